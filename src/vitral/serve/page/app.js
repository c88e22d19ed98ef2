// Entry point of the page: image inputs, drawing, batches, model, language and theme.
import { listModels } from "/page/api.js";
import * as batch from "/page/batch.js";
import { DrawingPad } from "/page/drawing.js";
import { currentLanguage, t, TEXTS, translatePage } from "/page/i18n.js";
import { drawBackdrop } from "/page/image_view.js";
import { cancelRequest, classify, redraw, translateResult } from "/page/result.js";
import { $, clearError, showError, showSections, state, truncateList, withErrorsShown } from "/page/shared.js";

// --- image inputs ---------------------------------------------------------------------------------------------------

function openFiles(files) {
  const list = [...files];
  if (!list.length) return showError("no-image");
  if (list.length === 1) return classify(list[0]);
  return classifyBatch(list);
}

for (const id of ["file-input", "camera-input"])
  $(id).addEventListener("change", () => {
    if ($(id).files.length) openFiles($(id).files);
    $(id).value = "";
  });

addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length) return;
  event.preventDefault();
  // Browsers call every pasted screenshot image.png.
  openFiles(files.map((file) => (file.name === "image.png" ? new File([file], t("pasted-name"), { type: file.type }) : file)));
});

let dragDepth = 0;
addEventListener("dragenter", (event) => {
  event.preventDefault();
  dragDepth++;
  document.body.classList.add("dragging");
});
addEventListener("dragleave", () => {
  if (--dragDepth <= 0) document.body.classList.remove("dragging");
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  dragDepth = 0;
  document.body.classList.remove("dragging");
  openFiles(event.dataTransfer.files);
});

function showStart() {
  cancelRequest();
  Object.assign(state, { explanation: null, file: null, results: [] });
  clearError();
  showSections("start");
  $("file-input").focus({ preventScroll: true });
  scrollTo(0, 0);
}
$("again").addEventListener("click", showStart);
$("again-batch").addEventListener("click", showStart);

// --- drawing --------------------------------------------------------------------------------------------------------

const pad = new DrawingPad($("drawing-canvas"), () => classifyDrawing());

$("draw").addEventListener("click", () => {
  clearError();
  pad.light = state.model.mean[0] < 0.5;
  pad.clear();
  showSections("drawing");
  $("drawing-canvas").focus();
});

async function classifyDrawing() {
  if (!pad.strokes.length) return showSections("drawing");
  return classify(await pad.toFile(t("drawing-name"), $("centre").checked), { keepView: true });
}
$("centre").addEventListener("change", classifyDrawing);
$("undo").addEventListener("click", () => {
  pad.undo();
  classifyDrawing();
});
$("clear").addEventListener("click", () => {
  pad.clear();
  showSections("drawing");
});
$("drawing-done").addEventListener("click", showStart);

// --- batches --------------------------------------------------------------------------------------------------------

async function classifyBatch(files) {
  const requestNumber = ++state.requestNumber;
  const isCurrent = () => requestNumber === state.requestNumber;
  const setTitle = (done) => ($("batch-title").textContent = t("batch-title", { done, total: files.length }));
  state.results = [];
  showSections("batch");
  $("rows").replaceChildren();
  $("csv").disabled = true;
  $("progress").hidden = false;
  setTitle(0);
  const onGroup = (results) => {
    if (!isCurrent()) return;
    for (const result of results.slice(state.results.length)) $("rows").append(batch.tableRow(result, (file) => classify(file)));
    state.results = [...results];
    $("progress").value = results.length / files.length;
    setTitle(results.length);
    $("csv").disabled = false;
  };
  await withErrorsShown(async () => {
    await batch.predictAll(state.model, files, onGroup, isCurrent);
    if (isCurrent()) $("progress").hidden = true;
  });
}

$("csv").addEventListener("click", () => batch.download(batch.toCsv(state.results), "predictions.csv"));

function translateBatch() {
  const { results } = state;
  if (!results.length) return;
  $("rows").replaceChildren(...results.map((result) => batch.tableRow(result, (file) => classify(file))));
  $("batch-title").textContent = t("batch-title", { done: results.length, total: results.length });
}

// --- model, language and theme --------------------------------------------------------------------------------------

function selectModel(name) {
  state.model = state.models.find((model) => model.name === name);
  const { model } = state;
  $("about").textContent = t({ regression: "about-values", multilabel: "about-labels" }[model.task] ?? "about", {
    classes: model.classes.length,
    names: truncateList(model.classes, 4),
    patches: model.grid[0] * model.grid[1],
    side: model.patch_size,
    depth: model.depth,
    heads: model.heads,
  });
  $("draw").hidden = model.channels !== 1;
  $("explorer").hidden = !model.explorer;
  $("explorer").href = `/explorer/#?model=${encodeURIComponent(model.name)}`;
  $("confidence-title").dataset.i18n = model.task === "regression" ? "interval-title" : "confidence";
  $("confidence-title").textContent = t($("confidence-title").dataset.i18n);
}

$("model").addEventListener("change", () => {
  selectModel($("model").value);
  if (state.file && state.explanation) classify(state.file);
  else if (state.results.length) classifyBatch(state.results.map(({ file }) => file));
});

function setLanguage(language) {
  translatePage(language);
  localStorage.setItem("language", currentLanguage());
  const other = Object.keys(TEXTS).find((code) => code !== currentLanguage());
  $("language").textContent = { en: "English", ko: "한국어" }[other];
  $("language").lang = other;
  if (state.model) selectModel(state.model.name);
  translateResult();
  translateBatch();
}
$("language").addEventListener("click", () => setLanguage(currentLanguage() === "en" ? "ko" : "en"));

function redrawCanvases() {
  drawBackdrop($("backdrop"));
  redraw();
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  requestAnimationFrame(redrawCanvases);
}
$("theme").addEventListener("click", () => {
  const systemTheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = (document.documentElement.dataset.theme ?? systemTheme) === "dark" ? "light" : "dark";
  localStorage.setItem("theme", theme);
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());

let resizeFrame;
addEventListener("resize", () => {
  cancelAnimationFrame(resizeFrame);
  resizeFrame = requestAnimationFrame(redrawCanvases);
});

async function loadModels() {
  await withErrorsShown(async () => {
    state.models = await listModels();
    for (const { name } of state.models) $("model").append(new Option(name, name));
    $("model-field").hidden = state.models.length < 2;
    selectModel(state.models[0].name);
    document.body.dataset.ready = "yes";
  });
}

// Offer the camera on devices that are likely to have one: phones and tablets.
$("camera-field").hidden = !matchMedia("(pointer: coarse)").matches;
setLanguage(localStorage.getItem("language") ?? (navigator.language.startsWith("ko") ? "ko" : "en"));
setTheme(localStorage.getItem("theme"));
showSections("start");
loadModels();
