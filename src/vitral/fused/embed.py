"""A ViT's first tokens straight from 8-bit pixels: nothing as large as the pixels is written on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.fused import embed_kernels
from vitral.fused.ahead import launcher
from vitral.fused.trial import largest, reason_against
from vitral.hardware import Hardware
from vitral.vit import PatchEmbedding, ViT

ROWS, PIECE = 128, 64  # patches of a program, and how many of their pixels pass by at once
OFF = 0.02  # by what share tokens may be off: what bf16 rounds

Seen = Callable[[Tensor], Tensor]  # uint8 images as a model takes them


def embedding_of(model: ViT, preprocessing: Preprocessing, hardware: Hardware, seen: Seen) -> Seen | None:
    """uint8 images of the model's size → tokens, if the kernel knows its patches and gives here what PyTorch gives."""
    config = model.config
    known = type(model).embed is ViT.embed and type(model.patch_embedding) is PatchEmbedding
    sizes = config.channels * config.patch_size**2 % PIECE == 0 == config.width % 16
    if not (known and sizes and preprocessing.image_size == config.image_size):
        return None
    embed = Embed(model, preprocessing)
    before = hardware.random_state()
    reason = reason_against(partial(difference, embed, model, hardware, seen), OFF)
    hardware.set_random_state(before)
    return None if reason else embed


def difference(embed: Seen, model: ViT, hardware: Hardware, seen: Seen) -> float:
    shape = (3, model.config.channels, *model.config.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=hardware.device)
    with torch.no_grad():
        return largest([embed(images)], [model.embed(seen(images), model.config.grid)])


class Embed:
    def __init__(self, model: ViT, preprocessing: Preprocessing) -> None:
        config, patches = model.config, model.patch_embedding.project
        device, each = patches.weight.device, config.patch_size**2
        mean, std = (torch.tensor(v, device=device) * 255 for v in (preprocessing.mean, preprocessing.std))
        self.config, self.weight = config, patches.weight.detach()
        self.scale, self.shift = (v.repeat_interleave(each).contiguous() for v in (1 / std, -mean / std))
        with torch.no_grad():
            nothing = torch.zeros(1, config.channels, *config.image_size, device=device, dtype=self.weight.dtype)
            self.front = model.embed(nothing, config.grid)[:, : config.prefix].clone()
            rows = patches.bias.float().expand(math.prod(config.grid), -1)
            if model.position_embedding is not None:
                rows = rows + model.position_embedding.rows(config.grid)[0, -len(rows) :].float()
            self.table = rows.contiguous()

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        B, (C, H, W), (N, D) = len(images_BCHW), images_BCHW.shape[1:], self.table.shape
        front = self.front.shape[1]
        tokens = self.weight.new_empty(B, front + N, D)
        if front:
            tokens[:, :front] = self.front
        columns = min(D & -D, 128)  # a power of two that divides them
        launcher(embed_kernels.embed, (D // columns, triton.cdiv(B * N, ROWS)))(
            images_BCHW.contiguous(), self.scale, self.shift, self.weight, self.table, tokens, B * N,
            C=C, H=H, W=W, P=self.config.patch_size, D=D, FRONT=front, ROWS=ROWS, N=columns, PIECE=PIECE, STAGES=3,
            num_warps=8,
        )  # fmt: skip
        return tokens
