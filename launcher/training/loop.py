"""The training loop, top to bottom: step, log, evaluate, save, stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from launcher.arithmetic import warmup_steps
from launcher.errors import ConfigError, Problem
from launcher.families import FAMILIES
from launcher.rundir import RunDir
from launcher.spec import RunPlan
from launcher.training import checkpoint, evaluate, export, processors
from launcher.training.check import note_bad_rows, usable_groups
from launcher.training.encoding import Encoder, make_encoder
from launcher.training.engine import build_scorer, make_engine, optimizer_step
from launcher.training.formats import Group
from launcher.training.jsonl import BadRow
from launcher.training.lengths import Lengths, fitting, measure
from launcher.training.metriclog import MetricLog
from launcher.training.pixels import Pixels
from launcher.training.profiling import Profile, make_profile
from launcher.training.rankstatus import RankStatus
from launcher.training.runtime import Rank, distributed
from launcher.training.schedule import Order, learning_rate
from launcher.training.steps import Step, StepMaker, prefetched, training_steps
from launcher.training.timing import DATA_WAIT, Stopwatch, over_ranks, peak_memory_gib
from launcher.training.tuning import trainable_by_part


def train(plan: RunPlan, run: RunDir, status: RankStatus) -> None:
    """Train as the plan says; returns when done or, after a requested stop, saved."""
    with distributed(plan) as rank:
        log = MetricLog(run, rank.rank, status)
        trainer = Trainer.build(plan, run, rank, status, log)
        stopped = trainer.fit()
        trainer.engine.destroy()
        if plan.config.checkpoint.export and not stopped and rank.rank == 0:
            log.phase("exporting")
            source = export.checkpoint_to_export(run)
            folder = export.export_from_checkpoint(plan, source, run.export, status.each)
            log.event("export", path=str(folder), checkpoint=str(source))
        log.phase("ended", state="stopped" if stopped else "done")


@dataclass
class Trainer:
    """Everything one rank needs while it trains."""

    plan: RunPlan
    run: RunDir
    rank: Rank
    status: RankStatus
    log: MetricLog
    engine: Any
    maker: StepMaker
    train_rows: Sequence[Group]
    eval_rows: Sequence[Group]
    order: Order
    processor: Any
    watch: Stopwatch
    profile: Profile
    step: int = 0  # optimizer steps done
    best: dict[str, Any] | None = None  # {"step", "value"} of eval.metric
    last_eval: int = -1
    saved: set[int] = field(default_factory=set)
    units: float | None = None  # of the loss trained on, over all ranks; None before a step

    @classmethod
    def build(cls, plan: RunPlan, run: RunDir, rank: Rank, status: RankStatus, log: MetricLog) -> Trainer:
        """Read the data, load the model, start the engine, and resume when the plan says so."""
        log.phase("reading data")
        processor = processors.load_processor(plan)
        encoder = make_encoder(plan, processor)
        train_rows, eval_rows = (_rows(plan, split, encoder, rank, log) for split in ("train", "eval"))
        log.phase("loading model")
        scorer = build_scorer(plan, processor, rank.device)
        log.phase("starting DeepSpeed")
        rank.gather(None)  # here a slow reader is waited for; DeepSpeed's own NCCL groups give up after 10 minutes
        engine = make_engine(scorer, plan)
        _hold_to_plan(engine.module, plan)
        maker = StepMaker(
            plan,
            encoder,
            Pixels(processor.image_processor),
            rank=rank.rank,
            padded=scorer.padded,
            warn=log.warn,
        )
        order = Order(len(train_rows), plan.batch.global_size, plan.config.train.seed)
        watch = Stopwatch(rank.device)
        profile = make_profile(plan.config.profile, run, rank, engine, watch, log)
        trainer = cls(
            plan, run, rank, status, log, engine, maker, train_rows, eval_rows, order, processor, watch, profile
        )
        if plan.resume_from is not None:
            trainer._resume(plan.resume_from)
        return trainer

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.order.total_steps(self.plan.config.train)

    def fit(self) -> bool:
        """Run the remaining steps; true when a stop was asked for before the end."""
        config = self.plan.config
        self.log.phase("training", state="running", step=self.step)
        self.profile.choose(self.step, self.total_steps)
        if self.step == 0 and config.eval.at_start:
            self.evaluate()
        if self.stopping():  # asked for while loading or evaluating
            return self._finish(stopped=True)
        stopped = False
        for share in self._shares():
            stopped = self._train_step(share)
            self.profile.end_step(self.step)
            self.log.phase("training", step=self.step)
            if stopped:
                break
            if self._due(config.eval.every_steps):
                self.evaluate()
            if self._due(config.checkpoint.every_steps) or self._epoch_ended():
                self.save()
        self.profile.close()
        return self._finish(stopped)

    def _shares(self) -> Iterator[Step]:
        """This rank's share of each remaining step; waiting for one is part of its step."""
        shares = training_steps(self.maker, self.train_rows, self.order, self.step, self.total_steps)
        while self.step < self.total_steps:
            self.log.phase("training")
            self.profile.begin_step(self.step + 1)
            self.watch.begin()
            with self.watch.span(DATA_WAIT):
                share = next(shares)
            yield share

    def stopping(self) -> bool:
        """Whether any rank was asked to stop; a collective call."""
        (asked,) = self.rank.sum(float(self.status.stop_requested))
        return asked > 0

    def _train_step(self, share: Step) -> bool:
        """One optimizer step; true when a stop was asked for meanwhile."""
        config = self.plan.config
        count, groups, tokens, stop = self.rank.sum(
            share.units, share.groups, share.tokens, float(self.status.stop_requested)
        )
        lr = self._learning_rate()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        loss = optimizer_step(self.engine, self.plan, self.log.each(share.micro_batches), count, self.rank, self.watch)
        self.step += 1
        self.units = (self.units or 0.0) + count
        if self.step % config.logging.every_steps == 0 or self.step == self.total_steps:
            own = (loss, *self.watch.seconds(), share.tokens, *peak_memory_gib(self.rank.device))
            losses, *rest = zip(*self.rank.table(own), strict=True)
            seconds = self.watch.elapsed
            norm = self.engine.get_global_grad_norm()
            self.log.step(
                step=self.step,
                total_steps=self.total_steps,
                epoch=self.step / self.order.steps_per_epoch,
                loss=sum(losses),
                lr=lr,
                grad_norm=None if norm is None else float(norm),
                queries_per_s=groups / seconds,
                tokens_per_s=tokens / seconds,
                step_s=seconds,
                skipped=int(self.engine.skipped_steps),
                micro_steps=len(share.micro_batches),
                timings=over_ranks(list(zip(*rest, strict=True))),
            )
        return stop > 0

    def _learning_rate(self) -> float:
        optim, total = self.plan.config.optim, self.total_steps
        warmup = warmup_steps(optim, total)
        return learning_rate(self.step, total_steps=total, peak=self.plan.lr, warmup_steps=warmup, optim=optim)

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0 and self.step < self.total_steps

    def _epoch_ended(self) -> bool:
        return self.plan.config.checkpoint.every_epoch and self.step % self.order.steps_per_epoch == 0

    def evaluate(self) -> None:
        """Score the held-out rows, log the metrics, and note whether they are the best so far."""
        if not self.eval_rows or self.last_eval == self.step:
            return
        self.log.phase("evaluating")
        records = score_rows(self.engine, self.maker, self.eval_rows, self.rank, self.stopping, self.status.beat)
        if records is None:
            return
        if not records:
            raise _no_usable_row("dataset.eval")
        metrics = evaluate.summarise(records)
        self.last_eval = self.step
        self.log.evaluation(step=self.step, metrics=metrics, groups=len(records))
        for text in evaluate.warnings(records):
            self.log.warn(text)
        value = metrics[f"eval/{self.plan.config.eval.metric}"]
        if self.step > 0 and (self.best is None or value > self.best["value"]):
            self.best = {"step": self.step, "value": value}
            if self.plan.config.checkpoint.keep_best:
                self.save()

    def save(self) -> None:
        """Write a checkpoint of this step unless it exists; keep the last ones and the best."""
        if self.step in self.saved:
            return
        self.log.phase("saving")
        state = {"epoch": self.step / self.order.steps_per_epoch, "best": self.best}
        folder = checkpoint.save(
            self.engine,
            run=self.run,
            step=self.step,
            state=state,
            plan=self.plan,
            group=self.rank.cpu_group,
            beat=self.status.beat,
        )
        self.saved.add(self.step)
        self.log.event("checkpoint", step=self.step, path=str(folder))
        options = self.plan.config.checkpoint
        if self.rank.rank == 0:
            best = self.best["step"] if self.best and options.keep_best else None
            checkpoint.rotate(self.run, options.keep_last, best)

    def _resume(self, folder: str) -> None:
        state = checkpoint.load(self.engine, Path(folder), self.plan, self.rank.cpu_group, self.status.beat)
        self.step, self.best = int(state["step"]), state.get("best")
        self.saved.add(self.step)
        self.log.event("resumed", step=self.step, path=folder)

    def _finish(self, stopped: bool) -> bool:
        """Evaluate and save what the end, or a stop, asks for; true when it was a stop."""
        options = self.plan.config.checkpoint
        if not stopped:
            if self.units == 0:
                raise _no_usable_row("dataset.train")
            self.evaluate()
            stopped = self.stopping()  # that evaluation may have been cut short
        if stopped:
            self.log.event("stop_requested", step=self.step)
        # Before the first step nothing is lost by starting anew.
        if (stopped and self.step > 0) or (not stopped and (options.at_end or options.export)):
            self.save()
        return stopped


