"""Which modules a model family has, and which of them a tuning choice trains. Shared by both planes.

Standard library only. The plan counts what these tables say; training asks the same tables, so that what is shown
is what trains.

A new family is one entry of FAMILIES here (names as `model.named_parameters()` gives them) and one file in
conf/model whose `arch` has the structure of its config.json. `tests/test_plan_models.py` then holds the counts to
those of transformers, `tests/test_families.py` the packed forward to transformers' own; a family whose layers are
of a new kind needs its sizes in launcher/planning/models.py too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.spec import ModelConfig, RunConfig, RunPlan, TuneConfig

PARTS = ("language", "embeddings", "head", "vision", "projector")
LORA_PARTS = ("language", "vision", "projector")
SEEING_PARTS = ("vision", "projector")  # those that only images and videos reach
AUTO = "auto"  # model.family: by config.json's model_type
# What the published rerankers ask a query with, by Family.prompt.
INSTRUCTIONS = {
    "vl": "Given a search query, retrieve relevant candidates that answer the query.",
    "text": "Given a web search query, retrieve relevant passages that answer the query",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Module names of one model family, as they are in the live model (not always in its files), and its habits."""

    model_type: str  # of config.json
    model_class: str  # transformers' class with its head
    prefixes: tuple[tuple[str, str], ...]  # (part, start of the name); the first match decides
    # part -> regular expression over whole module names, for peft's target_modules; a Family is a key of caches
    lora: dict[str, str] = field(hash=False)
    prompt: str = "vl"  # which published reranker prompt: launcher.training.prompts
    tower: str | None = "qwen3"  # kind of vision tower: qwen3 | qwen2_5 (windows, RMSNorm, SwiGLU); None: text only
    turned: str | None = None  # parameters whose last two dimensions are exchanged in published files
    leaves: tuple[str, ...] = ()  # classes that ZeRO-3 gathers whole: which experts run differs between ranks
    qk_norm: bool = True  # queries and keys are normalised per head
    qkv_bias: bool = False  # query, key and value projections have a bias, whatever attention_bias says
    gated: bool = False  # q_proj is twice as wide: half of it gates the attention's output
    recurrent: bool = False  # some layers carry a state along the sequence, so that packed rows would leak
    ties_by_text: bool = False  # text_config's tie_word_embeddings counts too
    overflows_fp16: bool = False  # activations beyond 65,504 are reported: loss 0, gradients not finite

    @property
    def sees(self) -> bool:
        """Whether it has a vision tower."""
        return self.tower is not None

    @property
    def language(self) -> str:
        """Start of the names of the language model's modules, its embeddings included."""
        return dict(self.prefixes)["language"]

    def part_of(self, name: str) -> str:
        """The part that a module or parameter belongs to; a name of no part is a KeyError.

        Example:
            >>> FAMILIES["qwen3_vl"].part_of("model.visual.merger.linear_fc1.weight")
            'projector'
        """
        for part, prefix in self.prefixes:
            if name.startswith(prefix):
                return part
        raise KeyError(name)


_SEEING = (
    ("projector", "model.visual.merger"),
    ("projector", "model.visual.deepstack_merger_list"),
    ("vision", "model.visual"),
    ("embeddings", "model.language_model.embed_tokens"),
    ("language", "model.language_model"),
    ("head", "lm_head"),
)
_TEXT_ONLY = (("embeddings", "model.embed_tokens"), ("language", "model"), ("head", "lm_head"))

# Suffixes such as gate_proj would reach the vision tower of Qwen2.5-VL, and "all-linear" that of every family, so
# each part has its own expression.
_ATTENTION = r"self_attn\.(q|k|v|o)_proj"
_MLP = r"mlp\.(gate|up|down)_proj"
_DELTA = r"linear_attn\.(in_proj_(qkv|z|a|b)|out_proj)"  # Qwen3.5's layers without attention
_SHARED = r"mlp\.(shared_expert\.(gate|up|down)_proj|shared_expert_gate)"
_VISION = {
    "vision": r".*visual\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])",
    "projector": r".*visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc[12]",
}


def _layers(*linears: str, text_only: bool = False) -> dict[str, str]:
    where = r"model" if text_only else r".*language_model"
    return {"language": rf"{where}\.layers\.\d+\.({'|'.join(linears)})"}


