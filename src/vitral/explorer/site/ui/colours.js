// Numbers as colours, with the same scales as the walk of the reports.

const PURPLE_ORANGE = [[127, 59, 8], [224, 130, 20], [253, 184, 99], [247, 247, 247], [178, 171, 210], [128, 115, 172], [45, 0, 75]];
const CIVIDIS = [[0, 34, 78], [50, 65, 107], [87, 92, 109], [124, 123, 120], [164, 156, 116], [208, 190, 92], [254, 232, 56]];

function interpolate(stops, fraction) {
  const position = Math.min(Math.max(fraction, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(position), stops.length - 2);
  return stops[low].map((from, channel) => Math.round(from + (stops[low + 1][channel] - from) * (position - low)));
}

// The value below which a share of the sizes lies; large arrays are sampled.
function quantileOfSizes(values, share) {
  const step = Math.max(1, Math.floor(values.length / 20000));
  const sizes = [];
  for (let i = 0; i < values.length; i += step) sizes.push(Math.abs(values[i]));
  sizes.sort((a, b) => a - b);
  return sizes[Math.min(sizes.length - 1, Math.floor(share * sizes.length))] ?? 0;
}

export function valueRange(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// A function from a value to [r, g, b].
// signed: orange below 0, white at 0, purple above. weights: by the square root, from 0. range: from the smallest value.
export function colourScale(values, kind = "signed") {
  if (kind === "signed") {
    const limit = Math.max(quantileOfSizes(values, 0.99), 1e-12);
    return (value) => interpolate(PURPLE_ORANGE, value / limit / 2 + 0.5);
  }
  const [low, high] = valueRange(values);
  if (kind === "weights") return (value) => interpolate(CIVIDIS, Math.sqrt(Math.max(value, 0) / Math.max(high, 1e-12)));
  return (value) => interpolate(CIVIDIS, (value - low) / Math.max(high - low, 1e-12));
}

export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

// Black or white, whichever is easier to read on the colour.
export const inkOn = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#14111a" : "#ffffff");

// Stable, distinguishable colours for classes (lightness and hue differ).
export function classColour(index, count) {
  const hue = (360 * index) / Math.max(count, 1);
  return `hsl(${hue} 65% ${index % 2 ? 42 : 58}%)`;
}
