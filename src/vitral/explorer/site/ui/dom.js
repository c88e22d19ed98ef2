// Small helpers to build elements.

export const byId = (id) => document.getElementById(id);

// element("p", { class: "small", onclick: f }, "text", child): attributes, properties (on..., value, ...) and children.
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (value === true) node.setAttribute(name, "");
    else node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// A set of buttons of which one is pressed. items: [{ value, label, focus? }]
export function choiceButtons(label, items, selected, onchange, key) {
  return element(
    "div",
    { class: "choices", role: "group", "aria-label": label },
    items.map(({ value, label: text, title }) =>
      element(
        "button",
        {
          type: "button",
          class: "choice",
          title,
          "aria-pressed": String(value === selected),
          "data-focus": `${key}:${value}`,
          onclick: () => onchange(value),
        },
        text,
      ),
    ),
  );
}

// A canvas context in CSS pixels on a canvas that is as sharp as the screen.
export function sharpContext(canvas, width, height) {
  const ratio = Math.min(globalThis.devicePixelRatio || 1, 3);
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

// x_{1} and R^{2} as <sub> and <sup>.
export function equation(text) {
  const node = element("div", { class: "equation", role: "math" });
  const pattern = /([_^])\{([^}]*)\}/g;
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    node.append(text.slice(end, match.index), element(match[1] === "_" ? "sub" : "sup", {}, match[2]));
    end = match.index + match[0].length;
  }
  node.append(text.slice(end));
  return node;
}

export function formatNumber(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3).replace("-", "−");
}

// Never rounds to 100% or 0% unless the value is exactly 1 or 0.
export function percent(fraction) {
  if (fraction >= 0.9995 && fraction < 1) return "> 99.9%";
  if (fraction > 0 && fraction < 0.0005) return "< 0.1%";
  return `${(100 * fraction).toFixed(1)}%`;
}

export function signedPercent(difference) {
  const text = (100 * Math.abs(difference)).toFixed(1);
  if (text === "0.0") return "±0.0";
  return `${difference > 0 ? "+" : "−"}${text}`;
}
