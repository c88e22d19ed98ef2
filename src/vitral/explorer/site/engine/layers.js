/** The layers of a ViT that are not matrix products. Shapes as in engine.js. */

/** Layer norm of rows of `width` values, with learned scale and shift (null: none). */
export function layerNorm(x, width, scale, shift, eps) {
  const out = new Float32Array(x.length);
  for (let start = 0; start < x.length; start += width) {
    let mean = 0;
    for (let i = 0; i < width; i++) mean += x[start + i];
    mean /= width;
    let variance = 0;
    for (let i = 0; i < width; i++) variance += (x[start + i] - mean) ** 2;
    const factor = 1 / Math.sqrt(variance / width + eps);
    for (let i = 0; i < width; i++) {
      const value = (x[start + i] - mean) * factor;
      out[start + i] = scale === null ? value : value * scale[i] + shift[i];
    }
  }
  return out;
}

/** Gradient of layer norm with respect to its input x, from that with respect to its output. */
export function layerNormBackward(x, width, scale, g, eps) {
  const out = new Float32Array(x.length), normalised = layerNorm(x, width, null, null, eps);
  for (let start = 0; start < x.length; start += width) {
    let mean = 0, variance = 0, gMean = 0, gProduct = 0;
    for (let i = 0; i < width; i++) mean += x[start + i] / width;
    for (let i = 0; i < width; i++) variance += (x[start + i] - mean) ** 2 / width;
    for (let i = 0; i < width; i++) {
      const value = g[start + i] * scale[i];
      gMean += value / width;
      gProduct += (value * normalised[start + i]) / width;
    }
    const factor = 1 / Math.sqrt(variance + eps);
    for (let i = 0; i < width; i++) {
      out[start + i] = factor * (g[start + i] * scale[i] - gMean - normalised[start + i] * gProduct);
    }
  }
  return out;
}

/** Softmax of rows of `width` values after multiplying them by `factor`; in place. */
export function softmaxRows(x, width, factor = 1) {
  for (let start = 0; start < x.length; start += width) {
    let max = -Infinity;
    for (let i = 0; i < width; i++) max = Math.max(max, x[start + i] * factor);
    let sum = 0;
    for (let i = 0; i < width; i++) sum += x[start + i] = Math.exp(x[start + i] * factor - max);
    for (let i = 0; i < width; i++) x[start + i] /= sum;
  }
  return x;
}

/** Add a bias to every row; in place. */
export function addBias(x, bias) {
  for (let start = 0; start < x.length; start += bias.length) {
    for (let i = 0; i < bias.length; i++) x[start + i] += bias[i];
  }
  return x;
}

/** log Σ exp(x) without overflow. */
export function logSumExp(x) {
  const max = x.reduce((a, b) => Math.max(a, b), -Infinity);
  return max + Math.log(x.reduce((sum, value) => sum + Math.exp(value - max), 0));
}

/** erf with an error below 1.2e-7 (Numerical Recipes, section 6.2.2), well below float32 rounding of GELU's input. */
function erf(x) {
  const t = 1 / (1 + 0.5 * Math.abs(x));
  const polynomial =
    -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * (0.09678418 + t * (-0.18628806 +
    t * (0.27886807 + t * (-1.13520398 + t * (1.48851587 + t * (-0.82215223 + t * 0.17087277))))))));
  const tail = t * Math.exp(-x * x + polynomial);
  return x >= 0 ? 1 - tail : tail - 1;
}

/** Activations of the MLP by their name in config.json. */
export const ACTIVATIONS = {
  gelu: (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x))),
  quick_gelu: (x) => x / (1 + Math.exp(-1.702 * x)),
  relu: (x) => Math.max(x, 0),
};

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

/** Their derivatives. */
export const ACTIVATION_DERIVATIVES = {
  gelu: (x) => 0.5 * (1 + erf(x * Math.SQRT1_2)) + (x * Math.exp(-x * x / 2)) / Math.sqrt(2 * Math.PI),
  gelu_tanh: (x) => {
    const a = Math.sqrt(2 / Math.PI), tanh = Math.tanh(a * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * a * (1 + 3 * 0.044715 * x * x);
  },
  quick_gelu: (x) => sigmoid(1.702 * x) * (1 + 1.702 * x * (1 - sigmoid(1.702 * x))),
  relu: (x) => Number(x > 0),
};

/** Apply the activation to T×M; SwiGLU halves T×2M: silu(gate)·value. */
export function activate(x, name, hidden) {
  if (name !== "swiglu") return x.map(ACTIVATIONS[name]);
  const out = new Float32Array(x.length / 2);
  for (let i = 0; i < out.length; i++) {
    const start = Math.floor(i / hidden) * 2 * hidden + (i % hidden);
    const gate = x[start];
    out[i] = (gate / (1 + Math.exp(-gate))) * x[start + hidden];
  }
  return out;
}

/** Rotate pairs of channels (i, i + d/2) of h×T×d by the angles of each token (RoPE); in place.
 * rows: the row of `rope` for each token; direction -1 rotates back. */
export function applyRope(x, rope, rows, T, d, direction = 1) {
  const half = d / 2, size = T * half;
  for (let head = 0; head < x.length; head += T * d) {
    for (let t = 0; t < T; t++) {
      const angles = rows[t] * half, start = head + t * d;
      for (let i = 0; i < half; i++) {
        const cos = rope[angles + i], sin = direction * rope[size + angles + i];
        const a = x[start + i], b = x[start + half + i];
        x[start + i] = a * cos - b * sin;
        x[start + half + i] = a * sin + b * cos;
      }
    }
  }
  return x;
}
