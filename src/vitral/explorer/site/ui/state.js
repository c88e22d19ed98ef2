// What the page shows, and its copy in the address: #view/place?key=value, so that any view can be linked to.

export const VIEWS = ["tour", "explore", "lab", "training"];
export const PANELS = ["attention", "lens", "similarity", "norms"];
export const ZOOMS = ["model", "block", "head", "dot"];

export const DEFAULTS = {
  view: "tour",
  step: "image", // tour: key of a step of the walk
  panel: "attention", // explore: one of PANELS
  zoom: "model", // explore, attention: one of ZOOMS
  lab: "experiments", // lab: "experiments" or "workbench"
  experiment: "", // key of the open experiment
  model: "", // name
  epoch: -1, // index of the weights; -1: the last
  image: "0", // index of an example, "d" and the strokes of a drawing, or "photo"
  block: 0,
  head: 0,
  mean: false, // attention pictures show the mean of all heads
  token: -1, // -1: the class token or, without one, the middle patch
  key: -1, // the token whose key is multiplied; -1: the one with the most attention
  layer: -1, // explore, similarity: tokens after this many blocks; -1: the last
  changes: {}, // interventions
  lang: "",
};

export const state = { ...DEFAULTS };

const PLACE = { tour: "step", explore: "panel", lab: "lab", training: null };
const NUMBERS = ["epoch", "block", "head", "token", "key", "layer"];
const TEXTS = ["zoom", "experiment", "model", "image", "lang"];

// Blocks, heads and layers are counted from 1 in the address, as on the page.
const FROM_ONE = new Set(["block", "head"]);

export function toHash(source = state) {
  const place = PLACE[source.view];
  const query = new URLSearchParams();
  for (const name of TEXTS) if (source[name] !== DEFAULTS[name]) query.set(name, source[name]);
  for (const name of NUMBERS) if (source[name] !== DEFAULTS[name]) query.set(name, source[name] + (FROM_ONE.has(name) ? 1 : 0));
  if (source.mean) query.set("mean", "1");
  if (Object.keys(source.changes).length) query.set("changes", JSON.stringify(source.changes));
  const text = query.toString();
  return `#${source.view}${place ? `/${source[place]}` : ""}${text ? `?${text}` : ""}`;
}

// The state an address describes; anything it does not understand keeps its default.
export function fromHash(hash) {
  const [path, text = ""] = hash.replace(/^#/, "").split("?");
  const [view, place] = path.split("/");
  const parsed = { ...DEFAULTS, changes: {} };
  if (VIEWS.includes(view)) parsed.view = view;
  if (place && PLACE[parsed.view]) parsed[PLACE[parsed.view]] = place;
  const query = new URLSearchParams(text);
  for (const name of TEXTS) if (query.has(name)) parsed[name] = query.get(name);
  for (const name of NUMBERS) {
    const value = parseInt(query.get(name), 10);
    if (Number.isInteger(value)) parsed[name] = value - (FROM_ONE.has(name) ? 1 : 0);
  }
  parsed.mean = query.get("mean") === "1";
  try {
    const changes = JSON.parse(query.get("changes") ?? "{}");
    if (changes && typeof changes === "object" && !Array.isArray(changes)) parsed.changes = changes;
  } catch {
    parsed.changes = {};
  }
  if (!PANELS.includes(parsed.panel)) parsed.panel = DEFAULTS.panel;
  if (!ZOOMS.includes(parsed.zoom)) parsed.zoom = DEFAULTS.zoom;
  if (!["experiments", "workbench"].includes(parsed.lab)) parsed.lab = DEFAULTS.lab;
  return parsed;
}

const listeners = [];
export const onStateChange = (listener) => listeners.push(listener);

// Changes the state, the address and the page. A change of place makes an entry in the browser's history.
export function setState(changes) {
  const isNewPlace = [
    "view",
    "step",
    "panel",
    "zoom",
    "lab",
    "experiment",
    "model",
  ].some((name) => name in changes && changes[name] !== state[name]);
  const before = { ...state };
  Object.assign(state, changes);
  const hash = toHash();
  if (hash !== location.hash) history[isNewPlace ? "pushState" : "replaceState"](null, "", hash);
  for (const listener of listeners) listener(before);
}

export function loadState() {
  const before = { ...state };
  Object.assign(state, fromHash(location.hash));
  return before;
}

// The strokes of a drawing as text: two characters per point, strokes separated by dots.
const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
const MAX_POINTS = 60; // per stroke

export function encodeStrokes(strokes, side) {
  const digit = (value) => DIGITS[Math.min(63, Math.max(0, Math.round((63 * value) / side)))];
  return strokes
    .map((stroke) => {
      const step = Math.max(1, Math.ceil(stroke.length / MAX_POINTS));
      const points = stroke.filter((_, index) => index % step === 0 || index === stroke.length - 1);
      return points.map(([x, y]) => digit(x) + digit(y)).join("");
    })
    .join(".");
}

export function decodeStrokes(text, side) {
  return text
    .split(".")
    .map((stroke) =>
      (stroke.match(/../g) ?? []).map((pair) =>
        [...pair].map((digit) => (DIGITS.indexOf(digit) * side) / 63),
      ).filter(([x, y]) => x >= 0 && y >= 0),
    )
    .filter((stroke) => stroke.length);
}
