"""Guess what the tensors of an unknown checkpoint are, from their names and shapes.

The result is a starting point for a key map, never loaded without the user's confirmation.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from vitral.weights.custom_map import BLOCK

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(kw_only=True)
class TensorGroup:
    """A tensor, or the same tensor of all blocks: `layers.{block}.fc1.weight`."""

    pattern: str
    shape: Shape
    blocks: list[int] = field(default_factory=list)  # empty outside the blocks
    target: str | None = None  # vitral's name; None if there is no guess
    transpose: bool = False

    @property
    def leaf(self) -> str:
        """weight, bias, or the last part of the name."""
        match = re.search(r"[._](weight|bias)$", self.pattern)
        return match[1] if match else self.pattern.rpartition(".")[2]

    @property
    def stem(self) -> str:
        """The name without weight or bias."""
        return re.sub(r"[._](weight|bias)$", "", self.pattern)


@dataclass(kw_only=True)
class Guess:
    groups: list[TensorGroup]
    width: int | None  # None if there are no blocks
    missing: list[str]  # vitral's names of tensors that a ViT needs and that no tensor seems to be

    @property
    def uses_torch_encoder(self) -> bool:
        """Whether blocks are named as in torch.nn.TransformerEncoderLayer, whose default is post-norm with ReLU."""
        return any(re.search(r"\{block\}\.self_attn\.in_proj_weight$", group.pattern) for group in self.groups)


def guess_tensors(shapes: Shapes) -> Guess:
    """Group the tensors of the blocks and guess which of vitral's tensors each group is."""
    groups = _group_blocks(shapes)
    block_groups = [group for group in groups if group.blocks]
    if not block_groups:
        return Guess(groups=groups, width=None, missing=[f"{BLOCK}.*"])
    width = _guess_width(block_groups)
    _guess_block(block_groups, width)
    _guess_outside([group for group in groups if not group.blocks], width)
    targets = [group.target for group in groups if group.target is not None]
    for target in {target for target in targets if targets.count(target) > 1}:
        for duplicate in [group for group in groups if group.target == target][1:]:
            duplicate.target = None
    return Guess(groups=groups, width=width, missing=_missing(set(targets)))


def _group_blocks(shapes: Shapes) -> list[TensorGroup]:
    """Replace the block number by {block} in names that differ in it only. The largest such family is the blocks."""
    families: Counter[str] = Counter()
    for name in shapes:
        for number in re.finditer(r"(?<![^.])\d+(?=\.)|(?<=_)\d+(?=\.)", name):
            families[name[: number.start()]] += 1
    if not families:
        return [TensorGroup(pattern=name, shape=shape) for name, shape in shapes.items()]
    prefix = max(families, key=lambda prefix: (families[prefix], -len(prefix)))
    groups: dict[tuple[str, Shape], TensorGroup] = {}
    for name, shape in shapes.items():
        match = re.match(re.escape(prefix) + r"(\d+)\.(.+)", name)
        pattern = f"{prefix}{{block}}.{match[2]}" if match else name
        group = groups.setdefault((pattern, shape), TensorGroup(pattern=pattern, shape=shape))
        if match:
            group.blocks.append(int(match[1]))
    return list(groups.values())


def _guess_width(groups: list[TensorGroup]) -> int:
    """The length that most vectors of a block have: norms and output biases."""
    lengths = Counter(group.shape[0] for group in groups if len(group.shape) == 1)
    if not lengths:
        lengths = Counter(min(group.shape) for group in groups if len(group.shape) == 2)
    return lengths.most_common(1)[0][0] if lengths else 0


# Names of parts, searched in the part of the name after the block's number.
QKV = r"qkv|in_proj|c_attn|to_qkv|query_key_value"
QUERY = r"(^|[._])(to_|w)?q(uery|ueries|_?proj)?([._]|$)"
KEY = r"(^|[._])(to_|w)?k(eys?|_?proj)?([._]|$)"
VALUE = r"(^|[._])(to_|w)?v(alues?|_?proj)?([._]|$)"
EXPAND = r"fc_?1|linear_?1|lin_?1|c_fc|expand|up_proj|intermediate|dense_?1|w1|mlp\.0|net\.[01]|ff\.0"
CONTRACT = r"fc_?2|linear_?2|lin_?2|c_proj|contract|down_proj|output|dense_?2|w2|mlp\.[23]|net\.[34]|ff\.[23]"
FIRST_NORM = r"(norm|ln|layer_?norm)_?(1|before|attn|attention|a)([._]|$)|(attn|attention|pre)_?norm|0\.norm"
SECOND_NORM = r"(norm|ln|layer_?norm)_?(2|after|mlp|ffn|ff|b)([._]|$)|(mlp|ffn|ff)_?norm|1\.(net\.0|norm)"
LAYER_SCALE = r"ls_?\d|gamma|lambda|layer_?scale|scale"


