"""The walk: complete steps, figures with the actual values, and the actual source code."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import vitral.models.vit
from support.vit_kinds import KINDS, predictor_for, random_model
from vitral.cli.commands import walk as command
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.calibration import Calibration
from vitral.models.vit import ViT, ViTConfig
from vitral.reporting.walk import html as walk_html
from vitral.reporting.walk import terminal as walk_terminal
from vitral.reporting.walk.colours import to_colours
from vitral.reporting.walk.source import source_excerpt
from vitral.reporting.walk.steps import Walk, walk
from vitral.reporting.walk.texts import CAPTIONS, PAGE_TEXTS, STEP_TEXTS
from vitral.runs.model_io import ModelConfig, save_model

ROOT = Path(__file__).parents[3]
SHAPES = {
    "MNIST": (1, ViTConfig(image_size=(28, 28), patch_size=7, channels=1, num_classes=10, width=64, depth=3, heads=4)),
    "CIFAR-10": (3, ViTConfig(image_size=(32, 32), patch_size=4, num_classes=10, width=48, depth=2, heads=3)),
    "a photograph": (3, ViTConfig(image_size=(224, 224), patch_size=16, num_classes=12, width=24, depth=2, heads=3)),
}


def make_walk(name: str, cpu: Hardware, lang: str = "en") -> tuple[Walk, Predictor, Image.Image]:
    C, config = SHAPES[name]
    torch.manual_seed(0)
    preprocessing = Preprocessing(image_size=config.image_size, channels=C, mean=(0.5,) * C, std=(0.5,) * C)
    names = tuple(f"class <{i}>" for i in range(config.num_classes))
    model_config = ModelConfig(architecture=config, preprocessing=preprocessing, classes=names, trained_on="x", epoch=1)
    predictor = Predictor(random_model("plain", config), model_config, cpu)
    picture = Image.effect_noise((300, 240), 60).convert("L" if C == 1 else "RGB")
    return walk(predictor, picture, lang), predictor, picture  # type: ignore[arg-type]


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_step_from_pixels_to_logits(name: str, lang: str, cpu: Hardware) -> None:
    result, predictor, picture = make_walk(name, cpu, lang)
    keys = [step.key for step in result.steps]
    first = ["image", "patches", "flatten", "embedding", "class_token", "learned", "embed"]
    assert keys == [*first, "queries", "attention", "residual", "mlp", "encoder", "pool_class", "logits"]
    for step in result.steps:
        assert step.text
        assert step.equation
        assert step.shape
        assert step.code
        assert step.figures
        assert "{" not in step.text + step.title + "".join(p.caption for p in step.figures)
    best = predictor.predict(picture).best
    assert result.top_classes[0].name == best.name
    assert result.top_classes[0].probability == pytest.approx(best.probability, rel=1e-4)


def test_figures_show_the_values_of_the_model(cpu: Hardware) -> None:
    result, predictor, picture = make_walk("MNIST", cpu)
    steps = {step.key: step for step in result.steps}
    pixels = predictor.model_config.preprocessing.resize_and_crop(picture)
    image = predictor.model_config.preprocessing.normalise(pixels[None])
    with torch.no_grad():
        trace = predictor.model.trace(image)
    values: dict[str, list[Any]] = {key: [p.values for p in step.figures] for key, step in steps.items()}
    np.testing.assert_array_equal(values["flatten"][0], trace.patches[0].numpy())
    np.testing.assert_array_equal(values["embed"][0], trace.tokens[0][0].numpy())
    np.testing.assert_array_equal(values["attention"][0], trace.attention[0][0, 0].numpy())
    z, added, after = (np.asarray(v) for v in values["residual"][:3])
    np.testing.assert_allclose(z + added, after, atol=1e-5)
    np.testing.assert_allclose(values["mlp"][1], trace.tokens[1][0].numpy(), atol=1e-5)
    q, k, v = (torch.from_numpy(np.asarray(value)) for value in values["queries"][1:])
    attention = (q @ k.T / 4).softmax(dim=-1)
    torch.testing.assert_close(attention, trace.attention[0][0, 0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(values["attention"][2], (attention @ v).numpy(), rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(values["logits"][0], trace.logits.numpy())
    assert len(values["encoder"]) == 3
    shapes = {step.key: step.shape for step in result.steps}
    assert (shapes["flatten"], shapes["embed"], shapes["attention"]) == ("16 × 49", "17 × 64", "17 × 17")


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_last_equation_gives_the_probabilities_of_the_table(lang: str, cpu: Hardware) -> None:
    _, predictor, picture = make_walk("MNIST", cpu)
    for temperature in (1.0, 0.5):
        predictor.model_config = replace(predictor.model_config, calibration=Calibration(temperature=temperature))
        result = walk(predictor, picture, lang)  # type: ignore[arg-type]
        last = result.steps[-1]
        divided = re.search(r"p = softmax\(logits(?:/([\d.]+))?\)$", last.equation)
        assert divided is not None
        assert float(divided[1] or 1) == temperature
        assert ("0.5" in last.text) == (temperature == 0.5), "the text explains the temperature"
        logits = torch.from_numpy(np.asarray(last.figures[0].values))[0]
        best = (logits / temperature).softmax(dim=0).max()
        assert result.top_classes[0].probability == pytest.approx(float(best), rel=1e-5)


def test_last_equation_of_a_multi_label_model_is_a_sigmoid(cpu: Hardware) -> None:
    _, predictor, picture = make_walk("MNIST", cpu)
    for temperature, equation in ((1.0, "p = sigmoid(logits)"), (2.0, "p = sigmoid(logits/2)")):
        calibration = Calibration(temperature=temperature, activation="sigmoid")
        predictor.model_config = replace(predictor.model_config, task="multilabel", calibration=calibration)
        result = walk(predictor, picture)
        last = result.steps[-1]
        assert last.key == "logits"
        assert last.equation.endswith(equation)
        assert "softmax" not in last.text
        best = (torch.from_numpy(np.asarray(last.figures[0].values))[0] / temperature).sigmoid().max()
        assert result.top_classes[0].probability == pytest.approx(float(best), rel=1e-5)


def test_out_of_distribution_image_is_called_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpu: Hardware
) -> None:
    monkeypatch.chdir(tmp_path)
    _, predictor, picture = make_walk("MNIST", cpu)
    picture.save("noise.png")
    for threshold, is_ood in ((1e9, True), (-1e9, False)):
        predictor.model_config = replace(predictor.model_config, calibration=Calibration(ood_threshold=threshold))
        assert walk(predictor, picture).is_ood is is_ood
        save_model(tmp_path / str(is_ood), predictor.model, predictor.model_config)
        assert command.COMMAND(["noise.png", "--model", str(is_ood), "--out", "walk.html"]) == 0
        assert ("unknown" in capsys.readouterr().out) is is_ood
        assert ("unlike anything in the training set" in Path("walk.html").read_text(encoding="utf-8")) is is_ood


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_walk_of_every_kind_of_vit(kind: str, cpu: Hardware) -> None:
    variant, config = KINDS[kind]
    predictor = predictor_for(random_model(variant, config), cpu)
    for lang in ("en", "ko"):
        result = walk(predictor, Image.effect_noise((24, 16), 60), lang, layer=2, head=2)
        keys = {step.key for step in result.steps}
        assert ("class_token" in keys) == config.has_class_token
        assert ("rotary" in keys) == ("rotary" in config.positions)
        pooling = {"class-and-mean": "class_and_mean", "distilled": "distilled"}.get(variant, config.pooling)
        assert f"pool_{pooling}" in keys
        assert ("hybrid" in keys) == (variant == "hybrid") == ("flatten" not in keys)  # cuts the feature map
        assert ("encoder" in keys) == (config.pooling == "class")
        equations = {step.key: step.equation for step in result.steps}
        for key in {"patches", "squares"} & keys:
            left, *middle, right = equations[key].replace("^{2}", "²").split(" = ")
            assert (left, int(right)) == ("N", config.grid[0] * config.grid[1])
            first, second = middle[-1].split("/")[0].split("·")
            divided = config.patch_size**2 if "/" in middle[-1] else 1
            assert int(first) * int(second) == int(right) * divided, "the equation is true"
        for key in {"learned", "sincos"} & keys:
            assert ("x_{class}" in equations[key]) == (config.pooling == "class")
        assert walk_html.render_html(result).count("<section") == len(result.steps)
        walk_terminal.print_walk(result, Console(file=io.StringIO(), width=80))


def test_first_steps_show_the_code_that_normalises_and_cuts(cpu: Hardware) -> None:
    result, _, _ = make_walk("MNIST", cpu)
    code = {step.key: "\n".join(excerpt.text for excerpt in step.code) for step in result.steps}
    assert "(images_BCHW.float() - mean) / std" in code["image"]
    assert "images_BCHW.reshape(B, C, H // P, P, W // P, P)" in code["patches"]


def test_residual_figure_shows_the_value_added_with_layer_scale(cpu: Hardware) -> None:
    _, config = SHAPES["MNIST"]
    torch.manual_seed(0)
    model = random_model("plain", replace(config, layer_scale=0.1))
    _, predictor, image = make_walk("MNIST", cpu)
    model_config = replace(predictor.model_config, architecture=model.config)
    result = walk(Predictor(model, model_config, cpu), image)
    residual = next(step for step in result.steps if step.key == "residual")
    z, added, after = (np.asarray(figure.values) for figure in residual.figures[:3])
    np.testing.assert_allclose(z + added, after, atol=1e-5)
    assert "λ ⊙ MSA" in residual.equation
    assert "layer scale" in residual.text


def test_line_numbers_are_written_as_each_language_does(cpu: Hardware) -> None:
    for lang, pattern in (
        ("en", r"PatchEmbedding\.forward, line \d+<"),
        ("ko", r"PatchEmbedding\.forward, \d+번째 줄<"),
    ):
        assert re.search(pattern, walk_html.render_html(make_walk("MNIST", cpu, lang)[0]))


def test_no_korean_particle_follows_a_bare_placeholder() -> None:
    """The right particle depends on the last sound of the inserted value, which is unknown."""
    particle = re.compile(r"\}(이|가|은|는|을|를|으로|로|와|과|라는|이라는)(?![가-힣])")
    texts = [text for step in STEP_TEXTS["ko"].values() for text in step.values()] + [*CAPTIONS["ko"].values()]
    assert [text for text in texts if particle.search(text)] == []


def test_source_excerpts_are_verbatim() -> None:
    text = Path(vitral.models.vit.__file__).read_text()
    code = source_excerpt(vitral.models.vit.EncoderBlock.forward)
    assert code.location == "vit.py · EncoderBlock.forward"
    assert text.splitlines()[code.line - 1].strip() == code.text.splitlines()[0]
    for line in code.text.splitlines():
        assert line.strip() in text
    assert '"""' not in source_excerpt(ViT.embed).text
    assert "self.class_token(tokens)" in source_excerpt(ViT.embed).text


