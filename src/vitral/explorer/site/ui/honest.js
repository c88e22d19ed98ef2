// Honest attention: the attention picture next to the map that the faithfulness test ranks best for this model.
import { app } from "./context.js";
import { element } from "./dom.js";
import { t } from "./i18n.js";
import { captioned, litPicture } from "./pictures.js";

const MAX_RUNS = 64; // maps that need more forward passes wait for a click
const METHOD_NAMES = {
  random: "method-random",
  attention: "method-attention",
  rollout: "method-rollout",
  occlusion: "method-occlusion",
  gradcam: "method-gradcam",
  relevance: "method-relevance",
};
export const methodName = (method) => (method in METHOD_NAMES ? t(METHOD_NAMES[method]) : method);

export function honestAttention() {
  const best = bestMap();
  const section = element("section", { class: "honest" }, element("h3", {}, t("honest-title")), element("p", {}, t("honest-lead")));
  const progress = element("progress", { max: 1, value: 0, "aria-label": t("computing") });
  const holder = element(
    "div",
    { class: "figures", "aria-busy": "true" },
    element("div", {}, element("p", { class: "small" }, t("computing")), progress),
  );
  const isQuick = runsFor(best) <= MAX_RUNS || app.trace.explanations?.[best];
  const button = element("button", { type: "button", "data-focus": "honest", onclick: () => {
    button.replaceWith(holder);
    fillHonest(holder, best, progress);
  } }, t("honest-compute", { seconds: Math.ceil((runsFor(best) * app.base.ms) / 1000) }));
  if (isQuick) fillHonest(holder, best, progress);
  section.append(
    isQuick ? holder : button,
    ...ranking(best),
    element("p", { class: "small" }, t("honest-when")),
  );
  return section;
}

// The map with the best ranking; for a model without one, occlusion or, where that takes long, relevance.
function bestMap() {
  const best = app.entry.faithfulness?.best;
  if (best && best in METHOD_NAMES) return best;
  return affordableMap();
}

// Occlusion, or relevance for a model with many patches.
const affordableMap = () => (runsFor("occlusion") <= MAX_RUNS ? "occlusion" : "relevance");

// A map to compare attention with in an experiment.
export function comparisonMap() {
  const best = bestMap();
  return best !== "attention" && runsFor(best) <= MAX_RUNS ? best : affordableMap();
}

// Occlusion runs the model once per window of patches; the other maps cost about one run.
function runsFor(method) {
  const [rows, columns] = app.entry.grid;
  const side = Math.max(Math.round(Math.min(rows, columns) / 7), 1);
  return method === "occlusion" ? (rows - side + 1) * (columns - side + 1) : 1;
}

async function fillHonest(holder, best, progress) {
  const { trace, model } = app;
  try {
    const attention = await explanation(trace, model, "attention");
    const faithful = await explanation(trace, model, best, (share) => (progress.value = typeof share === "number" ? share : 0));
    if (!holder.isConnected || app.trace !== trace) return;
    holder.removeAttribute("aria-busy");
    const pictures = [["attention", attention]];
    if (best !== "attention") pictures.push([best, faithful]);
    holder.replaceChildren(
      ...pictures.map(([method, values]) =>
        captioned(
          litPicture(values, 210, { label: methodName(method), brightness: rescale(values) }),
          element("b", {}, methodName(method)),
          element("br"),
          t(`about-${method}`),
        ),
      ),
    );
  } catch (error) {
    console.error(error);
    holder.replaceChildren(element("p", { class: "error" }, t("failed")));
  }
}

// Each explanation is computed once per trace.
export function explanation(trace, model, method, onProgress = () => {}) {
  trace.explanations ??= {};
  trace.explanations[method] ??= model.explain(trace, method, { onProgress });
  return trace.explanations[method];
}

// To [0, 1]; what speaks against the class is dark.
function rescale(values) {
  const top = Math.max(...values, 1e-9);
  const low = Math.min(...values);
  const from = Math.max(low, 0);
  return Float32Array.from(values, (value) => Math.max(0, (value - from) / Math.max(top - from, 1e-9)) ** 0.8);
}

// What the faithfulness test says about the maps of this model, and all its numbers.
function ranking(best) {
  const record = app.entry.faithfulness;
  if (!record) return [
    element("p", {}, t(best === "occlusion" ? "honest-unranked" : "honest-unranked-other", { method: methodName(best) })),
  ];
  const isBest = record.best === best;
  return [
    element(
      "p",
      {},
      t("honest-tests", { images: record.images, source: record.source }),
      " ",
      t(isBest ? "honest-best" : "honest-none", { method: methodName(best) }),
    ),
    element("div", { class: "scroll", tabindex: "0" }, scoreTable(record)),
  ];
}

function scoreTable({ best, scores }) {
  const columns = ["map", "deletion", "insertion", "pointing", "beats-random"];
  const share = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
  return element("table", { class: "scores" },
    element("thead", {}, element("tr", {}, columns.map((name) => element("th", { scope: "col" }, t(`honest-${name}`))))),
    element("tbody", {}, scores.map((row) =>
      element("tr", { class: row.method === best ? "strong" : "" },
        element("th", { scope: "row" }, methodName(row.method)),
        [row.deletion, row.insertion, row.pointing].map((value) => element("td", {}, share(value))),
        element("td", {}, row.method === "random" ? "" : t(row.beats_random ? "yes" : "no"))))));
}
