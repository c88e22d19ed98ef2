"""What only a GPU can show: a step recorded as one graph trains like one that is not. Passed over elsewhere."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from support.common import textures
from vitral.data.augment import Augment
from vitral.data.autoaugment import MOVING, OPERATIONS, Policy, apply
from vitral.data.datasets import Dataset
from vitral.data.loader import Loader
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware, choose
from vitral.errors import VitralError
from vitral.inference.cuda_engine import GpuEngine
from vitral.models.variants.hybrid import HybridViT
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.builtin import named
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run, load_weights
from vitral.training.callbacks import Watch
from vitral.training.optim.adamw import kernel_agrees
from vitral.training.optim.muon import Muon, kernels_agree, suit_kernels
from vitral.training.signals import Interrupted
from vitral.training.trainer import fit, judge_of, vary_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    import triton

    from vitral.kernels import fused_model as fused

EVERYTHING: dict[str, Any] = {
    "optim.name": "muon", "augment.shift": 1, "augment.flip": True, "augment.mixup": 0.4, "augment.cutmix": 1.0,
    "augment.erase": 0.3, "model.drop_path": 0.2, "model.qk_norm": True, "model.positions": "learned+rotary",
    "label_smoothing": 0.1, "ema": 0.3, "accumulate": 2, "class_weights": "balanced", "epochs": 3,
}  # fmt: skip


@pytest.fixture
def gpu() -> Hardware:
    hardware = choose(device="gpu", precision="fp32", compile="auto", steps=10)
    assert hardware.graph
    assert not hardware.compile
    return hardware


def train(
    path: Path, hardware: Hardware, dataset: Dataset, recipe: Recipe, seen: Preprocessing, watch: Watch | None = None
) -> Run:
    run = Run(path) if path.exists() else Run.create(path.parent, path.name, path)
    fit(recipe, dataset, seen, run, hardware, watch)
    return run


def losses(run: Run) -> list[float]:
    return [row[name] for row in run.metrics() for name in ("train_loss", "validation_loss")]


AS_THEY_ARE = {"accumulate": 1, "optim.clip": 0.0}  # gradients: Muon begins while the pass backwards still goes on


@pytest.mark.parametrize("changes", [{"optim.name": "adamw"}, {"optim.name": "sgd"}, {}, AS_THEY_ARE], ids=str)
def test_a_recorded_step_trains_like_a_plain_one(
    tmp_path: Path,
    gpu: Hardware,
    dataset: Dataset,
    recipe: Recipe,
    preprocessing: Preprocessing,
    changes: dict[str, Any],
) -> None:
    plan = recipe.changed(EVERYTHING | changes)
    plain = train(tmp_path / "plain", replace(gpu, graph=False), dataset, plan, preprocessing)
    graph = train(tmp_path / "graph", gpu, dataset, plan, preprocessing)
    assert losses(graph) == pytest.approx(losses(plain), rel=2e-3)


def test_an_interrupted_recorded_run_ends_like_one_that_was_not(
    tmp_path: Path, gpu: Hardware, dataset: Dataset, recipe: Recipe, preprocessing: Preprocessing
) -> None:
    class CtrlC(Watch):
        def epoch(self, row: dict[str, Any], seconds_left: float) -> None:
            if row["epoch"] == 1:
                import signal

                signal.raise_signal(signal.SIGINT)

    plan = recipe.changed(EVERYTHING)
    straight = train(tmp_path / "straight", gpu, dataset, plan, preprocessing)
    with pytest.raises(Interrupted):
        train(tmp_path / "resumed", gpu, dataset, plan, preprocessing, CtrlC())
    resumed = train(tmp_path / "resumed", gpu, dataset, plan, preprocessing)
    assert losses(resumed) == pytest.approx(losses(straight), rel=2e-3)
    assert load_weights(straight.model / "weights.safetensors").keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"augment.crop": 0.5},
        {"augment.rotate": 10.0, "augment.scale": 0.1},
        {"augment.policy.name": "randaugment"},
        {"augment.policy.name": "randaugment", "augment.policy.increasing": True, "augment.policy.spread": 0.5},
        {"augment.policy.name": "trivialaugment"},
        {"augment.jitter": 0.3},
        {"sampling": "balanced"},
        {"loss": "sigmoid"},
        {"recompute": True},
        {"augment.repeat": 2},
    ],
    ids=str,
)
def test_every_augmentation_and_setting_can_be_recorded(
    tmp_path: Path, gpu: Hardware, dataset: Dataset, recipe: Recipe, changes: dict[str, Any]
) -> None:
    colour = replace(dataset, train=textures(96, seed=1, channels=3), validation=textures(40, seed=2, channels=3))
    plan = recipe.changed({"model.channels": 3, "epochs": 2} | changes)
    seen = Preprocessing(image_size=(8, 8), channels=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    assert len(losses(train(tmp_path / "run", gpu, colour, plan, seen))) == 4


def test_in_bf16_the_loss_is_that_of_fp32_but_for_rounding(
    tmp_path: Path, gpu: Hardware, dataset: Dataset, recipe: Recipe, preprocessing: Preprocessing
) -> None:
    exact = train(tmp_path / "fp32", gpu, dataset, recipe, preprocessing)
    rounded = train(tmp_path / "bf16", replace(gpu, precision="bf16"), dataset, recipe, preprocessing)
    assert losses(rounded) == pytest.approx(losses(exact), rel=0.1, abs=0.02)


@pytest.mark.parametrize("on_nan", ["stop", "rollback"])
def test_a_recorded_run_that_diverges_stops_and_names_the_step(
    tmp_path: Path, gpu: Hardware, dataset: Dataset, recipe: Recipe, preprocessing: Preprocessing, on_nan: str
) -> None:
    plan = recipe.changed({"optim.lr": 1e12, "optim.clip": 0.0, "on_nan": on_nan})
    with pytest.raises(VitralError, match="step"):
        train(tmp_path / "run", gpu, dataset, plan, preprocessing)


class Crowded(Hardware):
    """A GPU without room for the images: each batch is sent there."""

    def room(self) -> float:
        return 0.0


@pytest.mark.parametrize("changes", [{}, {"augment.repeat": 2}, {"sampling": "balanced"}], ids=str)
def test_batches_that_are_fetched_are_those_that_lie_on_the_gpu(changes: dict[str, Any], gpu: Hardware) -> None:
    images = torch.randint(0, 256, (500, 3, 40, 40), dtype=torch.uint8)
    shared: dict[str, Any] = {"labels": (torch.arange(500) % 7).to(gpu.device), "batch": 32, "seed": 0}
    shared |= {name.split(".")[-1]: value for name, value in changes.items()}
    busy = torch.randn(4096, 4096, device=gpu.device)
    here, there = (Loader(images=place, **shared) for place in (images, images.to(gpu.device)))
    wrong = torch.zeros((), device=gpu.device)
    for epoch in range(3):
        for (sent, labels), (lying, others) in zip(here.epoch(epoch), there.epoch(epoch), strict=True):
            for _ in range(10):
                busy = busy @ busy * 1e-3  # the GPU falls behind Python: what is overwritten too early, it sees
            wrong += (sent != lying).any() | (labels != others).any()
    assert wrong == 0


def test_a_run_whose_images_are_sent_ends_like_one_whose_images_lie_on_the_gpu(
    tmp_path: Path, gpu: Hardware, dataset: Dataset, recipe: Recipe, preprocessing: Preprocessing
) -> None:
    crowded = Crowded(**{field.name: getattr(gpu, field.name) for field in fields(gpu)})
    lying = train(tmp_path / "lying", gpu, dataset, recipe, preprocessing)
    sent = train(tmp_path / "sent", crowded, dataset, recipe, preprocessing)
    assert losses(sent) == pytest.approx(losses(lying), rel=2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True, "positions": "learned+rotary", "pooling": "mean", "gelu": "tanh"},
        {"image_size": (64, 64), "qk_norm": True, "positions": "rotary"},  # 257 tokens: PyTorch's attention
        {"image_size": (64, 64), "width": 192, "heads": 3, "registers": 4},
        {"width": 96, "heads": 4, "mlp_width": 208, "drop_path": 0.3},
        {"heads": 8, "qkv_bias": False},  # 65 tokens, heads of 32 columns
        {"heads": 8, "qk_norm": True, "positions": "learned+rotary"},
        {"image_size": (224, 224), "patch_size": 16, "width": 768, "heads": 12},  # 197, 64
        {"image_size": (224, 224), "patch_size": 16, "width": 384, "heads": 12, "qk_norm": True, "registers": 4},
        {"image_size": (64, 64), "pooling": "mean"},  # 256, 64
        {"image_size": (64, 64), "heads": 8, "pooling": "mean", "positions": "rotary", "qkv_bias": False},
    ],
    ids=str,
)
def test_fused_kernels_agree_with_the_plain_encoder(changes: dict[str, Any], precision: Any) -> None:
    hardware = choose(device="gpu", precision=precision)
    settings = {"image_size": (32, 32), "patch_size": 4, "classes": 10, "width": 256, "depth": 3, "heads": 4} | changes
    torch.manual_seed(0)
    model = ViT(ViTConfig(**settings)).to(hardware.device)
    assert fused.why_not(model, hardware) == ""
    for batch in (16, 2**20):  # norms and GELU kept, and computed again
        off = fused.difference(model.eval(), hardware, learning=True, batch=batch)
        assert off < (0.3 if hardware.fp8 else 0.05)
        if hardware.fp8:
            assert fused.difference_of_columns(model.eval(), hardware, batch) < 0.1
    assert fused.difference(model.bfloat16(), hardware, learning=False) < (0.2 if hardware.fp8 else 0.03)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("pixels", "patch", "heads"), [(32, 4, 4), (32, 8, 4), (72, 4, 4), (32, 4, 2)])  # 65, 17, 325
def test_the_engine_answers_like_the_model(pixels: int, patch: int, heads: int, precision: Any) -> None:
    """Whichever way attention goes, for any number of images."""
    settings: dict[str, Any] = {"image_size": (pixels, pixels), "patch_size": patch, "width": 256, "heads": heads}
    torch.manual_seed(0)
    model = ViT(ViTConfig(classes=10, depth=3, **settings)).eval()
    torch.nn.init.normal_(model.head.out.weight, std=0.05)  # at first a head answers nothing but zeros
    seen = Preprocessing(image_size=(pixels, pixels), channels=3, mean=(0.4,) * 3, std=(0.2,) * 3)
    images = torch.randint(0, 256, (300, 3, pixels, pixels), dtype=torch.uint8)
    with torch.inference_mode():
        wanted = model(seen.normalise(images))
    engine = GpuEngine(model, seen, choose(device="gpu", precision=precision))
    assert "fused" in engine.how
    for count in (300, 1, 33):
        found = engine(images[:count])
        assert (found - wanted[:count]).norm() < (0.2 if precision == "fp8" else 0.03) * wanted[:count].norm()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("pooling", "width", "patch"), [("class", 192, 4), ("mean", 192, 8), ("class", 512, 8), ("mean", 512, 4)]
)
def test_after_the_trial_a_step_compiles_nothing(
    pooling: Any, width: int, patch: int, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware, said = choose(device="gpu", precision=precision), list[str]()
    settings: dict[str, Any] = {"width": width, "depth": 3, "heads": width // 64, "drop_path": 0.1, "pooling": pooling}
    model = ViT(ViTConfig(image_size=(32, 32), patch_size=patch, classes=10, **settings)).to(hardware.device).train()
    assert fused.why_not(model, hardware, batch=48) == ""
    forward, compiled = fused.forward(model, hardware, said.append, 48), list[str]()
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **given: compiled.append(given["src"].name))
    forward(torch.zeros(48, 3, 32, 32, device=hardware.device)).sum().backward()
    assert (said, compiled) == ([], [])


@pytest.mark.parametrize("spare", [0, 2**25])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_fused_training_is_that_of_the_plain_encoder(
    tmp_path: Path,
    dataset: Dataset,
    recipe: Recipe,
    preprocessing: Preprocessing,
    precision: Any,
    spare: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is kept for the way back, and whatever is computed again there."""
    for name, value in (("fused.SPARE", spare), ("fused.encoder.SPARE", spare), ("fused.MANY", 1)):
        monkeypatch.setattr(f"vitral.{name}", value)
    plan = recipe.changed({"model.width": 64, "model.heads": 2, "model.mlp_width": 128, "epochs": 3})
    hardware = choose(device="gpu", precision=precision, steps=10)
    ours = train(tmp_path / "ours", hardware, dataset, plan, preprocessing)
    plain = train(tmp_path / "plain", replace(hardware, fused=False, fp8=False), dataset, plan, preprocessing)
    assert losses(ours) == pytest.approx(losses(plain), rel=0.1)


