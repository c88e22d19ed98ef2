"""Value types and configuration flags that several commands share.

The types repeat those of modules that import torch; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitral.cli.config_fields import NO_DEFAULT, ConfigField, read_config_fields
from vitral.cli.parsing import config_options
from vitral.errors import VitralError

if TYPE_CHECKING:
    from vitral.recipes.checkpoint_options import CheckpointOptions

AUTO = "auto"  # value of --init-from: a checkpoint from the hub that suits the images
EngineFlag = Literal["auto", "reference", "fp32", "bf16", "int8", "bf16-cascade", "int8-cascade", "fp8", "fp8-cascade"]
DeviceFlag = Literal["auto", "cpu", "gpu", "cuda"]
SplitFlag = Literal["test", "validation", "train"]
ResizeFlag = Literal["crop", "pad", "stretch", "native"]

JUDGE_FIELDS = tuple(
    ConfigField(path, type, NO_DEFAULT, help)
    for path, type, help in (
        ("judge", str, "labelled images: compare the weights before and after by k-NN, linear probe and fine-tuning"),
        ("judge_seeds", int, "repetitions with other labels and random seeds (default: 3)"),
        ("judge_fractions", tuple[float, ...], "fractions of the labels to learn from (default: 0.01,0.1,1)"),
        ("judge_fine_tuning", bool, "also fine-tune, which takes nearly all of the time"),
    )
)  # fmt: skip


def vit_fields() -> Iterable[ConfigField]:
    """Fields of a model configuration, as flags without a prefix."""
    return read_config_fields("vitral.models.vit", "ViTConfig")


def checkpoint_flags() -> Mapping[str, Any]:
    """The flags that state what the files of another library's checkpoint do not contain."""
    return config_options(
        lambda: read_config_fields("vitral.recipes.checkpoint_options", "CheckpointOptions"),
        group="Checkpoints of other libraries (defaults: from their files, or assumed and printed)",
    )


def judge_flags() -> Mapping[str, Any]:
    """The flags that compare the weights after training without labels with those before it."""
    return config_options(lambda: JUDGE_FIELDS, group="Measuring whether it helped (--judge)")


def judge_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `judge_flags`, as arguments of `vitral.pretrain` and `vitral.distill`."""
    options = {path.removeprefix("judge_"): value for path, value in values.items() if path != "judge"}
    if options and "judge" not in values:
        flag = f"--judge-{next(iter(options)).replace('_', '-')}"
        raise VitralError(f"{flag} is an option of --judge", "Name labelled images with --judge LABELLED")
    return {"judge": values.get("judge"), "judge_options": options}


def check_checkpoint_flags(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Refuse flags that describe a checkpoint where none is named, and say which flag sets the model's own value."""
    if not values or "init_from" in overrides:
        return
    name = next(iter(values))
    if name == "adapter":
        raise VitralError("--adapter needs the weights that it was trained on", "Name them with --init-from")
    own = f"{'data' if name in ('mean', 'std', 'crop', 'interpolation') else 'model'}.{name}".replace("_", "-")
    raise VitralError(
        f"--{name.replace('_', '-')} describes a checkpoint (--init-from)", f"Set the model's own with --{own}"
    )


def checkpoint_options(values: Mapping[str, Any]) -> CheckpointOptions:
    """The values of `checkpoint_flags`."""
    adapter = values.get("adapter")
    if adapter is not None and not Path(adapter).is_file():
        raise VitralError(
            f"no adapter file {adapter}", "Pass the adapter.safetensors in the model/ folder of a run with --tune"
        )
    from vitral.recipes.checkpoint_options import CheckpointOptions

    try:
        return CheckpointOptions(**values)
    except ValueError as error:
        name, _, reason = str(error).partition(" ")
        raise VitralError(f"--{name.replace('_', '-')} {reason}", "Omit it for the value in the checkpoint") from error
