"""Figures of a training run: the files, and the values in matplotlib's objects."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.evaluation.metrics import Metrics, compute_metrics
from vitral.explain import METHODS, rescale_for_display
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.reporting.figures import training as figures
from vitral.reporting.figures.images import overlay_heatmap, patch_mosaic, rollout_heatmaps, save_image, to_rgb
from vitral.reporting.figures.style import format_percent, save, shorten
from vitral.runs.model_io import ModelConfig

NAMES = ("ant", "bee", "$x_ {broken math", "猫", "a very long name of a class, which is shortened", "fox", "gnu")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved while the test ran."""
    saved: list[Figure] = []
    savefig = Figure.savefig

    def recording_savefig(self: Figure, *arguments: Any, **settings: Any) -> None:
        saved.append(self)
        savefig(self, *arguments, **settings)

    monkeypatch.setattr(Figure, "savefig", recording_savefig)
    return saved


def predictor(
    cpu: Hardware,
    channels: int = 1,
    pooling: Any = "class",
    image_size: tuple[int, int] = (16, 16),
    names: tuple[str, ...] = NAMES,
    registers: int = 0,
) -> Predictor:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=image_size,
        patch_size=4,
        channels=channels,
        num_classes=len(names),
        width=16,
        depth=2,
        heads=2,
        pooling=pooling,
        registers=registers,
    )
    model = ViT(config)
    nn.init.normal_(model.get_parameter("head.out.weight"))
    for block in model.encoder.blocks:
        nn.init.normal_(block.get_parameter("attention.qkv.weight"))
    preprocessing = Preprocessing(
        image_size=image_size, channels=channels, mean=(0.5,) * channels, std=(0.25,) * channels
    )
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=names, trained_on="nothing", epoch=1
    )
    return Predictor(model, model_config, cpu)


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def is_figure_file(path: Path) -> bool:
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
        return picture.format == "PNG" and min(picture.size) > 150 and len(np.unique(pixels)) > 20


def width_of(path: Path) -> int:
    with Image.open(path) as picture:
        return picture.width


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


ROWS = [
    {
        "epoch": epoch,
        "train_loss": 2 / epoch,
        "validation_loss": 3 / epoch,
        "train_top1": 0.5 + epoch / 20,
        "validation_top1": 0.4 + epoch / 20,
        "best": epoch <= 3,
    }
    for epoch in range(1, 6)
]


def test_curves_show_every_epoch_and_the_best_one(tmp_path: Path, drawn: list[Figure]) -> None:
    path = figures.plot_training_curves(ROWS, tmp_path / "curves.png")
    assert is_figure_file(path)
    loss, accuracy = drawn[0].axes
    for axes, metric in ((loss, "loss"), (accuracy, "top1")):
        lines: list[Any] = axes.lines[:2]
        training, validation = lines
        assert list(training.get_xdata()) == [1, 2, 3, 4, 5]
        assert list(training.get_ydata()) == [row[f"train_{metric}"] for row in ROWS]
        assert list(validation.get_ydata()) == [row[f"validation_{metric}"] for row in ROWS]
        assert training.get_color() != validation.get_color()
    best_epoch: Any = accuracy.lines[2]
    assert list(best_epoch.get_xdata()) == [3, 3]
    legend = accuracy.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["training (augmented)", "validation", "best epoch (3)"]


def test_curves_of_one_epoch_have_one_integer_tick(tmp_path: Path, drawn: list[Figure]) -> None:
    assert is_figure_file(figures.plot_training_curves(ROWS[:1], tmp_path / "curves.png"))
    for axes in drawn[0].axes:
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1]


def random_metrics(K: int, seed: int = 0) -> Metrics:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, K, (40 * K,), generator=draws)
    logits = torch.randn(40 * K, K, generator=draws) + 2 * nn.functional.one_hot(labels, K)
    return compute_metrics(logits, labels, tuple((NAMES * 20)[:K]))


