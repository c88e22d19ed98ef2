"""Images that are packed during the first pass: the batches and the pack are those of images packed beforehand."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from support.common import identical
from support.photos import PREPROCESSING, save_class_folders
from vitral.data.files import file_dataset, pack_writer, packing_images
from vitral.data.files.decode_pool import DecodeThreads
from vitral.data.files.file_dataset import ReadOptions, load_file_dataset
from vitral.data.files.packed import is_packed, read_split
from vitral.data.files.packing_images import PackingImages
from vitral.data.files.row_checksums import join_checksums
from vitral.data.files.stream import StreamedImages
from vitral.data.loader import Loader
from vitral.data.registry.cache import cache_dir
from vitral.errors import VitralError
from vitral.runs.model_io import load_weights

OPTIONS = ReadOptions(unreadable=0.1, workers=2)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "home"))
    for split, count in (("train", 24), ("val", 3)):
        save_class_folders(tmp_path / "photos" / split, ("ants", "bees"), count, first_seed=100 * count)
    return tmp_path / "photos"


@pytest.fixture
def load_packing(photos, monkeypatch):
    """Load the training images to be packed during the first pass, whatever their size."""
    monkeypatch.setattr(file_dataset, "MIN_BYTES_TO_DEFER", 0)
    monkeypatch.setattr(packing_images, "READ_AHEAD_IMAGES", 8)

    def load():
        train = load_file_dataset(photos, PREPROCESSING, read_options=OPTIONS).train
        assert isinstance(train.images, PackingImages)
        return train

    return load


def make_loader(split, batch_size: int = 8) -> Loader:
    return Loader(images=split.images, labels=split.labels, batch_size=batch_size, seed=3)


def pack_beforehand(photos: Path, tmp_path: Path, monkeypatch):
    """The training images and the pack of the same folder, packed before the first pass, in another cache."""
    with monkeypatch.context() as patch:
        patch.setenv("VITRAL_HOME", str(tmp_path / "other-home"))
        patch.setattr(file_dataset, "MIN_BYTES_TO_DEFER", 2**60)
        train = load_file_dataset(photos, PREPROCESSING, read_options=OPTIONS).train
        (folder,) = (path for path in (cache_dir() / "packed").iterdir() if is_packed(path))
    return train, folder


def pack_folder() -> Path:
    (folder,) = (path for path in (cache_dir() / "packed").glob("photos-*") if path.is_dir())
    return folder


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_batches_and_pack_equal_those_packed_beforehand(photos, load_packing, tmp_path, monkeypatch, workers):
    if workers == "processes":
        monkeypatch.setattr(pack_writer, "MIN_FILES_FOR_WORKERS", 0)
    for name in ("train/bees/03.jpg", "train/bees/04.jpg"):
        (photos / name).write_bytes(b"no image")
    expected, expected_folder = pack_beforehand(photos, tmp_path, monkeypatch)
    train = load_packing()
    for epoch in range(3):
        pairs = zip(make_loader(expected).epoch(epoch), make_loader(train).epoch(epoch), strict=True)
        for (expected_images, expected_labels), (images, labels) in pairs:
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)
    assert isinstance(train.images.resolve(), torch.Tensor)
    folder = pack_folder()
    assert (folder / "train.npy").read_bytes() == (expected_folder / "train.npy").read_bytes()
    assert is_packed(folder)
    assert not list(folder.glob(".train*"))
    first, second = read_split(folder, "train"), read_split(expected_folder, "train")
    assert first is not None
    assert second is not None
    assert first.unreadable == second.unreadable
    again = load_file_dataset(photos, PREPROCESSING, read_options=OPTIONS).train.images
    assert torch.equal(again[:], expected.images[:])


def test_first_batch_needs_only_the_read_ahead(load_packing):
    train = load_packing()
    batches = make_loader(train, batch_size=2).epoch(0)
    next(batches)
    train.images.writer.workers.close()
    assert np.count_nonzero(train.images.writer.checksums) <= 12
    assert not (pack_folder() / "train.json").exists()


def test_pack_is_completed_with_the_images_that_the_epoch_leaves_out(load_packing, monkeypatch):
    train = load_packing()
    monkeypatch.setattr(packing_images, "READ_AHEAD_IMAGES", 0)
    list(make_loader(train, batch_size=47).epoch(0))  # of 48 images
    assert train.images.packed is not None


def test_part_of_the_images_does_not_complete_the_pack(load_packing):
    images = load_packing().images
    _ = images[:20]
    assert images.packed is None
    assert torch.equal(images[3], images[torch.tensor([3])][0])
    _ = images[:]
    assert images.packed is not None


def test_loading_again_in_the_same_process_continues_the_pack(load_packing):
    first = load_packing().images
    _ = first[:5]
    assert load_packing().images is first


def test_images_are_streamed_while_another_process_packs_them(photos, load_packing, monkeypatch):
    images = load_packing().images
    monkeypatch.setattr(packing_images, "_unfinished", {})  # as in another process
    data = load_file_dataset(photos, PREPROCESSING, read_options=OPTIONS)
    assert isinstance(data.train.images, StreamedImages)
    assert "another process is packing the images" in data.source
    assert torch.equal(data.train.images[:], images[:])


def test_processes_of_a_distributed_run_wait_for_a_whole_pack(photos, load_packing, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert isinstance(load_file_dataset(photos, PREPROCESSING).train.images, torch.Tensor)


def test_too_many_unreadable_files_are_an_error(photos, load_packing):
    for index in range(6):
        (photos / "train" / "bees" / f"{index:02}.jpg").write_bytes(b"no image")
    with pytest.raises(VitralError, match=r"5 of 48 images are unreadable, more than 10\.0%"):
        _ = load_packing().images[:]


def test_killed_worker_is_an_error_and_the_next_access_starts_new_workers(load_packing, monkeypatch):
    monkeypatch.setattr(pack_writer, "MIN_FILES_FOR_WORKERS", 0)
    images = load_packing().images
    batches = images.split(4)
    next(batches)
    images.writer.workers.wait_until_ready()
    processes = images.writer.workers.processes
    os.kill(processes[0].pid, signal.SIGKILL)
    with pytest.raises(VitralError, match="an image decoding process was killed"):
        list(batches)
    assert all(process.returncode is not None for process in processes)
    assert len(images[:]) == 48
    assert images.packed is not None


def test_full_disk_is_an_error_before_the_first_batch(load_packing, monkeypatch):
    def disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack_writer, "reserve_disk_space", disk_full)
    with pytest.raises(VitralError, match="No space left on device") as caught:
        load_packing()
    assert "--data.pack 0" in caught.value.hint
    assert not list((cache_dir() / "packed").glob("photos-*/.train*"))


def test_training_continues_if_the_finished_pack_cannot_be_written(photos, load_packing, monkeypatch, capsys):
    def disk_full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    images = load_packing().images
    monkeypatch.setattr(pack_writer, "write_split_metadata", disk_full)
    first = images[:]
    assert "the packed images cannot be kept: [Errno 28] No space left on device" in capsys.readouterr().err
    assert torch.equal(images[:], first)
    assert not (pack_folder() / "train.json").exists()


KILLED_SCRIPT = """
import os, signal, sys
from vitral.data.files import file_dataset, packing_images
from vitral.data.preprocess import Preprocessing
file_dataset.MIN_BYTES_TO_DEFER = 0
packing_images.READ_AHEAD_IMAGES = 8
preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.8)
options = file_dataset.ReadOptions(unreadable=0.1, workers=2)
images = file_dataset.load_file_dataset(sys.argv[1], preprocessing, read_options=options).train.images
for number, _ in enumerate(images.split(4)):
    if number == 5:
        images.writer.workers.close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_next_process_continues_after_a_kill(photos, load_packing, tmp_path, monkeypatch):
    expected, expected_folder = pack_beforehand(photos, tmp_path, monkeypatch)
    assert subprocess.run([sys.executable, "-c", KILLED_SCRIPT, str(photos)]).returncode == -signal.SIGKILL
    folder = pack_folder()
    assert not is_packed(folder)
    assert read_split(folder, "train") is None, "half a pack is not taken for a whole one"
    with (folder / ".train.npy").open("r+b") as file:  # damage the second image
        file.seek(128 + 1200 + 100)
        file.write(b"damaged")
    decoded: list[int] = []
    decode = DecodeThreads.decode

    def record_and_decode(self, rows, *args):
        decoded.extend(rows)
        return decode(self, rows, *args)

    monkeypatch.setattr(DecodeThreads, "decode", record_and_decode)
    images = load_packing().images
    assert torch.equal(images[:], expected.images[:])
    assert 1 in decoded
    assert 0 not in decoded
    assert len(decoded) == len(set(decoded)) <= 48 - 22
    assert (folder / "train.npy").read_bytes() == (expected_folder / "train.npy").read_bytes()


