"""Training on two ranks: the losses of one process, checkpoints that move between DDP, FSDP and one process, faults."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import identical
from support.distributed_jobs import RECIPE
from support.processes import HANG_SECONDS
from support.rank_jobs import Job, Outcomes, SingleProcess, errors, run_jobs
from vitral.analysis.cost import ddp_memory
from vitral.distributed.parallel import choose_parallelism
from vitral.errors import VitralError
from vitral.models.presets import preset
from vitral.runs.model_io import load_weights
from vitral.runs.run import Run
from vitral.training import checkpoint, provenance

pytestmark = pytest.mark.timeout(2 * HANG_SECONDS)  # on a busy machine the ranks take minutes
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DDP, FSDP = {"parallel": "ddp"}, {"parallel": "fsdp"}
UNEVEN = {  # micro-batches of 7 and 8 images
    "optim.name": "muon",
    "augment.cutmix": 1.0,
    "augment.shift": 1,
    "batch_size": 15,
    "grad_accum": 2,
}
LORA = {"tune": "lora", "lora.rank": 2, "ema": 0.3, "optim.layer_decay": 0.8}
FITTED_HEAD = {"head_init": "least_squares"}
JOBS: tuple[Job, ...] = (
    {"name": "ddp", "overrides": DDP},
    {"name": "fsdp", "overrides": FSDP},
    {"name": "ddp-head", "overrides": DDP | FITTED_HEAD},
    {"name": "too-small", "overrides": {"batch_size": 1}},
    {"name": "fsdp-stopped", "overrides": FSDP, "stop_at": 8},
    {"name": "fsdp-ddp", "overrides": DDP, "resume_from": "fsdp-stopped"},
)
SLOW_JOBS: tuple[Job, ...] = (
    {"name": "ddp-uneven", "overrides": DDP | UNEVEN},
    {"name": "fsdp-uneven", "overrides": FSDP | UNEVEN},
    {"name": "fsdp-bf16", "overrides": FSDP | {"precision": "bf16", "activation_checkpointing": True}},
    {"name": "fsdp-diverged", "overrides": FSDP | {"optim.lr": 1e30, "optim.grad_clip": 0.0}},
    {"name": "ddp-lora", "overrides": DDP | LORA},
    {"name": "fsdp-lora", "overrides": FSDP | LORA},
    {"name": "ddp-stopped", "overrides": DDP, "stop_at": 8},
    {"name": "single-stopped", "overrides": {}, "stop_at": 8, "single": True},
    {"name": "ddp-single", "overrides": {}, "resume_from": "ddp-stopped", "single": True},
    {"name": "fsdp-single", "overrides": {}, "resume_from": "fsdp-stopped", "single": True, "stop_at": 3},
    {"name": "fsdp-single-fsdp", "overrides": FSDP, "resume_from": "fsdp-single"},
    {"name": "fsdp-single-ddp", "overrides": DDP, "resume_from": "fsdp-single"},
    {"name": "ddp-fsdp", "overrides": FSDP, "resume_from": "ddp-stopped"},
    {"name": "fsdp-fsdp", "overrides": FSDP, "resume_from": "fsdp-stopped"},
    {"name": "ddp-ddp", "overrides": DDP, "resume_from": "ddp-stopped"},
    {"name": "single-ddp", "overrides": DDP, "resume_from": "single-stopped"},
    {"name": "single-fsdp", "overrides": FSDP, "resume_from": "single-stopped"},
)


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    return run_jobs(JOBS, folder)


@pytest.fixture(scope="module")
def slow_outcomes(folder: Path, outcomes: Outcomes) -> Outcomes:
    return outcomes | run_jobs(SLOW_JOBS, folder)


def metric_rows(run: Run) -> list[tuple[float, ...]]:
    names = ("epoch", "step", "train_loss", "train_top1", "validation_loss", "validation_top1")
    return [tuple(row[name] for name in names) for row in run.load_metrics()]


def assert_same_metrics(run: Run, reference: Run, rel: float = 1e-5) -> None:
    rows = zip(metric_rows(run), metric_rows(reference), strict=True)
    assert all(row == pytest.approx(expected, rel=rel) for row, expected in rows)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_ranks_have_the_losses_of_one_process(
    folder: Path, outcomes: Outcomes, single_process: SingleProcess, mode: str
) -> None:
    assert errors(outcomes, mode) == [None, None]
    assert len(metric_rows(Run(folder / mode))) == 3
    assert_same_metrics(Run(folder / mode), single_process.train("default", {}))


def test_a_fitted_head_on_two_ranks_is_that_of_one_process(
    folder: Path, outcomes: Outcomes, single_process: SingleProcess
) -> None:
    assert errors(outcomes, "ddp-head") == [None, None]
    assert_same_metrics(Run(folder / "ddp-head"), single_process.train("head", FITTED_HEAD), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp-uneven", "fsdp-uneven"])
def test_uneven_shards_with_muon_cutmix_and_grad_accum_match_one_process(
    folder: Path, slow_outcomes: Outcomes, single_process: SingleProcess, mode: str
) -> None:
    """Augmentation draws for the global batch, each image counts once, Muon orthogonalises full matrices."""
    reference = single_process.train("uneven", UNEVEN)
    assert_same_metrics(Run(folder / mode), reference)
    expected, actual = (load_weights(run.model_dir / "weights.safetensors") for run in (reference, Run(folder / mode)))
    for name, tensor in expected.items():
        if tensor.ndim == 2:  # AdamW amplifies rounding in the key biases, whose gradient is zero
            torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp-lora", "fsdp-lora"])
def test_lora_on_two_ranks_matches_one_process(
    folder: Path, slow_outcomes: Outcomes, single_process: SingleProcess, mode: str
) -> None:
    assert errors(slow_outcomes, mode) == [None, None]
    assert_same_metrics(Run(folder / mode), single_process.train("lora", LORA))


@pytest.mark.slow
def test_fsdp_with_bf16_weights_matches_bf16_on_one_process(
    folder: Path, slow_outcomes: Outcomes, single_process: SingleProcess
) -> None:
    assert_same_metrics(Run(folder / "fsdp-bf16"), single_process.train("bf16", {"precision": "bf16"}), rel=0.01)


def test_signal_to_one_rank_stops_all_at_the_same_step(folder: Path, outcomes: Outcomes) -> None:
    """SIGTERM to rank 1 in step 8 is visible to both ranks one step later."""
    assert_stopped_after_step_9(folder, "fsdp", *outcomes["fsdp-stopped"])


@pytest.mark.slow
def test_signal_to_one_rank_of_ddp_stops_all_at_the_same_step(folder: Path, slow_outcomes: Outcomes) -> None:
    assert_stopped_after_step_9(folder, "ddp", *slow_outcomes["ddp-stopped"])


def assert_stopped_after_step_9(folder: Path, mode: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first == second
    assert "after step 9 of 18" in first["error"][0]
    saved = checkpoint.newest(folder / f"{mode}-stopped" / "checkpoints")
    assert saved is not None
    assert saved.name == f"step-000000009.{'pt' if mode == 'ddp' else 'sharded'}"


@pytest.mark.slow
def test_divergence_is_seen_by_all_ranks_and_names_the_module(slow_outcomes: Outcomes) -> None:
    first, second = slow_outcomes["fsdp-diverged"]
    assert first == second
    assert "at step 2" in first["error"][0]
    assert "encoder.blocks.0.norm1" in first["error"][0]


def test_batch_smaller_than_the_world_is_refused(outcomes: Outcomes) -> None:
    for outcome in outcomes["too-small"]:
        assert outcome["error"][0].startswith("batch size 1 with --grad-accum 1 is too small for 2 processes")


def test_sharded_checkpoint_stores_each_row_once_and_no_pickled_code(folder: Path, outcomes: Outcomes) -> None:
    path = checkpoint.newest(folder / "fsdp-stopped" / "checkpoints")
    assert path is not None
    assert sorted(file.suffix for file in path.iterdir()) == [".pt", ".safetensors", ".safetensors"]
    weights = load_weights(folder / "fsdp" / "model" / "weights.safetensors")
    num_parameters = sum(tensor.numel() for tensor in weights.values())
    num_saved = sum(tensor.numel() for file in path.glob("*.safetensors") for tensor in load_weights(file).values())
    assert num_saved == 4 * num_parameters  # model, EMA, both AdamW moments
    content = checkpoint.load(path)
    assert content["step"] == 9
    assert content["model"]["class_token.token"].shape == (1, 1, RECIPE.model.width)


def test_incomplete_sharded_checkpoint_is_ignored_or_refused(folder: Path, outcomes: Outcomes, tmp_path: Path) -> None:
    path = checkpoint.newest(folder / "fsdp-stopped" / "checkpoints")
    assert path is not None
    shutil.copytree(path, tmp_path / f".{path.name}")
    assert checkpoint.newest(tmp_path) is None
    damaged = shutil.copytree(path, tmp_path / path.name)
    next(damaged.glob("*.safetensors")).write_bytes(b"truncated")
    with pytest.raises(VitralError, match=r"step-000000009\.sharded"):
        checkpoint.load(damaged)


def test_flipped_bit_in_any_file_of_a_sharded_checkpoint_is_recognised(
    folder: Path, outcomes: Outcomes, tmp_path: Path
) -> None:
    source = folder / "fsdp-stopped" / "checkpoints"
    path = checkpoint.newest(source)
    assert path is not None
    assert checkpoint.find_damage(path) is None
    for file in path.iterdir():
        copies = shutil.copytree(source, tmp_path / file.name)
        damaged = copies / path.name / file.name
        content = bytearray(damaged.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        damaged.write_bytes(content)
        messages: list[str] = []
        loaded = checkpoint.load_newest(copies, log=messages.append)
        assert loaded is not None
        assert loaded[0].name == "step-000000006.sharded"
        assert messages[0].startswith("step-000000009.sharded is damaged")
        assert messages[0].endswith("using step-000000006.sharded")


def test_checkpoint_of_fsdp_resumes_with_ddp(folder: Path, outcomes: Outcomes, single_process: SingleProcess) -> None:
    assert errors(outcomes, "fsdp-ddp") == [None, None]
    assert_same_metrics(Run(folder / "fsdp-ddp"), single_process.train("default", {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [job["name"] for job in SLOW_JOBS if "resume_from" in job and "stop_at" not in job])
def test_checkpoint_resumes_with_another_world_size_and_strategy(
    folder: Path, slow_outcomes: Outcomes, single_process: SingleProcess, name: str
) -> None:
    """Between one process, DDP and FSDP in any order, the metrics are those of an uninterrupted run."""
    assert errors(slow_outcomes, name) == [None, None]
    assert_same_metrics(Run(folder / name), single_process.train("default", {}))


@pytest.mark.slow
def test_interrupted_jobs_stopped_where_requested(slow_outcomes: Outcomes) -> None:
    assert "after step 8 of 18" in slow_outcomes["single-stopped"][0]["error"][0]
    assert "after step 12 of 18" in slow_outcomes["fsdp-single"][0]["error"][0]


def find_rank_process(rank: int, launcher: int, exclude: int | None = None) -> int:
    """The process id of a rank that torchrun has started, once it exists."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        for folder in Path("/proc").iterdir():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                has_rank = f"\0RANK={rank}\0" in "\0" + (folder / "environ").read_text()
                if parent == launcher and has_rank and int(folder.name) != exclude:
                    return int(folder.name)
            except (OSError, ValueError, IndexError):
                continue
        time.sleep(0.05)
    raise AssertionError(f"torchrun has not started rank {rank}")


