// Entry point: loads the model, runs it on the image whenever something changes, and draws the view.
import { loadModel } from "../engine/engine.js";
import { app, currentToken } from "./context.js";
import { byId, choiceButtons, element } from "./dom.js";
import { renderExplore } from "./explore.js";
import { currentLanguage, otherLanguage, setLanguage, t } from "./i18n.js";
import { currentSource, drawImage, examplesOf, hasPhoto, renderInputPanel, setPhoto, setUpInputPanel } from "./input_panel.js";
import { renderLab } from "./lab.js";
import { renderMap, zoomBy } from "./map.js";
import { canvasOfInput, canvasOfPixels } from "./pictures.js";
import { loadState, onStateChange, setState, state, VIEWS } from "./state.js";
import { renderTour, stepIndex, tourSteps } from "./tour.js";
import { hasHistory, renderTraining, stopPlaying } from "./training.js";

app.site = globalThis.VITRAL_SITE;
app.history = new Map(); // probabilities of the current image by index of the weights

// ── running the model ────────────────────────────────────────────────────────────────────────────────────────

const loaded = { model: "", weights: -1, image: "", changes: "{}" };
let isRunning = false;
let isStale = false;

const wantedEntry = () => app.site.models.find(({ name }) => name === state.model) ?? app.site.models[0];
const wantedWeights = (entry) => (state.epoch >= 0 && state.epoch < entry.weights.length ? state.epoch : entry.weights.length - 1);

// Brings model, image and traces up to date with the state, then draws. Changes during a run start another run.
async function update() {
  if (isRunning) {
    isStale = true;
    return;
  }
  isRunning = true;
  app.isBusy = true;
  const slow = setTimeout(() => document.body.classList.add("busy"), 150);
  try {
    do {
      isStale = false;
      await refresh();
      await render();
    } while (isStale);
    byId("error").hidden = true;
    document.body.dataset.ready = "yes";
  } catch (error) {
    console.error(error);
    showError(t("failed-more", { message: error.message }));
  } finally {
    clearTimeout(slow);
    isRunning = false;
    app.isBusy = false;
    document.body.classList.remove("busy");
  }
  if (isStale) update();
  else if (state.view === "training") fillHistory();
}

async function refresh() {
  const entry = wantedEntry();
  const weights = wantedWeights(entry);
  const isOtherModel = loaded.model !== entry.name;
  if (isOtherModel || loaded.weights !== weights) {
    const previous = app.model;
    setStatus(t("loading", { name: entry.name }));
    const model = await loadModel(entry, weights);
    setStatus("");
    previous?.close();
    Object.assign(app, { entry, model, weightsIndex: weights, base: null, trace: null });
    Object.assign(loaded, { model: entry.name, weights });
  }
  if (isOtherModel || loaded.image !== imageKey()) await readImage();
  if (app.base === null) {
    app.base = app.trace = await app.model.run(app.input);
    loaded.changes = "{}";
    app.history.set(app.weightsIndex, app.base.probabilities);
  }
  await applyChanges();
}

const imageKey = () => `${state.image}:${state.image === "photo" ? photoNumber : ""}`;
let photoNumber = 0;

async function readImage() {
  const key = imageKey();
  const { source, name, label } = await currentSource();
  const { pixels, input } = app.model.preprocess(source);
  const { channels, image_size: [height, width] } = app.entry.preprocessing;
  Object.assign(
    app,
    { input, picture: canvasOfPixels(pixels, channels, height, width), imageName: name, label, base: null, changedPicture: null },
  );
  app.history.clear();
  loaded.image = key;
}

async function applyChanges() {
  const key = JSON.stringify(state.changes);
  if (loaded.changes === key) return;
  if (key === "{}") Object.assign(app, { trace: app.base, changedPicture: null });
  else {
    try {
      app.trace = await app.model.run(app.input, state.changes, app.base);
    } catch (error) {
      console.warn(error);
      state.changes = {};
      Object.assign(app, { trace: app.base, changedPicture: null });
      showError(t("bad-changes"));
      return;
    }
    const changesPixels = state.changes.maskPatches || state.changes.swapPatches;
    app.changedPicture = changesPixels ? canvasOfInput(app.trace.input) : null;
  }
  loaded.changes = key;
}

