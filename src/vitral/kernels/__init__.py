"""Fused Triton kernels for NVIDIA GPUs.

Entry points: `backend.TritonBackend` for training, `inference.make_inference_forward` for the CUDA engine. Both compare
every kernel with PyTorch on the device before they use it (`self_check`, `encoder_checks`), after compiling all kernels
of a run in parallel (`precompile`).

The encoder (`encoder`, `encoder_forward`, `encoder_backward`) is one autograd function around cuBLAS GEMMs. Between two
GEMMs there is one kernel:

    LN + residual   layernorm_gelu
      ▼  qkv GEMM (linear)
    QK-norm, RoPE   qk_norm_rope
    attention       attention (65 to 640 tokens), short_attention (up to 64), or PyTorch
      ▼  projection GEMM
    LN + residual   layernorm_gelu
      ▼  MLP GEMM
    GELU            layernorm_gelu
      ▼  MLP GEMM; the next block's first kernel adds the residual

How a block runs, by mode:

| mode                       | GEMM inputs | block                                                             |
|----------------------------|-------------|-------------------------------------------------------------------|
| training, bf16             | bf16        | kernel by kernel; narrow models in large batches: `block`, forward |
| training, FP8              | FP8         | kernel by kernel; from width 512 weight gradients too (`fp8_wgrad`) |
| inference, bf16            | bf16        | kernel by kernel; narrow models: `block`                          |
| inference, FP8             | FP8         | kernel by kernel; narrow models: expansion and GELU in one kernel |

Norms and GELU outputs are saved for backward while a batch is small and recomputed above `RECOMPUTE_THRESHOLD`. The
last block computes only the class token if the model pools it.

Several processes: the backward pass gives each block's gradients to `vitral.distributed.gradients`. Under FSDP
(`sharded_model`, `sharded_weights`) the weights of a block are gathered just before it computes.
"""
