"""The HTML report: contents, escaping, size, accessibility, and behaviour in a browser."""

from __future__ import annotations

import json
import math
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from support.common import TINY_MODEL
from vitral import api
from vitral.cli import main as cli
from vitral.data.datasets import Split
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.doctor import diagnose
from vitral.errors import VitralError
from vitral.evaluation.data import load_eval_target
from vitral.evaluation.evaluate import evaluate
from vitral.evaluation.ood import OODResult, evaluate_score
from vitral.evaluation.report import build_report
from vitral.evaluation.robustness import measure_robustness
from vitral.inference.predictor import Predictor
from vitral.models.calibration import Calibration
from vitral.models.vit import ViT, ViTConfig
from vitral.reporting.html.charts import Chart, nice_ticks, padded_range
from vitral.reporting.html.confusion_matrix import spectral_order
from vitral.reporting.html.report import render_report, write_report
from vitral.reporting.html.report_data import ReportData, issue_text
from vitral.reporting.html.run_sections import summary_section
from vitral.runs.model_io import ModelConfig
from vitral.utils.intervals import Interval

MARKUP_NAMES = ("<script>alert(1)</script>", '"quoted" & <b>bold</b>', "</script><img src=x onerror=alert(2)>", "plain")


def save_report(data: ReportData, path: Path) -> Path:
    path.write_text(render_report(data), encoding="utf-8")
    return path


def make_report_data(
    cpu: Hardware, classes: tuple[str, ...], *, images: int = 60, size: int = 16, channels: int = 1, **fields: Any
) -> ReportData:
    """Report data of a model with random weights, which makes many errors."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(size, size), patch_size=8, channels=channels, num_classes=len(classes), width=16, depth=2, heads=2
    )
    model = ViT(config)
    torch.nn.init.normal_(model.get_parameter("head.out.weight"))
    preprocessing = Preprocessing(
        image_size=(size, size), channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels
    )
    model_config = ModelConfig(
        architecture=config,
        preprocessing=preprocessing,
        classes=classes,
        trained_on="noise",
        epoch=1,
        calibration=Calibration(temperature=1.5, ood_threshold=0.1),
    )
    predictor = Predictor(model, model_config, cpu)
    inputs = torch.randint(0, 256, (images, channels, size, size), dtype=torch.uint8)
    labels = torch.arange(images) % len(classes)
    logits = predictor.logits(inputs)
    robustness = measure_robustness(inputs[:20], labels[:20], lambda x: predictor.logits(x).argmax(dim=1))
    scores = [torch.randn(200, generator=torch.Generator().manual_seed(seed)) - seed for seed in range(3)]
    ood = OODResult(
        dataset="<i>other</i>",
        ood_images=200,
        id_images=200,
        scores=(evaluate_score("energy", (scores[0], scores[0], scores[1])),),
    )
    evaluation = build_report(logits, labels, classes, model_config.calibration, ood=ood, robustness=robustness)
    return ReportData(
        title="A test of <b>everything</b>",
        predictor=predictor,
        split_name="test",
        split=Split(images=inputs, labels=labels),
        logits=logits,
        evaluation=evaluation,
        facts=(("Training data", "<noise>"),),
        **fields,
    )


class ParsedPage(HTMLParser):
    """Tags with attributes, ids, and tags that are closed in the wrong order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.misnested: list[str] = []
        self.ids: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.misnested.append(tag)


def test_external_text_is_escaped_and_nothing_is_fetched(cpu: Hardware) -> None:
    source = render_report(
        make_report_data(
            cpu, MARKUP_NAMES, commands=("vitral train '<x>'",), recipe="name = '<script>'", data_checks=("<u>",)
        )
    )
    page = ParsedPage(source)
    assert page.misnested == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 2
    assert not {"b", "i", "u", "x", "noise", "iframe", "link", "object"} & set(names) - {"b"}
    assert names.count("b") == 5  # the key figures at the top, not a class name
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith(("data:image/", "data:", "#"))
        assert tag != "img" or attributes.get("alt")
    assert not re.search(r"https?://", source)
    assert "alert(1)&lt;/script&gt;" in source
    stored = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', source, flags=re.DOTALL)
    assert stored is not None
    assert json.loads(stored[1])["classes"] == list(MARKUP_NAMES)
    assert "best epoch was selected on these images" not in source


def test_validation_results_are_marked_as_optimistic(cpu: Hardware) -> None:
    assert "best epoch was selected on these images" in summary_section(
        replace(make_report_data(cpu, ("a", "b"), images=4), split_name="validation")
    )


