// Free exploration: attention at every zoom, the logit lens, token similarity and norms of the residual stream.
import { AttentionOverview } from "../page/image_view.js";
import { toBrightness } from "../page/attention.js";
import { attentionWeight } from "./arithmetic.js";
import { lineChart } from "./charts.js";
import { classColour } from "./colours.js";
import {
  app, argmax, attentionOf, className, cosine, currentBlock, currentHead, currentToken, largest, norm, numPatches, numTokens,
  patchesOf, patchName, rowOf, tokenName, tokenPhrase } from "./context.js";
import { choiceButtons, element, formatNumber, percent, sharpContext } from "./dom.js";
import { matrixFigure } from "./figure.js";
import { t } from "./i18n.js";
import { honestAttention } from "./honest.js";
import { readoutName } from "./map.js";
import { captioned, gridPicture, litPicture, patchMap } from "./pictures.js";
import { PANELS, setState, state } from "./state.js";
import { attentionMatrix, lookingFigure, qkvFigures } from "./tour_figures.js";
import { placeControls } from "./tour.js";

export function renderExplore() {
  const panel = { attention: attentionPanel, lens: lensPanel, similarity: similarityPanel, norms: normsPanel }[state.panel];
  return [
    choiceButtons(
      t("panels"),
      PANELS.map((value) => ({ value, label: t(`panel-${value}`) })),
      state.panel,
      (value) => setState({ panel: value }),
      "panel",
    ),
    element("article", { class: "step" }, panel()),
  ];
}

const heading = (text) => element("h2", { id: "step-title", tabindex: "-1" }, text);
const lead = (key, values) => element("p", { class: "lead" }, t(key, values));

// ── attention ────────────────────────────────────────────────────────────────────────────────────────────────

function attentionPanel() {
  return { model: modelZoom, block: blockZoom, head: headZoom, dot: dotZoom }[state.zoom]();
}

function modelZoom() {
  const token = currentToken();
  const { depth, heads } = app.entry.config;
  const canvas = element("canvas", { role: "img", "aria-label": t("overview-label", { token: tokenPhrase(token) }) });
  const axis = element("span", { class: "axis" });
  const nameAxis = (shown) => (axis.textContent = `${t("overview-axes")} · ${tokenPhrase(shown)}`);
  nameAxis(token);
  const holder = element("div", { class: "overview" }, axis, canvas);
  const overview = new AttentionOverview(canvas);
  const weights = Array.from(
    { length: depth },
    (_, block) => Array.from({ length: heads }, (_, head) => toBrightness(patchesOf(attentionOf(app.trace, block, head, currentToken())))),
  );
  queueMicrotask(() => holder.isConnected && overview.draw(weights, app.entry.grid, { block: currentBlock(), head: currentHead() + 1 }));
  holder.redraw = (shown) => {
    nameAxis(shown);
    const rows = Array.from(
      { length: depth },
      (_, block) => Array.from({ length: heads }, (_, head) => toBrightness(patchesOf(attentionOf(app.trace, block, head, shown)))),
    );
    overview.draw(rows, app.entry.grid, { block: currentBlock(), head: currentHead() + 1 });
  };
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const [block, head] = overview.cellAt(event.clientX - box.left, event.clientY - box.top);
    setState({ block, head, zoom: "head" });
  });
  return [
    heading(t("overview-title", { token: tokenPhrase(token) })),
    lead("overview-lead"),
    element("div", { id: "overview-holder" }, holder),
    overviewTable(token),
    honestAttention(),
  ];
}

// For each block and head: the patch with the most attention. A link to each head, and the alternative to the picture.
function overviewTable(token) {
  const { depth, heads } = app.entry.config;
  const range = (count) => Array.from({ length: count }, (_, index) => index);
  const rows = range(heads).map((head) =>
    element("tr", {}, element("th", { scope: "row" }, t("head-n", { n: head + 1 })), range(depth).map((block) => {
      const weights = attentionOf(app.trace, block, head, token);
      const most = argmax(weights);
      const label = t("open-head", { block: block + 1, head: head + 1, token: tokenName(most), share: percent(weights[most]) });
      return element(
        "td",
        {},
        element(
          "button",
          {
            type: "button",
            class: "link",
            "aria-label": label,
            "data-focus": `cell:${block}.${head}`,
            onclick: () => setState({ block, head, zoom: "head" }),
          },
          `${shortName(most)} ${Math.round(100 * weights[most])}%`,
        ),
      );
    })));
  return element("details", { class: "table" }, element("summary", {}, t("overview-table")),
    element("div", { class: "scroll", tabindex: "0" }, element("table", { class: "numbers" },
      element(
        "thead",
        {},
        element("tr", {}, element("td"), range(depth).map((block) => element("th", { scope: "col" }, t("block-n", { n: block + 1 })))),
      ),
      element("tbody", {}, rows))));
}

