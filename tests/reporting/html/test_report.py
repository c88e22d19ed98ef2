"""One file to send to a colleague: what is in it, what cannot get into it, and how it behaves in a browser."""

from __future__ import annotations

import json
import math
import os
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

from vitral import api as workshop
from vitral.cli import main as cli
from vitral.data.datasets import Split
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.doctor import examine
from vitral.errors import VitralError
from vitral.evaluation import evaluate as judge
from vitral.evaluation.calibration import Calibration
from vitral.evaluation.ood import Unknown, judge_score
from vitral.evaluation.report import assess
from vitral.evaluation.robustness import robustness
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.reporting.html.charts import Chart, around, nice
from vitral.reporting.html.confusion_matrix import side_by_side
from vitral.reporting.html.report import page, summary, write_report
from vitral.reporting.html.report_data import Material, gather
from vitral.runs.run import ModelCard

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
NASTY = ("<script>alert(1)</script>", '"quoted" & <b>bold</b>', "</script><img src=x onerror=alert(2)>", "plain")


def material(
    cpu: Hardware, classes: tuple[str, ...], *, images: int = 60, size: int = 16, channels: int = 1, **more: Any
) -> Material:
    """Of a model of random weights, which makes plenty of mistakes."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(size, size), patch_size=8, channels=channels, classes=len(classes), width=16, depth=2, heads=2
    )
    model = ViT(config)
    torch.nn.init.normal_(model.head.out.weight)
    seen = Preprocessing(image_size=(size, size), channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
    card = ModelCard(
        architecture=config,
        preprocessing=seen,
        classes=classes,
        trained_on="noise",
        epoch=1,
        calibration=Calibration(temperature=1.5, unknown_below=0.1),
    )
    predictor = Predictor(model, card, cpu)
    pictures = torch.randint(0, 256, (images, channels, size, size), dtype=torch.uint8)
    labels = torch.arange(images) % len(classes)
    logits = predictor.logits(pictures)
    damaged = robustness(pictures[:20], labels[:20], lambda x: predictor.logits(x).argmax(dim=1))
    scores = tuple(torch.randn(200, generator=torch.Generator().manual_seed(seed)) - seed for seed in range(3))
    unknown = Unknown(
        against="<i>other</i>", images=200, known_images=200, scores=(judge_score("energy", (scores[0], *scores[:2])),)
    )
    found = assess(logits, labels, classes, card.calibration, unknown=unknown, robustness=damaged)
    return Material(
        title="A test of <b>everything</b>",
        predictor=predictor,
        split_name="test",
        split=Split(images=pictures, labels=labels),
        logits=logits,
        found=found,
        facts=(("trained on", "<noise>"),),
        **more,
    )


class Reader(HTMLParser):
    """Tags, their attributes, and what is wrong with their nesting."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
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
            self.wrong.append(tag)


def test_nothing_from_outside_becomes_markup_and_nothing_is_fetched(cpu: Hardware) -> None:
    source = page(material(cpu, NASTY, repeat=("vitral train '<x>'",), recipe="name = '<script>'", health=("<u>",)))
    read = Reader(source)
    assert read.wrong == []
    assert read.open == []
    assert len(read.ids) == len(set(read.ids))
    names = [tag for tag, _ in read.tags]
    assert names.count("script") == 2
    assert not {"b", "i", "u", "x", "noise", "iframe", "link", "object"} & set(names) - {"b"}
    assert names.count("b") == 5  # the figures at the top, no class name
    for tag, attributes in read.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith(("data:image/", "data:", "#"))
        assert tag != "img" or attributes.get("alt")
    assert not re.search(r"https?://", source)
    assert "alert(1)&lt;/script&gt;" in source
    stored = re.search(r'<script type="application/json" id="material">(.*?)</script>', source, flags=re.DOTALL)
    assert stored is not None
    assert json.loads(stored[1])["classes"] == list(NASTY)
    assert "also chose the epoch" not in source


def test_figures_of_the_images_that_chose_the_epoch_are_called_so(cpu: Hardware) -> None:
    assert "also chose the epoch" in summary(replace(material(cpu, ("a", "b"), images=4), split_name="validation"))


def test_the_policy_names_the_script_and_the_style_that_are_there(cpu: Hardware) -> None:
    import base64
    import hashlib

    source = page(material(cpu, ("a", "b")))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', source)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    for tag in ("style", "script"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", source, flags=re.DOTALL)
        assert content is not None
        wanted = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{wanted}'" in policy[1]


