"""torchvision's vit_b_16, vit_b_32, vit_l_16, vit_l_32 and vit_h_14."""

from __future__ import annotations

from vitral.errors import VitralError
from vitral.weights.checkpoint import Asked, Checkpoint, Written, refuse
from vitral.weights.files import Found
from vitral.weights.key_mapping import Names, fold_layer_scale, with_qkv_bias
from vitral.weights.preprocessing import IMAGENET, preprocessing, seen
from vitral.weights.reading import architecture, choose_heads, finish, place_rows
from vitral.weights.writing import writable

BLOCK = "encoder.layers.encoder_layer_{i}"
NAMES = Names(
    {
        "patch_embedding.project.{leaf}": "conv_proj.{leaf}",
        "class_token.token": "class_token",
        "position_embedding.table": "encoder.pos_embedding",
        "encoder.blocks.{i}.norm1.{leaf}": f"{BLOCK}.ln_1.{{leaf}}",
        "encoder.blocks.{i}.attention.qkv.{leaf}": f"{BLOCK}.self_attention.in_proj_{{leaf}}",
        "encoder.blocks.{i}.attention.project.{leaf}": f"{BLOCK}.self_attention.out_proj.{{leaf}}",
        "encoder.blocks.{i}.norm2.{leaf}": f"{BLOCK}.ln_2.{{leaf}}",
        # the second spelling is that of earlier releases
        "encoder.blocks.{i}.mlp.expand.{leaf}": (f"{BLOCK}.mlp.0.{{leaf}}", f"{BLOCK}.mlp.linear_1.{{leaf}}"),
        "encoder.blocks.{i}.mlp.contract.{leaf}": (f"{BLOCK}.mlp.3.{{leaf}}", f"{BLOCK}.mlp.linear_2.{{leaf}}"),
        "encoder.norm.{leaf}": "encoder.ln.{leaf}",
        "head.hidden.{leaf}": "heads.pre_logits.{leaf}",
        "head.out.{leaf}": "heads.head.{leaf}",
    }
)


def to_vitral(found: Found, asked: Asked) -> Checkpoint:
    notes: list[str] = []
    state, unknown = NAMES.read(found.tensors)
    kernel, table = state["patch_embedding.project.weight"], state.get("position_embedding.table")
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
        raise refuse(found.where, f"its stem is not one convolution over square patches: {tuple(kernel.shape)}")
    if table is None or table.ndim != 3:
        raise VitralError(f"{found.where} is not a whole torchvision model", "missing: encoder.pos_embedding")
    width, channels, patch, _ = kernel.shape
    state["patch_embedding.project.weight"] = kernel.flatten(1)  # d c p q -> d (c p q)
    _, size = place_rows(table.shape[1], [1], patch, asked, None, found.where)
    config = architecture(
        found,
        state,
        NAMES.theirs,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=choose_heads(width, asked, None, "", notes, found.where),
        norm_eps=1e-6,
    )
    # IMAGENET1K_V1 is at 224; the larger ones are SWAG's, resized without a margin.
    crop, interpolation = (0.875, "bilinear") if min(size) <= 224 else (1.0, "bicubic")
    pixels = preprocessing(size, channels, IMAGENET, crop, interpolation, notes)
    notes.append(f"preprocessing ASSUMED, torchvision's usual at this size: {seen(pixels)}")
    return finish("torchvision", found, state, unknown, config, NAMES.theirs, pixels, notes)


def from_vitral(checkpoint: Checkpoint) -> Written:
    config = checkpoint.config
    if config.image_size[0] != config.image_size[1] or config.channels != 3:
        raise VitralError(
            f"torchvision's ViT takes square images with 3 channels, not {config.image_size} with {config.channels}",
            "another family may: --to vitral can",
        )
    state, notes = writable(checkpoint, "torchvision", hidden=True, norm_eps=1e-6, gelu="exact")
    if config.layer_scale is not None:
        fold_layer_scale(state)
        notes.append("layer scale is multiplied into the projections before it")
    with_qkv_bias(state)
    kernel = state["patch_embedding.project.weight"]
    state["patch_embedding.project.weight"] = kernel.unflatten(1, (config.channels, config.patch_size, -1))
    notes.append(f"a torchvision file holds no preprocessing: {seen(checkpoint.preprocessing)}")
    return Written(tensors=NAMES.write(state), notes=notes)
