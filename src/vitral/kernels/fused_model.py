"""A ViT on a GPU with kernels of our own between the matrix products: `forward` to learn, `answering` to answer.

Imported where a GPU was found, never before: the kernels are written in Triton, which PyTorch brings along there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.kernels.conv_stem.op import FusedStem
from vitral.kernels.embed.op import Seen, embedding_of, learning_embedding_of
from vitral.kernels.encoder import SPARE, FusedEncoder, of, unknown
from vitral.kernels.linear import WIDE
from vitral.kernels.ops import ENOUGH, MANY, act, add_norm, expand, expands, narrow
from vitral.kernels.precompile import compile_ahead
from vitral.kernels.self_check import Say, largest, reason_against
from vitral.models.variants.hybrid import ConvStem, HybridEmbedding
from vitral.models.vit import Grid, PatchEmbedding, ViT

__all__ = ["answering", "forward", "why_not"]

TABLE, BIAS = "model.position_embedding.table", "model.patch_embedding.project.bias"
MODEST = 224 * 224  # pixels of images of which sixteen are tried at once
OFF_STEM = 0.3  # gradients through ReLUs, some of which bf16 turns on or off
OFF_COLUMNS = 0.2  # of a matrix's gradient: FP8 rounds what it is the product of once more, by 2 to 4 %
OFF_EXPANDED = 0.05  # of the hidden numbers: each way rounds them to FP8 for itself, by 2.7 %
OFF = {False: 0.1, True: 0.5}  # of the norm: more than bf16's, or FP8's, rounding adds up to in tens of blocks


def why_not(model: ViT, hardware: Hardware, learning: bool = True, batch: int = 16) -> str:
    """Why this model is not computed with fused kernels on this machine; empty where it is.

    They are compared with the plain encoder first. `batch`: how many images a step will have.
    """
    if reason := unknown(model, hardware.fp8, learning):
        return f"the model has {reason}"
    compare = partial(difference, model, hardware, learning, batch)
    return tried_out(model, hardware, partial(rehearse, model, hardware, learning, batch), compare, OFF[hardware.fp8])


def tried_out(
    model: ViT, hardware: Hardware, rehearsal: Callable[[], None], compare: Callable[[], float], most: float
) -> str:
    """What speaks against it here; the model and all random numbers are afterwards as they were."""
    before, training = hardware.random_state(), model.training
    compile_ahead(rehearsal)
    try:
        model.eval()
        return reason_against(compare, most)
    finally:
        model.train(training)
        hardware.set_random_state(before)


def columns_agree(model: ViT, hardware: Hardware, batch: int, say: Say) -> bool:
    """Whether gradients of weights are products of FP8 too: where that is worth it, and gives what bf16 gives."""
    if not (hardware.fp8 and model.config.width >= WIDE):
        return False
    reason = "they sum over multiples of 16 tokens alone"
    if batch * tokens_of(model) % 16 == 0:
        rehearsal = partial(rehearse, model, hardware, True, batch, columns=True)
        compare = partial(difference_of_columns, model, hardware, batch)
        reason = tried_out(model, hardware, rehearsal, compare, OFF_COLUMNS)
    if reason:
        say(f"gradients of weights are products of bf16: {reason}")
    return not reason


def rows_of(
    model: ViT, hardware: Hardware, learning: bool = False, batch: int = 16, say: Say = lambda sentence: None
) -> int | None:
    """From how many tokens on all of a block but attention is one kernel forwards: it is for narrow ones, and for
    training that keeps little and drops no branches. In FP8, it is about expansion and GELU, in answers alone."""
    config = model.config
    sizes = config.width, config.hidden_width
    keeps = learning and (config.drop_path or batch * tokens_of(model) * config.hidden_width <= SPARE)
    if hardware.fp8:
        alone = config.depth == 1 and asks_first(model)  # a block with nothing to expand but a first token
        if learning or alone or not expands(*sizes):
            return None
        compare, most, pays = partial(difference_of_expansion, model, hardware), OFF_EXPANDED, ENOUGH
    elif keeps or not narrow(*sizes, learning):
        return None
    else:
        compare, most, pays = partial(difference, model, hardware, learning, batch, rows=0), OFF[False], MANY
    rehearsal = partial(rehearse, model, hardware, learning, batch, rows=0)
    if reason := tried_out(model, hardware, rehearsal, compare, most):
        say(f"blocks are computed kernel by kernel: {reason}")
    return None if reason else pays


@torch.no_grad()
def difference_of_expansion(model: ViT, hardware: Hardware) -> float:
    """Between hidden numbers of the first block that one kernel gives, and a product with GELU behind it."""
    encoder = compared(model, hardware, tried(model), tried(model))
    block, tanh = encoder.blocks[0], model.config.gelu == "tanh"
    layer, tokens = block.mlp.expand, tried(model) * tokens_of(model)
    x = torch.randn(tokens, model.config.width, device=hardware.device).to(encoder.number)
    x8 = add_norm(x, None, None, None, of(block.norm2), fp8=True, plain=False).small
    assert x8 is not None
    h, known = encoder.weights.product(None, x8, layer.weight)
    both = expand(x8, encoder.weights.small[layer.weight], layer.bias, tanh), act(h, layer.bias, tanh, known)[1]
    once, twice = ([g8.numbers.float() * g8.scales] for g8 in both if g8 is not None)
    return largest(once, twice)


def tokens_of(model: ViT) -> int:
    return model.config.prefix + model.config.grid[0] * model.config.grid[1]


def difference_of_columns(model: ViT, hardware: Hardware, batch: int) -> float:
    """Between gradients of weights that are products of FP8 and those of bf16: the largest share of a matrix."""
    images = tried(model)
    tokens = torch.randn(images, tokens_of(model), model.config.width, device=hardware.device)
    dy = torch.randn_like(tokens)[:, : 1 if asks_first(model) else None]
    found = []
    for columns in (True, False):
        encoder = compared(model, hardware, images, batch, columns)
        given = torch.autograd.grad(encoder(tokens, model.config.grid), encoder.parameters, dy.to(encoder.number))
        found.append([gradient for gradient in given if gradient.ndim == 2])
    return largest(*found)


@torch.no_grad()
def rehearse(
    model: ViT, hardware: Hardware, learning: bool, batch: int, columns: bool = False, rows: int | None = None
) -> None:
    """The ways through the encoder of what `difference` computes, and of the batches afterwards: with few images, but
    as many more than a multiple of 16. Triton compiles anew for a multiple of 16, and for 1."""
    config = model.config
    few = batch if batch < 32 else 16 + batch % 16
    afterwards = ((few, model.training),) if learning else ((1, False), (2, False))
    for images, training in ((tried(model), False), *afterwards):
        encoder = compared(model.train(training), hardware, images, batch, columns, rows)
        z = torch.empty(images, tokens_of(model), config.width, device=hardware.device)
        encoder.there_and_back(z, config.grid) if learning else encoder(z, config.grid)


def tried(model: ViT) -> int:
    """Images whose tokens are a multiple of 16: the very kernels that training takes."""
    H, W = model.config.image_size
    return 16 if H * W <= MODEST else 2


def compared(
    model: ViT, hardware: Hardware, images: int, batch: int, columns: bool = False, rows: int | None = None
) -> FusedEncoder:
    """That keeps of so many images what it would of the whole batch."""
    number, spare = torch.bfloat16 if hardware.precision == "bf16" else torch.float32, SPARE * images // batch
    return FusedEncoder(model.encoder, hardware.fp8, number, spare, asks_first(model), columns, rows)


def difference(model: ViT, hardware: Hardware, learning: bool, batch: int = 16, rows: int | None = None) -> float:
    """Between the fused encoder and the plain one, for random tokens: the largest of four shares, that of answers, of
    the tokens' gradients, of all matrices' and of all vectors' together. What is not a number is infinitely far off."""
    C, (H, W), grid, images = model.config.channels, model.config.image_size, model.config.grid, tried(model)
    with torch.no_grad():
        shaped = model.embed(torch.zeros(images, C, H, W).to(next(model.parameters())), grid)
    tokens, dy = torch.randn_like(shaped), torch.randn_like(shaped)[:, : 1 if asks_first(model) else None]
    found = []
    for encoder in (compared(model, hardware, images, batch, rows=rows), model.encoder):
        given = tokens.clone().requires_grad_(learning)
        with torch.set_grad_enabled(learning), hardware.autocast():
            out = encoder(given, grid)[:, : dy.shape[1]].to(dy)
        found.append([out.detach()])
        if learning:
            tokens_too, *rest = torch.autograd.grad(out, [given, *model.encoder.parameters()], dy)
            matrices, vectors = ([d.flatten() for d in rest if (d.ndim == 2) == flat] for flat in (True, False))
            found[-1] += [tokens_too, torch.cat(matrices), torch.cat(vectors)]
    return largest(*found)


