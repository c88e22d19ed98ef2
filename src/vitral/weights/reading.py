"""What each family's reader ends with: the rest of the architecture is read off the tensors, and what is missing,
unexpected or of another shape is an error. Nothing half-matching goes through."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViTConfig
from vitral.weights.checkpoint import Asked, Checkpoint, described, refuse
from vitral.weights.files import Found
from vitral.weights.key_mapping import State
from vitral.weights.uninitialized import shapes

# Heads of the papers' and libraries' models, by width: 64 numbers a head up to L, 16 heads beyond.
HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1664: 16}


def say(flag: str, where: str, python: str) -> str:
    """What no tensor tells, a person must: `vitral convert` writes it down once, for every other command."""
    named = shlex.quote(where)
    return f"say it once: vitral convert {named} FOLDER {flag}, then use FOLDER (in Python: {python})"


def say_size(where: str) -> str:
    return say("--image-size H W", where, "image_size=(H, W)")


TheirName = Callable[[str], str | None]


def choose_heads(width: int, asked: Asked, said: int | None, by: str, notes: list[str], where: str) -> int:
    """Heads leave no trace in the tensors of most families: what config.json says, or what is usual, or ask."""
    if said is not None:
        if asked.heads not in (None, said):
            raise VitralError(f"{where} has {said} heads ({by}), not {asked.heads}", "leave heads out")
        notes.append(f"heads: {said}, from {by}")
        return said
    if asked.heads is not None:
        if asked.heads < 1 or width % asked.heads:
            raise VitralError(
                f"{where}: a width of {width} cannot be shared by {asked.heads} heads",
                f"usual is a head for every 64: {max(width // 64, 1)}",
            )
        usual = asked.heads == HEADS.get(width)  # then a training may have asked for what was assumed before
        notes.append(f"heads: {asked.heads}, {f'usual at width {width}: tensors do not tell' if usual else 'as asked'}")
        return asked.heads
    if width not in HEADS:
        raise VitralError(
            f"{where}: the tensors do not tell how many heads a model of width {width} has",
            say("--heads N", where, "heads=N"),
        )
    notes.append(f"heads: {HEADS[width]}, ASSUMED: usual at width {width}")
    return HEADS[width]


def place_rows(
    rows: int, fronts: Sequence[int], patch: int, asked: Asked, said: tuple[int, int] | None, where: str
) -> tuple[int, tuple[int, int]]:
    """How many rows of a position table stand before the patches' (one of `fronts`), and the image size."""
    size = asked.image_size or said
    for front in fronts:
        if size and size[0] % patch == size[1] % patch == 0 and math.prod(size) // patch**2 == rows - front:
            return front, size
    if asked.image_size is None:
        for front in fronts:
            side = math.isqrt(max(rows - front, 0))
            if side and side**2 == rows - front:
                return front, (side * patch, side * patch)
        raise VitralError(f"{where}: {rows} positions are no square image", say_size(where))
    height, width = asked.image_size
    raise VitralError(
        f"{where}: {rows} positions do not fit images of {height}×{width}", _that_fit(rows, fronts[0], patch, where)
    )


def _that_fit(rows: int, front: int, patch: int, where: str) -> str:
    """The image sizes that have so many patches, the squarest first; and how to get to others."""
    count = rows - front
    heights = [h for h in range(math.isqrt(max(count, 0)), 0, -1) if count % h == 0][:3]
    fitting = " or ".join(f"{h * patch} {count // h * patch}" for h in heights)
    other = f"for another size: vitral train DATA --init {shlex.quote(where)} --model.image-size H W"
    return f"these fit: --image-size {fitting}, or turned; {other}" if fitting else f"leave it out; {other}"


