"""Output on a terminal, and output to a file."""

from __future__ import annotations

import io

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