// The examples as model inputs, for experiments.
let inputs = { name: "", list: [] };
app.exampleInputs = async (count) => {
  if (inputs.name !== app.entry.name) inputs = { name: app.entry.name, list: [] };
  const examples = examplesOf(app.entry);
  for (let index = inputs.list.length; index < Math.min(count + 1, examples.length); index++) inputs.list.push(
    app.model.preprocess(await examples[index].source()).input,
  );
  return inputs.list.filter((_, index) => String(index) !== state.image).slice(0, count);
};

// Predictions of the other epochs for the timeline, one after another.
let isFilling = false;
async function fillHistory() {
  if (isFilling || !hasHistory(app.entry)) return;
  isFilling = true;
  const { entry, input } = app;
  try {
    for (let index = 0; index < entry.weights.length; index++) {
      if (app.history.has(index) || app.input !== input || app.entry !== entry || state.view !== "training") continue;
      const model = await loadModel(entry, index);
      const { probabilities } = await model.run(input);
      model.close();
      if (app.input === input) app.history.set(index, probabilities);
      if (state.view === "training" && !isRunning) await render();
    }
  } finally {
    isFilling = false;
  }
}

// ── drawing the page ─────────────────────────────────────────────────────────────────────────────────────────

async function render() {
  const focus = document.activeElement?.dataset?.focus;
  renderHeader();
  byId("map").replaceChildren(...renderMap().filter(Boolean));
  const content = { tour: renderTour, explore: renderExplore, lab: renderLab, training: renderTraining }[state.view]();
  byId("view").replaceChildren(...content.flat(3).filter(Boolean));
  if (focus) document.querySelector(`[data-focus="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
  showPlaceOnMap();
  await renderInputPanel();
}

// On narrow screens the map scrolls sideways; where the visitor is stays visible.
function showPlaceOnMap() {
  const place = byId("map").querySelector('[aria-current="location"]');
  const row = place?.closest(".map-row");
  if (row) row.scrollLeft = place.offsetLeft - row.offsetLeft - row.clientWidth / 2 + place.offsetWidth / 2;
}

function renderHeader() {
  const views = VIEWS.filter((view) => view !== "training" || hasHistory(app.entry));
  byId("views").replaceChildren(
    ...choiceButtons(
      t("views"),
      views.map((value) => ({ value, label: t(`view-${value}`) })),
      state.view,
      (view) => setState({ view }),
      "view",
    ).childNodes,
  );
  byId("about").textContent = t(
    "about",
    {
      K: app.entry.classes.length,
      N: app.entry.numbers.N,
      P: app.entry.numbers.P,
      L: app.entry.numbers.L,
      h: app.entry.numbers.h,
      parameters: compact(app.entry.parameters ?? 0),
    },
  );
  byId("model-field").hidden = app.site.models.length < 2;
  byId("model").value = app.entry.name;
  const hasEarlier = hasHistory(app.entry) && app.weightsIndex < app.entry.weights.length - 1;
  byId("epoch-note").hidden = !hasEarlier;
  if (hasEarlier) byId("epoch-note-text").textContent = t("epoch-note", { n: app.entry.weights[app.weightsIndex].epoch });
}

const compact = (count) => (count >= 1e6 ? `${(count / 1e6).toFixed(1)} M` : `${Math.round(count / 1000)} k`);

function setStatus(text) {
  byId("status").textContent = text;
}

function showError(text) {
  byId("error").textContent = text;
  byId("error").hidden = false;
}

// ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

onStateChange((before) => {
  const isNewPlace = ["view", "step", "panel", "zoom", "lab", "experiment"].some((name) => before[name] !== state[name]);
  if (state.view !== "training") stopPlaying();
  update().then(() => isNewPlace && goToTop(before));
});

// After a change of place, reading starts at its heading, unless a control that still exists has the focus.
function goToTop(before) {
  const top = byId("map-top").getBoundingClientRect().top;
  const isPhone = matchMedia("(max-width: 60rem)").matches;
  if (before.view !== state.view && !isPhone) scrollTo({ top: 0 });
  else if (top < 0 || isPhone) scrollTo({ top: top + scrollY });
  if (document.activeElement === document.body) byId("step-title")?.focus({ preventScroll: true });
}

function restore() {
  const before = loadState();
  if (state.lang && state.lang !== before.lang) applyLanguage(state.lang);
  if (state.image === "photo" && !hasPhoto()) state.image = "0";
  update();
}
addEventListener("popstate", restore);
addEventListener("hashchange", restore);

async function openFile(file) {
  try {
    const source = await createImageBitmap(file);
    photoNumber++;
    setPhoto(source, file.name);
  } catch {
    showError(t("bad-image", { name: file.name }));
  }
}

addEventListener("paste", (event) => {
  const [file] = event.clipboardData.files;
  if (file) openFile(file);
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (file) openFile(file);
});

// Keys: arrows walk through the tour, + and - zoom.
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  const isField = event.target.closest?.("input, select, textarea, canvas, #patches, .scroll, pre");
  if (isField) return;
  if (event.key === "+" || event.key === "=") zoomBy(1);
  else if (event.key === "-") zoomBy(-1);
  else if (state.view === "tour" && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
    const next = tourSteps()[stepIndex() + (event.key === "ArrowRight" ? 1 : -1)];
    if (next) setState({ step: next.key });
  }
});

function showHover(token) {
  if (!app.trace) return;
  drawImage(token);
  const overview = byId("overview-holder")?.firstChild;
  overview?.redraw?.(token ?? currentToken());
}

function applyLanguage(language) {
  setLanguage(language);
  const other = otherLanguage();
  byId("language").textContent = { en: "English", ko: "한국어" }[other];
  byId("language").lang = other;
}

function systemLanguage() {
  return remembered("language") ?? (navigator.language.startsWith("ko") ? "ko" : "en");
}

// Storage may be forbidden, for example on file:// pages or in embedded frames.
function remembered(name) {
  try {
    return localStorage.getItem(`explorer-${name}`);
  } catch {
    return null;
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`explorer-${name}`, value);
  } catch {
    // The choice holds until the page is closed.
  }
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

async function share() {
  try {
    await navigator.clipboard.writeText(location.href);
    setStatus(t("link-copied"));
  } catch {
    setStatus(location.href);
  }
  setTimeout(() => setStatus(""), 4000);
}

let resizeFrame;
let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === lastWidth || !app.trace) return; // the address bar of phones changes only the height
  lastWidth = innerWidth;
  cancelAnimationFrame(resizeFrame);
  resizeFrame = requestAnimationFrame(() => !isRunning && render());
});

function start() {
  loadState();
  if (state.image === "photo") state.image = "0";
  state.lang ||= systemLanguage();
  applyLanguage(state.lang);
  setTheme(remembered("theme"));
  for (const { name } of app.site.models) byId("model").append(element("option", { value: name }, name));
  byId("model").addEventListener(
    "change",
    () => setState(
      {
        model: byId("model").value,
        epoch: -1,
        image: "0",
        block: 0,
        head: 0,
        token: -1,
        key: -1,
        layer: -1,
        step: "image",
        zoom: "model",
        changes: {},
        experiment: "",
      },
    ),
  );
  byId("language").addEventListener("click", () => {
    applyLanguage(otherLanguage());
    remember("language", currentLanguage());
    setState({ lang: currentLanguage() });
  });
  byId("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const theme = (document.documentElement.dataset.theme ?? system) === "dark" ? "light" : "dark";
    remember("theme", theme);
    setTheme(theme);
  });
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("step-title")?.focus();
  });
  byId("share").addEventListener("click", share);
  byId("undo-changes").addEventListener("click", () => setState({ changes: {} }));
  byId("last-epoch").addEventListener("click", () => setState({ epoch: -1 }));
  setUpInputPanel(openFile, showHover);
  update();
}

start();
