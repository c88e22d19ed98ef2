"""Chromium for tests of web pages.

Without it these tests are skipped; with VITRAL_NEEDS_CHROMIUM=1 they fail. CHROMIUM overrides the program's path.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM_ARGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@contextmanager
def launch_browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        if os.environ.get("VITRAL_NEEDS_CHROMIUM"):
            pytest.fail("chromium not found, but VITRAL_NEEDS_CHROMIUM is set")
        pytest.skip("chromium not found (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(CHROMIUM_ARGS), timeout=120_000)
        yield browser
        browser.close()
