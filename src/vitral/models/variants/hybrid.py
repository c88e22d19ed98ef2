"""The hybrid ViT: patches are taken from a CNN's feature map instead of from pixels.

    images ──▶ ResNet or ConvStem ──▶ PatchEmbedding ──▶ class token, positions, encoder, head: the plain ViT
    B C H W       B E H/s W/s            B N D

The paper's section 3.1, "Hybrid Architecture". The ResNet is that of section 4.1, with group norm and
weight-standardised convolutions. `patch_size` counts image pixels, as in the plain ViT: "R50+B/16" has one token per
16×16 pixels. It is the stem's stride s times the patch size on the feature map, which is 1×1 in the presets.

Shapes:  E channels of the feature map   s stride of the stem   others as in vit.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import unknown_name_error
from vitral.models.presets import with_overrides
from vitral.models.vit import Grid, PatchEmbedding, ViT, ViTConfig

GROUPS = 32  # groups of the ResNet's group norms (arXiv 1803.08494)
GROUP_WIDTH = 8  # channels per group in the ConvStem, which may have fewer channels than GROUPS
MATMUL_MAX_FILTER_SIZE = 32  # filters of at most this many weights are faster as a compiled matmul than in cuDNN


class StdConv(nn.Conv2d):
    """Convolution with weight standardisation: filters have mean 0 and variance 1 (arXiv 1903.10520).

    SAME padding, as in the paper's code: k-s pixels in total, the odd one at the bottom and right. Image sides are
    multiples of the stride (`ViT.patch_grid` checks that), so the padding does not depend on them.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, same_padding: bool = True) -> None:
        padding, odd = divmod(max(kernel - stride, 0), 2)
        super().__init__(inputs, outputs, kernel, stride, padding=padding, bias=False)  # the norm after it has a bias
        self.extra_padding = odd if same_padding else 0

    def reset_parameters(self) -> None:
        """Variance 1/fan-in. The output does not depend on the scale of the weights; their learning speed does."""
        nn.init.normal_(self.weight, std=math.prod(self.weight.shape[1:]) ** -0.5)

    def forward(self, x_BEHW: Tensor) -> Tensor:
        if self.extra_padding:
            x_BEHW = F.pad(x_BEHW, (0, 1, 0, 1))
        filters = F.layer_norm(self.weight, self.weight.shape[1:], eps=1e-8)
        if filters[0].numel() <= MATMUL_MAX_FILTER_SIZE and torch.compiler.is_dynamo_compiling():
            return conv_as_matmul(x_BEHW, filters, self.stride[0], int(self.padding[0]))
        return F.conv2d(x_BEHW, filters, None, self.stride, self.padding)


def conv_as_matmul(x_BEHW: Tensor, filters_OEkk: Tensor, stride: int, padding: int) -> Tensor:
    """A convolution as one GEMM over all patches (im2col), four times as fast as cuDNN for 3 input channels."""
    k, padding_E = filters_OEkk.shape[-1], -filters_OEkk[0].numel() % 16  # rows of a multiple of 16 elements
    patches = F.pad(x_BEHW, (padding,) * 4).unfold(2, k, stride).unfold(3, k, stride)  # B E h w k k
    rows = F.pad(patches.permute(0, 2, 3, 1, 4, 5).flatten(3), (0, padding_E))
    return (rows @ F.pad(filters_OEkk.flatten(1), (0, padding_E)).t()).permute(0, 3, 1, 2)


