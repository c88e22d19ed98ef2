"""An ensemble: the mean probabilities of several ViTs of one architecture, such as the folds of a cross-validation.

Inference, export and serving treat it as a single model. Its features are those of its members, concatenated; it has no
attention maps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from vitral.errors import VitralError
from vitral.models.vit import Trace, ViT, ViTConfig

PARTS = ("class_token", "encoder", "head", "patch_embedding", "position_embedding")
MEMBER_VARIANTS = ("plain", "distilled", "late-norm", "patch-norm", "class-and-mean")  # those with a ViTConfig


Normalisation = tuple[Sequence[float], Sequence[float]]  # per-channel mean and standard deviation


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(ViTConfig):
    """The architecture of the members, and their number."""

    members: int = 2
    member_variant: str = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (type(self.members) is int and 1 <= self.members <= 1000):
            raise ValueError(f"members must be an integer from 1 to 1000, got {self.members!r}")
        if self.member_variant not in MEMBER_VARIANTS:
            raise ValueError(f"member_variant must be one of {', '.join(MEMBER_VARIANTS)}, got {self.member_variant!r}")

    @classmethod
    def of(cls, config: ViTConfig, variant: str, members: int) -> EnsembleConfig:
        values = {field.name: getattr(config, field.name) for field in fields(ViTConfig)}
        return cls(**values, members=members, member_variant=variant)

    @property
    def member_config(self) -> ViTConfig:
        return ViTConfig(**{field.name: getattr(self, field.name) for field in fields(ViTConfig)})


class EnsembleViT(ViT):
    """Mean of the members' calibrated probabilities, as logits."""

    config: EnsembleConfig
    temperatures: Tensor  # (M,) of the members' calibrations
    scales: Tensor  # (M, C) and offsets (M, C): from the normalisation of the ensemble to that of each member
    offsets: Tensor

    def __init__(self, config: EnsembleConfig) -> None:
        from vitral.models.variants import VARIANTS

        nn.Module.__init__(self)
        self.config = config
        member_class = VARIANTS[config.member_variant]
        self.members = nn.ModuleList([member_class(config.member_config) for _ in range(config.members)])
        self.register_buffer("temperatures", torch.ones(config.members))
        self.register_buffer("scales", torch.ones(config.members, config.channels))
        self.register_buffer("offsets", torch.zeros(config.members, config.channels))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """B C H W -> B K. softmax(logits) is the mean of the members' probabilities.

        A constant per image is added, so that log Σ exp(logits), the score of OOD detection, is the members' mean.
        """
        logits_MBK = torch.stack([member(x).float() for member, x in self._member_inputs(images_BCHW)])
        scaled_MBK = logits_MBK / self.temperatures.float()[:, None, None]
        log_mean_BK = scaled_MBK.log_softmax(dim=2).logsumexp(dim=0) - math.log(len(self.members))
        return log_mean_BK + logits_MBK.logsumexp(dim=2).mean(dim=0)[:, None]

    def features(self, images_BCHW: Tensor) -> Tensor:
        """B C H W -> B (M D)."""
        return torch.cat([member.features(x) for member, x in self._member_inputs(images_BCHW)], dim=1)

    def _member_inputs(self, images_BCHW: Tensor) -> Iterator[tuple[ViT, Tensor]]:
        for member, scale, offset in zip(self.members, self.scales, self.offsets, strict=True):
            assert isinstance(member, ViT)
            yield member, images_BCHW * scale[:, None, None] + offset[:, None, None]

    def trace(self, images_BCHW: Tensor) -> Trace:
        raise self.single_model_error()

    def __getattr__(self, name: str) -> Any:
        if name in PARTS:  # of a ViT, which explanations, fused kernels and other libraries' formats need
            raise self.single_model_error()
        return super().__getattr__(name)

    def single_model_error(self) -> VitralError:
        return VitralError(
            f"this needs a single model, and this is an ensemble of {self.config.members}",
            "Pass one of its models instead, such as the folder fold-1 of the cross-validation",
        )

    @classmethod
    def average(
        cls, models: Sequence[ViT], variant: str, temperatures: Sequence[float], normalisations: Sequence[Normalisation]
    ) -> EnsembleViT:
        """The ensemble of models with the same architecture. Its input is normalised as that of the first one."""
        ensemble = cls(EnsembleConfig.of(models[0].config, variant, len(models)))
        mean, std = (torch.tensor(values) for values in normalisations[0])
        for index, (model, normalisation) in enumerate(zip(models, normalisations, strict=True)):
            ensemble.members[index].load_state_dict(model.state_dict())
            member_mean, member_std = (torch.tensor(values) for values in normalisation)
            ensemble.scales[index] = std / member_std
            ensemble.offsets[index] = (mean - member_mean) / member_std
        ensemble.temperatures.copy_(torch.tensor(temperatures))
        return ensemble.eval()
