"""The fork server of a command, started before its arguments are parsed.

Torch's import in the server is most of a start. What the command imports to parse its arguments
takes a tenth as long, on another core, so it comes second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from axonlaunch.launch.environment_variables import may_be_rank
from axonlaunch.system import forkserver, limits

COMMANDS = ("train", "estimate", "plan", "verify")
"""Those that always need a server, but for ``train`` in a process that a launcher started."""
_HELP = {"--help", "-h"}
_TRANSFORMERS = ("axonlaunch.models.hf.preload",)
_COMPILER = ("axonlaunch.planning.tracing.preload",)
_COMPILES = re.compile(r"compile|deterministic|pipeline|strategy=(hybrid|auto)")
"""Overrides of runs that use torch's compiler, or its pipelines, which import it."""


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
    is_run = arguments[0] == "train" and "--dry-run" not in arguments
    with forkserver.warm(preload=preloads(arguments, traces=not is_run)):
        yield


def preloads(overrides: Sequence[str] | None, *, traces: bool = True) -> list[str]:
    """Return modules that the fork server imports in addition to those that every rank needs.

    If the overrides do not show that they are needed (a key in a YAML file), each rank imports
    them itself.

    Args:
        overrides: Of the command line.
        traces: Whether the command traces a training step on fake tensors.
    """
    words = [*(overrides or ())]
    of_hf = {"model=hf", "+model=hf", "model.name=hf"} & {*words}
    compiles = traces or any(_COMPILES.search(word) for word in words)
    return [*(_COMPILER if compiles else ()), *(_TRANSFORMERS if of_hf else ())]
