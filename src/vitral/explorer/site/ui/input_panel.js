// The visitor's image: examples, drawing, files, camera; the image with its patches; the prediction.
import { DrawingPad } from "../page/drawing.js";
import { ImageView } from "../page/image_view.js";
import { toBrightness } from "../page/attention.js";
import { app, argmax, attentionOf, className, currentBlock, currentHead, currentPatch, currentToken, hasClassToken, isChanged, largest, patchesOf, patchName, tokenPhrase, capital } from "./context.js";
import { byId, element, percent, signedPercent } from "./dom.js";
import { openDialog } from "./figure.js";
import { t } from "./i18n.js";
import { describeChanges, patchTool, usePatchTool } from "./lab.js";
import { gridPicture } from "./pictures.js";
import { decodeStrokes, encodeStrokes, setState, state } from "./state.js";
import { digitStrokes, SCENES } from "./stand_ins.js";

const PAD_SIDE = 280;

// ── sources ──────────────────────────────────────────────────────────────────────────────────────────────────

// Examples of the model: [{ name, label, canvas() }]. Drawings stand in where the site has no example images.
export function examplesOf(entry) {
  if (entry.examples.length) return entry.examples.map(({ name, label, src }) =>
    ({ name: String(name), label, source: () => loadImage(src) }),
  );
  if (isDigitModel(entry)) return Array.from(
    { length: 10 },
    (_, digit) => ({
      name: String(digit),
      label: entry.classes.indexOf(String(digit)),
      source: async () => drawingCanvas(digitStrokes(digit, PAD_SIDE)),
    }),
  );
  return Object.entries(SCENES).map(([name, paint]) =>
    ({ name, label: entry.classes.indexOf(name), source: async () => sceneCanvas(paint) }),
  );
}

const isDigitModel = (entry) => entry.preprocessing.channels === 1;

async function loadImage(src) {
  const image = new Image();
  image.src = src;
  await image.decode();
  return image;
}

function sceneCanvas(paint) {
  const canvas = element("canvas", { width: 320, height: 320 });
  paint(canvas.getContext("2d", { willReadFrequently: true }));
  return canvas;
}

// A drawing as the training images were made: scaled, and its centre of mass in the middle.
async function drawingCanvas(strokes, isCentred = true) {
  const canvas = element("canvas", { width: PAD_SIDE, height: PAD_SIDE });
  const pad = new DrawingPad(canvas, () => {});
  pad.light = app.entry.preprocessing.mean[0] < 0.5;
  pad.strokes = strokes;
  const file = await pad.toFile("drawing", isCentred);
  return createImageBitmap(file);
}

let photo = null; // the last image from a file or the camera; it is not in the address

export function setPhoto(source, name) {
  photo = { source, name };
  setState({ image: "photo" });
}

export const hasPhoto = () => photo !== null;

// The image that the state names: { source, name, label }
export async function currentSource() {
  if (state.image === "photo" && photo) return { source: photo.source, name: photo.name, label: null };
  if (state.image.startsWith("d")) {
    const strokes = decodeStrokes(state.image.slice(1), PAD_SIDE);
    if (strokes.length) return { source: await drawingCanvas(strokes), name: t("drawing-name"), label: null };
  }
  const examples = examplesOf(app.entry);
  const index = Math.min(Math.max(parseInt(state.image, 10) || 0, 0), examples.length - 1);
  const { name, label, source } = examples[index];
  return { source: await source(), name, label: label ?? null };
}

// ── the panel ────────────────────────────────────────────────────────────────────────────────────────────────

let view = null;
let shownPicture = null;

export function setUpInputPanel(onFile, onHover) {
  view = new ImageView(byId("image-canvas"), byId("patches"));
  const buttons = byId("patches");
  const patchAt = (event) => event.target.closest("button[data-patch]");
  buttons.addEventListener("click", (event) => {
    const button = patchAt(event);
    if (button) pickPatch(Number(button.dataset.patch));
  });
  buttons.addEventListener("pointerover", (event) => {
    const button = patchAt(event);
    if (button && event.pointerType === "mouse") onHover(app.entry.prefix + Number(button.dataset.patch));
  });
  buttons.addEventListener("pointerleave", () => onHover(null));
  buttons.addEventListener("keydown", moveFocus);
  byId("class-token").addEventListener("click", () => setState({ token: 0, key: -1 }));
  byId("file-input").addEventListener("change", () => openFile(byId("file-input"), onFile));
  byId("camera-input").addEventListener("change", () => openFile(byId("camera-input"), onFile));
  byId("draw").addEventListener("click", openDrawing);
  byId("camera").addEventListener("click", () => openCamera(onFile));
  const isTouch = matchMedia("(pointer: coarse)").matches;
  byId("camera-field").hidden = !isTouch;
  byId("camera").hidden = isTouch || !navigator.mediaDevices?.getUserMedia;
}

