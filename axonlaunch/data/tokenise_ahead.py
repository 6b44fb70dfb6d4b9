"""The process that tokenises a corpus shard after shard while a run trains on the first of them.

It reads what is to be done from its standard input, and ends with the process that wrote it there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading

from axonlaunch.data.encoding import Tokenising
from axonlaunch.data.learned_tokenizer import load_or_learn
from axonlaunch.data.sources import find_sources
from axonlaunch.data.text_rows import corpus

_NICE = 10
"""Training goes first where there is not a core for each."""


def main() -> None:
    """Tokenise all shards; whoever needs one that can't be reports why."""
    config, tokenizer = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(_NICE)
    with contextlib.suppress(ValueError, OSError):
        made_by = load_or_learn(tokenizer, config, report=_say_nothing)
        for _ in corpus(config, find_sources(config.files), made_by, _say_nothing):
            pass  # each is complete when it is given


def _say_nothing(state: Tokenising) -> None:
    del state


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # until the other end is closed
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
