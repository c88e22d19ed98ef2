"""Shared fixtures: one thread, an isolated cache, no network, and a dataset that a model learns within a second."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: runs its kernels on the CPU

import pytest
import torch

from support.browser import launch_browser
from support.common import TINY_RECIPE, Command, FakeMachine, Fit, skip_figures, texture_dataset
from support.pretrain_runs import PRETRAIN_RECIPE, preprocessing_for, unlabelled_textures
from vitral.cli import main as cli
from vitral.data.datasets import Dataset, Split
from vitral.data.preprocess import Preprocessing, channel_stats
from vitral.device import select
from vitral.device.select import Hardware
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run
from vitral.training.callbacks import Callback
from vitral.training.pretraining.trainer import PretrainTrainer
from vitral.training.trainer import Trainer
from vitral.utils.atomic import atomic_write

torch.set_num_threads(1)


def pytest_configure() -> None:
    """Disable garbage collection while test modules are imported, which saves a third of the time."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that have the longest timeouts, so that no worker is left with one of them at the end."""

    def timeout(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return marker.args[0] if marker else 0.0

    items.sort(key=timeout, reverse=True)  # other tests stay in order


def pytest_collection_finish() -> None:
    gc.freeze()  # imported modules are never collected
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Do not wait for the disk: tests kill processes, which lose no written data, and never the whole machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from the user's cache."""
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path_factory.getbasetemp() / "vitral-home"))
    monkeypatch.delenv("VITRAL_DATA", raising=False)


@pytest.fixture
def network() -> None:
    """Request this fixture to allow connections to other machines."""


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections to other machines, unless the test requests `network`."""
    if "network" in request.fixturenames:
        return
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and str(address[0]) not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test tried to connect to {address[0]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright. Not shared between modules: its event loop would disturb other tests."""
    with launch_browser() as running:
        yield running


@pytest.fixture
def dataset() -> Dataset:
    return texture_dataset()


@pytest.fixture
def recipe() -> Recipe:
    return TINY_RECIPE


@pytest.fixture
def cpu() -> Hardware:
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    return Hardware(device=torch.device("cpu"), precision="fp32", compile=False, reasons=reasons)


@pytest.fixture
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """`fake_machine(gpu=..., gpu_bf16=..., cpu_bf16=..., capability=...)` sets what PyTorch reports."""

    def configure(
        *,
        gpu: bool = False,
        gpu_bf16: bool = True,
        cpu_bf16: bool = True,
        capability: tuple[int, int] = (9, 0),
        gpu_name: str = "H200",
    ) -> None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: gpu_bf16)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu_name)
        monkeypatch.setattr(select, "cpu_has_bf16", lambda: cpu_bf16)

    return configure


@pytest.fixture
def preprocessing(dataset: Dataset, recipe: Recipe) -> Preprocessing:
    mean, std = channel_stats(dataset.train.images)
    return Preprocessing(image_size=recipe.model.image_size, channels=recipe.model.channels, mean=mean, std=std)


@pytest.fixture
def train_tiny(tmp_path: Path, dataset: Dataset, recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware) -> Fit:
    """`train_tiny(name, callback, dataset=..., **overrides)` trains in the run folder `name`, or resumes it."""

    def train(
        name: str = "run",
        callback: Callback | None = None,
        dataset: Dataset = dataset,
        preprocessing: Preprocessing = preprocessing,
        recipe: Recipe = recipe,
        trainer_class: type[Trainer] = Trainer,
        **overrides: Any,
    ) -> Run:
        path = tmp_path / name
        run = Run(path) if path.exists() else Run.create(tmp_path, name, path)
        resolved = recipe.with_overrides(overrides)
        atomic_write(run.recipe_file, resolved.to_toml())
        trainer_class(resolved, dataset, preprocessing, run, cpu, callbacks=[callback] if callback else []).fit()
        return run

    return train


@pytest.fixture
def pretrain_tiny(tmp_path: Path, cpu: Hardware) -> Fit:
    """`pretrain_tiny(name, callback, dataset=..., **overrides)` pretrains in the run folder `name`, or resumes it."""

    def pretrain(
        name: str = "run",
        callback: Callback | None = None,
        dataset: Dataset | None = None,
        trainer_class: type[PretrainTrainer] = PretrainTrainer,
        **overrides: Any,
    ) -> Run:
        path = tmp_path / name
        run = Run(path) if path.exists() else Run.create(tmp_path, name, path)
        recipe, dataset = PRETRAIN_RECIPE.with_overrides(overrides), dataset or unlabelled_textures()
        atomic_write(run.recipe_file, recipe.to_toml())
        preprocessing = preprocessing_for(dataset, recipe)
        trainer_class(recipe, dataset, preprocessing, run, cpu, callbacks=[callback] if callback else []).fit()
        return run

    return pretrain


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip figures and HTML report after training: they take seconds and have their own tests."""
    skip_figures(monkeypatch)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a vitral command in this process; returns exit status, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        code = 0
        try:
            cli.main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def dataset_without_test(dataset: Dataset) -> Dataset:
    """The dataset with a test split that raises when it is read."""

    def load_test() -> Split:
        raise AssertionError("the test set was read")

    return replace(dataset, load_test=load_test)
