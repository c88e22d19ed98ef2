"""The Vision Transformer, from pixels to logits, in data-flow order.

    images ──▶ PatchEmbedding ──▶ ClassToken + PositionEmbedding ──▶ Encoder ──▶ ClassificationHead ──▶ logits
    B C H W       B N D              B T D                            B T D        B D                  B K

"An Image is Worth 16x16 Words", Dosovitskiy et al., ICLR 2021 (arXiv 2010.11929): "the paper" below, and the
equation numbers refer to it. This file depends on PyTorch only.

Shapes:  B images   C channels   H, W pixels   P patch side   N = HW/P² patches   T tokens: patches and prefix tokens
         D width    h heads      d = D/h head width           M hidden width      K classes
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pooling = Literal["class", "mean", "attention"]
Positions = Literal["learned", "sincos", "rotary", "learned+rotary", "none"]
Head = Literal["linear", "mlp"]
Resampling = Literal["bicubic-antialias", "bicubic", "bicubic-corners", "bilinear-corners", "bilinear-antialias"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu"]
Rope = Literal["patch", "centered", "index", "scaled-index", "scaled-index-1"]
Grid = tuple[int, int]  # patches down, patches across
LEARNED_VECTORS = ("token", "table", "registers", "probe")  # parameter-name suffixes of tokens and positions
MAX_SIZE = 2**20  # of widths, depth and patches: more is a mistake, or a damaged file
RopeTable = Tensor  # cosines and sines of the rotary position angles, 2 T d/2


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Architecture of a Vision Transformer. The defaults are the paper's ViT-B/16 (table 1)."""

    image_size: tuple[int, int] = (224, 224)  # height and width in pixels
    patch_size: int = 16  # side of a square patch in pixels
    channels: int = 3  # 3: RGB, 1: greyscale
    num_classes: int = 1000  # size of the output
    width: int = 768  # embedding dimension D
    depth: int = 12  # number of encoder blocks
    heads: int = 12  # attention heads per block
    mlp_width: int | None = None  # hidden dimension of the MLP; 4·width if omitted
    pooling: Pooling = "class"  # input of the head: class token, mean of the patches, or attention pooling
    class_token: bool | None = None  # whether there is a class token; if omitted, only if it is pooled
    positions: Positions = "learned"  # position embedding
    position_resampling: Resampling = "bicubic-antialias"  # resampling of learned positions for images of another size
    rope: Rope = "patch"  # convention for coordinates and frequencies of rotary positions, see ROPE
    rope_base: float = 100.0  # ratio of the largest to the smallest frequency of rotary positions
    registers: int = 0  # number of registers, extra learned tokens (arXiv 2309.16588)
    register_positions: bool = False  # learned positions of the registers; they have none by default
    dropout_embedding: float = 0.0  # dropout rate after the position embedding
    dropout_attention: float = 0.0  # dropout rate of the attention weights
    dropout: float = 0.0  # dropout rate after the attention projection and both MLP layers
    patch_drop: float = 0.0  # share of the patches that each training step leaves out (arXiv 2208.07220)
    drop_path: float = 0.0  # stochastic depth: 0 in the first block, this rate in the last (arXiv 1603.09382)
    layer_scale: float | None = None  # initial LayerScale value; no LayerScale if omitted (arXiv 2103.17239)
    qk_norm: bool = False  # layer norm of queries and keys (arXiv 2302.05442)
    qkv_bias: bool = True  # bias of the query, key and value projections
    key_bias: bool = True  # bias of the key projection; without it, queries and values still have one (BEiT, DINOv3)
    pre_norm: bool = False  # layer norm before the first block, and no bias of the patch embedding (CLIP)
    final_norm: bool = True  # layer norm after the last block
    head: Head = "linear"  # classification head: one linear layer, or a tanh layer before it
    activation: Activation = "gelu"  # activation of the MLP; gelu_tanh approximates gelu, quick_gelu: x·sigmoid(1.702x)
    norm_eps: float = 1e-6  # epsilon of the layer norms

    def __post_init__(self) -> None:
        def require(names: str, types: Any, is_valid: Callable[[Any], bool], expected: str) -> None:
            for name in names.split():
                if not (isinstance(value := getattr(self, name), types) and is_valid(value)):
                    raise ValueError(f"{name} must be {expected}, got {value!r}")

        require("image_size", tuple, lambda sides: [*map(type, sides)] == [int, int], "(height, width) as integers")
        sizes = "patch_size channels num_classes width depth heads"
        require(sizes, int, lambda n: 1 <= n <= MAX_SIZE, f"an integer from 1 to {MAX_SIZE:,}")
        optional = f"an integer from 1 to {MAX_SIZE:,} or None"
        require("mlp_width", int | None, lambda n: n is None or 1 <= n <= MAX_SIZE, optional)
        require("registers", int, lambda n: 0 <= n <= MAX_SIZE, f"an integer from 0 to {MAX_SIZE:,}")
        rates = "dropout_embedding dropout_attention dropout patch_drop drop_path"
        require(rates, int | float, lambda p: 0 <= p < 1, "at least 0 and less than 1")
        require("layer_scale", int | float | None, lambda s: s is None or s > 0, "greater than 0 or None")
        require("norm_eps rope_base", int | float, lambda e: e > 0, "greater than 0")
        flags = "qk_norm qkv_bias key_bias pre_norm final_norm register_positions"
        require(flags, bool, lambda _: True, "True or False")
        expected = "True, False or None, and not False with class pooling"
        require("class_token", bool | None, lambda c: c is not False or self.pooling != "class", expected)
        choices = {"pooling": Pooling, "positions": Positions, "head": Head, "activation": Activation}
        for name, options in (choices | {"position_resampling": Resampling, "rope": Rope}).items():
            require(name, str, get_args(options).__contains__, f"one of {', '.join(get_args(options))}")
        divisor = math.lcm(
            self.heads * (4 if "rotary" in self.positions else 1), 4 if self.positions == "sincos" else 1
        )
        require("width", int, lambda D: D % divisor == 0, f"a multiple of {divisor} (heads, positions)")
        check_divisible(self.image_size, self.patch_size)
        if math.prod(self.image_size) > MAX_SIZE * self.patch_size**2:
            raise ValueError(
                f"image_size must give at most {MAX_SIZE:,} patches, got {self.grid[0]}x{self.grid[1]} patches"
            )

    @property
    def grid(self) -> Grid:
        return self.grid_for(*self.image_size)

    def grid_for(self, height: int, width: int) -> Grid:
        """Patches down and across in images of this size."""
        return height // self.patch_size, width // self.patch_size

    def margin_for(self, height: int, width: int) -> int:
        """Pixels between the outermost patches and the image border; nonzero only for hybrids without SAME padding."""
        return (height - self.grid_for(height, width)[0] * self.patch_size) // 2

    @property
    def has_class_token(self) -> bool:
        return self.pooling == "class" if self.class_token is None else self.class_token

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: the class token, if any, and the registers."""
        return self.has_class_token + self.registers

    @property
    def num_tokens(self) -> int:
        """Tokens of an image of `image_size`."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def hidden_width(self) -> int:
        return self.mlp_width if self.mlp_width is not None else 4 * self.width


