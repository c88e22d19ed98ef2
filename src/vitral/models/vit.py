"""The Vision Transformer, from pixels to logits, in the order the data meets it.

    images ──▶ PatchEmbedding ──▶ ClassToken + PositionEmbedding ──▶ Encoder ──▶ ClassificationHead ──▶ logits
    B C H W       B N D              B T D                            B T D        B D                  B K

"An Image is Worth 16x16 Words", Dosovitskiy et al., ICLR 2021 (arXiv 2010.11929): "the paper" below, and the
equation numbers are its own. This file needs PyTorch and nothing else.

Shapes:  B images   C channels   H, W pixels   P patch side   N = HW/P² patches   T tokens: N and the extra ones
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
Gelu = Literal["exact", "tanh"]
Grid = tuple[int, int]  # patches down, patches across
Turn = Tensor  # cosines and sines of the rotary positions, 2 T d/2


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """What a Vision Transformer is made of. Defaults are the paper's ViT-B/16 (table 1)."""

    image_size: tuple[int, int] = (224, 224)  # height, width
    patch_size: int = 16
    channels: int = 3
    classes: int = 1000
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_width: int | None = None  # None: 4·width, as in all but the largest models
    pooling: Pooling = "class"
    positions: Positions = "learned"
    registers: int = 0  # extra tokens without a position (arXiv 2309.16588)
    dropout_embedding: float = 0.0
    dropout_attention: float = 0.0  # on the attention weights
    dropout: float = 0.0  # after the attention's and both of the MLP's projections
    drop_path: float = 0.0  # stochastic depth: 0 at the first block, this at the last (arXiv 1603.09382)
    layer_scale: float | None = None  # initial value; None: no such parameter (arXiv 2103.17239)
    qk_norm: bool = False  # layer norm on queries and keys (arXiv 2302.05442)
    qkv_bias: bool = True
    head: Head = "linear"
    gelu: Gelu = "exact"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        def are(names: str, kind: Any, holds: Callable[[Any], bool], must: str) -> None:
            for name in names.split():
                if not (isinstance(value := getattr(self, name), kind) and holds(value)):
                    raise ValueError(f"{name} must be {must}, not {value!r}")

        are("image_size", tuple, lambda sides: [*map(type, sides)] == [int, int], "(height, width), whole numbers")
        are("patch_size channels classes width depth heads", int, lambda n: n >= 1, "a whole number, at least 1")
        are("mlp_width", int | None, lambda n: n is None or n >= 1, "a whole number, at least 1, or None")
        are("registers", int, lambda n: n >= 0, "a whole number, at least 0")
        rates = "dropout_embedding dropout_attention dropout drop_path"
        are(rates, int | float, lambda p: 0 <= p < 1, "at least 0 and below 1")
        are("layer_scale", int | float | None, lambda s: s is None or s > 0, "above 0, or None")
        are("norm_eps", int | float, lambda e: e > 0, "above 0")
        are("qk_norm qkv_bias", bool, lambda _: True, "True or False")
        for name, kind in (("pooling", Pooling), ("positions", Positions), ("head", Head), ("gelu", Gelu)):
            are(name, str, get_args(kind).__contains__, f"one of {', '.join(get_args(kind))}")
        step = math.lcm(self.heads * (4 if "rotary" in self.positions else 1), 4 if self.positions == "sincos" else 1)
        are("width", int, lambda D: D % step == 0, f"a multiple of {step} (heads, positions)")
        check_divides(self.image_size, self.patch_size)

    @property
    def grid(self) -> Grid:
        return self.grid_of(*self.image_size)

    def grid_of(self, height: int, width: int) -> Grid:
        """Patches down and across, in images of this size."""
        return height // self.patch_size, width // self.patch_size

    def margin_of(self, height: int, width: int) -> int:
        """Pixels between the outermost patches and the edge of such images: 0 but for some hybrids."""
        return (height - self.grid_of(height, width)[0] * self.patch_size) // 2

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches: the class token, if there is one, and the registers."""
        return (self.pooling == "class") + self.registers

    @property
    def hidden_width(self) -> int:
        return self.mlp_width if self.mlp_width is not None else 4 * self.width


def check_divides(image_size: tuple[int, int], patch_size: int) -> None:
    for side, pixels in zip(("height", "width"), image_size, strict=True):
        if pixels < 1 or pixels % patch_size:
            below = pixels - pixels % patch_size
            work = f"{below} and {below + patch_size} are" if below > 0 else f"{patch_size} is"
            raise ValueError(f"image {side} {pixels} is not a multiple of patch_size {patch_size}; {work}")


def patchify(images_BCHW: Tensor, patch_size: int) -> Tensor:
    """Cut images into patches, row by row, each flattened: B C H W -> B N CPP."""
    B, C, H, W = images_BCHW.shape
    P = patch_size
    patches = images_BCHW.reshape(B, C, H // P, P, W // P, P)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * P * P)  # b c (y p) (x q) -> b (y x) (c p q)


def unpatchify(patches_BNE: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """The way back: B N CPP -> B C H W."""
    B, _, E = patches_BNE.shape
    P = patch_size
    patches = patches_BNE.reshape(B, *grid, E // P**2, P, P)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(B, -1, grid[0] * P, grid[1] * P)


class PatchEmbedding(nn.Module):
    """x_p·E (equation 1): each flattened patch becomes D numbers. A convolution with stride P is the same map."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.project = nn.Linear(config.channels * config.patch_size**2, config.width)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.project(patchify(images_BCHW, self.patch_size))


