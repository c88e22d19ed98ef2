"""Losses for learning the predictions of a teacher.

With the student's logits z_s, the teacher's z_t, softmax ψ and label y, DeiT (arXiv 2012.12877) defines

    soft, equation 2    (1 - α) CE(ψ(z_s), y) + α τ² KL(ψ(z_s / τ), ψ(z_t / τ)), after Hinton et al. (arXiv 1503.02531)
    hard, equation 3    1/2 CE(ψ(z_s), y) + 1/2 CE(ψ(z_s), argmax z_t), which is α = 1/2 here

where KL measures how far the student is from the teacher's distribution. A model with a distillation token (variant
"distilled") has a head for each term; others learn both with one head. DeiT-Ti reaches 72.2% on ImageNet-1k from
scratch, and 74.5% with hard distillation and the token.

Shapes:  B images   K classes
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def soft_distillation_losses(logits_BK: Tensor, teacher_logits_BK: Tensor, temperature: float) -> Tensor:
    """τ² KL(ψ(z_t / τ) ‖ ψ(z_s / τ)) of each image, (B,). The factor keeps gradients independent of τ."""
    log_probs_BK = (logits_BK / temperature).log_softmax(dim=1)
    teacher_log_probs_BK = (teacher_logits_BK / temperature).log_softmax(dim=1)
    divergence_B = F.kl_div(log_probs_BK, teacher_log_probs_BK, reduction="none", log_target=True).sum(dim=1)
    return divergence_B * temperature**2


def hard_distillation_losses(logits_BK: Tensor, teacher_logits_BK: Tensor) -> Tensor:
    """Cross-entropy with the class that the teacher predicts, of each image, (B,)."""
    return F.cross_entropy(logits_BK, teacher_logits_BK.argmax(dim=1), reduction="none")
