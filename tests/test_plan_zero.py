"""Finished DeepSpeed configurations, judged by DeepSpeed; and every mistake in a user's own JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.planning.facts import TextFile
from launcher.planning.hjson_file import read_hjson
from launcher.planning.zero import NEVER, Trained, finish_zero
from launcher.planning.zero_keys import (
    BF16_KEYS,
    FP16_KEYS,
    FP16_ONLY,
    OWNED_KEYS,
    PASSED_KEYS,
    ZERO_KEYS,
)
from launcher.planning.zero_lint import Settings, batch_error
from launcher.resources import ds_configs_dir
from launcher.spec import BatchConfig, OptimConfig, RunConfig, ZeroConfig

CASES = Path(__file__).parent / "cases" / "ds_config"
STAGES = ("stage0", "stage1", "stage2", "stage3", "stage3_hpz")
OTHERS = (  # and precisions that they are refused in
    ("stage2_offload", ()),
    ("stage3_offload", ()),
    ("stage3_nvme", ()),
    ("zeropp", ("bf16", "fp32")),
    ("stage2_bf16_states", ("fp16", "fp32")),
    ("stage3_bf16_states", ("fp16", "fp32")),
    ("autotp", ("bf16", "fp16", "fp32")),
)


def group(name: str) -> TextFile:
    """A shipped file."""
    path = ds_configs_dir() / f"{name}.json"
    return TextFile(path=f"ds_configs/{path.name}", text=path.read_text())


def settings(world: int = 1, precision: str = "bf16", slots: tuple[int, ...] = (), *, nvme: bool = False) -> Settings:
    """What the launcher decided."""
    world = sum(slots) or world
    zero = ZeroConfig(nvme_path="/local/nvme" if nvme else None)
    config = RunConfig(optim=OptimConfig(lr=1e-4), batch=BatchConfig(global_size=16), zero=zero)
    return Settings(world_size=world, precision=precision, lr=1e-4, config=config, slots=slots)


def finish(
    name: str,
    user: Any = None,
    *,
    world: int = 1,
    precision: str = "bf16",
    slots: tuple[int, ...] = (),
    **trained: int,
) -> Any:
    """The finished configuration, from a shipped file and maybe a user's JSON (text or value)."""
    text = user if isinstance(user, str) or user is None else json.dumps(user)
    file = None if text is None else TextFile(path="my.json", text=text)
    sizes = Trained(**{"parameters": 10**9, "largest_adapter": 0, **trained})
    return finish_zero(group(name), file, settings(world, precision, slots, nvme="nvme" in name), sizes)


