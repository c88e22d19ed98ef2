"""timm's class Eva: DINOv3, ViTs with rotary positions and Perception Encoders.

Its blocks have the tensor names of VisionTransformer, except for biases and layer scale. Rotary positions differ in
coordinates, frequencies and in the order of channels. The order of vitral and DINOv3 is that of halves: channel j is
rotated with channel j + d/2, the first quarter by rows, the second by columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from vitral.models.vit import Rope, ViTConfig
from vitral.weights.checkpoint import unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import State, split_swiglu
from vitral.weights.writing import NotRepresentableError

# Arguments of the registered architectures, by a pattern of their names. config.json overrides them.
DEFAULTS: dict[str, Any] = {
    "rope_type": "cat", "rope_temperature": 10_000.0, "rope_grid_indexing": "ij", "rope_grid_offset": 0.0,
    "rope_rotate_half": False, "ref_feat_shape": None, "use_rot_pos_emb": False,
}  # fmt: skip
PERCEPTION = {"use_rot_pos_emb": True, "rope_grid_indexing": "xy", "rope_grid_offset": 1.0}
REGISTERED: dict[str, dict[str, Any]] = {
    r"dinov3|lingbot": {
        "use_rot_pos_emb": True, "rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True
    },
    r"_rope_mixed_": {"use_rot_pos_emb": True, "rope_type": "mixed"},
    r"_rope_reg": {"use_rot_pos_emb": True, "ref_feat_shape": 16},
    r"_rope_(ape_)?\d": {"use_rot_pos_emb": True, "rope_temperature": 100.0, "rope_grid_indexing": "xy"},
    r"eva02_\w+_224": {"use_rot_pos_emb": True, "ref_feat_shape": 16},
    r"eva_(giant|large)": {},
    r"vit_pe_\w+_gigantic": PERCEPTION | {"rope_grid_offset": 0.0, "ref_feat_shape": 32},
    r"vit_pe_core_base": PERCEPTION | {"ref_feat_shape": 14},
    r"vit_pe_core": PERCEPTION | {"ref_feat_shape": 24},
    r"vit_pe_": PERCEPTION | {"ref_feat_shape": 32},
}  # fmt: skip
DINOV3_BASE = 100.0
DINOV3_HEADS = {1280: 20, 4096: 32}  # by width, where they are not the usual ones
NAMES = r"dinov3|lingbot|_rope_|vit_pe_|eva"  # of architectures of this class
UNSUPPORTED_ARGS = ("scale_mlp", "scale_attn_inner", "num_kv_heads", "attn_only_layer_scale", "use_post_norm")
# The registered architecture to write, by norm eps. Its settings are overridden by model_args.
ARCHITECTURES = {1e-5: "vit_base_patch16_dinov3", 1e-6: "vit_base_patch16_rope_224"}
SWIGLU_ALIGNMENT = 8  # timm rounds the hidden width up to a multiple


@dataclass(frozen=True, kw_only=True)
class RopeLayout:
    """Rotary positions of a model of timm, and the order of the channels that they rotate."""

    rope: Rope
    base: float
    interleaved: bool = False  # channels 2j and 2j + 1 are rotated together, instead of j and j + d/2
    columns_first: bool = False

    def channel_order(self, head_width: int) -> torch.Tensor:
        """Index of timm's channel for each of vitral's channels, within a head."""
        pairs = torch.arange(head_width // 2)
        if self.columns_first:
            pairs = pairs.roll(head_width // 4)
        first, second = (2 * pairs, 2 * pairs + 1) if self.interleaved else (pairs, pairs + head_width // 2)
        return torch.cat([first, second])


def drop_training_tensors(raw: RawCheckpoint, notes: list[str]) -> None:
    """Remove tensors of DINOv3's own files that are not parameters, or that only pre-training uses."""
    tensors = raw.tensors
    if name := next((name for name in tensors if re.match(r"cls_norm\.", name)), None):
        raise unsupported_model_error(raw.source, f"a norm of its own for the class token ({name})")
    for mask in [name for name in tensors if name.endswith("attn.qkv.bias_mask")]:
        del tensors[mask]
        q, _, v = tensors.pop(bias := mask.removesuffix("_mask")).chunk(3)
        tensors |= {bias.replace("qkv.bias", "q_bias"): q.clone(), bias.replace("qkv.bias", "v_bias"): v.clone()}
    for name in [name for name in tensors if re.match(r"rope_embed\.periods$|local_cls_norm\.", name)]:
        del tensors[name]
        notes.append(f"{name} is not needed: ignored")


def read_rope(
    name: str,
    model_args: dict[str, Any],
    state: State,
    is_eva: bool,
    grid: tuple[int, int],
    reading: Interpretation,
) -> RopeLayout | None:
    """Rotary positions according to config.json, or as the tensors suggest; None if the model has none."""
    registered = next((args for pattern, args in REGISTERED.items() if re.search(pattern, name)), None)
    if not name or (registered is None and is_eva):
        return _assumed_rope(state, is_eva, reading)
    registered = registered or {}
    args = DEFAULTS | registered | model_args
    if not args["use_rot_pos_emb"]:
        return None
    base = float(args["rope_temperature"])
    if args["rope_type"] == "dinov3" and args["rope_rotate_half"] and not args["rope_grid_offset"]:
        return RopeLayout(rope="centered", base=base)
    if args["rope_type"] != "cat" or args["rope_rotate_half"]:
        raise unsupported_model_error(reading.source, f"rotary positions of type {args['rope_type']!r}")
    reference, offset = args["ref_feat_shape"], float(args["rope_grid_offset"])
    reference = (reference, reference) if isinstance(reference, int) else reference
    offsets = (0.0,) if reference is None else (0.0, 1.0)
    if (reference is not None and tuple(reference) != grid) or offset not in offsets:
        size = "×".join(map(str, grid))
        raise unsupported_model_error(
            reading.source, f"rotary positions for another grid than {size} (ref_feat_shape, rope_grid_offset)"
        )
    rope: Rope = "index" if reference is None else "scaled-index-1" if offset else "scaled-index"
    columns_first = args["rope_grid_indexing"] == "xy"
    return RopeLayout(rope=rope, base=base, interleaved=True, columns_first=columns_first)


