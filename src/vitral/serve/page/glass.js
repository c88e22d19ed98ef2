// The window: one image made of patches, and the light that falls through them.
const LEAD = "#16131c";

function context(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return pen;
}

// Edges of `count` panes over `length` pixels, and the width of the lead between them.
export function edges(count, length) {
  const lead = Math.max(1, Math.min(4, length / count / 9));
  const pane = (length - lead * (count - 1)) / count;
  return { lead, pane, at: (index) => index * (pane + lead) };
}

export class Glass {
  constructor(canvas, patches) {
    this.canvas = canvas;
    this.patches = patches;
  }

  // image: a picture as the model saw it; grid: [rows, columns]
  async show(image, grid, name) {
    const picture = new Image();
    picture.src = `data:image/png;base64,${image.png}`;
    await picture.decode();
    this.picture = picture;
    this.small = image.width < 128;
    if (!this.grid || this.grid.join() !== grid.join()) this.#cut(grid, name);
    this.grid = grid;
  }

  // A button over each patch; Tab reaches one of them, the arrow keys the others.
  #cut([rows, columns], name) {
    this.patches.replaceChildren();
    this.patches.style.setProperty("--rows", rows);
    this.patches.style.setProperty("--columns", columns);
    for (let index = 0; index < rows * columns; index++) {
      const button = document.createElement("button");
      button.type = "button";
      button.tabIndex = index === 0 ? 0 : -1;
      button.dataset.patch = index;
      this.patches.append(button);
    }
    this.named(name, [rows, columns]);
  }

  named(name, grid = this.grid) {
    [...this.patches.children].forEach((button, index) =>
      button.setAttribute("aria-label", name(Math.floor(index / grid[1]) + 1, (index % grid[1]) + 1)),
    );
  }

  size() {
    const width = this.canvas.parentElement.clientWidth;
    return [width, (width * this.picture.naturalHeight) / this.picture.naturalWidth];
  }

  // light: for each patch 0…1, or a heatmap of levels, or nothing: the patches as they are
  draw({ light, heatmap } = {}) {
    if (!this.picture) return;
    const [width, height] = this.size();
    this.canvas.style.height = `${height}px`;
    const pen = context(this.canvas, width, height);
    const [rows, columns] = this.grid;
    const down = edges(rows, height);
    const across = edges(columns, width);
    const { naturalWidth: W, naturalHeight: H } = this.picture;
    pen.imageSmoothingEnabled = !this.small;
    pen.fillStyle = LEAD;
    pen.fillRect(0, 0, width, height);
    for (let y = 0; y < rows; y++)
      for (let x = 0; x < columns; x++)
        pen.drawImage(
          this.picture,
          (x * W) / columns, (y * H) / rows, W / columns, H / rows,
          across.at(x), down.at(y), across.pane, down.pane,
        );
    if (light) this.#lit(pen, light, down, across);
    if (heatmap) this.#warm(pen, heatmap, width, height);
  }

  #lit(pen, light, down, across) {
    const columns = this.grid[1];
    light.forEach((amount, index) => {
      const place = [across.at(index % columns), down.at(Math.floor(index / columns)), across.pane, down.pane];
      pen.globalCompositeOperation = "source-over";
      pen.fillStyle = `rgba(12, 8, 20, ${0.76 * (1 - amount)})`;
      pen.fillRect(...place);
      pen.globalCompositeOperation = "screen";
      pen.fillStyle = `rgba(255, 176, 59, ${0.55 * amount ** 1.5})`;
      pen.fillRect(...place);
    });
    pen.globalCompositeOperation = "source-over";
  }

  #warm(pen, { width: W, height: H, levels }, width, height) {
    const dark = new ImageData(W, H);
    const glow = new ImageData(W, H);
    levels.forEach((level, index) => {
      const amount = level / 255;
      dark.data.set([12, 8, 20, 255 * 0.76 * (1 - amount)], 4 * index);
      glow.data.set([255, 176, 59, 255 * 0.55 * amount ** 1.5], 4 * index);
    });
    pen.imageSmoothingEnabled = true;
    for (const [layer, way] of [[dark, "source-over"], [glow, "screen"]]) {
      const sheet = new OffscreenCanvas(W, H);
      sheet.getContext("2d").putImageData(layer, 0, 0);
      pen.globalCompositeOperation = way;
      pen.drawImage(sheet, 0, 0, width, height);
    }
    pen.globalCompositeOperation = "source-over";
  }
}