@pytest.mark.slow
@pytest.mark.parametrize("K", [2, 7, 30])
def test_confusion_matrix_has_every_count_in_its_cell(tmp_path: Path, drawn: list[Figure], K: int) -> None:
    metrics = random_metrics(K)
    assert is_figure_file(figures.plot_confusion_matrix(metrics, tmp_path / "confusion.png", title="50% of $all$_"))
    axes = drawn[0].axes[0]
    cells = {tuple(map(int, text.get_position())): int(text.get_text()) for text in axes.texts}
    counts = np.array(metrics.confusion)
    assert cells == {(predicted, true): counts[true, predicted] for true, predicted in np.argwhere(counts).tolist()}
    coloured = np.asarray(axes.images[0].get_array())
    assert np.array_equal(coloured, counts * (1 - np.eye(K)))
    assert axes.get_ylabel() == "True class"
    assert axes.get_xlabel() == "Predicted class"
    assert axes.get_title() == "50% of $all$_"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [label.get_text() for label in axes.get_xticklabels()]
    assert labels[:2] == ["ant", "bee"]
    assert max(map(len, labels)) <= 24


def test_counts_contrast_with_their_cells(tmp_path: Path, drawn: list[Figure]) -> None:
    figures.plot_confusion_matrix(random_metrics(7), tmp_path / "confusion.png")
    axes = drawn[0].axes[0]

    def brightness(color: Any) -> float:
        return float(np.dot(to_rgba(color)[:3], [0.2126, 0.7152, 0.0722]))

    image = axes.images[0]
    for text in axes.texts:
        predicted, true = map(int, text.get_position())
        cell = image.cmap(image.norm(np.asarray(image.get_array())[true, predicted]))
        assert abs(brightness(cell) - brightness(text.get_color())) > 0.3


def test_confusion_matrix_without_errors_and_with_a_hundred_classes(tmp_path: Path, drawn: list[Figure]) -> None:
    labels = torch.arange(4)
    perfect = compute_metrics(9.0 * torch.eye(4), labels, NAMES[:4])
    figures.plot_confusion_matrix(perfect, tmp_path / "perfect.png")
    assert len(drawn[0].axes[0].texts) == 4
    assert is_figure_file(figures.plot_confusion_matrix(random_metrics(100), tmp_path / "hundred.png"))
    axes = drawn[1].axes[0]
    assert not axes.texts
    assert 10 <= len(axes.get_xticklabels()) <= 30
    ticks = axes.get_xticks().astype(int)
    assert [label.get_text()[:5] for label in axes.get_xticklabels()] == [(NAMES * 20)[tick][:5] for tick in ticks]


@pytest.mark.parametrize(
    ("channels", "pooling"),
    [
        (1, "class"),
        (3, "mean"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, "attention"), (3, "class"))),
    ],
)
def test_attention_figure_for_greyscale_and_colour_and_every_pooling(
    tmp_path: Path, cpu: Hardware, drawn: list[Figure], channels: int, pooling: str
) -> None:
    model = predictor(cpu, channels, pooling, registers=2 if pooling == "mean" else 0)
    images, labels = noise(5, channels, 16, 16), torch.tensor([0, 1, 2, 3, 4])
    assert is_figure_file(figures.plot_attention(model, images, labels, tmp_path / "attention.png"))
    shown = [axes for axes in drawn[0].axes if axes.images]
    assert len(shown) == 2 * len(images)
    probabilities = model.probabilities(images)
    for image_axes, heatmap_axes, image, label, p_K in zip(
        shown[::2], shown[1::2], images, labels, probabilities, strict=True
    ):
        drawn_pixels = np.asarray(image_axes.images[0].get_array())
        assert np.array_equal(drawn_pixels, image[[0, 1, 2] if channels > 1 else [0, 0, 0]].permute(1, 2, 0).numpy())
        assert not np.array_equal(np.asarray(heatmap_axes.images[0].get_array()), drawn_pixels)
        title, best = image_axes.get_title(loc="left"), int(p_K.argmax())
        assert title.startswith(NAMES[best][:10])
        assert f"{p_K[best]:.0%}" in title
        assert (", true: " in title) == (best != label)


def test_attention_figure_of_a_single_wide_image(tmp_path: Path, cpu: Hardware) -> None:
    model = predictor(cpu, 3, "mean", image_size=(8, 24))
    path = figures.plot_attention(model, noise(1, 3, 8, 24), torch.tensor([0]), tmp_path / "attention.png")
    assert width_of(path) > 200


