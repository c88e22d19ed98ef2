// A matrix as a picture: each number is a square. Point at it, or focus it and use the arrow keys, to read a number.
import { colourScale, valueRange } from "./colours.js";
import { element, formatNumber } from "./dom.js";
import { t } from "./i18n.js";

const MAX_TABLE = 40; // rows and columns of the table of numbers

// matrix: { values, rows, columns, scale, caption, rowName?(i), columnName?(j), marked?: {row?, column?}, onpick?(i, j), size?, key, perRow?: every row has its own colour scale }
export function matrixFigure(matrix) {
  const { values, rows, columns, caption, scale = "signed" } = matrix;
  const [low, high] = valueRange(values);
  const summary = `${caption} (${rows} × ${columns}; ${formatNumber(low)} … ${formatNumber(high)})`;
  const canvas = element("canvas", {
    width: columns,
    height: rows,
    tabindex: "0",
    role: "img",
    "aria-label": `${summary}. ${t(matrix.onpick ? "figure-keys-pick" : "figure-keys")}`,
    "data-focus": matrix.key && `figure:${matrix.key}`,
  });
  const scaleOf = matrix.perRow ? Array.from(
    { length: rows },
    (_, row) => colourScale(values.subarray(row * columns, (row + 1) * columns), scale),
  ) : null;
  const whole = colourScale(values, scale);
  paint(canvas, values, rows, columns, (value, index) => (scaleOf ? scaleOf[Math.floor(index / columns)] : whole)(value));
  const frame = element("div", { class: "frame" }, canvas, marks(matrix));
  const cursor = element("span", { class: "cursor", hidden: true });
  frame.append(cursor);
  const readout = element("span", { class: "readout", "aria-live": "polite" });
  const figure = element(
    "figure",
    { class: "matrix", style: sizeOf(rows, columns, matrix.size) },
    frame,
    element("figcaption", {}, summary, element("br"), readout, tableButton(matrix)),
  );
  addCursor({ canvas, cursor, readout, matrix });
  return figure;
}

function sizeOf(rows, columns, size = 300) {
  const width = columns >= rows ? size : Math.max(48, (size * columns) / rows);
  const height = Math.max((width * rows) / columns, rows === 1 ? 26 : Math.min(160, 5 * rows));
  return `--width: ${Math.round(width)}px; --ratio: ${(width / Math.min(height, size)).toFixed(4)}`;
}

function paint(canvas, values, rows, columns, colour) {
  const pixels = new ImageData(columns, rows);
  for (let index = 0; index < rows * columns; index++) pixels.data.set([...colour(values[index], index), 255], 4 * index);
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

function marks({ rows, columns, marked = {} }) {
  const lines = [];
  const { row, column } = marked;
  if (row >= 0 && row < rows)
    lines.push(element("span", { class: "mark", style: `top: ${(100 * row) / rows}%; height: ${100 / rows}%; left: 0; right: 0` }));
  if (column >= 0 && column < columns)
    lines.push(
      element("span", { class: "mark", style: `left: ${(100 * column) / columns}%; width: ${100 / columns}%; top: 0; bottom: 0` }),
    );
  return lines;
}

function nameOf(matrix, row, column) {
  const rowName = matrix.rowName?.(row) ?? t("row-n", { n: row + 1 });
  const columnName = matrix.columnName?.(column) ?? t("number-n", { n: column + 1 });
  return matrix.rows === 1 ? columnName : `${rowName}, ${columnName}`;
}

function addCursor({ canvas, cursor, readout, matrix }) {
  const { rows, columns, values } = matrix;
  let [row, column] = [matrix.marked?.row ?? 0, matrix.marked?.column ?? 0];
  const show = () => {
    row = Math.min(Math.max(row, 0), rows - 1);
    column = Math.min(Math.max(column, 0), columns - 1);
    cursor.hidden = false;
    cursor.style.cssText =
      `left: ${(100 * column) / columns}%; top: ${(100 * row) / rows}%; width: ${100 / columns}%; height: ${100 / rows}%`;
    readout.textContent = `${nameOf(matrix, row, column)}: ${formatNumber(values[row * columns + column])}`;
  };
  const locate = (event) => {
    const box = canvas.getBoundingClientRect();
    row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    show();
  };
  canvas.addEventListener("pointermove", locate);
  canvas.addEventListener("pointerdown", locate);
  canvas.addEventListener("pointerleave", () => (cursor.hidden = true));
  canvas.addEventListener("blur", () => (cursor.hidden = true));
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  canvas.addEventListener("keydown", (event) => {
    if (event.key in moves) {
      event.preventDefault();
      row += moves[event.key][0];
      column += moves[event.key][1];
      show();
    } else if (matrix.onpick && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      matrix.onpick(row, column);
    }
  });
  if (!matrix.onpick) return;
  canvas.classList.add("pickable");
  canvas.addEventListener("click", (event) => {
    locate(event);
    matrix.onpick(row, column);
  });
}

// Opens the numbers as a table, for screen readers and for those who want to check.
function tableButton(matrix) {
  return element(
    "button",
    { type: "button", class: "link", "aria-label": `${t("numbers")}: ${matrix.caption}`, onclick: () => showTable(matrix) },
    t("numbers"),
  );
}

function showTable(matrix) {
  const { values, rows, columns, caption } = matrix;
  const [shownRows, shownColumns] = [Math.min(rows, MAX_TABLE), Math.min(columns, MAX_TABLE)];
  const range = (count) => Array.from({ length: count }, (_, index) => index);
  const head = element(
    "tr",
    {},
    element("td"),
    range(shownColumns).map((j) => element("th", { scope: "col" }, matrix.columnName?.(j) ?? String(j + 1))),
  );
  const body = range(shownRows).map((i) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, matrix.rowName?.(i) ?? String(i + 1)),
      range(shownColumns).map((j) => element("td", {}, formatNumber(values[i * columns + j]))),
    ),
  );
  const cut = shownRows < rows || shownColumns < columns;
  openDialog(
    caption,
    cut && element("p", { class: "small" }, t("table-cut", { rows: shownRows, columns: shownColumns, allRows: rows, allColumns: columns })),
    element(
      "div",
      { class: "scroll", tabindex: "0" },
      element("table", { class: "numbers" }, element("thead", {}, head), element("tbody", {}, body)),
    ),
  );
}

// A modal dialog with a heading and a close button; the focus returns to where it was.
export function openDialog(heading, ...content) {
  const dialog = element(
    "dialog",
    { "aria-label": heading },
    element(
      "form",
      { method: "dialog", class: "dialog-head" },
      element("h2", {}, heading),
      element("button", { class: "quiet" }, t("close")),
    ),
    content,
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

// A plain picture on a canvas that fills its frame. draw(context, width, height)
export function pictureFigure({ width, height, caption, draw, size = 300, pixelated = true, label }) {
  const canvas = element("canvas", { width, height, role: "img", "aria-label": label ?? caption, class: pixelated ? "" : "smooth" });
  draw(canvas.getContext("2d"), width, height);
  return element(
    "figure",
    { class: "matrix", style: `--width: ${size}px; --ratio: ${(width / height).toFixed(4)}` },
    element("div", { class: "frame" }, canvas),
    element("figcaption", {}, caption),
  );
}
