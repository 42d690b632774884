"""A plan as text for people: aligned tables, at most 110 columns where paths allow it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.arithmetic import peak_rate
from launcher.datafiles import sources_of
from launcher.families import PARTS, family_of
from launcher.kernels import fused_layers
from launcher.planning.describe_choices import choice_lines, scaling_lines
from launcher.planning.describe_memory import memory_lines
from launcher.planning.describe_time import time_lines
from launcher.planning.gpus import ASSUMED_KIND
from launcher.planning.hosts import shown_weight
from launcher.planning.lines import WIDTH, beside, count, item, table, wrap
from launcher.planning.secrets import masked
from launcher.prepared import histogram_lines, modality_lines
from launcher.spec import Host, RunPlan

SHOWN_COMMANDS = 4
OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "AdamW (8-bit moments)"}
SHOWN_HOSTS = 16
SOURCES = ("launcher", "nccl", "forwarded", "env.file", "env.set")  # later ones win
FILES = (
    ("plan.json, config.yaml, overrides.txt", "what was planned and what was typed"),
    ("ds_config.json, hostfile, env.txt, command.sh", "the same run without the launcher"),
    ("logs/HOST.RANK.log, metrics.jsonl, events.jsonl", "what happens"),
    ("report.html, monitor.jsonl, tensorboard/", "the run on one page, its machines, its curves"),
    ("checkpoints/step-NNNNNN/", "to resume from; whole when COMPLETE is in it"),
    ("export/", "the finished model, as a Hugging Face folder"),
    ("outcome.json", "how it ended"),
)


def describe(plan: RunPlan) -> str:
    """The whole plan; its first line says where the hosts came from."""
    # Assumed hosts make everything below them a guess, so that warning stands first.
    first, rest = (plan.warnings[0], plan.warnings[1:]) if plan.hosts_assumed else (None, plan.warnings)
    sections = [
        _hosts(plan, first),
        _model(plan),
        _training(plan),
        _data(plan),
        memory_lines(plan),
        time_lines(plan),
        choice_lines(plan),
        scaling_lines(plan),
        _deepspeed(plan),
        _environment(plan),
        _files(plan),
        _commands(plan),
    ]
    if rest:
        sections.append(["Warnings", *(line for text in rest for line in item(text))])
    return "\n\n".join("\n".join(section) for section in sections if section)


def _hosts(plan: RunPlan, warning: str | None) -> list[str]:
    head = [f"Hosts  {plan.hosts_source}"] if warning is None else [*wrap(f"Warning: {warning}", ""), "", "Hosts"]
    rows = [("host", "ranks", "GPUs" if plan.device == "cuda" else "slots", "address", "")]
    shown, rank, turned = SHOWN_HOSTS if len(plan.hosts) > SHOWN_HOSTS + 1 else len(plan.hosts), 0, False
    for host in plan.hosts[:shown]:
        fields = {"user": host.user, "port": host.port, "iface": host.iface, "weight": shown_weight(host)}
        extra = " ".join(f"{key}={value}" for key, value in fields.items() if value is not None)
        slots = slots_by_rank(host, rank)
        turned = turned or slots != host.gpus
        rows.append((host.name, _span(rank, host.slots), _spans(slots), host.address or host.name, extra))
        rank += host.slots
    port = f"port {plan.master_port}" if plan.master_port else "a free port"
    guess = f"planned as {ASSUMED_KIND}; cluster.gpu=KIND" if plan.device == "cuda" else "CPU"
    reached = "" if plan.transport == "local" else f" over {plan.transport}"
    lines = table(rows)
    if shown < len(plan.hosts):
        last = plan.hosts[-1].name
        lines.append(
            f"  ... and {len(plan.hosts) - shown:,} more to {last}, ranks {_span(rank, plan.world_size - rank)}"
        )
    if turned:
        lines.append("  (in the order of ranks: LOCAL_RANK is the rank modulo the ranks of its host)")
    ranks = f"{count(plan.world_size, 'rank')} ({plan.gpu_kind or guess}){reached}"
    lines.append(f"  {ranks} meet at {plan.master_addr}, {port}")
    if plan.resume_from:
        lines.append(f"  resumes from {plan.resume_from}")
    return head + lines


def slots_by_rank(host: Host, first_rank: int) -> tuple[int, ...]:
    """Slots in the order of the host's ranks: DeepSpeed gives each rank slot `rank % slots`, not the next one.

    Example:
        >>> slots_by_rank(Host(name="b", gpus=(0, 1)), 3)
        (1, 0)
    """
    return tuple(host.gpus[(first_rank + n) % host.slots] for n in range(host.slots))


def _span(first: int, count: int) -> str:
    return f"{first}" if count == 1 else f"{first}-{first + count - 1}"


def _model(plan: RunPlan) -> list[str]:
    model, tune = plan.config.model, plan.config.tune
    total, trained = sum(plan.parameters.values()), sum(plan.trainable.values())
    rows = [("part", "parameters", "tuning", "trained")]
    for part in PARTS:
        how = getattr(tune, "language" if part == "embeddings" else part)
        how = "frozen" if part == "embeddings" and how == "lora" else how
        tied = part == "head" and plan.parameters[part] == 0
        count = "tied" if tied else f"{plan.parameters[part]:,}"
        rows.append((part, count, _how(how, plan), f"{plan.trainable[part]:,}" if plan.trainable[part] else ""))
    rows.append(("total", f"{total:,}", f"{100 * trained / total:.3g} % trained", f"{trained:,}"))
    source = model.path or model.repo or "built here"
    weights = "random weights" if model.weights == "random" else "pretrained weights"
    lines = [f"Model  {model.name} ({source}), {weights}", *table(rows, right=(1, 3))]
    if model.min_pixels and model.max_pixels:
        lines.append(f"  images are scaled to {model.min_pixels:,} to {model.max_pixels:,} pixels")
    return lines


def _how(how: str, plan: RunPlan) -> str:
    tune = plan.config.tune
    if how != "lora":
        return how
    kind = "dora" if tune.use_dora else "lora"
    return f"{kind} r={tune.r} alpha={tune.lora_alpha:g}" + (" / sqrt(r)" if tune.use_rslora else "")


def _training(plan: RunPlan) -> list[str]:
    config, batch = plan.config, plan.batch
    optim, layers = config.optim, plan.layers
    again = plan.checkpointed_layers
    family = family_of(config.model, plan.arch)
    fused, why_fused = fused_layers(config, family, plan.device, plan.capability)
    optimizer = f"{OPTIMIZERS[optim.name]}, lr {_rates(plan)}"
    warm = "warm-up not known" if plan.warmup_steps is None else f"warm-up {count(plan.warmup_steps, 'step')}"
    steps = "not known: the rows are not counted" if batch.total_steps is None else f"{batch.total_steps:,}"
    if batch.steps_per_epoch:
        steps += f", {batch.steps_per_epoch:,} an epoch"
    rows = [
        ("data", f"{config.dataset.name}: {_rows(plan)}"),
        *(("", name) for split in ("train", "eval") for name in config.dataset.sources(split)),
        ("loss", f"{config.loss.name}, task {config.task.name}"),
        ("batch", f"{count(batch.global_size, 'query', 'queries')} a step, over all ranks"),
        ("micro-batch", f"at most {batch.max_tokens:,} tokens; micro-batches a step: {_measured(batch.micro_steps)}"),
        ("steps", steps),
        ("optimizer", f"{optimizer}, {optim.schedule}, {warm}, gradients clipped to {optim.max_grad_norm:g}"),
        ("precision", f"{plan.precision}{_loss_scale(plan)} ({plan.precision_reason})"),
        *_unknown_gpu(plan),
        ("attention", f"{plan.attention} ({plan.attention_reason})"),
        ("layers", f"{'fused' if fused else 'plain'} ({why_fused})"),
        ("recomputed", f"{again} of {layers} decoder layers"),
    ]
    return ["Training", *table(rows)]


def _unknown_gpu(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """That the kernels below are a guess; where no kind of GPU is known at all, the hosts' lines say so."""
    if plan.device == "cuda" and plan.gpu_kind is not None and plan.capability is None:
        yield "GPU", f"{plan.gpu_kind}: compute capability not known, taken as 8.0 or newer; a run asks its driver"


