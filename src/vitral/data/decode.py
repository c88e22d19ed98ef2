"""One file → one picture, upright, in 8 bits a channel, or an error that says what is wrong with the file."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vitral.errors import VitralError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # Pillow knows more, some of which start other programs
MOST_PIXELS = 100_000_000  # a larger picture is refused: decoded it would fill the memory
TOO_LARGE = f"make it smaller: {MOST_PIXELS // 10**6} million pixels are the most"


class NotAnImage(VitralError):
    """A file that is no picture, or a broken or too large one."""

    def __init__(self, what: str, hint: str = "JPEG, PNG, WebP, BMP, GIF and TIFF are read") -> None:
        super().__init__(what, hint)


def decode(source: Path | str | bytes | Image.Image, *, at_least: tuple[int, int] | None = None) -> Image.Image:
    """The picture in a file or in bytes: EXIF orientation applied, alpha laid over white; mode "L" or "RGB".

    A JPEG may come at a half, a quarter or an eighth of its size, where that still covers `at_least` (height, width).

    One that Pillow has already opened is made upright and 8 bits like the others, and is itself left as it was.
    """
    name = str(source) if isinstance(source, Path | str) else "the image"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata and bombs; the size is checked below
            if isinstance(source, Image.Image):
                return _upright(source.copy(), name)
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as picture:
                if at_least is not None:
                    _draft(picture, max(at_least))
                return _upright(picture, name)
    except NotAnImage:
        raise
    except UnidentifiedImageError as error:
        raise NotAnImage(f"{name}: {_known_but_not_read(source)}") from error
    except FileNotFoundError as error:
        if re.match(r"https?:/", name):  # a path has lost the second slash
            raise NotAnImage(f"{name}: an address, not a file", "save the picture first") from error
        raise NotAnImage(f"{name}: no such file", "is the name right?") from error
    except IsADirectoryError as error:
        if not image_files([Path(name)]):
            raise NotAnImage(f"{name}: a folder without images") from error
        raise NotAnImage(f"{name}: a folder, not an image", "name the image in it") from error
    except PermissionError as error:
        raise NotAnImage(f"{name}: no permission to read it", "may this user read it?") from error
    except Image.DecompressionBombError as error:
        raise NotAnImage(f"{name}: more pixels than vitral reads", TOO_LARGE) from error
    except Exception as error:  # a broken file makes Pillow raise almost anything: struct.error, IndexError, …
        raise NotAnImage(f"{name}: broken or truncated ({str(error) or type(error).__name__})") from error


def _known_but_not_read(source: Path | str | bytes | Image.Image) -> str:
    """What a file is that Pillow does not know: telephones write HEIC, and call it .jpg when they send it."""
    if isinstance(source, Path | str):
        with Path(source).open("rb") as file:
            source = file.read(12)
    if not source:
        return "an empty file"
    phone = isinstance(source, bytes) and source[4:8] == b"ftyp"
    return "HEIC, AVIF or a film, not an image that vitral reads; save it as JPEG" if phone else "not an image"


def _draft(picture: Image.Image, least: int) -> None:
    """Let the JPEG decoder skip detail that would be scaled away: both sides stay at least `least`."""
    short = min(picture.size)
    if short >= 2 * least:
        picture.draft(None, (picture.width * least // short, picture.height * least // short))


def _upright(picture: Image.Image, name: str) -> Image.Image:
    if picture.width * picture.height > MOST_PIXELS:
        raise NotAnImage(f"{name}: {picture.width}×{picture.height} pixels are more than vitral reads", TOO_LARGE)
    picture.load()
    with contextlib.suppress(Exception):  # broken metadata costs the orientation, not the picture
        ImageOps.exif_transpose(picture, in_place=True)  # which, unlike a new picture, is free where it is upright
    return to_eight_bits(picture)


def to_eight_bits(picture: Image.Image) -> Image.Image:
    """Any of Pillow's modes → "L" or "RGB"."""
    if picture.mode in ("I;16", "I;16L", "I;16B", "I;16N", "I", "F"):
        values = np.nan_to_num(np.asarray(picture, dtype=np.float64), posinf=0, neginf=0)
        top = 1.0 if picture.mode == "F" and values.max(initial=0) <= 1 else 65535.0
        if picture.mode in ("I", "F") and 1 < values.max(initial=0) <= 255:
            top = 255.0
        return Image.fromarray((values / top * 255).clip(0, 255).round().astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    if picture.mode in ("L", "RGB"):
        return picture  # as it is: to convert would be to copy
    return picture.convert("L" if picture.mode == "1" else "RGB")


def image_files(paths: list[Path]) -> list[Path]:
    """Files as given, and the pictures in and below folders, in order; hidden files and folders are passed over.

    A folder without any stands for itself, if it is not all there is: whoever opens it is told."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in SUFFIXES)
            shown = (p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts))
            found += sorted(shown) or [path]
        else:
            found.append(path)
    return found if any(path not in paths or not path.is_dir() for path in found) else []
