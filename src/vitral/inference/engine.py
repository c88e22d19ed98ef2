"""The same ViT for asking only: no gradient, no dropout, matrices laid out beforehand, pixels taken as they are.

What is done once, when it is built:
- mean and deviation go into the patch embedding, which then reads the 8-bit pixels themselves;
- 1/√d goes into the queries' weights, layer scale into the matrix before it;
- where the pooling reads the first tokens only (the class token), the last block computes those only;
- for int8: the steps of every column go into the layer norm before it and into the matrix behind it, so that columns
  with large numbers do not spoil the small ones (arXiv 2211.10438 moves them the same way).

Shapes as in vit.py; M = B·T, all tokens of a batch in one matrix.
"""

from __future__ import annotations

import copy
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import cpu_has_bf16, cpu_has_int8, cpu_packs_matrices
from vitral.errors import VitralError
from vitral.inference.int8_calibration import Ranges
from vitral.inference.linear import ByteProduct, FloatProduct, to_bytes
from vitral.models.vit import (
    Encoder,
    EncoderBlock,
    FeedForward,
    Grid,
    MultiHeadAttention,
    PatchEmbedding,
    Turn,
    ViT,
    patchify,
    rotate,
)

Number = Literal["fp32", "bf16", "int8"]
NUMBERS: tuple[Number, ...] = ("fp32", "bf16", "int8")
MOST_APART, WORTH_APART = 8, 1.5  # hidden columns computed apart in fp32, where the largest is so many times the next
CUT = 0.8  # of the largest hidden number: finer steps for the others are worth more (a sixth less error, Ti/16)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}  # of queries, keys and values


def cannot_be_arranged(model: ViT) -> str:
    """Why this model must be run as it is; empty where an Engine can be made of it."""
    if type(model).features is not ViT.features or type(model).forward is not ViT.forward:
        return f"{type(model).__name__} computes its features in its own way"
    if type(model.encoder) is not Encoder:
        return f"{type(model.encoder).__name__} is not the plain encoder"
    for block in model.encoder.blocks:
        for part, kind in ((block, EncoderBlock), (block.attention, MultiHeadAttention), (block.mlp, FeedForward)):
            if type(part) is not kind:
                return f"{type(part).__name__} is not a plain part of an encoder block"
    return "" if cpu_packs_matrices() else "this build of PyTorch has no oneDNN"


def cannot_run_here(number: Number) -> str:
    """Why this CPU should not compute in these numbers; empty where it can."""
    if number == "bf16" and not cpu_has_bf16():
        return "the CPU has no bf16 instructions"
    if number == "int8" and not cpu_has_int8():
        return "the CPU has no 8-bit dot products (AVX-512-VNNI or AMX)"
    return ""


class Engine:
    """`Engine(model, preprocessing, "bf16")(images)`: uint8 images, B C H W → logits, B K, from any thread."""

    def __init__(self, model: ViT, preprocessing: Preprocessing, number: Number, ranges: Ranges | None = None) -> None:
        if why := cannot_be_arranged(model) or cannot_run_here(number):
            raise VitralError(f"this model cannot be arranged for {number}: {why}", "ask the model as it is")
        if number == "int8" and ranges is None:
            raise VitralError("int8 needs to know how large the activations get", "vitral bench RUN measures that")
        self.number, self.channels, self.dtype = number, model.config.channels, DTYPES[number]
        self.shell = copy.copy(model)  # its own parts, but for the patches; the model itself stays as it is
        self.shell._modules = dict(model._modules)
        self.shell.patch_embedding = _patches(model.patch_embedding, preprocessing, number)  # type: ignore[assignment]
        blocks = [block for block in model.encoder.blocks if isinstance(block, EncoderBlock)]
        self.blocks: list[_Block] = [
            _ByteBlock(block, f"blocks.{index}.", ranges)
            if ranges is not None and number == "int8"
            else _FloatBlock(block, self.dtype)
            for index, block in enumerate(blocks)
        ]
        self.read = _tokens_read(model)

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor) -> Tensor:
        return self.shell.head(self.features(images_BCHW))

    @torch.inference_mode()
    def features(self, images_BCHW: Tensor) -> Tensor:
        grid = self.shell.check(images_BCHW)
        return self.shell.pool(self._encode(self.shell.embed(images_BCHW, grid), grid))

    @property
    def nbytes(self) -> int:
        """Of the matrices."""
        shapes = [weight.shape for block in self.shell.encoder.blocks for weight in block.parameters()]
        return sum(math.prod(shape) for shape in shapes) * {"fp32": 4, "bf16": 2, "int8": 1}[self.number]

    def _encode(self, tokens_BTD: Tensor, grid: Grid) -> Tensor:
        encoder, (B, T, D) = self.shell.encoder, tokens_BTD.shape
        turn = None if encoder.rotary_position is None else encoder.rotary_position(grid)
        z_MD = tokens_BTD.reshape(B * T, D)
        for block in self.blocks[:-1]:
            z_MD = block(z_MD, B, T, turn)
        z_MD = self.blocks[-1](z_MD, B, self.read or T, turn)
        return encoder.norm(z_MD.view(B, -1, D))


