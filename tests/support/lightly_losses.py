"""lightly's losses of self-supervised learning, imported here only, to compare vitral's with them."""

from __future__ import annotations

import warnings

from peers import register_torchvision_ops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    register_torchvision_ops()
    from lightly.loss import DINOLoss, IBOTPatchLoss
    from lightly.loss.lejepa_loss import SIGReg, lejepa_invariance_loss
    from lightly.loss.swav_loss import sinkhorn

__all__ = ["DINOLoss", "IBOTPatchLoss", "SIGReg", "lejepa_invariance_loss", "sinkhorn"]
