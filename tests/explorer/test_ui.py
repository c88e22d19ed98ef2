"""The explorer's page in a real browser, opened from file://: tour, zoom, experiments, links, languages and layouts.

Without Chromium these tests are skipped; with VITRAL_NEEDS_CHROMIUM=1 they fail. VITRAL_SCREENSHOTS=folder keeps
a screenshot of every test.
"""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from support.explorer_models import CONFIGS, random_model
from vitral.explorer.build import ExplorerOptions, site_model
from vitral.explorer.weights import encode_weights
from vitral.explorer.write import ModelWeights, SiteModel, write_site
from vitral.inference.predictor import Predictor
from vitral.models.variants.hybrid import HybridConfig

expect.set_options(timeout=60_000)
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}


@pytest.fixture(scope="module")
def mnist() -> Predictor:
    return Predictor.load("bundled:mnist", device="cpu", engine="reference")


@pytest.fixture(scope="module")
def site(predictors, mnist, tmp_path_factory) -> Path:
    """A site with the bundled MNIST model first, one small model of every kind, and one with three epochs."""
    models = [site_model(mnist, "mnist", ExplorerOptions())]
    models += [site_model(predictor, name, ExplorerOptions()) for name, predictor in predictors.items()]
    weights = encode_weights(random_model(CONFIGS["plain"]))
    epochs = tuple(ModelWeights(epoch=epoch, weights=weights) for epoch in (1, 4, 9))
    models.append(SiteModel(name="epochs", predictor=predictors["plain"], weights=epochs))
    folder = tmp_path_factory.mktemp("site")
    write_site(models, folder)
    return folder


@pytest.fixture
def open_page(browser, site, request):
    """Open the page at an address and wait for it. Afterwards, check for script errors and foreign requests."""
    contexts, problems = [], []

    def open_ready(address: str = "", locale: str = "en-US", **settings):
        context = browser.new_context(locale=locale, **({"viewport": {"width": 1200, "height": 860}} | settings))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: None if is_own(request.url) else problems.append(request.url))
        page.goto((site / "index.html").as_uri() + address)
        page.wait_for_selector("body[data-ready]")
        return page

    def is_own(url: str) -> bool:
        return url.startswith((site.as_uri(), "blob:", "data:"))

    yield open_ready
    if folder := os.environ.get("VITRAL_SCREENSHOTS"):
        Path(folder).mkdir(exist_ok=True)
        for number, context in enumerate(contexts):
            name = re.sub(r"\W+", "-", request.node.name)
            context.pages[0].screenshot(path=f"{folder}/explorer-{name}-{number}.png", full_page=True)
    for context in contexts:
        context.close()
    assert problems == []


def address(page) -> str:
    return page.evaluate("decodeURIComponent(location.hash)")


def click(page, focus: str) -> None:
    page.locator(f'[data-focus="{focus}"]').click()


def with_changes(place: str, **changes) -> str:
    return f"#{place}?changes={quote(json.dumps(changes))}"


# ── tour ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mnist", *CONFIGS])
def test_tour_leads_from_the_first_step_to_the_last(open_page, model):
    page = open_page(f"#tour/image?model={model}")
    steps = page.evaluate("name => VITRAL_SITE.models.find((m) => m.name === name).steps.map((s) => s.key)", model)
    titles = set()
    for index, key in enumerate(steps):
        expect(page.locator(".dot[aria-current=step]")).to_have_text(str(index + 1))
        assert f"tour/{key}" in address(page)
        titles.add(page.inner_text("#step-title"))
        assert page.locator("article figure").count() > 0
        assert page.locator("article .code pre").count() > 0
        assert "{" not in page.inner_text("article h2, article .lead, article .equation")
        click(page, "next")
    assert len(titles) == len(steps) >= (10 if isinstance(CONFIGS.get(model), HybridConfig) else 12)
    expect(page.locator("#views [aria-pressed=true]")).to_have_text("Explore")


