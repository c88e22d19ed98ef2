"""Preprocessing in the browser: the pixels are exactly Pillow's, the input is vitral's."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from support.explorer import decode
from vitral.data.preprocess import Preprocessing

BASE = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
CASES = {
    "crop": BASE,
    "crop-part": replace(BASE, crop=0.875, interpolation="bicubic"),
    "grey": replace(BASE, channels=1, mean=(0.13,), std=(0.31,)),
    "tall-input": replace(BASE, image_size=(48, 32)),
    "pad": replace(BASE, resize="pad"),
    "stretch": replace(BASE, resize="stretch", interpolation="bicubic"),
}
PREPROCESS = """\
([pixels, width, height, settings]) => {
  const data = Uint8ClampedArray.from(atob(pixels), (c) => c.charCodeAt(0));
  const result = preprocessPixels(new ImageData(data, width, height), settings);
  return [toBase64(result.pixels), toBase64(result.input)];
}"""


SIZES = [(57, 41), (41, 57), (20, 20), (32, 32), (150, 33)]
SHRINKS_HEIGHT_MORE = ("stretch", (41, 57))  # Pillow 13 resizes columns first: values differ by its rounding


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("case", CASES)
def test_pixels_and_input_are_those_of_vitral(engine, case, size):
    preprocessing = CASES[case]
    width, height = size
    rng = np.random.default_rng(0)
    rgba = np.dstack([rng.integers(0, 256, (height, width, 3)), np.full((height, width), 255)]).astype(np.uint8)
    image = Image.fromarray(rgba).convert("RGB")
    expected = preprocessing.load(image)
    settings = {
        name: getattr(preprocessing, name)
        for name in ("image_size", "channels", "mean", "std", "crop", "interpolation", "resize")
    }
    arguments = [base64.b64encode(rgba.tobytes()).decode(), width, height, settings]
    pixels, model_input = engine.page.evaluate(PREPROCESS, arguments)
    result = np.frombuffer(base64.b64decode(pixels), np.uint8)
    if (case, size) == SHRINKS_HEIGHT_MORE:
        assert np.abs(result.astype(int) - expected.numpy().ravel()).mean() < 1
        return
    np.testing.assert_array_equal(result, expected.numpy().ravel())
    np.testing.assert_allclose(decode(model_input), preprocessing.normalise(expected[None]).numpy().ravel(), atol=1e-6)
