// Drawing on canvases: the image cut into patches, the overview of all blocks and heads, and the start page's backdrop.
const GAP_COLOUR = "#16131c";

function scaledContext(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

// Positions of `count` tiles along `length` pixels, with gaps between them.
export function tileLayout(count, length) {
  const gap = Math.max(1, Math.min(4, length / count / 9));
  const size = (length - gap * (count - 1)) / count;
  return { size, start: (index) => index * (size + gap) };
}

// The image as the model receives it, cut into patches, with a button over each patch.
export class ImageView {
  constructor(canvas, buttons) {
    this.canvas = canvas;
    this.buttons = buttons;
  }

  // image: { png, width }; grid: [rows, columns]; patchLabel(row, column): the name of a patch, counted from 1
  async load(image, grid, patchLabel) {
    const element = new Image();
    element.src = `data:image/png;base64,${image.png}`;
    await element.decode();
    this.image = element;
    this.pixelated = image.width < 128;
    if (!this.grid || this.grid.join() !== grid.join()) this.#createButtons(grid, patchLabel);
    this.grid = grid;
  }

  // Only one button is in the tab order; the arrow keys reach the others.
  #createButtons([rows, columns], patchLabel) {
    this.buttons.replaceChildren();
    this.buttons.style.setProperty("--rows", rows);
    this.buttons.style.setProperty("--columns", columns);
    for (let index = 0; index < rows * columns; index++) {
      const button = document.createElement("button");
      button.type = "button";
      button.tabIndex = index === 0 ? 0 : -1;
      button.dataset.patch = index;
      this.buttons.append(button);
    }
    this.labelPatches(patchLabel, [rows, columns]);
  }

  labelPatches(patchLabel, [, columns] = this.grid) {
    [...this.buttons.children].forEach((button, index) =>
      button.setAttribute("aria-label", patchLabel(Math.floor(index / columns) + 1, (index % columns) + 1)),
    );
  }

  // brightness: a value in [0, 1] per patch; heatmap: { width, height, values }; neither: the plain patches
  draw({ brightness, heatmap } = {}) {
    if (!this.image) return;
    const { naturalWidth: W, naturalHeight: H } = this.image;
    const width = this.canvas.parentElement.clientWidth;
    const height = (width * H) / W;
    this.canvas.style.height = `${height}px`;
    const context = scaledContext(this.canvas, width, height);
    const [rows, columns] = this.grid;
    const vertical = tileLayout(rows, height);
    const horizontal = tileLayout(columns, width);
    context.imageSmoothingEnabled = !this.pixelated;
    context.fillStyle = GAP_COLOUR;
    context.fillRect(0, 0, width, height);
    for (let y = 0; y < rows; y++)
      for (let x = 0; x < columns; x++)
        context.drawImage(
          this.image,
          (x * W) / columns, (y * H) / rows, W / columns, H / rows,
          horizontal.start(x), vertical.start(y), horizontal.size, vertical.size,
        );
    if (brightness) this.#drawBrightness(context, brightness, vertical, horizontal);
    if (heatmap) this.#drawHeatmap(context, heatmap, width, height);
  }

  // Darken each patch, then add light in proportion to its brightness.
  #drawBrightness(context, brightness, vertical, horizontal) {
    const columns = this.grid[1];
    brightness.forEach((value, index) => {
      const left = horizontal.start(index % columns);
      const top = vertical.start(Math.floor(index / columns));
      context.globalCompositeOperation = "source-over";
      context.fillStyle = `rgba(12, 8, 20, ${0.76 * (1 - value)})`;
      context.fillRect(left, top, horizontal.size, vertical.size);
      context.globalCompositeOperation = "screen";
      context.fillStyle = `rgba(255, 176, 59, ${0.55 * value ** 1.5})`;
      context.fillRect(left, top, horizontal.size, vertical.size);
    });
    context.globalCompositeOperation = "source-over";
  }

  #drawHeatmap(context, { width: W, height: H, values }, width, height) {
    const shadow = new ImageData(W, H);
    const glow = new ImageData(W, H);
    values.forEach((level, index) => {
      const value = level / 255;
      shadow.data.set([12, 8, 20, 255 * 0.76 * (1 - value)], 4 * index);
      glow.data.set([255, 176, 59, 255 * 0.55 * value ** 1.5], 4 * index);
    });
    context.imageSmoothingEnabled = true;
    for (const [pixels, operation] of [[shadow, "source-over"], [glow, "screen"]]) {
      const layer = new OffscreenCanvas(W, H);
      layer.getContext("2d").putImageData(pixels, 0, 0);
      context.globalCompositeOperation = operation;
      context.drawImage(layer, 0, 0, width, height);
    }
    context.globalCompositeOperation = "source-over";
  }
}

