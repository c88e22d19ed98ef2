/** The worker: holds one model and the states from which runs can be resumed. Messages: see WorkerClient in engine.js. */
import { JavaScriptKernel } from "./matmul.js";
import { WasmKernel } from "./wasm.js";
import { VisionTransformer } from "./vit.js";
import { decodeWeights } from "./weights.js";
import { explain } from "./explanations.js";

const MAX_STATES = 8;

let model = null;
const states = new Map(); // trace id -> state, the most recent last
let nextTraceId = 0;

const METHODS = {
  async load({ entry, weights, encoded, kernel }) {
    const tensors = await decodeWeights(encoded, weights.layout);
    const shapes = Object.fromEntries(weights.layout.map(({ name, shape }) => [name, shape]));
    model = new VisionTransformer({ ...entry, shapes }, tensors, chooseKernel(kernel));
    states.clear();
    return {
      kernel: model.kernel.name,
      positionTable: model.positionTable(),
      ropeTable: tensors["rope"] ?? null,
      firstFilters: model.filters(),
    };
  },

  run({ input, interventions, previousId }) {
    const start = performance.now();
    const { state, trace } = model.run(input, interventions, states.get(previousId) ?? null);
    trace.ms = performance.now() - start;
    trace.id = nextTraceId++;
    states.set(trace.id, state);
    if (states.size > MAX_STATES) states.delete(states.keys().next().value);
    return { ...trace, tokens: trace.tokens.slice(trace.keptTokens) };
  },

  lens({ tokens }) {
    return model.lens(tokens);
  },

  explain(request, report) {
    return explain(model, request, report);
  },
};

/** WebAssembly where it is available (a content security policy may forbid it), otherwise JavaScript. */
function chooseKernel(requested) {
  if (requested === "javascript") return new JavaScriptKernel();
  try {
    return WasmKernel.isSupported() ? new WasmKernel() : new JavaScriptKernel();
  } catch {
    return new JavaScriptKernel();
  }
}

/** The memory of all tensors inside blocks, which the page receives without a copy: the worker does not need them. */
function blockBuffers(result) {
  return (result.blocks ?? []).flatMap((block) => Object.values(block).map((tensor) => tensor.buffer));
}

self.onmessage = async ({ data: { id, method, args } }) => {
  try {
    const result = await METHODS[method](args, (progress) => self.postMessage({ id, progress }));
    self.postMessage({ id, result }, blockBuffers(result));
  } catch (error) {
    self.postMessage({ id, error: error.message });
  }
};
