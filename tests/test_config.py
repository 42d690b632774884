"""Command lines and YAML files -> RunConfig, or every problem with what to type instead."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launcher.errors import ConfigError
from launcher.planning import checks, grammar, habits, keys
from launcher.planning.config import Composed, read_config
from launcher.planning.overrides import is_sweep, read_command_line
from launcher.planning.resumed import resumed_words
from launcher.planning.sweeps import read_jobs, refusal
from launcher.resources import conf_dir

CASES = Path(__file__).parent / "cases" / "hydra"
WRONG = CASES / "wrong_lines.txt"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"  # accept the new answers on purpose, then read the diff


def answer(line: str) -> str:
    """What a wrong command line is answered with."""
    words = shlex.split(line)
    with pytest.raises(ConfigError) as caught:
        _read_sweep(words) if is_sweep(words) else read_config(words)
    return str(caught.value)


def _read_sweep(words: list[str]) -> None:
    read = read_jobs(words)
    raise refusal(read.jobs, read.invalid)


def wrong_lines() -> list[tuple[str, str]]:
    """The golden file: `$ LINE`, then its answer."""
    blocks = WRONG.read_text(encoding="utf-8").split("$ ")[1:]
    return [(line, text.rstrip("\n")) for line, _, text in (block.partition("\n") for block in blocks)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test stands in an empty folder, so that no file of the checkout is meant by accident."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "text"), wrong_lines(), ids=[line for line, _ in wrong_lines()])
def test_wrong_line_is_answered_whole(line: str, text: str) -> None:
    """Y10 (all that must be given), Y11 (unset variables), Y22 (types), Y23 (cut off), Y24 (zero/stage) and more."""
    given = answer(line)
    if UPDATE:
        _accept(line, given)
    else:
        assert given == text


def _accept(line: str, text: str) -> None:
    blocks = [(known, text if known == line else old) for known, old in wrong_lines()]
    WRONG.write_text("\n".join(f"$ {known}\n{old}\n" for known, old in blocks), encoding="utf-8")


# Text that Hydra's grammar refuses or reads otherwise, but that can mean one thing only where text belongs.
LITERAL = {
    "resume": ["ckpt/epoch=3-step=100", "ckpt/中文"],
    "run.name": [
        "run(1)",
        "café",
        "中文",
        "a#b",
        "a!b",
        "a;b",
        "08",
        "12:30:00",
        "no",
        "true",
        "1e-5",
        "a b",
        "a'b",
        "x=y",
    ],
    "env.set.X": ["^lo", "=eth0", "~/x", '{"a":1,"b":2}', "[a,b]", "", "$HOME", "`date`", "a&b", "no", "022", "None?"],
    "tune.target_modules": [".*(q|v)_proj", r".*\.layers\.\d{1,2}\..*", "a(?=b)"],
    "task.instruction": ["Is it relevant? Answer yes or $5", "What's relevant?"],
}


@pytest.mark.parametrize(("key", "raw"), [(key, raw) for key, values in LITERAL.items() for raw in values])
def test_text_needs_no_quotes_where_its_meaning_is_clear(key: str, raw: str) -> None:
    """Y01 Y03 Y04 Y06."""
    line = read_command_line([f"{key}={raw}"])
    assert (line.problems, line.values) == ([], {key: raw})


def test_checkpoints_that_could_not_be_resumed_are_not_offered() -> None:
    """C11."""
    assert "a checkpoint holds all that resume needs" in answer("--save_only_model true")


@pytest.mark.parametrize("raw", ["'mlx5_0,mlx5_1'", '"mlx5_0,mlx5_1"', r"mlx5_0\,mlx5_1"])
def test_quoted_commas_are_text(raw: str) -> None:
    assert read_config([f"env.set.NCCL_IB_HCA={raw}"]).config.env.set == {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}


def test_typed_values_arrive() -> None:
    words = "model=qwen3_vl_8b dataset=jsonl dataset.train=t.jsonl optim.betas=[0.9,0.95] gpus=[0,2] nodes=null"
    config = read_config(
        [*words.split(), "optim.lr=1_0e-5", "train.epochs=2", "+zero=stage3", "env.set={A:1,B:x}"]
    ).config
    assert config.optim.betas == [0.9, 0.95]
    assert (config.gpus, config.nodes, config.optim.lr, config.zero.name) == ([0, 2], None, 1e-4, "stage3")
    assert isinstance(config.train.epochs, float)
    assert config.env.set == {"A": "1", "B": "x"}


@pytest.mark.parametrize(
    ("raw", "texts"),
    [
        (
            "[--time=08:00:00,--nodelist=gpu[01-02,05],-f,64]",
            ["--time=08:00:00", "--nodelist=gpu[01-02,05]", "-f", "64"],
        ),
        ("[-n, 'a, b', \"c d\"]", ["-n", "a, b", "c d"]),
        ("[]", []),
    ],
)
def test_lists_of_texts_are_literal(raw: str, texts: list[str]) -> None:
    composed = read_config([f"notify.command={raw}"])
    assert composed.config.notify.command == texts
    assert read_config(composed.overrides).config == composed.config


def test_options_for_sbatch_may_have_their_value_behind_them() -> None:
    fits = [["-p", "gpu"], ["--partition", "gpu"], ["--partition=gpu", "-t", "10"], []]
    misfits = [["gpu"], ["--partition=gpu", "x"], ["-p", "gpu", "x"], ["-p", ""]]
    assert [checks.rule_problem("cluster.slurm_args", value) for value in fits] == [None] * len(fits)
    assert None not in [checks.rule_problem("cluster.slurm_args", value) for value in misfits]


def test_a_script_to_source_keeps_its_arguments(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for raw, line in (
        ("~/conda/bin/activate my env", "/home/me/conda/bin/activate my env"),
        ("bin/activate", f"{elsewhere}/bin/activate"),
        ("conda.sh 'a b'", "conda.sh 'a b'"),
    ):
        assert shlex.split(read_config([f"cluster.activate={raw}"]).config.cluster.activate or "") == shlex.split(line)


@pytest.mark.parametrize(
    ("words", "experiment"),
    [("", True), ("zero=stage3 train.seed=1", True), ("model=tiny", False), ("dataset=digits", False)],
)
def test_the_demo_runs_when_nothing_is_named(words: str, experiment: bool) -> None:
    line = f"{words} model=tiny" if words == "dataset=digits" else words
    config = read_config(line.split()).config
    assert (config.tune.name, config.loss.name) == (("full", "listwise") if experiment else ("lora", "pointwise"))
    assert config.dataset.name == "digits"
    assert config.zero.name == ("stage3" if "stage3" in words else "stage2")


def test_a_file_names_its_data_set_and_a_folder_its_model() -> None:
    config = read_config(["model.path=m", "dataset.train=t.jsonl"]).config
    assert (config.model.name, config.dataset.name) == ("local", "jsonl")


def test_paths_are_relative_to_where_the_user_stands(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Y18, and Y01 in a path."""
    monkeypatch.setenv("HOME", str(elsewhere / "home"))
    words = "model.path=m dataset.train=../t.jsonl cluster.hostfile=~/hosts cluster.python=python3"
    config = read_config([*words.split(), "resume=r/epoch=3-step=100"]).config
    assert config.model.path == str(elsewhere / "m")
    assert config.dataset.train == str(elsewhere.parent / "t.jsonl")
    assert config.cluster.hostfile == str(elsewhere / "home" / "hosts")
    assert config.resume == str(elsewhere / "r" / "epoch=3-step=100")
    assert config.run.root == str(elsewhere / "runs")
    assert config.cluster.python == "python3"  # a program name stays for the PATH of each host


