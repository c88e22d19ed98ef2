/** The worker: holds one model and the states from which runs can be resumed. Messages: see WorkerClient in engine.js. */
import { JavaScriptKernel } from "./matmul.js";
import { VisionTransformer } from "./vit.js";
import { decodeWeights } from "./weights.js";
import { explain } from "./explanations.js";

const MAX_STATES = 8;

let model = null;
const states = new Map(); // trace id -> state, the most recent last
let nextTraceId = 0;

const METHODS = {
  async load({ entry, weights, encoded }) {
    const tensors = await decodeWeights(encoded, weights.layout);
    const shapes = Object.fromEntries(weights.layout.map(({ name, shape }) => [name, shape]));
    model = new VisionTransformer({ ...entry, shapes }, tensors, new JavaScriptKernel());
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

self.onmessage = async ({ data: { id, method, args } }) => {
  try {
    const result = await METHODS[method](args, (progress) => self.postMessage({ id, progress }));
    self.postMessage({ id, result });
  } catch (error) {
    self.postMessage({ id, error: error.message });
  }
};
