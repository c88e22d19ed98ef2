/** Data that arrive in classic scripts, which work on file:// where fetch() does not. */

/** Run the script at `url`, which calls VITRAL_RECEIVE(url, text), and return the text. */
export function loadScript(url) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    globalThis.VITRAL_RECEIVE = (name, text) => {
      if (name === url) resolve(text);
    };
    script.src = url;
    script.onload = () => script.remove();
    script.onerror = () => reject(new Error(`cannot load ${url}`));
    document.head.append(script);
  });
}
