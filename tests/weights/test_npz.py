"""Google's .npz: a file laid out by hand as theirs are, computed as Flax would; and timm's own reader of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.common import identical
from support.references import VisionTransformer, answers, lively, ours, pictures
from vitral import weights
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig

D, h, d, M, P, L, K, SIDE = 24, 3, 8, 40, 4, 3, 5, 12  # width, heads, head, MLP, patch, depth, classes, image
N = (SIDE // P) ** 2
Arrays = dict[str, np.ndarray[Any, Any]]


def drawn(*shape: int, scale: float = 0.3, around: float = 0.0, seed: list[int] = [0]) -> np.ndarray[Any, Any]:  # noqa: B006
    seed[0] += 1
    return (around + scale * np.random.default_rng(seed[0]).standard_normal(shape)).astype(np.float32)


def attention(folder: str) -> Arrays:
    """Axes as in Flax: into the heads D × h × d, out of them h × d × D."""
    arrays: Arrays = {}
    for part in ("query", "key", "value"):
        arrays |= {f"{folder}/{part}/kernel": drawn(D, h, d), f"{folder}/{part}/bias": drawn(h, d)}
    return arrays | {f"{folder}/out/kernel": drawn(h, d, D), f"{folder}/out/bias": drawn(D)}


def norm(folder: str) -> Arrays:
    return {f"{folder}/scale": drawn(D, around=1.0), f"{folder}/bias": drawn(D)}


def mlp(folder: str) -> Arrays:
    first = {f"{folder}/Dense_0/kernel": drawn(D, M), f"{folder}/Dense_0/bias": drawn(M)}
    return first | {f"{folder}/Dense_1/kernel": drawn(M, D), f"{folder}/Dense_1/bias": drawn(D)}


def block(folder: str, numbers: tuple[int, int, int]) -> Arrays:
    """Flax counts a block's modules: through all kinds in vision_transformer, by kind in big_vision."""
    a, n, m = numbers
    arrays = norm(f"{folder}/LayerNorm_0") | attention(f"{folder}/MultiHeadDotProductAttention_{a}")
    return arrays | norm(f"{folder}/LayerNorm_{n}") | mlp(f"{folder}/MlpBlock_{m}")


def stem_and_head() -> Arrays:
    return {
        "embedding/kernel": drawn(P, P, 3, D),  # height, width, in, out
        "embedding/bias": drawn(D),
        **norm("Transformer/encoder_norm"),
        "head/kernel": drawn(D, K),
        "head/bias": drawn(K),
    }


def vision_transformer(pre_logits: bool = False) -> Arrays:
    arrays = stem_and_head() | {"cls": drawn(1, 1, D), "Transformer/posembed_input/pos_embedding": drawn(1, 1 + N, D)}
    for i in range(L):
        arrays |= block(f"Transformer/encoderblock_{i}", (1, 2, 3))
    return arrays | ({"pre_logits/kernel": drawn(D, D), "pre_logits/bias": drawn(D)} if pre_logits else {})


def big_vision(pooling: str, scanned: bool = False) -> Arrays:
    arrays = stem_and_head() | {"pos_embedding": drawn(1, N, D)}
    blocks = [block(f"Transformer/encoderblock_{i}", (0, 1, 0)) for i in range(L)]
    if scanned:
        names = [name.replace("encoderblock_0", "encoderblock") for name in blocks[0]]
        arrays |= {n: np.stack(layers) for n, *layers in zip(names, *(b.values() for b in blocks), strict=True)}
    else:
        for one in blocks:
            arrays |= one
    if pooling == "tok":
        arrays["cls"] = drawn(1, 1, D)
    if pooling == "map":
        arrays |= {"MAPHead_0/probe": drawn(1, 1, D), **attention("MAPHead_0/MultiHeadDotProductAttention_0")}
        arrays |= norm("MAPHead_0/LayerNorm_0") | mlp("MAPHead_0/MlpBlock_0")
    return {f"params/{name}": array for name, array in arrays.items()}


