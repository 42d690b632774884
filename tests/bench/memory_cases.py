"""Configurations whose memory is foretold and then measured, and micro-batches of a load known to the last token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launcher.estimates import Load
from launcher.spec import RunPlan
from tests import planning_support
from tests.planning_support import compose, gpus

if TYPE_CHECKING:
    from launcher.training.batching import MicroBatch

GRID = (1, 56, 72)  # a page of 896 x 1152 pixels in patches of 16
PATCHES, VISUAL = 56 * 72, 28 * 36  # of a page
PAGE = 1008  # its visual tokens
MICRO_STEPS = 2  # the second one's forward pass runs beside the first one's gradients


@dataclass(frozen=True, kw_only=True)
class Work:
    """A micro-batch: `groups` of equal shape."""

    groups: int = 1
    prefix: int = 0  # tokens that the documents of a group share
    own: tuple[int, ...]  # tokens of each document beside them
    pages: str = ""  # a page stands in each of: prefix | own
    answers: int = 0  # tokens of a document that the loss is on
    shared: bool = True  # else every document repeats the prefix

    @property
    def load(self) -> Load:
        """What the planner is told."""
        groups, count = self.groups, len(self.own)
        prefix, own = self._packed()
        pages = self._pages(prefix)
        images = count if self.pages == "own" else 1 if self.pages else 0  # a repeated page goes through the tower once
        return Load(
            tokens=groups * (prefix + sum(own)),
            visual=groups * pages * VISUAL,
            patches=groups * images * PATCHES,
            key_rows=groups * (prefix + sum(prefix + n for n in own)) if prefix else 0,
            documents=groups * count,
            answers=groups * count * self.answers,
            pairs=groups * (prefix * (prefix + 1) / 2 + sum(n * (prefix + (n + 1) / 2) for n in own)),
            patch_pairs=float(groups * images * PATCHES**2),
        )

    def _packed(self) -> tuple[int, tuple[int, ...]]:
        if self.shared:
            return self.prefix, self.own
        return 0, tuple(self.prefix + n for n in self.own)

    def _pages(self, prefix: int) -> int:
        """Pages that stand in the packed tokens of a group."""
        if not self.pages:
            return 0
        return 1 if self.pages == "prefix" and prefix else len(self.own)

    def times(self, groups: int) -> Work:
        """So many groups of it."""
        return replace(self, groups=groups)

    def micro_batch(self, plan: RunPlan, *, padded: bool, seed: int = 0) -> MicroBatch:
        """Random tokens and pixels in this shape, packed as training packs them."""
        import numpy as np
        import torch

        from launcher.training.batching import Unit, collate
        from launcher.training.patches import CHANNELS, Patches
        from launcher.training.pieces import MediaSlot

        rng = np.random.default_rng(seed)
        encoded = [self._group(plan, rng, number) for number in range(self.groups)]
        units = [Unit(i, tuple(range(len(self.own))), e.tokens, 1.0) for i, e in enumerate(encoded)]
        slots: list[MediaSlot] = [slot for e in encoded for slot in e.unique_media()]
        vision = plan.arch.get("vision_config", {})
        values, frames = CHANNELS * vision.get("patch_size", 16) ** 2, vision.get("temporal_patch_size", 2)
        table = torch.linspace(-1, 1, 256).expand(CHANNELS, 256)
        shown = {slot.key: rng.integers(0, 256, (PATCHES, values), dtype=np.uint8) for slot in slots}
        pixels = {key: Patches(torch.from_numpy(rows), table, frames) for key, rows in shown.items()}
        return collate(encoded, units, pixels, padded=padded)

    def _group(self, plan: RunPlan, rng: Any, number: int) -> Any:
        import numpy as np

        from launcher.training.encoding import Encoded
        from launcher.training.pieces import MediaSlot, Prompt, rope_positions
        from launcher.training.rows import Image

        prefix, _ = self._packed()
        shared = rng.integers(0, 300, self.prefix)
        prompts = []
        for d, own in enumerate(self.own):
            ids = np.concatenate([shared, rng.integers(0, 300, own)])
            picture = Image(f"{number}" if self.pages == "prefix" else f"{number}-{d}")
            start = 20 if self.pages == "prefix" else self.prefix + 20
            slots = (MediaSlot(start, VISUAL, picture, GRID),) if self.pages else ()
            answer = np.arange(len(ids)) >= len(ids) - self.answers if self.answers else None
            prompts.append(Prompt(ids, rope_positions(len(ids), slots, 2), slots, answer))
        labels = tuple(float(d == 0) for d in range(len(self.own)))
        return Encoded(row=None, prompts=tuple(prompts), prefix=prefix, labels=labels)  # type: ignore[arg-type]


TEXT = Work(prefix=170, own=(80, 150, 220, 290, 360, 430, 500, 570))
APART = replace(TEXT, shared=False)
PAGES = Work(prefix=90, own=(PAGE + 42,) * 4, pages="own")
QUERY = Work(prefix=PAGE + 100, own=(130,) * 8, pages="prefix")
CHAT = Work(own=(3960,), answers=1980)
LOOK = Work(own=(PAGE + 1000,), pages="own", answers=800)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on `gpus` GPUs of one host, as a command line asks for it, and what its micro-batches hold."""

    name: str
    model: str
    work: Work
    tune: str = "lora"
    zero: str = "stage2"
    recompute: str = "none"  # none | half | all: of the decoder's layers
    keys: tuple[str, ...] = ()
    gpus: int = 1
    steps: int = 5  # the first two (or, of three, the first) are not timed
    timeout_s: float = 150.0

    def words(self, tiny: bool) -> tuple[str, ...]:
        """The command line; `tiny` puts the tiny model in the place of the real one."""
        words = (
            *("model=tiny" if tiny else f"model={self.model}", "model.weights=random", "dataset=jsonl"),
            *("dataset.train=rows.jsonl", f"tune={self.tune}", f"zero={self.zero}"),
            *(("task=sft", "loss=cross_entropy") if self.work.answers else ("loss=listwise",)),
            *("train.max_steps=10", "optim.warmup_steps=1", f"batch.max_tokens={self.work.load.tokens}"),
            *(f"dataset.max_length={min(4096, self.work.load.tokens)}", "checkpoint.every_steps=null"),
            *("checkpoint.keep_best=false", "checkpoint.at_end=false", "checkpoint.export=false"),
            *(() if self.work.shared else ("attention.shared_prefix=false",)),
            *self.keys,
        )
        if self.recompute != "half":
            return (*words, f"memory.gradient_checkpointing={self.recompute}")
        arch = compose(*words).model.arch
        layers = arch.get("text_config", arch)["num_hidden_layers"]
        return (*words, f"memory.gradient_checkpointing={layers // 2}")

    def plan(self, *, device: str = "cuda") -> RunPlan:
        """The plan on H200s, or of the tiny model on the CPU; whether it fits is what will be measured, so that memory
        is told to be plenty."""
        words = self.words(tiny=device == "cpu")
        if device == "cuda":
            return planning_support.plan(*words, gpus=gpus(self.gpus, gib=9999.0), cpu_count=16)
        words = tuple(word.replace("tune=qlora", "tune=lora") for word in words)
        return planning_support.plan(*words, f"gpus={self.gpus}")


