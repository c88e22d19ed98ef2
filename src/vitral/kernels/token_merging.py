"""Token merging with fused kernels: the forward pass of `models.token_merging.TokenMergingViT` for inference.

Attention with token sizes is one kernel; norms, GELU and FP8 GEMMs are those of the fused encoder. A block that merges
adds its attention branch in PyTorch, because the merge comes between the addition and the norm that follows it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.device.select import Hardware
from vitral.kernels.attention import op as attention_op
from vitral.kernels.block.op import expand_gelu_fp8
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.encoder_forward import AttentionOutput, PendingResidual, norm_params, qk_norm_params
from vitral.kernels.fp8.op import Fp8Tensor, GemmBound
from vitral.kernels.layernorm_gelu.op import AddNormOutput, activation_name, add_layernorm, bias_gelu
from vitral.kernels.qk_norm_rope.op import qk_norm_rope
from vitral.kernels.self_check import max_relative_error, self_check_failure
from vitral.kernels.swiglu.op import swiglu
from vitral.models.token_merging import attend_by_size, match_tokens, merge_limit, merge_tokens
from vitral.models.vit import ViT

ATTENTION_TOLERANCE = 0.05  # relative error of attention with sizes: bf16 rounding of inputs and outputs


def unsupported_reason(model: ViT, hardware: Hardware) -> str | None:
    """Why attention with token sizes cannot be used on this machine, or None. The rest is checked with the encoder."""
    config, B = model.config, 2
    h, d = config.heads, config.width // config.heads
    if d > attention_op.MAX_HEAD_DIM:
        return None  # PyTorch computes attention

    def error(T: int) -> float:
        qkv = torch.randn(B * T, 3 * config.width, device=hardware.device).to(next(model.parameters()).dtype)
        sizes = torch.randint(1, 9, (B * T,), device=hardware.device).float()
        expected = attend_by_size(*attention_op.split_heads(qkv.float(), h, T), sizes.view(B, T))
        q, k, v = qkv.chunk(3, dim=1)
        out, _ = attention_op.attention_forward(q, k, v, h, T, sizes)
        return max_relative_error([out], [expected.transpose(1, 2).reshape(B * T, -1)])

    # Many tokens use other tiles, and the last blocks of a model with many may have few.
    counts = (84, attention_op.FEW_TOKENS + 5) if config.num_tokens > attention_op.FEW_TOKENS else (84,)
    return self_check_failure(lambda: max(map(error, counts)), ATTENTION_TOLERANCE)


class Tokens(NamedTuple):
    """The tokens of B images between two blocks."""

    residual: PendingResidual  # (M, D)
    sizes_M: Tensor | None  # fp32; None: no token is merged yet
    per_image: int  # T


class FusedTokenMerging:
    """`FusedTokenMerging(encoder, r, p)(tokens)`: tokens (B, T', D) after the final norm, and their sizes (B, T').

    r: tokens that each block merges. p: prefix tokens, which are never merged.
    """

    def __init__(self, encoder: FusedEncoder, r: int, num_prefix_tokens: int) -> None:
        self.encoder, self.r, self.num_prefix_tokens = encoder, r, num_prefix_tokens

    def __call__(self, z_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        encoder, (B, T, D) = self.encoder, z_BTD.shape
        tokens = Tokens(PendingResidual(z_BTD.reshape(B * T, D).to(encoder.dtype).contiguous()), None, T)
        for block in encoder.blocks:
            tokens = self.run_block(block, tokens, B)
        normed = add_and_norm(tokens.residual, encoder.norm, fp8=False).normed
        assert normed is not None
        sizes = None if tokens.sizes_M is None else tokens.sizes_M.view(B, -1)
        return normed.view(B, -1, D), sizes

    def run_block(self, block: Any, tokens: Tokens, B: int) -> Tokens:
        encoder, weights, T = self.encoder, self.encoder.weights, tokens.per_image
        qkv_layer, project = block.attention.qkv, block.attention.project
        norm1 = add_and_norm(tokens.residual, block.norm1, encoder.fp8)
        qkv, bound = weights.linear(norm1.normed, norm1.normed_fp8, qkv_layer.weight, weights.bias(qkv_layer))
        q, k, v = self.split_qkv(block.attention, qkv, T)
        cls_only = encoder.cls_only and block is encoder.blocks[-1]
        attn = self.attend(q, k, v, block.attention.heads, tokens, bound, cls_only)
        r = 0 if cls_only else merge_limit(T - self.num_prefix_tokens, self.r)
        x, bias, fp8 = norm1.sum, weights.bias(project), encoder.fp8 and not cls_only
        projected, _ = weights.linear(attn.out, attn.out_fp8, project.weight, bias if r else None)
        if r:
            keys = k.reshape(B, T, block.attention.heads, -1).mean(dim=2)
            x, sizes = self.merge(x + projected, tokens.sizes_M, keys, r)
            tokens = tokens._replace(sizes_M=sizes, per_image=T - r)
            norm2 = add_and_norm(PendingResidual(x), block.norm2, fp8)
        else:
            x = x[::T].contiguous() if cls_only else x
            norm2 = add_and_norm(PendingResidual(x, projected, bias), block.norm2, fp8)
        return tokens._replace(residual=self.run_mlp(block.mlp, norm2))

    def split_qkv(self, attention: Any, qkv: Tensor, T: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (M, D), after the norm of queries and keys."""
        q, k, v = qkv.chunk(3, dim=1)
        if (qk_norm := qk_norm_params(attention)) is not None:
            q, k = qk_norm_rope(qkv, attention.heads, T, qk_norm, None).view(2, -1, q.shape[1])
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, tokens: Tokens, bound: GemmBound | None, cls_only: bool
    ) -> AttentionOutput:
        """Attention in which a token counts as often as its size says; for class tokens alone if `cls_only`."""
        T, D, sizes = tokens.per_image, q.shape[1], tokens.sizes_M
        fits = attention_op.MAX_TOKENS >= T and attention_op.MAX_HEAD_DIM * num_heads >= D
        if fits and not cls_only:
            if bound is not None:
                fp8 = attention_op.attention_forward_fp8(q, k, v, num_heads, T, bound, sizes)
                return AttentionOutput(None, fp8)
            return AttentionOutput(attention_op.attention_forward(q, k, v, num_heads, T, sizes)[0])
        q, k, v = (x.unflatten(0, (-1, T)).unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        bias = None if sizes is None else sizes.log().to(q.dtype).view(-1, 1, 1, T)
        out = F.scaled_dot_product_attention(q[:, :, :1] if cls_only else q, k, v, attn_mask=bias)
        return AttentionOutput(out.transpose(1, 2).reshape(-1, D))

    def merge(self, x: Tensor, sizes_M: Tensor | None, keys_BTd: Tensor, r: int) -> tuple[Tensor, Tensor]:
        """Tokens (M - B·r, D) and their sizes."""
        (B, T, _), p = keys_BTd.shape, self.num_prefix_tokens
        sizes_BT = keys_BTd.new_ones(B, T, dtype=torch.float32) if sizes_M is None else sizes_M.view(B, T)
        merged, sizes = merge_tokens(x.view(B, T, -1), sizes_BT, match_tokens(keys_BTd, r, p), p)
        return merged.reshape(B * (T - r), -1), sizes.reshape(-1)

    def run_mlp(self, mlp: Any, norm2: AddNormOutput) -> PendingResidual:
        encoder, weights, activation = self.encoder, self.encoder.weights, activation_name(mlp)
        minimum = encoder.fused_block_min_tokens
        gelu: Tensor | None = None
        gelu_fp8: Fp8Tensor | None
        if norm2.normed_fp8 is not None and minimum is not None and minimum <= len(norm2.sum):
            quantized = weights.quantized[mlp.expand.weight]
            gelu_fp8 = expand_gelu_fp8(norm2.normed_fp8, quantized, mlp.expand.bias, activation)
        else:
            hidden, bound = weights.linear(norm2.normed, norm2.normed_fp8, mlp.expand.weight)
            if activation == "swiglu":
                gelu, gelu_fp8 = swiglu(hidden, mlp.expand.bias, bound is not None)
            else:
                gelu, gelu_fp8 = bias_gelu(hidden, mlp.expand.bias, activation, bound, in_place=True)
        contracted, _ = weights.linear(gelu, gelu_fp8, mlp.contract.weight)
        return PendingResidual(norm2.sum, contracted, weights.bias(mlp.contract))


def add_and_norm(residual: PendingResidual, norm: nn.LayerNorm, fp8: bool) -> AddNormOutput:
    """The residual sum and its LayerNorm, in FP8 or in the compute dtype."""
    return add_layernorm(residual.x, residual.branch, residual.bias, None, norm_params(norm), fp8, store_normed=not fp8)
