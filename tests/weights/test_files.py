"""Files as they come: damaged, wrapped, hostile, somebody else's. Each mistake is two lines, and nothing runs."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.common import identical
from support.references import VisionTransformer, as_checkpoint, randomize_weights
from vitral import weights
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import load_model

SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 7}
SIZES: dict[str, Any] = {"image_size": (32, 32), "patch_size": 8, "width": 48, "depth": 2, "heads": 4, "classes": 7}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return dict(randomize_weights(VisionTransformer(**SMALL)).state_dict())


def two_lines(error: VitralError) -> bool:
    return bool(error.what) and bool(error.hint) and "\n" not in error.what + error.hint


class Evil:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("how", ["zip", "legacy", "bare pickle"])
def test_a_pickle_that_would_run_code_is_refused_unread(how: str, tmp_path: Path) -> None:
    content = {"state_dict": {"cls_token": torch.zeros(1)}, "extra": Evil(tmp_path / "was here")}
    if how == "bare pickle":
        (tmp_path / "evil.pth").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / "evil.pth", _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(VitralError, match=r"would run code when opened .* refused unread") as error:
        weights.read(tmp_path / "evil.pth")
    assert two_lines(error.value)
    assert not (tmp_path / "was here").exists()


def test_torchscript_is_named(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    with pytest.raises(VitralError, match="is a TorchScript program") as error:
        weights.read(tmp_path / "script.pt")
    assert two_lines(error.value)


@pytest.mark.parametrize("kind", ["safetensors", "pth", "npz"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(kind: str, share: float, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / f"model.{kind}"
    if kind == "safetensors":
        save_file(tensors, path)
    elif kind == "pth":
        torch.save(tensors, path)
    else:
        np.savez(path, **{"embedding/kernel": np.zeros((8, 8, 3, 48), np.float32)})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(VitralError, match=str(path)) as error:
        weights.read(path, heads=4)
    assert two_lines(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth", "model.npz", "model"])
@pytest.mark.parametrize("content", [b"dear reader, this is a letter", b"\x00" * 64, b"{}", b"\xff" * 9])
def test_a_text_file_renamed_is_no_file_of_weights(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(VitralError, match="is not a file of weights") as error:
        weights.read(tmp_path / name)
    assert two_lines(error.value)


def test_a_git_lfs_pointer_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(VitralError, match="Git LFS pointer"):
        weights.read(tmp_path / "model.safetensors")


def test_a_file_under_another_ending_is_read_by_what_it_is(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "renamed.pth")
    assert weights.read(tmp_path / "renamed.pth", heads=4).family == "timm"


@pytest.mark.parametrize("legacy", [False, True])
def test_a_trainings_checkpoint_is_unwrapped_and_averaged_weights_are_preferred(
    legacy: bool, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    live = {f"module.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    averaged = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
    content = {"epoch": 3, "args": argparse.Namespace(lr=1e-3), "model": live, "model_ema": {"state_dict": averaged}}
    torch.save(content, tmp_path / "training.pth", _use_new_zipfile_serialization=not legacy)
    checkpoint = weights.read(tmp_path / "training.pth", heads=4)
    save_file(tensors, tmp_path / "bare.safetensors")
    assert identical(checkpoint.state, weights.read(tmp_path / "bare.safetensors", heads=4).state)
    assert "taken from 'model_ema' in training.pth (averaged weights)" in checkpoint.notes


def test_a_half_matching_file_lists_what_is_wrong(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    del tensors["blocks.1.mlp.fc2.bias"]
    tensors["blocks.1.attn.gate"] = torch.zeros(3)
    tensors["blocks.2.norm1.weight"] = torch.ones(47)
    tensors["norm.bias"] = torch.zeros(48, dtype=torch.int8)
    save_file(tensors, tmp_path / "half.safetensors")
    with pytest.raises(VitralError, match="1 missing, 1 unexpected, 1 of another shape, 1 not numbers") as error:
        weights.read(tmp_path / "half.safetensors", heads=4)
    assert two_lines(error.value)
    for part in (
        "missing: blocks.1.mlp.fc2.bias",
        "unexpected: blocks.1.attn.gate",
        "blocks.2.norm1.weight (47, not 48)",
        "norm.bias (torch.int8)",
    ):
        assert part in error.value.hint


def test_a_block_that_is_missing_is_noticed(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file({n: t for n, t in tensors.items() if not n.startswith("blocks.1.")}, tmp_path / "gap.safetensors")
    with pytest.raises(VitralError, match="12 missing") as error:
        weights.read(tmp_path / "gap.safetensors", heads=4)
    assert "and 4 more" in error.value.hint


@pytest.mark.parametrize("gone", ["patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "pos_embed", "cls_token"])
def test_whatever_is_missing_is_an_error(gone: str, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    del tensors[gone]
    save_file(tensors, tmp_path / "half.safetensors")
    with pytest.raises(VitralError) as error:
        weights.read(tmp_path / "half.safetensors", heads=4)
    assert two_lines(error.value)


def test_folders_say_what_they_lack(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="there is no file or folder"):
        weights.read(tmp_path / "nowhere")
    with pytest.raises(VitralError, match="holds no weights"):
        weights.read(tmp_path)
    for name in ("one.safetensors", "two.safetensors"):
        save_file(tensors, tmp_path / name)
    with pytest.raises(VitralError, match="holds 2 files of weights") as error:
        weights.read(tmp_path)
    assert error.value.hint == "name one: one.safetensors, two.safetensors"


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(VitralError, match="points out of its folder"):
        weights.read(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '"words"', '{"model_args": 7}', '{"pretrained_cfg": {"mean": "no"}}'])
def test_a_strange_config_json_is_two_lines(content: str, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(VitralError) as error:
        weights.read(tmp_path, heads=4)
    assert two_lines(error.value)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    checkpoint = as_checkpoint(ViT(ViTConfig(**SIZES)))
    weights.write(checkpoint, tmp_path / "model", to="vitral")
    weights.write(checkpoint, tmp_path / "model.npz", to="npz")
    for name, to in (("model", "timm"), ("model.npz", "npz")):
        with pytest.raises(VitralError, match="already exists"):
            weights.write(checkpoint, tmp_path / name, to=to)


@pytest.mark.parametrize(
    ("name", "to", "reason"),
    [
        ("model", "npz", "a npz checkpoint is a file"),
        ("model.pth", "npz", "a npz checkpoint is a file"),
        ("model.safetensors", "transformers", "a transformers model is a folder"),
        ("model", "keras", "no family named 'keras'"),
        ("model", "trch", "no family named 'trch'"),
    ],
)
def test_a_destination_says_what_it_must_be(name: str, to: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(VitralError, match=reason):
        weights.write(as_checkpoint(ViT(ViTConfig(**SIZES))), tmp_path / name, to=to)


def test_half_precision_stays_half_and_is_built_in_full(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(half, tmp_path / "half.safetensors")
    checkpoint = weights.read(tmp_path / "half.safetensors", heads=4)
    assert {tensor.dtype for tensor in checkpoint.state.values()} == {torch.float16}
    assert {parameter.dtype for parameter in checkpoint.build().parameters()} == {torch.float32}
    weights.write(checkpoint, tmp_path / "back.safetensors", to="timm")
    assert identical(load_file(tmp_path / "back.safetensors"), half)


@pytest.mark.parametrize("variant", ["plain", "distilled", "late-norm", "patch-norm", "class-and-mean"])
def test_each_variant_comes_back_from_a_model_folder(variant: str, tmp_path: Path) -> None:
    model = randomize_weights(
        VARIANTS[variant](ViTConfig(**SIZES, pooling="mean" if variant == "late-norm" else "class"))
    )
    weights.write(as_checkpoint(model, classes=tuple("abcdefg")), tmp_path / "model", to="vitral")
    loaded, card = load_model(tmp_path / "model")
    assert type(loaded) is type(model)
    assert card.variant == variant
    assert identical(loaded.state_dict(), model.state_dict())
    checkpoint = weights.read(tmp_path / "model")
    assert (checkpoint.family, checkpoint.variant, checkpoint.classes) == ("vitral", variant, tuple("abcdefg"))
    assert identical(checkpoint.state, dict(model.state_dict()))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(checkpoint.build()(x), model(x))
    trace = model.trace(x)
    torch.testing.assert_close(trace.logits, model(x), atol=1e-5, rtol=0)


def test_vitrals_own_weights_need_their_config_json_and_must_match_it(tmp_path: Path) -> None:
    weights.write(as_checkpoint(ViT(ViTConfig(**SIZES))), tmp_path / "model", to="vitral")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"depth": 2', '"depth": 3'))
    with pytest.raises(VitralError, match="12 missing"):
        weights.read(tmp_path / "model")
    config.unlink()
    with pytest.raises(VitralError, match=r"needs the config\.json"):
        weights.read(tmp_path / "model")


def test_a_run_folder_is_read_as_the_model_in_it(tmp_path: Path) -> None:
    model = randomize_weights(ViT(ViTConfig(**SIZES)))
    weights.write(as_checkpoint(model), tmp_path / "run" / "model", to="vitral")
    (tmp_path / "run" / "recipe.toml").write_text("")
    for source in ("run", "run/model", "run/model/weights.safetensors"):
        assert identical(weights.read(tmp_path / source).state, dict(model.state_dict()))


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, vitral.weights; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


FAMILIES = {"timm": "", "transformers": "", "torchvision": ".pth", "npz": ".npz", "vitral": ""}


@pytest.mark.parametrize("first", FAMILIES)
@pytest.mark.parametrize("second", FAMILIES)
def test_any_family_goes_to_any_other_bit_for_bit(first: str, second: str, tmp_path: Path) -> None:
    model = randomize_weights(ViT(ViTConfig(**SIZES)))
    one, two = tmp_path / f"one{FAMILIES[first]}", tmp_path / f"two{FAMILIES[second]}"
    weights.write(as_checkpoint(model), one, to=first)
    notes = weights.convert(one, two, to=second, heads=4)
    back = weights.read(two, heads=4)
    assert back.family == second
    assert identical(back.state, dict(model.state_dict()))
    assert any(f"{first}: patches of 8, images of 32×32×3" in note for note in notes)


MEASURE = """
import sys, time
from vitral.weights import exchange
def peak():  # not getrusage: that one begins with the memory of the process that forked this one
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
before, start = peak(), time.perf_counter()
exchange.convert(sys.argv[1], sys.argv[2], to=sys.argv[3])
print(before, peak(), time.perf_counter() - start)
"""


def measured(source: Path, destination: Path, to: str) -> tuple[float, float, float]:
    """Peak memory before and after, and seconds, of a conversion in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(destination), to], capture_output=True, text=True, check=True
    )
    before, after, seconds = map(float, done.stdout.split())
    return before, after, seconds