class ClassToken(nn.Module):
    """x_class (equation 1): one learned vector, the same for each image, put at the FRONT of the patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(1, 1, width))

    def forward(self, tokens_BND: Tensor) -> Tensor:
        return torch.cat([self.token.expand(tokens_BND.shape[0], -1, -1), tokens_BND], dim=1)


class PositionEmbedding(nn.Module):
    """E_pos (equation 1): a row for each place, added to its token. Without it the order of the patches is lost.

    Learned, or the fixed sines and cosines of arXiv 2205.01580; the class token's row stands first. For another
    grid than the trained one, the patches' rows are resampled in two dimensions (section 3.2).
    """

    table: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid, self.front, self.fixed = config.grid, int(config.pooling == "class"), config.positions == "sincos"
        if self.fixed:
            self.register_buffer("table", self.waves(config.grid, config.width), persistent=False)
        else:
            self.table = nn.Parameter(torch.empty(1, self.front + math.prod(config.grid), config.width))

    def forward(self, tokens_BTD: Tensor, grid: Grid) -> Tensor:
        return tokens_BTD + self.rows(grid)

    def rows(self, grid: Grid) -> Tensor:
        """The table for this grid: 1 T D."""
        if grid == self.grid:
            return self.table
        if self.fixed:
            return self.waves(grid, self.table.shape[-1]).to(self.table)
        front, patches = self.table[:, : self.front], self.table[:, self.front :]
        return torch.cat([front, resample_positions(patches, self.grid, grid)], dim=1)

    def waves(self, grid: Grid, width: int) -> Tensor:
        """Sines and cosines of column and row, of wave lengths from 2π to 2π·10⁴ patches; zeros for the class token."""
        quarter = width // 4
        frequency = 10_000 ** -(torch.arange(quarter) / max(quarter - 1, 1))
        row, column = (place[:, None] * frequency for place in places(grid, self.grid).unbind(1))
        waves = torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1)
        return F.pad(waves, (0, 0, self.front, 0))[None]


def resample_positions(rows_1ND: Tensor, old: Grid, new: Grid) -> Tensor:
    """The rows of the grid `old`, seen as a picture with D channels, resized to the grid `new`."""
    picture = rows_1ND.view(1, *old, -1).permute(0, 3, 1, 2).float()  # 1 (y x) d -> 1 d y x
    resized = F.interpolate(picture, size=new, mode="bicubic", antialias=True)
    return resized.flatten(2).transpose(1, 2).to(rows_1ND.dtype)


def places(grid: Grid, trained: Grid) -> Tensor:
    """Row and column of each patch, N 2, measured in patches of the grid that the model was trained with."""
    y, x = ((torch.arange(n) + 0.5) * (base / n) - 0.5 for n, base in zip(grid, trained, strict=True))
    return torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)


class RotaryPosition(nn.Module):
    """Turns pairs of numbers in queries and keys by angles that grow with row and column (arXiv 2104.09864, in 2-D):
    their product then depends on how far apart the places are. Tokens in front of the patches are not turned."""

    turn: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid, self.prefix, self.quarter = config.grid, config.prefix, config.width // config.heads // 4
        self.register_buffer("turn", self.turn_of(config.grid), persistent=False)  # angles would not survive bf16

    def frequency(self) -> Tensor:
        """Angles a patch, d/4: the fastest π."""
        return math.pi * 100 ** -(torch.arange(self.quarter) / self.quarter)

    def turn_of(self, grid: Grid) -> Turn:
        """2 T d/2: half of the pairs turn with the row, half with the column."""
        angles = F.pad((places(grid, self.grid)[:, :, None] * self.frequency()).flatten(1), (0, 0, self.prefix, 0))
        return torch.stack([angles.cos(), angles.sin()])

    def forward(self, grid: Grid) -> Turn:
        return self.turn if grid == self.grid else self.turn_of(grid).to(self.turn)


def rotate(x_BhTd: Tensor, turn: Turn) -> Tensor:
    cos, sin = turn
    a, b = x_BhTd.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x_BhTd.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, record: list[Tensor] | None = None) -> Tensor:
    """softmax(q·kᵀ/√d)·v for queries B h Q d, keys and values B h T d; rows of the softmax sum to one."""
    if record is None:  # one fused kernel, which never forms the Q×T matrix
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    record.append((q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1))  # the same by hand, for whoever wants to look
    return F.dropout(record[-1], dropout) @ v


class MultiHeadAttention(nn.Module):
    """Attention in each of h heads, side by side, then mixed by one projection (equations 5 to 8)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D, d = config.width, config.width // config.heads
        self.heads, self.dropout_attention = config.heads, config.dropout_attention
        self.qkv = nn.Linear(D, 3 * D, bias=config.qkv_bias)
        self.norm_q = nn.LayerNorm(d, config.norm_eps) if config.qk_norm else nn.Identity()
        self.norm_k = nn.LayerNorm(d, config.norm_eps) if config.qk_norm else nn.Identity()
        self.project = nn.Linear(D, D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, turn: Turn | None = None, record: list[Tensor] | None = None) -> Tensor:
        qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # b t (three h d) -> three b h t d
        q, k = self.norm_q(q), self.norm_k(k)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        mixed = attend(q, k, v, dropout=self.dropout_attention if self.training else 0.0, record=record)
        return self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))  # b h t d -> b t (h d)


