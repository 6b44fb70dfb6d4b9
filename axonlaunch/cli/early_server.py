"""The fork server of a command, started before its arguments are parsed.

Torch's import in the server is most of a start. What the command imports to parse its arguments
takes a tenth as long, on another core, so it comes second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from axonlaunch.launch.environment_variables import may_be_rank
from axonlaunch.system import forkserver, limits

COMMANDS = ("train", "estimate", "plan", "verify")
"""Those that always need a server, but for ``train`` in a process that a launcher started."""
_HELP = {"--help", "-h"}


@contextmanager
def early_server(arguments: Sequence[str]) -> Iterator[None]:
    """Start the server that a command line will ask for, and end it on leaving.

    Where nothing is started, the command starts it when it asks for it.

    Args:
        arguments: Of the command line, unparsed: ``train strategy=fsdp ...``.
    """
    asks = bool(arguments) and arguments[0] in COMMANDS and not _HELP & {*arguments}
    if not asks or may_be_rank(os.environ):
        yield
        return
    limits.allow_open_files()  # the server inherits it, and so do ranks
    with forkserver.warm(preload=preloads(arguments)):
        yield


def preloads(overrides: Sequence[str] | None) -> list[str]:
    """Return modules that the fork server is to import, as far as overrides say."""
    of_hf = ("model=hf", "+model=hf", "model.name=hf")
    return ["axonlaunch.models.hf.preload"] if {*of_hf} & {*(overrides or ())} else []