def test_photographs_of_a_hundred_classes_stay_below_five_megabytes(cpu: Hardware, tmp_path: Path) -> None:
    names = tuple(f"a class with a rather long name, number {k}" for k in range(100))
    path = write_report(material(cpu, names, images=400, size=120, channels=3), tmp_path / "report.html")
    assert path.stat().st_size < 5_000_000
    assert "The 40 classes with the most mistakes" in path.read_text()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(scheme: str) -> None:
    """WCAG 2.2: at least 4.5 for text, 3 for lines."""
    style = files("vitral.reporting.html").joinpath("page", "report.css").read_text("utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[0] if scheme == "light" else blocks[1]))

    def contrast(one: str, other: str) -> float:
        light, dark = sorted((luminance(colours[one]), luminance(colours[other])), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    for ink in ("ink", "soft", "link", "b"):
        for paper in ("page", "card"):
            assert contrast(ink, paper) >= 4.5, (ink, paper)
    for line in "abcde":
        assert contrast(line, "page") >= 3, line
    for paper in ("m1", "m2", "right") + (("m3",) if scheme == "light" else ()):
        assert contrast("ink", paper) >= 4.5, paper
    assert contrast("on-dark", "m5") >= 4.5


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 9))
@example(1.0, 400_401.0, 2)
def test_ticks_are_round_and_inside(low: float, width: float, about: int) -> None:
    ticks = nice(low, low + width, about)
    assert 1 <= len(ticks) <= about + 2 or math.isclose(low, low + width, rel_tol=1e-9)
    slack = 1e-6 * max(abs(low), width)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)


def test_a_chart_is_whole_svg_with_marks_where_the_numbers_are() -> None:
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
    assert first[1] > last[1], "up is more"
    assert figure.find("svg").attrib["aria-label"] == "a <chart>"
    assert around([math.nan, 1.0, 3.0]) == pytest.approx((0.88, 3.12))


def test_classes_that_are_confused_stand_side_by_side() -> None:
    import numpy as np

    counts = np.diag([50] * 6)
    counts[0, 3] = counts[3, 0] = counts[1, 4] = counts[4, 1] = counts[2, 5] = counts[5, 2] = 20
    order = side_by_side(counts)
    assert sorted(order) == list(range(6))
    assert {frozenset(order[i : i + 2]) for i in (0, 2, 4)} == {frozenset((0, 3)), frozenset((1, 4)), frozenset((2, 5))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    workshop.train("digits", epochs=4, out=out, **{"model.depth": 1, "model.width": 32})
    return out


def test_training_leaves_a_report(run: Path) -> None:
    source = (run / "report.html").read_text()
    test = json.loads((run / "test.json").read_text())
    assert f"{100 * test['top1']:.2f} %" in source
    for words in ("How it learned", "The surest mistakes", "Environment", f"vitral train --recipe {run}/recipe.toml"):
        assert words in source
    assert "vitral report" in source  # how to have what the quick version lacks
    assert len(source) < 5_000_000
    assert Reader(source).wrong == []


def test_the_quick_version_takes_less_than_two_seconds(run: Path, tmp_path: Path) -> None:
    asked = judge.question(run, None, None)
    found, logits = judge.evaluate(asked)
    start = time.process_time()
    write_report(gather(asked, found, logits, run), tmp_path / "report.html")
    assert time.process_time() - start < 2


def test_the_command_writes_where_it_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workshop, "DAMAGED", 30)
    with pytest.raises(SystemExit):
        cli.main(["report", str(run / "model"), "--out", str(tmp_path / "a.html")])
    assert "one file, needs no network" in capsys.readouterr().out
    source = (tmp_path / "a.html").read_text()
    assert "rotation" in source
    assert "How it learned" not in source  # a model folder has no curves
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(run), "--fast", "--out", str(tmp_path / "no" / "such" / "folder.html")])
    assert stop.value.code == 2
    assert "cannot write" in capsys.readouterr().err


def test_the_doctor_has_looked_at_a_persons_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from data.files.test_listing import photograph

    monkeypatch.setattr(workshop, "DAMAGED", 10)
    for index in range(24):
        photograph(tmp_path / "photos" / ("a", "b")[index % 2] / f"{index}.jpg", (index % 2 * 200, 90, 90), index)
    (tmp_path / "photos" / "a" / "broken.jpg").write_text("no picture")
    model = {"model.image_size": (16, 16), "model.patch_size": 8, "model.width": 24, "model.depth": 1}
    more = {"precision": "fp32", "data.unreadable": 0.5}
    workshop.train(str(tmp_path / "photos"), out=tmp_path / "run", epochs=1, **model, **more)
    found = examine(tmp_path / "photos")
    assert found.sizes not in (tmp_path / "run" / "report.html").read_text()
    source = workshop.report(tmp_path / "run").read_text()
    for line in (found.sizes, found.troubles[0].what, found.troubles[0].todo, "validation images of"):
        assert escape(line) in source


