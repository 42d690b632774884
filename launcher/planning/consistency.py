"""Settings that contradict each other. Single values, and keys without effect, are checked in config.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.datafiles import sources_of
from launcher.errors import Problem
from launcher.families import LORA_PARTS, why_no_adapter
from launcher.planning.facts import Facts
from launcher.planning.lines import count
from launcher.planning.secrets import is_secret
from launcher.spec import METRICS_OF_TASK, MISSING, RunConfig, TuneConfig

MANY_STEPS = 10  # 30 steps of the tiny model made 18 MB, packed, and two minutes of writing on a busy CPU
MOST_LR = 0.1  # the tiny model learns at 1e-2
TASK_LOSSES = {
    "rerank": ("pointwise", "listwise", "pairwise", "distill", "custom"),
    "sft": ("cross_entropy",),
    "classify": ("cross_entropy",),
}
LOSS_FORMS = {"pairwise": ("ranknet", "margin"), "distill": ("margin_mse", "kl")}


def contradictions(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Everything that must be changed before a run can start, as far as the configuration alone tells."""
    yield from _tune(config)
    yield from _kept_features(config)
    yield from _patience(config)
    yield from _loss(config)
    yield from _metric(config)
    yield from _data(config)
    yield from _mixture(config)
    yield from _code(config)
    yield from _export(config)
    yield from _run_folder(config, facts)


def _kept_features(config: RunConfig) -> Iterator[Problem]:
    """Features are kept only where every step would compute the same."""
    trained = [part for part in ("vision", "projector") if getattr(config.tune, part) != "frozen"]
    if config.memory.vision_cache_gib and trained:
        parts = " ".join(f"tune.{part}={getattr(config.tune, part)}" for part in trained)
        text = f"memory.vision_cache_gib keeps what the vision tower makes of an image, and {parts} changes it"
        tries = ("memory.vision_cache_gib=0", " ".join(f"tune.{part}=frozen" for part in trained))
        yield Problem(text, "", tries)


def profile_problems(config: RunConfig, device: str, world_size: int, total_steps: int | None) -> Iterator[Problem]:
    """What keeps group profile from recording anything, once ranks and steps are known."""
    profile = config.profile
    if profile.name == "nsys" and device == "cpu":
        yield Problem("profile=nsys records what GPUs do, and this run uses the CPU", "", ("profile=torch",))
    if profile.name in ("torch", "nsys"):
        beyond = [rank for rank in profile.ranks if rank >= world_size]
        if beyond:
            has = "the run has rank 0 alone" if world_size == 1 else f"the run's ranks are 0 to {world_size - 1}"
            yield Problem(f"profile.ranks names {', '.join(map(str, beyond))}, but {has}", "", ("'profile.ranks=[0]'",))
    if total_steps is None or profile.name == "none":
        return
    steps = 1 if profile.name == "deepspeed" else profile.steps
    last = profile.first_step + steps - 1
    if last > total_steps:
        text = f"profile={profile.name} records up to step {last}, and the run ends at step {total_steps}"
        fits = total_steps - steps + 1
        short = f"profile.first_step=1 profile.steps={total_steps}"
        yield Problem(text, "", (f"profile.first_step={fits}" if fits > 0 else short,))