class Checked:
    """Answers of a quick engine; where its two best labels are close, a surer one is asked and its word counts."""

    def __init__(self, quick: Engine, sure: Engine | Checked, margin: float) -> None:
        self.quick, self.sure, self.margin = quick, sure, margin

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor) -> Tensor:
        logits_BK = self.quick(images_BCHW)
        close_B = self.close(logits_BK)
        if close_B.any():
            logits_BK[close_B] = self.sure(images_BCHW[close_B])
        return logits_BK

    @property
    def nbytes(self) -> int:
        return self.quick.nbytes + self.sure.nbytes

    def close(self, logits_BK: Tensor) -> Tensor:
        """B booleans: the lead of the best label is smaller than the margin."""
        best_B2 = logits_BK.topk(min(2, logits_BK.shape[1]), dim=1).values
        return best_B2[:, 0] - best_B2[:, -1] < self.margin


def margin_of(quick_NK: Tensor, sure_NK: Tensor) -> float:
    """A lead that a quick engine's errors hardly ever overturn: 3.5 deviations of the error in the lead.

    Measured between the quick engine's first label and its next four, on images that both engines answered.
    """
    best = quick_NK.topk(min(5, quick_NK.shape[1]), dim=1).indices
    leads = [logits.gather(1, best)[:, :1] - logits.gather(1, best)[:, 1:] for logits in (quick_NK, sure_NK)]
    errors = (leads[0] - leads[1]).double()
    return 3.5 * float(errors.square().mean().sqrt()) if errors.numel() else 0.0


