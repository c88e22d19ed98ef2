"""Properties of every pretraining method: gradients, the EMA teacher, randomness, image formats, ranks and learning."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Generator, Tensor

from support.common import identical
from support.pretraining import (
    METHOD_NAMES,
    TINY,
    VIT,
    WITH_TEACHER,
    draw_batch,
    preprocessing_of,
    random_images,
    tiny_method,
)
from support.processes import HANG_SECONDS, run_ranks
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.ssl.config import MethodName, PretrainConfig
from vitral.ssl.method import Branch, PretrainMethod, default_momentum, pooled_width
from vitral.ssl.methods import make_method
from vitral.ssl.views import ViewConfig

MODELS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean": {"pooling": "mean"},
    "mean with class token": {"pooling": "mean", "class_token": True},
    "sincos": {"positions": "sincos"},
    "rotary": {"positions": "rotary", "pooling": "mean"},
    "registers": {"positions": "learned+rotary", "registers": 2},
    "layer scale": {"layer_scale": 1e-2, "qk_norm": True},
    "pre-norm": {"pre_norm": True, "activation": "swiglu"},
}
IS_FINITE, NOT_FINITE = torch.tensor(1.0), torch.tensor(0.0)
methods = pytest.mark.parametrize("name", METHOD_NAMES)
methods_with_teacher = pytest.mark.parametrize("name", WITH_TEACHER)


def gradients(method: PretrainMethod, batch: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    method.zero_grad()
    method(*batch)[0].backward()
    return {name: parameter.grad for name, parameter in method.named_parameters()}


@pytest.mark.parametrize("model", MODELS)
@methods
def test_gradients_reach_every_trainable_parameter_and_no_teacher(name: MethodName, model: str) -> None:
    method = tiny_method(name, replace(VIT, **MODELS[model]))
    if method.student.mask_token is not None:
        torch.nn.init.normal_(method.student.mask_token)  # with pre-norm, a zero token without position has no norm
    for parameter, gradient in gradients(method, draw_batch(method, random_images())).items():
        if parameter.startswith("teacher."):
            assert gradient is None, parameter
        else:
            assert gradient is not None, parameter
            assert gradient.isfinite().all(), parameter
            assert gradient.any(), parameter


@pytest.mark.parametrize("variant", ["distilled", "late-norm", "patch-norm", "class-and-mean"])
@methods
def test_variants_are_trained_or_refused_in_two_lines(name: MethodName, variant: str) -> None:
    torch.manual_seed(0)
    vit = VARIANTS[variant](VIT)
    if name == "dino" and variant in ("distilled", "class-and-mean"):  # pooled features have twice the width
        with pytest.raises(VitralError, match="32 and 16 channels") as error:
            make_method(replace(TINY, method=name), vit, preprocessing_of(VIT))
        assert "dino.patch_weight" in error.value.hint
        config = replace(TINY, method=name, dino=replace(TINY.dino, patch_weight=0.0))
    else:
        config = replace(TINY, method=name)
    method = make_method(config, vit, preprocessing_of(VIT))
    parameters = dict(method.named_parameters())
    for parameter, gradient in gradients(method, draw_batch(method, random_images())).items():
        assert (gradient is not None) == parameters[parameter].requires_grad, parameter


@methods
def test_loss_and_score_are_sums_over_the_images_in_fp32(name: MethodName) -> None:
    method = tiny_method(name)
    loss, score = method(*draw_batch(method, random_images()))
    assert loss.shape == score.shape == ()
    assert loss.dtype == score.dtype == torch.float32
    assert loss.requires_grad
    assert not score.requires_grad


@methods
def test_every_tensor_of_a_batch_has_a_row_per_image(name: MethodName) -> None:
    method = tiny_method(name)
    assert {len(tensor) for tensor in draw_batch(method, random_images(count=5))} == {5}


@methods
def test_the_loss_under_autocast_is_finite_and_near_that_in_fp32(name: MethodName) -> None:
    method = tiny_method(name)
    batch = draw_batch(method, random_images(count=32))
    expected, _ = method(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, score = method(*batch)
    assert loss.dtype == score.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.03)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in method.parameters() if p.grad is not None)


@pytest.mark.parametrize(("total_steps", "momentum"), [(100_000, 0.99), (2500, 0.99), (250, 0.9), (3, 0.5)])
def test_the_default_momentum_is_lower_in_short_runs(total_steps: int, momentum: float) -> None:
    """Otherwise the teacher, which becomes the model, would mostly consist of its initial weights."""
    assert default_momentum(total_steps) == pytest.approx(momentum)
    method = tiny_method("moco", options={"momentum": None})
    method.set_total_steps(total_steps)
    assert method.teacher_momentum == pytest.approx(momentum)
    given = tiny_method("dino", options={"momentum": 0.996})
    given.set_total_steps(total_steps)
    assert given.teacher_momentum == 0.996


@methods_with_teacher
@pytest.mark.parametrize(("progress", "fraction"), [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)])
def test_the_teacher_moves_towards_the_student_at_a_rate_that_falls_to_0(
    name: MethodName, progress: float, fraction: float
) -> None:
    method = tiny_method(name, options={"momentum": 0.9})
    assert method.teacher is not None
    with torch.no_grad():
        for parameter in method.student.parameters():
            parameter.add_(torch.randn_like(parameter))
    before, student = state_of(method.teacher), state_of(method.student)
    method.after_step(torch.tensor(progress), IS_FINITE)
    after = state_of(method.teacher)
    for key in before:
        expected = before[key] + 0.1 * fraction * (student[key] - before[key])
        torch.testing.assert_close(after[key], expected, rtol=1e-5, atol=1e-6)
    assert identical(state_of(method.student), student)
    if progress == 1:
        assert identical(after, before)


def state_of(branch: Branch) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in branch.state_dict().items()}


@methods_with_teacher
def test_the_teacher_stays_after_a_step_that_is_not_finite(name: MethodName) -> None:
    method = tiny_method(name)
    assert method.teacher is not None
    with torch.no_grad():
        for parameter in method.student.parameters():
            parameter.add_(1)
    before = state_of(method.teacher)
    method.after_step(torch.tensor(0.0), NOT_FINITE)
    assert identical(state_of(method.teacher), before)


@methods_with_teacher
def test_the_teacher_starts_as_the_student_and_shares_no_memory_with_it(name: MethodName) -> None:
    method = tiny_method(name)
    assert method.teacher is not None
    assert identical(state_of(method.teacher), state_of(method.student))
    shared = {p.data_ptr() for p in method.teacher.parameters()} & {p.data_ptr() for p in method.student.parameters()}
    assert not shared
    assert method.backbone is method.teacher.vit


@methods_with_teacher
def test_only_the_student_has_dropout_and_stochastic_depth(name: MethodName) -> None:
    method = tiny_method(name, replace(VIT, dropout=0.5, drop_path=0.5)).train()
    assert method.teacher is not None
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(method.teacher.features(images), method.teacher.features(images))
    assert not torch.equal(method.student.features(images), method.student.features(images))
    method.eval()
    assert torch.equal(method.student.features(images), method.student.features(images))


@methods
def test_features_are_those_of_the_resulting_model(name: MethodName) -> None:
    method = tiny_method(name).eval()
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(method.features(images), method.backbone.features(images))
    assert torch.equal(method.backbone(images), method.features(images))  # no classification head


@methods
def test_copies_are_independent(name: MethodName) -> None:
    method = tiny_method(name)
    method.student.encode_fn = lambda *_: pytest.fail("refers to the weights of the original")
    duplicate = copy.deepcopy(method)
    method.student.encode_fn = None
    batch = draw_batch(duplicate, random_images())
    if name == "lejepa":
        draw_batch(method, random_images())
    assert torch.equal(duplicate(*batch)[0], method(*batch)[0])
    before = {key: tensor.clone() for key, tensor in duplicate.state_dict().items()}
    with torch.no_grad():
        for tensor in method.state_dict().values():
            tensor.add_(1)
    assert identical(duplicate.state_dict(), before)


@methods
def test_a_state_dict_continues_training_exactly(name: MethodName) -> None:
    method, other = tiny_method(name, seed=0), tiny_method(name, seed=1)
    for seed in range(2):
        method(*draw_batch(method, random_images(), seed))
        method.after_step(torch.tensor(0.5), IS_FINITE)
    other.load_state_dict(method.state_dict())
    batch = draw_batch(method, random_images())
    assert all(map(torch.equal, batch, draw_batch(other, random_images())))
    assert torch.equal(method(*batch)[0], other(*batch)[0])


@methods
def test_the_generator_determines_batch_and_loss(name: MethodName) -> None:
    method, images = tiny_method(name), random_images()
    torch.manual_seed(1)
    first = draw_batch(method, images)
    loss = method(*first)[0]
    torch.manual_seed(2)
    again = draw_batch(method, images)
    assert all(map(torch.equal, first, again))
    assert torch.equal(method(*again)[0], loss)
    other = draw_batch(method, images, seed=3)
    assert not torch.equal(method(*other)[0], loss)


@methods
def test_equal_images_get_different_views(name: MethodName) -> None:
    method = tiny_method(name)
    images = draw_batch(method, random_images()[:1].expand(6, -1, -1, -1).contiguous())[0]
    assert len(images.flatten(1).unique(dim=0)) == 6


@pytest.mark.parametrize(
    ("channels", "dtype", "image_size"),
    [(1, torch.uint8, (16, 16)), (5, torch.uint8, (8, 24)), (3, torch.uint16, (16, 16)), (1, torch.float32, (24, 8))],
)
@methods
def test_any_channels_pixel_format_and_shape(
    name: MethodName, channels: int, dtype: torch.dtype, image_size: tuple[int, int]
) -> None:
    vit = replace(VIT, channels=channels, image_size=image_size)
    preprocessing = preprocessing_of(vit, dtype=str(dtype).removeprefix("torch."))
    images = random_images(vit).float() * (257 if dtype == torch.uint16 else 1)
    method = make_method(replace(TINY, method=name), ViT(vit), preprocessing)
    batch = draw_batch(method, images.to(dtype))
    assert batch[0].shape[-3:] == (channels, *image_size)
    assert all(tensor.isfinite().all() for tensor in batch)
    loss, _ = method(*batch)
    assert loss.isfinite()
    loss.backward()


@methods
def test_images_of_another_size_than_the_models_with_native_resizing(name: MethodName) -> None:
    method = make_method(replace(TINY, method=name), ViT(VIT), preprocessing_of(VIT, resize="native"))
    batch = draw_batch(method, random_images(replace(VIT, image_size=(8, 24))))
    assert batch[0].shape[-2:] == (8, 24)
    assert method(*batch)[0].isfinite()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in METHOD_NAMES), ("dino", {"balance": "center"})])
def test_a_compiled_method_computes_the_same(name: MethodName, options: dict[str, Any]) -> None:
    """Two steps: directions, teacher and centre change between them, and the compiled graph must see the change."""
    method, reference = tiny_method(name, options=options), tiny_method(name, options=options)
    compiled = torch.compile(method, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        batch = draw_batch(method, random_images(), seed)
        draw_batch(reference, random_images(), seed)
        torch.testing.assert_close(compiled(*batch)[0], reference(*batch)[0])
        for model in (method, reference):
            with torch.no_grad():
                for parameter in model.student.parameters():
                    parameter.mul_(1.1)
            model.after_step(torch.tensor(0.1), IS_FINITE)
    for key, tensor in reference.state_dict().items():
        torch.testing.assert_close(method.state_dict()[key], tensor, msg=key)


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary"])
@pytest.mark.parametrize("model", [{}, {"pooling": "mean"}, {"registers": 2}, {"pre_norm": True}])
def test_masked_patches_are_the_mask_token_and_their_position(positions: Any, model: dict[str, Any]) -> None:
    config = replace(VIT, positions=positions, **model)
    torch.manual_seed(0)
    branch = Branch(ViT(config), masks_patches=True)
    assert branch.mask_token is not None
    torch.nn.init.normal_(branch.mask_token)
    images, mask = torch.randn(3, 3, 16, 16), torch.rand(3, 16) < 0.5
    tokens = branch.vit.embed(images, (4, 4))
    masked = branch.mask_patches(tokens, (4, 4), mask)
    # an embedding that is the mask token for any pixels
    branch.vit.patch_embedding.project.weight.data.zero_()
    if config.pre_norm:  # its projection has no bias
        branch.vit.patch_embedding.project = torch.nn.Linear(48, 16)
        branch.vit.patch_embedding.project.weight.data.zero_()
    branch.vit.patch_embedding.project.bias.data.copy_(branch.mask_token.data)
    expected = branch.vit.embed(images, (4, 4))
    num_prefix = config.num_prefix_tokens
    assert torch.equal(masked[:, :num_prefix], tokens[:, :num_prefix])
    torch.testing.assert_close(masked[:, num_prefix:][mask], expected[:, num_prefix:][mask])
    assert torch.equal(masked[:, num_prefix:][~mask], tokens[:, num_prefix:][~mask])


def test_masks_on_another_grid_have_resampled_positions() -> None:
    branch = Branch(ViT(VIT), masks_patches=True)
    images, mask = torch.randn(2, 3, 8, 24), torch.ones(2, 12, dtype=torch.bool)
    masked = branch.mask_patches(branch.vit.embed(images, (2, 6)), (2, 6), mask)
    assert branch.vit.position_embedding is not None
    torch.testing.assert_close(masked[:1, 1:], branch.vit.position_embedding.table_for((2, 6))[:, 1:])  # token 0


def test_an_encode_function_replaces_the_encoder() -> None:
    method = tiny_method("lejepa")
    images = torch.randn(2, 3, 16, 16)
    method.student.encode_fn = lambda images, mask: torch.zeros(len(images), 17, 16)
    assert not method.features(images).any()
    method.student.encode_fn = method.student.encode
    assert method.features(images).any()


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match=r"^pretrain\.method must be one of lejepa, moco, .*, got 'simclr'$"):
        PretrainConfig(method="simclr")  # type: ignore[arg-type]


@methods
def test_only_mae_needs_no_second_view(name: MethodName) -> None:
    views = ViewConfig(global_views=1, local_views=0)
    if name == "mae":
        assert PretrainConfig(method=name, views=views).views == views
        return
    with pytest.raises(ValueError, match=rf"^method {name} compares views of an image, so views\.global_views must"):
        PretrainConfig(method=name, views=views)
    PretrainConfig(method=name, views=ViewConfig(global_views=1, local_views=1))


@methods
def test_one_global_view_and_local_views_suffice(name: MethodName) -> None:
    method = tiny_method(name)
    method.views = ViewConfig(global_views=1, local_views=2, local_size=0.5)
    assert method(*draw_batch(method, random_images()))[0].isfinite()


TWO_RANKS = """
import sys
import torch
from pathlib import Path
from support.pretraining import METHOD_NAMES, draw_batch, random_images, tiny_method
from vitral.device.select import select_hardware
from vitral.distributed.world import init_distributed