// Attention of all blocks (columns) and heads (rows) at once.
export class AttentionOverview {
  constructor(canvas) {
    this.canvas = canvas;
  }

  // brightness[block][head]: a value in [0, 1] per patch; selected: { block, head }, head 0 for all heads
  draw(brightness, [rows, columns], selected) {
    const numBlocks = brightness.length;
    const numHeads = brightness[0].length;
    const available = this.canvas.parentElement.clientWidth;
    const gap = 3;
    const cellWidth = Math.max(10, Math.min(64, (available - gap * (numBlocks - 1)) / numBlocks));
    const cellHeight = (cellWidth * rows) / columns;
    const width = numBlocks * (cellWidth + gap) - gap;
    const height = numHeads * (cellHeight + gap) - gap;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = scaledContext(this.canvas, width, height);
    context.imageSmoothingEnabled = false;
    this.cellAt = (x, y) => [
      Math.min(numBlocks - 1, Math.max(0, Math.floor(x / (cellWidth + gap)))),
      Math.min(numHeads - 1, Math.max(0, Math.floor(y / (cellHeight + gap)))),
    ];
    brightness.forEach((heads, block) =>
      heads.forEach((values, head) => {
        const pixels = new ImageData(columns, rows);
        values.forEach((value, index) => pixels.data.set(emberColour(value), 4 * index));
        const tile = new OffscreenCanvas(columns, rows);
        tile.getContext("2d").putImageData(pixels, 0, 0);
        const [x, y] = [block * (cellWidth + gap), head * (cellHeight + gap)];
        context.drawImage(tile, x, y, cellWidth, cellHeight);
        if (block === selected.block && (selected.head === 0 || selected.head - 1 === head)) {
          context.strokeStyle = "#ffb03b";
          context.lineWidth = 2;
          context.strokeRect(x + 0.5, y + 0.5, cellWidth - 1, cellHeight - 1);
        }
      }),
    );
  }
}

// Colour map: dark violet, ruby, amber, white.
const EMBER = [[24, 18, 36], [110, 30, 80], [200, 70, 50], [245, 170, 60], [255, 245, 220]];

function emberColour(value) {
  const position = value * (EMBER.length - 1);
  const low = Math.min(Math.floor(position), EMBER.length - 2);
  const fraction = position - low;
  return [...EMBER[low].map((from, i) => from + (EMBER[low + 1][i] - from) * fraction), 255];
}

// Hues of the backdrop from the centre to the edge: gold, rose and violet, blue and green.
const RING_HUES = [[44, 48, 38], [38, 352, 24], [350, 232, 262], [226, 214, 256], [214, 204, 232], [208, 160, 222], [200, 216, 164]];

// Coloured tiles behind the start card. The pseudo-random sequence is fixed, so the backdrop never changes.
export function drawBackdrop(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  const context = scaledContext(canvas, width, height);
  const columns = Math.max(6, Math.round(width / 62));
  const rows = Math.max(5, Math.round(height / 62));
  const vertical = tileLayout(rows, height);
  const horizontal = tileLayout(columns, width);
  const style = getComputedStyle(canvas);
  const [lightness, glow] = ["--tile-lightness", "--tile-glow"].map((name) => Number(style.getPropertyValue(name)));
  context.fillStyle = style.getPropertyValue("--tile-gap");
  context.fillRect(0, 0, width, height);
  let seed = 11;
  const random = () => ((seed = (seed * 16807) % 2147483647) / 2147483647);
  for (let y = 0; y < rows; y++)
    for (let x = 0; x < columns; x++) {
      const stretch = Math.max(1, width / height / 1.3);
      const distance = Math.hypot(((x + 0.5) / columns - 0.5) * stretch, (y + 0.5) / rows - 0.5);
      const ring = Math.max(0, Math.min(RING_HUES.length - 1, Math.floor(distance * 8 - 0.9 + random() * 1.3)));
      const hue = RING_HUES[ring][Math.floor(random() * 3)] + 8 * random();
      context.fillStyle = `hsl(${hue} ${42 + 20 * random()}% ${lightness + glow * (0.6 - distance) + 6 * random()}%)`;
      context.fillRect(horizontal.start(x), vertical.start(y), horizontal.size, vertical.size);
    }
}
