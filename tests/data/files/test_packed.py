"""Packs: decoded once, mapped afterwards, never stale; and what becomes of files that cannot be read."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from data.files.test_listing import COLOURS, SEEN, photograph
from support.common import identical
from vitral.cli.commands import data
from vitral.data import resize_crop as scale
from vitral.data.decode import decode
from vitral.data.files import file_dataset as reading
from vitral.data.files import packed
from vitral.data.files.file_dataset import Reading, stored_like
from vitral.data.files.listing import load_files
from vitral.data.files.packed import is_packed, read_index, read_split, stand_in
from vitral.data.registry.sources import home
from vitral.errors import VitralError
from vitral.runs.run import load_weights
from vitral.training import setup as plan

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Forty photographs each of red ants and green bees, and ten of each to validate."""
    root = tmp_path / "photos"
    for split, count in (("train", 40), ("val", 10), ("test", 5)):
        for name in ("ants", "bees"):
            for index in range(count):
                photograph(root / split / name / f"{index:02}.jpg", COLOURS[name], index + 100 * count)
    return root


def packs(photos: Path) -> list[Path]:
    found = (path for path in (home() / "packed").iterdir() if is_packed(path))
    return sorted(path for path in found if read_index(path).source == str(photos))


@pytest.fixture
def no_decoding(monkeypatch):
    def forbid() -> None:
        monkeypatch.setattr(packed, "_decode_into", lambda *_: pytest.fail("decoded again"))

    return forbid


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_first_reading_shows_how_far_it_is_to_who_looks(photos, monkeypatch, capsys, looked_at):
    monkeypatch.setattr(packed, "FEW", 10)
    if looked_at:
        monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes a pipe for a terminal
    load_files(photos, SEEN, progress=True)
    shown = capsys.readouterr()
    assert not shown.out
    assert ("decoding train" in shown.err and "80 of 80 images" in shown.err) if looked_at else not shown.err
    load_files(photos, SEEN, progress=True)
    assert not capsys.readouterr().err, "nothing was decoded again"


def test_pixels_are_those_that_preprocessing_makes_and_a_second_reading_decodes_nothing(photos, no_decoding):
    first = load_files(photos, SEEN)
    stored = stored_like(SEEN)
    files = [*sorted((photos / "train" / "ants").iterdir()), *sorted((photos / "train" / "bees").iterdir())]
    for image, file in zip(first.train.images, files, strict=True):
        assert torch.equal(image, stored.pixels(decode(file, at_least=stored.image_size)))
    no_decoding()
    again = load_files(photos, SEEN)
    assert torch.equal(first.train.images, again.train.images)
    assert first.fingerprint == again.fingerprint
    with pytest.raises(pytest.fail.Exception, match="decoded again"):
        _ = again.test, "whose files are read when it is asked for"


def change_a_file(root: Path) -> None:
    photograph(root / "train" / "ants" / "00.jpg", (0, 0, 0), 1)


def touch_a_file(root: Path) -> None:
    os.utime(root / "train" / "bees" / "03.jpg", ns=(1, 10**18))


def add_a_file(root: Path) -> None:
    photograph(root / "val" / "ants" / "new.jpg", COLOURS["ants"], 77)


def remove_a_file(root: Path) -> None:
    (root / "train" / "ants" / "39.jpg").unlink()


def move_to_another_class(root: Path) -> None:
    (root / "train" / "ants" / "05.jpg").rename(root / "train" / "bees" / "a05.jpg")


def rename_a_class(root: Path) -> None:
    for split in ("train", "val", "test"):
        (root / split / "ants").rename(root / split / "aunts")


@pytest.mark.parametrize(
    "change", [change_a_file, touch_a_file, add_a_file, remove_a_file, move_to_another_class, rename_a_class]
)
def test_a_stale_pack_is_never_used_and_makes_room_for_the_new_one(photos, change):
    first = load_files(photos, SEEN)
    (before,) = packs(photos)
    change(photos)
    second = load_files(photos, SEEN)
    assert second.fingerprint != first.fingerprint
    (after,) = packs(photos)
    assert before != after
    assert after.name == f"photos-{second.fingerprint}"


