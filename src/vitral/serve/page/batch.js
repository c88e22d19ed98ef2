// Many files: asked for in small groups, shown as a table, taken away as CSV.
import { predict, Trouble } from "/page/api.js";
import { percent, say } from "/page/words.js";

const MOST_BYTES = 8 * 2 ** 20;

export function groups(files, mostImages, mostBytes = MOST_BYTES) {
  const out = [];
  let [group, bytes] = [[], 0];
  for (const file of files) {
    if (group.length && (group.length >= mostImages || bytes + file.size > mostBytes)) {
      out.push(group);
      [group, bytes] = [[], 0];
    }
    group.push(file);
    bytes += file.size;
  }
  return group.length ? [...out, group] : out;
}

// One answer a file, in order; `onGroup` after each group; what went wrong with one file stops nothing.
export async function answers(model, files, onGroup, going) {
  const found = [];
  for (const group of groups(files, Math.min(16, model.most_images))) {
    if (!going()) return found;
    let said;
    try {
      said = await predict(model.name, group);
    } catch (error) {
      if (!(error instanceof Trouble) || error.kind === "key") throw error;
      said = group.map((file) => ({ name: file.name, error: error.kind === "bad-image" ? error.message : say(error.kind, { name: file.name }) }));
    }
    said.forEach((answer, index) => found.push({ file: group[index], ...answer }));
    onGroup(found);
  }
  return found;
}

export function row(answer, onLook) {
  const line = document.createElement("tr");
  const [image, file, label, sure] = ["td", "th", "td", "td"].map((kind) => line.appendChild(document.createElement(kind)));
  file.scope = "row";
  file.textContent = answer.file.name;
  if (answer.error) {
    label.colSpan = 2;
    label.className = "wrong";
    label.textContent = say("bad-image", { name: answer.file.name });
    label.title = answer.error;
    sure.remove();
    return line;
  }
  const look = document.createElement("button");
  look.type = "button";
  look.className = "thumb";
  look.setAttribute("aria-label", say("look", { name: answer.file.name }));
  const picture = new Image();
  picture.alt = "";
  picture.src = URL.createObjectURL(answer.file);
  picture.addEventListener("load", () => URL.revokeObjectURL(picture.src), { once: true });
  look.append(picture);
  look.addEventListener("click", () => onLook(answer.file));
  image.append(look);
  const best = answer.labels[0];
  label.textContent = answer.unknown ? `${say("unknown-short")} (${best.name})` : best.name;
  label.classList.toggle("unsure", answer.unknown);
  const bar = document.createElement("span");
  bar.className = "bar";
  bar.style.setProperty("--share", best.probability);
  sure.append(bar, document.createTextNode(percent(best.probability)));
  return line;
}

// A name that begins like a formula is kept from becoming one in a spreadsheet.
export function cell(value) {
  const text = String(value ?? "");
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function csv(found) {
  const lines = [["file", "label", "probability", "unknown", "second", "second_probability", "error"]];
  for (const { file, labels = [], unknown, error } of found) {
    const [first, second] = labels;
    const numbers = [first, second].map((label) => label?.probability.toFixed(6));
    lines.push([file.name, first?.name, numbers[0], error ? "" : unknown, second?.name, numbers[1], error]);
  }
  return `\ufeff${lines.map((line) => line.map(cell).join(",")).join("\r\n")}\r\n`;
}

export function download(text, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
