"""Home-made checkpoints: key maps give the logits of the original model, and wrong maps errors that name the tensor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.references import assert_same_logits, random_images, randomize_weights, timm, transformers, vit_pytorch
from vitral import weights
from vitral.cli import main as cli
from vitral.errors import VitralError
from vitral.models.uninitialized import meta_state_dict
from vitral.models.vit import ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights.custom_map import TARGETS
from vitral.weights.explanation import explain, starting_map
from vitral.weights.guess import guess_tensors

D, HEADS, HIDDEN = 24, 3, 40


class TorchEncoderViT(nn.Module):
    """A ViT as a course would write it: a convolution, nn.TransformerEncoder and a linear layer."""

    def __init__(
        self, *, norm_first: bool = True, activation: str = "gelu", final_norm: bool = True, pre_norm: bool = False
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 8, 8)
        self.cls = nn.Parameter(torch.zeros(D))
        self.pos = nn.Embedding(17, D)
        layer = nn.TransformerEncoderLayer(
            D, HEADS, HIDDEN, batch_first=True, norm_first=norm_first, activation=activation
        )
        norm = nn.LayerNorm(D) if final_norm else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False)
        self.ln_pre = nn.LayerNorm(D) if pre_norm else nn.Identity()
        self.fc = nn.Linear(D, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.cls.expand(x.shape[0], 1, -1), x], dim=1) + self.pos.weight
        return self.fc(self.encoder(self.ln_pre(x))[:, 0])


class HomeMadeBlock(nn.Module):
    """A pre-norm block with the projections that tutorials use."""

    def __init__(self, layout: str, bias: bool) -> None:
        super().__init__()
        self.layout = layout
        self.ln_a, self.ln_b = nn.LayerNorm(D, bias=bias), nn.LayerNorm(D, bias=bias)
        if layout == "separate":
            self.wq, self.wk, self.wv = (nn.Linear(D, D, bias=bias) for _ in range(3))
        else:
            self.qkv = nn.Linear(D, 3 * D, bias=bias)
        self.out = nn.Linear(D, D, bias=bias)
        self.up, self.down = nn.Linear(D, HIDDEN, bias=bias), nn.Linear(HIDDEN, D, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_a(x)
        if self.layout == "separate":
            q, k, v = (linear(h).unflatten(-1, (HEADS, -1)) for linear in (self.wq, self.wk, self.wv))
        else:
            sizes = {"qkv": 3, "h": HEADS, "d": D // HEADS}
            axes = self.layout.split()
            qkv = self.qkv(h).unflatten(-1, [sizes[axis] for axis in axes])
            q, k, v = qkv.movedim([2 + axes.index(axis) for axis in ("qkv", "h", "d")], [2, 3, 4]).unbind(2)
        weights = (q.transpose(1, 2) @ k.transpose(1, 2).mT * (D // HEADS) ** -0.5).softmax(-1)
        x = x + self.out((weights @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.ln_b(x))))


class HomeMadeViT(nn.Module):
    """Linear patch embedding with channels last, no class token, and the norm after mean pooling."""

    def __init__(self, *, layout: str = "qkv h d", bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(4 * 4 * 3, D, bias=bias)
        self.positions = nn.Parameter(torch.zeros(1, 4 * 6, D))
        self.body = nn.ModuleList(HomeMadeBlock(layout, bias) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 5))

    def forward(self, images: Tensor) -> Tensor:
        B, C, H, W = images.shape
        patches = images.reshape(B, C, H // 4, 4, W // 4, 4).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        x = self.embed(patches) + self.positions
        for block in self.body:
            x = block(x)
        return self.head(x.mean(dim=1))


MODEL = "[model]\nnorm_first = true\nheads = 3\n"
BLOCK = "encoder.blocks.{block}"
HOME_MADE_TENSORS = f"""
[tensors]
"embed" = "patch_embedding.project"
"positions" = "position_embedding.table"
"body.{{block}}.ln_a" = "{BLOCK}.norm1"
"body.{{block}}.out" = "{BLOCK}.attention.project"
"body.{{block}}.ln_b" = "{BLOCK}.norm2"
"body.{{block}}.up" = "{BLOCK}.mlp.expand"
"body.{{block}}.down" = "{BLOCK}.mlp.contract"
"head.0" = "pooled_norm"
"head.1" = "head.out"
"""
FUSED = f'"body.{{block}}.qkv" = "{BLOCK}.attention.qkv"\n'
SEPARATE = "".join(f'"body.{{block}}.w{p}" = "{BLOCK}.attention.{p}"\n' for p in "qkv")
HOME_MADE = MODEL + 'activation = "relu"\nimage_size = [16, 24]\npatch_layout = "p q c"\n'


def save(folder: Path, model: nn.Module, key_map: str) -> tuple[Path, Path]:
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, folder / "model.pt")
    (folder / "map.toml").write_text(key_map)
    return folder / "model.pt", folder / "map.toml"


def is_two_lines(error: VitralError) -> bool:
    return bool(error.hint) and "\n" not in error.what + error.hint


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return int(stop.value.code or 0)


def test_torch_encoder_is_converted_with_the_map_that_explain_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = randomize_weights(TorchEncoderViT())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    key_map, converted = tmp_path / "map.toml", tmp_path / "converted"
    assert run("convert", tmp_path / "model.pt", "--explain", "--write-map", key_map) == 0
    printed = capsys.readouterr().out
    assert "encoder.layers.{block}.linear1.weight" in printed
    assert "40×24" in printed
    assert "[blocks 0-1]" in printed
    assert run("convert", tmp_path / "model.pt", converted, "--key-map", key_map) == 2
    assert "[model] must state norm_first" in capsys.readouterr().err
    text = key_map.read_text().replace("# norm_first = true ", "norm_first = true ")
    key_map.write_text(text.replace("# heads = 4 ", "heads = 3 ").replace('"relu"', '"gelu"'))
    assert run("convert", tmp_path / "model.pt", converted, "--key-map", key_map) == 0
    assert_same_logits(weights.read(converted).build(), model, random_images(32, 32))


@pytest.mark.parametrize("changes", [{"final_norm": False}, {"pre_norm": True}, {"activation": "relu"}])
def test_starting_map_needs_only_what_tensors_do_not_show(changes: dict[str, Any], tmp_path: Path) -> None:
    model = randomize_weights(TorchEncoderViT(**changes))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    text = starting_map(explain(tmp_path / "model.pt"), Path("map.toml")).replace("# norm_first", "norm_first")
    (tmp_path / "map.toml").write_text(text)
    options = CheckpointOptions(heads=3, activation="relu" if "activation" in changes else "gelu")
    checkpoint = weights.read(tmp_path / "model.pt", options, key_map=tmp_path / "map.toml")
    assert_same_logits(checkpoint.build(), model, random_images(32, 32))


def test_map_of_the_guide_is_complete(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/how-to/convert-weights.md").read_text(encoding="utf-8")
    model = randomize_weights(TorchEncoderViT())
    source, key_map = save(tmp_path, model, guide.split("```toml\n")[1].split("```")[0])
    checkpoint = weights.read(source, CheckpointOptions(heads=3), key_map=key_map)
    assert_same_logits(checkpoint.build(), model, random_images(32, 32))


@pytest.mark.parametrize("layout", ["qkv h d", "h qkv d", "h d qkv", "separate"])
def test_projections_of_every_layout_give_the_same_logits(layout: str, tmp_path: Path) -> None:
    model = randomize_weights(HomeMadeViT(layout=layout))
    setting = "" if layout == "separate" else f'qkv_layout = "{layout}"\n'
    tensors = HOME_MADE_TENSORS + (SEPARATE if layout == "separate" else FUSED)
    source, key_map = save(tmp_path, model, HOME_MADE + setting + tensors)
    checkpoint = weights.read(source, key_map=key_map)
    assert checkpoint.variant == "late-norm"
    assert checkpoint.config.activation == "relu"
    assert_same_logits(checkpoint.build(), model, random_images(16, 24))


def test_layers_without_biases_get_zero_biases(tmp_path: Path) -> None:
    model = randomize_weights(HomeMadeViT(bias=False))
    source, key_map = save(tmp_path, model, HOME_MADE + HOME_MADE_TENSORS + FUSED)
    checkpoint = weights.read(source, key_map=key_map)
    assert any("layers without a bias get one of zeros" in note for note in checkpoint.notes)
    assert not checkpoint.config.qkv_bias
    assert_same_logits(checkpoint.build(), model, random_images(16, 24))


def test_transposed_matrices_are_read_if_the_map_says_so(tmp_path: Path) -> None:
    model = randomize_weights(HomeMadeViT())
    source, key_map = save(tmp_path, model, HOME_MADE + HOME_MADE_TENSORS + FUSED)
    state = model.state_dict()
    torch.save({k: v.T.contiguous() if k.endswith("up.weight") else v for k, v in state.items()}, source)
    with pytest.raises(VitralError, match=r"body\.0\.up\.weight has shape 24×40, expected .*×24") as error:
        weights.read(source, key_map=key_map)
    assert "transpose = true" in error.value.hint
    lines = f'"body.{{block}}.up.weight" = {{ to = "{BLOCK}.mlp.expand.weight", transpose = true }}\n'
    lines += f'"body.{{block}}.up.bias" = "{BLOCK}.mlp.expand.bias"'
    text = key_map.read_text().replace(f'"body.{{block}}.up" = "{BLOCK}.mlp.expand"', lines)
    key_map.write_text(text)
    assert_same_logits(weights.read(source, key_map=key_map).build(), model, random_images(16, 24))


def test_post_norm_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = TorchEncoderViT(norm_first=False, activation="relu")
    torch.save(model.state_dict(), tmp_path / "post.pt")
    explanation = explain(tmp_path / "post.pt")
    text = starting_map(explanation, Path("map.toml")).replace("# norm_first = true", "norm_first = false")
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(VitralError, match=r"after the residual additions \(post-norm\) are another function") as error:
        weights.read(tmp_path / "post.pt", CheckpointOptions(heads=3), key_map=tmp_path / "map.toml")
    assert is_two_lines(error.value)
    with pytest.raises(VitralError, match="can be pre- or post-norm") as error:
        weights.read(tmp_path / "post.pt")
    assert "--explain --write-map" in error.value.hint


def test_options_on_the_command_line_win_over_the_map(tmp_path: Path) -> None:
    model = randomize_weights(HomeMadeViT())
    source, key_map = save(tmp_path, model, HOME_MADE + HOME_MADE_TENSORS + FUSED)
    options = CheckpointOptions(heads=2, mean=(0.1,), activation="gelu")
    checkpoint = weights.read(source, options, key_map=key_map)
    assert (checkpoint.config.heads, checkpoint.config.activation) == (2, "gelu")
    assert checkpoint.preprocessing.mean == (0.1, 0.1, 0.1)


WRONG_MAPS: dict[str, tuple[str, str]] = {
    "syntax": ("[tensors\n", "cannot read .*map.toml"),
    "misspelled section": (MODEL + "[tensor]\na = 'b'", r"no section named 'tensor'\. Did you mean 'tensors'"),
    "misspelled field": (
        MODEL.replace("heads", "head") + HOME_MADE_TENSORS,
        r"no field of \[model\] named 'head'\. Did you mean 'heads'",
    ),
    "no tensors": (MODEL, r"has no section \[tensors\]"),
    "value of a wrong type": (MODEL.replace("3", "'three'") + HOME_MADE_TENSORS + FUSED, "heads"),
    "unknown target": (
        MODEL + HOME_MADE_TENSORS.replace(".norm1", ".nrom1"),
        r"no tensor 'encoder\.blocks\.\{block\}\.nrom1'\. Did you mean 'encoder\.blocks\.\{block\}\.norm1'",
    ),
    "block on one side": (
        MODEL + HOME_MADE_TENSORS.replace('"body.{block}.out"', '"body.0.out"'),
        r"must contain \{block\}, the number of the block, on both sides",
    ),
    "no such tensor": (
        HOME_MADE + HOME_MADE_TENSORS.replace("ln_a", "ln_x") + FUSED,
        r'"body\.\{block\}\.ln_x" matches no tensor of .*Did you mean .body\.\{block\}\.ln_a',
    ),
    "unnamed tensors": (HOME_MADE + HOME_MADE_TENSORS, r"without a name: body\.0\.qkv\.weight, body\.0\.qkv\.bias"),
    "two for one": (
        HOME_MADE + HOME_MADE_TENSORS.replace(f"{BLOCK}.norm2", f"{BLOCK}.norm1") + FUSED,
        r"body\.0\.ln_a\.weight and body\.0\.ln_b\.weight are both mapped",
    ),
    "swapped": (
        HOME_MADE + HOME_MADE_TENSORS.replace(".up", ".tmp").replace(".down", ".up").replace(".tmp", ".down") + FUSED,
        r"body\.0\.up\.weight has shape 40×24, expected 24×40 for encoder\.blocks\.0\.mlp\.contract\.weight",
    ),
    "layout": (HOME_MADE + 'qkv_layout = "d h qkv"\n' + HOME_MADE_TENSORS, 'must be one of "qkv h d"'),
    "ignore": ("ignore = 3\n" + HOME_MADE + HOME_MADE_TENSORS, "ignore must be a list of tensor names"),
}


@pytest.mark.parametrize("kind", WRONG_MAPS)
def test_error_of_a_wrong_map_names_what_is_wrong(kind: str, tmp_path: Path) -> None:
    key_map, message = WRONG_MAPS[kind]
    source, path = save(tmp_path, HomeMadeViT(), key_map)
    with pytest.raises(VitralError, match=message) as error:
        weights.read(source, key_map=path)
    assert is_two_lines(error.value)
    assert "Traceback" not in str(error.value)


def test_ignored_tensors_are_listed(tmp_path: Path) -> None:
    model = HomeMadeViT()
    source, key_map = save(tmp_path, model, 'ignore = ["decoder.*"]\n' + HOME_MADE + HOME_MADE_TENSORS + FUSED)
    torch.save(model.state_dict() | {"decoder.weight": torch.zeros(3)}, source)
    assert any("decoder.weight" in note for note in weights.read(source, key_map=key_map).notes)


def test_every_name_of_a_key_map_is_a_tensor_of_vitral() -> None:
    changes: list[tuple[str, dict[str, Any]]] = [
        ("plain", {"head": "mlp", "registers": 2, "layer_scale": 0.1, "qk_norm": True}),
        ("plain", {"pooling": "attention", "pre_norm": True}),
        ("late-norm", {"pooling": "mean"}),
        ("patch-norm", {}),
    ]
    names = {name for variant, fields in changes for name in meta_state_dict(variant, ViTConfig(depth=1, **fields))}
    separate = {f"{prefix}.{p}" for prefix in ("attention", "attention_pooling") for p in "qkv"}
    for target in TARGETS:
        if not any(f"{part}." in target for part in separate):
            assert target.replace("{block}", "0") in names, target


@pytest.mark.parametrize("library", ["timm", "transformers", "vit-pytorch", "nn.TransformerEncoder"])
def test_guess_finds_every_part_of_a_known_model(library: str) -> None:
    if library == "timm":
        model = timm.models.vision_transformer.VisionTransformer(embed_dim=D, depth=2, num_heads=3, img_size=32)
    elif library == "transformers":
        config = transformers.ViTConfig(hidden_size=D, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40)
        model = transformers.ViTForImageClassification(config)
    elif library == "vit-pytorch":
        sizes = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": D, "depth": 2, "heads": 3, "dim_head": 8}
        model = vit_pytorch.ViT(**sizes, mlp_dim=HIDDEN)
    else:
        model = TorchEncoderViT()
    guess = guess_tensors({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    assert guess.missing == []
    assert guess.width == D
    guessed = [group.pattern for group in guess.groups if group.target is None]
    assert guessed == [name for name in guessed if "to_patch_embedding" in name]  # norms around vit-pytorch's patches


def test_explain_runs_no_code_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    torch.save({"weight": torch.zeros(3), "x": Payload()}, tmp_path / "evil.pt")
    assert run("convert", tmp_path / "evil.pt", "--explain") == 2
    assert "it could execute code" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


def test_explain_of_something_else_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.zeros(3), "b": torch.zeros(())}, tmp_path / "other.pt")
    lines = explain(tmp_path / "other.pt").lines()
    assert "does not look like a Transformer" in lines[-1]
    assert run("convert", tmp_path / "other.pt") == 2
    assert "missing argument DESTINATION" in capsys.readouterr().err
