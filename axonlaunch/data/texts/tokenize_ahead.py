"""Separate process that tokenizes a corpus, shard by shard, while a run trains on the first shards.

It reads its task from standard input, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading

from axonlaunch.data.selection.file_selection import FileSelection
from axonlaunch.data.shards.encoding import Tokenizing
from axonlaunch.data.texts.learned_tokenizer import load_or_learn
from axonlaunch.data.texts.text_rows import corpus

_NICE = 10
"""Training has priority if there are fewer cores than processes."""


def main() -> None:
    """Tokenize all shards; errors are reported by the process that needs the shard."""
    config, tokenizer = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(_NICE)
    with contextlib.suppress(ValueError, OSError):
        loaded = load_or_learn(tokenizer, config, report=_say_nothing)
        for _ in corpus(config, FileSelection.of_training(config).sources(), loaded, _say_nothing):
            pass  # a shard is complete when it is yielded


def _say_nothing(state: Tokenizing) -> None:
    del state


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # until the other end is closed
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
