"""A checkpoint -> a Hugging Face folder that transformers loads as it is: adapters merged, head written back.

Runs in one process, without DeepSpeed and with no process group: the base model is built again, the
checkpoint's float32 masters are put into it by name, so that nothing of a training engine is touched.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from launcher.errors import ConfigError, Problem
from launcher.rundir import RunDir, complete_checkpoints, is_complete, read_json, write_json
from launcher.spec import RunPlan
from launcher.training import models, processors
from launcher.training.checkpoint import read_masters, share

MARK = "launcher.json"  # says which run and step an export came from
_SCORER = "model."  # Scorer's attribute that holds the model
_PEFT = "base_model.model."  # what peft puts before a model's own names
_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.\w+\.weight")


def checkpoint_to_export(run: RunDir) -> Path:
    """The best checkpoint by `eval.metric` when it is there, else the last one."""
    complete = complete_checkpoints(run)
    if not complete:
        raise ConfigError(Problem(f"{run.checkpoints} holds no complete checkpoint to export"))
    best = read_json(complete[-1] / "state.json").get("best")
    if best is not None and is_complete(run.checkpoint(best["step"])):
        return run.checkpoint(best["step"])
    return complete[-1]


def export_from_checkpoint(
    plan: RunPlan, checkpoint: Path, out: Path, each: Callable[[Iterable[Any]], Iterator[Any]] = iter
) -> Path:
    """Write the model of `checkpoint` to the folder `out`; it appears whole or not at all.

    Weights have the number format of the run (`plan.precision`); adapters are merged in float32. An
    earlier export at `out` is replaced, any other folder that is not empty is refused. `each` takes
    the trained tensors through `RankStatus.each`, say.
    """
    if out.exists() and any(out.iterdir()) and not (out / MARK).is_file():
        raise ConfigError(Problem(f"{out} is not empty and no export of this launcher", tries=("another folder",)))
    processor = processors.load_processor(plan)
    ids = processors.token_ids(processor)
    # Random weights depend on the kind of device, so the base is built where the run built it.
    model = models.load_model(plan, processors.special_ids(processor.tokenizer), torch.device(plan.device)).cpu()
    tune = plan.config.tune
    masters = each(read_masters(checkpoint))
    put_masters(model, masters, scaling=tune.lora_alpha / tune.r, answer_ids=(ids["no"], ids["yes"]))
    # transformers reads the flag at the top level, other servers the one of the text part.
    model.config.text_config.tie_word_embeddings = model.config.tie_word_embeddings
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    model.save_pretrained(aside, max_shard_size="5GB")
    for weights in aside.glob("*.safetensors"):
        share(weights)
    processor.save_pretrained(aside)
    write_json(aside / MARK, _origin(plan, checkpoint))
    verify_export(aside)
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)
    return out


@torch.no_grad()
def put_masters(
    model: Any, masters: Iterable[tuple[str, Tensor]], *, scaling: float, answer_ids: tuple[int, int]
) -> None:
    """Put trained weights, under the names they have in a Scorer, into a freshly loaded model.

    A LoRA pair adds scaling * B @ A to its layer. `answer_ids` are the rows of lm_head that a trained
    head replaces ("no", "yes"). A tied lm_head gets weights of its own where the head or the embeddings
    were trained: training scores with the head it had at the start, whatever the embeddings became.
    """
    parameters = dict(model.named_parameters())
    embeddings = model.get_input_embeddings().weight
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, value in masters:
        if name == "head":
            models.restore_tied_head(model)
            model.lm_head.weight[list(answer_ids)] = value.to(model.lm_head.weight.dtype)
            continue
        live = model_name(name)
        adapter = _ADAPTER.fullmatch(live)
        if adapter:
            pairs.setdefault(adapter["module"], {})[adapter["side"]] = value
            continue
        if parameters[live] is embeddings:
            models.restore_tied_head(model)
        parameters[live].copy_(value)
    for module, pair in pairs.items():
        weight = parameters[f"{module}.weight"]
        weight.copy_(weight.float() + scaling * (pair["B"] @ pair["A"]))


def model_name(name: str) -> str:
    """A parameter's name in the bare model, from its name in a Scorer around it or around peft's wrapper.

    Example:
        >>> model_name("model.base_model.model.model.visual.merger.linear_fc1.base_layer.weight")
        'model.visual.merger.linear_fc1.weight'
    """
    return name.removeprefix(_SCORER).removeprefix(_PEFT).replace(".base_layer.", ".")


def verify_export(folder: Path) -> None:
    """Compare the files with what a loader will ask for: every name, every shape, nothing more, a usable processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    found: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118  not a dict
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
        found.pop("lm_head.weight", None)
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise RuntimeError(
            f"the export in {folder} would not load: {len(wrong)} tensors differ, the first is {wrong[0]}: "
            f"wanted {wanted.get(wrong[0])}, in the files {found.get(wrong[0])}"
        )
    templates = AutoProcessor.from_pretrained(folder).chat_template
    if "reranker" not in templates:
        raise RuntimeError(f"the export in {folder} lost its reranker chat template")


def _origin(plan: RunPlan, checkpoint: Path) -> dict[str, Any]:
    state, model = read_json(checkpoint / "state.json"), plan.config.model
    return {
        "run": plan.run_id,
        "step": state["step"],
        "best": state.get("best"),
        "base": "random weights" if model.weights == "random" else model.path or model.repo,
        "precision": plan.precision,
        "instruction": plan.config.task.instruction,
        "version": plan.version,
    }
