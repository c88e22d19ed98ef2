/** The Vision Transformer, from normalised pixels to logits, in data-flow order: vit.py in JavaScript, with every
 * intermediate tensor kept and every intervention applied. Shapes as in engine.js. */
import { activate, addBias, applyRope, layerNorm, layerNormBackward, logSumExp, softmaxRows } from "./layers.js";
import { blockChanges, complete, firstChange, mergeGroups, mergeTokens, permutation } from "./interventions.js";
import { buildStem, runStem } from "./stem.js";
import { transpose } from "./matmul.js";

export class VisionTransformer {
  /** entry: see engine.js; tensors: {name in vit.py: Float32Array}; kernel: matmul.js */
  constructor(entry, tensors, kernel) {
    const { config, grid, prefix } = entry;
    Object.assign(this, { entry, config, tensors, kernel, prefix });
    this.N = grid[0] * grid[1];
    this.T = prefix + this.N;
    this.D = config.width;
    this.h = config.heads;
    this.d = this.D / this.h;
    this.margin = Math.floor((config.image_size[0] - grid[0] * config.patch_size) / 2);
    this.stem = config.conv ? buildStem(config, tensors, kernel) : null;
    this.matrices = new Map();
  }

  // ── layers with weights ────────────────────────────────────────────────────────────────────────────────

  /** x·Wᵀ + b for a layer of nn.Linear. */
  linear(x, name) {
    const weight = this.tensors[`${name}.weight`], bias = this.tensors[`${name}.bias`];
    if (!this.matrices.has(name)) {
      const inputs = this.inputs(name), outputs = weight.length / inputs;
      this.matrices.set(name, { inputs, outputs, matrix: this.kernel.load(transpose(weight, outputs, inputs), inputs, outputs) });
    }
    const { inputs, outputs, matrix } = this.matrices.get(name);
    const out = this.kernel.matmul(x, matrix, x.length / inputs, inputs, outputs);
    return bias === undefined ? out : addBias(out, bias);
  }

  inputs(name) {
    return this.entry.shapes[`${name}.weight`][1];
  }

  /** Gradient with respect to the input of a linear layer, g·W. */
  linearBackward(g, name) {
    const weight = this.tensors[`${name}.weight`], inputs = this.inputs(name), outputs = weight.length / inputs;
    return this.kernel.matmul(g, weight, g.length / outputs, outputs, inputs);
  }

  norm(x, name, width = this.D) {
    return layerNorm(x, width, this.tensors[`${name}.weight`], this.tensors[`${name}.bias`], this.config.norm_eps);
  }

  normBackward(x, name, g, width = this.D) {
    return layerNormBackward(x, width, this.tensors[`${name}.weight`], g, this.config.norm_eps);
  }

  // ── embedding (equation 1) ─────────────────────────────────────────────────────────────────────────────

  /** The input with masked and swapped patches. */
  changePixels(input, { maskPatches, swapPatches }) {
    const out = input.slice();
    for (const [i, j] of swapPatches) this.forEachPixel(i, (a, index) => {
      const b = this.pixelIndex(j, index);
      [out[a], out[b]] = [out[b], out[a]];
    });
    for (const i of maskPatches) this.forEachPixel(i, (a) => (out[a] = 0));
    return out;
  }

  /** Index in C×H×W of pixel (channel, row, column) number `index` of a patch. */
  pixelIndex(patch, index) {
    const { patch_size: P, image_size } = this.config, [H, W] = image_size, columns = this.entry.grid[1];
    const channel = Math.floor(index / (P * P)), y = Math.floor(index / P) % P, x = index % P;
    const top = this.margin + Math.floor(patch / columns) * P, left = this.margin + (patch % columns) * P;
    return (channel * H + top + y) * W + left + x;
  }

  forEachPixel(patch, visit) {
    const size = this.config.channels * this.config.patch_size ** 2;
    for (let index = 0; index < size; index++) visit(this.pixelIndex(patch, index), index);
  }

  /** N×CPP: the pixels of each patch. */
  patchify(input) {
    const size = this.config.channels * this.config.patch_size ** 2, out = new Float32Array(this.N * size);
    for (let patch = 0; patch < this.N; patch++) {
      this.forEachPixel(patch, (pixel, index) => (out[patch * size + index] = input[pixel]));
    }
    return out;
  }

  /** Patches of the stem's feature map, N×E: only 1×1 patches are supported, so that a row is one position. */
  featurePatches({ data, channels, height, width }) {
    return transpose(data, channels, height * width);
  }