def _rates(plan: RunPlan) -> str:
    """One number, or one for each part that trains when they differ."""
    rates = {part: peak_rate(plan.config.optim, part, plan.lr) for part in PARTS if plan.trainable[part]}
    if len(set(rates.values())) == 1:
        return f"{next(iter(rates.values())):g}"
    return ", ".join(f"{rate:g} {part}" for part, rate in rates.items() if part != "embeddings")


def _loss_scale(plan: RunPlan) -> str:
    fp16 = plan.deepspeed.get("fp16")
    if fp16 is None:
        return ""
    fixed = fp16.get("loss_scale")
    return f", loss scale {fixed:g}" if fixed else f", dynamic loss scale from {2 ** fp16['initial_scale_power']:,}"


def _data(plan: RunPlan) -> list[str]:
    """What is known of rows that have been prepared; nothing while they are not."""
    if not plan.data:
        return []
    lines = ["Data  as prepared before"]
    for split, summary in plan.data.items():
        lengths, bad = summary["lengths"] or {}, sum(summary["bad"].values())
        parts = [count(summary["rows"], "row"), count(summary["images"], "distinct image")]
        parts += [count(summary["videos"], "distinct video")] if summary["videos"] else []
        parts += [f"{count(bad, 'bad row')} beside these"] if bad else []
        if "longest" in lengths:
            parts.append(f"{lengths['mean']:,.0f} tokens a row, at most {lengths['longest']['tokens']:,}")
        parts += [f"{lengths['too_long']:,} too long"] if lengths.get("too_long") else []
        parts += [f"{count(lengths['cut'], 'document')} cut"] if lengths.get("cut") else []
        lines.append(f"  {split:<7}{', '.join(parts)}")
        lines += [f"    {line}" for line in (*modality_lines(summary), *histogram_lines(summary))]
    return lines


