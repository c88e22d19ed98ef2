"""Export to torch.export (.pt2), for programs with torch, and to AOTInductor, compiled for this kind of machine."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.export.wrapper import ExportPrecision, ExportWrapper, capture_graph, example_images, export_metadata
from vitral.models.vit import ViT
from vitral.runs.model_io import ModelConfig
from vitral.utils.json_toml import dump_json, parse_json

METADATA_FILE = "vitral.json"  # in a .pt2 archive
AOTI_METADATA_KEY = "vitral"
LoadedModel = tuple[Callable[[Tensor], tuple[Tensor, Tensor]], dict[str, Any]]  # the program and its metadata


def write_pt2(path: Path, model: ViT, config: ModelConfig, precision: ExportPrecision) -> None:
    metadata = dump_json(export_metadata(config, precision))
    torch.export.save(_capture(model, config, precision), path, extra_files={METADATA_FILE: metadata})


def read_pt2(path: Path) -> LoadedModel:
    """Load a .pt2 file. Load only files you trust: loading can execute code."""
    extra_files = {METADATA_FILE: ""}
    module = torch.export.load(path, extra_files=extra_files).module()
    return module, parse_json(extra_files[METADATA_FILE])


def write_aoti(path: Path, model: ViT, config: ModelConfig, precision: ExportPrecision) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise VitralError("AOTInductor requires a C++ compiler", "Install g++, or use --to torch")
    metadata = dump_json(export_metadata(config, precision))
    program = _capture(model, config, precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": {AOTI_METADATA_KEY: metadata}},
        )


def read_aoti(path: Path) -> LoadedModel:
    package = torch._inductor.aoti_load_package(str(path))
    return package, parse_json(package.loader.get_metadata()[AOTI_METADATA_KEY])


def _capture(model: ViT, config: ModelConfig, precision: ExportPrecision) -> torch.export.ExportedProgram:
    if precision == "int8":
        raise VitralError("int8 can only be exported to ONNX", "Use --to onnx --precision int8, or --precision bf16")
    return capture_graph(ExportWrapper(model, config, precision).eval(), example_images(config))
