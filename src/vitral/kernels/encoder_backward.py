"""Backward pass of the fused encoder: equations 3 and 2 in reverse, block by block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.kernels.attention.op import attention_backward, merge_heads, split_heads
from vitral.kernels.dropout.op import NO_DROPOUT, Dropout, apply_dropout
from vitral.kernels.encoder_forward import (
    BlockCheckpoint,
    ForwardPass,
    SavedForBackward,
    norm_params,
    qk_norm_params,
)
from vitral.kernels.fp8.op import Fp8Tensor, GemmBound, quantize_and_sum
from vitral.kernels.fp8_wgrad import op as fp8_wgrad
from vitral.kernels.layer_scale.op import layer_scale_backward
from vitral.kernels.layernorm_gelu.op import (
    AddNormGrads,
    AddNormOutput,
    activation_name,
    add_layernorm_backward,
    bias_gelu_backward,
)
from vitral.kernels.linear import layer_scales, lora_gradients, needs_weight_gradient, weight_gradient
from vitral.kernels.qk_norm_rope.op import qk_norm_rope_backward
from vitral.kernels.reduce.op import ColumnSums
from vitral.kernels.short_attention.op import short_attention_backward
from vitral.kernels.swiglu.op import swiglu_backward
from vitral.models.lora import LoRALinear
from vitral.models.vit import QKVLinear


class BackwardPass:
    """Gradients of the tokens and of all parameters of the encoder.

    The activations that `forward_pass` saved are consumed, so that those of a block are freed as soon as they are used.
    `grads` holds the gradients of the residual stream and of the branch that was added to it last.
    """

    grads: AddNormGrads

    def __init__(self, forward_pass: ForwardPass, final_norm: AddNormOutput) -> None:
        assert forward_pass.saved is not None
        self.forward_pass, self.encoder, self.rope = forward_pass, forward_pass.encoder, forward_pass.rope
        self.shape, self.saved, self.final_norm = forward_pass.shape, forward_pass.saved, final_norm
        self.sums = ColumnSums()
        self.param_grads: dict[Tensor, Tensor] = {}

    def run(self, grad_out_BTD: Tensor) -> Tensor:
        """The gradient of the encoder's input, (B, T, D). Fills `param_grads`, unless a reducer takes the gradients."""
        encoder, norm = self.encoder, self.encoder.norm
        grad_out = grad_out_BTD.reshape(-1, self.shape[-1]).to(encoder.dtype).contiguous()
        self.grads = self.norm_backward(
            self.final_norm, grad_out, None, norm, self.saved[-1].block, fp8=encoder.fp8 and not encoder.cls_only
        )
        self.param_grads[norm.weight], self.param_grads[norm.bias], _ = self.grads.params
        while self.saved:
            if isinstance(self.saved[-1], BlockCheckpoint):
                self.forward_pass.recompute(self.saved.pop())  # type: ignore[arg-type]
            saved = self.saved.pop()
            assert isinstance(saved, SavedForBackward)
            encoder.weights.fetch(saved.block, backward=True)
            self.mlp_branch(saved)
            self.attention_branch(saved)
            self.hand_over_gradients()
        return self.grads.x.view(self.shape)

    def hand_over_gradients(self) -> None:
        """Give the gradients of the finished blocks to the reducer if this backward pass exchanges gradients."""
        reducer = self.encoder.reducer
        if reducer is None or not reducer.is_active:
            return
        for parameter, grad in self.param_grads.items():
            if parameter.requires_grad:
                reducer.collect(parameter, grad)
        self.param_grads.clear()

    def norm_backward(
        self, saved: AddNormOutput, grad_normed: Tensor, grad_residual: Tensor | None, norm: nn.LayerNorm,
        previous_block: Any | None, fp8: bool = False, recompute: bool = True,
    ) -> AddNormGrads:  # fmt: skip
        """Backward of a norm after the addition of the MLP branch of `previous_block`; None: of the encoder's input."""
        if previous_block is None:
            return add_layernorm_backward(
                saved, grad_normed, grad_residual, None, norm_params(norm), self.sums, fp8, recompute
            )
        scale = self.forward_pass.branch_scales.get(previous_block.residual2)
        dropout = self.forward_pass.dropout(previous_block).contract
        return add_layernorm_backward(
            saved, grad_normed, grad_residual, scale, norm_params(norm), self.sums, fp8, recompute, dropout
        )

    def mlp_branch(self, saved: SavedForBackward) -> None:
        """z = MLP(LN(z')) + z' (equation 3)."""
        block, mlp = saved.block, saved.block.mlp
        self.param_grads[mlp.contract.bias] = self.grads.params[2]
        forward_pass = self.forward_pass
        in_fp8 = self.encoder.weights.uses_fp8_wgrad(block) and activation_name(mlp) != "swiglu"
        if self.grads.branch_fp8 is not None and in_fp8:
            grad_normed, grad_hidden = self.mlp_fp8(saved, self.grads.branch_fp8), None
        else:
            grad_normed, grad_hidden = self.mlp(saved)
        self.grads = add_layernorm_backward(
            saved.norm2, grad_normed, self.grads.x, forward_pass.branch_scales.get(block.residual1),
            norm_params(block.norm2), self.sums,
            recompute=grad_hidden is not None and needs_weight_gradient(mlp.expand),
            dropout=forward_pass.dropout(block).project,
        )  # fmt: skip
        if grad_hidden is not None:
            self.weight_gradients(mlp.expand, grad_hidden, self.grads.normed)
        norm_weight, norm_bias, project_bias = self.grads.params
        self.param_grads[block.norm2.weight], self.param_grads[block.norm2.bias] = norm_weight, norm_bias
        self.param_grads[block.attention.project.bias] = project_bias

    def mlp(self, saved: SavedForBackward) -> tuple[Tensor, Tensor]:
        """Gradients of the MLP's input and hidden activations; the caller computes `expand`'s weight gradient."""
        mlp, grads = saved.block.mlp, self.param_grads
        grad_gelu, bound = self.input_gradient(mlp.contract, self.grads.branch, self.grads.branch_fp8)
        hidden, bias, dropout = saved.hidden, mlp.expand.bias, self.forward_pass.dropout(saved.block).gelu
        if activation_name(mlp) == "swiglu":
            gelu, grad_hidden, grad_hidden_fp8, grads[bias] = swiglu_backward(
                hidden, bias, grad_gelu, bound is not None, saved.gelu, self.sums, dropout
            )
        else:
            gelu, grad_hidden, grad_hidden_fp8, grads[bias] = bias_gelu_backward(
                hidden, bias, grad_gelu, activation_name(mlp), bound, saved.gelu, self.sums, dropout
            )
        self.weight_gradients(mlp.contract, self.grads.branch, gelu)
        return self.input_gradient(mlp.expand, grad_hidden, grad_hidden_fp8)[0], grad_hidden

    def mlp_fp8(self, saved: SavedForBackward, grad_out: Fp8Tensor) -> Tensor:
        """Gradient of the MLP's input, with both weight gradients as FP8 GEMMs."""
        mlp, weights, grads = saved.block.mlp, self.encoder.weights, self.param_grads
        grad_gelu, _ = weights.input_gradient(self.grads.branch, grad_out, mlp.contract.weight)
        scales = weights.wgrad_scales[saved.block]
        token_scales = fp8_wgrad.relative_scales(grad_out.scales)
        grad_hidden, grad_hidden_t, gelu_t, grads[mlp.expand.bias] = fp8_wgrad.gelu_backward_fp8(
            saved.hidden, mlp.expand.bias, grad_gelu, activation_name(mlp), grad_out.scales, scales.grad_ratio,
            token_scales.remainder, scales.gelu, self.sums, self.forward_pass.dropout(saved.block).gelu,
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
        grad_attn_out, _ = self.input_gradient(attention.project, self.grads.branch, None)
        grad_qkv, grad_qkv_fp8 = self.softmax_attention(saved, grad_attn_out)
        grad_normed, _ = self.input_gradient(attention.qkv, grad_qkv, grad_qkv_fp8)
        grad_residual = scatter_class_tokens(self.grads.x, self.shape[1]) if saved.cls_only else self.grads.x
        uses_fp8_wgrad = grad_qkv_fp8 is not None and weights.uses_fp8_wgrad(block)
        if grad_qkv_fp8 is not None and uses_fp8_wgrad:
            self.param_grads[attention.qkv.weight] = self.qkv_weight_gradient_fp8(saved, grad_qkv_fp8)
        self.grads = self.norm_backward(
            saved.norm1, grad_normed, grad_residual, block.norm1, self.saved[-1].block if self.saved else None,
            fp8=self.encoder.fp8 and bool(self.saved),
            recompute=not uses_fp8_wgrad and needs_weight_gradient(attention.qkv),
        )  # fmt: skip
        self.sums.compute()
        if isinstance(attention.qkv, QKVLinear) and attention.qkv.bias.requires_grad:  # its keys have no bias
            self.param_grads[attention.qkv.bias].chunk(3)[1].zero_()
        self.unscale_gradients(block)
        if not uses_fp8_wgrad:
            assert grad_qkv is not None
            self.weight_gradients(attention.qkv, grad_qkv, self.grads.normed)
        self.param_grads[block.norm1.weight], self.param_grads[block.norm1.bias], _ = self.grads.params

    def input_gradient(
        self, layer: Any, grad_out: Tensor | None, grad_out_fp8: Fp8Tensor | None
    ) -> tuple[Tensor, GemmBound | None]:
        """Gradient of a layer's input, and the bound of an FP8 GEMM."""
        weights = self.encoder.weights
        grad, bound = weights.input_gradient(grad_out, grad_out_fp8, layer.weight)
        if layer in weights.separate_lora:
            assert grad_out is not None
            grad += weights.lora_input_gradient(layer, grad_out, self.lora_dropout(layer))
        return grad, bound

    def lora_dropout(self, layer: Any) -> Dropout:
        return self.forward_pass.lora_dropouts.get(layer, NO_DROPOUT)

    def weight_gradients(self, layer: nn.Linear, grad_out: Tensor, x: Tensor | None) -> None:
        """Gradients of a layer's weight, or of the factors of its low-rank update; none if they are frozen.

        With layer scale, the gradient of the scaled weight, from which `unscale_gradients` computes the others.
        """
        scale = self.encoder.weights.layer_scales.get(layer)
        if layer.weight.requires_grad or (scale is not None and scale.requires_grad):
            self.param_grads[layer.weight] = weight_gradient(grad_out, x)
        if isinstance(layer, LoRALinear):
            assert x is not None
            factors = layer.lora_A.weight, layer.lora_B.weight
            x = apply_dropout(x, self.lora_dropout(layer))
            self.param_grads |= dict(zip(factors, lora_gradients(layer, grad_out, x, scale), strict=True))

    def unscale_gradients(self, block: Any) -> None:
        """Gradients of layer scale, and of the weights and biases without it. Needs all sums of the block."""
        for layer, scale in layer_scales(block).items():
            grad, grad_bias = self.param_grads.get(layer.weight), self.param_grads[layer.bias]
            if grad is None:
                self.param_grads[layer.bias] = grad_bias * scale
            else:
                self.param_grads[scale] = layer_scale_backward(grad, grad_bias, layer.weight, layer.bias, scale)

    def qkv_weight_gradient_fp8(self, saved: SavedForBackward, grad_qkv: Fp8Tensor) -> Tensor:
        token_scales = fp8_wgrad.relative_scales(grad_qkv.scales)
        scale = self.encoder.weights.wgrad_scales[saved.block].norm1
        normed_t = fp8_wgrad.layernorm_transposed(
            saved.norm1, norm_params(saved.block.norm1), token_scales.relative, scale
        )
        return fp8_wgrad.wgrad_gemm(fp8_wgrad.transpose_fp8(grad_qkv), normed_t, token_scales.max_scale, scale)

    def softmax_attention(self, saved: SavedForBackward, grad_out: Tensor) -> tuple[Tensor | None, Fp8Tensor | None]:
        """The gradient of qkv, (M, 3D), and its FP8 form, except after `short_attention`.

        After PyTorch's attention, whose gradients of q, k and v are separate, None if only the FP8 form is used.
        """
        attention, T = saved.block.attention, self.shape[1]
        bias, num_heads, qk_norm = attention.qkv.bias, attention.heads, qk_norm_params(attention)
        has_bias = bias is not None and bias.requires_grad
        is_short = not saved.attn_inputs
        is_plain = qk_norm is None and self.rope is None and not is_short
        grad_qkv: Tensor | None = None
        norm_grads: Tensor | None = None
        if saved.lse is not None:
            q, k, v = saved.attn_inputs
            grad_qkv = attention_backward(q, k, v, saved.attn_out, saved.lse, grad_out, num_heads, T)
        elif is_short:
            grad_qkv = short_attention_backward(saved.qkv, grad_out, num_heads, T, qk_norm, self.rope)
        if grad_qkv is not None:
            grads_BhTd = split_heads(grad_qkv, num_heads, T)
        else:  # PyTorch's attention
            grad_q, grad_k, grad_v = torch.autograd.grad(saved.attn_out, saved.attn_inputs, grad_out)
            grads_BhTd = F.pad(grad_q, (0, 0, 0, T - 1)) if saved.cls_only else grad_q, grad_k, grad_v
        if is_plain and (grad_qkv is not None or self.encoder.weights.uses_fp8_wgrad(saved.block)):
            parts = (grad_qkv,) if grad_qkv is not None else tuple(map(merge_heads, grads_BhTd))
            bias_grad, grad_qkv_fp8 = quantize_and_sum(parts, has_bias, self.encoder.fp8, self.sums)
        else:
            grad_qkv, norm_grads, bias_grad = qk_norm_rope_backward(
                saved.qkv, grads_BhTd, qk_norm, self.rope, has_bias, self.sums, grad_qkv
            )
            _, grad_qkv_fp8 = quantize_and_sum((grad_qkv,), False, self.encoder.fp8 and not is_short, self.sums)
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
