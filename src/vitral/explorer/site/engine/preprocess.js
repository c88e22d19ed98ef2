/** Preprocessing as in vitral (data/preprocess.py): resize, crop or pad, scale to [0, 1], subtract mean, divide by std.
 *
 * Resizing is Pillow's: antialiased, two passes in fixed-point arithmetic, so that pixels agree exactly. */

const PRECISION = 22; // bits of Pillow's 8-bit filter coefficients

/** source: canvas, ImageBitmap, image or video element, or ImageData. See engine.js for the result. */
export function preprocess(source, settings) {
  return preprocessPixels(readPixels(source, settings), settings);
}

/** RGBA pixels of the source, on a white (or the given) background. */
function readPixels(source, { background = "#ffffff" }) {
  if (source instanceof ImageData) return source;
  const width = source.naturalWidth || source.videoWidth || source.width;
  const height = source.naturalHeight || source.videoHeight || source.height;
  const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d");
  context.fillStyle = background;
  context.fillRect(0, 0, width, height);
  context.drawImage(source, 0, 0, width, height);
  return context.getImageData(0, 0, width, height);
}

/** {pixels, input} of RGBA pixels {data, width, height}. */
export function preprocessPixels({ data, width, height }, settings) {
  const { channels, image_size: size, mean, std } = settings;
  const planes = channels === 1 ? [toGray(data)] : [0, 1, 2].map((c) => plane(data, c));
  const geometry = inputGeometry(height, width, settings);
  const area = size[0] * size[1], pixels = new Uint8ClampedArray(channels * area), input = new Float32Array(channels * area);
  planes.forEach((values, c) => {
    const resized = resize(values, width, height, geometry.width, geometry.height, settings.interpolation);
    const padding = roundHalfEven(mean[c] * 255);
    pixels.set(cutWindow(resized, geometry, size, padding), c * area);
    for (let i = c * area; i < (c + 1) * area; i++) input[i] = (pixels[i] - mean[c] * 255) / (std[c] * 255);
  });
  return { pixels, input };
}

function plane(rgba, channel) {
  return Uint8Array.from({ length: rgba.length / 4 }, (_, i) => rgba[4 * i + channel]);
}

/** Pillow's conversion to L: ITU-R 601 with 16-bit integer weights. */
function toGray(rgba) {
  const at = (i) => (rgba[4 * i] * 19595 + rgba[4 * i + 1] * 38470 + rgba[4 * i + 2] * 7471 + 0x8000) >> 16;
  return Uint8Array.from({ length: rgba.length / 4 }, (_, i) => at(i));
}

/** Size to resize an image to, and the corner of the model's window in it; negative where it is padded (geometry.py). */
export function inputGeometry(height, width, { image_size: [H, W], resize: mode, crop }) {
  if (mode === "stretch") return { height: H, width: W, top: 0, left: 0 };
  if (mode === "pad") {
    const isWide = H * width >= W * height;
    const h = isWide ? Math.max(Math.floor((2 * W * height + width) / (2 * width)), 1) : H;
    const w = isWide ? W : Math.max(Math.floor((2 * H * width + height) / (2 * height)), 1);
    return { height: h, width: w, top: -Math.floor((H - h) / 2), left: -Math.floor((W - w) / 2) };
  }
  const minH = Math.floor(H / crop), minW = Math.floor(W / crop), isWide = minH * width >= minW * height;
  const h = isWide ? minH : Math.floor((minW * height) / width);
  const w = isWide ? Math.floor((minH * width) / height) : minW;
  return { height: h, width: w, top: roundHalfEven((h - H) / 2), left: roundHalfEven((w - W) / 2) };
}

function roundHalfEven(value) {
  const floor = Math.floor(value);
  return value - floor === 0.5 ? floor + (floor % 2) : Math.round(value);
}

function cutWindow(pixels, { height, width, top, left }, [H, W], padding) {
  const out = new Uint8Array(H * W).fill(padding);
  for (let y = 0; y < H; y++) for (let x = 0; x < W; x++) {
    const row = y + top, column = x + left;
    if (row >= 0 && row < height && column >= 0 && column < width) out[y * W + x] = pixels[row * width + column];
  }
  return out;
}

const FILTERS = {
  bilinear: { support: 1, weight: (x) => Math.max(1 - Math.abs(x), 0) },
  bicubic: {
    support: 2,
    weight: (x) => {
      const a = -0.5, t = Math.abs(x);
      if (t < 1) return ((a + 2) * t - (a + 3)) * t * t + 1;
      return t < 2 ? (((t - 5) * t + 8) * t - 4) * a : 0;
    },
  },
};

/** Resize one channel, rows first and then columns, each rounded to 8 bits, as Pillow does it for images that keep their
 * aspect ratio. Pillow 13 starts with the columns where the height shrinks much more, and then rounds differently. */
export function resize(pixels, width, height, newWidth, newHeight, interpolation) {
  const rows = newWidth === width ? pixels : resampleRows(pixels, width, height, newWidth, interpolation);
  if (newHeight === height) return rows;
  const turned = swapAxes(rows, height, newWidth);
  return swapAxes(resampleRows(turned, height, newWidth, newHeight, interpolation), newWidth, newHeight);
}

function swapAxes(pixels, height, width) {
  const out = new Uint8Array(pixels.length);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) out[x * height + y] = pixels[y * width + x];
  return out;
}

function resampleRows(pixels, width, height, newWidth, interpolation) {
  const windows = filterWindows(width, newWidth, FILTERS[interpolation]);
  const out = new Uint8Array(height * newWidth);
  for (let y = 0; y < height; y++) for (let x = 0; x < newWidth; x++) {
    const { first, weights } = windows[x];
    let sum = 2 ** (PRECISION - 1);
    for (let i = 0; i < weights.length; i++) sum += pixels[y * width + first + i] * weights[i];
    out[y * newWidth + x] = Math.min(Math.max(Math.floor(sum / 2 ** PRECISION), 0), 255);
  }
  return out;
}

/** For each output position, the first input position and the fixed-point weights. */
function filterWindows(size, newSize, { support, weight }) {
  const scale = size / newSize, stretch = Math.max(scale, 1), radius = support * stretch;
  return Array.from({ length: newSize }, (_, position) => {
    const center = (position + 0.5) * scale;
    const first = Math.max(Math.floor(center - radius + 0.5), 0);
    const last = Math.min(Math.floor(center + radius + 0.5), size);
    const weights = Array.from({ length: last - first }, (_, i) => weight((i + first - center + 0.5) / stretch));
    const total = weights.reduce((sum, value) => sum + value, 0);
    const fixed = weights.map((value) => (value / total) * 2 ** PRECISION);
    return { first, weights: fixed.map((value) => Math.trunc(value < 0 ? value - 0.5 : value + 0.5)) };
  });
}