def wait_for(condition: Callable[[], Any], launcher: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert launcher.poll() is None, "\n".join(launcher.communicate())
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.slow
def test_killed_rank_is_restarted_once_and_a_second_kill_ends_the_job(tmp_path: Path) -> None:
    """After SIGKILL of rank 1, torchrun restarts both ranks and they resume from the newest checkpoint."""
    arguments = ["train", "digits", "--epochs", "1000", "--data.validation", "0.5", "--device", "cpu"]
    arguments += ["--model.width", "16", "--model.depth", "1", "--model.heads", "2"]
    command = [*TORCHRUN, "--max-restarts", "1", "-m", "vitral", *arguments]  # without --out, the run is found again
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    job = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: list(tmp_path.glob("runs/*/checkpoints/step-*.pt")), job)
        first = find_rank_process(1, job.pid)
        (folder,) = (tmp_path / "runs").iterdir()
        os.kill(first, signal.SIGKILL)
        num_epochs = len(Run(folder).load_metrics())
        second = find_rank_process(1, job.pid, exclude=first)
        wait_for(lambda: len(Run(folder).load_metrics()) >= num_epochs + 2, job)
        os.kill(second, signal.SIGKILL)
        stdout, stderr = job.communicate(timeout=HANG_SECONDS)
    finally:
        job.kill()
    assert job.returncode != 0
    assert "Signal 9 (SIGKILL)" in stderr
    assert "rank      : 1" in stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert "Resuming after step " in stdout
    epochs = [row["epoch"] for row in Run(folder).load_metrics()]
    assert epochs == list(range(1, len(epochs) + 1)), "the second attempt continues the first"
    assert checkpoint.newest(folder / "checkpoints") is not None


