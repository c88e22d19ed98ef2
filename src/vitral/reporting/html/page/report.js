"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const matrix = document.getElementById("matrix");
  const panel = document.getElementById("cell");

  const create = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };

  function showExamples(button) {
    const [trueClass, predicted] = button.dataset.cell.split(",").map(Number);
    for (const other of matrix.querySelectorAll('[aria-pressed="true"]')) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", "true");
    const names = data.classes;
    const count = Number(button.textContent);
    const examples = data.cells[button.dataset.cell] || [];
    const isCorrect = trueClass === predicted;
    const title = isCorrect ? `${names[trueClass]}, correct` : `${names[trueClass]} predicted as ${names[predicted]}`;
    panel.replaceChildren(create("h3", `${title}: ${count} of ${data.counts[trueClass]}`));
    if (examples.length < count) {
      const order = isCorrect ? "least confident" : "most confident";
      panel.append(create("p", `${examples.length} shown, ${order} first`, "note"));
    }
    const list = create("ul", undefined, "images");
    for (const [index, confidence] of examples) {
      const item = create("li");
      const image = create("img");
      image.src = data.images[index];
      image.alt = `image of class ${names[trueClass]}`;
      if (data.pixelated) image.className = "pixels";
      item.append(image, create("div", `${names[predicted]} (${(100 * confidence).toFixed(1)}%)`));
      list.append(item);
    }
    panel.append(list);
  }

  function sortMatrix(order) {
    const classes = data.orders[order];
    const sort = (row) => {
      const cells = new Map([...row.children].slice(1).map((cell) => [Number(cell.dataset.predicted), cell]));
      row.append(...classes.map((index) => cells.get(index)));
    };
    sort(matrix.tHead.rows[matrix.tHead.rows.length - 1]);
    const body = matrix.tBodies[0];
    const rows = new Map([...body.rows].map((row) => [Number(row.dataset.true), row]));
    for (const row of rows.values()) sort(row);
    body.append(...classes.map((index) => rows.get(index)));
  }

  if (matrix) {
    matrix.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-cell]");
      if (button) showExamples(button);
    });
    matrix.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      const cell = event.target.closest("td");
      if (!step || !cell) return;
      const rows = [...matrix.tBodies[0].rows];
      let row = rows.indexOf(cell.parentElement);
      let column = [...cell.parentElement.children].indexOf(cell);
      for (;;) {
        row += step[0];
        column += step[1];
        const next = rows[row] && column > 0 ? rows[row].children[column] : undefined;
        if (!next) return;
        const button = next.querySelector("button");
        if (button) {
          event.preventDefault();
          button.focus();
          return;
        }
      }
    });
    document.getElementById("order").addEventListener("change", (event) => sortMatrix(event.target.value));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, column) => {
      header.querySelector("button").addEventListener("click", () => {
        const descending = header.getAttribute("aria-sort") === "ascending";
        for (const other of headers) other.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const key = (row) => {
          const cell = row.cells[column];
          return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
        };
        const rows = [...table.tBodies[0].rows].sort((first, second) => {
          const [a, b] = [key(first), key(second)];
          const difference = typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
          return descending ? -difference : difference;
        });
        table.tBodies[0].append(...rows);
      });
    });
  }
  document.documentElement.dataset.ready = "yes";
})();
