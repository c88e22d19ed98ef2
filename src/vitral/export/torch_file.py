"""torch.export's .pt2, for any program with torch; and an AOTInductor package: compiled for this kind of machine."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral import __version__
from vitral.errors import VitralError
from vitral.export.wrapper import Exported, Precision, captured, example
from vitral.models.vit import ViT
from vitral.runs.run import ModelCard
from vitral.utils.serialization import to_plain

KEY = "vitral.json"


def about(card: ModelCard, precision: Precision) -> dict[str, Any]:
    return {
        "made_by": f"vitral {__version__}, torch {torch.__version__}",
        "classes": list(card.classes),
        "preprocessing": to_plain(card.preprocessing),
        "calibration": to_plain(card.calibration),
        "precision": precision,
    }


def check_precision(precision: Precision) -> None:
    if precision == "int8":
        raise VitralError("int8 is exported to ONNX only", "use --to onnx --precision int8, or --precision bf16")


def write_pt2(path: Path, model: ViT, card: ModelCard, precision: Precision) -> None:
    check_precision(precision)
    program = captured(Exported(model, card, precision).eval(), example(card))
    torch.export.save(program, path, extra_files={KEY: json.dumps(about(card, precision))})


def read_pt2(path: Path) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], dict[str, Any]]:
    """The program and what the file says about itself. Only files you made: loading one can run what is in it."""
    extra = {KEY: ""}
    module = torch.export.load(path, extra_files=extra).module()
    return module, json.loads(extra[KEY])


def write_aoti(path: Path, model: ViT, card: ModelCard, precision: Precision) -> None:
    check_precision(precision)
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise VitralError("AOTInductor needs a C++ compiler", "install g++, or use --to torch")
    program = captured(Exported(model, card, precision).eval(), example(card))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": {"vitral": json.dumps(about(card, precision))}},
        )


def read_aoti(path: Path) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], dict[str, Any]]:
    package = torch._inductor.aoti_load_package(str(path))
    return package, json.loads(package.loader.get_metadata()["vitral"])
