"""The few numbers of a step's time that no data sheet tells.

Fitted on seven runs of Qwen3-VL-Reranker-8B and Qwen3-VL-4B on one and two H200s and judged on seven others
(tests/bench/speed_runs.py has both), then on 28 of tests/bench/memory.py, foretold before they were made; two constants
were changed after those (tests/bench/RESULTS.md). What ZeRO-3 takes of the host is the least certain: two hosts with
the same GPUs differed by half in it.
"""

from __future__ import annotations

from dataclasses import dataclass

# Matrix products: share of the best rate, and the width and rows at which half of that is reached.
PRODUCTS = 0.926
HALF_WIDTH, HALF_ROWS = 250.0, 150.0
# Attention: keys a query has on average at which half of its rate is reached; the backward pass's share of the rate;
# the tower's (heads of 72 or 80 values are computed as 128); that of padded and masked rows (attention=sdpa).
HALF_KEYS, ATTENTION_BACKWARD, VISION_ATTENTION, PADDED_ATTENTION = 100.0, 0.65, 0.42, 0.25
FP32_SLOWDOWN = 12.0  # products in float32, which torch keeps off the tensor cores; H100's data sheet: 67 against 989
THIN = 1.4  # adapters: traffic of products with a side of a few values, over that of elementwise kernels
SCATTER_BYTES = 140.0  # a value: gradients of keys that several documents share, added up by atomic operations
DEQUANTISE_BYTES = 9.6  # a weight and use: 4-bit weights to bf16
PICTURE_S = 6.7e-6  # a patch, of one thread: 27 ms for a page of 4,032, decoding included
WORKERS = 15  # threads that make pictures for a rank whose processors nobody has counted
MICRO_STEP_S, STEP_S = 0.018, 0.01  # before the first kernel runs; loss, norm and log of a step

# Kernels that the host calls in a forward pass; the backward pass is called from C++ and has more of them.
LAYER_KERNELS, ADAPTER_KERNELS, VISION_KERNELS, EXPERT_KERNELS, DELTA_KERNELS = 65, 4, 45, 10, 400
BACKWARD_KERNELS = 1.3
# Host time of each tensor that trains: in a backward pass, and in an optimizer step of stages 0 and 1,
# of stage 2 and of stage 3.
TENSOR_MICRO_S, TENSOR_STEP1_S, TENSOR_STEP_S, TENSOR_STEP3_S = 5e-5, 3.5e-5, 8.2e-5, 1.6e-3
# ZeRO-3's Python around each module and each module that has weights to gather, and the backward pass's share.
MODULE_S, GATHER_S, ZERO3_BACKWARD = 3.6e-4, 6.1e-4, 0.515

# Bytes of a trained parameter that pass a GPU's memory: a micro-step's gradient put into its bucket and added to the
# float32 sum, which stage 2 takes many small steps for; then norm, clipping, AdamW and the copy into 16 bits.
GRADIENT_BYTES, STAGE2_GRADIENT_BYTES, OPTIMIZER_BYTES = 14.0, 80.0, 46.0

# Fused decoder layers (train.kernels=auto on GPUs), and what came with them: sums of kernels in profiles of whole steps
# of text, page and chat on one H200 with torch 2.11, LoRA and ZeRO-1 (tests/bench/RESULTS.md). Single kernels in bursts
# are up to 20 % faster; FUSED_ADDING and LEAF_S are of such, and not of runs yet.
FUSED_PRODUCTS = 0.942
FUSED_MEMORY = 0.975  # of STREAMED: norms, sums, SwiGLU and their gradients
FUSED_ADDING = 2.0  # kernels that add adapters (ZeRO-3, 4-bit weights) take so many times as long
FUSED_THIN = 1.0  # products with a side of a few values


@dataclass(frozen=True, slots=True)
class Attention:
    """Of each pass: share of rates.attention_tflops that long segments reach, and keys a query has on average at which
    half of that is reached; `vision`: the share of both with a tower's heads of 72."""

    forward: float
    half_forward: float
    backward: float
    half_backward: float
    vision: float


FLASH = Attention(1.04, 583.0, 0.80, 418.0, 0.64)  # PyTorch's and flash-attn 2
# On Hopper. Half of cuDNN's backward pass is no product: sums over each row of results, of heads, and into 16 bits.
# flash-attn 4's are of text, page, imgq, chat, and of 16 pages in the tower; flash-attn 3 was never measured.
CUDNN = Attention(1.57, 670.0, 1.47, 1430.0, 0.64)
ATTENTION = {
    "cudnn": CUDNN,
    "flash_attention_3": CUDNN,
    "flash_attention_4": Attention(1.67, 800.0, 1.33, 750.0, 0.87),
}
# Kernels called for a layer in each pass, of which Python calls the backward pass's too; ZeRO-3's Python for one, and
# for a block of the tower beside them; its optimizer step for each tensor that trains. The last two are of one H200:
# 0.25 s for a tower of 24 blocks, gathers with it; 0.13 s for 398 tensors of Qwen3-VL-4B, as long for 504 adapters.
# WHOLE_BLOCK_S is of a tower that is gathered at once, an upper bound: no step of one H200 waited for it.
FUSED_KERNELS, FUSED_BACKWARD_KERNELS, LEAF_S, BLOCK_S, FUSED_STEP3_S = 60, 80, 2.0e-3, 7.5e-3, 3.0e-4
WHOLE_BLOCK_S = 1.0e-3