class ConvNorm(nn.Module):
    """Convolution and group norm. Group norm is independent of the batch, so training and inference agree."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, groups: int, eps: float, same_padding: bool = True
    ) -> None:
        super().__init__()
        self.conv = StdConv(inputs, outputs, kernel, stride, same_padding)
        self.norm = nn.GroupNorm(groups, outputs, eps)

    def forward(self, x_BEHW: Tensor) -> Tensor:
        return self.norm(self.conv(x_BEHW))


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """A ResNet stem. It has 3·blocks + 2 layers including a classifier: (2, 2, 2, 2) is R26, (3, 4, 6, 3) is R50."""

    blocks: tuple[int, ...]  # bottleneck blocks per stage
    width: int = 64  # channels of the root; stage i has 4·2ⁱ times as many

    def __post_init__(self) -> None:
        if not (type(self.blocks) is tuple and len(self.blocks) <= 4 and all(type(n) is int for n in self.blocks)):
            raise ValueError(f"blocks must be at most four integers, one per stage, got {self.blocks!r}")
        if min(self.blocks, default=1) < 1:
            raise ValueError(f"blocks must be at least 1 in each stage, got {self.blocks!r}")
        if not (type(self.width) is int and self.width > 0 and self.width % GROUPS == 0):
            raise ValueError(f"width of the ResNet must be a multiple of {GROUPS} (group norm), got {self.width!r}")

    @property
    def channels(self) -> int:
        """Channels E of the feature map."""
        return self.width * 2 ** (len(self.blocks) + 1) if self.blocks else self.width

    @property
    def stride(self) -> int:
        """4 in the root, then 2 in each stage except the first."""
        return 2 ** (1 + max(len(self.blocks), 1))

    def output_size(self, pixels: int) -> int:
        """Side of the feature map for an image side in pixels."""
        return pixels // self.stride


class Bottleneck(nn.Module):
    """ReLU(f(x) + x), where f is a 1×1 convolution to a quarter of the channels, a 3×3 and a 1×1 back.

    Post-activation: unlike BiT's "v2" ResNets, the hybrids do not use pre-activation.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, eps: float) -> None:
        super().__init__()
        middle, is_identity = outputs // 4, inputs == outputs and stride == 1
        self.reduce = ConvNorm(inputs, middle, 1, 1, GROUPS, eps)
        self.spatial = ConvNorm(middle, middle, 3, stride, GROUPS, eps)
        self.expand = ConvNorm(middle, outputs, 1, 1, GROUPS, eps)
        self.shortcut = nn.Identity() if is_identity else ConvNorm(inputs, outputs, 1, stride, GROUPS, eps)
        nn.init.zeros_(self.expand.norm.weight)  # each block starts as its shortcut, as in the paper's code

    def forward(self, x_BEHW: Tensor) -> Tensor:
        inner = F.relu(self.reduce(x_BEHW))
        inner = F.relu(self.spatial(inner))
        return F.relu(self.expand(inner) + self.shortcut(x_BEHW))


class ResNet(nn.Module):
    """A root of stride 4, then stages of bottleneck blocks: B C H W -> B E H/s W/s."""

    def __init__(self, config: ResNetConfig, channels: int, eps: float) -> None:
        super().__init__()
        self.root = ConvNorm(channels, config.width, 7, 2, GROUPS, eps)
        self.stages = nn.Sequential()
        inputs, outputs = config.width, 4 * config.width
        for stage, blocks in enumerate(config.blocks):
            strides = [1 if stage == 0 else 2] + [1] * (blocks - 1)
            widths = [inputs] + [outputs] * (blocks - 1)
            units = (Bottleneck(E, outputs, stride, eps) for E, stride in zip(widths, strides, strict=True))
            self.stages.append(nn.Sequential(*units))
            inputs, outputs = outputs, 2 * outputs

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = F.relu(self.root(images_BCHW))
        x = F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)  # zero padding cannot win: inputs are ReLU outputs
        return self.stages(x)


@dataclass(frozen=True, kw_only=True)
class ConvStemConfig:
    """A stem of one to three 3×3 convolutions."""

    widths: tuple[int, ...]  # channels per convolution
    strides: tuple[int, ...]  # stride per convolution
    same_padding: bool = True  # without it, no padding at bottom and right, so that stride 2 maps 32 to 15 pixels

    def __post_init__(self) -> None:
        for name, layers in (("widths", self.widths), ("strides", self.strides)):
            if not (type(layers) is tuple and 1 <= len(layers) <= 3 and all(type(n) is int for n in layers)):
                raise ValueError(f"{name} must be one to three integers, got {layers!r}")
        if len(self.widths) != len(self.strides):
            raise ValueError(f"widths and strides must have equal lengths, got {self.widths} and {self.strides}")
        if any(n < 1 or n % GROUP_WIDTH for n in self.widths):
            raise ValueError(f"widths must be multiples of {GROUP_WIDTH} (group norm), got {self.widths}")
        if not {1, 2, 3}.issuperset(self.strides):
            raise ValueError(f"strides must be 1, 2 or 3 (the size of the filters), got {self.strides}")
        if type(self.same_padding) is not bool:
            raise ValueError(f"same_padding must be True or False, got {self.same_padding!r}")

    @property
    def channels(self) -> int:
        """Channels E of the feature map."""
        return self.widths[-1]

    @property
    def stride(self) -> int:
        return math.prod(self.strides)

    def output_size(self, pixels: int) -> int:
        """Side of the feature map for an image side in pixels."""
        for stride in self.strides:
            pixels = (pixels - (stride == 2 and not self.same_padding)) // stride
        return pixels


