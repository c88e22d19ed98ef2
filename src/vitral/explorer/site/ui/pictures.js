// Small pictures of the image: cut into patches, lit by weights, or coloured by values.
import { toBrightness } from "../page/attention.js";
import { colourScale, css } from "./colours.js";
import { app } from "./context.js";
import { element, sharpContext } from "./dom.js";

export const currentPicture = () => app.changedPicture ?? app.picture;

// The part of the image that is cut into patches; some models leave a margin.
export function gridPicture(picture = currentPicture()) {
  const { margin } = app.entry;
  if (!margin) return picture;
  const canvas = element("canvas", { width: picture.width - 2 * margin, height: picture.height - 2 * margin });
  canvas.getContext("2d").drawImage(picture, -margin, -margin);
  return canvas;
}

// Greyscale or RGB values C×H×W in [0, 255] on a canvas.
export function canvasOfPixels(pixels, channels, height, width) {
  const canvas = element("canvas", { width, height });
  const image = new ImageData(width, height);
  const size = height * width;
  for (let i = 0; i < size; i++)
    for (let channel = 0; channel < 3; channel++) image.data[4 * i + channel] = pixels[(channels === 1 ? 0 : channel) * size + i];
  for (let i = 0; i < size; i++) image.data[4 * i + 3] = 255;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The normalised input of the model as an image again.
export function canvasOfInput(input) {
  const { channels, image_size: [height, width] } = app.entry.preprocessing;
  const { mean, std } = app.entry.preprocessing;
  const size = height * width;
  const pixels = Float32Array.from(input, (value, i) => 255 * (value * std[Math.floor(i / size)] + mean[Math.floor(i / size)]));
  return canvasOfPixels(pixels, channels, height, width);
}

// The image, lit where the weights are large. weights: one per patch, or null for the plain image
export function litPicture(weights, side, { label, brightness } = {}) {
  const picture = gridPicture();
  const height = Math.round((side * picture.height) / picture.width);
  const canvas = element(
    "canvas",
    { class: "picture", role: label ? "img" : undefined, "aria-label": label, "aria-hidden": label ? undefined : "true" },
  );
  const context = sharpContext(canvas, side, height);
  context.imageSmoothingEnabled = picture.width >= 128;
  context.drawImage(picture, 0, 0, side, height);
  if (weights) light(context, brightness ?? toBrightness(weights), side, height);
  return canvas;
}

function light(context, brightness, width, height) {
  const [rows, columns] = app.entry.grid;
  const [stepX, stepY] = [width / columns, height / rows];
  brightness.forEach((value, index) => {
    const [x, y] = [(index % columns) * stepX, Math.floor(index / columns) * stepY];
    context.globalCompositeOperation = "source-over";
    context.fillStyle = `rgba(12, 8, 20, ${0.76 * (1 - value)})`;
    context.fillRect(x, y, stepX + 0.5, stepY + 0.5);
    context.globalCompositeOperation = "screen";
    context.fillStyle = `rgba(255, 176, 59, ${0.6 * value ** 1.5})`;
    context.fillRect(x, y, stepX + 0.5, stepY + 0.5);
  });
  context.globalCompositeOperation = "source-over";
}

// One coloured square per patch. marked: a patch with a frame
export function patchMap(values, side, { scale = "range", marked, label, colour } = {}) {
  const [rows, columns] = app.entry.grid;
  const height = Math.round((side * rows) / columns);
  const canvas = element("canvas", { class: "picture", role: "img", "aria-label": label ?? "" });
  const context = sharpContext(canvas, side, height);
  const toColour = colour ?? colourScale(values, scale);
  const [stepX, stepY] = [side / columns, height / rows];
  for (let index = 0; index < rows * columns; index++) {
    context.fillStyle = css(toColour(values[index]));
    context.fillRect((index % columns) * stepX, Math.floor(index / columns) * stepY, stepX + 0.5, stepY + 0.5);
  }
  if (marked >= 0) {
    context.strokeStyle = "#ffb03b";
    context.lineWidth = 2.5;
    context.strokeRect((marked % columns) * stepX + 1, Math.floor(marked / columns) * stepY + 1, stepX - 2, stepY - 2);
  }
  return canvas;
}

export function captioned(node, ...caption) {
  return element("figure", { class: "small-figure", style: `width: ${node.style.width}` }, node, element("figcaption", {}, ...caption));
}
