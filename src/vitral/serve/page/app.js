// The page: an image comes in, an answer and a window into the model come out.
import { explain, models, Trouble, useKey } from "/page/api.js";
import { brightest, light, row } from "/page/attention.js";
import * as batch from "/page/batch.js";
import { inverted, rim, Sheet } from "/page/draw.js";
import { Glass, panes, Whole } from "/page/glass.js";
import { percent, say, speak, spoken, WORDS } from "/page/words.js";

const $ = (id) => document.getElementById(id);
const SECTIONS = ["ask", "drawing", "seen", "many"];

const state = {
  models: [],
  model: null, // the one that is asked
  file: null, // what was asked about
  answer: null,
  view: "patches",
  from: null, // the row of the attention that is shown; null: none
  held: null, // the row that stays when the pointer leaves
  layer: 0,
  head: 0, // 0: the mean
  found: [], // answers for many files
  asked: 0, // counts questions: an answer to an old one is passed over
};

const glass = new Glass($("pane"), $("patches"));
const whole = new Whole($("whole"));
const sheet = new Sheet($("ink"), () => askAboutDrawing());

// --- what is on the page -------------------------------------------------------------------------------------------

function show(...sections) {
  for (const id of SECTIONS) $(id).hidden = !sections.includes(id);
  document.body.classList.toggle("started", !sections.includes("ask"));
  document.body.classList.toggle("drawing", sections.includes("drawing"));
  if (sections.includes("ask")) panes($("panes"));
}

function trouble(kind, values = {}, detail = "") {
  const box = $("trouble");
  box.hidden = !kind;
  box.textContent = kind ? say(kind, values) : "";
  if (detail && spoken() === "en") box.append(` ${detail[0].toUpperCase()}${detail.slice(1)}.`);
  if (kind) box.scrollIntoView({ block: "nearest" });
}

async function guarded(work, name = "") {
  try {
    trouble("");
    await work();
  } catch (error) {
    if (error.name === "AbortError") return;
    document.body.classList.remove("waiting");
    if (!(error instanceof Trouble)) {
      console.error(error);
      trouble("failed");
    } else if (error.kind === "key") askForKey(() => guarded(work, name));
    else trouble(error.kind, { name }, error.kind === "failed" ? error.message : "");
  }
}

function askForKey(then) {
  const dialog = $("key-dialog");
  dialog.addEventListener("close", () => {
    useKey($("key").value.trim());
    then();
  }, { once: true });
  if (!dialog.open) dialog.showModal();
}

// --- one image ------------------------------------------------------------------------------------------------------

let controller = new AbortController();

async function askAbout(file, { keep = false } = {}) {
  await guarded(async () => {
    controller.abort();
    controller = new AbortController();
    const question = ++state.asked;
    document.body.classList.add("waiting");
    const methods = state.model.methods.includes("rollout") ? ["rollout"] : [];
    const answer = await explain(state.model.name, file, { methods, attention: true }, controller.signal);
    if (question !== state.asked) return;
    document.body.classList.remove("waiting");
    state.file = file;
    state.answer = answer;
    if (!keep) Object.assign(state, { view: "patches", from: null, held: null });
    show(...($("drawing").hidden || !keep ? ["seen"] : ["drawing", "seen"]));
    await glass.show(answer.image, answer.grid, (r, c) => say("patch", { row: r, column: c }));
    fitSliders();
    showAnswer();
    if (state.view !== "patches") await choose(state.view);
    else draw();
    if (!keep) scrollTo(0, 0);
    await offerInversion(file);
  }, file.name);
}

function fitSliders() {
  const sent = state.answer.attention;
  const depth = sent.layers.length;
  $("layer").max = depth;
  if (state.layer >= depth || !state.layerChosen) state.layer = Math.round(0.6 * depth) - 1; // there is most to see
  $("layer").value = state.layer + 1;
  $("head").max = sent.heads;
  $("head").disabled = sent.heads === 1;
  if (state.head > sent.heads) state.head = 0;
  $("head").value = state.head;
  $("from-class").hidden = !sent.class_token;
  $("averaged").hidden = !sent.averaged;
}

