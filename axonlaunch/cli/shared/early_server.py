"""Starts the fork server of a command before its arguments are parsed.

Importing torch in the server takes most of the start. The command's own imports take a tenth as
long and run on another core meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from axonlaunch.launch.environment.environment_variables import may_be_rank
from axonlaunch.launch.local.preload_rules import preloads
from axonlaunch.system.node import limits
from axonlaunch.system.processes import forkserver

COMMANDS = ("train", "estimate", "plan", "verify")
"""Commands that need a server. ``train`` needs none in a process that a launcher started."""
_HELP = {"--help", "-h"}


@contextmanager
def early_server(arguments: Sequence[str]) -> Iterator[None]:
    """Start the fork server if the command line will need it, and stop it on exit.

    A command that needs the server although it was not started here starts it itself.

    Args:
        arguments: Unparsed arguments of the command line: ``train strategy=fsdp ...``.
    """
    needs_server = bool(arguments) and arguments[0] in COMMANDS and not _HELP & {*arguments}
    if not needs_server or may_be_rank(os.environ):
        yield
        return
    limits.allow_open_files()  # the server and the ranks inherit the limit
    is_run = arguments[0] == "train" and "--dry-run" not in arguments
    with forkserver.warm(preload=preloads(arguments, traces=not is_run)):
        yield