def check_divisible(image_size: tuple[int, int], patch_size: int) -> None:
    for side, pixels in zip(("height", "width"), image_size, strict=True):
        if pixels < 1 or pixels % patch_size:
            below = pixels - pixels % patch_size
            nearby = f"{below} or {below + patch_size}" if below > 0 else f"{patch_size}"
            raise ValueError(f"image {side} {pixels} is not divisible by the patch size {patch_size}; try {nearby}")


def patchify(images_BCHW: Tensor, patch_size: int) -> Tensor:
    """Cut images into flattened patches in row-major order: B C H W -> B N CPP."""
    B, C, H, W = images_BCHW.shape
    P = patch_size
    patches = images_BCHW.reshape(B, C, H // P, P, W // P, P)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * P * P)  # b c (y p) (x q) -> b (y x) (c p q)


class PatchEmbedding(nn.Module):
    """x_p·E (equation 1): a linear projection of each flattened patch, equivalent to a P×P convolution of stride P."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.project = nn.Linear(config.channels * config.patch_size**2, config.width, bias=not config.pre_norm)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.project(patchify(images_BCHW, self.patch_size))


class ClassToken(nn.Module):
    """x_class (equation 1): one learned vector, prepended to the patches of every image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(1, 1, width))

    def forward(self, tokens_BND: Tensor) -> Tensor:
        return torch.cat([self.token.expand(tokens_BND.shape[0], -1, -1), tokens_BND], dim=1)


