"""The web page in a real browser: all inputs and views, two languages, two themes and two screen sizes.

Without Chromium these tests are skipped; with VITRAL_NEEDS_CHROMIUM=1 they fail. VITRAL_SCREENSHOTS=folder keeps
a screenshot of every test.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import expect

from support.served import make_image, server, tiny_model, tiny_multilabel, tiny_regression
from vitral.models.conformal import ConformalSets

expect.set_options(timeout=60_000)
PAGE = Path(__file__).parents[2] / "src" / "vitral" / "serve" / "page"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sets = ConformalSets(coverage=0.9, threshold=0.2, images=99)
    insects = tiny_model(folder / "insects", ood_threshold=6.0, prediction_sets=sets)
    digits = tiny_model(folder / "digits", channels=1, size=28, mean=0.13)
    with server(insects, digits, tiny_regression(folder / "ages"), tiny_multilabel(folder / "things")) as process:
        yield process


@pytest.fixture
def open_page(browser, running, request):
    """Open the page and wait until it is ready. Afterwards, check for script errors and requests to other servers."""
    contexts, problems = [], []

    def open_ready(model: str = "insects", locale: str = "en-US", **settings):
        settings = {"viewport": {"width": 1200, "height": 860}} | settings
        context = browser.new_context(locale=locale, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if is_unexpected(message) else None)
        page.on("request", lambda request: problems.append(request.url) if is_foreign(request.url) else None)
        page.goto(running.url)
        page.wait_for_selector("body[data-ready]")
        if model != "insects":
            page.select_option("#model", model)
        return page

    def is_unexpected(message) -> bool:
        expected = ("the server responded with a status of 4", "net::ERR_FAILED")  # the page handles these
        return message.type == "error" and not any(text in message.text for text in expected)

    def is_foreign(url: str) -> bool:
        return not url.startswith((running.url, "blob:", "data:"))

    yield open_ready
    if folder := os.environ.get("VITRAL_SCREENSHOTS"):
        Path(folder).mkdir(exist_ok=True)
        for number, context in enumerate(contexts):
            context.pages[0].screenshot(path=f"{folder}/{request.node.name}-{number}.png", full_page=True)
    for context in contexts:
        context.close()
    assert problems == []


def upload(page, *contents: bytes, names: tuple[str, ...] = ()) -> None:
    names = names or tuple(f"{index}.png" for index in range(len(contents)))
    files = [{"name": n, "mimeType": "image/png", "buffer": c} for n, c in zip(names, contents, strict=True)]
    page.set_input_files("#file-input", files)


def wait_for_result(page) -> None:
    page.wait_for_selector("#result:not([hidden]) [data-patch]")


def canvas_pixels(page) -> str:
    return page.evaluate("() => document.getElementById('image-canvas').toDataURL()")


def find_image(running, *, ood: bool = False) -> bytes:
    """An image that the model does, or does not, classify as out of distribution."""
    url = f"{running.url}/v1/models/insects/predict"
    images = (make_image(seed) for seed in range(30))
    return next(image for image in images if httpx.post(url, content=image).json()["predictions"][0]["ood"] == ood)


def test_uploaded_image_gets_ranked_labels_with_bars(open_page, running):
    page = open_page()
    content = find_image(running)
    upload(page, content, names=("bee.png",))
    wait_for_result(page)
    labels = page.locator("#labels .label").all_text_contents()
    assert sorted(labels) == sorted(["ant", "bee", "<b>wasp</b>", "나비"])  # class names are not HTML
    shares = [float(re.sub(r"[^\d.]", "", text)) for text in page.locator("#labels .share").all_text_contents()]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.3)
    bars = page.evaluate(
        "() => [...document.querySelectorAll('#labels button')].map((b) => Number(b.style.getPropertyValue('--share')))"
    )
    assert [100 * bar for bar in bars] == pytest.approx(shares, abs=0.11)  # shares below 0.1% are shown as "< 0.1%"
    assert page.locator("#unknown").is_hidden()
    assert page.locator("#file-name").text_content() == "bee.png"
    assert page.locator("[data-patch]").count() == 16
    assert "Nothing is stored." in page.locator("footer").text_content()


def image_with_set(running, size: int) -> tuple[bytes, list[str]]:
    """An in-distribution image whose prediction set has this many classes, and the classes."""
    url = f"{running.url}/v1/models/insects/predict"
    for seed in range(60):
        prediction = httpx.post(url, content=make_image(seed)).json()["predictions"][0]
        if not prediction["ood"] and len(prediction["prediction_set"]["labels"]) == size:
            return make_image(seed), prediction["prediction_set"]["labels"]
    raise AssertionError(f"no image with a set of {size} classes")


@pytest.mark.slow
def test_prediction_set_of_several_classes_is_shown(open_page, running):
    page = open_page()
    content, labels = image_with_set(running, 2)
    upload(page, content)
    wait_for_result(page)
    expect(page.locator("#prediction-set-labels")).to_have_text(f"One of: {', '.join(labels)}")
    expect(page.locator("#prediction-set-coverage")).to_contain_text("90%")
    page.click("#again")
    upload(page, image_with_set(running, 1)[0])
    wait_for_result(page)
    expect(page.locator("#prediction-set")).to_be_hidden()


@pytest.mark.slow
def test_multilabel_shows_thresholds_and_greys_absent_labels(open_page, running):
    image = make_image(1)
    labels = httpx.post(f"{running.url}/v1/models/things/predict", content=image).json()["predictions"][0]["labels"]
    page = open_page("things")
    expect(page.locator("#about")).to_contain_text("4 labels")
    upload(page, image)
    wait_for_result(page)
    assert page.locator("#labels .label").all_text_contents() == [label["name"] for label in labels]
    assert page.locator("#labels button.absent").count() == sum(not label["present"] for label in labels)
    expect(page.locator("#labels .share").first).to_contain_text("threshold")
    expect(page.locator("#calibration")).to_contain_text("any number of labels")
    upload(page, image, make_image(2))
    present = [label["name"] for label in labels if label["present"]]
    expect(page.locator("tbody tr td:nth-child(3)").first).to_have_text(", ".join(present) or "no label")


@pytest.mark.slow
def test_regression_shows_values_with_intervals_and_evidence_for_each_target(open_page, running):
    page = open_page("ages")
    expect(page.locator("#about")).to_contain_text("values: age, mass")
    upload(page, make_image(1))
    wait_for_result(page)
    url = f"{running.url}/v1/models/ages/predict"
    age, mass = httpx.post(url, content=make_image(1)).json()["predictions"][0]["values"]
    expected = f"{age['value']:.1f} ({age['low']:.1f} to {age['high']:.1f})"
    expect(page.locator("#labels .share").first).to_have_text(expected)
    expect(page.locator("#calibration")).to_contain_text("90%")
    page.locator("#labels button").nth(1).click()
    expect(page.locator("#caption")).to_contain_text("mass")
    page.click("#again")
    upload(page, make_image(1), make_image(2), b"not an image")
    expect(page.locator("#batch-title")).to_have_text("3 of 3 images")
    expect(page.locator("#confidence-title")).to_have_text("Prediction interval")
    assert f"age {age['value']:.1f}, mass {mass['value']:,.0f}" in page.locator("#rows tr").first.text_content()
    with page.expect_download() as event:
        page.click("#csv")
    rows = list(csv.DictReader(io.StringIO(Path(event.value.path()).read_text(encoding="utf-8-sig"))))
    assert [row["target"] for row in rows] == ["age", "mass", "age", "mass", ""]
    assert float(rows[1]["low"]) == pytest.approx(mass["low"])
    assert rows[4]["error"] == "not an image"


@pytest.mark.slow
def test_out_of_distribution_image_is_shown_as_unknown(open_page, running):
    page = open_page()
    upload(page, find_image(running, ood=True))
    wait_for_result(page)
    assert page.locator("#unknown h2").text_content() == "Unknown image"
    assert page.locator("#unknown").is_visible()


@pytest.mark.slow
def test_pointing_at_a_patch_shows_its_attention(open_page, running):
    page = open_page()
    upload(page, find_image(running))
    wait_for_result(page)
    plain = canvas_pixels(page)
    page.hover("[data-patch='5']")
    expect(page.locator("#caption")).to_contain_text(
        "Patch in row 2, column 2, block 2, mean of all heads: attends most to"
    )
    lit = canvas_pixels(page)
    assert lit != plain
    page.hover("[data-patch='10']")
    expect(page.locator("#caption")).to_contain_text("Patch in row 3, column 3")
    assert canvas_pixels(page) not in (plain, lit)
    page.mouse.move(1, 1)
    expect(page.locator("#caption")).to_contain_text("Point at a patch")
    assert canvas_pixels(page) == plain
    page.click("[data-patch='5']")
    page.locator("[data-patch='5']").blur()
    page.mouse.move(1, 1)
    assert canvas_pixels(page) == lit  # a click pins it
    assert page.locator("[data-patch='5']").get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_caption_equals_the_attention_of_the_server(open_page, running):
    page = open_page()
    content = find_image(running)
    upload(page, content)
    wait_for_result(page)
    response = httpx.post(f"{running.url}/v1/models/insects/explain?attention=true", content=content)
    packed = response.json()["attention"]
    values = np.frombuffer(base64.b64decode(packed["values"]), "u1").reshape(3, 2, 17, 16) / 255
    row_max = np.frombuffer(base64.b64decode(packed["row_max"]), "<u2").reshape(3, 2, 17, 1) / 65535
    weights = (values * row_max)[1].mean(axis=0)[1 + 6]  # block 2, mean of the heads, seventh patch
    best = int(weights.argmax())
    page.hover("[data-patch='6']")
    expected = f"row {best // 4 + 1}, column {best % 4 + 1} ({100 * weights[best]:.1f}%)"
    expect(page.locator("#caption")).to_contain_text(expected)


@pytest.mark.slow
def test_keyboard_reaches_every_patch(open_page, running):
    page = open_page()
    upload(page, find_image(running))
    wait_for_result(page)
    page.locator("#views input:checked").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.dataset.patch") == "0"
    assert page.locator("[data-patch][tabindex='0']").count() == 1
    for key, place in (("ArrowRight", 1), ("ArrowDown", 5), ("End", 7), ("Home", 4), ("PageDown", 12), ("ArrowUp", 8)):
        page.keyboard.press(key)
        assert page.evaluate("() => document.activeElement.dataset.patch") == str(place)
    page.keyboard.press("ArrowLeft")  # no patch there: focus stays
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "Patch in row 3, column 1"
    expect(page.locator("#announcement")).to_contain_text("Patch in row 3, column 1")  # for screen readers
    page.keyboard.press("Enter")
    assert page.locator("[data-patch='8']").get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    assert page.locator("[data-patch][aria-pressed='true']").count() == 0


@pytest.mark.slow
def test_sliders_select_blocks_and_heads(open_page, running):
    page = open_page()
    upload(page, find_image(running))
    wait_for_result(page)
    images = set()
    for block in (1, 2, 3):
        for head, head_name in ((0, "mean of all heads"), (1, "head 1"), (2, "head 2")):
            page.locator("#block").fill(str(block))
            page.locator("#head").fill(str(head))
            expect(page.locator("#caption")).to_contain_text(f"Class token, block {block}, {head_name}")
            images.add(canvas_pixels(page))
    assert len(images) == 9
    box = page.locator("#overview").bounding_box()
    page.mouse.click(box["x"] + 4, box["y"] + box["height"] - 4)  # first block, second head
    expect(page.locator("#caption")).to_contain_text("block 1, head 2")
    assert (page.locator("#block").input_value(), page.locator("#head").input_value()) == ("1", "2")
    assert page.locator("#from-class-token").get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_heatmaps_and_evidence_for_another_class(open_page, running):
    page = open_page()
    upload(page, find_image(running))
    wait_for_result(page)
    images = {canvas_pixels(page)}
    for view in ("rollout", "relevance", "gradcam"):
        page.locator(f"#views input[value='{view}']").check(force=True)
        expect(page.locator("#attention")).to_be_hidden()
        page.wait_for_selector("body:not(.busy)")
        images.add(canvas_pixels(page))
    assert len(images) == 4
    second = page.locator("#labels button").nth(1)
    name = second.locator(".label").text_content()
    page.locator("#views input[value='relevance']").check(force=True)
    page.wait_for_selector("body:not(.busy)")
    first = canvas_pixels(page)
    with page.expect_response("**/explain?**target=**"):
        second.click()
    expect(second).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#caption")).to_contain_text(f"Evidence for “{name}”")
    assert canvas_pixels(page) != first


def test_text_file_named_png_shows_an_error(open_page, running):
    page = open_page()
    upload(page, b"Dear diary, this is not an image.", names=("notes.png",))
    expect(page.locator("#error")).to_have_text("notes.png is not a readable image.")
    assert page.locator("#error").get_attribute("role") == "alert"
    upload(page, find_image(running))
    wait_for_result(page)
    assert page.locator("#error").is_hidden()


@pytest.mark.slow
def test_unreachable_server_shows_an_error(open_page, running):
    page = open_page()
    page.route("**/explain?**", lambda route: route.abort())
    upload(page, make_image())
    expect(page.locator("#error")).to_contain_text("The server does not respond")


@pytest.mark.slow
def test_drop_and_paste(open_page, running):
    page = open_page()
    content = list(find_image(running))
    events = """([content, kind]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(content)], "image.png", {type: "image/png"}));
        const event = kind === "drop" ? new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true})
                                      : new ClipboardEvent("paste", {clipboardData: data, bubbles: true});
        document.body.dispatchEvent(event);
    }"""
    page.evaluate(events, [content, "drop"])
    wait_for_result(page)
    assert page.locator("#file-name").text_content() == "image.png"
    page.click("#again")
    expect(page.locator("#start")).to_be_visible()
    page.evaluate(events, [content, "paste"])
    wait_for_result(page)
    assert page.locator("#file-name").text_content() == "pasted image"


def stroke(page, *points: tuple[int, int]) -> None:
    box = page.locator("#drawing-canvas").bounding_box()
    page.mouse.move(box["x"] + points[0][0], box["y"] + points[0][1])
    page.mouse.down()
    for x, y in points[1:]:
        page.mouse.move(box["x"] + x, box["y"] + y, steps=5)
    page.mouse.up()


@pytest.mark.slow
def test_drawing_is_light_on_dark_centred_and_classified_after_each_stroke(open_page, running):
    page = open_page()
    assert page.locator("#draw").is_hidden()  # only for greyscale models
    page.select_option("#model", "digits")
    page.click("#draw")
    with page.expect_response("**/digits/explain?**") as event:
        stroke(page, (20, 20), (90, 20), (50, 120))
    wait_for_result(page)
    assert page.locator("#drawing").is_visible()
    png = base64.b64decode(event.value.json()["image"]["png"])
    drawn = np.asarray(Image.open(io.BytesIO(png))).astype(float)
    ys, xs = np.mgrid[:28, :28] + 0.5
    assert drawn[0].max() == drawn[:, 0].max() == 0
    assert drawn.max() > 240
    assert (drawn * xs).sum() / drawn.sum() == pytest.approx(14, abs=0.5)
    assert (drawn * ys).sum() / drawn.sum() == pytest.approx(14, abs=0.5)
    assert np.ptp(np.flatnonzero(drawn.max(axis=1) > 60)) + 1 == pytest.approx(20, abs=1)
    with page.expect_response("**/digits/explain?**"):
        stroke(page, (120, 120), (150, 200))
    with page.expect_response("**/digits/explain?**"):
        page.uncheck("#centre")
    with page.expect_response("**/digits/explain?**"):
        page.click("#undo")
    page.click("#clear")
    expect(page.locator("#result")).to_be_hidden()


@pytest.mark.slow
def test_dark_on_light_image_can_be_inverted(open_page, running):
    paper = Image.new("L", (200, 200), 250)
    ImageDraw.Draw(paper).line((60, 40, 140, 160), fill=10, width=18)
    file = io.BytesIO()
    paper.save(file, format="PNG")
    page = open_page("digits")
    upload(page, file.getvalue())
    page.wait_for_selector("#inversion:not([hidden])")
    before = canvas_pixels(page)
    page.click("#invert")
    expect(page.locator("#inversion")).to_be_hidden()
    page.wait_for_selector("body:not(.busy)")
    assert canvas_pixels(page) != before


@pytest.mark.slow
def test_several_files_become_a_table_and_a_csv(open_page, running):
    page = open_page()
    contents = [make_image(seed) for seed in range(20)]
    contents[3] = b"not an image"
    names = [f"{index}.png" for index in range(20)]
    names[5] = '=1+1,"x".png'
    upload(page, *contents, names=tuple(names))
    expect(page.locator("#batch-title")).to_have_text("20 of 20 images")
    assert page.locator("#rows tr").count() == 20
    assert "3.png is not a readable image." in page.locator("#rows tr").nth(3).text_content()
    with page.expect_download() as event:
        page.click("#csv")
    text = Path(event.value.path()).read_text(encoding="utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["file"] for row in rows[:5]] == names[:5]
    assert rows[5]["file"] == "'" + names[5]  # a spreadsheet would evaluate it as a formula
    assert rows[3]["error"] == "not an image"
    for index in (0, 19):
        url = f"{running.url}/v1/models/insects/predict"
        prediction = httpx.post(url, content=contents[index]).json()["predictions"][0]
        assert rows[index]["label"] == prediction["labels"][0]["name"]
        assert float(rows[index]["probability"]) == pytest.approx(prediction["labels"][0]["probability"], abs=1e-5)
        assert rows[index]["ood"] == str(prediction["ood"]).lower()
        assert json.loads(rows[index]["prediction_set"]) == prediction["prediction_set"]["labels"]
        assert float(rows[index]["coverage"]) == 0.9
    page.locator(".thumbnail").first.click()
    wait_for_result(page)


@pytest.mark.slow
def test_korean_page_has_no_english_text(open_page, running):
    page = open_page(locale="ko-KR")
    assert page.locator("html").get_attribute("lang") == "ko"
    expect(page.locator("h1")).to_have_text("무엇으로 보일까요?")
    upload(page, find_image(running, ood=True))
    wait_for_result(page)
    assert page.locator("#unknown h2").text_content() == "모르는 이미지입니다"
    page.hover("[data-patch='5']")
    expect(page.locator("#caption")).to_contain_text("2행 2열 패치, 블록 2, 모든 헤드의 평균: 가장 많이 보는 곳은")
    assert "아무것도 저장하지 않습니다." in page.locator("footer").text_content()
    words = re.findall(r"[A-Za-z]{3,}", page.locator("main").inner_text())
    labels = page.evaluate("() => [...document.querySelectorAll('[aria-label]')].map((e) => e.ariaLabel)")
    words += re.findall(r"[A-Za-z]{3,}", " ".join(labels))
    assert set(words) <= {"png", "Grad", "CAM", "ant", "bee", "wasp"}
    page.click("#language")
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("#unknown h2").text_content() == "Unknown image"
    page.reload()
    page.wait_for_selector("body[data-ready]")
    expect(page.locator("h1")).to_have_text("What does the model see?")  # the choice is stored


def background(page) -> tuple[int, ...]:
    color = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    return tuple(int(part) for part in re.findall(r"\d+", color)[:3])


def contrast(page, selector: str) -> float:
    """WCAG contrast ratio of the text of an element and the page background."""
    color = page.evaluate("(s) => getComputedStyle(document.querySelector(s)).color", selector)

    def luminance(rgb) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance([int(p) for p in re.findall(r"\d+", color)[:3]]), luminance(background(page))])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
def test_both_themes_have_enough_contrast(open_page, running):
    for scheme, is_dark in (("light", False), ("dark", True)):
        page = open_page(color_scheme=scheme)
        assert (max(background(page)) < 60) == is_dark
        upload(page, find_image(running))
        wait_for_result(page)
        for selector in (
            ".caption",
            ".file-name",
            "#labels .label",
            "footer p",
            "#calibration",
            ".about",
            "#views span",
        ):
            assert contrast(page, selector) >= 4.5, selector
        page.click("#theme")
        assert (max(background(page)) < 60) != is_dark


@pytest.mark.slow
def test_phone_layout(open_page, running):
    size = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    page = open_page(**size)
    assert page.locator("#camera-field").is_visible()
    assert page.locator("#camera-input").get_attribute("capture") == "environment"
    upload(page, find_image(running))
    wait_for_result(page)
    page.tap("[data-patch='5']")
    expect(page.locator("#caption")).to_contain_text("Patch in row 2, column 2")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    viewer, prediction = (page.locator(selector).bounding_box() for selector in (".viewer", ".prediction"))
    assert prediction["y"] >= viewer["y"] + viewer["height"]  # one below the other
    for selector in ("#again", "#labels button", "#views label"):
        assert page.locator(selector).first.bounding_box()["height"] >= 39


def test_every_control_has_an_accessible_name(open_page, running):
    page = open_page()
    upload(page, find_image(running))
    wait_for_result(page)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, a, canvas:not([aria-hidden]), [role]")]
        .filter((e) => e.offsetParent && e.id !== "image-canvas")
        .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.[0]?.textContent.trim()
                         || e.getAttribute("aria-labelledby")))
        .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []


@pytest.mark.slow
def test_page_asks_for_the_api_key(browser, tmp_path):
    (tmp_path / "keys").write_text("# comment\nopen-sesame\n")
    with server(tiny_model(tmp_path / "tiny"), "--keys", tmp_path / "keys") as running:
        page = browser.new_page(locale="en-US")
        page.goto(running.url)
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "open-sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("body[data-ready]")
        page.close()


@pytest.mark.slow
def test_api_docs_are_rendered(open_page, running):
    page = open_page()
    page.goto(f"{running.url}/docs")
    expect(page.locator("summary")).to_have_count(7)
    expect(page.locator("#example")).to_contain_text("/v1/models/insects/predict")


def texts_by_language() -> dict[str, dict[str, str]]:
    source = (PAGE / "i18n.js").read_text(encoding="utf-8")
    blocks = re.findall(r"^  (\w+): \{\n(.*?)^  \},", source, flags=re.DOTALL | re.MULTILINE)
    return {
        language: dict(re.findall(r'^    "?([\w-]+)"?: "(.*)",', block, re.MULTILINE)) for language, block in blocks
    }


def test_languages_have_the_same_keys_and_placeholders():
    texts = texts_by_language()
    assert list(texts["en"]) == list(texts["ko"])
    for key, english in texts["en"].items():
        assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", texts["ko"][key])), key


def test_no_korean_particle_follows_a_bare_placeholder():
    """The right particle depends on the last sound of the inserted value, which is unknown."""
    particle = re.compile(r"\}(이|가|은|는|을|를|으로|로|와|과|라는|이라는)(?![가-힣])")
    for key, text in texts_by_language()["ko"].items():
        assert not particle.search(text), key


def test_every_text_is_used():
    sources = [path for path in PAGE.iterdir() if path.suffix in (".js", ".html") and path.name != "i18n.js"]
    used = "".join(path.read_text(encoding="utf-8") for path in sources)
    computed = re.compile(r"(view|hint)-(patches|rollout|relevance|gradcam)")
    for key in texts_by_language()["en"]:
        assert f'"{key}"' in used or computed.fullmatch(key), f"{key} is never used"


@pytest.mark.slow
def test_batch_table_shows_the_actual_error(open_page, running):
    page = open_page()
    busy = {"error": {"code": "too_many_requests", "message": "the queue is full"}}
    headers = {"Retry-After": "0"}
    page.route("**/predict?**", lambda route: route.fulfill(status=429, json=busy, headers=headers))
    upload(page, make_image(0), make_image(1), names=("a.png", "b.png"))
    expect(page.locator("#rows tr")).to_have_count(2)
    expect(page.locator("#rows .failed").first).to_have_text("The server is busy. Try again in a moment.")
    page.unroute("**/predict?**")
    errors = [
        {"code": "image_too_large", "message": "8000×8000"},
        {"code": "unreadable_image", "message": "not an image"},
    ]
    body = {"error": errors[0], "predictions": [{"file": "x", "error": error} for error in errors]}
    page.route("**/predict?**", lambda route: route.fulfill(status=422, json=body))
    upload(page, make_image(0), make_image(1), names=("a.png", "b.png"))
    expect(page.locator("#rows .failed").first).to_have_text("a.png is too large for this server.")
    expect(page.locator("#rows .failed").nth(1)).to_have_text("b.png is not a readable image.")


def test_all_labels_are_translated_when_the_language_changes(open_page):
    page = open_page()
    assert page.locator("#result").get_attribute("aria-label") == "Result"
    page.click("#language")
    assert page.locator("#result").get_attribute("aria-label") == "결과"


def test_page_files_refer_to_no_other_server():
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, path.name
        assert "https://" not in text, path.name
        assert "innerHTML" not in text, path.name


@pytest.mark.slow
def test_wheel_contains_the_page(tmp_path):
    import subprocess
    import sys
    import zipfile

    root = PAGE.parents[3]
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, root]
    subprocess.run(command, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {f"vitral/serve/page/{path.name}" for path in PAGE.iterdir()} <= set(names)
    assert json.dumps(names).count("serve/page/") == len(list(PAGE.iterdir()))