torch.set_num_threads(1)
hardware = select_hardware(device="cpu")
world = hardware.world
init_distributed(world, hardware.device)
results = {}
for name, options in [*((name, {}) for name in METHOD_NAMES), ("dino", {"balance": "center"})]:
    method = tiny_method(name, options=options, world=world)
    for seed in range(2):  # the second loss depends on teacher and centre after the first
        batch = draw_batch(method, random_images(count=8), seed)
        method.zero_grad()
        loss, score = method(*(tensor[:5] if world.is_rank0 else tensor[5:] for tensor in batch))
        loss.backward()
        method.after_step(torch.tensor(0.25), torch.tensor(1.0))
    loss, score = (world.all_reduce_sum(value.detach().clone()) for value in (loss, score))
    gradients = {key: world.all_reduce_sum(p.grad) for key, p in method.named_parameters() if p.grad is not None}
    results["-".join([name, *options.values()])] = (loss, score, gradients, method.state_dict())
torch.save(results, Path(sys.argv[1]) / f"results-{world.rank}.pt")
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "two_ranks.py"
    script.write_text(TWO_RANKS)
    run_ranks(script, folder)
    return [torch.load(folder / f"results-{rank}.pt") for rank in range(2)]


@pytest.mark.timeout(2 * HANG_SECONDS)  # on a busy machine the ranks take minutes
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in METHOD_NAMES), ("dino", {"balance": "center"})])
def test_two_ranks_compute_the_loss_and_gradients_of_one_process(
    name: MethodName, options: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    """Batch norm, SIGReg, keys, Sinkhorn-Knopp and the centre use the images of both ranks, of which one has more."""
    method = tiny_method(name, options=options)
    for seed in range(2):
        batch = draw_batch(method, random_images(count=8), seed)
        method.zero_grad()
        loss, score = method(*batch)
        loss.backward()
        method.after_step(torch.tensor(0.25), IS_FINITE)
    for results in two_ranks:
        rank_loss, rank_score, rank_gradients, state = results["-".join([name, *options.values()])]
        torch.testing.assert_close(rank_loss, loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank_score, score, rtol=1e-5, atol=1e-5)
        for key, parameter in method.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(rank_gradients[key], parameter.grad, rtol=1e-3, atol=1e-5, msg=key)
        for key, tensor in method.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


LEARNER = ViTConfig(image_size=(16, 16), patch_size=4, channels=1, num_classes=6, width=32, depth=2, heads=2)
LEARNER_OPTIONS: dict[MethodName, dict[str, Any]] = {
    "lejepa": {"hidden_width": 128, "width": 16, "directions": 64},
    "moco": {"hidden_width": 128, "width": 32, "momentum": 0.97},
    "dino": {
        "hidden_width": 128, "bottleneck": 32, "prototypes": 256, "teacher_temperature": 0.02, "momentum": 0.97,
        "patch_weight": 0.5,
    },
    "mae": {},
}  # fmt: skip


def gratings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy gratings of six classes: rows, columns or both, coarse or fine. Phase, brightness and contrast vary."""
    rng = Generator().manual_seed(seed)
    labels, y, x = torch.arange(count) % 6, torch.arange(16.0)[:, None], torch.arange(16.0)[None, :]
    phase_y, phase_x, brightness, contrast = torch.rand(4, count, 1, 1, generator=rng)
    period = torch.tensor([4.0, 8.0])[labels // 3][:, None, None]
    rows = torch.sin(2 * math.pi * (y / period + phase_y)).expand(-1, 16, 16)
    columns = torch.sin(2 * math.pi * (x / period + phase_x)).expand(-1, 16, 16)
    waves = torch.stack([rows, columns, 1.4 * rows * columns])[labels % 3, torch.arange(count)]
    noise = torch.randn(count, 16, 16, generator=rng)
    images = 78 + 100 * brightness + (20 + 30 * contrast) * (waves + 0.5 * noise)
    return images.clamp(0, 255).to(torch.uint8)[:, None], labels


def knn_accuracy(method: PretrainMethod) -> float:
    splits = gratings(300, seed=11), gratings(300, seed=12)
    method.eval()
    with torch.no_grad():
        train, test = ((method.features((images / 255 - 0.5) / 0.25).numpy(), labels) for images, labels in splits)
    method.train()
    return float(KNeighborsClassifier(5).fit(*train).score(*test))


@pytest.mark.slow
@methods
def test_training_lowers_the_loss_and_improves_the_features(name: MethodName) -> None:
    method = tiny_method(name, LEARNER, options=LEARNER_OPTIONS[name])
    method.views = replace(method.views, global_min_area=0.6, local_views=0, blur_first=0.0, blur_second=0.0)
    accuracy, images, steps = knn_accuracy(method), gratings(600, seed=10)[0], 300
    rng = Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in method.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.05)
    losses = []
    for step in range(steps):
        batch = method.make_batch(images[torch.randint(600, (64,), generator=rng)], rng)
        loss = method(*batch)[0] / 64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.after_step(torch.tensor(step / steps), IS_FINITE)
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert knn_accuracy(method) > accuracy + 0.05  # from 0.70


@pytest.mark.parametrize("variant", ["plain", "class-and-mean", "distilled", "late-norm"])
def test_pooled_width_is_that_of_the_features(variant: str) -> None:
    vit = VARIANTS[variant](VIT)
    assert vit.pool(torch.zeros(1, 2 + math.prod(VIT.grid), VIT.width)).shape == (1, pooled_width(vit))
