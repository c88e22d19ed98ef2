"""What is in the files: each is opened once, no larger than needed; copies are found by their thumbnails."""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitral.data.decode import FORMATS, NotAnImage, decode
from vitral.data.files.duplicates import SIDE, exact_groups, grouped, near_pairs, thumbnail
from vitral.doctor.issue import Trouble
from vitral.doctor.issue import listed as listed_trouble

SMALL_SIDE = 32  # pixels of the shorter side
LONG = 4.0  # times as long as wide: a square crop from the middle misses most of it
MODES = {"L": "gray", "1": "black and white", "P": "palette", "PA": "palette", "LA": "gray with alpha"}


@dataclass(frozen=True, kw_only=True)
class Photo:
    """A file of the listing, opened once."""

    path: Path
    label: str
    split: str
    error: str = ""
    size: tuple[int, int] = (0, 0)  # width, height, as stored
    mode: str = ""
    frames: int = 1


def opened(listed: Sequence[tuple[Path, str, str]]) -> tuple[list[Photo], np.ndarray[Any, Any]]:
    """Each file, decoded no larger than its thumbnail needs: what it is, and N 32 32 3."""
    small = np.zeros((len(listed), SIDE, SIDE, 3), dtype=np.uint8)

    def look(index: int) -> Photo:
        path, label, split = listed[index]
        try:
            small[index] = thumbnail(decode(path, at_least=(SIDE, SIDE)))
            with Image.open(path, formats=FORMATS) as picture:  # the header alone
                return Photo(
                    path=path,
                    label=label,
                    split=split,
                    size=picture.size,
                    mode=picture.mode,
                    frames=getattr(picture, "n_frames", 1),
                )
        except NotAnImage as error:
            return Photo(path=path, label=label, split=split, error=error.what.removeprefix(f"{path}: "))

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(look, range(len(listed)))), small


def unreadable(photos: Sequence[Photo]) -> Iterable[Trouble]:
    broken = [photo for photo in photos if photo.error]
    if broken:
        files, details = [str(photo.path) for photo in broken], [photo.error for photo in broken]
        yield listed_trouble("unreadable", "error", "unreadable", files, "remove, or copy again", details=details)


def twins(photos: Sequence[Photo], small: np.ndarray[Any, Any]) -> Iterable[Trouble]:
    """Copies: with different labels, in more than one split, or merely twice. Exact ones first, then near ones."""
    exact = exact_groups([photo.path for photo in photos])
    of_exact = grouped(len(photos), np.array([(g[0], other) for g in exact for other in g[1:]]).reshape(-1, 2))
    near: defaultdict[int, list[int]] = defaultdict(list)
    pairs = near_pairs(small)
    new = pairs[of_exact[pairs[:, 0]] != of_exact[pairs[:, 1]]]  # copies in bytes are told already
    for index, group in enumerate(grouped(len(photos), new)):
        near[int(group)].append(index)
    alike = [[i for k, i in enumerate(g) if of_exact[i] not in {of_exact[j] for j in g[:k]}] for g in near.values()]
    for how, groups in (("exact", exact), ("near", [g for g in alike if len(g) > 1])):
        yield from _copies(how, [[photos[index] for index in group] for group in groups])


