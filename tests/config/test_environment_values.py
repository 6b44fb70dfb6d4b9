"""Values of environment variables (``${oc.env:NAME}``) reach ranks, but no file, page or node."""

from __future__ import annotations

import copy
import pickle
import socket
from pathlib import Path

import pytest

from axonlaunch import config
from axonlaunch.config import ConfigError, to_interpolations, to_tree, to_yaml
from axonlaunch.config.composition.origins import origins_of
from axonlaunch.config.options.loggers import CustomLoggerConfig
from axonlaunch.config.values.environment_values import EnvironmentText
from axonlaunch.preflight.paths import with_absolute_paths

SECRET = "hunter2,\"x}'"
LOGGER = "loggers=[{target: 'json:loads', arguments: {key: '${oc.env:API_KEY}', n: 1}}]"


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", SECRET)
    monkeypatch.setenv("STEPS", "7")


def key_of(loaded: config.RunConfig) -> str:
    [logger] = loaded.loggers
    assert isinstance(logger, CustomLoggerConfig)
    return str(logger.arguments["key"])


def test_a_secret_of_the_environment_is_in_the_configuration_and_not_in_its_yaml() -> None:
    loaded = config.load([LOGGER])
    assert key_of(loaded) == SECRET
    text = to_yaml(loaded)
    assert "hunter2" not in text
    assert "key: ${oc.env:API_KEY}" in text
    again = config.parse_frozen(text)
    assert again == loaded
    assert to_yaml(again) == text


def test_secret_survives_pickle_and_is_excluded_from_node_comparison() -> None:
    loaded = pickle.loads(pickle.dumps(copy.deepcopy(config.load([LOGGER]))))
    assert key_of(loaded) == SECRET
    assert "hunter2" not in str(to_interpolations(to_tree(loaded)))


def test_each_node_expands_its_environment_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = to_yaml(config.load([LOGGER]))
    monkeypatch.setenv("API_KEY", "of this node")
    assert key_of(config.parse_frozen(text)) == "of this node"
    monkeypatch.delenv("API_KEY")
    with pytest.raises(ConfigError) as error:
        config.parse_frozen(text)
    assert str(error.value) == (
        "loggers: the frozen configuration names the environment variable API_KEY, which is not "
        f"set on {socket.gethostname()}; set it there too"
    )


def test_a_foreign_configuration_gets_no_value_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        to_yaml(config.load(["checkpoint.path=s3://bucket/${oc.env:API_KEY}"]))
    )
    foreign = config.read_frozen(tmp_path)
    assert foreign.checkpoint.path == "s3://bucket/${oc.env:API_KEY}"
    assert to_yaml(foreign) == (tmp_path / "config.yaml").read_text()
    trusted = config.read_frozen(tmp_path, trusted=True)
    assert trusted.checkpoint.path == f"s3://bucket/{SECRET}"


@pytest.mark.parametrize(
    ("text", "value", "written"),
    [
        ("a ${oc.env:API_KEY} b", f"a {SECRET} b", "a ${oc.env:API_KEY} b"),
        ("${oc.env:NOT_SET_ANYWHERE,abc}", "abc", '${oc.env:NOT_SET_ANYWHERE,"abc"}'),
        ("${run_dir}", SECRET, "${oc.env:API_KEY}"),
        ("${oc.select:run_dir}", SECRET, "${oc.env:API_KEY}"),
        ("${oc.decode:${oc.env:STEPS}}x", "7x", "${oc.env:STEPS}x"),
        (r"\${oc.env:API_KEY}", "${oc.env:API_KEY}", r"\${oc.env:API_KEY}"),
    ],
)
def test_texts_with_environment_variables_are_written_with_their_names(
    text: str, value: str, written: str
) -> None:
    folder = "run_dir='${oc.env:API_KEY}'"
    loaded = config.load([folder, f"checkpoint.path='{text}'"])
    assert loaded.checkpoint.path == value
    path = to_interpolations(to_tree(loaded))["checkpoint"]["path"]
    assert path == written
    assert config.parse_frozen(to_yaml(loaded)).checkpoint.path == value


def test_numbers_and_choices_from_the_environment_are_frozen_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECISION", "bf16")
    overrides = [
        "train.steps='${oc.decode:${oc.env:STEPS}}'",
        "train.precision='${oc.env:PRECISION}'",
    ]
    text = to_yaml(config.load(overrides))
    assert "steps: 7\n" in text
    assert "precision: bf16\n" in text


def test_environment_text_changed_by_another_resolver_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUOTED", "'in quotes'")
    with pytest.raises(ConfigError) as error:
        config.load(["checkpoint.path='${oc.decode:${oc.env:QUOTED}}'"])
    assert str(error.value).startswith("checkpoint.path: another resolver changes the value of an")


def test_messages_and_origins_show_the_variable_and_not_its_value() -> None:
    with pytest.raises(ConfigError) as error:
        config.load(["train.steps='${oc.env:API_KEY}'"])
    assert str(error.value).startswith("train.steps=${oc.env:API_KEY}: expected a whole number")
    composed = config.compose([LOGGER])
    loaded = config.type_config(composed.tree)
    assert "hunter2" not in str(origins_of(composed, loaded))


def test_a_relative_path_of_the_environment_is_written_below_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZER", "mine")
    (tmp_path / "mine").mkdir()
    overrides = ["data=documents", "data.files=[a.txt]", "tokenizer.path='${oc.env:TOKENIZER}'"]
    loaded = with_absolute_paths(config.load(overrides))
    path = loaded.tokenizer.path
    assert path == str(tmp_path / "mine")
    assert isinstance(path, EnvironmentText)
    assert path.written == f"{tmp_path}/${{oc.env:TOKENIZER}}"
