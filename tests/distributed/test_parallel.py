"""Two real processes that train together: the losses of one process, checkpoints that move, deaths that are noticed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.test_world import TORCHRUN, both_run
from support.common import identical
from support.distributed_jobs import RECIPE, train
from vitral.device.hardware import Hardware
from vitral.distributed.parallel import way_of
from vitral.distributed.world import World
from vitral.errors import VitralError
from vitral.models.presets import preset
from vitral.runs.run import Run, load_weights
from vitral.training import checkpoint
from vitral.training import provenance as origin

SUPPORT = Path(__file__).parents[1] / "support"
MIXED = {
    "optim.name": "muon",
    "augment.cutmix": 1.0,
    "augment.shift": 1,
    "batch": 15,
    "accumulate": 2,
}  # 7 and 8 images


def together(folder: Path, *asked: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each of two processes answers, for one training after the other."""
    (folder / "asked.json").write_text(json.dumps(asked))
    both_run(SUPPORT / "distributed_jobs.py", folder)
    return [json.loads((folder / f"answers-{rank}.json").read_text()) for rank in (0, 1)]


DDP, FSDP = {"parallel": "ddp"}, {"parallel": "fsdp"}
ASKED: tuple[dict[str, Any], ...] = (
    {"name": "ddp", "changes": DDP},
    {"name": "fsdp", "changes": FSDP},
    {"name": "ddp-mixed", "changes": DDP | MIXED},
    {"name": "fsdp-mixed", "changes": FSDP | MIXED},
    {"name": "fsdp-bf16", "changes": FSDP | {"precision": "bf16", "recompute": True}},
    {"name": "fsdp-diverged", "changes": FSDP | {"optim.lr": 1e30, "optim.clip": 0.0}},
    {"name": "too-small", "changes": {"batch": 1}},
    {"name": "ddp-stopped", "changes": DDP, "stop": 8},
    {"name": "fsdp-stopped", "changes": FSDP, "stop": 8},
    {"name": "alone-stopped", "changes": {}, "stop": 8, "alone": True},
    {"name": "ddp-alone", "changes": {}, "goes_on_with": "ddp-stopped", "alone": True},
    {"name": "fsdp-alone", "changes": {}, "goes_on_with": "fsdp-stopped", "alone": True, "stop": 3},
    {"name": "fsdp-alone-fsdp", "changes": FSDP, "goes_on_with": "fsdp-alone"},
    {"name": "fsdp-alone-ddp", "changes": DDP, "goes_on_with": "fsdp-alone"},
    {"name": "ddp-fsdp", "changes": FSDP, "goes_on_with": "ddp-stopped"},
    {"name": "fsdp-ddp", "changes": DDP, "goes_on_with": "fsdp-stopped"},
    {"name": "fsdp-fsdp", "changes": FSDP, "goes_on_with": "fsdp-stopped"},
    {"name": "ddp-ddp", "changes": DDP, "goes_on_with": "ddp-stopped"},
    {"name": "alone-ddp", "changes": DDP, "goes_on_with": "alone-stopped"},
    {"name": "alone-fsdp", "changes": FSDP, "goes_on_with": "alone-stopped"},
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def answers(place: Path) -> dict[str, list[dict[str, Any]]]:
    """By name, what both processes said."""
    both = together(place, *ASKED)
    return {asked["name"]: [answer[index] for answer in both] for index, asked in enumerate(ASKED)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The same training in this process; each is computed once."""
    folder = tmp_path_factory.mktemp("alone")

    def run(name: str, **changes: Any) -> Run:
        if not (folder / name).exists():
            train(folder, name, changes)
        return Run(folder / name)

    return run


def told(run: Run) -> list[tuple[float, ...]]:
    names = ("epoch", "step", "train_loss", "train_top1", "validation_loss", "validation_top1")
    return [tuple(row[name] for name in names) for row in run.metrics()]


def same(one: Run, other: Run, within: float = 1e-5) -> None:
    rows = zip(told(one), told(other), strict=True)
    assert all(row == pytest.approx(other_row, rel=within) for row, other_row in rows)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(
    place: Path, answers: dict[str, Any], alone: Callable[..., Run], kind: str
) -> None:
    assert [answer["error"] for answer in answers[kind]] == [None, None]
    assert len(told(Run(place / kind))) == 3
    same(Run(place / kind), alone("plain"))


@pytest.mark.parametrize("kind", ["ddp-mixed", "fsdp-mixed"])
def test_with_muon_cutmix_parts_and_a_batch_that_does_not_divide(
    place: Path, answers: dict[str, Any], alone: Callable[..., Run], kind: str
) -> None:
    """The draws are those of the whole batch, each image counts once, matrices are orthogonalised whole."""
    same(Run(place / kind), alone("mixed", **MIXED))
    straight, other = (load_weights(run.model / "weights.safetensors") for run in (alone("mixed"), Run(place / kind)))
    for name, tensor in straight.items():
        if tensor.ndim == 2:  # AdamW makes steps of the rounding in the keys' biases, whose gradient is zero
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)


def test_divided_weights_gathered_as_bf16_learn_what_bf16_learns(
    place: Path, answers: dict[str, Any], alone: Callable[..., Run]
) -> None:
    same(Run(place / "fsdp-bf16"), alone("bf16", precision="bf16"), within=0.01)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_is_interrupted_and_all_stop_at_the_same_step(place: Path, answers: dict[str, Any], kind: str) -> None:
    """SIGTERM to the second process in step 8: what it raises is known to both one step later."""
    one, other = answers[f"{kind}-stopped"]
    assert one == other
    assert one["error"][0] == "stopped after step 9 of 18; everything is saved"
    saved = checkpoint.newest(place / f"{kind}-stopped" / "checkpoints")
    assert saved is not None
    assert saved.name == f"step-000000009.{'pt' if kind == 'ddp' else 'sharded'}"


def test_a_divergence_is_seen_by_all_and_names_the_module(answers: dict[str, Any]) -> None:
    one, other = answers["fsdp-diverged"]
    assert one == other
    assert "the loss is not finite at step 2, first in encoder.blocks.0.norm1 (activation)" in one["error"][0]


def test_a_batch_smaller_than_the_processes_is_refused(answers: dict[str, Any]) -> None:
    for answer in answers["too-small"]:
        assert answer["error"][0].startswith("a batch of 1 in 1 part is too small for 2 processes")


def test_a_sharded_checkpoint_holds_each_row_once_and_no_pickled_code(place: Path, answers: dict[str, Any]) -> None:
    folder = checkpoint.newest(place / "fsdp-stopped" / "checkpoints")
    assert folder is not None
    assert sorted(file.suffix for file in folder.iterdir()) == [".pt", ".safetensors", ".safetensors"]
    model = RECIPE.model
    numbers = sum(tensor.numel() for tensor in load_weights(place / "fsdp" / "model" / "weights.safetensors").values())
    rows = sum(tensor.numel() for file in folder.glob("*.safetensors") for tensor in load_weights(file).values())
    assert rows == 4 * numbers  # the model, its average, AdamW's two
    content = checkpoint.load(folder)
    assert content["step"] == 9
    assert content["model"]["class_token.token"].shape == (1, 1, model.width)


def test_a_sharded_checkpoint_that_is_not_complete_does_not_count(
    place: Path, answers: dict[str, Any], tmp_path: Path
) -> None:
    folder = checkpoint.newest(place / "fsdp-stopped" / "checkpoints")
    assert folder is not None
    shutil.copytree(folder, tmp_path / f".{folder.name}")
    assert checkpoint.newest(tmp_path) is None
    broken = shutil.copytree(folder, tmp_path / folder.name)
    next(broken.glob("*.safetensors")).write_bytes(b"half of it")
    with pytest.raises(VitralError, match=r"step-000000009\.sharded cannot be read"):
        checkpoint.load(broken)


# ── checkpoints move ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [asked["name"] for asked in ASKED if "goes_on_with" in asked and "stop" not in asked])
def test_a_checkpoint_moves_between_processes_and_ways(
    place: Path, answers: dict[str, Any], alone: Callable[..., Run], name: str
) -> None:
    """From two processes to one and back, whole, divided, and each after the other: all end as if nothing had been."""
    assert [answer["error"] for answer in answers[name]] == [None, None]
    same(Run(place / name), alone("plain"))


def test_what_was_stopped_was_stopped(answers: dict[str, Any]) -> None:
    assert answers["alone-stopped"][0]["error"][0].startswith("stopped after step 8 of 18")
    assert answers["fsdp-alone"][0]["error"][0].startswith("stopped after step 12 of 18")


# ── deaths ─────────────────────────────────────────────────────────────────────────────────────────────────────


def process_of(rank: int, launcher: int, other_than: int | None = None) -> int:
    """The process of this rank that torchrun has started, as soon as it has."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        for folder in Path("/proc").iterdir():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                its = f"\0RANK={rank}\0" in "\0" + (folder / "environ").read_text()
                if int(stat[1]) == launcher and its and int(folder.name) != other_than:
                    return int(folder.name)
            except (OSError, ValueError, IndexError):
                continue
        time.sleep(0.05)
    raise AssertionError("no such process")


def wait_for(condition: Callable[[], Any], launcher: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert launcher.poll() is None, launcher.communicate()[1][-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked for in /proc")
@pytest.mark.slow
def test_a_killed_process_is_started_again_and_killed_once_more_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    """kill -9 of the second process: torchrun starts both anew, they go on from the newest checkpoint."""
    words = ["train", "digits", "--epochs", "1000", "--data.validation", "0.5", "--device", "cpu"]
    words += ["--model.width", "16", "--model.depth", "1", "--model.heads", "2"]
    command = [*TORCHRUN, "--max-restarts", "1", "-m", "vitral", *words]  # no --out: the run is found again
    at_once = os.environ | {"PYTHONUNBUFFERED": "1"}
    job = subprocess.Popen(
        command, cwd=tmp_path, env=at_once, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: list(tmp_path.glob("runs/*/checkpoints/step-*.pt")), job)
        first = process_of(1, job.pid)
        (folder,) = (tmp_path / "runs").iterdir()
        os.kill(first, signal.SIGKILL)
        seen = len(Run(folder).metrics())
        second = process_of(1, job.pid, other_than=first)
        wait_for(lambda: len(Run(folder).metrics()) >= seen + 2, job)
        os.kill(second, signal.SIGKILL)
        out, said = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode != 0
    assert "Signal 9 (SIGKILL)" in said
    assert "rank      : 1" in said
    assert len(list((tmp_path / "runs").iterdir())) == 1
    again = out.split("images/s")[2].splitlines()[1:]  # the table of the second attempt
    assert again[0].startswith("goes on after step ")
    assert int(again[1].split()[0]) > 1, "it began anew, though the first epoch was saved"
    assert checkpoint.newest(folder / "checkpoints") is not None


# ── without processes ──────────────────────────────────────────────────────────────────────────────────────────


def machine(size: int, memory: int | None, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setattr(Hardware, "memory", property(lambda _: memory))
    return Hardware(
        device=torch.device("cpu"), precision="bf16", compile=False, reasons={}, world=World(rank=0, size=size)
    )


def test_the_way_is_chosen_by_memory_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(RECIPE, batch=512, model=preset("g/14"))
    assert way_of(large, machine(1, 80 * 10**9, monkeypatch)).name == "alone"
    roomy, tight = (way_of(large, machine(64, memory * 10**9, monkeypatch)) for memory in (80, 24))
    assert (roomy.name, tight.name) == ("ddp", "fsdp")
    assert "fit each GPU's" in roomy.reason
    assert "whole copies would need" in tight.reason
    assert way_of(large, machine(2, None, monkeypatch)).name == "ddp"
    asked = way_of(large.changed({"parallel": "fsdp"}), machine(2, None, monkeypatch))
    assert (asked.name, asked.reason) == ("fsdp", "as asked")


def test_the_way_is_no_part_of_what_decides_the_result() -> None:
    assert RECIPE.essence() == RECIPE.changed({"parallel": "fsdp", "accumulate": 2}).essence()


def test_alone_the_weights_saved_are_the_bits_of_before(alone: Callable[..., Run]) -> None:
    best, model = alone("plain").checkpoints / "best.safetensors", alone("plain").model / "weights.safetensors"
    assert identical(load_weights(best), load_weights(model))


def test_a_job_finds_its_own_unfinished_run_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, job in (("one", "job-1"), ("two", "job-2"), ("old", None)):
        run = Run.create(Path("runs"), name, Path("runs") / name)
        run.recipe_file.write_text(RECIPE.to_toml())
        run.environment_file.write_text(json.dumps({"launch": job}))
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "environment.json").write_text("{")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert origin.earlier_attempt(None) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert origin.earlier_attempt(None) == Path("runs/two") == origin.earlier_attempt("runs/two")
    assert origin.earlier_attempt("runs/one") is None
    assert origin.earlier_attempt("runs/new") is None
    two = Run(Path("runs/two"))
    two.model.mkdir()
    for name in ("config.json", "weights.safetensors"):
        (two.model / name).write_text("{}")
    assert origin.earlier_attempt(None) == Path("runs/two"), "trained, but the test images were not read"
    two.test_file.write_text("{}")
    assert origin.earlier_attempt(None) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun without an id: its process stands for it
    (tmp_path / "runs" / "one" / "environment.json").write_text(json.dumps({"launch": origin.launch()}))
    assert origin.earlier_attempt(None) == Path("runs/one")