@pytest.mark.parametrize("name", ["cifar10-94", "fashion-mnist-94"])
def test_the_stem_s_kernels_agree_with_the_plain_stem(gpu: Hardware, name: str) -> None:
    from vitral.kernels.conv_stem.op import FusedStem

    torch.manual_seed(0)
    model = HybridViT(named(name).model).to(gpu.device)
    assert fused.stem_of(model, gpu, print) is not None
    images = torch.randn(8, model.config.channels, *model.config.image_size, device=gpu.device)
    with torch.no_grad():
        wanted, found = model.patch_embedding.stem(images), FusedStem(model.patch_embedding.stem)(images)
    assert (found.float() - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize("name", ["cifar10-94", "fashion-mnist-94"])
def test_augmentation_in_one_kernel_gives_the_same_images(gpu: Hardware, name: str) -> None:
    recipe = named(name)
    C = recipe.model.channels
    seen = Preprocessing(image_size=recipe.model.image_size, channels=C, mean=(0.45,) * C, std=(0.25,) * C)
    assert vary_of(recipe, seen, replace(gpu, fused=True), print) is not None  # it compares them itself
    assert vary_of(recipe, seen, replace(gpu, fused=True, precision="bf16"), print) is not None


@pytest.mark.parametrize(("width", "heads", "patch"), [(192, 3, 16), (256, 4, 8), (384, 6, 16)])
def test_patches_are_embedded_by_kernels_and_narrow_blocks_are_one(width: int, heads: int, patch: int) -> None:
    """In training, with the gradients of PyTorch, and in answers: each trial compares them itself."""
    from vitral.kernels.embed.op import embedding_of, learning_embedding_of

    hardware, said = choose(device="gpu", precision="bf16", steps=10), list[str]()
    config = ViTConfig(image_size=(64, 96), patch_size=patch, classes=10, width=width, depth=3, heads=heads)
    model = ViT(config).to(hardware.device)
    assert learning_embedding_of(model, hardware, said.append) is not None, said
    assert fused.rows_of(model, hardware, True, 2**14) == (fused.MANY if width <= 192 else None)
    seen = Preprocessing(image_size=(64, 96), channels=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    model = model.bfloat16().eval().requires_grad_(False)
    assert embedding_of(model, seen, hardware, lambda images: seen.normalise(images).bfloat16()) is not None
    assert fused.rows_of(model, hardware) == (fused.MANY if width <= 256 else None)


@pytest.mark.parametrize(("width", "gelu"), [(192, "exact"), (256, "tanh"), (384, "exact")])
def test_answers_of_fp8_have_expansion_and_gelu_as_one(width: int, gelu: Literal["exact", "tanh"]) -> None:
    """Its trial compares it with other kernels of ours; here it is against the product of such numbers in fp32."""
    from vitral.kernels import ops as launch

    hardware = choose(device="gpu", precision="fp8")
    config = ViTConfig(
        image_size=(64, 96), patch_size=16, classes=10, width=width, depth=3, heads=width // 64, gelu=gelu
    )
    model = ViT(config).to(hardware.device).bfloat16().eval().requires_grad_(False)
    assert fused.rows_of(model, hardware) == fused.ENOUGH
    M, H = 1000, 4 * width
    x, weight = torch.randn(M, width, device=hardware.device), torch.randn(H, width, device=hardware.device) * 0.05
    bias, ones = torch.randn(H, device=hardware.device), torch.ones(width, device=hardware.device)
    x8 = launch.add_norm(x.bfloat16(), None, None, None, (ones, 0 * ones, 1e-6), fp8=True, plain=False).small
    w8 = launch.shrink(weight, bias, torch.zeros(2, device=hardware.device))
    assert x8 is not None
    product = (x8.numbers.float() * x8.scales) @ (w8.numbers.float() * w8.scales).t()
    wanted = F.gelu(product + bias, approximate="tanh" if gelu == "tanh" else "none")
    once, twice = (
        launch.expand(x8, w8, bias, gelu == "tanh"),
        launch.act(product.bfloat16(), bias, gelu == "tanh", (x8.norms, w8.norms))[1],
    )
    for found, same in ((once, 0.94), (twice, 0.9)):  # the second of a product that was rounded to bf16
        assert found is not None
        rounded = (wanted / found.scales).to(torch.float8_e4m3fn)
        assert (found.numbers.view(torch.uint8) == rounded.view(torch.uint8)).float().mean() > same
        off = found.numbers.float() * found.scales - wanted
        assert off.norm() < 0.03 * wanted.norm()
        assert off.mean().abs() < 1e-3


@pytest.mark.parametrize("pixels", [32, 64, 224])
@pytest.mark.parametrize("channels", [1, 3])
def test_each_operation_of_randaugment_is_the_same_as_one_kernel(gpu: Hardware, pixels: int, channels: int) -> None:
    """PyTorch's own, on the GPU; those against Pillow are in test_policy.py."""
    from vitral.kernels.augment import op as vary

    draws = torch.Generator(gpu.device).manual_seed(1)
    images = torch.randint(0, 256, (4, channels, pixels, pixels), generator=draws, device=gpu.device, dtype=torch.uint8)
    images[1] //= 3
    images[2] = 77
    place = torch.rand(2, 4, generator=draws, device=gpu.device)
    for name, argument in zip(OPERATIONS, vary.TRIED, strict=True):
        operation, by = (torch.full((4,), x, device=gpu.device) for x in (OPERATIONS.index(name), float(argument)))
        apart = (vary.operate(images, operation, by, place).int() - apply(images, operation, by, place).int()).abs()
        assert apart.max() <= (1 if name in MOVING else 0), name
        assert (apart > 0).float().mean() < 0.02, name


@pytest.mark.parametrize(
    "policy",
    [Policy(name="randaugment", magnitude=9, spread=0.5, increasing=True), Policy(name="trivialaugment")],
    ids=str,
)
def test_a_training_with_colours_varied_by_kernels_goes_as_without(
    tmp_path: Path, policy: Policy, dataset: Dataset, recipe: Recipe, preprocessing: Preprocessing
) -> None:
    hardware, said = choose(device="gpu", precision="bf16", steps=10), list[str]()
    augment = Augment(shift=1, flip=True, cutmix=1.0, jitter=0.2, policy=policy)
    plan = replace(recipe.changed({"model.width": 64, "model.heads": 2, "model.mlp_width": 128}), augment=augment)
    assert vary_of(plan, preprocessing, hardware, said.append) is not None, said
    ours = train(tmp_path / "ours", hardware, dataset, plan, preprocessing)
    plain = train(tmp_path / "plain", replace(hardware, fused=False), dataset, plan, preprocessing)
    assert losses(ours) == pytest.approx(losses(plain), rel=0.1)


def test_the_loss_in_one_kernel_and_adamw_s_small_tensors_agree_with_pytorch(gpu: Hardware) -> None:
    for number in ("fp32", "bf16"):
        assert judge_of(named("cifar10-94"), 256, replace(gpu, fused=True, precision=number), print) is not None
    assert kernel_agrees(gpu.device)


def test_muon_steps_with_kernels_as_without_and_recorded_too(gpu: Hardware) -> None:
    shapes = [[(288, 96), (576, 192)], [(96, 96), (200, 96), (96, 200), (33, 65)], [(96, 200), (65, 33), (192, 192)]]
    draws = torch.Generator(gpu.device).manual_seed(0)
    start = [[torch.randn(shape, device=gpu.device, generator=draws) for shape in group] for group in shapes]
    gradients = [[[torch.randn_like(w) for w in group] for group in start] for _ in range(5)]

    def made() -> Muon:
        groups: list[dict[str, Any]] = [{"params": [w.clone() for w in group]} for group in start]
        for group, parts in zip(groups, (3, 1, 1), strict=True):
            group |= {"parts": parts, "lr": torch.zeros((), device=gpu.device)}
        optimizer = Muon(groups, lr=0.0, weight_decay=0.1)
        optimizer.found_inf = torch.zeros((), device=gpu.device)
        for group in optimizer.param_groups:
            for w in group["params"]:
                w.grad = torch.zeros_like(w)
        return optimizer

    def prepare(optimizer: Muon, step: int) -> None:
        for group, given in zip(optimizer.param_groups, gradients[step], strict=True):
            group["lr"].fill_(0.01 * (step + 1))
            for w, gradient in zip(group["params"], given, strict=True):
                w.grad.copy_(gradient)

    def weights(optimizer: Muon) -> torch.Tensor:
        return torch.cat([w.flatten() for group in optimizer.param_groups for w in group["params"]])

    def averages(optimizer: Muon) -> torch.Tensor:
        return torch.cat([state["momentum"].flatten() for state in optimizer.state.values()])

    plain, eager, recorded = made(), made(), made()
    assert kernels_agree(weights(eager).device)
    assert suit_kernels([(group, group["params"]) for group in eager.param_groups], eager.found_inf)
    before, graph = weights(plain), torch.cuda.CUDAGraph()
    for step in range(5):
        for optimizer in (plain, eager, recorded):
            prepare(optimizer, step)
        with torch.no_grad():
            plain.step_plainly([(group, group["params"]) for group in plain.param_groups])
        eager.step()
        if step == 2:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                recorded.step()
        if step >= 2:
            graph.replay()
        else:
            recorded.step()
    way = (weights(plain) - before).norm()
    assert (weights(eager) - weights(plain)).norm() < 0.03 * way  # bf16, divided by a norm that one of them rounds
    assert (weights(recorded) - weights(eager)).norm() < 1e-3 * way
    torch.testing.assert_close(averages(eager), averages(plain), rtol=1e-5, atol=1e-6)
    assert recorded.found_inf is not None
    recorded.found_inf.fill_(1)
    for group in recorded.param_groups:
        group["params"][0].grad[0, -1] = torch.nan
    stayed = weights(recorded)
    graph.replay()
    assert torch.equal(weights(recorded), stayed)
