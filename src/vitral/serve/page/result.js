// The result for one image: labels, heatmaps, and attention by patch, block and head.
import { explain } from "/page/api.js";
import { argmax, attentionRow, toBrightness } from "/page/attention.js";
import { borderBrightness, invertImage } from "/page/drawing.js";
import { formatValue, percent, t } from "/page/i18n.js";
import { AttentionOverview, ImageView } from "/page/image_view.js";
import { $, intervalText, setBusy, showSections, state, truncateList, withErrorsShown } from "/page/shared.js";

const imageView = new ImageView($("image-canvas"), $("patches"));
const overview = new AttentionOverview($("overview"));
let controller = new AbortController();

const patchLabel = (row, column) => t("patch", { row, column });
const explainsClass = () => state.view === "relevance" || state.view === "gradcam";
const numPrefixRows = () => (state.explanation.attention.has_class_token ? 1 : 0);

export function cancelRequest() {
  controller.abort();
  state.requestNumber++;
  setBusy(false);
}

// keepView: the image is a new version of the current drawing, so the view and the selected patch stay.
export async function classify(file, { keepView = false } = {}) {
  await withErrorsShown(async () => {
    cancelRequest();
    controller = new AbortController();
    const requestNumber = state.requestNumber;
    setBusy(true);
    const methods = state.model.explain_methods.includes("rollout") ? ["rollout"] : [];
    const explanation = await explain(state.model.name, file, { methods, attention: true }, controller.signal);
    if (requestNumber !== state.requestNumber) return;
    setBusy(false);
    Object.assign(state, { file, explanation });
    if (!keepView) Object.assign(state, { view: "patches", row: null, pinnedRow: null });
    showSections(...($("drawing").hidden || !keepView ? ["result"] : ["drawing", "result"]));
    await imageView.load(explanation.image, explanation.grid, patchLabel);
    updateSliders();
    showPrediction();
    if (state.view !== "patches") await selectView(state.view);
    else redraw();
    if (!keepView) scrollTo(0, 0);
    await offerInversion(file);
  }, file.name);
}

function updateSliders() {
  const { attention } = state.explanation;
  const depth = attention.layers.length;
  $("block").max = depth;
  // By default a block at 60% of the depth, where attention is most informative.
  if (state.block >= depth || !state.blockChosen) state.block = Math.round(0.6 * depth) - 1;
  $("block").value = state.block + 1;
  $("head").max = attention.heads;
  $("head").disabled = attention.heads === 1;
  if (state.head > attention.heads) state.head = 0;
  $("head").value = state.head;
  $("from-class-token").hidden = !attention.has_class_token;
  $("heads-averaged").hidden = !attention.heads_averaged;
}

function showPrediction() {
  const { explanation, file } = state;
  $("file-name").textContent = file.name;
  const ood = Boolean(explanation.ood);
  $("unknown").hidden = !ood;
  $("prediction-title").hidden = ood;
  $("labels").classList.toggle("unknown-labels", ood);
  $("labels").replaceChildren(...(explanation.values?.map(valueItem) ?? explanation.labels.map(labelItem)));
  $("calibration").textContent = calibrationText(explanation);
  showPredictionSet(explanation);
  showViews();
}

// A set of several classes; a set of one class only repeats the prediction.
function showPredictionSet({ ood, prediction_set: set }) {
  $("prediction-set").hidden = ood || !set || set.labels.length < 2;
  if ($("prediction-set").hidden) return;
  const coverage = `${Number((100 * set.coverage).toPrecision(4))}%`;
  $("prediction-set-labels").textContent = t("prediction-set", { labels: truncateList(set.labels) });
  $("prediction-set-coverage").textContent = t("prediction-set-more", { coverage });
}

function calibrationText({ values }) {
  if (state.model.task === "multilabel") return t("multilabel-more");
  if (!values) return t(state.model.calibrated ? "calibrated" : "uncalibrated");
  const { coverage } = values[0];
  return coverage ? t("interval-more", { coverage: `${Number((100 * coverage).toPrecision(4))}%` }) : t("no-interval");
}

// One target of a regression: its value, and its prediction interval.
function valueItem(value) {
  const number = formatValue(value.value, value);
  const interval = intervalText(value);
  return evidenceItem(value.name, `${value.name} ${number}`, interval ? `${number} (${interval})` : number, 0);
}

function labelItem({ name, probability, threshold, present }) {
  const share = percent(probability);
  if (threshold === undefined) return evidenceItem(name, name, share, probability);
  const item = evidenceItem(name, name, t("label-threshold", { share, threshold: percent(threshold) }), probability);
  item.firstElementChild.classList.toggle("absent", !present);
  return item;
}

