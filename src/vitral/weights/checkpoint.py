"""`Checkpoint`, a model read from any format under vitral's tensor names, and types that readers and writers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.uninitialized import build_uninitialized
from vitral.models.variants import variant_name
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig, tensors_digest
from vitral.weights.interpretation import Assumption
from vitral.weights.key_mapping import State

NO_HEAD = "(no head)"  # the only class name of a model folder made from weights without a classifier


@dataclass(kw_only=True)
class Checkpoint:
    """Weights, architecture and preprocessing read from a file, folder or the hub. `build()` returns the model.

    `notes` describes the files and lists the assumptions that were made, for the user to check.
    """

    format: str  # one of vitral.weights.FORMATS
    source: str
    config: ViTConfig
    state: State  # vitral's tensor names, in the dtype of the source
    preprocessing: Preprocessing
    variant: str = "plain"  # a key of vitral.models.variants.VARIANTS
    classes: tuple[str, ...] | None = None
    headless: bool = False  # the source has no classifier; `config.num_classes` is 1 and the head's weights are zero
    notes: list[str] = field(default_factory=list)
    assumptions: tuple[Assumption, ...] = ()  # settings that are in neither the files nor the options

    @classmethod
    def from_model(cls, model: ViT, model_config: ModelConfig) -> Checkpoint:
        return cls(
            format="vitral",
            source=model_config.trained_on,
            config=model.config,
            variant=variant_name(model),
            state=dict(model.state_dict()),
            preprocessing=model_config.preprocessing,
            classes=model_config.classes,
            headless=model_config.classes == (NO_HEAD,),
        )

    def sha256(self) -> str:
        """The digest of the tensors, whatever file and format they were read from."""
        return tensors_digest(self.state)

    def build(self) -> ViT:
        """The model with these weights, in fp32 and evaluation mode."""
        model = build_uninitialized(self.variant, self.config)
        model.load_state_dict(self.state)
        return model.eval()

    @property
    def model_config(self) -> ModelConfig:
        """The config of a vitral model folder. Classes without names are numbered."""
        numbered = (NO_HEAD,) if self.headless else tuple(f"class {k}" for k in range(self.config.num_classes))
        return ModelConfig(
            architecture=self.config,
            preprocessing=self.preprocessing,
            classes=self.classes or numbered,
            trained_on=f"{self.format}: {self.source}",
            epoch=0,
            variant=self.variant,
        )


@dataclass(kw_only=True)
class ConvertedModel:
    """A model in another library's format: tensors, JSON files by name, and notes about differences."""

    tensors: State
    json_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def unsupported_model_error(source: str, reason: str) -> VitralError:
    return VitralError(
        f"vitral does not support the architecture of {source}: {reason}",
        "Supported are pre-norm Vision Transformers from timm, transformers, torchvision, vit-pytorch, OpenCLIP "
        "and Google's repositories",
    )


def describe_architecture(config: ViTConfig, variant: str, *, headless: bool = False) -> str:
    """The architecture in one line."""
    height, width = config.image_size
    classes = "no classifier" if headless else f"{config.num_classes} classes"
    parts = [
        f"patch size {config.patch_size}, images {height}×{width}×{config.channels}",
        f"width {config.width}, depth {config.depth}, {config.heads} heads, MLP width {config.hidden_width}",
        f"{config.positions} positions, {config.pooling} pooling, {classes}",
        f"activation {config.activation}, norm eps {config.norm_eps:g}",
    ]
    optional_parts = {
        f"variant {variant}": variant != "plain",
        f"{config.registers} registers": config.registers > 0,
        "layer scale": config.layer_scale is not None,
        "hidden head layer": config.head == "mlp",
        "no qkv bias": not config.qkv_bias,
        "no key bias": config.qkv_bias and not config.key_bias,
        "norm before the blocks": config.pre_norm,
        "no final norm": not config.final_norm,
        "class token not pooled": config.has_class_token and config.pooling != "class",
        "q and k norms": config.qk_norm,
    }
    return "; ".join([*parts, *(text for text, applies in optional_parts.items() if applies)])