def test_heatmap_overlay_is_brightest_at_the_maximum_and_keeps_the_image_visible(cpu: Hardware) -> None:
    model, images = predictor(cpu), noise(1, 1, 16, 16)
    heat = rollout_heatmaps(model, images)[0]
    expected = rescale_for_display(METHODS["rollout"](model.model, model.model_config.preprocessing.normalise(images)))[
        0
    ]
    np.testing.assert_allclose(heat, expected.numpy(), atol=1e-5)
    black, white = np.zeros((16, 16, 3), dtype=np.uint8), np.full((16, 16, 3), 255, dtype=np.uint8)
    red = overlay_heatmap(black, heat)[..., 0].astype(int)
    assert np.corrcoef(red.ravel(), heat.ravel())[0, 1] > 0.9
    assert np.unravel_index(red.argmax(), red.shape) == np.unravel_index(heat.argmax(), heat.shape)
    difference = overlay_heatmap(white, heat).astype(int) - overlay_heatmap(black, heat)
    assert difference.max(axis=-1).min() > 60, "the image must stay visible under the brightest overlay"
    assert overlay_heatmap(white, heat).dtype == np.uint8


@pytest.mark.parametrize(("H", "W", "P"), [(28, 28, 7), (8, 24, 4), (224, 224, 16), (500, 500, 250)])
def test_patch_mosaic_has_the_patches_of_the_model_with_white_gaps(H: int, W: int, P: int) -> None:
    picture = noise(H, W, 3).numpy() // 2
    mosaic = patch_mosaic(picture, P)
    white_rows, white_columns = (mosaic == 255).all(axis=(1, 2)), (mosaic == 255).all(axis=(0, 2))
    kept = mosaic[~white_rows][:, ~white_columns]
    enlarge = kept.shape[0] // H
    assert np.array_equal(kept[::enlarge, ::enlarge], picture)
    assert np.count_nonzero(np.diff(white_rows.astype(int)) == 1) == H // P - 1
    assert np.count_nonzero(np.diff(white_columns.astype(int)) == 1) == W // P - 1
    patch = mosaic[: P * enlarge, : P * enlarge]
    assert np.array_equal(patch[::enlarge, ::enlarge], picture[:P, :P])


@pytest.mark.parametrize("channels", [1, 3])
def test_attention_overview_shows_image_patches_attention_and_prediction(
    tmp_path: Path, cpu: Hardware, drawn: list[Figure], channels: int
) -> None:
    model, image = predictor(cpu, channels), noise(channels, 16, 16)
    path = figures.plot_attention_overview(model, image, tmp_path / "attention_overview.png")
    assert is_figure_file(path)
    image_axes, patch_axes, heatmap_axes, class_axes = drawn[0].axes
    titles = [axes.get_title() for axes in drawn[0].axes]
    assert titles == ["Image", "4 × 4 patches", "Attention rollout", "Prediction"]
    shown = to_rgb(image)
    assert np.array_equal(np.asarray(image_axes.images[0].get_array()), shown)
    assert np.array_equal(np.asarray(patch_axes.images[0].get_array()), patch_mosaic(shown, 4))
    heat = rollout_heatmaps(model, image[None])[0]
    assert np.array_equal(np.asarray(heatmap_axes.images[0].get_array()), overlay_heatmap(shown, heat))
    best = model.probabilities(image[None])[0].topk(5)
    bars: list[Any] = list(class_axes.patches)[1::2]
    assert [bar.get_width() for bar in bars] == pytest.approx(best.values.tolist())
    assert texts(class_axes)[::2] == [shorten(NAMES[index], 14) for index in best.indices.tolist()]
    assert texts(class_axes)[1::2] == [format_percent(probability) for probability in best.values.tolist()]
    tops = [axes.get_position().y1 for axes in drawn[0].axes]
    assert max(tops) - min(tops) < 0.02, "all four panels are aligned"


