"""The losses of this launcher and of ms-swift, step by step, on the same random model and rows.

    python -m tests.bench.swift_parity FOLDER SWIFT_PYTHON

SWIFT_PYTHON is the Python of an environment that has ms-swift 4.6.0 (transformers below 5.20, peft below 0.21). Both
train a Qwen3-VL of two small layers with Qwen's vocabulary in float32 on the CPU: the language model, the embeddings
and the head, from the same file, with the same AdamW. FOLDER gets the model, the rows, both logs and `table.md`.

What has to be set for ms-swift to do the same: rows in order (no shuffling of data set or loader; this script writes
them in the order that ours draws), all of a row's negatives (it takes one positive and seven negatives unless told),
AdamW's beta2 0.999 and no weight decay (its defaults are 0.95 and 0.1), a constant rate without warm-up, one process,
no checkpointing, and a head that is not tied: ms-swift trains embeddings and head as one then, ours keeps them apart.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from launcher.training import processors
from launcher.training.bpe import PUBLISHED_SIZE
from launcher.training.engine import build_scorer
from launcher.training.schedule import Order
from tests.bench.workloads import WORDS
from tests.tiny import tiny_arch, tiny_plan

STEPS, ROWS_A_STEP, NEGATIVES, SEED, LR = 10, 4, 3, 42, 1e-3
ROWS = STEPS * ROWS_A_STEP
KINDS = ("text", "image query", "image documents")
LOSSES = {"pointwise": "pointwise_reranker", "listwise": "listwise_reranker"}
SIDE = (64, 96)  # multiples of 32 pixels, so that neither side scales a picture
TOLERANCE = 1e-4


def main(folder: Path, swift_python: str) -> int:
    """Run every pair, print the table and write it down; 1 when a loss differs by more than TOLERANCE."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    columns: dict[str, list[tuple[float, float]]] = {}
    for kind in KINDS:
        rows = write_rows(folder, kind)
        for loss in LOSSES:
            out = folder / f"{kind} {loss}".replace(" ", "_")
            pairs = list(
                zip(
                    train_ours(folder, rows, loss, out), train_swift(swift_python, folder, rows, loss, out), strict=True
                )
            )
            columns[f"{loss}, {kind}"] = pairs
            print(f"{loss}, {kind}: largest difference {_largest(pairs):.1e}", flush=True)
    lines = [f"| step | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for step, row in enumerate(zip(*columns.values(), strict=True), 1):
        lines.append(f"| {step} | {' | '.join(f'{ours:.6f} / {theirs:.6f}' for ours, theirs in row)} |")
    worst = max(map(_largest, columns.values()))
    table = "\n".join([*lines, "", f"ours / ms-swift; largest difference {worst:.1e}; {versions(swift_python)}"])
    (folder / "table.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)
    return int(worst > TOLERANCE)


def _largest(pairs: list[tuple[float, float]]) -> float:
    return max(abs(ours - theirs) for ours, theirs in pairs)


def write_model(folder: Path) -> None:
    """A random Qwen3-VL with Qwen's vocabulary, whose special tokens ms-swift knows by number."""
    plan = tiny_plan(folder, train={"seed": SEED})
    arch = {**tiny_arch(vocab_size=PUBLISHED_SIZE, num_hidden_layers=2), "tie_word_embeddings": False}
    plan = replace(plan, arch=arch)
    processor = processors.load_processor(plan)
    processor.chat_template = processor.chat_template["default"]  # transformers would write several as a folder
    for part in (build_scorer(plan, processor, torch.device("cpu")).model, processor):
        part.save_pretrained(folder)


def write_rows(folder: Path, kind: str) -> dict[str, Path]:
    """The same queries in both forms: ours in the file's order, ms-swift's in the order in which ours draws them."""
    rng = random.Random(f"{SEED} {kind}")
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)

    def text() -> dict[str, Any]:
        return {"text": " ".join(rng.choices(WORDS, k=rng.randint(3, 30)))}

    def picture() -> dict[str, Any]:
        path = pictures / f"{rng.getrandbits(48):012x}.png"
        Image.frombytes("RGB", SIDE, rng.randbytes(SIDE[0] * SIDE[1] * 3)).save(path)
        return {"image": str(path)}

    query, document = (picture if kind == f"image {part}" else text for part in ("query", "documents"))
    rows = [(query(), [document() for _ in range(1 + NEGATIVES)]) for _ in range(ROWS)]
    ours = [{"query": q, "positives": docs[:1], "negatives": docs[1:]} for q, docs in rows]
    order = Order(ROWS, ROWS_A_STEP, SEED)
    theirs = [_swift_row(*rows[row]) for step in range(STEPS) for row in order.batch(step)]
    files = {side: folder / f"{kind.replace(' ', '_')}.{side}.jsonl" for side in ("ours", "swift")}
    for file, written in zip(files.values(), (ours, theirs), strict=True):
        file.write_text("".join(f"{json.dumps(row)}\n" for row in written), encoding="utf-8")
    return files


def _swift_row(query: dict[str, Any], documents: list[dict[str, Any]]) -> dict[str, Any]:
    def turn(content: dict[str, Any], role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content.get("text", "<image>")}]

    def images(content: dict[str, Any]) -> list[str]:
        return [content["image"]] if "image" in content else []

    row: dict[str, Any] = {"messages": turn(query, "user"), "images": images(query)}
    for side, docs in (("positive", documents[:1]), ("negative", documents[1:])):
        row[f"{side}_messages"] = [turn(doc, "assistant") for doc in docs]
        row[f"{side}_images"] = [images(doc) for doc in docs]
    return row