def test_parallelism_is_chosen_by_the_memory_of_a_gpu() -> None:
    def choose(gpu_gigabytes: int) -> tuple[str, str]:
        needed, usable = ddp_memory(
            preset("g/14"),
            gpu_memory_bytes=gpu_gigabytes * 1e9,
            world_size=64,
            batch_size=512,
            grad_accum=1,
            precision="bf16",
            optimizer="adamw",
            ema=True,
            activation_checkpointing=False,
        )
        plan = choose_parallelism(world_size=64, batch_size=512, ddp_bytes=needed, usable_bytes=usable)
        return plan.mode, plan.reason

    assert [choose(gigabytes)[0] for gigabytes in (80, 24)] == ["ddp", "fsdp"]
    assert "fit into" in choose(80)[1]
    assert "a replica needs" in choose(24)[1]


def test_parallelism_without_memory_estimate_or_on_request() -> None:
    assert choose_parallelism(world_size=1, batch_size=512).mode == "single"
    assert choose_parallelism(world_size=2, batch_size=512).mode == "ddp"
    plan = choose_parallelism(world_size=2, batch_size=512, requested="fsdp")
    assert (plan.mode, plan.reason) == ("fsdp", "--parallel fsdp")


def test_parallelism_is_not_a_result_field() -> None:
    assert RECIPE.result_fields() == RECIPE.with_overrides({"parallel": "fsdp", "grad_accum": 2}).result_fields()


