"""A checkpoint -> a folder that transformers, sentence-transformers and vLLM load: adapters merged, or alone for peft.

Runs in one process, without DeepSpeed and with no process group: the base model is built again, the
checkpoint's float32 masters are put into it by name, so that nothing of a training engine is touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from launcher.families import family_of, instruction_of
from launcher.golden import write_golden
from launcher.hubs import model_source
from launcher.plain import to_data
from launcher.rundir import EXPORT, RunDir, check_export_place, checkpoint_to_export, read_json, write_json
from launcher.spec import RunPlan
from launcher.training import adapters, card, golden, layouts, models, processors, serving, tuning
from launcher.training.base import check_base
from launcher.training.checkpoint import read_masters, share

__all__ = ["checkpoint_to_export", "export_from_checkpoint", "put_masters", "verify_export"]

HEAD = "head.safetensors"  # of a task whose head is no part of the model: score it with `launcher score` only
_SCORER = "model."  # Scorer's attribute that holds the model

Each = Callable[[Iterable[Any]], Iterator[Any]]


def export_from_checkpoint(
    plan: RunPlan, checkpoint: Path, out: Path, each: Each = iter, warn: Callable[[str], None] = print
) -> Path:
    """Write the model of `checkpoint` to the folder `out`; it appears whole or not at all.

    Weights have the number format of the run (`plan.precision`); adapters are merged in float32, or with
    `checkpoint.merge=false` written alone. The folder is loaded again, as its users will, before it appears. An
    earlier export at `out` is replaced, any other folder that is not empty is refused. `each` takes
    tensors and pairs through `RankStatus.each`, say; `warn` hears what is suspicious about the scores.
    """
    check_export_place(out)
    merge = plan.config.checkpoint.merge
    if not merge:
        adapters.check_exportable(plan)
    state = read_json(checkpoint / "state.json")
    check_base(plan, state, checkpoint)
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    processor = processors.load_processor(plan)
    masters = each(read_masters(checkpoint))
    if merge:
        _write_merged(plan, processor, masters, aside)
    else:
        adapters.write(plan, masters, aside)
    for weights in aside.glob("*.safetensors"):
        share(weights)
    processor.save_pretrained(aside)
    write_json(aside / EXPORT, _origin(plan, state))
    notes = _write_companions(plan, processor, aside, each)
    for note in notes:
        warn(note)
    if plan.config.tune.name == "qlora" and merge:
        notes.append("Trained on a base of 4 bits and merged into the base as published: scores differ a little.")
    card.write_card(aside, plan, state, merged=merge, notes=notes)
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)
    return out


def _write_merged(plan: RunPlan, processor: Any, masters: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    ids = processors.token_ids(processor)
    # Random weights depend on the kind of device, so the base is built where the run built it.
    device, cpu = torch.device(plan.device), torch.device("cpu")
    model = models.load_model(plan, processors.special_ids(processor), device, large_on=cpu).cpu()
    left = put_masters(
        model,
        masters,
        scaling=adapters.scaling(plan.config.tune),
        answer_ids=(ids["no"], ids["yes"]),
        head_follows=plan.config.task.name != "rerank",
    )
    if hasattr(model.config, "text_config"):
        # transformers reads the flag at the top level, other servers the one of the text part.
        model.config.text_config.tie_word_embeddings = model.config.tie_word_embeddings
    model.save_pretrained(folder, max_shard_size="5GB")
    layouts.publish(folder, family_of(plan.config.model, plan.arch))
    if left:
        save_file(left, folder / HEAD)
    serving.write_older_files(folder, processor)
    serving.copy_side_files(plan.config.model.path, folder)
    fusion = RunDir(Path(plan.run_dir)).fusion
    if fusion.is_file():  # how scores of a film's segments become one
        shutil.copyfile(fusion, folder / fusion.name)


def _write_companions(plan: RunPlan, processor: Any, folder: Path, each: Each) -> list[str]:
    """What other programs want beside the weights, after loading them as those do; returns what looks wrong."""
    task, merged = plan.config.task, plan.config.checkpoint.merge
    base = None if merged else model_source(plan.config.model)  # of ModelScope: no name that Hugging Face knows
    if task.name != "rerank":
        golden.load_exported(folder, base)
        return []
    sees = hasattr(processor, "image_processor")
    if merged:
        serving.write_cross_encoder(folder, processors.token_ids(processor), sees=sees)
        serving.write_vllm_keys(folder)
        serving.write_guide(folder, instruction_of(plan), sees=sees)
    scores = golden.compute(golden.Exported(folder, base=base), plan.precision, each)
    write_golden(folder, scores)
    return golden.suspicions(scores)


@torch.no_grad()
def put_masters(
    model: Any,
    masters: Iterable[tuple[str, Tensor]],
    *,
    scaling: float,
    answer_ids: tuple[int, int],
    head_follows: bool = False,
) -> dict[str, Tensor]:
    """Put trained weights, under the names they have in a Scorer, into a freshly loaded model.

    A LoRA pair adds scaling * B @ A to its layer. `answer_ids` are the rows of lm_head that a trained
    head replaces ("no", "yes"). A tied lm_head gets weights of its own where the head or the embeddings
    were trained: a reranker trains with the head it had at the start, whatever the embeddings became. It stays
    tied when it `head_follows` them in training too, as a chat's does.
    Returns the tensors of a head that has no place in the model.
    """
    parameters = dict(model.named_parameters())
    embeddings = model.get_input_embeddings().weight
    layers: dict[str, dict[str, Tensor]] = {}
    left: dict[str, Tensor] = {}
    for name, value in masters:
        if name == "head.rows":
            models.restore_tied_head(model)
            model.lm_head.weight[list(answer_ids)] = value.to(model.lm_head.weight.dtype)
            continue
        if name.startswith("head."):
            left[name] = value
            continue
        live = model_name(name)
        adapter = adapters.part_of(live)
        if adapter:
            layers.setdefault(adapter[0], {})[adapter[1]] = value
            continue
        if parameters[live] is embeddings and not head_follows:
            models.restore_tied_head(model)
        parameters[live].copy_(value)
    for module, parts in layers.items():
        weight = parameters[f"{module}.weight"]
        weight.copy_(adapters.merged(weight.float(), parts, scaling))
    return left


def model_name(name: str) -> str:
    """A parameter's name in the bare model, from its name in a Scorer around it or around peft's wrapper.

    Example:
        >>> model_name("model.base_model.model.model.visual.merger.linear_fc1.base_layer.weight")
        'model.visual.merger.linear_fc1.weight'
    """
    return name.removeprefix(_SCORER).removeprefix(tuning.PEFT_PREFIX).replace(".base_layer.", ".")


def verify_export(folder: Path) -> None:
    """Load a merged folder as its users will; raises golden.NotLoadable unless it is all there, and no more."""
    golden.load_whole(folder)


def _origin(plan: RunPlan, state: dict[str, Any]) -> dict[str, Any]:
    """Which run made an export, and what `evaluate` and `score` need to use it without that run's folder."""
    config, model = plan.config, plan.config.model
    settings = {
        "model": {"name": model.name, "family": model.family},
        "dataset": {
            key: value for key, value in to_data(config.dataset).items()
            if key in ("max_length", "over_long", "min_pixels", "max_pixels", "video")
        },
        "task": {**to_data(config.task), "classes": state.get("classes") or config.task.classes},
        "loss": to_data(config.loss),
    }  # fmt: skip
    if not config.checkpoint.merge:  # an adapter: its base too
        settings["model"] = {key: value for key, value in to_data(model).items() if key != "arch"}
        settings["tune"] = to_data(config.tune)
    return {
        "run": plan.run_id,
        "step": state["step"],
        "best": state.get("best"),
        "base": "random weights" if model.weights == "random" else model.path or model.repo,
        "precision": plan.precision,
        "instruction": instruction_of(plan),
        "version": plan.version,
        "merged": config.checkpoint.merge,
        "max_tokens": plan.batch.max_tokens,
        "cost": to_data(plan.cost),
        "settings": settings,
    }
