"""The part of a plan's text that says how long it takes: a step by part, what bounds it, its timeline."""

from __future__ import annotations

from launcher.estimates import LANES, TimeEstimate
from launcher.planning import lines
from launcher.planning.gpus import ASSUMED_KIND, kind_of
from launcher.planning.pictures import bar, cut_names, lane, letters
from launcher.planning.speed import share_of_limit
from launcher.spec import RunPlan

BAR = 74  # characters, as the memory has
LANE_WIDTH = 64
BOUNDS = {
    "compute": "computing on the GPUs",
    "network": "the network between the GPUs",
    "host link": "the link between GPU and main memory",
    "host": "the host's processors",
    "data": "reading and decoding rows",
}


def time_lines(plan: RunPlan) -> list[str]:
    """Seconds of an average step and where they go; nothing on a CPU, whose speed is not foretold."""
    time = plan.time
    if time is None:
        return []
    marks = letters(name for name, value in time.parts.items() if value > 0)
    parts = {name: value for name, value in time.parts.items() if value > 0}
    rows = [
        (marks[name], name, lines.seconds(value), f"{100 * value / time.step_s:.1f} %") for name, value in parts.items()
    ]
    rows.append(("", "step", lines.seconds(time.step_s), ""))
    return [
        f"Time of an average step, estimated: {lines.seconds(time.step_s)}, "
        f"{time.tokens_per_s:,.0f} tokens/s, {lines.digits(time.queries_per_s)} queries/s",
        f"  {bar(parts, marks, BAR)}",
        *lines.table(rows, right=(2, 3)),
        *lines.table_with_text(_remarks(plan, time)),
        *_timeline(time),
    ]


def _remarks(plan: RunPlan, time: TimeEstimate) -> list[tuple[str, str]]:
    limit = (
        f"{100 * time.least_s / time.step_s:.0f} %: the {lines.digits(time.flops / 1e12)} TFLOP that the step needs "
        f"(nothing twice) would take {lines.seconds(time.least_s)} at the highest rate of matrix products on these GPUs"
    )
    kind = kind_of(plan.gpu_kind or ASSUMED_KIND)
    if kind is not None:
        used = share_of_limit(time.flops, time.step_s, plan.world_size, kind.peak_tflops)
        limit += f"; MFU, against the {kind.peak_tflops:g} TFLOP/s of the data sheet: {100 * used:.0f} %"
    rows = [("it waits for", BOUNDS.get(time.bound, time.bound)), ("of the limit", limit)]
    if time.compute_bound_tokens is not None and plan.deepspeed["zero_optimization"]["stage"] == 3:
        rows.append(("ZeRO-3", _gathers(plan, time.compute_bound_tokens)))
    if plan.config.dataset.name == "digits":
        rows.append(("digits", "the rows of the demo are tiny: rows of your own take far longer, and scale better"))
    return [*rows, *((name, said) for name, said in (("rates", time.rates), ("lengths", time.load)) if said)]


def _gathers(plan: RunPlan, least: int) -> str:
    """Whether gathering weights is hidden behind computing."""
    text = f"gathering weights hides behind computing above about {least:,} tokens a GPU and micro-batch"
    text = f"{text}; here at most {plan.batch.max_tokens:,}"
    return f"{text}, so the GPUs wait for weights" if plan.batch.max_tokens <= least else text


def _timeline(time: TimeEstimate) -> list[str]:
    """Lanes over the time of one micro-step and the optimizer."""
    spans = time.timeline
    if not spans:
        return []
    begin, end = min(span.begin_s for span in spans), max(span.end_s for span in spans)
    names = [name for name in LANES if any(span.lane == name for span in spans)]
    names += [name for name in dict.fromkeys(span.lane for span in spans) if name not in names]
    once = lines.seconds(time.step_s - time.micro_steps * time.micro_s)
    found = [
        f"  one micro-step and the optimizer, {lines.seconds(end - begin)}"
        f" (a step: {time.micro_steps:,} x {lines.seconds(time.micro_s)} + {once})"
    ]
    width = max(len(name) for name in names)
    for name in names:
        own = [span for span in spans if span.lane == name]
        found.append(f"    {name:<{width}}  {lane(own, begin, end, LANE_WIDTH)}")
    cut = cut_names(spans, begin, end, LANE_WIDTH)
    lane_of = {span.name: span.lane for span in reversed(spans)}  # GPU and host have passes of one name
    told = []
    for name in cut:
        lasting = [s.end_s - s.begin_s for s in spans if (s.name, s.lane) == (name, lane_of[name])]
        told.append(f"{name} {lines.seconds(sum(lasting))}")
    return found + (lines.wrap(f"    too short for a name: {', '.join(told)}", "      ") if told else [])
