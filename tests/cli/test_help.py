"""``axonlaunch help``: the pages that the package ships, listed, rendered and as text."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.command import Served
from support.served import Server

from axonlaunch.cli.app import app
from axonlaunch.cli.configuration.help import search_pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "axonlaunch" / "docs"
PAGES = [path.stem for path in sorted(DOCS.glob("*.md"))]


@pytest.fixture
def axonlaunch(tmp_path: Path, server: Server) -> Served:
    return Served(tmp_path, server)


class Narrow(Served):
    """Runs the command on a terminal of 80 columns."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "COLUMNS": "80"}


@pytest.fixture
def narrow(tmp_path: Path, server: Server) -> Narrow:
    return Narrow(tmp_path, server)


def test_every_page_is_listed_with_its_first_sentence(axonlaunch: Served) -> None:
    listed = json.loads(axonlaunch("help", "--json").stdout)["pages"]
    assert list(listed) == PAGES
    text = axonlaunch("help").stdout
    for name, line in listed.items():
        assert 20 < len(line) <= 120
        assert name in text
        assert line[:40] in text


def test_a_page_is_rendered_for_the_terminal(axonlaunch: Served) -> None:
    shown = axonlaunch("help", "checkpoints").stdout
    assert "Corrupt checkpoints" in shown
    assert "## Corrupt" not in shown
    assert "```" not in shown


@pytest.mark.parametrize("page", ["extending", "security"])
def test_tables_of_a_narrow_terminal_break_long_words_and_cut_none(
    page: str, narrow: Narrow
) -> None:
    shown = narrow("help", page).stdout
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def examples_of(command: Any, name: str = "axonlaunch") -> Iterator[tuple[str, str]]:
    """Yield each line below a command's help, with the command's name."""
    yield from ((name, line) for line in (command.epilog or "").splitlines())
    for part, inner in getattr(command, "commands", {}).items():
        yield from examples_of(inner, f"{name} {part}")


def test_the_examples_of_every_command_fit_a_terminal_of_80_columns() -> None:
    lines = [*examples_of(typer.main.get_command(app))]
    assert len({name for name, _ in lines}) > 15
    indent = 2  # of the text below a command's help
    assert [(name, line) for name, line in lines if len(line) + indent > 80] == []


def test_drawings_fit_a_terminal_of_80_columns() -> None:
    page = (DOCS / "architecture.md").read_text()
    drawings = re.findall(r"^```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(drawings) == 2
    assert max(len(line) for drawing in drawings for line in drawing.splitlines()) <= 78


def test_help_of_80_columns_is_not_truncated(narrow: Narrow) -> None:
    page = (DOCS / "failures.md").read_text().splitlines()
    lines = [line for line in page if line.startswith(("╭", "│", "╰"))]
    shown = narrow("help", "failures").stdout.splitlines()
    assert [line for line in lines if line not in shown] == []


def test_json_has_the_text_of_a_page(axonlaunch: Served) -> None:
    page = json.loads(axonlaunch("help", "estimate-and-plan", "--json").stdout)
    text = (DOCS / "estimate-and-plan.md").read_text()
    assert page == {"topic": "estimate-and-plan", "text": text}


@pytest.mark.parametrize("topic", ["Strategies", "python_api", "security.md"])
def test_a_page_is_found_however_its_name_is_written(topic: str, axonlaunch: Served) -> None:
    assert axonlaunch("help", topic).stdout


def test_an_unknown_page_is_an_error_that_names_similar_ones(axonlaunch: Served) -> None:
    errors = axonlaunch("help", "strattegies", status=2).stderr
    assert errors.startswith(
        "error: there is no page 'strattegies'; did you mean strategies? known:"
    )
    assert errors.count("\n") == 1


def test_words_that_are_no_page_are_searched_in_all_pages(axonlaunch: Served) -> None:
    shown = axonlaunch("help", "learning", "rate").stdout
    assert "configuration: Optimizers, schedules and groups of parameters\n" in shown
    found = json.loads(axonlaunch("help", "Ring Attention", "--json").stdout)["sections"]
    assert "ring attention" in found[0]["line"].lower()
    assert [each["count"] for each in found] == sorted(
        (each["count"] for each in found), reverse=True
    )


def test_lines_of_code_are_no_headings_in_a_search() -> None:
    page = "# Page\n\n## One\n\n```python\n# word.py\nx\n```\nword\n\n## Two\n\nother\n"
    [section] = search_pages("WORD", {"page": page})
    assert (section.heading, section.line, section.count) == ("One", "# word.py", 2)
    assert search_pages("word nowhere", {"page": page}) == []


def test_commands_are_listed_in_groups_that_have_every_command(axonlaunch: Served) -> None:
    shown = axonlaunch("--help").stdout
    assert shown.index("Start here:\n  init ") < shown.index("\nRuns:\n  runs ")
    listed = re.findall(r"^  ([a-z]+)  ", shown, flags=re.MULTILINE)
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_a_command_that_is_no_page_is_sent_to_its_help(axonlaunch: Served) -> None:
    errors = axonlaunch("help", "train", status=2).stderr
    assert errors == "error: train is a command; use axonlaunch train --help\n"


def test_the_wheel_has_the_pages() -> None:
    """hatchling includes every file of the package that git does not ignore."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["axonlaunch"]
    assert not {"exclude", "only-include", "include"} & wheel.keys()


def commands_of(command: Any, name: str = "axonlaunch") -> Iterator[tuple[str, Any]]:
    """Yield every command and subcommand by its full name."""
    yield name, command
    for part, inner in getattr(command, "commands", {}).items():
        yield from commands_of(inner, f"{name} {part}")


def test_help_shows_arguments_and_options_by_name_without_python_types() -> None:
    texts = {
        name: command.get_help(typer.Context(command, info_name=name))
        for name, command in commands_of(typer.main.get_command(app))
    }
    assert "axonlaunch report [OPTIONS] RUN...\n" in texts["axonlaunch report"]
    assert "axonlaunch train [OPTIONS] [KEY=VALUE...]\n" in texts["axonlaunch train"]
    assert [name for name, text in texts.items() if re.search(r"[<{][\w\[\] ]+[>}]", text)] == []
