"""Choose a pretrained checkpoint for a dataset: `vitral train photos --init-from auto`.

    images, their size, hardware, time budget ─▶ affordable backbones ─▶ the first that the hub or the cache has

All candidates are plain ViTs of AugReg (arXiv 2106.10270), trained on ImageNet-21k and fine-tuned on ImageNet-1k, under
a permissive license and not gated. License and access are checked again on the hub before a download.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from vitral.analysis.cost import count_parameters, multiply_adds
from vitral.data.decode import ImageDecodeError, read_header
from vitral.data.files.file_dataset import list_images
from vitral.data.files.packed import is_packed
from vitral.data.names import SEQUENCE_PREFIX, is_file_dataset
from vitral.device.select import Hardware
from vitral.doctor.estimates import OVERHEAD_SECONDS, estimate_memory, estimate_seconds
from vitral.errors import VitralError
from vitral.models.presets import preset
from vitral.models.vit import ViTConfig
from vitral.recipes.options import parse_duration
from vitral.recipes.schema import DataConfig, Recipe
from vitral.training.setup import with_preset
from vitral.utils.progress import format_duration
from vitral.weights.hub import INSTALL_COMMAND, SCHEME, HubLibraryMissing, HubUnreachable, is_cached, model_info

PERMISSIVE_LICENSES = {"apache-2.0": "Apache-2.0", "mit": "MIT", "bsd-3-clause": "BSD-3-Clause"}
CATALOGUE_LICENSE = "apache-2.0"  # of all BACKBONES
WITHOUT_THE_HUB = "--init-from FILE, or train from scratch by omitting --init-from"
DEFAULT_BUDGET = 30 * 60.0  # seconds of training without --time-limit
MAX_MEMORY = 0.8  # share of the memory that training may need
SAMPLED_IMAGES = 100  # images whose size is read
TRIAL_SECONDS = 2.0  # of timed steps of the smallest backbone


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A pretrained ViT on the hub."""

    repository: str
    preset: str
    image_size: int
    top1: float  # ImageNet-1k validation accuracy in %, as timm publishes it
    min_images: int  # with fewer training images, a smaller one is as good within the uncertainty of the evaluation

    @property
    def title(self) -> str:
        return f"{self.preset} at {self.image_size} px"


def _augreg(preset: str, name: str, image_size: int, top1: float, min_images: int) -> Backbone:
    repository = f"timm/vit_{name}_patch16_{image_size}.augreg_in21k_ft_in1k"
    return Backbone(repository=repository, preset=preset, image_size=image_size, top1=top1, min_images=min_images)


