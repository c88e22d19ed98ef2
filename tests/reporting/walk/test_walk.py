"""The walk: every step is there, what it shows is what the model computed, and its source is the source."""

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
from explain.test_methods import KINDS, alive
from reporting.figures.test_paper import predictor_for
from reporting.html.test_report import browser  # noqa: F401
from vitral.cli.commands import walk as command
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.evaluation.calibration import Calibration
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.reporting.walk import html as walk_html
from vitral.reporting.walk import terminal as walk_terminal
from vitral.reporting.walk.steps import Walk, coloured, source_of, walk
from vitral.reporting.walk.texts import CAPTIONS, PAGE, TEXTS
from vitral.runs.run import ModelCard, save_model

ROOT = Path(__file__).parents[3]
SHAPES = {
    "MNIST": (1, ViTConfig(image_size=(28, 28), patch_size=7, channels=1, classes=10, width=64, depth=3, heads=4)),
    "CIFAR-10": (3, ViTConfig(image_size=(32, 32), patch_size=4, classes=10, width=48, depth=2, heads=3)),
    "a photograph": (3, ViTConfig(image_size=(224, 224), patch_size=16, classes=12, width=24, depth=2, heads=3)),
}


def made(name: str, cpu: Hardware, lang: str = "en") -> tuple[Walk, Predictor, Image.Image]:
    C, config = SHAPES[name]
    torch.manual_seed(0)
    seen = Preprocessing(image_size=config.image_size, channels=C, mean=(0.5,) * C, std=(0.5,) * C)
    names = tuple(f"class <{i}>" for i in range(config.classes))
    card = ModelCard(architecture=config, preprocessing=seen, classes=names, trained_on="x", epoch=1)
    predictor = Predictor(alive("plain", config), card, cpu)
    picture = Image.effect_noise((300, 240), 60).convert("L" if C == 1 else "RGB")
    return walk(predictor, picture, lang), predictor, picture  # type: ignore[arg-type]


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_step_from_pixels_to_logits(name: str, lang: str, cpu: Hardware) -> None:
    found, predictor, picture = made(name, cpu, lang)
    keys = [step.key for step in found.steps]
    first = ["image", "patches", "flatten", "embedding", "class_token", "learned", "embed"]
    assert keys == [*first, "queries", "attention", "residual", "mlp", "encoder", "pool_class", "logits"]
    for step in found.steps:
        assert step.text
        assert step.equation
        assert step.shape
        assert step.code
        assert step.pictures
        assert "{" not in step.text + step.title + "".join(p.caption for p in step.pictures)
    best = predictor.predict(picture).best
    assert (found.answers[0].name, found.answers[0].probability) == (
        best.name,
        pytest.approx(best.probability, rel=1e-4),
    )


