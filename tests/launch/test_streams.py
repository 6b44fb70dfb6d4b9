"""A run is never ended by its console."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest
from support.command import TINY, Command
from support.served import Forked, Server, command

from axonlaunch import cli
from axonlaunch.system.text.streams import tolerant


def _reader_that_left() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def _closed_terminal() -> TextIO:
    ours, terminal = pty.openpty()
    os.close(ours)
    return os.fdopen(terminal, "w")


@pytest.mark.parametrize("dead", [_reader_that_left, _closed_terminal])
def test_missing_console_becomes_dev_null(dead: object) -> None:
    stream = tolerant(dead())  # type: ignore[operator]
    print("a line", file=stream, flush=True)
    print("another", file=stream, flush=True)
    assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == os.devnull  # noqa: PTH115
    stream.close()  # with remaining data in the buffer


def test_closed_stream_does_not_end_run() -> None:
    closed = io.StringIO()
    closed.close()
    print("a line", file=tolerant(closed), flush=True)


def test_output_continues_after_full_disk_has_space() -> None:
    class Full(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text)

    disk = Full()
    stream = tolerant(disk)
    stream.write("dropped\n")
    disk.full = False
    stream.write("written\n")
    assert disk.getvalue() == "written\n"


def test_unencodable_console_character_is_escaped() -> None:
    raw = io.BytesIO()
    stream = tolerant(io.TextIOWrapper(raw, encoding="ascii"))
    print("naïve", file=stream, flush=True)
    assert raw.getvalue() == b"na\\xefve\n"


def test_commands_escape_names_that_standard_output_cannot_encode(tmp_path: Path) -> None:
    (tmp_path / "größe").mkdir()
    (tmp_path / "größe" / "config.yaml").write_text("name: a\n")
    listed = subprocess.run(
        [sys.executable, "-m", "axonlaunch", "runs", str(tmp_path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert b"gr\\xf6\\xdfe" in listed.stdout


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (["train", "--json"], 2, "the working folder was deleted; change to another one"),
        (["--version"], 0, ""),
        (["help", "glossary"], 0, ""),
        (["ls", "models"], 0, ""),
        (
            ["ls", "--plugin=mine", "--json"],
            2,
            "the working folder was deleted; change to another one",
        ),
    ],
)
def test_deleted_working_folder_is_one_line(
    words: list[str], status: int, error: str, tmp_path: Path
) -> None:
    program = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    command = ["sh", "-c", program, "sh", sys.executable, "-m", "axonlaunch", *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert ended.returncode == status
    assert ended.stderr.decode() == (f"error: {error}\n" if error else "")
    if error:
        assert json.loads(ended.stdout) == {"errors": [{"key": None, "message": error}]}


def test_unreadable_working_folder_is_not_called_deleted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "getcwd", refuse)
    assert not cli._has_working_folder(["train"])
    error = "the working folder can't be found: Permission denied; change to another one"
    assert capsys.readouterr().err == f"error: {error}\n"


def test_closed_standard_output_is_not_reused_by_next_file() -> None:
    program = (
        "from axonlaunch.system.text import streams; import os, tempfile;"
        "streams.open_missing(); file = tempfile.TemporaryFile();"
        "print('lost'); os.write(2, b'lost'); import sys; sys.stdout.flush();"
        "assert file.fileno() > 2 and file.read() == b'', file.fileno()"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_run_survives_blocked_console(tmp_path: Path, server: Server) -> None:
    run = Command(tmp_path)

    overrides = ["train", *TINY, "strategy=ddp", "name=run", "checkpoint.every=6"]
    process = Forked(
        command,
        server,
        *overrides,
        folder=tmp_path,
        environment=run.environment(),
        console="/dev/full",
    )
    process.communicate(timeout=90)
    assert process.returncode == 0
    assert run.summary("run")["status"] == "done"
    assert run.summary("run")["console_refused"] == "No space left on device"
    log = (tmp_path / "runs/run/logs/rank_0.log").read_text()
    assert "the console did not take all that was printed: No space left on device\n" in log
    assert (tmp_path / "runs/run/checkpoints/step_6").is_dir()
