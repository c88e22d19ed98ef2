// The model, the image and the traces that all views show.
import { t } from "./i18n.js";
import { state } from "./state.js";

export const app = {
  site: null, // VITRAL_SITE
  entry: null, // the model's entry in it
  model: null, // the running model
  picture: null, // canvas: the image as the model receives it, before changes
  changedPicture: null, // the same after masking and swapping patches
  input: null, // normalised values of `picture`
  imageName: "",
  label: null, // true class of an example
  base: null, // trace of the untouched model
  trace: null, // trace with the changes; the same object as `base` without changes
  weightsIndex: 0,
};

export const isChanged = () => app.trace !== app.base;

export const numTokens = () => app.entry.prefix + numPatches();
export const numPatches = () => app.entry.grid[0] * app.entry.grid[1];
export const hasClassToken = () => app.entry.prefix - (app.entry.config.registers ?? 0) > 0;

export const className = (index) => app.entry.classes[index];

export function patchName(patch) {
  const columns = app.entry.grid[1];
  return t("patch", { row: Math.floor(patch / columns) + 1, column: (patch % columns) + 1 });
}

export function tokenName(token) {
  if (token >= app.entry.prefix) return patchName(token - app.entry.prefix);
  if (token === 0 && hasClassToken()) return t("class-token");
  return t("register", { n: token + 1 - (hasClassToken() ? 1 : 0) });
}

// A token as part of a sentence.
export function tokenPhrase(token) {
  if (token >= app.entry.prefix) return t("the-patch", { patch: tokenName(token) });
  return token === 0 && hasClassToken() ? t("the-class-token") : tokenName(token);
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// The selected token: the class token or, without one, the middle patch, until the visitor selects another.
export function currentToken() {
  if (state.token >= 0 && state.token < numTokens()) return state.token;
  if (hasClassToken()) return 0;
  const [rows, columns] = app.entry.grid;
  return app.entry.prefix + Math.floor(rows / 2) * columns + Math.floor(columns / 2);
}

// The selected patch; while no patch is selected, the one with the most contrast.
export function currentPatch() {
  const token = currentToken();
  if (token >= app.entry.prefix && (state.token >= 0 || !hasClassToken())) return token - app.entry.prefix;
  const N = numPatches();
  const size = app.trace.patches.length / N;
  const contrast = Float32Array.from({ length: N }, (_, patch) => {
    const [low, high] = rowOf(app.trace.patches, patch, size).reduce(([a, b], value) => [a + value, b + value * value], [0, 0]);
    return high - (low * low) / size;
  });
  return argmax(contrast);
}

export const currentBlock = () => Math.min(Math.max(state.block, 0), app.entry.config.depth - 1);
export const currentHead = () => Math.min(Math.max(state.head, 0), app.entry.config.heads - 1);

// The token whose key the query meets: the selected one, or the one with the most attention.
export function currentKey() {
  if (state.key >= 0 && state.key < numTokens()) return state.key;
  return argmax(attentionOf(app.trace, currentBlock(), currentHead(), currentToken()));
}

// Attention of one token to all tokens, T numbers. head: null for the mean of all heads.
export function attentionOf(trace, block, head, token) {
  const T = numTokens();
  const { attention } = trace.blocks[block];
  const { heads } = app.entry.config;
  const row = (h) => attention.subarray((h * T + token) * T, (h * T + token + 1) * T);
  if (head !== null) return row(head);
  const mean = new Float32Array(T);
  for (let h = 0; h < heads; h++) row(h).forEach((weight, index) => (mean[index] += weight / heads));
  return mean;
}

export const patchesOf = (perToken) => perToken.subarray(app.entry.prefix);

// Row `index` of a matrix with `columns` columns.
export const rowOf = (values, index, columns) => values.subarray(index * columns, (index + 1) * columns);

// The part of one head, T×d, of h×T×d or h×T×T.
export const headPart = (values, head, size) => values.subarray(head * size, (head + 1) * size);

export function norm(vector) {
  let sum = 0;
  for (const value of vector) sum += value * value;
  return Math.sqrt(sum);
}

export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

export const cosine = (a, b) => dot(a, b) / Math.max(norm(a) * norm(b), 1e-12);

export function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

// Indices of the `count` largest values, largest first.
export const largest = (values, count) => [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, count);

// Mean over the patches of T×D tokens, or one token: what the head reads.
export function readoutOf(tokens) {
  const D = app.entry.config.width;
  if (app.entry.config.pooling === "class") return rowOf(tokens, 0, D);
  const mean = new Float32Array(D);
  const N = numPatches();
  for (let patch = 0; patch < N; patch++) rowOf(tokens, app.entry.prefix + patch, D).forEach((value, i) => (mean[i] += value / N));
  return mean;
}

// The title, text or equation of a step of the walk, with the numbers of the model filled in.
export function walkText(language, section, key, extra = {}) {
  const table = app.site.walk[language][section] ?? {};
  const text = table[key];
  return text === undefined ? "" : formatWalk(text, extra);
}

export function formatWalk(text, extra = {}) {
  const numbers = { ...app.entry.numbers, l: currentBlock() + 1, before: currentBlock(), head: currentHead() + 1, ...extra };
  // Python's str.format: {{ and }} are literal braces.
  return text.replace(/\{\{|\}\}|\{(\w+)\}/g, (match, name) => (match === "{{" ? "{" : match === "}}" ? "}" : (numbers[name] ?? match)));
}
