// Attention weights, unpacked one row at a time.

// Attention of one row (0 is the class token, if there is one) to each patch, and to all non-patch tokens together.
// head: 0 for the mean over all heads.
export function attentionRow(attention, layer, head, row) {
  const { heads, rows, columns } = attention;
  const weights = new Float32Array(columns);
  const selected = head === 0 ? Array.from({ length: heads }, (_, i) => i) : [head - 1];
  let nonPatch = 0;
  for (const h of selected) {
    const index = (layer * heads + h) * rows + row;
    const scale = attention.row_max[index] / 255 / selected.length;
    const start = index * columns;
    for (let i = 0; i < columns; i++) weights[i] += attention.values[start + i] * scale;
    nonPatch += attention.non_patch[index] / selected.length;
  }
  return { weights, nonPatch };
}

// Brightness in [0, 1] for drawing. The top 2% are clipped: models use a few patches as scratch space, with very high
// attention that is unrelated to the image (arXiv 2309.16588), and everything else would look dark next to them.
export function toBrightness(weights) {
  const sorted = Float32Array.from(weights).sort();
  const maximum = Math.max(sorted[Math.ceil(0.98 * sorted.length) - 1], 1e-9);
  return Float32Array.from(weights, (weight) => Math.min(weight / maximum, 1) ** 0.8);
}

export function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}