def asks_first(model: ViT) -> bool:
    """Whether the head is told about the first token alone."""
    return model.config.pooling == "class"


class Embedding(nn.Module):
    """The first step of a ViT, as a module of its own: images, or what a stem made of them → tokens."""

    def __init__(self, model: ViT, stem: bool = True) -> None:
        super().__init__()
        self.model = (
            model
            if stem
            else with_modules(model, patch_embedding=with_modules(model.patch_embedding, stem=nn.Identity()))
        )

    def forward(self, images_BCHW: Tensor, grid: Grid) -> Tensor:
        return self.model.embed(images_BCHW, grid)


def with_modules(module: Any, **others: nn.Module) -> Any:
    """The same module, its parameters too, with other modules by these names."""
    same = copy.copy(module)
    same._modules = module._modules | others
    return same


def stem_of(model: ViT, hardware: Hardware, say: Say = lambda sentence: None) -> FusedStem | None:
    """The stem with our kernels, if it has one that they know, and if they give here what PyTorch gives."""
    plain = getattr(model.patch_embedding, "stem", None)
    if not isinstance(plain, ConvStem) or not all(parameter.requires_grad for parameter in plain.parameters()):
        return None
    before = hardware.random_state()
    reason = reason_against(partial(stem_difference, plain, model.config.channels, model.config.image_size), OFF_STEM)
    hardware.set_random_state(before)
    if reason:
        say(f"the stem is left to the compiler: {reason}")
    return None if reason else FusedStem(plain)


