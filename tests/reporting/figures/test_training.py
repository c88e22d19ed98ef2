"""Pictures: that they are made, and that what they show is true (read off matplotlib's own objects)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

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
from vitral.device.hardware import Hardware
from vitral.evaluation.metrics import Metrics, measure
from vitral.explain import METHODS, scaled
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.reporting.figures import training as figures
from vitral.runs.run import ModelCard

NAMES = ("ant", "bee", "$x_ {broken math", "猫", "a very long name of a class, which is shortened", "fox", "gnu")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved while the test ran."""
    found: list[Figure] = []
    savefig = Figure.savefig

    def keeping(self: Figure, *arguments: Any, **settings: Any) -> None:
        found.append(self)
        savefig(self, *arguments, **settings)

    monkeypatch.setattr(Figure, "savefig", keeping)
    return found


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
        classes=len(names),
        width=16,
        depth=2,
        heads=2,
        pooling=pooling,
        registers=registers,
    )
    model = ViT(config)
    nn.init.normal_(model.head.out.weight)
    for block in model.encoder.blocks:
        nn.init.normal_(block.attention.qkv.weight)
    preprocessing = Preprocessing(
        image_size=image_size, channels=channels, mean=(0.5,) * channels, std=(0.25,) * channels
    )
    card = ModelCard(architecture=config, preprocessing=preprocessing, classes=names, trained_on="nothing", epoch=1)
    return Predictor(model, card, cpu)


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def is_a_picture(path: Path) -> bool:
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


def test_curves_show_each_epoch_of_both_sets_and_mark_the_best(tmp_path: Path, drawn: list[Figure]) -> None:
    path = figures.curves(ROWS, tmp_path / "curves.png")
    assert is_a_picture(path)
    loss, accuracy = drawn[0].axes
    for axes, what in ((loss, "loss"), (accuracy, "top1")):
        training, validation = axes.lines[:2]
        assert list(training.get_xdata()) == [1, 2, 3, 4, 5]
        assert list(training.get_ydata()) == [row[f"train_{what}"] for row in ROWS]
        assert list(validation.get_ydata()) == [row[f"validation_{what}"] for row in ROWS]
        assert training.get_color() != validation.get_color()
    assert list(accuracy.lines[2].get_xdata()) == [3, 3]
    legend = [text.get_text() for text in accuracy.get_legend().get_texts()]
    assert legend == ["training (augmented)", "validation", "best epoch (3)"]


def test_the_curves_of_one_epoch_are_two_points_over_a_whole_number(tmp_path: Path, drawn: list[Figure]) -> None:
    assert is_a_picture(figures.curves(ROWS[:1], tmp_path / "curves.png"))
    for axes in drawn[0].axes:
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1]


def confused(K: int, seed: int = 0) -> Metrics:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, K, (40 * K,), generator=draws)
    logits = torch.randn(40 * K, K, generator=draws) + 2 * nn.functional.one_hot(labels, K)
    return measure(logits, labels, tuple((NAMES * 20)[:K]))


@pytest.mark.parametrize("K", [2, 7, 30])
def test_the_confusion_matrix_has_each_count_in_its_cell(tmp_path: Path, drawn: list[Figure], K: int) -> None:
    metrics = confused(K)
    assert is_a_picture(figures.confusion(metrics, tmp_path / "confusion.png", title="50% of $all$_"))
    axes = drawn[0].axes[0]
    cells = {tuple(map(int, text.get_position())): int(text.get_text()) for text in axes.texts}
    counts = np.array(metrics.confusion)
    assert cells == {(said, true): counts[true, said] for true, said in np.argwhere(counts).tolist()}
    coloured = np.asarray(axes.images[0].get_array())
    assert np.array_equal(coloured, counts * (1 - np.eye(K)))
    assert axes.get_ylabel() == "it is"
    assert axes.get_xlabel() == "the model said"
    assert axes.get_title() == "50% of $all$_"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [label.get_text() for label in axes.get_xticklabels()]
    assert labels[:2] == ["ant", "bee"]
    assert max(map(len, labels)) <= 24


def test_counts_can_be_read_on_their_cells(tmp_path: Path, drawn: list[Figure]) -> None:
    figures.confusion(confused(7), tmp_path / "confusion.png")
    axes = drawn[0].axes[0]

    def brightness(color: Any) -> float:
        return float(np.dot(to_rgba(color)[:3], [0.2126, 0.7152, 0.0722]))

    image = axes.images[0]
    for text in axes.texts:
        said, true = map(int, text.get_position())
        cell = image.cmap(image.norm(np.asarray(image.get_array())[true, said]))
        assert abs(brightness(cell) - brightness(text.get_color())) > 0.3