def architecture(
    found: Found, state: State, their_name: TheirName, layer_scale: float | None = None, **settings: Any
) -> ViTConfig:
    """The settings that a family's reader knows, and all that the tensors tell."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in state or state[name].ndim == 0:
            raise VitralError(f"{found.where} is not a whole model", f"missing: {their_name(name) or name}")
        return tuple(state[name].shape)

    blocks = [int(number[1]) for name in state if (number := re.match(r"encoder\.blocks\.(\d+)\.", name))]
    first = "encoder.blocks.0"
    width, hidden = shape("patch_embedding.project.weight")[0], shape(f"{first}.mlp.expand.weight")[0]
    if hidden == 2 * shape(f"{first}.mlp.contract.weight")[-1]:
        raise refuse(found.where, "its MLP is a SwiGLU")
    if f"{first}.norm1.weight" in state and f"{first}.norm1.bias" not in state:
        raise refuse(found.where, "its norms have no bias (RMS norm)")
    outs = _classifiers(state)
    scaled = any(name.endswith("residual1.scale") for name in state)
    try:
        return ViTConfig(
            width=width,
            depth=max(blocks) + 1,
            mlp_width=None if hidden == 4 * width else hidden,
            classes=shape(outs[0])[0] if outs else 1,
            head="mlp" if any("hidden" in name for name in state) else "linear",
            registers=shape("registers")[1] if "registers" in state else 0,
            layer_scale=(layer_scale or 1e-5) if scaled else None,
            qkv_bias=any(name.endswith("attention.qkv.bias") for name in state),
            qk_norm=any("attention.norm_q" in name for name in state),
            **settings,
        )
    except ValueError as error:
        raise VitralError(f"{found.where}: {error}", "the tensors describe no model that vitral can build") from error


def _classifiers(state: State) -> list[str]:
    return [name for name in state if name.startswith("head.") and name.endswith("out.weight")]


def finish(
    family: str,
    found: Found,
    state: State,
    unknown: list[str],
    config: ViTConfig,
    their_name: TheirName,
    preprocessing: Preprocessing,
    notes: list[str],
    *,
    variant: str = "plain",
    classes: Sequence[str] | None = None,
) -> Checkpoint:
    """The comparison with the model that the configuration describes, and all that is known in one place."""
    try:
        wanted = shapes(variant, config)
    except ValueError as error:
        raise VitralError(f"{found.where}: {error}", "the tensors describe no model that vitral can build") from error
    headless = family != "vitral" and not _classifiers(state)
    if headless:
        notes.append("no classifier in the file: a zero one of a single class stands in, for features and training")
        like = state["patch_embedding.project.weight"]
        state |= {name: like.new_zeros(tensor.shape) for name, tensor in wanted.items() if ".out." in f".{name}"}
    _compare(family, found.where, state, unknown, wanted, their_name)
    if classes is not None and len(classes) != config.classes:
        notes.append(f"{len(classes)} class names for {config.classes} classes: left out")
        classes = None
    return Checkpoint(
        family=family,
        source=found.where,
        config=config,
        variant=variant,
        state=state,
        preprocessing=preprocessing,
        classes=None if classes is None else tuple(classes),
        headless=headless,
        notes=[*found.notes, f"{family}: {described(config, variant)}", *notes],
    )


def _compare(
    family: str,
    where: str,
    state: State,
    unknown: list[str],
    wanted: dict[str, Tensor],
    their_name: TheirName,
) -> None:
    def named(names: list[str]) -> list[str]:
        return [their_name(name) or name for name in names]

    def shaped(tensor: Tensor) -> str:
        return "×".join(map(str, tensor.shape))

    both = [name for name in wanted if name in state]
    wrong = {
        "missing": named([name for name in wanted if name not in state]),
        "unexpected": [*unknown, *named([name for name in state if name not in wanted])],
        "of another shape": [
            f"{their_name(name) or name} ({shaped(state[name])}, not {shaped(wanted[name])})"
            for name in both
            if state[name].shape != wanted[name].shape
        ],
        "not numbers with a fraction": [
            f"{their_name(name) or name} ({state[name].dtype})" for name in both if not state[name].is_floating_point()
        ],
    }
    if any(wrong.values()):
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in wrong.items() if names)
        lists = [f"{kind}: {', '.join(names[:8])}{_more(names, 8)}" for kind, names in wrong.items() if names]
        raise VitralError(f"{where} does not match a {family} ViT: {counts}", "; ".join(lists))


def _more(names: list[str], shown: int) -> str:
    return f" and {len(names) - shown} more" if len(names) > shown else ""
