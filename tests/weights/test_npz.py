"""Google's .npz files: logits agree with a NumPy implementation of the Flax models, and with timm's reader."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.common import identical
from support.references import (
    VisionTransformer,
    as_checkpoint,
    assert_same_logits,
    compute_logits,
    random_images,
    randomize_weights,
)
from vitral import weights
from vitral.errors import VitralError
from vitral.models.vit import Pooling, ViT, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions

D, h, d, M, P, L, K, SIDE = 24, 3, 8, 40, 4, 3, 5, 12  # width, heads, head, MLP, patch, depth, classes, image
N = (SIDE // P) ** 2
Arrays = dict[str, np.ndarray[Any, Any]]


SEEDS = itertools.count(1)


def save_npz(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def random_array(*shape: int, scale: float = 0.3, mean: float = 0.0) -> np.ndarray[Any, Any]:
    return (mean + scale * np.random.default_rng(next(SEEDS)).standard_normal(shape)).astype(np.float32)


def attention(folder: str) -> Arrays:
    """Kernel shapes as in Flax: (D, h, d) for query, key and value, (h, d, D) for out."""
    arrays: Arrays = {}
    for part in ("query", "key", "value"):
        arrays |= {f"{folder}/{part}/kernel": random_array(D, h, d), f"{folder}/{part}/bias": random_array(h, d)}
    return arrays | {f"{folder}/out/kernel": random_array(h, d, D), f"{folder}/out/bias": random_array(D)}


def norm(folder: str) -> Arrays:
    return {f"{folder}/scale": random_array(D, mean=1.0), f"{folder}/bias": random_array(D)}


def mlp(folder: str) -> Arrays:
    first = {f"{folder}/Dense_0/kernel": random_array(D, M), f"{folder}/Dense_0/bias": random_array(M)}
    return first | {f"{folder}/Dense_1/kernel": random_array(M, D), f"{folder}/Dense_1/bias": random_array(D)}


def block(folder: str, indices: tuple[int, int, int]) -> Arrays:
    """Flax numbers the modules of a block across types in vision_transformer and by type in big_vision."""
    a, n, m = indices
    arrays = norm(f"{folder}/LayerNorm_0") | attention(f"{folder}/MultiHeadDotProductAttention_{a}")
    return arrays | norm(f"{folder}/LayerNorm_{n}") | mlp(f"{folder}/MlpBlock_{m}")


def stem_and_head() -> Arrays:
    return {
        "embedding/kernel": random_array(P, P, 3, D),  # height, width, in, out
        "embedding/bias": random_array(D),
        **norm("Transformer/encoder_norm"),
        "head/kernel": random_array(D, K),
        "head/bias": random_array(K),
    }


def vision_transformer(pre_logits: bool = False) -> Arrays:
    arrays = stem_and_head() | {
        "cls": random_array(1, 1, D),
        "Transformer/posembed_input/pos_embedding": random_array(1, 1 + N, D),
    }
    for i in range(L):
        arrays |= block(f"Transformer/encoderblock_{i}", (1, 2, 3))
    return arrays | (
        {"pre_logits/kernel": random_array(D, D), "pre_logits/bias": random_array(D)} if pre_logits else {}
    )


def big_vision(pooling: str, scanned: bool = False) -> Arrays:
    arrays = stem_and_head() | {"pos_embedding": random_array(1, N, D)}
    blocks = [block(f"Transformer/encoderblock_{i}", (0, 1, 0)) for i in range(L)]
    if scanned:
        names = [name.replace("encoderblock_0", "encoderblock") for name in blocks[0]]
        arrays |= {n: np.stack(layers) for n, *layers in zip(names, *(b.values() for b in blocks), strict=True)}
    else:
        for block_arrays in blocks:
            arrays |= block_arrays
    if pooling == "tok":
        arrays["cls"] = random_array(1, 1, D)
    if pooling == "map":
        arrays |= {"MAPHead_0/probe": random_array(1, 1, D), **attention("MAPHead_0/MultiHeadDotProductAttention_0")}
        arrays |= norm("MAPHead_0/LayerNorm_0") | mlp("MAPHead_0/MlpBlock_0")
    return {f"params/{name}": array for name, array in arrays.items()}


class Flax:
    """Forward pass of vision_transformer and big_vision in NumPy, with the arrays as they are stored."""

    def __init__(self, arrays: Arrays) -> None:
        self.p = {name.removeprefix("params/"): array.astype(np.float64) for name, array in arrays.items()}

    def dense(self, x: Any, folder: str) -> Any:
        return x @ self.p[f"{folder}/kernel"] + self.p[f"{folder}/bias"]

    def norm(self, x: Any, folder: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * self.p[f"{folder}/scale"] + self.p[f"{folder}/bias"]

    def attend(self, queries: Any, x: Any, folder: str) -> Any:
        def project(tokens: Any, part: str) -> Any:
            kernel, bias = self.p[f"{folder}/{part}/kernel"], self.p[f"{folder}/{part}/bias"]
            return np.einsum("btD,Dhd->bthd", tokens, kernel) + bias

        q, k, v = project(queries, "query"), project(x, "key"), project(x, "value")
        scores = np.einsum("bqhd,bkhd->bhqk", q / np.sqrt(d), k)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        attn_out = np.einsum("bhqk,bkhd->bqhd", probs, v)
        return np.einsum("bqhd,hdD->bqD", attn_out, self.p[f"{folder}/out/kernel"]) + self.p[f"{folder}/out/bias"]

    def mlp(self, x: Any, folder: str) -> Any:
        x = self.dense(x, f"{folder}/Dense_0")
        x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return self.dense(x, f"{folder}/Dense_1")

    def __call__(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        images = images_BCHW.permute(0, 2, 3, 1).double().numpy()  # (B, H, W, C) as in Flax
        B, side = images.shape[0], SIDE // P
        patches = images.reshape(B, side, P, side, P, 3)
        x = (
            np.einsum("bypxqc,pqcD->byxD", patches, self.p["embedding/kernel"]).reshape(B, N, D)
            + self.p["embedding/bias"]
        )
        if "pos_embedding" in self.p:
            x = x + self.p["pos_embedding"]
        if "cls" in self.p:
            x = np.concatenate([np.broadcast_to(self.p["cls"], (B, 1, D)), x], axis=1)
        if "Transformer/posembed_input/pos_embedding" in self.p:
            x = x + self.p["Transformer/posembed_input/pos_embedding"]
        a, n, m = (0, 1, 0) if "pos_embedding" in self.p else (1, 2, 3)
        for i in range(L):
            block = f"Transformer/encoderblock_{i}"
            y = self.norm(x, f"{block}/LayerNorm_0")
            x = x + self.attend(y, y, f"{block}/MultiHeadDotProductAttention_{a}")
            x = x + self.mlp(self.norm(x, f"{block}/LayerNorm_{n}"), f"{block}/MlpBlock_{m}")
        x = self.norm(x, "Transformer/encoder_norm")
        if "MAPHead_0/probe" in self.p:
            probe = np.broadcast_to(self.p["MAPHead_0/probe"], (B, 1, D))
            y = self.attend(probe, x, "MAPHead_0/MultiHeadDotProductAttention_0")
            pooled = (y + self.mlp(self.norm(y, "MAPHead_0/LayerNorm_0"), "MAPHead_0/MlpBlock_0"))[:, 0]
        else:
            pooled = x[:, 0] if "cls" in self.p else x.mean(axis=1)
        if "pre_logits/kernel" in self.p:
            pooled = np.tanh(self.dense(pooled, "pre_logits"))
        return torch.from_numpy(self.dense(pooled, "head")).float()


LAYOUTS = {
    "vision_transformer": lambda: vision_transformer(),
    "representation layer": lambda: vision_transformer(pre_logits=True),
    "big_vision, class token": lambda: big_vision("tok"),
    "big_vision, mean": lambda: big_vision("gap"),
    "big_vision, MAP": lambda: big_vision("map"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_those_of_flax(layout: str, tmp_path: Path) -> None:
    arrays = LAYOUTS[layout]()
    save_npz(tmp_path / "reference.npz", arrays)
    checkpoint = weights.read(tmp_path / "reference.npz")
    x = random_images(SIDE, SIDE)
    assert checkpoint.format == "npz"
    assert "heads: 3, from the shape of query/kernel" in checkpoint.notes
    torch.testing.assert_close(compute_logits(checkpoint.build(), x), Flax(arrays)(x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "converted.npz", to="npz")
    with np.load(tmp_path / "converted.npz") as converted:
        if layout != "big_vision, class token":  # is written in the layout of vision_transformer
            assert {*converted.files} == {*arrays}
            assert all(np.array_equal(converted[name], arrays[name]) for name in arrays)
    assert identical(weights.read(tmp_path / "converted.npz").state, checkpoint.state)


def test_scanned_encoder_is_unstacked(tmp_path: Path) -> None:
    arrays = big_vision("map", scanned=True)
    save_npz(tmp_path / "scanned.npz", arrays)
    unstacked = dict(arrays)
    for name in [name for name in arrays if "encoderblock/" in name]:
        stacked = unstacked.pop(name)
        unstacked |= {name.replace("encoderblock/", f"encoderblock_{i}/"): stacked[i] for i in range(L)}
    x = random_images(SIDE, SIDE)
    model = weights.read(tmp_path / "scanned.npz").build()
    torch.testing.assert_close(compute_logits(model, x), Flax(unstacked)(x), atol=1e-4, rtol=0)


def test_optimizer_state_and_text_tower_are_ignored(tmp_path: Path) -> None:
    image_tower = {name.replace("params/", "params/img/"): array for name, array in big_vision("map").items()}
    save_npz(
        tmp_path / "both.npz",
        image_tower | {"params/txt/Embed_0/embedding": random_array(9, D), "opt/step": np.array(7)},
    )
    checkpoint = weights.read(tmp_path / "both.npz")
    assert "used params/img/; ignored 2 other tensors" in checkpoint.notes


def test_jax_bfloat16_is_read(tmp_path: Path) -> None:
    arrays = vision_transformer()
    bf16 = {name: torch.from_numpy(array).bfloat16() for name, array in arrays.items()}
    save_npz(tmp_path / "bf16.npz", {name: t.view(torch.uint16).numpy().view("V2") for name, t in bf16.items()})
    checkpoint = weights.read(tmp_path / "bf16.npz")
    assert {tensor.dtype for tensor in checkpoint.state.values()} == {torch.bfloat16}
    x = random_images(SIDE, SIDE)
    rounded = {name: tensor.float().numpy() for name, tensor in bf16.items()}
    torch.testing.assert_close(compute_logits(checkpoint.build(), x), Flax(rounded)(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"class_token": False, "global_pool": "map"}], ids=["class token", "MAP"])
@pytest.mark.parametrize("tiny", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["small", "Ti/16"])
def test_written_file_is_read_by_timm(tiny: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    pooling: Pooling = "attention" if changes else "class"
    side, patch, width, depth, heads = (224, 16, 192, 12, 3) if tiny else (32, 8, 48, 3, 4)
    sizes: dict[str, Any] = {"image_size": (side, side), "patch_size": patch, "width": width, "depth": depth}
    config = ViTConfig(**sizes, heads=heads, num_classes=7, pooling=pooling, activation="gelu_tanh")
    model = randomize_weights(ViT(config))
    weights.write(as_checkpoint(model), tmp_path / "written.npz", to="npz")
    reference = VisionTransformer(
        img_size=side,
        patch_size=patch,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        num_classes=7,
        act_layer="gelu_tanh",
        **changes,
    ).eval()
    with torch.no_grad():
        reference.load_pretrained(str(tmp_path / "written.npz"))
    x = random_images(side, side, count=1)
    assert_same_logits(reference, model, x)
    assert identical(weights.read(tmp_path / "written.npz").state, dict(model.state_dict()))


def test_sincos_positions_need_the_image_size_and_are_not_written(tmp_path: Path) -> None:
    arrays = big_vision("gap")
    table = arrays.pop("params/pos_embedding")
    save_npz(tmp_path / "fixed.npz", arrays)
    with pytest.raises(VitralError, match="has no position table"):
        weights.read(tmp_path / "fixed.npz")
    checkpoint = weights.read(tmp_path / "fixed.npz", CheckpointOptions(image_size=(SIDE, SIDE)))
    assert checkpoint.config.positions == "sincos"
    model, x = checkpoint.build(), random_images(SIDE, SIDE)
    assert model.position_embedding is not None
    sincos = model.position_embedding.table.numpy()
    assert sincos.shape == table.shape
    torch.testing.assert_close(
        compute_logits(model, x), Flax(arrays | {"params/pos_embedding": sincos})(x), atol=1e-4, rtol=0
    )
    weights.write(checkpoint, tmp_path / "converted.npz", to="npz")
    with np.load(tmp_path / "converted.npz") as converted:
        assert {*converted.files} == {*arrays}


def test_hybrid_stem_is_refused(tmp_path: Path) -> None:
    save_npz(tmp_path / "hybrid.npz", vision_transformer() | {"conv_root/kernel": random_array(7, 7, 3, 64)})
    with pytest.raises(VitralError, match="convolutional stem before the patches"):
        weights.read(tmp_path / "hybrid.npz")


def test_object_array_is_refused(tmp_path: Path) -> None:
    save_npz(tmp_path / "objects.npz", {"embedding/kernel": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(VitralError, match=r"refused to load .*objects\.npz: it could execute code"):
        weights.read(tmp_path / "objects.npz")
