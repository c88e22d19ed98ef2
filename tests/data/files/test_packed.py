"""Packed datasets: decoded once, memory-mapped, never stale; and the handling of unreadable files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from support.common import identical
from support.damage import DAMAGES, truncate
from support.photos import COLOURS, PREPROCESSING, save_class_folders, save_photo
from vitral.cli.commands import data as data_command
from vitral.data.decode import decode_image
from vitral.data.files import pack_writer, packed
from vitral.data.files.file_dataset import ReadOptions, load_file_dataset, storage_preprocessing
from vitral.data.files.folders import list_folder
from vitral.data.files.packed import is_packed, read_index, read_split
from vitral.data.files.unreadable import replacement_for
from vitral.data.geometry import input_geometry
from vitral.data.registry.cache import cache_dir
from vitral.data.resize_crop import resize_and_crop
from vitral.errors import VitralError
from vitral.runs.model_io import load_weights
from vitral.training import setup


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Forty training photographs each of red ants and green bees, ten for validation and five for testing."""
    root = tmp_path / "photos"
    for split, count in (("train", 40), ("val", 10), ("test", 5)):
        save_class_folders(root / split, ("ants", "bees"), count, first_seed=100 * count)
    return root


def packs(photos: Path) -> list[Path]:
    """Packs of the folder in the cache."""
    folders = (path for path in (cache_dir() / "packed").iterdir() if is_packed(path))
    return sorted(path for path in folders if json.loads((path / "index.json").read_text())["source"] == str(photos))


@pytest.fixture
def forbid_decoding(monkeypatch):
    """A function after whose call decoding images fails the test."""

    def forbid() -> None:
        monkeypatch.setattr(pack_writer.PackWriter, "decode", lambda *_: pytest.fail("decoded again"))

    return forbid


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_bar_is_shown_on_a_terminal_while_decoding(photos, monkeypatch, capsys, is_terminal):
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat a pipe as a terminal
    load_file_dataset(photos, PREPROCESSING, progress=True)
    output = capsys.readouterr()
    assert not output.out
    assert ("decoding train" in output.err and "80 of 80 images" in output.err) if is_terminal else not output.err
    load_file_dataset(photos, PREPROCESSING, progress=True)
    assert not capsys.readouterr().err, "nothing was decoded again"


def test_packed_pixels_equal_decoded_images_and_are_decoded_once(photos, forbid_decoding):
    first = load_file_dataset(photos, PREPROCESSING)
    stored = storage_preprocessing(PREPROCESSING)
    files = [*sorted((photos / "train" / "ants").iterdir()), *sorted((photos / "train" / "bees").iterdir())]
    for image, file in zip(first.train.images[:], files, strict=True):
        expected = decode_image(file, min_size=stored.image_size, allow_reduced_jpeg=True)
        assert torch.equal(image, stored.resize_and_crop(expected))
    forbid_decoding()
    again = load_file_dataset(photos, PREPROCESSING)
    assert torch.equal(first.train.images[:], again.train.images[:])
    assert first.fingerprint == again.fingerprint
    with pytest.raises(pytest.fail.Exception, match="decoded again"):
        _ = again.test, "decoded on first access"


def test_large_training_images_are_resized_by_torch_in_sets_of_any_size(photos):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8))
    for split in ("train", "val"):
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(photos / split / "ants" / "00.jpg")
    preprocessing = replace(PREPROCESSING, image_size=(248, 248), crop=1.0)
    data = load_file_dataset(photos, preprocessing)
    image = decode_image(photos / "train" / "ants" / "00.jpg")
    geometry = preprocessing.geometry(image.height, image.width)
    expected = resize_and_crop(image, geometry, 3, preprocessing.interpolation, use_torch=True)
    assert np.array_equal(data.train.images[0].numpy(), expected)
    assert torch.equal(data.validation.images[0], preprocessing.resize_and_crop(image)), "as in a prediction"


def change_file(root: Path) -> None:
    save_photo(root / "train" / "ants" / "00.jpg", (0, 0, 0), 1)