class PositionEmbedding(nn.Module):
    """E_pos (equation 1): one vector per position, added to the tokens. Attention alone ignores the order of patches.

    Learned, or the fixed sines and cosines of arXiv 2205.01580; the vectors of the class token and, optionally, of the
    registers come first. For another grid than the trained one, the patches' vectors are resampled (section 3.2).
    """

    table: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid, self.resampling = config.grid, config.position_resampling
        self.num_prefix_rows = config.num_prefix_tokens if config.register_positions else int(config.has_class_token)
        self.fixed = config.positions == "sincos"
        if self.fixed:
            self.register_buffer("table", self.sincos_table(config.grid, config.width), persistent=False)
        else:
            self.table = nn.Parameter(torch.empty(1, self.num_prefix_rows + math.prod(config.grid), config.width))

    def forward(self, tokens_BTD: Tensor, grid: Grid) -> Tensor:
        return tokens_BTD + self.table_for(grid)

    def table_for(self, grid: Grid) -> Tensor:
        """The embedding for this grid: 1 T D."""
        if grid == self.grid:
            return self.table
        if self.fixed:
            with self.table.device:  # a CUDA graph must not copy from the host
                return self.sincos_table(grid, self.table.shape[-1]).to(self.table)
        prefix, patches = self.table[:, : self.num_prefix_rows], self.table[:, self.num_prefix_rows :]
        return torch.cat([prefix, resample_positions(patches, self.grid, grid, self.resampling)], dim=1)

    def sincos_table(self, grid: Grid, width: int) -> Tensor:
        """Sines and cosines of column and row with wavelengths from 2π to 2π·10⁴ patches; zeros for prefix tokens."""
        quarter = width // 4
        frequency = 10_000 ** -(torch.arange(quarter) / max(quarter - 1, 1))
        row, column = (axis[:, None] * frequency for axis in patch_coordinates(grid, self.grid).unbind(1))
        table_ND = torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1)
        return F.pad(table_ND, (0, 0, self.num_prefix_rows, 0))[None]


RESAMPLING: dict[Resampling, dict[str, Any]] = {  # libraries differ
    "bicubic-antialias": {"mode": "bicubic", "antialias": True},  # timm
    "bicubic": {"mode": "bicubic"},  # transformers
    "bicubic-corners": {"mode": "bicubic", "align_corners": True},  # torchvision
    "bilinear-corners": {"mode": "bilinear", "align_corners": True},  # vision_transformer, big_vision
    "bilinear-antialias": {"mode": "bilinear", "antialias": True},  # SigLIP 2 NaFlex
}


def resample_positions(table_1ND: Tensor, old: Grid, new: Grid, resampling: Resampling = "bicubic-antialias") -> Tensor:
    """Resize a table of patch positions from grid `old` to grid `new`, as an image with D channels."""
    image = table_1ND.view(1, *old, -1).permute(0, 3, 1, 2).float()  # 1 (y x) d -> 1 d y x
    resized = F.interpolate(image, size=new, **RESAMPLING[resampling])
    return resized.flatten(2).transpose(1, 2).to(table_1ND.dtype)


