"""CPU engine on OpenVINO: the graphs of openvino_graph.py, compiled for the number of threads in use.

The model's own pooling follows in PyTorch.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import available_cpus
from vitral.errors import VitralError
from vitral.inference.cpu_engine import (
    CpuPrecision,
    cpu_unsupported_reason,
    encoder_nbytes,
    num_pooled_tokens,
    unsupported_reason,
)
from vitral.inference.int8_calibration import ActivationRanges
from vitral.models.vit import ClassificationHead, EncoderBlock, PatchEmbedding, ViT

if TYPE_CHECKING:
    import numpy as np
    import openvino as ov

GraphName = Literal["images", "one image", "head"]
INSTALL_COMMAND = "pip install 'vitral[openvino]'"
NOT_INSTALLED = f"OpenVINO is not installed; {INSTALL_COMMAND}"


def openvino_unsupported_reason(model: ViT, preprocessing: Preprocessing) -> str | None:
    """Why OpenVINO cannot run a model, or None if it can."""
    if reason := unsupported_reason(model):
        return reason
    if preprocessing.dtype != "uint8":
        return f"OpenVINO is used for uint8 pixels only, these are {preprocessing.dtype}"
    if preprocessing.resize == "native":
        return "OpenVINO graphs have one image size, and native sizes vary"
    if type(model.patch_embedding) is not PatchEmbedding:
        return f"{type(model.patch_embedding).__name__} is not the standard patch embedding"
    for norm in (model.pre_norm, model.encoder.norm):
        if not isinstance(norm, nn.LayerNorm | nn.Identity):
            return f"{type(norm).__name__} is not a layer norm"
    if not is_installed():
        return NOT_INSTALLED
    from vitral.inference.openvino_graph import activation_name, constant_tokens

    for block in model.encoder.blocks:
        activation = cast(EncoderBlock, block).mlp.activation
        if activation_name(activation) is None:
            return f"the OpenVINO graph has no {type(activation).__name__}"
    return None if constant_tokens(model) is not None else f"{type(model).__name__} embeds patches in its own way"


def openvino_cpu_unsupported_reason(precision: CpuPrecision) -> str | None:
    """Why OpenVINO does not support a precision on this CPU, or None if it does."""
    if reason := cpu_unsupported_reason(precision):
        return reason
    name = {"fp32": "FP32", "bf16": "BF16", "int8": "INT8"}[precision]
    return None if name in _capabilities() else f"OpenVINO does not support {precision} on this CPU"


def is_installed() -> bool:
    return find_spec("openvino") is not None


def openvino_version() -> str:
    """Version of the installed package, for example 2026.4.1."""
    return version("openvino").split("-")[0]


@cache
def openvino_core() -> ov.Core:
    """The only core of this process.

    On Linux, each core replaces the signal stack of the thread that creates it. After two cores are destroyed in the
    order in which they were created, that stack is unmapped memory and the next Ctrl-C a segmentation fault.
    """
    import openvino as ov

    return ov.Core()


@cache
def _capabilities() -> frozenset[str]:
    return frozenset(openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


class OpenVinoEngine:
    """`OpenVinoEngine(model, preprocessing, "bf16")(images)`: uint8 images (B, C, H, W) to logits (B, K).

    `ranges` is required for int8.
    """

    def __init__(
        self,
        model: ViT,
        preprocessing: Preprocessing,
        precision: CpuPrecision,
        ranges: ActivationRanges | None = None,
    ) -> None:
        if reason := openvino_unsupported_reason(model, preprocessing) or openvino_cpu_unsupported_reason(precision):
            raise VitralError(f"{precision} engine unavailable: {reason}", "Use --engine auto")
        if precision == "int8" and ranges is None:
            raise VitralError("int8 engine unavailable: no activation ranges", "Measure them with: vitral bench RUN")
        self.model, self.preprocessing, self.precision = model, preprocessing, precision
        self.ranges = ranges if precision == "int8" else None
        self.num_pooled_tokens = num_pooled_tokens(model)
        self._compiled: dict[tuple[GraphName, int], ov.CompiledModel] = {}  # by graph and number of threads
        self._idle_requests: dict[tuple[GraphName, int], list[ov.InferRequest]] = defaultdict(list)
        self._compile_lock = threading.Lock()

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor) -> Tensor:
        return self.head(self.features(images_BCHW))

    @torch.inference_mode()
    def features(self, images_BCHW: Tensor) -> Tensor:
        from vitral.inference.openvino_graph import cut_patches

        # Each graph holds a copy of the weights, so only single images, where latency matters, have their own.
        graph: GraphName = "one image" if len(images_BCHW) == 1 else "images"
        with self._request(graph) as request:
            return self.model.pool(_infer(request, cut_patches(images_BCHW, self.model.config.patch_size))).clone()

    @torch.inference_mode()
    def head(self, features_BD: Tensor) -> Tensor:
        if type(self.model.head) is not ClassificationHead:
            return cast(Tensor, self.model.head(features_BD))
        with self._request("head") as request:
            return _infer(request, features_BD.numpy()).clone()

    @contextmanager
    def _request(self, graph: GraphName) -> Iterator[ov.InferRequest]:
        """An idle inference request for the current number of threads."""
        key = graph, torch.get_num_threads()
        idle = self._idle_requests[key]
        try:
            request = idle.pop()
        except IndexError:
            request = self._compile(*key).create_infer_request()
        try:
            yield request
        finally:
            idle.append(request)

    @property
    def nbytes(self) -> int:
        """Size of the encoder's weights in bytes."""
        return encoder_nbytes(self.model, self.precision)

    def _compile(self, graph: GraphName, threads: int) -> ov.CompiledModel:
        from vitral.inference.openvino_graph import build_head

        with self._compile_lock:
            if (key := (graph, threads)) not in self._compiled:
                precision: CpuPrecision = "fp32" if graph == "head" else self.precision
                built = (
                    build_head(cast(ClassificationHead, self.model.head))
                    if graph == "head"
                    else self._build(graph, threads)
                )
                self._compiled[key] = openvino_core().compile_model(built, "CPU", compile_options(precision, threads))
            return self._compiled[key]

    def _build(self, graph: GraphName, threads: int) -> ov.Model:
        from vitral.inference.openvino_graph import build_graph

        is_one = graph == "one image"
        row_multiple = threads if is_one and self.precision != "fp32" else 1  # fp32: no faster (Ti/16)
        batch_size = 1 if is_one else None
        count = self.num_pooled_tokens
        return build_graph(self.model, self.preprocessing, count, self.ranges, batch_size, row_multiple)


def _infer(request: ov.InferRequest, values: np.ndarray[Any, Any]) -> Tensor:
    """The output of the graph, valid until the next call of this request."""
    return torch.from_numpy(request.infer([values], share_inputs=True, share_outputs=True)[0])


def compile_options(precision: CpuPrecision, threads: int) -> dict[str, Any]:
    """Options for `threads` threads per call, and for as many concurrent calls as there are CPUs for them."""
    streams = max(available_cpus() // threads, 1)
    is_bf16 = precision == "bf16" or (precision == "int8" and "BF16" in _capabilities())
    return {
        "INFERENCE_PRECISION_HINT": "bf16" if is_bf16 else "f32",
        "INFERENCE_NUM_THREADS": streams * threads,
        "NUM_STREAMS": streams,
        "ENABLE_CPU_PINNING": False,  # pinned threads of several processes would share cores
    }