def _deepspeed(plan: RunPlan) -> list[str]:
    zero = plan.config.zero
    source = zero.config or f"ds_configs/{f'{plan.zero_name}.json' if zero.file == 'auto' else zero.file}"
    rows = [(key, _value(value)) for key, value in _flat(plan.deepspeed)]
    stage = plan.deepspeed["zero_optimization"]["stage"]
    note = "  (batch numbers are nominal: the training loop decides what a step holds)"
    return [f"DeepSpeed  ZeRO stage {stage} ({source})", *table(rows), note]


def _environment(plan: RunPlan) -> list[str]:
    names = sorted(plan.env, key=lambda name: (SOURCES.index(plan.env_sources[name]), name))
    values = masked(plan.env)
    lines = ["Environment of every rank"]
    width = max((len(plan.env_sources[name]) for name in names), default=0)
    for name in names:
        shown = f"  {plan.env_sources[name]:<{width}}  {name}={_quoted(values[name])}"
        reason = plan.env_reasons.get(name)
        lines += beside(shown, f"({reason})", " " * (width + 6)) if reason else [shown]
    if plan.device == "cuda" and len(plan.hosts) > 1:
        lines.append("  and, once the hosts are asked: the interface of each, and what NCCL needs on their network")
    return lines


def _quoted(value: str) -> str:
    """One line that a shell reads as `value`."""
    if value.isprintable():
        return shlex.quote(value)
    escaped = value.encode("unicode_escape").decode().replace("'", "\\'")
    return f"$'{escaped}'"


def _files(plan: RunPlan) -> list[str]:
    return [f"Run folder  {plan.run_dir}", *table(FILES)]


def _commands(plan: RunPlan) -> list[str]:
    by_pdsh = plan.transport == "pdsh"
    lines = ["Commands, one on each host" + (", all by one `deepspeed --launcher=pdsh` here" if by_pdsh else "")]
    for host in plan.hosts[:SHOWN_COMMANDS]:
        lines += [f"  {host.name}:", *_command(plan.commands[host.name])]
    if len(plan.hosts) > SHOWN_COMMANDS:
        more = len(plan.hosts) - SHOWN_COMMANDS
        lines.append(f"  ... and {more} more, with --node_rank {SHOWN_COMMANDS} to {len(plan.hosts) - 1}")
    return lines


def _command(argv: Sequence[str]) -> Iterator[str]:
    """The line, continued with backslashes between arguments."""
    line = "    "
    for word in _with_values(argv):
        if len(line) + len(word) > WIDTH - 2 and line.strip():
            yield line + "\\"
            line = "      "
        line += word + " "
    yield line.rstrip()


def _with_values(argv: Sequence[str]) -> list[str]:
    """Quoted words, each flag together with its value."""
    words: list[str] = []
    for before, word in zip(("", *argv), argv, strict=False):
        quoted = shlex.quote(word)
        if before.startswith("--") and not word.startswith("--"):
            words[-1] += f" {quoted}"
        else:
            words.append(quoted)
    return words


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, entry in value.items():
        if isinstance(entry, dict) and entry:
            yield from _flat(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def _spans(numbers: Sequence[int]) -> str:
    """0,1,2,5 -> 0-2,5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _rows(plan: RunPlan) -> str:
    """How many rows train and are held out, as far as they are counted."""
    batch = plan.batch
    train = "rows not counted yet" if batch.train_rows is None else count(batch.train_rows, "row")
    if not (sources_of(plan.config.dataset, "eval") or batch.eval_rows):
        return f"{train}, none held out"
    if batch.eval_rows is None:
        return train if batch.train_rows is None else f"{train}; held-out rows not counted yet"
    return f"{train}, {batch.eval_rows:,} held out"


def _measured(micro_steps: int | None) -> str:
    return "not measured: run check data" if micro_steps is None else f"about {micro_steps}"
