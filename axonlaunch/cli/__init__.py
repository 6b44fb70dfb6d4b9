"""Entry point of the command line. Importing it imports no torch, Hydra or Typer."""

import atexit
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from axonlaunch.system.exit_status import take_status_file, write_status
from axonlaunch.system.text import streams


def main() -> None:
    """Run the command line and exit with its status."""
    status, status_file = 1, take_status_file()

    def leave() -> None:
        # Skip the interpreter's teardown: threads of torch and gloo that still run then would
        # abort the finished process (status 134).
        for stream in (sys.stdout, sys.stderr):
            streams.tolerant(stream).flush()
        write_status(status_file, status)
        os._exit(status)

    streams.open_missing()
    streams.escape_unencodable()
    atexit.register(leave)  # registered first, so it is called last, after threads are joined
    if not _has_working_folder(sys.argv[1:]):
        status = 2
        return
    try:
        from axonlaunch.cli.shared.early_server import early_server

        with early_server(sys.argv[1:]):
            from axonlaunch.cli.app import run_command

            run_command()
    except KeyboardInterrupt:  # during imports
        status = 130
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def _has_working_folder(arguments: Sequence[str]) -> bool:
    """Return whether a command has the working folder that it needs; print the error if not."""
    try:
        Path.cwd()
    except OSError as error:
        if _reads_no_folder(arguments):
            return True
        from axonlaunch.cli.shared.options import print_problems
        from axonlaunch.config import ConfigIssue

        reason = f"can't be found: {error.strerror}"
        if isinstance(error, FileNotFoundError):
            reason = "was deleted"
        problem = ConfigIssue("", f"the working folder {reason}; change to another one")
        print_problems([problem], as_json="--json" in arguments)
        return False
    return True


def _reads_no_folder(arguments: Sequence[str]) -> bool:
    """Return whether a command prints only what is installed."""
    if {"--help", "-h"} & {*arguments}:
        return True
    command = next((text for text in arguments if not text.startswith("-")), None)
    of_user = [text for text in arguments if text.startswith(("--plugin", "--config-dir"))]
    return command in (None, "help") or (command == "ls" and not of_user)
