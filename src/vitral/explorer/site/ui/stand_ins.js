// Drawings to start with, for sites without example images: digits as strokes, and simple scenes.

// Points in a square of 100 × 100; a stroke is a list of x, y pairs.
const DIGITS = [
  [[50, 14, 33, 20, 25, 38, 25, 62, 33, 80, 50, 86, 67, 80, 75, 62, 75, 38, 67, 20, 50, 14]],
  [[38, 28, 54, 14, 53, 86]],
  [[27, 32, 34, 18, 52, 14, 68, 24, 68, 40, 54, 56, 38, 70, 26, 84, 50, 83, 76, 84]],
  [[30, 20, 48, 14, 66, 21, 67, 36, 55, 46, 44, 48, 58, 50, 72, 60, 71, 76, 56, 86, 40, 86, 28, 78]],
  [[34, 14, 30, 36, 27, 54, 48, 54, 74, 52], [64, 30, 62, 58, 59, 88]],
  [[70, 15, 38, 16, 34, 44, 50, 41, 66, 48, 70, 64, 62, 80, 46, 87, 28, 82]],
  [[62, 13, 44, 28, 32, 50, 29, 68, 37, 83, 54, 86, 68, 76, 68, 62, 56, 54, 42, 57, 32, 68]],
  [[26, 19, 50, 17, 74, 17, 64, 40, 52, 64, 46, 88]],
  [[56, 47, 38, 38, 34, 26, 42, 15, 58, 14, 67, 24, 62, 38, 48, 50, 34, 63, 31, 76, 42, 87, 58, 86, 69, 76, 66, 62, 56, 47]],
  [[68, 30, 58, 17, 42, 17, 32, 30, 36, 45, 52, 49, 66, 40, 69, 28, 67, 52, 62, 70, 54, 88]],
];

export function digitStrokes(digit, side) {
  return DIGITS[digit].map((flat) =>
    Array.from({ length: flat.length / 2 }, (_, i) => [(flat[2 * i] * side) / 100, (flat[2 * i + 1] * side) / 100]),
  );
}

const polygon = (context, colour, ...points) => {
  context.fillStyle = colour;
  context.beginPath();
  points.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
  context.fill();
};
const disc = (context, colour, x, y, radius, stretch = 1) => {
  context.fillStyle = colour;
  context.beginPath();
  context.ellipse(x, y, radius * stretch, radius, 0, 0, 2 * Math.PI);
  context.fill();
};
const rectangle = (context, colour, x, y, width, height) => {
  context.fillStyle = colour;
  context.fillRect(x, y, width, height);
};
const gradient = (context, top, bottom) => {
  const fill = context.createLinearGradient(0, 0, 0, 320);
  fill.addColorStop(0, top);
  fill.addColorStop(1, bottom);
  context.fillStyle = fill;
  context.fillRect(0, 0, 320, 320);
};

// Scenes of 320 × 320, named after the CIFAR-10 class they show.
export const SCENES = {
  ship(c) {
    gradient(c, "#b9d6ee", "#dcebf5");
    rectangle(c, "#2f6ea3", 0, 205, 320, 115);
    polygon(c, "#7d2a22", [28, 190], [292, 178], [262, 232], [62, 232]);
    polygon(c, "#ece8df", [80, 186], [84, 150], [216, 146], [222, 181]);
    rectangle(c, "#f6f4ef", 108, 112, 72, 38);
    rectangle(c, "#c43f2e", 128, 76, 26, 38);
    for (let x = 94; x < 210; x += 20) rectangle(c, "#334", x, 160, 9, 9);
    polygon(c, "#dfeaf2", [40, 236], [290, 232], [300, 242], [30, 246]);
  },
  airplane(c) {
    gradient(c, "#6fa8dc", "#cfe4f6");
    polygon(c, "#eef1f4", [30, 168], [62, 152], [262, 140], [296, 152], [270, 172], [70, 184]);
    polygon(c, "#c3ccd6", [142, 160], [196, 158], [120, 250], [92, 252]);
    polygon(c, "#d5dce4", [150, 146], [190, 144], [140, 86], [122, 88]);
    polygon(c, "#b23a30", [236, 146], [282, 142], [296, 92], [276, 92]);
    for (let x = 84; x < 240; x += 16) rectangle(c, "#445566", x, 158 - (x - 84) * 0.06, 7, 7);
  },
  automobile(c) {
    gradient(c, "#d8dee3", "#b7bcc0");
    rectangle(c, "#6d6f72", 0, 226, 320, 94);
    polygon(c, "#c8201e", [22, 214], [30, 172], [92, 160], [128, 118], [214, 118], [250, 160], [298, 172], [302, 214]);
    polygon(c, "#22303d", [108, 160], [136, 128], [168, 128], [168, 160]);
    polygon(c, "#22303d", [178, 160], [178, 128], [208, 128], [232, 160]);
    for (const x of [84, 238]) {
      disc(c, "#15161a", x, 216, 32);
      disc(c, "#b9bdc2", x, 216, 15);
    }
    rectangle(c, "#f3e8a2", 288, 180, 12, 14);
  },
  truck(c) {
    gradient(c, "#cfdbe6", "#e6e9ea");
    rectangle(c, "#77787a", 0, 238, 320, 82);
    rectangle(c, "#f3f3ef", 22, 92, 186, 128);
    polygon(c, "#1f5fae", [212, 220], [212, 126], [262, 126], [296, 172], [296, 220]);
    polygon(c, "#20303f", [228, 140], [256, 140], [278, 172], [228, 172]);
    rectangle(c, "#3a3c40", 22, 218, 276, 14);
    for (const x of [66, 116, 252]) {
      disc(c, "#141519", x, 236, 27);
      disc(c, "#a8acb0", x, 236, 12);
    }
  },
  bird(c) {
    gradient(c, "#9cc77b", "#cfe3b0");
    rectangle(c, "#7a5a3a", 0, 244, 320, 16);
    disc(c, "#6b4a35", 164, 170, 54, 1.35);
    polygon(c, "#4e3527", [94, 168], [22, 220], [36, 236], [116, 204]);
    disc(c, "#7d563d", 228, 116, 34);
    polygon(c, "#e0a030", [256, 110], [292, 122], [256, 130]);
    disc(c, "#111", 238, 108, 6);
    disc(c, "#b98a63", 180, 196, 32, 1.3);
    for (const x of [160, 184]) rectangle(c, "#c98a3a", x, 216, 6, 32);
  },
  frog(c) {
    gradient(c, "#8f7a52", "#6f5c3b");
    disc(c, "#5f9a2f", 160, 196, 74, 1.35);
    disc(c, "#6fae38", 160, 132, 56, 1.35);
    for (const x of [118, 202]) {
      disc(c, "#6fae38", x, 88, 26);
      disc(c, "#e8d44a", x, 86, 17);
      disc(c, "#101010", x, 86, 9);
    }
    disc(c, "#c9d98a", 160, 226, 42, 1.4);
    polygon(c, "#4c7f25", [60, 200], [28, 268], [100, 262]);
    polygon(c, "#4c7f25", [260, 200], [292, 268], [220, 262]);
    rectangle(c, "#3c661d", 112, 150, 96, 5);
  },
};
