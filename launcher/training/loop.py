"""The training loop, top to bottom: step, log, evaluate, save, stop."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.arithmetic import warmup_steps
from launcher.errors import ConfigError, Problem
from launcher.families import family_of
from launcher.plain import to_data
from launcher.prepared import SPLITS
from launcher.rundir import RunDir, read_json, write_json
from launcher.spec import RunPlan, is_better
from launcher.training import checkpoint, evaluate, export, health, processors
from launcher.training.chats import with_classes
from launcher.training.check import note_bad_rows
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer, loss_scale, make_engine, optimizer_step, zero_stage
from launcher.training.evaluate import Outputs, score_rows
from launcher.training.metriclog import MetricLog
from launcher.training.models import DTYPES
from launcher.training.outofmemory import MemoryWatch
from launcher.training.pixels import Pixels
from launcher.training.prepare import Prepared, agreed, prepare
from launcher.training.profiling import Profile, make_profile
from launcher.training.rankstatus import RankStatus
from launcher.training.rows import Row
from launcher.training.runtime import Rank, distributed
from launcher.training.sampling import held_out
from launcher.training.schedule import Order, learning_rate, make_order
from launcher.training.spared import resume_collection
from launcher.training.speeds import measured_speeds
from launcher.training.steps import Step, StepMaker, training_steps
from launcher.training.timing import DATA_WAIT, Stopwatch, over_ranks, peak_memory_gib
from launcher.training.tuning import trainable_by_part
from launcher.training.warmup import Warmup, local_device

SHOWN_ROWS = 20  # of those left out, in a rank's log


def train(plan: RunPlan, run: RunDir, status: RankStatus, compiling: subprocess.Popen[bytes] | None = None) -> None:
    """Train as the plan says; returns when done or, after a requested stop, saved.

    `compiling` compiles kernels meanwhile (launcher.training.warmup).
    """
    log = MetricLog(run, int(os.environ["RANK"]), status)
    log.phase("reading data")
    warmup = Warmup.start(plan, local_device(plan), compiling)
    # Before the ranks are a group: one of them may work for long, and no time limit runs for the others.
    prepared = {split: prepare(plan, split, status.beat) for split in SPLITS}
    with distributed(plan) as rank:
        memory = MemoryWatch(plan, rank.device)
        if zero_stage(plan) == 3:
            warmup.wait(status.beat)
        with memory.told():
            trainer = Trainer.build(plan, run, rank, status, log, prepared, memory)
            warmup.wait(status.beat)
            resume_collection()
            stopped = trainer.fit()
        trainer.engine.destroy()
        if plan.config.checkpoint.export and not stopped and rank.rank == 0:
            log.phase("exporting")
            source = export.checkpoint_to_export(run)
            folder = export.export_from_checkpoint(plan, source, run.export, status.each, log.warn)
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
    train_rows: Sequence[Row]
    eval_rows: Sequence[Row]
    order: Order
    processor: Any
    watch: Stopwatch
    profile: Profile
    watched: health.GradientWatch
    memory: MemoryWatch
    step: int = 0  # optimizer steps done
    best: dict[str, Any] | None = None  # {"step", "value"} of eval.metric
    last_eval: int = -1
    stale: int = 0  # evaluations in a row without a new best
    saved: set[int] = field(default_factory=set)
    units: float | None = None  # of the loss trained on, over all ranks; None before a step

    def __post_init__(self) -> None:
        self.bad = health.BadSteps(self.plan.config, self.plan.precision, self.plan.lr)

    @classmethod
    def build(
        cls,
        plan: RunPlan,
        run: RunDir,
        rank: Rank,
        status: RankStatus,
        log: MetricLog,
        prepared: dict[str, Prepared],
        memory: MemoryWatch,
    ) -> Trainer:
        """Load the model, start the engine, and resume when the plan says so."""
        _hold_rows_equal(plan, prepared, rank, log)
        train_rows = prepared["train"]
        eval_rows = held_out(prepared["eval"], plan.config.dataset, seed=plan.config.train.seed)
        plan = with_classes(plan, train_rows, _saved_classes(plan))
        processor = processors.load_processor(plan)
        encoder = make_encoder(plan, processor)
        log.phase("loading model")
        sees = any(split.has_media for split in prepared.values())
        scorer = build_scorer(plan, processor, rank.device, rank.gather, sees=sees)
        log.phase("starting DeepSpeed")
        memory.at("starting DeepSpeed")
        rank.gather(None)  # here a slow reader is waited for; DeepSpeed's own NCCL groups give up after 10 minutes
        begun = health.digests(health.trained(scorer), DTYPES[plan.precision])
        watched = health.GradientWatch(scorer, family_of(plan.config.model, plan.arch))
        engine = make_engine(scorer, plan)
        _hold_to_plan(engine.module, plan)
        health.check_equal_start(rank, begun, health.digests(health.trained(engine.module), DTYPES[plan.precision]))
        speeds = plan.speeds
        if plan.measures_speeds:
            speeds = measured_speeds(plan, rank)
            log.event("speeds", ranks=speeds)
        maker = StepMaker(
            plan,
            encoder,
            Pixels(processor),
            rank=rank.rank,
            padded=scorer.padded,
            warn=log.warn,
            speeds=speeds,
            device=rank.device,
            known=scorer.knows,
        )
        order = make_order(plan, train_rows)
        watch = Stopwatch(rank.device)
        profile = make_profile(plan.config.profile, run, rank, engine, watch, log)
        trainer = cls(
            plan,
            run,
            rank,
            status,
            log,
            engine,
            maker,
            train_rows,
            eval_rows,
            order,
            processor,
            watch,
            profile,
            watched,
            memory,
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
                if config.eval.patience is not None and self.stale >= config.eval.patience:
                    self.log.event("early_stop", step=self.step, evaluations=self.stale, best=self.best)
                    break
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
        if self.step == 0:
            share = share.held()
            if (blind := health.unseen_pixels(self.engine, tuple(share.micro_batches), self.rank)) is not None:
                self.log.warn(blind)
        lr = self._learning_rate(self.plan.lr)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self._learning_rate(group["peak"])
        skipped = int(self.engine.skipped_steps)
        batches = self.memory.each(self.log.each(self.watch.each(DATA_WAIT, share.micro_batches)))
        own_loss = optimizer_step(self.engine, self.plan, batches, count, self.rank, self.watch)
        self.step += 1
        self.units = (self.units or 0.0) + count
        peaks = (*peak_memory_gib(self.rank.device), self.watch.fullest)
        own = (own_loss, *self.watch.seconds(), share.tokens, self.memory.most_tokens, *peaks)
        losses, *rest = zip(*self.rank.table(own), strict=True)
        loss, scale = sum(losses), loss_scale(self.engine)
        fault = self.bad.note(self.step, loss, count, skipped=int(self.engine.skipped_steps) > skipped)
        if self.step % config.logging.every_steps == 0 or self.step == self.total_steps:
            seconds = self.watch.elapsed
            norm = self.engine.get_global_grad_norm()
            self.log.step(
                step=self.step,
                total_steps=self.total_steps,
                epoch=self.step / self.order.steps_per_epoch,
                loss=loss,
                lr=lr,
                grad_norm=None if norm is None else float(norm),
                queries_per_s=groups / seconds,
                tokens_per_s=tokens / seconds,
                step_s=seconds,
                skipped=int(self.engine.skipped_steps),
                bad_steps=self.bad.total,
                loss_scale=scale,
                micro_steps=share.micro_steps,
                timings=over_ranks(list(zip(*rest, strict=True))),
            )
        if fault is not None and self.bad.in_a_row == 1:
            self.log.warn(fault)
        self.bad.check(fault, scale, whole_run=self.bad.in_a_row == self.step == self.total_steps)
        if (idle := self.bad.idle(self.step, loss, count)) is not None:
            self.log.warn(idle)
        if (unseen := self.watched.after_step(self.rank, share.sees, loss)) is not None:
            self.log.warn(unseen)
        return stop > 0

    def _learning_rate(self, peak: float) -> float:
        optim, total = self.plan.config.optim, self.total_steps
        warmup = warmup_steps(optim, total)
        return learning_rate(self.step, total_steps=total, peak=peak, warmup_steps=warmup, optim=optim)

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0 and self.step < self.total_steps

    def _epoch_ended(self) -> bool:
        return self.plan.config.checkpoint.every_epoch and self.step % self.order.steps_per_epoch == 0

    def evaluate(self) -> None:
        """Score the held-out rows, log the metrics, and note whether they are the best so far."""
        if not self.eval_rows or self.last_eval == self.step:
            return
        self.log.phase("evaluating")
        self.memory.at("evaluating")
        found = score_rows(self.engine, self.maker, self.eval_rows, self.rank, self.stopping, self.status.beat)
        if found is None:
            return
        if not found.rows:
            raise _no_usable_row("dataset.eval")
        config = self.plan.config
        # Rank 0's for all: processors of two kinds may differ in the last digit, and ranks must decide alike.
        metrics = self.rank.gather(evaluate.numbers(found, config))[0]
        self.last_eval = self.step
        self.log.evaluation(step=self.step, metrics=metrics, groups=found.rows)
        if config.task.name == "rerank":
            self._look_at(found)
        value, best = metrics[f"eval/{config.metric}"], None if self.best is None else self.best["value"]
        if self.step > 0 and is_better(config.metric, value, best):
            self.best, self.stale = {"step": self.step, "value": value}, 0
            if self.plan.config.checkpoint.keep_best:
                self.save()
        elif self.step > 0:
            self.stale += 1

    def _look_at(self, found: Outputs) -> None:
        """Warn of scores that are suspicious, and keep the model that fused those of segments."""
        fused = evaluate.fused(found.records, self.plan.config)
        for text in [*evaluate.warnings(fused.records), *([fused.note] if fused.note else [])]:
            self.log.warn(text)
        if fused.model is not None and self.rank.rank == 0:
            write_json(self.run.fusion, to_data(fused.model))

    def save(self) -> None:
        """Write a checkpoint of this step unless it exists; keep the last ones and the best."""
        if self.step in self.saved:
            return
        self.log.phase("saving")
        state = {
            "epoch": self.step / self.order.steps_per_epoch,
            "best": self.best,
            "stale": self.stale,
            "bad_steps": self.bad.saved(),
            "rows": len(self.train_rows),
            "classes": self.plan.config.task.classes,  # of task=classify: the rows may have told them
        }
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
        self.step, self.best, self.stale = int(state["step"]), state.get("best"), int(state.get("stale", 0))
        self.bad.go_on(state.get("bad_steps", {}))
        self.saved.add(self.step)
        self.log.event("resumed", step=self.step, path=folder)
        before, now = state.get("rows", len(self.train_rows)), len(self.train_rows)
        if before != now:
            text = f"{now:,} usable training rows, and {before:,} when the checkpoint was saved"
            self.log.warn(f"{text}: the rows of this epoch are dealt anew, some come twice and some not at all")

    def _finish(self, stopped: bool) -> bool:
        """Evaluate and save what the end, or a stop, asks for; true when it was a stop."""
        options, sight = self.plan.config.checkpoint, self.engine.module.sight
        if sight is not None and sight.cache is not None:
            print(f"kept features: {sight.cache.told()}", flush=True)
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


def _hold_rows_equal(plan: RunPlan, prepared: dict[str, Prepared], rank: Rank, log: MetricLog) -> None:
    """Check that all ranks hold the same rows, and note those that are left out."""
    agreed(plan, rank.gather([rows.digest for rows in prepared.values()]))
    for split, rows in prepared.items():
        for row in rows.left_out[:SHOWN_ROWS]:
            log.warn(f"left out: {row.reason}")
        if len(rows.left_out) > SHOWN_ROWS:
            log.warn(f"and {len(rows.left_out) - SHOWN_ROWS:,} more of the {split} data; bad_rows.json names each")
        cut = 0 if rows.lengths is None else int(rows.lengths.cut.sum())
        if cut:
            limit = plan.config.dataset.max_length
            log.warn(f"{cut:,} documents of the {split} data lose their end to fit dataset.max_length={limit}")
        if rank.rank == 0:
            note_bad_rows(plan, split, rows.left_out)
    if rank.rank == 0:
        found = {split: rows.summary() for split, rows in prepared.items()}
        write_json(RunDir(Path(plan.run_dir)).data, {split: summary for split, summary in found.items() if summary})


def _hold_to_plan(scorer: Any, plan: RunPlan) -> None:
    """What trains is what the plan said, to the last parameter; else one of the two is wrong."""
    found = trainable_by_part(scorer, family_of(plan.config.model, plan.arch))
    planned = {part: count for part, count in plan.trainable.items() if count}
    print(f"trainable parameters: {found}", flush=True)
    if found != planned:
        raise RuntimeError(f"the plan says that {planned} parameters train, the model has {found}")


def _saved_classes(plan: RunPlan) -> list[str] | None:
    return None if plan.resume_from is None else read_json(Path(plan.resume_from) / "state.json").get("classes")


def _no_usable_row(key: str) -> ConfigError:
    text = f"every row of {key} was left out: too long, or an image that cannot be read"
    tries = ("dataset.on_bad=error   (names the first row and why)", "dataset.max_length=... or batch.max_tokens=...")
    return ConfigError(Problem(text, tries=tries), title="with the data")
