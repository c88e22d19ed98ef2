// The figures of each step of the tour, drawn from the trace of the visitor's image.
import { attentionWeight, embeddingNumber, residualSum } from "./arithmetic.js";
import { bars } from "./charts.js";
import {
  app, attentionOf, className, cosine, currentBlock, currentHead, currentPatch, currentToken, hasClassToken, headPart, largest, norm, numPatches,
  numTokens, patchesOf, patchName, rowOf, tokenName, walkText, tokenPhrase } from "./context.js";
import { element, formatNumber, percent } from "./dom.js";
import { matrixFigure, pictureFigure } from "./figure.js";
import { currentLanguage, t } from "./i18n.js";
import { captioned, currentPicture, gridPicture, litPicture, patchMap } from "./pictures.js";
import { setState } from "./state.js";

const MAX_FILTERS = 24;
const caption = (key, extra) => walkText(currentLanguage(), "captions", key, extra);

const tokenMatrix = (values, key, columns, extra = {}) =>
  matrixFigure({
    values, columns, rows: values.length / columns, caption: caption(key), key,
    rowName: values.length / columns === numTokens() ? tokenName : patchName,
    marked: { row: values.length / columns === numTokens() ? currentToken() : currentPatch() },
    onpick: (row) => setState({ token: row + (values.length / columns === numTokens() ? 0 : app.entry.prefix) }),
    ...extra,
  });

function imageFigures() {
  const { H, W, C } = app.entry.numbers;
  const picture = currentPicture();
  const image = pictureFigure({
    width: picture.width, height: picture.height, caption: caption("image"), size: 260, pixelated: picture.width < 128,
    draw: (context) => context.drawImage(picture, 0, 0),
  });
  const names = C === 1 ? ["gray"] : ["red", "green", "blue"];
  const channels = names.map((name, channel) =>
    matrixFigure({
      values: app.trace.input.subarray(channel * H * W, (channel + 1) * H * W), rows: H, columns: W, caption: caption(name), key: name,
      rowName: (row) => t("row-n", { n: row + 1 }), columnName: (column) => t("column-n", { n: column + 1 }), size: C === 1 ? 260 : 200,
    }));
  return [image, ...channels];
}

function patchFigures() {
  const [rows, columns] = app.entry.grid;
  const picture = gridPicture();
  const P = app.entry.numbers.P;
  const scale = Math.max(1, Math.round(320 / picture.width));
  const gap = Math.max(2, Math.round((P * scale) / 8));
  const tile = P * scale;
  return [pictureFigure({
    width: columns * (tile + gap) - gap, height: rows * (tile + gap) - gap, caption: caption("patches"), size: 340, pixelated: picture.width < 128,
    draw: (context) => {
      context.imageSmoothingEnabled = picture.width >= 128;
      for (let y = 0; y < rows; y++)
        for (let x = 0; x < columns; x++)
          context.drawImage(picture, x * P, y * P, P, P, x * (tile + gap), y * (tile + gap), tile, tile);
    },
  }), patchPicture()];
}

// The selected patch, enlarged.
function patchPicture() {
  const patch = currentPatch();
  const columns = app.entry.grid[1];
  const [P, picture] = [app.entry.numbers.P, gridPicture()];
  const [x, y] = [(patch % columns) * P, Math.floor(patch / columns) * P];
  return pictureFigure({
    width: P, height: P, size: 150, caption: t(
      "one-patch",
      { patch: patchName(patch), count: app.entry.numbers.E ?? P * P * app.entry.numbers.C },
    ),
    draw: (context) => context.drawImage(picture, x, y, P, P, 0, 0, P, P),
  });
}

const flattenFigures = () => {
  const E = app.trace.patches.length / numPatches();
  return [patchPicture(), tokenMatrix(app.trace.patches, "flat", E, { size: 420 })];
};

function embeddingFigures() {
  const filters = app.model.filters();
  const count = Math.min(filters.count, MAX_FILTERS);
  const { side, channels } = filters;
  const [columns, gap, scale] = [8, 1, 6];
  const rows = Math.ceil(count / columns);
  const cell = side * scale + gap * scale;
  const figure = pictureFigure({
    width: columns * cell, height: rows * cell, caption: caption("filters", { count, all: filters.count }), size: 340,
    draw: (context) => {
      for (let index = 0; index < count; index++) {
        const tile = filterImage(
          filters.data.subarray(index * channels * side * side, (index + 1) * channels * side * side),
          channels,
          side,
        );
        context.imageSmoothingEnabled = false;
        context.drawImage(tile, (index % columns) * cell, Math.floor(index / columns) * cell, side * scale, side * scale);
      }
    },
  });
  return [figure, tokenMatrix(app.trace.embedded, "embedded", app.entry.config.width, { size: 420 }), embeddingNumber()];
}