def _assumed_rope(state: State, is_eva: bool, reading: Interpretation) -> RopeLayout | None:
    """Without config.json: DINOv3's rotary positions if there is no table but a class token and registers."""
    if "position_embedding.table" in state:
        if is_eva:
            raise unsupported_model_error(
                reading.source, "EVA blocks, and no config.json with a known architecture that states rotary positions"
            )
        reading.assume("no rotary positions")
        return None
    if "class_token.token" in state and "registers" in state:
        reading.assume("rotary positions of DINOv3")
        return RopeLayout(rope="centered", base=DINOV3_BASE)
    return None


def permute_heads(state: State, layout: RopeLayout, heads: int, *, inverse: bool = False) -> None:
    """Reorder the channels of queries and keys from timm's to vitral's order, or back."""
    if not (layout.interleaved or layout.columns_first):
        return
    for key in [key for key in state if ".attention.qkv." in key or re.search(r"attention\.norm_[qk]\.", key)]:
        is_norm = "norm_" in key
        head_width = len(state[key]) if is_norm else len(state[key]) // (3 * heads)
        order = layout.channel_order(head_width)
        order = order.argsort() if inverse else order
        if is_norm:
            state[key] = state[key][order]
        else:
            q, k, v = state[key].unflatten(0, (3, heads, head_width)).unbind(0)
            state[key] = torch.stack([q[:, order], k[:, order], v]).flatten(0, 2)


def rename_arguments(model_args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of VisionTransformer as Eva calls them."""
    names = {
        "reg_tokens": "num_reg_tokens", "fc_norm": "use_fc_norm", "pre_norm": "use_pre_transformer_norm",
        "final_norm": "use_post_transformer_norm",
    }  # fmt: skip
    renamed = {names.get(name, name): value for name, value in model_args.items()}
    renamed["use_post_transformer_norm"] &= not renamed["use_fc_norm"]
    return renamed


def rename_layer_scale(tensors: State) -> State:
    return {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): tensor for name, tensor in tensors.items()}


def is_needed(config: ViTConfig) -> bool:
    """Whether a model can only be written as Eva."""
    return "rotary" in config.positions or (config.qkv_bias and not config.key_bias)


def to_eva(config: ViTConfig, state: State) -> dict[str, Any]:
    """Arrange the tensors as in Eva; returns the arguments of the class that VisionTransformer does not have."""
    if config.activation not in ("gelu", "swiglu"):
        raise NotRepresentableError("timm", f"its ViTs with rotary positions do not support {config.activation}")
    if "rotary" in config.positions and config.rope == "patch":
        raise NotRepresentableError("timm", f"it does not support {config.positions} positions as in vitral")
    layout = written_layout(config)
    if "rotary" in config.positions:
        permute_heads(state, layout, config.heads, inverse=True)
    if config.qkv_bias and not config.key_bias:
        for key in [key for key in state if key.endswith("attention.qkv.bias")]:
            q, _, v = state.pop(key).chunk(3)
            state |= {key.replace("qkv", "q"): q, key.replace("qkv", "v"): v}
    is_split = config.rope == "centered" and config.hidden_width % SWIGLU_ALIGNMENT == 0  # as in DINOv3
    if config.activation == "swiglu" and is_split:
        split_swiglu(state)
    arguments: dict[str, Any] = {
        "attn_type": "rope" if config.qkv_bias and config.key_bias else "eva",
        "swiglu_mlp": config.activation == "swiglu",
        "swiglu_align_to": SWIGLU_ALIGNMENT if is_split else 0,
        "use_abs_pos_emb": "learned" in config.positions,
        "use_rot_pos_emb": "rotary" in config.positions,
        "dynamic_img_size": True,
    }
    if "rotary" in config.positions:
        arguments |= {
            "rope_type": "cat" if layout.interleaved else "dinov3",
            "rope_temperature": config.rope_base,
            "rope_rotate_half": not layout.interleaved,
            "rope_grid_indexing": "xy" if layout.columns_first else "ij",
            "rope_grid_offset": 1.0 if config.rope == "scaled-index-1" else 0.0,
            "ref_feat_shape": list(config.grid) if "scaled" in config.rope else None,
        }
    return arguments


def written_layout(config: ViTConfig) -> RopeLayout:
    """The order of channels in timm's own models with these coordinates, so that their tensors are reproduced."""
    columns_first = config.rope in ("index", "scaled-index-1") or (config.rope == "scaled-index" and config.pre_norm)
    return RopeLayout(
        rope=config.rope, base=config.rope_base, interleaved=config.rope != "centered", columns_first=columns_first
    )
