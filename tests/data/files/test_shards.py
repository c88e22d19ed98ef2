"""WebDataset shards: read in any order and from any place, here and over http, and never unpacked."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

import vitral
from data.files.test_listing import COLOURS, SEEN
from vitral.data.decode import decode
from vitral.data.files import shards
from vitral.data.files.file_dataset import Reading, stored_like
from vitral.data.files.listing import load_files, looks_like_files
from vitral.data.files.shards import indexed, listed_shards, splits_of
from vitral.errors import VitralError

pytestmark = pytest.mark.usefixtures("no_pictures")

NAMES = sorted(COLOURS)


def jpeg(label: int, seed: int) -> bytes:
    noise = np.random.default_rng(seed).integers(-25, 25, (30, 40, 3))
    pixels = (np.array(COLOURS[NAMES[label]]) + noise).clip(0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG")
    return content.getvalue()


def write(path: Path, numbers: range, label_kind: str = "cls") -> None:
    """As people make them: with webdataset's own writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for number in numbers:
            label = number % 3
            said = {"cls": label, "txt": NAMES[label], "json": {"label": NAMES[label], "id": number}}[label_kind]
            writer.write({"__key__": f"part/{number:05}", "jpg": jpeg(label, number), label_kind: said})


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for index in range(3):
        write(tmp_path / "shards" / f"train-{index:03}.tar", range(index * 20, index * 20 + 20), "txt")
    write(tmp_path / "shards" / "val-000.tar", range(100, 112), "txt")
    return tmp_path / "shards"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its file open
@pytest.mark.parametrize("kind", ["cls", "txt", "json"])
def test_labels_come_from_cls_txt_and_json_as_webdataset_reads_them(tmp_path, kind):
    write(tmp_path / f"a-{0}.tar", range(12), kind)
    listed = listed_shards(str(tmp_path / "a-{0..0}.tar"), 0.25)
    assert listed.classes == (("0", "1", "2") if kind == "cls" else tuple(NAMES))
    theirs = {
        sample["__key__"]: (sample["jpg"], sample[kind])
        for sample in webdataset.WebDataset(str(tmp_path / "a-0.tar"), shardshuffle=False)
    }
    ours = sorted((*listed.splits["train"], *listed.splits["validation"]))
    content = (tmp_path / "a-0.tar").read_bytes()
    assert len(ours) == len(theirs) == 12
    for (source, label), (picture, said) in zip(ours, theirs.values(), strict=True):
        assert content[source.offset : source.offset + source.size] == picture
        text = json.loads(said)["label"] if kind == "json" else said.decode()
        assert listed.classes[label] == text


def test_numbers_are_ordered_as_numbers(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:03}", "jpg": jpeg(0, number), "cls": number})
    assert listed_shards(str(tmp_path / "a.tar"), 0.25).classes == tuple(map(str, range(12)))


def test_splits_are_said_by_the_shards_names():
    assert splits_of(["a/train-0.tar", "a/imagenet-val-0.tar", "a/test_1.tar", "a/training-x.tar"]) == [
        "train", "validation", "test", "train",
    ]  # fmt: skip
    assert splits_of(["latest-0.tar", "valley-1.tar"]) == ["train", "train"]
    assert splits_of(["test-0.tar", "test-1.tar"]) == ["train", "train"], "no name says train"


@pytest.mark.parametrize("pack", [0.0, 1.0])
def test_pixels_are_those_of_the_pictures_whether_packed_or_streamed(here, pack):
    pattern = str(here / "{train-{000..002},val-000}.tar")
    data = load_files(pattern, SEEN, how=Reading(pack=pack))
    assert (len(data.train), len(data.validation), data.classes) == (60, 12, tuple(NAMES))
    stored = stored_like(SEEN)
    for index in (0, 21, 59):
        expected = stored.pixels(decode(jpeg(index % 3, index), at_least=stored.image_size))
        assert torch.equal(data.train.images[index], expected)
    assert data.train.labels.tolist() == [index % 3 for index in range(60)]


def test_a_changed_shard_is_indexed_anew(here):
    pattern = str(here / "train-{000..002}.tar")
    first = load_files(pattern, SEEN)
    assert len(first.train) + len(first.validation) == 60
    write(here / "train-001.tar", range(20, 45), "txt")
    second = load_files(pattern, SEEN)
    assert len(second.train) + len(second.validation) == 65
    assert first.fingerprint != second.fingerprint