function shortName(token) {
  if (token < app.entry.prefix) return t("cls-short");
  const patch = token - app.entry.prefix;
  return `${Math.floor(patch / app.entry.grid[1]) + 1},${(patch % app.entry.grid[1]) + 1}`;
}

function blockZoom() {
  const [block, D] = [currentBlock(), app.entry.config.width];
  const { heads } = app.entry.config;
  const values = app.trace.blocks[block];
  const token = currentToken();
  const size = (matrix) => norm(rowOf(matrix, token, D));
  const rows = (matrix, caption, columns = D) => matrixFigure({
    values: matrix, columns, rows: numTokens(), caption, rowName: tokenName, marked: { row: token }, key: caption, size: 260, onpick: (row) => setState({ token: row }),
  });
  const headButtons = Array.from({ length: heads }, (_, head) =>
    element("button", {
      type: "button",
      class: "head-card",
      "data-focus": `open-head:${head}`,
      onclick: () => setState({ head, zoom: "head" }),
    },
      litPicture(patchesOf(attentionOf(app.trace, block, head, token)), heads > 6 ? 84 : 110),
      element("span", {}, t("head-n", { n: head + 1 }))));
  const stage = (number, title, ...content) => element(
    "section",
    { class: "stage" },
    element("h3", {}, element("span", { class: "number" }, `${number} `), title),
    content,
  );
  return [
    heading(t("block-title", { n: block + 1 })),
    lead("block-lead", { heads }),
    placeControls(false),
    stage(
      1,
      t("stage-in"),
      element("div", { class: "figures" }, rows(app.trace.tokens[block], t("caption-z")), rows(values.norm1, t("caption-norm"))),
    ),
    stage(
      2,
      t("stage-heads", { token: tokenPhrase(token) }),
      element("div", { class: "head-cards" }, headButtons),
      element("p", { class: "small" }, t("open-a-head")),
    ),
    stage(3, t("stage-attention"), element(
      "p",
      {},
      t(
        "stage-share",
        { token: tokenPhrase(token), f: formatNumber(size(values.attentionAdded)), z: formatNumber(size(app.trace.tokens[block])) },
      ),
    ),
      element("div", { class: "figures" }, rows(values.attentionAdded, t("caption-msa")), rows(values.middle, t("caption-middle")))),
    stage(4, t("stage-mlp"), element(
      "p",
      {},
      t("stage-share", { token: tokenPhrase(token), f: formatNumber(size(values.mlpAdded)), z: formatNumber(size(values.middle)) }),
    ),
      element(
        "div",
        { class: "figures" },
        rows(values.hidden, t("hidden-caption"), app.entry.numbers.M),
        rows(app.trace.tokens[block + 1], t("caption-out")),
      )),
  ];
}

function headZoom() {
  const [block, head] = [currentBlock(), currentHead()];
  return [
    heading(t("head-title", { block: block + 1, head: head + 1 })),
    lead("head-lead"),
    placeControls(true),
    element(
      "div",
      { class: "figures" },
      attentionMatrix({ onpick: (token, key) => setState({ token, key, zoom: "dot" }) }),
      lookingFigure(240),
    ),
    element(
      "p",
      {},
      element(
        "button",
        { type: "button", class: "primary", "data-focus": "to-dot", onclick: () => setState({ zoom: "dot" }) },
        t("zoom-dot"),
      ),
    ),
    element("h3", {}, t("qkv-title", { token: tokenPhrase(currentToken()) })),
    element("div", { class: "figures" }, qkvFigures({ withNorm: false })),
  ];
}

const dotZoom = () => [
  heading(t("dot-heading", { block: currentBlock() + 1, head: currentHead() + 1 })),
  lead("dot-lead"),
  placeControls(true),
  attentionWeight(),
  element(
    "p",
    {},
    element("button", { type: "button", "data-focus": "out-of-dot", onclick: () => setState({ zoom: "head" }) }, t("zoom-out-head")),
  ),
];

// ── logit lens ───────────────────────────────────────────────────────────────────────────────────────────────

export async function lensOf(trace) {
  trace.lens ??= Promise.all(Array.from({ length: app.entry.config.depth + 1 }, (_, layer) => app.model.lens(trace, layer)));
  return trace.lens;
}

