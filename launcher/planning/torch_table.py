"""What is known of variables of torch's process groups, CUDA and DeepSpeed, in the rows of `nccl_table`."""

from __future__ import annotations

from launcher.planning.nccl_rules import ERROR, NOTICE, WARNING, Rule, above, is_off, is_on, is_one_of

_ALIASES = "NCCL_(ASYNC_ERROR_HANDLING|BLOCKING_WAIT|DESYNC_DEBUG|ENABLE_TIMING)"

TORCH_RULES: tuple[Rule, ...] = (
    Rule(
        name="(TORCH_)?NCCL_BLOCKING_WAIT",
        level=ERROR,
        when=is_on,
        text="turns off the watchdog that ends a run whose ranks wait for one another",
        source="torch",
    ),
    Rule(
        name="(TORCH_)?NCCL_ASYNC_ERROR_HANDLING",
        level=ERROR,
        when=is_off,
        text="lets ranks wait for ever after an error of NCCL",
        source="torch",
    ),
    Rule(name=_ALIASES, level=WARNING, text="is the old name", instead="TORCH_{name}={value}", source="torch"),
    Rule(
        name="TORCH_NCCL_AVOID_RECORD_STREAMS",
        level=NOTICE,
        text="changed its default, and is seldom needed",
        source="torch",
    ),
    Rule(
        name="TORCH_NCCL_TRACE_BUFFER_SIZE",
        level=NOTICE,
        text="was renamed in torch 2.9",
        instead="TORCH_FR_BUFFER_SIZE={value}",
        source="torch",
    ),
    Rule(
        name="TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        level=NOTICE,
        text="was renamed in torch 2.9",
        instead="TORCH_FR_DUMP_TEMP_FILE={value}",
        source="torch",
    ),
    Rule(
        name="TORCH_FR_BUFFER_SIZE",
        level=WARNING,
        when=is_off,
        text="turns off the flight recorder, the cheapest evidence of a hang",
        instead="2000",
        source="torch",
    ),
    Rule(
        name="TORCH_NCCL_(ENABLE_MONITORING|DUMP_ON_TIMEOUT)",
        level=WARNING,
        when=is_off,
        text="leaves a hang without an end or without evidence",
        source="torch",
    ),
    Rule(
        name="TORCH_NCCL_(ENABLE_TIMING|DESYNC_DEBUG|NAN_CHECK)",
        level=WARNING,
        when=is_on,
        text="is for debugging: it slows the run, and has caused hangs",
        source="torch",
    ),
    Rule(
        name="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        level=WARNING,
        when=above(3600),
        text="lets a rank whose watchdog hangs keep its GPU for more than an hour",
        instead="480",
        source="torch",
    ),
    Rule(
        name="DEEPSPEED_TIMEOUT",
        level=WARNING,
        when=above(60),
        text="turns each hang into more than an hour lost; rows are prepared before ranks meet: nothing takes so long",
        instead="10",
        source="deepspeed",
    ),
    Rule(
        name="TORCH_DISTRIBUTED_DEBUG",
        level=WARNING,
        when=is_one_of("detail"),
        text="checks every collective and slows the run",
        instead="INFO",
        source="torch",
    ),
    Rule(
        name="CUDA_LAUNCH_BLOCKING",
        level=WARNING,
        when=is_on,
        text="makes the CPU wait for each kernel: for debugging",
        source="cuda",
    ),
    Rule(
        name="CUDA_DEVICE_MAX_CONNECTIONS",
        level=NOTICE,
        when=is_one_of("1"),
        text="is advice for Megatron; with ZeRO it can keep communication from overlapping",
        source="Megatron-LM",
    ),
)
