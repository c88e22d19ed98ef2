"""The page, in a real browser: every way in, every way to look, in two languages, two lights and two sizes.

Chromium is needed. Where it is missing these tests are skipped, and say so; with VITRAL_NEEDS_CHROMIUM=1 they fail.
VITRAL_PICTURES=folder keeps screenshots for people to look at.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import expect, sync_playwright

from support.served import make_image, server, tiny_model

expect.set_options(timeout=60_000)
PAGE = Path(__file__).parents[2] / "src" / "vitral" / "serve" / "page"
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    insects = tiny_model(place / "insects", ood_threshold=6.0)
    digits = tiny_model(place / "digits", channels=1, size=28, mean=0.13)
    with server(insects, digits) as process:
        yield process


@pytest.fixture(scope="module")
def browser():
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        if os.environ.get("VITRAL_NEEDS_CHROMIUM"):
            pytest.fail("chromium is missing, and VITRAL_NEEDS_CHROMIUM says that it must be there")
        pytest.skip("no chromium: the page is not tested (apt-get install chromium)")
    with sync_playwright() as play:
        launched = play.chromium.launch(executable_path=program, args=list(SWITCHES))
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser, running, request):
    """`open_page(model=…, locale=…)`: the page, ready. At the end: no error in it, and nothing fetched elsewhere."""
    contexts, troubles = [], []

    def opened(model: str = "insects", locale: str = "en-US", **settings):
        settings = {"viewport": {"width": 1200, "height": 860}} | settings
        context = browser.new_context(locale=locale, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if expected_not(said) else None)
        page.on("request", lambda asked: troubles.append(asked.url) if foreign(asked.url) else None)
        page.goto(running.url)
        page.wait_for_selector("body[data-ready]")
        if model != "insects":
            page.select_option("#model", model)
        return page

    def expected_not(said) -> bool:
        told = ("the server responded with a status of 4", "net::ERR_FAILED")  # the page tells of these itself
        return said.type == "error" and not any(text in said.text for text in told)

    def foreign(url: str) -> bool:
        return not url.startswith((running.url, "blob:", "data:"))

    yield opened
    if folder := os.environ.get("VITRAL_PICTURES"):
        Path(folder).mkdir(exist_ok=True)
        for number, context in enumerate(contexts):
            context.pages[0].screenshot(path=f"{folder}/{request.node.name}-{number}.png", full_page=True)
    for context in contexts:
        context.close()
    assert troubles == []


def upload(page, *contents: bytes, names: tuple[str, ...] = ()) -> None:
    names = names or tuple(f"{index}.png" for index in range(len(contents)))
    files = [{"name": n, "mimeType": "image/png", "buffer": c} for n, c in zip(names, contents, strict=True)]
    page.set_input_files("#choose", files)


def seen(page) -> None:
    page.wait_for_selector("#seen:not([hidden]) [data-patch]")


def shown(page) -> str:
    """What the window's canvas shows."""
    return page.evaluate("() => document.getElementById('pane').toDataURL()")


def known(running, unknown: bool = False) -> bytes:
    """A picture the model does not call unknown."""
    address = f"{running.url}/v1/models/insects/predict"
    asked = (make_image(seed) for seed in range(30))
    return next(c for c in asked if httpx.post(address, content=c).json()["answers"][0]["unknown"] == unknown)


def strange(running) -> bytes:
    return known(running, unknown=True)


def test_an_uploaded_image_gets_ranked_labels_with_bars(open_page, running):
    page = open_page()
    content = known(running)
    upload(page, content, names=("bee.png",))
    seen(page)
    labels = page.locator("#labels .label").all_text_contents()
    assert sorted(labels) == sorted(["ant", "bee", "<b>wasp</b>", "나비"])  # as text: a name is no HTML
    shares = [float(re.sub(r"[^\d.]", "", text)) for text in page.locator("#labels .share").all_text_contents()]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.3)
    bars = page.evaluate(
        "() => [...document.querySelectorAll('#labels button')].map((b) => Number(b.style.getPropertyValue('--share')))"
    )
    assert [100 * bar for bar in bars] == pytest.approx(shares, abs=0.11)  # “< 0.1 %” is the least that is said
    assert page.locator("#unknown").is_hidden()
    assert page.locator("#name").text_content() == "bee.png"
    assert page.locator("[data-patch]").count() == 16
    assert "Nothing is stored." in page.locator("footer").text_content()


def test_an_unknown_image_is_called_that(open_page, running):
    page = open_page()
    upload(page, strange(running))
    seen(page)
    assert page.locator("#unknown h2").text_content() == "I don't know this"
    assert page.locator("#unknown").is_visible()