def _copies(how: str, groups: Sequence[Sequence[Photo]]) -> Iterable[Trouble]:
    labels = [g for g in groups if len({photo.label for photo in g}) > 1]
    leaks = [g for g in groups if len({photo.split for photo in g}) > 1]
    merely = [g for g in groups if g not in labels and g not in leaks]
    if labels:
        files, details = _told(labels, lambda photo: f"{how} copy, called {photo.label} here")
        yield listed_trouble(
            f"{how} copies, different labels", "error", f"are {how} copies with different labels", files,
            "decide which label is right; remove the others", details=details,
        )  # fmt: skip
    if leaks:
        files, details = _told(leaks, lambda photo: f"{how} copy, in {photo.split} here")
        splits = sorted({photo.split for g in leaks for photo in g}, key=["train", "validation", "test"].index)
        yield listed_trouble(
            f"{how} copies, several splits", "error", f"are {how} copies that stand in {' and '.join(splits)}", files,
            "remove them from training: what was learned by heart is no test", details=details,
        )  # fmt: skip
    if merely:
        files, details = _told(merely, lambda photo: f"{how} copy")
        more = sum(len(g) - 1 for g in merely)
        yield Trouble(
            kind=f"{how} copies",
            level="warning",
            what=f"{more:,} {how} duplicate{'s' if more > 1 else ''}   {_few(files)}",
            todo="keep one of each group",
            files=tuple(files),
            details=tuple(details),
        )


def _told(groups: Sequence[Sequence[Photo]], say: Any) -> tuple[list[str], list[str]]:
    files = [str(photo.path) for g in groups for photo in g]
    details = [f"{say(photo)}; group {number}" for number, g in enumerate(groups, start=1) for photo in g]
    return files, details


def odd(photos: Sequence[Photo]) -> Iterable[Trouble]:
    """Sizes and modes that are not like the others'."""
    if not photos:
        return
    commonest = Counter(photo.mode for photo in photos).most_common(1)[0][0]
    other = [photo for photo in photos if photo.mode != commonest]
    if other:
        counted = ", ".join(f"{n} {MODES.get(mode, mode)}" for mode, n in Counter(p.mode for p in other).most_common())
        yield listed_trouble(
            "odd mode", "warning", f"not {MODES.get(commonest, commonest)} like the others ({counted})",
            [str(p.path) for p in other], "are they what they should be? They are read like the others",
            details=[MODES.get(p.mode, p.mode) for p in other],
        )  # fmt: skip
    area = statistics.median(p.size[0] * p.size[1] for p in photos)
    usual = [p for p in photos if min(p.size) >= SMALL_SIDE]
    few_are_small = len(usual) > len(photos) / 2  # else the set is one of small images
    small = [p for p in photos if few_are_small and (min(p.size) < SMALL_SIDE or p.size[0] * p.size[1] < area / 64)]
    long = [p for p in photos if max(p.size) > LONG * min(p.size) and p not in small]
    for found, what, todo in (
        (small, "far smaller than the others", "remove, or replace"),
        (long, f"more than {LONG:g} times as long as wide: the middle alone is seen", "crop to what matters"),
    ):
        if found:
            told = [f"{p.size[0]}×{p.size[1]}" for p in found]
            yield listed_trouble("odd size", "warning", what, [str(p.path) for p in found], todo, details=told)
    moving = [p for p in photos if p.frames > 1]
    if moving:
        details = [f"{p.frames} frames" for p in moving]
        yield listed_trouble("several frames", "warning", "with several frames: the first alone is seen",
                      [str(p.path) for p in moving], "keep the frame that matters", details=details)  # fmt: skip


def _few(files: Sequence[str]) -> str:
    return ", ".join(files[:2]) + (" …" if len(files) > 2 else "")


def sizes(photos: Sequence[Photo]) -> str:
    seen = sorted({photo.size for photo in photos})
    if not seen:
        return "unknown"
    if len(seen) == 1:
        return f"{seen[0][0]}×{seen[0][1]}"
    width, height = (statistics.median(photo.size[side] for photo in photos) for side in (0, 1))
    low, high = min(min(s) for s in seen), max(max(s) for s in seen)
    return f"about {width:.0f}×{height:.0f}, sides from {low} to {high}"


def modes(photos: Sequence[Photo]) -> str:
    counted = Counter(photo.mode for photo in photos).most_common()
    if not counted:
        return "no image can be read"
    name = MODES.get(counted[0][0], counted[0][0])
    return f"all {name}" if len(counted) == 1 else f"{counted[0][1]} of {len(photos)} {name}"