def touch_file(root: Path) -> None:
    os.utime(root / "train" / "bees" / "03.jpg", ns=(1, 10**18))


def add_file(root: Path) -> None:
    save_photo(root / "val" / "ants" / "new.jpg", COLOURS["ants"], 77)


def remove_file(root: Path) -> None:
    (root / "train" / "ants" / "39.jpg").unlink()


def move_to_another_class(root: Path) -> None:
    (root / "train" / "ants" / "05.jpg").rename(root / "train" / "bees" / "a05.jpg")


def rename_class(root: Path) -> None:
    for split in ("train", "val", "test"):
        (root / split / "ants").rename(root / split / "aunts")


@pytest.mark.parametrize(
    "change", [change_file, touch_file, add_file, remove_file, move_to_another_class, rename_class]
)
def test_stale_pack_is_replaced(photos, change):
    first = load_file_dataset(photos, PREPROCESSING)
    (before,) = packs(photos)
    change(photos)
    second = load_file_dataset(photos, PREPROCESSING)
    assert second.fingerprint != first.fingerprint
    (after,) = packs(photos)
    assert before != after
    assert after.name == f"photos-{second.fingerprint}-v{packed.FORMAT}"


def test_changed_label_in_a_csv_list_makes_a_new_pack(photos):
    rows = [f"train/{name}/{i:02}.jpg,{name},{'val' if i < 3 else 'train'}" for name in COLOURS if name != "wasps"
            for i in range(10)]  # fmt: skip
    (photos / "list.csv").write_text("path,label,split\n" + "\n".join(rows))
    first = load_file_dataset(photos / "list.csv", PREPROCESSING)
    rows[5] = rows[5].replace(",ants,", ",bees,")
    (photos / "list.csv").write_text("path,label,split\n" + "\n".join(rows))
    second = load_file_dataset(photos / "list.csv", PREPROCESSING)
    assert (first.train.labels != second.train.labels).sum() == 1
    assert first.fingerprint != second.fingerprint


def test_different_channel_count_is_a_separate_pack(photos):
    colour = load_file_dataset(photos, PREPROCESSING)
    gray = load_file_dataset(photos, replace(PREPROCESSING, channels=1, mean=(0.5,), std=(0.5,)))
    assert (colour.train.images.shape[1], gray.train.images.shape[1]) == (3, 1)
    assert len(packs(photos)) == 2


def test_unreadable_training_image_is_replaced_and_unreadable_validation_image_dropped(photos):
    for file in (photos / "train/ants/07.jpg", photos / "val/bees/02.jpg"):
        file.write_bytes(file.read_bytes()[:300])
    data = load_file_dataset(photos, PREPROCESSING, read_options=ReadOptions(unreadable=0.06))
    assert torch.bincount(data.train.labels).tolist() == [40, 40], "class counts are unchanged"
    assert torch.equal(data.train.images[7], data.train.images[8])
    assert torch.bincount(data.validation.labels).tolist() == [10, 9]
    means = data.validation.images[:].float().mean(dim=(2, 3))
    assert (means.argmax(dim=1) == data.validation.labels).all(), "images and labels still match"
    assert "1 unreadable train image replaced by others of their class: " in data.source
    assert "07.jpg: corrupt or truncated" in data.source
    assert "1 unreadable validation image dropped" in data.source
    again = load_file_dataset(photos, PREPROCESSING, read_options=ReadOptions(unreadable=0.06))
    assert again.source == data.source, "reported every time"


def test_too_many_unreadable_files_are_an_error_and_leave_no_pack(photos):
    for index in range(3):
        (photos / "train" / "bees" / f"{index:02}.jpg").write_bytes(b"no image")
    message = r"3 of 80 images are unreadable, more than 1\.0%: .*00\.jpg: not an image"
    with pytest.raises(VitralError, match=message) as caught:
        load_file_dataset(photos, PREPROCESSING)
    assert "--data.unreadable 0.04" in caught.value.hint
    assert not packs(photos)


