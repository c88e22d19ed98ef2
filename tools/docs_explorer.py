"""mkdocs hook: write the explorer of the bundled MNIST model next to the page that embeds it."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from vitral.explorer.build import ExplorerOptions, site_model
from vitral.explorer.write import site_files
from vitral.inference.predictor import Predictor


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the site below explorer/."""
    predictor = Predictor.load("bundled:mnist", device="cpu", engine="reference")
    for name, text in site_files([site_model(predictor, "mnist", ExplorerOptions())]).items():
        files.append(File.generated(config, str(Path("explorer") / name), content=text))
    return files