def oddities(config: RunConfig, facts: Facts, world_size: int) -> Iterator[str]:
    """What is allowed and may still surprise, one sentence each."""
    data = config.dataset
    if data.name == "digits" and config.model.name != "tiny":
        yield (
            f"the data set is digits, because none was named beside model={config.model.name}: "
            "dataset=jsonl dataset.train=FILE names your own"
        )
    tune = config.tune
    if config.model.weights == "random" and not tune.language == tune.vision == tune.projector == "full":
        yield (
            "the frozen parts keep their random weights, so that only the speed of this run means anything: "
            "tune=full tune.vision=full trains all of them"
        )
    if config.loss.name in ("listwise", "pairwise") and config.model.weights == "pretrained":
        yield (
            f"loss={config.loss.name} compares the documents of a query only: scores need no longer be probabilities, "
            "which a pretrained reranker's are (loss=pointwise is the objective it was trained with)"
        )
    if config.optim.lr is not None and config.optim.lr > MOST_LR:
        yield f"optim.lr={config.optim.lr:g} is far above what AdamW trains such models with, 1e-6 to 1e-3: mistyped?"
    both = sorted({*data.sources("train")} & {*data.sources("eval")})
    if both and data.name != "digits" and data.eval_split in (None, data.split):
        yield (
            f"{both[0]} is trained on and evaluated: its figures say nothing of other rows "
            "(dataset.eval_fraction=0.05 without dataset.eval holds a part of it out)"
        )
    for name in facts.data_elsewhere:
        yield (
            f"{name} is no file or folder here: it is taken for a data set of {data.source}, and fetched before the "
            "ranks start"
        )
    if facts.train_rows is not None and facts.train_rows < config.batch.global_size:
        yield (
            f"dataset.train has {count(facts.train_rows, 'row')}, fewer than "
            f"batch.global_size={config.batch.global_size}: every step trains on all of them"
        )
    if world_size > config.batch.global_size:
        yield (
            f"{world_size} ranks share batch.global_size={config.batch.global_size} queries: "
            f"some compute nothing in a step (batch.global_size={2 * world_size} keeps all busy)"
        )
    most = config.batch.max_tokens
    if most != "auto" and int(most) < data.max_length and data.name != "digits" and "train" not in facts.prepared:
        yield (
            f"batch.max_tokens={most} is below dataset.max_length={data.max_length}: rows that are longer fit into no "
            "micro-batch, and are refused"
        )
    yield from _much_recorded(config)
    if data.name != "digits" and not sources_of(data, "eval") and config.eval.every_steps is not None:
        yield "nothing is evaluated, because dataset.eval names no file: the last checkpoint counts as the best"