@pytest.mark.slow
def test_zoom_reaches_one_dot_product_and_leads_back(open_page):
    page = open_page("#explore/attention?token=6")
    here = page.locator(".crumbs")
    for focus, place in (("map:block1", "Block 2"), ("open-head:2", "Head 3"), ("to-dot", "query of row 2, column 2")):
        click(page, focus)
        expect(here).to_contain_text(place)
    worked_out = page.locator(".sums li b").nth(2).inner_text()
    assert worked_out.strip(" =") == page.locator(".bars .strong .value").inner_text()
    for level in (2, 1, 0):
        click(page, f"crumb:{level}")
        expect(page.locator(".crumbs li:not(.deeper) button")).to_have_count(level + 1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["rotary", "unusual", "hybrid"])
def test_every_panel_shows_every_kind_of_model(open_page, model):
    places = ["explore/attention", "explore/lens", "explore/similarity", "explore/norms", "lab/workbench"]
    for place in [*places, *(f"explore/attention?zoom={zoom}&model={model}" for zoom in ("block", "head", "dot"))]:
        page = open_page(f"#{place}{'' if '?' in place else f'?model={model}'}")
        expect(page.locator("#step-title")).to_be_visible()
        expect(page.locator("[aria-busy]")).to_have_count(0)
        page.close()


@pytest.mark.slow
def test_attention_is_shown_beside_the_map_that_the_faithfulness_test_ranks_best(open_page):
    page = open_page("#explore/attention?image=5")
    expect(page.locator(".honest [aria-busy]")).to_have_count(0)
    record = page.evaluate("VITRAL_SITE.models[0].faithfulness")
    assert record["best"] == "occlusion"
    expect(page.locator(".honest figcaption b")).to_have_text(["Attention, last block", "Occlusion"])
    expect(page.locator(".scores tbody tr")).to_have_count(len(record["scores"]))
    expect(page.locator(".scores .strong")).to_contain_text("Occlusion")


# ── image and prediction ─────────────────────────────────────────────────────────────────────────────────────


def test_prediction_of_an_uploaded_image_agrees_with_the_predictor(open_page, mnist):
    digit = Image.fromarray(np.asarray(Image.linear_gradient("L").resize((40, 40))).T.copy())
    file = io.BytesIO()
    digit.save(file, "PNG")
    page = open_page()
    page.set_input_files("#file-input", [{"name": "digit.png", "mimeType": "image/png", "buffer": file.getvalue()}])
    best = mnist.predict(digit).best
    expect(page.locator("#prediction li").first).to_contain_text(f"{best.name}")
    assert page.locator("#prediction li .share").first.inner_text() == f"{best.probability:.1%}"


@pytest.mark.slow
def test_examples_are_classified_correctly(open_page):
    page = open_page()
    for index in range(10):
        click(page, f"example:{index}")
        expect(page.locator("#prediction-note")).to_have_text(f"Correct: this is “{index}”.")


@pytest.mark.slow
def test_a_drawing_is_classified_and_travels_in_the_link(open_page):
    page = open_page()
    page.click("#draw")
    box = page.locator("#drawing-canvas").bounding_box()
    page.mouse.move(box["x"] + 140, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 138, box["y"] + 140, steps=4)
    page.mouse.move(box["x"] + 136, box["y"] + 240, steps=4)
    page.mouse.up()
    expect(page.locator(".drawing-result")).to_contain_text("Prediction: 1")
    page.keyboard.press("Escape")
    prediction = page.inner_text("#prediction")
    assert "image=d" in address(page)
    again = open_page(page.evaluate("location.hash"))
    assert again.inner_text("#prediction") == prediction


def test_an_unreadable_file_is_refused(open_page):
    page = open_page()
    page.set_input_files("#file-input", [{"name": "x.png", "mimeType": "image/png", "buffer": b"no image"}])
    expect(page.locator("#error")).to_have_text("x.png is not a readable image.")


