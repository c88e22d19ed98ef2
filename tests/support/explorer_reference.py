"""The explorer's interventions in PyTorch, as hooks on the real model: the reference for the engine in JavaScript."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from vitral.models.vit import Trace, ViT


def reference_trace(model: ViT, image_CHW: Tensor, permutation: list[int] | None = None, **interventions) -> Trace:
    """Trace of an image under interventions, named as in engine.js; positions are shuffled by `permutation`."""
    image = change_pixels(model, image_CHW, interventions)[None]
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(changed_positions(model, permutation, interventions.get("removePositions", False)))
        stack.enter_context(changed_class_token(model, image, interventions.get("classToken", "learned")))
        handles = [handle for block in range(model.config.depth) for handle in add_hooks(model, block, interventions)]
        try:
            return model.trace(image)
        finally:
            for handle in handles:
                handle.remove()


def patch_slices(model: ViT, patch: int) -> tuple[slice, slice]:
    config = model.config
    P, margin = config.patch_size, config.margin_for(*config.image_size)
    row, column = divmod(patch, config.grid[1])
    top, left = margin + row * P, margin + column * P
    return slice(top, top + P), slice(left, left + P)


def change_pixels(model: ViT, image_CHW: Tensor, interventions) -> Tensor:
    image = image_CHW.clone()
    for i, j in interventions.get("swapPatches", ()):
        a, b = patch_slices(model, i), patch_slices(model, j)
        first = image[:, *a].clone()
        image[:, *a] = image[:, *b]
        image[:, *b] = first
    for i in interventions.get("maskPatches", ()):
        image[:, *patch_slices(model, i)] = 0
    return image


@contextmanager
def replaced(*pairs: tuple[Tensor, Tensor]):
    """Overwrite tensors for a while."""
    originals = [tensor.detach().clone() for tensor, _ in pairs]
    for tensor, value in pairs:
        tensor.data.copy_(value)
    try:
        yield
    finally:
        for (tensor, _), original in zip(pairs, originals, strict=True):
            tensor.data.copy_(original)


def changed_positions(model: ViT, permutation: list[int] | None, remove: bool | str):
    pairs = []
    N = model.config.grid[0] * model.config.grid[1]
    order = torch.arange(N) if permutation is None else torch.tensor(permutation)
    if model.position_embedding is not None:
        table = model.position_embedding.table
        patches = table[:, table.shape[1] - N :][:, order]
        value = torch.cat([table[:, : table.shape[1] - N], patches], dim=1)
        pairs.append((table, torch.zeros_like(table) if remove in (True, "learned") else value))
    if model.encoder.rotary_position is not None:
        rope = model.encoder.rotary_position.rope
        value = torch.cat([rope[:, : rope.shape[1] - N], rope[:, rope.shape[1] - N :][:, order]], dim=1)
        identity = torch.stack([torch.ones_like(rope[0]), torch.zeros_like(rope[1])])
        pairs.append((rope, identity if remove in (True, "rotary") else value))
    return replaced(*pairs)


def changed_class_token(model: ViT, image_1CHW: Tensor, kind: str):
    if kind == "learned" or model.class_token is None:
        return replaced()
    mean = model.patch_embedding(image_1CHW).mean(dim=1)[None]
    return replaced((model.class_token.token, torch.zeros_like(mean) if kind == "zero" else mean))


def add_hooks(model: ViT, index: int, interventions) -> list:
    block: Any = model.encoder.blocks[index]
    d = model.config.width // model.config.heads
    is_off = {
        branch: index in interventions.get(f"{branch}Off", ()) or index in interventions.get("blocksOff", ())
        for branch in ("attention", "mlp")
    }
    handles = [
        module.register_forward_hook(lambda _, __, out: torch.zeros_like(out))
        for module, branch in ((block.attention, "attention"), (block.mlp, "mlp"))
        if is_off[branch]
    ]
    for name in interventions.get("headsOff", ()):
        of_block, head = map(int, name.split("."))
        if of_block == index:
            handles.append(block.attention.project.register_forward_pre_hook(zero_channels(head * d, (head + 1) * d)))
    for residual, branch in ((block.residual1, "attention"), (block.residual2, "mlp")):
        dropped = interventions.get("residualOff", ())
        if (index in dropped or f"{index}.{branch}" in dropped) and not is_off[branch]:
            handles.append(residual.register_forward_hook(lambda _, inputs, out: out - inputs[0]))
    temperature = interventions.get("temperature", 1)
    temperature = temperature if isinstance(temperature, int | float) else temperature.get(str(index), 1)
    handles.append(block.attention.norm_q.register_forward_hook(lambda _, __, q: q / temperature))
    merge = interventions.get("mergeTokens")
    if merge is not None and merge["block"] == index:
        prefix = model.config.num_prefix_tokens
        handles.append(
            block.register_forward_pre_hook(lambda _, inputs: (merged(inputs[0], prefix, merge["pairs"]), *inputs[1:]))
        )
    return handles


def zero_channels(start: int, stop: int):
    def hook(_, inputs):
        x = inputs[0].clone()
        x[..., start:stop] = 0
        return (x,)

    return hook


def merged(z_1TD: Tensor, prefix: int, pairs: int) -> Tensor:
    """Bipartite matching of even and odd patches; every group of matched patches becomes its mean."""
    patches = z_1TD[0, prefix:]
    unit = torch.nn.functional.normalize(patches, dim=1)
    similarity, partner = (unit[0::2] @ unit[1::2].T).max(dim=1)
    group = torch.arange(len(patches))
    chosen = similarity.topk(min(pairs, len(similarity))).indices
    group[2 * chosen] = 2 * partner[chosen] + 1
    one_hot = torch.nn.functional.one_hot(group, len(patches)).float()
    means = (one_hot.T @ patches) / one_hot.sum(dim=0).clamp_min(1)[:, None]
    return torch.cat([z_1TD[:, :prefix], means[group][None]], dim=1)
