"""Sets that fit no disk: decoded as they are asked for, the same pixels in the same order, in bounded memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import vitral
from data.files.test_listing import COLOURS, SEEN, photograph
from support.common import identical
from vitral.data.files import stream
from vitral.data.files.file_dataset import Reading
from vitral.data.files.listing import load_files
from vitral.data.files.stream import Streamed
from vitral.data.lazy_images import Images
from vitral.data.loader import Loader, on_device
from vitral.data.preprocess import adapt, measure
from vitral.errors import VitralError
from vitral.runs.run import load_weights

pytestmark = pytest.mark.usefixtures("no_pictures")

STREAMED = Reading(pack=0.0, unreadable=0.1, workers=2)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for split, count in (("train", 24), ("val", 6)):
        for name in ("ants", "bees"):
            for index in range(count):
                photograph(root / split / name / f"{index:02}.jpg", COLOURS[name], index + 100 * count)
    return root


@pytest.fixture
def streamed(photos):
    data = load_files(photos, SEEN, how=STREAMED)
    assert isinstance(data.train.images, Streamed)
    return data


def test_a_stream_gives_what_a_pack_gives(photos, streamed):
    packed = load_files(photos, SEEN)
    images = packed.train.images
    assert streamed.train.images.shape == images.shape
    assert torch.equal(torch.cat(list(streamed.train.images.split(7))), images)
    assert torch.equal(streamed.train.images[3], images[3])
    assert torch.equal(streamed.train.images[torch.tensor([40, 2, 2])], images[[40, 2, 2]])
    assert torch.equal(streamed.train.images[5:9], images[5:9])
    smaller = adapt(streamed.train.images, SEEN)
    assert isinstance(smaller, Images)
    assert torch.equal(smaller[torch.arange(4)], adapt(images, SEEN)[:4])
    assert measure(streamed.train.images) == measure(images)
    assert "decoded anew each epoch by 2 workers" in streamed.source
    assert packed.fingerprint == streamed.fingerprint


@pytest.mark.parametrize("start", [0, 3])
def test_the_loader_reads_a_stream_in_the_same_order_from_any_place(photos, streamed, start, cpu):
    packed = load_files(photos, SEEN)
    for images in (packed.train.images, streamed.train.images):
        assert on_device(images, cpu) is images
    one, other = (
        Loader(images=data.train.images, labels=data.train.labels, batch=7, seed=3, repeat=2)
        for data in (packed, streamed)
    )
    for (images, labels), (streamed_images, streamed_labels) in zip(
        one.epoch(4, start), other.epoch(4, start), strict=True
    ):
        assert torch.equal(images, streamed_images)
        assert torch.equal(labels, streamed_labels)


def test_batches_larger_than_the_buffer_come_in_parts(photos, monkeypatch):
    monkeypatch.setattr(stream, "MOST_BUFFER", 4 * 3 * 20 * 20 * 3)
    images = load_files(photos, SEEN, how=STREAMED).train.images
    assert isinstance(images, Streamed)
    assert (images.rows, images.buffer) == (3, 12 * 1200)
    packed = load_files(photos, SEEN).train.images
    for found, expected in zip(images.split(10), packed.split(10), strict=True):
        assert torch.equal(found, expected)


def test_reading_inside_a_reading_and_stopping_in_the_middle_disturb_nothing(photos, streamed):
    images, packed = streamed.train.images, load_files(photos, SEEN).train.images
    outer = images.split(5)
    assert torch.equal(next(outer), packed[:5])
    assert torch.equal(images[20:30], packed[20:30])
    assert torch.equal(next(outer), packed[5:10])
    outer.close()
    assert torch.equal(images[:3], packed[:3])


def test_a_broken_file_is_reported_once_and_replaced_as_in_a_pack(photos, capsys):
    for name in ("03", "04"):
        (photos / "train" / "bees" / f"{name}.jpg").write_bytes(b"no image")
    packed = load_files(photos, SEEN, how=Reading(unreadable=0.1)).train.images
    streamed = load_files(photos, SEEN, how=STREAMED).train
    for _ in range(3):
        assert torch.equal(torch.cat(list(streamed.images.split(5))), packed)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all("another image of its class takes its place" in line for line in said)
    assert "03.jpg: not an image" in said[0]


def test_too_many_broken_files_stop_the_reading(photos):
    for index in range(3):
        (photos / "train" / "bees" / f"{index:02}.jpg").write_bytes(b"no image")
    images = load_files(photos, SEEN, how=Reading(pack=0.0, unreadable=0.05)).train.images
    with pytest.raises(VitralError, match=r"3 of 48 images cannot be read, more than 5\.0%"):
        list(images.split(8))


def test_a_killed_worker_is_a_clear_error_and_the_next_reading_starts_new_ones(streamed):
    images = streamed.train.images
    list(images.split(8))
    first = images._idle.workers._all
    os.kill(first[0].pid, signal.SIGKILL)
    with pytest.raises(VitralError, match="a worker process that decodes images was killed"):
        list(images.split(8))
    assert all(process.returncode is not None for process in first)
    assert len(list(images.split(8))) == 6


def test_what_is_read_ahead_is_bounded(photos, streamed, monkeypatch):
    asked = []
    begin = Streamed._begin
    monkeypatch.setattr(Streamed, "_begin", lambda self, *rest: asked.append(1) or begin(self, *rest))
    reading = streamed.train.images.split(4)
    next(reading)
    assert len(asked) == stream.SLOTS
    reading.close()


def test_a_run_over_a_stream_ends_with_the_weights_of_a_run_over_a_pack(photos, tmp_path):
    small = {"model.image_size": (32, 32), "model.width": 48, "model.depth": 1, "batch": 8, "epochs": 2}
    runs = {}
    for name, pack in (("packed", 1.0), ("streamed", 0.0)):
        vitral.train(str(photos), out=tmp_path / name, **small, **{"data.pack": pack, "data.workers": 1})
        runs[name] = load_weights(tmp_path / name / "model" / "weights.safetensors")
    assert identical(runs["packed"], runs["streamed"])
