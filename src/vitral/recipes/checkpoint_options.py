"""Options for reading checkpoints of other libraries (`vitral.weights`), stored in recipes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, get_args

from vitral.data.preprocess import Interpolation
from vitral.models.vit import Activation, Pooling

PREPROCESSING_FIELDS = ("mean", "std", "crop", "interpolation")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Properties of a checkpoint that its files do not contain. Omitted ones are assumed, which the notes say.

    Architecture fields must agree with the checkpoint's config.json; preprocessing fields override it.
    """

    heads: int | None = None  # attention heads per block
    activation: Activation | None = None  # activation function of the MLPs
    pooling: Pooling | None = None  # input of the head: class token, mean of the patches, or attention pooling
    norm_eps: float | None = None  # epsilon of the layer norms
    channels: int | None = None  # channels of the images; other formats than vit-pytorch contain it
    image_size: tuple[int, int] | None = None  # height and width that the positions were trained for
    mean: tuple[float, ...] | None = None  # mean in [0, 1], one value or one per channel
    std: tuple[float, ...] | None = None  # standard deviation, one value or one per channel
    crop: float | None = None  # fraction of the resized image's shorter side that the central crop keeps
    interpolation: Interpolation | None = None  # how images are resized
    adapter: str | None = None  # adapter.safetensors of a run with --tune, to merge into these weights

    def __post_init__(self) -> None:
        for name, choices in (("activation", Activation), ("pooling", Pooling), ("interpolation", Interpolation)):
            if getattr(self, name) not in (None, *get_args(choices)):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {getattr(self, name)!r}")
        for name in ("heads", "channels"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.image_size is not None and min(self.image_size) < 1:
            raise ValueError(f"image_size must be at least 1 1, got {self.image_size[0]} {self.image_size[1]}")
        if self.norm_eps is not None and not 0 < self.norm_eps < math.inf:
            raise ValueError(f"norm_eps must be above 0, got {self.norm_eps}")
        if self.crop is not None and not 0 < self.crop <= 1:
            raise ValueError(f"crop must be above 0 and at most 1, got {self.crop}")
        if self.mean is not None and not all(map(math.isfinite, self.mean)):
            raise ValueError(f"mean must be finite, got {self.mean}")
        if self.std is not None and not all(0 < value < math.inf for value in self.std):
            raise ValueError(f"std must be above 0, got {self.std}")

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


NO_OPTIONS = CheckpointOptions()


def flag_name(name: str) -> str:
    """The command-line flag of a field."""
    return f"--{name.replace('_', '-')}"