function showAnswer() {
  const { answer, file } = state;
  $("name").textContent = file.name;
  $("unknown").hidden = !answer.unknown;
  $("says").hidden = answer.unknown;
  $("labels").classList.toggle("unsure", answer.unknown);
  $("labels").replaceChildren(
    ...answer.labels.map(({ name, probability }) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-label", say("why", { label: name, share: percent(probability) }));
      button.setAttribute("aria-pressed", String(classView() && name === answer.target));
      button.style.setProperty("--share", probability);
      const [label, share] = ["span", "span"].map((kind) => button.appendChild(document.createElement(kind)));
      label.className = "label";
      label.textContent = name;
      share.className = "share";
      share.textContent = percent(probability);
      button.addEventListener("click", () => why(name));
      item.append(button);
      return item;
    }),
  );
  $("calibrated").textContent = say(state.model.calibrated ? "calibrated" : "uncalibrated");
  showViews();
}

const classView = () => state.view === "relevance" || state.view === "gradcam";

function showViews() {
  const views = ["patches", ...state.model.methods];
  $("views").replaceChildren(
    ...views.map((view) => {
      const label = document.createElement("label");
      const radio = document.createElement("input");
      Object.assign(radio, { type: "radio", name: "view", value: view, checked: view === state.view });
      radio.addEventListener("change", () => guarded(() => choose(view)));
      const text = document.createElement("span");
      text.textContent = say(`view-${view}`);
      label.append(radio, text);
      return label;
    }),
  );
}

// What speaks for this answer.
async function why(name) {
  await guarded(async () => {
    if (name !== state.answer.target) {
      state.answer.target = name;
      for (const method of ["relevance", "gradcam"]) delete state.answer.heatmaps[method];
    }
    await choose(classView() ? state.view : "relevance");
    [...$("labels").querySelectorAll("button")].find((b) => b.querySelector(".label").textContent === name)?.focus();
  });
}

async function choose(view) {
  const { answer } = state;
  state.view = view;
  if (view !== "patches" && !answer.heatmaps[view]) {
    document.body.classList.add("waiting");
    const target = answer.target;
    const more = await explain(state.model.name, state.file, { methods: [view], target, attention: false });
    document.body.classList.remove("waiting");
    if (answer.target !== target) return;
    answer.heatmaps[view] = more.heatmaps[view];
  }
  for (const radio of $("views").querySelectorAll("input")) radio.checked = radio.value === view;
  for (const button of $("labels").querySelectorAll("button")) {
    const chosen = classView() && button.querySelector(".label").textContent === answer.target;
    button.setAttribute("aria-pressed", String(chosen));
  }
  draw();
}

function draw() {
  const { answer, view } = state;
  if (!answer) return;
  const from = view === "patches" ? state.from : null;
  const sent = answer.attention;
  $("inside").hidden = view !== "patches";
  $("layer-value").textContent = sent.layers[state.layer];
  $("head-value").textContent = sent.averaged || state.head === 0 ? say("head-mean") : state.head;
  $("layer").setAttribute("aria-valuetext", sent.layers[state.layer]);
  $("head").setAttribute("aria-valuetext", $("head-value").textContent);
  $("from-class").setAttribute("aria-pressed", String(sent.class_token && state.held === 0));
  const front = sent.class_token ? 1 : 0;
  for (const button of $("patches").children) {
    const index = Number(button.dataset.patch) + front;
    button.classList.toggle("from", view === "patches" && index === from);
    button.setAttribute("aria-pressed", String(index === state.held));
  }
  if (view !== "patches") glass.draw({ heatmap: answer.heatmaps[view] });
  else if (from === null) glass.draw();
  else glass.draw({ light: light(row(sent, state.layer, state.head, from).shares) });
  if (view === "patches") {
    const shown = from ?? 0;
    const lights = sent.layers.map((_, layer) =>
      Array.from({ length: sent.heads }, (_, head) => light(row(sent, layer, head + 1, shown).shares)),
    );
    whole.draw(lights, answer.grid, { layer: state.layer, head: sent.averaged ? 1 : state.head });
  }
  describe(from);
}

let speaking;

// The caption says what is seen; a screen reader hears it when the eye would have come to rest.
function describe(from) {
  const { answer, view } = state;
  let text = say(`hint-${view}`, { target: answer.target });
  if (view === "patches" && from !== null) {
    const sent = answer.attention;
    const { shares, elsewhere } = row(sent, state.layer, state.head, from);
    const columns = answer.grid[1];
    const place = (index) => ({ row: Math.floor(index / columns) + 1, column: (index % columns) + 1 });
    const best = brightest(shares);
    const own = from - (sent.class_token ? 1 : 0);
    text = say("where", {
      from: own < 0 ? say("from-token") : say("from-patch", place(own)),
      layer: sent.layers[state.layer],
      head: state.head === 0 || sent.averaged ? say("head-mean") : say("head-one", { head: state.head }),
      ...place(best),
      share: percent(shares[best]),
    });
    if (elsewhere > 0.0005) text += say("elsewhere", { share: percent(elsewhere) });
    text += ".";
  }
  $("caption").textContent = text;
  clearTimeout(speaking);
  speaking = setTimeout(() => ($("spoken").textContent = from === null ? "" : text), 400);
}

