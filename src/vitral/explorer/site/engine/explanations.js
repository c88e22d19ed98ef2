/** Explanations of a prediction, one value per patch: vitral.explain in JavaScript. */

import { attentionGradients } from "./backward.js";

/** Methods by name: (model, request, report) -> Float32Array N. request: see Model.explain in engine.js. */
export const EXPLANATIONS = { attention: lastAttention, rollout, relevance, gradcam, occlusion };

export function explain(model, request, report) {
  if (!(request.method in EXPLANATIONS)) throw new Error(`no explanation named ${request.method}`);
  const target = request.target ?? request.logits.indexOf(Math.max(...request.logits));
  return EXPLANATIONS[request.method](model, { ...request, target }, report);
}

/** Weight of each token in the pooled feature, T: one for the class token, or uniform over the patches. */
function readoutWeights({ T, N, prefix, config }) {
  return Float64Array.from({ length: T }, (_, t) => (config.pooling === "class" ? Number(t === 0) : t < prefix ? 0 : 1 / N));
}

/** row·A for the mean of the heads: T. */
function attendRow(row, attention, { T, h }) {
  const out = new Float64Array(T);
  for (let head = 0; head < h; head++) for (let i = 0; i < T; i++) {
    if (row[i] === 0) continue;
    const start = (head * T + i) * T;
    for (let j = 0; j < T; j++) out[j] += (row[i] * attention[start + j]) / h;
  }
  return out;
}

/** Attention of the pooled token in the last block, averaged over heads. */
function lastAttention(model, { attention }) {
  return Float32Array.from(attendRow(readoutWeights(model), attention.at(-1), model).subarray(model.prefix));
}

/** Attention rollout (arXiv 2005.00928): the product of all layers' attention, with residuals as identity. */
function rollout(model, { attention }) {
  let row = readoutWeights(model);
  for (const layer of attention.toReversed()) {
    const attended = attendRow(row, layer, model);
    row = row.map((value, t) => (value + attended[t]) / 2);
  }
  return Float32Array.from(row.subarray(model.prefix));
}

/** Run the model again, because the worker does not keep the tensors of traces, and compute gradients. */
function withGradients(model, { input, interventions, target }) {
  const { trace, state } = model.run(input, { ...interventions, maskPatches: [], swapPatches: [] }); // `input` has these
  return { trace, gradients: attentionGradients(model, trace, state, target) };
}

/** Class relevance (arXiv 2103.15679): attention of all layers, weighted by its effect on the class's logit. */
function relevance(model, request) {
  const { T, h } = model, { trace, gradients } = withGradients(model, request);
  const readout = readoutWeights(model);
  let row = readout.slice();
  for (let block = gradients.length - 1; block >= 0; block--) {
    const { attention } = trace.blocks[block], { gAttention } = gradients[block];
    const positive = attention.map((value, i) => Math.max(value * gAttention[i], 0));
    const attended = attendRow(row, positive, { T, h });
    row = row.map((value, t) => value + attended[t]);
  }
  return Float32Array.from(row.map((value, t) => value - readout[t]).subarray(model.prefix));
}

/** Grad-CAM (arXiv 1610.02391) on the input of the last attention: channels weighted by their mean gradient. */
function gradcam(model, request) {
  const { D, N, prefix } = model, { trace, gradients } = withGradients(model, request);
  const { norm1 } = trace.blocks.at(-1), { gNorm1 } = gradients.at(-1);
  const weights = new Float64Array(D);
  for (let i = prefix * D; i < gNorm1.length; i++) weights[i % D] += gNorm1[i] / N;
  return Float32Array.from({ length: N }, (_, patch) => {
    let sum = 0;
    for (let c = 0; c < D; c++) sum += weights[c] * norm1[(prefix + patch) * D + c];
    return Math.max(sum, 0);
  });
}

/** Drop of the class's log-odds when windows of patches are covered with the mean colour, averaged where they overlap.
 * It takes a forward pass per window, so it lets other requests to the worker go first. */
async function occlusion(model, { input, interventions, target }, report) {
  const [rows, columns] = model.entry.grid, side = Math.max(Math.round(Math.min(rows, columns) / 7), 1);
  const heat = new Float32Array(model.N), counts = new Float32Array(model.N);
  const untouched = { ...interventions, maskPatches: [], swapPatches: [] }; // `input` already contains these
  const oddsOf = (maskPatches) => logOdds(model.run(input, { ...untouched, maskPatches }).trace.logits, target);
  const baseline = oddsOf([]), windows = (rows - side + 1) * (columns - side + 1);
  for (let index = 0; index < windows; index++) {
    const top = Math.floor(index / (columns - side + 1)), left = index % (columns - side + 1);
    const covered = Array.from({ length: side * side }, (_, i) => (top + Math.floor(i / side)) * columns + left + (i % side));
    const drop = baseline - oddsOf(covered);
    for (const patch of covered) heat[patch] += drop, counts[patch]++;
    report((index + 1) / windows);
    await otherMessages();
  }
  return heat.map((sum, patch) => sum / counts[patch]);
}

/** Resolves after the messages that have already arrived. */
function otherMessages() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

/** log(p / (1 - p)) of the class. */
function logOdds(logits, target) {
  let others = 0;
  const max = logits.reduce((a, b, i) => (i === target ? a : Math.max(a, b)), -Infinity);
  logits.forEach((value, i) => { if (i !== target) others += Math.exp(value - max); });
  return logits[target] - max - Math.log(others);
}