def test_walk_in_the_documentation_is_up_to_date() -> None:
    """Made with: vitral walk docs/images/walk/digit.png --model bundled:mnist --out walk.md"""
    page = ROOT / "docs" / "explanation" / "walk.md"
    text = page.read_text(encoding="utf-8")
    result = walk(Predictor.load("bundled:mnist"), ROOT / "docs" / "images" / "walk" / "digit.png")
    code = [excerpt.text for step in result.steps for excerpt in step.code]
    assert re.findall(r"```python\n(.*?)\n```", text, flags=re.DOTALL) == code
    assert re.findall(r"^## \d+\. (.*)$", text, flags=re.MULTILINE) == [step.title for step in result.steps]
    for link in re.findall(r"\]\((\.\./images/[^)]+)\)", text):
        assert (page.parent / link).is_file()


def test_languages_have_the_same_keys_and_placeholders() -> None:
    assert STEP_TEXTS["en"].keys() == STEP_TEXTS["ko"].keys()
    assert CAPTIONS["en"].keys() == CAPTIONS["ko"].keys()
    assert PAGE_TEXTS["en"].keys() == PAGE_TEXTS["ko"].keys()
    fields = re.compile(r"\{(\w+)\}")
    for key, texts in STEP_TEXTS["ko"].items():
        assert set(fields.findall(texts["text"])) == set(fields.findall(STEP_TEXTS["en"][key]["text"])), key
        assert re.search("[가-힣]", texts["text"])
    for key, caption in CAPTIONS["ko"].items():
        assert set(fields.findall(caption)) == set(fields.findall(CAPTIONS["en"][key]))


