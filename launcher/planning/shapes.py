"""The sizes of a model, and how they are read from config.json.

Whatever is missing there, odd, or not trained right here is a problem.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.families import Family, family_of
from launcher.spec import ModelConfig

Linears = dict[str, tuple[int, int]]  # name of a linear module -> its input and output width


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """Sizes of the vision tower and its projector."""

    kind: str  # Family.tower
    depth: int
    hidden: int
    intermediate: int
    heads: int
    out_hidden: int
    patch_values: int  # numbers of one patch: channels x frames x side x side
    merge: int  # patches of one visual token: merge x merge
    positions: int  # learned position embeddings
    maps: tuple[int, ...]  # blocks whose feature maps are handed to early decoder layers
    windowed: int  # blocks whose patches attend inside a window only
    window_patches: int  # patches of such a window

    @property
    def deepstack(self) -> int:
        """Feature maps handed to early decoder layers."""
        return len(self.maps)

    @property
    def merged(self) -> int:
        """Width of the patches of one visual token side by side."""
        return self.hidden * self.merge**2

    @property
    def block(self) -> Linears:
        """Linear modules of one vision block."""
        h, i = self.hidden, self.intermediate
        attention = {"attn.qkv": (h, 3 * h), "attn.proj": (h, h)}
        if self.kind == "qwen2_5":
            return {**attention, "mlp.gate_proj": (h, i), "mlp.up_proj": (h, i), "mlp.down_proj": (i, h)}
        return {**attention, "mlp.linear_fc1": (h, i), "mlp.linear_fc2": (i, h)}

    @property
    def merger(self) -> Linears:
        """Linear modules of one merger."""
        first, second = ("mlp.0", "mlp.2") if self.kind == "qwen2_5" else ("linear_fc1", "linear_fc2")
        return {first: (self.merged, self.merged), second: (self.merged, self.out_hidden)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Sizes of a sparse MLP, whose experts are three-dimensional parameters and no linear modules."""

    count: int
    active: int  # of one token
    intermediate: int
    shared: int  # intermediate size of the expert that every token takes; 0 without


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Sizes of a linear-attention (gated delta net) layer."""

    keys: int  # width of all key heads together
    values: int  # width of all value heads together
    heads: int  # value heads
    keys_dim: int  # of a key head
    head_dim: int  # of a value head
    kernel: int  # taps of its convolution


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a model."""

    family: Family
    hidden: int
    intermediate: int  # of the dense MLP; 0 with experts
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    turning: int  # of a head's numbers, those that rotary positions turn
    vocab: int
    tied: bool
    attention_bias: bool
    experts: Experts | None
    delta: Delta | None
    attending: frozenset[int]  # numbers of the layers with attention; the others have `delta`
    vision: VisionShape | None

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def mlp_width(self) -> int:
        """Intermediate values that one token has in one layer."""
        e = self.experts
        return self.intermediate if e is None else e.active * e.intermediate + e.shared

    @property
    def expert_weights(self) -> int:
        """Weights of one layer's experts together, the shared one aside."""
        e = self.experts
        return 0 if e is None else e.count * 3 * self.hidden * e.intermediate

    def decoder(self, layer: int) -> Linears:
        """Linear modules of a decoder layer."""
        h, i = self.hidden, self.intermediate
        mlp = {"mlp.gate_proj": (h, i), "mlp.up_proj": (h, i), "mlp.down_proj": (i, h)}
        if self.experts is not None:
            s = self.experts.shared
            mlp = {
                "mlp.shared_expert.gate_proj": (h, s),
                "mlp.shared_expert.up_proj": (h, s),
                "mlp.shared_expert.down_proj": (s, h),
                "mlp.shared_expert_gate": (h, 1),
            } if s else {}  # fmt: skip
        if layer in self.attending or self.delta is None:
            q, kv = self.q_width, self.kv_width
            mixing = {
                "self_attn.q_proj": (h, 2 * q if self.family.gated else q),
                "self_attn.k_proj": (h, kv),
                "self_attn.v_proj": (h, kv),
                "self_attn.o_proj": (q, h),
            }
        else:
            d = self.delta
            mixing = {
                "linear_attn.in_proj_qkv": (h, 2 * d.keys + d.values),
                "linear_attn.in_proj_z": (h, d.values),
                "linear_attn.in_proj_a": (h, d.heads),
                "linear_attn.in_proj_b": (h, d.heads),
                "linear_attn.out_proj": (d.values, h),
            }
        return {**mixing, **mlp}

    @property
    def token_weights(self) -> int:
        """Weights of all decoder layers that multiply one token: of the experts only those that are active."""
        linears = _linear_weights(self)
        e = self.experts
        sparse = 0 if e is None else (e.active * 3 * e.intermediate + e.count) * self.hidden
        return linears + self.layers * sparse


@functools.lru_cache(maxsize=64)  # hundreds of settings of one model are weighed for a plan
def _linear_weights(shape: Shape) -> int:
    """Weights of the linear modules of all decoder layers."""
    return sum(weights(shape.decoder(n)) for n in range(shape.layers))


def weights(linears: Linears) -> int:
    """Weights of linear modules, without biases."""
    return sum(a * b for a, b in linears.values())