def test_replacement_is_the_next_readable_image_of_the_class():
    labels = np.array([0, 1, 0, 1, 0])
    assert replacement_for(0, labels, [0]) == 2
    assert replacement_for(0, labels, [0, 2]) == 4
    assert replacement_for(4, labels, [4]) == 0
    with pytest.raises(VitralError, match="all images of a class are unreadable"):
        replacement_for(1, labels, [1, 3])


def test_packed_images_are_memory_mapped(photos):
    images = load_file_dataset(photos, PREPROCESSING).train.images
    assert isinstance(images, torch.Tensor)
    maps = Path("/proc/self/maps").read_text()
    start = images.data_ptr()
    (line,) = [
        row for row in maps.splitlines() if int(row.split("-")[0], 16) <= start < int(row.split("-")[1].split()[0], 16)
    ]
    assert line.endswith("train.npy")
    assert line.split()[1].startswith("r--s"), "read-only and shared between processes"


def test_incomplete_pack_of_a_killed_process_is_packed_again(photos):
    data = load_file_dataset(photos, PREPROCESSING)
    (pack,) = packs(photos)
    images = data.train.images[:].clone()
    (pack / "train.json").unlink()
    with (pack / "train.npy").open("r+b") as file:
        file.truncate(5000)
    (pack / ".train.npy").write_bytes(b"half")
    assert read_split(pack, "train") is None
    assert torch.equal(load_file_dataset(photos, PREPROCESSING).train.images[:], images)


def test_pack_of_an_older_format_is_not_used(photos):
    images = load_file_dataset(photos, PREPROCESSING).train.images[:].clone()
    (pack,) = packs(photos)
    for name in ("index.json", "train.json"):
        content = json.loads((pack / name).read_text())
        (pack / name).write_text(json.dumps({**content, "format": 1}))
    assert read_split(pack, "train") is None
    with pytest.raises(VitralError, match=f"packed in format 1, expected {packed.FORMAT}"):
        read_index(pack)
    assert torch.equal(load_file_dataset(photos, PREPROCESSING).train.images[:], images)


def test_older_packs_of_the_same_folder_are_deleted(photos):
    load_file_dataset(photos, PREPROCESSING)
    (pack,) = packs(photos)
    old = pack.with_name("photos-old")
    shutil.copytree(pack, old)
    (old / "index.json").write_text(json.dumps({**json.loads((old / "index.json").read_text()), "format": 1}))
    shutil.rmtree(pack)
    load_file_dataset(photos, PREPROCESSING)
    assert pack.exists()
    assert not old.exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(name, damage, marks=[pytest.mark.slow] * (name.startswith("validation") and damage != truncate))
        for name in ("train.npy", "train.json", "validation.npy", "validation.json")
        for damage in DAMAGES
    ],
)
def test_damaged_pack_is_reported_and_written_again(photos, name, damage, capsys):
    first = load_file_dataset(photos, PREPROCESSING)
    expected = [split.images[:].clone() for split in (first.train, first.validation)]
    (pack,) = packs(photos)
    damage(pack / name)
    for is_first in (True, False):
        again = load_file_dataset(photos, PREPROCESSING)
        assert torch.equal(again.train.images[:], expected[0])
        assert torch.equal(again.validation.images[:], expected[1])
        warnings = capsys.readouterr().err.splitlines()
        assert len(warnings) == is_first
        assert all(line.startswith(f"warning: damaged cache file {pack / name} (") for line in warnings)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_index_is_written_again(photos, damage):
    load_file_dataset(photos, PREPROCESSING)
    (pack,) = packs(photos)
    index = read_index(pack)
    damage(pack / "index.json")
    load_file_dataset(photos, PREPROCESSING)
    assert read_index(pack) == index