def train_ours(folder: Path, rows: dict[str, Path], loss: str, out: Path) -> list[float]:
    """Losses of the launcher's own command."""
    words = ["model=local", f"model.path={folder / 'model'}", "dataset=jsonl", f"dataset.train={rows['ours']}"]
    words += [f"loss={loss}", "tune=full", "tune.vision=frozen", "tune.projector=frozen", "tune.head=full"]
    words += ["zero=stage0", "precision=fp32", f"optim.lr={LR}", "optim.schedule=constant", "optim.warmup_steps=0"]
    words += [f"batch.global_size={ROWS_A_STEP}", f"train.max_steps={STEPS}", f"train.seed={SEED}", "gpus=1"]
    words += ["eval.every_steps=null", "checkpoint.every_steps=null", "checkpoint.at_end=false"]
    words += ["checkpoint.export=false", "batch.max_tokens=8192", f"run.dir={out}.ours"]
    _run([sys.executable, "-m", "launcher", *words], f"{out}.ours.log", {"DS_ACCELERATOR": "cpu"})
    return _losses(Path(f"{out}.ours") / "metrics.jsonl")


def train_swift(python: str, folder: Path, rows: dict[str, Path], loss: str, out: Path) -> list[float]:
    """Losses of `swift sft`."""
    options: dict[str, Any] = {
        **{"model": folder / "model", "model_type": "qwen3_vl_reranker", "check_model": "false"},
        **{"task_type": "generative_reranker", "loss_type": LOSSES[loss], "torch_dtype": "float32"},
        **{"dataset": rows["swift"], "split_dataset_ratio": 0, "strict": "true", "attn_impl": "sdpa"},
        **{"dataset_shuffle": "false", "train_dataloader_shuffle": "false", "dataloader_num_workers": 0},
        **{"tuner_type": "full", "freeze_vit": "true", "freeze_aligner": "true", "seed": SEED},
        **{"per_device_train_batch_size": ROWS_A_STEP, "gradient_accumulation_steps": 1, "max_steps": STEPS},
        **{"learning_rate": LR, "lr_scheduler_type": "constant", "warmup_ratio": 0, "gradient_checkpointing": "false"},
        **{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0, "max_grad_norm": 1},
        **{"max_length": 4096, "logging_steps": 1, "eval_strategy": "no", "save_strategy": "no", "report_to": "none"},
        **{"add_version": "false", "output_dir": f"{out}.swift", "use_cpu": "true"},
    }
    command = [
        python,
        "-m",
        "swift.cli.sft",
        *(str(word) for key, value in options.items() for word in (f"--{key}", value)),
    ]
    offline = {f"{name}_OFFLINE": "1" for name in ("HF_HUB", "TRANSFORMERS", "HF_DATASETS")}
    samples = {"MAX_POSITIVE_SAMPLES": "1", "MAX_NEGATIVE_SAMPLES": str(NEGATIVES), "IMAGE_MAX_TOKEN_NUM": "1280"}
    caches = {"MODELSCOPE_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    _run(command, f"{out}.swift.log", {**offline, **samples, **caches})
    return _losses(Path(f"{out}.swift") / "logging.jsonl")


def _run(command: list[str], log: str, extra: dict[str, str]) -> None:
    with open(log, "w") as file:
        done = subprocess.run(command, check=False, env={**os.environ, **extra}, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{Path(log).read_text()[-3000:]}\nended with {done.returncode}")


def _losses(file: Path) -> list[float]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [float(line["loss"]) for line in lines if "loss" in line]


def versions(swift_python: str) -> str:
    """What was compared."""
    names = ("torch", "transformers", "ms-swift")
    code = f"from importlib.metadata import version as v; print(', '.join(n + ' ' + v(n) for n in {names}))"
    theirs = subprocess.run([swift_python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    import transformers

    return f"ours: torch {torch.__version__}, transformers {transformers.__version__}; ms-swift's: {theirs}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
