"""List the tensors of any checkpoint with a guess of what each is, and write a key map to start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitral import bundled
from vitral.errors import VitralError, one_line, shell_quote, truncate_list
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json
from vitral.weights import hub
from vitral.weights.custom_map import BLOCK, MODULES
from vitral.weights.detect import detect_format
from vitral.weights.files import load_raw
from vitral.weights.guess import Guess, TensorGroup, guess_tensors
from vitral.weights.interpretation import USUAL_HEADS

MAX_NAME_WIDTH = 60  # of the first column


@dataclass(frozen=True, kw_only=True)
class CheckpointExplanation:
    """What a checkpoint contains, as far as names and shapes tell."""

    source: str
    num_tensors: int
    num_parameters: int
    format: str | None  # one of vitral.weights.FORMATS; None if no reader supports the checkpoint
    reason: str | None  # why there is no reader
    guess: Guess

    def lines(self) -> list[str]:
        """The explanation for a terminal."""
        size = f"{self.num_tensors} tensors, {self.num_parameters:,} values"
        state = f"format: {self.format}, no key map needed" if self.format else "no known format"
        lines = [f"{one_line(self.source)}: {size}; {state}", *([] if self.format else [self.reason or ""]), ""]
        rows = [
            (_name(group), "×".join(map(str, group.shape)) or "scalar", _role(group)) for group in self.guess.groups
        ]
        rows = [("Tensor", "Shape", "Best guess"), *rows]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines += [f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {role}" for name, shape, role in rows]
        lines += ["", *self._open_questions()]
        return lines

    def _open_questions(self) -> list[str]:
        if self.guess.width is None:
            return ["No numbered blocks were found: this does not look like a Transformer."]
        lines = []
        if missing := [target for target in self.guess.missing if target != "head.out.weight"]:
            lines.append(f"Not found: {truncate_list(missing, 4)}")
        if "head.out.weight" in self.guess.missing:
            lines.append("No classifier found: usable for features and fine-tuning.")
        if self.format is None:
            lines.append("Tensors do not show: norm_first, heads, activation, norm_eps, pooling and the preprocessing.")
            lines.append("State them in a key map; --write-map map.toml writes one to start from.")
        return lines


def explain(source: Path | str) -> CheckpointExplanation:
    """Read the tensors of a checkpoint of any origin and guess what they are."""
    location = str(bundled.resolve(source))
    raw = load_raw(hub.download(location) if location.startswith(hub.SCHEME) else Path(location))
    format_name, reason = None, None
    try:
        format_name = detect_format(raw)
    except VitralError as error:
        reason = error.what
    return CheckpointExplanation(
        source=str(source),
        num_tensors=len(raw.tensors),
        num_parameters=sum(tensor.numel() for tensor in raw.tensors.values()),
        format=format_name,
        reason=reason,
        guess=guess_tensors({name: tuple(tensor.shape) for name, tensor in raw.tensors.items()}),
    )


def _name(group: TensorGroup) -> str:
    name = one_line(group.pattern)
    return name if len(name) <= MAX_NAME_WIDTH else f"{name[: MAX_NAME_WIDTH - 1]}…"


def _role(group: TensorGroup) -> str:
    role = "?" if group.target is None else group.target + (" (transposed)" if group.transpose else "")
    if not group.blocks:
        return role
    first, last = min(group.blocks), max(group.blocks)
    is_range = len(group.blocks) == last - first + 1
    blocks = (
        f"blocks {first}-{last}" if is_range and first != last else f"block {truncate_list([*map(str, group.blocks)])}"
    )
    return f"{role}  [{blocks}]"


def write_starting_map(explanation: CheckpointExplanation, path: Path) -> None:
    """Write a key map with the guesses, for the user to check and complete."""
    if path.exists():
        raise VitralError(f"{path} already exists", "Choose another name; existing files are not overwritten")
    atomic_write(path, starting_map(explanation, path))


def starting_map(explanation: CheckpointExplanation, path: Path) -> str:
    source, guess = shell_quote(explanation.source), explanation.guess
    width = guess.width or 0
    if guess.uses_torch_encoder:
        layer = "torch.nn.TransformerEncoderLayer's defaults are norm_first=False (not supported) and ReLU"
    else:
        layer = "post-norm models, x = norm(x + attention(x)), are not supported"
    lines = [
        f"# Key map of {one_line(explanation.source)}: check every line against the code of the model, then run",
        f"#   vitral convert {source} DESTINATION --key-map {shell_quote(path)}",
        "",
        '# ignore = ["decoder.*"]     # tensors that the model does not need; * is any text',
        "",
        "[model]                       # what tensors do not show",
        f"# norm_first = true           # remove the # if it is true: {layer}",
        f"heads = {USUAL_HEADS[width]}                     # assumed from the width {width}"
        if width in USUAL_HEADS
        else "# heads = 4                   # attention heads: required",
        f'activation = "{"relu" if guess.uses_torch_encoder else "gelu"}"           '
        "# gelu, gelu_tanh, quick_gelu or relu: assumed",
        "norm_eps = 1e-5               # PyTorch's default",
        '# pooling = "class"           # class, mean or attention; class if there is a class token',
        "# image_size = [224, 224]     # for images that are not square",
        '# qkv_layout = "qkv h d"      # rows of a fused projection: "qkv h d", "h qkv d" or "h d qkv"',
        '# patch_layout = "c p q"      # columns of a linear patch embedding: "c p q" or "p q c"',
        '# classes = ["cat", "dog"]    # in the order of the outputs',
        "",
        "[preprocessing]",
        "# mean = [0.5, 0.5, 0.5]      # of pixels in [0, 1]",
        "# std = [0.5, 0.5, 0.5]",
        "# crop = 1.0",
        '# interpolation = "bilinear"',
        "",
        "[tensors]                     # name in the file = vitral's name; without .weight and .bias, both",
        *_tensor_lines(guess.groups),
    ]
    return "\n".join(lines) + "\n"


def _tensor_lines(groups: list[TensorGroup]) -> list[str]:
    lines, done = [], set[str]()
    for group in groups:
        target = group.target
        module = None if target is None else target.rpartition(".")[0]
        siblings = [other for other in groups if other.stem == group.stem]
        is_module = module in MODULES and not any(other.transpose for other in siblings)
        is_module = is_module and all(other.target == f"{module}.{other.leaf}" for other in siblings)
        name = group.stem if is_module else group.pattern
        if name in done:
            continue
        done.add(name)
        if target is None:
            lines.append(f'# {dump_json(name)} = "?"')
        elif group.transpose:
            lines.append(f"{dump_json(name)} = {{ to = {dump_json(target)}, transpose = true }}")
        else:
            lines.append(f"{dump_json(name)} = {dump_json(module if is_module else target)}")
    return lines or [f'# "layers.{{block}}.norm" = "{BLOCK}.norm1"']
