"""A frozen network whose outputs another network learns.

Shapes:  B images   C channels   H, W pixels   E teacher features   N patches in a grid of h x w   K classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError, truncate_list
from vitral.models.variants.ensemble import EnsembleViT
from vitral.models.vit import ViT
from vitral.utils.text import count_text

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in Pillow
EXPECTED_FEATURES = (
    "features (B, E), a feature map (B, E, h, w), or both as a pair or as a dictionary of 'pooled' and 'patches'"
)


class TeacherFeatures(NamedTuple):
    """Pooled features (B, E), and patch features (B, F, h, w) if the teacher has them."""

    pooled: Tensor
    patches: Tensor | None


class Teacher:
    """A frozen network with its own preprocessing. Not a module, so that checkpoints do not contain it.

    Args:
        network: A ViT, or any callable from normalised images (B, C, H, W) to features; a module is moved to the device
            and set to evaluation mode.
        preprocessing: What the network expects.
        name: For messages.
        sha256: Digest of the weights, which a resumed run compares; None if they are unknown.
        classes: Names of the classes of `logits`, if the network is a classifier.
        notes: What was assumed about its files, one line each.
    """

    def __init__(
        self,
        network: Callable[..., Any],
        preprocessing: Preprocessing,
        *,
        name: str,
        sha256: str | None = None,
        classes: tuple[str, ...] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.network, self.preprocessing, self.name = network, preprocessing, name
        self.sha256, self.classes, self.notes = sha256, classes, notes
        self.class_order: Tensor | None = None
        self.device = torch.device("cpu")
        if isinstance(network, nn.Module):
            network.eval().requires_grad_(False)
            self.device = next((parameter.device for parameter in network.parameters()), self.device)
        if isinstance(network, ViT):
            network.accepts_any_grid = True  # images that are not square

    def to(self, device: torch.device) -> None:
        self.device = device
        if isinstance(self.network, nn.Module):
            self.network.to(device)
        if self.class_order is not None:
            self.class_order = self.class_order.to(device)

    @torch.no_grad()
    def features(self, images_BCHW: Tensor, source: Preprocessing) -> TeacherFeatures:
        """Features of images that are normalised as `source` does, in fp32."""
        images_BCHW = convert_images(images_BCHW, source, self.preprocessing)
        if isinstance(self.network, ViT):
            features = vit_features(self.network, images_BCHW)
        else:
            features = as_features(self.network(images_BCHW), len(images_BCHW), self.name)
        return TeacherFeatures(features.pooled.float(), None if features.patches is None else features.patches.float())

    def example(self, source: Preprocessing) -> TeacherFeatures:
        """Features of one black image, for their shapes."""
        return self.features(torch.zeros(1, *source.shape, device=self.device), source)

    @torch.no_grad()
    def logits(self, images_BCHW: Tensor, source: Preprocessing) -> Tensor:
        """Logits (B, K) of images that are normalised as `source` does, in the order of `use_classes`, in fp32."""
        logits_BK: Tensor = self.network(convert_images(images_BCHW, source, self.preprocessing)).float()
        return logits_BK if self.class_order is None else logits_BK[:, self.class_order]

    def use_classes(self, classes: tuple[str, ...]) -> None:
        """Return logits in the order of these classes. Raises VitralError if they are not those of the teacher."""
        if self.classes is None:
            raise VitralError(
                f"the teacher {self.name} has no classifier with named classes",
                "Train one with vitral train --init-from, or learn its features with vitral distill",
            )
        if missing := [name for name in classes if name not in self.classes]:
            raise self._classes_error(f"has no class {missing[0]!r}")
        if extra := [name for name in self.classes if name not in classes]:
            raise self._classes_error(f"has a class that the images do not have, {extra[0]!r}")
        order = [self.classes.index(name) for name in classes]
        self.class_order = None if order == sorted(order) else torch.tensor(order)

    def _classes_error(self, what: str) -> VitralError:
        return VitralError(
            f"the teacher {self.name} {what}",
            "Fine-tune it on these classes first (vitral train --init-from), or learn its features: vitral distill",
        )


def vit_features(vit: ViT, images_BCHW: Tensor) -> TeacherFeatures:
    """Pooled features and patch tokens after the encoder. The patches of an ensemble are not aligned: it has none."""
    if isinstance(vit, EnsembleViT):
        return TeacherFeatures(vit.features(images_BCHW), None)
    grid = vit.patch_grid(images_BCHW)
    tokens = vit.encoder(vit.embed(images_BCHW, grid), grid)
    patches = tokens[:, -grid[0] * grid[1] :].transpose(1, 2).unflatten(2, grid)
    return TeacherFeatures(vit.pool(tokens), patches)


def as_features(output: Any, num_images: int, name: str) -> TeacherFeatures:
    """What a callable returned as features: (B, E), (B, E, h, w), a pair or a dictionary of pooled and patch features.

    Patch features are (B, E, h, w), or (B, N, E) if the grid is square.
    """
    if isinstance(output, Mapping):
        if "pooled" not in output:
            raise _output_error(name, output, num_images)
        output = (output["pooled"], output.get("patches"))
    pooled, patches = output if isinstance(output, tuple | list) and len(output) == 2 else (output, None)
    if isinstance(pooled, Tensor) and pooled.ndim == 4 and patches is None:
        pooled, patches = pooled.mean(dim=(2, 3)), pooled
    if not isinstance(pooled, Tensor) or pooled.ndim != 2 or len(pooled) != num_images:
        raise _output_error(name, pooled, num_images)
    if isinstance(patches, Tensor) and patches.ndim == 3 and math.isqrt(patches.shape[1]) ** 2 == patches.shape[1]:
        side = math.isqrt(patches.shape[1])
        patches = patches.transpose(1, 2).unflatten(2, (side, side))
    if patches is not None and (not isinstance(patches, Tensor) or patches.ndim != 4 or len(patches) != num_images):
        raise _output_error(name, patches, num_images)
    return TeacherFeatures(pooled, patches)


def _output_error(name: str, output: Any, num_images: int) -> VitralError:
    actual = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    if isinstance(output, Mapping):
        actual += f" with {truncate_list([str(key) for key in output], 4)}"
    what = f"the teacher {name} returned {actual} for {count_text(num_images, 'image')}"
    return VitralError(what, f"Expected {EXPECTED_FEATURES}")


def convert_images(images_BCHW: Tensor, source: Preprocessing, target: Preprocessing) -> Tensor:
    """Images normalised as `source` does, normalised, sized and with the channels as `target` does.

    The geometry of the view is kept: whole images are resized. Images that are not square keep their aspect ratio if
    both sizes have one, as far as whole pixels allow.
    """
    if source.mean == target.mean and source.std == target.std and source.channels == target.channels:
        return resize_images(images_BCHW, target)
    (mean, std), (target_mean, target_std) = (
        [values / side.pixel_scale for values in side.mean_and_std(images_BCHW.device)] for side in (source, target)
    )
    images = convert_channels(images_BCHW.float() * std + mean, target.channels)
    return (resize_images(images, target) - target_mean) / target_std


def resize_images(images_BCHW: Tensor, target: Preprocessing) -> Tensor:
    size = target.image_size
    if tuple(images_BCHW.shape[2:]) == size:
        return images_BCHW
    return F.interpolate(images_BCHW.float(), size=size, mode=target.interpolation, antialias=True)


def convert_channels(images_BCHW: Tensor, channels: int) -> Tensor:
    """Grey to RGB by repetition, RGB to grey by luma."""
    if images_BCHW.shape[1] == channels:
        return images_BCHW
    if channels == 3:
        return images_BCHW.expand(-1, 3, -1, -1)
    red, green, blue = images_BCHW.split(1, dim=1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def for_views(teacher: Preprocessing, student: Preprocessing, patch_size: int) -> Preprocessing:
    """The teacher's preprocessing for views with the aspect ratio of the student's, in whole patches of the teacher.

    Raises VitralError for pixels that cannot be converted.
    """
    if {student.channels, teacher.channels} != {1, 3} and student.channels != teacher.channels:
        raise VitralError(
            f"the teacher expects {teacher.channels} channels, and the images have {student.channels}",
            "Only grey (1 channel) and RGB (3 channels) images can be converted into each other",
        )
    if student.dtype != teacher.dtype and "float32" in (student.dtype, teacher.dtype):
        raise VitralError(
            f"the teacher expects {teacher.pixel_format}, and the images have {student.pixel_format}",
            "Values without a fixed range cannot be converted; use a teacher that was trained on such images",
        )
    (height, width), (teacher_height, teacher_width) = student.image_size, teacher.image_size
    if height * teacher_width == width * teacher_height:
        return teacher
    scale = math.sqrt(teacher_height * teacher_width / (height * width))
    height, width = (max(1, round(side * scale / patch_size)) * patch_size for side in (height, width))
    return replace(teacher, image_size=(height, width))


def conversion_note(teacher: Preprocessing, student: Preprocessing) -> str | None:
    """One line about what is converted for the teacher; None if it has the student's preprocessing."""
    changes = []
    if teacher.channels != student.channels:
        changes.append("RGB" if teacher.channels == 3 else "greyscale")
    if teacher.image_size != student.image_size:
        changes.append("{}x{} pixels".format(*teacher.image_size))
    if (teacher.mean, teacher.std) != (student.mean, student.std):
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (teacher.mean, teacher.std))
        changes.append(f"mean {mean}, std {std}")
    return f"views are converted for the teacher: {', '.join(changes)}" if changes else None