// Ink on paper shown to a model that learned chalk on slate, or the other way round.
async function offerInversion(file) {
  const { model } = state;
  $("inversion").hidden = true;
  if (model.channels !== 1) return;
  const mean = model.mean[0];
  const edge = await rim(file);
  $("inversion").hidden = !((mean < 0.45 && edge > 0.6) || (mean > 0.55 && edge < 0.4));
}

// --- patches, sliders, keys ----------------------------------------------------------------------------------------

const front = () => (state.answer.attention.class_token ? 1 : 0);
const patchOf = (event) => event.target.closest?.("[data-patch]");

function lookFrom(index) {
  if (state.view !== "patches" || !state.answer) return;
  state.from = index;
  draw();
}

$("patches").addEventListener("pointerover", (event) => {
  const patch = patchOf(event);
  if (patch && event.pointerType === "mouse") lookFrom(Number(patch.dataset.patch) + front());
});
$("patches").addEventListener("pointerleave", () => lookFrom(state.held));
$("patches").addEventListener("focusin", (event) => {
  const patch = patchOf(event);
  if (!patch) return;
  for (const other of $("patches").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  patch.tabIndex = 0;
  lookFrom(Number(patch.dataset.patch) + front());
});
$("patches").addEventListener("focusout", () => lookFrom(state.held));
$("patches").addEventListener("click", (event) => {
  const patch = patchOf(event);
  if (!patch) return;
  const index = Number(patch.dataset.patch) + front();
  state.held = state.held === index ? null : index;
  if (state.view !== "patches") guarded(() => choose("patches"));
  lookFrom(index);
});
$("patches").addEventListener("keydown", (event) => {
  const patch = patchOf(event);
  if (!patch) return;
  const [rows, columns] = state.answer.grid;
  const index = Number(patch.dataset.patch);
  const [y, x] = [Math.floor(index / columns), index % columns];
  const moves = {
    ArrowUp: [y - 1, x], ArrowDown: [y + 1, x], ArrowLeft: [y, x - 1], ArrowRight: [y, x + 1],
    Home: [y, 0], End: [y, columns - 1], PageUp: [0, x], PageDown: [rows - 1, x],
  };
  if (event.key === "Escape") {
    state.held = null;
    lookFrom(null);
  }
  if (!(event.key in moves)) return;
  event.preventDefault();
  const [row, column] = moves[event.key];
  if (row < 0 || column < 0 || row >= rows || column >= columns) return;
  $("patches").children[row * columns + column].focus();
});

$("from-class").addEventListener("click", () => {
  state.held = state.held === 0 ? null : 0;
  lookFrom(state.held);
});

// The sliders show something at once: where the answer is read off, if no patch was chosen yet.
function slide() {
  if (state.from === null) state.from = state.held ?? 0;
  if (state.held === null) state.held = state.from;
  draw();
}
$("layer").addEventListener("input", () => {
  state.layer = Number($("layer").value) - 1;
  state.layerChosen = true;
  slide();
});
$("head").addEventListener("input", () => {
  state.head = Number($("head").value);
  slide();
});
$("whole").addEventListener("click", (event) => {
  const [layer, head] = whole.at(event.offsetX, event.offsetY);
  Object.assign(state, { layer, layerChosen: true, head: state.answer.attention.averaged ? 0 : head + 1 });
  $("layer").value = layer + 1;
  $("head").value = state.head;
  slide();
});

// --- ways in --------------------------------------------------------------------------------------------------------

function take(files) {
  const list = [...files];
  if (!list.length) return trouble("no-image");
  if (list.length === 1) return askAbout(list[0]);
  return askAboutMany(list);
}

for (const id of ["choose", "photograph"])
  $(id).addEventListener("change", () => {
    if ($(id).files.length) take($(id).files);
    $(id).value = "";
  });

addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length) return;
  event.preventDefault();
  take(files.map((file) => (file.name === "image.png" ? new File([file], say("pasted"), { type: file.type }) : file)));
});

let over = 0;
addEventListener("dragenter", (event) => {
  event.preventDefault();
  over++;
  document.body.classList.add("over");
});
addEventListener("dragleave", () => {
  if (--over <= 0) document.body.classList.remove("over");
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  over = 0;
  document.body.classList.remove("over");
  take(event.dataTransfer.files);
});

