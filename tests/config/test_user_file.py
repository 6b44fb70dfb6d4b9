"""``axonlaunch train FILE.yaml``: a file of options and keys is the primary configuration."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.command import TINY, Served
from support.served import Server

from axonlaunch import config
from axonlaunch.config import ConfigError, to_yaml
from axonlaunch.config.consistency.resumed_settings import frozen_settings
from axonlaunch.config.values.plain_values import read_yaml
from axonlaunch.launch.output.summary import resuming_command


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "run.yaml") -> str:
    Path(name).write_text(text)
    return name


def test_file_selects_options_and_changes_keys_and_overrides_change_it() -> None:
    write("strategy: fsdp\noptimizer: sgd\nmodel:\n  num_hidden_layers: 2\ntrain:\n  steps: 7\n")
    loaded = config.load(["run.yaml", "train.eval_every=3", "train.steps=9"])
    expected = ["strategy=fsdp", "optimizer=sgd", "model.num_hidden_layers=2"]
    assert loaded == config.load([*expected, "train.eval_every=3", "train.steps=9"])
    assert config.load([], config_name="run.yaml").train.steps == 7


@pytest.mark.parametrize("entry", ["override /model", "override model", "/model", "model"])
@pytest.mark.parametrize("first", ["", "  - config\n"])
def test_file_has_a_list_of_defaults_as_experiments_have(entry: str, first: str) -> None:
    text = f"# @package _global_\ndefaults:\n{first}  - {entry}: llama_debug\n  - _self_\nseed: 3\n"
    write(text)
    assert config.load(["run.yaml"]) == config.load(["model=llama_debug", "seed=3"])


def test_keys_of_a_file_replace_those_of_its_experiment() -> None:
    write("experiment: digits_mlp\ntrain:\n  steps: 3\n")
    assert config.load(["run.yaml"]) == config.load(["experiment=digits_mlp", "train.steps=3"])


def test_group_with_a_name_replaces_the_option_and_null_removes_it() -> None:
    write("model:\n  name: llama\n  num_key_value_heads: 2\nadapter: null\n")
    loaded = config.load(["run.yaml"])
    assert loaded.model.name == "llama"
    assert loaded.adapter is None


def test_frozen_configuration_of_a_run_is_a_file() -> None:
    loaded = config.load(["model=llama_debug", "strategy=hybrid", "train.steps=3", "adapter=lora"])
    write(to_yaml(loaded))
    assert config.load(["run.yaml"]) == loaded


@pytest.mark.parametrize(
    ("first", "run_dir", "override", "expected"),
    [
        ("first", "/data/runs/first", "name=second", "/data/runs/second"),
        ("first", "runs/first/", "name=second", "runs/second"),
        ("first", "first", "name=second", "second"),
        ("swept/0", "/data/swept/0", "name=second", "/data/second"),
        ("first", "${oc.env:DISK}/first", "name=second", "/scratch/second"),
        ("first", "/data/${name}", "name=second", "/data/second"),
        ("first", "/data/runs/first", "name=first", "/data/runs/first"),  # resumes the run
        ("first", "/data/runs/first", "seed=4", "/data/runs/first"),
        ("first", "/data/scratch", "name=second", "/data/scratch"),
        ("first", "/data/not-first", "name=second", "/data/not-first"),
        ("auto", "auto", "name=second", "auto"),
    ],
)
def test_another_name_than_in_the_file_is_a_run_beside_it(
    monkeypatch: pytest.MonkeyPatch, first: str, run_dir: str, override: str, expected: str
) -> None:
    monkeypatch.setenv("DISK", "/scratch")
    text = f"name: {first}\nrun_dir: {run_dir}\ncheckpoint:\n  path: {run_dir}\nseed: 3\n"
    write(text)
    Path("experiment").mkdir()
    write(f"# @package _global_\n{text}", "experiment/mine.yaml")
    for file in ("run.yaml", "experiment=mine"):
        loaded = config.load([file, override], config_dirs=[Path.cwd()])
        assert (loaded.run_dir, loaded.checkpoint.path) == (expected, expected)
        given = [file, override, "run_dir=/r", "checkpoint.path=/c"]
        loaded = config.load(given, config_dirs=[Path.cwd()])
        assert (loaded.run_dir, loaded.checkpoint.path) == ("/r", "/c")


def test_another_name_needs_neither_a_folder_nor_a_known_name_in_the_file() -> None:
    write("name: None\nrun_dir: /data/None\ncheckpoint:\n  path: null\n")
    loaded = config.load(["run.yaml", "name=second"])
    assert (loaded.run_dir, loaded.checkpoint.path) == ("/data/second", None)
    write("name: ${oc.env:UNSET_NAME_OF_RUN}\nrun_dir: /data/runs\n")
    assert config.load(["run.yaml", "name=second"]).run_dir == "/data/runs"


@pytest.mark.parametrize(("name", "origin"), [("second", "override name=second"), ("first", None)])
def test_origin_of_the_folder_is_the_other_name(name: str, origin: str | None) -> None:
    write("name: first\nrun_dir: /data/first\n")
    origins = config.compose(["run.yaml", f"name={name}"]).origins()
    assert origins["run_dir"] == (origin or str(Path.cwd() / "run.yaml"))


def test_command_that_resumes_a_file_with_a_folder_resumes_that_run() -> None:
    write("name: first\nrun_dir: /data/first\n")
    composed, loaded = config.compose(["run.yaml"]), config.load(["run.yaml"])
    words = ["axonlaunch", "train", "run.yaml"]
    command = resuming_command(loaded, words, composed=composed, name=None)
    assert command == "axonlaunch train run.yaml name=first"
    assert config.load(command.split()[2:]).run_dir == "/data/first"


def test_changed_file_is_read_again() -> None:
    assert config.load([write("seed: 1\n")]).seed == 1
    assert config.load([write("seed: 2\n")]).seed == 2


def test_origin_of_a_value_is_the_file() -> None:
    write("train:\n  steps: 7\n")
    origins = config.compose(["run.yaml"]).origins()
    assert origins["train.steps"] == str(Path.cwd() / "run.yaml")


def test_two_merge_keys_of_a_mapping_are_no_repeated_key() -> None:
    text = "a: &a {x: 1, z: 1}\nb: &b {y: 2, z: 2}\nboth:\n  <<: *a\n  <<: *b\n"
    assert read_yaml(text)["both"] == {"x": 1, "y": 2, "z": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  stepz: 3\n", "train.stepz=3: there is no such key; did you mean train.steps?"),
        ("model: fh\n", "model=fh: there is no such option; known: custom, "),
        ("modl: hf\n", "modl=hf: there is no such key; did you mean model?"),
        ("- a\n", "run.yaml: holds no keys"),
        ("a: [\n", "run.yaml: not YAML: line 2, column 1: "),
        ("train:\n\tsteps: 3\n", "run.yaml: not YAML: line 2 is indented with a tab; use spaces"),
        ("defaults: hf\n", "run.yaml: its defaults are not a list; write defaults: [override"),
        (
            "train:\n  steps: 3\nseed: 1\ntrain:\n  log_every: 1\n",
            "run.yaml: has the key train twice, in lines 1 and 4; write both values below one",
        ),
        (
            "strategy.fsdp.sharding: full_shard\n",
            "run.yaml: strategy.fsdp.sharding: keys are nested in a file; write strategy: {fsdp: "
            "{sharding: ...}}",
        ),
        (
            "seed: ${oc.env:UNSET_VARIABLE}\n",
            "seed: the environment variable UNSET_VARIABLE is not set",
        ),
    ],
)
def test_errors_in_a_file_are_one_line(text: str, message: str) -> None:
    write(text)
    with pytest.raises(ConfigError) as raised:
        config.load(["run.yaml"])
    [problem] = raised.value.problems
    assert str(problem).startswith(message)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("2e-5", 2e-5), ("1E-2", 0.01), (".5e3", 500.0), ("-1.5", -1.5), ("1_000", 1000)),
        *((".inf", math.inf), ("0x10", 16), ("0", 0), ("+7", 7), ("1.", 1.0)),
        *(("2026-11-29", "2026-11-29"), ("12:00:00", "12:00:00"), ("1:30.5", "1:30.5")),
        *(("010", "010"), ("1e", "1e"), ("'1e-3'", "1e-3"), ("e5", "e5"), ("1.2.3", "1.2.3")),
    ],
)
def test_numbers_in_a_file_are_those_that_one_reads_there(text: str, value: object) -> None:
    """In YAML 1.1 a time limit of 12:00:00 is 43,200, and 010 is 8."""
    [read] = read_yaml(f"key: {text}\n").values()
    assert (read, type(read)) == (value, type(value))


def test_files_of_a_folder_have_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /launch: slurm\nlaunch:\n  slurm:\n"
    write(f"{text}    time: 12:00:00\nname: 010\n", "experiment/mine.yaml")
    loaded = config.load(["experiment=mine"], config_dirs=[tmp_path])
    assert (loaded.launch.slurm.time, loaded.name) == ("12:00:00", "010")


@pytest.mark.parametrize("name", ["1e-3", "12e4567", "2026-11-29", "0123", "1e-3\n"])
def test_frozen_text_that_looks_like_a_number_is_text_for_every_reader(name: str) -> None:
    text = to_yaml({"name": name})
    assert read_yaml(text) == OmegaConf.to_container(OmegaConf.create(text)) == {"name": name}


NUMBERS = ["1e-3", "12e4567", "1.10", "1.0", ".5"]
"""Texts that YAML and Hydra read as numbers; other digits would be other names."""


@pytest.mark.parametrize("number", NUMBERS)
def test_number_where_text_is_expected_is_the_text_of_the_user(folder: Path, number: str) -> None:
    adding = "tokenizer:\n  add_tokens: [a, NUMBER]\nname: NUMBER\nseed: 1\n"
    expected = (number, ["a", number])
    (folder / "experiment").mkdir()
    write(adding.replace("NUMBER", number))
    write("# @package _global_\n" + adding.replace("NUMBER", number), "experiment/mine.yaml")
    for words in (
        ["run.yaml"],
        ["experiment=mine"],
        [f"name={number}", f"tokenizer.add_tokens=[a,{number}]"],
    ):
        tree = config.compose(words, config_dirs=[folder]).tree
        assert (tree["name"], tree["tokenizer"]["add_tokens"]) == expected


@pytest.mark.parametrize("number", ["1e-3", "12e4567", "1.5e10"])
def test_frozen_text_without_quotes_of_an_earlier_version_is_read(number: str) -> None:
    earlier = to_yaml(config.load(["model=llama_debug", f"name='{number}'", "optimizer.lr=1e-3"]))
    write(earlier.replace(f"name: '{number}'", f"name: {number}"), "config.yaml")
    assert f"name: {number}\n" in Path("config.yaml").read_text()
    loaded = config.load(["config.yaml"])
    assert (loaded.name, loaded.optimizer.lr) == (number, 0.001)
    assert config.read_frozen(Path("config.yaml")).name == number
    assert frozen_settings(Path("config.yaml"))["name"] == number


def test_missing_file_and_second_file_are_refused() -> None:
    write("seed: 1\n")
    with pytest.raises(ConfigError, match=r"^rum.yaml: No such file .*; did you mean run.yaml\?$"):
        config.load(["rum.yaml"])
    with pytest.raises(ConfigError, match="only one file can be given"):
        config.load(["run.yaml", "run.yaml"])


@pytest.mark.slow
def test_train_runs_a_file_and_a_sweep_of_it(folder: Path, server: Server) -> None:
    command = Served(folder, server)
    write("strategy: single\nname: swept\ntrain:\n  steps: 1\n")
    short = [word for word in TINY if not word.startswith("train.steps=")]
    command("train", "-m", "run.yaml", *short, "seed=0,1", "launch.backend=mock")
    assert {len(command.losses(f"swept/{number}")) for number in (0, 1)} == {1}
    finished = command("train", "--config", "runs/swept/0/config.yaml").stdout
    assert "swept/0 is finished: it has trained all of its 1 steps" in finished