def test_an_accuracy_with_tta_is_shown_next_to_that_without(cpu: Hardware) -> None:
    data = make_report_data(cpu, ("a", "b"), images=4)
    plain = Interval(value=0.8125, low=0.75, high=0.875)
    evaluation = replace(data.evaluation, tta="flip", accuracy_without_tta=plain)
    html = render_report(replace(data, evaluation=evaluation))
    assert "accuracy with test-time augmentation (" in html
    assert "<b>81.25%</b><span>without it, as in predict and evaluate (75.00–87.50%)" in html
    assert "predict, evaluate and serve do not use it: 81.25% (95% CI 75.00-87.50%)." in html
    assert "test-time augmentation" not in render_report(data)


def test_content_security_policy_matches_script_and_style(cpu: Hardware) -> None:
    import base64
    import hashlib

    source = render_report(make_report_data(cpu, ("a", "b")))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', source)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    for tag in ("style", "script"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", source, flags=re.DOTALL)
        assert content is not None
        expected = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{expected}'" in policy[1]


@pytest.mark.slow
def test_report_of_a_hundred_classes_of_photographs_is_below_5_mb(cpu: Hardware, tmp_path: Path) -> None:
    names = tuple(f"a class with a rather long name, number {k}" for k in range(100))
    path = save_report(make_report_data(cpu, names, images=400, size=120, channels=3), tmp_path / "report.html")
    assert path.stat().st_size < 5_000_000
    assert "The 40 classes with the most errors" in path.read_text()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_enough_contrast(scheme: str) -> None:
    """WCAG 2.2: at least 4.5 for text, 3 for lines."""
    style = files("vitral.reporting.html").joinpath("page", "report.css").read_text("utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[0] if scheme == "light" else blocks[1]))

    def contrast(one: str, other: str) -> float:
        light, dark = sorted((luminance(colours[one]), luminance(colours[other])), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    for foreground in ("text", "muted", "link", "b"):
        for background in ("background", "surface"):
            assert contrast(foreground, background) >= 4.5, (foreground, background)
    for line in "abcde":
        assert contrast(line, "background") >= 3, line
    for cell in ("m1", "m2", "correct") + (("m3",) if scheme == "light" else ()):
        assert contrast("text", cell) >= 4.5, cell
    assert contrast("on-dark", "m5") >= 4.5


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 9))
@example(1.0, 400_401.0, 2)
def test_ticks_are_within_the_range(low: float, width: float, count: int) -> None:
    ticks = nice_ticks(low, low + width, count)
    assert 1 <= len(ticks) <= count + 2 or math.isclose(low, low + width, rel_tol=1e-9)
    slack = 1e-6 * max(abs(low), width)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)


def test_chart_is_valid_svg_with_marks_at_the_right_positions() -> None:
    chart = Chart(label="a <chart>", x="x & y", y="<y>", x_range=(0, 10), y_range=(0, 1))
    chart.line([0, 10], [0, 1], "a", "<line>")
    chart.dots([5], [0.5], "b")
    chart.spans([5], [0.25], [0.75], "b")
    chart.steps([0, 5, 10], [0.2, 2.0], "c", "bars")
    chart.rule(3, "g")
    figure = ET.fromstring(chart.svg())
    (circle,) = figure.iter("circle")
    (line,) = figure.iter("polyline")
    first, last = (tuple(map(float, point.split(","))) for point in line.attrib["points"].split())
    assert float(circle.attrib["cx"]) == pytest.approx((first[0] + last[0]) / 2, abs=0.11)
    assert float(circle.attrib["cy"]) == pytest.approx((first[1] + last[1]) / 2, abs=0.11)
    assert first[1] > last[1], "larger values are higher"
    svg = figure.find("svg")
    assert svg is not None
    assert svg.attrib["aria-label"] == "a <chart>"
    assert padded_range([math.nan, 1.0, 3.0]) == pytest.approx((0.88, 3.12))
    assert padded_range([0.0, 0.0], floor=0.0) == (0.0, 1.0)


