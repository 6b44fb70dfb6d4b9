"""Every wrong configuration is refused with a specific message, at once and without torch."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from axonlaunch import config
from axonlaunch.config import ConfigError

WRONG: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("wrong.yaml").read_text())
"""Overrides as typed in a shell, and the problems in order."""


@pytest.mark.parametrize("overrides", WRONG)
def test_a_wrong_configuration_is_reported_in_exact_words(
    overrides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        config.load(shlex.split(overrides))
    reported = [str(problem) for problem in raised.value.problems]
    assert reported == [problem.replace("{cwd}", str(tmp_path)) for problem in WRONG[overrides]]
    assert list(tmp_path.iterdir()) == []


def test_unknown_key_has_no_suggestion_from_distant_group() -> None:
    with pytest.raises(ConfigError, match=r"train.epz=3: there is no such key; keys of train: "):
        config.load(["train.epz=3"])


def test_an_unknown_primary_config_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--config-name foo: there is no config 'foo'"):
        config.load([], config_name="foo")


def test_a_missing_config_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: there is no such folder"):
        config.load([], config_dirs=[tmp_path / "nowhere"])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: is a file, not a folder"):
        config.load([], config_dirs=[tmp_path / "file"])


def test_yaml_that_does_not_parse_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "broken.yaml").write_text("name: gpt\nhidden_size: [1\n")
    with pytest.raises(ConfigError, match=r"broken.yaml:3:1: not YAML"):
        config.load(["model=broken"], config_dirs=[tmp_path])
    (tmp_path / "model" / "broken.yaml").write_text("name: gpt\noptions:\n\ta: 1\n")
    with pytest.raises(ConfigError, match=r"broken.yaml:3:1: not YAML: .*; use spaces in place of"):
        config.load(["model=broken"], config_dirs=[tmp_path])
    (tmp_path / "model" / "broken.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match=f"^{tmp_path}/model/broken.yaml: holds no keys$"):
        config.load(["model=broken"], config_dirs=[tmp_path])


def test_a_wrong_configuration_exits_2_with_a_line_a_problem_and_no_torch(tmp_path: Path) -> None:
    overrides = ["train.stepz=3", "optimizer.lr=x", "strategy=fsdq", "launch.nproc=3"]
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "axonlaunch", "config", *overrides],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    lines = [line for line in ran.stderr.splitlines() if not line.startswith("import time:")]
    assert ran.returncode == 2
    assert len(lines) == 4
    assert all(line.startswith("error: ") for line in lines)
    assert "| torch\n" not in ran.stderr
    assert ran.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_errors_in_user_files_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\ntrain:\n  steps: none\n")
    with pytest.raises(config.ConfigError, match=f"train.steps=none: .*in {file}\\)$"):
        config.load(["experiment=mine"], config_dirs=[tmp_path])
    file.write_text("train:\n  steps: 7\n")
    with pytest.raises(config.ConfigError, match="begins with # @package _global_"):
        config.load(["experiment=mine"], config_dirs=[tmp_path])
    file.write_text("# @package _global_\ntrain:\n  steps: 7\n")
    with pytest.raises(config.ConfigError) as refused:
        config.load(["experiment=mine", "train.steps=none"], config_dirs=[tmp_path])
    assert str(file) not in str(refused.value)
