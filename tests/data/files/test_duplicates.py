"""Duplicates are detected, different images are not, and copies stay in one split."""

from __future__ import annotations

import io
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from vitral.data.datasets import stratified_holdout
from vitral.data.files import duplicates
from vitral.data.files.duplicates import (
    connected_groups,
    duplicate_groups,
    exact_groups,
    near_duplicate_pairs,
    signatures,
)
from vitral.data.files.folders import list_folder
from vitral.data.files.image_fingerprint import thumbnail


def scene(seed: int, width: int = 240, height: int = 180) -> Image.Image:
    """A synthetic photograph: blobs of all sizes, with a spectrum like that of natural images."""
    random = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for size, strength in ((3, 60), (6, 40), (12, 25), (48, 15)):
        coarse = Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8))
        total += (np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=float) - 128) * strength
    return Image.fromarray((128 + total / 70).clip(0, 255).astype(np.uint8))


def recompressed(image: Image.Image, quality: int) -> Image.Image:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=quality)
    return Image.open(content)


def cropped(image: Image.Image, keep: float, seed: int) -> Image.Image:
    width, height = int(image.width * keep), int(image.height * keep)
    left, top = np.random.default_rng(seed).integers(0, [image.width - width + 1, image.height - height + 1])
    return image.crop((left, top, left + width, top + height))


