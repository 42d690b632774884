"""Training with this launcher and with sentence-transformers' CrossEncoder, on the same random model and rows.

    python -m tests.bench.cross_encoder_parity FOLDER

The tiny model is exported at step 0; CrossEncoder trains that folder in a plain loop (its BinaryCrossEntropyLoss, its
own template and padding), the launcher trains it by its own command with `loss=pointwise`. The same queries a step in
the same order, AdamW without weight decay at the same constant rate, the same clipping, float32, no dropout; the head
is not tied and trains on both sides. Compared are the loss of every step and NDCG@10 on held-out rows, for some seeds.
FOLDER gets the models, the rows, the runs and `table.md`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from launcher.resources import conf_dir
from launcher.training import processors
from launcher.training.digits import WORDS
from launcher.training.engine import build_scorer
from launcher.training.export import export_from_checkpoint
from launcher.training.metrics import ndcg_at_k
from launcher.training.schedule import Order
from tests.tiny import tiny_plan

SEEDS = (1, 2, 3)
STEPS, EVERY, QUERIES, HELD_OUT, DOCUMENTS, LR = 24, 6, 8, 40, 4, 1e-3
TOLERANCE = 0.02  # of NDCG@10, between the two after the same steps


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training: the loss of each step, and NDCG@10 at step 0, EVERY, 2 * EVERY, ..."""

    losses: list[float]
    ndcg: list[float]


def main(folder: Path) -> int:
    """Train both ways from each seed and print the table; 1 when they end further apart than TOLERANCE."""
    folder = folder.resolve()
    head = " | ".join(f"NDCG@10, step {step}" for step in range(0, STEPS + 1, EVERY))
    table = [f"| seed | {head} | largest difference of a step's loss, steps 1 to {EVERY} / all |", "|---" * 7 + "|"]
    gaps = []
    for seed in SEEDS:
        place = folder / f"seed{seed}"
        rows = {"train": make_rows(STEPS * QUERIES, seed), "eval": make_rows(HELD_OUT, -seed)}
        model = write_model(place, seed)
        ours, theirs = train_ours(place, model, rows, seed), train_theirs(model, rows, seed)
        gaps.append(abs(ours.ndcg[-1] - theirs.ndcg[-1]))
        apart = [abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
        cells = " | ".join(f"{a:.4f} / {b:.4f}" for a, b in zip(ours.ndcg, theirs.ndcg, strict=True))
        table.append(f"| {seed} | {cells} | {max(apart[:EVERY]):.1e} / {max(apart):.1e} |")
        print("\n".join(table) if len(table) == 3 else table[-1], flush=True)
        (folder / "table.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print(f"ours / CrossEncoder; {versions()}")
    return int(max(gaps) > TOLERANCE)


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Which document has the word that the query names?"""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        right, *wrong = draw.sample(WORDS[:DOCUMENTS], DOCUMENTS)
        other = draw.choice(WORDS)
        documents = [f"{word}, {draw.randrange(100)}" for word in (right, *wrong)]
        rows.append({"query": f"{number}, {other}: {right}", "positives": documents[:1], "negatives": documents[1:]})
    return rows


def write_model(folder: Path, seed: int) -> Path:
    """Step 0 of a run of the tiny model, exported by the code that every run exports with."""
    arch = yaml.safe_load((conf_dir() / "model" / "tiny.yaml").read_text(encoding="utf-8"))["arch"]
    arch |= {"tie_word_embeddings": False, "dtype": "float32"}
    plan = replace(tiny_plan(folder / "run", train={"seed": seed}), arch=arch)
    scorer = build_scorer(plan, processors.load_processor(plan), torch.device("cpu"))
    weights = {name: p.detach().clone() for name, p in scorer.named_parameters() if p.requires_grad}
    begin = folder / "step-000000"
    begin.mkdir(parents=True)
    save_file({f"master/{name}": value for name, value in weights.items()}, begin / "part.safetensors")
    parameters = {name: {"shape": list(value.shape), "file": "part.safetensors"} for name, value in weights.items()}
    (begin / "state.json").write_text(json.dumps({"step": 0, "best": None, "parameters": parameters}))
    return export_from_checkpoint(plan, begin, folder / "model")


def train_ours(folder: Path, model: Path, rows: dict[str, list[dict[str, Any]]], seed: int) -> Curve:
    """The launcher's own command."""
    words = ["model=local", f"model.path={model}", "dataset=jsonl", "loss=pointwise", "tune=full", "tune.head=full"]
    for split, found in rows.items():
        file = folder / f"{split}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in found), encoding="utf-8")
        words.append(f"dataset.{split}={file}")
    words += ["tune.vision=frozen", "tune.projector=frozen", "zero=stage0", "precision=fp32", "gpus=1"]
    words += [f"optim.lr={LR}", "optim.schedule=constant", "optim.warmup_steps=0", f"train.seed={seed}"]
    words += [f"batch.global_size={QUERIES}", f"train.max_steps={STEPS}", f"eval.every_steps={EVERY}"]
    words += ["checkpoint.every_steps=null", "checkpoint.keep_best=false", "checkpoint.at_end=false"]
    words += ["checkpoint.export=false", "batch.max_tokens=8192", f"run.dir={folder / 'ours'}"]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    with open(folder / "ours.log", "w") as log:
        command = [sys.executable, "-m", "launcher", *words]
        done = subprocess.run(command, check=False, env=environ, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"ended with {done.returncode}: {folder / 'ours.log'}")
    lines = [json.loads(line) for line in (folder / "ours/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return Curve(losses=losses, ndcg=[line["eval/ndcg@10"] for line in lines if "eval/ndcg@10" in line])


def train_theirs(model: Path, rows: dict[str, list[dict[str, Any]]], seed: int) -> Curve:
    """CrossEncoder in a plain loop, its batches those that the launcher draws."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    encoder = CrossEncoder(str(model), device="cpu", model_kwargs={"dtype": torch.float32})
    loss_of = BinaryCrossEntropyLoss(encoder)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=LR, weight_decay=0.0)
    order = Order(len(rows["train"]), QUERIES, seed)
    curve = Curve(losses=[], ndcg=[_ndcg(encoder, rows["eval"])])
    for step in range(STEPS):
        pairs = [pair for row in order.batch(step) for pair in _pairs(rows["train"][row])]
        queries, documents, labels = (list(column) for column in zip(*pairs, strict=True))
        encoder.train()
        optimizer.zero_grad()
        loss = loss_of([queries, documents], torch.tensor(labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        curve.losses.append(float(loss.detach()))
        if (step + 1) % EVERY == 0:
            curve.ndcg.append(_ndcg(encoder, rows["eval"]))
    return curve


def _pairs(row: dict[str, Any]) -> list[tuple[str, str, float]]:
    documents = [(document, 1.0) for document in row["positives"]] + [(document, 0.0) for document in row["negatives"]]
    return [(row["query"], document, label) for document, label in documents]


def _ndcg(encoder: Any, rows: list[dict[str, Any]]) -> float:
    encoder.eval()
    pairs = [_pairs(row) for row in rows]
    flat = [(query, document) for row in pairs for query, document, _ in row]
    scores = encoder.predict(flat, activation_fn=torch.nn.Identity()).reshape(len(rows), -1).tolist()
    labels = [[label for _, _, label in row] for row in pairs]
    return sum(map(ndcg_at_k, scores, labels, [10] * len(rows))) / len(rows)


def versions() -> str:
    """What was compared."""
    from importlib.metadata import version

    return ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed", "sentence-transformers")
    )


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
