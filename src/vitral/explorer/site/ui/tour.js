// The guided tour: the steps of the walk with the values of the visitor's image.
import { app, currentBlock, currentHead, currentPatch, currentToken, formatWalk, tokenPhrase } from "./context.js";
import { choiceButtons, element, equation } from "./dom.js";
import { currentLanguage, hasText, t } from "./i18n.js";
import { setState, state } from "./state.js";
import { figuresOf } from "./tour_figures.js";

const IN_BLOCK = ["queries", "attention", "residual", "mlp"];
const USES_HEAD = ["queries", "attention"];
const USES_PATCH = ["patches", "squares", "flatten", "embedding", "hybrid", "learned", "sincos", "rotary"];
const USES_TOKEN = ["embed", "queries", "attention", "residual", "mlp"];

export const tourSteps = () => app.entry.steps;

export function stepIndex() {
  const index = tourSteps().findIndex(({ key }) => key === state.step);
  return Math.max(index, 0);
}

export const stepTitle = (step, language = currentLanguage()) => formatWalk(app.site.walk[language].steps[step.key].title);

function stepText(step) {
  const texts = app.site.walk[currentLanguage()].steps;
  return [step.key, ...(step.extra ?? [])].map((key) => formatWalk(texts[key].text)).join(" ");
}

const stepEquation = (step) => formatWalk(app.site.walk.en.steps[step.equation ?? step.key].equation ?? "");

export function renderTour() {
  const index = stepIndex();
  const step = tourSteps()[index];
  const figures = figuresOf(step.key);
  const isWorked = (node) => node.classList.contains("worked");
  const question = `ask-${step.key}`;
  return [
    stepNavigation(index),
    element("article", { class: "step", "aria-labelledby": "step-title" },
      element("div", { class: "step-head" },
        element("h2", { id: "step-title", tabindex: "-1" }, element("span", { class: "number" }, `${index + 1} `), stepTitle(step)),
        element("span", { class: "shape" }, element("span", { class: "shape-label" }, `${t("shape")} `), step.shape)),
      index === 0 && introduction(),
      element("p", { class: "lead" }, stepText(step)),
      equation(stepEquation(step)),
      IN_BLOCK.includes(step.key) && placeControls(USES_HEAD.includes(step.key)),
      (USES_TOKEN.includes(step.key) || USES_PATCH.includes(step.key)) && element(
        "p",
        { class: "small" },
        t("token-note", { token: tokenPhrase(USES_PATCH.includes(step.key) ? app.entry.prefix + currentPatch() : currentToken()) }),
      ),
      element("div", { class: "figures" }, figures.filter((node) => !isWorked(node))),
      element("p", { class: "small" }, app.site.walk[currentLanguage()].page.colours),
      figures.filter(isWorked),
      hasText(question) && element("p", { class: "ask" }, element("b", {}, `${t("try-it")} `), t(question)),
      wordsOf(step),
      symbols(),
      codeOf(step)),
    stepNavigation(index, true),
  ];
}

function stepNavigation(index, isFoot = false) {
  const steps = tourSteps();
  const go = (to) => setState({ step: steps[to].key });
  const previous = element(
    "button",
    { type: "button", disabled: index === 0, "data-focus": isFoot ? "foot-previous" : "previous", onclick: () => go(index - 1) },
    t("previous"),
  );
  const next = index < steps.length - 1
    ? element(
      "button",
      { type: "button", class: "primary", "data-focus": isFoot ? "foot-next" : "next", onclick: () => go(index + 1) },
      isFoot ? t("next-step", { title: stepTitle(steps[index + 1]) }) : t("next"),
    )
    : element(
      "button",
      { type: "button", class: "primary", "data-focus": isFoot ? "foot-next" : "next", onclick: () => setState({ view: "explore" }) },
      t("to-explore"),
    );
  if (isFoot) return element("nav", { class: "step-nav foot", "aria-label": t("steps-end") }, previous, next);
  return element("nav", { class: "step-nav", "aria-label": t("steps") }, previous,
    element("ol", { class: "dots" }, steps.map((step, place) =>
      element("li", {}, element("button", {
        type: "button", class: "dot", title: stepTitle(step), "aria-label": `${place + 1}. ${stepTitle(step)}`,
        "aria-current": place === index ? "step" : undefined, "data-focus": `dot:${place}`, onclick: () => go(place),
      }, String(place + 1))))),
    next);
}

// Which block and head the step shows.
export function placeControls(withHead = true) {
  const { depth, heads } = app.entry.config;
  const range = (count) => Array.from({ length: count }, (_, value) => ({ value, label: String(value + 1) }));
  return element("div", { class: "place" },
    element("span", { class: "place-label" }, t("block")), choiceButtons(
      t("block"),
      range(depth),
      currentBlock(),
      (block) => setState({ block }),
      "block",
    ),
    withHead && element("span", { class: "place-label" }, t("head")),
    withHead && choiceButtons(t("head"), range(heads), currentHead(), (head) => setState({ head }), "head"));
}

// What the tour is about, before its first step.
function introduction() {
  const { title, text } = app.site.walk[currentLanguage()].steps.intro;
  return element(
    "div",
    { class: "intro" },
    element("h3", {}, formatWalk(title)),
    element("p", {}, formatWalk(text)),
    element("p", { class: "small" }, t("intro-keys")),
  );
}

const WORDS = {
  image: ["normalise"], patches: ["token"], squares: ["token"], flatten: ["vector"], embedding: ["vector", "projection"], hybrid: ["convolution", "projection"],
  class_token: ["token", "parameter"], learned: ["parameter"], queries: ["layer-norm", "head"], attention: ["dot-product", "softmax"],
  residual: ["residual"], mlp: ["mlp", "activation"], encoder: ["encoder"], encoder_patches: ["encoder"], logits: ["logit", "softmax"],
};

// Definitions for those who meet a word for the first time.
function wordsOf(step) {
  const words = WORDS[step.key];
  return words && element("details", { class: "code words", open: false }, element("summary", {}, t("words")),
    element("dl", {}, words.map((word) => [element("dt", {}, t(`word-${word}`)), element("dd", {}, t(`word-${word}-text`))])));
}

const SYMBOLS = ["H", "W", "C", "P", "N", "D", "T", "h", "d", "M", "L", "K"];

// The letters of the equations and shapes, with their values in this model.
function symbols() {
  return element("details", { class: "code words" }, element("summary", {}, t("symbols")),
    element(
      "dl",
      {},
      SYMBOLS.map((name) => [element("dt", {}, `${name} = ${app.entry.numbers[name]}`), element("dd", {}, t(`symbol-${name}`))]),
    ));
}

function codeOf(step) {
  const isWide = matchMedia("(min-width: 60rem)").matches;
  return element("details", { class: "code", open: isWide }, element("summary", {}, t("source")),
    step.code.map(({ location, line, text }) => [
      element("div", { class: "small" }, `${location}, ${t("line", { line })}`),
      element("pre", { tabindex: "0" }, text)]));
}
