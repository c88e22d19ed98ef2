"""How far to trust a model: each figure against a closed form, scikit-learn, scipy or Pillow."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage, stats
from scipy.spatial.distance import mahalanobis
from sklearn import metrics as sklearn
from torch import Tensor

import vitral
from support.common import leave_out_pictures
from vitral import api as workshop
from vitral.data.datasets import Split
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.evaluation import evaluate as judge
from vitral.evaluation.bootstrap import Interval, bootstrap, mean_intervals, resamples
from vitral.evaluation.calibration import Calibration
from vitral.evaluation.compare import compare, mcnemar
from vitral.evaluation.metrics import logits_of
from vitral.evaluation.ood import Mahalanobis, judge_score, separation
from vitral.evaluation.reliability import membership, reliability
from vitral.evaluation.report import assess, headline
from vitral.evaluation.robustness import SEVERITIES, compress, damage, robustness, rotate
from vitral.evaluation.selective_prediction import answer_at, answer_from, selective
from vitral.recipes.schema import Recipe
from vitral.reporting.figures import evaluation as trust_figures
from vitral.reporting.terminal import evaluation as trust_text


def honest(N: int, K: int, seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits whose softmax is the truth: each label is drawn from it."""
    draws = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(N, K, generator=draws, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(dim=1), 1, generator=draws).flatten()


def names(K: int) -> tuple[str, ...]:
    return tuple(f"class {k}" for k in range(K))


# calibration


def test_the_calibration_error_is_what_one_computes_by_hand() -> None:
    """Two bins of ten: .6 sure and 5 of 10 right, .9 sure and 10 of 10 right: (10·.1 + 10·.1) / 20."""
    sure = torch.tensor([0.6] * 10 + [0.9] * 10, dtype=torch.float64)
    p = torch.stack([sure, 1 - sure], dim=1)
    labels = torch.tensor([0] * 5 + [1] * 5 + [0] * 10)
    found = reliability(p, labels, bins=2)
    assert found.ece == pytest.approx(0.1)
    assert [(b.confidence, b.accuracy, b.images) for b in found.bins] == [
        (pytest.approx(0.6), 0.5, 10),
        (pytest.approx(0.9), 1.0, 10),
    ]


@settings(max_examples=30, deadline=None)
@given(N=st.integers(1, 200), K=st.integers(2, 9), seed=st.integers(0, 999), scale=st.floats(0.1, 8))
def test_brier_and_surprise_are_scikit_learns_and_the_bins_hold_everything(
    N: int, K: int, seed: int, scale: float
) -> None:
    logits, labels = honest(N, K, seed, scale)
    p = logits.softmax(dim=1)
    found = reliability(p, labels)
    onehot = np.eye(K)[labels.numpy()]
    assert found.brier == pytest.approx(((p.numpy() - onehot) ** 2).sum(axis=1).mean())
    if K > 2:
        everyone = list(range(K))
        assert found.brier == pytest.approx(
            sklearn.brier_score_loss(labels, p.numpy(), labels=everyone, scale_by_half=False)
        )
        assert found.nll == pytest.approx(sklearn.log_loss(labels, p.numpy(), labels=everyone), rel=1e-6)
    assert sum(b.images for b in found.bins) == N
    assert all(b.low - 1e-12 <= b.accuracy <= b.high + 1e-12 for b in found.bins)
    by_hand = sum(b.images * abs(b.confidence - b.accuracy) for b in found.bins) / N
    assert found.ece == pytest.approx(by_hand)


def test_bins_are_equally_full_and_equals_stay_together() -> None:
    members = membership(torch.rand(1500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), bins=15)
    assert members.sum(dim=0).tolist() == [100] * 15
    tied = membership(torch.tensor([1.0] * 90 + [0.5] * 10, dtype=torch.float64), bins=10)
    assert sorted(tied.sum(dim=0).tolist()) == [10, 90]


