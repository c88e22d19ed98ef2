"""Key maps written by users: which tensor of a home-made checkpoint is which tensor of vitral.

    [model]                                  # what tensors do not show
    norm_first = true                        # layer norms before attention and MLP
    heads = 4

    [tensors]                                # name in the file = vitral's name
    "patches" = "patch_embedding.project"    # weight and bias
    "layers.{block}.ln1" = "encoder.blocks.{block}.norm1"
    "layers.{block}.fc1.weight" = { to = "encoder.blocks.{block}.mlp.expand.weight", transpose = true }

This module does not import torch, so that a mistake in the file is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vitral.errors import VitralError, did_you_mean, error_reason, short_repr, truncate_list
from vitral.utils.json_toml import read_toml

BLOCK = "encoder.blocks.{block}"
# Modules with a weight and a bias, and single tensors.
MODULES = (
    "patch_embedding.project", "patch_embedding.norm_pixels", "patch_embedding.norm",
    f"{BLOCK}.norm1", f"{BLOCK}.attention.qkv", f"{BLOCK}.attention.q", f"{BLOCK}.attention.k", f"{BLOCK}.attention.v",
    f"{BLOCK}.attention.norm_q", f"{BLOCK}.attention.norm_k", f"{BLOCK}.attention.project",
    f"{BLOCK}.norm2", f"{BLOCK}.mlp.expand", f"{BLOCK}.mlp.contract",
    "pre_norm", "encoder.norm", "pooled_norm",
    "attention_pooling.q", "attention_pooling.k", "attention_pooling.v", "attention_pooling.kv",
    "attention_pooling.project", "attention_pooling.norm", "attention_pooling.mlp.expand",
    "attention_pooling.mlp.contract",
    "head.hidden", "head.out",
)  # fmt: skip
PARAMETERS = (
    "class_token.token", "position_embedding.table", "registers", "attention_pooling.probe",
    f"{BLOCK}.residual1.scale", f"{BLOCK}.residual2.scale",
)  # fmt: skip
TARGETS = (*PARAMETERS, *(f"{module}.{leaf}" for module in MODULES for leaf in ("weight", "bias")))
# Fields of CheckpointOptions with the type of their values, or of the items of a list
OPTION_TYPES: dict[str, Any] = {
    "heads": int, "activation": str, "pooling": str, "norm_eps": float, "channels": int, "image_size": [int]
}  # fmt: skip
PREPROCESSING_TYPES: dict[str, Any] = {"mean": [float], "std": [float], "crop": float, "interpolation": str}
MODEL_KEYS = ("norm_first", *OPTION_TYPES, "qkv_layout", "patch_layout", "classes")
SECTIONS = ("model", "preprocessing", "tensors", "ignore")
QKV_LAYOUTS = ("qkv h d", "h qkv d", "h d qkv")  # order in the rows of a fused projection, as in einops
PATCH_LAYOUTS = ("c p q", "p q c")  # order in the columns of a linear patch embedding: channel, row, column
POST_NORM_REASON = (
    "norm_first = false: layer norms after the residual additions (post-norm) are another function, which vitral "
    "does not implement"
)


@dataclass(frozen=True)
class TensorRule:
    """One line of [tensors]: tensors whose name matches `pattern` are `target` in vitral."""

    pattern: str
    target: str
    transpose: bool = False

    def match(self, name: str) -> str | None:
        """vitral's name of the tensor `name`; None if the rule is for others."""
        pattern, target = re.escape(self.pattern).replace(r"\{block\}", r"(?P<block>\d+)"), self.target
        if self.target in MODULES:
            pattern, target = rf"{pattern}[._](?P<leaf>weight|bias)", f"{self.target}.{{leaf}}"
        if match := re.fullmatch(pattern, name):
            for group, value in match.groupdict().items():
                target = target.replace(f"{{{group}}}", str(int(value)) if group == "block" else value)
            return target
        return None


