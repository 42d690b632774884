"""report.html: whole, offline, escaped, and its numbers true; for runs of every fate, for several, for sweeps."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from launcher.__main__ import main
from launcher.errors import ConfigError
from launcher.estimates import CONTEXT, FRAGMENTS
from launcher.reporting.chart import smooth, thin
from launcher.reporting.page import write_report
from launcher.reporting.record import number, read_record
from launcher.rundir import SWEEP, RunDir, write_json
from launcher.running.outcome import foretold_lines
from launcher.running.supervisor import write_supervisor
from launcher.spec import plan_to_json
from tests.conftest import Launch
from tests.foretold import MEMORY, TIME
from tests.reporting_support import (
    START,
    STEP_S,
    TRAINING,
    Page,
    eval_line,
    failure,
    make_run,
    monitor_line,
    phases,
    plan_of,
    stamp,
    step_line,
    write_lines,
    write_outcome,
)

ALL_PLOTS = {
    *("loss", "rate", "eval", "speed", "memory", "shares", "spread", "ranks", "phases", "lengths"),
    *("gpus", "hosts", "network", "infiniband"),
    *("memory_parts", "step_parts", "timeline", "scaling"),
}


@pytest.fixture
def run(runs: Path) -> RunDir:
    """A run that is done and has everything."""
    return make_run(runs / "good")


def page(run: RunDir) -> Page:
    return Page(write_report(run))


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def test_every_plot_is_drawn_and_is_one_that_plotly_knows(run: RunDir) -> None:
    found = page(run)
    places = {attrs["id"] for tag, attrs in found.elements if attrs.get("class") == "plot"}
    assert set(found.figures) == ALL_PLOTS
    assert places == {f"plot-{name}" for name in ALL_PLOTS}
    for figure in found.figures.values():
        go.Figure(data=figure["data"], layout=figure["layout"])  # ValueError for a property it does not have
        assert all(len(trace["x"]) for trace in figure["data"])
    assert [switch["label"] for switch in found.figures["loss"]["switches"]] == ["linear", "log"]
    marks = {trace["name"]: trace["x"] for trace in found.figures["loss"]["data"] if trace["mode"] == "markers"}
    assert marks == {"kept checkpoint": [100, 200], "warning": [40]}
    shutil.rmtree(run.checkpoint(100))
    marks = {trace["name"]: trace["x"] for trace in page(run).figures["loss"]["data"]}
    assert marks["kept checkpoint"] == [200]


def test_gradients_are_clipped_where_the_line_is_drawn(run: RunDir) -> None:
    def clipped(limit: float) -> list[Any]:
        plan = json.loads(run.plan.read_text())
        plan["config"]["optim"]["max_grad_norm"] = limit
        write_json(run.plan, plan)
        return [trace["y"] for trace in page(run).figures["rate"]["data"] if trace["name"] == "clipped at"]

    assert clipped(1.0) == [[1, 1]]  # norms go from 2 to 4
    assert "Dashed: clipped at 1." in page(run).text
    assert clipped(0.1) == clipped(100.0) == []


def test_head_tells_how_long_and_warnings_stand_above_the_plots(run: RunDir) -> None:
    found = page(run)
    assert "16 queries a step, 200 steps, seed 42" in found.text
    order = ["Key numbers", "Warnings", "3 documents of the train data lose their end", "Plots", "Plan against reality"]
    places = [found.text.index(text) for text in order]
    assert places == sorted(places)
    plan = json.loads(run.plan.read_text())
    plan["config"]["train"]["max_steps"] = None
    write_json(run.plan, plan)
    assert "16 queries a step, epochs 3, seed 42" in page(run).text


def test_memory_of_a_run_on_a_cpu_was_not_measured(run: RunDir) -> None:
    write_json(run.plan, {**json.loads(run.plan.read_text()), "device": "cpu"})
    run.monitor.unlink()
    lines = [{k: v for k, v in step_line(s).items() if "memory" not in k and k != "ranks"} for s in range(1, 9)]
    write_lines(run.metrics, lines)
    rows = {row[0]: row for row in page(run).tables["Plan against reality"]}
    assert rows["memory of one rank, estimated"][2:] == ["not measured on a CPU", "–"]


def test_page_needs_no_network_and_runs_only_its_own_scripts(run: RunDir) -> None:
    found = page(run)
    assert not any({"src", "href", "srcset", "action"} & set(attrs) for _, attrs in found.elements)
    assert {tag for tag, _ in found.elements} & {"link", "img", "iframe", "object", "embed", "form", "base"} == set()
    assert "url(" not in found.style and "@import" not in found.style
    policy = next(str(attrs["content"]) for _, attrs in found.elements if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none';") and "http" not in policy.replace("http-equiv", "")
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found.scripts[1:]]
    assert len(hashes) == 2 and all(f"'sha256-{digest}'" in policy for digest in hashes)
    assert "showSendToCloud: false" in found.scripts[2]  # plotly's own default offers to send the data away
    assert run.report.stat().st_size < 6e6


def test_names_logs_and_errors_are_text_and_not_html(runs: Path) -> None:
    evil = "<script>alert(1)<!--"
    run = make_run(runs / evil, steps=30)
    text = "row 7 has <b>no</b> document"
    write_outcome(run, "failed", 4, [failure(run, 1, text, f"Traceback\n  x\nValueError: {text}")])
    run.log("desk", 1).write_text("<img src=x onerror=alert(2)>\n</pre></details><script>alert(3)</script>\n" * 20)
    warning = {"time": TRAINING + 9, "event": "warning", "text": "</script><a href='javascript:alert(4)'>x</a>"}
    with open(run.events, "a") as file:
        file.write(json.dumps(warning) + "\n")
    found = page(run)
    assert len(found.scripts) == 3
    tags = {tag for tag, _ in found.elements}
    assert tags & {"img", "b", "a"} == set()
    assert not any(name.startswith("on") for _, attrs in found.elements for name in attrs)
    for shown in (evil, text, "<img src=x onerror=alert(2)>", warning["text"]):
        assert shown in found.text
    hover = [t for trace in found.figures["loss"]["data"] for t in trace.get("text", [])]
    assert any("&lt;a href" in text for text in hover) and not any("<a" in text for text in hover)
    assert found.text.count("<img src=x") == 15  # the last 30 lines


def test_key_numbers_are_those_of_the_files(run: RunDir) -> None:
    tiles = page(run).tiles
    steady = steps_of(run)[5:]
    time = sum(line["step_s"] for line in steady)
    assert tiles["queries/s"] == f"{16 * len(steady) / time:.3g}" == "12.1"
    assert tiles["tokens/s"] == f"{24_000 * len(steady) / time:,.0f}"
    assert tiles["step time"] == f"{statistics.median(line['step_s'] for line in steady):.3g} s"
    assert tiles["waiting for data"] == f"{100 * 0.06 * len(steady) / time:.1f} %"
    assert tiles["best ndcg@10"] == "0.7700" and tiles["ndcg@10 at the end"] == "0.7400"
    assert tiles["loss, last tenth"] == f"{statistics.fmean(line['loss'] for line in steady[-20:]):.4f}"
    assert tiles["peak GPU memory"] == "42.0 GiB"
    assert tiles["GPU use"] == "85.0 %"  # 90 and 80 while it trained, nothing before
    assert tiles["steps"] == "200"


def test_an_early_stop_is_told(run: RunDir) -> None:
    line = {"time": 0.0, "event": "early_stop", "step": 200, "evaluations": 3}
    with open(run.events, "a") as file:
        file.write(json.dumps(line) + "\n")
    assert "of 200, stopped early: no new best (eval.patience)" in page(run).text


def test_plan_against_reality_is_right(run: RunDir) -> None:
    limit = json.loads(run.plan.read_text())["batch"]["max_tokens"]
    rows = {row[0]: row[1:] for row in page(run).tables["Plan against reality"]}
    # Of 80 GiB planned 3 are fragmentation and 3 the context.
    assert rows["peak allocated, rank 0"] == ["74.0 GiB", "42.0 GiB", f"{42 / 74:.2f}"]
    assert rows["peak allocated, rank 1"] == ["74.0 GiB", "39.5 GiB", f"{39.5 / 74:.2f}"]
    assert rows["peak reserved, largest rank"] == ["77.0 GiB", "47.5 GiB", f"{47.5 / 77:.2f}"]
    assert rows["in use on desk GPU 1 (driver)"] == ["80.0 GiB", "51.0 GiB", f"{51 / 80:.2f}"]
    assert rows["the fullest moment"] == ["backward", "forward", "–"]
    steady = steps_of(run)[5:]
    seconds = [line["step_s"] for line in steady]
    mean, tokens = statistics.fmean(seconds), 24_000 * len(steady) / sum(seconds)
    assert rows["time of a step, mean"] == ["4 s", f"{mean:.3g} s", f"{mean / 4:.2f}"]
    assert rows["tokens/s"] == ["12,000", f"{tokens:,.0f}", f"{tokens / 12_000:.2f}"]
    assert rows["queries/s"] == ["4", f"{16 / mean:.3g}", f"{4 / mean:.2f}"]
    # A quarter of the planned 4 s would do for 48,000 tokens at the highest rate.
    assert rows["share of the limit"] == ["25.0 %", f"{100 * tokens / 48_000:.1f} %", f"{tokens / 12_000:.2f}"]
    used = 8e15 / (2 * 989e12)  # seconds of the planned 48,000 tokens at the data sheet's rate on two H200s
    mfu = [f"{100 * used / 4:.1f} %", f"{100 * used * tokens / 48_000:.1f} %", f"{tokens / 12_000:.2f}"]
    assert rows["MFU"] == mfu
    assert rows["share of waiting for data"][:2] == ["6.2 %", f"{6 / mean:.1f} %"]
    assert rows["optimizer steps"] == ["200", "200", "1.00"]
    assert rows["steps an epoch"] == ["63", "62.5", f"{62.5 / 63:.2f}"]  # 1,000 rows, 16 a step
    assert rows["queries a step, mean"] == ["16", "16", "1.00"]
    assert rows["micro-batches a rank and step, mean"][1] == "2"
    most = [f"at most {limit:,}"]  # 12,400 and 11,600 tokens in two micro-batches each
    assert rows["tokens of a micro-batch, mean"] == [*most, "6,000", f"{600000 / limit:.1f} % of the limit"]
    assert rows["tokens of the fullest micro-batch"] == [
        *most,
        "6,200",
        f"{620000 / limit:.1f} % of the limit",
    ]


def test_plan_at_the_tokens_seen_scales_what_grows_with_them(run: RunDir) -> None:
    plan = json.loads(run.plan.read_text())
    gib = {"frozen weights": 9, "gradients": 1, "activations of the language model": 40, "logits": 8}
    gib |= {FRAGMENTS: 1, CONTEXT: 2}
    plan["memory"] = {name: value * 2**30 for name, value in gib.items()}
    plan["batch"]["max_tokens"] = 12_400  # rank 0 held 12,400 tokens in two micro-batches
    write_json(run.plan, plan)
    found = page(run)
    rows = {row[0]: row[1:] for row in found.tables["Plan against reality"]}
    assert rows["peak allocated against the plan at the tokens seen"] == ["34.0 GiB", "42.0 GiB", "1.24"]  # 10 + 48/2
    levels = {line["name"]: line["y"] for line in found.figures["memory"]["data"] if line["line"]["dash"] != "solid"}
    planned = {"planned, allocated": [58, 58], "planned, reserved": [59, 59]}
    assert levels == {**planned, "planned, allocated at the tokens seen": [34, 34]}
    steps = run.metrics.read_text()
    run.metrics.write_text(steps.replace('"ranks": {', '"ranks": {"fullest_tokens": [9300, 6000], '))
    noted = {row[0]: row[1:] for row in page(run).tables["Plan against reality"]}  # micro-batches that are not alike
    assert noted["peak allocated against the plan at the tokens seen"][0] == "46.0 GiB"  # 10 + 48 x 3/4
    run.metrics.write_text(steps)
    old = {"frozen weights": 10, "activations": 40, "vision": 8, "context": 2}  # as plans were written once
    plan["memory"] = {name: value * 2**30 for name, value in old.items()}
    write_json(run.plan, plan)
    found = page(run)
    assert {row[0]: row[1:] for row in found.tables["Plan against reality"]} == {
        **rows,
        "peak reserved, largest rank": ["58.0 GiB", "47.5 GiB", "0.82"],
        **{f"in use on desk GPU {n} (driver)": ["60.0 GiB", f"{50 + n}.0 GiB", f"{(50 + n) / 60:.2f}"] for n in (0, 1)},
    }
    del plan["batch"]["max_tokens"]
    write_json(run.plan, plan)
    found = page(run)
    assert len(found.tables["Plan against reality"]) == len(rows) - 1
    assert not any("tokens seen" in line["name"] for line in found.figures["memory"]["data"])


def test_what_was_foretold_is_drawn_beside_what_came(run: RunDir) -> None:
    found = page(run)
    memory = {bar["name"]: dict(zip(bar["y"], bar["x"], strict=True)) for bar in found.figures["memory_parts"]["data"]}
    assert {name: bar["planned"] for name, bar in memory.items() if "planned" in bar} == MEMORY
    assert list(memory)[: len(MEMORY)][-2:] == [FRAGMENTS, CONTEXT]  # torch's tensors stand before both
    assert memory["allocated"] == {"rank 0": 42, "rank 1": 39.5}
    assert memory["held by torch beside it"] == {"rank 0": 5.5, "rank 1": 4.5}
    assert memory["in use, as the driver says"] == {"desk GPU 0": 50, "desk GPU 1": 51}
    assert [shape["x0"] for shape in found.figures["memory_parts"]["layout"]["shapes"]] == [140, 133]
    step = {bar["name"]: dict(zip(bar["y"], bar["x"], strict=True)) for bar in found.figures["step_parts"]["data"]}
    assert {name: bar["planned"] for name, bar in step.items() if "planned" in bar} == TIME.parts
    mean = statistics.fmean(line["step_s"] for line in steps_of(run)[5:])
    seen = {"waiting for data": 0.06, "forward": 0.33, "backward": 0.6, "optimizer": 0.05, "rest": mean - 1.04}
    assert {name: bar["seen"] for name, bar in step.items() if "seen" in bar} == pytest.approx(seen, rel=1e-4)
    spans = [
        (lane, bar["name"], base, base + lasting)
        for bar in found.figures["timeline"]["data"]
        for lane, base, lasting in zip(bar["y"], bar["base"], bar["x"], strict=True)
    ]
    assert sorted(spans) == sorted((s.lane, s.name, s.begin_s, pytest.approx(s.end_s)) for s in TIME.timeline)
    hours = [(t["name"], t["x"], t["y"]) for t in found.figures["scaling"]["data"] if t["type"] == "bar"]
    assert hours == [
        ("hours an epoch", ["1", "2", "4"], [None, 4, 2.5]),
        ("GPU-hours an epoch", ["1", "2", "4"], [None, 8, 10]),
    ]
    stars = [(t["x"], t["y"]) for t in found.figures["scaling"]["data"] if t["type"] == "scatter"]
    assert stars == [(["2"], [pytest.approx(n * 63 * mean / 3600, rel=1e-4)]) for n in (1, 2)]  # 63 steps an epoch
    assert "Does not fit on 1." in found.text


def test_a_plan_without_it_has_a_page_too(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path)]) == 0
    mean = statistics.median(line["step_s"] for line in steps_of(run)[-100:])
    told = f"memory planned 77.0 GiB, peak 47.5 GiB; step planned 4 s, took {mean:.3g} s"
    assert f"  {told}" in capsys.readouterr().out.splitlines()
    assert foretold_lines(run) == [told]
    plan = json.loads(run.plan.read_text())
    write_json(run.plan, {**plan, "time": {**plan["time"], "load": "assumed: each prompt as long as may be"}})
    assert foretold_lines(run) == [told.replace("planned 4 s", "planned 4 s for the longest prompts")]
    new = ("time", "choices", "scaling", "host_memory", "disk", "memory_moment", "memory_capacity", "env_reasons")
    write_json(run.plan, {key: value for key, value in plan.items() if key not in new})
    found = page(run)
    assert set(found.figures) == ALL_PLOTS - {"step_parts", "timeline", "scaling"}
    assert "Seconds of a step, planned and seen: The plan foretells no time" in found.text
    assert not {"time of a step, mean", "share of the limit"} & {row[0] for row in found.tables["Plan against reality"]}
    assert foretold_lines(run) == ["memory planned 77.0 GiB, peak 47.5 GiB"]
    write_lines(run.metrics, [{k: v for k, v in line.items() if "memory" not in k} for line in steps_of(run)])
    assert foretold_lines(run) == []


def axes(found: Page) -> list[tuple[str, dict[str, Any]]]:
    layouts = ((name, figure["layout"]) for name, figure in found.figures.items())
    return [(name, axis) for name, layout in layouts for key, axis in layout.items() if key[1:].startswith("axis")]


def test_axes_have_plain_numbers_and_units_that_suit_them(run: RunDir) -> None:
    tiny = {"data_wait_s": 6e-5, "step_s": 0.05, "loss": 1e-7, "grad_norm": 2.0, "tokens_per_s": 4e6}
    ranks = {"data_wait_s": [6e-5, 5e-5], "forward_s": [0.02, 0.02]}
    write_lines(run.metrics, [step_line(step, **tiny, ranks=ranks) for step in range(1, 5)])
    found = page(run)
    for name, axis in axes(found):
        if axis.get("type") != "category":
            assert axis["tickformat"] in ("", "~g", "~e") and axis["exponentformat"] == "power", name  # no k, m, µ, M
    titles = {name: [note["text"] for note in f["layout"]["annotations"]] for name, f in found.figures.items()}
    assert titles["ranks"] == ["forward, ms", "waiting for data, µs"]
    assert found.figures["ranks"]["data"][1]["median"] == [60, 50]
    assert titles["rate"][1] == "gradient norm before clipping"  # a constant on a logarithmic axis shows nothing
    assert max(found.figures["shares"]["data"][-1]["y"]) == pytest.approx(100 * 6e-5 / 0.98006, rel=1e-4)  # per cent
    assert found.figures["spread"]["layout"]["xaxis"]["title"]["text"] == "time of a step, ms"
    assert found.figures["spread"]["data"][0]["x"][0] == pytest.approx(50, rel=0.02)
    assert found.figures["spread"]["layout"]["yaxis"]["dtick"] == 1  # no half steps
    assert found.figures["loss"]["layout"]["xaxis"]["dtick"] == 1
    log = found.figures["loss"]["switches"][1]["layout"]["yaxis.tickvals"]
    assert log[0] <= 1e-7 <= log[-1]


def test_what_is_not_there_is_said_in_one_place(run: RunDir) -> None:
    write_lines(run.metrics, steps_of(run))
    write_lines(run.monitor, [{**line, "gpus": line["gpus"][:1]} for line in map(monitor_line, range(72))])
    write_json(run.path / "bad_rows.json", [])
    write_lines(run.events, phases(("reading data", 10), ("training", 60), ("ended", 355)))
    write_json(run.plan, {**json.loads(run.plan.read_text()), "warnings": []})
    found = page(run)
    assert {"Evaluations", "Profiles", "Warnings"} & set(found.titles) == set()
    absent = found.text[found.text.index("Without data") :]
    for said in ("Evaluation metrics: No", "Profiles: Nothing", "Warnings: none.", "Rows that were dropped: none."):
        assert said in absent
    heads = [note["text"] for note in found.figures["gpus"]["layout"]["annotations"]]
    assert "temperature, °C" in heads and not any("held back" in head for head in heads)  # GPU 0 never is
    assert "None was ever held back" in found.text
    charts = [str(attrs["class"]) for _, attrs in found.elements if str(attrs.get("class")).split()[0] == "chart"]
    assert charts.count("chart") % 2 == 0 and charts.count("chart wide") >= 3


def test_versions_stand_in_two_columns_and_long_values_are_cut(run: RunDir) -> None:
    long = "cuda>=13.0 " + "brand=unknown,driver<536 " * 40
    named = {"NVIDIA_REQUIRE_CUDA": long, "python": "3.11.9", "TORCH_LOGS": 'a"b' + "x" * 200}
    write_json(run.environment, {**named, **{f"package {n}": "1" for n in range(9)}})
    found = page(run)
    rows = found.tables["Versions and machine"]
    assert [row[0] for row in rows][:2] == ["python", "TORCH_LOGS"] and rows[-1][0] == "NVIDIA_REQUIRE_CUDA"
    assert len(rows) == 12 and rows[-1][1] == long[:79] + "…"
    assert [attrs["title"] for _, attrs in found.elements if "title" in attrs] == ['a"b' + "x" * 200, long]
    tables = [tag for tag, _ in found.elements if tag in ("h3", "table")]
    assert "table,table" in ",".join(tables)


def test_time_is_told_apart_by_phase_and_by_part_of_a_step(run: RunDir) -> None:
    tables = page(run).tables
    assert {row[0]: row[1] for row in tables["Time per phase"][1:]} == {
        **{"starting": "10 s", "reading data": "15 s", "loading model": "20 s", "starting DeepSpeed": "5 s"},
        **{"evaluating": "20 s", "training": "4 min 20 s", "saving": "10 s", "exporting": "15 s", "ending": "5 s"},
    }
    mean = statistics.fmean(line["step_s"] for line in steps_of(run)[5:])
    shares = {row[0]: row[2] for row in tables["Parts of a step"][1:]}
    assert shares["forward"] == f"{100 * 0.33 / mean:.1f} %"
    assert shares["rest"] == f"{100 * (mean - 0.06 - 0.33 - 0.6 - 0.05) / mean:.1f} %"
    assert sum(float(share[:-2]) for share in shares.values()) == pytest.approx(100, abs=0.3)
    ranks = {row[0]: row for row in tables["Ranks"][1:]}
    assert [ranks[rank][8] for rank in "01"] == ["0.0 %", "100.0 %"]  # rank 1 is the slow one
    assert ranks["1"][4] == "0.36 s"
    assert tables["GPUs"][2][6] == f"sw_power_cap {100 * 6 / 72:.1f} %"


def test_tables_hold_what_else_there_is_to_know(run: RunDir) -> None:
    run.report.write_text("an older page")
    found = page(run)
    assert ["torch", "2.9.1"] in found.tables["Versions and machine"]
    assert ["torch", "profile/rank0.json.gz", "https://ui.perfetto.dev"] in found.tables["Profiles"]
    assert [r[0] for r in found.tables["Files"] if r[0] in ("logs/", "metrics.jsonl")][::-1] == [
        "metrics.jsonl",
        "logs/",
    ]
    assert "Rows that were dropped: 1" in found.text
    assert "HF_TOKEN=***" in found.text
    assert "Memory of one GPU, GiB, estimated" in found.text  # the plan, as `plan` prints it
    assert [row[0] for row in found.tables["Evaluations"]] == ["step", "0", "100", "200"]


def test_thinning_keeps_extremes_order_and_gaps() -> None:
    ys: list[float | None] = [float((n * 7919) % 10_007) for n in range(50_000)]
    ys[31_234], ys[7_777] = 1e6, -1e6
    ys[20_000:21_000] = [None] * 1000
    xs, kept = thin(range(50_000), ys, 2000)
    assert len(xs) == len(kept) <= 2000
    assert xs == sorted(set(xs)) and (xs[0], xs[-1]) == (0, 49_999)
    assert (31_234, 1e6) in zip(xs, kept, strict=True) and (7_777, -1e6) in zip(xs, kept, strict=True)
    assert None in kept
    assert thin([1, 2], [3.0, None], 2000) == ([1, 2], [3.0, None])


def test_long_run_stays_small_and_says_what_is_left_out(run: RunDir) -> None:
    changed = {7777: {"loss": 9.5}, 500: {"loss": None}}
    lines = [step_line(step, total_steps=10_000, lr=1e-4, **changed.get(step, {})) for step in range(1, 10_001)]
    write_lines(run.metrics, lines)
    write_lines(run.monitor, [monitor_line(number, gpus=8) for number in range(1200)])
    found = page(run)
    assert "has 10,000 points; 2,000 are drawn" in found.text
    assert max(y for y in found.figures["loss"]["data"][0]["y"] if y is not None) == 9.5
    assert "The loss was not finite in 1 step, first in step 500" in found.text
    assert run.report.stat().st_size < 6e6


def test_the_best_lies_on_its_line(run: RunDir) -> None:
    entries = [{"kind": "eval", "step": 100, "eval/ndcg@10": 0.123456789, "time": START + 1.0}]
    write_lines(run.metrics, [*steps_of(run), *entries])
    first, *_, best = page(run).figures["eval"]["data"]
    assert best["name"] == "best" and best["y"] == first["y"]


def test_smoothing_starts_at_the_first_value_and_skips_gaps() -> None:
    assert smooth([4.0, None, 4.0, 4.0]) == [pytest.approx(4.0), None, pytest.approx(4.0), pytest.approx(4.0)]
    steps = smooth([0.0] * 50 + [1.0] * 50)
    assert steps[49] == 0 and 0 < (steps[51] or 0) < (steps[60] or 0) < 1


def test_run_that_failed_before_training(run: RunDir) -> None:
    for file in (run.metrics, run.events, run.monitor, run.environment, run.data):
        file.unlink()
    shutil.rmtree(run.ranks)
    text = "DeepSpeed's node launcher on desk left with exit code 1 before a rank had started"
    write_outcome(run, "failed", 3, [{**failure(run, 0, "", ""), "rank": None, "error": None, "text": text}])
    run.node_log("desk").write_text("ImportError: libcudart\n")
    found = page(run)
    assert set(found.figures) == {"timeline", "scaling"}  # of the plan alone
    for shown in (text, "ImportError: libcudart", "Loss: No step has been written down yet.", "failed, exit code 3"):
        assert shown in found.text
    assert "Network: The monitor wrote nothing." in found.text


def test_data_are_shown(run: RunDir) -> None:
    found = page(run)
    shown = found.figures["lengths"]
    assert [trace["y"] for trace in shown["data"]] == [[3000, 200]] * 2
    assert shown["layout"]["xaxis"]["categoryarray"] == ["96 - 127", "128 - 191"]
    for name, train, held_out in (
        ("usable rows", "3,200", "12"),
        ("bad rows", "3", "3"),
        ("tokens", "123,456", "123,456"),
        ("documents: mixed", "9", "9"),
    ):
        assert [name, train, held_out] in found.tables["Data"]


def test_run_that_goes_on(run: RunDir) -> None:
    run.outcome.unlink()
    write_supervisor(run, "a-run")  # this process
    found = page(run)
    assert "running, supervised by process" in found.text and "so far" in found.text
    assert {"loss", "speed", "gpus"} <= set(found.figures)


def test_run_without_evaluation_monitor_or_the_newer_keys(run: RunDir) -> None:
    new = (
        "data_wait_s",
        "forward_s",
        "backward_s",
        "optimizer_s",
        "micro_steps",
        "ranks",
        "memory_gib",
        "memory_reserved_gib",
    )
    old = [{key: value for key, value in line.items() if key not in new} for line in steps_of(run)]
    write_lines(run.metrics, [{**line, "loss": None} for line in old])
    run.monitor.unlink()
    write_lines(run.events, phases(("reading data", 10), ("starting DeepSpeed", 45)))
    plan = json.loads(run.plan.read_text())
    plan["config"]["logging"]["monitor_every_s"] = None
    write_json(run.plan, plan)
    found = page(run)
    assert set(found.figures) == {"loss", "rate", "speed", "spread", "lengths", "step_parts", "timeline", "scaling"}
    for reason in (
        *("Evaluation metrics: No evaluation was made", "Where a step's time goes: Its steps were written without"),
        *("Time per phase: Not every change", "GPUs over time: The monitor was off"),
    ):
        assert reason in found.text
    assert "The loss was not finite in 200 steps" in found.text


def test_damaged_files_are_read_as_far_as_they_go(run: RunDir) -> None:
    with open(run.metrics, "a") as file:
        file.write('{"kind": "step", "step": 201, "lo\n[1, 2]\n{"kind": "step", "step": "x", "time": 1}\n{"kind": "st')
    run.monitor.write_text("\x00\x00\n" + run.monitor.read_text() + '{"time": 1e9, "gpus": 7, "network": []}\n')
    run.outcome.write_text('{"status": ')
    (run.path / "bad_rows.json").write_text("{")
    found = page(run)
    assert "metrics.jsonl: 2 of " in found.text and "outcome.json cannot be read" in found.text
    assert set(found.figures) == ALL_PLOTS
    assert found.tiles["steps"] == "200"


def test_plan_of_another_version_is_said_and_the_rest_is_shown(run: RunDir) -> None:
    plan = json.loads(run.plan.read_text())
    write_json(run.plan, {**plan, "version": "9.0", "news": 1, "memory": {}})
    found = page(run)
    assert "This plan was written by launcher 9.0" in found.text
    assert set(found.figures) == ALL_PLOTS


@pytest.mark.parametrize(
    ("content", "said"), [(None, "it has no plan.json"), ('{"run_id"', "plan.json cannot be read")]
)
def test_folder_without_a_plan_is_refused(
    run: RunDir, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    run.plan.unlink() if content is None else run.plan.write_text(content)
    with pytest.raises(ConfigError, match=said):
        write_report(run)
    assert main(["report", str(run.path)]) == 2
    shown = capsys.readouterr().err
    assert said in shown and "try  python -m launcher status" in shown
    assert not run.report.exists()


def test_resumed_run_counts_the_last_line_of_a_step(run: RunDir) -> None:
    """Steps 1 to 200, then a resume from step 100 two hours later that reached 150."""
    later = 7200.0
    again = [step_line(s, loss=0.125, time=TRAINING + later + s) for s in range(101, 151)]
    first = steps_of(run)
    write_lines(run.metrics, [*first, eval_line(200, 0.99), *again])
    resumed = {"time": TRAINING + later + 90, "event": "resumed", "step": 100, "path": "x"}
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    write_lines(run.events, [*events, {"time": START + later, "event": "phase", "phase": "reading data"}, resumed])
    os.rename(run.plan, run.path / "plan.1.json")
    os.rename(run.outcome, run.path / "outcome.1.json")
    run.plan.write_text(plan_to_json(plan_of(run.path)))
    write_outcome(run, "stopped", 130, started=stamp(START + later), ended=stamp(START + later + 300))
    record = read_record(run)
    assert [line["step"] for line in record.steps] == list(range(1, 151))
    assert {line["loss"] for line in record.steps[100:]} == {0.125}
    assert record.evals == []  # that of step 200 belongs to what was given up
    assert record.seconds == 360 + 300
    assert record.minutes(START + later + 60) == pytest.approx(7)  # the pause does not count
    found = page(run)
    assert "11 min 0 s in 2 parts (resumed)" in found.text
    assert found.tiles["steps"] == "150"
    assert [t["x"] for t in found.figures["loss"]["data"] if t["name"] == "resumed"] == [[100]]


def test_report_of_one_run_in_the_terminal(run: RunDir, launch: Launch, tmp_path: Path) -> None:
    """By `latest`, in a real process, and opened in what BROWSER names."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    none = {"BROWSER": "false %s", "PATH": str(tmp_path), "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    assert "no browser was found here" in launch("report", "--open", env=none).stdout
    done = launch("report", "--open", env={"BROWSER": f"{browser} %s"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert 3 <= len(lines) <= 8
    assert lines[0] == "good: done, exit code 0, 6 min 0 s"
    assert "best ndcg@10 0.7700 at step 100, before training 0.4100" in done.stdout
    assert lines[-1].strip() == "runs/good/report.html"
    assert (tmp_path / "opened").read_text().strip() == run.report.resolve().as_uri()


def test_comparison_shows_only_what_differs_and_marks_the_best(
    run: RunDir, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs.parent)
    words = ("optim.lr=3e-4", "+env.set.MY_TOKEN=one", "env.set.NCCL_DEBUG=INFO")
    other = make_run(runs / "other", *(word.removeprefix("+") for word in words))
    plan = json.loads(other.plan.read_text())
    plan["config"]["env"]["set"]["MY_TOKEN"] = "hidden"
    write_json(other.plan, plan)
    write_lines(
        other.metrics,
        [step_line(s, step_s=2 * STEP_S, tokens_per_s=20_000.0, queries_per_s=6.0, loss=0.1) for s in range(1, 101)],
    )
    assert main(["report", "good", "other"]) == 0
    shown = capsys.readouterr().out
    assert "compare.html" in shown and "loss, last tenth" in shown
    found = Page(Path("compare.html"))
    rows = {row[0]: row[1:] for row in found.tables["What differs"]}
    assert rows == {
        "key": ["good", "other"],
        "optim.lr": ["null", "0.0003"],
        "env.set.NCCL_DEBUG": ["–", "INFO"],
        "env.set.MY_TOKEN": ["***", "***"],
    }
    assert found.best == ["12.1", "1.21 s", "0.1000", "20,000"]  # a metric that only one of them has is no contest
    assert set(found.figures) == {"loss", "eval", "memory", "queries", "tokens"}
    for figure in found.figures.values():
        go.Figure(data=figure["data"], layout=figure["layout"])
    by_time = found.figures["loss"]["switches"][1]
    assert by_time["visible"] == [False, False, True, True]
    assert by_time["layout"]["xaxis.tickmode"] == "auto" and "dtick" not in found.figures["loss"]["layout"]["xaxis"]
    assert found.figures["eval"]["layout"]["xaxis"].get("dtick") is None  # steps 0 to 200
    assert found.figures["loss"]["data"][2]["x"][0] == pytest.approx((60 + 1.35) / 60, rel=1e-4)


def test_comparison_replaces_its_own_pages_only(run: RunDir, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(runs / "other")
    mine, words = runs / "mine.html", ["report", "good", "other", "--root", str(runs), "-o"]
    mine.write_text("<html>my thesis</html>")
    assert main([*words, str(mine)]) == 2
    assert "is not replaced" in capsys.readouterr().err
    assert mine.read_text() == "<html>my thesis</html>"
    ours = runs / "ours.html"
    assert [main([*words, str(ours)]) for _ in range(2)] == [0, 0]
    assert main(["report", "good", "--root", str(runs), "-o", str(ours)]) == 2


def test_sweep_compares_its_jobs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs / "20260101-000000-sweep"
    for place, lr in enumerate(("1e-3", "1e-2")):
        make_run(folder / str(place), f"optim.lr={lr}")
    better = RunDir(folder / "1")
    write_lines(better.metrics, [*steps_of(better), eval_line(200, 0.95)])
    jobs = [
        {"number": n, "folder": str(n), "differs": {"optim.lr": lr}, "status": status, "reason": reason}
        for n, (lr, status, reason) in enumerate(
            (("1e-3", "done", ""), ("1e-2", "done", ""), ("-1", "invalid", "lr < 0"))
        )
    ]
    write_json(folder / SWEEP, {"metric": "mrr@10", "status": "done", "jobs": jobs})
    assert "20260101-000000-sweep/1 done" in page(better).text
    assert main(["report", folder.name, "--root", str(runs)]) == 0
    assert "report.html" in capsys.readouterr().out
    found = Page(folder / "report.html")
    assert [row[0] for row in found.tables["Results"]] == ["run", "1: optim.lr=1e-2", "0: optim.lr=1e-3"]
    assert [row[3] for row in found.tables["Results"]] == ["best mrr@10", "0.9000", "0.7200"]  # the best first
    assert [attrs["href"] for tag, attrs in found.elements if tag == "a"] == ["1/report.html"]  # 0 has no page yet
    swept = found.figures["swept"]
    assert [(trace["x"], trace["y"]) for trace in swept["data"]] == [([0.001, 0.01], [0.72, 0.9])]
    assert swept["layout"]["xaxis"]["type"] == "log"
    go.Figure(data=swept["data"], layout=swept["layout"])
    assert [row[0] for row in found.tables["What differs"]] == ["key", "optim.lr"]
    assert "Job 2: optim.lr=-1 is not shown: invalid, lr < 0." in found.text
    for job, lr in zip(jobs, ("a", "b", "c"), strict=True):
        job["differs"] = {"optim.lr": lr}
    write_json(folder / SWEEP, {"metric": "mrr@10", "status": "done", "jobs": jobs})
    assert main(["report", folder.name, "--root", str(runs)]) == 0
    assert "swept" not in Page(folder / "report.html").figures  # words have no place on an axis
    shutil.rmtree(folder / "0")
    shutil.rmtree(folder / "1")
    assert main(["report", folder.name, "--root", str(runs)]) == 2
    assert "no job of this sweep has started" in capsys.readouterr().err
    write_json(folder / SWEEP, {"jobs": [{"number": 0}]})
    assert main(["report", folder.name, "--root", str(runs)]) == 2
    assert "sweep.json is damaged" in capsys.readouterr().err


def test_report_imports_little(run: RunDir) -> None:
    """Looking at a run needs neither Hydra nor torch, and importing the plane not even plotly."""
    code = (
        "import sys; import launcher.reporting.verb as verb, launcher.reporting.page\n"
        "early = {'plotly', 'jinja2', 'rich'} & set(sys.modules)\n"
        f"verb.main([{str(run.path)!r}])\n"
        "late = {'hydra', 'omegaconf', 'torch', 'transformers', 'pandas'} & set(sys.modules)\n"
        "sys.exit(str(early | late) if early | late else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("value", "expected"), [(2, 2.0), (0.5, 0.5), (True, None), ("2", None), (None, None), (10**400, None)]
)
def test_a_number_is_one_that_can_be_drawn(value: object, expected: float | None) -> None:
    assert number(value) == expected
