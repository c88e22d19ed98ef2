// Training over time: filters, positions, attention and the prediction at several epochs.
import { lineChart } from "./charts.js";
import { classColour } from "./colours.js";
import { app, argmax, className, largest, patchesOf } from "./context.js";
import { element, percent } from "./dom.js";
import { t } from "./i18n.js";
import { captioned, litPicture } from "./pictures.js";
import { setState } from "./state.js";
import { figuresOf, positionSimilarity, summaryAttention } from "./tour_figures.js";

const PLAY_MS = 900;

export const hasHistory = (entry) => entry.weights.length > 1;

const epochName = ({ epoch }, index) => (epoch === null || epoch === undefined ? String(index + 1) : String(epoch));

let timer = null;

export function stopPlaying() {
  clearInterval(timer);
  timer = null;
}

export function renderTraining() {
  const { weights } = app.entry;
  const index = app.weightsIndex;
  return [
    element("article", { class: "step" },
      element("h2", { id: "step-title", tabindex: "-1" }, t("training-title")),
      element("p", { class: "lead" }, t("training-lead", { count: weights.length })),
      element("label", { class: "slider wide" }, element("span", {}, t("epoch")),
        element(
          "input",
          {
            type: "range",
            min: 0,
            max: weights.length - 1,
            step: 1,
            value: index,
            "data-focus": "epoch",
            "aria-valuetext": t("epoch-n", { n: epochName(weights[index], index) }),
            oninput: (event) => selectEpoch(Number(event.target.value)),
          },
        ),
        element("output", {}, t("epoch-n", { n: epochName(weights[index], index) }))),
      element(
        "div",
        { class: "actions" },
        element(
          "button",
          { type: "button", "data-focus": "play", "aria-pressed": String(timer !== null), onclick: play },
          t(timer === null ? "play" : "pause"),
        ),
      ),
      historyChart(index),
      element(
        "div",
        { class: "figures" },
        figuresOf("embedding").slice(0, 1),
        app.model.positionTable && positionSimilarity(app.model.positionTable, 200),
      ),
      element("h3", {}, t("training-attention")),
      element("div", { class: "figures small-figures" }, app.trace.blocks.map((_, block) =>
        captioned(
          litPicture(patchesOf(summaryAttention(app.trace, block)), 130, { label: t("block-n", { n: block + 1 }) }),
          t("block-n", { n: block + 1 }),
        )))),
  ];
}

const selectEpoch = (epoch) => setState({ epoch: epoch === app.entry.weights.length - 1 ? -1 : epoch });

function play() {
  if (timer !== null) {
    stopPlaying();
    return setState({});
  }
  const last = app.entry.weights.length - 1;
  if (app.weightsIndex === last) selectEpoch(0);
  timer = setInterval(() => {
    if (app.isBusy) return;
    if (app.weightsIndex >= last) {
      stopPlaying();
      setState({});
    } else selectEpoch(app.weightsIndex + 1);
  }, PLAY_MS);
  return setState({});
}

// Probabilities of the current image at each epoch that has been computed so far.
function historyChart(index) {
  const { weights, classes } = app.entry;
  const probabilities = weights.map((_, epoch) => app.history.get(epoch) ?? null);
  const known = probabilities.filter(Boolean);
  if (known.length < weights.length) return element(
    "p",
    { class: "small", "aria-busy": "true" },
    t("history-computing", { done: known.length, total: weights.length }),
  );
  const shown = [...new Set([...largest(known.at(-1), 3), ...known.map((row) => argmax(row))])].slice(0, 6);
  return lineChart({
    caption: t("history-caption"), labels: weights.map(epochName), max: 1, format: (value) => `${Math.round(100 * value)}%`, marked: index, onpick: selectEpoch,
    series: shown.map((label) =>
      ({
        name: `${className(label)} (${percent(known[index]?.[label] ?? 0)})`,
        colour: classColour(label, classes.length),
        values: known.map((row) => row[label]),
      }),
    ),
  });
}
