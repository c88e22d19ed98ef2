"""Forward pass of the fused encoder.

    z' = MSA(LN(z)) + z,   z = MLP(LN(z')) + z'   (equations 2 and 3)

A residual addition and the norm that follows it are one kernel. A block therefore returns its second addition pending
(`PendingResidual`), and the first norm of the next block, or the final norm, completes it.

With activation checkpointing only the input of each block is saved (`BlockCheckpoint`), and the backward pass computes
the block's activations again. Dropout masks are computed from seeds in both passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.kernels.attention import op as attention_op
from vitral.kernels.block.op import BlockActivations, expand_gelu_fp8, post_attention
from vitral.kernels.dropout.op import NO_DROPOUT, Dropout, draw_seeds
from vitral.kernels.fp8.op import Fp8Tensor, GemmBound
from vitral.kernels.layernorm_gelu.op import (
    AddNormOutput,
    LayerNormParams,
    activation_name,
    add_layernorm,
    bias_gelu,
)
from vitral.kernels.linear import AllocateFn, Workspace
from vitral.kernels.qk_norm_rope.op import QkNormParams, qk_norm_rope
from vitral.kernels.short_attention import op as short_attention_op
from vitral.kernels.swiglu.op import swiglu
from vitral.models.vit import Residual, RopeTable

if TYPE_CHECKING:
    from vitral.kernels.encoder import FusedEncoder


class PendingResidual(NamedTuple):
    """x + branch_scale·dropout(branch + bias), which the next norm's kernel computes."""

    x: Tensor
    branch: Tensor | None = None
    bias: Tensor | None = None
    branch_scale: Tensor | None = None
    dropout: Dropout = NO_DROPOUT


class BlockDropout(NamedTuple):
    """The dropout masks of one block."""

    project: Dropout = NO_DROPOUT
    gelu: Dropout = NO_DROPOUT
    contract: Dropout = NO_DROPOUT


NO_BLOCK_DROPOUT = BlockDropout()


class QkvInput(NamedTuple):
    """A block's input with its first norm, and qkv (M, 3D) computed from it."""

    norm1: AddNormOutput
    qkv: Tensor
    bound: GemmBound | None = None


class AttentionOutput(NamedTuple):
    """Output of attention, (M, D), in bf16 or FP8, and the tensors that its backward pass needs."""

    out: Tensor | None
    out_fp8: Fp8Tensor | None = None
    inputs: tuple[Tensor, ...] = ()  # q, k, v as attention read them; empty for `short_attention`
    lse: Tensor | None = None  # of `attention_forward`; None if PyTorch computed attention


class SavedForBackward(NamedTuple):
    """Activations of one block. None: recomputed in the backward pass."""

    block: Any
    norm1: AddNormOutput
    qkv: Tensor
    attn_inputs: tuple[Tensor, ...]
    lse: Tensor | None
    attn_out: Tensor
    norm2: AddNormOutput
    hidden: Tensor  # before bias and GELU
    gelu: Tensor | None
    cls_only: bool  # attn_out and everything after it hold class tokens only


class BlockCheckpoint(NamedTuple):
    """The input of one block, from which the backward pass computes its activations again."""

    block: Any
    x: Tensor