def test_a_changed_label_in_a_list_makes_a_new_pack(photos):
    rows = [f"train/{name}/{i:02}.jpg,{name},{'val' if i < 3 else 'train'}" for name in COLOURS if name != "wasps"
            for i in range(10)]  # fmt: skip
    (photos / "list.csv").write_text("path,label,split\n" + "\n".join(rows))
    first = load_files(photos / "list.csv", SEEN)
    rows[5] = rows[5].replace(",ants,", ",bees,")
    (photos / "list.csv").write_text("path,label,split\n" + "\n".join(rows))
    second = load_files(photos / "list.csv", SEEN)
    assert (first.train.labels != second.train.labels).sum() == 1
    assert first.fingerprint != second.fingerprint


def test_another_size_or_channel_count_is_another_pack_beside_the_first(photos):
    colour = load_files(photos, SEEN)
    gray = load_files(photos, reading.replace(SEEN, channels=1, mean=(0.5,), std=(0.5,)))
    assert (colour.train.images.shape[1], gray.train.images.shape[1]) == (3, 1)
    assert len(packs(photos)) == 2


def test_a_broken_training_file_is_replaced_in_its_class_and_a_broken_validation_file_is_left_out(photos):
    for place in ("train/ants/07.jpg", "val/bees/02.jpg"):
        (photos / place).write_bytes((photos / place).read_bytes()[:300])
    data = load_files(photos, SEEN, how=Reading(unreadable=0.06))
    assert torch.bincount(data.train.labels).tolist() == [40, 40], "the classes keep their weight"
    assert torch.equal(data.train.images[7], data.train.images[8])
    assert torch.bincount(data.validation.labels).tolist() == [10, 9]
    means = data.validation.images.float().mean(dim=(2, 3))
    assert (means.argmax(dim=1) == data.validation.labels).all(), "images and labels were closed up together"
    assert "1 unreadable train image replaced by others of their class: " in data.source
    assert "07.jpg: broken or truncated" in data.source
    assert "1 unreadable validation image left out" in data.source
    again = load_files(photos, SEEN, how=Reading(unreadable=0.06))
    assert again.source == data.source, "said each time"


def test_more_broken_files_than_allowed_stop_the_run_and_leave_no_pack(photos):
    for index in range(3):
        (photos / "train" / "bees" / f"{index:02}.jpg").write_bytes(b"no image")
    with pytest.raises(
        VitralError, match=r"3 of 80 images cannot be read, more than 1\.0%: .*00\.jpg: not an image"
    ) as e:
        load_files(photos, SEEN)
    assert "--data.unreadable" in e.value.hint
    assert not packs(photos)


def test_a_stand_in_is_the_next_of_its_class_that_can_be_read():
    labels = np.array([0, 1, 0, 1, 0])
    assert stand_in(0, labels, [0]) == 2
    assert stand_in(0, labels, [0, 2]) == 4
    assert stand_in(4, labels, [4]) == 0
    with pytest.raises(VitralError, match="none of the images of a class"):
        stand_in(1, labels, [1, 3])


def test_a_packed_set_is_mapped_and_not_loaded(photos):
    images = load_files(photos, SEEN).train.images
    assert isinstance(images, torch.Tensor)
    maps = Path("/proc/self/maps").read_text()
    start = images.data_ptr()
    (line,) = [
        row for row in maps.splitlines() if int(row.split("-")[0], 16) <= start < int(row.split("-")[1].split()[0], 16)
    ]
    assert line.endswith("train.npy")
    assert line.split()[1].startswith("r--s"), "read only, shared with whoever else reads it"


def test_what_is_left_of_a_killed_packing_is_not_taken_for_a_pack(photos):
    data = load_files(photos, SEEN)
    (pack,) = packs(photos)
    kept = data.train.images.clone()
    (pack / "train.json").unlink()
    with (pack / "train.npy").open("r+b") as file:
        file.truncate(5000)
    (pack / ".train.npy").write_bytes(b"half")
    assert read_split(pack, "train") is None
    assert torch.equal(load_files(photos, SEEN).train.images, kept)


def test_no_room_for_a_pack_is_an_error_that_says_so(photos, monkeypatch):
    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed, "_reserve", full)
    with pytest.raises(VitralError, match="No space left on device") as caught:
        load_files(photos, SEEN)
    assert "--data.pack 0" in caught.value.hint
    assert not list((home() / "packed").glob("photos-*/.train.npy"))