class ConvStem(nn.Module):
    """3×3 convolutions for small images: B C H W -> B E H/s W/s, slightly smaller without `same_padding`.

    After "Early Convolutions Help Transformers See Better" (arXiv 2106.14881), whose stem has batch norm.
    """

    def __init__(self, config: ConvStemConfig, channels: int, eps: float) -> None:
        super().__init__()
        inputs = (channels, *config.widths[:-1])
        layers = zip(inputs, config.widths, config.strides, strict=True)
        self.layers = nn.ModuleList(
            ConvNorm(C, E, 3, s, E // GROUP_WIDTH, eps, config.same_padding) for C, E, s in layers
        )

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = images_BCHW
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ViTConfig):
    """A ViTConfig with a convolutional stem: either `resnet` or `conv`."""

    resnet: ResNetConfig | None = None  # ResNet stem
    conv: ConvStemConfig | None = None  # small convolutional stem

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, cls in (("resnet", self.resnet, ResNetConfig), ("conv", self.conv, ConvStemConfig)):
            if not isinstance(value, cls | None):
                raise ValueError(f"{name} must be a {cls.__name__} or None, got {value!r}")
        if (self.resnet is None) == (self.conv is None):
            raise ValueError(f"a hybrid needs one stem, resnet or conv, got {'both' if self.conv else 'neither'}")
        if self.patch_size % self.stem.stride:
            raise ValueError(
                f"patch_size must be a multiple of {self.stem.stride}, the stride of the stem, got {self.patch_size}"
            )
        if not (self.conv is None or self.conv.same_padding) and (self.patch_size > self.stem.stride or 0 in self.grid):
            raise ValueError(
                "without same_padding, patch_size must equal the stem's stride and the grid must have a patch"
            )

    @property
    def stem(self) -> ResNetConfig | ConvStemConfig:
        stem = self.resnet or self.conv
        assert stem is not None  # checked in __post_init__
        return stem

    def grid_for(self, height: int, width: int) -> Grid:
        patch = self.patch_size // self.stem.stride  # patch size on the feature map
        return self.stem.output_size(height) // patch, self.stem.output_size(width) // patch


class HybridEmbedding(PatchEmbedding):
    """x_p·E (equation 1), where x_p are patches of the stem's feature map: B C H W -> B N D."""

    def __init__(self, config: HybridConfig) -> None:
        (H, W), stem = config.image_size, config.stem
        feature_map_config = ViTConfig(
            image_size=(stem.output_size(H), stem.output_size(W)),
            patch_size=config.patch_size // stem.stride,
            channels=config.stem.channels,
            width=config.width,
            heads=config.heads,
        )
        super().__init__(feature_map_config)
        nn.init.normal_(self.project.weight, std=self.project.in_features**-0.5)  # as in `initialise`
        nn.init.zeros_(self.project.bias)
        self.stem: nn.Module
        if config.resnet is not None:
            self.stem = ResNet(config.resnet, config.channels, config.norm_eps)
        elif config.conv is not None:
            self.stem = ConvStem(config.conv, config.channels, config.norm_eps)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return super().forward(self.stem(images_BCHW))


class HybridViT(ViT):
    """`HybridViT(hybrid_preset("R50+B/16", num_classes=10))`. `model.patch_embedding.stem` computes the feature map.

    `trace(images).patches` are the pixels at a token's position, as in the plain ViT, although its receptive field is
    larger. Without `same_padding` these patches do not cover a margin at the image border.
    """

    def __init__(self, config: ViTConfig) -> None:
        if not isinstance(config, HybridConfig):
            raise ValueError(f"a hybrid ViT requires a HybridConfig, got {config!r}")
        super().__init__(config)
        self.patch_embedding = HybridEmbedding(config)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> HybridViT:
        return cls(hybrid_preset(name, **overrides))


HYBRIDS: dict[str, HybridConfig] = {
    # The paper's (section 4.1): R50 with the blocks of its last stage moved to the third, for a stride of 16.
    "R50+B/16": HybridConfig(patch_size=16, width=768, depth=12, heads=12, resnet=ResNetConfig(blocks=(3, 4, 9))),
    # "How to train your ViT?" (arXiv 2106.10270, table 1)
    "R26+S/32": HybridConfig(patch_size=32, width=384, depth=12, heads=6, resnet=ResNetConfig(blocks=(2, 2, 2, 2))),
    "R50+L/32": HybridConfig(patch_size=32, width=1024, depth=24, heads=16, resnet=ResNetConfig(blocks=(3, 4, 6, 3))),
    # For 32×32 images, 8×8 tokens. The stem costs about as much as one block, so there is one block fewer.
    "conv-Ti/4": HybridConfig(
        image_size=(32, 32),
        patch_size=4,
        width=192,
        depth=11,
        heads=3,
        conv=ConvStemConfig(widths=(48, 96, 192), strides=(1, 2, 2)),
    ),
    "conv-S/4": HybridConfig(
        image_size=(32, 32),
        patch_size=4,
        width=384,
        depth=11,
        heads=6,
        conv=ConvStemConfig(widths=(96, 192, 384), strides=(1, 2, 2)),
    ),
}


def hybrid_preset(name: str, **overrides: Any) -> HybridConfig:
    """A hybrid preset with overrides: `hybrid_preset("R26+S/32", image_size=(384, 384), num_classes=10)`."""
    by_lower = {preset.lower(): preset for preset in HYBRIDS}
    if name.lower() not in by_lower:
        raise unknown_name_error("hybrid", name, HYBRIDS)
    return with_overrides(HYBRIDS[by_lower[name.lower()]], overrides)
