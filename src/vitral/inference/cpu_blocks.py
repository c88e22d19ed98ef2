"""Encoder blocks of the CPU engine, in fp32, bf16 and int8.

Folded into the weights when a block is built:
- the attention scale 1/√d into the query weights, and layer scale into the linear layer before it;
- for int8, a scale per input column into the preceding layer norm and the following weights, so that columns with
  large values do not cost the others precision (SmoothQuant, arXiv 2211.10438).

Shapes as in vit.py. M = B·T: all tokens of a batch form one matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.inference.int8_calibration import ActivationRanges
from vitral.inference.linear import Int8Linear, PackedLinear, to_uint8
from vitral.models.vit import EncoderBlock, QKVLinear, RopeTable, apply_rope

MAX_OUTLIERS = 8  # hidden columns that stay in fp32
OUTLIER_RATIO = 1.5  # they stay in fp32 if the largest exceeds the next column by this factor
HIDDEN_CLIP = 0.8  # share of the largest hidden value that int8 covers: finer steps reduce the error by a sixth (Ti/16)


class CpuBlock:
    """One encoder block on a (M, D) token matrix. Subclasses implement the linear layers in their precision."""

    def __init__(self, block: EncoderBlock, dtype: torch.dtype) -> None:
        attention = block.attention
        self.heads, self.dtype = attention.heads, dtype
        self.norm_q, self.norm_k = attention.norm_q, attention.norm_k
        self.has_qk_norm = not isinstance(attention.norm_q, nn.Identity)
        self.activation = block.mlp.activation
        self.gelu = block.mlp.activation.approximate if isinstance(block.mlp.activation, nn.GELU) else None  # is fused

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
        weights = folded_weights(block)
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv, self.project, self.expand, self.contract = (
            PackedLinear(*weights[name], dtype) for name in ("qkv", "project", "expand", "contract")
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
        weights = folded_weights(block)
        D = block.norm1.normalized_shape[0]
        qkv, qkv_bias = weights["qkv"]
        project, project_bias = weights["project"]
        # Softmax rows sum to one, so scaling the columns of v scales the columns of the attention output.
        scales = column_scales(ranges[prefix + "attention.project"], project)
        qkv[2 * D :] /= scales[:, None]
        qkv_bias[2 * D :] /= scales
        self.project = Int8Linear(project * scales, project_bias, 1.0, 128)
        scales = column_scales(ranges[prefix + "attention.qkv"], qkv)
        self.norm1 = _scaled_norm(block.norm1, scales)
        self.qkv = Int8Linear(qkv * scales, qkv_bias, 1.0, 128, out_dtype=torch.bfloat16)
        expand, expand_bias = weights["expand"]
        scales = column_scales(ranges[prefix + "mlp.expand"], expand)
        self.norm2 = _scaled_norm(block.norm2, scales)
        self.expand = Int8Linear(expand * scales, expand_bias, 1.0, 128)
        contract, contract_bias = weights["contract"]
        outliers, low, high = split_outlier_columns(*ranges[prefix + "mlp.contract"])
        self.hidden_scale = (high - low) / 255
        self.hidden_zero_point = round(-low / self.hidden_scale)
        self.outlier_weights = None  # of hidden columns too large for int8: two narrow GEMMs in fp32
        if len(outliers):
            is_gated = len(expand) == 2 * contract.shape[1]  # SwiGLU: a hidden column is made from two rows
            rows = torch.cat([outliers, outliers + contract.shape[1]]) if is_gated else outliers
            self.outlier_weights = (expand[rows] * scales, expand_bias[rows], contract[:, outliers].T.contiguous())
            contract = contract.index_fill(1, outliers, 0.0)
        self.contract = Int8Linear(contract, contract_bias, self.hidden_scale, self.hidden_zero_point)

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


def folded_weights(block: EncoderBlock) -> dict[str, tuple[Tensor, Tensor]]:
    """fp32 copies of a block's weights and biases, with 1/√d and layer scale folded in."""
    attention, mlp = block.attention, block.mlp
    layers = {"qkv": attention.qkv, "project": attention.project, "expand": mlp.expand, "contract": mlp.contract}
    folded: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in layers.items():
        weight = layer.weight.detach().float().clone()
        masked = layer.masked_bias() if isinstance(layer, QKVLinear) else layer.bias
        bias = torch.zeros(len(weight)) if masked is None else masked.detach().float().clone()
        layer_scale = {"project": block.residual1.scale, "contract": block.residual2.scale}.get(name)
        if layer_scale is not None:
            weight, bias = weight * layer_scale.detach()[:, None], bias * layer_scale.detach()
        if name == "qkv" and isinstance(attention.norm_q, nn.Identity):
            D = weight.shape[1]
            weight[:D] *= (D // attention.heads) ** -0.5
            bias[:D] *= (D // attention.heads) ** -0.5
        folded[name] = weight, bias
    return folded


def column_scales(low_high_2K: Tensor, weight_NK: Tensor) -> Tensor:
    """int8 scales (K,) of the columns of x. Half of a column's magnitude stays in x, half moves into W."""
    max_abs_K = low_high_2K.abs().amax(dim=0).clamp_min(1e-5)
    smoothing_K = (max_abs_K / weight_NK.abs().amax(dim=0).clamp_min(1e-5)).sqrt()
    return smoothing_K * (max_abs_K / smoothing_K).amax() / 127


def split_outlier_columns(low_F: Tensor, high_F: Tensor) -> tuple[Tensor, float, float]:
    """Indices of the hidden columns to keep out of int8, and the range that int8 covers for the others.

    After GELU a few columns can be thirty times as large as the others (arXiv 2402.17762); one scale for all would
    leave no precision for the rest.
    """
    descending = high_F.sort(descending=True).values
    count = min(MAX_OUTLIERS, len(high_F) - 1)
    outliers = (
        (high_F > descending[count]).nonzero().flatten()
        if descending[0] > OUTLIER_RATIO * descending[count]
        else high_F.new_empty(0)
    )
    outliers = outliers.long()
    is_int8 = torch.ones(len(high_F), dtype=torch.bool).index_fill(0, outliers, False)
    return outliers, min(float(low_F[is_int8].min()), -1e-6), max(float(high_F[is_int8].max()) * HIDDEN_CLIP, 1e-6)


def _scaled_norm(norm: nn.LayerNorm, scales_D: Tensor) -> tuple[Tensor, Tensor, float]:
    return norm.weight.detach() / scales_D, norm.bias.detach() / scales_D, norm.eps
