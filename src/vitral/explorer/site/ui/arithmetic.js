// Single numbers worked out by hand: where a dot product, a weight or a sum comes from.
import {
  app, attentionOf, currentBlock, currentHead, currentKey, currentPatch, currentToken, dot, headPart, largest, norm, numTokens, rowOf, tokenName, tokenPhrase, capital } from "./context.js";
import { element, formatNumber, percent } from "./dom.js";
import { matrixFigure } from "./figure.js";
import { t } from "./i18n.js";
import { setState, state } from "./state.js";

export function workedOut(heading, ...content) {
  return element("section", { class: "worked" }, element("h3", {}, heading), content);
}

const step = (expression, result, note) =>
  element(
    "li",
    {},
    element("span", { class: "expression" }, expression),
    element("b", {}, ` = ${result}`),
    note && element("span", { class: "small" }, ` ${note}`),
  );

// Two vectors, their products and the sum as a picture of three rows.
function productPicture(a, b, nameA, nameB, caption, key) {
  const d = a.length;
  const products = Float32Array.from(a, (value, index) => value * b[index]);
  const values = new Float32Array(3 * d);
  values.set(a);
  values.set(b, d);
  values.set(products, 2 * d);
  const names = [nameA, nameB, `${nameA} × ${nameB}`];
  return element("div", { class: "product" },
    element("div", { class: "product-names", "aria-hidden": "true" }, names.map((name) => element("span", {}, name))),
    matrixFigure({ values, rows: 3, columns: d, caption, rowName: (row) => names[row], key, size: 560, perRow: true }),
  );
}

const tokenSelect = (label, token, key, onchange) =>
  element("label", { class: "field" }, label, " ",
    element("select", { "data-focus": key, onchange: (event) => onchange(Number(event.target.value)) },
      Array.from({ length: numTokens() }, (_, index) => element("option", { value: index, selected: index === token }, tokenName(index)))));

// q·k, divided by √d, through softmax, for the selected query and key.
export function attentionWeight({ withSelects = true } = {}) {
  const [block, head, i, j] = [currentBlock(), currentHead(), currentToken(), currentKey()];
  const T = numTokens();
  const d = app.entry.config.width / app.entry.config.heads;
  const { q, k } = app.trace.blocks[block];
  const query = rowOf(headPart(q, head, T * d), i, d);
  const keys = headPart(k, head, T * d);
  const temperature = temperatureOf(block);
  const scores = Float32Array.from({ length: T }, (_, index) => dot(query, rowOf(keys, index, d)) / Math.sqrt(d) / temperature);
  const product = dot(query, rowOf(keys, j, d));
  const shift = Math.max(...scores);
  const total = scores.reduce((sum, score) => sum + Math.exp(score - shift), 0);
  const weight = attentionOf(app.trace, block, head, i)[j];
  const divisor = temperature === 1 ? `√${d}` : `(√${d} · ${formatNumber(temperature)})`;
  return workedOut(
    t("dot-title"),
    withSelects && element("p", { class: "fields" },
      tokenSelect(t("query-of"), i, "query-token", (token) => setState({ token })),
      tokenSelect(t("key-of"), j, "key-token", (key) => setState({ key }))),
    productPicture(query, rowOf(keys, j, d), "q", "k", t("dot-caption", { d }), "dot"),
    element("ol", { class: "sums" },
      step("q · k", formatNumber(product), t("dot-sum", { d })),
      step(`${formatNumber(product)} / ${divisor}`, formatNumber(scores[j]), t("dot-scale")),
      step(`exp(${formatNumber(scores[j])}) / Σ exp(…)`, percent(Math.exp(scores[j] - shift) / total), t("dot-softmax", { T })),
    ),
    element(
      "p",
      {},
      t("dot-meaning", { query: tokenPhrase(i), key: tokenPhrase(j), share: percent(weight), block: block + 1, head: head + 1 }),
    ),
    strongestKeys(scores, block, head, i, j),
  );
}

function temperatureOf(block) {
  const { temperature = 1 } = state.changes;
  return typeof temperature === "object" ? (temperature[block] ?? 1) : temperature;
}