ROPE: dict[Rope, tuple[float, Callable[[Tensor, int, int], Tensor]]] = {
    # Largest frequency, and the coordinates of patches 0 to n-1 on an axis with `trained` patches in training
    "patch": (math.pi, lambda i, n, trained: (i + 0.5) * (trained / n) - 0.5),  # vitral
    "centered": (2 * math.pi, lambda i, n, trained: 2 * (i + 0.5) / n - 1),  # DINOv3
    "index": (1.0, lambda i, n, trained: i),  # timm's vit_*_rope
    "scaled-index": (1.0, lambda i, n, trained: i / n * trained),  # EVA-02
    "scaled-index-1": (1.0, lambda i, n, trained: (i + 1) / n * trained),  # Perception Encoder
}


def patch_coordinates(grid: Grid, trained: Grid, rope: Rope = "patch") -> Tensor:
    """Row and column of each patch, N 2, by default in units of the patches of the `trained` grid."""
    y, x = (ROPE[rope][1](torch.arange(n), n, base) for n, base in zip(grid, trained, strict=True))
    return torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)


class RotaryPosition(nn.Module):
    """RoPE in two dimensions (arXiv 2104.09864): rotates pairs of query and key channels by angles proportional to row
    and column, so that q·k depends on relative positions. Prefix tokens are not rotated."""

    rope: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid, self.num_prefix_tokens = config.grid, config.num_prefix_tokens
        self.kind, self.base = config.rope, config.rope_base
        self.quarter = config.width // config.heads // 4
        # Cosines and sines are stored instead of angles, which bf16 would round too coarsely.
        self.register_buffer("rope", self.rope_table(config.grid), persistent=False)

    def frequency(self) -> Tensor:
        """Radians per unit of the coordinates, d/4, in descending order."""
        return ROPE[self.kind][0] * self.base ** -(torch.arange(self.quarter) / self.quarter)

    def rope_table(self, grid: Grid) -> RopeTable:
        """2 T d/2: half of the pairs rotate with the row, half with the column."""
        angles = (patch_coordinates(grid, self.grid, self.kind)[:, :, None] * self.frequency()).flatten(1)
        angles = F.pad(angles, (0, 0, self.num_prefix_tokens, 0))
        return torch.stack([angles.cos(), angles.sin()])

    def forward(self, grid: Grid) -> RopeTable:
        if grid == self.grid:
            return self.rope
        with self.rope.device:  # a CUDA graph must not copy from the host
            return self.rope_table(grid).to(self.rope)


def apply_rope(x_BhTd: Tensor, rope: RopeTable) -> Tensor:
    cos, sin = rope
    a, b = x_BhTd.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x_BhTd.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, attentions: list[Tensor] | None = None) -> Tensor:
    """softmax(q·kᵀ/√d)·v for queries B h Q d, keys and values B h T d. Appends the softmax to `attentions` if given."""
    if attentions is None:  # one fused kernel that never materialises the Q×T matrix
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    attentions.append((q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1))
    return F.dropout(attentions[-1], dropout) @ v


class QKVLinear(nn.Linear):
    """The projections to queries, keys and values without a bias of the keys: that third of the bias is ignored."""

    def masked_bias(self) -> Tensor:
        q, k, v = self.bias.chunk(3)
        return torch.cat([q, torch.zeros_like(k), v])

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, self.weight, self.masked_bias())


class MultiHeadAttention(nn.Module):
    """Self-attention in h heads, then a projection that mixes them (equations 5 to 8)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D, d = config.width, config.width // config.heads
        self.heads, self.dropout_attention = config.heads, config.dropout_attention
        linear = nn.Linear if config.key_bias or not config.qkv_bias else QKVLinear
        self.qkv = linear(D, 3 * D, bias=config.qkv_bias)
        self.norm_q = nn.LayerNorm(d, config.norm_eps) if config.qk_norm else nn.Identity()
        self.norm_k = nn.LayerNorm(d, config.norm_eps) if config.qk_norm else nn.Identity()
        self.project = nn.Linear(D, D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, rope: RopeTable | None = None, attentions: list[Tensor] | None = None) -> Tensor:
        qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # b t (three h d) -> three b h t d
        q, k = self.norm_q(q), self.norm_k(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        out = attend(q, k, v, dropout=self.dropout_attention if self.training else 0.0, attentions=attentions)
        return self.dropout(self.project(out.transpose(1, 2).flatten(2)))  # b h t d -> b t (h d)


class QuickGELU(nn.Module):
    """x·sigmoid(1.702x), the approximation of GELU in OpenAI's CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class SwiGLU(nn.Module):
    """silu(gate)·value (arXiv 2002.05202): halves the number of channels, the gate comes first."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "swiglu": SwiGLU,
}


class FeedForward(nn.Module):
    """The MLP of equation 3, applied to each token: D → M, GELU, M → D. With SwiGLU, D → 2M, which it halves."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, config.hidden_width * (2 if config.activation == "swiglu" else 1))
        self.activation = ACTIVATIONS[config.activation]()
        self.contract = nn.Linear(config.hidden_width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.contract(self.dropout(self.activation(self.expand(x_BTD)))))