// Places a node now and fills it when the promise is there, unless the page has moved on.
export function later(promise, build, className = "later") {
  const holder = element("div", { class: className, "aria-busy": "true" }, element("p", { class: "small" }, t("computing")));
  promise.then((value) => {
    holder.removeAttribute("aria-busy");
    holder.replaceChildren(...[build(value)].flat(2).filter(Boolean));
  }).catch((error) => {
    holder.replaceChildren(element("p", { class: "error" }, t("failed")));
    console.error(error);
  });
  return holder;
}

const currentLayer = () => (state.layer >= 0 && state.layer <= app.entry.config.depth ? state.layer : app.entry.config.depth);
const layerLabels = () => Array.from({ length: app.entry.config.depth + 1 }, (_, layer) => String(layer));

function layerChoice() {
  return element("div", { class: "place" }, element("span", { class: "place-label" }, t("after-block")),
    choiceButtons(
      t("after-block"),
      layerLabels().map((label, value) => ({ value, label, title: value === 0 ? t("encoder-input") : t("block-n", { n: value }) })),
      currentLayer(),
      (layer) => setState({ layer }),
      "layer",
    ));
}

function lensPanel() {
  return [
    heading(t("lens-title")),
    lead("lens-lead", { readout: readoutName() }),
    later(
      lensOf(app.trace),
      (lens) => [
        lensChart(lens),
        element("h3", {}, t("lens-patches", { layer: currentLayer() })),
        layerChoice(),
        lensGrid(lens[currentLayer()]),
        element("p", { class: "small" }, t(app.entry.config.pooling === "class" ? "lens-warning-class" : "lens-warning")),
      ],
    ),
  ];
}

function lensChart(lens) {
  const K = app.entry.classes.length;
  const final = lens.at(-1).pooled;
  const shown = new Set(largest(final, 3));
  for (const { pooled } of lens) shown.add(argmax(pooled));
  const classes = [...shown].slice(0, 7);
  const series = classes.map((index) =>
    ({ name: className(index), colour: classColour(index, K), values: lens.map(({ pooled }) => pooled[index]) }),
  );
  return lineChart(
    {
      caption: t("lens-caption", { readout: readoutName() }),
      series,
      labels: layerLabels(),
      format: (value) => `${Math.round(100 * value)}%`,
      max: Math.min(1, Math.max(0.1, 1.15 * Math.max(...series.flatMap(({ values }) => values)))),
      marked: currentLayer(),
      onpick: (layer) => setState({ layer }),
    },
  );
}

// What each patch alone would predict, written on the image.
function lensGrid({ probabilities }) {
  const K = app.entry.classes.length;
  const [rows, columns] = app.entry.grid;
  const cells = Array.from({ length: numPatches() }, (_, patch) => {
    const row = rowOf(probabilities, app.entry.prefix + patch, K);
    const best = argmax(row);
    return { best, share: row[best] };
  });
  const side = Math.min(420, Math.max(260, document.documentElement.clientWidth - 60));
  const canvas = element(
    "canvas",
    { class: "picture", role: "img", "aria-label": cells.map(({ best, share }, patch) => `${patchName(patch)}: ${className(best)} ${percent(share)}`).join("; ") },
  );
  const context = sharpContext(canvas, side, (side * rows) / columns);
  const picture = gridPicture();
  context.imageSmoothingEnabled = false;
  context.globalAlpha = 0.45;
  context.drawImage(picture, 0, 0, side, (side * rows) / columns);
  context.globalAlpha = 1;
  const step = side / columns;
  cells.forEach(({ best, share }, patch) => {
    const [x, y] = [(patch % columns) * step, Math.floor(patch / columns) * step];
    context.fillStyle = classColour(best, K).replace(")", ` / ${0.2 + 0.5 * share})`);
    context.fillRect(x + 1, y + 1, step - 2, step - 2);
    if (step < (className(best).length <= 2 ? 20 : 34)) return;
    context.fillStyle = "#fff";
    context.strokeStyle = "rgba(20, 17, 26, 0.85)";
    context.lineWidth = 3;
    const fits = Math.max(1, Math.floor(step / 8.5));
    context.font = `600 ${className(best).length <= 2 ? Math.min(22, step / 2.4) : Math.max(9, Math.min(13, step / 4.2))}px system-ui`;
    context.textAlign = "center";
    const text = className(best).slice(0, fits);
    context.strokeText(text, x + step / 2, y + step / 2 + 5);
    context.fillText(text, x + step / 2, y + step / 2 + 5);
  });
  const votes = new Map();
  for (const { best } of cells) votes.set(best, (votes.get(best) ?? 0) + 1);
  const summary = [...votes.entries()].sort((a, b) => b[1] - a[1]).slice(0, 5).map(([index, count]) =>
    `${className(index)}: ${count}`,
  ).join(", ");
  const readout = element("span", { class: "readout" });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const patch = Math.floor(((event.clientY - box.top) / box.height) * rows) * columns + Math.floor(
      ((event.clientX - box.left) / box.width) * columns,
    );
    if (cells[patch]) readout.textContent = `${patchName(patch)}: ${className(cells[patch].best)} ${percent(cells[patch].share)}`;
  });
  return captioned(canvas, readout, element("br"), t("lens-grid-caption", { summary }));
}

