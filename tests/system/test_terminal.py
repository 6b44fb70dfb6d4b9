"""Output on a terminal, and output to a file."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from rich.table import Table

from axonlaunch.system.text.terminal import console_on


@pytest.mark.parametrize("in_table", [False, True])
def test_a_users_text_is_printed_as_it_was_written(in_table: bool) -> None:
    """``:x:`` would be an emoji in rich."""
    text = "loggers[0].target=nowhere:x:"
    table = Table(box=None, show_header=False)
    table.add_row(text.replace("[", "\\["))
    stream = io.StringIO()
    console_on(stream, width=80).print(table if in_table else text, markup=in_table)
    assert stream.getvalue().strip() == text


def test_console_in_a_notebook_prints_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    assert console_on(io.StringIO()).color_system
    application = SimpleNamespace(initialized=lambda: True)
    kernel = SimpleNamespace(IPKernelApp=application)
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", kernel)
    console = console_on(io.StringIO())
    assert not console.is_terminal
    assert not console.color_system


def test_forced_color_colors_a_log_without_animations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as many CI jobs do
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    console = console_on(stream)
    with console.status("waiting"):
        console.print("[red]failed[/red]")
    assert stream.getvalue() == "\x1b[31mfailed\x1b[0m\n"