def _tokens_read(model: ViT) -> int:
    """How many tokens, from the front, the pooling reads; 0: all. Asked of the pooling itself."""
    tokens = torch.randn(1, model.config.prefix + 2, model.config.width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = model.pool(tokens)
        for count in range(1, model.config.prefix + 2):
            if torch.equal(model.pool(tokens[:, :count]), whole):
                return count
    return 0


def _patches(embedding: nn.Module, preprocessing: Preprocessing, number: Number) -> nn.Module:
    plain = type(embedding) is PatchEmbedding
    return _Patches(embedding, preprocessing, number) if plain else _AsItIs(embedding, preprocessing)  # type: ignore


class _AsItIs(nn.Module):
    """Any other way from an image to tokens, behind the normalisation."""

    def __init__(self, embedding: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.embedding, self.preprocessing = embedding, preprocessing

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.embedding(self.preprocessing.normalise(images_BCHW))


class _Patches(nn.Module):
    """((x/255 − mean)/std)·E + b = x·E' + b': the 8-bit pixels of a patch are read as they are."""

    def __init__(self, embedding: PatchEmbedding, preprocessing: Preprocessing, number: Number) -> None:
        super().__init__()
        self.patch_size, self.number, self.dtype = embedding.patch_size, number, DTYPES[number]
        each = embedding.patch_size**2  # pixels of a channel
        mean, std = (
            (torch.tensor(values, dtype=torch.float64) * 255).repeat_interleave(each)
            for values in (preprocessing.mean, preprocessing.std)
        )
        weight, bias = embedding.project.weight.detach().double(), embedding.project.bias.detach().double()
        bias = (bias - weight @ (mean / std)).float()
        weight = (weight / std).float()
        # Measured from the mean pixel, so that rounded weights are not multiplied by large numbers of one sign.
        zero = round(float(mean.mean()))
        self.project = (
            ByteProduct(weight, bias + zero * weight.sum(dim=1), 1.0, zero)
            if number == "int8"
            else FloatProduct(weight, bias, self.dtype)
        )

    def forward(self, images_BCHW: Tensor) -> Tensor:
        patches_BNE = patchify(images_BCHW, self.patch_size)
        B, N, E = patches_BNE.shape
        pixels_ME = patches_BNE.view(B * N, E)
        if self.number != "int8":
            pixels_ME = pixels_ME.to(self.dtype)  # 0 … 255 are exact in bf16
        return self.project(pixels_ME).view(B, N, -1).float()


class _Block:
    """One encoder block on a matrix of tokens. Number types differ in how norms and products are handed on."""

    def __init__(self, block: EncoderBlock, dtype: torch.dtype) -> None:
        attention = block.attention
        self.heads, self.dtype = attention.heads, dtype
        self.norm_q, self.norm_k = attention.norm_q, attention.norm_k
        self.normed = not isinstance(attention.norm_q, nn.Identity)
        self.approximate = block.mlp.gelu.approximate

    def __call__(self, z_MD: Tensor, B: int, read: int, turn: Turn | None) -> Tensor:
        D = z_MD.shape[1]
        qkv_MF = self._qkv(z_MD)
        T = len(z_MD) // B
        q, k, v = qkv_MF.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if read < T:
            q, z_MD = q[:, :, :read], z_MD.view(B, T, D)[:, :read].reshape(-1, D).contiguous()
        z_MD = self._project(z_MD, self._attend(q, k, v, turn, T, read))
        return self._mlp(z_MD)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, turn: Turn | None, T: int, read: int) -> Tensor:
        """B h T d each → M D. Queries come scaled by 1/√d, unless they are normed here."""
        if self.normed:
            d = q.shape[-1]
            q, k = self.norm_q(q.float()) * d**-0.5, self.norm_k(k.float())
        if turn is not None:
            q, k = rotate(q.float(), turn[:, :read] if read < T else turn), rotate(k.float(), turn)
        q, k = q.to(self.dtype), k.to(self.dtype)
        if self.dtype == torch.float32:
            mixed = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:  # oneDNN's bf16 products with the T×T matrix written out beat the fused kernel on AVX-512
            B, h, _, d = k.shape
            scores = torch.bmm(q.reshape(B * h, -1, d), k.reshape(B * h, -1, d).mT)
            mixed = torch.bmm(scores.softmax(dim=-1), v.reshape(B * h, -1, d)).view(B, h, -1, d)
        return mixed.transpose(1, 2).reshape(-1, mixed.shape[1] * mixed.shape[3])  # b h t d -> (b t) (h d)

    def _qkv(self, z_MD: Tensor) -> Tensor:
        raise NotImplementedError

    def _project(self, z_MD: Tensor, mixed_MD: Tensor) -> Tensor:
        raise NotImplementedError

    def _mlp(self, z_MD: Tensor) -> Tensor:
        raise NotImplementedError


def _weights(block: EncoderBlock) -> dict[str, tuple[Tensor, Tensor]]:
    """Matrices and biases of a block in fp32, with 1/√d and the layer scales in them."""
    attention, mlp = block.attention, block.mlp
    layers = {"qkv": attention.qkv, "project": attention.project, "expand": mlp.expand, "contract": mlp.contract}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in layers.items():
        weight = layer.weight.detach().float().clone()
        bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.detach().float().clone()
        scale = {"project": block.residual1.scale, "contract": block.residual2.scale}.get(name)
        if scale is not None:
            weight, bias = weight * scale.detach()[:, None], bias * scale.detach()
        if name == "qkv" and isinstance(attention.norm_q, nn.Identity):
            D = weight.shape[1]
            weight[:D] *= (D // attention.heads) ** -0.5
            bias[:D] *= (D // attention.heads) ** -0.5
        found[name] = weight, bias
    return found


class _FloatBlock(_Block):
    def __init__(self, block: EncoderBlock, dtype: torch.dtype) -> None:
        super().__init__(block, dtype)
        weights = _weights(block)
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv, self.project, self.expand, self.contract = (
            FloatProduct(*weights[name], dtype) for name in ("qkv", "project", "expand", "contract")
        )

    def _qkv(self, z_MD: Tensor) -> Tensor:
        return self.qkv(self.norm1(z_MD).to(self.dtype))

    def _project(self, z_MD: Tensor, mixed_MD: Tensor) -> Tensor:
        return self.project.add_to(z_MD, mixed_MD)

    def _mlp(self, z_MD: Tensor) -> Tensor:
        hidden_MF = self.expand.gelu(self.norm2(z_MD).to(self.dtype), self.approximate)
        return self.contract.add_to(z_MD, hidden_MF)


class _ByteBlock(_Block):
    def __init__(self, block: EncoderBlock, where: str, ranges: Ranges) -> None:
        super().__init__(block, torch.bfloat16)
        weights = _weights(block)
        D = block.norm1.normalized_shape[0]
        qkv, qkv_bias = weights["qkv"]
        project, project_bias = weights["project"]
        # The rows of softmax sum to one, so v's columns can be scaled before it as well as behind it.
        steps = _steps(ranges[where + "attention.project"], project)
        qkv[2 * D :] /= steps[:, None]
        qkv_bias[2 * D :] /= steps
        self.project = ByteProduct(project * steps, project_bias, 1.0, 128)
        steps = _steps(ranges[where + "attention.qkv"], qkv)
        self.norm1 = _norm_in_steps(block.norm1, steps)
        self.qkv = ByteProduct(qkv * steps, qkv_bias, 1.0, 128, out=torch.bfloat16)
        expand, expand_bias = weights["expand"]
        steps = _steps(ranges[where + "mlp.expand"], expand)
        self.norm2 = _norm_in_steps(block.norm2, steps)
        self.expand = ByteProduct(expand * steps, expand_bias, 1.0, 128)
        contract, contract_bias = weights["contract"]
        low, high = ranges[where + "mlp.contract"]
        apart, bottom, top = hidden_range(low, high)
        self.step = (top - bottom) / 255
        self.zero = round(-bottom / self.step)
        self.apart = None  # hidden numbers too large for bytes: their two skinny products stay in fp32
        if len(apart):
            self.apart = (expand[apart] * steps, expand_bias[apart], contract[:, apart].T.contiguous())
            contract = contract.index_fill(1, apart, 0.0)
        self.contract = ByteProduct(contract, contract_bias, self.step, self.zero)

    def _qkv(self, z_MD: Tensor) -> Tensor:
        return self.qkv(to_bytes(self._norm(z_MD, self.norm1)))

    def _project(self, z_MD: Tensor, mixed_MD: Tensor) -> Tensor:
        return self.project.add_to(z_MD, to_bytes(mixed_MD))

    def _mlp(self, z_MD: Tensor) -> Tensor:
        normed_MD = self._norm(z_MD, self.norm2)
        if self.apart is not None:
            weight, bias, back = self.apart
            z_MD = torch.addmm(z_MD, F.gelu(F.linear(normed_MD, weight, bias), approximate=self.approximate), back)
        hidden_MF = self.expand.gelu_to_bytes(to_bytes(normed_MD), self.approximate, self.step, self.zero)
        return self.contract.add_to(z_MD, hidden_MF)

    @staticmethod
    def _norm(z_MD: Tensor, norm: tuple[Tensor, Tensor, float]) -> Tensor:
        return torch.layer_norm(z_MD, (z_MD.shape[1],), *norm)


def _steps(low_high_2K: Tensor, weight_NK: Tensor) -> Tensor:
    """The step of each column of x, K: half of a column's size is left to x, half is moved into W."""
    largest_K = low_high_2K.abs().amax(dim=0).clamp_min(1e-5)
    moved_K = (largest_K / weight_NK.abs().amax(dim=0).clamp_min(1e-5)).sqrt()
    return moved_K * (largest_K / moved_K).amax() / 127


def hidden_range(low_F: Tensor, high_F: Tensor) -> tuple[Tensor, float, float]:
    """Which few columns of the hidden layer stay out of the bytes, and the range of all others.

    Behind GELU a handful of columns can be thirty times as large as the rest (arXiv 2402.17762); one step for all would
    then leave nothing of the rest.
    """
    ordered = high_F.sort(descending=True).values
    few = min(MOST_APART, len(high_F) - 1)
    apart = (
        (high_F > ordered[few]).nonzero().flatten() if ordered[0] > WORTH_APART * ordered[few] else high_F.new_empty(0)
    )
    apart = apart.long()
    rest = torch.ones(len(high_F), dtype=torch.bool).index_fill(0, apart, False)
    return apart, min(float(low_F[rest].min()), -1e-6), max(float(high_F[rest].max()) * CUT, 1e-6)


def _norm_in_steps(norm: nn.LayerNorm, steps_D: Tensor) -> tuple[Tensor, Tensor, float]:
    return norm.weight.detach() / steps_D, norm.bias.detach() / steps_D, norm.eps
