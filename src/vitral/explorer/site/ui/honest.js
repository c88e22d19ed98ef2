// Honest attention: the attention picture next to the map that the faithfulness test ranks best for this model.
import { app } from "./context.js";
import { element, formatNumber } from "./dom.js";
import { t } from "./i18n.js";
import { captioned, litPicture } from "./pictures.js";

const MAX_SECONDS = 2; // longer computations wait for a click
const METHOD_NAMES = {
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
  const seconds = app.trace.explanations?.[best] ? 0 : secondsFor(best);
  const button = element("button", { type: "button", "data-focus": "honest", onclick: () => {
    button.replaceWith(holder);
    fillHonest(holder, best, progress);
  } }, t("honest-compute", { seconds: Math.ceil(seconds) }));
  if (seconds < MAX_SECONDS) fillHonest(holder, best, progress);
  section.append(
    seconds < MAX_SECONDS ? holder : button,
    element("p", {}, ranking(best)),
    element("p", { class: "small" }, t("honest-when")),
  );
  return section;
}

// The map with the best ranking; for a model without one, occlusion or, where that takes long, relevance.
function bestMap() {
  const best = app.entry.faithfulness?.best;
  if (best in METHOD_NAMES) return best;
  return secondsFor("occlusion") < MAX_SECONDS ? "occlusion" : "relevance";
}

// Occlusion runs the model once per window of patches; the other maps cost about one run.
export function secondsFor(method) {
  const [rows, columns] = app.entry.grid;
  const side = Math.max(Math.round(Math.min(rows, columns) / 7), 1);
  return method === "occlusion" ? ((rows - side + 1) * (columns - side + 1) * app.base.ms) / 1000 : 0;
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

function ranking(best) {
  const record = app.entry.faithfulness;
  if (!record) return t(best === "occlusion" ? "honest-unranked" : "honest-unranked-other", { method: methodName(best) });
  const score = (method) => record.scores.find((row) => row.method === method);
  const values = { images: record.images, source: record.source, method: methodName(best) };
  const [winner, attention, random] = [score(best), score("attention"), score("random")];
  if (winner && attention && best !== "attention")
    return t(
      "honest-ranked",
      {
        ...values,
        score: formatNumber(winner.score),
        attention: formatNumber(attention.score),
        random: random ? formatNumber(random.score) : "0",
      },
    );
  return t(
    "honest-attention-best",
    { ...values, score: winner ? formatNumber(winner.score) : "–", random: random ? formatNumber(random.score) : "0" },
  );
}