def test_interpolations_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y11."""
    monkeypatch.setenv("WHO", "me")
    config = read_config(["run.name=${oc.env:WHO}-${train.seed}", "eval.every_steps=${checkpoint.every_steps}"]).config
    assert config.run.name == "me-42"
    assert config.eval.every_steps == config.checkpoint.every_steps


def test_variables_of_this_shell_are_read_as_if_they_were_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y11."""
    words = []
    for key, text in (
        ("train.seed", "5"),
        ("optim.lr", "1e-5"),
        ("optim.betas", "[0.9,0.95]"),
        ("gpus", "2"),
        ("train.deterministic", "true"),
        ("notify.command", "[tell,010]"),
        ("run.name", "010"),
    ):
        monkeypatch.setenv(f"MY_{len(words)}", text)
        words.append(f"{key}=${{oc.env:MY_{len(words)}}}")
    config = read_config(words).config
    assert (config.train.seed, config.optim.lr, config.optim.betas) == (5, 1e-5, [0.9, 0.95])
    assert (config.gpus, config.train.deterministic, config.notify.command) == (2, True, ["tell", "010"])
    assert config.run.name == "010"


@pytest.mark.parametrize("key", [key for key in keys.PATHS if keys.is_text(key)] + ["cluster.include", "run.name"])
def test_no_text_is_never_this_folder_nor_a_filter_that_is_off(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Y11: a variable that is set and empty."""
    monkeypatch.setenv("EMPTY", "")
    for typed in ("${oc.env:EMPTY}", "${oc.env:NO_SUCH_VARIABLE,''}", '""'):
        with pytest.raises(ConfigError, match=rf"{key}=.*: must not be empty"):
            read_config(["model=tiny", f"{key}={typed}"])


def test_a_file_is_read_again_when_it_has_changed(elsewhere: Path) -> None:
    """One process composes the same files once, and nobody sees what another has typed."""
    file = elsewhere / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    words = ["--config-dir=conf", "model=tiny", "dataset=digits", "experiment=mine"]
    for lr in ("1e-3", "2e-03"):
        file.write_text(f"# @package _global_\noptim:\n  lr: {lr}\n")
        assert read_config([*words, "env.set.A=1"]).config.env.set == {"A": "1"}
        again = read_config(words).config
        assert (again.optim.lr, again.env.set) == (float(lr), {})


# Files of a user's own.


def with_files(*words: str) -> Composed:
    return read_config([f"--config-dir={CASES / 'conf'}", *words])


def test_text_of_a_yaml_file_stays_text() -> None:
    """Y12."""
    config = with_files("experiment=scalars").config
    assert (config.run.name, config.task.instruction) == ("12:30:45", "no")
    assert (config.cluster.gpu, config.cluster.include) == ("010", "yes")
    assert (config.optim.lr, config.train.seed, config.logging.project) == (1e-5, 10, "10")
    assert config.cluster.pdsh_args == ["-f", "64", "no", "010", "x", "10"]
    assert config.notify.command == ["12:30:45", "10"]
    expected = {"NCCL_DEBUG": "OFF", "NCCL_IB_TIMEOUT": "022", "NCCL_IB_GID_INDEX": "3", "QUOTED": "yes", "SEED": "10"}
    assert config.env.set == expected


def test_options_of_a_folder_work_like_shipped_ones(elsewhere: Path) -> None:
    config = with_files("model=mine", "cluster=lab", "cluster.stop_grace_s=5").config
    assert (config.model.name, config.model.weights) == ("mine", "random")
    assert config.cluster.hostfile == str(elsewhere / "hosts" / "lab.txt")
    assert config.cluster.stop_grace_s == 5.0


def test_every_problem_of_a_file_is_named_with_its_line() -> None:
    """Y11 Y12 Y22."""
    with pytest.raises(ConfigError) as caught:
        with_files("experiment=misread", "train.seed=x")
    text = str(caught.value).replace(str(CASES), "CASES")
    assert text == (CASES / "misread.txt").read_text(encoding="utf-8").rstrip("\n")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("experiment=bad_option", ["zero=stge3: no such option", "bad_option.yaml", "try  zero=stage3"]),
        ("experiment=not_yaml", ["mapping values are not allowed", "not_yaml.yaml", "line 2"]),
        ("model=tiny", ["a file of that name would be ignored", "model/tiny.yaml"]),
        ("experiment=scalers", ["no such option", "misread", "try  experiment=scalars"]),
    ],
)
def test_a_file_that_cannot_be_used_is_named(words: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        with_files(*words.split())
    assert [part for part in parts if part not in str(caught.value)] == []


# What is written down.


def test_recorded_words_give_the_same_configuration_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["experiment=scalars", "dataset=jsonl", "dataset.train=a b/t.jsonl", "run.root=r", "optim.betas=[0.9,0.95]"]
    words += ['run.name="x, \\"y\\""', "env.set.A='[1,2]'", "env.set.C=${oc.env:HOME}", "train.max_steps=null"]
    first = with_files(*words)
    monkeypatch.chdir("/")
    again = read_config(first.overrides)
    assert again == first
    assert first.config.run.name == 'x, "y"'


def test_the_written_yaml_is_the_configuration_with_secrets_masked() -> None:
    composed = read_config(["env.set.HF_TOKEN=hf_abc", "env.set.TOKENIZERS_PARALLELISM=false", "batch.max_tokens=4096"])
    assert composed.config.env.set["HF_TOKEN"] == "hf_abc"
    assert "hf_abc" not in composed.yaml + str(composed.overrides)
    written = OmegaConf.create(composed.yaml)
    assert written.env.set == {"HF_TOKEN": "***", "TOKENIZERS_PARALLELISM": "false"}
    assert written.batch.max_tokens == 4096
    assert "batch.max_tokens=4096" in composed.overrides


def test_resume_reads_what_was_typed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    (run / "checkpoints" / "step-000010").mkdir(parents=True)
    (run / "overrides.txt").write_text('experiment=digits\ntrain.seed=3\nrun.name=a\nrun.dir="/x"\n')
    expected = ["experiment=digits", "train.max_steps=9"]
    assert resumed_words(["runs/a", "train.seed=4"]) == ["experiment=digits", "train.seed=4", f"resume={run}"]
    for place in (run, run / "checkpoints" / "step-000010"):
        assert resumed_words([str(place), *expected[1:]])[-1] == f"resume={place}"
    (run / "overrides.txt").write_text('env.set.HF_TOKEN="***"\n')
    with pytest.raises(ConfigError, match=r"secrets are not recorded: env\.set\.HF_TOKEN"):
        resumed_words([str(run)])
    assert resumed_words([str(run), "env.set.HF_TOKEN=x"])[0] == "env.set.HF_TOKEN=x"
    for words in ([], ["nowhere"], ["train.seed=1"]):
        with pytest.raises(ConfigError):
            resumed_words(words)


# The tree of conf/ and the tables.


def shipped() -> list[str]:
    """Every option of every group."""
    return [f"{group}={name}" for group, names in keys.options([conf_dir()]).items() for name in names]


@pytest.mark.parametrize("word", shipped())
def test_every_shipped_option_composes(word: str) -> None:
    needed = {"dataset=jsonl": ["dataset.train=t.jsonl"], "model=local": ["model.path=m"]}
    needed |= {one: ["dataset.train=t.jsonl"] for one in shipped() if one.startswith("experiment=")}
    needed["experiment=digits"] = []
    needed["loss=custom"] = ["loss.function=ours:loss"]
    needed["zero=stage3_nvme"] = ["zero.nvme_path=scratch"]
    model = [] if word.startswith(("model=", "experiment=")) else ["model=tiny"]
    config = read_config([word, *model, *needed.get(word, [])]).config
    group, _, option = word.partition("=")
    assert getattr(getattr(config, group, None), "name", option) in (option, "adamw")


def test_every_key_is_written_and_explained_once_in_its_usual_option() -> None:
    for key in keys.kinds():
        group = key.split(".")[0]
        options = {group: keys.default_options().get(group) or "tiny"} if group in keys.groups() else {}
        file = keys.option_file([conf_dir()], group, options[group]) if options else conf_dir() / "config.yaml"
        assert file is not None
        files = [file.read_text(encoding="utf-8")] + [f.read_text(encoding="utf-8") for f in file.parent.glob("*.yaml")]
        name = key.rsplit(".", 1)[-1]
        lines = [line for text in files for line in text.splitlines() if re.match(rf" *{name}:", line)]
        assert lines, f"{key} is not in conf/"
        explained = name in ("name", "arch", "instruction", "repo") or any("# " in line for line in lines)
        assert explained, f"{key} has no comment"


def test_every_rule_and_habit_is_about_a_key_that_exists() -> None:
    assert [key for key in checks.RULES if keys.kind_of(key) is None] == []
    options = keys.options([conf_dir()])
    assert [key for key in habits.VALUES if key not in options and keys.kind_of(key) is None] == []
    for name in habits.HABITS:
        template, remark = habits.meant(name) or ("", "")
        words = template.split()
        assert words or remark
        assert [
            word for word in words if word.split("=")[0] not in options and keys.kind_of(word.split("=")[0]) is None
        ] == []
        assert name not in keys.kinds(), f"{name} is a key of ours"


@pytest.mark.parametrize("key", [key for key in checks.RULES if keys.default(key) not in (None, "???")])
def test_every_default_passes_its_own_check(key: str) -> None:
    value = keys.default(key)
    assert checks.type_problem(key, value) is None
    assert checks.rule_problem(key, value) is None


def test_tries_can_be_typed() -> None:
    """Y07: each KEY=VALUE that an answer offers, as a shell reads it, is itself understood: it is read, and allowed."""
    offered = {line.split("try  ", 1)[1] for _, text in wrong_lines() for line in text.splitlines() if "try  " in line}
    typed = [
        line
        for line in offered
        if re.match(r"'?[\w.]+=(?!VALUE|NAME|FILE|FOLDER)", line) and not line.startswith("KEY")
    ]
    assert len(typed) > 60
    for line in typed:
        read = read_command_line(shlex.split(line))
        assert read.problems == [], line
        for key, value in read.values.items():
            assert (checks.type_problem(key, value) or checks.rule_problem(key, value)) is None, line


@pytest.mark.parametrize(
    "value", [None, True, 3, 1e-5, "a", "a,b", "null", "None", "1", "q\"u'o\\te", "", [1, "x,y"], {"a": 1}, "é"]
)
def test_written_values_read_back_the_same(value: object) -> None:
    parsed = grammar.parse(grammar.as_typed(value))
    assert (parsed.readable, parsed.value) == (True, value)


def test_a_value_is_one_line() -> None:
    """The words of a run are recorded one a line."""
    for word in ('run.name="a\nb"', "run.name=a\nb", "env.set.A=a\nb"):
        assert len(read_command_line([word]).problems) == 1
