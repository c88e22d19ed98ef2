"""The error for a training step that does not fit into memory."""

from __future__ import annotations

from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run, resume_command

GIB = 2**30


def out_of_memory_error(recipe: Recipe, hardware: Hardware, run: Run | None = None) -> VitralError:
    """The error, with flags that need less memory: to resume the run with the same result, or to start again."""
    total = hardware.gpu_memory_bytes
    kind = f"GPU memory ({hardware.name}, {total / GIB:.0f} GiB)" if total else "memory"
    what = f"out of {kind} with batch size {recipe.batch_size}"
    if recipe.pretrain is not None and recipe.pretrain.compares_images:
        return _out_of_memory_without_labels(what, recipe, run)
    if recipe.grad_accum >= recipe.batch_size:
        return VitralError(what, "Use --activation-checkpointing, a smaller --model.image-size or a smaller model")
    accumulate = f"--grad-accum {min(2 * recipe.grad_accum, recipe.batch_size)}"
    resume = f": {resume_command(run.path)} {accumulate}" if run is not None else f": {accumulate}"
    return VitralError(
        what,
        f"Keep the result with less memory{resume}\nOr start again with --batch-size {max(recipe.batch_size // 2, 1)}",
    )


def _out_of_memory_without_labels(what: str, recipe: Recipe, run: Run | None) -> VitralError:
    """Does not suggest --grad-accum: a loss that compares images would only compare those of a micro-batch."""
    smaller = f"--batch-size {max(recipe.batch_size // 2, 1)}, fewer --views.local-views"
    if recipe.activation_checkpointing:
        return VitralError(what, f"Start again with {smaller} or a smaller model")
    command = "" if run is None else f"{resume_command(run.path)} "
    return VitralError(
        what,
        f"Keep the result with less memory: {command}--activation-checkpointing\nOr start again with {smaller}",
    )