def test_pointing_at_a_patch_shows_where_it_looks(open_page, running):
    page = open_page()
    upload(page, known(running))
    seen(page)
    plain = shown(page)
    page.hover("[data-patch='5']")
    expect(page.locator("#caption")).to_contain_text("From row 2, column 2, layer 2, mean of all heads: mostly")
    lit = shown(page)
    assert lit != plain
    page.hover("[data-patch='10']")
    expect(page.locator("#caption")).to_contain_text("From row 3, column 3")
    assert shown(page) not in (plain, lit)
    page.mouse.move(1, 1)
    expect(page.locator("#caption")).to_contain_text("Point at a patch")
    assert shown(page) == plain
    page.click("[data-patch='5']")
    page.locator("[data-patch='5']").blur()
    page.mouse.move(1, 1)
    assert shown(page) == lit  # a click holds it
    assert page.locator("[data-patch='5']").get_attribute("aria-pressed") == "true"


def test_what_is_shown_is_what_the_server_sent(open_page, running):
    """The caption's figures, computed again from the answer."""
    page = open_page()
    content = known(running)
    upload(page, content)
    seen(page)
    sent = httpx.post(f"{running.url}/v1/models/insects/explain?attention=true", content=content).json()["attention"]
    levels = np.frombuffer(base64.b64decode(sent["levels"]), "u1").reshape(3, 2, 17, 16) / 255
    peaks = np.frombuffer(base64.b64decode(sent["peaks"]), "<u2").reshape(3, 2, 17, 1) / 65535
    shares = (levels * peaks)[1].mean(axis=0)[1 + 6]  # layer 2, mean of the heads, the seventh patch
    best = int(shares.argmax())
    page.hover("[data-patch='6']")
    said = f"row {best // 4 + 1}, column {best % 4 + 1} ({100 * shares[best]:.1f}\u00a0%)"
    expect(page.locator("#caption")).to_contain_text(said)


def test_the_keyboard_reaches_every_patch(open_page, running):
    page = open_page()
    upload(page, known(running))
    seen(page)
    page.locator("#views input:checked").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.dataset.patch") == "0"
    assert page.locator("[data-patch][tabindex='0']").count() == 1
    for key, place in (("ArrowRight", 1), ("ArrowDown", 5), ("End", 7), ("Home", 4), ("PageDown", 12), ("ArrowUp", 8)):
        page.keyboard.press(key)
        assert page.evaluate("() => document.activeElement.dataset.patch") == str(place)
    page.keyboard.press("ArrowLeft")  # there is none: it stays
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "Patch in row 3, column 1"
    expect(page.locator("#spoken")).to_contain_text("From row 3, column 1")  # for screen readers
    page.keyboard.press("Enter")
    assert page.locator("[data-patch='8']").get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    assert page.locator("[data-patch][aria-pressed='true']").count() == 0


def test_sliders_move_through_layers_and_heads(open_page, running):
    page = open_page()
    upload(page, known(running))
    seen(page)
    pictures = set()
    for layer in (1, 2, 3):
        for head, said in ((0, "mean of all heads"), (1, "head 1"), (2, "head 2")):
            page.locator("#layer").fill(str(layer))
            page.locator("#head").fill(str(head))
            expect(page.locator("#caption")).to_contain_text(f"From the class token, layer {layer}, {said}")
            pictures.add(shown(page))
    assert len(pictures) == 9
    box = page.locator("#whole").bounding_box()
    page.mouse.click(box["x"] + 4, box["y"] + box["height"] - 4)  # the first layer's second head
    expect(page.locator("#caption")).to_contain_text("layer 1, head 2")
    assert (page.locator("#layer").input_value(), page.locator("#head").input_value()) == ("1", "2")
    assert page.locator("#from-class").get_attribute("aria-pressed") == "true"


def test_overlays_and_what_speaks_for_another_answer(open_page, running):
    page = open_page()
    upload(page, known(running))
    seen(page)
    pictures = {shown(page)}
    for view in ("rollout", "relevance", "gradcam"):
        page.locator(f"#views input[value='{view}']").check(force=True)
        expect(page.locator("#inside")).to_be_hidden()
        page.wait_for_selector("body:not(.waiting)")
        pictures.add(shown(page))
    assert len(pictures) == 4
    second = page.locator("#labels button").nth(1)
    name = second.locator(".label").text_content()
    page.locator("#views input[value='relevance']").check(force=True)
    page.wait_for_selector("body:not(.waiting)")
    first = shown(page)
    with page.expect_response("**/explain?**target=**"):
        second.click()
    expect(second).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#caption")).to_contain_text(f"What speaks for “{name}”")
    assert shown(page) != first


