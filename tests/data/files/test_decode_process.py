"""Decoding into the rows of a file."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from support.photos import save_photo
from vitral.data.decode import decode_image
from vitral.data.files.decode_process import DecodeOptions, RowFile, decode_into
from vitral.data.files.location import ImageLocation
from vitral.data.geometry import input_geometry
from vitral.data.resize_crop import resize_and_crop

SHAPE = (3, 20, 30)


@pytest.mark.parametrize("max_write", [2**30, 1000])
def test_rows_are_written_at_their_place_with_their_checksums(tmp_path: Path, monkeypatch, max_write):
    for index in range(3):
        save_photo(tmp_path / f"{index}.png", (200, 30, 30), index)
    (tmp_path / "1.png").write_bytes(b"no image")
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, content, position: pwrite(fd, content[:max_write], position))
    file = tmp_path / "rows"
    file.write_bytes(b"header" + bytes(range(250)) * 30)
    untouched = file.read_bytes()[6 + 4 * 1800 :]
    fd = os.open(file, os.O_RDWR)
    locations = [ImageLocation(str(tmp_path / f"{index}.png")) for index in range(3)]
    decoded = decode_into(RowFile(fd, SHAPE, 6), [3, 0, 1], locations, DecodeOptions("bilinear", checksums=True))
    os.close(fd)
    assert list(decoded.errors) == [0]
    assert "1.png: not an image" in decoded.errors[0]
    content = file.read_bytes()
    for row, index in ((3, 0), (1, 2)):
        image = decode_image(tmp_path / f"{index}.png")
        geometry = input_geometry(image.height, image.width, (20, 30), "crop", crop=1.0, patch_size=1)
        expected = np.ascontiguousarray(resize_and_crop(image, geometry, 3, "bilinear")).tobytes()
        assert content[6 + row * 1800 : 6 + (row + 1) * 1800] == expected
        assert decoded.checksums[row] == zlib.crc32(expected)
    assert set(decoded.checksums) == {3, 1}
    assert content[:6] == b"header"
    assert content[6 + 4 * 1800 :] == untouched