def test_spectral_order_puts_confused_classes_next_to_each_other() -> None:
    import numpy as np

    counts = np.diag([50] * 6)
    counts[0, 3] = counts[3, 0] = counts[1, 4] = counts[4, 1] = counts[2, 5] = counts[5, 2] = 20
    order = spectral_order(counts)
    assert sorted(order) == list(range(6))
    assert {frozenset(order[i : i + 2]) for i in (0, 2, 4)} == {frozenset((0, 3)), frozenset((1, 4)), frozenset((2, 5))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    api.train("digits", epochs=4, out=out, **TINY_MODEL)
    return out


def test_training_writes_a_report(run: Path) -> None:
    source = (run / "report.html").read_text()
    test = json.loads((run / "test.json").read_text())
    assert f"{100 * test['top1']:.2f}%" in source
    for text in ("Training</h2>", "Most confident errors", "Environment", f"vitral train --recipe {run}/recipe.toml"):
        assert text in source
    assert "vitral report" in source  # the command for the missing sections
    assert len(source) < 5_000_000
    assert ParsedPage(source).misnested == []


def test_quick_report_takes_less_than_two_seconds(run: Path, tmp_path: Path) -> None:
    target = load_eval_target(run)
    evaluation, logits = evaluate(target)
    start = time.process_time()
    write_report(target, evaluation, logits, run, tmp_path / "report.html")
    assert time.process_time() - start < 2


def test_command_writes_to_the_given_path(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitral.api.evaluation.REPORT_CORRUPTED_IMAGES", 30)
    with pytest.raises(SystemExit):
        cli.main(["report", str(run / "model"), "--out", str(tmp_path / "a.html")])
    assert "Wrote " in capsys.readouterr().out
    source = (tmp_path / "a.html").read_text()
    assert "rotation" in source
    assert "Training</h2>" not in source  # a model folder has no curves
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(run), "--fast", "--out", str(tmp_path / "no" / "such" / "folder.html")])
    assert stop.value.code == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.slow
def test_full_report_of_a_folder_has_the_findings_of_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.photos import save_photo

    monkeypatch.setattr("vitral.api.evaluation.REPORT_CORRUPTED_IMAGES", 10)
    for index in range(24):
        save_photo(tmp_path / "photos" / ("a", "b")[index % 2] / f"{index}.jpg", (index % 2 * 200, 90, 90), index)
    (tmp_path / "photos" / "a" / "broken.jpg").write_text("not an image")
    model: dict[str, Any] = {"model.image_size": (16, 16), "model.patch_size": 8, "model.width": 24, "model.depth": 1}
    more: dict[str, Any] = {"precision": "fp32", "data.unreadable": 0.5}
    api.train(str(tmp_path / "photos"), out=tmp_path / "run", epochs=1, **model, **more)
    diagnosis = diagnose(tmp_path / "photos")
    assert diagnosis.image_sizes not in (tmp_path / "run" / "report.html").read_text()
    source = api.report(tmp_path / "run").read_text()
    for line in (diagnosis.image_sizes, issue_text(diagnosis.issues[0]), "validation images of"):
        assert escape(line) in source


def test_empty_split_is_refused(run: Path) -> None:
    target = load_eval_target(run, None, "test")
    empty = replace(target, split=Split(images=target.split.images[:0], labels=target.split.labels[:0]))
    with pytest.raises(VitralError, match="no images"):
        evaluate(empty)