def test_an_empty_set_is_said(run: Path) -> None:
    asked = judge.question(run, None, "test")
    none = replace(asked, split=Split(images=asked.split.images[:0], labels=asked.split.labels[:0]))
    with pytest.raises(VitralError, match="there are no images to evaluate"):
        judge.evaluate(none)


# in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"there is no {CHROMIUM}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """`opened(path, **context)`: the page in a browser that must neither complain nor ask for anything."""
    contexts, trouble = [], []

    def opened(path: Path, **more: Any) -> Any:
        context = browser.new_context(**more)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(60_000)
        tab.on("console", lambda message: trouble.append(message.text))
        tab.on("pageerror", lambda error: trouble.append(str(error)))
        tab.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        tab.on("request", lambda r: r.url.startswith(("data:", path.as_uri())) or trouble.append(r.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector('html[data-ready="yes"]')
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert trouble == []


def test_clicking_a_cell_shows_its_pictures(run: Path, opened: Any) -> None:
    tab = opened(run / "report.html")
    wrong = tab.locator("#matrix td:not(.right) button").first
    true, said = wrong.get_attribute("data-cell").split(",")
    count = int(wrong.inner_text())
    wrong.click()
    assert tab.locator("#cell h3").inner_text().startswith(f"{true}, taken for {said}: {count} of ")
    assert tab.locator("#cell img").count() == min(count, 12)
    assert tab.evaluate("[...document.querySelectorAll('#cell img')].every(i => i.complete && i.naturalWidth === 8)")
    assert wrong.get_attribute("aria-pressed") == "true"
    tab.locator("#matrix td.right button").first.click()
    assert "recognised" in tab.locator("#cell h3").inner_text()
    assert wrong.get_attribute("aria-pressed") == "false"


def test_cells_can_be_reached_and_opened_with_the_keyboard(run: Path, opened: Any) -> None:
    tab = opened(run / "report.html")
    tab.locator("#matrix td.right button").first.focus()
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


def test_the_matrix_is_sorted_both_ways_and_cells_move_along(run: Path, opened: Any) -> None:
    tab = opened(run / "report.html")
    confusion = json.loads((run / "test.json").read_text())["confusion"]
    mistakes = [sum(row) + sum(r[k] for r in confusion) - 2 * row[k] for k, row in enumerate(confusion)]
    for order in ("mistakes", "together", "name", "given"):
        tab.select_option("#order", order)
        rows, columns = rows_and_columns(tab)
        assert rows == columns
        assert sorted(rows) == [str(k) for k in range(10)]
        if order == "mistakes":
            assert [mistakes[int(k)] for k in rows] == sorted(mistakes, reverse=True)
        for i, true in enumerate(rows):
            cells = tab.locator(f"#matrix tbody tr:nth-child({i + 1}) td").all_inner_texts()
            assert [int(c or 0) for c in cells] == [confusion[int(true)][int(said)] for said in columns]
    assert rows_and_columns(tab)[0] == [str(k) for k in range(10)]


def test_the_class_table_sorts_by_number(run: Path, opened: Any) -> None:
    tab = opened(run / "report.html")
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
def test_it_follows_light_and_dark_and_prints_light(run: Path, opened: Any, scheme: str) -> None:
    tab = opened(run / "report.html", color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(paper) == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
    tab.emulate_media(media="print")
    assert tab.evaluate(paper) == "rgb(255, 255, 255)"
    assert not tab.locator("nav").is_visible()
    assert not tab.locator("#cell").is_visible()
    assert tab.locator("#matrix").is_visible()


def test_a_phone_scrolls_down_only(run: Path, opened: Any) -> None:
    tab = opened(run / "report.html", viewport={"width": 360, "height": 740})
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [1100, 1400])
def test_no_table_is_cut_off_on_a_desk(cpu: Hardware, tmp_path: Path, opened: Any, width: int) -> None:
    path = write_report(material(cpu, ("ant", "bee", "wasp")), tmp_path / "report.html")
    tab = opened(path, viewport={"width": width, "height": 900})
    cut = "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)"
    assert tab.evaluate(cut) == []


def test_class_names_that_are_markup_are_text_in_the_browser_too(cpu: Hardware, tmp_path: Path, opened: Any) -> None:
    tab = opened(write_report(material(cpu, NASTY), tmp_path / "nasty.html"))
    button = tab.locator('#matrix button[data-cell^="0,"]').first
    button.click()
    assert tab.locator("#cell h3").inner_text().startswith(NASTY[0])
    assert tab.locator("h1").inner_text() == "A test of <b>everything</b>"
    for section in ("summary", "confusion", "mistakes", "trust", "unknown", "robustness"):
        assert tab.locator(f"#{section}").is_visible()
