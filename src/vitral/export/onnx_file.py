"""Export to ONNX: the graph of torch's exporter in fp32, fp16, bf16 or int8, with metadata."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.export.onnx_preprocessing import add_preprocessing
from vitral.export.wrapper import (
    ExportPrecision,
    ExportWrapper,
    capture_graph,
    example_images,
    export_metadata,
    smooth_activations,
)
from vitral.inference.folded_weights import split_outlier_columns
from vitral.inference.int8_calibration import ActivationRanges, collect_activation_ranges
from vitral.inference.onnx_runtime import METADATA_FORMAT, METADATA_KEY
from vitral.models.vit import ViT
from vitral.runs.model_io import ModelConfig
from vitral.utils.json_toml import dump_json

OPSET = 20
MIN_BF16_SIZE = 64  # smaller tensors are not worth a cast
CALIBRATION_BATCH_SIZE = 16
QUANTIZATION_BATCH_SIZE = 8


def require_onnx() -> tuple[Any, Any]:
    """Import onnx and onnxruntime, or raise a VitralError with the install command."""
    try:
        importlib.import_module("onnxscript")
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise VitralError(f"export to ONNX requires {error.name}", "pip install 'vitral[export]'") from error


def write_onnx(
    path: Path,
    model: ViT,
    config: ModelConfig,
    precision: ExportPrecision,
    preprocessing: bool,
    calibration_images: Tensor,
) -> None:
    onnx, _ = require_onnx()
    if precision == "int8":
        onnx_model = quantize_graph(model, config, calibration_images)
    else:
        onnx_model = build_graph(model, config, precision)
    if preprocessing:
        add_preprocessing(onnx, onnx_model, config.preprocessing)
    metadata = {
        "format": METADATA_FORMAT,
        **export_metadata(config, precision),
        "has_preprocessing": preprocessing,
    }
    del onnx_model.metadata_props[:]
    onnx.helper.set_model_props(onnx_model, {METADATA_KEY: dump_json(metadata)})
    onnx.checker.check_model(onnx_model)
    onnx.save(onnx_model, str(path))


def build_graph(model: ViT, config: ModelConfig, precision: ExportPrecision, blocks: bool = False) -> Any:
    """ONNX model of the ExportWrapper: uint8 images to logits and probabilities (or tokens of all blocks and logits).

    ONNX Runtime has no bf16 GEMMs for CPUs: bf16 weights are stored in bf16 and computed with in fp32.
    """
    onnx, _ = require_onnx()
    is_bf16 = precision == "bf16"
    module = ExportWrapper(model, config, "fp32" if is_bf16 else precision, blocks)
    images = example_images(config)
    program = capture_graph(module.eval(), images)
    depth = model.config.depth
    second = "values" if config.task == "regression" else "probabilities"
    outputs = [*(f"tokens_{i}" for i in range(depth + 1)), "logits"] if blocks else ["logits", second]
    with _silence_exporter(), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.onnx"
        torch.onnx.export(
            program,
            (images,),
            str(file),
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=outputs,
            external_data=False,
            verbose=False,
        )
        onnx_model = onnx.load(str(file))
    _make_batch_dynamic(onnx_model)
    if is_bf16:
        _store_weights_in_bf16(onnx_model)
    return onnx_model


@contextlib.contextmanager
def _silence_exporter() -> Iterator[None]:
    """Suppress the exporter's logs, warnings and prints; the result is checked afterwards."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _make_batch_dynamic(onnx_model: Any) -> None:
    for value in (*onnx_model.graph.input, *onnx_model.graph.output):
        value.type.tensor_type.shape.dim[0].ClearField("dim_value")
        value.type.tensor_type.shape.dim[0].dim_param = "batch"


def _store_weights_in_bf16(onnx_model: Any) -> None:
    """Store matrices in bf16 and cast them to fp32 where they are used, which halves the file."""
    onnx, _ = require_onnx()
    graph = onnx_model.graph
    initializers, casts = [], []
    for tensor in graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if tensor.data_type != onnx.TensorProto.FLOAT or values.ndim < 2 or values.size < MIN_BF16_SIZE:
            initializers.append(tensor)
            continue
        bf16 = torch.from_numpy(np.array(values)).bfloat16()
        stored = onnx.TensorProto(name=f"{tensor.name}_bf16", data_type=onnx.TensorProto.BFLOAT16, dims=values.shape)
        stored.raw_data = bf16.view(torch.int16).numpy().tobytes()
        initializers.append(stored)
        casts.append(onnx.helper.make_node("Cast", [stored.name], [tensor.name], to=onnx.TensorProto.FLOAT))
    del graph.initializer[:]
    graph.initializer.extend(initializers)
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def quantize_graph(model: ViT, config: ModelConfig, calibration_images: Tensor, blocks: bool = False) -> Any:
    """ONNX model with int8 GEMMs: one scale per output channel of the weights, static scales for activations."""
    onnx, _ = require_onnx()
    quantization = importlib.import_module("onnxruntime.quantization")
    ranges = collect_activation_ranges(model, calibration_images.split(CALIBRATION_BATCH_SIZE), config.preprocessing)
    onnx_model = build_graph(smooth_activations(model, ranges), config, "fp32", blocks)
    graph = onnx_model.graph
    weights = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    gemms = [node for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights]
    quantized = {node.name for node in gemms} - _gemms_with_outliers(gemms, graph, ranges)

    class CalibrationReader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.batches = iter(calibration_images.split(QUANTIZATION_BATCH_SIZE))

        def get_next(self) -> dict[str, Any] | None:
            images = next(self.batches, None)
            return None if images is None else {"images": images.numpy()}

    with _silence_exporter(), tempfile.TemporaryDirectory() as folder:
        fp32_file, int8_file = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        onnx.save(onnx_model, str(fp32_file))
        quantization.quantize_static(
            str(fp32_file),
            str(int8_file),
            CalibrationReader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
            nodes_to_quantize=sorted(quantized),
            extra_options={"ActivationSymmetric": False, "QuantizeBias": False, "DedicatedQDQPair": False},
        )
        return onnx.load(str(int8_file))


def _gemms_with_outliers(gemms: list[Any], graph: Any, ranges: ActivationRanges) -> set[str]:
    """Names of the second GEMM of each MLP whose hidden activations have outlier columns. They stay in fp32."""
    names = set()
    contractions = [node for node in gemms if _follows_gelu(node, graph)]
    for index, node in enumerate(contractions):
        low_high = ranges.get(f"blocks.{index}.mlp.contract")
        if low_high is not None and len(split_outlier_columns(low_high[0], low_high[1])[0]):
            names.add(node.name)
    return names


def _follows_gelu(node: Any, graph: Any) -> bool:
    producers = {output: other for other in graph.node for output in other.output}
    producer = producers.get(node.input[0])
    while producer is not None and producer.op_type in ("Reshape", "Identity"):
        producer = producers.get(producer.input[0])
    return producer is not None and producer.op_type in ("Gelu", "Mul")