def a_file(preset: str, family: str, tmp_path: Path) -> tuple[Path, int]:
    from vitral.models.presets import preset as named

    config = named(preset)
    with torch.device("meta"):
        shapes = ViT(config).state_dict()
    checkpoint = as_checkpoint(ViT(ViTConfig(**SIZES)))
    checkpoint.config, checkpoint.state = config, {n: torch.full(t.shape, 0.1) for n, t in shapes.items()}
    source = tmp_path / f"source{FAMILIES[family]}"
    weights.write(checkpoint, source, to=family)
    return source, sum(tensor.numel() * 4 for tensor in shapes.values())


linux = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="measured through /proc")


@linux
@pytest.mark.parametrize(("family", "to"), [("transformers", "timm"), ("npz", "transformers")])
def test_a_conversion_holds_the_weights_about_once(family: str, to: str, tmp_path: Path) -> None:
    source, size = a_file("S/16", family, tmp_path)
    before, after, _ = measured(source, tmp_path / "back", to)
    assert after - before < 1.35 * size


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "to"),
    [("timm", "vitral"), ("transformers", "timm"), ("torchvision", "transformers"), ("npz", "npz"), ("vitral", "npz")],
)
def test_converting_b16_takes_under_5_seconds_and_twice_its_size(family: str, to: str, tmp_path: Path) -> None:
    source, size = a_file("B/16", family, tmp_path)
    for attempt in range(3):  # the quickest counts: other work on the machine only ever adds
        destination = tmp_path / f"back{attempt}{FAMILIES[to]}"
        before, after, seconds = measured(source, destination, to)
        if seconds < 5:
            break
    print(f"{family} → {to}: {seconds:.2f} s, {after / size:.2f}× ({before / 2**20:.0f} → {after / 2**20:.0f} MiB)")
    for folder in (source, destination):  # a third of a gigabyte each
        for file in folder.iterdir() if folder.is_dir() else [folder]:
            file.unlink()
    assert after < 2 * size
    assert seconds < 5