def _much_recorded(config: RunConfig) -> Iterator[str]:
    """More than a look at some steps: many of them, or an evaluation with its thousands of forward passes."""
    profile, every = config.profile, config.eval.every_steps
    if profile.name == "torch" and profile.steps > MANY_STEPS:
        yield (
            f"profile=torch keeps every operator of {profile.steps} steps in memory until the last, and then takes "
            f"minutes to write them: profile.steps={MANY_STEPS} or fewer"
        )
    if profile.name not in ("torch", "nsys") or every is None:
        return
    step = -(-profile.first_step // every) * every  # the first evaluation that is not over when recording begins
    if step < profile.first_step + profile.steps - 1:
        other = f"profile.first_step={step + 1}" + (f" profile.steps={every}" if profile.steps > every else "")
        yield (
            f"profile={profile.name} also records the evaluation after step {step}, which takes memory and makes the "
            f"files large: {other}"
        )


def withheld(transport: str, env: Mapping[str, str]) -> Iterator[str]:
    """What of the environment a transport does not bring to the ranks, one sentence."""
    names = sorted(name for name, value in env.items() if is_secret(name, value))
    if transport == "pdsh" and names:
        yield (
            f"ranks do not get {', '.join(names)}: pdsh would show their values on command lines "
            "(cluster.transport=ssh brings them)"
        )


def uses_lora(tune: TuneConfig) -> bool:
    """Whether any part gets adapters."""
    return any(getattr(tune, part) == "lora" for part in LORA_PARTS)


def _tune(config: RunConfig) -> Iterator[Problem]:
    tune = config.tune
    frozen = all(getattr(tune, part) == "frozen" for part in (*LORA_PARTS, "head"))
    if frozen and config.task.name != "classify":  # whose head always trains
        yield Problem("nothing trains: every part of the model is frozen", "", ("tune=lora", "tune.projector=full"))
    if tune.lora_dropout > 0 and config.attention.shared_prefix and uses_lora(tune):
        text = f"tune.lora_dropout={tune.lora_dropout:g} with attention.shared_prefix=true: documents share one"
        why = "computed prefix, and dropout would have to differ in each; the result would not be exact"
        yield Problem(f"{text} {why}", "", ("tune.lora_dropout=0", "attention.shared_prefix=false"))
    if tune.name == "qlora" and tune.language != "lora":
        text = f"tune.language={tune.language} with tune=qlora: weights of 4 bits cannot train, adapters can"
        yield Problem(text, "", ("tune.language=lora", "tune=lora"))


def _export(config: RunConfig) -> Iterator[Problem]:
    if config.checkpoint.export and not config.checkpoint.merge:
        for why in why_no_adapter(config):
            yield Problem(f"checkpoint.merge=false exports an adapter alone, and {why}", "", ("checkpoint.merge=true",))


def _patience(config: RunConfig) -> Iterator[Problem]:
    data, every = config.dataset, config.eval.every_steps
    if config.eval.patience is None:
        return
    patience = f"eval.patience={config.eval.patience} counts evaluations,"
    if every is None:
        yield Problem(f"{patience} and there is one at the end only", "", ("eval.every_steps=500",))
    if data.name != "digits" and not sources_of(data, "eval"):
        yield Problem(f"{patience} and no rows are held out", "", ("dataset.eval=FILE", "dataset.eval_fraction=0.05"))


def _loss(config: RunConfig) -> Iterator[Problem]:
    task, loss = config.task.name, config.loss.name
    losses = TASK_LOSSES.get(task, ())
    if loss not in losses:
        text = f"loss={loss} does not fit task={task}, whose losses are {', '.join(losses)}"
        yield Problem(text, "", tuple(f"loss={name}" for name in losses))
    forms = LOSS_FORMS.get(loss, ())
    if forms and config.loss.form not in forms:
        text = f"loss.form={config.loss.form} is no form of loss={loss}, whose forms are {' and '.join(forms)}"
        yield Problem(text, "", tuple(f"loss.form={name}" for name in forms))
    if loss == "distill" and config.dataset.random_negatives > 0:
        text = f"dataset.random_negatives={config.dataset.random_negatives} with loss=distill: documents of other rows"
        yield Problem(f"{text} have no teacher's score for this query", "", ("dataset.random_negatives=0",))


def _metric(config: RunConfig) -> Iterator[Problem]:
    fitting = METRICS_OF_TASK.get(config.task.name, ())
    for key, metric, more in (
        ("eval.metric", config.eval.metric, ("auto",)),
        ("sweep.metric", config.sweep.metric, (None, "loss", "eval/loss", "tokens_per_s", "queries_per_s")),
    ):
        if metric not in fitting and metric not in more:
            text = f"{key}={metric} is not measured with task={config.task.name}, whose metrics are"
            yield Problem(f"{text} {', '.join(fitting)}", "", tuple(f"{key}={name}" for name in fitting))


def _mixture(config: RunConfig) -> Iterator[Problem]:
    weights, sources = config.dataset.weights, config.dataset.sources("train")
    if weights is not None and len(weights) != len(sources):
        given = f"dataset.weights={weights} has {len(weights)} numbers, and dataset.train names {len(sources)} sources"
        equal = f"dataset.weights=[{','.join(['1'] * len(sources))}]"
        yield Problem(given, "", (equal, "dataset.weights=null"))


def _data(config: RunConfig) -> Iterator[Problem]:
    data, model = config.dataset, config.model
    if data.name != "digits" and data.train in (None, MISSING):
        yield Problem(f"dataset={data.name} needs a file of training rows", "", ("dataset.train=FILE",))
    for group, one in (("model", model), ("dataset", data)):
        if one.min_pixels is not None and one.max_pixels is not None and one.min_pixels > one.max_pixels:
            text = f"{group}.min_pixels={one.min_pixels} is above {group}.max_pixels={one.max_pixels}"
            yield Problem(text, "", (f"{group}.min_pixels={one.max_pixels}",))
    if data.video.min_frames > data.video.max_frames:
        text = f"dataset.video.min_frames={data.video.min_frames} is above dataset.video.max_frames"
        text += f"={data.video.max_frames}"
        yield Problem(text, "", (f"dataset.video.min_frames={data.video.max_frames}",))


def _code(config: RunConfig) -> Iterator[Problem]:
    how = config.cluster.transport
    if config.cluster.sync == "rsync" and how in ("env", "manual"):
        text = "sends the working folder by ssh, which no node"
        tries = (
            "cluster.sync=check   (with the same code on every node)",
            "cluster.transport=ssh cluster.hostfile=FILE",
        )
        yield Problem(f"cluster.sync=rsync {text} is reached by with cluster.transport={how}", "", tries)


def _run_folder(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    if not facts.run_dir_used:
        return
    name = config.run.dir or f"{config.run.root}/{config.run.name}"
    key = "run.dir" if config.run.dir else "run.name"
    # Its own run may go on in it; nothing else may write there.
    if facts.resume is None or name.rstrip("/") != facts.resume.run_dir:
        text = f"{key}={config.run.dir or config.run.name}: {name} exists and is not empty; nothing is overwritten"
        yield Problem(text, "", (*([f"resume={name}"] if facts.run_dir_saved else []), f"{key}=ANOTHER"))