@pytest.mark.slow
def test_changed_files_replace_an_unfinished_pack(photos, load_packing):
    assert subprocess.run([sys.executable, "-c", KILLED_SCRIPT, str(photos)]).returncode == -signal.SIGKILL
    unfinished = pack_folder()
    os.utime(photos / "train" / "bees" / "03.jpg", ns=(1, 10**18))
    _ = load_packing().images[:]
    assert pack_folder() != unfinished


def test_joined_checksum_is_that_of_the_whole_file():
    random = np.random.default_rng(0)
    header, rows = random.bytes(128), [random.bytes(97) for _ in range(5)]
    joined = join_checksums(zlib.crc32(header), [zlib.crc32(row) for row in rows], 97)
    assert joined == zlib.crc32(header + b"".join(rows))
    assert join_checksums(7, [], 97) == 7


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_training_while_packing_gives_the_weights_of_packed_images(photos, tmp_path, monkeypatch):
    tiny: dict[str, Any] = {"model.image_size": (32, 32), "model.width": 48, "model.depth": 1, "batch_size": 8}
    runs = []
    for name, min_bytes in (("packing", 0), ("packed", 2**60)):
        monkeypatch.setenv("VITRAL_HOME", str(tmp_path / f"{name}-home"))
        monkeypatch.setattr(file_dataset, "MIN_BYTES_TO_DEFER", min_bytes)
        vitral.train(str(photos), out=tmp_path / name, **tiny | {"epochs": 2})
        runs.append(load_weights(tmp_path / name / "model" / "weights.safetensors"))
    assert identical(*runs)
