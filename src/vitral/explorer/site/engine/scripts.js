/** Data that arrive in classic scripts, which work on file:// where fetch() does not. */

const waiting = new Map(); // url -> function that receives the text

/** Run the script at `url`, which calls VITRAL_RECEIVE(url, text), and return the text. */
export function loadScript(url) {
  globalThis.VITRAL_RECEIVE ??= (name, text) => waiting.get(name)?.(text);
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    waiting.set(url, resolve);
    script.src = url;
    script.onload = () => script.remove();
    script.onerror = () => reject(new Error(`cannot load ${url}`));
    document.head.append(script);
  });
}