  /** Encoder input z0, T×D, and what it is made of. */
  embed(input, interventions) {
    const patches = this.patchify(input);
    const features = this.stem === null ? null : runStem(this.stem, input, this.config, this.kernel);
    const embedded = this.linear(features === null ? patches : this.featurePatches(features), "patch_embedding.project");
    const order = interventions.shufflePositions;
    const permuted = order === null ? permutationOf(this.N) : Array.isArray(order) ? order : permutation(order, this.N);
    const { tokens, table } = { tokens: new Float32Array(this.T * this.D), table: this.positionTable() };
    tokens.set(embedded, this.prefix * this.D);
    this.setPrefixTokens(tokens, embedded, interventions.classToken);
    const { removePositions } = interventions;
    if (table !== null && removePositions !== true && removePositions !== "learned") {
      for (let t = 0; t < this.T; t++) {
        const row = t < this.prefix ? t : this.prefix + permuted[t - this.prefix];
        for (let c = 0; c < this.D; c++) tokens[t * this.D + c] += table[row * this.D + c];
      }
    }
    const z0 = this.config.pre_norm ? this.norm(tokens, "pre_norm") : tokens;
    return { input, patches, features: features === null ? null : features.data, embedded, z0, permutation: permuted };
  }

  /** Class token and registers in the first rows. */
  setPrefixTokens(tokens, embedded, classToken) {
    const { D, N } = this, learned = this.tensors["class_token.token"];
    if (learned !== undefined) {
      if (classToken === "learned") tokens.set(learned, 0);
      else if (classToken === "mean") for (let i = 0; i < N * D; i++) tokens[i % D] += embedded[i] / N;
    }
    const registers = this.tensors["registers"];
    if (registers !== undefined) tokens.set(registers, learned === undefined ? 0 : D);
  }

  /** Positions of all tokens, T×D: zero for registers without positions; null if none are added. */
  positionTable() {
    const table = this.tensors["position_embedding.table"];
    if (table === undefined) return null;
    const out = new Float32Array(this.T * this.D), prefixRows = table.length / this.D - this.N;
    out.set(table.subarray(0, prefixRows * this.D), 0);
    out.set(table.subarray(prefixRows * this.D), this.prefix * this.D);
    return out;
  }

  // ── encoder blocks (equations 2 and 3) ─────────────────────────────────────────────────────────────────

  /** z + f, or f without the residual. */
  residual(z, f, isOff, withoutResidual) {
    const added = isOff ? new Float32Array(z.length) : f();
    const out = withoutResidual && !isOff ? added.slice() : z.map((value, i) => value + added[i]);
    return { added, out };
  }

  scaled(x, name) {
    const scale = this.tensors[`${name}.scale`];
    if (scale !== undefined) for (let i = 0; i < x.length; i++) x[i] *= scale[i % this.D];
    return x;
  }

  block(z, index, changes, permuted) {
    const name = `encoder.blocks.${index}`;
    const norm1 = this.norm(z, `${name}.norm1`);
    const attention = this.attention(norm1, `${name}.attention`, changes, permuted);
    const project = () => this.scaled(this.linear(joinHeads(attention.headOutput, this), `${name}.attention.project`), `${name}.residual1`);
    const first = this.residual(z, project, changes.attentionOff, changes.attentionResidualOff);
    const norm2 = this.norm(first.out, `${name}.norm2`);
    const expanded = this.linear(norm2, `${name}.mlp.expand`);
    const hidden = activate(expanded, this.config.activation, expanded.length / this.T / 2);
    const contract = () => this.scaled(this.linear(hidden, `${name}.mlp.contract`), `${name}.residual2`);
    const second = this.residual(first.out, contract, changes.mlpOff, changes.mlpResidualOff);
    const tensors = { norm1, ...attention, attentionAdded: first.added, middle: first.out, norm2, hidden, mlpAdded: second.added };
    return { tensors, out: second.out };
  }

  /** Queries, keys, values and softmax(q·kᵀ/√d)·v of every head (equations 5 to 8). */
  attention(x, name, { headsOff, temperature, useRope }, permuted) {
    const { T, h, d, config } = this;
    const qkv = this.linear(x, `${name}.qkv`);
    let [q, k, v] = [0, 1, 2].map((part) => this.splitHeads(qkv, part));
    if (config.qk_norm) {
      q = this.norm(q, `${name}.norm_q`, d);
      k = this.norm(k, `${name}.norm_k`, d);
    }
    const rope = this.tensors["rope"];
    if (rope !== undefined && useRope) {
      applyRope(q, rope, this.ropeRows(permuted), T, d);
      applyRope(k, rope, this.ropeRows(permuted), T, d);
    }
    const attention = new Float32Array(h * T * T), headOutput = new Float32Array(h * T * d);
    for (let head = 0; head < h; head++) {
      const part = (tensor) => tensor.subarray(head * T * d, (head + 1) * T * d);
      const scores = this.kernel.matmul(part(q), transpose(part(k), T, d), T, d, T);
      softmaxRows(scores, T, 1 / (Math.sqrt(d) * temperature));
      attention.set(scores, head * T * T);
      if (!headsOff.includes(head)) headOutput.set(this.kernel.matmul(scores, part(v), T, T, d), head * T * d);
    }
    return { q, k, v, attention, headOutput };
  }