def read_shape(model: ModelConfig, arch: dict[str, Any]) -> Shape:
    """Sizes from `arch`, which has the structure of config.json; missing or odd values are one ConfigError.

    Older files keep the language model's numbers at the top level, newer ones in text_config.
    """
    where = f"{model.path}/config.json" if model.path else "model.arch"
    family = family_of(model, arch)
    text = _Numbers(arch, "text_config" if arch.get("text_config") else None, where)
    hidden, heads = text("hidden_size"), text("num_attention_heads")
    layers = text("num_hidden_layers")
    experts = _experts(text, family) if family.leaves else None
    attending = _attending(text, layers) if family.recurrent else frozenset(range(layers))
    vision = _vision(_Numbers(arch, "vision_config", where, text.problems), family, layers) if family.sees else None
    if vision is not None and vision.out_hidden != hidden:
        said = f"vision_config.out_hidden_size is {vision.out_hidden}, but must be {hidden}"
        text.problems.append(Problem(f"{said}, the language model's hidden_size", where))
    head_dim = text("head_dim", max(1, hidden // heads))
    rope = text.section.get("rope_parameters") or {}
    shape = Shape(
        family=family,
        hidden=hidden,
        intermediate=0 if experts else text("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=text("num_key_value_heads", heads),
        head_dim=head_dim,
        turning=int(head_dim * (rope.get("partial_rotary_factor") or 1)),
        vocab=text("vocab_size"),
        # Qwen3-VL obeys the top-level key only; the one in its text_config is ignored by transformers.
        tied=bool(arch.get("tie_word_embeddings") or (family.ties_by_text and text.section.get("tie_word_embeddings"))),
        attention_bias=bool(text.section.get("attention_bias")),
        experts=experts,
        delta=_delta(text) if len(attending) < layers else None,
        attending=attending,
        vision=vision,
    )
    if text.section.get("use_sliding_window") or "sliding_attention" in (text.section.get("layer_types") or ()):
        text.problems.append(
            Problem("use_sliding_window: attention inside a sliding window is not trained here", where)
        )
    if text.problems:
        raise ConfigError(*text.problems)
    return shape


class _Numbers:
    """Whole numbers of a section of config.json, its problems collected."""

    def __init__(self, arch: dict[str, Any], name: str | None, where: str, problems: list[Problem] | None = None):
        self.section: dict[str, Any] = arch if name is None else arch.get(name) or {}
        self.prefix, self.where = f"{name}." if name else "", where
        self.problems: list[Problem] = [] if problems is None else problems

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.section.get(key, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "missing" if value is None else repr(value)
            self.problem(f"{key} is {found}, but must be a whole number above 0")
            return 1
        return value

    def problem(self, text: str) -> None:
        """Note what is wrong with a key, which `text` begins with."""
        self.problems.append(Problem(self.prefix + text, self.where))


def _experts(text: _Numbers, family: Family) -> Experts:
    if text.section.get("mlp_only_layers") or text.section.get("decoder_sparse_step", 1) != 1:
        text.problem("mlp_only_layers or decoder_sparse_step makes some layers dense, which is not trained here")
    shared = text("shared_expert_intermediate_size") if family.recurrent else 0
    # transformers writes Qwen3-VL-MoE's number of experts under its second name.
    count, active = text("num_experts", text.section.get("num_local_experts")), text("num_experts_per_tok")
    return Experts(count=count, active=active, intermediate=text("moe_intermediate_size"), shared=shared)


def _attending(text: _Numbers, layers: int) -> frozenset[int]:
    """Layers with full attention: named, or every so many (transformers' default is 4)."""
    types = text.section.get("layer_types")
    if types is None:
        every = text("full_attention_interval", 4)
        return frozenset(n for n in range(layers) if (n + 1) % every == 0)
    if len(types) != layers or set(types) - {"full_attention", "linear_attention"}:
        text.problem(f"layer_types must name full_attention or linear_attention for each of {layers} layers")
    return frozenset(n for n, kind in enumerate(types) if kind == "full_attention")


def _delta(text: _Numbers) -> Delta:
    heads, head_dim = text("linear_num_value_heads"), text("linear_value_head_dim")
    return Delta(
        keys=text("linear_num_key_heads") * text("linear_key_head_dim"),
        values=heads * head_dim,
        heads=heads,
        keys_dim=text("linear_key_head_dim"),
        head_dim=head_dim,
        kernel=text("linear_conv_kernel_dim"),
    )


def _vision(number: _Numbers, family: Family, layers: int) -> VisionShape:
    patch, depth = number("patch_size"), number("depth")
    windows = family.tower == "qwen2_5"
    deepstack = number.section.get("deepstack_visual_indexes") or []
    if any(not isinstance(i, int) or not 0 <= i < depth for i in deepstack) or len(deepstack) > layers:
        text = f"deepstack_visual_indexes {list(deepstack)} must lie below depth {depth}"
        number.problem(f"{text} and be at most {layers}, the decoder layers")
    whole = {i for i in number.section.get("fullatt_block_indexes") or () if i < depth} if windows else range(depth)
    return VisionShape(
        kind=str(family.tower),
        depth=depth,
        hidden=number("hidden_size"),
        intermediate=number("intermediate_size"),
        heads=number("num_heads"),
        out_hidden=number("out_hidden_size"),
        patch_values=number("in_channels", 3) * number("temporal_patch_size", 2) * patch**2,
        merge=number("spatial_merge_size"),
        positions=0 if windows else number("num_position_embeddings"),
        maps=tuple(deepstack),
        windowed=depth - len(whole),
        window_patches=(number("window_size") // patch) ** 2 if windows else 0,
    )
