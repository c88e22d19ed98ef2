"""Compile every kernel that training and inference launch, for GPUs that need not exist.

Training steps and forward passes run on the CPU with launches that are only recorded. Then each recorded
specialisation is compiled for an H100. One per kernel and argument types is also compiled for the oldest GPU that has
these types: types decide which instructions a GPU must have. Kernels of Muon, attention and the stem must not spill
registers, unless they limit them.
Prints both numbers of specialisations.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import vitral.kernels
from vitral.data.augment import AugmentConfig
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import available_cpus
from vitral.kernels.adamw import op as adamw_op
from vitral.kernels.augment.op import fused_augment
from vitral.kernels.block.op import expand_gelu_supports, post_attention_supports
from vitral.kernels.conv_stem.op import FusedConvStem
from vitral.kernels.cross_entropy.op import fused_cross_entropy
from vitral.kernels.dropout.op import Dropout, apply_dropout, draw_seeds
from vitral.kernels.embed.op import BOTH_TILES, InferenceEmbedding, embed_patches, token_offsets, unfold_patches
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.fp8.op import quantize_with_scales
from vitral.kernels.linear import FP8_WGRAD_MIN_WIDTH
from vitral.kernels.muon import op as muon_op
from vitral.models.variants.hybrid import ConvStem, ConvStemConfig
from vitral.models.vit import ViT, ViTConfig
from vitral.training.optim import muon
from vitral.training.optim.adamw import AdamW

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, positional and keyword arguments

POINTER_TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
AMPERE, ADA, H100 = 80, 89, 90  # compute capabilities; FP8 needs Ada
NO_SPILL_PACKAGES = ("muon", "attention", "conv_stem")
FP8_PACKAGES = ("fp8_wgrad",)  # some of its kernels convert to FP8 without an FP8 argument
AUGMENTATIONS = [
    AugmentConfig(shift=2, flip=True, cutmix=1.0, mix_prob=0.4),
    AugmentConfig(shift=2, border="black"),
    AugmentConfig(cutmix=1.0),
    AugmentConfig(shift=2, policy=AutoAugmentPolicy(name="randaugment"), cutmix=1.0),
    AugmentConfig(jitter=0.2),
]
MODELS: list[dict[str, Any]] = [
    {"qk_norm": True, "positions": "learned+rotary", "pooling": "mean", "activation": "gelu_tanh", "drop_path": 0.2},
    {"pooling": "mean"},
    {"image_size": (64, 64)},
    {"image_size": (64, 64), "qk_norm": True, "positions": "rotary", "qkv_bias": False},
    {"image_size": (64, 64), "positions": "rotary", "width": 768, "heads": 12},
    {"image_size": (64, 64), "qk_norm": True, "positions": "rotary", "pooling": "mean"},
    {"image_size": (40, 40), "width": 96, "heads": 4, "qkv_bias": False},
    {"image_size": (224, 224), "patch_size": 16, "width": 768, "heads": 12},
    {"image_size": (272, 272), "patch_size": 16, "width": 768, "heads": 12},
    {"pooling": "mean", "width": 768, "heads": 12, "activation": "gelu_tanh"},
    {"pooling": "mean", "width": 1024, "heads": 16, "image_size": (64, 64)},
    {"width": 768, "heads": 12, "layer_scale": 0.1, "dropout": 0.1, "key_bias": False, "activation": "quick_gelu"},
    {"width": 384, "heads": 6, "activation": "swiglu", "dropout": 0.1, "drop_path": 0.1},
]


def train_encoder(fp8: bool, recompute_threshold: int, **changes: Any) -> None:
    sizes: dict[str, Any] = {"image_size": (32, 32), "patch_size": 4, "num_classes": 10, "width": 256, "depth": 2}
    model = ViT(ViTConfig(**sizes | {"heads": 4} | changes)).train()
    tokens = model.embed(torch.zeros(4, 3, *model.config.image_size), model.config.grid).detach().requires_grad_()
    encoder = FusedEncoder(
        model.encoder,
        fp8,
        recompute_threshold=recompute_threshold,
        cls_only=model.config.pooling == "class",
        fp8_wgrad=fp8 and model.config.width >= FP8_WGRAD_MIN_WIDTH,
    )
    encoder(tokens, model.config.grid).sum().backward()
    with torch.no_grad():
        encoder(tokens, model.config.grid)


@torch.no_grad()
def run_inference(width: int, heads: int, activation: Any) -> None:
    """With the kernels that only inference uses: the embedding of bytes, and whole blocks in narrow models."""
    config = ViTConfig(
        image_size=(224, 224), patch_size=16, num_classes=10, width=width, heads=heads, depth=2, activation=activation
    )
    model = ViT(config).bfloat16().eval()
    preprocessing = Preprocessing(image_size=(224, 224), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    embed = InferenceEmbedding(model, preprocessing)
    images = torch.zeros(1, 3, 224, 224).bfloat16()
    unfold_patches(images, 16, 1)
    weight, offsets = model.patch_embedding.project.weight, token_offsets(model)
    for min_programs in BOTH_TILES:
        tokens = embed(torch.zeros(1, 3, 224, 224, dtype=torch.uint8), min_programs)
        embed_patches(images, weight, *offsets, 16, min_programs=min_programs)
    min_tokens = 0 if post_attention_supports(width, 4 * width) else None
    encoder = FusedEncoder(model.encoder, cls_only=True, recompute_threshold=0, fused_block_min_tokens=min_tokens)
    encoder(tokens, config.grid)
    encoder.forward_backward(tokens, config.grid)
    if expand_gelu_supports(width, 4 * width):
        FusedEncoder(model.encoder, fp8=True, cls_only=True, fused_block_min_tokens=0)(tokens, config.grid)


def drop_activations() -> None:
    apply_dropout(torch.zeros(16, 64).bfloat16(), Dropout(draw_seeds(1, torch.device("cpu"))[0], 0.1))


def train_stem(widths: tuple[int, ...]) -> None:
    stem = ConvStem(ConvStemConfig(widths=widths, strides=(1, 2, 2)), 3, 1e-6)
    FusedConvStem(stem)(torch.zeros(4, 3, 32, 32)).sum().backward()


def step_adamw(with_found_inf: bool) -> None:
    tensors = [torch.zeros(256, 128, 3, 3), *(torch.zeros(256) for _ in range(50)), torch.zeros(10)]
    optimizer = AdamW(tensors, lr=torch.tensor(0.1), fused=True)
    optimizer.found_inf = torch.zeros(()) if with_found_inf else None
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()  # creates the state
    optimizer.launch_kernels(adamw_op)


def step_muon(width: int, depth: int, with_found_inf: bool) -> None:
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    matrices = [torch.empty(shape) for _ in range(depth) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.empty_like(matrix)
    groups: list[dict[str, Any]] = [
        {"params": matrices[index::4], "num_matrices": 3 if index == 0 else 1, "lr": torch.ones(())}
        for index in range(4)
    ]
    optimizer = muon.Muon(groups, lr=0.0, weight_decay=0.1)
    optimizer.found_inf = torch.zeros(()) if with_found_inf else None
    optimizer.launch_kernels(muon_op)


def augment(config: AugmentConfig, mix_enabled: Tensor | None) -> None:
    images, labels = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    fused_augment(config, torch.zeros(3, 256).bfloat16(), 10, images, labels, torch.Generator(), mix_enabled)


def run_everything() -> None:
    for fp8, threshold, changes in itertools.product((False, True), (0, 2**25), MODELS):
        train_encoder(fp8, threshold, **changes)
    for width, heads, activation in ((192, 3, "gelu"), (256, 4, "gelu_tanh"), (384, 6, "gelu"), (768, 12, "gelu")):
        run_inference(width, heads, activation)
    drop_activations()
    quantize_with_scales(torch.zeros(64, 32), torch.ones(64, 1), torch.empty(64, 32, dtype=torch.float8_e4m3fn))
    for widths in ((64, 128, 256), (48, 96, 192)):
        train_stem(widths)
    for config, mix_enabled in itertools.product(AUGMENTATIONS, (None, torch.ones((), dtype=torch.bool))):
        augment(config, mix_enabled)
    for dtype, label_smoothing in itertools.product((torch.bfloat16, torch.float32), (0.0, 0.1)):
        for offsets in (None, torch.zeros(10)):
            logits, targets = torch.zeros(256, 10, dtype=dtype), torch.zeros(256, 10)
            fused_cross_entropy(logits, targets, torch.arange(256), label_smoothing, offsets)
    for with_found_inf in (True, False):
        step_adamw(with_found_inf)
    for width, depth, with_found_inf in (
        (256, 6, True), (256, 6, False), (768, 12, True), (192, 12, True), (20, 1, True),
    ):  # fmt: skip
        step_muon(width, depth, with_found_inf)


def record_launches() -> list[Launch]:
    """Run everything on the CPU, with GEMMs that the CPU lacks or does slowly replaced by empty results."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((kernel, args, kwargs))

    def scaled_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, **_: Any) -> Tensor:
        return torch.zeros(len(a), b.shape[1], dtype=out_dtype)

    def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        return a.new_zeros(len(a), b.shape[1]) if out is None else out

    JITFunction.run = record
    torch._scaled_mm = scaled_mm  # type: ignore[assignment]
    torch.mm = mm  # type: ignore[assignment]
    torch.addmm = lambda _, a, b, *, out=None: mm(a, b, out=out)  # type: ignore[assignment]
    Tensor.__matmul__ = mm  # type: ignore[assignment]
    muon.bf16_is_faster = lambda *_: True  # type: ignore[attr-defined]
    muon.newton_schulz = lambda x_NAB, steps=5: x_NAB
    run_everything()
    return launches