def score_rows(
    engine: Any,
    maker: StepMaker,
    rows: Sequence[Group],
    rank: Rank,
    stopping: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
) -> evaluate.Records | None:
    """Scores and labels of every row, on every rank; the work is shared and groups may be split.

    Rows are taken some batches at a time: their pixels need not fit in memory together. None when `stopping`
    (collective, asked once in such a while) says so. `beat` is called for each batch, as a sign of progress.
    """
    chunk = 4 * maker.plan.batch.global_size
    shares = prefetched(lambda i: maker.scoring(rows[i * chunk : (i + 1) * chunk]), 0, -(-len(rows) // chunk))
    engine.eval()
    mine: list[tuple[int, float, float]] = []
    with torch.no_grad():
        for number, share in enumerate(shares):
            if stopping():
                return None
            for batch in share.micro_batches:
                beat()
                scores = engine(batch.to(rank.device)).tolist()
                index = (batch.group + number * chunk).tolist()
                mine += zip(index, scores, batch.labels.tolist(), strict=True)
    records: dict[int, tuple[list[float], list[float]]] = {}
    for group, score, label in (item for part in rank.gather(mine) for item in part):
        scores, labels = records.setdefault(group, ([], []))
        scores.append(score)
        labels.append(label)
    return dict(sorted(records.items()))


def _rows(plan: RunPlan, split: str, encoder: Encoder, rank: Rank, log: MetricLog) -> list[Group]:
    """The rows of a split that can be used, the same on every rank; the ranks share the counting of their tokens."""
    groups = usable_groups(plan, split)
    lengths = Lengths()
    mine = range(rank.rank, len(groups), rank.world_size)
    for part in rank.gather(measure(plan, encoder, groups, log.each(mine), split)):
        lengths.add(part)
    kept = fitting(plan, lengths, groups, split)
    for row in sorted(lengths.unfit):
        log.warn(f"left out: {lengths.unfit[row]}")
    if rank.rank == 0:  # every rank has read the list by now: it met the others in `gather`
        note_bad_rows(plan, split, [BadRow(groups[r].where, groups[r].id, lengths.unfit[r]) for r in lengths.unfit])
    if lengths.cut:
        limit = plan.config.dataset.max_length
        log.warn(f"{lengths.cut:,} documents of the {split} data lose their end to fit dataset.max_length={limit}")
    return kept


def _hold_to_plan(scorer: Any, plan: RunPlan) -> None:
    """What trains is what the plan said, to the last parameter; else one of the two is wrong."""
    found = trainable_by_part(scorer, FAMILIES[plan.config.model.family])
    planned = {part: count for part, count in plan.trainable.items() if count}
    print(f"trainable parameters: {found}", flush=True)
    if found != planned:
        raise RuntimeError(f"the plan says that {planned} parameters train, the model has {found}")


def _no_usable_row(key: str) -> ConfigError:
    text = f"every row of {key} was left out: too long, or an image that cannot be read"
    tries = ("dataset.on_bad=error   (names the first row and why)", "dataset.max_length=... or batch.max_tokens=...")
    return ConfigError(Problem(text, tries=tries), title="with the data")
