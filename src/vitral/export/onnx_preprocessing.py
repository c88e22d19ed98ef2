"""Resizing and cropping as ONNX nodes, so that an exported model accepts images of any size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vitral.data.preprocess import Preprocessing

PREFIX = "preprocess_"


class _NodeBuilder:
    """Collects nodes and constants. Their names get a prefix, so that they do not collide with the model's."""

    def __init__(self, onnx: Any) -> None:
        self.onnx, self.nodes, self.constants = onnx, list[Any](), list[Any]()

    def constant(self, name: str, values: list[int] | list[float]) -> str:
        dtype = np.float64 if isinstance(values[0], float) else np.int64
        self.constants.append(self.onnx.numpy_helper.from_array(np.array(values, dtype), PREFIX + name))
        return PREFIX + name

    def node(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        name = PREFIX + output
        self.nodes.append(self.onnx.helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name


def add_preprocessing(onnx: Any, model: Any, preprocessing: Preprocessing) -> None:
    """Prepend resizing and cropping to an ONNX model whose input `images` has the model's input size.

    The new input `images` is (B, C, any height, any width), of the preprocessing's type.
    """
    graph, tensor_types = model.graph, onnx.TensorProto
    _rename_tensor(graph, "images", f"{PREFIX}output")
    builder = _NodeBuilder(onnx)
    is_8_bit = preprocessing.dtype == "uint8"
    images = "images" if is_8_bit else builder.node("Cast", ["images"], "floats", to=tensor_types.FLOAT)
    cropped = _resize_and_crop(builder, images, preprocessing)
    if preprocessing.dtype == "uint16":  # ONNX has no resize of uint16
        rounded = builder.node("Round", [cropped], "rounded_pixels")
        bounds = [builder.constant(name, [value]) for name, value in (("lowest", 0.0), ("highest", 65535.0))]
        bounds = [builder.node("Cast", [bound], f"{bound}_float", to=tensor_types.FLOAT) for bound in bounds]
        lowest, highest = (builder.node("Squeeze", [bound], f"{bound}_scalar") for bound in bounds)
        clipped = builder.node("Clip", [rounded, lowest, highest], "clipped")
        cropped = builder.node("Cast", [clipped], "uint16", to=tensor_types.UINT16)
    output = onnx.helper.make_node("Identity", [cropped], [f"{PREFIX}output"], name=f"{PREFIX}output")
    shape = ["batch", preprocessing.channels, "height", "width"]
    input_type = {"uint8": tensor_types.UINT8, "uint16": tensor_types.UINT16, "float32": tensor_types.FLOAT}[
        preprocessing.dtype
    ]
    del graph.input[:]
    graph.input.append(onnx.helper.make_tensor_value_info("images", input_type, shape))
    nodes = [*builder.nodes, output, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(builder.constants)


def _resize_and_crop(builder: _NodeBuilder, images: str, preprocessing: Preprocessing) -> str:
    """The arithmetic of vitral.data.resize_crop: sides are rounded down, the corner of the crop to the nearest even."""
    node, constant, to_double = builder.node, builder.constant, builder.onnx.TensorProto.DOUBLE
    H, W = preprocessing.image_size
    min_h = constant("min_h", [math.floor(H / preprocessing.crop)])
    min_w = constant("min_w", [math.floor(W / preprocessing.crop)])
    zero, one, two, three, four = (constant(f"index_{value}", [value]) for value in range(5))
    size, axes = constant("size", [H, W]), constant("axes", [2, 3])

    shape = node("Shape", [images], "shape")
    h = node("Slice", [shape, two, three], "h")
    w = node("Slice", [shape, three, four], "w")
    min_h_times_w, min_w_times_h = node("Mul", [min_h, w], "min_h_times_w"), node("Mul", [min_w, h], "min_w_times_h")
    fit_height = node("GreaterOrEqual", [min_h_times_w, min_w_times_h], "fit_height")
    scaled_h = node("Where", [fit_height, min_h, node("Div", [min_w_times_h, w], "h_from_w")], "scaled_h")
    scaled_w = node("Where", [fit_height, node("Div", [min_h_times_w, h], "w_from_h"), min_w], "scaled_w")
    scaled = node("Concat", [scaled_h, scaled_w], "scaled", axis=0)
    batch = node("Slice", [shape, zero, one], "batch")
    channels = constant("channels", [preprocessing.channels])
    sizes = node("Concat", [batch, channels, scaled], "sizes", axis=0)
    resized = node(
        "Resize",
        [images, "", "", sizes],
        "resized",
        mode={"bilinear": "linear", "bicubic": "cubic"}[preprocessing.interpolation],
        antialias=1,
        coordinate_transformation_mode="half_pixel",
        cubic_coeff_a=-0.5,
    )
    excess = node("Cast", [node("Sub", [scaled, size], "excess")], "excess_double", to=to_double)
    half = node("Div", [excess, constant("divisor", [2.0])], "half")
    corner = node("Cast", [node("Round", [half], "rounded")], "corner", to=builder.onnx.TensorProto.INT64)
    end = node("Add", [corner, size], "end")
    return node("Slice", [resized, corner, end, axes], "cropped")


def _rename_tensor(graph: Any, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new
    for value in graph.value_info:
        if value.name == old:
            value.name = new
