"""WebDataset shards: random access to local and remote tar files without extracting them."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset

import vitral
from support.damage import DAMAGES
from support.photos import COLOURS, PREPROCESSING, noisy_image
from vitral.data.decode import decode_image
from vitral.data.files import duplicates
from vitral.data.files.file_dataset import ReadOptions, load_file_dataset, storage_preprocessing
from vitral.data.files.shards import list_shards, shard_index, shard_splits
from vitral.data.names import is_file_dataset
from vitral.data.registry.cache import cache_dir
from vitral.errors import VitralError

NAMES = sorted(COLOURS)


def jpeg(label: int, seed: int) -> bytes:
    content = io.BytesIO()
    noisy_image(COLOURS[NAMES[label]], seed).save(content, "JPEG")
    return content.getvalue()


def write_shard(path: Path, numbers: range, label_suffix: str = "cls") -> None:
    """Write a shard with the webdataset library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for number in numbers:
            label = number % 3
            label_content = {"cls": label, "txt": NAMES[label], "json": {"label": NAMES[label], "id": number}}
            writer.write(
                {"__key__": f"part/{number:05}", "jpg": jpeg(label, number), label_suffix: label_content[label_suffix]}
            )


@pytest.fixture
def local_shards(tmp_path: Path) -> Path:
    for index in range(3):
        write_shard(tmp_path / "shards" / f"train-{index:03}.tar", range(index * 20, index * 20 + 20), "txt")
    write_shard(tmp_path / "shards" / "val-000.tar", range(100, 112), "txt")
    return tmp_path / "shards"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its file open
@pytest.mark.parametrize("suffix", ["cls", "txt", "json"])
def test_labels_and_images_match_those_read_by_webdataset(tmp_path, suffix):
    write_shard(tmp_path / "a-0.tar", range(12), suffix)
    listing = list_shards(str(tmp_path / "a-{0..0}.tar"), 0.25)
    assert listing.classes == (("0", "1", "2") if suffix == "cls" else tuple(NAMES))
    reference = {
        sample["__key__"]: (sample["jpg"], sample[suffix])
        for sample in webdataset.WebDataset(str(tmp_path / "a-0.tar"), shardshuffle=False)
    }
    images = sorted((*listing.splits["train"], *listing.splits["validation"]))
    content = (tmp_path / "a-0.tar").read_bytes()
    assert len(images) == len(reference) == 12
    for (location, label), (image, label_content) in zip(images, reference.values(), strict=True):
        assert content[location.offset : location.offset + location.size] == image
        text = json.loads(label_content)["label"] if suffix == "json" else label_content.decode()
        assert isinstance(label, int)
        assert listing.classes[label] == text


def test_numeric_class_names_are_sorted_by_value(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:03}", "jpg": jpeg(0, number), "cls": number})
    assert list_shards(str(tmp_path / "a.tar"), 0.25).classes == tuple(map(str, range(12)))


def test_splits_come_from_shard_names():
    assert shard_splits(["a/train-0.tar", "a/imagenet-val-0.tar", "a/test_1.tar", "a/training-x.tar"]) == [
        "train", "validation", "test", "train",
    ]  # fmt: skip
    assert shard_splits(["latest-0.tar", "valley-1.tar"]) == ["train", "train"]
    assert shard_splits(["test-0.tar", "test-1.tar"]) == ["train", "train"], "no name contains train"


@pytest.mark.parametrize("pack", [0.0, 1.0])
def test_packed_and_streamed_pixels_equal_the_decoded_images(local_shards, pack):
    pattern = str(local_shards / "{train-{000..002},val-000}.tar")
    data = load_file_dataset(pattern, PREPROCESSING, read_options=ReadOptions(pack=pack))
    assert (len(data.train), len(data.validation), data.classes) == (60, 12, tuple(NAMES))
    stored = storage_preprocessing(PREPROCESSING)
    for index in (0, 21, 59):
        expected = stored.resize_and_crop(
            decode_image(jpeg(index % 3, index), min_size=stored.image_size, allow_reduced_jpeg=True)
        )
        assert torch.equal(data.train.images[index], expected)
    assert data.train.labels.tolist() == [index % 3 for index in range(60)]


