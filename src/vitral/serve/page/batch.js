// Several files: classified in small groups, shown as a table, downloaded as CSV.
import { ApiError, errorKind, predict } from "/page/api.js";
import { formatValue, percent, t } from "/page/i18n.js";
import { intervalText, truncateList } from "/page/shared.js";

const MAX_GROUP_IMAGES = 16;
const MAX_GROUP_BYTES = 8 * 2 ** 20;

export function groupFiles(files, maxImages, maxBytes = MAX_GROUP_BYTES) {
  const groups = [];
  let [group, bytes] = [[], 0];
  for (const file of files) {
    if (group.length && (group.length >= maxImages || bytes + file.size > maxBytes)) {
      groups.push(group);
      [group, bytes] = [[], 0];
    }
    group.push(file);
    bytes += file.size;
  }
  return group.length ? [...groups, group] : groups;
}

// One result per file, in order; `onGroup` is called after each group. A failed request is an error of its files only.
// Each result has `file`, and either `labels`, `ood` and perhaps `prediction_set`, or `errorKind` and `errorMessage`.
export async function predictAll(model, files, onGroup, shouldContinue) {
  const results = [];
  for (const group of groupFiles(files, Math.min(MAX_GROUP_IMAGES, model.max_images))) {
    if (!shouldContinue()) return results;
    let predictions;
    try {
      predictions = await predict(model.name, group);
    } catch (error) {
      if (!(error instanceof ApiError) || error.kind === "key") throw error;
      predictions = group.map(() => ({ errorKind: error.kind, errorMessage: error.message }));
    }
    predictions.forEach(({ labels, values, ood, prediction_set, error, ...failure }, index) => {
      if (error) failure = { errorKind: errorKind(error.code), errorMessage: error.message };
      results.push({ ...failure, labels, values, ood, prediction_set, file: group[index] });
    });
    onGroup(results);
  }
  return results;
}

export function tableRow(result, onExplain) {
  const row = document.createElement("tr");
  const [image, file, label, confidence] = ["td", "th", "td", "td"].map((tag) => row.appendChild(document.createElement(tag)));
  file.scope = "row";
  file.textContent = result.file.name;
  if (result.errorKind) {
    label.colSpan = 2;
    label.className = "failed";
    label.textContent = t(result.errorKind, { name: result.file.name });
    label.title = result.errorMessage;
    confidence.remove();
    return row;
  }
  image.append(thumbnail(result.file, onExplain));
  if (result.values) {
    label.textContent = result.values.map((value) => `${value.name} ${formatValue(value.value, value)}`).join(", ");
    confidence.textContent = result.values.map(intervalText).join(", ");
    return row;
  }
  const best = result.labels[0];
  const names = presentNames(result.labels) ?? result.prediction_set?.labels ?? [best.name];
  label.textContent = result.ood ? `${t("unknown-short")} (${best.name})` : truncateList(names, 3) || t("no-label");
  label.classList.toggle("unknown-label", result.ood);
  const bar = document.createElement("span");
  bar.className = "bar";
  bar.style.setProperty("--share", best.probability);
  confidence.append(bar, document.createTextNode(percent(best.probability)));
  return row;
}

// The labels that a multi-label model predicts; undefined for other models.
const presentNames = (labels) =>
  labels[0]?.threshold === undefined ? undefined : labels.filter(({ present }) => present).map(({ name }) => name);

function thumbnail(file, onExplain) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "thumbnail";
  button.setAttribute("aria-label", t("explain", { name: file.name }));
  const image = new Image();
  image.alt = "";
  image.src = URL.createObjectURL(file);
  image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
  button.append(image);
  button.addEventListener("click", () => onExplain(file));
  return button;
}

// Text that a spreadsheet would take for a formula is prefixed with an apostrophe.
export function csvCell(value) {
  const text = String(value ?? "");
  const safe = typeof value !== "number" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function valuesCsv(results) {
  const lines = [["file", "target", "value", "low", "high", "coverage", "error"]];
  for (const { file, values, errorMessage } of results) {
    if (!values) lines.push([file.name, "", "", "", "", "", errorMessage]);
    else for (const { name, value, low, high, coverage } of values) lines.push([file.name, name, value, low, high, coverage, ""]);
  }
  return lines;
}

function multilabelCsv(results) {
  const lines = [["file", "labels", "probabilities", "error"]];
  for (const { file, labels = [], errorMessage } of results) {
    const present = labels.filter(({ present }) => present);
    const probabilities = present.map(({ probability }) => probability.toFixed(6)).join("|");
    lines.push([file.name, present.map(({ name }) => name).join("|"), probabilities, errorMessage]);
  }
  return lines;
}

export function toCsv(results) {
  if (results.some(({ labels }) => labels?.[0]?.threshold !== undefined)) return csvText(multilabelCsv(results));
  if (results.some(({ values }) => values)) return csvText(valuesCsv(results));
  const lines = [["file", "label", "probability", "ood", "second_label", "second_probability", "error", "prediction_set", "coverage"]];
  for (const { file, labels = [], ood, prediction_set: set, errorMessage } of results) {
    const [first, second] = labels;
    const [p1, p2] = [first, second].map((label) => label?.probability.toFixed(6));
    lines.push([file.name, first?.name, p1, errorMessage ? "" : ood, second?.name, p2, errorMessage, set && JSON.stringify(set.labels), set?.coverage]);
  }
  return csvText(lines);
}

const csvText = (lines) => `\ufeff${lines.map((line) => line.map(csvCell).join(",")).join("\r\n")}\r\n`;

export function download(text, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
