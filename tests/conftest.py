"""What all tests share: one thread, a cache of their own, no network, and a set that is learned in a second."""

from __future__ import annotations

import gc
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is: a GPU's kernels run on the CPU, in Python

import pytest
import torch

from support.common import Command, Fit, leave_out_pictures, textures
from vitral.cli import main as cli
from vitral.data.datasets import Dataset, Split
from vitral.data.preprocess import Preprocessing, channel_stats
from vitral.device.select import Hardware
from vitral.models.vit import ViTConfig
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.runs.run import Run, atomic_write
from vitral.training.callbacks import Callback
from vitral.training.trainer import fit

torch.set_num_threads(1)


def pytest_configure() -> None:
    """While modules are imported nothing becomes garbage: looking for it takes a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the person's cache."""
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path_factory.getbasetemp() / "vitral-home"))
    monkeypatch.delenv("VITRAL_DATA", raising=False)


@pytest.fixture
def network() -> None:
    """Ask for this to be let out of the machine."""


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this machine answers, unless the test asks for `network`."""
    if "network" in request.fixturenames:
        return
    connect = socket.socket.connect

    def only_here(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and str(address[0]) not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test wanted to reach {address[0]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", only_here)


@pytest.fixture
def dataset() -> Dataset:
    return Dataset(
        name="textures",
        classes=("rows", "columns", "chequerboard", "plain"),
        train=textures(96, seed=1),
        validation=textures(40, seed=2),
        source="made by a test",
        fingerprint="0123456789abcdef",
        load_test=lambda: textures(40, seed=3),
    )


@pytest.fixture
def recipe() -> Recipe:
    """Six steps an epoch, four epochs, a fraction of a second."""
    return Recipe(
        name="tiny",
        data=DataConfig(name="textures"),
        model=ViTConfig(image_size=(8, 8), patch_size=4, channels=1, num_classes=4, width=16, depth=2, heads=2),
        optim=OptimConfig(lr=1e-2),
        epochs=4,
        batch_size=16,
        device="cpu",
        precision="fp32",
        compile="no",
    )


@pytest.fixture
def cpu() -> Hardware:
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    return Hardware(device=torch.device("cpu"), precision="fp32", compile=False, reasons=reasons)


@pytest.fixture
def preprocessing(dataset: Dataset, recipe: Recipe) -> Preprocessing:
    mean, std = channel_stats(dataset.train.images)
    return Preprocessing(image_size=recipe.model.image_size, channels=recipe.model.channels, mean=mean, std=std)


@pytest.fixture
def train_tiny(tmp_path: Path, dataset: Dataset, recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware) -> Fit:
    """`train_tiny("name", watch=…, dataset=…, **changes of the recipe)`: fit in the run folder of that name."""

    def run_it(
        name: str = "run",
        watch: Callback | None = None,
        dataset: Dataset = dataset,
        preprocessing: Preprocessing = preprocessing,
        recipe: Recipe = recipe,
        **changes: Any,
    ) -> Run:
        path = tmp_path / name
        run = Run(path) if path.exists() else Run.create(tmp_path, name, path)
        plan = recipe.with_overrides(changes)
        atomic_write(run.recipe_file, plan.to_toml())
        fit(plan, dataset, preprocessing, run, cpu, watch)
        return run

    return run_it


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of this test end without figures and page: those have tests of their own, and take seconds."""
    leave_out_pictures(monkeypatch)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process: exit status, what it printed, what it complained about."""

    def run_it(*words: object) -> tuple[int, str, str]:
        code = 0
        try:
            cli.main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_it


@pytest.fixture
def unread(dataset: Dataset) -> Dataset:
    """The same set, with a test split that nobody may read."""

    def read_test() -> Split:
        raise AssertionError("the test set was read")

    return replace(dataset, read_test=read_test)