def test_a_read_only_cache_is_read(photos, monkeypatch):
    expected = load_file_dataset(photos, PREPROCESSING)
    monkeypatch.setattr(pack_writer, "is_writable", lambda folder: False)
    monkeypatch.setattr(pack_writer, "file_lock", lambda path: pytest.fail("a lock would be written"))
    dataset = load_file_dataset(photos, PREPROCESSING)
    assert torch.equal(dataset.train.images[:], expected.train.images[:])


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_duplicate_groups_are_computed_again(tmp_path, damage, capsys):
    photos = save_class_folders(tmp_path / "photos", ("ants", "bees"), 10)
    shutil.copy(photos / "ants" / "00.jpg", photos / "ants" / "copy.jpg")
    before = set((cache_dir() / "copies").glob("*"))
    expected = list_folder(photos, 0.2)
    (cached,) = set((cache_dir() / "copies").glob("*")) - before
    damage(cached)
    for is_first in (True, False):
        assert list_folder(photos, 0.2) == expected
        assert capsys.readouterr().err.count(f"warning: damaged cache file {cached} (") == is_first


@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
@pytest.mark.parametrize("name", ["index.json", "train.npy", "train.json"])
def test_damaged_pack_without_the_original_images_is_an_error(photos, tmp_path, name, damage):
    pack = tmp_path / "mine.pack"
    setup.pack_dataset(setup.resolve_recipe(str(photos), None).with_overrides({"model.image_size": (16, 16)}), pack)
    damage(pack / name)
    if name == "index.json" and damage == Path.unlink:
        return  # no longer recognised as a pack
    with pytest.raises(VitralError, match=f"mine.pack/{name} is damaged: ") as caught:
        load_file_dataset(pack, PREPROCESSING)
    assert caught.value.hint == "Copy the pack again, or pack the images again"


def test_copied_pack_is_verified_once(photos, tmp_path, monkeypatch):
    pack = tmp_path / "mine.pack"
    setup.pack_dataset(setup.resolve_recipe(str(photos), None).with_overrides({"model.image_size": (16, 16)}), pack)
    copy = Path(shutil.copytree(pack, tmp_path / "copy.pack", copy_function=shutil.copyfile))  # times are not copied
    first = read_split(copy, "train")
    monkeypatch.setattr(packed, "file_checksum", lambda _: pytest.fail("read again"))
    second = read_split(copy, "train")
    assert first is not None
    assert second is not None
    assert torch.equal(first.images[:], second.images[:])


def test_full_disk_is_an_error_with_an_alternative(photos, monkeypatch):
    def disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack_writer, "reserve_disk_space", disk_full)
    with pytest.raises(VitralError, match="No space left on device") as caught:
        load_file_dataset(photos, PREPROCESSING)
    assert "--data.pack 0" in caught.value.hint
    assert not list((cache_dir() / "packed").glob("photos-*/.train.npy"))


@pytest.mark.parametrize("changes", [{"pack": -1.0}, {"unreadable": 1.5}, {"workers": -2}])
def test_invalid_read_options_are_errors(changes):
    with pytest.raises(ValueError, match=f"data.{next(iter(changes))} must"):
        ReadOptions(**changes)


PACK_SCRIPT = """
import sys
from pathlib import Path
from vitral.data.files import decode_pool, pack_writer
from vitral.data.files.file_dataset import load_file_dataset
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
pack_writer.MIN_FILES_FOR_WORKERS = pack_writer.MAX_THREADS = 0
start = decode_pool.DecodeWorkers.__init__
def start_and_print_pids(self, *args, **kwargs):
    start(self, *args, **kwargs)
    print(*[process.pid for process in self.processes], flush=True)
decode_pool.DecodeWorkers.__init__ = start_and_print_pids
preprocessing = Preprocessing(image_size=(64, 64), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
try:
    load_file_dataset(sys.argv[1], preprocessing)
except VitralError as error:
    print(error.what, "|", error.hint)
    sys.exit(2)
"""


