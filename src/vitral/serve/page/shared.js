// State of the page, and which part of it is visible.
import { ApiError, setApiKey } from "/page/api.js";
import { drawBackdrop } from "/page/image_view.js";
import { currentLanguage, formatValue, t } from "/page/i18n.js";

export const $ = (id) => document.getElementById(id);

export const state = {
  models: [],
  model: null, // the selected model
  file: null, // the classified file
  explanation: null, // response of /explain for the file
  view: "patches", // or one of the explain methods
  row: null, // the attention row shown: class token or patch; null: none
  pinnedRow: null, // the row that stays when the pointer leaves
  block: 0,
  blockChosen: false, // whether the user has moved the slider
  head: 0, // 0: mean of all heads
  results: [], // results of a batch
  requestNumber: 0, // responses to older requests are ignored
};

const SECTIONS = ["start", "drawing", "result", "batch"];

export function showSections(...visible) {
  for (const id of SECTIONS) $(id).hidden = !visible.includes(id);
  document.body.classList.toggle("started", !visible.includes("start"));
  document.body.classList.toggle("drawing", visible.includes("drawing"));
  if (visible.includes("start")) drawBackdrop($("backdrop"));
}

export const setBusy = (busy) => document.body.classList.toggle("busy", busy);

export function clearError() {
  $("error").hidden = true;
  $("error").textContent = "";
}

export function showError(kind, values = {}, serverMessage = "") {
  const element = $("error");
  element.hidden = false;
  element.textContent = t(kind, values);
  if (serverMessage && currentLanguage() === "en") {
    element.append(` ${serverMessage[0].toUpperCase()}${serverMessage.slice(1)}.`);
  }
  element.scrollIntoView({ block: "nearest" });
}

// Runs an action and shows its errors; prompts for the API key and repeats the action if the server requires one.
export async function withErrorsShown(action, fileName = "") {
  try {
    clearError();
    await action();
  } catch (error) {
    if (error.name === "AbortError") return;
    setBusy(false);
    if (!(error instanceof ApiError)) {
      console.error(error);
      showError("failed");
    } else if (error.kind === "key") askForKey(() => withErrorsShown(action, fileName));
    else showError(error.kind, { name: fileName }, error.kind === "failed" ? error.message : "");
  }
}

function askForKey(then) {
  const dialog = $("key-dialog");
  const onClose = () => {
    setApiKey($("key").value.trim());
    then();
  };
  dialog.addEventListener("close", onClose, { once: true });
  if (!dialog.open) dialog.showModal();
}

// At most `limit` names, comma-separated, and how many more there are.
export function truncateList(names, limit = 8) {
  const labels = names.slice(0, limit).join(", ");
  return names.length > limit ? t("and-more", { labels, count: names.length - limit }) : labels;
}

// "25.0 to 37.8"; empty without an interval.
export function intervalText(value) {
  if (value.low === undefined) return "";
  return t("interval", { low: formatValue(value.low, value), high: formatValue(value.high, value) });
}