function strongestKeys(scores, block, head, i, j) {
  const weights = attentionOf(app.trace, block, head, i);
  return element("table", { class: "bars" },
    element("caption", {}, t("strongest", { query: tokenPhrase(i) })),
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        element("th", { scope: "col" }, t("token")),
        element("th", { scope: "col" }, t("weight")),
        element("td"),
        element("th", { scope: "col" }, t("score")),
      ),
    ),
    element("tbody", {}, largest(weights, 6).map((token) =>
      element("tr", { class: token === j ? "strong" : "" },
        element(
          "th",
          { scope: "row" },
          element(
            "button",
            { type: "button", class: "link", "data-focus": `strongest:${token}`, onclick: () => setState({ key: token }) },
            tokenName(token),
          ),
        ),
        element("td", { class: "bar-cell" }, element("span", { class: "bar", style: `--share: ${weights[token]}` })),
        element("td", { class: "value" }, percent(weights[token])),
        element("td", { class: "note" }, formatNumber(scores[token]))))));
}

// One number of the patch embedding: a patch times a filter.
export function embeddingNumber() {
  const patch = currentPatch();
  const filters = app.model.filters();
  const D = app.entry.config.width;
  const size = filters.channels * filters.side ** 2;
  if (app.trace.features !== null || app.trace.patches.length / (app.entry.grid[0] * app.entry.grid[1]) !== size) return null;
  const row = rowOf(app.trace.embedded, patch, D);
  const strongest = largest(row.map(Math.abs), 1)[0];
  const pixels = rowOf(app.trace.patches, patch, size);
  const filter = rowOf(filters.data, strongest, size);
  const sum = dot(pixels, filter);
  return workedOut(
    t("embedding-title"),
    element("p", {}, t("embedding-lead", { patch: capital(tokenPhrase(patch + app.entry.prefix)), n: strongest + 1 })),
    element(
      "div",
      { class: "figures small-figures" },
      smallMatrix(pixels, filters, t("pixels")),
      smallMatrix(filter, filters, t("filter")),
      smallMatrix(pixels.map((value, i) => value * filter[i]), filters, `${t("pixels")} × ${t("filter")}`),
    ),
    productPicture(pixels, filter, t("pixels"), t("filter"), t("dot-caption", { d: size }), "embedding-dot"),
    element("ol", { class: "sums" },
      step(`${t("pixels")} · ${t("filter")}`, formatNumber(sum), t("dot-sum", { d: size })),
      step(
        `${formatNumber(sum)} + b`,
        formatNumber(row[strongest]),
        t("bias-note", { b: formatNumber(row[strongest] - sum), n: strongest + 1, D }),
      ),
    ),
  );
}

// One channel of a patch or filter as a square.
function smallMatrix(values, { side, channels }, caption) {
  const shown = channels === 1 ? values : values.subarray(0, side * side);
  return matrixFigure(
    {
      values: shown,
      rows: side,
      columns: side,
      caption: channels === 1 ? caption : `${caption}, ${t("first-channel")}`,
      size: 130,
      columnName: (column) => t("column-n", { n: column + 1 }),
    },
  );
}

// How much the attention branch or the MLP changes the selected token.
export function residualSum(kind) {
  const { width: D } = app.entry.config;
  const token = currentToken();
  const block = app.trace.blocks[currentBlock()];
  const [before, added, after] = kind === "attention"
    ? [app.trace.tokens[currentBlock()], block.attentionAdded, block.middle]
    : [block.middle, block.mlpAdded, app.trace.tokens[currentBlock() + 1]];
  const [z, f, sum] = [before, added, after].map((values) => rowOf(values, token, D));
  const values = new Float32Array(3 * D);
  values.set(z);
  values.set(f, D);
  values.set(sum, 2 * D);
  const names = [t("before"), t("added"), t("after")];
  const widest = largest(f.map(Math.abs), 1)[0];
  return workedOut(
    t("residual-title", { token: tokenPhrase(token) }),
    element("div", { class: "product" },
      element("div", { class: "product-names", "aria-hidden": "true" }, names.map((name) => element("span", {}, name))),
      matrixFigure(
        {
          values,
          rows: 3,
          columns: D,
          caption: t("residual-caption", { D }),
          rowName: (row) => names[row],
          key: `residual-${kind}`,
          size: 560,
        },
      )),
    element("ol", { class: "sums" },
      step(t("residual-number", { n: widest + 1, z: formatNumber(z[widest]), f: formatNumber(f[widest]) }), formatNumber(sum[widest])),
      step(
        t("residual-norms", { f: formatNumber(norm(f)), z: formatNumber(norm(z)) }),
        percent(norm(f) / Math.max(norm(z), 1e-12)),
        t("residual-meaning"),
      ),
    ),
  );
}
