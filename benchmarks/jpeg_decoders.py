"""JPEG decoders on one thread: milliseconds per image to an array of pixels, in full and at reduced sizes.

    python benchmarks/jpeg_decoders.py FOLDER [--images 8] [--rounds 2] [--csv PATH]

Pillow (draft mode), simplejpeg, OpenCV and pyvips (shrink on load), as far as they are installed. The bytes of the
files are in memory. The lowest of the rounds is reported. The pixels of one image are compared with Pillow's.
"""

from __future__ import annotations

import argparse
import importlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from _output import add_output_arguments, write_results

Decoder = Callable[[bytes, int], Any]


def decode_pillow(content: bytes, factor: int) -> Any:
    with Image.open(io.BytesIO(content)) as image:
        if factor > 1:
            image.draft(None, (image.width // factor, image.height // factor))
        return np.asarray(image)


def make_simplejpeg(module: Any) -> Decoder:
    def decode(content: bytes, factor: int) -> Any:
        height, width, *_ = module.decode_jpeg_header(content)
        size = {"min_height": height // factor, "min_width": width // factor} if factor > 1 else {}
        return module.decode_jpeg(content, "RGB", min_factor=1, **size)

    return decode


def make_opencv(module: Any) -> Decoder:
    module.setNumThreads(1)
    flags = {
        1: module.IMREAD_COLOR,
        **{factor: getattr(module, f"IMREAD_REDUCED_COLOR_{factor}") for factor in (2, 4, 8)},
    }

    def decode(content: bytes, factor: int) -> Any:
        options = flags[factor] | module.IMREAD_IGNORE_ORIENTATION
        return module.imdecode(np.frombuffer(content, np.uint8), options)[..., ::-1]

    return decode


def make_pyvips(module: Any) -> Decoder:
    def decode(content: bytes, factor: int) -> Any:
        image = module.Image.new_from_buffer(content, "", shrink=factor)
        shape = (image.height, image.width, image.bands)
        return np.frombuffer(image.write_to_memory(), dtype=np.uint8).reshape(shape)

    return decode


def installed_decoders() -> dict[str, Decoder]:
    decoders: dict[str, Decoder] = {"pillow": decode_pillow}
    for name, make in (("simplejpeg", make_simplejpeg), ("cv2", make_opencv), ("pyvips", make_pyvips)):
        try:
            decoders[name] = make(importlib.import_module(name))
        except (ImportError, OSError) as error:
            print(f"{name} left out: {error}")
    return decoders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    add_output_arguments(parser)
    args = parser.parse_args()
    contents = [file.read_bytes() for file in sorted(args.folder.rglob("*.jpg"))[: args.images]]
    rows = []
    for factor in (1, 2, 4, 8):
        expected = decode_pillow(contents[0], factor)
        for name, decode in installed_decoders().items():
            seconds = []
            for _ in range(args.rounds):
                start = time.perf_counter()
                for content in contents:
                    pixels = decode(content, factor)
                seconds.append(time.perf_counter() - start)
            pixels = decode(contents[0], factor)
            is_equal = pixels.shape == expected.shape and bool((pixels == expected).all())
            row = {"decoder": name, "size": f"1/{factor}", "ms": 1000 * min(seconds) / len(contents), "equal": is_equal}
            print(f"1/{factor} {name:<12}{row['ms']:8.2f} ms   {'equal' if is_equal else 'differs'}")
            rows.append(row)
    write_results(args, rows, packages=("pillow",))


if __name__ == "__main__":
    main()
