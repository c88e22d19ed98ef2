"""Find the files of a built-in dataset on this machine, or fetch them. Unverified files are never used.

`fetch_files` looks in the cache and in folders that may already contain the dataset, then tries the dataset's fetchers
in order until one delivers files with the right checksums. Verifying files and moving them into the cache happens
here, under a lock.

The layout of the cache is torchvision's, so that folders can be shared with it:

    $VITRAL_HOME/MNIST/raw/train-images-idx3-ubyte      (uncompressed)
    $VITRAL_HOME/cifar-10-batches-bin/data_batch_1.bin  (per record one label byte, then 3072 bytes C, H, W)
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitral.data.progress_bars import progress_bars
from vitral.data.registry.cache import cache_dir, data_roots, is_verified, locked_staging, mark_verified
from vitral.data.registry.checksums import ChecksummedFile, file_size, move_into_place
from vitral.data.registry.errors import FETCH_ERRORS, failure_reason
from vitral.data.registry.fetchers import DatasetFiles, FileSplit, local_fetchers
from vitral.data.registry.sources import BUILTIN_DATASETS, DATASET_FILES
from vitral.errors import VitralError, did_you_mean

Failure = tuple[str, str, str]  # (description of the fetcher, its address, reason)


@dataclass(frozen=True, kw_only=True)
class FetchedFiles:
    """Verified files."""

    paths: tuple[Path, ...]
    source: str  # for display: where they came from, and why earlier sources failed


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A line of `vitral data list`."""

    name: str
    description: str
    size: int  # bytes on disk; 0: part of an installed package
    paths: list[Path] | None  # result of `local_files`

    @property
    def is_cached(self) -> bool:
        return self.paths is not None


def check_dataset_name(name: str, suggestion: str = "") -> None:
    """Raise VitralError unless `name` is a built-in dataset. `suggestion` ends the message; default: a similar name."""
    if name not in BUILTIN_DATASETS:
        raise VitralError(
            f"no dataset or folder named {name!r}{suggestion or did_you_mean(name, BUILTIN_DATASETS)}",
            f"Built-in datasets: {', '.join(BUILTIN_DATASETS)} (see `vitral data list`)",
        )


def local_files(name: str) -> list[Path] | None:
    """Paths of the dataset's files if all are on this machine, else None; [] if it needs no files.

    Compares sizes only; contents are verified when the files are loaded.
    """
    check_dataset_name(name)
    if name not in DATASET_FILES:
        return []
    files = DATASET_FILES[name].files("all")
    for root in data_roots():
        paths = [root / DATASET_FILES[name].folder / file.name for file in files]
        if all(path.is_file() and file_size(path) == file.size for path, file in zip(paths, files, strict=True)):
            return paths
    return None


def list_datasets() -> list[CatalogEntry]:
    """All built-in datasets: description, size on disk, and whether they are on this machine."""
    sizes = {name: sum(file.size for file in dataset.files("all")) for name, dataset in DATASET_FILES.items()}
    return [
        CatalogEntry(name=name, description=description, size=sizes.get(name, 0), paths=local_files(name))
        for name, description in BUILTIN_DATASETS.items()
    ]


def fetch(name: str, *, progress: bool = False) -> FetchedFiles:
    """Make sure that the whole dataset is on this machine, and verify every file again."""
    check_dataset_name(name)
    if name not in DATASET_FILES:
        return FetchedFiles(paths=(), source="comes with scikit-learn")
    return fetch_files(name, "all", progress=progress, recheck=True)


def fetch_files(name: str, split: FileSplit, *, progress: bool = False, recheck: bool = False) -> FetchedFiles:
    """Verified files of one split: from a local folder, else from the first fetcher that delivers them.

    A fetch always covers the whole dataset, so that a run does not fail at the end because the test set cannot be
    downloaded. Files of other splits that are already in the cache are not opened.
    """
    dataset = DATASET_FILES[name]
    files = dataset.files(split)
    if fetched := _find_verified(dataset, files, recheck=recheck):
        return fetched
    with locked_staging(name) as staging, progress_bars(progress) as report_progress:
        if fetched := _find_verified(dataset, files, recheck=recheck):  # by another process, while this one waited
            return fetched
        failures = _quarantine_corrupt(dataset, files, recheck=recheck)
        folder = cache_dir() / dataset.folder
        missing = [file for file in dataset.files("all") if not (folder / file.name).exists()]
        for fetcher in [*local_fetchers(dataset, missing, data_roots()), *dataset.fetchers]:
            try:
                fetcher.fetch(missing, staging, report_progress)
                for file in missing:
                    file.verify(staging / file.name)
                for file in missing:
                    move_into_place(staging / file.name, folder / file.name)
                    mark_verified(folder / file.name, file)
            except FETCH_ERRORS as error:
                failures.append((fetcher.description, fetcher.address, failure_reason(error)))
                continue
            shutil.rmtree(staging, ignore_errors=True)
            paths = tuple(folder / file.name for file in files)
            return FetchedFiles(paths=paths, source=f"from {fetcher.description}{_summarise_failures(failures)}")
    attempts = "; ".join(f"{address}: {reason}" for _, address, reason in failures)
    raise VitralError(f"cannot download {name}; all sources failed: {attempts}", _manual_instructions(dataset))


def _find_verified(dataset: DatasetFiles, files: Sequence[ChecksummedFile], *, recheck: bool) -> FetchedFiles | None:
    for root in data_roots():
        folder = root / dataset.folder
        paths = tuple(folder / file.name for file in files)
        if all(is_verified(path, file, recheck=recheck) for path, file in zip(paths, files, strict=True)):
            return FetchedFiles(paths=paths, source="from the cache" if root == cache_dir() else f"from {folder}")
    return None


def _quarantine_corrupt(dataset: DatasetFiles, files: Sequence[ChecksummedFile], *, recheck: bool) -> list[Failure]:
    """Rename corrupt files in the cache to *.damaged and return them as failures."""
    failures = []
    for file in dataset.files("all"):
        path = cache_dir() / dataset.folder / file.name
        is_good = is_verified(path, file, recheck=recheck) if file in files else file_size(path) == file.size
        if path.exists() and not is_good:
            path.replace(path.with_name(f"{file.name}.damaged"))
            failures.append(("the cache", str(path), f"{file.name} corrupt, renamed to {file.name}.damaged"))
    return failures


def _summarise_failures(failures: Sequence[Failure]) -> str:
    """' (official mirror: no route to host)', with each reason once even if several mirrors share it."""
    reasons = dict.fromkeys(f"{source.removeprefix('the ')}: {reason}" for source, _, reason in failures)
    return f" ({'; '.join(reasons)})" if reasons else ""


def _manual_instructions(dataset: DatasetFiles) -> str:
    if dataset.archive:
        return f"Download {dataset.archive.address} on another machine and copy it to {cache_dir()}"
    names = ", ".join(f"{file.name}.gz" for file in dataset.files("all"))
    return f"Copy {names} (or the uncompressed files) to {cache_dir() / dataset.folder}"
