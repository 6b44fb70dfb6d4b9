"""The command, forked from the server of the tests, and the conversion of other tools' files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Command, Served
from support.other_tools import Converter
from support.served import Server


@pytest.fixture
def axonlaunch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> Iterator[Command]:
    """Return the command in a new folder, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = Served(tmp_path, server)
    yield command
    assert not command.processes()


@pytest.fixture
def convert(tmp_path: Path) -> Converter:
    """Return a function that writes a file of another tool and translates it."""
    return Converter(tmp_path)