class Residual(nn.Module):
    """z + f, where z is the branch's input before the layer norm. In training, stochastic depth drops f per image."""

    def __init__(self, config: ViTConfig, drop: float) -> None:
        super().__init__()
        self.drop, scale = drop, config.layer_scale
        self.scale = None if scale is None else nn.Parameter(torch.full((config.width,), scale))

    def forward(self, z_BTD: Tensor, f_BTD: Tensor) -> Tensor:
        if self.scale is not None:
            f_BTD = f_BTD * self.scale
        if self.training and self.drop:
            mask = torch.rand(f_BTD.shape[0], 1, 1, device=f_BTD.device) >= self.drop
            f_BTD = f_BTD * (mask / (1 - self.drop)).to(f_BTD.dtype)  # divided to preserve the mean
        return z_BTD + f_BTD


class EncoderBlock(nn.Module):
    """z' = MSA(LN(z)) + z (equation 2), then z = MLP(LN(z')) + z' (equation 3)."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, config.norm_eps)
        self.attention = MultiHeadAttention(config)
        self.residual1 = Residual(config, drop_path)
        self.norm2 = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config)
        self.residual2 = Residual(config, drop_path)

    def forward(self, z_BTD: Tensor, rope: RopeTable | None = None, attentions: list[Tensor] | None = None) -> Tensor:
        z_BTD = self.residual1(z_BTD, self.attention(self.norm1(z_BTD), rope, attentions))
        return self.residual2(z_BTD, self.mlp(self.norm2(z_BTD)))


class Encoder(nn.Module):
    """L blocks, then a final layer norm (equation 4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.rotary_position = RotaryPosition(config) if "rotary" in config.positions else None
        drops = [config.drop_path * block / max(config.depth - 1, 1) for block in range(config.depth)]
        self.blocks = nn.ModuleList(EncoderBlock(config, drop) for drop in drops)
        self.norm: nn.Module = nn.LayerNorm(config.width, config.norm_eps) if config.final_norm else nn.Identity()
        self.activation_checkpointing = False  # set when the blocks are wrapped to save only their inputs

    def forward(self, z_BTD: Tensor, grid: Grid, trace: Trace | None = None, kept_BT: Tensor | None = None) -> Tensor:
        """`kept_BT`: indices of the tokens, if patches were dropped; equal for all images with rotary positions."""
        rope = None if self.rotary_position is None else self.rotary_position(grid)
        if rope is not None and kept_BT is not None:
            rope = rope[:, kept_BT[0]]
        for block in self.blocks:
            z_BTD = block(z_BTD, rope, trace.attention if trace else None)
            if trace:
                trace.tokens.append(z_BTD)
        return self.norm(z_BTD)


class AttentionPooling(nn.Module):
    """Attention of one learned query to all patches, then an MLP (the "MAP head" of arXiv 2106.04560)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, 1, D))
        self.q, self.kv, self.project = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.norm = nn.LayerNorm(D, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, patches_BND: Tensor, attentions: list[Tensor] | None = None) -> Tensor:
        k, v = self.kv(patches_BND).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q = self.q(self.probe).unflatten(-1, (self.heads, -1)).transpose(1, 2).expand(k.shape[0], -1, -1, -1)
        pooled = self.project(attend(q, k, v, attentions=attentions).transpose(1, 2).flatten(2))
        return (pooled + self.mlp(self.norm(pooled))).squeeze(1)


class ClassificationHead(nn.Module):
    """B D -> B K: a linear layer, or a tanh layer and a linear layer (the paper, section 3.1)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.width, config.width) if config.head == "mlp" else None
        self.out = nn.Linear(config.width, config.num_classes)

    def forward(self, pooled_BD: Tensor) -> Tensor:
        return self.out(pooled_BD if self.hidden is None else torch.tanh(self.hidden(pooled_BD)))