@pytest.mark.parametrize("name", [*STAGES, *(name for name, _ in OTHERS)])
def test_shipped_files_are_deepspeeds_and_hold_sharding_only(name: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    raw = read_hjson(group(name)).value
    assert set(raw) <= {"zero_optimization", "data_types", "bf16", "aio", "tensor_parallel"}
    assert raw["zero_optimization"]["overlap_comm"] is (raw["zero_optimization"]["stage"] == 3)
    parsed = DeepSpeedConfig({**raw, "train_micro_batch_size_per_gpu": 1})  # the one thing DeepSpeed insists on
    assert parsed.zero_optimization_stage == (
        int(name[5]) if name.startswith("stage") else 3 if name == "zeropp" else 1
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "refused"), OTHERS)
def test_other_files_finish_in_their_precisions(name: str, refused: tuple[str, ...], precision: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    if precision in refused:
        with pytest.raises(ConfigError, match=r"AutoTP|float16|precision=bf16"):
            finish(name, precision=precision, slots=(2, 2))
        return
    config, _ = finish(name, precision=precision, slots=(2, 2))
    assert "auto" not in json.dumps(config)
    parsed = DeepSpeedConfig({**json.loads(json.dumps(config)), "train_batch_size": 1})
    offload = parsed.zero_config.offload_optimizer
    wanted = "nvme" if "nvme" in name else "cpu" if "offload" in name else None
    assert (offload and offload.device) == wanted
    assert ("zero_force_ds_cpu_optimizer" in config) is ("offload" in name or "nvme" in name)
    assert parsed.bfloat16_config.bf16_optimizer_states is ("states" in name)
    assert parsed.grad_accum_dtype == ("bf16" if "states" in name else "fp32")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", STAGES)
def test_finished_configurations_are_accepted_and_whole(name: str, precision: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    if name == "stage0" and precision != "fp32":
        with pytest.raises(ConfigError, match="zero=stage1"):
            finish(name, precision=precision)
        return
    config, notices = finish(name, precision=precision, slots=(2, 2) if name == "stage3_hpz" else ())
    assert "auto" not in json.dumps(config)
    assert notices == []
    parsed = DeepSpeedConfig({**json.loads(json.dumps(config)), "train_batch_size": 1})  # of this one process
    assert parsed.bfloat16_config.enabled is (precision == "bf16")
    assert parsed.float16_config.enabled is (precision == "fp16")
    assert parsed.gradient_clipping == 1.0
    assert parsed.managed_gradient_accumulation is False
    assert parsed.steps_per_print == NEVER
    assert parsed.zero_allow_untested_optimizer is True
    assert parsed.zero_config.gather_16bit_weights_on_model_save is name.startswith("stage3")
    assert parsed.grad_accum_dtype == (None if name == "stage0" else "fp32")


def test_nominal_batch_numbers_follow_the_ranks() -> None:
    config, _ = finish("stage2", world=5)
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[key] for key in keys] == [5, 1, 1]


def test_sizes_follow_what_trains() -> None:
    small = finish("stage3", parameters=20_000_000, largest_adapter=250_000)[0]["zero_optimization"]
    assert small["reduce_bucket_size"] == small["allgather_bucket_size"] == 20_000_000
    assert small["stage3_param_persistence_threshold"] == 250_000
    large = finish("stage3", largest_adapter=1000)[0]["zero_optimization"]
    assert large["reduce_bucket_size"] == 200_000_000
    assert large["stage3_param_persistence_threshold"] == 100_000


def test_whole_layers_are_fetched_ahead() -> None:
    keys = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")

    def sizes(user: Any = None, **layer: int) -> list[int]:
        zero = finish("stage3", user, **layer)[0]["zero_optimization"]
        return [zero[key] for key in keys]

    assert sizes(layer=10**9) == [10**9, 3 * 10**9, 5 * 10**8]  # of 72B
    assert sizes(layer=10**7) == [5 * 10**7, 7 * 10**7, 5 * 10**6]  # several small layers travel together
    assert sizes({"zero_optimization": {keys[1]: 7}}, layer=10**9)[1] == 7
    assert sizes() == [5 * 10**7, 10**9, 10**9]


def test_a_copy_of_the_weights_for_each_host() -> None:
    key = "zero_hpz_partition_size"
    assert finish("stage3_hpz", slots=(4, 4, 4))[0]["zero_optimization"][key] == 4
    own = {"zero_optimization": {key: 2}}
    assert finish("stage3", own, world=4)[0]["zero_optimization"][key] == 2  # 2 x 2 of one host, when asked for
    assert key not in finish("stage3", world=4)[0]["zero_optimization"]


@pytest.mark.parametrize(
    ("name", "size", "slots", "text"),
    [
        ("stage3_hpz", None, (4,), "one host has them all already"),
        ("stage3_hpz", None, (4, 2), "needs hosts of equally many ranks, and these have 4, 2"),
        ("stage3_hpz", None, (1, 1), "every host has one"),
        ("stage3", 3, (2, 2), "zero_hpz_partition_size is 3, which does not divide 4 ranks"),
        ("stage3", 8, (2, 2), "zero_hpz_partition_size is 8, which does not divide 4 ranks"),
        ("stage2", 2, (2, 2), "no effect below stage 3"),
    ],
)
def test_copies_that_cannot_be(name: str, size: Any, slots: tuple[int, ...], text: str) -> None:
    user = None if size is None else {"zero_optimization": {"zero_hpz_partition_size": size}}
    with pytest.raises(ConfigError, match="try  zero=stage3") as caught:
        finish(name, user, slots=slots)
    assert text in caught.value.render()


def test_known_keys_are_those_of_deepspeed() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    deprecated = {
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "legacy_stage1",
        "stage3_gather_fp16_weights_on_model_save",
    }
    assert set(ZERO_KEYS) == zero - deprecated
    assert set(BF16_KEYS) == set(DeepSpeedBF16Config.model_fields)
    assert set(FP16_KEYS) == set(DeepSpeedFP16Config.model_fields)
    assert set(FP16_ONLY) <= set(FP16_KEYS) - set(BF16_KEYS)
    assert not set(PASSED_KEYS) & set(OWNED_KEYS)


# D01, D06, D07, D08, D13, D15: what DeepSpeed passes over, or refuses on every rank after loading.
ERRORS = {
    "batch_mismatch.json": "train_batch_size 8 is not 2 x 2 x 1 rank = 4",
    "fp16_and_bf16.json": "fp16 and bf16 are enabled",
    "top_level_typo.json": "unknown key zero_optimisation; did you mean zero_optimization?",
    "nested_typo.json": "unknown key overlap_com in zero_optimization; did you mean overlap_comm?",
    "gather_at_top.json": "stage3_gather_16bit_weights_on_model_save belongs under zero_optimization",
    "stage2_offload_param.json": "offload_param needs stage 3, and the stage is 2",
    "offload_gpu.json": 'device is "gpu", but must be none, cpu or nvme',
    "nvme_without_path.json": "nvme_path is missing",
    "bf16_with_loss_scale.json": "bf16.loss_scale is a key of fp16",
    "duplicate_key.json": "key train_micro_batch_size_per_gpu stands twice",
    "lr_as_text.json": 'optimizer.params.lr is the text "1e-4"',
    "optimizer_typo.json": "optimizer.type is AdamWW; known are AdamW and Adam",
    "float_micro_batch.json": "train_micro_batch_size_per_gpu is 1.5",
}
FINE = {"no_batch.json", "auto_bf16_only.json"}


def test_every_case_file_has_an_outcome() -> None:
    listed = {case["file"] for case in json.loads((CASES / "expected.json").read_text())}
    assert {*ERRORS, *FINE, "(path that does not exist)"} == listed


@pytest.mark.parametrize("name", ERRORS)
def test_bad_json_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        finish("stage2", (CASES / name).read_text())
    problem = next(p for p in caught.value.problems if ERRORS[name] in p.text)
    assert problem.where.startswith("my.json")
    assert problem.tries


def test_batch_numbers_are_judged_at_the_runs_world_size_and_dropped() -> None:
    config, notices = finish("stage2", (CASES / "batch_mismatch.json").read_text(), world=2)
    assert config["train_batch_size"] == 2
    assert notices == ["batch numbers of my.json are not used: batch.global_size=16 decides"]


def test_auto_is_resolved_and_said() -> None:
    user = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 10**8},
    }
    config, notices = finish("stage2", user)
    assert "auto" not in json.dumps(config)
    assert config["bf16"] == {"enabled": True}
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["sub_group_size"]) == (3, 200_000_000, 10**8)
    replaced = "zero_optimization.reduce_bucket_size, bf16.enabled, fp16.enabled"
    assert f"my.json: auto is replaced by the launcher's value: gradient_clipping, {replaced}" in notices
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(json.loads(json.dumps(config)))