// ── similarity and norms ─────────────────────────────────────────────────────────────────────────────────────

function similarityPanel() {
  const [token, D, T] = [currentToken(), app.entry.config.width, numTokens()];
  const layer = currentLayer();
  const scale = (value) => similarityColour(value);
  const maps = app.trace.tokens.map((tokens, index) => {
    const own = rowOf(tokens, token, D);
    const values = Float32Array.from({ length: numPatches() }, (_, patch) => cosine(own, rowOf(tokens, app.entry.prefix + patch, D)));
    const name = index === 0 ? t("encoder-input") : t("block-n", { n: index });
    return captioned(
      patchMap(values, app.entry.config.depth > 6 ? 110 : 140, { marked: token - app.entry.prefix, label: name, colour: scale }),
      name,
    );
  });
  const tokens = app.trace.tokens[layer];
  const values = new Float32Array(T * T);
  for (let i = 0; i < T; i++) for (let j = 0; j < T; j++) values[i * T + j] = cosine(rowOf(tokens, i, D), rowOf(tokens, j, D));
  return [
    heading(t("similarity-title", { token: tokenPhrase(token) })),
    lead("similarity-lead"),
    element("div", { class: "figures small-figures" }, maps),
    element("h3", {}, t("similarity-all")),
    layerChoice(),
    element(
      "div",
      { class: "figures" },
      matrixFigure(
        {
          values,
          rows: T,
          columns: T,
          caption: t("similarity-caption"),
          rowName: tokenName,
          columnName: tokenName,
          marked: { row: token },
          key: "similarity",
          size: 380,
          onpick: (row) => setState({ token: row }),
        },
      ),
    ),
  ];
}

// Orange at -1, white at 0, purple at 1.
function similarityColour(value) {
  const stops = [[127, 59, 8], [253, 184, 99], [247, 247, 247], [178, 171, 210], [45, 0, 75]];
  const position = ((Math.min(Math.max(value, -1), 1) + 1) / 2) * 4;
  const low = Math.min(Math.floor(position), 3);
  return stops[low].map((from, channel) => Math.round(from + (stops[low + 1][channel] - from) * (position - low)));
}

function normsPanel() {
  const [token, D] = [currentToken(), app.entry.config.width];
  const norms = app.trace.tokens.map((tokens) => Float32Array.from({ length: numTokens() }, (_, index) => norm(rowOf(tokens, index, D))));
  const mean = norms.map((row) => patchesOf(row).reduce((sum, value) => sum + value, 0) / numPatches());
  const accent = "var(--accent)";
  const added = (name) => app.trace.blocks.map((block) => norm(rowOf(block[name], token, D)));
  return [
    heading(t("norms-title")),
    lead("norms-lead"),
    lineChart({ caption: t("norms-caption"), labels: layerLabels(), series: [
      { name: tokenName(token), colour: accent, values: norms.map((row) => row[token]) },
      { name: t("mean-of-patches"), colour: "var(--warning)", values: mean, dashed: true },
    ] }),
    lineChart({ caption: t(
      "added-caption",
      { token: tokenPhrase(token) },
    ), labels: app.trace.blocks.map((_, block) => String(block + 1)), series: [
      { name: t("added-attention"), colour: "#7b3294", values: added("attentionAdded") },
      { name: t("added-mlp"), colour: "#c2621b", values: added("mlpAdded") },
    ] }),
    element("h3", {}, t("norms-maps")),
    element("div", { class: "figures small-figures" }, norms.map((row, layer) => {
      const name = layer === 0 ? t("encoder-input") : t("block-n", { n: layer });
      return captioned(
        patchMap(patchesOf(row), app.entry.config.depth > 6 ? 110 : 140, { label: name }),
        name,
        element("br"),
        `${formatNumber(Math.min(...patchesOf(row)))} … ${formatNumber(Math.max(...patchesOf(row)))}`,
      );
    })),
  ];
}