function start() {
  controller.abort();
  state.asked++;
  Object.assign(state, { answer: null, file: null, found: [] });
  document.body.classList.remove("waiting");
  trouble("");
  show("ask");
  $("choose").focus({ preventScroll: true });
  scrollTo(0, 0);
}
$("again").addEventListener("click", start);
$("again-many").addEventListener("click", start);

$("invert").addEventListener("click", () => guarded(async () => askAbout(await inverted(state.file))));

// --- drawing --------------------------------------------------------------------------------------------------------

$("draw").addEventListener("click", () => {
  trouble("");
  sheet.dark = state.model.mean[0] < 0.5;
  sheet.clear();
  show("drawing");
  $("ink").focus();
});

async function askAboutDrawing() {
  if (!sheet.strokes.length) return show("drawing");
  return askAbout(await sheet.file(say("drawing"), $("centre").checked), { keep: true });
}
$("centre").addEventListener("change", askAboutDrawing);
$("undo").addEventListener("click", () => {
  sheet.undo();
  askAboutDrawing();
});
$("clear").addEventListener("click", () => {
  sheet.clear();
  show("drawing");
});
$("drawn").addEventListener("click", start);

// --- many files -----------------------------------------------------------------------------------------------------

async function askAboutMany(files) {
  const question = ++state.asked;
  state.found = [];
  show("many");
  $("rows").replaceChildren();
  $("csv").disabled = true;
  $("progress").hidden = false;
  const told = (found) => {
    if (question !== state.asked) return;
    for (const answer of found.slice(state.found.length))
      $("rows").append(batch.row(answer, (file) => askAbout(file)));
    state.found = [...found];
    $("progress").value = found.length / files.length;
    $("many-title").textContent = say("many", { done: found.length, all: files.length });
    $("csv").disabled = false;
  };
  $("many-title").textContent = say("many", { done: 0, all: files.length });
  await guarded(async () => {
    await batch.answers(state.model, files, told, () => question === state.asked);
    if (question === state.asked) $("progress").hidden = true;
  });
}

$("csv").addEventListener("click", () => batch.download(batch.csv(state.found), "answers.csv"));

// --- the model, the language, the light -----------------------------------------------------------------------------

function use(name) {
  state.model = state.models.find((model) => model.name === name);
  const { model } = state;
  const patches = model.grid[0] * model.grid[1];
  $("about").textContent = say("about", {
    classes: model.classes.length, patches, side: model.patch_size, depth: model.depth, heads: model.heads,
  });
  $("draw").hidden = model.channels !== 1;
}

$("model").addEventListener("change", () => {
  use($("model").value);
  if (state.file && state.answer) askAbout(state.file);
  else if (state.found.length) askAboutMany(state.found.map(({ file }) => file));
});

function setLanguage(language) {
  speak(language);
  localStorage.setItem("language", spoken());
  const other = Object.keys(WORDS).find((each) => each !== spoken());
  $("language").textContent = { en: "English", ko: "한국어" }[other];
  $("language").lang = other;
  if (state.model) use(state.model.name);
  if (state.answer) {
    glass.named((r, c) => say("patch", { row: r, column: c }));
    showAnswer();
    draw();
  }
  if (state.found.length) {
    $("rows").replaceChildren(...state.found.map((answer) => batch.row(answer, (file) => askAbout(file))));
    $("many-title").textContent = say("many", { done: state.found.length, all: state.found.length });
  }
}
$("language").addEventListener("click", () => setLanguage(spoken() === "en" ? "ko" : "en"));

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  requestAnimationFrame(() => {
    panes($("panes"));
    draw();
  });
}
$("theme").addEventListener("click", () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = (document.documentElement.dataset.theme ?? system) === "dark" ? "light" : "dark";
  localStorage.setItem("theme", theme);
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());

let resizing;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => {
    panes($("panes"));
    draw();
  });
});

async function begin() {
  await guarded(async () => {
    state.models = await models();
    for (const { name } of state.models) $("model").append(new Option(name, name));
    $("model-field").hidden = state.models.length < 2;
    use(state.models[0].name);
    document.body.dataset.ready = "yes";
  });
}

// A camera button where there is likely to be a camera to open: phones and tablets.
$("photograph-field").hidden = !matchMedia("(pointer: coarse)").matches;
setLanguage(localStorage.getItem("language") ?? (navigator.language.startsWith("ko") ? "ko" : "en"));
setTheme(localStorage.getItem("theme"));
show("ask");
begin();
