"""The losses of DINO and iBOT against lightly's, Sinkhorn-Knopp against its limit, centring, and masked patches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from support.lightly_losses import DINOLoss, IBOTPatchLoss
from support.lightly_losses import sinkhorn as lightly_sinkhorn
from support.pretraining import VIT, draw_batch, random_images, tiny_method
from vitral.distributed.world import SINGLE_PROCESS
from vitral.ssl.collapse import output_entropies
from vitral.ssl.dino import DINO, DINOConfig, sinkhorn, view_cross_entropy

STUDENT, TEACHER = 0.1, 0.05  # temperatures


def make_dino(**options: Any) -> DINO:
    method = tiny_method("dino", options=options)
    assert isinstance(method, DINO)
    return method


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    """Cosine similarities."""
    return torch.randn(*shape, generator=Generator().manual_seed(seed)).tanh()


def test_the_view_loss_equals_that_of_lightly() -> None:
    student, teacher = random_logits(6, 5, 24), random_logits(6, 2, 24, seed=1)
    reference = DINOLoss(24, teacher_temp=TEACHER, student_temp=STUDENT)
    expected = reference([*teacher.unbind(1)], [*student.unbind(1)])
    loss = view_cross_entropy(student / STUDENT, (teacher / TEACHER).softmax(dim=-1))
    torch.testing.assert_close(loss / 6, expected)


def step_with_lightly(method: DINO, batch: tuple[Tensor, ...], dino: DINOLoss, ibot: IBOTPatchLoss) -> Tensor:
    """The loss of a batch, by lightly's modules, whose centres move with every call."""
    global_views, local_views, masks = batch
    (B, G), images, mask = masks.shape[:2], global_views.flatten(0, 1), masks.flatten(0, 1)
    assert method.teacher is not None
    num_prefix = VIT.num_prefix_tokens
    with torch.no_grad():
        teacher_tokens = method.teacher.tokens(images)
        teacher_out = method.logits(method.teacher, teacher_tokens[:, 0]).unflatten(0, (B, G))
        teacher_patches = method.logits(method.teacher, teacher_tokens[:, num_prefix:][mask])
    tokens = method.student.tokens(images, mask)
    student_out = [
        method.logits(method.student, tokens[:, 0]).unflatten(0, (B, G)),
        method.logits(method.student, method.student.features(local_views.flatten(0, 1))).unflatten(0, (B, -1)),
    ]
    student_patches = method.logits(method.student, tokens[:, num_prefix:][mask])
    view_loss = dino([*teacher_out.unbind(1)], [*torch.cat(student_out, dim=1).unbind(1)])
    return view_loss + method.config.patch_weight * ibot(teacher_patches, student_patches, mask.unflatten(1, VIT.grid))


def test_two_steps_with_centring_equal_those_of_lightly() -> None:
    method = make_dino(balance="center", patch_weight=0.5)
    temperatures = {"teacher_temp": TEACHER, "student_temp": STUDENT}
    dino, ibot = DINOLoss(24, **temperatures), IBOTPatchLoss(24, **temperatures)
    for seed in range(2):  # the second loss depends on the centres after the first
        batch = draw_batch(method, random_images(), seed)
        expected = step_with_lightly(method, batch, dino, ibot)
        loss, _ = method(*batch)
        torch.testing.assert_close(loss / 6, expected)
        method.after_step(torch.tensor(0.5), torch.tensor(1.0))
        torch.testing.assert_close(method.centers_2K[0], dino.center.flatten())
        torch.testing.assert_close(method.centers_2K[1], ibot.center.value.flatten())
    assert method.centers_2K.any()