def test_a_model_without_mistakes_and_one_with_a_hundred_classes_are_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    labels = torch.arange(4)
    perfect = measure(9.0 * torch.eye(4), labels, NAMES[:4])
    figures.confusion(perfect, tmp_path / "perfect.png")
    assert len(drawn[0].axes[0].texts) == 4
    assert is_a_picture(figures.confusion(confused(100), tmp_path / "hundred.png"))
    axes = drawn[1].axes[0]
    assert not axes.texts
    assert 10 <= len(axes.get_xticklabels()) <= 30
    ticks = axes.get_xticks().astype(int)
    assert [label.get_text()[:5] for label in axes.get_xticklabels()] == [(NAMES * 20)[tick][:5] for tick in ticks]


@pytest.mark.parametrize(("channels", "pooling"), [(1, "class"), (3, "mean"), (4, "attention"), (3, "class")])
def test_attention_is_drawn_for_gray_and_colour_and_every_pooling(
    tmp_path: Path, cpu: Hardware, drawn: list[Figure], channels: int, pooling: str
) -> None:
    model = predictor(cpu, channels, pooling, registers=2 if pooling == "mean" else 0)
    images, labels = noise(5, channels, 16, 16), torch.tensor([0, 1, 2, 3, 4])
    assert is_a_picture(figures.attention(model, images, labels, tmp_path / "attention.png"))
    shown = [axes for axes in drawn[0].axes if axes.images]
    assert len(shown) == 2 * len(images)
    said = model.probabilities(images)
    for plain, seen, image, label, chances in zip(shown[::2], shown[1::2], images, labels, said, strict=True):
        drawn_pixels = np.asarray(plain.images[0].get_array())
        assert np.array_equal(drawn_pixels, image[[0, 1, 2] if channels > 1 else [0, 0, 0]].permute(1, 2, 0).numpy())
        assert not np.array_equal(np.asarray(seen.images[0].get_array()), drawn_pixels)
        title, best = plain.get_title(loc="left"), int(chances.argmax())
        assert title.startswith(NAMES[best][:10])
        assert f"{chances[best]:.0%}" in title
        assert (", is " in title) == (best != label)


def test_attention_of_one_image_and_of_a_wide_one_is_drawn(tmp_path: Path, cpu: Hardware) -> None:
    model = predictor(cpu, 3, "mean", image_size=(8, 24))
    path = figures.attention(model, noise(1, 3, 8, 24), torch.tensor([0]), tmp_path / "attention.png")
    assert width_of(path) > 200


def test_the_glow_is_strongest_where_the_model_looked_and_leaves_the_picture_visible(cpu: Hardware) -> None:
    model, images = predictor(cpu), noise(1, 1, 16, 16)
    heat = figures.looked_at(model, images)[0]
    wanted = scaled(METHODS["rollout"](model.model, model.card.preprocessing.normalise(images)))[0]
    np.testing.assert_allclose(heat, wanted.numpy(), atol=1e-5)
    black, white = np.zeros((16, 16, 3), dtype=np.uint8), np.full((16, 16, 3), 255, dtype=np.uint8)
    red = figures.glowing(black, heat)[..., 0].astype(int)
    assert np.corrcoef(red.ravel(), heat.ravel())[0, 1] > 0.9
    assert np.unravel_index(red.argmax(), red.shape) == np.unravel_index(heat.argmax(), heat.shape)
    difference = figures.glowing(white, heat).astype(int) - figures.glowing(black, heat)
    assert difference.max(axis=-1).min() > 60, "light and dark must stay apart under the brightest glow"
    assert figures.glowing(white, heat).dtype == np.uint8


@pytest.mark.parametrize(("H", "W", "P"), [(28, 28, 7), (8, 24, 4), (224, 224, 16), (500, 500, 250)])
def test_the_patches_are_those_of_the_model_with_white_between(H: int, W: int, P: int) -> None:
    picture = noise(H, W, 3).numpy() // 2
    cut = figures.with_gaps(picture, P)
    white_rows, white_columns = (cut == 255).all(axis=(1, 2)), (cut == 255).all(axis=(0, 2))
    kept = cut[~white_rows][:, ~white_columns]
    enlarge = kept.shape[0] // H
    assert np.array_equal(kept[::enlarge, ::enlarge], picture)
    assert np.count_nonzero(np.diff(white_rows.astype(int)) == 1) == H // P - 1
    assert np.count_nonzero(np.diff(white_columns.astype(int)) == 1) == W // P - 1
    patch = cut[: P * enlarge, : P * enlarge]
    assert np.array_equal(patch[::enlarge, ::enlarge], picture[:P, :P])