def test_the_temperature_improves_what_it_promises() -> None:
    logits, labels = honest(4000, 10, seed=1)
    too_sure = assess(3 * logits, labels, names(10), Calibration(temperature=3.0))
    assert too_sure.raw.ece > 0.1
    assert too_sure.calibrated.ece < 0.03
    assert too_sure.calibrated.nll < too_sure.raw.nll
    assert too_sure.headline.nll.value == pytest.approx(too_sure.calibrated.nll, rel=1e-5)
    assert too_sure.headline.ece.value == pytest.approx(too_sure.calibrated.ece, rel=1e-4)
    assert too_sure.loss == pytest.approx(too_sure.raw.nll, rel=1e-5)


# intervals


def test_counts_are_draws_with_replacement() -> None:
    blocks = list(resamples(7, 3, count=5))
    first, second = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    assert first.shape == (5, 7)
    assert second.shape == (5, 3)
    assert first.sum(dim=1).tolist() == [7] * 5
    assert second.sum(dim=1).tolist() == [3] * 5


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation() -> None:
    values = torch.randn(2000, 1, generator=torch.Generator().manual_seed(0)) * 3 + 1
    (found,) = mean_intervals(values, count=4000)
    half = 1.96 * values.std().item() / 2000**0.5
    assert found.value == pytest.approx(values.mean().item(), abs=1e-5)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=half * 0.08)


def test_scipy_draws_the_same_interval() -> None:
    values = np.random.default_rng(0).exponential(size=300)
    wanted = stats.bootstrap((values,), np.mean, n_resamples=4000, method="percentile", rng=1).confidence_interval
    (found,) = mean_intervals(torch.from_numpy(values)[:, None], count=4000)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=0.015)


def test_every_headline_number_lies_in_its_interval_and_is_scikit_learns() -> None:
    logits, labels = honest(800, 6, seed=2)
    found = assess(logits, labels, names(6), Calibration())
    said = logits.argmax(dim=1)
    line = found.headline
    assert line.accuracy.value == pytest.approx(found.top1)
    assert line.top5.value == pytest.approx(found.top5)
    assert line.macro_f1.value == pytest.approx(sklearn.f1_score(labels, said, average="macro"), abs=1e-6)
    assert line.aurc.value == pytest.approx(found.selective.aurc, rel=1e-5)
    assert line.brier.value == pytest.approx(found.raw.brier, rel=1e-5)
    for figure in (line.accuracy, line.top5, line.macro_f1, line.nll, line.brier, line.aurc):
        assert figure.low < figure.value < figure.high
    as_training_says = (found.top1_low, found.top1_high)
    assert (line.accuracy.low, line.accuracy.high) == pytest.approx(as_training_says)


