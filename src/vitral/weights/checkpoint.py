"""Checkpoint: a model read from somewhere, under vitral's names, with all that is known about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.variants import variant_of
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.run import ModelCard
from vitral.weights.key_mapping import State
from vitral.weights.uninitialized import blank

NO_HEAD = "(no head)"  # the one class name of a model folder made from weights without a classifier


@dataclass(kw_only=True)
class Checkpoint:
    """`build()` gives the model; show `notes` before: what was read from where, and what was assumed."""

    family: str
    source: str
    config: ViTConfig
    state: State  # under vitral's names, in the number type of the source
    preprocessing: Preprocessing
    variant: str = "plain"  # of the table in vitral.models.variants
    classes: tuple[str, ...] | None = None
    headless: bool = False  # no classifier in the source: `config.classes` is 1 and its weights are zero
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: ViT, card: ModelCard) -> Checkpoint:
        return cls(
            family="vitral",
            source=card.trained_on,
            config=model.config,
            variant=variant_of(model),
            state=dict(model.state_dict()),
            preprocessing=card.preprocessing,
            classes=card.classes,
            headless=card.classes == (NO_HEAD,),
        )

    def build(self) -> ViT:
        """The model with these weights, in fp32, ready to answer."""
        model = blank(self.variant, self.config)
        model.load_state_dict(self.state)
        return model.eval()

    @property
    def card(self) -> ModelCard:
        """As a model folder wants it; classes without names are numbered."""
        numbered = (NO_HEAD,) if self.headless else tuple(f"class {k}" for k in range(self.config.classes))
        return ModelCard(
            architecture=self.config,
            preprocessing=self.preprocessing,
            classes=self.classes or numbered,
            trained_on=f"{self.family}: {self.source}",
            epoch=0,
            variant=self.variant,
        )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a person adds where the files do not say."""

    heads: int | None = None
    image_size: tuple[int, int] | None = None


@dataclass(kw_only=True)
class Written:
    """What a family's files hold: named tensors, and documents beside them."""

    tensors: State
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def refuse(where: str, reason: str) -> VitralError:
    return VitralError(
        f"{where} is no model that vitral has: {reason}",
        "read are pre-norm Vision Transformers with GELU, as timm, transformers, torchvision, vit-pytorch "
        "and Google's code make them",
    )


def described(config: ViTConfig, variant: str) -> str:
    """The architecture in one line."""
    height, width = config.image_size
    parts = [
        f"patches of {config.patch_size}, images of {height}×{width}×{config.channels}",
        f"width {config.width}, depth {config.depth}, {config.heads} heads, MLP {config.hidden_width}",
        f"{config.positions} positions, pooling {config.pooling}, {config.classes} classes",
        f"GELU {config.gelu}, norm eps {config.norm_eps:g}",
    ]
    extras = {
        f"variant {variant}": variant != "plain",
        f"{config.registers} registers": config.registers > 0,
        "layer scale": config.layer_scale is not None,
        "hidden head layer": config.head == "mlp",
        "no bias in q, k, v": not config.qkv_bias,
        "norms on q and k": config.qk_norm,
    }
    return "; ".join([*parts, *(text for text, so in extras.items() if so)])
