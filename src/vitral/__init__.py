"""Vision Transformers in PyTorch: train, evaluate, explain and deploy.

    import vitral
    model = vitral.train("photos/", recipe="folder-finetune", epochs=20)
    model.predict("bottle.jpg").best

Names are imported when they are first used, so `import vitral` is fast and does not import torch. The functions are
documented in `vitral.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitral.api import MODULE_OF as API_MODULE_OF
from vitral.utils.lazy import lazy_attributes

__version__ = "0.2.0"

if TYPE_CHECKING:
    from vitral import data as data
    from vitral import explain as explain
    from vitral import weights as weights
    from vitral.api import bench as bench
    from vitral.api import calibrate as calibrate
    from vitral.api import compare as compare
    from vitral.api import compare_label_efficiency as compare_label_efficiency
    from vitral.api import compare_models as compare_models
    from vitral.api import cross_validate as cross_validate
    from vitral.api import demo as demo
    from vitral.api import distill as distill
    from vitral.api import embed as embed
    from vitral.api import evaluate as evaluate
    from vitral.api import find_lr as find_lr
    from vitral.api import load as load
    from vitral.api import pretrain as pretrain
    from vitral.api import probe as probe
    from vitral.api import push as push
    from vitral.api import report as report
    from vitral.api import train as train
    from vitral.errors import VitralError as VitralError
    from vitral.inference.predictor import Predictor as Predictor
    from vitral.models.presets import preset as preset
    from vitral.models.vit import ViT as ViT
    from vitral.models.vit import ViTConfig as ViTConfig
    from vitral.recipes.checkpoint_options import CheckpointOptions as CheckpointOptions
    from vitral.recipes.schema import Recipe as Recipe

_IN_API_ONLY = ("load_bench", "reset_bench", "export", "explorer")  # the last two are packages here
_MODULE_OF = {
    "CheckpointOptions": "recipes.checkpoint_options",
    "VitralError": "errors",
    "Predictor": "inference.predictor",
    "preset": "models.presets",
    "Recipe": "recipes.schema",
    "ViT": "models.vit",
    "ViTConfig": "models.vit",
} | {name: f"api.{module}" for name, module in API_MODULE_OF.items() if name not in _IN_API_ONLY}
_PACKAGES = ("data", "explain", "weights")
__all__ = ["__version__", *_PACKAGES, *_MODULE_OF]
_RIGHT_CALLS = {
    "Model": "vitral.load(MODEL)",
    "create_model": 'vitral.ViT.from_preset("Ti/16"), or vitral.load(MODEL) for a trained model',
    "export": "vitral.api.export(MODEL)",
    "fit": "vitral.train(DATA)",
    "predict": "vitral.load(MODEL).predict(IMAGE)",
}
__getattr__, __dir__ = lazy_attributes(__name__, _MODULE_OF, _PACKAGES, _RIGHT_CALLS)