def _case(name: str, model: str, work: Work, *keys: str, **fields: Any) -> Case:
    return Case(name=name, model=model, work=work, keys=keys, **fields)


LAYERS = ("train.kernels=plain",)  # as transformers computes them: sets of before there were fused ones
SEES = ("tune.vision=full",)
PLAIN = ("env.set.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",)
LONG = {"steps": 3, "timeout_s": 240.0}
B2, B4, B8, B32 = "qwen3_vl_2b", "qwen3_vl_4b", "qwen3_vl_reranker_8b", "qwen3_vl_32b"

SETS: dict[str, tuple[Case, ...]] = {
    # constants are fitted on these
    "fit": (
        _case("2b-lora-s2-text", B2, TEXT.times(4)),
        _case("2b-full-s2-text-all", B2, TEXT.times(4), tune="full", recompute="all"),
        _case("4b-lora-s1-pages-half", B4, PAGES.times(3), zero="stage1", recompute="half"),
        _case("4b-full-s3-text-half", B4, TEXT.times(2), tune="full", zero="stage3", recompute="half"),
        _case("8b-lora-s2-text", B8, TEXT.times(3)),
        _case("8b-lora-s2-pages", B8, PAGES.times(2)),
        _case("8b-lora-s3-query", B8, QUERY.times(5), zero="stage3", recompute="all"),
        _case("8b-sft-lora-s2-half", "qwen3_vl_8b", CHAT.times(2), recompute="half"),
        _case("8b-qlora-s2-text-all", B8, TEXT.times(4), tune="qlora", recompute="all"),
        _case("32b-lora-s2-text-all", B32, TEXT.times(2), recompute="all", **LONG),
        _case("4b-full-s1-vision", B4, PAGES.times(1), *SEES, tune="full", zero="stage1"),
        _case("8b-lora-s2-text-plain", B8, TEXT.times(3), *PLAIN),
    ),
    # and judged on these
    "judge": (
        _case("2b-lora-s3-text", B2, TEXT.times(6), zero="stage3"),
        _case("2b-full-s1-pages-all", B2, PAGES.times(4), tune="full", zero="stage1", recompute="all"),
        _case("2b-sft-full-s2-half", B2, CHAT.times(3), tune="full", recompute="half"),
        _case("4b-lora-s2-vision-lora", B4, PAGES.times(2), "tune.vision=lora", "tune.projector=lora"),
        _case("4b-full-s2-text-all", B4, TEXT.times(6), tune="full", recompute="all"),
        _case("8b-lora-s2-query", B8, QUERY.times(4)),
        _case("8b-lora-s1-pages-all", B8, PAGES.times(6), zero="stage1", recompute="all"),
        _case("8b-sft-lora-s3-half", "qwen3_vl_8b", LOOK.times(3), zero="stage3", recompute="half"),
        _case("4b-full-s2-8bit", B4, TEXT.times(2), "optim=adamw8bit", tune="full", recompute="all"),
        _case("8b-qlora-s2-sft", "qwen3_vl_8b", CHAT.times(1), tune="qlora"),
        _case("8b-lora-s2-apart-half", B8, APART.times(2), recompute="half"),
        _case("7b-lora-s2-pages", "qwen2_5_vl_7b", PAGES.times(2)),
        _case("text8b-lora-s2-half", "qwen3_reranker_8b", TEXT.times(4), "tune.r=32", recompute="half"),
        _case("32b-lora-s3-pages-all", B32, PAGES.times(1), zero="stage3", recompute="all", **LONG),
        _case("32b-qlora-s2-text-half", B32, TEXT.times(1), tune="qlora", recompute="half", **LONG),
        _case("72b-qlora-s2-text-all", "qwen2_5_vl_72b", TEXT.times(1), tune="qlora", recompute="all", **LONG),
        _case("2b-lora-s2-pages-plain", B2, PAGES.times(4), *PLAIN),
    ),
    # two GPUs of one host
    "judge2": (
        _case("2b-full-s1-text-x2", B2, TEXT.times(3), tune="full", zero="stage1", gpus=2),
        _case("4b-full-s2-pages-x2", B4, PAGES.times(2), tune="full", recompute="all", gpus=2),
        _case("4b-full-s3-vision-x2", B4, PAGES.times(2), *SEES, tune="full", zero="stage3", recompute="half", gpus=2),
        _case("8b-full-s3-text-x2", B8, TEXT.times(4), tune="full", zero="stage3", recompute="all", gpus=2),
        _case("8b-full-s2-text-x2", B8, TEXT.times(2), tune="full", recompute="all", gpus=2),
        _case("8b-lora-s3-text-x2", B8, TEXT.times(3), zero="stage3", gpus=2),
        _case("8b-sft-lora-s2-x2", "qwen3_vl_8b", CHAT.times(2), recompute="half", gpus=2),
        _case("32b-lora-s3-pages-x2", B32, PAGES.times(2), zero="stage3", recompute="all", gpus=2, **LONG),
        _case("72b-lora-s3-text-x2", "qwen2_5_vl_72b", TEXT.times(1), zero="stage3", recompute="all", gpus=2, **LONG),
    ),
}
SETS = {name: tuple(replace(case, keys=(*case.keys, *LAYERS)) for case in cases) for name, cases in SETS.items()}
# Layers of the fused functions, on one GPU and on two.
SETS["fused"] = (
    _case("8b-lora-text", B8, TEXT.times(6)),
    _case("8b-lora-text-half", B8, TEXT.times(6), recompute="half"),
    _case("8b-lora-pages", B8, PAGES.times(4)),
    _case("8b-lora-query", B8, QUERY.times(8)),
    _case("8b-lora-chat", "qwen3_vl_8b", CHAT.times(4)),
    _case("8b-lora-chat-half", "qwen3_vl_8b", CHAT.times(4), recompute="half"),
    _case("8b-lora-text-small", B8, TEXT.times(2)),
    _case("8b-lora-s3-text", B8, TEXT.times(4), zero="stage3", steps=4),
    _case("8b-qlora-text-all", B8, TEXT.times(4), tune="qlora", recompute="all", steps=4),
    _case("4b-full-s3-chat-half", "qwen3_vl_4b", CHAT.times(2), tune="full", zero="stage3", recompute="half", steps=4),
    _case("2b-full-s2-pages", B2, PAGES.times(2), tune="full"),
)
SETS["fused2"] = (
    _case("8b-full-s3-chat-all-x2", "qwen3_vl_8b", CHAT.times(4), tune="full", zero="stage3", recompute="all", gpus=2),
    _case("8b-lora-chat-x2", "qwen3_vl_8b", CHAT.times(4), gpus=2),
    _case("72b-lora-s3-text-x2", "qwen2_5_vl_72b", TEXT.times(2), zero="stage3", recompute="all", gpus=2, **LONG),
)
SETS["try"] = tuple(
    replace(SETS[name][n], work=replace(SETS[name][n].work, groups=1), steps=3)
    for name, n in (("fit", 0), ("fit", 3), ("fused", 5), ("judge2", 1))
)
