"""Streamed images: decoded on access, equal to packed ones, in bounded memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from support.common import identical
from support.photos import PREPROCESSING, save_class_folders
from vitral.data.files import stream
from vitral.data.files.decode_pool import DecodeWorkers
from vitral.data.files.file_dataset import ReadOptions, load_file_dataset
from vitral.data.files.stream import StreamedImages
from vitral.data.lazy_images import LazyImages
from vitral.data.loader import Loader, to_device_if_fits
from vitral.data.preprocess import channel_stats, to_model_input
from vitral.errors import VitralError
from vitral.runs.model_io import load_weights

STREAMED = ReadOptions(pack=0.0, unreadable=0.1, workers=2)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for split, count in (("train", 24), ("val", 6)):
        save_class_folders(root / split, ("ants", "bees"), count, first_seed=100 * count)
    return root


@pytest.fixture
def streamed(photos):
    data = load_file_dataset(photos, PREPROCESSING, read_options=STREAMED)
    assert isinstance(data.train.images, StreamedImages)
    return data


def test_streamed_images_equal_packed_images(photos, streamed):
    packed = load_file_dataset(photos, PREPROCESSING)
    images = packed.train.images[:]
    assert streamed.train.images.shape == images.shape
    assert torch.equal(torch.cat(list(streamed.train.images.split(7))), images)
    assert torch.equal(streamed.train.images[3], images[3])
    assert torch.equal(streamed.train.images[torch.tensor([40, 2, 2])], images[[40, 2, 2]])
    assert torch.equal(streamed.train.images[5:9], images[5:9])
    smaller = to_model_input(streamed.train.images, PREPROCESSING)
    assert isinstance(smaller, LazyImages)
    assert torch.equal(smaller[torch.arange(4)], to_model_input(images, PREPROCESSING)[:4])
    assert channel_stats(streamed.train.images) == channel_stats(images)
    assert "decoded in every epoch by 2 workers" in streamed.source
    assert packed.fingerprint == streamed.fingerprint


@pytest.mark.parametrize("start", [0, 3])
def test_loader_reads_streamed_images_in_the_same_order_from_any_position(photos, streamed, start, cpu):
    packed = load_file_dataset(photos, PREPROCESSING)
    for images in (packed.train.images, streamed.train.images):
        assert to_device_if_fits(images, cpu) is images
    packed_loader, streamed_loader = (
        Loader(images=data.train.images, labels=data.train.labels, batch_size=7, seed=3, repeat=2)
        for data in (packed, streamed)
    )
    for (images, labels), (streamed_images, streamed_labels) in zip(
        packed_loader.epoch(4, start), streamed_loader.epoch(4, start), strict=True
    ):
        assert torch.equal(images, streamed_images)
        assert torch.equal(labels, streamed_labels)


def test_batches_may_be_larger_than_the_buffer(photos, monkeypatch):
    monkeypatch.setattr(stream, "MAX_BUFFER_BYTES", 4 * 3 * 20 * 20 * 3)
    images = load_file_dataset(photos, PREPROCESSING, read_options=STREAMED).train.images
    assert isinstance(images, StreamedImages)
    assert (images.slot_rows, images.buffer_bytes) == (3, 12 * 1200)
    packed = load_file_dataset(photos, PREPROCESSING).train.images
    for batch, expected in zip(images.split(10), packed.split(10), strict=True):
        assert torch.equal(batch, expected)


@pytest.mark.slow
def test_nested_and_abandoned_iterations_do_not_interfere(photos, streamed):
    images, packed = streamed.train.images, load_file_dataset(photos, PREPROCESSING).train.images
    outer = images.split(5)
    assert torch.equal(next(outer), packed[:5])
    assert torch.equal(images[20:30], packed[20:30])
    assert torch.equal(next(outer), packed[5:10])
    outer.close()
    assert torch.equal(images[:3], packed[:3])


def test_unreadable_file_is_reported_once_and_replaced_as_in_a_pack(photos, capsys):
    for name in ("03", "04"):
        (photos / "train" / "bees" / f"{name}.jpg").write_bytes(b"no image")
    packed = load_file_dataset(photos, PREPROCESSING, read_options=ReadOptions(unreadable=0.1)).train.images[:]
    streamed = load_file_dataset(photos, PREPROCESSING, read_options=STREAMED).train
    for _ in range(3):
        assert torch.equal(torch.cat(list(streamed.images.split(5))), packed)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert all("unreadable image replaced by another one: " in line for line in warnings)
    assert "03.jpg: not an image" in warnings[0]


def test_too_many_unreadable_files_are_an_error(photos):
    for index in range(3):
        (photos / "train" / "bees" / f"{index:02}.jpg").write_bytes(b"no image")
    images = load_file_dataset(photos, PREPROCESSING, read_options=ReadOptions(pack=0.0, unreadable=0.05)).train.images
    with pytest.raises(VitralError, match=r"3 of 48 images are unreadable, more than 5\.0%"):
        list(images.split(8))


def test_killed_worker_is_an_error_and_the_next_access_starts_new_workers(streamed):
    images = streamed.train.images
    list(images.split(8))
    images._idle.workers.wait_until_ready()
    processes = images._idle.workers.processes
    os.kill(processes[0].pid, signal.SIGKILL)
    with pytest.raises(VitralError, match="an image decoding process was killed"):
        list(images.split(8))
    assert all(process.returncode is not None for process in processes)
    assert len(list(images.split(8))) == 6


def test_read_ahead_is_bounded(streamed, monkeypatch):
    requests = []
    decode = DecodeWorkers.decode

    def count_and_decode(self, *args):
        requests.append(args)
        return decode(self, *args)

    monkeypatch.setattr(DecodeWorkers, "decode", count_and_decode)
    batches = streamed.train.images.split(4)
    next(batches)
    assert len(requests) == stream.NUM_SLOTS
    batches.close()


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_training_on_streamed_images_gives_the_weights_of_packed_images(photos, tmp_path):
    tiny: dict[str, Any] = {
        "model.image_size": (32, 32),
        "model.width": 48,
        "model.depth": 1,
        "batch_size": 8,
        "epochs": 2,
    }
    runs = {}
    for name, pack in (("packed", 1.0), ("streamed", 0.0)):
        vitral.train(str(photos), out=tmp_path / name, **tiny | {"data.pack": pack})
        runs[name] = load_weights(tmp_path / name / "model" / "weights.safetensors")
    assert identical(runs["packed"], runs["streamed"])
