// The map of the model: where the visitor is, from the whole model down to one dot product.
import { app, currentBlock, currentHead, currentKey, currentToken, hasClassToken, tokenName } from "./context.js";
import { element } from "./dom.js";
import { t } from "./i18n.js";
import { setState, state } from "./state.js";

const STEP_PLACES = {
  image: "image", patches: "patches", squares: "patches", flatten: "patches", embedding: "embedding", hybrid: "embedding",
  class_token: "embedding", learned: "embedding", sincos: "embedding", embed: "embedding", rotary: "embedding",
  queries: "qkv", attention: "attention", residual: "residual", mlp: "mlp", encoder: "blocks", encoder_patches: "blocks", logits: "prediction",
};
const FIRST_STEPS = { image: ["image"], patches: ["patches", "squares"], embedding: ["embedding", "hybrid"], prediction: ["logits"] };
const BLOCK_PARTS = [["qkv", "queries"], ["attention", "attention"], ["residual", "residual"], ["mlp", "mlp"]];

// Where the visitor is: { place, block?, head?, dot? }
export function whereAmI() {
  if (state.view === "tour") {
    const place = STEP_PLACES[state.step] ?? "pool";
    const inBlock = BLOCK_PARTS.some(([part]) => part === place);
    return { place, block: inBlock ? currentBlock() : null, head: ["qkv", "attention"].includes(place) ? currentHead() : null, dot: false };
  }
  if (state.view === "explore" && state.panel === "attention" && state.zoom !== "model")
    return {
      place: state.zoom === "block" ? "block" : "attention",
      block: currentBlock(),
      head: state.zoom === "block" ? null : currentHead(),
      dot: state.zoom === "dot",
    };
  return { place: state.view === "explore" && state.panel === "attention" ? "blocks" : "model", block: null, head: null, dot: false };
}

export function renderMap() {
  const here = whereAmI();
  return [
    element("div", { class: "map-row" }, modelRow(here)),
    here.block !== null && element("div", { class: "map-row inner" }, blockRow(here)),
    breadcrumb(here),
  ];
}

function station(name, label, isHere, onclick, className = "") {
  return element(
    "button",
    {
      type: "button",
      class: `station ${className}`,
      "aria-current": isHere ? "location" : undefined,
      "data-focus": `map:${name}`,
      onclick,
    },
    label,
  );
}

const arrow = () => element("span", { class: "arrow", "aria-hidden": "true" }, "→");

function goToStep(candidates) {
  const step = app.entry.steps.find(({ key }) => candidates.includes(key) || (candidates[0] === "pool" && key.startsWith("pool")));
  setState({ view: "tour", step: step.key });
}

function modelRow(here) {
  const off = (block) => isBlockChanged(block);
  const blocks = Array.from({ length: app.entry.config.depth }, (_, block) =>
    station(
      `block${block}`,
      String(block + 1),
      here.block === block || here.place === "blocks",
      () => goToBlock(block),
      off(block) ? "block changed" : "block",
    ));
  const outer = (name) => station(name, t(`map-${name}`), here.place === name, () => goToStep(FIRST_STEPS[name] ?? [name]));
  return [
    outer("image"), arrow(), outer("patches"), arrow(), outer("embedding"), arrow(),
    element(
      "span",
      { class: "blocks", role: "group", "aria-label": t("blocks") },
      element("span", { class: "blocks-label", "aria-hidden": "true" }, t("blocks")),
      blocks,
    ),
    arrow(), outer("pool"), arrow(), outer("prediction"),
  ];
}

function goToBlock(block) {
  if (state.view === "tour") {
    const isInBlock = BLOCK_PARTS.some(([, step]) => step === state.step);
    setState({ block, step: isInBlock ? state.step : "queries" });
  } else setState(
    {
      view: "explore",
      panel: "attention",
      zoom: ["head", "dot"].includes(state.zoom) && state.view === "explore" ? state.zoom : "block",
      block,
    },
  );
}

function isBlockChanged(block) {
  const { headsOff = [], attentionOff = [], mlpOff = [], blocksOff = [], residualOff = [] } = state.changes;
  return [
    attentionOff,
    mlpOff,
    blocksOff,
    residualOff,
  ].some((list) => list.includes(block)) || headsOff.some((name) => name.startsWith(`${block}.`));
}

function blockRow(here) {
  const parts = BLOCK_PARTS.map(([part, step], index) => [
    index > 0 && arrow(),
    station(part, t(`map-${part}`), here.place === part, () => (state.view === "tour" ? setState({ step }) : goToPart(part, step))),
  ]);
  return [element("span", { class: "map-title" }, t("block-n", { n: here.block + 1 })), parts];
}

function goToPart(part, step) {
  if (part === "attention" || part === "qkv") setState({ zoom: "head" });
  else setState({ view: "tour", step });
}

// Model › Block 2 › Head 3 › q·k. Every part leads back to that level.
function breadcrumb(here) {
  const inExplore = state.view === "explore";
  const levels = [
    {
      label: t("whole-model"),
      go: () => (inExplore ? setState({ panel: "attention", zoom: "model" }) : goToStep(["encoder", "encoder_patches"])),
    },
  ];
  if (here.block !== null) levels.push(
    { label: t("block-n", { n: here.block + 1 }), go: () => (inExplore ? setState({ zoom: "block" }) : setState({ step: "queries" })) },
  );
  if (here.head !== null) levels.push(
    { label: t("head-n", { n: here.head + 1 }), go: () => (inExplore ? setState({ zoom: "head" }) : setState({ step: "attention" })) },
  );
  if (here.block === null && ["image", "patches", "embedding", "pool", "prediction"].includes(here.place)) levels.push(
    { label: t(`map-${here.place}`), go: () => goToStep(FIRST_STEPS[here.place] ?? [here.place]) },
  );
  if (here.dot) levels.push(
    { label: t("crumb-dot", { query: tokenName(currentToken()), key: tokenName(currentKey()) }), go: () => setState({ zoom: "dot" }) },
  );
  const deeper = here.head !== null && !here.dot && element(
    "li",
    { class: "deeper" },
    element(
      "button",
      {
        type: "button",
        class: "crumb deeper",
        "data-focus": "crumb:deeper",
        onclick: () => setState({ view: "explore", panel: "attention", zoom: "dot" }),
      },
      t("crumb-deeper"),
    ),
  );
  return element("ol", { class: "crumbs", "aria-label": t("you-are-here") },
    element("li", { class: "crumb-label", "aria-hidden": "true" }, t("you-are-here")),
    levels.map(({ label, go }, index) =>
      element(
        "li",
        {},
        element(
          "button",
          {
            type: "button",
            class: "crumb",
            "aria-current": index === levels.length - 1 ? "true" : undefined,
            "data-focus": `crumb:${index}`,
            onclick: go,
          },
          label,
        ),
      )),
    deeper);
}

// Zooming with + and -: one level in or out.
export function zoomBy(direction) {
  const levels = ["model", "block", "head", "dot"];
  const here = whereAmI();
  const level = here.dot ? 3 : here.head !== null ? 2 : here.block !== null ? 1 : 0;
  const next = Math.min(3, Math.max(0, level + direction));
  if (next !== level) setState({ view: "explore", panel: "attention", zoom: levels[next] });
}

export const readoutName = () => (app.entry.config.pooling === "class" && hasClassToken() ? t("class-token") : t("mean-of-patches"));