class FeedForward(nn.Module):
    """The MLP of equation 3, on each token by itself: D → M, GELU, M → D."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, config.hidden_width)
        self.gelu = nn.GELU(approximate="tanh" if config.gelu == "tanh" else "none")
        self.contract = nn.Linear(config.hidden_width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.contract(self.dropout(self.gelu(self.expand(x_BTD)))))


class Residual(nn.Module):
    """z + f: what a branch found, added to its RAW input. Stochastic depth leaves f out for some images in training."""

    def __init__(self, config: ViTConfig, drop: float) -> None:
        super().__init__()
        self.drop, start = drop, config.layer_scale
        self.scale = None if start is None else nn.Parameter(torch.full((config.width,), start))

    def forward(self, z_BTD: Tensor, f_BTD: Tensor) -> Tensor:
        if self.scale is not None:
            f_BTD = f_BTD * self.scale
        if self.training and self.drop:
            kept = torch.rand(f_BTD.shape[0], 1, 1, device=f_BTD.device) >= self.drop
            f_BTD = f_BTD * (kept / (1 - self.drop)).to(f_BTD.dtype)  # divided, so that the mean stays what it was
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

    def forward(self, z_BTD: Tensor, turn: Turn | None = None, record: list[Tensor] | None = None) -> Tensor:
        z_BTD = self.residual1(z_BTD, self.attention(self.norm1(z_BTD), turn, record))
        return self.residual2(z_BTD, self.mlp(self.norm2(z_BTD)))


class Encoder(nn.Module):
    """L blocks, then one more layer norm (equation 4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.rotary_position = RotaryPosition(config) if "rotary" in config.positions else None
        drops = [config.drop_path * block / max(config.depth - 1, 1) for block in range(config.depth)]
        self.blocks = nn.ModuleList(EncoderBlock(config, drop) for drop in drops)
        self.norm: nn.Module = nn.LayerNorm(config.width, config.norm_eps)

    def forward(self, z_BTD: Tensor, grid: Grid, trace: Trace | None = None) -> Tensor:
        turn = None if self.rotary_position is None else self.rotary_position(grid)
        for block in self.blocks:
            z_BTD = block(z_BTD, turn, trace.attention if trace else None)
            if trace:
                trace.tokens.append(z_BTD)
        return self.norm(z_BTD)


class AttentionPooling(nn.Module):
    """One learned question put to all patches, then an MLP (the "MAP head" of arXiv 2106.04560)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, 1, D))
        self.q, self.kv, self.project = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.norm = nn.LayerNorm(D, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, patches_BND: Tensor, record: list[Tensor] | None = None) -> Tensor:
        k, v = self.kv(patches_BND).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q = self.q(self.probe).unflatten(-1, (self.heads, -1)).transpose(1, 2).expand(k.shape[0], -1, -1, -1)
        answer = self.project(attend(q, k, v, record=record).transpose(1, 2).flatten(2))
        return (answer + self.mlp(self.norm(answer))).squeeze(1)


class ClassificationHead(nn.Module):
    """From one vector an image to one number a class: linear, or with a tanh layer between (the paper, section 3.1)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.width, config.width) if config.head == "mlp" else None
        self.out = nn.Linear(config.width, config.classes)

    def forward(self, pooled_BD: Tensor) -> Tensor:
        return self.out(pooled_BD if self.hidden is None else torch.tanh(self.hidden(pooled_BD)))