// A button that shows the evidence for a class or target. bar: filled share of its background.
function evidenceItem(name, title, shareText, bar) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  button.type = "button";
  button.setAttribute("aria-label", t("show-evidence", { label: title, share: shareText }));
  button.setAttribute("aria-pressed", String(explainsClass() && name === state.explanation.target));
  button.style.setProperty("--share", bar);
  const [label, share] = ["span", "span"].map((tag) => button.appendChild(document.createElement(tag)));
  label.className = "label";
  label.textContent = name;
  share.className = "share";
  share.textContent = shareText;
  button.addEventListener("click", () => showEvidence(name));
  item.append(button);
  return item;
}

function showViews() {
  const views = ["patches", ...state.model.explain_methods];
  $("views").replaceChildren(
    ...views.map((view) => {
      const label = document.createElement("label");
      const radio = document.createElement("input");
      Object.assign(radio, { type: "radio", name: "view", value: view, checked: view === state.view });
      radio.addEventListener("change", () => withErrorsShown(() => selectView(view)));
      const text = document.createElement("span");
      text.textContent = t(`view-${view}`);
      label.append(radio, text);
      return label;
    }),
  );
}

async function showEvidence(className) {
  await withErrorsShown(async () => {
    const { explanation } = state;
    if (className !== explanation.target) {
      explanation.target = className;
      for (const method of ["relevance", "gradcam"]) delete explanation.heatmaps[method];
    }
    await selectView(explainsClass() ? state.view : "relevance");
    labelButtons().find((button) => labelOf(button) === className)?.focus();
  });
}

const labelButtons = () => [...$("labels").querySelectorAll("button")];
const labelOf = (button) => button.querySelector(".label").textContent;

async function selectView(view) {
  const { explanation } = state;
  state.view = view;
  if (view !== "patches" && !explanation.heatmaps[view]) {
    setBusy(true);
    const { target } = explanation;
    const response = await explain(state.model.name, state.file, { methods: [view], target, attention: false });
    setBusy(false);
    if (explanation.target !== target) return;
    explanation.heatmaps[view] = response.heatmaps[view];
  }
  for (const radio of $("views").querySelectorAll("input")) radio.checked = radio.value === view;
  for (const button of labelButtons()) {
    button.setAttribute("aria-pressed", String(explainsClass() && labelOf(button) === explanation.target));
  }
  redraw();
}

export function redraw() {
  const { explanation, view } = state;
  if (!explanation) return;
  const showsPatches = view === "patches";
  const { attention } = explanation;
  $("attention").hidden = !showsPatches;
  $("block-value").textContent = attention.layers[state.block];
  $("head-value").textContent = attention.heads_averaged || state.head === 0 ? t("head-mean") : state.head;
  $("block").setAttribute("aria-valuetext", attention.layers[state.block]);
  $("head").setAttribute("aria-valuetext", $("head-value").textContent);
  $("from-class-token").setAttribute("aria-pressed", String(attention.has_class_token && state.pinnedRow === 0));
  for (const button of $("patches").children) {
    const row = Number(button.dataset.patch) + numPrefixRows();
    button.classList.toggle("source", showsPatches && row === state.row);
    button.setAttribute("aria-pressed", String(row === state.pinnedRow));
  }
  if (!showsPatches) imageView.draw({ heatmap: explanation.heatmaps[view] });
  else if (state.row === null) imageView.draw();
  else imageView.draw({ brightness: toBrightness(attentionRow(attention, state.block, state.head, state.row).weights) });
  if (showsPatches) drawOverview();
  updateCaption();
}

function drawOverview() {
  const { attention, grid } = state.explanation;
  const row = state.row ?? 0;
  const brightness = attention.layers.map((_, block) =>
    Array.from({ length: attention.heads }, (_, head) => toBrightness(attentionRow(attention, block, head + 1, row).weights)),
  );
  overview.draw(brightness, grid, { block: state.block, head: attention.heads_averaged ? 1 : state.head });
}

let announceTimer;

// The caption is announced to screen readers with a delay, so that moving quickly over patches is not read out.
function updateCaption() {
  const { explanation, view } = state;
  const describesRow = view === "patches" && state.row !== null;
  const text = describesRow ? attentionCaption() : t(`hint-${view}`, { target: explanation.target });
  $("caption").textContent = text;
  clearTimeout(announceTimer);
  announceTimer = setTimeout(() => ($("announcement").textContent = describesRow ? text : ""), 400);
}