@pytest.mark.slow
def test_the_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Honest logits, made too sure on purpose, 200 times: the true ECE is known from a million images."""
    truth = reliability((2 * honest(1_000_000, 3, seed=0)[0]).softmax(dim=1), honest(1_000_000, 3, seed=0)[1]).ece
    held = []
    for seed in range(1, 201):
        logits, labels = honest(500, 3, seed)
        found = headline((2 * logits).softmax(dim=1), labels).ece
        held.append(found.low <= truth <= found.high)
    assert 0.88 <= np.mean(held) <= 0.99


# selective


def by_hand(confidence: list[float], right: list[int]) -> float:
    order = sorted(range(len(right)), key=lambda i: -confidence[i])
    risks = [sum(1 - right[j] for j in order[: i + 1]) / (i + 1) for i in range(len(order))]
    return sum(risks) / len(risks)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 1)), min_size=1, max_size=60, unique_by=lambda x: x[0]))
def test_the_area_is_what_one_computes_by_hand(rows: list[tuple[int, int]]) -> None:
    confidence, right = [float(c) for c, _ in rows], [r for _, r in rows]
    found = selective(torch.tensor(confidence, dtype=torch.float64), torch.tensor(right))
    assert found.aurc == pytest.approx(by_hand(confidence, right))
    assert found.best_aurc <= found.aurc + 1e-12
    assert found.coverage[-1] == 1
    assert found.risk[-1] == pytest.approx(1 - sum(right) / len(right))


def test_among_equals_the_order_does_not_matter() -> None:
    sure = torch.full((10,), 0.5, dtype=torch.float64)
    right = torch.tensor([1] * 7 + [0] * 3)
    assert selective(sure, right).aurc == pytest.approx(selective(sure, right.flip(0)).aurc) == pytest.approx(0.3)


def test_the_threshold_keeps_the_wished_for_error_where_it_was_chosen() -> None:
    logits, labels = honest(3000, 5, seed=4)
    confidence, said = logits.softmax(dim=1).max(dim=1)
    right = said == labels
    least = answer_from(confidence, right, 0.05)
    assert least is not None
    assert (~right[confidence >= least]).float().mean() <= 0.05
    lower = confidence[confidence < least].max()
    assert (~right[confidence >= lower]).float().mean() > 0.05
    new_logits, new_labels = honest(3000, 5, seed=5)
    new_confidence, new_said = new_logits.softmax(dim=1).max(dim=1)
    found = answer_at(0.05, (confidence, right), (new_confidence, new_said == new_labels))
    assert found.error is not None
    assert found.coverage is not None
    assert found.error.low < 0.05 < found.error.high + 0.02
    assert found.coverage.value == pytest.approx((new_confidence >= least).double().mean().item())


def test_a_wish_that_cannot_be_fulfilled_is_said() -> None:
    wrong = torch.zeros(20, dtype=torch.bool)
    sure = torch.linspace(0.5, 1, 20, dtype=torch.float64)
    found = answer_at(0.01, (sure, wrong), (sure, wrong))
    assert found.confidence is None
    assert "At no confidence" in trust_text.told(found)
    with pytest.raises(VitralError, match="above 0 and below 1, not 2"):
        answer_from(sure, wrong, 2.0)


# unknown images


@settings(max_examples=40, deadline=None)
@given(
    known=st.lists(st.integers(-5, 9), min_size=2, max_size=60),
    unknown=st.lists(st.integers(-9, 5), min_size=2, max_size=60),
)
def test_auroc_and_fpr_are_scikit_learns_ties_too(known: list[int], unknown: list[int]) -> None:
    auroc, fpr95 = separation(torch.tensor(known).double(), torch.tensor(unknown).double())
    truth, scores = [1] * len(known) + [0] * len(unknown), known + unknown
    assert auroc.value == pytest.approx(sklearn.roc_auc_score(truth, scores))
    fpr, tpr, _ = sklearn.roc_curve(truth, scores, drop_intermediate=False)
    assert fpr95.value == pytest.approx(fpr[np.argmax(tpr >= 0.95 - 1e-12)])
    assert auroc.low - 1e-9 <= auroc.value <= auroc.high + 1e-9


def test_the_interval_of_auroc_is_that_of_hanley_and_mcneil() -> None:
    draws = torch.Generator().manual_seed(0)
    known, unknown = torch.randn(600, generator=draws) + 1.2, torch.randn(400, generator=draws)
    found, _ = separation(known.double(), unknown.double())
    a = found.value
    q1, q2 = a / (2 - a), 2 * a**2 / (1 + a)
    error = ((a * (1 - a) + 599 * (q1 - a**2) + 399 * (q2 - a**2)) / (600 * 400)) ** 0.5  # Radiology 143 (1982)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.15)


def test_the_distance_is_scipys() -> None:
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (300,), generator=draws)
    mix = torch.randn(5, 5, generator=draws, dtype=torch.float64)
    x = torch.randn(300, 5, generator=draws, dtype=torch.float64) @ mix + 4 * F.one_hot(labels, 5)
    score = Mahalanobis(x, labels)
    means = np.stack([x[labels == k].numpy().mean(axis=0) for k in range(3)])
    rest = x.numpy() - means[labels]
    covariance = rest.T @ rest / 300
    covariance += 1e-3 * np.trace(covariance) / 5 * np.eye(5)
    inverse = np.linalg.inv(covariance)
    wanted = [-(min(mahalanobis(row, mean, inverse) for mean in means) ** 2) for row in x[:20].numpy()]
    assert score.score(x[:20]).tolist() == pytest.approx(wanted)


def test_a_feature_without_spread_is_no_trouble() -> None:
    x = torch.cat([torch.randn(50, 3), torch.zeros(50, 2)], dim=1)
    assert Mahalanobis(x, torch.arange(50) % 2).score(x).isfinite().all()


def test_the_threshold_is_the_validation_images() -> None:
    draws = torch.Generator().manual_seed(0)
    validation, known = torch.randn(2000, generator=draws), torch.randn(2000, generator=draws)
    found = judge_score("energy", (validation, known, torch.randn(500, generator=draws) - 4))
    assert found.false_alarms == pytest.approx(0.01, abs=0.01)
    assert found.caught > 0.9
    assert sum(found.known) == 2000
    assert sum(found.unknown) == 500
    assert len(found.edges) == len(found.known) + 1


# damage


@pytest.mark.parametrize("shape", [(5, 1, 28, 28), (300, 1, 9, 20), (3, 3, 32, 32), (2, 3, 130, 141), (2, 4, 16, 16)])
@pytest.mark.parametrize("quality", [50, 5])
def test_a_mosaic_comes_out_of_jpeg_as_each_image_by_itself(shape: tuple[int, ...], quality: int) -> None:
    images = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = compress(images, quality)
    assert found.shape == images.shape
    for image, out in zip(images[:5], found[:5], strict=True):
        planes = [image] if shape[1] in (1, 3) else list(image[:, None])
        for plane, seen in zip(planes, [out] if shape[1] in (1, 3) else list(out[:, None]), strict=True):
            file = io.BytesIO()
            array = plane.permute(1, 2, 0).squeeze(2).contiguous().numpy()
            Image.fromarray(array).save(file, "JPEG", quality=quality, subsampling=0)
            alone = torch.from_numpy(np.array(Image.open(file))).reshape(*plane.shape[1:], -1).permute(2, 0, 1)
            assert torch.equal(alone, seen)


def test_blur_is_scipys() -> None:
    images = torch.randint(0, 256, (4, 2, 20, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = damage(images, "blur", 0.05)
    for image, seen in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
        wanted = ndimage.gaussian_filter(image.double().numpy(), sigma=1.0, mode="nearest", truncate=4)
        assert np.abs(seen.numpy() - wanted).max() <= 0.51


def test_a_quarter_turn_is_a_quarter_turn_and_a_small_one_is_scipys() -> None:
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    quarter = torch.tensor([torch.pi / 2], dtype=torch.float64)
    torch.testing.assert_close(rotate(image, quarter), image.rot90(1, dims=(2, 3)))
    oblong = torch.rand(1, 1, 20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = rotate(oblong, torch.deg2rad(torch.tensor([15.0], dtype=torch.float64)))[0, 0].numpy()
    wanted = ndimage.rotate(oblong[0, 0].numpy(), 15, reshape=False, order=1, mode="nearest")
    assert np.abs(found - wanted).max() < 1e-6


def test_noise_has_its_deviation_contrast_its_share_and_both_are_the_same_each_time() -> None:
    gray = torch.full((50, 1, 20, 20), 128, dtype=torch.uint8)
    noisy = damage(gray, "noise", 0.08)
    assert (noisy.float() / 255).std().item() == pytest.approx(0.08, rel=0.05)
    assert torch.equal(noisy, damage(gray, "noise", 0.08))
    half = torch.tensor([0, 100, 200, 100], dtype=torch.uint8).view(1, 1, 2, 2)
    assert damage(half, "contrast", 0.5).flatten().tolist() == [50, 100, 150, 100]
    with pytest.raises(ValueError, match="no damage is called 'rust'"):
        damage(half, "rust", 1)


def test_robustness_counts_what_is_left() -> None:
    """A model that tells bright from dark is right, whatever is done, but for those that noise can push over."""
    images = torch.full((40, 1, 16, 16), 60, dtype=torch.uint8)
    images[::2] = 190
    labels = (torch.arange(40) % 2 == 0).long()
    found = robustness(images, labels, lambda x: (x.float().mean(dim=(1, 2, 3)) > 125).long())
    assert found.clean == 1
    assert found.relative.value == 1
    assert [d.kind for d in found.damages] == list(SEVERITIES)
    blind = robustness(images, labels, lambda x: torch.ones(len(x), dtype=torch.long))
    assert blind.clean == 0.5
    assert blind.relative.value == pytest.approx(1)
    assert blind.damages[0].accuracy[0].low < 0.5 < blind.damages[0].accuracy[0].high


# comparison


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemars_test_is_scipys_binomial(one: int, other: int) -> None:
    wanted = stats.binomtest(one, one + other).pvalue if one + other else 1.0
    assert mcnemar(one, other) == pytest.approx(wanted, rel=1e-9)


def test_mcnemars_test_holds_for_thousands() -> None:
    assert mcnemar(4000, 4300) == pytest.approx(stats.binomtest(4000, 8300).pvalue, rel=1e-9)
    assert mcnemar(0, 5000) == 0 or mcnemar(0, 5000) < 1e-300


def test_a_comparison_counts_who_was_right() -> None:
    labels = torch.tensor([0] * 60 + [1] * 40)
    first, second = labels.clone(), labels.clone()
    first[:10] = 1  # ten mistakes on class 0
    second[58:62] = 1 - second[58:62]  # two on each
    first[99] = second[99] = 0  # the same mistake
    found = compare(first, second, labels, ("a", "b"))
    assert (found.both_right, found.only_first, found.only_second, found.both_wrong, found.same_mistake) == (
        85, 4, 10, 1, 1,
    )  # fmt: skip
    assert found.difference.value == pytest.approx(0.06)
    assert found.difference.low < 0.06 < found.difference.high
    assert found.p == pytest.approx(stats.binomtest(4, 14).pvalue)
    assert [(row.name, row.only_first, row.only_second) for row in found.classes] == [("a", 2, 10), ("b", 2, 0)]
    assert "cannot tell which is better" in found.verdict()
    same = compare(first, first, labels, ("a", "b"))
    assert same.p == 1
    assert "exactly the same 89 images" in same.verdict()
    clear = compare(labels * 0, labels, labels, ("a", "b"))
    assert clear.verdict("A", "B").startswith("B is better than A by 40.00 points")


# all of it


def test_ten_thousand_images_take_seconds_beyond_the_forward_passes() -> None:
    logits, labels = honest(10_000, 10, seed=0)
    images = torch.randint(0, 256, (10_000, 1, 28, 28), dtype=torch.uint8)
    start = time.process_time()
    assess(logits, labels, names(10), Calibration())
    separation(logits.amax(dim=1), logits.amax(dim=1) - 1)
    robustness(images, labels, lambda x: x[:, 0, 0, 0].long())
    assert time.process_time() - start < 15  # about 2.5 s on one idle core


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patched:
        leave_out_pictures(patched)
        workshop.train("digits", epochs=8, out=out, **{"model.depth": 1, "model.width": 32})
    return out


def other_things(folder: Path) -> Path:
    """Pictures that are no digits, in no order."""
    draws = np.random.default_rng(0)
    (folder / "deep").mkdir(parents=True)
    for index in range(30):
        array = draws.integers(0, 256, (12, 12), dtype=np.uint8)
        Image.fromarray(array).save(folder / ("deep" if index % 2 else ".") / f"{index}.png")
    (folder / "broken.png").write_text("no picture")
    return folder


def test_evaluate_says_everything_with_flags_and_little_without(run: Path, command, tmp_path: Path) -> None:
    code, out, err = command("evaluate", run)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) < 14
    for word in ("accuracy", "calibration error", "AURC", "95 % interval", "It confuses most often"):
        assert word in out
    strange = other_things(tmp_path / "noise")
    flags = ("--max-error", 0.05, "--unknown", strange, "--robustness")
    code, out, err = command("evaluate", run, *flags, "--figures", tmp_path / "fig", "--full")
    assert (code, err) == (0, "")
    for word in ("mahalanobis", "AUROC", "noise", "rotation", "To be wrong at most 5.00%", "precision", "said →"):
        assert word in out
    for name in ("reliability", "risk-coverage", "unknown", "robustness"):
        with Image.open(tmp_path / "fig" / f"{name}.png") as picture:
            assert picture.width > 400
    code, out, _ = command("evaluate", run, *flags, "--json")
    plain = json.loads(out)
    assert plain["unknown"]["images"] == 30
    assert {s["name"] for s in plain["unknown"]["scores"]} == {"max-logit", "energy", "mahalanobis"}
    assert len(plain["robustness"]["damages"]) == 5
    assert set(plain["headline"]) == {"accuracy", "top5", "macro_f1", "nll", "brier", "ece", "aurc"}


def test_what_training_wrote_down_has_the_headline(run: Path) -> None:
    assert json.loads((run / "test.json").read_text()) == {"split": "test"} | vitral.evaluate(run).as_dict()


@pytest.mark.usefixtures("no_pictures")
def test_compare_two_runs(run: Path, command, tmp_path: Path) -> None:
    workshop.train("digits", epochs=1, out=tmp_path / "worse", **{"model.depth": 1, "model.width": 32})
    code, out, err = command("compare", run, tmp_path / "worse")
    assert (code, err) == (0, "")
    assert "is better than" in out
    assert "McNemar" in out
    found = json.loads(command("compare", run, tmp_path / "worse", "--json")[1])
    assert found["first"]["value"] == pytest.approx(vitral.evaluate(run).top1)
    assert "exactly the same" in command("compare", run, run)[1]


def test_a_run_whose_photographs_are_elsewhere_says_so(run: Path, tmp_path: Path) -> None:
    model = vitral.load(run)
    for name in ("photos", str(tmp_path / "photos")):
        model.card = replace(model.card, trained_on=name)
        with pytest.raises(VitralError, match=f"trained on {name}, which is not there\nname the images with --data"):
            judge.question(model, None, None)


def test_models_of_other_classes_cannot_be_compared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = judge.question(run, None, "test")
    card = replace(asked.predictor.card, classes=tuple("abcdefghij"))
    other = replace(asked, predictor=vitral.Predictor(asked.predictor.model, card, asked.predictor.hardware))
    with pytest.raises(VitralError, match="different classes: 0, 1, 2, 3, 4, 5 and 14 more only in one"):
        judge.compare_models(asked, other)
    fewer = replace(asked, split=Split(images=asked.split.images[:5], labels=asked.split.labels[:5]))
    with pytest.raises(VitralError, match="asked different images: 359 of digits, 5 of digits"):
        judge.compare_models(asked, fewer)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--unknown", "digits"], "digits is what the model was trained on"),
        (["--unknown", "nothing/here"], "there is no folder nothing/here"),
        (["--unknown", "mnits"], "no data set or folder named 'mnits'. Did you mean mnist?"),
        (["--max-error", "1.5"], "must be above 0 and below 1, not 1.5"),
        (["--calibrate", "--false-alarms", "0"], "must be above 0 and below 1, not 0.0"),
    ],
)
def test_mistakes_are_said_in_two_lines(run: Path, command, words: list[str], what: str) -> None:
    code, _, err = command("evaluate", run, *words)
    assert code == 2
    assert what in err.splitlines()[0]
    assert len(err.splitlines()) <= 2


def test_an_empty_folder_of_unknown_images_is_said(run: Path, command, tmp_path: Path) -> None:
    code, _, err = command("evaluate", run, "--unknown", f"{tmp_path}/")
    assert code == 2
    assert "no readable images" in err


def test_images_of_another_channel_count_are_said(cpu: Hardware, recipe: Recipe) -> None:
    preprocessing = Preprocessing(image_size=(8, 8), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(VitralError, match="the images have 1 channels; the model wants 3"):
        logits_of(torch.nn.Identity(), torch.zeros(2, 1, 8, 8, dtype=torch.uint8), preprocessing, cpu)


def test_figures_can_be_drawn_of_very_little(tmp_path: Path) -> None:
    found = assess(torch.eye(2), torch.tensor([0, 1]), ("a", "b"), Calibration())
    assert all(path.is_file() for path in trust_figures.draw(found, tmp_path / "a" / "b"))
    with pytest.raises(VitralError, match="cannot make the folder"):
        trust_figures.draw(found, tmp_path / "a" / "b" / "reliability.png")


def test_an_interval_reads_well() -> None:
    assert str(Interval(value=0.5, low=0.25, high=0.75)) == "0.5000 (0.2500 – 0.7500)"
    assert bootstrap(lambda counts: counts[:, :1], 4, count=3).shape == (3, 1)
