"""Report which of timm's registered architectures vitral reads, and why it refuses the others.

PYTHONPATH=benchmarks python tools/timm_coverage.py [PATTERN ...]

Models are built with two blocks on the meta device; their tensors are zeros that take no memory. Default: vit_*
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from peers import register_torchvision_ops
from vitral.errors import VitralError
from vitral.models.vit import ViTConfig
from vitral.recipes.checkpoint_options import NO_OPTIONS
from vitral.weights.detect import detect_format
from vitral.weights.files import RawCheckpoint
from vitral.weights.timm import to_vitral

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    register_torchvision_ops()
    import timm


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Whether a registered architecture is read."""

    name: str
    model: Any  # timm's model on the meta device
    config: ViTConfig | None  # None: refused
    variant: str
    reason: str  # why it is refused


def check_architecture(name: str) -> Coverage:
    """Read a checkpoint of this architecture as timm's hub folders contain it."""
    with torch.device("meta"):
        try:
            model = timm.create_model(name, depth=2)
        except (AssertionError, TypeError):  # heads per block are fixed, or it has no depth
            model = timm.create_model(name)
    zero = torch.zeros((), dtype=torch.float16)
    raw = RawCheckpoint(
        source=name,
        tensors={key: zero.expand(tensor.shape) for key, tensor in model.state_dict().items()},
        config={
            "architecture": name,
            "global_pool": model.global_pool,
            "pretrained_cfg": dict(model.pretrained_cfg),
        },
    )
    try:
        detect_format(raw)
        checkpoint = to_vitral(raw, NO_OPTIONS)
    except VitralError as error:
        reason = error.what.partition(": ")[2] or error.what.partition(" is ")[2]
        return Coverage(name=name, model=model, config=None, variant="", reason=reason)
    return Coverage(name=name, model=model, config=checkpoint.config, variant=checkpoint.variant, reason="")


def main(patterns: list[str]) -> None:
    names = [name for pattern in patterns or ["vit_*"] for name in timm.list_models(pattern)]
    refused: dict[str, list[str]] = defaultdict(list)
    for name in names:
        coverage = check_architecture(name)
        if coverage.config is None:
            refused[coverage.reason.partition(" (")[0]].append(name)
    num_refused = sum(map(len, refused.values()))
    print(f"timm {timm.__version__}: {len(names) - num_refused} of {len(names)} architectures are read")
    for reason, group in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"{len(group):3} {reason}: {', '.join(group)}")


if __name__ == "__main__":
    main(sys.argv[1:])
