"""The computations of a pretraining step, in particular those of a repeated step after a divergence."""

from __future__ import annotations

import copy

import torch

from support.pretraining import draw_batch, random_images, tiny_method
from vitral.device.select import Hardware
from vitral.training.nan_debug import locate_nonfinite
from vitral.training.pretraining.backend import PretrainBackend


def test_eager_backend_shows_the_modules_of_fused_encoders(cpu: Hardware) -> None:
    """Hooks do not see the modules whose kernels are fused; a copy of each branch stands for them."""
    method = tiny_method("moco")
    images = random_images()
    torch.nn.init.constant_(method.student.get_parameter("vit.encoder.blocks.1.mlp.expand.weight"), 1e38)
    assert method.teacher is not None
    branches = [method.student, method.teacher]
    for branch in branches:
        branch.encode_fn = copy.deepcopy(branch).encode
    encode_fns = [branch.encode_fn for branch in branches]
    backend, batch = PretrainBackend(method, cpu, method), draw_batch(method, images)
    labels = torch.zeros(len(images), dtype=torch.int64)
    fused, _ = locate_nonfinite(method, lambda: backend.loss_and_score(batch, labels)[0])
    assert fused.nonfinite_in is not None
    assert "blocks" not in fused.nonfinite_in
    eager, _ = locate_nonfinite(method, lambda: backend.eager().loss_and_score(batch, labels)[0])
    assert eager.nonfinite_in == "student.vit.encoder.blocks.1.mlp.expand (activation)"
    assert [branch.encode_fn for branch in branches] == encode_fns  # training continues with them after a rollback