@pytest.mark.parametrize("changes", [{"pack": -1.0}, {"unreadable": 1.5}, {"workers": -2}])
def test_settings_that_make_no_sense_are_named(changes):
    with pytest.raises(ValueError, match=f"data.{next(iter(changes))} must"):
        Reading(**changes)


PACKING = """
import sys
from pathlib import Path
from vitral.data import packed, workers
from vitral.data.folder import load_files
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.run import load_weights
from vitral.training import plan
packed.FEW = 0
start = workers.Workers.__init__
def tell(self, *args):
    start(self, *args)
    print(*[process.pid for process in self._all], flush=True)
workers.Workers.__init__ = tell
seen = Preprocessing(image_size=(64, 64), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
try:
    load_files(sys.argv[1], seen)
except VitralError as error:
    print(error.what, "|", error.hint)
    sys.exit(2)
"""


def packing(photos: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that packs photographs which take it seconds to decode, and the workers it started."""
    large = photos / "train" / "ants" / "large.png"
    Image.effect_noise((1500, 1500), 80).save(large, compress_level=1)
    for index in range(60):
        shutil.copy(large, large.with_stem(f"large{index}"))
    process = subprocess.Popen([sys.executable, "-c", PACKING, str(photos)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_a_worker_that_the_system_kills_is_a_clear_error_and_the_next_try_succeeds(photos):
    process, workers = packing(photos)
    os.kill(workers[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "a worker process that decodes images was killed, as the system does when memory runs out" in said
    assert "--data.workers 1" in said
    assert not any(alive(worker) for worker in workers)
    for file in (photos / "train" / "ants").glob("large*"):
        file.unlink()
    assert len(load_files(photos, SEEN).train) == 80


def test_workers_end_when_the_training_is_killed(photos):
    process, workers = packing(photos)
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 20
    while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(worker) for worker in workers)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_packs_what_training_then_uses_and_a_pack_can_be_carried_away(
    photos, tmp_path, capsys, no_decoding
):
    assert data.run(["pack", str(photos), "--image-size", "32"]) == 0
    said = capsys.readouterr().out
    assert "80 train · 20 validation · 10 test, 35×35 pixels, 2 classes" in said
    assert data.run(["pack", str(photos), "--image-size", "32", "--out", str(tmp_path / "mine.pack")]) == 0
    no_decoding()
    small = {"model.image_size": (32, 32), "model.width": 48, "model.depth": 1, "batch": 8, "epochs": 1}
    vitral.train(str(photos), out=tmp_path / "one", **small)
    shutil.rmtree(photos)
    vitral.train(str(tmp_path / "mine.pack"), out=tmp_path / "two", **small)
    weights = [load_weights(tmp_path / run / "model" / "weights.safetensors") for run in ("one", "two")]
    assert identical(*weights)
    other = vitral.train(str(tmp_path / "mine.pack"), out=tmp_path / "three", **{**small, "model.image_size": (48, 48)})
    assert other.card.preprocessing.image_size == (48, 48)
    photograph(photos / "a" / "0.jpg", COLOURS["ants"], 1)
    photograph(photos / "b" / "0.jpg", COLOURS["bees"], 1)
    with pytest.raises(VitralError, match=r"mine\.pack exists already"):
        plan.pack(plan.plan_for(str(photos), None), tmp_path / "mine.pack")


def test_a_known_set_needs_no_packing():
    with pytest.raises(VitralError, match="mnist is a known set"):
        plan.pack(plan.plan_for("mnist", None))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_large_pictures_are_scaled_by_torch_as_pillow_does_it(mode, interpolation):
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (40, 50, 3), dtype=np.uint8))
    picture = coarse.resize((500, 375), Image.Resampling.BICUBIC).convert(mode)
    channels = len(picture.getbands())
    exact = scale.pixels(picture, (248, 248), channels, 1.0, interpolation)
    quick = scale.pixels(picture, (248, 248), channels, 1.0, interpolation, quick=True)
    assert quick.shape == exact.shape == (channels, 248, 248)
    difference = np.abs(quick.astype(int) - exact)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.02
