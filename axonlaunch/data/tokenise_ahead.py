"""The process that tokenises a corpus shard after shard while a run trains on the first of them.

It reads what is to be done from its standard input, and ends with the process that wrote it there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading

from axonlaunch.config.documents import TextRowsConfig
from axonlaunch.data import token_cache
from axonlaunch.data.encoders import make_encoder
from axonlaunch.data.encoding import Encoder
from axonlaunch.data.learned_tokenizer import load_or_learn
from axonlaunch.data.sources import find_sources

_NICE = 10
"""Training goes first where there is not a core for each."""


def main() -> None:
    """Tokenise all shards; whoever needs one that can't be reports why."""
    config, shards, tokenizer = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(_NICE)
    with contextlib.suppress(ValueError, OSError):
        encoder = make_encoder(config, load_or_learn(tokenizer, config, report=lambda state: None))
        for files in shards:
            _tokenise(files, config, encoder)


def _tokenise(files: list[str], config: TextRowsConfig, encoder: Encoder) -> None:
    for _ in token_cache.shards(
        find_sources(files),
        encoder,
        folder=token_cache.folder_of(config.cache_dir),
        skip_bad=config.on_bad_row == "skip",
        report=lambda state: None,
    ):
        pass


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # until the other end is closed
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
