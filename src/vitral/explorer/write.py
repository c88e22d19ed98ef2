"""Write the site."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral import __version__
from vitral.errors import VitralError, error_reason
from vitral.explorer.bundle import bundle_modules
from vitral.explorer.manifest import model_entry
from vitral.explorer.weights import EncodedWeights
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT
from vitral.reporting.walk.texts import CAPTIONS, PAGE_TEXTS, STEP_TEXTS
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json

SITE_DIR = (Path(__file__).parent / "site").resolve()
SHARED_MODULES = {SITE_DIR / "page": SITE_DIR.parents[1] / "serve" / "page"}  # of the server's page, used by ui/
MODULE_SCRIPT = '<script type="module" src="ui/main.js"></script>'
CLASSIC_SCRIPT = '<script defer src="app.js"></script>'


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelWeights:
    """Weights of one epoch."""

    epoch: int | None
    weights: EncodedWeights


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteModel:
    """A model of the site."""

    name: str
    predictor: Predictor
    weights: tuple[ModelWeights, ...]  # in the order of training; the last are those of the finished model
    examples: tuple[dict[str, Any], ...] = ()
    faithfulness: dict[str, Any] | None = None

    @property
    def model(self) -> ViT:
        assert isinstance(self.predictor.model, ViT)  # checked by check_supported
        return self.predictor.model


def write_site(models: Sequence[SiteModel], out: Path) -> int:
    """Write the site into `out` and return its size in bytes. Files of the same names are replaced."""
    files = site_files(models)
    try:
        for name, text in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_write(out / name, text)
    except OSError as error:
        raise VitralError(f"cannot write {out}: {error_reason(error)}", "Choose another --out") from error
    return sum(len(text.encode()) for text in files.values())


def site_files(models: Sequence[SiteModel]) -> dict[str, str]:
    """The text of each file by its path in the site."""
    page = (SITE_DIR / "index.html").read_text(encoding="utf-8")
    return {
        "index.html": page.replace(MODULE_SCRIPT, CLASSIC_SCRIPT),
        "app.js": app_script(),
        **{path.name: path.read_text(encoding="utf-8") for path in SITE_DIR.glob("*.css")},
        **data_files(models),
    }


def data_files(models: Sequence[SiteModel]) -> dict[str, str]:
    """The manifest, and one script of weights per model and epoch."""
    files: dict[str, str] = {}
    entries = []
    for model in models:
        weights = []
        for index, each in enumerate(model.weights):
            url = f"weights/{slug(model.name)}{f'-{index}' if index < len(model.weights) - 1 else ''}.js"
            files[url] = f'VITRAL_RECEIVE({dump_json(url)}, "{each.weights.text}");\n'
            weights.append(
                {"epoch": each.epoch, "url": url, "precision": each.weights.precision, "layout": each.weights.layout}
            )
        entry = model_entry(model.predictor, model.name)
        extra = {"weights": weights, "examples": list(model.examples), "faithfulness": model.faithfulness}
        entries.append(entry | extra)
    walk = {
        lang: {"steps": STEP_TEXTS[lang], "captions": CAPTIONS[lang], "page": PAGE_TEXTS[lang]} for lang in STEP_TEXTS
    }
    site = {"version": __version__, "walk": walk, "models": entries}
    files["data/manifest.js"] = f"globalThis.VITRAL_SITE = {dump_json(site, ensure_ascii=False)};\n"
    return files


def app_script(main: Path = SITE_DIR / "ui" / "main.js", main_text: str | None = None) -> str:
    """The page's code with the worker's code as a string inside. `main_text` replaces the text of `main`."""
    engine = SITE_DIR / "engine"
    worker = bundle_modules(engine / "worker.js")
    replaced = {engine / "worker_source.js": f"export const WORKER_SOURCE = {dump_json(worker, ensure_ascii=False)};\n"}
    replaced |= {main: main_text} if main_text is not None else {}
    return bundle_modules(main, replaced, SHARED_MODULES)


def slug(name: str) -> str:
    """A name that is safe in a file name and in a URL."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"