def test_changed_shard_is_indexed_again(local_shards):
    pattern = str(local_shards / "train-{000..002}.tar")
    first = load_file_dataset(pattern, PREPROCESSING)
    assert len(first.train) + len(first.validation) == 60
    write_shard(local_shards / "train-001.tar", range(20, 45), "txt")
    second = load_file_dataset(pattern, PREPROCESSING)
    assert len(second.train) + len(second.validation) == 65
    assert first.fingerprint != second.fingerprint


def test_shard_index_is_cached(local_shards, monkeypatch):
    list_shards(str(local_shards / "train-{000..002}.tar"), 0.2)
    monkeypatch.setattr(tarfile, "open", lambda *_, **__: pytest.fail("read again"))
    list_shards(str(local_shards / "train-{000..002}.tar"), 0.2)


def test_near_duplicates_of_shards_are_searched_once(local_shards, monkeypatch):
    pattern = str(local_shards / "train-{000..002}.tar")
    first = list_shards(pattern, 0.2)
    monkeypatch.setattr(duplicates, "thumbnails", lambda *_: pytest.fail("searched again"))
    assert list_shards(pattern, 0.2) == first


def test_shards_are_listed_and_read_without_a_writable_cache(local_shards, tmp_path, monkeypatch):
    pattern = str(local_shards / "train-{000..002}.tar")
    expected = load_file_dataset(pattern, PREPROCESSING)
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "file"))
    dataset = load_file_dataset(pattern, PREPROCESSING)
    assert f"the cache {tmp_path}/file is not writable: decoded in every epoch" in dataset.source
    assert torch.equal(dataset.train.images[:], expected.train.images[:])
    assert torch.equal(dataset.validation.labels, expected.validation.labels)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_index_is_reported_and_written_again(local_shards, damage, capsys):
    pattern = f"{local_shards}/{{train-{{000..002}},val-000}}.tar"
    before = set((cache_dir() / "shards").glob("*"))
    expected = list_shards(pattern, 0.0)
    cached, *others = sorted(set((cache_dir() / "shards").glob("*")) - before)
    assert len(others) == 3
    content = cached.read_bytes()
    damage(cached)
    for is_first in (True, False):
        assert list_shards(pattern, 0.0) == expected
        warnings = capsys.readouterr().err.splitlines()
        assert len(warnings) == is_first
        assert all(line.startswith(f"warning: damaged cache file {cached} (") for line in warnings)
    assert cached.read_bytes() == content


def test_special_members_and_paths_outside_the_archive_are_harmless(tmp_path):
    archive = tmp_path / "malicious.tar"
    with tarfile.open(archive, "w") as tar:
        kinds = {"../../escape.jpg": tarfile.REGTYPE, "link.jpg": tarfile.SYMTYPE, "/abs.jpg": tarfile.CHRTYPE}
        for name, kind in kinds.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            content = jpeg(0, 1) if kind == tarfile.REGTYPE else b""
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            label = tarfile.TarInfo(name.replace("jpg", "cls"))
            label.size = 1
            tar.addfile(label, io.BytesIO(b"0"))
    assert len(shard_index(str(archive), "state")) == 1
    assert not list(tmp_path.parent.glob("escape*"))


def test_unusable_shards_are_reported(tmp_path, local_shards):
    with pytest.raises(VitralError, match="no shard named"):
        list_shards(str(local_shards / "train-{000..009}.tar"), 0.1)
    with pytest.raises(VitralError, match="compressed"):
        list_shards("a.tar.gz", 0.1)
    with pytest.raises(VitralError, match="unsupported protocol"):
        list_shards("pipe:cat secret.tar", 0.1)
    (tmp_path / "broken.tar").write_bytes(b"\x01" * 2000)
    with pytest.raises(VitralError, match="corrupt or not a tar file"):
        list_shards(str(tmp_path / "broken.tar"), 0.1)
    whole = (local_shards / "train-000.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2 + 100])
    with pytest.raises(VitralError, match="corrupt or not a tar file"):
        list_shards(str(tmp_path / "cut.tar"), 0.1)
    assert is_file_dataset("shards/train-{000..003}.tar")
    assert is_file_dataset("https://example.org/a-{0..9}.tar")


def test_shards_without_labels_are_refused_where_labels_are_needed(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "train-1.tar")) as writer:
        for number in range(4):
            writer.write({"__key__": f"{number:03}", "jpg": jpeg(0, number)})
    write_shard(tmp_path / "train-0.tar", range(6), "cls")
    with pytest.raises(VitralError, match=r"train-1\.tar has no labelled images"):
        list_shards(str(tmp_path / "train-{0..1}.tar"), 0.1)
    assert [label for _, _, label in shard_index(str(tmp_path / "train-1.tar"), "state")] == [None] * 4


