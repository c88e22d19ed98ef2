// Take it apart: controls that change the model, and what changes.
import { bars, lineChart } from "./charts.js";
import {
  app, argmax, className, cosine, hasClassToken, isChanged, largest, numPatches, patchesOf, patchName, readoutOf,
  rowOf,
} from "./context.js";
import { choiceButtons, element, formatNumber, percent, signedPercent } from "./dom.js";
import { renderExperiments } from "./experiment_view.js";
import { t } from "./i18n.js";
import { readoutName } from "./map.js";
import { captioned, litPicture, patchMap } from "./pictures.js";
import { setState, state } from "./state.js";
import { summaryAttention } from "./tour_figures.js";

export const patchTool = { name: "mask", first: null }; // what a click on a patch does in the workbench

export function renderLab() {
  const pages = ["experiments", "workbench"].map((value) => ({ value, label: t(`lab-${value}`) }));
  return [
    choiceButtons(t("lab"), pages, state.lab, (lab) => setState({ lab }), "lab"),
    element("article", { class: "step" }, state.lab === "experiments" ? renderExperiments(whatChanged) : workbench()),
  ];
}

// Sets interventions; an empty value (null, false, empty list) removes one.
export function change(updates) {
  const changes = { ...state.changes, ...updates };
  for (const [name, value] of Object.entries(changes))
    if (value === null || value === false || value === undefined || (Array.isArray(value) && !value.length)) delete changes[name];
  setState({ changes });
}

const toggled = (list = [], item) => (list.includes(item) ? list.filter((other) => other !== item) : [...list, item]);

function workbench() {
  return [
    element("h2", { id: "step-title", tabindex: "-1" }, t("workbench-title")),
    element("p", { class: "lead" }, t("workbench-lead")),
    element("div", { class: "actions" },
      element(
        "button",
        { type: "button", disabled: !Object.keys(state.changes).length, "data-focus": "reset", onclick: () => setState({ changes: {} }) },
        t("reset"),
      )),
    element("div", { class: "bench" },
      element(
        "div",
        { class: "bench-controls" },
        patchControls(),
        positionControls(),
        partControls(),
        temperatureControl(),
        hasClassToken() && classTokenControl(),
        mergeControl(),
      ),
      element("div", { class: "bench-result" }, whatChanged())),
  ];
}

const group = (title, ...content) => element("fieldset", { class: "group" }, element("legend", {}, title), content);

function patchControls() {
  const { maskPatches = [], swapPatches = [] } = state.changes;
  const choose = (name) => {
    Object.assign(patchTool, { name, first: null });
    setState({});
  };
  return group(t("bench-patches"),
    choiceButtons(
      t("bench-patches"),
      ["mask", "swap"].map((value) => ({ value, label: t(`tool-${value}`) })),
      patchTool.name,
      choose,
      "tool",
    ),
    element("p", { class: "small" }, t(patchTool.name === "mask" ? "mask-hint" : patchTool.first === null ? "swap-hint" : "swap-second")),
    element("p", { class: "small" }, t("patch-count", { masked: maskPatches.length, swapped: swapPatches.length })));
}

// A click on a patch of the image, in the workbench.
export function usePatchTool(patch) {
  if (patchTool.name === "mask") return change({ maskPatches: toggled(state.changes.maskPatches, patch) });
  if (patchTool.first === null || patchTool.first === patch) {
    patchTool.first = patchTool.first === patch ? null : patch;
    return setState({});
  }
  const pair = [patchTool.first, patch];
  patchTool.first = null;
  return change({ swapPatches: [...(state.changes.swapPatches ?? []), pair] });
}

function positionControls() {
  const { removePositions = false, shufflePositions = null } = state.changes;
  const both = app.model.positionTable && app.model.ropeTable;
  const values = [
    ["", "positions-kept"],
    ["true", "positions-removed"],
    ...(both ? [["learned", "positions-no-learned"], ["rotary", "positions-no-rotary"]] : []),
  ];
  const set = (value) => change({ removePositions: { "": false, true: true }[value] ?? value });
  return group(t("bench-positions"),
    element("label", { class: "field" }, element("span", { class: "visually-hidden" }, t("bench-positions")),
      element("select", { "data-focus": "positions", onchange: (event) => set(event.target.value) },
        values.map(([value, key]) => element("option", { value, selected: String(removePositions || "") === value }, t(key))))),
    element("div", { class: "actions" },
      element(
        "button",
        { type: "button", "data-focus": "shuffle", onclick: () => change({ shufflePositions: ((shufflePositions ?? 0) % 99) + 1 }) },
        t("shuffle"),
      ),
      shufflePositions !== null && element(
        "button",
        { type: "button", class: "quiet", "data-focus": "unshuffle", onclick: () => change({ shufflePositions: null }) },
        t("unshuffle"),
      )));
}

