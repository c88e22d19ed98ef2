"""Speed of the explorer's engine: forward passes in headless Chromium, in a Web Worker, as on the page.

    python benchmarks/explorer.py                                          # the bundled models
    python benchmarks/explorer.py mnist cifar10 vit_tiny.safetensors --passes 30

Times are those of the forward pass with all tensors kept. "interventions" switches off a head of the last block, which
runs that block again. Needs chromium and playwright.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _output import add_output_arguments, write_results
from vitral.explorer.build import model_names
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.browser import launch_browser
from support.explorer import decode, encode, write_engine_page

MEASURE = """\
async ([name, input, kernel, passes, warmups, interventions]) => {
  const model = kernel === "wasm" ? await open(name) : await openInJavaScript(name);
  if (model.kernel !== kernel) throw new Error(`expected ${kernel}, got ${model.kernel}`);
  const image = fromBase64(input), times = { forward: [], rerun: [], page: [] };
  for (let i = 0; i < passes + warmups; i++) {
    const start = performance.now();
    const trace = await model.run(image);
    const elapsed = performance.now() - start;
    const rerun = await model.run(image, interventions, trace);
    if (i < warmups) continue;
    times.forward.push(trace.ms);
    times.page.push(elapsed);
    times.rerun.push(rerun.ms);
  }
  const logits = toBase64((await model.run(image)).logits);
  model.close();
  delete models[name];
  return { times, logits };
}"""
WARMUPS = 3  # compilation of JavaScript and WebAssembly


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["bundled:mnist", "bundled:cifar10"])
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--kernels", nargs="+", default=["wasm", "javascript"])
    add_output_arguments(parser)
    args = parser.parse_args()
    names = model_names(args.models)
    predictors = {
        name: Predictor.load(source, device="cpu", engine="reference")
        for name, source in zip(names, args.models, strict=True)
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, launch_browser() as browser:
        page = browser.new_page()
        page.set_default_timeout(600_000)
        page.goto(write_engine_page(Path(folder), predictors).as_uri())
        for name, predictor in predictors.items():
            for kernel in args.kernels:
                rows += measure(page, name, predictor, kernel, args.passes, browser.version)
                write_results(args, rows, packages=("playwright",))


def measure(
    page: Any, name: str, predictor: Predictor, kernel: str, passes: int, chromium: str
) -> list[dict[str, Any]]:
    """One row per forward pass; prints mean and spread."""
    model = predictor.model
    assert isinstance(model, ViT)
    image = torch.randn(predictor.model_config.preprocessing.shape, generator=torch.Generator().manual_seed(0))
    last_head = {"headsOff": [f"{model.config.depth - 1}.0"]}
    result = page.evaluate(MEASURE, [name, encode(image.numpy()), kernel, passes, WARMUPS, last_head])
    with torch.no_grad():
        logits = model(image[None])[0].numpy()
    difference = float(np.abs(decode(result["logits"]) - logits).max())
    for what, times in result["times"].items():
        spread = f"mean {statistics.mean(times):.1f} ms ± {statistics.stdev(times):.1f}, min {min(times):.1f}"
        print(f"{name:<20} {kernel:<10} {what:<8} {spread}, max {max(times):.1f} (n = {len(times)})", flush=True)
    print(f"{name:<20} {kernel:<10} logits differ from PyTorch by at most {difference:.2g}", flush=True)
    return [
        {"model": name, "kernel": kernel, "chromium": chromium, "pass": index}
        | {f"{what}_ms": times[index] for what, times in result["times"].items()}
        | {"max_abs_logit_difference": difference}
        for index in range(passes)
    ]


if __name__ == "__main__":
    main()