def all_kernels() -> set[str]:
    """Names of all kernels in vitral.kernels; functions they inline start with an underscore."""
    names = set()
    for module_info in pkgutil.walk_packages(vitral.kernels.__path__, "vitral.kernels."):
        if module_info.name.endswith("kernel"):
            module = importlib.import_module(module_info.name)
            names |= {name for name, value in vars(module).items() if is_kernel(name, value)}
    return names


def is_kernel(name: str, value: Any) -> bool:
    return isinstance(value, JITFunction) and name.endswith("_kernel")


def argument_type(value: Any) -> str:
    return POINTER_TYPES[value.dtype] if isinstance(value, Tensor) else {int: "i32", float: "fp32"}[type(value)]


def is_divisible_by_16(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def specialisation(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ASTSource: types, compile-time constants and divisibility, as Triton would derive them."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        value = args[index] if index < len(args) else kwargs[name]
        if index >= len(args) or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[index,] = "constexpr", value
            continue
        if isinstance(value, tuple):
            signature[name] = tuple(argument_type(item) for item in value)
            divisible = [position for position, item in enumerate(value) if is_divisible_by_16(item)]
            attributes |= {(index, position): [["tt.divisibility", 16]] for position in divisible}
            continue
        signature[name] = argument_type(value)
        if is_divisible_by_16(value):
            attributes[index,] = [["tt.divisibility", 16]]
    return {"fn": kernel, "signature": signature, "constexprs": constants, "attrs": attributes}


def spilled_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack, local = re.findall(r"STACK:(\d+)", output), re.findall(r"LOCAL:(\d+)", output)
    assert stack, output
    return max(int(size) for size in stack + local)


class Specialisation:
    """A kernel with the types and compile-time constants of one launch."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.source = specialisation(kernel, args, kwargs)
        self.options = {name: kwargs[name] for name in ("num_warps", "maxnreg", "enable_fp_fusion") if name in kwargs}
        self.package = kernel.fn.__module__.split(".")[2]
        types = [type for type in self.source["signature"].values() if type != "constexpr"]
        self.argument_types = f"{kernel.__name__} {types}"
        self.name = f"{kernel.__name__} {self.source} {self.options}"
        self.needs_fp8 = "*fp8e4nv" in types or self.package in FP8_PACKAGES

    def compile(self, capability: int) -> None:
        source, target = ASTSource(**self.source), GPUTarget("cuda", capability, 32)
        binary = triton.compile(source, target=target, options=self.options)
        if self.package in NO_SPILL_PACKAGES and "maxnreg" not in self.options:
            assert spilled_bytes(binary.asm["cubin"]) == 0, self.name


def main() -> None:
    launches = record_launches()
    assert {kernel.__name__ for kernel, _, _ in launches} == all_kernels()
    recorded = [Specialisation(*launch) for launch in launches]
    distinct = list({each.name: each for each in recorded}.values())
    sample = list({each.argument_types: each for each in recorded}.values())
    compilations = [(each, H100) for each in distinct]
    compilations += [(each, ADA if each.needs_fp8 else AMPERE) for each in sample]
    with ThreadPoolExecutor(available_cpus()) as threads:
        for _ in threads.map(lambda pair: pair[0].compile(pair[1]), compilations):
            pass
    print(len(distinct), len(sample))


if __name__ == "__main__":
    main()