// All layers and heads at once: columns are layers, rows are heads. lights[layer][head]: 0…1 for each patch.
export class Whole {
  constructor(canvas) {
    this.canvas = canvas;
  }

  draw(lights, [rows, columns], chosen) {
    const L = lights.length;
    const h = lights[0].length;
    const room = this.canvas.parentElement.clientWidth;
    const gap = 3;
    const cell = Math.max(10, Math.min(64, (room - gap * (L - 1)) / L));
    const tall = (cell * rows) / columns;
    const width = L * (cell + gap) - gap;
    const height = h * (tall + gap) - gap;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = context(this.canvas, width, height);
    pen.imageSmoothingEnabled = false;
    this.at = (x, y) => [
      Math.min(L - 1, Math.max(0, Math.floor(x / (cell + gap)))),
      Math.min(h - 1, Math.max(0, Math.floor(y / (tall + gap)))),
    ];
    lights.forEach((heads, layer) =>
      heads.forEach((light, head) => {
        const tile = new ImageData(columns, rows);
        light.forEach((amount, index) => tile.data.set(ember(amount), 4 * index));
        const sheet = new OffscreenCanvas(columns, rows);
        sheet.getContext("2d").putImageData(tile, 0, 0);
        const [x, y] = [layer * (cell + gap), head * (tall + gap)];
        pen.drawImage(sheet, x, y, cell, tall);
        if (layer === chosen.layer && (chosen.head === 0 || chosen.head - 1 === head)) {
          pen.strokeStyle = "#ffb03b";
          pen.lineWidth = 2;
          pen.strokeRect(x + 0.5, y + 0.5, cell - 1, tall - 1);
        }
      }),
    );
  }
}

// Dark violet through ruby and amber to white.
const RAMP = [[24, 18, 36], [110, 30, 80], [200, 70, 50], [245, 170, 60], [255, 245, 220]];

function ember(amount) {
  const place = amount * (RAMP.length - 1);
  const low = Math.min(Math.floor(place), RAMP.length - 2);
  const part = place - low;
  return [...RAMP[low].map((from, i) => from + (RAMP[low + 1][i] - from) * part), 255];
}

// The empty window: gold in the middle, rose and violet around it, blue and green towards the edge.
const RINGS = [[44, 48, 38], [38, 352, 24], [350, 232, 262], [226, 214, 256], [214, 204, 232], [208, 160, 222], [200, 216, 164]];

export function panes(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  const pen = context(canvas, width, height);
  const columns = Math.max(6, Math.round(width / 62));
  const rows = Math.max(5, Math.round(height / 62));
  const down = edges(rows, height);
  const across = edges(columns, width);
  const style = getComputedStyle(canvas);
  const [light, glow] = ["--pane-light", "--pane-glow"].map((name) => Number(style.getPropertyValue(name)));
  pen.fillStyle = style.getPropertyValue("--lead");
  pen.fillRect(0, 0, width, height);
  let seed = 11;
  const random = () => ((seed = (seed * 16807) % 2147483647) / 2147483647);
  for (let y = 0; y < rows; y++)
    for (let x = 0; x < columns; x++) {
      const away = Math.hypot(((x + 0.5) / columns - 0.5) * Math.max(1, width / height / 1.3), (y + 0.5) / rows - 0.5);
      const ring = Math.max(0, Math.min(RINGS.length - 1, Math.floor(away * 8 - 0.9 + random() * 1.3)));
      const hue = RINGS[ring][Math.floor(random() * 3)] + 8 * random();
      pen.fillStyle = `hsl(${hue} ${42 + 20 * random()}% ${light + glow * (0.6 - away) + 6 * random()}%)`;
      pen.fillRect(across.at(x), down.at(y), across.pane, down.pane);
    }
}
