"""Text as bytes, and the dataset of a user's text files.

Files are joined in order. A file that is not text, and a pattern without files, are errors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from glob import glob
from pathlib import Path

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.data import NUM_BYTES, TextConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.datasets.dataset import DatasetInfo, FileSums
from axonlaunch.data.files import text_files
from axonlaunch.data.included.windows import TokenWindows
from axonlaunch.data.tokenizers.tokenizer import ByteTokenizer
from axonlaunch.system.node import host
from axonlaunch.system.storage.home import expand_home
from axonlaunch.system.text.formatting import size

_BYTES = ByteTokenizer()


class ByteWindows(TokenWindows):
    """Windows of text with one token per byte."""

    is_text = True

    def __init__(
        self,
        train: npt.NDArray[np.uint8],
        held_out: npt.NDArray[np.uint8],
        *,
        sequence_length: int,
    ) -> None:
        super().__init__(train, held_out, sequence_length=sequence_length, num_classes=NUM_BYTES)

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        return DatasetInfo(unigram_entropy=lambda: self._unigram_entropy, file_sums=self.file_sums)

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return (name, checksum) of the training files."""
        raise NotImplementedError

    @cached_property
    def _unigram_entropy(self) -> float:
        """Loss of a model that only knows the frequency of each byte, in nats per byte.

        It is the cross entropy of the held-out bytes under the frequencies of the training bytes,
        with one added to each count. A trained model must have a lower loss.
        """
        train = _histogram(self._rows["train"]) + 1
        held_out = _histogram(self._rows["eval"])
        return float(-(held_out / held_out.sum() * np.log(train / train.sum())).sum())

    def encode(self, text: str) -> list[int]:
        """Convert text to bytes, UTF-8."""
        return _BYTES.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert bytes to text, with the replacement character for invalid UTF-8."""
        return _BYTES.decode(tokens)


class Text(ByteWindows):
    """Windows of the files' bytes; the last bytes are held out."""

    def __init__(self, config: TextConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: A pattern matches no file, a file can't be read or is not text, or there is
                too little text.
        """
        files = _files(config.files)
        _refuse([(path, text_files.refused_name(path)) for path in files], config.files)
        first = _read(files, config.files, at_most=text_files.CHECKED_BYTES)
        checked = zip(files, map(text_files.refused_content, first), strict=True)
        _refuse(checked, config.files)
        needed = 2 * sum(path.stat().st_size for path in files)  # joining them makes a copy
        if needed > (available := host.free_memory_bytes()):
            message = (
                f"these files take {size(needed)} of memory, and {size(available)} is available; "
                "data=documents maps rows of .jsonl or .parquet files, and data=tokens a token file"
            )
            raise ConfigError([ConfigIssue("data.files", message, config.files)])
        contents = _read(files, config.files)
        content = np.frombuffer(b"\n".join(contents), dtype=np.uint8)
        self._content = content
        parts = zip(files, contents, strict=True)
        self._files = [(str(path), len(part)) for path, part in parts]
        held_out = round(len(content) * config.eval_fraction)
        train = len(content) - held_out
        super().__init__(content[:train], content[train:], sequence_length=config.sequence_length)

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return (name, checksum) of the files."""
        del shards  # no shards
        sums, start = [], 0
        for name, length in self._files:
            crc32 = zlib.crc32(self._content[start : start + length].data)
            sums.append((name, f"{length}-{crc32:08x}"))
            start += length + 1  # a newline is between two files
        return FileSums(sums)


def _read(files: Sequence[Path], patterns: list[str], *, at_most: int = -1) -> list[bytes]:
    """Read the beginnings of files, or all of each file.

    Raises:
        ConfigError: A file can't be read.
    """
    contents = []
    for path in files:
        try:
            with path.open("rb") as stream:
                contents.append(stream.read(at_most))
        except (OSError, MemoryError) as reason:
            why = getattr(reason, "strerror", None) or "not enough memory"
            message = f"{path} can't be read: {why}"
            raise ConfigError([ConfigIssue("data.files", message, patterns)]) from reason
    return contents


def _refuse(checked: Iterable[tuple[Path, str | None]], patterns: list[str]) -> None:
    """Raise an error for files that are not text.

    Raises:
        ConfigError: Always; the message names the files, the reason and the correction.
    """
    refused = [(path, reason) for path, reason in checked if reason is not None]
    if refused:
        raise ConfigError(text_files.text_file_issues(refused, patterns=patterns))


def _files(patterns: list[str]) -> list[Path]:
    """Expand paths and globs; each file once, ordered by pattern, then by name."""
    matched: dict[Path, None] = {}
    problems = []
    for pattern in patterns:
        path = expand_home(pattern)
        # An existing path is used literally, even with a bracket in its name.
        names = [str(path)] if path.is_file() else sorted(glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        files = [name for name in map(Path, names) if name.is_file()]
        if not files:
            message = (
                f"it is a folder; write {pattern.rstrip('/')}/**/*.txt for the files in it"
                if path.is_dir()
                else f"no file matches, seen from {Path.cwd()}"
            )
            problems.append(ConfigIssue("data.files", message, pattern))
        matched.update(dict.fromkeys(files))
    if problems:
        raise ConfigError(problems)
    return list(matched)


def _histogram(row: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    counts = np.zeros(NUM_BYTES, dtype=np.int64)
    for start in range(0, len(row), 2**20):  # bincount makes an int64 copy: keep it small
        counts += np.bincount(row[start : start + 2**20], minlength=NUM_BYTES)
    return counts