# ── in a browser ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Open a file in a browser. Afterwards, check for messages, dialogs and network requests."""
    contexts: list[Any] = []
    problems: list[str] = []

    def on_dialog(dialog: Any) -> None:
        problems.append(dialog.message)
        dialog.dismiss()

    def on_request(url: str, page: Path) -> None:
        if not url.startswith(("data:", page.as_uri())):
            problems.append(url)

    def open_file(path: Path, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(60_000)
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("dialog", on_dialog)
        tab.on("request", lambda request: on_request(request.url, path))
        tab.goto(path.as_uri())
        tab.wait_for_selector('html[data-ready="yes"]')
        return tab

    yield open_file
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.slow
def test_clicking_a_cell_shows_its_images(run: Path, open_page: Any) -> None:
    tab = open_page(run / "report.html")
    cell = tab.locator("#matrix td:not(.correct) button").first
    true, predicted = cell.get_attribute("data-cell").split(",")
    count = int(cell.inner_text())
    cell.click()
    assert tab.locator("#cell h3").inner_text().startswith(f"{true} predicted as {predicted}: {count} of ")
    assert tab.locator("#cell img").count() == min(count, 12)
    assert tab.evaluate("[...document.querySelectorAll('#cell img')].every(i => i.complete && i.naturalWidth === 8)")
    assert cell.get_attribute("aria-pressed") == "true"
    tab.locator("#matrix td.correct button").first.click()
    assert ", correct:" in tab.locator("#cell h3").inner_text()
    assert cell.get_attribute("aria-pressed") == "false"


@pytest.mark.slow
def test_cells_are_accessible_with_the_keyboard(run: Path, open_page: Any) -> None:
    tab = open_page(run / "report.html")
    tab.locator("#matrix td.correct button").first.focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert tab.locator("#cell img").count() > 0


def rows_and_columns(tab: Any) -> tuple[list[str], list[str]]:
    return (
        tab.locator("#matrix tbody tr th").all_inner_texts(),
        tab.locator("#matrix thead th").all_inner_texts()[1:],
    )


@pytest.mark.slow
def test_sorting_the_matrix_moves_rows_columns_and_cells(run: Path, open_page: Any) -> None:
    tab = open_page(run / "report.html")
    confusion = json.loads((run / "test.json").read_text())["confusion"]
    errors = [sum(row) + sum(r[k] for r in confusion) - 2 * row[k] for k, row in enumerate(confusion)]
    for order in ("errors", "similar", "name", "original"):
        tab.select_option("#order", order)
        rows, columns = rows_and_columns(tab)
        assert rows == columns
        assert sorted(rows) == [str(k) for k in range(10)]
        if order == "errors":
            assert [errors[int(k)] for k in rows] == sorted(errors, reverse=True)
        for i, true in enumerate(rows):
            cells = tab.locator(f"#matrix tbody tr:nth-child({i + 1}) td").all_inner_texts()
            assert [int(c or 0) for c in cells] == [confusion[int(true)][int(predicted)] for predicted in columns]
    assert rows_and_columns(tab)[0] == [str(k) for k in range(10)]


def test_class_table_sorts_numerically(run: Path, open_page: Any) -> None:
    tab = open_page(run / "report.html")
    for name, column in (("recall", 2), ("images", 4)):
        tab.click(f"table.sortable th button:text-is('{name}')")
        cells = tab.locator(f"table.sortable tbody tr > :nth-child({column + 1})").all_inner_texts()
        values = [float(cell.replace("%", "").replace(",", "")) for cell in cells]
        assert values == sorted(values)
        tab.click(f"table.sortable th button:text-is('{name}')")
        cells = tab.locator(f"table.sortable tbody tr > :nth-child({column + 1})").all_inner_texts()
        assert [float(cell.replace("%", "").replace(",", "")) for cell in cells] == values[::-1]
        assert tab.locator("table.sortable th[aria-sort=descending]").inner_text() == name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_system_and_print_is_light(run: Path, open_page: Any, scheme: str) -> None:
    tab = open_page(run / "report.html", color_scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(background) == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
    tab.emulate_media(media="print")
    assert tab.evaluate(background) == "rgb(255, 255, 255)"
    assert not tab.locator("nav").is_visible()
    assert not tab.locator("#cell").is_visible()
    assert tab.locator("#matrix").is_visible()


def test_phone_layout_has_no_horizontal_scrolling(run: Path, open_page: Any) -> None:
    tab = open_page(run / "report.html", viewport={"width": 360, "height": 740})
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1100, 1280])
def test_no_table_or_number_is_cut_off(cpu: Hardware, tmp_path: Path, open_page: Any, width: int, scheme: str) -> None:
    names = ("ant", "European hornet (Vespa crabro)", "Schwarzblauerölkäferundsonstigekäfer")
    counts = (("train", (123_456, 20, 3)), ("validation", (12_345, 2, 1)), ("test", (12_345, 2, 1)))
    data = make_report_data(cpu, names, counts=counts)
    ood = data.evaluation.ood
    assert ood is not None
    scores = tuple(replace(ood.scores[0], name=name) for name in ("max-logit", "energy", "mahalanobis"))
    ood = replace(ood, dataset="/home/alice/photographs/of/something/else", scores=scores)
    data = replace(data, evaluation=replace(data.evaluation, ood=ood))
    path = save_report(data, tmp_path / "report.html")
    tab = open_page(path, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    clipped = "e => e.scrollWidth > e.clientWidth"
    script = f"[...document.querySelectorAll('.wide:not(:has(.matrix)), td')].filter({clipped}).map(e => e.innerText)"
    assert tab.evaluate(script) == []
    heights = "[...document.querySelectorAll('#data tbody td:not(.bars), #calibration td')].map(e => e.innerText)"
    assert not [text for text in tab.evaluate(heights) if "\n" in text], "numbers are on one line"


def test_class_names_with_markup_are_shown_as_text(cpu: Hardware, tmp_path: Path, open_page: Any) -> None:
    tab = open_page(save_report(make_report_data(cpu, MARKUP_NAMES), tmp_path / "nasty.html"))
    button = tab.locator('#matrix button[data-cell^="0,"]').first
    button.click()
    assert tab.locator("#cell h3").inner_text().startswith(MARKUP_NAMES[0])
    assert tab.locator("h1").inner_text() == "A test of <b>everything</b>"
    for section in ("summary", "confusion", "errors", "calibration", "ood", "robustness"):
        assert tab.locator(f"#{section}").is_visible()
