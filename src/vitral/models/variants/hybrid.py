"""The hybrid: a CNN looks first, and patches of its feature map take the place of patches of pixels.

    images ──▶ ResNet or ConvStem ──▶ PatchEmbedding ──▶ class token, positions, encoder, head: the plain ViT
    B C H W       B E H/s W/s            B N D

The paper's section 3.1, "Hybrid Architecture"; its ResNet is section 4.1's, with group norm and standardised
convolutions. `patch_size` means what it means in the plain ViT, and in the names: "R50+B/16" has a token for each
16×16 pixels. The stem's stride s is a part of it, patches of patch_size/s on the map the rest: 1×1 in the presets.

Shapes:  E channels of the feature map   s stride of the stem   the others as in vit.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import unknown
from vitral.models.vit import Grid, PatchEmbedding, ViT, ViTConfig

GROUPS = 32  # of the ResNet's group norms (arXiv 1803.08494)
FEW = 32  # numbers in a filter: with so few, what a compiler makes of patches is quicker than a convolution
GROUP_WIDTH = 8  # channels that the small stem's group norms take together: it can have fewer channels than GROUPS


class StandardConv(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1, whatever the optimizer makes of them (arXiv 1903.10520).

    Padded as in the paper's code ("SAME"): k-s pixels in all, the odd one behind. Sides are multiples of the stride
    wherever an image passed the model's check, so the padding does not depend on them.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, whole: bool = True) -> None:
        before, odd = divmod(max(kernel - stride, 0), 2)
        super().__init__(inputs, outputs, kernel, stride, padding=before, bias=False)  # a norm follows, with a bias
        self.odd = odd if whole else 0

    def reset_parameters(self) -> None:
        """Variance 1/fan-in. What the convolution computes does not depend on it, how fast it turns does."""
        nn.init.normal_(self.weight, std=math.prod(self.weight.shape[1:]) ** -0.5)

    def forward(self, x_BEHW: Tensor) -> Tensor:
        if self.odd:
            x_BEHW = F.pad(x_BEHW, (0, 1, 0, 1))
        filters = F.layer_norm(self.weight, self.weight.shape[1:], eps=1e-8)
        if filters[0].numel() <= FEW and torch.compiler.is_dynamo_compiling():
            return product_of_patches(x_BEHW, filters, self.stride[0], int(self.padding[0]))
        return F.conv2d(x_BEHW, filters, None, self.stride, self.padding)


def product_of_patches(x_BEHW: Tensor, filters_OEkk: Tensor, stride: int, padding: int) -> Tensor:
    """A convolution as one matrix product of all patches, side by side: cuDNN's needs four times as long for pixels."""
    k, room = filters_OEkk.shape[-1], -filters_OEkk[0].numel() % 16  # rows that a GPU can read in whole pieces
    patches = F.pad(x_BEHW, (padding,) * 4).unfold(2, k, stride).unfold(3, k, stride)  # B E h w k k
    rows = F.pad(patches.permute(0, 2, 3, 1, 4, 5).flatten(3), (0, room))
    return (rows @ F.pad(filters_OEkk.flatten(1), (0, room)).t()).permute(0, 3, 1, 2)


class ConvNorm(nn.Module):
    """GN(x * w). Group norm sees one image at a time: the same in training, in use, and in a batch of one."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, groups: int, eps: float, whole: bool = True
    ) -> None:
        super().__init__()
        self.conv = StandardConv(inputs, outputs, kernel, stride, whole)
        self.norm = nn.GroupNorm(groups, outputs, eps)

    def forward(self, x_BEHW: Tensor) -> Tensor:
        return self.norm(self.conv(x_BEHW))


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Which ResNet. Layers = 3·blocks + 2 where a classifier is counted: (2, 2, 2, 2) is R26, (3, 4, 6, 3) R50."""

    blocks: tuple[int, ...]  # bottlenecks in each stage
    width: int = 64  # channels of the root; stage i gives 4·2ⁱ times as many

    def __post_init__(self) -> None:
        if not (type(self.blocks) is tuple and len(self.blocks) <= 4 and all(type(n) is int for n in self.blocks)):
            raise ValueError(f"blocks must be at most four whole numbers, one a stage, not {self.blocks!r}")
        if min(self.blocks, default=1) < 1:
            raise ValueError(f"blocks must be at least 1 in each stage, not {self.blocks!r}")
        if not (type(self.width) is int and self.width > 0 and self.width % GROUPS == 0):
            raise ValueError(f"width of the ResNet must be a multiple of {GROUPS} (group norm), not {self.width!r}")

    @property
    def channels(self) -> int:
        """E of the feature map."""
        return self.width * 2 ** (len(self.blocks) + 1) if self.blocks else self.width

    @property
    def stride(self) -> int:
        """4 in the root, then 2 in each stage but the first."""
        return 2 ** (1 + max(len(self.blocks), 1))

    def places(self, pixels: int) -> int:
        """Along a side of the feature map."""
        return pixels // self.stride


