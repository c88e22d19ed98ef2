/** Weights as `vitral explorer` writes them (explorer/weights.py): base64 of a deflated buffer of all tensors. */

/** {name: Float32Array} of all tensors. layout: [{name, shape, dtype, offset}], offsets in bytes of the buffer. */
export async function decodeWeights(encoded, layout) {
  const bytes = await inflate(fromBase64(encoded));
  return Object.fromEntries(layout.map((tensor) => [tensor.name, decodeTensor(bytes, tensor)]));
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  return Uint8Array.from({ length: binary.length }, (_, i) => binary.charCodeAt(i));
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function decodeTensor(bytes, { shape, dtype, offset }) {
  const count = shape.reduce((product, side) => product * side, 1);
  return DECODERS[dtype](bytes, offset, count, shape);
}

/** All first bytes of the values, then all second bytes and so on: similar bytes together compress better. */
function gatherPlanes(bytes, offset, count, size, shift) {
  const out = new Uint32Array(count);
  for (let plane = 0; plane < size; plane++) {
    for (let i = 0; i < count; i++) out[i] |= bytes[offset + plane * count + i] << (8 * (plane + shift));
  }
  return new Float32Array(out.buffer);
}

const DECODERS = {
  float32: (bytes, offset, count) => gatherPlanes(bytes, offset, count, 4, 0),
  bfloat16: (bytes, offset, count) => gatherPlanes(bytes, offset, count, 2, 2), // the upper half of a float32
  /** Signed bytes times one scale per row; the scales (float32) come first. */
  int8: (bytes, offset, count, shape) => {
    const rows = shape[0], width = count / rows;
    const scales = gatherPlanes(bytes, offset, rows, 4, 0), start = offset + 4 * rows;
    return Float32Array.from({ length: count }, (_, i) => ((bytes[start + i] << 24) >> 24) * scales[Math.floor(i / width)]);
  },
};