# ── taking it apart ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_workbench_changes_the_prediction_and_undoes_it(open_page):
    page = open_page("#lab/workbench?image=7")
    before = page.inner_text("#prediction")
    expect(page.locator(".bench-result")).to_contain_text("Nothing yet")
    for block in range(4):
        click(page, f"part-block:{block}")
        expect(page.locator(f'[data-focus="part-block:{block}"]')).to_have_attribute("aria-pressed", "false")
    expect(page.locator(".bench-result .verdict")).to_be_visible()
    assert '"blocksOff":[0,1,2,3]' in address(page)
    assert page.inner_text("#prediction") != before
    expect(page.locator(".station.changed")).to_have_count(4)
    page.click("#undo-changes")
    expect(page.locator(".bench-result")).to_contain_text("Nothing yet")
    assert page.inner_text("#prediction") == before


def test_patches_are_hidden_and_swapped_by_clicks(open_page):
    page = open_page("#lab/workbench")
    page.locator("#patches button").nth(5).click()
    expect(page.locator("#patches .masked")).to_have_count(1)
    click(page, "tool:swap")
    page.locator("#patches button").nth(0).click()
    page.locator("#patches button").nth(15).click()
    expect(page.locator("#patches .swapped")).to_have_count(2)
    assert address(page).endswith('{"maskPatches":[5],"swapPatches":[[0,15]]}')


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mnist", "hybrid"])
def test_ten_experiments_ask_first_and_measure_then(open_page, model):
    page = open_page(f"#lab/experiments?model={model}")
    keys = page.eval_on_selector_all(".card", "cards => cards.map((card) => card.dataset.focus.split(':')[1])")
    assert len(keys) == len(set(keys)) == 10
    for key in keys:
        click(page, f"experiment:{key}")
        expect(page.locator('[data-focus="measure"]')).to_be_disabled()
        page.locator('[data-focus="guess:1"]').check()
        click(page, "measure")
        expect(page.locator(".finding").nth(1)).to_be_visible()
        expect(page.locator(".quiz .right")).to_have_count(1)
        assert not re.search(r"\{|undefined|NaN", page.inner_text("article"))
        click(page, "all-experiments")
    expect(page.locator(".cards .done")).to_have_count(10)


@pytest.mark.slow
def test_without_positions_swapping_patches_changes_nothing(open_page):
    page = open_page("#lab/experiments?experiment=set")
    page.locator('[data-focus="guess:0"]').check()
    click(page, "measure")
    expect(page.locator(".verdict").first).to_have_text("As you expected.")


# ── links, languages, keyboard, layout ───────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_link_restores_the_view(open_page):
    link = with_changes("explore/attention", headsOff=["1.2"], temperature=2)
    page = open_page(f"{link}&zoom=head&block=2&head=3&token=6&image=4&lang=ko")
    expect(page.locator("#step-title")).to_have_text("블록 2, 헤드 3")
    expect(page.locator('#examples [aria-pressed="true"]')).to_have_attribute("data-name", "4")
    expect(page.locator("#changed-list")).to_contain_text("2.3")
    expect(page.locator('#patches [aria-pressed="true"]')).to_have_attribute("data-patch", "5")
    click(page, "head:0")
    expect(page.locator("#step-title")).to_have_text("블록 2, 헤드 1")
    again = open_page(page.evaluate("location.hash"))
    expect(again.locator("#step-title")).to_have_text("블록 2, 헤드 1")


def test_back_button_returns_to_the_previous_step(open_page):
    page = open_page()
    click(page, "next")
    expect(page.locator("#step-title")).to_contain_text("Patches")
    page.go_back()
    expect(page.locator("#step-title")).to_contain_text("Image")


