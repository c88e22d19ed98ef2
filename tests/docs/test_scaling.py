"""The guide to scaling out: its files are valid, its flags exist, and its table is what the code computes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from vitral.analysis.cost import GB, GIB, GPUS, CostEstimate
from vitral.cli import main as cli
from vitral.models.presets import preset

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "how-to" / "scale-out.md").read_text(encoding="utf-8")
SHELL = [DOCS / "scaling" / name for name in ("one-node.sh", "slurm.sbatch")]


def table_rows() -> list[str]:
    """The table of memory and communication, in Markdown."""
    memory_names = "DDP | with activation checkpointing | FSDP | with activation checkpointing"
    head = f"| | M parameters | {memory_names} | all-reduce (DDP) | gather + scatter (FSDP) | step |"
    lines = [head, "|---" * 9 + "|"]
    for name in ("B/16", "L/16", "H/14", "g/14"):
        plan = CostEstimate(config=preset(name), gpus=64, batch_size=4096, gpu=GPUS["H100"])
        memory = [
            plan.memory(kind, checkpointing).total / GIB for kind in ("ddp", "fsdp") for checkpointing in (False, True)
        ]
        sharded = plan.communication("fsdp")
        low, high = (f"{seconds * 1000:.0f}" for seconds in plan.step_seconds("ddp"))
        figures = " | ".join(f"{value:.1f}" for value in memory)
        parts = f"{sharded.all_gather / GB:.2f} + {sharded.reduce_scatter / GB:.2f}"
        sent = f"{plan.communication('ddp').total / GB:.2f} | {parts}"
        lines.append(f"| {name} | {plan.parameters.total / 1e6:,.0f} | {figures} | {sent} | {low} to {high} ms |")
    return lines


def test_the_table_is_what_the_code_computes() -> None:
    assert "\n".join(table_rows()) in TEXT


def test_every_mentioned_file_exists() -> None:
    files = re.findall(r"`((?:docs|tests)/[\w./-]+)`", TEXT)
    assert len(files) >= 4
    for file in files:
        assert (DOCS.parent / file).exists(), file


@pytest.mark.parametrize("file", SHELL, ids=lambda file: file.name)
def test_the_scripts_are_valid_shell(file: Path) -> None:
    subprocess.run(["bash", "-n", file], check=True)


def torchrun_calls(text: str) -> list[list[str]]:
    """The arguments of every torchrun call in a script, with variables replaced by 1."""
    joined = text.replace("\\\n", " ")
    calls = re.findall(r"torchrun (.*?-m vitral train[^\n;]*)", joined)
    return [shlex.split(re.sub(r'"?\$\{?[\w@\[\]:-]+\}?"?', "1", call.strip("`"))) for call in calls]


def pytorch_job() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((DOCS / "scaling" / "kubernetes.yaml").read_text(encoding="utf-8"))
    return job


def script_texts() -> list[str]:
    container = pytorch_job()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return [*(file.read_text(encoding="utf-8") for file in SHELL), *container["args"]]


@pytest.mark.parametrize("index", range(3), ids=["one-node.sh", "slurm.sbatch", "kubernetes.yaml"])
def test_scripts_call_existing_commands(index: int) -> None:
    (words,) = torchrun_calls(script_texts()[index])
    torchrun_words, script = words[: words.index("-m")], words[words.index("-m") :]
    get_args_parser().parse_args([*torchrun_words, "-m", "vitral"])
    assert script[:3] == ["-m", "vitral", "train"]
    assert script[2] in cli.COMMANDS


def test_the_flags_of_vitral_in_the_files_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "digits", "--help"])
    help_text = capsys.readouterr().out
    for text in [*script_texts(), TEXT]:
        for flag in re.findall(r"vitral train[^\n`]*?(--[a-z-]+)", text):
            assert f"{flag} " in help_text or flag == "--resume", flag


def test_the_kubernetes_job_matches_the_training_operator() -> None:
    job = pytorch_job()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    elastic = job["spec"]["elasticPolicy"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator requires this name
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    subprocess.run(["bash", "-n"], input=container["args"][0], text=True, check=True)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node {gpus} " in container["args"][0]


def test_the_documented_plan_output_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "B/16", "--gpus", "1", "--batch-size", "256", "--no-ema"])
    total = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  total"))
    assert f"computes {float(total.split()[1]):.1f}." in TEXT