def test_images_without_a_label_in_a_labelled_shard_are_not_used(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(8):
            label = {} if number % 4 == 3 else {"cls": number % 2}
            writer.write({"__key__": f"{number:03}", "jpg": jpeg(number % 2, number), **label})
    listing = list_shards(str(tmp_path / "a.tar"), 0.0)
    assert listing.labels("train").tolist() == [0, 1, 0, 0, 1, 0]


def test_unreadable_image_in_a_shard_is_replaced_and_reported_with_its_offset(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(40):
            content = b"no image" if number == 7 else jpeg(number % 2, number)
            writer.write({"__key__": f"{number:03}", "jpg": content, "cls": number % 2})
    data = load_file_dataset(str(tmp_path / "a.tar"), PREPROCESSING, read_options=ReadOptions(unreadable=0.2))
    assert len(data.train) + len(data.validation) in (39, 40)
    assert f"{tmp_path}/a.tar at byte" in data.source


@pytest.fixture
def server_url(local_shards: Path) -> Iterator[str]:
    """A local server with range requests, except for paths that start with "whole-"."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self, *, with_body: bool) -> None:
            content = (local_shards / Path(self.path).name.removeprefix("whole-")).read_bytes()
            byte_range = self.headers.get("Range")
            start, end = 0, len(content) - 1
            if byte_range and "whole-" not in self.path:
                start, end = (int(position) for position in byte_range.removeprefix("bytes=").split("-"))
            self.send_response(206 if byte_range and "whole-" not in self.path else 200)
            self.send_header("Content-Length", str(end - start + 1))
            self.send_header("ETag", str(hash(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content[start : end + 1])

        def do_GET(self) -> None:
            self.respond(with_body=True)

        def do_HEAD(self) -> None:
            self.respond(with_body=False)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_remote_shards_give_the_same_pixels_as_local_ones(local_shards, server_url):
    local = load_file_dataset(str(local_shards / "{train-{000..002},val-000}.tar"), PREPROCESSING)
    options = ReadOptions(pack=0.0, workers=1)
    remote = load_file_dataset(server_url + "/{train-{000..002},val-000}.tar", PREPROCESSING, read_options=options)
    assert torch.equal(remote.train.images[torch.arange(0, 60, 7)], local.train.images[::7])
    assert torch.equal(remote.validation.labels, local.validation.labels)


def test_server_without_range_requests_or_connection_is_reported(server_url):
    with pytest.raises(VitralError, match="the server does not support range requests"):
        list_shards(server_url + "/whole-train-000.tar", 0.1)
    with pytest.raises(VitralError, match=r"cannot reach http://127\.0\.0\.1:9/a\.tar"):
        list_shards("http://127.0.0.1:9/a.tar", 0.1)


@pytest.mark.usefixtures("no_figures")
def test_model_trains_on_shards(local_shards, tmp_path):
    tiny: dict[str, Any] = {
        "model.image_size": (32, 32),
        "model.width": 48,
        "model.depth": 1,
        "batch_size": 10,
        "epochs": 6,
    }
    pattern = str(local_shards / "{train-{000..002},val-000}.tar")
    model = vitral.train(pattern, out=tmp_path / "run", **tiny)
    assert model.classes == tuple(NAMES)
    assert vitral.evaluate(tmp_path / "run", split="validation").top1 > 0.6