function attentionCaption() {
  const { attention, grid } = state.explanation;
  const { weights, nonPatch } = attentionRow(attention, state.block, state.head, state.row);
  const position = (patch) => ({ row: Math.floor(patch / grid[1]) + 1, column: (patch % grid[1]) + 1 });
  const best = argmax(weights);
  const sourcePatch = state.row - numPrefixRows();
  const caption = t("attends-most", {
    from: sourcePatch < 0 ? t("class-token") : t("patch", position(sourcePatch)),
    block: attention.layers[state.block],
    head: state.head === 0 || attention.heads_averaged ? t("head-mean") : t("head-one", { head: state.head }),
    ...position(best),
    share: percent(weights[best]),
  });
  return nonPatch > 0.0005 ? caption + t("non-patch", { share: percent(nonPatch) }) : caption;
}

// Offer to invert a dark-on-light image for a model trained on light-on-dark images, and the other way round.
async function offerInversion(file) {
  const { model } = state;
  $("inversion").hidden = true;
  if (model.channels !== 1) return;
  const mean = model.mean[0];
  const border = await borderBrightness(file);
  $("inversion").hidden = !((mean < 0.45 && border > 0.6) || (mean > 0.55 && border < 0.4));
}

export function translateResult() {
  if (!state.explanation) return;
  imageView.labelPatches(patchLabel);
  showPrediction();
  redraw();
}

// --- events --------------------------------------------------------------------------------------------------------

const patchButton = (event) => event.target.closest?.("[data-patch]");
const rowOf = (button) => Number(button.dataset.patch) + numPrefixRows();

function showRow(row) {
  if (state.view !== "patches" || !state.explanation) return;
  state.row = row;
  redraw();
}

$("patches").addEventListener("pointerover", (event) => {
  const button = patchButton(event);
  if (button && event.pointerType === "mouse") showRow(rowOf(button));
});
$("patches").addEventListener("pointerleave", () => showRow(state.pinnedRow));
$("patches").addEventListener("focusin", (event) => {
  const button = patchButton(event);
  if (!button) return;
  for (const other of $("patches").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  button.tabIndex = 0;
  showRow(rowOf(button));
});
$("patches").addEventListener("focusout", () => showRow(state.pinnedRow));
$("patches").addEventListener("click", (event) => {
  const button = patchButton(event);
  if (!button) return;
  const row = rowOf(button);
  state.pinnedRow = state.pinnedRow === row ? null : row;
  if (state.view !== "patches") withErrorsShown(() => selectView("patches"));
  showRow(row);
});
$("patches").addEventListener("keydown", (event) => {
  const button = patchButton(event);
  if (!button) return;
  if (event.key === "Escape") {
    state.pinnedRow = null;
    showRow(null);
  }
  const [rows, columns] = state.explanation.grid;
  const patch = Number(button.dataset.patch);
  const [y, x] = [Math.floor(patch / columns), patch % columns];
  const targets = {
    ArrowUp: [y - 1, x], ArrowDown: [y + 1, x], ArrowLeft: [y, x - 1], ArrowRight: [y, x + 1],
    Home: [y, 0], End: [y, columns - 1], PageUp: [0, x], PageDown: [rows - 1, x],
  };
  if (!(event.key in targets)) return;
  event.preventDefault();
  const [row, column] = targets[event.key];
  if (row < 0 || column < 0 || row >= rows || column >= columns) return;
  $("patches").children[row * columns + column].focus();
});

$("from-class-token").addEventListener("click", () => {
  state.pinnedRow = state.pinnedRow === 0 ? null : 0;
  showRow(state.pinnedRow);
});

// Moving a slider before a patch is selected shows the first row: the class token, or the first patch.
function onSelectionChange() {
  state.row ??= state.pinnedRow ?? 0;
  state.pinnedRow ??= state.row;
  redraw();
}
$("block").addEventListener("input", () => {
  Object.assign(state, { block: Number($("block").value) - 1, blockChosen: true });
  onSelectionChange();
});
$("head").addEventListener("input", () => {
  state.head = Number($("head").value);
  onSelectionChange();
});
$("overview").addEventListener("click", (event) => {
  const [block, head] = overview.cellAt(event.offsetX, event.offsetY);
  Object.assign(state, { block, blockChosen: true, head: state.explanation.attention.heads_averaged ? 0 : head + 1 });
  $("block").value = block + 1;
  $("head").value = state.head;
  onSelectionChange();
});
$("invert").addEventListener("click", () => withErrorsShown(async () => classify(await invertImage(state.file))));