@dataclass(frozen=True, kw_only=True)
class CustomMap:
    """The content of a key map."""

    path: Path
    rules: tuple[TensorRule, ...]
    ignore: tuple[str, ...] = ()  # names or patterns with * of tensors that are not used
    options: Mapping[str, Any]  # of CheckpointOptions
    qkv_layout: str = QKV_LAYOUTS[0]
    patch_layout: str = PATCH_LAYOUTS[0]
    classes: tuple[str, ...] | None = None

    def assign(self, source: str, names: Iterable[str]) -> tuple[dict[str, tuple[str, TensorRule]], list[str]]:
        """vitral's names of these tensors, each with the tensor's name and rule; and the names that are ignored.

        Raises VitralError for a rule without a tensor, a tensor without a rule, and two tensors of one name.
        """
        names, used = list(names), set[TensorRule]()
        assigned: dict[str, tuple[str, TensorRule]] = {}
        ignored: list[str] = []
        unmapped: list[str] = []
        for name in names:
            matches = ((rule, target) for rule in self.rules if (target := rule.match(name)) is not None)
            rule, target = next(matches, (None, ""))
            if rule is None:
                (ignored if any(fnmatchcase(name, pattern) for pattern in self.ignore) else unmapped).append(name)
                continue
            used.add(rule)
            if target in assigned:
                raise VitralError(
                    f"{self.path}: {assigned[target][0]} and {name} are both mapped to {target}",
                    "Map one of them elsewhere, or list it under ignore",
                )
            assigned[target] = name, rule
        for rule in self.rules:
            if rule not in used:
                raise VitralError(
                    f'{self.path}: "{rule.pattern}" matches no tensor of {source}'
                    f"{did_you_mean(rule.pattern, _stems(unmapped))}",
                    f"Tensors without a name so far: {truncate_list(unmapped or ['none'], 4)}",
                )
        if unmapped:
            raise VitralError(
                f"{self.path} names {len(names) - len(unmapped)} of the {len(names)} tensors of {source}; "
                f"without a name: {truncate_list(unmapped, 6)}",
                "Add them to [tensors], or to a list ignore = [...] at the top of the file if the model does not "
                "need them",
            )
        return assigned, ignored


def _stems(names: Iterable[str]) -> list[str]:
    """Names as a rule would state them: with {block}, and without weight and bias."""
    patterns = [re.sub(r"\.\d+\.", ".{block}.", name, count=1) for name in names]
    return list(dict.fromkeys(part for name in patterns for part in (name, re.sub(r"[._](weight|bias)$", "", name))))


def load_key_map(path: Path) -> CustomMap:
    """Read and check a key map. Values of [model] that `CheckpointOptions` has are checked there."""
    try:
        content = read_toml(path)
    except (OSError, ValueError) as error:
        raise VitralError(
            f"cannot read {path}: {error_reason(error)}",
            "Write a key map to start from: vitral convert SOURCE --explain --write-map map.toml",
        ) from error
    _check_keys(path, "section", content, SECTIONS)
    model, preprocessing = _section(path, content, "model"), _section(path, content, "preprocessing")
    _check_keys(path, "field of [model]", model, MODEL_KEYS)
    _check_keys(path, "field of [preprocessing]", preprocessing, PREPROCESSING_TYPES)
    _check_norm_first(path, model.get("norm_first"))
    types = OPTION_TYPES | PREPROCESSING_TYPES
    options = {key: value for key, value in (model | preprocessing).items() if key in types}
    for key, value in options.items():
        _check_type(path, key, value, types[key])
    ignore = content.get("ignore", [])
    if not _is_strings(ignore):
        raise VitralError(f"{path}: ignore must be a list of tensor names", 'For example: ignore = ["decoder.*"]')
    classes = model.get("classes")
    if classes is not None and not _is_strings(classes):
        raise VitralError(f"{path}: classes must be a list of names", 'For example: classes = ["cat", "dog"]')
    return CustomMap(
        path=path,
        rules=tuple(_parse_rule(path, name, value) for name, value in _section(path, content, "tensors").items()),
        ignore=tuple(ignore),
        options={key: tuple(value) if isinstance(value, list) else value for key, value in options.items()},
        qkv_layout=_choice(path, model, "qkv_layout", QKV_LAYOUTS),
        patch_layout=_choice(path, model, "patch_layout", PATCH_LAYOUTS),
        classes=None if classes is None else tuple(classes),
    )


