"""The directory walk: order, links, files that are no images, and what is reported as skipped."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from PIL import Image

from vitral.data.files.walk import (
    ImageWalk,
    SkippedFile,
    SkippedFiles,
    SkipReason,
    find_images,
    has_image_content,
    iter_images,
    subfolders,
)


def create_files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    names = ("b.jpg", "a/2.PNG", "a/1.webp", "a/notes.txt", "c/d/e.tiff", ".hidden/x.jpg", "a/.x.jpg", "z.txt")
    create_files(tmp_path, *names)
    return tmp_path


def relative(paths, root):
    return [str(path.relative_to(root)) for path in paths]


def test_images_are_sorted_by_name_at_each_level(tree):
    assert relative(find_images([tree]), tree) == ["a/1.webp", "a/2.PNG", "b.jpg", "c/d/e.tiff"]
    assert list(iter_images([tree])) == find_images([tree]) == sorted(find_images([tree]))


def test_walk_can_stay_in_one_folder(tree):
    assert relative(ImageWalk().images(tree, recursive=False), tree) == ["b.jpg"]


def skipped_entries(root: Path) -> dict[str, SkipReason]:
    """Reasons by relative path."""
    skipped: list[SkippedFile] = []
    list(iter_images([root], skipped.append))
    assert len({entry.path for entry in skipped}) == len(skipped), "each is reported once"
    return {str(entry.path.relative_to(root)): entry.reason for entry in skipped}


def test_links_to_files_and_folders_are_followed(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    create_files(other, "1.jpg", "deep/2.jpg")
    (tree / "link").symlink_to(other)
    (tree / "linked.jpg").symlink_to(other / "1.jpg")
    assert relative(find_images([tree]), tree) == [
        "a/1.webp", "a/2.PNG", "b.jpg", "c/d/e.tiff", "linked.jpg", "link/1.jpg", "link/deep/2.jpg",
    ]  # fmt: skip
    assert find_images([tree / "link"]) == [tree / "link" / "1.jpg", tree / "link" / "deep" / "2.jpg"]
    assert relative(subfolders(tree), tree) == ["a", "c", "link"]


def test_each_folder_is_listed_once_and_under_its_own_name(tmp_path):
    create_files(tmp_path, "cats/1.jpg", "cats/deep/2.jpg")
    (tmp_path / "a").symlink_to(tmp_path / "cats")
    (tmp_path / "cats" / "deep" / "up").symlink_to(tmp_path)
    (tmp_path / "self.jpg").symlink_to(tmp_path / "self.jpg")
    assert relative(find_images([tmp_path]), tmp_path) == ["cats/1.jpg", "cats/deep/2.jpg"]
    assert skipped_entries(tmp_path) == {
        "a": SkipReason.REPEATED_FOLDER,
        "cats/deep/up": SkipReason.REPEATED_FOLDER,
        "self.jpg": SkipReason.LINK_LOOP,
    }


def test_everything_that_is_not_listed_is_reported_with_a_reason(tree):
    create_files(tree, "phone.HEIC", "raw.dng")
    (tree / "a" / "broken.jpg").symlink_to(tree / "missing.jpg")
    os.mkfifo(tree / "a" / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tree / "s.png"))  # an absolute path may be longer than the system allows
    assert skipped_entries(tree) == {
        ".hidden": SkipReason.HIDDEN,
        "a/.x.jpg": SkipReason.HIDDEN,
        "a/broken.jpg": SkipReason.DANGLING_LINK,
        "a/notes.txt": SkipReason.NOT_AN_IMAGE,
        "a/pipe.jpg": SkipReason.NOT_REGULAR,
        "phone.HEIC": SkipReason.UNSUPPORTED_FORMAT,
        "raw.dng": SkipReason.UNSUPPORTED_FORMAT,
        "s.png": SkipReason.NOT_REGULAR,
        "z.txt": SkipReason.NOT_AN_IMAGE,
    }


def test_unreadable_folder_is_reported(tmp_path):
    skipped: list[SkippedFile] = []
    assert list(ImageWalk(skipped.append).images(tmp_path / "gone")) == []
    assert skipped == [(tmp_path / "gone", SkipReason.UNREADABLE_FOLDER)]


@pytest.mark.parametrize("name", ["photo", "photo.jpg_original", "photo.bin", "photo.JFIF", "photo.jpe"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_image_is_recognised_by_its_content_if_the_suffix_is_unusual(tmp_path, name, format):
    Image.new("RGB", (4, 4)).save(tmp_path / name, format)
    assert find_images([tmp_path]) == [tmp_path / name]


@pytest.mark.parametrize(
    "content", [b"", b"BMW notes: the car is red and blue", b"RIFF\0\0\0\0WAVEfmt ", b"\xff\xd8", b"II.txt"]
)
def test_other_content_is_not_an_image(tmp_path, content):
    assert not has_image_content(content)
    (tmp_path / "file").write_bytes(content)
    assert find_images([tmp_path]) == []


def test_summary_counts_reasons_and_names_the_first_files():
    skipped = SkippedFiles()
    assert skipped.summary() is None
    skipped.add(SkippedFile(Path("notes.txt"), SkipReason.NOT_AN_IMAGE))
    assert skipped.summary() == "skipped 1 file: 1 not an image (notes.txt)"
    for index in range(5):
        skipped.add(SkippedFile(Path(f"{index}.jpg"), SkipReason.DANGLING_LINK))
    assert skipped.summary() == (
        "skipped 6 files: 5 dangling links (0.jpg, 1.jpg, 2.jpg and 2 more), 1 not an image (notes.txt)"
    )


def test_summary_of_skipped_folders_counts_folders():
    skipped = SkippedFiles()
    skipped.add(SkippedFile(Path("ants"), SkipReason.NO_IMAGES))
    skipped.add(SkippedFile(Path("bees"), SkipReason.NO_IMAGES))
    assert skipped.summary() == "skipped 2 folders: 2 folders without images (ants, bees)"


def test_hidden_folder_is_searched_if_given_by_name(tree):
    assert find_images([tree / ".hidden"]) == [tree / ".hidden" / "x.jpg"]


def test_files_with_the_suffix_of_an_image_are_not_opened(tmp_path):
    images = ["a/2.JPG", "a/b/deep.tiff", "b.png", "c d/ünï códe 猫.webp", "z.Gif"]
    others = [
        ".hidden.png", ".git/x.png", "a/.ipynb_checkpoints/2-checkpoint.jpg", "__MACOSX/._2.jpg", "a/notes.txt",
        "a/jpg", "labels.csv",
    ]  # fmt: skip
    create_files(tmp_path, *reversed(images), *others)
    (tmp_path / "folder.png").mkdir()
    assert relative(find_images([tmp_path]), tmp_path) == images


def test_files_are_taken_as_given(tmp_path):
    create_files(tmp_path, "folder/1.png", "folder/0.png", "photo.unknown")
    paths = [tmp_path / "photo.unknown", tmp_path / "missing.png", tmp_path / "folder", tmp_path / "folder/1.png"]
    assert [path.name for path in find_images(paths)] == ["photo.unknown", "missing.png", "0.png", "1.png", "1.png"]


def test_folder_without_images_is_listed_only_next_to_other_paths(tmp_path):
    create_files(tmp_path, "full/a.png")
    (tmp_path / "empty").mkdir()
    empty, full = tmp_path / "empty", tmp_path / "full"
    assert find_images([full, empty, full / "a.png"]) == [full / "a.png", empty, full / "a.png"]
    assert find_images([empty]) == find_images([empty, empty]) == []
    assert list(iter_images([empty, full])) == [full / "a.png"]


def test_walk_lists_one_folder_at_a_time(tree, monkeypatch):
    listed = []
    scandir = os.scandir

    def record(folder):
        listed.append(Path(folder).name)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", record)
    assert next(iter_images([tree])) == tree / "a" / "1.webp"
    assert listed == [tree.name, "a"]
