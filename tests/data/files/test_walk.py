"""The directory walk: order, hidden files, symbolic links and folders without images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vitral.data.files.walk import find_images, iter_images, subfolders, walk_files


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


def test_walk_can_yield_other_suffixes_and_stay_in_one_folder(tree):
    every = relative(walk_files(tree, suffixes=None), tree)
    assert every == ["a/1.webp", "a/2.PNG", "a/notes.txt", "b.jpg", "c/d/e.tiff", "z.txt"]
    assert relative(walk_files(tree, recursive=False), tree) == ["b.jpg"]


def test_linked_folders_are_listed_but_not_followed(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "1.jpg").write_bytes(b"")
    (tree / "link").symlink_to(other)
    (tree / "broken.jpg").symlink_to(tree / "missing.jpg")
    (tree / "linked.jpg").symlink_to(other / "1.jpg")
    assert relative(find_images([tree]), tree) == ["a/1.webp", "a/2.PNG", "b.jpg", "c/d/e.tiff", "linked.jpg"]
    assert find_images([tree / "link"]) == [tree / "link" / "1.jpg"]
    assert relative(subfolders(tree), tree) == ["a", "c", "link"]


def test_hidden_folder_is_searched_if_given_by_name(tree):
    assert find_images([tree / ".hidden"]) == [tree / ".hidden" / "x.jpg"]


def test_suffixes_decide_what_is_an_image(tmp_path):
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