function openFile(input, onFile) {
  if (input.files.length) onFile(input.files[0]);
  input.value = "";
}

function pickPatch(patch) {
  if (state.view === "lab" && state.lab === "workbench") usePatchTool(patch);
  else setState({ token: app.entry.prefix + patch, key: -1 });
}

// The arrow keys move between patches.
function moveFocus(event) {
  const columns = app.entry.grid[1];
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  const button = event.target.closest("button[data-patch]");
  if (!step || !button) return;
  event.preventDefault();
  const next = byId("patches").children[Number(button.dataset.patch) + step];
  if (!next) return;
  button.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

export async function renderInputPanel() {
  renderExamples();
  byId("draw").hidden = !isDigitModel(app.entry);
  const picture = gridPicture(app.changedPicture ?? app.picture);
  if (shownPicture !== (app.changedPicture ?? app.picture) || view.grid?.join() !== app.entry.grid.join()) {
    shownPicture = app.changedPicture ?? app.picture;
    await view.load({ png: picture.toDataURL("image/png").split(",")[1], width: picture.width }, app.entry.grid, nameOfPatch);
  }
  view.labelPatches(nameOfPatch);
  byId("class-token").hidden = !hasClassToken() || isBeforeClassToken();
  markPatches();
  drawImage();
  renderPrediction();
}

// The first steps of the tour are about patches; the class token appears later.
function isBeforeClassToken() {
  if (state.view !== "tour") return false;
  const keys = app.entry.steps.map(({ key }) => key);
  return keys.indexOf(state.step) < keys.indexOf("class_token");
}

const nameOfPatch = (row, column) => patchName((row - 1) * app.entry.grid[1] + column - 1);

function markPatches() {
  const inBench = state.view === "lab" && state.lab === "workbench";
  const masked = new Set(state.changes.maskPatches ?? []);
  const swapped = new Set((state.changes.swapPatches ?? []).flat());
  const source = isBeforeClassToken() ? currentPatch() : currentToken() - app.entry.prefix;
  [...byId("patches").children].forEach((button, patch) => {
    const isSource = !inBench && patch === source;
    button.classList.toggle("masked", masked.has(patch));
    button.classList.toggle("swapped", swapped.has(patch));
    button.classList.toggle("first-of-pair", inBench && patchTool.first === patch);
    button.setAttribute("aria-pressed", String(inBench ? masked.has(patch) || swapped.has(patch) || patchTool.first === patch : isSource));
  });
  byId("class-token").setAttribute("aria-pressed", String(currentToken() === 0 && hasClassToken()));
}

const ATTENTION_STEPS = ["attention", "residual", "mlp", "queries"];
const showsAttention = () => (state.view === "tour" ? ATTENTION_STEPS.includes(state.step) : state.view === "explore" && state.panel === "attention");

// The image; lit by the attention of a token where the view is about attention.
export function drawImage(hovered = null) {
  const token = hovered ?? currentToken();
  const caption = byId("image-caption");
  if (!showsAttention()) {
    view.draw();
    caption.textContent = state.view === "lab" && state.lab === "workbench" ? t(
      patchTool.name === "mask" ? "mask-hint" : "swap-hint",
    ) : t("image-hint");
    return;
  }
  const useMean = state.view === "explore" && state.zoom === "model";
  const [block, head] = [useMean ? app.entry.config.depth - 1 : currentBlock(), useMean ? null : currentHead()];
  const weights = attentionOf(app.trace, block, head, token);
  view.draw({ brightness: toBrightness(patchesOf(weights)) });
  const most = argmax(weights);
  caption.textContent = t(
    "looks-most",
    {
      token: capital(tokenPhrase(token)),
      block: block + 1,
      head: head === null ? t("head-mean") : t("head-small", { n: head + 1 }),
      to: tokenPhrase(most),
      share: percent(weights[most]),
    },
  );
}

function renderExamples() {
  const examples = examplesOf(app.entry);
  const holder = byId("examples");
  const key = `${app.entry.name}:${examples.length}`;
  if (holder.dataset.key !== key) {
    holder.dataset.key = key;
    holder.replaceChildren(...examples.map(({ name, source }, index) => {
      const button = element(
        "button",
        {
          type: "button",
          class: "example",
          "data-focus": `example:${index}`,
          "data-name": name,
          onclick: () => setState({ image: String(index) }),
        },
      );
      const canvas = element("canvas", { width: 56, height: 56, "aria-hidden": "true" });
      source().then((image) => canvas.getContext("2d").drawImage(image, 0, 0, 56, 56));
      button.append(canvas);
      return button;
    }));
  }
  [...holder.children].forEach((button, index) => {
    button.setAttribute("aria-label", t("example", { name: button.dataset.name }));
    button.setAttribute("aria-pressed", String(state.image === String(index)));
  });
}

function renderPrediction() {
  const { trace, base } = app;
  const best = argmax(trace.probabilities);
  const shown = largest(trace.probabilities, Math.min(3, trace.probabilities.length));
  const before = argmax(base.probabilities);
  if (isChanged() && !shown.includes(before)) shown.push(before);
  byId("prediction").replaceChildren(...shown.map((index) =>
    element("li", { class: index === best ? "first" : "", style: `--share: ${trace.probabilities[index]}; --before: ${isChanged() ? base.probabilities[index] : 0}` },
      element("span", { class: "label" }, className(index)),
      element(
        "span",
        { class: "share" },
        percent(trace.probabilities[index]),
        isChanged() && element("span", { class: "delta" }, ` ${signedPercent(trace.probabilities[index] - base.probabilities[index])}`),
      ))));
  byId("prediction-note").textContent = predictionNote(best);
  const changes = describeChanges();
  byId("changed-note").hidden = !changes.length;
  byId("changed-list").textContent = changes.join("; ");
  byId("announcement").textContent = t("announce", { label: className(best), share: percent(trace.probabilities[best]) });
}

function predictionNote(best) {
  const threshold = app.entry.ood_threshold;
  if (threshold !== null && threshold !== undefined && app.trace.score < threshold) return t("unknown");
  if (app.label === null || app.label < 0) return "";
  return best === app.label ? t("correct", { label: className(app.label) }) : t("incorrect", { label: className(app.label) });
}

// ── dialogs ──────────────────────────────────────────────────────────────────────────────────────────────────

function openDrawing() {
  const canvas = element(
    "canvas",
    { width: PAD_SIDE, height: PAD_SIDE, id: "drawing-canvas", tabindex: "0", role: "img", "aria-label": t("drawing-area") },
  );
  const strokesNow = () => (state.image.startsWith("d") ? decodeStrokes(state.image.slice(1), PAD_SIDE) : []);
  const apply = () => setState({ image: pad.strokes.length ? `d${encodeStrokes(pad.strokes, PAD_SIDE)}` : "0" });
  const pad = new DrawingPad(canvas, apply);
  pad.light = app.entry.preprocessing.mean[0] < 0.5;
  pad.strokes = strokesNow();
  pad.paint();
  const result = element("p", { class: "drawing-result", "aria-live": "polite" });
  const dialog = openDialog(t("draw-title"), element("p", { class: "small" }, t("draw-lead")), canvas, result,
    element("div", { class: "actions" },
      element("button", { type: "button", onclick: () => { pad.undo(); apply(); } }, t("undo")),
      element("button", { type: "button", onclick: () => { pad.clear(); apply(); } }, t("clear")),
      element("button", { type: "button", class: "primary", onclick: () => dialog.close() }, t("done"))));
  const watch = new MutationObserver(() => (result.textContent = pad.strokes.length ? byId("announcement").textContent : ""));
  watch.observe(byId("announcement"), { childList: true, characterData: true, subtree: true });
  dialog.addEventListener("close", () => watch.disconnect());
}

async function openCamera(onFile) {
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch {
    byId("error").hidden = false;
    byId("error").textContent = t("no-camera");
    return;
  }
  const video = element("video", { autoplay: true, playsinline: true, muted: true, class: "camera" });
  video.srcObject = stream;
  const take = () => {
    const canvas = element("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob((blob) => onFile(new File([blob], t("camera-name"))));
    dialog.close();
  };
  const dialog = openDialog(
    t("camera"),
    video,
    element("div", { class: "actions" }, element("button", { type: "button", class: "primary", onclick: take }, t("take-photo"))),
  );
  dialog.addEventListener("close", () => stream.getTracks().forEach((track) => track.stop()));
}
