/** The convolutional stem of a hybrid ViT (models/variants/hybrid.py): 3×3 convolutions, group norm, ReLU. */
import { layerNorm } from "./layers.js";
import { transpose } from "./matmul.js";

const KERNEL = 3;
const GROUP_WIDTH = 8; // channels per group of the group norm

/** The stem's layers, with standardised filters as a loaded (C·3·3)×E matrix each. */
export function buildStem(config, tensors, kernel) {
  return config.conv.widths.map((width, index) => {
    const name = `patch_embedding.stem.layers.${index}`;
    const weights = tensors[`${name}.conv.weight`], size = weights.length / width;
    const filters = layerNorm(weights, size, null, null, 1e-8);
    return {
      width,
      stride: config.conv.strides[index],
      inputs: size / KERNEL ** 2,
      filters,
      matrix: kernel.load(transpose(filters, width, size), size, width),
      scale: tensors[`${name}.norm.weight`],
      shift: tensors[`${name}.norm.bias`],
    };
  });
}

/** The feature map of an image: {data: E×height×width, channels, height, width}. */
export function runStem(layers, input, config, kernel) {
  const [height, width] = config.image_size;
  let map = { data: input, channels: config.channels, height, width };
  for (const layer of layers) map = convNormReLU(map, layer, config, kernel);
  return map;
}

function convNormReLU(map, layer, config, kernel) {
  const { stride, width: E } = layer;
  const total = Math.max(KERNEL - stride, 0), before = Math.floor(total / 2);
  const after = config.conv.same_padding ? total - before : before;
  const height = Math.floor((map.height + before + after - KERNEL) / stride) + 1;
  const width = Math.floor((map.width + before + after - KERNEL) / stride) + 1;
  const columns = unfold(map, stride, before, height, width);
  const positions = kernel.matmul(columns, layer.matrix, height * width, map.channels * KERNEL ** 2, E);
  const data = transpose(positions, height * width, E);
  groupNormReLU(data, layer, height * width, config.norm_eps);
  return { data, channels: E, height, width };
}

/** im2col: one row per output position, with the 3×3 pixels of each channel around it; zero outside the image. */
function unfold(map, stride, padding, height, width) {
  const size = map.channels * KERNEL ** 2, rows = new Float32Array(height * width * size);
  let out = 0;
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    for (let c = 0; c < map.channels; c++) for (let i = 0; i < KERNEL; i++) for (let j = 0; j < KERNEL; j++, out++) {
      const row = y * stride + i - padding, column = x * stride + j - padding;
      const inside = row >= 0 && row < map.height && column >= 0 && column < map.width;
      if (inside) rows[out] = map.data[(c * map.height + row) * map.width + column];
    }
  }
  return rows;
}

/** Group norm over groups of 8 channels, then ReLU; in place on E×positions. */
function groupNormReLU(data, layer, positions, eps) {
  const normalised = layerNorm(data, GROUP_WIDTH * positions, null, null, eps);
  for (let channel = 0; channel < layer.width; channel++) {
    for (let i = channel * positions; i < (channel + 1) * positions; i++) {
      data[i] = Math.max(normalised[i] * layer.scale[channel] + layer.shift[channel], 0);
    }
  }
}

