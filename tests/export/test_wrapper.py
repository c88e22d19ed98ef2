"""The traced graph."""

from __future__ import annotations

import io

import torch

from support.vit_kinds import KINDS, random_model
from vitral.data.preprocess import Preprocessing
from vitral.export.wrapper import ExportWrapper, capture_graph, example_images, export_metadata
from vitral.runs.model_io import ModelConfig


def test_exported_graph_and_metadata_contain_no_path_of_this_machine():
    model = random_model(*KINDS["class"])
    c = model.config
    half = (0.5,) * c.channels
    config = ModelConfig(
        architecture=c,
        preprocessing=Preprocessing(image_size=c.image_size, channels=c.channels, mean=half, std=half),
        classes=tuple(map(str, range(c.num_classes))),
        trained_on="/home/alice/photos",
        epoch=1,
    )
    file = io.BytesIO()
    torch.export.save(capture_graph(ExportWrapper(model, config, "fp32").eval(), example_images(config)), file)
    assert b"wrapper.py" not in file.getvalue()  # of the stack traces
    assert export_metadata(config, "fp32")["trained_on"] == "photos"
