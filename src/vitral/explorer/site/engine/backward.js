/** Gradients of one class's logit, by the chain rule through vit.js in reverse order. Weights need no gradients.
 * `g` before a name means the gradient with respect to it. Shapes as in engine.js. */
import { ACTIVATION_DERIVATIVES, applyRope, layerNormBackward } from "./layers.js";
import { blockChanges, mergeTokens } from "./interventions.js";
import { transpose } from "./matmul.js";

/** For each block, the gradient of the logit of `target` with respect to its attention (h×T×T) and norm1 (T×D).
 * `trace` and `state` are what `model.run` returned. */
export function attentionGradients(model, trace, state, target) {
  const { depth } = model.config, gradients = [];
  let g = outputGradient(model, trace, target);
  for (let block = depth - 1; block >= 0; block--) {
    const changes = blockChanges(state.interventions, block);
    const merged = changes.pairs > 0 ? mergeTokens(trace.tokens[block], state.groups, model.prefix, model.D) : trace.tokens[block];
    const result = blockGradients(model, block, trace.blocks[block], merged, changes, trace.permutation, g);
    gradients.unshift(result);
    g = changes.pairs > 0 ? mergeTokens(result.gInput, state.groups, model.prefix, model.D) : result.gInput;
  }
  return gradients;
}

/** Gradient with respect to the output of the last block, T×D. */
function outputGradient(model, { tokens, pooled }, target) {
  const { D, T, N, prefix, config, tensors } = model;
  let gPooled = tensors["head.out.weight"].slice(target * D, (target + 1) * D);
  if (config.head === "mlp") {
    const hidden = model.linear(pooled, "head.hidden").map(Math.tanh);
    gPooled = model.linearBackward(gPooled.map((value, i) => value * (1 - hidden[i] ** 2)), "head.hidden");
  }
  const gFinal = new Float32Array(T * D);
  if (config.pooling === "class") gFinal.set(gPooled, 0);
  else for (let i = prefix * D; i < T * D; i++) gFinal[i] = gPooled[i % D] / N;
  return config.final_norm ? model.normBackward(tokens[config.depth], "encoder.norm", gFinal) : gFinal;
}

function blockGradients(model, index, saved, z, changes, permuted, gOutput) {
  const name = `encoder.blocks.${index}`;
  const gMiddle = changes.mlpResidualOff && !changes.mlpOff ? new Float32Array(z.length) : gOutput.slice();
  if (!changes.mlpOff) {
    const gHidden = model.linearBackward(model.scaled(gOutput.slice(), `${name}.residual2`), `${name}.mlp.contract`);
    const gExpanded = activationBackward(model, model.linear(saved.norm2, `${name}.mlp.expand`), gHidden);
    const gNorm2 = model.linearBackward(gExpanded, `${name}.mlp.expand`);
    addTo(gMiddle, model.normBackward(saved.middle, `${name}.norm2`, gNorm2));
  }
  const gInput = changes.attentionResidualOff && !changes.attentionOff ? new Float32Array(z.length) : gMiddle.slice();
  if (changes.attentionOff) return { gInput, gAttention: new Float32Array(saved.attention.length), gNorm1: new Float32Array(z.length) };
  const gJoined = model.linearBackward(model.scaled(gMiddle, `${name}.residual1`), `${name}.attention.project`);
  const { gNorm1, gAttention } = attentionBackward(model, `${name}.attention`, saved, changes, permuted, gJoined);
  addTo(gInput, model.normBackward(z, `${name}.norm1`, gNorm1));
  return { gInput, gAttention, gNorm1 };
}

/** From the joined heads (T×D) back to the attention matrices and to the input of the projections. */
function attentionBackward(model, name, saved, { headsOff, temperature, useRope }, permuted, gJoined) {
  const { T, D, h, d, kernel } = model, factor = 1 / (Math.sqrt(d) * temperature);
  const gAttention = new Float32Array(h * T * T), [gq, gk, gv] = [0, 1, 2].map(() => new Float32Array(T * D));
  for (let head = 0; head < h; head++) {
    if (headsOff.includes(head)) continue;
    const part = (tensor) => tensor.subarray(head * T * d, (head + 1) * T * d);
    const attention = saved.attention.subarray(head * T * T, (head + 1) * T * T);
    const gOut = new Float32Array(T * d);
    for (let t = 0; t < T; t++) gOut.set(gJoined.subarray(t * D + head * d, t * D + (head + 1) * d), t * d);
    const gA = kernel.matmul(gOut, transpose(part(saved.v), T, d), T, d, T);
    gAttention.set(gA, head * T * T);
    const gScores = softmaxBackward(attention, gA, T, factor);
    part(gv).set(kernel.matmul(transpose(attention, T, T), gOut, T, T, d));
    part(gq).set(kernel.matmul(gScores, part(saved.k).slice(), T, T, d));
    part(gk).set(kernel.matmul(transpose(gScores, T, T), part(saved.q).slice(), T, T, d));
  }
  const rope = model.tensors["rope"];
  if (rope !== undefined && useRope) for (const g of [gq, gk]) applyRope(g, rope, model.ropeRows(permuted), T, d, -1);
  const projected = model.linear(saved.norm1, `${name}.qkv`);
  const gProjected = new Float32Array(T * 3 * D);
  [gq, gk, gv].forEach((g, part) => {
    const normName = ["norm_q", "norm_k"][part];
    const back = model.config.qk_norm && part < 2 ? model.normBackward(model.splitHeads(projected, part), `${name}.${normName}`, g, d) : g;
    for (let head = 0; head < h; head++) for (let t = 0; t < T; t++) {
      const start = (head * T + t) * d;
      gProjected.set(back.subarray(start, start + d), t * 3 * D + part * D + head * d);
    }
  });
  return { gAttention, gNorm1: model.linearBackward(gProjected, `${name}.qkv`) };
}

/** Gradient with respect to the scores before the factor 1/√d and the softmax of each row. */
function softmaxBackward(attention, gAttention, width, factor) {
  const out = new Float32Array(attention.length);
  for (let start = 0; start < out.length; start += width) {
    let mean = 0;
    for (let i = start; i < start + width; i++) mean += attention[i] * gAttention[i];
    for (let i = start; i < start + width; i++) out[i] = factor * attention[i] * (gAttention[i] - mean);
  }
  return out;
}

function activationBackward(model, expanded, gHidden) {
  const { activation } = model.config;
  if (activation !== "swiglu") {
    const derivative = ACTIVATION_DERIVATIVES[activation];
    return gHidden.map((value, i) => value * derivative(expanded[i]));
  }
  const hidden = gHidden.length / model.T, out = new Float32Array(expanded.length);
  for (let i = 0; i < gHidden.length; i++) {
    const gate = Math.floor(i / hidden) * 2 * hidden + (i % hidden), sigmoid = 1 / (1 + Math.exp(-expanded[gate]));
    out[gate] = gHidden[i] * expanded[gate + hidden] * sigmoid * (1 + expanded[gate] * (1 - sigmoid));
    out[gate + hidden] = gHidden[i] * expanded[gate] * sigmoid;
  }
  return out;
}

function addTo(target, values) {
  for (let i = 0; i < target.length; i++) target[i] += values[i];
}
