"""vitral: a Vision Transformer workshop.

    import vitral
    model = vitral.train("mnist", recipe="mnist-quick", quiet=False)
    model.predict("seven.png").best

Everything is looked up when first used: `import vitral` is quick and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitral.lazy import lazily

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vitral import data as data
    from vitral import explain as explain
    from vitral import weights as weights
    from vitral.errors import VitralError as VitralError
    from vitral.predict import Predictor as Predictor
    from vitral.presets import preset as preset
    from vitral.report.publish import push as push
    from vitral.training.recipe import Recipe as Recipe
    from vitral.vit import ViT as ViT
    from vitral.vit import ViTConfig as ViTConfig
    from vitral.workshop import calibrate as calibrate
    from vitral.workshop import compare as compare
    from vitral.workshop import compare_models as compare_models
    from vitral.workshop import demo as demo
    from vitral.workshop import embed as embed
    from vitral.workshop import evaluate as evaluate
    from vitral.workshop import load as load
    from vitral.workshop import probe as probe
    from vitral.workshop import report as report
    from vitral.workshop import train as train

_LIVES_IN = {
    "VitralError": "errors",
    "Predictor": "predict",
    "preset": "presets",
    "Recipe": "training.recipe",
    "ViT": "vit",
    "ViTConfig": "vit",
    "calibrate": "workshop",
    "compare": "workshop",
    "compare_models": "workshop",
    "demo": "workshop",
    "embed": "workshop",
    "evaluate": "workshop",
    "load": "workshop",
    "push": "report.publish",
    "probe": "workshop",
    "report": "workshop",
    "train": "workshop",
}
_PACKAGES = ("data", "explain", "weights")
__all__ = ["__version__", *_PACKAGES, *_LIVES_IN]
__getattr__, __dir__ = lazily(__name__, _LIVES_IN, _PACKAGES)
