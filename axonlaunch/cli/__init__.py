"""The command line; importing it imports no torch, no Hydra and no Typer."""

import atexit
import os
import sys

from axonlaunch.system import streams


def main() -> None:
    """Run the command that the arguments name, and end the process with its status."""
    status = 1

    def leave() -> None:
        # Threads of torch's and gloo's outlive the interpreter's state and abort a process in its
        # teardown (status 134) whose work is done.
        for stream in (sys.stdout, sys.stderr):
            streams.tolerant(stream).flush()
        os._exit(status)

    streams.open_missing()
    atexit.register(leave)  # registered first, so called last, after threads were joined
    try:
        from axonlaunch.cli.early_server import early_server

        with early_server(sys.argv[1:]):
            from axonlaunch.cli.app import run_command

            run_command()
    except KeyboardInterrupt:  # while modules were imported
        status = 130
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