def test_page_is_self_contained_and_escapes_names(cpu: Hardware) -> None:
    result, _, _ = make_walk("CIFAR-10", cpu, "ko")
    page = walk_html.render_html(result)
    assert '<html lang="ko">' in page
    assert "class &lt;" in page
    assert "class <" not in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 5_000_000


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_page_in_a_browser(cpu: Hardware, tmp_path: Path, browser: Any, width: int, scheme: str) -> None:
    result, _, _ = make_walk("MNIST", cpu, "ko")
    file = tmp_path / "walk.html"
    file.write_text(walk_html.render_html(result), encoding="utf-8")
    trouble: list[str] = []

    def on_request(url: str) -> None:
        if not url.startswith(("data:", file.as_uri())):
            trouble.append(url)

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    tab.on("console", lambda message: trouble.append(message.text))
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on("request", lambda request: on_request(request.url))
    tab.goto(file.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (light > 128) == (scheme == "light")
    tab.click("nav a[href='#attention']")
    assert tab.evaluate("location.hash") == "#attention"
    context.close()
    assert trouble == []


@pytest.mark.parametrize(("width", "rows"), [(1280, 1), (400, 2)])
def test_image_and_its_channels_are_aligned(cpu: Hardware, tmp_path: Path, browser: Any, width: int, rows: int) -> None:
    result, _, _ = make_walk("CIFAR-10", cpu)
    (tmp_path / "walk.html").write_text(walk_html.render_html(result), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900})
    tab = context.new_page()
    tab.goto((tmp_path / "walk.html").as_uri())
    boxes = tab.evaluate(
        "[...document.querySelectorAll('#image figure img')].map(e => e.getBoundingClientRect())"
        ".map(r => [Math.round(r.left), Math.round(r.top), Math.round(r.width)])"
    )
    assert len(boxes) == 4
    assert len({top for _, top, _ in boxes}) == rows
    assert len({left for left, _, _ in boxes}) == 4 // rows
    assert len({size for _, _, size in boxes}) == 1
    links = tab.evaluate(
        "[...document.querySelectorAll('nav a')].map(e => e.getBoundingClientRect()).map(r => [r.left, r.right, r.top])"
    )
    for left, right, top in links:
        assert all(other - right > 40 for other, _, line in links if line == top and other > left)
    context.close()


