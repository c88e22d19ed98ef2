"""Every kernel that a training asks for, compiled for GPUs that need not be there: `python compile_kernels.py 80 90`.

A training is gone through with kernels that only note what they were asked; then each variant is compiled. Muon's must
not spill registers, nor attention's but where it is told to do with few.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vitral.data.augment import Augment
from vitral.data.autoaugment import Policy
from vitral.data.preprocess import Preprocessing
from vitral.kernels import encoder
from vitral.kernels import linear as weights
from vitral.kernels import ops as launch
from vitral.kernels.adamw import kernel as adamw_kernels
from vitral.kernels.attention import kernel as attention
from vitral.kernels.augment import autoaugment_kernel as policy_kernels
from vitral.kernels.augment import kernel as vary_kernels
from vitral.kernels.augment import op as vary
from vitral.kernels.block import kernel as rows_kernels
from vitral.kernels.conv_stem import kernel as stem_kernels
from vitral.kernels.conv_stem import op as stem
from vitral.kernels.cross_entropy import kernel as judge_kernels
from vitral.kernels.cross_entropy import op as judge
from vitral.kernels.embed import kernel as embed_kernels
from vitral.kernels.embed import op as embed
from vitral.kernels.fp8_wgrad import kernel as columns_kernels
from vitral.kernels.fp8_wgrad import op as columns
from vitral.kernels.layernorm_gelu import kernel as kernels
from vitral.kernels.muon import kernel as muon_kernels
from vitral.models.variants.hybrid import ConvStem, ConvStemConfig
from vitral.models.vit import ViT, ViTConfig
from vitral.training.optim import muon
from vitral.training.optim.adamw import AdamW

TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
KERNELS = ("norm", "norm_back", "act", "act_back", "turn", "turn_back", "short", "short_back", "totals", "shrink")
OF_COLUMNS = ("turned", "normed", "gelu_back", "shares")
OF_ATTENTION = ("attend", "queries_back", "keys_back", "cast")
OF_MUON = ("look_ahead", "normalise", "move")
OF_STEM = ("patches", "norm_relu", "norm_relu_back")
OF_EMBEDDING = ("embed", "unfold")
OF_ROWS = ("rows", "expand")
VARIED = [Augment(shift=2, flip=True, cutmix=1.0, mixed=0.4), Augment(shift=2, border="black"), Augment(cutmix=1.0)]
VARIED += [Augment(shift=2, policy=Policy(name="randaugment"), cutmix=1.0), Augment(jitter=0.2)]
MODELS: list[dict[str, Any]] = [
    {"qk_norm": True, "positions": "learned+rotary", "pooling": "mean", "gelu": "tanh", "drop_path": 0.2},
    {"pooling": "mean"},
    {"image_size": (64, 64)},
    {"image_size": (64, 64), "qk_norm": True, "positions": "rotary", "qkv_bias": False},
    {"image_size": (64, 64), "positions": "rotary", "width": 768, "heads": 12},
    {"image_size": (64, 64), "qk_norm": True, "positions": "rotary", "pooling": "mean"},
    {"image_size": (40, 40), "width": 96, "heads": 4, "qkv_bias": False},
    {"image_size": (224, 224), "patch_size": 16, "width": 768, "heads": 12},
    {"pooling": "mean", "width": 768, "heads": 12, "gelu": "tanh"},
    {"pooling": "mean", "width": 1024, "heads": 16, "image_size": (64, 64)},
]


class Noting:
    """In a kernel's place: what it was asked with."""

    def __init__(self, kernel: Any, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **named: self.calls.append((self.kernel, given, named))


def train(fp8: bool, spare: int, **changes: Any) -> None:
    sizes = {"image_size": (32, 32), "patch_size": 4, "classes": 10, "width": 256, "depth": 2, "heads": 4}
    model = ViT(ViTConfig(**sizes | changes)).train()
    tokens = model.embed(torch.zeros(4, 3, *model.config.image_size), model.config.grid).detach().requires_grad_()
    front, wide = model.config.pooling == "class", fp8 and model.config.width >= weights.WIDE
    fused = encoder.FusedEncoder(model.encoder, fp8, spare=spare, front=front, columns=wide)
    fused(tokens, model.config.grid).sum().backward()
    with torch.no_grad():
        fused(tokens, model.config.grid)


@torch.no_grad()
def answer(width: int, heads: int, gelu: str) -> None:
    """With what only answers have: tokens from pixels, and blocks in one kernel where they are narrow."""
    config = ViTConfig(image_size=(224, 224), patch_size=16, classes=10, width=width, heads=heads, depth=2, gelu=gelu)
    model = ViT(config).bfloat16().eval()
    seen = Preprocessing(image_size=(224, 224), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    tokens = embed.Embed(model, seen)(torch.zeros(1, 3, 224, 224, dtype=torch.uint8))
    embed.unfolded(torch.zeros(1, 3, 224, 224).bfloat16(), 16, 1)
    embed.tokens_of(
        torch.zeros(1, 3, 224, 224).bfloat16(), model.patch_embedding.project.weight, *embed.parts(model), 16
    )
    many = 0 if launch.narrow(width, 4 * width) else None
    blocks = encoder.FusedEncoder(model.encoder, front=True, spare=0, rows=many)
    blocks(tokens, config.grid)
    blocks.there_and_back(tokens, config.grid)
    if launch.expands(width, 4 * width):
        encoder.FusedEncoder(model.encoder, fp8=True, front=True, rows=0)(tokens, config.grid)


def step_of_adamw(halting: bool) -> None:
    tensors = [torch.zeros(256, 128, 3, 3), *(torch.zeros(256) for _ in range(50)), torch.zeros(10)]
    optimizer = AdamW(tensors, lr=torch.tensor(0.1), fused=True)
    optimizer.found_inf = torch.zeros(()) if halting else None
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    with torch.no_grad():
        optimizer.step_with_kernel(optimizer.moving())


def step_of_muon(width: int, depth: int, halting: bool) -> None:
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    matrices = [torch.empty(shape) for _ in range(depth) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.empty_like(matrix)
    groups: list[dict[str, Any]] = [
        {"params": matrices[index::4], "parts": 3 if index == 0 else 1, "lr": torch.ones(())} for index in range(4)
    ]
    optimizer = muon.Muon(groups, lr=0.0, weight_decay=0.1)
    optimizer.found_inf = torch.zeros(()) if halting else None
    optimizer.step_with_kernels([(group, group["params"]) for group in optimizer.param_groups])


def vary_images(augment: Augment, mixing: torch.Tensor | None) -> None:
    images, labels = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    vary.vary(augment, torch.zeros(3, 256).bfloat16(), 10, images, labels, torch.Generator(), mixing)


def type_of(value: Any) -> str:
    return TYPES[value.dtype] if isinstance(value, torch.Tensor) else {int: "i32", float: "fp32"}[type(value)]


def divides(value: Any) -> bool:
    """By 16, as addresses do."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def described(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The types of its arguments, those that are known when it is compiled, and what divides by 16."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        value = given[index] if index < len(given) else named[name]
        if index >= len(given) or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[index,] = "constexpr", value
            continue
        if isinstance(value, tuple):
            signature[name] = tuple(type_of(one) for one in value)
            aligned = [at for at, one in enumerate(value) if divides(one)]
            attributes |= {(index, at): [["tt.divisibility", 16]] for at in aligned}
            continue
        signature[name] = type_of(value)
        if divides(value):
            attributes[index,] = [["tt.divisibility", 16]]
    return {"fn": kernel, "signature": signature, "constexprs": constants, "attrs": attributes}


def spilled(cubin: bytes) -> int:
    """Bytes beside the registers, which did not suffice."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack, local = re.findall(r"STACK:(\d+)", said), re.findall(r"LOCAL:(\d+)", said)
    assert stack, said
    return max(int(number) for number in stack + local)


def main(capabilities: list[int]) -> None:
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    of_modules = (
        (kernels, KERNELS), (attention, OF_ATTENTION), (stem_kernels, OF_STEM), (columns_kernels, OF_COLUMNS),
    )  # fmt: skip
    for module, names in of_modules:
        for name in names:
            setattr(module, name, Noting(getattr(module, name), calls))
    weights.scaled = lambda x, w, bias=None, out=None: (
        x.norms.new_zeros(len(x.numbers), len(w.numbers)).bfloat16(),
        (x.norms, w.norms),
    )
    columns.product = lambda dy, x, *scales: torch.zeros(len(dy), len(x))
    for fp8, spare, changes in itertools.product((False, True), (0, 2**25), MODELS):
        train(fp8, spare, **changes)
    for widths in ((64, 128, 256), (48, 96, 192)):
        plain = ConvStem(ConvStemConfig(widths=widths, strides=(1, 2, 2)), 3, 1e-6)
        stem.FusedStem(plain)(torch.zeros(4, 3, 32, 32)).sum().backward()
    for module, names in ((rows_kernels, OF_ROWS), (embed_kernels, OF_EMBEDDING)):
        for name in names:
            setattr(module, name, Noting(getattr(module, name), calls))
    for width, heads, gelu in ((192, 3, "exact"), (256, 4, "tanh"), (384, 6, "exact"), (768, 12, "exact")):
        answer(width, heads, gelu)
    vary_kernels.vary = Noting(vary_kernels.vary, calls)
    policy_kernels.operate = Noting(policy_kernels.operate, calls)
    for augment, mixing in itertools.product(VARIED, (None, torch.ones((), dtype=torch.bool))):
        vary_images(augment, mixing)
    judge_kernels.judge = Noting(judge_kernels.judge, calls)
    adamw_kernels.adamw = Noting(adamw_kernels.adamw, calls)
    for number, smoothing in itertools.product((torch.bfloat16, torch.float32), (0.0, 0.1)):
        judge.Judged.apply(torch.zeros(256, 10, dtype=number), torch.zeros(256, 10), torch.arange(256), smoothing)
    for halting in (True, False):
        step_of_adamw(halting)
    for name in OF_MUON:
        setattr(muon_kernels, name, Noting(getattr(muon_kernels, name), calls))
    muon.bf16_is_faster = lambda *_: True
    muon.newton_schulz = lambda x: x
    for width, depth, halting in ((256, 6, True), (256, 6, False), (768, 12, True), (192, 12, True), (20, 1, True)):
        step_of_muon(width, depth, halting)
    assert {kernel.__name__ for kernel, _, _ in calls} == {
        *KERNELS, *OF_ATTENTION, *OF_COLUMNS, *OF_MUON, *OF_STEM, "vary", "operate", "judge", "adamw",
        *OF_ROWS, *OF_EMBEDDING,
    }  # fmt: skip
    done = set()
    for kernel, given, named in calls:
        options = {name: named[name] for name in ("num_warps", "maxnreg", "enable_fp_fusion") if name in named}
        source = described(kernel, given, named)
        if (variant := f"{kernel.__name__} {source} {options}") in done:
            continue
        done.add(variant)
        for capability in capabilities:
            of_fp8 = "*fp8e4nv" in source["signature"].values() or kernel.__name__ in OF_COLUMNS[:3]
            if capability >= 89 or not of_fp8:
                made = triton.compile(ASTSource(**source), target=GPUTarget("cuda", capability, 32), options=options)
                fits = kernel.__name__ in OF_MUON + OF_ATTENTION + OF_STEM and "maxnreg" not in options
                assert not (fits and spilled(made.asm["cubin"])), variant
    print(len(done))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