def test_a_users_own_numbers_stay() -> None:
    user = {
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": True,
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
    }
    config, _ = finish("stage2", user, parameters=10**7)
    assert config["zero_optimization"]["reduce_bucket_size"] == 5e8
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["wall_clock_breakdown"] is True
    assert config["data_types"] == {"grad_accum_dtype": "bf16"}


def test_the_stage_comes_from_the_group_when_the_file_has_none() -> None:
    assert finish("stage3", {"wall_clock_breakdown": True})[0]["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    ("user", "text"),
    [
        # D03: the file and the launcher's own keys disagree
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, and optim.max_grad_norm is 1.0"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}, "optim.lr is 0.0001"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "optim.* decides the schedule"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is false, and this run computes in bf16"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, and this run computes in bf16"),
        ({"fp16": {"loss_scal": 0}}, "unknown key loss_scal in fp16; did you mean loss_scale?"),
        ({"zero_optimization": True}, "zero_optimization is true, but must be an object"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4, but must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}}, "no effect below stage 3"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}}, 'is the text "5e8", but must be a number'),
        ({"zero_optimization": {"stage": 0}}, "zero stage 0 in bf16"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing has no place here"),
        ({"tensor_parallel": {"autotp_size": 2}}, "AutoTP splits the attention of Qwen's vision towers"),
        ({"train_batch_size": 0}, "must be a whole number of at least 1"),
        ('{"sub": "NaN"}', "NaN is no JSON number"),
        ('{"a": NaN}', "not JSON"),
        ('{"zero_optimization": auto}', "texts in quotes"),
        ("[]", "one JSON object"),
    ],
    ids=str,
)
def test_more_that_is_refused(user: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        finish("stage2", user)
    assert text in caught.value.render()
    assert all(p.tries for p in caught.value.problems)


def test_all_problems_of_a_file_are_told_together() -> None:
    user = {"gradient_cliping": 1, "zero_optimization": {"stage": 2, "overlap": 1}, "train_batch_size": 7, "fp16": {}}
    with pytest.raises(ConfigError) as caught:
        finish("stage2", user, world=2)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("case", json.loads((CASES / "batch_math.json").read_text()), ids=str)
def test_batch_arithmetic(case: dict[str, Any]) -> None:
    """D01."""
    numbers = case["train_batch"], case["micro"], case["accum"]
    if case["train_batch"] == 0:
        return  # refused before arithmetic, above
    wrong = batch_error(*numbers, world=case["world"])
    if isinstance(case["want"], dict):
        assert wrong is None
        return
    assert wrong is not None
    assert str(case["train_batch"]) in wrong
    if "nearest 96 or 128" in case["want"]:
        assert wrong.endswith("nearest: 96 or 128")
    if "multi-GPU" in case["want"]:
        assert wrong.endswith("and so would 2 ranks")
