"""The directory walk: every command that takes folders of images finds the same files in the same order.

An image is a regular file whose suffix or content is that of a supported format. Links to files and folders are
followed; each folder is listed once, so that links cannot form a loop. Everything else is skipped and reported with
its reason (`SkippedFile`): hidden files, dangling links, named pipes, other files. Does not import torch.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from vitral.errors import truncate_list
from vitral.utils.text import count_text

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".npy"}
)  # read as images without looking at their content
UNSUPPORTED_SUFFIXES = frozenset(  # camera raw files are TIFF by content, but hold only a preview that Pillow can read
    {".heic", ".heif", ".avif", ".jxl", ".jp2", ".psd", ".svg", ".dng", ".cr2", ".nef", ".arw", ".raw"}
)
MAX_EXAMPLES = 3  # names per reason in a summary
HEADER_BYTES = 32


class SkipReason(StrEnum):
    """Why an entry of a folder is not listed."""

    HIDDEN = "hidden"
    DANGLING_LINK = "dangling link"
    LINK_LOOP = "link loop"
    REPEATED_FOLDER = "folder already listed"
    UNREADABLE_FOLDER = "unreadable folder"
    UNREADABLE_FILE = "unreadable file"
    NOT_REGULAR = "named pipe, socket or device"
    UNSUPPORTED_FORMAT = "unsupported image format"
    NOT_AN_IMAGE = "not an image"
    OUTSIDE_CLASSES = "image outside class folders"
    NOT_A_SPLIT = "folder that is not a split"
    TEST_SPLIT = "test split"
    NO_IMAGES = "folder without images"

    def describe(self, count: int) -> str:
        """`2 dangling links`."""
        return f"{count:,} {self if count == 1 else PLURALS.get(self, self + 's')}"


PLURALS = {
    SkipReason.HIDDEN: "hidden",
    SkipReason.REPEATED_FOLDER: "folders already listed",
    SkipReason.NOT_REGULAR: "named pipes, sockets or devices",
    SkipReason.NOT_AN_IMAGE: "not images",
    SkipReason.OUTSIDE_CLASSES: "images outside class folders",
    SkipReason.NOT_A_SPLIT: "folders that are not splits",
    SkipReason.NO_IMAGES: "folders without images",
}

FOLDER_REASONS = frozenset(
    {
        SkipReason.REPEATED_FOLDER,
        SkipReason.UNREADABLE_FOLDER,
        SkipReason.NOT_A_SPLIT,
        SkipReason.TEST_SPLIT,
        SkipReason.NO_IMAGES,
    }
)


class SkippedFile(NamedTuple):
    """A file or folder that was found but not listed."""

    path: Path
    reason: SkipReason


SkipFn = Callable[[SkippedFile], None]


def ignore_skipped(skipped: SkippedFile) -> None:
    pass


class SkippedFiles:
    """Number of skipped files by reason and the first names of each. Pass `add` as the `on_skip` of a walk."""

    def __init__(self) -> None:
        self.counts: Counter[SkipReason] = Counter()
        self.examples: defaultdict[SkipReason, list[str]] = defaultdict(list)

    def add(self, skipped: SkippedFile) -> None:
        self.counts[skipped.reason] += 1
        if len(self.examples[skipped.reason]) < MAX_EXAMPLES:
            self.examples[skipped.reason].append(str(skipped.path))

    def summary(self) -> str | None:
        """`skipped 3 files: 2 dangling links (a.jpg, b.jpg), 1 not an image (notes.txt)`; None if there are none."""
        total = self.counts.total()
        if not total:
            return None
        parts = []
        for reason in filter(self.counts.get, SkipReason):
            count, names = self.counts[reason], self.examples[reason]
            more = f" and {count - len(names):,} more" if count > len(names) else ""
            parts.append(f"{reason.describe(count)} ({truncate_list(names)}{more})")
        noun = "folder" if self.counts.keys() <= FOLDER_REASONS else "file"
        return f"skipped {count_text(total, noun)}: {', '.join(parts)}"


def no_test_folders(names: Sequence[str]) -> Collection[str]:
    return ()


class ImageWalk:
    """A walk through one or several folders that lists each folder once and reports what it skips.

    Lazy: one folder is read at a time, so that folders with millions of files can be processed as they are found.
    `test_folders` maps the names of the folders in one folder to those that `images` does not enter.
    """

    def __init__(
        self,
        on_skip: SkipFn = ignore_skipped,
        test_folders: Callable[[Sequence[str]], Collection[str]] = no_test_folders,
    ) -> None:
        self.on_skip, self.test_folders = on_skip, test_folders
        self._listed: set[tuple[int, int]] = set()  # device and inode of folders

    def images(self, folder: Path, *, recursive: bool = True) -> Iterator[Path]:
        """Yield the images in `folder`, and below it unless `recursive` is false, sorted by name at each level."""
        entries = self._entries(folder)
        test_folders = self.test_folders([entry.name for entry in entries if _is_folder(entry)])
        for entry in entries:
            path = folder / entry.name
            if _is_folder(entry):
                if entry.name in test_folders:
                    self.on_skip(SkippedFile(path, SkipReason.TEST_SPLIT))
                elif recursive:
                    yield from self.images(path)
            elif (reason := _file_skip_reason(path)) is not None:
                self.on_skip(SkippedFile(path, reason))
            else:
                yield path

    def subfolders(self, folder: Path) -> list[Path]:
        """Folders directly below `folder`, sorted by name. Files next to them are reported as skipped."""
        folders = []
        for entry in self._entries(folder):
            path = folder / entry.name
            if _is_folder(entry):
                folders.append(path)
            else:
                self.on_skip(SkippedFile(path, _file_skip_reason(path) or SkipReason.OUTSIDE_CLASSES))
        return folders

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """Visible folders and regular files in `folder`; empty if it cannot be read or was listed before."""
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in self._listed:
                self.on_skip(SkippedFile(folder, SkipReason.REPEATED_FOLDER))
                return []
            self._listed.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as iterator:
                entries = sorted(iterator, key=lambda entry: entry.name)
        except OSError:
            self.on_skip(SkippedFile(folder, SkipReason.UNREADABLE_FOLDER))
            return []
        listed = []
        for entry in entries:
            if (reason := _entry_skip_reason(entry)) is not None:
                self.on_skip(SkippedFile(folder / entry.name, reason))
            else:
                listed.append(entry)
        # A folder is listed under its own name rather than under that of a link next to it.
        return sorted(listed, key=lambda entry: entry.is_symlink() and _is_folder(entry))


def iter_images(paths: Iterable[Path], on_skip: SkipFn = ignore_skipped) -> Iterator[Path]:
    """Yield files as given, and for each folder the images in and below it."""
    for path in paths:
        if path.is_dir():
            yield from ImageWalk(on_skip).images(path)
        else:
            yield path


def find_images(paths: Iterable[Path], on_skip: SkipFn = ignore_skipped) -> list[Path]:
    """List files as given, and for each folder the images in and below it.

    A folder without images is listed itself, so that decoding it reports the problem. The list is empty if there is
    nothing but such folders.
    """
    images: list[Path] = []
    only_empty_folders = True
    for path in paths:
        below = list(iter_images([path], on_skip))
        images += below or [path]
        only_empty_folders &= not below
    return [] if only_empty_folders else images


def subfolders(folder: Path) -> list[Path]:
    """Visible folders directly below `folder`, including links to folders, sorted by name."""
    return ImageWalk().subfolders(folder)


def is_image_file(path: Path) -> bool:
    """Whether a regular file is an image, as the walk decides it."""
    return path.is_file() and _file_skip_reason(path) is None


def irregular_file_kind(mode: int) -> str | None:
    """`a named pipe`, `a socket` or `a device` for the mode of such a file. Opening it may block forever."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def has_image_content(header: bytes) -> bool:
    """Whether the first `HEADER_BYTES` of a file are those of a supported image format."""
    if header.startswith(b"BM"):  # two letters are not enough: BMP has four zero bytes and the size of its header
        return header[6:10] == bytes(4) and int.from_bytes(header[14:18], "little") in {12, 40, 52, 56, 64, 108, 124}
    if header.startswith(b"RIFF"):
        return header[8:12] == b"WEBP"
    tiff = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
    return header.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", *tiff))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _entry_skip_reason(entry: os.DirEntry[str]) -> SkipReason | None:
    """Why an entry is skipped whatever it contains; None for visible folders and regular files."""
    if entry.name.startswith("."):
        return SkipReason.HIDDEN
    try:
        if entry.is_dir() or entry.is_file():
            return None
        entry.stat()
    except FileNotFoundError:
        return SkipReason.DANGLING_LINK
    except OSError as error:
        return SkipReason.LINK_LOOP if error.errno == errno.ELOOP else SkipReason.UNREADABLE_FILE
    return SkipReason.NOT_REGULAR


def _file_skip_reason(path: Path) -> SkipReason | None:
    """Why a regular file is not an image. Only files with other suffixes are opened."""
    suffix = path.suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return None
    if suffix in UNSUPPORTED_SUFFIXES:
        return SkipReason.UNSUPPORTED_FORMAT
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError:
        return SkipReason.UNREADABLE_FILE
    if header[4:8] == b"ftyp" and header[8:12] in (b"heic", b"heix", b"mif1", b"avif"):
        return SkipReason.UNSUPPORTED_FORMAT
    return None if has_image_content(header) else SkipReason.NOT_AN_IMAGE
