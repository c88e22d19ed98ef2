// A pad to draw on, and image helpers for drawings and scans.
const STROKE_WIDTH = 22;

export class DrawingPad {
  // light: light strokes on a dark background, as in MNIST
  constructor(canvas, onStroke) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.onStroke = onStroke;
    this.strokes = []; // each a list of [x, y] in canvas pixels
    this.light = true;
    let stroke = null;
    const position = (event) => {
      const box = canvas.getBoundingClientRect();
      return [
        ((event.clientX - box.left) * canvas.width) / box.width,
        ((event.clientY - box.top) * canvas.height) / box.height,
      ];
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      canvas.setPointerCapture(event.pointerId);
      stroke = [position(event)];
      this.strokes.push(stroke);
      this.paint();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!stroke) return;
      const moves = event.getCoalescedEvents?.() ?? [];
      for (const move of moves.length ? moves : [event]) stroke.push(position(move));
      this.paint();
    });
    for (const type of ["pointerup", "pointercancel"])
      canvas.addEventListener(type, () => {
        if (stroke) this.onStroke();
        stroke = null;
      });
  }

  paint(context = this.context, transform = ([x, y]) => [x, y]) {
    const side = this.canvas.width;
    context.fillStyle = this.light ? "#000" : "#fff";
    context.fillRect(0, 0, side, side);
    context.strokeStyle = this.light ? "#fff" : "#000";
    context.lineWidth = STROKE_WIDTH;
    context.lineCap = context.lineJoin = "round";
    for (const stroke of this.strokes) {
      context.beginPath();
      context.moveTo(...transform(stroke[0]));
      for (const point of stroke.length > 1 ? stroke.slice(1) : stroke) context.lineTo(...transform(point));
      context.stroke();
    }
  }

  undo() {
    this.strokes.pop();
    this.paint();
  }

  clear() {
    this.strokes = [];
    this.paint();
  }

  // The drawing as a PNG file. If centred, it is scaled to 20/28 of the side and its centre of mass moved to the
  // middle, which is how the MNIST images were made.
  async toFile(name, centred) {
    const side = this.canvas.width;
    const canvas = new OffscreenCanvas(side, side);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    this.paint(context);
    if (centred) {
      const points = this.strokes.flat();
      const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
      const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
      const scale = Math.min(((20 / 28) * side - STROKE_WIDTH) / Math.max(right - left, bottom - top, 1), 4);
      const centreBox = ([x, y]) => [side / 2 + (x - (left + right) / 2) * scale, side / 2 + (y - (top + bottom) / 2) * scale];
      this.paint(context, centreBox);
      const [massX, massY] = this.#centreOfMass(context, side);
      this.paint(context, (point) => {
        const [x, y] = centreBox(point);
        return [x + side / 2 - massX, y + side / 2 - massY];
      });
    }
    return new File([await canvas.convertToBlob({ type: "image/png" })], name, { type: "image/png" });
  }

  #centreOfMass(context, side) {
    const { data } = context.getImageData(0, 0, side, side);
    let [sum, x, y] = [0, 0, 0];
    for (let i = 0; i < side * side; i++) {
      const ink = this.light ? data[4 * i] : 255 - data[4 * i];
      sum += ink;
      x += ink * (i % side);
      y += ink * Math.floor(i / side);
    }
    return sum ? [x / sum, y / sum] : [side / 2, side / 2];
  }
}

// Mean brightness of the border of an image, in [0, 1].
export async function borderBrightness(blob) {
  const image = await createImageBitmap(blob);
  const side = 32;
  const canvas = new OffscreenCanvas(side, side);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0, side, side);
  const { data } = context.getImageData(0, 0, side, side);
  let [sum, count] = [0, 0];
  for (let y = 0; y < side; y++)
    for (let x = 0; x < side; x++)
      if (Math.min(x, y, side - 1 - x, side - 1 - y) < 2) {
        sum += data[4 * (y * side + x)] + data[4 * (y * side + x) + 1] + data[4 * (y * side + x) + 2];
        count += 3;
      }
  return sum / count / 255;
}

export async function invertImage(file) {
  const image = await createImageBitmap(file);
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0);
  context.globalCompositeOperation = "difference";
  context.fillRect(0, 0, canvas.width, canvas.height);
  return new File([await canvas.convertToBlob({ type: "image/png" })], file.name, { type: "image/png" });
}