class Bottleneck(nn.Module):
    """ReLU(f(x) + x), f narrow in the middle: 1×1 down to a quarter, 3×3, 1×1 up.

    Not pre-activated, although the ResNets of this family are called "v2": the hybrids' are the exception.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, eps: float) -> None:
        super().__init__()
        middle, same = outputs // 4, inputs == outputs and stride == 1
        self.reduce = ConvNorm(inputs, middle, 1, 1, GROUPS, eps)
        self.spatial = ConvNorm(middle, middle, 3, stride, GROUPS, eps)
        self.expand = ConvNorm(middle, outputs, 1, 1, GROUPS, eps)
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride, GROUPS, eps)
        nn.init.zeros_(self.expand.norm.weight)  # each block starts as its shortcut, as in the paper's code

    def forward(self, x_BEHW: Tensor) -> Tensor:
        inner = F.relu(self.reduce(x_BEHW))
        inner = F.relu(self.spatial(inner))
        return F.relu(self.expand(inner) + self.shortcut(x_BEHW))


class ResNet(nn.Module):
    """A root of stride 4, then stages of bottlenecks: B C H W -> B E H/s W/s."""

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
        x = F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)  # zeros never win against what a ReLU gave
        return self.stages(x)


@dataclass(frozen=True, kw_only=True)
class ConvStemConfig:
    """One to three 3×3 convolutions: their channels and their strides."""

    widths: tuple[int, ...]
    strides: tuple[int, ...]
    whole: bool = True  # False: no zeros behind the last pixels, so a stride of 2 leaves a place less: 32, 15, 7

    def __post_init__(self) -> None:
        for name, layers in (("widths", self.widths), ("strides", self.strides)):
            if not (type(layers) is tuple and 1 <= len(layers) <= 3 and all(type(n) is int for n in layers)):
                raise ValueError(f"{name} must be one to three whole numbers, not {layers!r}")
        if len(self.widths) != len(self.strides):
            raise ValueError(f"widths and strides must be as many, not {self.widths} and {self.strides}")
        if any(n < 1 or n % GROUP_WIDTH for n in self.widths):
            raise ValueError(f"widths must be multiples of {GROUP_WIDTH} (group norm), not {self.widths}")
        if not {1, 2, 3}.issuperset(self.strides):
            raise ValueError(f"strides must be 1, 2 or 3 (a 3×3 filter misses pixels beyond), not {self.strides}")
        if type(self.whole) is not bool:
            raise ValueError(f"whole must be True or False, not {self.whole!r}")

    @property
    def channels(self) -> int:
        """E of the feature map."""
        return self.widths[-1]

    @property
    def stride(self) -> int:
        return math.prod(self.strides)

    def places(self, pixels: int) -> int:
        """Along a side of the feature map."""
        for stride in self.strides:
            pixels = (pixels - (stride == 2 and not self.whole)) // stride
        return pixels


class ConvStem(nn.Module):
    """A few 3×3 convolutions for small images: B C H W -> B E H/s W/s, or a little less where it is not `whole`.

    After "Early Convolutions Help Transformers See Better" (arXiv 2106.14881), whose stem has batch norm.
    """

    def __init__(self, config: ConvStemConfig, channels: int, eps: float) -> None:
        super().__init__()
        inputs = (channels, *config.widths[:-1])
        layers = zip(inputs, config.widths, config.strides, strict=True)
        self.layers = nn.ModuleList(ConvNorm(C, E, 3, s, E // GROUP_WIDTH, eps, config.whole) for C, E, s in layers)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = images_BCHW
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ViTConfig):
    """A ViTConfig and a stem: either `resnet` or `conv`."""

    resnet: ResNetConfig | None = None
    conv: ConvStemConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, kind in (("resnet", self.resnet, ResNetConfig), ("conv", self.conv, ConvStemConfig)):
            if not isinstance(value, kind | None):
                raise ValueError(f"{name} must be a {kind.__name__} or None, not {value!r}")
        if (self.resnet is None) == (self.conv is None):
            raise ValueError(f"a hybrid has one stem, resnet or conv, not {'both' if self.conv else 'neither'}")
        if self.patch_size % self.stem.stride:
            raise ValueError(
                f"patch_size must be a multiple of {self.stem.stride}, the stride of its stem, not {self.patch_size}"
            )
        if not (self.conv is None or self.conv.whole) and (self.patch_size > self.stem.stride or 0 in self.grid):
            raise ValueError("a stem that is not whole gives a token for each place of its map, and at least one")

    @property
    def stem(self) -> ResNetConfig | ConvStemConfig:
        stem = self.resnet or self.conv
        assert stem is not None  # __post_init__ saw to it
        return stem

    def grid_of(self, height: int, width: int) -> Grid:
        each = self.patch_size // self.stem.stride
        return self.stem.places(height) // each, self.stem.places(width) // each


class HybridEmbedding(PatchEmbedding):
    """x_p·E (equation 1) with x_p the patches of a feature map: B C H W -> B N D, like the embedding of pixels."""

    def __init__(self, config: HybridConfig) -> None:
        (H, W), stem = config.image_size, config.stem
        of_the_map = ViTConfig(
            image_size=(stem.places(H), stem.places(W)),
            patch_size=config.patch_size // stem.stride,
            channels=config.stem.channels,
            width=config.width,
            heads=config.heads,
        )
        super().__init__(of_the_map)
        nn.init.normal_(self.project.weight, std=self.project.in_features**-0.5)  # as `initialise` does for pixels
        nn.init.zeros_(self.project.bias)
        self.stem: nn.Module
        if config.resnet is not None:
            self.stem = ResNet(config.resnet, config.channels, config.norm_eps)
        elif config.conv is not None:
            self.stem = ConvStem(config.conv, config.channels, config.norm_eps)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return super().forward(self.stem(images_BCHW))


class HybridViT(ViT):
    """`HybridViT(hybrid("R50+B/16", classes=10))`. The feature map is `model.patch_embedding.stem(images)`.

    `trace(images).patches` are pixels, as in the plain ViT: the square that a token stands for. The token saw beyond
    its edges, since the stem's filters overlap; so where a stem is not `whole`, the squares leave a margin.
    """

    def __init__(self, config: ViTConfig) -> None:
        if not isinstance(config, HybridConfig):
            raise ValueError(f"a hybrid ViT is described by a HybridConfig, which names its stem, not by {config!r}")
        super().__init__(config)
        self.patch_embedding = HybridEmbedding(config)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> HybridViT:
        return cls(hybrid(name, **changes))


HYBRIDS: dict[str, HybridConfig] = {
    # The paper's (section 4.1): the blocks of R50's last stage moved into the one before, for a stride of 16.
    "R50+B/16": HybridConfig(patch_size=16, width=768, depth=12, heads=12, resnet=ResNetConfig(blocks=(3, 4, 9))),
    # "How to train your ViT?" (arXiv 2106.10270, table 1)
    "R26+S/32": HybridConfig(patch_size=32, width=384, depth=12, heads=6, resnet=ResNetConfig(blocks=(2, 2, 2, 2))),
    "R50+L/32": HybridConfig(patch_size=32, width=1024, depth=24, heads=16, resnet=ResNetConfig(blocks=(3, 4, 6, 3))),
    # Ours, for images of 32×32 pixels: 8×8 tokens. The stem does the arithmetic of about one block, so one is left out.
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


def hybrid(name: str, **changes: Any) -> HybridConfig:
    """The hybrid called `name`, with changes: `hybrid("R26+S/32", image_size=(384, 384), classes=10)`."""
    by_lower = {known.lower(): known for known in HYBRIDS}
    if name.lower() not in by_lower:
        raise unknown("hybrid", name, HYBRIDS)
    known_fields = [field.name for field in fields(HybridConfig)]
    for change in changes:
        if change not in known_fields:
            raise unknown("setting of a hybrid", change, known_fields)
    return replace(HYBRIDS[by_lower[name.lower()]], **changes)
