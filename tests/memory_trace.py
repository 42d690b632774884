"""The real forward and backward pass of a Scorer on meta tensors, its bytes counted one allocation at a time.

Nothing is computed and nothing is estimated: torch runs our own code and transformers' with tensors that have
sizes and no contents, autograd frees what it would free, and a dispatch mode adds up the live storages as CUDA's
allocator would hand them out. Index tensors stay real, so that what depends on data runs too. What one kernel
takes and gives back inside itself is invisible here, except for the flash kernel, whose buffers are added.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from launcher.estimates import Load
from launcher.families import family_of
from launcher.kernels import fused_layers
from launcher.spec import RunPlan
from launcher.training import attention, backbone, heads, models, scoring, token_loss, tuning, vision_sight
from launcher.training.batching import MicroBatch
from launcher.training.fused import layer as fused_layer
from launcher.training.losses import loss_of
from launcher.training.patches import Patches
from launcher.training.vision_tower import FrozenTower

META = torch.device("meta")
BLOCK = 512  # bytes; CUDA's caching allocator rounds up to it
aten = torch.ops.aten
TAKE_INDICES = ("aten.index.", "aten.index_put")  # with booleans, whose contents decide sizes
OWN_USES = 2  # the tensor's and that of the storage's Python object


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """What a micro-batch holds: groups of documents behind a prefix, images of so many patches in each."""

    groups: int = 1
    prefix: int = 0  # tokens of a group's prefix, its images included
    documents: int = 1  # of a group
    length: int = 100  # tokens of a document after the prefix, its images included
    longer: int = 0  # tokens that the very last document has more
    grid: tuple[int, int] = (0, 0)  # patches of an image, down and across; (0, 0) = no images
    in_prefix: bool = False  # the image is the prefix's, one a group; else each document has its own
    answers: int = 0  # task=sft: tokens of a document that are an answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """Bytes of one micro-batch, without the model's weights."""

    kept: int  # alive when the backward pass begins
    forward: int  # the most during the forward pass
    backward: int  # the most during the backward pass
    where_forward: str
    where_backward: str
    alive: tuple[tuple[str, int], ...] = ()  # when the backward pass begins, by where it was made
    fullest: tuple[tuple[str, int], ...] = ()  # likewise at the fullest moment of all, when asked for in detail