def test_the_loss_and_score_with_sinkhorn_are_cross_entropies_with_balanced_targets() -> None:
    method = make_dino(patch_weight=2.0)
    batch = draw_batch(method, random_images())
    global_views, local_views, masks = batch
    images, mask = global_views.flatten(0, 1), masks.flatten(0, 1)
    assert method.teacher is not None
    tokens, teacher_tokens = method.student.tokens(images, mask), method.teacher.tokens(images)
    targets = sinkhorn(method.logits(method.teacher, teacher_tokens[:, 0]) / TEACHER, SINGLE_PROCESS)
    patch_targets = sinkhorn(method.logits(method.teacher, teacher_tokens[:, 1:][mask]) / TEACHER, SINGLE_PROCESS)
    global_logits = method.logits(method.student, tokens[:, 0]).unflatten(0, (6, 2))
    local_logits = method.logits(method.student, method.student.features(local_views.flatten(0, 1))).unflatten(
        0, (6, 2)
    )
    logits = torch.cat([global_logits, local_logits], dim=1) / STUDENT
    losses = []
    for b in range(6):
        pairs = [(view, target) for view in range(4) for target in range(2) if view != target]
        view_losses = [-(targets[2 * b + target] * logits[b, view].log_softmax(0)).sum() for view, target in pairs]
        losses.append(sum(view_losses) / 6)
    patch_logits = method.logits(method.student, tokens[:, 1:][mask]) / STUDENT
    patch_loss = -(patch_targets * patch_logits.log_softmax(dim=1)).sum(dim=1).mean()
    loss, score = method(*batch)
    torch.testing.assert_close(loss / 6, torch.stack(losses).mean() + 2 * patch_loss)
    torch.testing.assert_close(score / 6, torch.special.entr(targets).sum(dim=1).mean().detach())


def sinkhorn_limit(logits_NK: Tensor) -> Tensor:
    """The matrix D1·exp(logits)·D2 whose rows have the sum 1 and whose columns have equal sums."""
    q = logits_NK.double().softmax(dim=1)
    for _ in range(2000):
        q = q / q.sum(dim=0) * (len(q) / q.shape[1])
        q = q / q.sum(dim=1, keepdim=True)
    return q


def test_sinkhorn_approaches_the_balanced_assignment() -> None:
    logits = random_logits(32, 12) / 0.2
    limit, probs = sinkhorn_limit(logits), sinkhorn(logits, SINGLE_PROCESS)
    torch.testing.assert_close(limit.sum(dim=0), torch.full((12,), 32 / 12, dtype=torch.double))
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(32))
    assert (probs - limit).abs().max() < 0.03
    assert (probs - limit).abs().max() < 0.1 * (logits.softmax(dim=1) - limit).abs().max()
    assert (probs.sum(dim=0) / (32 / 12) - 1).abs().max() < 0.05


def test_sinkhorn_equals_that_of_lightly_on_rows_of_equal_sum() -> None:
    logits = random_logits(20, 12) / TEACHER
    expected = lightly_sinkhorn(logits.log_softmax(dim=1), iterations=3, epsilon=1.0)
    torch.testing.assert_close(sinkhorn(logits, SINGLE_PROCESS), expected)


def test_sinkhorn_does_not_depend_on_what_is_added_to_a_row() -> None:
    logits = random_logits(20, 12) / TEACHER
    shifted = logits + 30 * random_logits(20, 1, seed=1)
    torch.testing.assert_close(sinkhorn(shifted, SINGLE_PROCESS), sinkhorn(logits, SINGLE_PROCESS))


@pytest.mark.parametrize("temperature", [0.05, 0.01, 1e-3, 1e-5])
def test_sinkhorn_is_finite_at_any_temperature(temperature: float) -> None:
    probs = sinkhorn(random_logits(20, 64) / temperature, SINGLE_PROCESS)
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(20))


def test_equal_outputs_become_uniform() -> None:
    probs = sinkhorn(random_logits(1, 12).expand(16, 12) / TEACHER, SINGLE_PROCESS)
    torch.testing.assert_close(probs, torch.full((16, 12), 1 / 12))


@pytest.mark.parametrize("balance", ["sinkhorn", "center"])
def test_what_all_outputs_have_in_common_is_no_collapse(balance: str) -> None:
    """Balancing removes it from the targets, so the distributions that are checked for collapse must not have it."""
    method, images = make_dino(balance=balance), torch.randn(32, 3, 16, 16)
    assert method.teacher is not None
    with torch.no_grad():
        method.teacher.head[-1].weight.mul_(3)
        method.teacher.head[-1].bias.copy_(method.teacher.prototypes.weight[0] * 10)
        method.centers_2K[0] = method.logits(method.teacher, method.teacher.features(images)).mean(dim=0)
        logits = method.output_logits(images)
        assert logits is not None
        probs = method.output_probs(logits)
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(32))
    _, marginal = output_entropies(probs)
    assert marginal > 0.9 * math.log(24)