def stem_difference(plain: ConvStem, channels: int, size: tuple[int, int]) -> float:
    """The same for a stem: the largest share of what it gives and of its gradients."""
    found, images = [], torch.randn(16, channels, *size, device=next(plain.parameters()).device)
    for stem in (FusedStem(plain), plain):
        out = stem(images).float()
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), list(plain.parameters()))])
    return largest(*found)


def forward(
    model: ViT, hardware: Hardware, say: Say = lambda sentence: None, batch: int = 16
) -> Callable[[Tensor], Tensor]:
    """Images → logits, for training. What is neither encoder nor patches or a small stem is PyTorch's, in bf16."""
    columns = columns_agree(model, hardware, batch, say)
    rows = rows_of(model, hardware, True, batch, say)
    encoder = FusedEncoder(model.encoder, fp8=hardware.fp8, front=asks_first(model), columns=columns, rows=rows)
    stem = stem_of(model, hardware, say)
    embedding = Embedding(model, stem=stem is None)
    outside = {name: p for name, p in embedding.named_parameters() if not name.startswith("model.encoder.")}
    biased = adds_bias_everywhere(model)

    def embed(images_BCHW: Tensor, grid: Grid) -> Tensor:
        of: dict[str, Tensor] = dict(outside)
        if biased and grid == model.config.grid:  # added once, and the sum over all images taken once
            of[TABLE] = outside[TABLE] + outside[BIAS]
            of[BIAS] = torch.zeros_like(outside[BIAS])
        rounded = {name: parameter.bfloat16() for name, parameter in of.items()}
        given = images_BCHW.bfloat16() if stem is None else stem(images_BCHW)
        return functional_call(embedding, rounded, (given, grid))

    patches = learning_embedding_of(model, hardware, say) if stem is None else None
    if stem is None and model.patch_embedding.__class__ is not PatchEmbedding:  # another stem has enough to fuse
        embed = hardware.compiled(embed)

    def fused(images_BCHW: Tensor) -> Tensor:
        grid = model.check(images_BCHW)
        if torch.is_grad_enabled():
            encoder.weights.round_beside()
        with torch.autocast(images_BCHW.device.type, torch.bfloat16, enabled=False):
            ours = patches if grid == model.config.grid else None
            tokens = encoder(embed(images_BCHW, grid) if ours is None else ours(images_BCHW), grid)
        with torch.autocast(images_BCHW.device.type, torch.bfloat16):
            return model.head(model.pool(tokens))

    return fused


def adds_bias_everywhere(model: ViT) -> bool:
    """The patches' bias goes to each token that has a row in a learned table of positions, and to no other."""
    learned = model.position_embedding is not None and not model.position_embedding.fixed
    plain = type(model.patch_embedding) in (PatchEmbedding, HybridEmbedding)
    return learned and plain and model.class_token is None


def answering(model: ViT, preprocessing: Preprocessing, hardware: Hardware, seen: Seen) -> Callable[[Tensor], Tensor]:
    """uint8 images → logits, for a model that is used for nothing else: with FP8, its large weights are gone."""
    number, front = next(model.parameters()).dtype, asks_first(model)
    rows = rows_of(model, hardware)
    encoder = FusedEncoder(model.encoder, fp8=hardware.fp8, number=number, front=front, rows=rows)
    encoder.weights.let_go(lambda small: hardware.gather([*model.parameters(), *small]))
    embed = embedding_of(model, preprocessing, hardware, seen)

    def answer(images_BCHW: Tensor) -> Tensor:
        grid = model.check(images_BCHW)
        ours = embed if grid == model.config.grid else None
        tokens = model.embed(seen(images_BCHW), grid) if ours is None else ours(images_BCHW)
        return model.head(model.pool(encoder(tokens, grid)))

    return answer
