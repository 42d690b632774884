"""A step in small: every kernel that a step of a plan starts on a GPU, on a few tokens, before there is a model.

On a GPU it has libraries loaded, handles made and kernels compiled by the time that the first step wants them
(launcher.training.warmup). On torch's meta device nothing is computed, and it tells which kernels are to be compiled
(launcher.training.precompile). It may run in a thread beside the one that loads the model: it makes no nn.Module, since
those that load models change what such are made of, and gives every tensor its type and device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from launcher.families import Family, family_of, lora_pattern, matched_modules, trains_fully
from launcher.kernels import fused_layers
from launcher.spec import RunPlan
from launcher.training import attention_rows, token_loss
from launcher.training.attention import packed_attention
from launcher.training.attention_calls import Call
from launcher.training.attention_layout import Layout, make_layout
from launcher.training.attention_ways import Three
from launcher.training.fused import blocks
from launcher.training.fused.projections import Joined, Projection

PREFIX, DOCUMENT = 64, 32  # tokens: a group of a prefix and two documents
TOKENS = PREFIX + 2 * DOCUMENT
PATCHES = 64  # of an image
WORDS = 4096  # of a vocabulary
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
Attend = Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]
NORMS = {"qwen3": "LayerNorm", "qwen2_5": "RMSNorm"}  # of vision towers, by Family.tower


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of a decoder layer, as config.json has them."""

    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int
    eps: float

    @classmethod
    def of(cls, arch: dict[str, Any]) -> Sizes:
        """Those of a plan's `arch`."""
        text = arch.get("text_config") or arch
        heads = int(text["num_attention_heads"])
        return cls(
            hidden=int(text["hidden_size"]),
            inner=int(text.get("intermediate_size") or 0),  # layers of experts alone have none
            heads=heads,
            key_heads=int(text.get("num_key_value_heads") or heads),
            head=int(text.get("head_dim") or text["hidden_size"] // heads),
            vocabulary=int(text["vocab_size"]),
            eps=float(text.get("rms_norm_eps", 1e-6)),
        )


class Rehearsal:
    """The parts of a plan's step on a device; raises KeyError for a plan that has none of these kernels (fp32).

    `padded`: attention is padded and masked.
    """

    def __init__(self, plan: RunPlan, device: torch.device, *, padded: bool = False) -> None:
        self.plan, self.device, self.dtype, self.padded = plan, device, FORMATS[plan.precision], padded
        self.family: Family = family_of(plan.config.model, plan.arch)
        self.sizes = Sizes.of(plan.arch)
        self.fused = fused_layers(plan.config, self.family, "cuda")[0]

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros: whatever lies in memory may be no number, which some kernels are slow with."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def layer(self) -> blocks.Layer:
        """A decoder layer as the fused functions see it, tuned as the plan says, its weights where a step has them."""
        s, trains = self.sizes, trains_fully("language", self.plan.config.tune)

        def norm(size: int) -> Any:
            return SimpleNamespace(weight=self.new(size).requires_grad_(trains), variance_epsilon=s.eps)

        mine, keys = s.heads * s.head, s.key_heads * s.head
        layer = blocks.Layer(
            before=norm(s.hidden),
            qkv=self._joined(s.hidden, {"self_attn.q_proj": mine, "self_attn.k_proj": keys, "self_attn.v_proj": keys}),
            norms=(norm(s.head), norm(s.head)) if self.family.qk_norm else None,
            out=self._joined(mine, {"self_attn.o_proj": s.hidden}),
            after=norm(s.hidden),
            gate_up=self._joined(s.hidden, {"mlp.gate_proj": s.inner, "mlp.up_proj": s.inner}),
            down=self._joined(s.inner, {"mlp.down_proj": s.hidden}),
            heads=(s.heads, s.key_heads),
        )
        whole = self.plan.deepspeed.get("zero_optimization", {}).get("stage", 0) < 3
        if whole and self.plan.config.tune.name != "qlora":  # as launcher.training.engine does
            for joined in (layer.qkv, layer.out, layer.gate_up, layer.down):
                joined.lay_together()
        return layer

    def _joined(self, inputs: int, outputs: dict[str, int]) -> Joined:
        return Joined(*(self._projection(name, inputs, size) for name, size in outputs.items()))

    def _projection(self, name: str, inputs: int, outputs: int) -> Projection:
        tune = self.plan.config.tune
        trains = trains_fully("language", tune)
        weight = self.new(outputs, inputs).requires_grad_(trains)
        base = SimpleNamespace(weight=weight, bias=None, in_features=inputs, out_features=outputs)
        if not matched_modules(lora_pattern(self.family, tune), [f"{self.family.language}.layers.0.{name}"]):
            return Projection(base=base)
        down, up = self.new(tune.r, inputs).requires_grad_(True), self.new(outputs, tune.r).requires_grad_(True)
        return Projection(
            base=base, down=SimpleNamespace(weight=down, out_features=tune.r), up=SimpleNamespace(weight=up)
        )

    def layout(self) -> Layout:
        """Who attends to whom: of a reranker, documents that share a beginning; else whole prompts."""
        bounds = [(0, PREFIX), (PREFIX, PREFIX + DOCUMENT), (PREFIX + DOCUMENT, TOKENS)]
        shares = self.plan.config.task.name == "rerank"
        before = [(0, 0), (0, PREFIX), (0, PREFIX)] if shares else [(0, 0)] * len(bounds)
        return make_layout(bounds, before, padded=self.padded).to(self.device)

    def attention(self, attend: Attend) -> None:
        """Attention alone, there and back."""
        s = self.sizes
        counts = (s.heads, s.key_heads, s.key_heads)
        q, k, v = (self.new(TOKENS, heads, s.head).requires_grad_(True) for heads in counts)
        out = attend(q, k, v, self.layout(), s.head**-0.5)
        out.backward(torch.zeros_like(out))

    def layers(self, attend: Attend) -> None:
        """Decoder layers, there and back.

        Two: the gradient that comes from a layer lies otherwise in memory than one that comes from the head.
        """
        if not self.fused:
            return
        s, layer, packed = self.sizes, self.layer(), self.layout()
        x = self.new(TOKENS, s.hidden).requires_grad_(trains_fully("embeddings", self.plan.config.tune))
        cos, sin = self.new(TOKENS, s.head), self.new(TOKENS, s.head)
        for _ in range(2):
            q, k, v, x = blocks.before_attention(layer, x, cos, sin)
            attended = attend(q, k, v, packed, s.head**-0.5).flatten(1)
            x = blocks.after_attention(layer, x, attended)
        if x.requires_grad:
            x.backward(torch.zeros_like(x))

    def merged_calls(self) -> None:
        """The sums of attention in two merged calls, which long prefixes get."""
        if self.plan.config.task.name != "rerank":
            return
        s = self.sizes
        rows = torch.arange(DOCUMENT, dtype=torch.int32, device=self.device)
        out, lse = self.new(TOKENS, s.heads, s.head), self.new(TOKENS, s.heads, dtype=torch.float32)
        attention_rows.merge_(out, lse, out.clone(), lse.clone(), rows)
        for heads in sorted({s.heads, s.key_heads}):
            total = self.new(TOKENS, heads, s.head)
            attention_rows.add_(total, total.clone(), rows)

    def answers(self) -> None:
        """What the loss of answer tokens is read off logits with, of fewer words than the vocabulary has."""
        if self.plan.config.task.name != "sft":
            return
        words = WORDS + self.sizes.vocabulary % WORDS  # what kernels know of their number: whether 16 divides it
        logits, wanted = self.new(DOCUMENT, words), self.new(DOCUMENT, dtype=torch.int64)
        _, top, log_sum = token_loss.statistics(logits, wanted)
        token_loss.slope_(logits, wanted, top, log_sum, torch.ones_like(top))

    def tower(self) -> None:
        """What lies between the products of a frozen vision tower."""
        from launcher.training import vision_kernels  # Triton is imported where a GPU is

        vision = self.plan.arch.get("vision_config")
        if not vision or self.family.tower not in NORMS or self.plan.config.tune.vision != "frozen":
            return
        width, heads = int(vision["hidden_size"]), int(vision["num_heads"])
        x, weight = self.new(PATCHES, width), self.new(width)
        bias = weight if NORMS[self.family.tower] == "LayerNorm" else None
        for delta in (None, x.clone()):
            vision_kernels.add_norm_(x, delta, weight, bias, 1e-6)
        angles = self.new(PATCHES, width // heads // 2, dtype=torch.float32)
        vision_kernels.turn_(self.new(PATCHES, 3, heads, width // heads), angles, angles)
        if bias is None:
            inner = self.new(PATCHES, int(vision["intermediate_size"]))
            vision_kernels.silu_times_(inner, inner.clone())

    def everything(self, attend: Attend) -> None:
        """All of it; `attend` is a kernel of launcher.training.attention.KERNELS."""
        self.layers(attend)
        self.merged_calls()
        self.answers()
        self.tower()


class Nothing:
    """launcher.training.attention_ways.Part that computes nothing: on the meta device no kernel runs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Of Part."""
        return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)

    def backward(
        self, grad: Tensor, tensors: Three, out: Tensor, lse: Tensor, call: Call, scale: float, causal: bool
    ) -> Three:
        """Of Part."""
        q, k, v = (t.new_empty(t.shape) for t in tensors)
        return q, k, v


def attend_nothing(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """As kernels of launcher.training.attention.KERNELS, without one."""
    return packed_attention(q, k, v, layout, scale, make_part=Nothing)
