// Line and bar charts in SVG, each with a table of its numbers.
import { element, formatNumber } from "./dom.js";
import { t } from "./i18n.js";

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// series: [{ name, colour, values, dashed? }]; labels: one per value; format: of the values; marked: index of a label
export function lineChart({ caption, series, labels, format = formatNumber, max, min = 0, marked, onpick }) {
  const isNarrow = matchMedia("(max-width: 40rem)").matches; // so that the writing stays readable
  const [width, height, left, right, top, bottom] = [isNarrow ? 340 : 640, isNarrow ? 200 : 250, 46, 12, 12, 30];
  const highest = max ?? Math.max(...series.flatMap(({ values }) => [...values]), 1e-9) * 1.05;
  const x = (index) => left + ((width - left - right) * index) / Math.max(labels.length - 1, 1);
  const y = (value) => top + (height - top - bottom) * (1 - (value - min) / (highest - min));
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": caption });
  for (const share of [0, 0.5, 1]) {
    const value = min + (highest - min) * share;
    chart.append(
      svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid-line" }),
      svg("text", { x: left - 6, y: y(value) + 4, class: "tick", "text-anchor": "end" }, format(value)),
    );
  }
  const every = Math.ceil(labels.length / (isNarrow ? 7 : 13));
  labels.forEach((label, index) => {
    if (index % every && index !== labels.length - 1) return;
    chart.append(
      svg("text", { x: x(index), y: height - 8, class: index === marked ? "tick marked" : "tick", "text-anchor": "middle" }, label),
    );
  });
  if (marked !== undefined) chart.append(svg("line", { x1: x(marked), x2: x(marked), y1: top, y2: height - bottom, class: "marked-line" }));
  for (const { colour, values, dashed } of series) {
    const points = [...values].map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    chart.append(svg("polyline", { points, class: "series", stroke: colour, "stroke-dasharray": dashed ? "5 4" : "none" }));
    if (!dashed) [...values].forEach((value, index) => chart.append(svg("circle", { cx: x(index), cy: y(value), r: 3.2, fill: colour })));
  }
  if (onpick)
    chart.addEventListener("click", (event) => {
      const box = chart.getBoundingClientRect();
      const position = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right);
      onpick(Math.min(labels.length - 1, Math.max(0, Math.round(position * (labels.length - 1)))));
    });
  return element(
    "figure",
    { class: "chart-figure" },
    chart,
    legend(series),
    element("figcaption", {}, caption),
    chartTable(series, labels, format),
  );
}

function legend(series) {
  return element(
    "ul",
    { class: "legend" },
    series.map(({ name, colour, dashed }) =>
      element("li", {}, element("span", { class: dashed ? "swatch dashed" : "swatch", style: `--colour: ${colour}` }), name),
    ),
  );
}

function chartTable(series, labels, format) {
  const details = element("details", { class: "table" }, element("summary", {}, t("numbers")));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const head = element("tr", {}, element("td"), labels.map((label) => element("th", { scope: "col" }, label)));
    const rows = series.map(({ name, values }) =>
      element("tr", {}, element("th", { scope: "row" }, name), [...values].map((value) => element("td", {}, format(value)))),
    );
    details.append(
      element(
        "div",
        { class: "scroll", tabindex: "0" },
        element("table", { class: "numbers" }, element("thead", {}, head), element("tbody", {}, rows)),
      ),
    );
  });
  return details;
}

// Horizontal bars. rows: [{ name, value, share (0..1), before? (0..1), note? }]
export function bars(caption, rows) {
  return element(
    "table",
    { class: "bars" },
    element("caption", {}, caption),
    element(
      "tbody",
      {},
      rows.map(({ name, value, share, before, note, strong }) =>
        element(
          "tr",
          { class: strong ? "strong" : "" },
          element("th", { scope: "row" }, name),
          element(
            "td",
            { class: "bar-cell" },
            element("span", { class: "bar", style: `--share: ${Math.min(Math.max(share, 0), 1)}` }),
            before !== undefined && element("span", { class: "bar-before", style: `--share: ${Math.min(Math.max(before, 0), 1)}` }),
          ),
          element("td", { class: "value" }, value),
          note !== undefined && element("td", { class: "note" }, note),
        ),
      ),
    ),
  );
}
