"""The page of a report: one self-contained HTML file, with light and dark theme.

Everything from outside, such as class names and commands, is escaped. The Content-Security-Policy allows only the
page's own style and script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from vitral import __version__
from vitral.evaluation.leaks import LeakReport, evaluation_warning, new_images_text
from vitral.reporting.html.markup import json_for_script, text


def render_page(
    title: str, sections: Sequence[tuple[str, str, str]], header: str, script_data: dict[str, Any] | None = None
) -> str:
    """The complete page.

    Args:
        title: heading and title of the page.
        sections: id, title and HTML of each section; those without content are left out.
        header: HTML below the heading.
        script_data: what report.js works with; without it the page has no script.
    """
    style, script = (
        files("vitral.reporting.html").joinpath("page", name).read_text("utf-8") for name in ("report.css", "report.js")
    )
    scripts = (
        ""
        if script_data is None
        else f'<script type="application/json" id="report-data">{json_for_script(script_data)}</script>'
        f"<script>{script}</script>"
    )
    present = [section for section in sections if section[2]]
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in present)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{heading}</h2>{content}</section>'
        for name, heading, content in present
    )
    policy = (
        f"default-src 'none'; img-src data:; style-src '{csp_hash(style)}'; script-src '{csp_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{text(title)}</title>'
        f"<style>{style}</style></head><body>"
        f"<header><h1>{text(title)}</h1>{header}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header><main>{body}</main>'
        f"<footer>vitral {__version__}. This file is self-contained.</footer>"
        f"{scripts}</body></html>\n"
    )


def csp_hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def figure_boxes(boxes: Sequence[tuple[str, str]]) -> str:
    """The most important figures, each with its label, below the title."""
    items = "".join(f"<div><b>{text(value)}</b><span>{text(label)}</span></div>" for value, label in boxes)
    return f'<div class="key-figures">{items}</div>'


def leak_banner(leak: LeakReport | None) -> str:
    """A warning above the figures if evaluated images were used for training."""
    warning = evaluation_warning(leak)
    if leak is None or warning is None:
        return ""
    sentences = [f"{warning[0].upper()}{warning[1:]}.", new_images_text(leak)]
    return f'<p class="warning" role="alert">{text(" ".join(filter(None, sentences)))}</p>'