def test_the_pictures_are_of_what_the_model_computed(cpu: Hardware) -> None:
    found, predictor, picture = made("MNIST", cpu)
    steps = {step.key: step for step in found.steps}
    pixels = predictor.card.preprocessing.pixels(picture)
    image = predictor.card.preprocessing.normalise(pixels[None])
    with torch.no_grad():
        trace = predictor.model.trace(image)
    values = {key: [p.values for p in step.pictures] for key, step in steps.items()}
    np.testing.assert_array_equal(values["flatten"][0], trace.patches[0].numpy())
    np.testing.assert_array_equal(values["embed"][0], trace.tokens[0][0].numpy())
    np.testing.assert_array_equal(values["attention"][0], trace.attention[0][0, 0].numpy())
    z, added, after = (np.asarray(v) for v in values["residual"][:3])
    np.testing.assert_allclose(z + added, after, atol=1e-5)
    np.testing.assert_allclose(values["mlp"][1], trace.tokens[1][0].numpy(), atol=1e-5)
    q, k = (torch.from_numpy(np.asarray(v)) for v in values["queries"][1:])
    torch.testing.assert_close((q @ k.T / 4).softmax(dim=-1), trace.attention[0][0, 0], rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(values["logits"][0], trace.logits.numpy())
    assert len(values["encoder"]) == 3
    shapes = {step.key: step.shape for step in found.steps}
    assert (shapes["flatten"], shapes["embed"], shapes["attention"]) == ("16 × 49", "17 × 64", "17 × 17")


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_the_last_equation_gives_the_probabilities_that_stand_below_it(lang: str, cpu: Hardware) -> None:
    _, predictor, picture = made("MNIST", cpu)
    for temperature in (1.0, 0.5):
        predictor.card = replace(predictor.card, calibration=Calibration(temperature=temperature))
        found = walk(predictor, picture, lang)  # type: ignore[arg-type]
        last = found.steps[-1]
        divided = re.search(r"p = softmax\(logits(?:/([\d.]+))?\)$", last.equation)
        assert divided is not None
        assert float(divided[1] or 1) == temperature
        assert ("0.5" in last.text) == (temperature == 0.5), "and the text says where the number is from"
        logits = torch.from_numpy(np.asarray(last.pictures[0].values))[0]
        best = (logits / temperature).softmax(dim=0).max()
        assert found.answers[0].probability == pytest.approx(float(best), rel=1e-5)


def test_a_picture_like_none_it_learned_from_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpu: Hardware
) -> None:
    monkeypatch.chdir(tmp_path)
    _, predictor, picture = made("MNIST", cpu)
    picture.save("noise.png")
    for least, unsure in ((1e9, True), (-1e9, False)):
        predictor.card = replace(predictor.card, calibration=Calibration(unknown_below=least))
        assert walk(predictor, picture).unknown is unsure
        save_model(tmp_path / str(unsure), predictor.model, predictor.card)
        assert command.run(["noise.png", "--model", str(unsure), "--out", "walk.html"]) == 0
        assert ("unsure" in capsys.readouterr().out) is unsure
        assert ("looks like nothing" in Path("walk.html").read_text(encoding="utf-8")) is unsure


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_vit_can_be_walked(kind: str, cpu: Hardware) -> None:
    variant, config = KINDS[kind]
    predictor = predictor_for(alive(variant, config), cpu)
    for lang in ("en", "ko"):
        found = walk(predictor, Image.effect_noise((24, 16), 60), lang, layer=2, head=2)  # type: ignore[arg-type]
        keys = {step.key for step in found.steps}
        assert ("class_token" in keys) == (config.pooling == "class")
        assert ("rotary" in keys) == ("rotary" in config.positions)
        assert f"pool_{config.pooling}" in keys
        assert ("hybrid" in keys) == (variant == "hybrid") == ("flatten" not in keys)  # its pixels are not cut
        assert ("encoder" in keys) == (config.pooling == "class")
        equations = {step.key: step.equation for step in found.steps}
        for key in {"patches", "squares"} & keys:
            left, *middle, right = equations[key].replace("^{2}", "²").split(" = ")
            assert (left, int(right)) == ("N", config.grid[0] * config.grid[1])
            first, second = middle[-1].split("/")[0].split("·")
            divided = config.patch_size**2 if "/" in middle[-1] else 1
            assert int(first) * int(second) == int(right) * divided, "what stands there is true"
        for key in {"learned", "sincos"} & keys:
            assert ("x_{class}" in equations[key]) == (config.pooling == "class")
        assert walk_html.page(found).count("<section") == len(found.steps)
        walk_terminal.show(found, Console(file=io.StringIO(), width=80))


def test_the_source_is_the_source() -> None:
    text = Path(vitral.models.vit.__file__).read_text()
    code = source_of(vitral.models.vit.EncoderBlock.forward)
    assert code.where == "vit.py · EncoderBlock.forward"
    assert text.splitlines()[code.line - 1].strip() == code.text.splitlines()[0]
    for line in code.text.splitlines():
        assert line.strip() in text
    assert '"""' not in source_of(ViT.embed).text
    assert "self.class_token(tokens)" in source_of(ViT.embed).text


def test_docs_walk_shows_the_source_as_it_is(cpu: Hardware) -> None:
    """Made with: vitral walk DIGIT --model RUN --out docs/walk.md (a model of recipe mnist-quick)."""
    text = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    found, _, _ = made("MNIST", cpu)
    wanted = [code.text for step in found.steps for code in step.code]
    assert re.findall(r"```python\n(.*?)\n```", text, flags=re.DOTALL) == wanted, "make docs/walk.md again"
    assert re.findall(r"^## \d+\. (.*)$", text, flags=re.MULTILINE) == [step.title for step in found.steps]
    for link in re.findall(r"\]\((images/[^)]+)\)", text):
        assert (ROOT / "docs" / link).is_file()


