// Where tokens looked: what the server packed, unpacked one row at a time.

// The attention of one row (0: the class token, where there is one) to each patch, as shares of one.
export function row(sent, layer, head, from) {
  const { heads, rows, columns } = sent;
  const out = new Float32Array(columns);
  const chosen = head === 0 ? Array.from({ length: heads }, (_, i) => i) : [head - 1];
  let elsewhere = 0;
  for (const h of chosen) {
    const index = (layer * heads + h) * rows + from;
    const scale = sent.peaks[index] / 255 / chosen.length;
    const start = index * columns;
    for (let i = 0; i < columns; i++) out[i] += sent.levels[start + i] * scale;
    elsewhere += sent.elsewhere[index] / chosen.length;
  }
  return { shares: out, elsewhere };
}

// 0…1 for drawing. The brightest two in a hundred share the top: models keep notes in a few patches that have nothing
// to do with the image (arXiv 2309.16588), and all else would be dark beside them.
export function light(shares) {
  const ranked = Float32Array.from(shares).sort();
  const most = Math.max(ranked[Math.ceil(0.98 * ranked.length) - 1], 1e-9);
  return Float32Array.from(shares, (share) => Math.min(share / most, 1) ** 0.8);
}

export function brightest(shares) {
  let best = 0;
  for (let i = 1; i < shares.length; i++) if (shares[i] > shares[best]) best = i;
  return best;
}
