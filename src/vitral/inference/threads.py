"""The number of CPU threads for predicting many images."""

from __future__ import annotations

from dataclasses import replace

import torch

from vitral.device.threads import ThreadChoice, select_threads
from vitral.inference.predictor import Predictor


def use_fastest_threads(predictor: Predictor) -> ThreadChoice | None:
    """Set the fastest number of threads for this process, by a measurement of a quarter of a second.

    At most the number in use, which `vitral bench` may have determined. Environment variables win. Returns the choice,
    or None on a GPU.
    """
    if predictor.hardware.device.type != "cpu":
        return None
    model = predictor.model_config.architecture
    rows = predictor.engine.batch_size * model.num_tokens
    choice = select_threads(width=model.width, rows=rows, backward=False)
    torch.set_num_threads(choice.threads)
    predictor.engine = replace(predictor.engine, threads=choice.threads)
    return choice