BACKBONES = (  # by accuracy
    _augreg("L/16", "large", 384, 87.1, 50_000),
    _augreg("B/16", "base", 384, 86.0, 5_000),
    _augreg("L/16", "large", 224, 85.8, 50_000),
    _augreg("B/16", "base", 224, 84.5, 5_000),
    _augreg("S/16", "small", 384, 83.8, 500),
    _augreg("S/16", "small", 224, 81.4, 500),
    _augreg("Ti/16", "tiny", 384, 78.4, 0),
    _augreg("Ti/16", "tiny", 224, 75.5, 0),
)


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What the choice depends on."""

    num_train: int
    num_images: int
    num_classes: int
    median_side: float  # of the shorter side, in pixels


@dataclass(frozen=True, kw_only=True)
class BackboneChoice:
    """The chosen checkpoint, with everything that a user should know about it."""

    backbone: Backbone
    source: str  # hf:owner/name@commit, the value for --init-from
    license: str  # "Apache-2.0"
    num_bytes: int  # of the download; 0 if it is in the cache
    seconds: float  # estimated duration of the training
    reason: str
    notes: tuple[str, ...] = ()  # candidates that were passed over

    def lines(self) -> list[str]:
        """The choice in sentences, for the terminal."""
        parameters = count_parameters(_config(self.backbone)).total / 1e6
        size = f"{self.num_bytes / 1e6:,.0f} MB" if self.num_bytes else "in the cache"
        facts = f"{self.backbone.title}, {parameters:.0f} M parameters, {self.license}, {size}"
        return [f"Checkpoint {self.source.removeprefix(SCHEME).split('@')[0]}: {facts}", self.reason, *self.notes]


def choose_checkpoint(recipe: Recipe) -> BackboneChoice:
    """Choose a checkpoint for the image files that a fine-tuning recipe names, and look it up on the hub."""
    data = read_data_facts(recipe.data)
    budget = parse_duration(recipe.time_limit) if recipe.time_limit else DEFAULT_BUDGET
    return find_checkpoint(affordable_backbones(data, recipe, budget), data, budget)


def read_data_facts(data: DataConfig) -> DataFacts:
    """Count the images of a folder, list or shards, and read the size of some of them."""
    if not is_file_dataset(data.name) or data.name.startswith(SEQUENCE_PREFIX) or is_packed(Path(data.name)):
        raise VitralError(
            "--init-from auto needs a folder, CSV list or shards of images",
            f"Name a checkpoint: --init-from {SCHEME}{BACKBONES[-1].repository}",
        )
    listing = list_images(data.name, data.validation, test_split=data.test_split, exclude=data.exclude)
    train = listing.splits["train"]
    sides = []
    for location, *_ in train[:: max(len(train) // SAMPLED_IMAGES, 1)]:
        try:
            header = read_header(location.read())
        except (ImageDecodeError, OSError):  # reported when the images are loaded
            continue
        sides.append(min(header.width, header.height))
    return DataFacts(
        num_train=len(train),
        num_images=sum(map(len, listing.splits.values())),
        num_classes=len(listing.classes),
        median_side=statistics.median(sides) if sides else BACKBONES[-1].image_size,
    )


class AffordableBackbone(NamedTuple):
    backbone: Backbone
    seconds: float  # estimated duration of the training


def affordable_backbones(data: DataFacts, recipe: Recipe, budget: float) -> list[AffordableBackbone]:
    """Backbones that suit the data and whose fine-tuning fits into memory and `budget` seconds, most accurate first.

    The smallest is timed for a few steps; the others take longer by the ratio of their arithmetic. Never empty.
    """
    smallest = BACKBONES[-1]
    trial = finetune_recipe(recipe, smallest, data)
    estimate = estimate_seconds(trial, data.num_train, data.num_images, TRIAL_SECONDS)
    affordable = []
    for backbone in BACKBONES:
        ratio = multiply_adds(_config(backbone)) / multiply_adds(_config(smallest))
        seconds = OVERHEAD_SECONDS + (estimate.seconds - OVERHEAD_SECONDS) * ratio
        memory = estimate_memory(finetune_recipe(recipe, backbone, data), data.num_images, estimate.hardware)
        suits_data = data.num_train >= backbone.min_images and data.median_side >= _min_side(backbone)
        if suits_data and seconds <= budget and memory <= MAX_MEMORY * _memory_bytes(estimate.hardware):
            affordable.append(AffordableBackbone(backbone, seconds))
    return affordable or [AffordableBackbone(smallest, estimate.seconds)]


def _min_side(backbone: Backbone) -> int:
    """Median shorter side from which on a backbone sees more than a smaller one; below it, images are enlarged."""
    return 0 if backbone.image_size == BACKBONES[-1].image_size else backbone.image_size


def _memory_bytes(hardware: Hardware) -> float:
    return hardware.gpu_memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def finetune_recipe(recipe: Recipe, backbone: Backbone, data: DataFacts) -> Recipe:
    """The recipe with the architecture of a backbone, for estimates; mean and std are placeholders."""
    size = (backbone.image_size, backbone.image_size)
    recipe = with_preset(recipe, backbone.preset)
    half = (0.5,) * recipe.model.channels
    return replace(
        recipe,
        model=replace(recipe.model, image_size=size, num_classes=data.num_classes),
        batch_size=min(recipe.batch_size, max(data.num_train, 1)),
        data=replace(recipe.data, mean=half, std=half),
    )


def _config(backbone: Backbone) -> ViTConfig:
    return preset(backbone.preset, image_size=(backbone.image_size, backbone.image_size))


def find_checkpoint(candidates: Sequence[AffordableBackbone], data: DataFacts, budget: float) -> BackboneChoice:
    """The first candidate that the hub offers freely; without the hub, the first in the cache."""
    notes: list[str] = []
    for backbone, seconds in candidates:
        try:
            info = model_info(backbone.repository)
        except HubLibraryMissing as error:
            raise VitralError(
                "checkpoints from the Hugging Face Hub require huggingface_hub",
                f"{INSTALL_COMMAND}, then --init-from {SCHEME}{backbone.repository}. Without: {WITHOUT_THE_HUB}",
            ) from error
        except HubUnreachable as error:
            return _cached_checkpoint(candidates, data, budget, error)
        except VitralError as error:
            notes.append(f"Skipped {error.what}")
            continue
        if info.is_gated or info.license not in PERMISSIVE_LICENSES:
            obstacle = "gated" if info.is_gated else f"under the license {info.license or 'unknown'}"
            notes.append(f"Skipped {backbone.repository}, which is now {obstacle}")
            continue
        return BackboneChoice(
            backbone=backbone,
            source=f"{SCHEME}{backbone.repository}@{info.revision}",
            license=PERMISSIVE_LICENSES[info.license],
            num_bytes=info.num_bytes,
            seconds=seconds,
            reason=_reason(backbone, seconds, data, budget),
            notes=tuple(notes),
        )
    raise VitralError(f"no checkpoint for --init-from auto. {'; '.join(notes)}", "Name one: --init-from FILE")


def _cached_checkpoint(
    candidates: Sequence[AffordableBackbone], data: DataFacts, budget: float, error: HubUnreachable
) -> BackboneChoice:
    cached = next((candidate for candidate in candidates if is_cached(candidate.backbone.repository)), None)
    if cached is None:
        best = candidates[0].backbone
        raise VitralError(
            f"the hub is unreachable and {best.repository}, which suits these images, is not in the cache",
            f"With a network: hf download {best.repository}, then --init-from {SCHEME}{best.repository}. Without: "
            f"{WITHOUT_THE_HUB}",
        ) from error
    backbone, seconds = cached
    return BackboneChoice(
        backbone=backbone,
        source=f"{SCHEME}{backbone.repository}",
        license=PERMISSIVE_LICENSES[CATALOGUE_LICENSE],
        num_bytes=0,
        seconds=seconds,
        reason=_reason(backbone, seconds, data, budget),
        notes=() if cached == candidates[0] else ("The hub is unreachable; this is the best one in the cache",),
    )


def _reason(backbone: Backbone, seconds: float, data: DataFacts, budget: float) -> str:
    facts = f"{data.num_train:,} training images of about {data.median_side:.0f} px"
    limit = f"a limit of {format_duration(budget)} on this machine (estimate: {format_duration(seconds)})"
    if seconds > budget:
        return f"The smallest backbone for {facts}; fewer epochs may be needed for {limit}"
    return f"The most accurate of {len(BACKBONES)} backbones for {facts} and {limit}"
