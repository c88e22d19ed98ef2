"""How a checkpoint is read: each setting comes from its files, from the user, or is assumed, in this order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from vitral.data.preprocess import Interpolation, Preprocessing
from vitral.errors import VitralError, shell_quote
from vitral.recipes.checkpoint_options import PREPROCESSING_FIELDS, CheckpointOptions, flag_name
from vitral.runs.model_io import ModelConfig
from vitral.weights.preprocessing import MeanStd, describe_preprocessing, format_values

# Attention heads by width, as in papers and libraries: head dimension 64 up to L, 16 heads beyond.
USUAL_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1664: 16}
MIN_CROPPED_SIZE = 128  # pixels; models for smaller images are usually evaluated on the whole image


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A setting that neither the files nor the user state."""

    text: str
    fields: tuple[str, ...] = ()  # of CheckpointOptions; empty if vitral supports nothing else

    def __str__(self) -> str:
        return f"{self.text} ({' '.join(map(flag_name, self.fields))})" if self.fields else self.text


@dataclass(kw_only=True)
class Interpretation:
    """Resolves the settings of one checkpoint and records which of them are assumed."""

    source: str
    options: CheckpointOptions
    notes: list[str] = field(default_factory=list)
    assumptions: list[Assumption] = field(default_factory=list)

    def assume(self, text: str, *fields: str) -> None:
        self.assumptions.append(Assumption(text=text, fields=fields))

    def setting(self, name: str, default: Any, text: str, *, stored: Any = None, origin: str = "config.json") -> Any:
        """The setting `name` of CheckpointOptions: as stored, as specified by the user, or `default`.

        Args:
            text: The default in words, for the list of assumptions.
            stored: The value in the files; None if they do not contain it. The user must not contradict it.
            origin: What contains `stored`.
        """
        option = getattr(self.options, name)
        if stored is not None:
            if option not in (None, stored):
                label = name.replace("_", " ")
                raise VitralError(
                    f"{self.source}: {label} is {stored} ({origin}), got {flag_name(name)} {option}",
                    f"Omit {flag_name(name)}",
                )
            return stored
        if option is not None:
            return option
        self.assume(text, name)
        return default

    def heads(self, width: int, stored: int | None = None, origin: str = "config.json") -> int:
        """The number of attention heads, which cannot be inferred from most formats' tensors."""
        if stored is None and self.options.heads is None and width not in USUAL_HEADS:
            raise VitralError(
                f"{self.source}: the number of heads of a model of width {width} cannot be inferred from its tensors",
                self.missing_hint("--heads N"),
            )
        usual = USUAL_HEADS.get(width, 0)
        heads = int(self.setting("heads", usual, f"{usual} heads", stored=stored, origin=origin))
        if stored is not None:
            self.notes.append(f"heads: {stored}, from {origin}")
        elif width % heads:
            raise VitralError(
                f"{self.source}: width {width} is not divisible by {heads} heads",
                f"Usual is one head per 64 channels: {max(width // 64, 1)}",
            )
        return heads

    def missing_hint(self, flag: str) -> str:
        """How to specify what the tensors do not contain."""
        return f"Pass {flag}, or store it once: vitral convert {shell_quote(self.source)} FOLDER {flag}"

    def position_table(
        self, num_rows: int, prefix_options: Sequence[int], patch: int, stored_size: tuple[int, int] | None = None
    ) -> tuple[int, tuple[int, int]]:
        """How many rows of a position table precede the patches (one of `prefix_options`), and the image size."""
        size = self.options.image_size or stored_size
        for num_prefix in prefix_options:
            fits = size and size[0] % patch == size[1] % patch == 0
            if size and fits and math.prod(size) // patch**2 == num_rows - num_prefix:
                return num_prefix, size
        if self.options.image_size is None:
            for num_prefix in prefix_options:
                side = math.isqrt(max(num_rows - num_prefix, 0))
                if side and side**2 == num_rows - num_prefix:
                    self.assume(f"square images of {side * patch}×{side * patch}", "image_size")
                    return num_prefix, (side * patch, side * patch)
            raise VitralError(
                f"{self.source}: {num_rows} positions do not form a square image",
                self.missing_hint("--image-size H W"),
            )
        height, width = self.options.image_size
        raise VitralError(
            f"{self.source}: {num_rows} positions do not fit images of {height}×{width}",
            _matching_sizes_hint(num_rows - prefix_options[0], patch, self.source),
        )

    def preprocessing(
        self,
        image_size: tuple[int, int],
        channels: int,
        *,
        mean_std: MeanStd,
        crop: float,
        interpolation: str,
        stored: Mapping[str, Any] | None = None,
        origin: str = "",
    ) -> Preprocessing:
        """The preprocessing: as specified by the user, as stored, or the library's defaults.

        Args:
            image_size: Height and width of the model input.
            channels: Channels of the model input.
            mean_std: Default of the library, as are `crop` and `interpolation`.
            crop: Small images are not cropped by default.
            interpolation: Any name; unsupported ones become bicubic.
            stored: Fields of `Preprocessing` that the files contain.
            origin: What contains `stored`.
        """
        default_crop = crop if min(image_size) >= MIN_CROPPED_SIZE else 1.0
        values: dict[str, Any] = {
            "mean": mean_std[0],
            "std": mean_std[1],
            "crop": default_crop,
            "interpolation": interpolation,
        }
        values |= stored or {}
        given = {name: value for name, value in self.options.given.items() if name in PREPROCESSING_FIELDS}
        for name in ("mean", "std"):
            values[name] = _per_channel(values[name], channels)
            if name in given and len(given[name]) not in (1, channels):
                raise VitralError(
                    f"{self.source}: --{name} needs one value or one per channel, {channels}, got {len(given[name])}",
                    f"For example: --{name} 0.5",
                )
            if name in given:
                given[name] = given[name] * channels if len(given[name]) == 1 else given[name]
        if {**values, **given}["interpolation"] not in get_args(Interpolation):
            self.notes.append(f"interpolation {values['interpolation']} is not supported; bicubic is used")
            values["interpolation"] = "bicubic"
        preprocessing = Preprocessing(image_size=image_size, channels=channels, **values | given)
        source = f" from {origin}" if stored else ""
        changed = f" ({', '.join(map(flag_name, given))} as specified)" if given else ""
        self.notes.append(f"preprocessing{source}{changed}: {describe_preprocessing(preprocessing)}")
        self._assume_preprocessing(preprocessing, {*given, *(stored or {})})
        return preprocessing

    def _assume_preprocessing(self, preprocessing: Preprocessing, known: set[str]) -> None:
        assumed = [name for name in ("mean", "std") if name not in known]
        if assumed:
            text = " ".join(f"{name} {format_values(getattr(preprocessing, name))}" for name in assumed)
            self.assume(text, *assumed)
        if "crop" not in known:
            self.assume(f"crop {preprocessing.crop:g}", "crop")
        if "interpolation" not in known:
            self.assume(f"{preprocessing.interpolation} interpolation", "interpolation")

    def assumption_notes(self) -> list[str]:
        """The assumptions as one note, or none."""
        return [f"assumed: {', '.join(map(str, self.assumptions))}"] if self.assumptions else []