@dataclass(slots=True)
class Counter(TorchDispatchMode):
    """Adds up live storages; `where` names the module or the backward node at work."""

    detail: bool = False
    alive: int = 0
    peak: int = 0
    peak_where: str = ""
    path: list[str] = field(default_factory=list)
    owners: dict[int, tuple[str, int]] = field(default_factory=dict)
    peak_owners: dict[int, tuple[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TorchDispatchMode.__init__(self)

    __hash__ = object.__hash__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        out = self.instead(func, args, kwargs)
        if out is None:
            args, kwargs = _on_one_device(func, args, kwargs)
            out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, str(func))
        if func is aten._flash_attention_backward.default:
            self.touch(_flash_buffers(args), str(func))
        return out

    def instead(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What takes the place of an operation that a mode or a meta tensor would change; None for most."""
        if func is aten._to_copy.default and kwargs.get("device") == META and not args[0].is_floating_point():
            kwargs["device"] = torch.device("cpu")  # integers and booleans stay real: what they select must be known
        if torch._C._current_autograd_node() is None or torch.is_grad_enabled():
            return None
        if func is aten.index_add.default:
            return args[0]  # the gradient of index_select is added into its zeros, except under a dispatch mode
        summed = func is aten.add.Tensor and isinstance(args[1], torch.Tensor)
        if summed and args[0].shape == args[1].shape and _only_owner(args[0]):
            return args[0]  # autograd adds a second gradient into the first, except under a dispatch mode
        return None

    def see(self, tensor: torch.Tensor, name: str) -> None:
        """Count a storage that is new, until nothing holds it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.owners or storage.nbytes() == 0:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self.owners[key] = (f"{self.where()} {name} {tuple(tensor.shape)} {tensor.dtype}", size)
        weakref.finalize(storage, self.gone, key, size)
        self.alive += size
        self.touch(0, name)

    def gone(self, key: int, size: int) -> None:
        """A storage was freed."""
        self.alive -= size
        del self.owners[key]

    def touch(self, extra: int, name: str) -> None:
        """Note the fullest moment; `extra` bytes exist inside a kernel only."""
        if self.alive + extra > self.peak:
            self.peak, self.peak_where = self.alive + extra, f"{self.where()} {name}"
            if self.detail:
                self.peak_owners = {**self.owners, 0: ("inside the kernel", extra)}

    def where(self) -> str:
        """The module of the forward pass, or the node of the backward pass."""
        node = torch._C._current_autograd_node()
        inside = self.path[-1] if self.path else ""
        return f"{inside} in {node.name()}" if node is not None else inside

    def left(self) -> None:
        """A module is done."""
        self.path.pop()

    def restart(self) -> tuple[int, str]:
        """The peak until now and where it was; counting begins anew."""
        found = self.peak, self.peak_where
        self.peak = self.alive
        return found


def _on_one_device(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Indices are made on the CPU; numbers that meet a meta tensor become one."""
    if kwargs.get("device") == META and kwargs.get("dtype") in (torch.bool, torch.int64, torch.int32):
        kwargs["device"] = torch.device("cpu")
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not any(t.device == META for t in tensors):
        return args, kwargs
    takes_indices = any(word in str(func) for word in TAKE_INDICES)

    def moved(value: Any) -> Any:
        stays = not isinstance(value, torch.Tensor) or value.device == META
        if stays or (takes_indices and not value.is_floating_point()):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)

    return tree_map(moved, args), kwargs


def _only_owner(tensor: torch.Tensor) -> bool:
    """Whether no other tensor has its storage, and it fills that densely."""
    storage = tensor.untyped_storage()
    dense = torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
    return dense and torch._C._storage_Use_Count(storage._cdata) <= OWN_USES


def _flash_buffers(args: Any) -> int:
    """Bytes that flash's backward kernel for segments takes for itself.

    A float32 sum of the queries' gradient, head size rounded up; a row of float32 a query; and where several query
    heads share one key head, the gradients of keys and values for each query head.
    Source: pytorch, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_bwd.
    """
    q, k, cu_q = args[1], args[2], args[6]
    rows, n, head = q.shape
    padded = rows + 128 * (len(cu_q) - 1)
    rounded = -(-head // 32) * 32 if head <= 128 else -(-head // 64) * 64
    expanded = 0 if k.shape[1] == n else 2 * k.shape[0] * n * head * k.element_size()
    return int(4 * n * padded * (1 + rounded) + expanded)


@contextmanager
def _named(model: torch.nn.Module, counter: Counter) -> Iterator[None]:
    """Keep `counter.path` at the module at work."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: counter.path.append(name)))
        handles.append(module.register_forward_hook(lambda *_: counter.left()))
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Operations for which torch chooses another way on meta tensors than on CUDA's, and small integer tensors."""
    attention, dropout, tensor = F.scaled_dot_product_attention, F.dropout, torch.tensor

    def attend(q: Any, k: Any, v: Any, attn_mask: Any = None, **options: Any) -> Any:
        """The memory-efficient kernel: with a mask, flash cannot."""
        bias = None
        if attn_mask is not None:  # booleans become numbers of the queries' format, 0 or -inf
            bias = torch.empty(attn_mask.shape, dtype=q.dtype, device=META).expand(*q.shape[:3], k.shape[2])
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=options.get("scale"))[0]

    def drop(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(x, p, training)[0] if training and p else x

    def make(data: Any, device: Any = None, **options: Any) -> Any:
        return tensor(data, **options)

    F.scaled_dot_product_attention, F.dropout, torch.tensor = attend, drop, make  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitsandbytes.functional.dequantize_4bit", lambda weight, _: torch.empty_like(weight))
        # Triton's kernels and a product into its sums
        _use_kernels(patch)
        patch.setattr(token_loss, "statistics", lambda logits, _: logits.new_empty(3, len(logits), dtype=torch.float32))
        patch.setattr(token_loss, "slope_", lambda *_: None)
        patch.setattr(token_loss, "add_product_", lambda *_: None)
        yield
    F.scaled_dot_product_attention, F.dropout, torch.tensor = attention, dropout, tensor


def _use_kernels(patch: pytest.MonkeyPatch) -> None:
    """Triton's kernels in place of their references: what calls them allocates, and they are not launched."""
    from launcher.training import attention_rows, token_loss_kernels, vision_ops
    from launcher.training.fused import kernels, ops

    jitted = type(token_loss_kernels._slope)  # Triton's, or that of what interprets kernels
    patch.setattr(jitted, "__getitem__", lambda self, grid: lambda *args, **options: None)
    for name in kernels.__all__:
        if hasattr(ops, name):
            patch.setattr(ops, name, getattr(kernels, name))
    patch.setattr(attention_rows, "merge_", lambda *_: None)
    patch.setattr(attention_rows, "add_", lambda *_: None)
    patch.setattr(attention_rows, "sum_rows", _sums)
    patch.setattr(vision_ops, "turn_", lambda *_: None)
    patch.setattr(vision_ops, "add_norm_", lambda x, *_: torch.empty_like(x))
    patch.setattr(vision_ops, "silu_times_", lambda gate, _: gate)
    patch.setattr(vision_ops, "gelu_linear", lambda x, linear: F.linear(x, linear.weight, linear.bias))


def _sums(first: torch.Tensor, second: torch.Tensor, length: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = length, *first.shape[1:]
    return first.new_empty(shape), second.new_empty(shape)


def make_batch(prompts: Prompts, plan: RunPlan, shape: Any) -> tuple[MicroBatch, Load]:
    """A micro-batch without contents, as `batching.collate` would pack it, and its numbers."""
    queries: list[tuple[int, int]] = []
    prefixes: list[tuple[int, int]] = []
    last, predicting, visual, images = [], [], list[int](), 0
    patches = prompts.grid[0] * prompts.grid[1]
    merged = patches // shape.vision.merge**2 if shape.vision else 0
    row = 0

    def segment(length: int, prefix: tuple[int, int], image: bool) -> tuple[int, int]:
        nonlocal row, images
        rows = (row, row + length)
        queries.append(rows)
        prefixes.append(prefix)
        if image and patches:
            visual.extend(range(row, row + merged))
            images += 1
        row += length
        return rows

    for group in range(prompts.groups):
        shared = (row, row)
        if prompts.prefix:
            shared = segment(prompts.prefix, (row, row), prompts.in_prefix)
        for number in range(prompts.documents):
            final = (group + 1, number + 1) == (prompts.groups, prompts.documents)
            length = prompts.length + (prompts.longer if final else 0)
            rows = segment(length, shared, not prompts.in_prefix)
            last.append(rows[1] - 1)
            predicting += range(rows[1] - prompts.answers, rows[1])
    recurrent = family_of(plan.config.model, plan.arch).recurrent
    layout = attention.make_layout(queries, prefixes, padded=recurrent)
    number = len(last)
    batch = MicroBatch(
        input_ids=torch.zeros(row, dtype=torch.int64),
        position_ids=torch.zeros(3, row, dtype=torch.int64),
        layout=layout,
        last=torch.tensor(last),
        labels=torch.zeros(number, device=META),
        scores=torch.zeros(number, device=META),
        predicting=torch.tensor(predicting, dtype=torch.int64),
        predicted=torch.zeros(len(predicting), dtype=torch.int64),
        group=torch.arange(prompts.groups).repeat_interleave(prompts.documents),
        document=torch.zeros(number, dtype=torch.int64),
        pixel_values=_pixels(images * patches, shape) if images else None,
        grid_thw=torch.tensor([[1, *prompts.grid]] * images) if images else None,
        grids=((1, *prompts.grid),) * images,
        visual_rows=torch.tensor(visual) if images else None,
        visual_source=torch.arange(len(visual)) if images else None,
    )
    load = Load(
        tokens=sum(part.real.numel() for part in layout.padded) or row,
        visual=len(visual),
        patches=images * patches,
        key_rows=0 if layout.key_rows is None else len(layout.key_rows),
        documents=number,
        answers=len(predicting),
    )
    return batch, load


def _pixels(patches: int, shape: Any) -> Patches:
    values = torch.empty(patches, shape.vision.patch_values // 2, dtype=torch.uint8, device=META)
    return Patches(values, torch.empty(3, 256, device=META), 2)


def make_scorer(plan: RunPlan) -> scoring.Scorer:
    """The plan's Scorer on meta tensors, as training would build it on a GPU."""
    family, tune = family_of(plan.config.model, plan.arch), plan.config.tune
    dtype = models.DTYPES[plan.precision]
    with META:
        model = models._model_class(plan)._from_config(models.model_config(plan, {}), dtype=dtype)
    language, tower = backbone.language_of(model.model), backbone.tower_of(model.model)
    attention.install(language, tower, "varlen", layout_padded=False, packed=not family.recurrent)
    tuned = tuning.apply_tuning(model, tune, family, dtype)
    tuned.to(META)
    if tune.name == "qlora":
        _take_for_4_bits(language, dtype)
    if fused_layers(plan.config, family, "cuda")[0]:
        fused_layer.install(language, "varlen")
        if plan.deepspeed["zero_optimization"]["stage"] < 3:
            fused_layer.lay_together(language)
    tuning.checkpoint_layers(model.model, plan.checkpointed_layers)
    head = heads.make_head(plan, model, {"no": 0, "yes": 1}, META).to(META)
    trains = tower is not None and any(p.requires_grad for p in tower.parameters())
    sight = None if tower is None else vision_sight.make_sight(tower, family, "varlen", 0, META)
    scorer = scoring.Scorer(tuned, head, always_see=trains, padded=False, sight=sight).train()
    for parameter in scorer.parameters():
        if parameter.requires_grad:  # DeepSpeed takes a gradient away as it arrives
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return scorer


def trace(plan: RunPlan, shape: Any, prompts: Prompts, *, detail: bool = False) -> tuple[Traced, Load]:
    """Bytes of one micro-batch through the plan's Scorer and its loss."""
    scorer = make_scorer(plan)
    counter = Counter(detail=detail)
    batch, load = make_batch(prompts, plan, shape)
    for tensor in (*scorer.parameters(), *scorer.buffers()):
        counter.owners[tensor.untyped_storage()._cdata] = ("", 0)
    with _named(scorer, counter), _as_on_cuda(), counter:
        for tensor in _tensors(batch):
            counter.see(tensor, "micro-batch")
        value = loss_of(plan.config)(scorer(batch), batch, plan.config.loss)
        forward, where_forward = counter.restart()
        kept, owners = counter.alive, dict(counter.peak_owners)
        alive = _by_owner(counter.owners)
        value.backward()
        backward, where_backward = counter.restart()
        tables = _tables(scorer.sight)
        if backward > forward:
            owners = counter.peak_owners
    return Traced(
        kept=kept - tables,
        forward=forward - tables,
        backward=backward - tables,
        where_forward=where_forward,
        where_backward=where_backward,
        alive=alive,
        fullest=_by_owner(owners),
    ), load


def _take_for_4_bits(language: torch.nn.Module, dtype: torch.dtype) -> None:
    """Frozen weights of layers look like bitsandbytes', but that they have all of their bits."""
    for name, module in language.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(("lora_A.default", "lora_B.default")):
            module.weight.quant_state = None  # type: ignore[attr-defined]
            module.compute_dtype = dtype


def _tables(sight: vision_sight.Sight | None) -> int:
    """Bytes that a tower keeps from one micro-batch to the next, of each size of picture: no part of any."""
    fast = None if sight is None else sight._compute
    return sum(f.size for f in fast.tables._frames.values()) if isinstance(fast, FrozenTower) else 0


def _by_owner(owners: dict[int, tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    by_owner: dict[str, int] = {}
    for name, size in owners.values():
        by_owner[name] = by_owner.get(name, 0) + size
    return tuple(sorted(by_owner.items(), key=lambda item: -item[1]))


def _tensors(batch: MicroBatch) -> Iterator[torch.Tensor]:
    fields: list[Any] = [getattr(batch, name) for name in batch.__slots__]
    fields += [batch.pixel_values.values] if isinstance(batch.pixel_values, Patches) else []
    for value in [*fields, *(getattr(batch.layout, name) for name in ("cu_q", "cu_k", "key_rows"))]:
        if isinstance(value, torch.Tensor):
            yield value
