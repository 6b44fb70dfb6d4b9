"""Names of runs that a terminal or another program could not show are refused."""

from __future__ import annotations

import pytest

from axonlaunch import config
from axonlaunch.config import ConfigError

UNREADABLE = {
    "a\nb": r"contains a line break (\n)",
    "a\rb": r"contains a line break (\r)",
    "a\u2028b": r"contains a line break (\u2028)",
    "a\x1b[31mb": r"contains a control character (\x1b)",
    "a\x9bb": r"contains a control character (\x9b)",
    "a\u202eb": r"contains a mark that changes the direction of text (\u202e)",
    "a\u2067b": r"contains a mark that changes the direction of text (\u2067)",
    "a\udcffb": r"contains a byte that is not UTF-8 (\udcff)",
    "   ": "has a name of blanks only",
    "a/\u00a0/b": "has a name of blanks only",
}


@pytest.mark.parametrize("key", ["name", "run_dir", "checkpoint.path"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_name_with_newlines_escapes_direction_marks_or_only_blanks_is_refused(
    name: str, key: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load([f'{key}="{name}"'])
    shown = ascii(name)
    expected = f"{key}={shown}: {UNREADABLE[name]}; use letters, digits, - and _"
    assert [str(problem) for problem in raised.value.problems] == [expected]


@pytest.mark.parametrize("name", ["größe 2", "実験/1", "a\u200db", "a-b_c.d"])
def test_a_name_in_any_script_is_accepted(name: str) -> None:
    assert config.load([f'name="{name}"']).name == name


@pytest.mark.parametrize("override", ['train.precision="fp\n8"', "name=a\nb"])
def test_a_value_with_a_newline_is_reported_in_one_line(override: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load([override])
    assert len(str(raised.value).splitlines()) == 1