def test_a_text_file_called_png_gets_a_sentence(open_page, running):
    page = open_page()
    upload(page, b"Dear diary, this is not a picture.", names=("notes.png",))
    expect(page.locator("#trouble")).to_have_text("notes.png is not an image that can be read here.")
    assert page.locator("#trouble").get_attribute("role") == "alert"
    upload(page, known(running))
    seen(page)
    assert page.locator("#trouble").is_hidden()


def test_a_server_that_is_gone_gets_a_sentence(open_page, running):
    page = open_page()
    page.route("**/explain?**", lambda route: route.abort())
    upload(page, make_image())
    expect(page.locator("#trouble")).to_contain_text("The server does not answer")


def test_drop_and_paste(open_page, running):
    page = open_page()
    content = list(known(running))
    events = """([content, kind]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(content)], "image.png", {type: "image/png"}));
        const event = kind === "drop" ? new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true})
                                      : new ClipboardEvent("paste", {clipboardData: data, bubbles: true});
        document.body.dispatchEvent(event);
    }"""
    page.evaluate(events, [content, "drop"])
    seen(page)
    assert page.locator("#name").text_content() == "image.png"
    page.click("#again")
    expect(page.locator("#ask")).to_be_visible()
    page.evaluate(events, [content, "paste"])
    seen(page)
    assert page.locator("#name").text_content() == "pasted image"


def stroke(page, *places: tuple[int, int]) -> None:
    box = page.locator("#ink").bounding_box()
    page.mouse.move(box["x"] + places[0][0], box["y"] + places[0][1])
    page.mouse.down()
    for x, y in places[1:]:
        page.mouse.move(box["x"] + x, box["y"] + y, steps=5)
    page.mouse.up()


def test_drawing_is_white_on_black_in_the_middle_and_answered_after_each_stroke(open_page, running):
    page = open_page()
    assert page.locator("#draw").is_hidden()  # for models with one channel
    page.select_option("#model", "digits")
    page.click("#draw")
    with page.expect_response("**/digits/explain?**") as caught:
        stroke(page, (20, 20), (90, 20), (50, 120))
    seen(page)
    assert page.locator("#drawing").is_visible()
    png = base64.b64decode(caught.value.json()["image"]["png"])
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
    expect(page.locator("#seen")).to_be_hidden()


def test_ink_on_paper_is_offered_to_be_inverted(open_page, running):
    paper = Image.new("L", (200, 200), 250)
    ImageDraw.Draw(paper).line((60, 40, 140, 160), fill=10, width=18)
    file = io.BytesIO()
    paper.save(file, format="PNG")
    page = open_page("digits")
    upload(page, file.getvalue())
    page.wait_for_selector("#inversion:not([hidden])")
    before = shown(page)
    page.click("#invert")
    expect(page.locator("#inversion")).to_be_hidden()
    page.wait_for_selector("body:not(.waiting)")
    assert shown(page) != before


