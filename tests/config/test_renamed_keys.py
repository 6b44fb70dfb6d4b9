"""A key of an earlier version is refused, and the message names the key that replaced it."""

from pathlib import Path

import pytest
from covers import every

from axonlaunch import config
from axonlaunch.config import ConfigError
from axonlaunch.config.key_reference import reference
from axonlaunch.config.other_names import RENAMED_KEYS

RENAMED = sorted(RENAMED_KEYS.items())


def refusal(overrides: list[str], **options: list[Path]) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        config.load(overrides, **options)
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(("old", "new"), RENAMED, ids=[old for old, _ in RENAMED])
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_an_override_of_an_old_key_names_the_new_one(old: str, new: str, prefix: str) -> None:
    wrong = refusal(["hardware=h100_80gb", f"{prefix}{old}=1"])
    assert wrong == [f"{old}=1: was renamed; write {new} instead"]


@pytest.mark.parametrize(("old", "new"), every(4, RENAMED), ids=[old for old, _ in RENAMED])
def test_a_file_with_an_old_key_names_the_new_one_and_the_file(
    old: str, new: str, tmp_path: Path
) -> None:
    group, name = old.split(".")
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{group}:\n  {name}: 1\n")
    wrong = refusal(["hardware=h100_80gb", "experiment=mine"], config_dirs=[tmp_path])
    assert wrong == [f"{old}=1: was renamed; write {new} instead (in {file})"]


def test_the_frozen_configuration_of_an_older_run_names_the_new_keys(tmp_path: Path) -> None:
    text = config.to_yaml(config.load([]))
    (tmp_path / "config.yaml").write_text(text.replace("keep_last:", "keep:"))
    with pytest.raises(ConfigError, match=r"checkpoint\.keep=2: was renamed; write checkpoint\.ke"):
        config.read_frozen(tmp_path)


def test_new_names_exist_and_old_ones_do_not() -> None:
    known = {key.name for key in reference(config.load(["hardware=h100_80gb"]))}
    assert {key.partition("=")[0] for key in RENAMED_KEYS.values()} <= known
    assert not set(RENAMED_KEYS) & known
