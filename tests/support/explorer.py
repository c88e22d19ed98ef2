"""The explorer's engine in a browser: a page without the user interface that exposes `loadModel`."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

from vitral.explorer.build import ExplorerOptions, site_model
from vitral.explorer.write import SITE_DIR, app_script, data_files
from vitral.inference.predictor import Predictor

MAIN = SITE_DIR / "engine" / "main.js"  # does not exist: its text follows
MAIN_TEXT = """\
import { loadModel } from "./engine.js";
import { preprocessPixels } from "./preprocess.js";
globalThis.preprocessPixels = preprocessPixels;
globalThis.toBase64 = (array) => {
  const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return btoa(text);
};
globalThis.fromBase64 = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
globalThis.models = {};
globalThis.loadEntry = (entry) => loadModel(entry);
globalThis.open = async (name) => {
  const entry = VITRAL_SITE.models.find((model) => model.name === name);
  return (globalThis.models[name] ??= await loadModel(entry));
};
globalThis.openEpoch = (name, index) => loadModel(VITRAL_SITE.models.find((model) => model.name === name), index);
globalThis.openInJavaScript = (name) => {
  const entry = VITRAL_SITE.models.find((model) => model.name === name);
  return loadModel(entry, entry.weights.length - 1, () => {}, "javascript");
};
"""
PAGE = '<!doctype html><meta charset="utf-8"><title>engine</title><script src="data/manifest.js"></script>'


def write_engine_page(folder: Path, models: dict[str, Predictor], options: ExplorerOptions | None = None) -> Path:
    """Write a page with these models and return its path."""
    site_models = [site_model(model, name, options or ExplorerOptions()) for name, model in models.items()]
    files = data_files(site_models) | {
        "app.js": app_script(MAIN, MAIN_TEXT),
        "index.html": f'{PAGE}<script src="app.js"></script>',
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "index.html"


def encode(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype="<f4").tobytes()).decode()


def decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<f4")


RUN = """\
async ([name, input, interventions, names, previous]) => {
  const model = await open(name);
  globalThis.traces ??= {};
  const trace = await model.run(fromBase64(input), interventions, previous ? traces[previous] : null);
  traces[name] = trace;
  const tensor = (path) => path.split(".").reduce((value, key) => value?.[key], trace);
  const encoded = (value) => (value instanceof Float32Array ? toBase64(value) : value);
  return Object.fromEntries(names.map((path) => [path, encoded(tensor(path))]));
}"""
RUN_IN_JAVASCRIPT = """\
async ([name, input]) => {
  const model = await openInJavaScript(name);
  if (model.kernel !== "javascript") throw new Error(model.kernel);
  return toBase64((await model.run(fromBase64(input))).logits);
}"""


class EnginePage:
    """Run models of an engine page."""

    def __init__(self, page) -> None:
        self.page = page

    def run(self, name: str, image, interventions=None, names=("logits",), previous: str | None = None) -> dict:
        """Tensors of a trace by name, as flat arrays; other values as they are."""
        arguments = [name, encode(np.asarray(image)), interventions or {}, list(names), previous]
        values = self.page.evaluate(RUN, arguments)
        return {key: decode(value) if isinstance(value, str) else value for key, value in values.items()}

    def run_with_javascript(self, name: str, image) -> np.ndarray:
        """Logits computed without WebAssembly."""
        return decode(self.page.evaluate(RUN_IN_JAVASCRIPT, [name, encode(np.asarray(image))]))
