// A sheet to draw on, and what is made of it for the model.
export class Sheet {
  // dark: whether the model learned light strokes on dark ground, as MNIST has them
  constructor(canvas, onStroke) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d", { willReadFrequently: true });
    this.onStroke = onStroke;
    this.strokes = [];
    this.dark = true;
    let stroke = null;
    const place = (event) => {
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
      stroke = [place(event)];
      this.strokes.push(stroke);
      this.paint();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!stroke) return;
      const moves = event.getCoalescedEvents?.() ?? [];
      for (const each of moves.length ? moves : [event]) stroke.push(place(each));
      this.paint();
    });
    for (const end of ["pointerup", "pointercancel"])
      canvas.addEventListener(end, () => {
        if (stroke) this.onStroke();
        stroke = null;
      });
  }

  paint(pen = this.pen, place = ([x, y]) => [x, y], width = 22) {
    const side = this.canvas.width;
    pen.fillStyle = this.dark ? "#000" : "#fff";
    pen.fillRect(0, 0, side, side);
    pen.strokeStyle = pen.fillStyle = this.dark ? "#fff" : "#000";
    pen.lineWidth = width;
    pen.lineCap = pen.lineJoin = "round";
    for (const stroke of this.strokes) {
      pen.beginPath();
      pen.moveTo(...place(stroke[0]));
      for (const point of stroke.length > 1 ? stroke.slice(1) : stroke) pen.lineTo(...place(point));
      pen.stroke();
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

  // As a PNG file. Centred: the drawing fills 20 of 28 parts, its weight in the middle, which is how MNIST was made.
  async file(name, centred) {
    const side = this.canvas.width;
    const out = new OffscreenCanvas(side, side);
    const pen = out.getContext("2d", { willReadFrequently: true });
    this.paint(pen);
    if (centred) {
      const points = this.strokes.flat();
      const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
      const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
      const scale = Math.min(((20 / 28) * side - 22) / Math.max(right - left, bottom - top, 1), 4);
      const middle = ([x, y]) => [side / 2 + (x - (left + right) / 2) * scale, side / 2 + (y - (top + bottom) / 2) * scale];
      this.paint(pen, middle);
      const [dx, dy] = this.#weight(pen, side);
      this.paint(pen, (point) => {
        const [x, y] = middle(point);
        return [x + side / 2 - dx, y + side / 2 - dy];
      });
    }
    return new File([await out.convertToBlob({ type: "image/png" })], name, { type: "image/png" });
  }

  #weight(pen, side) {
    const { data } = pen.getImageData(0, 0, side, side);
    let [sum, x, y] = [0, 0, 0];
    for (let i = 0; i < side * side; i++) {
      const ink = this.dark ? data[4 * i] : 255 - data[4 * i];
      sum += ink;
      x += ink * (i % side);
      y += ink * Math.floor(i / side);
    }
    return sum ? [x / sum, y / sum] : [side / 2, side / 2];
  }
}

// How bright an image is around its edge, 0…1.
export async function rim(blob) {
  const picture = await createImageBitmap(blob);
  const side = 32;
  const sheet = new OffscreenCanvas(side, side);
  const pen = sheet.getContext("2d", { willReadFrequently: true });
  pen.drawImage(picture, 0, 0, side, side);
  const { data } = pen.getImageData(0, 0, side, side);
  let [sum, count] = [0, 0];
  for (let y = 0; y < side; y++)
    for (let x = 0; x < side; x++)
      if (Math.min(x, y, side - 1 - x, side - 1 - y) < 2) {
        sum += data[4 * (y * side + x)] + data[4 * (y * side + x) + 1] + data[4 * (y * side + x) + 2];
        count += 3;
      }
  return sum / count / 255;
}

export async function inverted(file) {
  const picture = await createImageBitmap(file);
  const sheet = new OffscreenCanvas(picture.width, picture.height);
  const pen = sheet.getContext("2d");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, sheet.width, sheet.height);
  pen.drawImage(picture, 0, 0);
  pen.globalCompositeOperation = "difference";
  pen.fillRect(0, 0, sheet.width, sheet.height);
  return new File([await sheet.convertToBlob({ type: "image/png" })], file.name, { type: "image/png" });
}