function partControls() {
  const { depth, heads } = app.entry.config;
  const { headsOff = [], attentionOff = [], mlpOff = [], blocksOff = [], residualOff = [] } = state.changes;
  const toggle = (label, isOff, focus, onclick, short) =>
    element(
      "button",
      { type: "button", class: "part", "aria-pressed": String(!isOff), "aria-label": label, title: label, "data-focus": focus, onclick },
      short,
    );
  const rows = Array.from({ length: depth }, (_, block) => {
    const skip = blocksOff.includes(block);
    return element("tr", { class: skip ? "off" : "" },
      element(
        "th",
        { scope: "row" },
        toggle(
          t("part-block", { n: block + 1 }),
          skip,
          `part-block:${block}`,
          () => change({ blocksOff: toggled(blocksOff, block) }),
          String(block + 1),
        ),
      ),
      element("td", { class: "heads" }, Array.from({ length: heads }, (_, head) => {
        const name = `${block}.${head}`;
        return toggle(
          t("part-head", { block: block + 1, head: head + 1 }),
          headsOff.includes(name) || attentionOff.includes(block) || skip,
          `part-head:${name}`,
          () => change({ headsOff: toggled(headsOff, name) }),
          String(head + 1),
        );
      })),
      element(
        "td",
        {},
        toggle(
          t("part-attention", { n: block + 1 }),
          attentionOff.includes(block) || skip,
          `part-attention:${block}`,
          () => change({ attentionOff: toggled(attentionOff, block) }),
          "A",
        ),
      ),
      element(
        "td",
        {},
        toggle(
          t("part-mlp", { n: block + 1 }),
          mlpOff.includes(block) || skip,
          `part-mlp:${block}`,
          () => change({ mlpOff: toggled(mlpOff, block) }),
          "M",
        ),
      ),
      element(
        "td",
        {},
        toggle(
          t("part-residual", { n: block + 1 }),
          residualOff.includes(block),
          `part-residual:${block}`,
          () => change({ residualOff: toggled(residualOff, block) }),
          "+z",
        ),
      ));
  });
  const column = (key) => element("th", { scope: "col" }, t(key));
  return group(t("bench-parts"),
    element("p", { class: "small" }, t("parts-hint")),
    element("div", { class: "scroll", tabindex: "0" }, element("table", { class: "parts" },
      element(
        "thead",
        {},
        element("tr", {}, column("block"), column("heads"), column("attention-short"), column("mlp-short"), column("residual-short")),
      ),
      element("tbody", {}, rows))));
}

// Sliders apply while they move; the position of the slider is the exponent of the value.
function slider({ label, min, max, step, value, text, focus, oninput }) {
  const output = element("output", {}, text(value));
  return element("label", { class: "slider" }, element("span", {}, label),
    element("input", { type: "range", min, max, step, value, "data-focus": focus, "aria-valuetext": text(value), oninput: (event) => {
      output.textContent = text(Number(event.target.value));
      event.target.setAttribute("aria-valuetext", text(Number(event.target.value)));
      oninput(Number(event.target.value));
    } }),
    output);
}

function temperatureControl() {
  const temperature = typeof state.changes.temperature === "number" ? state.changes.temperature : 1;
  const toValue = (position) => Number((2 ** position).toPrecision(2));
  return group(t("bench-temperature"),
    slider(
      {
        label: "τ",
        min: -4,
        max: 4,
        step: 0.5,
        value: Math.log2(temperature),
        text: (position) => formatNumber(toValue(position)),
        focus: "temperature",
        oninput: (position) => change({ temperature: position === 0 ? null : toValue(position) }),
      },
    ),
    element("p", { class: "small" }, t("temperature-hint")));
}

function classTokenControl() {
  return group(t("bench-class-token"),
    choiceButtons(t("bench-class-token"), ["learned", "zero", "mean"].map((value) =>
      ({ value, label: t(`class-token-${value}`) }),
    ), state.changes.classToken ?? "learned",
      (value) => change({ classToken: value === "learned" ? null : value }), "class-token"));
}

function mergeControl() {
  const { block = 0, pairs = 0 } = state.changes.mergeTokens ?? {};
  const most = Math.floor(numPatches() / 2);
  const set = (updates) => {
    const next = { block, pairs, ...updates };
    change({ mergeTokens: next.pairs ? next : null });
  };
  return group(t("bench-merge"),
    slider(
      {
        label: t("pairs"),
        min: 0,
        max: most,
        step: 1,
        value: pairs,
        text: (value) => t("pairs-of", { pairs: value, N: numPatches() }),
        focus: "merge",
        oninput: (value) => set({ pairs: value }),
      },
    ),
    element("label", { class: "field" }, t("before-block"), " ", element("select", {
      "data-focus": "merge-block",
      onchange: (event) => set({ block: Number(event.target.value) }),
    },
      Array.from(
        { length: app.entry.config.depth },
        (_, index) => element("option", { value: index, selected: index === block }, String(index + 1)),
      ))),
    element("p", { class: "small" }, t("merge-hint")));
}

// ── what changed ─────────────────────────────────────────────────────────────────────────────────────────────