@pytest.mark.parametrize(
    "link",
    ["#nowhere/x?block=99&head=-3&token=1000&key=x&layer=77&model=none&image=zz", "#tour/x?changes=%5B1%5D", "#?%%%"],
)
def test_a_damaged_link_opens_the_page(open_page, link):
    page = open_page(link)
    expect(page.locator("#step-title")).to_be_visible()


def test_changes_that_do_not_exist_are_refused(open_page):
    page = open_page(with_changes("lab/workbench", unknownChange=[1]))
    expect(page.locator("#error")).to_contain_text("do not fit this model")
    expect(page.locator("#changed-note")).to_be_hidden()


@pytest.mark.slow
def test_language_switch_keeps_the_place(open_page):
    page = open_page("#tour/attention")
    page.click("#language")
    expect(page.locator("#step-title")).to_contain_text("블록 1: 어텐션")
    assert page.evaluate("document.documentElement.lang") == "ko"
    assert "lang=ko" in address(page)
    page.click("#language")
    expect(page.locator("#step-title")).to_contain_text("Block 1: attention")


def test_korean_visitors_start_in_korean(open_page):
    expect(open_page(locale="ko-KR").locator("#views")).to_contain_text("따라가기")


@pytest.mark.slow
def test_keyboard_walks_through_the_tour_and_zooms(open_page):
    page = open_page()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#step-title")).to_contain_text("Patches")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#step-title")).to_contain_text("Image")
    for title in ("Inside block 1", "Block 1, head 1", "One dot product"):
        page.keyboard.press("+")
        expect(page.locator("#step-title")).to_contain_text(title)
    page.keyboard.press("-")
    expect(page.locator("#step-title")).to_contain_text("Block 1, head 1")


@pytest.mark.slow
def test_keyboard_reaches_patches_and_numbers(open_page):
    page = open_page("#explore/attention?zoom=head")
    page.locator("#patches button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator('#patches [aria-pressed="true"]')).to_have_attribute("data-patch", "5")
    matrix = page.locator('[data-focus="figure:attention"]')
    matrix.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("figure:has([data-focus='figure:attention']) .readout")).to_contain_text("row 2, column 2, to")
    page.keyboard.press("Enter")
    expect(page.locator("#step-title")).to_contain_text("One dot product")


def test_every_control_has_a_name(open_page):
    page = open_page("#lab/workbench")
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('button, select, input, canvas[role=img]')]"
        ".filter((e) => !e.closest('[hidden]') && !(e.getAttribute('aria-label') || e.textContent.trim()"
        " || e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.slow
def test_numbers_of_a_figure_open_as_a_table(open_page):
    page = open_page("#tour/logits")
    page.locator("figure .link").first.click()
    expect(page.locator("dialog th[scope=col]")).to_have_count(10)
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)


PLACES = ["tour/image", "tour/attention", "tour/logits", "explore/attention", "explore/lens", "explore/norms"]


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("place", [*PLACES, "lab/experiments", "lab/workbench"])
def test_a_phone_needs_no_sideways_scrolling(open_page, place, language):
    page = open_page(f"#{place}?lang={language}", **PHONE)
    expect(page.locator("[aria-busy]")).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.slow
def test_theme_follows_the_system_and_the_button(open_page):
    page = open_page(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")
    assert page.evaluate(background) != dark


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_slider_shows_earlier_epochs(open_page):
    page = open_page("#training?model=epochs")
    expect(page.locator(".slider output")).to_have_text("epoch 9")
    expect(page.locator("article svg.chart")).to_be_visible()
    page.locator('[data-focus="epoch"]').press("Home")
    expect(page.locator(".slider output")).to_have_text("epoch 1")
    expect(page.locator("#epoch-note")).to_contain_text("epoch 1")
    assert "epoch=0" in address(page)
    page.click("#last-epoch")
    expect(page.locator(".slider output")).to_have_text("epoch 9")


@pytest.mark.slow
def test_models_with_one_epoch_have_no_training_view(open_page):
    expect(open_page().locator("#views button")).to_have_count(3)