class ForwardPass:
    """One call of the encoder. With `saved`, activations for the backward pass are appended to it, block by block.

    Without it (inference) and in the first `num_frozen` blocks, through which no gradient flows, blocks share a
    workspace and residual sums are computed in place. With activation checkpointing the same holds for all blocks but
    the last, except that the sum before the MLP does not overwrite the block's input.
    """

    def __init__(
        self, encoder: FusedEncoder, z_BTD: Tensor, rope: RopeTable | None,
        saved: list[SavedForBackward | BlockCheckpoint] | None = None, num_frozen: int = 0,
    ) -> None:  # fmt: skip
        self.encoder, self.rope, self.saved, self.num_frozen = encoder, rope, saved, num_frozen
        self.is_saving = saved is not None
        self.shape = z_BTD.shape
        self.B, self.T, _ = z_BTD.shape
        self.num_tokens = self.B * self.T
        self.branch_scales = self.draw_branch_scales()
        self.dropouts, self.lora_dropouts = self.draw_dropouts()
        self.checkpoints = saved is not None and encoder.activation_checkpointing
        self.first_saved = len(encoder.blocks) - 1 if self.checkpoints else num_frozen
        keeps = any(self.keeps_norm_and_gelu(block) for block in encoder.blocks)
        is_plain = not (self.branch_scales or self.dropouts or keeps or encoder.fp8 or self.checkpoints)
        is_plain = is_plain and not encoder.weights.separate_lora
        self.fuses_blocks = self.reaches_fused_block_minimum() and is_plain
        self.workspace: Workspace | None = None

    def run_blocks(self, z_BTD: Tensor) -> AddNormOutput:
        """All blocks and the final norm; `normed` is (M, D), or (B, D) with `cls_only`."""
        encoder = self.encoder
        residual = PendingResidual(z_BTD.reshape(self.num_tokens, -1).to(encoder.dtype).contiguous())
        fuses_blocks = self.fuses_blocks
        if self.saved is None or self.first_saved:
            self.is_saving, self.fuses_blocks = False, fuses_blocks and not self.first_saved
            self.workspace = self.allocate_workspace(residual.x)
        qkv_input: QkvInput | None = None
        for index, block in enumerate(encoder.blocks):
            if index == self.first_saved and self.saved is not None:
                self.is_saving, self.fuses_blocks, self.workspace = True, fuses_blocks, None
            encoder.weights.fetch(block)
            next_block = encoder.blocks[index + 1] if index + 1 < len(encoder.blocks) else None
            qkv_input = qkv_input or self.norm1_qkv(block, residual)
            if self.saved is not None and self.num_frozen <= index < self.first_saved:
                self.saved.append(BlockCheckpoint(block, qkv_input.norm1.sum))
            if self.fuses_blocks and next_block is not None:
                qkv_input = self.run_fused_block(block, next_block, qkv_input)
            else:
                residual, qkv_input = self.run_block(block, qkv_input), None
        return self.add_and_norm(residual, encoder.norm, fp8=False, in_place=not self.is_saving)

    def recompute(self, checkpoint: BlockCheckpoint) -> None:
        """Append the activations of a block to `saved`, computed from its input with the same random draws."""
        self.run_to_gelu(checkpoint.block, self.norm1_qkv(checkpoint.block, PendingResidual(checkpoint.x)))

    def add_and_norm(
        self, residual: PendingResidual, norm: nn.LayerNorm, fp8: bool, store_normed: bool = True,
        in_place: bool = False,
    ) -> AddNormOutput:  # fmt: skip
        x, branch, bias, branch_scale, dropout = residual
        return add_layernorm(x, branch, bias, branch_scale, norm_params(norm), fp8, store_normed, in_place, dropout)

    def linear(
        self, layer: Any, x: Tensor | None, x_fp8: Fp8Tensor | None, allocate: AllocateFn | None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, GemmBound | None]:  # fmt: skip
        """x·Wᵀ + bias with the layer's low-rank update, and the bound of an FP8 GEMM."""
        weights = self.encoder.weights
        out, bound = weights.linear(x, x_fp8, layer.weight, bias, allocate)
        if layer in weights.separate_lora:
            assert x is not None
            weights.add_lora(out, layer, x.detach(), self.lora_dropouts.get(layer, NO_DROPOUT))
        return out, bound

    def norm1_qkv(self, block: Any, residual: PendingResidual) -> QkvInput:
        """qkv of LN(z), after completing the addition that the previous block left pending."""
        keeps, fp8, qkv = self.keeps_norm_and_gelu(block), self.encoder.fp8, block.attention.qkv
        norm1 = self.add_and_norm(residual, block.norm1, fp8, keeps or not fp8, self.adds_in_place(block))
        allocate = None if self.workspace is None else self.workspace.wide
        weights = self.encoder.weights
        out, bound = self.linear(qkv, norm1.normed, norm1.normed_fp8, allocate, weights.bias(qkv))
        return QkvInput(norm1._replace(normed=norm1.normed if keeps else None, normed_fp8=None), out, bound)

    def run_block(self, block: Any, qkv_input: QkvInput) -> PendingResidual:
        """One block, kernel by kernel."""
        norm2_sum, gelu, gelu_fp8 = self.run_to_gelu(block, qkv_input)
        branch = None if self.workspace is None else self.workspace.branch
        contract, weights = block.mlp.contract, self.encoder.weights
        contracted, _ = self.linear(contract, gelu, gelu_fp8, branch)
        scale, dropout = self.branch_scales.get(block.residual2), self.dropout(block).contract
        return PendingResidual(norm2_sum, contracted, weights.bias(contract), scale, dropout)

    def run_to_gelu(self, block: Any, qkv_input: QkvInput) -> tuple[Tensor, Tensor | None, Fp8Tensor | None]:
        """The residual sum after attention, and GELU in bf16 or FP8. Saves the block's activations."""
        encoder, weights, project, mlp = self.encoder, self.encoder.weights, block.attention.project, block.mlp
        norm1, qkv, qkv_bound = qkv_input
        keeps = self.keeps_norm_and_gelu(block)
        wide, branch = (None, None) if self.workspace is None else (self.workspace.wide, self.workspace.branch)
        cls_only = encoder.cls_only and block is encoder.blocks[-1]
        fp8 = encoder.fp8 and not cls_only

        attn = self.attend(block.attention, qkv, cls_only, qkv_bound)  # z' = MSA(LN(z)) + z
        x = norm1.sum[:: self.T].contiguous() if cls_only else norm1.sum
        projected, _ = self.linear(project, attn.out, attn.out_fp8, branch)
        scale, dropout = self.branch_scales.get(block.residual1), self.dropout(block)
        residual = PendingResidual(x, projected, weights.bias(project), scale, dropout.project)
        in_place = self.adds_in_place(block) and not self.checkpoints
        norm2 = self.add_and_norm(residual, block.norm2, fp8, keeps or not fp8, in_place)

        activation = activation_name(mlp)  # z = MLP(LN(z')) + z'
        gelu: Tensor | None = None
        gelu_fp8: Fp8Tensor | None
        if norm2.normed_fp8 is not None and self.fuses_expansion():
            quantized = weights.quantized[mlp.expand.weight]
            gelu_fp8 = expand_gelu_fp8(norm2.normed_fp8, quantized, mlp.expand.bias, activation)
        else:
            hidden, bound = self.linear(mlp.expand, norm2.normed, norm2.normed_fp8, wide)
            if activation == "swiglu":
                gelu, gelu_fp8 = swiglu(hidden, mlp.expand.bias, bound is not None, dropout.gelu)
            else:
                gelu, gelu_fp8 = bias_gelu(
                    hidden, mlp.expand.bias, activation, bound, in_place=not self.is_saving, dropout=dropout.gelu
                )
        norm2 = norm2._replace(normed=norm2.normed if keeps else None, normed_fp8=None)
        if self.saved is not None and self.is_saving:
            assert attn.out is not None
            saved = SavedForBackward(
                block, norm1, qkv, attn.inputs, attn.lse, attn.out, norm2, hidden, gelu if keeps else None, cls_only
            )
            self.saved.append(saved)
        return norm2.sum, gelu, gelu_fp8

    def run_fused_block(self, block: Any, next_block: Any, qkv_input: QkvInput) -> QkvInput:
        """One block with everything after attention as one kernel, which also computes the next block's qkv."""
        self.encoder.weights.fetch(next_block)
        (norm1, qkv, _), weights = qkv_input, (self.encoder.weights.compute, self.encoder.weights.biases)
        attn = self.attend(block.attention, qkv, cls_only=False, qkv_bound=None)
        assert attn.out is not None
        x = norm1.sum
        if self.saved is None:
            out = x if self.adds_in_place(block) else torch.empty_like(x)
            post_attention(attn.out, x, out, qkv, block, next_block, *weights)
            return QkvInput(norm1._replace(sum=out), qkv)
        hidden = x.new_empty(len(x), block.mlp.expand.out_features)
        save = BlockActivations(torch.empty_like(x), hidden, *(torch.empty_like(norm1.stats) for _ in range(2)))
        next_norm1, next_qkv = AddNormOutput(torch.empty_like(x), save.norm1_stats, None), torch.empty_like(qkv)
        post_attention(attn.out.detach(), x, next_norm1.sum, next_qkv, block, next_block, *weights, save)
        norm2 = AddNormOutput(save.mid, save.norm2_stats, None)
        self.saved.append(
            SavedForBackward(block, norm1, qkv, attn.inputs, attn.lse, attn.out, norm2, hidden, None, cls_only=False)
        )
        return QkvInput(next_norm1, next_qkv)

    def attend(self, attention: Any, qkv: Tensor, cls_only: bool, qkv_bound: GemmBound | None) -> AttentionOutput:
        """softmax(q·kᵀ/√d)·v (equations 5 to 7), for all queries or those of the class tokens.

        In FP8 in inference, where the kernel supports it. PyTorch's attention drops attention weights in training.
        """
        num_heads, qk_norm, D = attention.heads, qk_norm_params(attention), qkv.shape[1] // 3
        dropout_p = attention.dropout_attention if attention.training else 0.0
        use_kernels = not (cls_only or dropout_p)
        if short_attention_op.MAX_SHORT_TOKENS >= self.T and use_kernels:
            return AttentionOutput(short_attention_op.short_attention(qkv, num_heads, self.T, qk_norm, self.rope))
        q, k, v = qkv.chunk(3, dim=1)
        if qk_norm is not None or self.rope is not None:
            q, k = qk_norm_rope(qkv, num_heads, self.T, qk_norm, self.rope).view(2, -1, D)
        fits = attention_op.MAX_TOKENS >= self.T and attention_op.MAX_HEAD_DIM * num_heads >= D
        if fits and use_kernels:
            if qkv_bound is not None and self.saved is None:
                out_fp8 = attention_op.attention_forward_fp8(q, k, v, num_heads, self.T, qkv_bound)
                return AttentionOutput(None, out_fp8)
            out, lse = attention_op.attention_forward(q, k, v, num_heads, self.T)
            return AttentionOutput(out, None, (q, k, v), lse)
        return self.attend_with_pytorch(q, k, v, num_heads, cls_only, dropout_p)

    def attend_with_pytorch(
        self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, cls_only: bool, dropout_p: float
    ) -> AttentionOutput:
        """scaled_dot_product_attention with its own autograd graph, from q, k, v (M, D)."""
        D, training = q.shape[1], self.is_saving
        q, k, v = (x.unflatten(0, (self.B, self.T)).unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        if cls_only:
            q = q[:, :, :1]
        with torch.set_grad_enabled(training):
            q, k, v = (x.detach().requires_grad_(training) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p).transpose(1, 2).reshape(-1, D)
        return AttentionOutput(out, None, (q, k, v))

    def keeps_norm_and_gelu(self, block: Any) -> bool:
        """Whether the outputs of norms and GELU are saved for the backward pass, too."""
        is_small = self.num_tokens * block.mlp.expand.out_features <= self.encoder.recompute_threshold
        return self.is_saving and is_small and not self.encoder.weights.uses_fp8_wgrad(block)

    def fuses_expansion(self) -> bool:
        """Whether the MLP's expansion and GELU are one FP8 kernel, except for class tokens alone."""
        return self.encoder.fp8 and not self.is_saving and self.reaches_fused_block_minimum()

    def reaches_fused_block_minimum(self) -> bool:
        minimum = self.encoder.fused_block_min_tokens
        return minimum is not None and minimum <= self.num_tokens

    def adds_in_place(self, block: Any) -> bool:
        """Whether residual sums overwrite their input: in inference, except for the caller's tokens."""
        return not self.is_saving and block is not self.encoder.blocks[0]

    def allocate_workspace(self, tokens: Tensor) -> Workspace:
        """Sized for the widest MLP. With fused blocks only the last block uses it, perhaps only for class tokens."""
        encoder = self.encoder
        hidden_width = max(block.mlp.expand.out_features for block in encoder.blocks)
        branch_rows = self.B if self.fuses_blocks and encoder.cls_only else self.num_tokens
        hidden_rows = self.B * encoder.cls_only if self.fuses_expansion() else branch_rows
        return Workspace(tokens, hidden_width * hidden_rows, branch_rows)

    def draw_branch_scales(self) -> dict[Residual, Tensor]:
        """Stochastic depth: one factor per image and branch, 0 or 1/(1 - p), drawn for all blocks at once."""
        residuals, drop_probs = self.encoder.dropped_residuals, self.encoder.drop_probs
        if not (residuals and residuals[0].training):
            return {}
        keep = torch.rand(len(residuals), self.B, device=drop_probs.device) >= drop_probs
        return dict(zip(residuals, (keep.float() / (1 - drop_probs)).unbind(), strict=True))

    def draw_dropouts(self) -> tuple[dict[Any, BlockDropout], dict[Any, Dropout]]:
        """The dropout masks of the blocks, and of the inputs of low-rank updates, in training."""
        blocks = [block for block in self.encoder.dropout_blocks if block.mlp.dropout.training]
        lora_layers = [layer for layer in self.encoder.weights.separate_lora if layer.lora_dropout.training]
        if not (blocks or lora_layers):
            return {}, {}
        seeds = self.encoder.dropout_seeds
        if seeds is None:
            seeds = draw_seeds(3 * len(blocks) + len(lora_layers), self.encoder.drop_probs.device)
        rates = [p for block in blocks for p in (block.attention.dropout.p, block.mlp.dropout.p, block.mlp.dropout.p)]
        rates += [layer.lora_dropout.p for layer in lora_layers]
        masks = [Dropout(seed, p) if p else NO_DROPOUT for seed, p in zip(seeds, rates, strict=True)]
        dropouts = {block: BlockDropout(*masks[3 * n : 3 * n + 3]) for n, block in enumerate(blocks)}
        return dropouts, dict(zip(lora_layers, masks[3 * len(blocks) :], strict=True))

    def dropout(self, block: Any) -> BlockDropout:
        return self.dropouts.get(block, NO_BLOCK_DROPOUT)


def norm_params(norm: nn.LayerNorm) -> LayerNormParams:
    return LayerNormParams(norm.weight, norm.bias, norm.eps)


def qk_norm_params(attention: Any) -> QkNormParams | None:
    q, k = attention.norm_q, attention.norm_k
    return QkNormParams(q.weight, k.weight, q.bias, k.bias, q.eps) if isinstance(q, nn.LayerNorm) else None
