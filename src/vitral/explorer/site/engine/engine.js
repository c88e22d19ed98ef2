/**
 * The engine: a Vision Transformer that runs in a Web Worker of the page. This file is all that the page imports.
 *
 * Every tensor is a row-major Float32Array. Shapes are those of vit.py:
 *   C channels   H, W pixels   P patch side   N patches   T tokens: prefix tokens (class token, registers), then patches
 *   D width      h heads       d = D/h        M hidden width of the MLP     L blocks     K classes
 * All indices count from 0.
 *
 * Model (what `loadModel` resolves to)
 *   entry                       the model's entry in VITRAL_SITE.models: name, config, classes, grid, prefix, ...
 *   kernel                      "wasm" (SIMD) or "javascript": what multiplies matrices
 *   preprocess(source)          {pixels, input}; source: canvas, ImageBitmap, <img>, <video> or ImageData
 *     .pixels                   Uint8ClampedArray C×H×W, resized and cropped as vitral does it (Pillow's filters)
 *     .input                    Float32Array C×H×W, normalised: the argument of `run`
 *   await run(input, interventions = {}, previous = null)   -> Trace
 *   await lens(trace, layer)    {probabilities: T×K, logits: T×K, pooled: K, pooledLogits: K}: final norm and head
 *                               applied to the tokens of layer 0 (encoder input) to L (output of the last block)
 *   await explain(trace, method, {target, onProgress})       Float32Array N; target: a class, default the predicted one
 *                               method: attention, rollout, relevance, gradcam or occlusion (explanations.js)
 *   filters()                   {count, channels, side, data: count×channels×side×side}: first-layer filters
 *   positionTable               T×D learned (or sincos) positions, zero for tokens without one; null if the model has none
 *   ropeTable                   2×T×d/2, cosines and then sines; null if the model has no rotary positions
 *   close()                     ends the worker
 *
 * Trace (what `run` resolves to)
 *   input           C×H×W    model input after masking and swapping patches
 *   patches         N×CPP    the pixels of each patch of `input`, in the order (channel, row, column)
 *   features        E×gh×gw  feature map of a convolutional stem; null for a plain ViT
 *   embedded        N×D      patch embeddings, before class token and positions
 *   tokens          L+1 of T×D: encoder input z0, then the output of each block
 *   blocks          L of
 *     norm1         T×D      LN(z)
 *     q, k, v       h×T×d    after QK-norm and rotary positions: what is multiplied
 *     attention     h×T×T    softmax of each query (row)
 *     headOutput    h×T×d    attention·v, zero for heads that are off
 *     attentionAdded T×D     what the attention branch adds to z, after the projection and LayerScale
 *     middle        T×D      z' (equation 2)
 *     norm2         T×D      LN(z')
 *     hidden        T×M      MLP hidden layer, after the activation
 *     mlpAdded      T×D      what the MLP branch adds to z'
 *   final           T×D      after the final layer norm
 *   pooled          D        input of the head
 *   logits          K
 *   probabilities   K        softmax(logits / calibration temperature), as `vitral predict` reports them
 *   score           number   logsumexp(logits), or the maximum logit (entry.ood_score): below entry.ood_threshold, the
 *                            image is unlike the training set
 *   interventions   the interventions as used (all fields present)
 *   permutation     N        position that each patch received (identity unless shufflePositions)
 *   groups          N        group of each patch after merging (number of the first patch of the group), or null
 *   rerunFrom       number   first block that was computed; blocks before it are those of `previous`. L: only the head
 *   ms              number   time of the forward pass in the worker
 *
 * Interventions (JSON; an absent field leaves the model untouched)
 *   maskPatches: [i, ...]        pixels of these patches become the training mean (0 after normalisation)
 *   swapPatches: [[i, j], ...]   pixels of the two patches change places, in this order
 *   shufflePositions: seed       each patch gets the position (learned and rotary) of patch permutation(seed, N)[i];
 *                                an array of N indices is used as the permutation itself
 *   removePositions: true | "learned" | "rotary"    no position embedding, no rotation, or neither
 *   classToken: "learned" | "zero" | "mean"         x_class of equation 1; "mean" is the mean patch embedding
 *   mergeTokens: {block, pairs}  before this block, `pairs` most similar pairs are merged (ToMe's bipartite matching,
 *                                arXiv 2210.09461): all tokens of a group become their mean. The group keeps its rows,
 *                                so it weighs as many tokens as it has (ToMe's proportional attention)
 *   headsOff: ["b.h", ...]       output of head h in block b is zero
 *   attentionOff, mlpOff: [b, ...]      the branch adds nothing
 *   blocksOff: [b, ...]          the block is skipped: both branches add nothing
 *   residualOff: [b | "b.attention" | "b.mlp", ...]   z = f(LN(z)) instead of z + f(LN(z))
 *   temperature: τ               softmax(q·kᵀ/(√d·τ)) in all blocks; {"b": τ} for single blocks
 */