def test_the_centre_moves_by_a_tenth_towards_the_mean_of_the_batch() -> None:
    method = make_dino(balance="center")
    batch = draw_batch(method, random_images())
    method(*batch)
    assert not method.centers_2K.any()  # only after the step
    assert method.teacher is not None
    mean = method.logits(method.teacher, method.teacher.features(batch[0].flatten(0, 1))).mean(dim=0)
    method.after_step(torch.tensor(0.0), torch.tensor(1.0))
    torch.testing.assert_close(method.centers_2K[0], 0.1 * mean)


def test_the_centre_stays_after_a_step_that_is_not_finite() -> None:
    method = make_dino(balance="center")
    batch = draw_batch(method, random_images())
    method(*batch)
    method.after_step(torch.tensor(0.0), torch.tensor(1.0))
    before = method.centers_2K.clone()
    method(batch[0] * math.nan, *batch[1:])
    method.after_step(torch.tensor(0.0), torch.tensor(0.0))
    assert torch.equal(method.centers_2K, before)


def test_the_centre_is_saved() -> None:
    assert "centers_2K" in make_dino().state_dict()


def test_without_patch_loss_there_are_no_masks_and_no_mask_token() -> None:
    method = make_dino(patch_weight=0.0)
    batch = draw_batch(method, random_images())
    assert not batch[2].any()
    assert not method.needs_patches
    assert method.student.mask_token is None
    assert torch.isfinite(method(*batch)[0])


def test_every_global_view_has_its_own_mask_with_the_same_number_of_patches() -> None:
    masks = draw_batch(make_dino(mask_ratio=0.3), random_images())[2]
    assert masks.shape == (6, 2, 16)
    assert (masks.sum(dim=2) == 5).all()  # 0.3 of 16
    assert len(masks.flatten(0, 1).unique(dim=0)) > 6


def test_pixels_under_masked_patches_do_not_reach_the_student() -> None:
    method = make_dino()
    images = torch.randn(4, 3, 16, 16)
    mask = torch.rand(4, 16, generator=Generator().manual_seed(0)) < 0.4
    pixels = mask.view(4, 1, 4, 4).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    changed = torch.where(pixels, torch.randn(4, 3, 16, 16), images)
    assert torch.equal(method.student.tokens(images, mask), method.student.tokens(changed, mask))
    assert not torch.equal(method.student.tokens(images), method.student.tokens(changed))


def test_local_views_are_not_masked() -> None:
    method = make_dino()
    global_views, local_views, masks = draw_batch(method, random_images())
    seen = []
    encode = method.student.encode
    method.student.encode_fn = lambda images, mask: (
        seen.append((images.shape[-1], mask is None)) or encode(images, mask)
    )
    method(global_views, local_views, masks)
    assert seen == [(16, False), (8, True)]


@pytest.mark.parametrize(("local_views", "mask_ratio"), [(0, 0.2), (1, 0.5), (6, 0.8)])
def test_a_uniform_student_has_the_initial_loss_whatever_the_views_and_masks(
    local_views: int, mask_ratio: float
) -> None:
    method = make_dino(mask_ratio=mask_ratio, patch_weight=0.5)
    method.views = replace(method.views, local_views=local_views)
    with torch.no_grad():
        method.student.prototypes.weight.copy_(torch.ones(24, 8))
    loss, _ = method(*draw_batch(method, random_images()))
    assert loss.item() / 6 == pytest.approx(1.5 * math.log(24), rel=1e-5)
    assert method.initial_loss == pytest.approx(1.5 * math.log(24))


def test_the_loss_under_autocast_is_near_that_in_fp32() -> None:
    method = make_dino()
    batch = draw_batch(method, random_images(count=32))
    expected, _ = method(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, score = method(*batch)
    assert loss.dtype == score.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("student_temperature", 0.0), ("teacher_temperature", -1.0), ("teacher_temperature", math.nan),
        ("balance", "none"), ("momentum", 1.0), ("patch_weight", -0.5), ("patch_weight", math.inf),
        ("mask_ratio", 0.0), ("mask_ratio", 1.0), ("prototypes", 1), ("hidden_width", 0), ("bottleneck", 0),
    ],
)  # fmt: skip
def test_invalid_options_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^dino\.{name} must be .*, got {value!r}$"):
        DINOConfig(**{name: value})