  /** The position of each token in the rotary table, T. */
  ropeRows(permuted) {
    return Int32Array.from({ length: this.T }, (_, t) => (t < this.prefix ? t : this.prefix + permuted[t - this.prefix]));
  }

  /** Part 0, 1 or 2 (query, key, value) of T×3D as h×T×d. */
  splitHeads(qkv, part) {
    const { T, D, h, d } = this, out = new Float32Array(T * D);
    for (let head = 0; head < h; head++) for (let t = 0; t < T; t++) {
      const start = t * 3 * D + part * D + head * d;
      out.set(qkv.subarray(start, start + d), (head * T + t) * d);
    }
    return out;
  }

  // ── output (equation 4) ────────────────────────────────────────────────────────────────────────────────

  finalNorm(z) {
    return this.config.final_norm ? this.norm(z, "encoder.norm") : z;
  }

  /** The class token, or the mean of the patches: D. */
  pool(tokens) {
    const { D, N, prefix } = this;
    if (this.config.pooling === "class") return tokens.slice(0, D);
    const out = new Float64Array(D);
    for (let i = prefix * D; i < tokens.length; i++) out[i % D] += tokens[i];
    return Float32Array.from(out, (sum) => sum / N);
  }

  /** Logits of R×D features: R×K. */
  head(features) {
    const hidden = this.config.head === "mlp" ? this.linear(features, "head.hidden").map(Math.tanh) : features;
    return this.linear(hidden, "head.out");
  }

  probabilities(logits) {
    return softmaxRows(logits.slice(), this.config.num_classes, 1 / this.entry.temperature);
  }

  /** What the head would predict from tokens of any layer: T×D. */
  lens(z) {
    const tokens = this.finalNorm(z), logits = this.head(tokens), pooledLogits = this.head(this.pool(tokens));
    return { logits, probabilities: this.probabilities(logits), pooledLogits, pooled: this.probabilities(pooledLogits) };
  }

  // ── the whole model ────────────────────────────────────────────────────────────────────────────────────

  /** A trace of `input`. `previous` is a state that `run` returned earlier: blocks before the first change are its own. */
  run(input, requested, previous = null) {
    const depth = this.config.depth, interventions = complete(requested);
    const sameImage = previous !== null && input.every((value, i) => value === previous.image[i]);
    const start = sameImage ? firstChange(previous.interventions, interventions, depth) : -1;
    const embedding = start < 0 ? this.embed(this.changePixels(input, interventions), interventions) : previous.embedding;
    const first = Math.max(start, 0);
    const tokens = start < 0 ? [embedding.z0] : previous.tokens.slice(0, first + 1), blocks = [];
    let groups = interventions.mergeTokens !== null && interventions.mergeTokens.block < first ? previous.groups : null;
    for (let block = first; block < depth; block++) {
      const changes = blockChanges(interventions, block);
      let z = tokens[block];
      if (changes.pairs > 0) {
        groups = mergeGroups(z, this.prefix, this.N, this.D, changes.pairs);
        z = mergeTokens(z, groups, this.prefix, this.D);
      }
      const { tensors, out } = this.block(z, block, changes, embedding.permutation);
      blocks.push(tensors);
      tokens.push(out);
    }
    const state = { image: input, interventions, embedding, tokens, groups };
    const output = this.output(tokens[depth]), keptTokens = start < 0 ? 0 : first + 1;
    return { state, trace: { ...embedding, ...output, tokens, blocks, interventions, groups, rerunFrom: first, keptTokens } };
  }

  output(z) {
    const final = this.finalNorm(z), pooled = this.pool(final), logits = this.head(pooled);
    const score = this.entry.ood_score === "max-logit" ? logits.reduce((a, b) => Math.max(a, b)) : logSumExp(logits);
    return { final, pooled, logits, probabilities: this.probabilities(logits), score };
  }

  /** First-layer filters: rows of the patch embedding, or the first convolution of a stem. */
  filters() {
    const { channels, patch_size } = this.config;
    if (this.stem !== null) return { count: this.stem[0].width, channels, side: 3, data: this.stem[0].filters };
    return { count: this.D, channels, side: patch_size, data: this.tensors["patch_embedding.project.weight"] };
  }
}

function permutationOf(count) {
  return Array.from({ length: count }, (_, index) => index);
}

/** h×T×d as T×D. */
function joinHeads(x, { T, D, h, d }) {
  const out = new Float32Array(T * D);
  for (let head = 0; head < h; head++) for (let t = 0; t < T; t++) {
    const start = (head * T + t) * d;
    out.set(x.subarray(start, start + d), t * D + head * d);
  }
  return out;
}
