"""Load teachers for distillation: a model by its name, or a callable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from vitral import bundled, weights
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.runs.model_io import load_model_config, tensors_digest
from vitral.runs.run import find_model_dir
from vitral.ssl.teacher import Teacher, conversion_note, for_views

TeacherFn = Callable[..., Any]  # normalised images (B, C, H, W) to features; see vitral.ssl.teacher.as_features
CALLABLE_PREFIX = "python:"  # of the name of a callable in a recipe


def load_teacher(source: str, options: CheckpointOptions = NO_OPTIONS) -> Teacher:
    """Read a teacher from a file, folder, run, the hub or the bundled models.

    `Teacher.classes` is None unless it is a classifier whose files name the classes.
    """
    if source.startswith(CALLABLE_PREFIX):
        raise VitralError(
            f"the teacher of this recipe is a Python object, {source.removeprefix(CALLABLE_PREFIX)}",
            "Pass it again as teacher= to vitral.distill",
        )
    checkpoint = weights.read(source, options)
    classes = None if checkpoint.headless else checkpoint.classes
    return Teacher(
        checkpoint.build(),
        checkpoint.preprocessing,
        name=source,
        sha256=checkpoint.sha256(),
        classes=classes,
        notes=tuple(f"teacher: {note}" for note in checkpoint.notes if note.startswith("assumed")),
    )


def wrap_teacher(network: TeacherFn, preprocessing: Preprocessing) -> Teacher:
    """Wrap a callable as a teacher. For a module, a resumed run checks the digest of its weights."""
    sha256 = tensors_digest(dict(network.state_dict())) if isinstance(network, nn.Module) else None
    return Teacher(network, preprocessing, name=callable_name(network), sha256=sha256)


def callable_name(network: TeacherFn) -> str:
    """The name of a function or of a module's class."""
    return str(getattr(network, "__name__", type(network).__name__))


def fit_to_student(teacher: Teacher, model: ViTConfig, preprocessing: Preprocessing) -> tuple[str, ...]:
    """Set the size of the teacher's input for the student's views; returns notes, one line each."""
    patch_size = teacher.network.config.patch_size if isinstance(teacher.network, ViT) else 1
    teacher.preprocessing = for_views(teacher.preprocessing, preprocessing, patch_size)
    notes = [*teacher.notes]
    if isinstance(teacher.network, ViT) and model.width > teacher.network.config.width:
        width = teacher.network.config.width
        notes.append(f"the student is wider than its teacher ({model.width} and {width}): a projection adapts it")
    if (note := conversion_note(teacher.preprocessing, preprocessing)) is not None:
        notes.append(note)
    return tuple(notes)


def load_label_teacher(
    source: str,
    options: CheckpointOptions,
    classes: tuple[str, ...],
    model: ViTConfig,
    preprocessing: Preprocessing,
) -> tuple[Teacher, tuple[str, ...]]:
    """Load a teacher whose predictions are learned together with labels; returns the teacher and notes.

    Raises VitralError if it is not a classifier of the same classes.
    """
    teacher = load_teacher(source, options)
    if (task := model_task(source)) not in (None, "classification"):
        raise VitralError(
            f"the teacher {source} is a model for {task}, and distillation needs one class per image",
            "Use a classifier, or learn its features with vitral distill",
        )
    teacher.use_classes(classes)
    notes = tuple(note for note in fit_to_student(teacher, model, preprocessing) if "projection" not in note)
    return teacher, notes


def model_task(source: str) -> str | None:
    """The task of a model in vitral's format; None for other formats."""
    folder = Path(bundled.resolve(source))
    if not folder.is_dir() or not any((folder / name).exists() for name in ("recipe.toml", "model", "config.json")):
        return None
    config_file = find_model_dir(folder) / "config.json"
    return load_model_config(config_file).task if (config_file.parent / "weights.safetensors").is_file() else None
