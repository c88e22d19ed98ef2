"use strict";
(() => {
  const data = JSON.parse(document.getElementById("material").textContent);
  const matrix = document.getElementById("matrix");
  const panel = document.getElementById("cell");

  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  };

  function show(button) {
    const [is, said] = button.dataset.cell.split(",").map(Number);
    for (const other of matrix.querySelectorAll('[aria-pressed="true"]')) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", "true");
    const names = data.classes;
    const count = Number(button.textContent);
    const kept = data.cells[button.dataset.cell] || [];
    const what = is === said ? `${names[is]}, recognised` : `${names[is]}, taken for ${names[said]}`;
    panel.replaceChildren(make("h3", `${what}: ${count} of ${data.images[is]}`));
    if (kept.length < count) {
      panel.append(make("p", `${kept.length} shown, ${is === said ? "the least sure" : "the surest"} first`, "note"));
    }
    const list = make("ul", undefined, "pictures");
    for (const [picture, sure] of kept) {
      const item = make("li");
      const image = make("img");
      image.src = data.pictures[picture];
      image.alt = `an image of ${names[is]}`;
      if (data.pixelated) image.className = "pixels";
      item.append(image, make("div", `${names[said]} ${(100 * sure).toFixed(1)} %`));
      list.append(item);
    }
    panel.append(list);
  }

  function arrange(order) {
    const places = data.orders[order];
    const sort = (row) => {
      const cells = new Map([...row.children].slice(1).map((cell) => [Number(cell.dataset.said), cell]));
      row.append(...places.map((place) => cells.get(place)));
    };
    sort(matrix.tHead.rows[matrix.tHead.rows.length - 1]);
    const body = matrix.tBodies[0];
    const rows = new Map([...body.rows].map((row) => [Number(row.dataset.is), row]));
    for (const row of rows.values()) sort(row);
    body.append(...places.map((place) => rows.get(place)));
  }

  if (matrix) {
    matrix.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-cell]");
      if (button) show(button);
    });
    matrix.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      const here = event.target.closest("td");
      if (!step || !here) return;
      const rows = [...matrix.tBodies[0].rows];
      let row = rows.indexOf(here.parentElement);
      let column = [...here.parentElement.children].indexOf(here);
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
    document.getElementById("order").addEventListener("change", (event) => arrange(event.target.value));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => {
          const cell = row.cells[column];
          return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
        };
        const rows = [...table.tBodies[0].rows].sort((one, other) => {
          const [a, b] = [key(one), key(other)];
          const way = typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
          return down ? -way : way;
        });
        table.tBodies[0].append(...rows);
      });
    });
  }
  document.documentElement.dataset.ready = "yes";
})();
