"""Encoder blocks of the PyTorch CPU engine, in fp32, bf16 and int8. Scales are part of the weights.

Shapes as in vit.py. M = B·T: all tokens of a batch form one matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.inference.folded_weights import fold_int8_weights, fold_weights
from vitral.inference.int8_calibration import ActivationRanges
from vitral.inference.linear import Int8Linear, make_linear, to_uint8
from vitral.models.vit import EncoderBlock, RopeTable, apply_rope


class CpuBlock:
    """One encoder block on a (M, D) token matrix. Subclasses implement the linear layers in their precision."""

    def __init__(self, block: EncoderBlock, dtype: torch.dtype) -> None:
        attention = block.attention
        self.heads, self.dtype = attention.heads, dtype
        self.norm_q, self.norm_k = attention.norm_q, attention.norm_k
        self.has_qk_norm = not isinstance(attention.norm_q, nn.Identity)
        self.activation = block.mlp.activation
        self.gelu = block.mlp.activation.approximate if isinstance(block.mlp.activation, nn.GELU) else None  # fused

    def __call__(self, z_MD: Tensor, B: int, num_outputs: int, rope: RopeTable | None) -> Tensor:
        """Return the first `num_outputs` tokens of each image."""
        D = z_MD.shape[1]
        qkv_MF = self._qkv(z_MD)
        T = len(z_MD) // B
        q, k, v = qkv_MF.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if num_outputs < T:
            q, z_MD = q[:, :, :num_outputs], z_MD.view(B, T, D)[:, :num_outputs].reshape(-1, D).contiguous()
        z_MD = self._project(z_MD, self._attend(q, k, v, rope, T, num_outputs))
        return self._mlp(z_MD)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rope: RopeTable | None, T: int, num_queries: int) -> Tensor:
        """q, k, v (B, h, T, d) to the attention output (M, D). Without qk-norm, q already includes 1/√d."""
        if self.has_qk_norm:
            d = q.shape[-1]
            q, k = self.norm_q(q.float()) * d**-0.5, self.norm_k(k.float())
        if rope is not None:
            query_rope = rope[:, :num_queries] if num_queries < T else rope
            q, k = apply_rope(q.float(), query_rope), apply_rope(k.float(), rope)
        q, k = q.to(self.dtype), k.to(self.dtype)
        if self.dtype == torch.float32:
            attn_out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:  # on AVX-512, oneDNN's bf16 GEMMs with an explicit T×T matrix are faster than the fused kernel
            B, h, _, d = k.shape
            scores = torch.bmm(q.reshape(B * h, -1, d), k.reshape(B * h, -1, d).mT)
            attn_out = torch.bmm(scores.softmax(dim=-1), v.reshape(B * h, -1, d)).view(B, h, -1, d)
        return attn_out.transpose(1, 2).reshape(-1, attn_out.shape[1] * attn_out.shape[3])  # b h t d -> (b t) (h d)

    def _qkv(self, z_MD: Tensor) -> Tensor:
        raise NotImplementedError

    def _project(self, z_MD: Tensor, attn_out_MD: Tensor) -> Tensor:
        raise NotImplementedError

    def _mlp(self, z_MD: Tensor) -> Tensor:
        raise NotImplementedError


class FloatBlock(CpuBlock):
    """fp32 or bf16 block."""

    def __init__(self, block: EncoderBlock, dtype: torch.dtype) -> None:
        super().__init__(block, dtype)
        weights = fold_weights(block)
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv, self.project, self.expand, self.contract = (
            make_linear(*weights[name], dtype) for name in ("qkv", "project", "expand", "contract")
        )

    def _qkv(self, z_MD: Tensor) -> Tensor:
        return self.qkv(self.norm1(z_MD).to(self.dtype))

    def _project(self, z_MD: Tensor, attn_out_MD: Tensor) -> Tensor:
        return self.project.add_to(z_MD, attn_out_MD)

    def _mlp(self, z_MD: Tensor) -> Tensor:
        x_MD = self.norm2(z_MD).to(self.dtype)
        hidden_MF = self.activation(self.expand(x_MD)) if self.gelu is None else self.expand.gelu(x_MD, self.gelu)
        return self.contract.add_to(z_MD, hidden_MF)


class Int8Block(CpuBlock):
    """int8 linear layers; attention in bf16. Layer norms and v return values in units of the int8 scales."""

    def __init__(self, block: EncoderBlock, prefix: str, ranges: ActivationRanges) -> None:
        super().__init__(block, torch.bfloat16)
        weights = fold_int8_weights(block, prefix, ranges)
        self.norm1, self.norm2 = weights.norm1, weights.norm2
        self.qkv = Int8Linear(*weights.qkv, 1.0, 128, out_dtype=torch.bfloat16)
        self.project = Int8Linear(*weights.project, 1.0, 128)
        self.expand = Int8Linear(*weights.expand, 1.0, 128)
        self.hidden_scale, self.hidden_zero_point = weights.hidden_scale, weights.hidden_zero_point
        self.outlier_weights = weights.outliers  # of hidden columns too large for int8: two narrow GEMMs in fp32
        self.contract = Int8Linear(*weights.contract, self.hidden_scale, self.hidden_zero_point)

    def _qkv(self, z_MD: Tensor) -> Tensor:
        return self.qkv(to_uint8(self._norm(z_MD, self.norm1)))

    def _project(self, z_MD: Tensor, attn_out_MD: Tensor) -> Tensor:
        return self.project.add_to(z_MD, to_uint8(attn_out_MD))

    def _mlp(self, z_MD: Tensor) -> Tensor:
        normed_MD = self._norm(z_MD, self.norm2)
        if self.outlier_weights is not None:
            expand, bias, contract = self.outlier_weights
            z_MD = torch.addmm(z_MD, self.activation(F.linear(normed_MD, expand, bias)), contract)
        return self.contract.add_to(z_MD, self._hidden(to_uint8(normed_MD)))

    def _hidden(self, x_MD: Tensor) -> Tensor:
        """The hidden layer after its activation, as uint8."""
        if self.gelu is not None:
            return self.expand.gelu_uint8(x_MD, self.gelu, self.hidden_scale, self.hidden_zero_point)
        hidden_MF = self.activation(self.expand(x_MD)).div_(self.hidden_scale)
        return to_uint8(hidden_MF.add_(self.hidden_zero_point - 128))

    @staticmethod
    def _norm(z_MD: Tensor, norm: tuple[Tensor, Tensor, float]) -> Tensor:
        return torch.layer_norm(z_MD, (z_MD.shape[1],), *norm)