def _guess_block(groups: list[TensorGroup], width: int) -> None:
    D = width
    parts = {group.pattern: group.pattern.partition("{block}.")[2].lower() for group in groups}
    matrices = [group for group in groups if len(group.shape) == 2]
    squares = []
    for group in matrices:
        part = parts[group.pattern]
        is_qkv = re.search(QKV, part) is not None
        if set(group.shape) == {D, 3 * D} and (is_qkv or not re.search(f"{EXPAND}|{CONTRACT}", part)):
            _set(group, "attention.qkv", transpose=group.shape[0] == D)
        elif group.shape == (D, D) and not re.search(EXPAND, part):
            squares.append(group)
        elif re.search(EXPAND, part) or (group.shape[1] == D and not re.search(CONTRACT, part)):
            _set(group, "mlp.expand", transpose=group.shape[1] != D)
        elif D in group.shape:
            _set(group, "mlp.contract", transpose=group.shape[0] != D)
    for name, pattern in (("q", QUERY), ("k", KEY), ("v", VALUE)):
        for group in squares:
            if group.target is None and re.search(pattern, parts[group.pattern].removesuffix(f".{group.leaf}")):
                _set(group, f"attention.{name}")
                break
    for group in squares:
        if group.target is None:
            is_mlp = any(other.target == f"{BLOCK}.attention.project.weight" for other in squares)
            _set(group, "mlp.contract" if is_mlp else "attention.project")
    _guess_block_vectors(groups, parts, D)


def _guess_block_vectors(groups: list[TensorGroup], parts: Mapping[str, str], width: int) -> None:
    modules = {group.stem: group.target.removesuffix(".weight") for group in groups if group.target is not None}
    norms: dict[str, list[TensorGroup]] = {}
    scales = []
    for group in (group for group in groups if len(group.shape) == 1 and group.target is None):
        part = parts[group.pattern]
        if group.stem in modules:
            group.target = f"{modules[group.stem]}.{group.leaf}"
        elif match := re.search(r"(q|k)_?norm|norm_?(q|k)|(q|k)_?ln", part):
            group.target = f"{BLOCK}.attention.norm_{next(filter(None, match.groups()))}.{group.leaf}"
        elif group.shape == (width,) and re.search(LAYER_SCALE, part) and group.leaf not in ("weight", "bias"):
            scales.append(group)
        elif group.shape == (width,) and group.leaf in ("weight", "bias"):
            norms.setdefault(group.stem, []).append(group)
    for number, group in enumerate(scales[:2], start=1):
        group.target = f"{BLOCK}.residual{number}.scale"
    first = next((stem for stem in norms if re.search(FIRST_NORM, stem.lower())), None)
    second = next((stem for stem in norms if stem != first and re.search(SECOND_NORM, stem.lower())), None)
    others = [stem for stem in norms if stem not in (first, second)]
    first = first or (others.pop(0) if others else None)
    second = second or (others.pop(0) if others else None)
    for number, stem in ((1, first), (2, second)):
        for group in norms.get(stem or "", []):
            group.target = f"{BLOCK}.norm{number}.{group.leaf}"


def _guess_outside(groups: list[TensorGroup], width: int) -> None:
    """Patch embedding, tokens, positions, final norm and head."""
    D, modules = width, dict[str, str]()
    for group in groups:
        name, shape = group.pattern.lower(), group.shape
        if len(shape) == 4 and shape[0] == D:
            modules.setdefault(group.stem, "patch_embedding.project")
        elif re.search(r"pos", name) and len(shape) >= 2 and shape[-1] == D:
            group.target = "position_embedding.table"
        elif re.search(r"reg", name) and len(shape) == 3 and shape[-1] == D:
            group.target = "registers"
        elif group.leaf not in ("weight", "bias") and shape and shape[-1] == D and math.prod(shape) == D:
            group.target = "class_token.token"
        elif len(shape) == 2 and shape[0] == D and re.search(r"patch|embed|input|stem", name):
            modules.setdefault(group.stem, "patch_embedding.project")
        elif len(shape) == 2 and shape[1] == D and not re.search(r"text|visual_projection", name):
            modules[group.stem] = "head.out"  # the last one wins
        elif shape == (D,) and group.leaf == "weight":
            is_first = re.search(r"(^|[._])pre([._]|$)|pre_?(layr?norm|layernorm|norm|ln)|(norm|ln)_?pre", name)
            modules.setdefault(group.stem, "pre_norm" if is_first else "encoder.norm")
    for module in ("head.out", "encoder.norm"):
        for stem in [stem for stem, target in modules.items() if target == module][:-1]:
            del modules[stem]
    for group in groups:
        if group.target is None and group.stem in modules and group.leaf in ("weight", "bias"):
            group.target = f"{modules[group.stem]}.{group.leaf}"


def _set(group: TensorGroup, module: str, *, transpose: bool = False) -> None:
    group.target, group.transpose = f"{BLOCK}.{module}.weight", transpose


def _missing(targets: set[str]) -> list[str]:
    required = ["patch_embedding.project.weight"]
    block = ("norm1", "attention.project", "norm2", "mlp.expand", "mlp.contract")
    required += [f"{BLOCK}.{module}.weight" for module in block]
    has_parts = all(f"{BLOCK}.attention.{part}.weight" in targets for part in "qkv")
    required += [] if has_parts else [f"{BLOCK}.attention.qkv.weight"]
    return [target for target in (*required, "head.out.weight") if target not in targets]
