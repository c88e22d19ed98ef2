"""Ridge regression in closed form, with the penalty that has the smallest leave-one-out error.

Shapes:  N images   D features   K outputs (classes, or targets of a regression)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PENALTIES = tuple(10.0 ** (half / 2) for half in range(-2, 13))  # λ from 0.1 to 10⁶, in half decades


@dataclass(frozen=True, kw_only=True)
class RidgeFit:
    """A linear layer on raw features, and leave-one-out predictions."""

    weight_KD: Tensor
    bias_K: Tensor
    left_out_NK: Tensor  # prediction of each image by the fit to all others
    penalty: float


def fit_ridge(features_ND: Tensor, targets_NK: Tensor) -> RidgeFit:
    """Minimise ‖X·W + b − Y‖² + λ‖W‖² in fp64, with the λ of PENALTIES that has the smallest leave-one-out error.

    X are the features, centred and scaled by one factor to a mean square of 1. One eigendecomposition of XᵀX or XXᵀ,
    whichever is smaller, gives the solution for every λ. The prediction of an image by the fit to all others follows
    from its residual r and leverage h, without another fit: y − r / (1 − h).
    """
    x, y = features_ND.double(), targets_NK.double()
    x_mean, y_mean = x.mean(dim=0), y.mean(dim=0)
    scale = (x - x_mean).square().mean().sqrt()
    x = (x - x_mean) / (scale if scale > 0 else 1.0)
    y = y - y_mean
    N, D = x.shape
    if D <= N:
        eigenvalues, basis_DM = torch.linalg.eigh(x.T @ x)
    else:  # XXᵀ has the same non-zero eigenvalues, and Xᵀu are the eigenvectors of XᵀX
        eigenvalues, vectors_NM = torch.linalg.eigh(x @ x.T)
        is_positive = eigenvalues > 1e-12 * eigenvalues.max()
        eigenvalues = eigenvalues[is_positive]
        basis_DM = x.T @ vectors_NM[:, is_positive] / eigenvalues.sqrt()
    z_NM, projected_MK = x @ basis_DM, (x @ basis_DM).T @ y

    def left_out_residuals(penalty: float) -> Tensor:
        damped_M = 1 / (eigenvalues.clamp(min=0) + penalty)
        leverage_N = z_NM.square() @ damped_M + 1 / N
        residual_NK = y - z_NM @ (damped_M[:, None] * projected_MK)
        return residual_NK / (1 - leverage_N).clamp(min=1e-6)[:, None]

    penalty = min(PENALTIES, key=lambda penalty: left_out_residuals(penalty).square().sum().item())
    weight_DK = basis_DM @ (projected_MK / (eigenvalues.clamp(min=0) + penalty)[:, None])
    weight_KD = weight_DK.T / (scale if scale > 0 else 1.0)
    return RidgeFit(
        weight_KD=weight_KD,
        bias_K=y_mean - weight_KD @ x_mean,
        left_out_NK=y_mean + y - left_out_residuals(penalty),
        penalty=penalty,
    )
