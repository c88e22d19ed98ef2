"""The fused encoder for NVIDIA GPUs: the blocks of models/vit.py with Triton kernels between the GEMMs.

One autograd function covers all blocks; `encoder_forward.py` and `encoder_backward.py` spell out both passes. For the
backward pass each block saves, in bf16, the activations that are expensive to recompute: both residual sums, qkv, the
attention output and the MLP's hidden activations before GELU. The outputs of norms and GELU are saved only
where they are small.

If the head reads only the class token, the last block computes nothing else after attention: its other tokens
contribute keys and values only.

Layer scale is part of the weights (`linear.py`). Dropout masks are not stored but computed from seeds in both passes.
Attention dropout uses PyTorch's attention. With activation checkpointing only the inputs of the blocks are saved.

Frozen weights have no weight-gradient GEMM. Blocks before the first one that trains save nothing and have no backward
pass if the embedding is frozen, too.

With FP8 the large GEMMs of the forward pass and the input-gradient GEMMs have e4m3 operands with one scale per row. In
wide models so do the weight-gradient GEMMs (`fp8_wgrad`). The attention output stays in bf16 in training.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vitral.distributed.gradients import GradientReducer
from vitral.kernels.encoder_backward import BackwardPass
from vitral.kernels.encoder_forward import ForwardPass
from vitral.kernels.layernorm_gelu.op import ACTIVATION_NAMES
from vitral.kernels.linear import EncoderWeights, layer_scales
from vitral.kernels.swiglu.op import MAX_COLS
from vitral.models.lora import LoRALinear
from vitral.models.token_merging import TokenMergingViT
from vitral.models.vit import Encoder, EncoderBlock, Grid, Residual, RopeTable, SwiGLU, ViT

RECOMPUTE_THRESHOLD = 2**25  # with more hidden activations per block, norms and GELU are recomputed instead of saved
MAX_WIDTH = 4096  # a program holds whole rows of tokens


def unsupported_architecture(model: ViT, fp8: bool = False, training: bool = True) -> str | None:
    """The first property of the model that the fused encoder does not support, or None."""
    cls = ViT if isinstance(model, TokenMergingViT) and not training else type(model)  # see kernels/token_merging.py
    if (cls.forward, cls.features, cls.pool) != (ViT.forward, ViT.features, ViT.pool):
        return "the model overrides the forward pass of ViT"
    encoder = model.encoder
    if type(encoder) is not Encoder:
        return "the model overrides the forward pass of ViT"
    if not isinstance(encoder.norm, nn.LayerNorm):
        return "the final norm is not a LayerNorm"
    blocks: list[Any] = list(encoder.blocks)
    for block in blocks:
        if type(block) is not EncoderBlock:
            return f"the blocks are {type(block).__name__}, not EncoderBlock"
        if not isinstance(block.mlp.activation, (nn.GELU, *ACTIVATION_NAMES)):
            return f"the activation {model.config.activation} is not supported"
        if training and block.attention.dropout_attention and encoder.activation_checkpointing:
            return "attention dropout cannot be recomputed with activation checkpointing"
        width = block.attention.qkv.in_features
        if width > MAX_WIDTH:
            return f"the width {width} exceeds {MAX_WIDTH}"
        if (width // block.attention.heads) % 8:
            return f"the head width {width // block.attention.heads} is not a multiple of 8"
        if block.mlp.contract.in_features > MAX_COLS and isinstance(block.mlp.activation, SwiGLU):
            return f"the hidden width {block.mlp.contract.in_features} of SwiGLU exceeds {MAX_COLS}"
        if fp8 and (block.mlp.expand.in_features % 16 or block.mlp.contract.in_features % 16):
            return "the widths are not multiples of 16, which FP8 GEMMs require"
        if fp8 and any(isinstance(m, LoRALinear) and m.lora_dropout.p for m in block.modules()):
            return "LoRA uses dropout, which needs bf16"
        if training and any(
            isinstance(layer, LoRALinear) and scale.requires_grad for layer, scale in layer_scales(block).items()
        ):
            return "LoRA trains together with layer scale"
    return None


class FusedEncoder:
    """`FusedEncoder(encoder)(tokens, grid)` computes `encoder(tokens, grid)`, with gradients if they are enabled.

    dtype: of activations and GEMMs; fp32 only in tests.
    recompute_threshold: see RECOMPUTE_THRESHOLD.
    cls_only: return only the first token, (B, 1, D).
    fp8_wgrad: weight-gradient GEMMs in FP8 too.
    fused_block_min_tokens: minimum number of tokens for the fused post-attention kernel, which also requires that norms
        and GELU are not saved and no branches are dropped. In FP8 inference, minimum for the fused expansion with
        GELU. None: never.
    reducer: takes the gradients of each block while the backward pass continues with the block before it.
    weights: of the GEMMs, if they are not copies of the encoder's own.
    """

    def __init__(
        self,
        encoder: Encoder,
        fp8: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        recompute_threshold: int | None = None,
        cls_only: bool = False,
        fp8_wgrad: bool = False,
        fused_block_min_tokens: int | None = None,
        reducer: GradientReducer | None = None,
        weights: EncoderWeights | None = None,
    ) -> None:
        self.reducer = reducer
        self.encoder, self.fp8, self.dtype, self.cls_only = encoder, fp8, dtype, cls_only
        self.fused_block_min_tokens = fused_block_min_tokens
        self.recompute_threshold = RECOMPUTE_THRESHOLD if recompute_threshold is None else recompute_threshold
        self.blocks: list[Any] = list(encoder.blocks)
        self.norm: Any = encoder.norm
        self.parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
        trained = [i for i, block in enumerate(self.blocks) if any(p.requires_grad for p in block.parameters())]
        # Blocks before the first one that trains. The last block always saves its activations for the final norm.
        self.num_frozen_blocks = min(trained[0] if trained else len(self.blocks), len(self.blocks) - 1)
        self.weights = weights or EncoderWeights(encoder, fp8, dtype, cls_only, fp8_wgrad)
        residuals = [residual for block in self.blocks for residual in (block.residual1, block.residual2)]
        self.dropped_residuals: list[Residual] = [residual for residual in residuals if residual.drop]
        self.drop_probs = torch.tensor(
            [[residual.drop] for residual in self.dropped_residuals], device=next(encoder.parameters()).device
        )
        self.dropout_blocks = [block for block in self.blocks if block.mlp.dropout.p or block.attention.dropout.p]
        self.dropout_seeds: Tensor | None = None  # fixed in self-checks; drawn in each pass otherwise
        self.activation_checkpointing = encoder.activation_checkpointing

    def __call__(self, z_BTD: Tensor, grid: Grid, kept_BT: Tensor | None = None) -> Tensor:
        rope = self.rope_table(grid)
        if rope is not None and kept_BT is not None:  # as in Encoder.forward
            rope = rope[:, kept_BT[0]]
        if not (torch.is_grad_enabled() and (z_BTD.requires_grad or self.parameters)):
            normed = ForwardPass(self, z_BTD, rope).run_blocks(z_BTD).normed
            assert normed is not None
            return normed.view(len(z_BTD), -1, z_BTD.shape[2])
        tokens: Tensor = FusedEncoderFunction.apply(z_BTD, rope, self, *self.parameters)  # type: ignore[no-untyped-call]
        return tokens

    def rope_table(self, grid: Grid) -> RopeTable | None:
        rotary = self.encoder.rotary_position
        return None if rotary is None else rotary(grid)

    @torch.no_grad()
    def forward_backward(self, z_BTD: Tensor, grid: Grid) -> None:
        """Run both passes in this thread (autograd has threads of its own) and discard the gradients."""
        if not (z_BTD.requires_grad or self.parameters):
            self(z_BTD, grid)
            return
        ctx = SimpleNamespace()
        out = FusedEncoderFunction.forward(ctx, z_BTD, self.rope_table(grid), self, *self.parameters)
        FusedEncoderFunction.backward(ctx, out)


class FusedEncoderFunction(torch.autograd.Function):
    """All blocks and the final norm: equations 2 to 4 of the paper."""

    @staticmethod
    def forward(ctx: Any, z_BTD: Tensor, rope: RopeTable | None, encoder: FusedEncoder, *parameters: Tensor) -> Tensor:
        encoder.weights.ensure_cast()
        num_frozen = 0 if z_BTD.requires_grad else encoder.num_frozen_blocks
        ctx.forward_pass = ForwardPass(encoder, z_BTD, rope, [], num_frozen)
        ctx.final_norm = ctx.forward_pass.run_blocks(z_BTD)
        return ctx.final_norm.normed.view(len(z_BTD), -1, z_BTD.shape[2])

    @staticmethod
    def backward(ctx: Any, grad_out_BTD: Tensor) -> tuple[Tensor | None, ...]:
        backward_pass = BackwardPass(ctx.forward_pass, ctx.final_norm)
        grad_z_BTD = backward_pass.run(grad_out_BTD)
        param_grads = (backward_pass.param_grads.get(parameter) for parameter in backward_pass.encoder.parameters)
        return grad_z_BTD, None, None, *param_grads