// The changes in words.
export function describeChanges(changes = state.changes) {
  const parts = [];
  const list = (indices) => indices.map((index) => Number(index) + 1).join(", ");
  const {
    maskPatches,
    swapPatches,
    shufflePositions,
    removePositions,
    headsOff,
    attentionOff,
    mlpOff,
    blocksOff,
    residualOff,
    temperature,
    classToken,
    mergeTokens,
  } = changes;
  if (maskPatches) parts.push(t("did-mask", { count: maskPatches.length }));
  if (swapPatches) parts.push(t("did-swap", { count: swapPatches.length }));
  if (shufflePositions !== undefined) parts.push(t("did-shuffle"));
  if (removePositions) parts.push(t(removePositions === true ? "positions-removed" : `positions-no-${removePositions}`));
  if (headsOff) parts.push(
    t("did-heads", { list: headsOff.map((name) => name.split(".").map((n) => Number(n) + 1).join(".")).join(", ") }),
  );
  if (attentionOff) parts.push(t("did-attention", { list: list(attentionOff) }));
  if (mlpOff) parts.push(t("did-mlp", { list: list(mlpOff) }));
  if (blocksOff) parts.push(t("did-blocks", { list: list(blocksOff) }));
  if (residualOff) parts.push(t("did-residual", { list: list(residualOff) }));
  if (temperature !== undefined) parts.push(
    t("did-temperature", { value: typeof temperature === "number" ? formatNumber(temperature) : Object.values(temperature).join(", ") }),
  );
  if (classToken) parts.push(t("did-class-token", { kind: t(`class-token-${classToken}`) }));
  if (mergeTokens) parts.push(t("did-merge", { pairs: mergeTokens.pairs, block: mergeTokens.block + 1 }));
  return parts;
}

export function whatChanged() {
  if (!isChanged()) return [element("h3", {}, t("changed-title")), element("p", { class: "small" }, t("nothing-changed"))];
  const { base, trace } = app;
  const [before, after] = [argmax(base.probabilities), argmax(trace.probabilities)];
  const verdict = before === after
    ? t(
      "verdict-same",
      { label: className(after), before: percent(base.probabilities[before]), after: percent(trace.probabilities[before]) },
    )
    : t(
      "verdict-other",
      {
        from: className(before),
        to: className(after),
        before: percent(base.probabilities[before]),
        after: percent(trace.probabilities[before]),
        now: percent(trace.probabilities[after]),
      },
    );
  return [
    element("h3", {}, t("changed-title")),
    element("ul", { class: "changes" }, describeChanges().map((text) => element("li", {}, text))),
    element("p", { class: before === after ? "verdict same" : "verdict other", role: "status" }, verdict),
    predictionBars(),
    distanceChart(),
    element("div", { class: "figures small-figures" }, changeMaps()),
    element(
      "p",
      { class: "small" },
      t("rerun", { from: Math.min(trace.rerunFrom + 1, app.entry.config.depth), depth: app.entry.config.depth, ms: Math.round(trace.ms) }),
    ),
  ];
}

function predictionBars() {
  const { base, trace } = app;
  const shown = [...new Set([...largest(trace.probabilities, 4), ...largest(base.probabilities, 3)])];
  return bars(t("prediction-change"), shown.map((index) => ({
    name: className(index), value: percent(trace.probabilities[index]), share: trace.probabilities[index], before: base.probabilities[index],
    note: `${signedPercent(trace.probabilities[index] - base.probabilities[index])} ${t("points")}`, strong: index === argmax(trace.probabilities),
  })));
}

// How far the vector that is read out has moved, block by block.
function distanceChart() {
  const distance = app.trace.tokens.map((tokens, layer) => 1 - cosine(readoutOf(tokens), readoutOf(app.base.tokens[layer])));
  return lineChart(
    {
      caption: t("distance-caption", { readout: readoutName() }),
      labels: distance.map((_, layer) => String(layer)),
      max: Math.max(1, ...distance),
      series: [{ name: readoutName(), colour: "var(--accent)", values: distance }],
    },
  );
}

function changeMaps() {
  const D = app.entry.config.width;
  const last = app.trace.tokens.length - 1;
  const moved = Float32Array.from({ length: numPatches() }, (_, patch) => {
    const token = app.entry.prefix + patch;
    return 1 - cosine(rowOf(app.trace.tokens[last], token, D), rowOf(app.base.tokens[last], token, D));
  });
  const strongest = argmax(moved);
  const attention = (trace) => patchesOf(summaryAttention(trace, app.entry.config.depth - 1));
  return [
    captioned(litPicture(attention(app.base), 150, { label: t("attention-before") }), t("attention-before")),
    captioned(litPicture(attention(app.trace), 150, { label: t("attention-after") }), t("attention-after")),
    captioned(
      patchMap(moved, 150, { label: t("moved-caption") }),
      t("moved-caption"),
      element("br"),
      t("moved-most", { patch: patchName(strongest), value: formatNumber(moved[strongest]) }),
    ),
  ];
}

