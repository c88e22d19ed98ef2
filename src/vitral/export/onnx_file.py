"""ONNX: the graph by torch's exporter, scaling and cropping in front of it, number types, what it says about itself."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral import __version__
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.export.wrapper import Exported, Precision, balanced, captured, example
from vitral.inference.engine import hidden_range
from vitral.inference.int8_calibration import measure_ranges
from vitral.inference.onnx_runtime import FORMAT, KEY
from vitral.models.vit import ViT
from vitral.runs.run import ModelCard
from vitral.utils.serialization import to_plain

OPSET = 20


def needed() -> tuple[Any, Any]:
    """onnx and onnxruntime, or the line that installs them."""
    try:
        importlib.import_module("onnxscript")
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise VitralError(f"exporting to ONNX needs {error.name}", "pip install 'vitral[export]'") from error


def write_onnx(
    path: Path, model: ViT, card: ModelCard, precision: Precision, preprocessing: bool, learn_from: Tensor
) -> None:
    onnx, _ = needed()
    graph = in_bytes(model, card, learn_from) if precision == "int8" else whole_graph(model, card, precision)
    if preprocessing:
        graph = with_scaling(graph, card.preprocessing)
    about = {
        "format": FORMAT,
        "made_by": f"vitral {__version__}, torch {torch.__version__}",
        "classes": list(card.classes),
        "preprocessing": to_plain(card.preprocessing),
        "preprocessing_inside": preprocessing,
        "calibration": to_plain(card.calibration),
        "precision": precision,
        "trained_on": card.trained_on,
    }
    del graph.metadata_props[:]
    onnx.helper.set_model_props(graph, {KEY: json.dumps(about)})
    onnx.checker.check_model(graph)
    onnx.save(graph, str(path))


def whole_graph(model: ViT, card: ModelCard, precision: Precision, blocks: bool = False) -> Any:
    """uint8 images of the model's size → logits, probabilities (or the tokens after each block, and logits)."""
    onnx, _ = needed()
    rounded = precision == "bf16"  # ONNX Runtime has no bf16 products for CPUs: weights are kept so, computed in fp32
    module = Exported(model, card, "fp32" if rounded else precision, blocks)
    images = example(card)
    program = captured(module.eval(), images)
    depth = len(model.encoder.blocks)
    outputs = [*(f"tokens_{i}" for i in range(depth + 1)), "logits"] if blocks else ["logits", "probabilities"]
    with _quiet(), tempfile.TemporaryDirectory() as folder:
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
        graph = onnx.load(str(file))
    _free_batch(graph)
    if rounded:
        _keep_in_bf16(graph)
    return graph


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter talks to whoever listens; what matters is checked afterwards."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _free_batch(graph: Any) -> None:
    for value in (*graph.graph.input, *graph.graph.output):
        value.type.tensor_type.shape.dim[0].ClearField("dim_value")
        value.type.tensor_type.shape.dim[0].dim_param = "batch"


def _keep_in_bf16(graph: Any) -> None:
    """Matrices stored in 16 bits, turned back where they are used: half the file, the rounding of bf16."""
    onnx, _ = needed()
    kept, casts = [], []
    for tensor in graph.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if tensor.data_type != onnx.TensorProto.FLOAT or values.ndim < 2 or values.size < 64:
            kept.append(tensor)
            continue
        rounded = torch.from_numpy(np.array(values)).bfloat16()
        small = onnx.TensorProto(name=f"{tensor.name}_bf16", data_type=onnx.TensorProto.BFLOAT16, dims=values.shape)
        small.raw_data = rounded.view(torch.int16).numpy().tobytes()
        kept.append(small)
        casts.append(onnx.helper.make_node("Cast", [small.name], [tensor.name], to=onnx.TensorProto.FLOAT))
    del graph.graph.initializer[:]
    graph.graph.initializer.extend(kept)
    nodes = [*casts, *graph.graph.node]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)