def test_both_languages_say_the_same_things() -> None:
    assert TEXTS["en"].keys() == TEXTS["ko"].keys()
    assert CAPTIONS["en"].keys() == CAPTIONS["ko"].keys()
    assert PAGE["en"].keys() == PAGE["ko"].keys()
    fields = re.compile(r"\{(\w+)\}")
    for key, told in TEXTS["ko"].items():
        assert set(fields.findall(told["text"])) <= set(fields.findall(TEXTS["en"][key]["text"])) | {"L", "D", "E"}
        assert re.search("[가-힣]", told["text"])
    for key, caption in CAPTIONS["ko"].items():
        assert set(fields.findall(caption)) == set(fields.findall(CAPTIONS["en"][key]))


def test_the_page_needs_nothing_else_and_escapes_names(cpu: Hardware) -> None:
    found, _, _ = made("CIFAR-10", cpu, "ko")
    page = walk_html.page(found)
    assert '<html lang="ko">' in page
    assert "class &lt;" in page
    assert "class <" not in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 5_000_000


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_in_a_browser(cpu: Hardware, tmp_path: Path, browser: Any, width: int, scheme: str) -> None:  # noqa: F811
    found, _, _ = made("MNIST", cpu, "ko")
    file = tmp_path / "walk.html"
    file.write_text(walk_html.page(found), encoding="utf-8")
    trouble: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    tab.on("console", lambda message: trouble.append(message.text))
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on("request", lambda asked: asked.url.startswith(("data:", file.as_uri())) or trouble.append(asked.url))
    tab.goto(file.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (light > 128) == (scheme == "light")
    tab.click("nav a[href='#attention']")
    assert tab.evaluate("location.hash") == "#attention"
    context.close()
    assert trouble == []


def test_equations_on_the_page_and_on_the_terminal() -> None:
    assert walk_html.equation("z_{0} = x^{2} < E_{pos}") == "z<sub>0</sub> = x<sup>2</sup> &lt; E<sub>pos</sub>"
    assert walk_terminal.equation("z_{0} = x^{2} + E_{pos} ∈ R^{2×3}, q^{T}") == "z₀ = x² + E_pos ∈ R^(2×3), q^T"


def test_a_terminal_without_colours_shows_shades(cpu: Hardware) -> None:
    found, _, _ = made("MNIST", cpu)
    plain, coloured_ = io.StringIO(), io.StringIO()
    walk_terminal.show(found, Console(file=plain, width=70))
    walk_terminal.show(found, Console(file=coloured_, width=70, force_terminal=True, color_system="truecolor"))
    assert "▒" in plain.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert "▀" in coloured_.getvalue()
    assert max(map(len, plain.getvalue().splitlines())) <= 70
    assert "z₀" in plain.getvalue()


def test_colours() -> None:
    low, zero, high = coloured(np.array([[-1.0, 0.0, 1.0]]))[0].astype(int)
    assert low[0] > low[2] + 50, "orange"
    assert high[2] > high[1] + 30, "purple"
    assert min(zero) > 240
    dark, light = coloured(np.array([[0.0, 1.0]]), "shares")[0].astype(int).sum(axis=-1)
    assert dark < light


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpu: Hardware
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("L", (28, 28), 90).save("digit.png")
    assert command.run(["digit.png", "--no-code"]) == 0
    assert "the model: mnist, which comes with vitral; another" in capsys.readouterr().err
    _, predictor, _ = made("MNIST", cpu)
    for name in ("old", "new"):
        save_model(tmp_path / "runs" / name / "model", predictor.model, predictor.card)
    assert command.newest(Path("digit.png")).name == "new"
    assert command.run(["digit.png", "--lang", "ko", "--no-code"]) == 0
    assert "패치 임베딩" in capsys.readouterr().out
    assert command.run(["digit.png", "--out", "walk.html", "--model", "runs/old"]) == 0
    assert Path("walk.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert command.run(["digit.png", "--out", "walk.md"]) == 0
    assert len([*Path("images/walk").glob("*.png")]) > 14
    for words, said in (
        (["digit.png", "--layer", "4"], "there is no layer 4: the model has 3"),
        (["digit.png", "--head", "0"], "there is no head 0"),
        (["digit.png", "--out", "walk.pdf"], "ends in .html or .md"),
        (["nothing.png"], "no such file"),
    ):
        capsys.readouterr()
        with pytest.raises(VitralError, match=said):
            command.run(words)
    assert capsys.readouterr().err == ""  # which model it would have been does not matter then
