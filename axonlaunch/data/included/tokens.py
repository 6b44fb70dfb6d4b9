"""Dataset of token ids in a flat binary file, memory-mapped.

It uses no tokenizer, and checks the size of the file, not its content.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.data import TokensConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.datasets.dataset import DatasetInfo, FileSums
from axonlaunch.data.included.windows import TokenWindows
from axonlaunch.data.shards.file_sum import sum_of_file
from axonlaunch.system.storage.home import expand_home

_SCANNED_PER_STEP = 2**22


class TokenFile(TokenWindows):
    """Windows of a token file; its last tokens, or a separate file, are held out."""

    def __init__(self, config: TokensConfig) -> None:
        """Map the files.

        Raises:
            ConfigError: A file is missing, has an invalid size, or is too short for a sample.
        """
        tokens = _map_file("data.path", config.path, config.dtype)
        self._path = config.path
        if config.eval_path is not None:
            train, held_out = tokens, _map_file("data.eval_path", config.eval_path, config.dtype)
        else:
            split = len(tokens) - round(len(tokens) * config.eval_fraction)
            train, held_out = tokens[:split], tokens[split:]
        vocab_size = config.vocab_size or 1 + max(_largest(train), _largest(held_out))
        super().__init__(
            train, held_out, sequence_length=config.sequence_length, num_classes=vocab_size
        )

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        return DatasetInfo(file_sums=self.file_sums)

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return (name, checksum) of the training file."""
        del shards  # no shards
        return FileSums([(self._path, sum_of_file(expand_home(self._path)))])


def _map_file(key: str, path: str, dtype: str) -> npt.NDArray[Any]:
    file = expand_home(path)
    if not file.is_file():
        reason = "is a folder; give a file" if file.is_dir() else "no such file"
        message = f"{reason}, seen from {Path.cwd()}"
        raise ConfigError([ConfigIssue(key, message, path)])
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        message = (
            f"its {size} bytes are not a whole number of {dtype} tokens of {width} bytes; "
            "check the file, or set data.dtype to the type it was written in"
        )
        raise ConfigError([ConfigIssue(key, message, path)])
    return np.memmap(file, dtype=dtype, mode="r")


def _largest(tokens: npt.NDArray[Any]) -> int:
    pieces = range(0, len(tokens), _SCANNED_PER_STEP)
    return max((int(tokens[i : i + _SCANNED_PER_STEP].max()) for i in pieces), default=0)