def in_bytes(model: ViT, card: ModelCard, learn_from: Tensor, blocks: bool = False) -> Any:
    """8-bit products: a step for each row of a matrix, fixed steps for what it reads, learned from real images."""
    onnx, _ = needed()
    quantization = importlib.import_module("onnxruntime.quantization")
    ranges = measure_ranges(model, learn_from.split(16), card.preprocessing)
    graph = whole_graph(balanced(model, ranges), card, "fp32", blocks)
    matrices = {tensor.name for tensor in graph.graph.initializer if len(tensor.dims) == 2}
    products = [n for n in graph.graph.node if n.op_type in ("MatMul", "Gemm") and n.input[1] in matrices]
    wanted = {node.name for node in products} - _too_wide(products, graph, ranges)

    class Images(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.batches = iter(learn_from.split(8))

        def get_next(self) -> dict[str, Any] | None:
            images = next(self.batches, None)
            return None if images is None else {"images": images.numpy()}

    with _quiet(), tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        onnx.save(graph, str(before))
        quantization.quantize_static(
            str(before),
            str(after),
            Images(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
            nodes_to_quantize=sorted(wanted),
            extra_options={"ActivationSymmetric": False, "QuantizeBias": False, "DedicatedQDQPair": False},
        )
        return onnx.load(str(after))


def _too_wide(products: list[Any], graph: Any, ranges: dict[str, Tensor]) -> set[str]:
    """The second products of those MLPs where a few hidden numbers are far larger than all others: they stay fp32."""
    wide = set()
    contracting = [node for node in products if _comes_from_gelu(node, graph)]
    for index, node in enumerate(contracting):
        found = ranges.get(f"blocks.{index}.mlp.contract")
        if found is not None and len(hidden_range(*found)[0]):
            wide.add(node.name)
    return wide


def _comes_from_gelu(node: Any, graph: Any) -> bool:
    makers = {output: other for other in graph.graph.node for output in other.output}
    maker = makers.get(node.input[0])
    while maker is not None and maker.op_type in ("Reshape", "Identity"):
        maker = makers.get(maker.input[0])
    return maker is not None and maker.op_type in ("Gelu", "Mul")


def with_scaling(graph: Any, wanted: Preprocessing) -> Any:
    """uint8 images of ANY size in front: scaled with antialiasing to cover the crop, its middle cut out.

    The same arithmetic as vitral.data.resize_crop: sides rounded down, the corner to the nearest, halves to even.
    """
    onnx, _ = needed()
    helper, tensors = onnx.helper, onnx.TensorProto
    H, W = wanted.image_size
    C = wanted.channels
    least = {"H": math.floor(H / wanted.crop), "W": math.floor(W / wanted.crop)}
    numbers = {"zero": [0], "one": [1], "two": [2], "three": [3], "four": [4], "axes": [2, 3], "half": [2.0]}
    numbers |= {"least_H": [least["H"]], "least_W": [least["W"]], "size": [H, W], "channels": [C]}
    constants = [
        onnx.numpy_helper.from_array(np.array(v, np.float64 if name == "half" else np.int64), f"scaling_{name}")
        for name, v in numbers.items()
    ]
    nodes: list[Any] = []

    def node(kind: str, inputs: list[str], out: str, **more: Any) -> str:
        given = [f"scaling_{name}" if name in numbers else name for name in inputs]
        nodes.append(helper.make_node(kind, given, [f"scaling_{out}"], name=f"scaling_{out}", **more))
        return f"scaling_{out}"

    shape = node("Shape", ["pixels"], "shape")
    h = node("Slice", [shape, "two", "three"], "h")
    w = node("Slice", [shape, "three", "four"], "w")
    tall, wide = node("Mul", ["least_H", w], "tall"), node("Mul", ["least_W", h], "wide")
    by_height = node("GreaterOrEqual", [tall, wide], "by_height")
    scaled_h = node("Where", [by_height, "least_H", node("Div", [wide, w], "from_width")], "scaled_h")
    scaled_w = node("Where", [by_height, node("Div", [tall, h], "from_height"), "least_W"], "scaled_w")
    scaled = node("Concat", [scaled_h, scaled_w], "scaled", axis=0)
    batch = node("Slice", [shape, "zero", "one"], "batch")
    sizes = node("Concat", [batch, "channels", scaled], "sizes", axis=0)
    mode = {"bilinear": "linear", "bicubic": "cubic"}[wanted.interpolation]
    resized = node(
        "Resize",
        ["pixels", "", "", sizes],
        "resized",
        mode=mode,
        antialias=1,
        coordinate_transformation_mode="half_pixel",
        cubic_coeff_a=-0.5,
    )
    over = node("Sub", [scaled, "size"], "over")
    halves = node("Div", [node("Cast", [over], "over_float", to=tensors.DOUBLE), "half"], "halves")
    corner = node("Cast", [node("Round", [halves], "rounded")], "corner", to=tensors.INT64)
    end = node("Add", [corner, "size"], "end")
    cut = node("Slice", [resized, corner, end, "axes"], "cut")
    nodes.append(helper.make_node("Identity", [cut], ["images"], name="scaling_images"))

    inside = graph.graph
    del inside.input[:]
    inside.input.append(
        helper.make_tensor_value_info("images_of_any_size", tensors.UINT8, ["batch", C, "height", "width"])
    )
    for made in nodes:
        for place, name in enumerate(made.input):
            if name == "pixels":
                made.input[place] = "images_of_any_size"
    everything = [*nodes, *inside.node]
    del inside.node[:]
    inside.node.extend(everything)
    inside.initializer.extend(constants)
    _rename(inside, {"images": "scaled_images", "images_of_any_size": "images"})
    return graph


def _rename(graph: Any, names: dict[str, str]) -> None:
    for node in graph.node:
        for places in (node.input, node.output):
            for place, name in enumerate(places):
                places[place] = names.get(name, name)
    for value in (*graph.input, *graph.value_info):
        value.name = names.get(value.name, value.name)
