"""docs/scaling.md and its files: what they tell people to type exists, and the table is what the code computes."""

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
TEXT = (DOCS / "scaling.md").read_text(encoding="utf-8")
SHELL = [DOCS / "scaling" / name for name in ("one-node.sh", "slurm.sbatch")]


def rows() -> list[str]:
    """The table of memory and communication, in Markdown."""
    memory_names = "ddp | with checkpointing | fsdp | with checkpointing"
    head = f"| | M parameters | {memory_names} | all-reduce (ddp) | gather + scatter (fsdp) | step |"
    lines = [head, "|---" * 9 + "|"]
    for name in ("B/16", "L/16", "H/14", "g/14"):
        plan = CostEstimate(config=preset(name), gpus=64, batch_size=4096, gpu=GPUS["H100"])
        memory = [plan.memory(kind, again).total / GIB for kind in ("ddp", "fsdp") for again in (False, True)]  # type: ignore[arg-type]
        sharded = plan.communication("fsdp")
        low, high = (f"{seconds * 1000:.0f}" for seconds in plan.step_seconds("ddp"))
        figures = " | ".join(f"{value:.1f}" for value in memory)
        parts = f"{sharded.all_gather / GB:.2f} + {sharded.reduce_scatter / GB:.2f}"
        sent = f"{plan.communication('ddp').total / GB:.2f} | {parts}"
        lines.append(f"| {name} | {plan.parameters.total / 1e6:,.0f} | {figures} | {sent} | {low} to {high} ms |")
    return lines


def test_the_table_is_what_the_code_computes() -> None:
    assert "\n".join(rows()) in TEXT


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    for link in links:
        assert (DOCS / link).exists(), link


@pytest.mark.parametrize("file", SHELL, ids=lambda file: file.name)
def test_the_scripts_are_valid_shell(file: Path) -> None:
    subprocess.run(["bash", "-n", file], check=True)


def commands(text: str) -> list[list[str]]:
    """Every call of torchrun in a script, as words; variables stand for a word."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"torchrun (.*?-m vitral train[^\n;]*)", joined)
    return [shlex.split(re.sub(r'"?\$\{?[\w@\[\]:-]+\}?"?', "1", call.strip("`"))) for call in found]


def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCS / "scaling" / "kubernetes.yaml").read_text(encoding="utf-8"))
    return found


def sources() -> list[str]:
    container = job()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return [*(file.read_text(encoding="utf-8") for file in SHELL), *container["args"]]


@pytest.mark.parametrize("index", range(3), ids=["one-node.sh", "slurm.sbatch", "kubernetes.yaml"])
def test_what_they_call_is_there(index: int) -> None:
    """torchrun knows its flags, and vitral the command."""
    (words,) = commands(sources()[index])
    known, script = words[: words.index("-m")], words[words.index("-m") :]
    get_args_parser().parse_args([*known, "-m", "vitral"])
    assert script[:3] == ["-m", "vitral", "train"]
    assert script[2] in cli.COMMANDS


def test_the_flags_of_vitral_in_the_files_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "digits", "--help"])
    said = capsys.readouterr().out
    for text in [*sources(), TEXT]:
        for flag in re.findall(r"vitral train[^\n`]*?(--[a-z-]+)", text):
            assert f"{flag} " in said or flag == "--resume", flag


def test_the_job_for_kubernetes_is_one_that_the_operator_starts() -> None:
    found = job()
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = found["spec"]["pytorchReplicaSpecs"]["Worker"]
    elastic = found["spec"]["elasticPolicy"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    subprocess.run(["bash", "-n"], input=container["args"][0], text=True, check=True)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node {gpus} " in container["args"][0]


def test_the_plan_in_the_text_says_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "B/16", "--gpus", "1", "--batch-size", "256", "--no-ema"])
    total = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  total"))
    assert f"says {float(total.split()[1]):.1f}." in TEXT