def test_headers_are_read_once(here, monkeypatch):
    listed_shards(str(here / "train-{000..002}.tar"), 0.2)
    monkeypatch.setattr(shards, "_entries", lambda *_: pytest.fail("read again"))
    listed_shards(str(here / "train-{000..002}.tar"), 0.2)


def test_members_that_are_no_plain_files_and_paths_that_lead_out_touch_nothing(tmp_path):
    archive = tmp_path / "evil.tar"
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
    assert len(indexed(str(archive), "state")) == 1
    assert not list(tmp_path.parent.glob("escape*"))


def test_what_is_wrong_with_shards_is_said(tmp_path, here):
    with pytest.raises(VitralError, match="there is no shard"):
        listed_shards(str(here / "train-{000..009}.tar"), 0.1)
    with pytest.raises(VitralError, match="compressed"):
        listed_shards("a.tar.gz", 0.1)
    with pytest.raises(VitralError, match="http and https"):
        listed_shards("pipe:cat secret.tar", 0.1)
    (tmp_path / "broken.tar").write_bytes(b"\x01" * 2000)
    with pytest.raises(VitralError, match="broken or no tar file"):
        listed_shards(str(tmp_path / "broken.tar"), 0.1)
    whole = (here / "train-000.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2 + 100])
    with pytest.raises(VitralError, match="broken or no tar file"):
        listed_shards(str(tmp_path / "cut.tar"), 0.1)
    assert looks_like_files("shards/train-{000..003}.tar")
    assert looks_like_files("https://example.org/a-{0..9}.tar")


def test_a_broken_picture_in_a_shard_is_named_by_its_place_and_replaced(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(40):
            content = b"no image" if number == 7 else jpeg(number % 2, number)
            writer.write({"__key__": f"{number:03}", "jpg": content, "cls": number % 2})
    data = load_files(str(tmp_path / "a.tar"), SEEN, how=Reading(unreadable=0.2))
    assert len(data.train) + len(data.validation) in (39, 40)
    assert f"{tmp_path}/a.tar at byte" in data.source


@pytest.fixture
def elsewhere(here: Path) -> Iterator[str]:
    """A server on this machine that sends parts of files, unless the address says not to."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: bool) -> None:
            content = (here / Path(self.path).name.removeprefix("whole-")).read_bytes()
            wanted = self.headers.get("Range")
            start, end = 0, len(content) - 1
            if wanted and "whole-" not in self.path:
                start, end = (int(place) for place in wanted.removeprefix("bytes=").split("-"))
            self.send_response(206 if wanted and "whole-" not in self.path else 200)
            self.send_header("Content-Length", str(end - start + 1))
            self.send_header("ETag", str(hash(content)))
            self.end_headers()
            if body:
                self.wfile.write(content[start : end + 1])

        def do_GET(self) -> None:
            self.answer(True)

        def do_HEAD(self) -> None:
            self.answer(False)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_shards_elsewhere_are_read_by_parts_and_give_the_same_pixels(here, elsewhere):
    local = load_files(str(here / "{train-{000..002},val-000}.tar"), SEEN)
    remote = load_files(elsewhere + "/{train-{000..002},val-000}.tar", SEEN, how=Reading(pack=0.0, workers=1))
    assert torch.equal(remote.train.images[torch.arange(0, 60, 7)], local.train.images[::7])
    assert torch.equal(remote.validation.labels, local.validation.labels)


def test_a_server_that_sends_no_parts_or_is_not_there_is_named(elsewhere):
    with pytest.raises(VitralError, match="the server sends no parts of files"):
        listed_shards(elsewhere + "/whole-train-000.tar", 0.1)
    with pytest.raises(VitralError, match=r"cannot reach http://127\.0\.0\.1:9/a\.tar"):
        listed_shards("http://127.0.0.1:9/a.tar", 0.1)


def test_shards_train_from_the_pattern_alone(here, tmp_path):
    small = {"model.image_size": (32, 32), "model.width": 48, "model.depth": 1, "batch": 10, "epochs": 6}
    pattern = str(here / "{train-{000..002},val-000}.tar")
    model = vitral.train(pattern, out=tmp_path / "run", **small)
    assert model.classes == tuple(NAMES)
    assert vitral.evaluate(tmp_path / "run", split="validation").top1 > 0.6
