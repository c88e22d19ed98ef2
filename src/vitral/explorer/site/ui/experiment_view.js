// The list of experiments; in each, the visitor predicts first, then measures, then reads why.
import { app } from "./context.js";
import { element, formatNumber, percent } from "./dom.js";
import { possibleExperiments } from "./experiments.js";
import { matrixFigure } from "./figure.js";
import { hasText, t } from "./i18n.js";
import { setState, state } from "./state.js";

const CHOICES = 3;
const progress = { guesses: {}, results: new Map(), running: null }; // results: by trace of the untouched model and experiment

const resultsHere = () => {
  if (!progress.results.has(app.base)) {
    progress.results.clear();
    progress.results.set(app.base, {});
    progress.guesses = {};
  }
  return progress.results.get(app.base);
};

export function renderExperiments(whatChanged) {
  const experiments = possibleExperiments();
  const open = experiments.findIndex(({ key }) => key === state.experiment);
  resultsHere();
  if (open < 0) return list(experiments);
  return experimentPage(experiments[open], open, experiments, whatChanged);
}

function list(experiments) {
  const results = resultsHere();
  return [
    element("h2", { id: "step-title", tabindex: "-1" }, t("experiments-title", { count: experiments.length })),
    element("p", { class: "lead" }, t("experiments-lead")),
    element("ol", { class: "cards" }, experiments.map(({ key }, index) =>
      element("li", {}, element("button", {
        type: "button",
        class: "card",
        "data-focus": `experiment:${key}`,
        onclick: () => openExperiment(key),
      },
        element("span", { class: "number" }, String(index + 1)), element("span", {}, t(`${key}-question`)), key in results && element(
          "span",
          { class: "done", "aria-label": t("measured") },
          "✓",
        ))))),
  ];
}

const openExperiment = (experiment) => setState({ experiment, changes: {} });

function experimentPage(experiment, index, experiments, whatChanged) {
  const { key } = experiment;
  const results = resultsHere();
  const result = results[key];
  const guess = progress.guesses[key];
  return [
    element(
      "p",
      {},
      element(
        "button",
        { type: "button", class: "link", "data-focus": "all-experiments", onclick: () => openExperiment("") },
        t("all-experiments"),
      ),
    ),
    element("h2", { id: "step-title", tabindex: "-1" }, element("span", { class: "number" }, `${index + 1} `), t(`${key}-question`)),
    element("p", { class: "lead" }, t(`${key}-setup`, experiment.values?.() ?? {})),
    choices(experiment, guess, result),
    result === undefined ? measureButton(experiment, guess) : outcome(experiment, result, guess, whatChanged),
    element("nav", { class: "step-nav foot", "aria-label": t("experiments-nav") },
      index > 0 ? element(
        "button",
        { type: "button", "data-focus": "experiment-previous", onclick: () => openExperiment(experiments[index - 1].key) },
        t("previous"),
      ) : element("span"),
      index < experiments.length - 1 && element(
        "button",
        {
          type: "button",
          class: result ? "primary" : "",
          "data-focus": "experiment-next",
          onclick: () => openExperiment(experiments[index + 1].key),
        },
        t("next-experiment"),
      )),
  ];
}

function choices({ key }, guess, result) {
  const choose = (value) => {
    progress.guesses[key] = value;
    setState({});
  };
  return element("fieldset", { class: "group quiz", disabled: result !== undefined },
    element("legend", {}, t("predict-first")),
    Array.from({ length: CHOICES }, (_, value) => value).filter((value) => hasText(`${key}-choice-${value}`)).map((value) => {
      const mark = result === undefined ? "" : value === result.answer ? "right" : value === guess ? "wrong" : "";
      return element("label", { class: `check ${mark}` },
        element(
          "input",
          { type: "radio", name: "guess", checked: value === guess, "data-focus": `guess:${value}`, onchange: () => choose(value) },
        ),
        element("span", {}, t(`${key}-choice-${value}`)),
        mark === "right" && element("span", { class: "mark-right" }, ` ${t("measured-answer")}`));
    }));
}

function measureButton(experiment, guess) {
  const bar = element("progress", { max: 1, value: 0, hidden: true, "aria-label": t("computing") });
  const button = element(
    "button",
    {
      type: "button",
      class: "primary",
      disabled: guess === undefined || progress.running !== null,
      "data-focus": "measure",
      onclick: () => measure(experiment, bar, button),
    },
    t("measure"),
  );
  return element("div", { class: "actions" }, button, bar, guess === undefined && element("span", { class: "small" }, t("guess-first")));
}

async function measure(experiment, bar, button) {
  button.disabled = true;
  bar.hidden = false;
  const base = app.base;
  progress.running = experiment.key;
  try {
    const result = await experiment.measure((share) => (bar.value = share));
    if (app.base !== base) return;
    resultsHere()[experiment.key] = result;
  } finally {
    progress.running = null;
  }
  if (state.experiment === experiment.key) setState({ changes: experiment.changes(resultsHere()[experiment.key]) });
}

function outcome(experiment, result, guess, whatChanged) {
  const { key } = experiment;
  const values = Object.fromEntries(
    Object.entries(result).map(([name, value]) => [name, typeof value === "number" ? formatValue(name, value) : value]),
  );
  const variant = hasText(`${key}-why-${result.answer}`) ? `${key}-why-${result.answer}` : `${key}-why`;
  const hybrid = result.hybrid && hasText(`${key}-why-hybrid`) ? `${key}-why-hybrid` : variant;
  return [
    element(
      "p",
      { class: guess === result.answer ? "verdict same" : "verdict other", role: "status" },
      t(guess === result.answer ? "guess-right" : "guess-wrong"),
    ),
    element(
      "section",
      { class: "finding" },
      element("h3", {}, t("measured-title")),
      element("p", {}, t(`${key}-result`, values)),
      result.grid && resultGrid(key, result.grid),
    ),
    element("section", { class: "finding" }, element("h3", {}, t("why")), element("p", {}, t(hybrid, values))),
    Object.keys(state.changes).length > 0 && element("section", { class: "finding" }, element("p", {}, t("applied")), whatChanged(),
      element(
        "div",
        { class: "actions" },
        element(
          "button",
          { type: "button", "data-focus": "to-workbench", onclick: () => setState({ lab: "workbench" }) },
          t("continue-workbench"),
        ),
        element(
          "button",
          { type: "button", class: "quiet", "data-focus": "undo-experiment", onclick: () => setState({ changes: {} }) },
          t("reset"),
        ),
      )),
  ];
}

const formatValue = (name, value) => (/share|Keeps/.test(name) ? percent(value) : Number.isInteger(value) ? value : formatNumber(value));

function resultGrid(key, { values, rows, columns }) {
  return element("div", { class: "figures" }, matrixFigure({
    values: Float32Array.from(values), rows, columns, scale: "weights", caption: t(`${key}-grid`), key: `${key}-grid`, size: 240,
    rowName: (row) => t("block-n", { n: row + 1 }), columnName: (column) => (rows === 1 ? t("block-n", { n: column + 1 }) : t("head-n", { n: column + 1 })),
  }));
}