def test_many_files_become_a_table_and_a_csv(open_page, running):
    page = open_page()
    contents = [make_image(seed) for seed in range(20)]
    contents[3] = b"not an image"
    names = [f"{index}.png" for index in range(20)]
    names[5] = '=1+1,"x".png'
    upload(page, *contents, names=tuple(names))
    expect(page.locator("#many-title")).to_have_text("20 of 20 images")
    assert page.locator("#rows tr").count() == 20
    assert "not an image" in page.locator("#rows tr").nth(3).text_content()
    with page.expect_download() as caught:
        page.click("#csv")
    text = Path(caught.value.path()).read_text(encoding="utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["file"] for row in rows[:5]] == names[:5]
    assert rows[5]["file"] == "'" + names[5]  # a spreadsheet would compute it
    assert rows[3]["error"] == "not an image"
    for index in (0, 19):
        reply = httpx.post(f"{running.url}/v1/models/insects/predict", content=contents[index]).json()["answers"][0]
        assert rows[index]["label"] == reply["labels"][0]["name"]
        assert float(rows[index]["probability"]) == pytest.approx(reply["labels"][0]["probability"], abs=1e-5)
        assert rows[index]["unknown"] == str(reply["unknown"]).lower()
    page.locator(".thumb").first.click()
    seen(page)


def test_korean(open_page, running):
    page = open_page(locale="ko-KR")
    assert page.locator("html").get_attribute("lang") == "ko"
    expect(page.locator("h1")).to_have_text("무엇으로 보일까요?")
    upload(page, strange(running))
    seen(page)
    assert page.locator("#unknown h2").text_content() == "모르는 이미지예요"
    page.hover("[data-patch='5']")
    expect(page.locator("#caption")).to_contain_text("2행 2열에서")
    assert "아무것도 저장하지 않습니다." in page.locator("footer").text_content()
    english = re.compile(r"[A-Za-z]{3,}")
    left = [
        w for w in english.findall(page.locator("main").inner_text()) if w not in ("png", "Grad", "CAM", "ant", "bee")
    ]
    assert not [word for word in left if word != "wasp"]
    page.click("#language")
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("#unknown h2").text_content() == "I don't know this"
    page.reload()
    page.wait_for_selector("body[data-ready]")
    expect(page.locator("h1")).to_have_text("What does it see?")  # the choice is kept


def ground(page) -> tuple[int, ...]:
    color = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    return tuple(int(part) for part in re.findall(r"\d+", color)[:3])


def contrast(page, selector: str) -> float:
    """WCAG's ratio of an element's text to the page's ground."""
    color = page.evaluate("(s) => getComputedStyle(document.querySelector(s)).color", selector)

    def bright(rgb) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([bright([int(p) for p in re.findall(r"\d+", color)[:3]]), bright(ground(page))])
    return (high + 0.05) / (low + 0.05)


def test_light_and_dark(open_page, running):
    for scheme, is_dark in (("light", False), ("dark", True)):
        page = open_page(color_scheme=scheme)
        assert (max(ground(page)) < 60) == is_dark
        upload(page, known(running))
        seen(page)
        for selector in (".caption", ".name", "#labels .label", "footer p", "#calibrated", ".about", "#views span"):
            assert contrast(page, selector) >= 4.5, selector
        page.click("#theme")
        assert (max(ground(page)) < 60) != is_dark


def test_on_a_phone(open_page, running):
    size = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    page = open_page(**size)
    assert page.locator("#photograph-field").is_visible()
    assert page.locator("#photograph").get_attribute("capture") == "environment"
    upload(page, known(running))
    seen(page)
    page.tap("[data-patch='5']")
    expect(page.locator("#caption")).to_contain_text("From row 2, column 2")
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 360
    glass, answer = (page.locator(s).bounding_box() for s in (".glass", ".answer"))
    assert answer["y"] >= glass["y"] + glass["height"]  # one below the other
    for selector in ("#again", "#labels button", "#views label"):
        assert page.locator(selector).first.bounding_box()["height"] >= 39


def test_everything_that_can_be_used_has_a_name(open_page, running):
    page = open_page()
    upload(page, known(running))
    seen(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, a, canvas:not([aria-hidden]), [role]")]
        .filter((e) => e.offsetParent && e.id !== "pane")
        .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.[0]?.textContent.trim()
                         || e.getAttribute("aria-labelledby")))
        .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert nameless == []


@pytest.mark.slow
def test_a_key_is_asked_for(browser, tmp_path):
    (tmp_path / "keys").write_text("# mine\nopen-sesame\n")
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


def test_the_description_for_programs_is_drawn_without_help(open_page, running):
    page = open_page()
    page.goto(f"{running.url}/docs")
    expect(page.locator("summary")).to_have_count(7)
    expect(page.locator("#example")).to_contain_text(
        "/v1/models/insects/predict"
    )  # its names are fetched after the list


def test_both_languages_say_everything_and_nothing_else():
    words = (PAGE / "words.js").read_text(encoding="utf-8")
    blocks = re.findall(r"^  (\w+): \{\n(.*?)^  \},", words, flags=re.DOTALL | re.MULTILINE)
    keys = {language: re.findall(r'^    "?([\w-]+)"?: "', block, flags=re.MULTILINE) for language, block in blocks}
    holes = {}
    for language, block in blocks:
        said = re.findall(r'"?([\w-]+)"?: "(.*)",', block)
        holes[language] = {key: set(re.findall(r"\{(\w+)\}", text)) for key, text in said}
    assert keys["en"] == keys["ko"]
    assert holes["en"] == holes["ko"]
    used = "".join(path.read_text(encoding="utf-8") for path in PAGE.iterdir() if path.suffix in (".js", ".html"))
    used = used.replace(words, "")
    computed = re.compile(r"(view|hint)-(patches|rollout|relevance|gradcam)")
    kinds = {"bad-image", "too-large", "busy", "away", "failed"}
    for key in keys["en"]:
        assert f'"{key}"' in used or computed.fullmatch(key) or key in kinds, f"{key} is never said"


def test_the_page_names_no_other_place():
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, path.name
        assert "https://" not in text, path.name
        assert "innerHTML" not in text, path.name


@pytest.mark.slow
def test_the_wheel_holds_the_page(tmp_path):
    import subprocess
    import sys
    import zipfile

    root = PAGE.parents[3]
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, root]
    subprocess.run(command, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {f"vitral/serve/page/{path.name}" for path in PAGE.iterdir()} <= set(names)
    assert json.dumps(names).count("serve/page/") == len(list(PAGE.iterdir()))
