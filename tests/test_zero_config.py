"""The shipped DeepSpeed files and their page, old and foreign JSONs, and the tables of what does not go together."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.planning import incompatible, known_bad
from launcher.planning.facts import TextFile
from launcher.planning.hjson_file import read_hjson
from launcher.planning.incompatible import ROWS, Combination
from launcher.planning.zero_keys import PASSED_KEYS, REFUSED_KEYS, UNUSED_KEYS
from launcher.planning.zero_kinds import KINDS
from launcher.planning.zero_old import REMOVED
from launcher.resources import conf_dir, ds_configs_dir
from launcher.running.facts import gather_facts
from launcher.spec import MISSING, RunConfig, ZeroConfig
from tests.planning_support import compose, gpus, plan
from tests.test_plan_zero import CASES, finish
from tests.test_plan_zero import settings as decided

PAGE = ds_configs_dir() / "README.md"
SHIPPED = sorted(ds_configs_dir().glob("*.json"))
FINE = Combination(
    stage=2, precision="bf16", device="cuda", hosts=2, tune="full", lora=False, dora=False, optim="adamw", lr="1e-05",
    offload="none", offload_param="none", overlap=False, master16="none", states16=False, sums="fp32",
    qwz=False, qgz=False, qnt=False, part=False, superchip=False, zenflow=False, norm=True, elastic=False, autotp=False,
    long=False,
)  # fmt: skip


def flat(value: Any, path: str = "") -> Any:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from flat(item, f"{path}{key}.")
        else:
            yield path + key, json.dumps(item)


def test_the_page_has_a_row_for_every_key_of_every_file() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(.+?)` \| (.+?) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {(key, value, name) for key, value, files, _ in rows for name in files.split(", ")}
    names = {file.stem for file in SHIPPED}
    told = {(k, v, name) for k, v, listed in told for name in (names if listed == "all" else {listed})}
    assert told == {(k, v, f.stem) for f in SHIPPED for k, v in flat(json.loads(f.read_text()))}
    assert all(len(reason) > 20 for *_, reason in rows)
    assert all(re.search(rf"^\|.*\b{name}\b", PAGE.read_text(encoding="utf-8"), re.MULTILINE) for name in names)


def test_every_file_is_an_option_of_its_name() -> None:
    options = {file.stem for file in (conf_dir() / "zero").glob("*.yaml")} - {"auto"}
    assert options == {file.stem for file in SHIPPED}
    for name in options:
        keys = yaml.safe_load((conf_dir() / "zero" / f"{name}.yaml").read_text())
        asked = {"nvme_path": MISSING} if name == "stage3_nvme" else {}
        assert ZeroConfig(**keys) == ZeroConfig(name=name, file=f"{name}.json", **asked)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.dictionaries(
            st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
            st.none() | st.booleans() | st.integers() | st.text("ab {}[]:,#/\\\"'", max_size=6),
        ),
        lambda inner: st.dictionaries(
            st.from_regex(r"[a-z_]{1,6}", fullmatch=True), inner | st.lists(inner, max_size=2), max_size=4
        ),
        max_leaves=12,
    ),
    st.sampled_from([None, 1, 4]),
)
def test_json_reads_as_json_and_every_key_has_its_line(value: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    read = read_hjson(TextFile(path="f", text=text))
    assert read.value == value
    assert list(read.lines) == [key for key, _ in _sections(value)]
    for key, line in read.lines.items():
        assert f'"{key.rpartition(".")[2]}":' in text.splitlines()[line - 1]


def _sections(value: dict[str, Any], path: str = "") -> Any:
    for key, item in value.items():
        yield path + key, item
        if isinstance(item, dict):
            yield from _sections(item, f"{path}{key}.")


def test_d09_comments_and_commas_are_read_as_deepspeed_reads_them() -> None:
    """D09."""
    text = (CASES / "peers" / "old_names.hjson").read_text()
    import hjson

    read = read_hjson(TextFile(path="f", text=text))
    assert read.value == hjson.loads(text)
    assert read.where("zero_optimization.cpu_offload_param") == "f:7"
    assert read.where("zero_optimization.stage.none") == "f:5"
    assert read.where("nowhere") == "f"


def test_d08_a_key_that_stands_twice_is_named_with_its_second_line() -> None:
    with pytest.raises(ConfigError) as caught:
        finish("stage2", '{"zero_optimization": {\n"stage": 2,\n"stage": 3}, "wandb": {"enabled": false}}')
    assert caught.value.problems[0].where == "my.json:3"


def test_problems_name_the_line_of_their_key() -> None:
    user = '{"zero_optimization": {\n  "stage": 1,\n\n "offload_param": {"device": "cpu"},\n  "zenflow": {}\n }}'
    with pytest.raises(ConfigError) as caught:
        finish("stage2", user)
    assert sorted(p.where for p in caught.value.problems) == ["my.json:4", "my.json:5"]


def test_old_names_become_new_ones_and_are_told() -> None:
    config, notices = finish("stage2", (CASES / "peers" / "old_names.hjson").read_text(), world=2)
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert {"amp", "elasticity", "sparse_gradients"} & set(config) == set()
    assert len(notices) == 8
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig({**json.loads(json.dumps(config)), "train_batch_size": 1})


@pytest.mark.parametrize("removed", REMOVED, ids=lambda row: row.key)
def test_what_deepspeed_removed_is_dropped_where_it_is_off_and_refused_where_it_is_on(removed: Any) -> None:
    section, _, name = removed.key.rpartition(".")

    def user(value: Any) -> Any:
        return {section: {"stage": 3, name: value}} if section else {name: value}

    _, notices = finish("stage3", user({"enabled": False} if not section else False))
    assert removed.key in notices[0] and "dropped" in notices[0]
    for value in (True, {"enabled": True}, {"a": {"b": 8}}):
        with pytest.raises(ConfigError) as caught:
            finish("stage3", user(value))
        (problem,) = caught.value.problems
        assert problem.text.startswith(f"{removed.key} is no longer a key of DeepSpeed: ") and problem.tries


def test_deepspeed_itself_refuses_the_removed_keys() -> None:
    from deepspeed.runtime import config

    ours = {row.key for row in REMOVED} - {"zero_optimization.legacy_stage1"}
    zero = {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert ours == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) | zero


@pytest.mark.parametrize("user", [{"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, {"cpu_offload": 3}])
def test_old_and_new_together_are_refused(user: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cpu_offload is"):
        finish("stage2", {"zero_optimization": {"stage": 2, **user}})
    with pytest.raises(ConfigError, match="old name of bf16"):
        finish("stage2", {"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})


@pytest.mark.parametrize("file", sorted((CASES / "peers").glob("*.json")), ids=lambda file: file.stem)
def test_d02_d04_files_for_other_trainers_pass_with_notices(file: Any) -> None:
    """D02, D04: every auto is replaced or dropped, and said."""
    config, notices = finish("stage2", file.read_text(), world=2)
    assert "auto" not in json.dumps(config)
    assert config["bf16"] == {"enabled": True}
    told = json.loads(file.read_text())["zero_optimization"]["stage"]
    assert config["zero_optimization"]["stage"] == (2 if told == "auto" else told)
    assert any("steps_per_print is not used" in notice for notice in notices)
    if "overlap" in file.read_text() and "zero2_offload" in file.stem:
        assert any("overlap_comm in stage 2 has given NaN" in notice for notice in notices)  # D18


def test_files_of_documentation_and_other_trainers_are_no_false_alarm() -> None:
    aio = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
    offload = {"device": "nvme", "nvme_path": "/nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False}
    user = {
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "sub_group_size": 1e14},
        "aio": aio,
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "scheduler": {"type": "WarmupDecayLR", "params": {"last_batch_iteration": -1, "total_num_steps": "auto"}},
    }
    config, notices = finish("stage3", user)
    assert config["aio"]["intra_op_parallelism"] == 1 and "thread_count" not in config["aio"]
    assert "my.json: aio.thread_count is called aio.intra_op_parallelism now, and is read as that" in notices
    config, notices = finish("stage1", {"zero_optimization": {"stage": 1, "overlap_comm": True}})
    assert config["zero_optimization"]["overlap_comm"] is False
    assert any("overlap_comm is switched off: in stage 1" in notice for notice in notices)
    empty = {"device": "cpu", "nvme_path": None}
    user = {"zero_optimization": {"stage": 3, "offload_optimizer": empty, "overlap_comm": None}, "fp16": None}
    config, notices = finish("stage3", user)
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"} and notices == []
    assert config["zero_optimization"]["overlap_comm"] is True


def _classes() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
    }


def test_kinds_of_values_are_those_of_deepspeed() -> None:
    """Each section has the keys of its class, and a value that fits here is one that the class takes."""
    values = [True, False, 0, 1, 0.5, 7.0, 2**63, 1e30, -1, "cpu", "none", "x", [], ["x"], {}, {"device": "cpu"}]
    classes = _classes()
    assert set(KINDS) - set(classes) == {"", "aio", "flops_profiler"}  # read by hand
    for section, theirs in classes.items():
        if section != "zero_optimization":
            assert set(KINDS[section]) == set(theirs.model_fields), section
        for key, kind in KINDS[section].items():
            fitting = [value for value in values if kind.fits(value)]
            assert fitting and len(fitting) < len(values), (section, key)
            for value in fitting:
                if not isinstance(value, dict):
                    beside: dict[str, Any] = {"enabled": True} if "enabled" in KINDS[section] else {}
                    beside |= {"stage": 2} if section == "zero_optimization" else {}
                    theirs(**{**beside, key: value})
            assert "..." in kind.example or kind.fits(json.loads(kind.example))


@pytest.mark.parametrize("section", [section for section in KINDS if section])
def test_wrong_kinds_are_told_wherever_they_stand_and_stop_nothing(section: str) -> None:
    """D07, D13, D15: no value reaches arithmetic or DeepSpeed that neither can read."""
    for key, kind in KINDS[section].items():
        for value in ("many", "5e8", -2.5, {"a": 1}, [1], True, [[]]):
            if kind.fits(value) or (section, key) == ("zero_optimization", "stage"):
                continue
            user: Any = {key: value}
            for name in reversed(section.split(".")):
                user = {name: user}
            user.setdefault("zero_optimization", {}).setdefault("stage", 3)
            with pytest.raises(ConfigError) as caught:
                finish("stage3", user)
            assert any(f"{key} is " in problem.text for problem in caught.value.problems), (key, value)


def test_an_open_path_of_a_users_file_is_the_launchers_key() -> None:
    user = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}}
    with pytest.raises(ConfigError, match="zero.nvme_path is missing"):
        finish("stage3", user)
    assert finish("stage3_nvme", user)[0]["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/local/nvme"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is nothing in the file"),
        ("// only a comment\n# and another\n", "there is nothing in the file"),
        ("{\0}\0", "holds NUL characters"),
        ('{"a": 1e400}', "too large"),
        ('{"a": ' * 3000 + "1" + "}" * 3000, "nested too deep"),
        ('{"a": ' * 40 + "1" + "}" * 40, "nested too deep"),
        ('{"zero_optimization": {"a": ' + "[" * 40 + "]" * 40 + "}}", "nested too deep"),
        ('{"zero_optimization": {\n"stage": 2}\n', "the file ends inside"),
    ],
    ids=lambda text: text[:12],
)
def test_texts_that_are_no_configuration(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        finish("stage2", text)
    (problem,) = caught.value.problems
    assert problem.where.startswith("my.json") and problem.tries


def test_tuning_of_other_stages_is_dropped_and_told() -> None:
    user = {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e8}}
    config, notices = finish("stage2", user)
    assert notices == ["my.json: stage3_max_live_parameters, sub_group_size have no effect in stage 2"]
    assert not [key for key in config["zero_optimization"] if key.startswith("stage3")]
    _, notices = finish("stage3", {"zero_optimization": {"stage": 3, "round_robin_gradients": True}})
    assert notices == ["my.json: round_robin_gradients has no effect in stage 3"]


@pytest.mark.parametrize("key", [*REFUSED_KEYS, *UNUSED_KEYS])
def test_what_the_launcher_does_itself(key: str) -> None:
    config, (notice, *_) = finish("stage2", {key: {"enabled": False} if key in REFUSED_KEYS else 1})
    assert notice.startswith(f"my.json: {key} ")
    assert config == finish("stage2")[0]
    if key in REFUSED_KEYS:
        with pytest.raises(ConfigError, match=f"{key} has no place here"):
            finish("stage2", {key: {"size": 8}})


def test_every_key_that_deepspeed_reads_at_the_top_has_a_fate() -> None:
    import inspect

    from deepspeed.runtime import config as theirs
    from deepspeed.runtime import constants

    source = inspect.getsource(theirs)
    names = {
        v
        for k, v in vars(constants).items()
        if k.isupper() and isinstance(v, str) and f"get_scalar_param(param_dict, {k}," in source
    }
    assert len(names) > 10
    from launcher.planning.zero_keys import BATCH_KEYS, OWNED_KEYS

    assert names <= {*BATCH_KEYS, *OWNED_KEYS, *PASSED_KEYS, *REFUSED_KEYS, *UNUSED_KEYS}


REFUSED_VALUES = {
    '{"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}}': "reduce_bucket_size is -1, but must be a whole",
    '{"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}}': 'is the text "5e8"',  # D13
    '{"zero_optimization": {"stage": 2, "contiguous_gradients": "yes"}}': "must be true or false",
    '{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}': "offload_optimizer is \"cpu\", but must be an",
    '{"zero_optimization": true}': "zero_optimization is true",  # D15
    '{"zero_optimization": {"stage": 2, "bf16": {"enabled": true}}}': "bf16 in zero_optimization belongs at the top",
    '{"communication_data_type": "float32"}': "communication_data_type is \"float32\", but must be fp32",
    '{"data_types": {"param_dtype": "fp16"}}': "param_dtype is fp16, and this run computes in bf16",
    '{"data_types": {"grad_dtype": "fp32"}}': "unknown key grad_dtype in data_types; did you mean grad_accum_dtype",
    '{"aio": {"blocksize": 1}}': "unknown key blocksize in aio; did you mean block_size",
    '{"optimizer": {"type": "OneBitAdam"}}': "OneBitAdam, which DeepSpeed no longer has",
    '{"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}': "params.max_grad_norm is refused",
    '{"train_micro_batch_size_per_gpu": 1.5}': "train_micro_batch_size_per_gpu is 1.5",  # D15
    '{"gradient_cliping": 1.0}': "did you mean gradient_clipping?",  # D06
    '{"bf16": true}': "bf16 is true, but must be an object",
    '{"bf16": {"enabled": "true"}}': 'bf16.enabled is "true", but must be true or false',
    '{"data_types": "bf16"}': 'data_types is "bf16", but must be an object',
    '{"optimizer": "AdamW"}': 'optimizer is "AdamW", but must be an object',
    '{"optimizer": {"typ": "AdamW"}}': "unknown key typ in optimizer; did you mean type?",
    '{"optimizer": {"type": "adamw", "params": {"weight_deca": 0}}}': "did you mean weight_decay?",
    '{"optimizer": {"type": "AdamW", "params": {"amsgrad": true}}}': "amsgrad is true, and torch's AdamW runs with",
    '{"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}': 'params.lr is "fast", but must be a number',
    '{"scheduler": {"type": "Cosine"}}': 'scheduler.type is "Cosine"; known are WarmupLR',
    '{"gradient_clipping": true}': "gradient_clipping is true, but must be a number",
    '{"gradient_clipping": 0}': "gradient_clipping is 0, and optim.max_grad_norm is 1.0",
    '{"wall_clock_breakdown": "true"}': 'wall_clock_breakdown is "true", but must be true or false',
    '{"tensorboard": {"enabled": true, "output_pth": "x"}}': "did you mean output_path?",
    '{"zero_optimization": {"stage": 3, "offload_param": {"fast_init": true}}}': "unknown key fast_init",
    '{"zero_optimization": {"stage": 3, "reduce_bucket_size": 0}}': "reduce_bucket_size is 0, but must be a whole",
    '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e30}}': "reduce_bucket_size is 1e+30, but must be",
    '{"zero_optimization ": {"stage": 2}}': 'unknown key "zero_optimization "; did you mean zero_optimization?',
}  # fmt: skip


@pytest.mark.parametrize("user", REFUSED_VALUES)
def test_values_that_deepspeed_refuses_late_or_passes_over(user: str) -> None:
    with pytest.raises(ConfigError) as caught:
        finish("stage2", user)
    (problem,) = caught.value.problems
    assert REFUSED_VALUES[user] in problem.text and problem.where == "my.json:1" and problem.tries


def test_d16_jobs_of_a_sweep_do_not_see_each_other() -> None:
    """D16: what one job finishes leaves nothing behind for the next."""
    user = (CASES / "peers" / "trainer_auto.json").read_text()
    small, large = finish("stage3", user, parameters=10**6), finish("stage3", user, parameters=10**9)
    assert small[0]["zero_optimization"]["reduce_bucket_size"] < large[0]["zero_optimization"]["reduce_bucket_size"]
    assert finish("stage3", user, parameters=10**6) == small


def test_d14_a_file_that_is_not_there_is_named_with_its_whole_path(tmp_path: Path) -> None:
    """D14."""
    config = compose(f"zero.config={tmp_path}/none.json")
    (problem,) = [p for p in gather_facts(config, tmp_path).problems if "zero.config" in p.text]
    assert problem.text == f"zero.config={tmp_path}/none.json: no such file"


def test_d17_a_file_of_the_group_without_a_stage_is_a_problem_and_a_users_file_takes_the_groups() -> None:
    """D17."""
    from launcher.planning.zero import Trained, finish_zero

    trained = Trained(parameters=1, largest_adapter=0)
    with pytest.raises(ConfigError, match="needs a zero_optimization section"):
        finish_zero(TextFile(path="ds_configs/x.json", text="{}"), None, decided(), trained)
    assert finish("stage3", {"wall_clock_breakdown": True})[0]["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_of_the_table_holds_where_it_says_and_nowhere_else(row: Any) -> None:
    assert not row.holds(FINE), "an ordinary run is fine"
    assert row.source
    first = {name: values[0] for name, values in row.when.items()}
    found = dataclasses.replace(FINE, **first)
    judged = incompatible.judge(found, lambda key: f"my.json:{key}")
    texts = judged.warnings if row.warning else [problem.text for problem in judged.problems]
    assert row.text.format(**dataclasses.asdict(found)) in texts
    for name in first:  # every condition counts
        others = [getattr(FINE, name), *OTHERS.get(name, ())]
        free = [value for value in others if value not in row.when[name]]
        assert free, name
        assert not row.holds(dataclasses.replace(found, **{name: free[0]}))
    assert row.warning or all("{" not in line or '"' in line for problem in judged.problems for line in problem.tries)


OTHERS: dict[str, tuple[Any, ...]] = {
    "stage": (3, 1, 0), "precision": ("fp16", "fp32"), "hosts": (1,), "master16": ("bf16",), "device": ("cpu",),
    "states16": (True,), "sums": ("bf16",),
}  # fmt: skip

COMMANDS = {
    "low precision in stage 0": "zero=stage0",
    "qlora in stage 3": "zero=stage3 tune=qlora",
    "dora in stage 3": "zero=stage3 tune=lora tune.use_dora=true",
    "8-bit moments of more than 2^31 values": "model=qwen3_vl_8b tune=full optim=adamw8bit",
    "quantised gradients in another precision": "zero=zeropp",
    "bf16 masters in another precision": "zero=stage2_bf16_states precision=fp32",
    "tensor parallelism": "zero=autotp",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_rows_reach_the_plan(name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    model = () if "model=" in COMMANDS[name] else ("model=qwen3_vl_2b",)
    with pytest.raises(ConfigError) as caught:
        plan(*model, "dataset=digits", "loss=pointwise", *COMMANDS[name].split(), gpus=gpus(2))
    assert row.tries[0].partition("   ")[0].replace("{stage}", "2") in caught.value.render()


def test_bf16_states_plan_with_a_warning_and_nvme_with_its_folder() -> None:
    words = ("model=qwen3_vl_2b", "dataset=digits", "tune=full")
    made = plan(*words, "zero=stage3_bf16_states", gpus=gpus(2))
    assert made.deepspeed["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
    assert any("lose every update smaller" in warning for warning in made.warnings)
    with pytest.raises(ConfigError, match="zero.nvme_path must be given"):
        compose("zero=stage3_nvme")
    made = plan(*words, "zero=stage3_nvme", "zero.nvme_path=/local/nvme", gpus=gpus(2))
    assert made.deepspeed["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/local/nvme"
    with pytest.raises(ConfigError, match="zero.nvme_path"):
        plan(*words, "zero=stage2", "zero.nvme_path=/local/nvme", gpus=gpus(2))


BAD = [  # (versions, what the run is, part of the text, warning)
    ({"transformers": "4.56.2"}, {}, "does not know Qwen3-VL", False),  # G11
    ({"transformers": "5.16"}, {}, "named from 5.17 on", False),
    ({"deepspeed": "0.18.2"}, {}, "computes wrong gradients", False),
    ({"deepspeed": "0.19.2"}, {"stage": 3, "lora": True, "layers": 28}, "recomputed layers with adapters", False),
    ({"deepspeed": "0.19.7"}, {}, "without a word", False),
    ({"deepspeed": "0.20.0"}, {}, "tested with 0.19.8 alone", True),
    ({"torch": "2.8.0+cu128"}, {}, "written for 2.9", False),
    ({"torch": "2.9.0+cu128", "nvidia-cudnn-cu12": "9.21"}, {}, "Conv3d", True),
    ({"torch": "2.9.1", "nvidia-cudnn-cu12": "9.13.0.50"}, {}, "cuDNN below 9.15", True),
    ({"nvidia-nccl-cu12": "2.27.5"}, {}, "NVLink SHARP", True),
    ({"peft": "0.16.0"}, {"lora": True}, "0.17 and newer", False),
    ({"bitsandbytes": "0.47"}, {}, "0.48 and newer", False),
]
GOOD = [
    ({"deepspeed": "0.19.8", "torch": "2.14.1", "transformers": "5.24.0", "nvidia-nccl-cu13": "2.30.7"}, {}),
    ({"torch": "2.9.1", "nvidia-cudnn-cu12": "9.15.1.9"}, {}),
    ({"torch": "2.9.0"}, {"device": "cpu"}),
    ({"peft": "0.16"}, {}),
    ({"nvidia-nccl-cu12": "2.28.9"}, {}),
    ({"nvidia-nccl-cu12": "unreadable", "torch": "3.0rc1"}, {"device": "cpu"}),
]


@functools.cache
def _plan(stage: int) -> Any:
    return plan("model=qwen3_vl_2b", "dataset=digits", "tune=full", f"zero=stage{stage}", gpus=gpus(2))


def _run(stage: int = 2, lora: bool = False, layers: int = 0, device: str = "cuda") -> Any:
    made = _plan(stage)
    config: RunConfig = made.config
    if lora:
        config = dataclasses.replace(config, tune=dataclasses.replace(config.tune, language="lora"))
    return dataclasses.replace(made, config=config, checkpointed_layers=layers, device=device)


@pytest.mark.parametrize(("versions", "run", "text", "warning"), BAD, ids=str)
def test_versions_that_go_wrong(versions: dict[str, str], run: dict[str, Any], text: str, warning: bool) -> None:
    found = [v for v in known_bad.known_bad(_run(**run), versions, "/venv/python") if text in v.text]
    assert [v.warning for v in found] == [warning]
    assert found[0].tries[0].startswith("/venv/python -m pip install ")


@pytest.mark.parametrize(("versions", "run"), GOOD, ids=str)
def test_versions_that_are_fine(versions: dict[str, str], run: dict[str, Any]) -> None:
    assert list(known_bad.known_bad(_run(**run), versions)) == []


def test_every_bad_version_is_tried() -> None:
    assert len(BAD) == len(known_bad.TABLE)
    assert all(any(text in row.text for _, _, text, _ in BAD) and row.source for row in known_bad.TABLE)


@pytest.mark.parametrize(
    ("user", "typed"),
    [
        ({"fp16": {"enabled": "False"}}, '"enabled": false'),
        ({"zero_optimization": {"stage": 2, "contiguous_gradients": 0}}, '"contiguous_gradients": false'),
        ({"wall_clock_breakdown": "yes"}, '"wall_clock_breakdown": true'),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "CPU"}}}, '"device": "cpu"'),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "NVMe"}}}, '"device": "nvme"'),
    ],
)
def test_a_wrong_value_is_answered_with_what_it_means(user: dict[str, Any], typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        finish("stage2", user)
    assert caught.value.problems[0].tries == (typed,)