FAMILIES = {
    "qwen3_vl": Family(
        model_type="qwen3_vl",
        model_class="Qwen3VLForConditionalGeneration",
        prefixes=_SEEING,
        lora={**_layers(_ATTENTION, _MLP), **_VISION},
    ),
    "qwen3_vl_moe": Family(
        model_type="qwen3_vl_moe",
        model_class="Qwen3VLMoeForConditionalGeneration",
        prefixes=_SEEING,
        lora={**_layers(_ATTENTION), **_VISION},  # experts are 3-D parameters, which adapters do not reach
        turned=r".*\.mlp\.experts\.(gate_up|down)_proj",
        leaves=("Qwen3VLMoeTextSparseMoeBlock",),
    ),
    "qwen2_5_vl": Family(
        model_type="qwen2_5_vl",
        model_class="Qwen2_5_VLForConditionalGeneration",
        prefixes=_SEEING,
        lora={
            **_layers(_ATTENTION, _MLP),
            "vision": rf".*visual\.blocks\.\d+\.(attn\.(qkv|proj)|{_MLP})",
            "projector": r".*visual\.merger\.mlp\.[02]",
        },
        tower="qwen2_5",
        qk_norm=False,
        qkv_bias=True,
        ties_by_text=True,
        overflows_fp16=True,
    ),
    "qwen3_5": Family(
        model_type="qwen3_5",
        model_class="Qwen3_5ForConditionalGeneration",
        prefixes=_SEEING,
        lora={**_layers(_ATTENTION, _MLP, _DELTA), **_VISION},
        gated=True,
        recurrent=True,
    ),
    "qwen3_5_moe": Family(
        model_type="qwen3_5_moe",
        model_class="Qwen3_5MoeForConditionalGeneration",
        prefixes=_SEEING,
        lora={**_layers(_ATTENTION, _SHARED, _DELTA), **_VISION},
        leaves=("Qwen3_5MoeSparseMoeBlock",),
        gated=True,
        recurrent=True,
    ),
    "qwen3": Family(
        model_type="qwen3",
        model_class="Qwen3ForCausalLM",
        prefixes=_TEXT_ONLY,
        lora=_layers(_ATTENTION, _MLP, text_only=True),
        prompt="text",
        tower=None,
    ),
    "qwen2": Family(
        model_type="qwen2",
        model_class="Qwen2ForCausalLM",
        prefixes=_TEXT_ONLY,
        lora=_layers(_ATTENTION, _MLP, text_only=True),
        prompt="text",
        tower=None,
        qk_norm=False,
        qkv_bias=True,
    ),
}


def family_of(model: ModelConfig, arch: Mapping[str, Any]) -> Family:
    """The family that `model.family` names, else the one of `arch`'s model_type (`arch`: config.json's structure).

    Raises ConfigError for one that is not known, and when name and model_type disagree.
    """
    found = arch.get("model_type")
    where = f"{model.path}/config.json" if model.path else "model.arch"
    known = ", ".join(FAMILIES)
    if model.family == AUTO:
        for family in FAMILIES.values():
            if family.model_type == found:
                return family
        text = f"model_type is {found}, and the families known here are {known}"
        raise ConfigError(Problem(text, where, ("model.path=FOLDER of a model of one of these",)))
    if model.family not in FAMILIES:
        text = f"model.family={model.family} is not known here: {AUTO}, {known}"
        raise ConfigError(Problem(text, "", (f"model.family={AUTO}",)))
    family = FAMILIES[model.family]
    if found not in (None, family.model_type):
        text = f"model_type is {found}, but model.family={model.family} needs {family.model_type}"
        raise ConfigError(Problem(text, where, (f"model.family={AUTO}",)))
    return family


def instruction_of(plan: RunPlan) -> str:
    """What a query is asked with when its row does not say: task.instruction, else what the family's rerankers use."""
    return plan.config.task.instruction or INSTRUCTIONS[family_of(plan.config.model, plan.arch).prompt]


ALL_LINEAR, PUBLISHED = "all-linear", "qwen"  # named choices of tune.target_modules
# What Qwen trained its rerankers with: no o_proj, and nothing of other layers than attention and MLP.
_PUBLISHED = r"(?=.*\.(?:q|k|v|gate|up|down)_proj$)"


def lora_pattern(family: Family, tune: TuneConfig) -> str | None:
    """The regular expression of modules that get adapters (peft's `target_modules`), None without LoRA.

    `tune.target_modules`: null and all-linear are every linear layer of the parts that are lora; qwen is those of
    Qwen's own recipe in the language model (other parts as with null); anything else replaces the expressions of all
    parts.
    """
    parts = [part for part in LORA_PARTS if getattr(tune, part) == "lora" and part in family.lora]
    if not parts:
        return None
    if tune.target_modules not in (None, ALL_LINEAR, PUBLISHED):
        return tune.target_modules
    found = {part: family.lora[part] for part in parts}
    if tune.target_modules == PUBLISHED and "language" in found:
        found["language"] = _PUBLISHED + found["language"]
    return "|".join(f"(?:{pattern})" for pattern in found.values())


def matched_modules(pattern: str | None, names: Iterable[str]) -> list[str]:
    """Names that `pattern` matches whole, as peft matches them."""
    return [] if pattern is None else [name for name in names if re.fullmatch(pattern, name)]


def why_no_adapter(config: RunConfig) -> list[str]:
    """Why what this run trains could not be exported as an adapter that others put on the base model."""
    tune, found = config.tune, []
    if not any(getattr(tune, part) == "lora" for part in LORA_PARTS):
        return ["the run trains no adapter"]
    if tune.language == "full" or tune.head == "full":
        found.append("trained embeddings or a trained lm_head don't fit into an adapter")
    if config.task.name == "classify":
        found.append("the head of the classes is no part of the base model, so peft has no place for it")
    if config.model.weights == "random":
        found.append("an adapter for random weights fits no model that anybody has")
    return found


def trains_fully(part: str, tune: TuneConfig) -> bool:
    """Whether every weight of `part` trains; embeddings go with the language model.

    The head is special: `tune.head=full` trains an own two-row parameter and lm_head stays as it is.
    """
    if part == "head":
        return False
    choice = tune.language if part == "embeddings" else getattr(tune, part)
    return bool(choice == "full")