def test_exported_weights_are_the_best_checkpoint_bit_for_bit(single_process: SingleProcess) -> None:
    run = single_process.train("default", {})
    best, exported = run.checkpoint_dir / "best.safetensors", run.model_dir / "weights.safetensors"
    assert identical(load_weights(best), load_weights(exported))


def test_job_finds_its_own_unfinished_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def write_launch_id(run: Run, launch_id: str | None) -> None:
        run.environment_file.write_text(json.dumps({"format": 2, "launch_id": launch_id}))

    for name, launch_id in (("one", "job-1"), ("two", "job-2"), ("other", None)):
        run = Run.create(Path("runs"), name, Path("runs") / name)
        run.recipe_file.write_text(RECIPE.to_toml())
        write_launch_id(run, launch_id)
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "environment.json").write_text("{")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert provenance.find_interrupted_run(None) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert provenance.find_interrupted_run(None) == Path("runs/two") == provenance.find_interrupted_run("runs/two")
    assert provenance.find_interrupted_run("runs/one") is None
    assert provenance.find_interrupted_run("runs/new") is None
    two = Run(Path("runs/two"))
    two.model_dir.mkdir()
    for name in ("config.json", "weights.safetensors"):
        (two.model_dir / name).write_text("{}")
    assert provenance.find_interrupted_run(None) == Path("runs/two"), "trained, but not evaluated on the test set"
    two.test_file.write_text("{}")
    assert provenance.find_interrupted_run(None) == Path("runs/two"), "killed before the report was written"
    two.mark_finished()
    assert provenance.find_interrupted_run(None) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun without an id is identified by its process
    write_launch_id(Run(Path("runs/one")), provenance.launch_id())
    assert provenance.find_interrupted_run(None) == Path("runs/one")