def _section(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name, {})
    if not isinstance(section, dict) or (name == "tensors" and not section):
        raise VitralError(f"{path} has no section [{name}]", "See docs/how-to/convert-weights.md for an example")
    return section


def _check_keys(path: Path, kind: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            raise VitralError(
                f"{path}: no {kind} named {key!r}{did_you_mean(key, known)}", f"Known: {', '.join(known)}"
            )


def _check_norm_first(path: Path, norm_first: Any) -> None:
    if norm_first is False:
        raise VitralError(f"{path}: {POST_NORM_REASON}", "Only pre-norm models (norm_first = true) can be converted")
    if norm_first is not True:
        raise VitralError(
            f"{path}: [model] must state norm_first; tensors do not show whether layer norms come before attention "
            "and MLP",
            "Set norm_first = true if the code is x + attention(norm(x)), as with "
            "TransformerEncoderLayer(norm_first=True); post-norm is not supported",
        )


def _parse_rule(path: Path, name: str, value: Any) -> TensorRule:
    fields = {"to": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("to"), str):
        raise VitralError(
            f"{path}: {name!r} must be the name of a tensor of vitral, got {short_repr(value)}",
            f'For example: "{name}" = "{BLOCK}.norm1"',
        )
    _check_keys(path, f"field of {name!r}", fields, ("to", "transpose"))
    target = fields["to"]
    if target not in (*MODULES, *TARGETS):
        suggestion = did_you_mean(target, (*MODULES, *TARGETS))
        raise VitralError(
            f"{path}: vitral has no tensor {target!r}{suggestion}",
            f"Names: {', '.join(name.replace(BLOCK, '...') for name in (*PARAMETERS[:4], *MODULES))}; ... is {BLOCK}",
        )
    if ("{block}" in target) != ("{block}" in name):
        raise VitralError(
            f"{path}: {name!r} = {target!r} must contain {{block}}, the number of the block, on both sides or on none",
            f'For example: "layers.{{block}}.ln1" = "{BLOCK}.norm1"',
        )
    if not isinstance(fields.get("transpose", False), bool):
        raise VitralError(f"{path}: transpose of {name!r} must be true or false", "Omit it for false")
    return TensorRule(name, target, fields.get("transpose", False))


def _check_type(path: Path, name: str, value: Any, expected: Any) -> None:
    """Refuse values of another type than `expected`, a type or a list of one type; integers are numbers too."""
    item_type = expected[0] if isinstance(expected, list) else expected
    allowed = (int, float) if item_type is float else item_type
    items = value if isinstance(expected, list) and isinstance(value, list) else [value]
    is_list = isinstance(value, list) == isinstance(expected, list)
    if not is_list or any(isinstance(item, bool) or not isinstance(item, allowed) for item in items):
        noun = {int: "integer", float: "number", str: "string"}[item_type]
        text = f"a list of {noun}s" if isinstance(expected, list) else f"{'an' if noun == 'integer' else 'a'} {noun}"
        raise VitralError(f"{path}: {name} must be {text}, got {short_repr(value)}", "Correct the value, or omit it")


def _choice(path: Path, model: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value = model.get(name, choices[0])
    if value not in choices:
        options = ", ".join(f'"{choice}"' for choice in choices)
        raise VitralError(f"{path}: {name} must be one of {options}, got {short_repr(value)}", "Omit it for the first")
    return str(value)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
