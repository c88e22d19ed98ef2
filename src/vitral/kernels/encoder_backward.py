"""Backward pass of the fused encoder: equations 3 and 2 in reverse, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.kernels.attention.op import attention_backward, split_heads
from vitral.kernels.encoder_forward import SavedForBackward, norm_params, qk_norm_params
from vitral.kernels.fp8.op import Fp8Tensor, quantize_and_sum
from vitral.kernels.fp8_wgrad import op as fp8_wgrad
from vitral.kernels.layernorm_gelu.op import (
    AddNormGrads,
    AddNormOutput,
    add_layernorm_backward,
    bias_gelu_backward,
)
from vitral.kernels.linear import lora_gradients, needs_weight_gradient, weight_gradient
from vitral.kernels.qk_norm_rope.op import qk_norm_rope_backward
from vitral.kernels.reduce.op import ColumnSums
from vitral.kernels.short_attention.op import short_attention_backward
from vitral.models.lora import LoRALinear
from vitral.models.vit import RopeTable

if TYPE_CHECKING:
    from vitral.kernels.encoder import FusedEncoder


class BackwardPass:
    """Gradients of the tokens and of all parameters of the encoder.

    `saved` is consumed, so that a block's activations are freed as soon as they are used. `grads` holds the gradients
    of the residual stream and of the branch that was added to it last.
    """

    grads: AddNormGrads

    def __init__(
        self, encoder: FusedEncoder, rope: RopeTable | None, shape: torch.Size, saved: list[SavedForBackward],
        final_norm: AddNormOutput,
    ) -> None:  # fmt: skip
        self.encoder, self.rope, self.shape, self.saved, self.final_norm = encoder, rope, shape, saved, final_norm
        self.sums = ColumnSums()
        self.param_grads: dict[Tensor, Tensor] = {}

    def run(self, grad_out_BTD: Tensor) -> Tensor:
        """The gradient of the encoder's input, (B, T, D). Fills `param_grads`."""
        encoder, norm = self.encoder, self.encoder.norm
        grad_out = grad_out_BTD.reshape(-1, self.shape[-1]).to(encoder.dtype).contiguous()
        self.grads = add_layernorm_backward(
            self.final_norm, grad_out, None, self.saved[-1].branch_scale2, norm_params(norm), self.sums,
            fp8=encoder.fp8 and not encoder.cls_only,
        )  # fmt: skip
        self.param_grads[norm.weight], self.param_grads[norm.bias], _ = self.grads.params
        while self.saved:
            saved = self.saved.pop()
            self.mlp_branch(saved)
            self.attention_branch(saved)
        return self.grads.x.view(self.shape)

    def mlp_branch(self, saved: SavedForBackward) -> None:
        """z = MLP(LN(z')) + z' (equation 3)."""
        block, mlp = saved.block, saved.block.mlp
        self.param_grads[mlp.contract.bias] = self.grads.params[2]
        if self.grads.branch_fp8 is not None and self.encoder.weights.uses_fp8_wgrad(len(self.grads.branch)):
            grad_normed, grad_hidden = self.mlp_fp8(saved, self.grads.branch_fp8), None
        else:
            grad_normed, grad_hidden = self.mlp(saved)
        self.grads = add_layernorm_backward(
            saved.norm2, grad_normed, self.grads.x, saved.branch_scale1, norm_params(block.norm2), self.sums,
            recompute=grad_hidden is not None and needs_weight_gradient(mlp.expand),
        )  # fmt: skip
        if grad_hidden is not None:
            self.weight_gradients(mlp.expand, grad_hidden, self.grads.normed)
        norm_weight, norm_bias, project_bias = self.grads.params
        self.param_grads[block.norm2.weight], self.param_grads[block.norm2.bias] = norm_weight, norm_bias
        self.param_grads[block.attention.project.bias] = project_bias

    def mlp(self, saved: SavedForBackward) -> tuple[Tensor, Tensor]:
        """Gradients of the MLP's input and hidden activations; the caller computes `expand`'s weight gradient."""
        mlp, weights, grads = saved.block.mlp, self.encoder.weights, self.param_grads
        grad_gelu, bound = weights.input_gradient(self.grads.branch, self.grads.branch_fp8, mlp.contract.weight)
        gelu, grad_hidden, grad_hidden_fp8, grads[mlp.expand.bias] = bias_gelu_backward(
            saved.hidden, mlp.expand.bias, grad_gelu, mlp.activation.approximate == "tanh", bound, saved.gelu, self.sums
        )
        self.weight_gradients(mlp.contract, self.grads.branch, gelu)
        return weights.input_gradient(grad_hidden, grad_hidden_fp8, mlp.expand.weight)[0], grad_hidden

    def mlp_fp8(self, saved: SavedForBackward, grad_out: Fp8Tensor) -> Tensor:
        """Gradient of the MLP's input, with both weight gradients as FP8 GEMMs."""
        mlp, weights, grads = saved.block.mlp, self.encoder.weights, self.param_grads
        grad_gelu, _ = weights.input_gradient(self.grads.branch, grad_out, mlp.contract.weight)
        scales = weights.wgrad_scales[saved.block]
        token_scales = fp8_wgrad.relative_scales(grad_out.scales)
        grad_hidden, grad_hidden_t, gelu_t, grads[mlp.expand.bias] = fp8_wgrad.gelu_backward_fp8(
            saved.hidden, mlp.expand.bias, grad_gelu, mlp.activation.approximate == "tanh", grad_out.scales,
            scales.grad_ratio, token_scales.remainder, scales.gelu, self.sums,
        )  # fmt: skip
        normed_t = fp8_wgrad.layernorm_transposed(
            saved.norm2, norm_params(saved.block.norm2), token_scales.relative, scales.norm2
        )
        grad_out_t = fp8_wgrad.transpose_fp8(grad_out, token_scales.pow2_root)
        max_scale = token_scales.max_scale
        grads[mlp.contract.weight] = fp8_wgrad.wgrad_gemm(grad_out_t, gelu_t, max_scale, scales.gelu)
        grads[mlp.expand.weight] = fp8_wgrad.wgrad_gemm(grad_hidden_t, normed_t, max_scale, scales.expand)
        return weights.input_gradient(grad_gelu, grad_hidden, mlp.expand.weight)[0]

    def attention_branch(self, saved: SavedForBackward) -> None:
        """z' = MSA(LN(z)) + z (equation 2)."""
        block, attention, weights = saved.block, saved.block.attention, self.encoder.weights
        self.weight_gradients(attention.project, self.grads.branch, saved.attn_out.detach())
        grad_attn_out = self.grads.branch @ weights.compute[attention.project.weight]
        grad_qkv, grad_qkv_fp8 = self.softmax_attention(saved, grad_attn_out)
        grad_normed, _ = weights.input_gradient(grad_qkv, grad_qkv_fp8, attention.qkv.weight)
        grad_residual = scatter_class_tokens(self.grads.x, self.shape[1]) if saved.cls_only else self.grads.x
        uses_fp8_wgrad = grad_qkv_fp8 is not None and weights.uses_fp8_wgrad(len(grad_qkv))
        if grad_qkv_fp8 is not None and uses_fp8_wgrad:
            self.param_grads[attention.qkv.weight] = self.qkv_weight_gradient_fp8(saved, grad_qkv_fp8)
        previous_branch_scale = self.saved[-1].branch_scale2 if self.saved else None
        self.grads = add_layernorm_backward(
            saved.norm1, grad_normed, grad_residual, previous_branch_scale, norm_params(block.norm1), self.sums,
            fp8=self.encoder.fp8 and bool(self.saved),
            recompute=not uses_fp8_wgrad and needs_weight_gradient(attention.qkv),
        )  # fmt: skip
        self.sums.compute()
        if not uses_fp8_wgrad:
            self.weight_gradients(attention.qkv, grad_qkv, self.grads.normed)
        self.param_grads[block.norm1.weight], self.param_grads[block.norm1.bias], _ = self.grads.params

    def weight_gradients(self, layer: nn.Linear, grad_out: Tensor, x: Tensor | None) -> None:
        """Gradients of a layer's weight, or of the factors of its low-rank update; none if they are frozen."""
        if layer.weight.requires_grad:
            self.param_grads[layer.weight] = weight_gradient(grad_out, x)
        if isinstance(layer, LoRALinear):
            assert x is not None
            factors = layer.lora_A.weight, layer.lora_B.weight
            self.param_grads |= dict(zip(factors, lora_gradients(layer, grad_out, x), strict=True))

    def qkv_weight_gradient_fp8(self, saved: SavedForBackward, grad_qkv: Fp8Tensor) -> Tensor:
        token_scales = fp8_wgrad.relative_scales(grad_qkv.scales)
        scale = self.encoder.weights.wgrad_scales[saved.block].norm1
        normed_t = fp8_wgrad.layernorm_transposed(
            saved.norm1, norm_params(saved.block.norm1), token_scales.relative, scale
        )
        return fp8_wgrad.wgrad_gemm(fp8_wgrad.transpose_fp8(grad_qkv), normed_t, token_scales.max_scale, scale)

    def softmax_attention(self, saved: SavedForBackward, grad_out: Tensor) -> tuple[Tensor, Fp8Tensor | None]:
        """The gradient of qkv, (M, 3D), and its FP8 form, except after `short_attention`."""
        attention, T = saved.block.attention, self.shape[1]
        bias, num_heads, qk_norm = attention.qkv.bias, attention.heads, qk_norm_params(attention)
        has_bias = bias is not None and bias.requires_grad
        is_short = not saved.attn_inputs
        grad_qkv: Tensor | None = None
        norm_grads: Tensor | None = None
        if saved.lse is not None:
            q, k, v = saved.attn_inputs
            grad_qkv = attention_backward(q, k, v, saved.attn_out, saved.lse, grad_out, num_heads, T)
        elif is_short:
            grad_qkv = short_attention_backward(saved.qkv, grad_out, num_heads, T, qk_norm, self.rope)
        if grad_qkv is not None and not is_short and qk_norm is None and self.rope is None:
            bias_grad, grad_qkv_fp8 = quantize_and_sum(grad_qkv, has_bias, self.encoder.fp8, self.sums)
        else:
            if grad_qkv is not None:
                grads_BhTd = split_heads(grad_qkv, num_heads, T)
            else:  # PyTorch's attention
                grad_q, grad_k, grad_v = torch.autograd.grad(saved.attn_out, saved.attn_inputs, grad_out)
                grads_BhTd = F.pad(grad_q, (0, 0, 0, T - 1)) if saved.cls_only else grad_q, grad_k, grad_v
            grad_qkv, norm_grads, bias_grad = qk_norm_rope_backward(
                saved.qkv, grads_BhTd, qk_norm, self.rope, has_bias, self.sums, grad_qkv
            )
            _, grad_qkv_fp8 = quantize_and_sum(grad_qkv, False, self.encoder.fp8 and not is_short, self.sums)
        if norm_grads is not None:
            self.param_grads[attention.norm_q.weight], self.param_grads[attention.norm_k.weight] = norm_grads[0]
            self.param_grads[attention.norm_q.bias], self.param_grads[attention.norm_k.bias] = norm_grads[1]
        if bias_grad is not None:
            self.param_grads[attention.qkv.bias] = bias_grad
        return grad_qkv, grad_qkv_fp8


def scatter_class_tokens(rows: Tensor, tokens_per_image: int) -> Tensor:
    """(B, D) -> (B·T, D): the rows as first tokens of their images, and zeros elsewhere."""
    out = rows.new_zeros(len(rows) * tokens_per_image, rows.shape[1])
    out[::tokens_per_image] = rows
    return out