def test_equations_on_the_page_and_on_the_terminal() -> None:
    assert walk_html.render_equation("z_{0} = x^{2} < E_{pos}") == "z<sub>0</sub> = x<sup>2</sup> &lt; E<sub>pos</sub>"
    assert walk_terminal.render_equation("z_{0} = x^{2} + E_{pos} ∈ R^{2×3}, q^{T}") == "z₀ = x² + E_pos ∈ R^(2×3), q^T"


def test_terminal_without_colours_shows_shades(cpu: Hardware) -> None:
    result, _, _ = make_walk("MNIST", cpu)
    plain, coloured_ = io.StringIO(), io.StringIO()
    walk_terminal.print_walk(result, Console(file=plain, width=70))
    walk_terminal.print_walk(result, Console(file=coloured_, width=70, force_terminal=True, color_system="truecolor"))
    assert "▒" in plain.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert "▀" in coloured_.getvalue()
    assert max(map(len, plain.getvalue().splitlines())) <= 70
    assert "z₀" in plain.getvalue()


def test_colours() -> None:
    low, zero, high = to_colours(np.array([[-1.0, 0.0, 1.0]]))[0].astype(int)
    assert low[0] > low[2] + 50, "orange"
    assert high[2] > high[1] + 30, "purple"
    assert min(zero) > 240
    dark, light = to_colours(np.array([[0.0, 1.0]]), "weights")[0].astype(int).sum(axis=-1)
    assert dark < light


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpu: Hardware
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("L", (28, 28), 90).save("digit.png")
    assert command.COMMAND(["digit.png", "--no-code"]) == 0
    assert "using bundled:mnist; choose another model with --model" in capsys.readouterr().err
    _, predictor, _ = make_walk("MNIST", cpu)
    for name in ("old", "new"):
        save_model(tmp_path / "runs" / name / "model", predictor.model, predictor.model_config)
    assert Path(command.default_model(Path("digit.png"))).name == "new"
    assert command.COMMAND(["digit.png", "--lang", "ko", "--no-code"]) == 0
    assert "패치 임베딩" in capsys.readouterr().out
    assert command.COMMAND(["digit.png", "--out", "walk.html", "--model", "runs/old"]) == 0
    assert Path("walk.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert command.COMMAND(["digit.png", "--out", "walk.md"]) == 0
    assert len([*Path("images/walk").glob("*.png")]) > 14
    for words, message in (
        (["digit.png", "--layer", "4"], "layer 4"),
        (["digit.png", "--head", "0"], "head 0"),
        (["digit.png", "--out", "walk.pdf"], "must end in .html or .md"),
        (["nothing.png"], "no such file"),
    ):
        capsys.readouterr()
        with pytest.raises(VitralError, match=message):
            command.COMMAND(words)
    assert capsys.readouterr().err == ""  # no note about the selected model