@dataclass(kw_only=True)
class Trace:
    """Everything that happened on the way from pixels to logits."""

    grid: Grid
    prefix: int  # tokens in front of the patches: attention[l][b, h, prefix:, prefix:] is between patches
    patches: Tensor  # B N CPP, pixels
    margin: int = 0  # pixels between the outermost patches and the image's edge: of some hybrids
    tokens: list[Tensor]  # B T D: with positions, then after each block
    attention: list[Tensor] = field(default_factory=list)  # B h T T for each block; row i: where token i looked
    pooling: list[Tensor] = field(default_factory=list)  # B h 1 N: where attention pooling looked, if there is one
    pooled: Tensor = field(init=False)  # B D
    logits: Tensor = field(init=False)  # B K


class ViT(nn.Module):
    """The Vision Transformer: `ViT(ViTConfig(...))(images)` gives logits, `.trace(images)` the whole way there."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = PatchEmbedding(config)
        self.class_token = ClassToken(config.width) if config.pooling == "class" else None
        self.position_embedding = PositionEmbedding(config) if config.positions not in ("rotary", "none") else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.dropout = nn.Dropout(config.dropout_embedding)
        self.encoder = Encoder(config)
        self.attention_pooling = AttentionPooling(config) if config.pooling == "attention" else None
        self.head: nn.Module = ClassificationHead(config)
        initialise(self)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> ViT:
        """`ViT.from_preset("S/16", classes=10)`: a size from the papers' tables, with your changes."""
        from vitral.models.presets import preset  # here and not above: that table is built on this file

        return cls(preset(name, **changes))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.head(self.features(images_BCHW))

    def features(self, images_BCHW: Tensor) -> Tensor:
        """One vector an image, B D: what the head sees."""
        grid = self.check(images_BCHW)
        return self.pool(self.encoder(self.embed(images_BCHW, grid), grid))

    def trace(self, images_BCHW: Tensor) -> Trace:
        """The same computation, with patches, tokens and attention weights kept."""
        grid = self.check(images_BCHW)
        tokens = self.embed(images_BCHW, grid)
        H, W = images_BCHW.shape[2:]
        margin = self.config.margin_of(H, W)
        patches = patchify(images_BCHW[:, :, margin : H - margin, margin : W - margin], self.config.patch_size)
        prefix = tokens.shape[1] - patches.shape[1]
        trace = Trace(grid=grid, prefix=prefix, patches=patches, margin=margin, tokens=[tokens])
        trace.pooled = self.pool(self.encoder(tokens, grid, trace), trace.pooling)
        trace.logits = self.head(trace.pooled)
        return trace

    def embed(self, images_BCHW: Tensor, grid: Grid) -> Tensor:
        """z0 = [x_class; x1·E; …; xN·E] + E_pos (equation 1); registers stand between class token and patches."""
        tokens = self.patch_embedding(images_BCHW)
        if self.class_token is not None:
            tokens = self.class_token(tokens)
        if self.position_embedding is not None:
            tokens = self.position_embedding(tokens, grid)
        if self.registers is not None:
            front = int(self.class_token is not None)
            registers = self.registers.expand(tokens.shape[0], -1, -1)
            tokens = torch.cat([tokens[:, :front], registers, tokens[:, front:]], dim=1)
        return self.dropout(tokens)

    def pool(self, tokens_BTD: Tensor, record: list[Tensor] | None = None) -> Tensor:
        """One vector an image: the class token (equation 4), the mean of the patches, or their attention pooling."""
        if self.config.pooling == "class":
            return tokens_BTD[:, 0]
        patches = tokens_BTD[:, self.config.prefix :]
        return patches.mean(dim=1) if self.attention_pooling is None else self.attention_pooling(patches, record)

    def check(self, images_BCHW: Tensor) -> Grid:
        """The patch grid of these images, or a sentence about why they do not fit."""
        shape, C = tuple(images_BCHW.shape), self.config.channels
        if len(shape) != 4 or shape[1] != C:
            raise ValueError(f"expected images of shape (batch, {C}, height, width), not {shape}")
        check_divides(shape[2:], self.config.patch_size)
        grid = self.config.grid_of(*shape[2:])
        if 0 in grid:
            raise ValueError(f"images of {shape[2]}×{shape[3]} pixels are too small for a single token of this model")
        if grid != self.config.grid and self.config.positions != "none":
            was, now = ("×".join(map(str, sides)) for sides in (self.config.grid, grid))
            warnings.warn(f"positions resampled from {was} to {now} patches: quality needs fine-tuning", stacklevel=3)
        return grid


@torch.no_grad()
def initialise(model: ViT) -> None:
    """As in the paper's code (vision_transformer, big_vision), except that the class token does not start at zero.

    The encoder's matrices Xavier-uniform, q, k and v each by itself; patch embedding and hidden head layer with
    variance 1/fan-in; tokens and positions normal; the head zero: training starts from equal odds for each class.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or name.endswith("head.out.weight"):
            nn.init.zeros_(parameter)
        elif name.endswith(("token", "table", "registers", "probe")):
            nn.init.normal_(parameter, std=0.02)
        elif name.startswith("patch_embedding") or name.endswith("head.hidden.weight"):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif parameter.ndim == 2:
            for matrix in parameter.split(model.config.width) if "kv" in name else (parameter,):
                nn.init.xavier_uniform_(matrix)