@pytest.mark.parametrize("channels", [1, 3])
def test_the_glass_shows_image_patches_glance_and_answer(
    tmp_path: Path, cpu: Hardware, drawn: list[Figure], channels: int
) -> None:
    model, image = predictor(cpu, channels), noise(channels, 16, 16)
    path = figures.glass(model, image, tmp_path / "glass.png")
    assert is_a_picture(path)
    picture, patches, seen, answer = drawn[0].axes
    titles = [axes.get_title() for axes in drawn[0].axes]
    assert titles == ["an image", "its 4 × 4 patches", "where the model looked", "its answer"]
    shown = figures.shown(image)
    assert np.array_equal(np.asarray(picture.images[0].get_array()), shown)
    assert np.array_equal(np.asarray(patches.images[0].get_array()), figures.with_gaps(shown, 4))
    heat = figures.looked_at(model, image[None])[0]
    assert np.array_equal(np.asarray(seen.images[0].get_array()), figures.glowing(shown, heat))
    best = model.probabilities(image[None])[0].topk(5)
    bars = [bar.get_width() for bar in answer.patches][1::2]
    assert bars == pytest.approx(best.values.tolist())
    assert texts(answer)[::2] == [figures.shortened(NAMES[index], 14) for index in best.indices.tolist()]
    assert texts(answer)[1::2] == [figures.percent(chance) for chance in best.values.tolist()]
    tops = [axes.get_position().y1 for axes in drawn[0].axes]
    assert max(tops) - min(tops) < 0.02, "all four must stand on one line"


def test_the_glass_takes_files_and_few_classes_and_wide_images(tmp_path: Path, cpu: Hardware) -> None:
    file = tmp_path / "photo.png"
    Image.fromarray(noise(40, 60, 3).numpy()).save(file)
    model = predictor(cpu, 3, "mean", image_size=(8, 16), names=("yes", "no"))
    for source in (file, str(file), file.read_bytes(), Image.open(file)):
        assert is_a_picture(figures.glass(model, source, tmp_path / "glass.png"))


def test_the_glass_is_legible_at_900_pixels(tmp_path: Path, cpu: Hardware, drawn: list[Figure]) -> None:
    path = figures.glass(predictor(cpu), noise(1, 16, 16), tmp_path / "glass.png")
    width = width_of(path)
    assert width >= 900
    points = [text.get_fontsize() for axes in drawn[0].axes for text in (axes.title, *axes.texts)]
    assert min(points) * 130 / 72 * 900 / width >= 13, "letters of at least 13 pixels"


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "100.0 %"), (0.9996, "> 99.9 %"), (0.934, "93.4 %"), (0.0006, "0.1 %"), (0.0001, "< 0.1 %"), (0.0, "0.0 %")],
)
def test_percentages_promise_nothing_that_is_not_so(share: float, text: str) -> None:
    assert figures.percent(share) == text


def examples(K: int, N: int, wrong: list[int]) -> tuple[Tensor, Tensor]:
    """Probabilities, surer from image to image, and labels; the images in `wrong` are answered wrongly."""
    labels = torch.arange(N) % K
    said = labels.clone()
    said[wrong] = (said[wrong] + 1) % K
    sure = torch.linspace(0.6, 0.99, N)[:, None]
    return nn.functional.one_hot(said, K) * sure + (1 - sure) / K, labels


def test_the_examples_are_one_right_answer_a_class_then_the_surest_mistakes() -> None:
    probabilities, labels = examples(5, 100, wrong=[10, 50, 90, 20, 77, 33, 61, 62, 63])
    chosen = figures.choose_examples(probabilities, labels, count=12).tolist()
    assert chosen[:5] == [0, 1, 2, 3, 4]
    assert chosen[5:] == [90, 77, 63, 62, 61, 50, 33]


@pytest.mark.parametrize(
    ("K", "N", "wrong"), [(10, 200, []), (100, 400, [1, 2, 3, 4, 5]), (3, 3, [0, 1, 2]), (2, 1, [])]
)
def test_there_are_always_examples_and_never_too_many(K: int, N: int, wrong: list[int]) -> None:
    chosen = figures.choose_examples(*examples(K, N, wrong), count=12)
    assert 1 <= len(chosen) <= 12
    assert len(chosen.unique()) == len(chosen)
    assert chosen.dtype == torch.long
    if wrong:
        assert set(chosen.tolist()) & set(wrong)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_saved_pixel_by_pixel(tmp_path: Path, channels: int) -> None:
    image = noise(channels, 9, 7)
    with Image.open(figures.picture(image, tmp_path / "example.png")) as picture:
        saved = np.asarray(picture)
    assert np.array_equal(saved.reshape(9, 7, channels), image.permute(1, 2, 0).numpy())


def test_letters_that_the_font_lacks_are_drawn_with_one_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stix = font_manager.findfont("STIXGeneral")
    own = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    letter = next(chr(code) for code in font_manager.get_font(stix).get_charmap() if not own.get_char_index(code))
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(tmp_path / "broken-sans.ttf"), stix])
    (tmp_path / "broken-sans.ttf").write_bytes(b"no font")
    figure = Figure()
    axes = figure.subplots()
    axes.set_xticks([0, 1], ["plain", letter])
    axes.set_title("plain, × and ·")
    figures.save(figure, tmp_path / "figure.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Glyph … missing"
        figure.savefig(tmp_path / "again.png")
    assert [label.get_fontfamily() for label in axes.get_xticklabels()] == [
        ["sans-serif"],
        ["sans-serif", "STIXGeneral"],
    ]
    assert axes.title.get_fontfamily() == ["sans-serif"]