def check_options(source: object, options: CheckpointOptions, config: ModelConfig) -> None:
    """Refuse options that contradict a model of vitral: its config.json states everything, calibrated together."""
    for name, value in options.given.items():
        stored = getattr(config.preprocessing if name in PREPROCESSING_FIELDS else config.architecture, name)
        if isinstance(value, tuple) and len(value) == 1:
            value = value * len(stored)
        if value != stored:
            raise VitralError(
                f"{source} has {name.replace('_', ' ')} {_format(stored)}, got {flag_name(name)} {_format(value)}",
                f"Omit {flag_name(name)}: it is for checkpoints of other libraries that do not store it",
            )


def _format(value: Any) -> str:
    return format_values(value) if isinstance(value, tuple) else str(value)


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One value per channel; if the numbers of channels differ, the average of all."""
    if len(values) != channels:
        values = (sum(values) / len(values),) * channels
    return tuple(map(float, values))


def _matching_sizes_hint(num_patches: int, patch: int, source: str) -> str:
    """Image sizes with this number of patches, the squarest first, and how to train at another size."""
    heights = [h for h in range(math.isqrt(max(num_patches, 0)), 0, -1) if num_patches % h == 0][:3]
    sizes = " or ".join(f"{h * patch} {num_patches // h * patch}" for h in heights)
    other = f"for another size: vitral train DATA --init-from {shell_quote(source)} --model.image-size H W"
    return f"Matching sizes: --image-size {sizes}, or transposed; {other}" if sizes else f"Omit the size; {other}"
