"""The public Python API. The command line calls these functions; `import vitral` exports most of them.

    import vitral
    model = vitral.train("photos/", recipe="folder-finetune", init_from="vit.safetensors")
    model.predict("bottle.jpg").best
    vitral.evaluate(model).top1

Wherever a function takes a model, it accepts a run folder, a model folder, a checkpoint file of another library,
`hf:owner/name`, the name of a bundled model, or a `Predictor`. Each module is imported when one of its functions is
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitral.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitral.api.cross_validation import cross_validate as cross_validate
    from vitral.api.deployment import explorer as explorer
    from vitral.api.deployment import export as export
    from vitral.api.deployment import push as push
    from vitral.api.distillation import distill as distill
    from vitral.api.evaluation import calibrate as calibrate
    from vitral.api.evaluation import compare_models as compare_models
    from vitral.api.evaluation import evaluate as evaluate
    from vitral.api.evaluation import probe as probe
    from vitral.api.evaluation import report as report
    from vitral.api.inference import bench as bench
    from vitral.api.inference import embed as embed
    from vitral.api.inference import load as load
    from vitral.api.inference import load_bench as load_bench
    from vitral.api.inference import reset_bench as reset_bench
    from vitral.api.label_efficiency import compare_label_efficiency as compare_label_efficiency
    from vitral.api.pretraining import pretrain as pretrain
    from vitral.api.training import compare as compare
    from vitral.api.training import demo as demo
    from vitral.api.training import find_lr as find_lr
    from vitral.api.training import train as train

MODULE_OF = {
    "train": "training",
    "find_lr": "training",
    "compare": "training",
    "demo": "training",
    "cross_validate": "cross_validation",
    "pretrain": "pretraining",
    "distill": "distillation",
    "load": "inference",
    "embed": "inference",
    "bench": "inference",
    "load_bench": "inference",
    "reset_bench": "inference",
    "evaluate": "evaluation",
    "compare_models": "evaluation",
    "calibrate": "evaluation",
    "report": "evaluation",
    "probe": "evaluation",
    "compare_label_efficiency": "label_efficiency",
    "export": "deployment",
    "explorer": "deployment",
    "push": "deployment",
}
__all__ = [*MODULE_OF]
__getattr__, __dir__ = lazy_attributes(__name__, MODULE_OF)