CHANGES = {
    "half the size": lambda p, _: p.resize((p.width // 2, p.height // 2)),
    "twice the size": lambda p, _: p.resize((p.width * 2, p.height * 2)),
    "JPEG quality 20": lambda p, _: recompressed(p, 20),
    "brighter": lambda p, _: p.point(lambda v: min(int(v * 1.12), 255)),
    "slightly blurred": lambda p, _: p.filter(ImageFilter.GaussianBlur(1)),
    "cropped by 5%": lambda p, seed: cropped(p, 0.95, seed),
}


@pytest.fixture(scope="module")
def scenes() -> list[Image.Image]:
    return [scene(seed) for seed in range(60)]


@pytest.mark.parametrize("change", CHANGES)
def test_modified_copies_are_detected_and_different_scenes_are_not(scenes, change):
    images = [*scenes, *(CHANGES[change](image, seed) for seed, image in enumerate(scenes))]
    pairs = near_duplicate_pairs(np.stack([thumbnail(image) for image in images]))
    assert {(i, j) for i, j in pairs.tolist()} == {(i, i + 60) for i in range(60)}


def test_flat_images_are_not_duplicates():
    random = np.random.default_rng(0)
    flat = np.repeat(random.integers(0, 256, (50, 1, 1, 3)), 32, axis=1).repeat(32, axis=2)
    noisy = (flat + random.integers(-3, 4, (50, 32, 32, 3))).clip(0, 255).astype(np.uint8)
    assert len(near_duplicate_pairs(noisy)) == 0
    assert len(near_duplicate_pairs(np.zeros((0, 32, 32, 3), dtype=np.uint8))) == 0


def test_images_of_different_colour_are_not_duplicates():
    random = np.random.default_rng(0)
    shape = np.asarray(scene(1).resize((32, 32)).convert("L"), dtype=float)
    tints = random.uniform(0.2, 1, (6, 3))
    assert len(near_duplicate_pairs((shape[None, :, :, None] * tints[:, None, None]).astype(np.uint8))) == 0


def test_among_similar_images_only_equal_ones_are_duplicates(monkeypatch):
    """Strokes on black, like digits: 80 similar but different images."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:32, :32]
    strokes = [
        np.exp(-((x - 16 - tilt * (y - 16)) ** 2) / width)
        for tilt, width in zip(random.uniform(-0.4, 0.4, 80), random.uniform(3, 12, 80), strict=True)
    ]
    small = (np.stack(strokes)[..., None] * [255, 255, 255]).astype(np.uint8)
    with_copy = np.concatenate([small, small[:1]])
    pairs = near_duplicate_pairs(with_copy)
    assert [0, 80] in pairs.tolist()
    monkeypatch.setattr(duplicates, "MAX_CANDIDATES_PER_IMAGE", 1000)
    assert len(pairs) < len(near_duplicate_pairs(with_copy)) / 3


def test_signatures_are_brightness_differences_between_grid_cells():
    ramp = np.broadcast_to(np.arange(32, dtype=np.uint8)[None, :, None] * 8, (32, 32, 3))[None]
    signature = signatures(np.ascontiguousarray(ramp))[0]
    assert torch.allclose(signature[64:], torch.zeros(64), atol=1e-5), "no vertical differences"
    assert torch.allclose(signature[9:15], signature[9:10].expand(6), atol=5e-3), "constant horizontal differences"
    assert signature.norm() == pytest.approx(1)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_groups_are_connected_components(case):
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count, pairs = case
    array = np.array(pairs).reshape(-1, 2)
    groups = connected_groups(count, array)
    edges = coo_array((np.ones(len(array)), (array[:, 0], array[:, 1])), shape=(count, count))
    _, expected = connected_components(edges, directed=False)
    matches = set(zip(groups.tolist(), expected.tolist(), strict=True))
    assert len(matches) == len(set(groups.tolist())) == expected.max() + 1
    assert all(groups[group] == group for group in groups), "numbered by the lowest member"


def test_exact_copies_are_detected_by_their_bytes(tmp_path):
    for name, content in (("a", b"xy"), ("b", b"yx"), ("c", b"xy"), ("d", b"xyz"), ("e", b"xy")):
        (tmp_path / name).write_bytes(content)
    files = [tmp_path / name for name in "abcde"]
    assert exact_groups([*files, tmp_path / "missing"]) == [[0, 2, 4]]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=60),
    fraction=st.floats(0.05, 0.5),
    seed=st.integers(0, 2**32 - 1),
)
def test_groups_stay_in_one_split_and_classes_contribute_their_share(sizes, fraction, seed):
    labels = np.repeat([label for label, _ in sizes], [size for _, size in sizes])
    groups = np.repeat(np.arange(len(sizes)), [size for _, size in sizes])
    shuffled = np.random.RandomState(seed).permutation(len(labels))
    labels, groups = labels[shuffled], groups[shuffled]
    held_out = stratified_holdout(labels, fraction, seed=seed, groups=groups)
    assert np.array_equal(held_out, stratified_holdout(labels, fraction, seed=seed, groups=groups))
    for group in np.unique(groups):
        assert len(set(held_out[groups == group].tolist())) == 1
    largest = max(size for _, size in sizes)
    for label in np.unique(labels):
        share = fraction * (labels == label).sum()
        assert share - largest - 1 < held_out[labels == label].sum() < share + 1


def test_groups_across_classes_stay_in_one_split():
    labels, groups = np.arange(400) % 4, np.arange(400) // 2
    held_out = stratified_holdout(labels, 0.25, seed=1, groups=groups)
    assert (held_out[::2] == held_out[1::2]).all()
    assert Counter(labels[held_out].tolist()) == dict.fromkeys(range(4), 25)


def test_without_duplicates_groups_do_not_change_the_holdout():
    labels = np.arange(100) % 7
    with_groups = stratified_holdout(labels, 0.2, seed=3, groups=np.arange(100))
    assert np.array_equal(with_groups, stratified_holdout(labels, 0.2, seed=3))


def test_many_copies_that_shrink_the_held_out_split_are_reported(scenes, tmp_path: Path):
    for index in range(20):
        folder = tmp_path / "photos" / ("ants" if index % 2 else "bees")
        folder.mkdir(parents=True, exist_ok=True)
        scenes[index % 2 if index < 18 else index].save(folder / f"{index}.jpg")
    listing = list_folder(tmp_path / "photos", validation=0.25)
    count = len(listing.splits["validation"])
    assert count < 4
    assert f"16 near-duplicates kept in one split, so only {count} instead of 5 images are held out" in listing.source


def test_near_duplicates_in_a_folder_stay_in_one_split(scenes, tmp_path: Path):
    for index, image in enumerate(scenes[:40]):
        folder = tmp_path / "photos" / ("ants" if index % 2 else "bees")
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{index}.jpg")
        if index < 20:
            image.resize((120, 90)).save(folder / f"{index}-small.jpg", quality=60)
    listing = list_folder(tmp_path / "photos", validation=0.25)
    assert "20 near-duplicates kept in one split" in listing.source
    assert len(listing.splits["validation"]) == 15
    splits: dict[str, set[str]] = {}
    for split in ("train", "validation"):
        for location, _ in listing.splits[split]:
            splits.setdefault(Path(location.path).stem.split("-")[0], set()).add(split)
    assert all(len(names) == 1 for names in splits.values())
    assert list_folder(tmp_path / "photos", validation=0.25) == listing


def test_duplicate_search_is_cached_until_a_file_changes(scenes, tmp_path, monkeypatch):
    for index, image in enumerate(scenes[:8]):
        (tmp_path / "photos" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "photos" / "ab"[index % 2] / f"{index}.png")
    searches = []

    def counted(locations, *_):
        searches.append(len(locations))
        return duplicate_groups(locations)

    monkeypatch.setattr("vitral.data.files.duplicates.duplicate_groups", counted)
    list_folder(tmp_path / "photos", validation=0.25)
    list_folder(tmp_path / "photos", validation=0.25)
    assert searches == [8]
    scenes[9].save(tmp_path / "photos" / "a" / "0.png")
    list_folder(tmp_path / "photos", validation=0.25)
    assert searches == [8, 8]


def test_duplicates_are_not_searched_if_nothing_is_held_out(scenes, tmp_path, monkeypatch):
    for index, image in enumerate(scenes[:4]):
        (tmp_path / "ab"[index % 2]).mkdir(exist_ok=True)
        image.save(tmp_path / "ab"[index % 2] / f"{index}.png")
    monkeypatch.setattr("vitral.data.files.duplicates.duplicate_groups", lambda *_: pytest.fail("searched"))
    listing = list_folder(tmp_path, validation=0.0)
    assert (len(listing.splits["train"]), len(listing.splits["validation"])) == (4, 0)
    assert listing.source == f"from {tmp_path}"


def test_ten_thousand_images_are_compared_in_seconds():
    random = torch.nn.functional.normalize(torch.randn(10_000, 128, generator=torch.Generator().manual_seed(0)))
    start = time.process_time()
    pairs = duplicates.similar_pairs(torch.cat([random, random[:100]]), 0.72)
    assert pairs is not None
    assert pairs.tolist() == [[i, 10_000 + i] for i in range(100)]
    assert time.process_time() - start < 20
