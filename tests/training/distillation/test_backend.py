"""Training with labels and a teacher: DeiT's losses on the right heads, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.common import Fit, identical
from support.models import randomize_weights
from support.training import ALL_RANDOMNESS, RaiseSigint, final_weights, metrics_without_timing
from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import Interrupted, VitralError
from vitral.models.variants import VARIANTS
from vitral.models.variants.distilled import DistilledHead
from vitral.models.vit import ViT
from vitral.recipes.distillation import DistillConfig
from vitral.recipes.schema import Recipe
from vitral.ssl.teacher import Teacher
from vitral.training.backend import make_backend
from vitral.training.distillation.backend import DistillBackend
from vitral.training.hardware import parallel_plan
from vitral.training.trainer import Trainer

CLASSES = ("rows", "columns", "chequerboard", "plain")


@pytest.fixture
def teacher(recipe: Recipe, preprocessing: Preprocessing) -> Teacher:
    vit = randomize_weights(ViT(replace(recipe.model, width=24, depth=1)))
    return Teacher(vit, preprocessing, name="tiny", sha256="1" * 64, classes=CLASSES)


@pytest.fixture
def fit(train_tiny: Fit, teacher: Teacher) -> Fit:
    """Train with the teacher, in a run folder, or resume."""

    class TeacherTrainer(Trainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options, teacher=teacher)

    def run(*arguments: Any, **overrides: Any) -> Any:
        return train_tiny(*arguments, trainer_class=TeacherTrainer, **{"distill.teacher": "tiny"} | overrides)

    return run


def make(recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware, teacher: Teacher) -> tuple[ViT, DistillBackend]:
    torch.manual_seed(0)
    model = randomize_weights(VARIANTS[recipe.variant](recipe.model), seed=3).train()
    backend = make_backend(model, recipe, preprocessing, cpu, parallel_plan(recipe, cpu), teacher=teacher)
    assert isinstance(backend, DistillBackend)
    return model, backend


def batch_of(dataset: Dataset, preprocessing: Preprocessing) -> tuple[tuple[Tensor, Tensor], Tensor]:
    images, labels = preprocessing.normalise(dataset.train.images[:8]), dataset.train.labels[:8]
    return (images, F.one_hot(labels, 4).float()), labels


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_one_head_learns_labels_and_teacher(
    recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware, teacher: Teacher, dataset: Dataset, kind: Any
) -> None:
    distill = DistillConfig(teacher="tiny", kind=kind, alpha=0.3, temperature=2.0)
    model, backend = make(replace(recipe, distill=distill), preprocessing, cpu, teacher)
    batch, labels = batch_of(dataset, preprocessing)
    loss, score = backend.loss_and_score(batch, labels)
    logits, teacher_logits = model(batch[0]), teacher.network(batch[0])
    if kind == "hard":
        learned = F.cross_entropy(logits, teacher_logits.argmax(dim=1), reduction="sum")
    else:
        learned = 4 * F.kl_div((logits / 2).log_softmax(1), (teacher_logits / 2).softmax(1), reduction="sum")
    torch.testing.assert_close(loss, 0.7 * F.cross_entropy(logits, labels, reduction="sum") + 0.3 * learned)
    assert score == (logits.argmax(dim=1) == labels).sum()


def test_distillation_token_learns_the_teacher_and_class_token_the_labels(
    recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware, teacher: Teacher, dataset: Dataset
) -> None:
    """DeiT, equation 3: 1/2 CE(class token, y) + 1/2 CE(distillation token, y_t)."""
    plan = replace(recipe, variant="distilled", distill=DistillConfig(teacher="tiny"))
    model, backend = make(plan, preprocessing, cpu, teacher)
    batch, labels = batch_of(dataset, preprocessing)
    decisions = teacher.network(batch[0]).argmax(dim=1)
    loss, _ = backend.loss_and_score(batch, labels)
    label_token, teacher_token = model.features(batch[0]).chunk(2, dim=1)
    assert isinstance(model.head, DistilledHead)
    label_loss = F.cross_entropy(model.head.label_head(label_token), labels, reduction="sum")
    teacher_loss = F.cross_entropy(model.head.teacher_head(teacher_token), decisions, reduction="sum")
    torch.testing.assert_close(loss, label_loss / 2 + teacher_loss / 2)
    loss.backward()
    for head, tokens, targets in (
        (model.head.label_head, label_token, labels),
        (model.head.teacher_head, teacher_token, decisions),
    ):
        probabilities = head(tokens).softmax(dim=1).detach()
        expected = (probabilities - F.one_hot(targets, 4)).T @ tokens.detach() / 2
        assert head.out.weight.grad is not None
        torch.testing.assert_close(head.out.weight.grad, expected, rtol=1e-4, atol=1e-5)


def test_distilled_model_predicts_the_mean_of_its_heads(
    recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware, teacher: Teacher, dataset: Dataset
) -> None:
    plan = replace(recipe, variant="distilled", distill=DistillConfig(teacher="tiny"))
    model, _ = make(plan, preprocessing, cpu, teacher)
    images = batch_of(dataset, preprocessing)[0][0]
    both = model(images)
    assert both.shape == (8, 8)
    torch.testing.assert_close(model.eval()(images), (both[:, :4] + both[:, 4:]) / 2)


def test_soft_distillation_with_alpha_0_is_plain_training_bit_for_bit(fit: Fit, train_tiny: Fit) -> None:
    plain = train_tiny("plain", **ALL_RANDOMNESS)
    weightless = fit("distill", **ALL_RANDOMNESS, **{"distill.kind": "soft", "distill.alpha": 0.0})
    assert identical(final_weights(plain), final_weights(weightless))
    assert metrics_without_timing(plain) == metrics_without_timing(weightless)


def test_teacher_changes_what_is_learned(fit: Fit, train_tiny: Fit) -> None:
    assert not identical(final_weights(train_tiny("plain")), final_weights(fit("distill")))


@pytest.mark.slow
def test_student_learns_the_decisions_of_its_teacher(
    fit: Fit, teacher: Teacher, dataset: Dataset, preprocessing: Preprocessing, recipe: Recipe
) -> None:
    """With alpha 1, the labels do not matter."""
    run = fit(
        "only-teacher", **{"distill.kind": "soft", "distill.alpha": 1.0, "distill.temperature": 1.0, "epochs": 20}
    )
    student = ViT(recipe.model)
    student.load_state_dict(final_weights(run))
    images = preprocessing.normalise(torch.as_tensor(dataset.train.images))
    with torch.no_grad():
        agreement = student.eval()(images).argmax(dim=1) == teacher.network(images).argmax(dim=1)
    assert agreement.float().mean() > 0.9


@pytest.mark.parametrize(
    ("variant", "after"),
    [
        ("distilled", [1, 5, 4]),
        pytest.param("distilled", [3], marks=pytest.mark.slow),
        pytest.param("plain", [3], marks=pytest.mark.slow),
        pytest.param("plain", [1, 5, 4], marks=pytest.mark.slow),
    ],
)
def test_interrupted_distillation_resumes_bit_for_bit(fit: Fit, after: list[int], variant: str) -> None:
    overrides = ALL_RANDOMNESS | {"distill.kind": "hard", "variant": variant}
    whole = fit("whole", **overrides)
    for steps in after:
        with pytest.raises(Interrupted):
            fit("parts", RaiseSigint(steps), **overrides)
        torch.rand(7)
    assert identical(final_weights(fit("parts", **overrides)), final_weights(whole))


def test_checkpoints_contain_the_digest_of_the_teacher_but_not_the_teacher(fit: Fit, teacher: Teacher) -> None:
    with pytest.raises(Interrupted):
        fit("run", RaiseSigint(3))
    teacher.sha256 = "2" * 64
    with pytest.raises(VitralError, match="the weights of the teacher tiny have changed") as error:
        fit("run")
    assert "start a new run" in error.value.hint
    teacher.sha256 = "1" * 64
    assert fit("run").has_model


def test_recipe_with_a_teacher_needs_one(recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware) -> None:
    plan = replace(recipe, distill=DistillConfig(teacher="tiny"))
    with pytest.raises(ValueError, match="needs a teacher"):
        make_backend(ViT(plan.model), plan, preprocessing, cpu, parallel_plan(plan, cpu))


def test_eager_backend_gives_the_same_loss(
    recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware, teacher: Teacher, dataset: Dataset
) -> None:
    _, backend = make(replace(recipe, distill=DistillConfig(teacher="tiny")), preprocessing, cpu, teacher)
    batch, labels = batch_of(dataset, preprocessing)
    assert torch.equal(backend.loss_and_score(batch, labels)[0], backend.eager().loss_and_score(batch, labels)[0])


def test_run_folder_is_complete(fit: Fit, tmp_path: Path) -> None:
    run = fit("run")
    assert 'teacher = "tiny"' in run.recipe_file.read_text()
    assert run.has_model
