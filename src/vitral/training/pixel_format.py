"""Adapt a recipe to the channels and the dtype of the images."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from vitral.data.augment import AugmentConfig
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.data.pixels import PixelFormat
from vitral.errors import VitralError
from vitral.recipes.schema import Recipe

PHOTO_STD = 0.226  # standard deviation of ImageNet's pixels, mean over the channels


def with_pixel_format(recipe: Recipe, detected: PixelFormat) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe for images of the detected format, and what was changed, one sentence each.

    Photographs (8-bit grey and RGB) are converted to the channels of the recipe. Images with other channels set the
    channels of the model; their mean and standard deviation are measured, and colour augmentation is off.
    """
    data, model, notes = recipe.data, recipe.model, []
    dtype = detected.dtype if data.dtype == "auto" else data.dtype
    is_converted = dtype == "uint8" and detected.channels in (1, 3) and model.channels in (1, 3, 4)  # 4: RGBA files
    channels = model.channels if is_converted else detected.channels
    if model.channels not in (1, 3, channels):
        raise VitralError(
            f"the images have {detected.channels} channels; the recipe's model expects {model.channels}",
            f"Omit --model.channels or set it to {detected.channels}",
        )
    names = data.channel_names or detected.names
    if names and len(names) != channels:
        raise VitralError(
            f"data.channel_names are {len(names)} names; the images have {channels} channels", "Name every channel"
        )
    is_photo = PixelFormat(channels, dtype).is_photo
    mean, std = data.mean, data.std
    if not is_photo:
        notes.append(f"images with {PixelFormat(channels, dtype)}" + (f": {', '.join(names)}" if names else ""))
        if mean is not None and (len(mean) != channels or (data.dtype == "auto" and recipe.init_from)):
            mean, std = None, None  # the checkpoint's
            notes.append(
                "mean and standard deviation are measured on the training images"
                + ("; the inputs vary as much as photographs did in pretraining" if recipe.init_from else "")
            )
    augment = recipe.augment
    if not is_photo and augment.has_color_ops:
        augment = without_color_ops(augment)
        notes.append(
            f"colour augmentation ({_color_ops(recipe.augment)}) is off: it is defined for 8-bit grey and RGB images"
        )
    return replace(
        recipe,
        data=replace(data, dtype=dtype, mean=mean, std=std, channel_names=names),
        model=replace(model, channels=channels),
        augment=augment,
    ), tuple(notes)


def pretrained_spread(std: tuple[float, ...], pretrained_std: tuple[float, ...]) -> tuple[float, ...]:
    """The divisor that gives inputs the standard deviation they had when the checkpoint was pretrained.

    A checkpoint that divides by 0.5 has seen inputs with a standard deviation of 0.45, not 1.
    """
    factor = fmean(pretrained_std) / PHOTO_STD
    return tuple(factor * value for value in std)


def without_color_ops(augment: AugmentConfig) -> AugmentConfig:
    return replace(augment, policy=AutoAugmentPolicy(), jitter=0.0)


def _color_ops(augment: AugmentConfig) -> str:
    names = [augment.policy.name] if augment.policy.name != "none" else []
    return " and ".join(names + ["jitter"] * (augment.jitter > 0))
