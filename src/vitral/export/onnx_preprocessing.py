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
    add_nodes = {"crop": _resize_and_crop, "pad": _resize_and_pad, "stretch": _stretch}[preprocessing.resize]
    cropped = add_nodes(builder, images, preprocessing)
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
    """The arithmetic of vitral.data.geometry: sides are rounded down, the corner of the crop to the nearest even."""
    node, constant, to_double = builder.node, builder.constant, builder.onnx.TensorProto.DOUBLE
    H, W = preprocessing.image_size
    min_h = constant("min_h", [math.floor(H / preprocessing.crop)])
    min_w = constant("min_w", [math.floor(W / preprocessing.crop)])
    size, axes = constant("size", [H, W]), constant("axes", [2, 3])
    h, w = _height_and_width(builder, images)
    min_h_times_w, min_w_times_h = node("Mul", [min_h, w], "min_h_times_w"), node("Mul", [min_w, h], "min_w_times_h")
    fit_height = node("GreaterOrEqual", [min_h_times_w, min_w_times_h], "fit_height")
    scaled_h = node("Where", [fit_height, min_h, node("Div", [min_w_times_h, w], "h_from_w")], "scaled_h")
    scaled_w = node("Where", [fit_height, node("Div", [min_h_times_w, h], "w_from_h"), min_w], "scaled_w")
    scaled = node("Concat", [scaled_h, scaled_w], "scaled", axis=0)
    resized = _resize(builder, images, scaled, preprocessing)
    excess = node("Cast", [node("Sub", [scaled, size], "excess")], "excess_double", to=to_double)
    half = node("Div", [excess, constant("divisor", [2.0])], "half")
    corner = node("Cast", [node("Round", [half], "rounded")], "corner", to=builder.onnx.TensorProto.INT64)
    end = node("Add", [corner, size], "end")
    return node("Slice", [resized, corner, end, axes], "cropped")


def _resize_and_pad(builder: _NodeBuilder, images: str, preprocessing: Preprocessing) -> str:
    """The arithmetic of `fit_inside` in vitral.data.geometry, then the mean colour around the image, per channel."""
    node, constant = builder.node, builder.constant
    H, W = preprocessing.image_size
    h, w = _height_and_width(builder, images)
    height, width, one = constant("height", [H]), constant("width", [W]), constant("one", [1])
    is_wide = node("GreaterOrEqual", [node("Mul", [height, w], "wide"), node("Mul", [width, h], "tall")], "is_wide")

    def rounded(fixed: str, side: str, other: str, name: str) -> str:
        """`fixed` · `side` / `other`, rounded to the nearest, at least 1."""
        two = constant(f"{name}_two", [2])
        double = node("Mul", [node("Mul", [fixed, side], f"{name}_product"), two], f"{name}_double")
        numerator = node("Add", [double, other], f"{name}_numerator")
        quotient = node("Div", [numerator, node("Mul", [other, two], f"{name}_divisor")], f"{name}_quotient")
        return node("Max", [quotient, one], name)

    fit_h = node("Where", [is_wide, rounded(width, h, w, "h_from_w"), height], "fit_h")
    fit_w = node("Where", [is_wide, width, rounded(height, w, h, "w_from_h")], "fit_w")
    fit = node("Concat", [fit_h, fit_w], "fit", axis=0)
    resized = _resize(builder, images, fit, preprocessing)
    missing = node("Sub", [constant("size", [H, W]), fit], "missing")
    before = node("Div", [missing, constant("half", [2, 2])], "before")
    after = node("Sub", [missing, before], "after")
    pads = node("Concat", [before, after], "pads", axis=0)
    axes = constant("axes", [2, 3])
    channels = []
    dtype = np.uint8 if preprocessing.dtype == "uint8" else np.float32
    for channel, value in enumerate(preprocessing.pad_color):
        bounds = [constant(f"channel_{channel}_{name}", [at]) for name, at in (("from", channel), ("to", channel + 1))]
        plane = node("Slice", [resized, *bounds, one], f"channel_{channel}")  # axis 1
        color = f"{PREFIX}color_{channel}"
        builder.constants.append(builder.onnx.numpy_helper.from_array(np.array(value, dtype), color))
        channels.append(node("Pad", [plane, pads, color, axes], f"padded_{channel}"))
    return node("Concat", channels, "padded", axis=1)


def _stretch(builder: _NodeBuilder, images: str, preprocessing: Preprocessing) -> str:
    H, W = preprocessing.image_size
    return _resize(builder, images, builder.constant("size", [H, W]), preprocessing)


def _height_and_width(builder: _NodeBuilder, images: str) -> tuple[str, str]:
    node, constant = builder.node, builder.constant
    two, three, four = (constant(f"index_{value}", [value]) for value in (2, 3, 4))
    shape = node("Shape", [images], "image_shape")
    return node("Slice", [shape, two, three], "h"), node("Slice", [shape, three, four], "w")


def _resize(builder: _NodeBuilder, images: str, size: str, preprocessing: Preprocessing) -> str:
    """Resize to the height and width in the tensor `size`, with antialiasing."""
    node, constant = builder.node, builder.constant
    shape = node("Shape", [images], "shape")
    batch = node("Slice", [shape, constant("index_0", [0]), constant("index_1", [1])], "batch")
    channels = constant("channels", [preprocessing.channels])
    return node(
        "Resize",
        [images, "", "", node("Concat", [batch, channels, size], "sizes", axis=0)],
        "resized",
        mode={"bilinear": "linear", "bicubic": "cubic"}[preprocessing.interpolation],
        antialias=1,
        coordinate_transformation_mode="half_pixel",
        cubic_coeff_a=-0.5,
    )


def _rename_tensor(graph: Any, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new
    for value in graph.value_info:
        if value.name == old:
            value.name = new