@pytest.mark.slow
def test_attention_overview_takes_files_bytes_and_pil_images(tmp_path: Path, cpu: Hardware) -> None:
    file = tmp_path / "photo.png"
    Image.fromarray(noise(40, 60, 3).numpy()).save(file)
    model = predictor(cpu, 3, "mean", image_size=(8, 16), names=("yes", "no"))
    for source in (file, str(file), file.read_bytes(), Image.open(file)):
        assert is_figure_file(figures.plot_attention_overview(model, source, tmp_path / "attention_overview.png"))


def test_attention_overview_is_legible_at_900_pixels(tmp_path: Path, cpu: Hardware, drawn: list[Figure]) -> None:
    path = figures.plot_attention_overview(predictor(cpu), noise(1, 16, 16), tmp_path / "attention_overview.png")
    width = width_of(path)
    assert width >= 900
    points = [float(text.get_fontsize()) for axes in drawn[0].axes for text in (axes.title, *axes.texts)]
    assert min(points) * 130 / 72 * 900 / width >= 13, "characters of at least 13 pixels"


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(1.0, "100.0%"), (0.9996, "> 99.9%"), (0.934, "93.4%"), (0.0006, "0.1%"), (0.0001, "< 0.1%"), (0.0, "0.0%")],
)
def test_percentages_are_never_rounded_to_certainty(fraction: float, text: str) -> None:
    assert format_percent(fraction) == text


def example_predictions(K: int, N: int, wrong: list[int]) -> tuple[Tensor, Tensor]:
    """Probabilities of increasing confidence, and labels; the images in `wrong` are misclassified."""
    labels = torch.arange(N) % K
    predicted = labels.clone()
    predicted[wrong] = (predicted[wrong] + 1) % K
    confidence = torch.linspace(0.6, 0.99, N)[:, None]
    return nn.functional.one_hot(predicted, K) * confidence + (1 - confidence) / K, labels


def test_examples_are_one_correct_image_per_class_then_the_most_confident_errors() -> None:
    probabilities, labels = example_predictions(5, 100, wrong=[10, 50, 90, 20, 77, 33, 61, 62, 63])
    selected = figures.select_examples(probabilities, labels, count=12).tolist()
    assert selected[:5] == [0, 1, 2, 3, 4]
    assert selected[5:] == [90, 77, 63, 62, 61, 50, 33]


@pytest.mark.parametrize(
    ("K", "N", "wrong"), [(10, 200, []), (100, 400, [1, 2, 3, 4, 5]), (3, 3, [0, 1, 2]), (2, 1, [])]
)
def test_number_of_examples_is_bounded(K: int, N: int, wrong: list[int]) -> None:
    selected = figures.select_examples(*example_predictions(K, N, wrong), count=12)
    assert 1 <= len(selected) <= 12
    assert len(selected.unique()) == len(selected)
    assert selected.dtype == torch.long
    if wrong:
        assert set(selected.tolist()) & set(wrong)


@pytest.mark.parametrize("channels", [1, 3])
def test_saved_image_has_the_same_pixels(tmp_path: Path, channels: int) -> None:
    image = noise(channels, 9, 7)
    with Image.open(save_image(image, tmp_path / "example.png")) as picture:
        saved = np.asarray(picture)
    assert np.array_equal(saved.reshape(9, 7, channels), image.permute(1, 2, 0).numpy())


def test_fallback_font_is_used_for_missing_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stix = str(Path(mpl.get_data_path()) / "fonts" / "ttf" / "STIXGeneral.ttf")
    default = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    character = next(
        chr(code) for code in font_manager.get_font(stix).get_charmap() if not default.get_char_index(code)
    )
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(tmp_path / "broken-sans.ttf"), stix])
    (tmp_path / "broken-sans.ttf").write_bytes(b"not a font")
    figure = Figure()
    axes = figure.subplots()
    axes.set_xticks([0, 1], ["plain", character])
    axes.set_title("plain, × and ·")
    save(figure, tmp_path / "figure.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Glyph … missing"
        figure.savefig(tmp_path / "again.png")
    assert [label.get_fontfamily() for label in axes.get_xticklabels()] == [
        ["sans-serif"],
        ["sans-serif", "STIXGeneral"],
    ]
    assert axes.title.get_fontfamily() == ["sans-serif"]