// A filter scaled to the full range of colours, with 0 in the middle.
function filterImage(weights, channels, side) {
  const limit = weights.reduce((max, value) => Math.max(max, Math.abs(value)), 1e-12);
  const canvas = element("canvas", { width: side, height: side });
  const image = new ImageData(side, side);
  for (let i = 0; i < side * side; i++) {
    for (let channel = 0; channel < 3; channel++) {
      const value = weights[(channels === 3 ? channel : 0) * side * side + i];
      image.data[4 * i + channel] = 127.5 + (127.5 * value) / limit;
    }
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function classTokenFigures() {
  const D = app.entry.config.width;
  const values = rowOf(app.trace.tokens[0], 0, D).slice();
  if (app.model.positionTable && !isPrefixWithoutPosition()) rowOf(app.model.positionTable, 0, D).forEach((value, i) =>
    (values[i] -= value),
  );
  return [matrixFigure({ values, rows: 1, columns: D, caption: caption("class_token"), key: "class_token", size: 560 })];
}

const isPrefixWithoutPosition = () => norm(rowOf(app.model.positionTable, 0, app.entry.config.width)) === 0;

// Similarity of the position of the selected patch to all others.
export function positionSimilarity(table, size = 220) {
  const [D, prefix] = [app.entry.config.width, app.entry.prefix];
  const patch = currentPatch();
  const own = rowOf(table, prefix + patch, D);
  const values = Float32Array.from({ length: numPatches() }, (_, other) => cosine(own, rowOf(table, prefix + other, D)));
  const [row, column] = [Math.floor(patch / app.entry.grid[1]) + 1, (patch % app.entry.grid[1]) + 1];
  const label = caption("position_similarity", { row, column });
  return captioned(
    patchMap(values, size, { marked: patch, label, scale: "range" }),
    label,
    element("br"),
    element("span", { class: "small" }, t("select-patch")),
  );
}

const positionFigures = () => [
  tokenMatrix(app.model.positionTable, "position_table", app.entry.config.width, { size: 420 }),
  positionSimilarity(app.model.positionTable),
];

function rotaryFigures() {
  const T = numTokens();
  const half = app.model.ropeTable.length / 2 / T;
  const [cosines, sines] = [app.model.ropeTable.subarray(0, T * half), app.model.ropeTable.subarray(T * half)];
  const patch = currentPatch();
  const own = app.entry.prefix + patch;
  const similarity = Float32Array.from({ length: numPatches() }, (_, other) => {
    const row = app.entry.prefix + other;
    return (dot2(cosines, own, row, half) + dot2(sines, own, row, half)) / half;
  });
  const [row, column] = [Math.floor(patch / app.entry.grid[1]) + 1, (patch % app.entry.grid[1]) + 1];
  const label = caption("position_similarity", { row, column });
  return [
    tokenMatrix(sines, "angles", half, { size: 300 }),
    captioned(
      patchMap(similarity, 220, { marked: patch, label }),
      label,
      element("br"),
      element("span", { class: "small" }, t("select-patch")),
    ),
  ];
}

function dot2(table, a, b, columns) {
  let sum = 0;
  for (let i = 0; i < columns; i++) sum += table[a * columns + i] * table[b * columns + i];
  return sum;
}

const embedFigures = () => [tokenMatrix(app.trace.tokens[0], "tokens", app.entry.config.width, { size: 560 })];

export function qkvFigures({ withNorm = true } = {}) {
  const block = app.trace.blocks[currentBlock()];
  const [T, head] = [numTokens(), currentHead()];
  const d = app.entry.config.width / app.entry.config.heads;
  return [
    withNorm && tokenMatrix(block.norm1, "norm", app.entry.config.width, { size: 260 }),
    ...["q", "k", "v"].map((name) => tokenMatrix(headPart(block[name], head, T * d), name, d, { size: 170 })),
  ].filter(Boolean);
}

export function attentionMatrix({ size = 360, onpick } = {}) {
  const T = numTokens();
  const values = headPart(app.trace.blocks[currentBlock()].attention, currentHead(), T * T);
  return matrixFigure({
    values, rows: T, columns: T, scale: "weights", caption: caption("attention"), key: "attention", size,
    rowName: (token) => t("from-token", { token: tokenName(token) }), columnName: (token) => t("to-token", { token: tokenName(token) }),
    marked: { row: currentToken() }, onpick: onpick ?? ((token, key) => setState({ token, key })),
  });
}

export function lookingFigure(size = 220) {
  const weights = attentionOf(app.trace, currentBlock(), currentHead(), currentToken());
  const label = t(
    "looks",
    { token: tokenPhrase(currentToken()), block: currentBlock() + 1, head: t("head-small", { n: currentHead() + 1 }) },
  );
  return captioned(litPicture(patchesOf(weights), size, { label }), label);
}

function attentionFigures() {
  const [T, d] = [numTokens(), app.entry.config.width / app.entry.config.heads];
  const output = headPart(app.trace.blocks[currentBlock()].headOutput, currentHead(), T * d);
  return [attentionMatrix(), lookingFigure(), tokenMatrix(output, "head_output", d, { size: 220 }), attentionWeight()];
}

function residualFigures() {
  const [block, D] = [app.trace.blocks[currentBlock()], app.entry.config.width];
  const z = app.trace.tokens[currentBlock()];
  const change = Float32Array.from({ length: numPatches() }, (_, patch) => {
    const token = app.entry.prefix + patch;
    return norm(rowOf(block.attentionAdded, token, D)) / Math.max(norm(rowOf(z, token, D)), 1e-12);
  });
  return [
    tokenMatrix(z, "z", D, { size: 215 }), tokenMatrix(
      block.attentionAdded,
      "added",
      D,
      { size: 215 },
    ), tokenMatrix(block.middle, "sum", D, { size: 215 }),
    captioned(patchMap(change, 130, { label: caption("change") }), caption("change")),
    residualSum("attention"),
  ];
}

function mlpFigures() {
  const block = app.trace.blocks[currentBlock()];
  return [
    tokenMatrix(block.hidden, "hidden", app.entry.numbers.M, { size: 420 }),
    tokenMatrix(app.trace.tokens[currentBlock() + 1], "block_output", app.entry.config.width, { size: 420 }),
    residualSum("mlp"),
  ];
}

// Where the class token (or, without one, all patches) looks in each block.
function encoderFigures() {
  const { depth } = app.entry.config;
  return Array.from({ length: depth }, (_, block) => {
    const weights = patchesOf(summaryAttention(app.trace, block));
    return captioned(
      litPicture(weights, depth > 6 ? 130 : 170, { label: caption("block", { block: block + 1 }) }),
      caption("block", { block: block + 1 }),
    );
  });
}

// Attention that matters for the readout, T numbers: of the class token, or the mean of the patches' rows.
export function summaryAttention(trace, block) {
  if (app.entry.config.pooling === "class") return attentionOf(trace, block, null, 0);
  const mean = new Float32Array(numTokens());
  const N = numPatches();
  for (let patch = 0; patch < N; patch++) attentionOf(
    trace,
    block,
    null,
    app.entry.prefix + patch,
  ).forEach((weight, i) => (mean[i] += weight / N));
  return mean;
}

const poolingFigures = () => [
  matrixFigure(
    { values: app.trace.pooled, rows: 1, columns: app.trace.pooled.length, caption: caption("pooled"), key: "pooled", size: 560 },
  ),
  tokenMatrix(
    app.trace.final,
    "tokens_final",
    app.entry.config.width,
    { caption: t("final-caption"), size: 420, marked: { row: hasClassToken() && app.entry.config.pooling === "class" ? 0 : -1 } },
  ),
];

function logitFigures() {
  const { logits, probabilities } = app.trace;
  const rows = largest(probabilities, Math.min(10, probabilities.length)).map((index, place) => ({
    name: className(index), value: percent(probabilities[index]), share: probabilities[index], note: `${t("logit")} ${formatNumber(logits[index])}`, strong: place === 0,
  }));
  return [
    matrixFigure(
      { values: logits, rows: 1, columns: logits.length, caption: caption("logits"), columnName: className, key: "logits", size: 560 },
    ),
    element("div", { class: "wide" }, bars(t("probabilities"), rows)),
  ];
}

export const TOUR_FIGURES = {
  image: imageFigures,
  patches: patchFigures,
  squares: patchFigures,
  flatten: flattenFigures,
  embedding: embeddingFigures,
  hybrid: embeddingFigures,
  class_token: classTokenFigures,
  learned: positionFigures,
  sincos: positionFigures,
  embed: embedFigures,
  rotary: rotaryFigures,
  queries: qkvFigures,
  attention: attentionFigures,
  residual: residualFigures,
  mlp: mlpFigures,
  encoder: encoderFigures,
  encoder_patches: encoderFigures,
  logits: logitFigures,
};

export const figuresOf = (key) => (TOUR_FIGURES[key] ?? poolingFigures)().filter(Boolean);