@dataclass(kw_only=True)
class Trace:
    """All intermediate results of a forward pass."""

    grid: Grid
    num_prefix_tokens: int  # p: attention[layer][b, h, p:, p:] is the attention between patches
    patches: Tensor  # B N CPP, pixels
    margin: int = 0  # pixels between the outermost patches and the image border
    tokens: list[Tensor]  # B T D: encoder input, then the output of each block
    attention: list[Tensor] = field(default_factory=list)  # B h T T per block; row i is the softmax of query i
    pooling: list[Tensor] = field(default_factory=list)  # B h 1 N of attention pooling, if used
    pooled: Tensor = field(init=False)  # B D
    logits: Tensor = field(init=False)  # B K


class ViT(nn.Module):
    """The Vision Transformer. `ViT(config)(images)` returns logits, `.trace(images)` all intermediate results."""

    pooled_vectors = 1  # of width D that `pool` concatenates; 2 in some variants

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = PatchEmbedding(config)
        self.class_token = ClassToken(config.width) if config.has_class_token else None
        self.position_embedding = PositionEmbedding(config) if config.positions not in ("rotary", "none") else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.dropout = nn.Dropout(config.dropout_embedding)
        self.pre_norm = nn.LayerNorm(config.width, config.norm_eps) if config.pre_norm else nn.Identity()
        self.encoder = Encoder(config)
        self.attention_pooling = AttentionPooling(config) if config.pooling == "attention" else None
        self.head: nn.Module = ClassificationHead(config)
        self.accepts_any_grid = False  # set for models that are trained on several grids: resampling needs no warning
        initialise(self)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> ViT:
        """A size from the papers with overrides: `ViT.from_preset("S/16", num_classes=10)`."""
        from vitral.models.presets import preset  # imported here: presets.py imports this module

        return cls(preset(name, **overrides))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.head(self.features(images_BCHW))

    def features(self, images_BCHW: Tensor) -> Tensor:
        """Pooled features, B D: the input of the head."""
        grid = self.patch_grid(images_BCHW)
        tokens_BTD, kept_BT = self.drop_patches(self.embed(images_BCHW, grid), grid)
        return self.pool(self.encoder(tokens_BTD, grid, kept_BT=kept_BT))

    def trace(self, images_BCHW: Tensor) -> Trace:
        """The forward pass with patches, tokens and attention weights recorded."""
        grid = self.patch_grid(images_BCHW)
        tokens = self.embed(images_BCHW, grid)
        H, W = images_BCHW.shape[2:]
        margin = self.config.margin_for(H, W)
        patches = patchify(images_BCHW[:, :, margin : H - margin, margin : W - margin], self.config.patch_size)
        num_prefix_tokens = tokens.shape[1] - patches.shape[1]
        trace = Trace(grid=grid, num_prefix_tokens=num_prefix_tokens, patches=patches, margin=margin, tokens=[tokens])
        trace.pooled = self.pool(self.encoder(tokens, grid, trace), trace.pooling)
        trace.logits = self.head(trace.pooled)
        return trace

    def embed(self, images_BCHW: Tensor, grid: Grid) -> Tensor:
        """z0 = [x_class; x1·E; …; xN·E] + E_pos (equation 1). Registers are inserted after the class token."""
        tokens = self.patch_embedding(images_BCHW)
        if self.class_token is not None:
            tokens = self.class_token(tokens)
        if self.config.register_positions:
            tokens = self.insert_registers(tokens)
        if self.position_embedding is not None:
            tokens = self.position_embedding(tokens, grid)
        if not self.config.register_positions:
            tokens = self.insert_registers(tokens)
        return self.pre_norm(self.dropout(tokens))

    def drop_patches(self, tokens_BTD: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """In training, a random share of the patches with all prefix tokens, and their indices, B T; else all and None.

        Drawn per image, but once per batch for rotary positions, whose table is shared by all images.
        """
        if not (self.training and self.config.patch_drop):
            return tokens_BTD, None
        (B, T, D), N = tokens_BTD.shape, math.prod(grid)
        p, num_kept = T - N, max(1, round(N * (1 - self.config.patch_drop)))
        draws = torch.rand(B if self.encoder.rotary_position is None else 1, N, device=tokens_BTD.device)
        patches = draws.argsort(dim=1)[:, :num_kept].sort(dim=1).values + p
        prefix = torch.arange(p, device=tokens_BTD.device).expand(len(patches), -1)
        kept_BT = torch.cat([prefix, patches], dim=1).expand(B, -1)
        return tokens_BTD.gather(1, kept_BT[:, :, None].expand(-1, -1, D)), kept_BT

    def insert_registers(self, tokens_BTD: Tensor) -> Tensor:
        """Registers between the class token and the patches."""
        if self.registers is None:
            return tokens_BTD
        num_cls_tokens = int(self.class_token is not None)
        registers = self.registers.expand(tokens_BTD.shape[0], -1, -1)
        return torch.cat([tokens_BTD[:, :num_cls_tokens], registers, tokens_BTD[:, num_cls_tokens:]], dim=1)

    def pool(self, tokens_BTD: Tensor, attentions: list[Tensor] | None = None) -> Tensor:
        """B T D -> B D: the class token (equation 4), the mean of the patches, or attention pooling."""
        if self.config.pooling == "class":
            return tokens_BTD[:, 0]
        patches = tokens_BTD[:, self.config.num_prefix_tokens :]
        return patches.mean(dim=1) if self.attention_pooling is None else self.attention_pooling(patches, attentions)

    def patch_grid(self, images_BCHW: Tensor) -> Grid:
        """The patch grid of these images. Raises ValueError if the model cannot process their shape."""
        shape, C = tuple(images_BCHW.shape), self.config.channels
        if len(shape) != 4 or shape[1] != C:
            raise ValueError(f"expected images of shape (batch, {C}, height, width), got {shape}")
        check_divisible(shape[2:], self.config.patch_size)
        grid = self.config.grid_for(*shape[2:])
        if 0 in grid:
            raise ValueError(f"images of {shape[2]}×{shape[3]} pixels are too small: the patch grid would be empty")
        if grid != self.config.grid and self.config.positions != "none" and not self.accepts_any_grid:
            old, new = ("×".join(map(str, sides)) for sides in (self.config.grid, grid))
            warnings.warn(f"positions resampled from {old} to {new} patches; fine-tune for best accuracy", stacklevel=3)
        return grid


@torch.no_grad()
def initialise(model: ViT) -> None:
    """Initialise as the paper's code (vision_transformer, big_vision) does, except that the class token is not zero.

    Encoder matrices: Xavier-uniform, separately for q, k, v, and for SwiGLU's gate and value. Patch embedding and
    hidden head layer: variance 1/fan-in. Tokens and positions: normal, standard deviation 0.02. Head: zero, so that
    all classes start equal.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or name.endswith("head.out.weight"):
            nn.init.zeros_(parameter)
        elif name.endswith(LEARNED_VECTORS):
            nn.init.normal_(parameter, std=0.02)
        elif name.startswith("patch_embedding") or name.endswith("head.hidden.weight"):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif parameter.ndim == 2:
            is_gated = model.config.activation == "swiglu" and "expand" in name
            rows = model.config.width if "kv" in name else model.config.hidden_width if is_gated else len(parameter)
            for matrix in parameter.split(rows):
                nn.init.xavier_uniform_(matrix)