def start_packing(photos: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that packs images for several seconds, and the process ids of its workers."""
    large = photos / "train" / "ants" / "large.png"
    Image.effect_noise((1500, 1500), 80).save(large, compress_level=1)
    for index in range(60):
        shutil.copy(large, large.with_stem(f"large{index}"))
    process = subprocess.Popen([sys.executable, "-c", PACK_SCRIPT, str(photos)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.slow
def test_killed_worker_is_an_error_and_packing_can_be_repeated(photos):
    process, workers = start_packing(photos)
    os.kill(workers[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "an image decoding process was killed, probably because the system ran out of memory" in output
    assert "--data.workers 1" in output
    assert not any(is_alive(worker) for worker in workers)
    for file in (photos / "train" / "ants").glob("large*"):
        file.unlink()
    assert len(load_file_dataset(photos, PREPROCESSING).train) == 80


@pytest.mark.slow
def test_workers_end_when_the_parent_process_is_killed(photos):
    process, workers = start_packing(photos)
    process.kill()
    process.communicate(timeout=240)
    deadline = time.monotonic() + 240
    while any(is_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(worker) for worker in workers)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("no_figures")
def test_pack_command_makes_the_pack_that_training_uses_and_that_can_be_moved(
    photos, tmp_path, capsys, forbid_decoding
):
    assert data_command.COMMAND(["pack", str(photos), "--image-size", "32"]) == 0
    output = capsys.readouterr().out
    assert "80 train, 20 validation, 10 test images, 35x35 pixels, 2 classes" in output
    assert "For a model of 32x32 pixels\n" in output
    assert data_command.COMMAND(["pack", str(photos), "--image-size", "32", "--out", str(tmp_path / "mine.pack")]) == 0
    forbid_decoding()
    tiny: dict[str, Any] = {
        "model.image_size": (32, 32),
        "model.width": 48,
        "model.depth": 1,
        "batch_size": 8,
        "epochs": 1,
    }
    vitral.train(str(photos), out=tmp_path / "one", **tiny)
    shutil.rmtree(photos)
    vitral.train(str(tmp_path / "mine.pack"), out=tmp_path / "two", **tiny)
    weights = [load_weights(tmp_path / run / "model" / "weights.safetensors") for run in ("one", "two")]
    assert identical(*weights)
    other = vitral.train(str(tmp_path / "mine.pack"), out=tmp_path / "three", **{**tiny, "model.image_size": (16, 16)})
    assert other.model_config.preprocessing.image_size == (16, 16)
    with pytest.raises(VitralError, match="holds images of 35x35 pixels, too small for a model of 48x48") as e:
        vitral.train(str(tmp_path / "mine.pack"), out=tmp_path / "four", **{**tiny, "model.image_size": (48, 48)})
    assert f"vitral data pack {photos} --out FOLDER --image-size 48 48" in e.value.hint
    save_photo(photos / "a" / "0.jpg", COLOURS["ants"], 1)
    save_photo(photos / "b" / "0.jpg", COLOURS["bees"], 1)
    with pytest.raises(VitralError, match=r"mine\.pack already exists"):
        setup.pack_dataset(setup.resolve_recipe(str(photos), None), tmp_path / "mine.pack")


def test_pack_command_says_for_which_image_size_it_packs(photos, capsys):
    (photos / "train" / "ants" / "notes.txt").write_text("a note")
    assert data_command.COMMAND(["pack", str(photos)]) == 0
    output = capsys.readouterr()
    assert "142x142 pixels" in output.out
    assert "For a model of 128x128 pixels (recipe folder-scratch)" in output.out
    assert "To fine-tune a checkpoint, pack for its image size: --init-from CHECKPOINT" in output.out
    assert "skipped 1 file: 1 not an image" in output.err


def test_builtin_dataset_cannot_be_packed():
    with pytest.raises(VitralError, match="mnist"):
        setup.pack_dataset(setup.resolve_recipe("mnist", None))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_torch_resize_matches_pillow(mode, interpolation):
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (40, 50, 3), dtype=np.uint8))
    image = coarse.resize((500, 375), Image.Resampling.BICUBIC).convert(mode)
    channels = len(image.getbands())
    geometry = input_geometry(image.height, image.width, (248, 248), "crop", crop=1.0, patch_size=1)
    exact = resize_and_crop(image, geometry, channels, interpolation)
    fast = resize_and_crop(image, geometry, channels, interpolation, use_torch=True)
    assert fast.shape == exact.shape == (channels, 248, 248)
    difference = np.abs(fast.astype(int) - exact)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.02
