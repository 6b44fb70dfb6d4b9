"""The ``axonlaunch`` command, with whatever it forks forked from a server that was there before.

Importing torch is most of a short command's time. Tests of what a command does share one server a
worker; tests of how it starts, prints and ends run it as a user does.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from typing import Any

from axonlaunch.launch import forkserver as ours

SERVER: Any = forkserver._forkserver
VARIABLE = "AXONLAUNCH_TESTS_SERVER"
# Where the server listens and, from Python 3.14, the key that it asks for.
NEEDED = ("_forkserver_address", "_forkserver_authkey")


@contextmanager
def serve() -> Iterator[dict[str, str]]:
    """Keep a server; yield the environment in which this file, as a script, is the command."""
    with ours.warm():
        found = {name: getattr(SERVER, name) for name in NEEDED if hasattr(SERVER, name)}
        yield {VARIABLE: pickle.dumps(found).hex()}


@contextmanager
def _shared() -> Iterator[ForkServerContext]:
    """Stand in for ``warm``: use the server of the environment, and leave it running."""
    vars(SERVER).update(pickle.loads(bytes.fromhex(os.environ[VARIABLE])))
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # others keep it alive
    SERVER.ensure_running = lambda: None
    yield get_context("forkserver")


if __name__ == "__main__":
    from axonlaunch.cli import main

    ours.warm = _shared
    sys.argv[0] = "axonlaunch"
    main()