import { WORKER_SOURCE } from "./worker_source.js";
import { preprocess } from "./preprocess.js";
import { loadScript } from "./scripts.js";

/**
 * Load a model of VITRAL_SITE.models: its weights arrive in a script, because fetch() does not work on file://.
 * @param {object} entry element of VITRAL_SITE.models
 * @param {number} weightsIndex element of entry.weights, by default the last (the finished model)
 * @param {(phase: "download" | "decode") => void} onProgress
 * @param {"wasm" | "javascript"} kernel what multiplies matrices; JavaScript also where WebAssembly is not available
 */
export async function loadModel(entry, weightsIndex = entry.weights.length - 1, onProgress = () => {}, kernel = "wasm") {
  onProgress("download");
  const weights = entry.weights[weightsIndex];
  const encoded = await loadScript(weights.url);
  onProgress("decode");
  const model = new Model(entry);
  await model.setWeights(weights, encoded, kernel);
  return model;
}

/** The worker behind an asynchronous function call: every message carries a number, its reply the same number. */
class WorkerClient {
  constructor() {
    const url = WORKER_SOURCE === null ? "engine/worker.js" : URL.createObjectURL(new Blob([WORKER_SOURCE], { type: "text/javascript" }));
    this.worker = new Worker(url, WORKER_SOURCE === null ? { type: "module" } : {});
    this.pending = new Map();
    this.nextId = 0;
    this.worker.onmessage = ({ data }) => this.receive(data);
    this.worker.onerror = (event) => {
      for (const { reject } of this.pending.values()) reject(new Error(event.message));
      this.pending.clear();
    };
  }

  receive({ id, result, error, progress }) {
    const call = this.pending.get(id);
    if (call === undefined) return;
    if (progress !== undefined) return call.onProgress(progress);
    this.pending.delete(id);
    if (error === undefined) call.resolve(result);
    else call.reject(new Error(error));
  }

  call(method, args, onProgress = () => {}) {
    const id = this.nextId++;
    return new Promise((resolve, reject) => {
      this.pending.set(id, { resolve, reject, onProgress });
      this.worker.postMessage({ id, method, args });
    });
  }
}

class Model {
  constructor(entry) {
    this.entry = entry;
    this.client = new WorkerClient();
  }

  /** Replace the weights, for example by those of another epoch. Traces of the old weights cannot be `previous`. */
  async setWeights(weights, encoded, kernel) {
    const info = await this.client.call("load", { entry: this.entry, weights, encoded, kernel });
    Object.assign(this, info); // kernel, positionTable, ropeTable, firstFilters
  }

  preprocess(source) {
    return preprocess(source, this.entry.preprocessing);
  }

  /** Run the model. Blocks that the interventions leave as they were in `previous` are taken from it. */
  async run(input, interventions = {}, previous = null) {
    const previousId = previous === null || previous.model !== this ? null : previous.id;
    const trace = await this.client.call("run", { input, interventions, previousId });
    if (trace.keptTokens > 0) {
      trace.blocks = [...previous.blocks.slice(0, trace.rerunFrom), ...trace.blocks];
      trace.tokens = [...previous.tokens.slice(0, trace.keptTokens), ...trace.tokens];
    }
    trace.model = this;
    return trace;
  }

  lens(trace, layer) {
    return this.client.call("lens", { tokens: trace.tokens[layer] });
  }

  explain(trace, method, { target = null, onProgress = () => {} } = {}) {
    const attention = method === "attention" || method === "rollout" ? trace.blocks.map((block) => block.attention) : null;
    const { input, logits, interventions } = trace;
    return this.client.call("explain", { method, target, attention, input, logits, interventions }, onProgress);
  }

  filters() {
    return this.firstFilters;
  }

  close() {
    this.client.worker.terminate();
  }
}