class Flax:
    """What vision_transformer and big_vision compute with such arrays, in NumPy, from their own axes."""

    def __init__(self, arrays: Arrays) -> None:
        self.p = {name.removeprefix("params/"): array.astype(np.float64) for name, array in arrays.items()}

    def dense(self, x: Any, folder: str) -> Any:
        return x @ self.p[f"{folder}/kernel"] + self.p[f"{folder}/bias"]

    def norm(self, x: Any, folder: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * self.p[f"{folder}/scale"] + self.p[f"{folder}/bias"]

    def attend(self, asking: Any, x: Any, folder: str) -> Any:
        def into(tokens: Any, part: str) -> Any:
            kernel, bias = self.p[f"{folder}/{part}/kernel"], self.p[f"{folder}/{part}/bias"]
            return np.einsum("btD,Dhd->bthd", tokens, kernel) + bias

        q, k, v = into(asking, "query"), into(x, "key"), into(x, "value")
        scores = np.einsum("bqhd,bkhd->bhqk", q / np.sqrt(d), k)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("bhqk,bkhd->bqhd", shares, v)
        return np.einsum("bqhd,hdD->bqD", mixed, self.p[f"{folder}/out/kernel"]) + self.p[f"{folder}/out/bias"]

    def mlp(self, x: Any, folder: str) -> Any:
        x = self.dense(x, f"{folder}/Dense_0")
        x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return self.dense(x, f"{folder}/Dense_1")

    def __call__(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        images = images_BCHW.permute(0, 2, 3, 1).double().numpy()  # b h w c, as there
        B, side = images.shape[0], SIDE // P
        cut = images.reshape(B, side, P, side, P, 3)
        x = np.einsum("bypxqc,pqcD->byxD", cut, self.p["embedding/kernel"]).reshape(B, N, D) + self.p["embedding/bias"]
        if "pos_embedding" in self.p:
            x = x + self.p["pos_embedding"]
        if "cls" in self.p:
            x = np.concatenate([np.broadcast_to(self.p["cls"], (B, 1, D)), x], axis=1)
        if "Transformer/posembed_input/pos_embedding" in self.p:
            x = x + self.p["Transformer/posembed_input/pos_embedding"]
        a, n, m = (0, 1, 0) if "pos_embedding" in self.p else (1, 2, 3)
        for i in range(L):
            at = f"Transformer/encoderblock_{i}"
            y = self.norm(x, f"{at}/LayerNorm_0")
            x = x + self.attend(y, y, f"{at}/MultiHeadDotProductAttention_{a}")
            x = x + self.mlp(self.norm(x, f"{at}/LayerNorm_{n}"), f"{at}/MlpBlock_{m}")
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
def test_a_file_laid_out_as_googles_gives_what_flax_computes(layout: str, tmp_path: Path) -> None:
    arrays = LAYOUTS[layout]()
    np.savez(tmp_path / "theirs.npz", **arrays)
    checkpoint = weights.read(tmp_path / "theirs.npz")
    x = pictures(SIDE, SIDE)
    assert checkpoint.family == "npz"
    assert "heads: 3, from the shape of query/kernel" in checkpoint.notes
    torch.testing.assert_close(answers(checkpoint.build(), x), Flax(arrays)(x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "back.npz", to="npz")
    with np.load(tmp_path / "back.npz") as back:
        if layout != "big_vision, class token":  # comes back in vision_transformer's layout
            assert {*back.files} == {*arrays}
            assert all(np.array_equal(back[name], arrays[name]) for name in arrays)
    assert identical(weights.read(tmp_path / "back.npz").state, checkpoint.state)


def test_a_scanned_encoder_is_taken_apart(tmp_path: Path) -> None:
    arrays = big_vision("map", scanned=True)
    np.savez(tmp_path / "scanned.npz", **arrays)
    apart = dict(arrays)
    for name in [name for name in arrays if "encoderblock/" in name]:
        stacked = apart.pop(name)
        apart |= {name.replace("encoderblock/", f"encoderblock_{i}/"): stacked[i] for i in range(L)}
    x = pictures(SIDE, SIDE)
    model = weights.read(tmp_path / "scanned.npz").build()
    torch.testing.assert_close(answers(model, x), Flax(apart)(x), atol=1e-4, rtol=0)


def test_an_optimizers_file_and_a_text_tower_are_passed_over(tmp_path: Path) -> None:
    tower = {name.replace("params/", "params/img/"): array for name, array in big_vision("map").items()}
    np.savez(tmp_path / "both.npz", **tower, **{"params/txt/Embed_0/embedding": drawn(9, D), "opt/step": np.array(7)})
    checkpoint = weights.read(tmp_path / "both.npz")
    assert "taken from params/img/; 2 tensors elsewhere left out" in checkpoint.notes


def test_jaxs_bfloat16_is_read(tmp_path: Path) -> None:
    arrays = vision_transformer()
    half = {name: torch.from_numpy(array).bfloat16() for name, array in arrays.items()}
    np.savez(tmp_path / "half.npz", **{name: t.view(torch.uint16).numpy().view("V2") for name, t in half.items()})
    checkpoint = weights.read(tmp_path / "half.npz")
    assert {tensor.dtype for tensor in checkpoint.state.values()} == {torch.bfloat16}
    x = pictures(SIDE, SIDE)
    rounded = {name: tensor.float().numpy() for name, tensor in half.items()}
    torch.testing.assert_close(answers(checkpoint.build(), x), Flax(rounded)(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"class_token": False, "global_pool": "map"}], ids=["class token", "MAP"])
@pytest.mark.parametrize("tiny", [False, True], ids=["small", "Ti/16"])
def test_what_vitral_writes_timm_reads_with_its_own_reader(tiny: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    pooling = "attention" if changes else "class"
    side, patch, width, depth, heads = (224, 16, 192, 12, 3) if tiny else (32, 8, 48, 3, 4)
    sizes: dict[str, Any] = {"image_size": (side, side), "patch_size": patch, "width": width, "depth": depth}
    model = lively(ViT(ViTConfig(**sizes, heads=heads, classes=7, pooling=pooling, gelu="tanh")))
    weights.write(ours(model), tmp_path / "ours.npz", to="npz")
    theirs = VisionTransformer(
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
        theirs.load_pretrained(str(tmp_path / "ours.npz"))
    x = pictures(side, side, count=1)
    torch.testing.assert_close(answers(theirs, x), answers(model, x), atol=1e-4, rtol=0)
    assert identical(weights.read(tmp_path / "ours.npz").state, dict(model.state_dict()))


def test_sines_and_cosines_need_the_image_size_and_come_back_without_a_table(tmp_path: Path) -> None:
    arrays = big_vision("gap")
    table = arrays.pop("params/pos_embedding")
    np.savez(tmp_path / "fixed.npz", **arrays)
    with pytest.raises(VitralError, match="no position table"):
        weights.read(tmp_path / "fixed.npz")
    checkpoint = weights.read(tmp_path / "fixed.npz", image_size=(SIDE, SIDE))
    assert checkpoint.config.positions == "sincos"
    model, x = checkpoint.build(), pictures(SIDE, SIDE)
    waves = model.position_embedding.table.numpy()
    assert waves.shape == table.shape
    torch.testing.assert_close(answers(model, x), Flax(arrays | {"params/pos_embedding": waves})(x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "back.npz", to="npz")
    with np.load(tmp_path / "back.npz") as back:
        assert {*back.files} == {*arrays}


def test_a_hybrids_stem_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "hybrid.npz", **vision_transformer() | {"conv_root/kernel": drawn(7, 7, 3, 64)})
    with pytest.raises(VitralError, match="convolutional network before its patches"):
        weights.read(tmp_path / "hybrid.npz")


def test_an_array_of_objects_is_refused_unread(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", **{"embedding/kernel": np.array([{"a": 1}], dtype=object)}, allow_pickle=True)
    with pytest.raises(VitralError, match=r"objects\.npz would run code when opened"):
        weights.read(tmp_path / "objects.npz")
