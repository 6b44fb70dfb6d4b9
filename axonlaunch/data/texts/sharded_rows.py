"""Rows of files that are tokenized while a run trains on earlier ones.

The first sample needs only the first shard: the shards of a pass follow one another, in the order
of the files in the first pass, and rows are shuffled within each shard. As for any dataset, the
order follows from the seed and the global sample index.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import subprocess
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.documents import TextRowsConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.datasets.dataset import Batch, DatasetInfo, FileSums, Kind, Split
from axonlaunch.data.datasets.document_parts import DocumentPart, TextSummary
from axonlaunch.data.datasets.shuffle import Indices, permute
from axonlaunch.data.selection.file_selection import FileSelection
from axonlaunch.data.shards import token_cache
from axonlaunch.data.shards.encoding import OnProgress
from axonlaunch.data.shards.token_cache import Shard
from axonlaunch.data.texts.text_rows import TextRows, corpus, explain_failures, refuse_overlap
from axonlaunch.data.tokenizers.tokenizer import Tokenizer
from axonlaunch.system.storage.files import read_text, replace_text
from axonlaunch.system.text.formatting import size

_SHARDS_KEY, _ROWS_KEY = 3, 4
"""Distinguish the orders of shards, and of the rows in them, from other orders."""
_FILLING = 2
"""Changed whenever rows are filled differently; the noted numbers of rows are then invalid."""
_LARGEST_NOTE = 1 << 10
_OPEN = 4
"""Number of shards with rows kept in memory; other shards are mapped again when needed."""


class ShardedRows:
    """Rows of shards. A shard that is not yet cached is tokenized when it is needed.

    Attributes:
        tokenizer: Tokenizer of the text.
        folder: Folder of the cached tokens.
        num_bytes: Bytes of all files.
    """

    kind: Kind = "tokens"
    is_text = True
    num_samples = 0

    def __init__(self, config: TextRowsConfig, tokenizer: Tokenizer, *, report: OnProgress) -> None:
        """Tokenize the first shard and held-out files; verify each shard when it is opened.

        Raises:
            ConfigError: One of these files can't be read, a row is invalid, or there are no
                training rows.
        """
        self._config, self._report = config, report
        self.tokenizer = tokenizer
        self.num_classes = tokenizer.vocab_size
        self.sample_shape = (config.sequence_length,)
        self.folder = token_cache.folder_of(config.cache_dir)
        sources = FileSelection.of_training(config).sources()
        refuse_overlap(config, sources)
        self._corpus = corpus(config, sources, tokenizer, report)
        # It stays open: another thread evaluates its held-out samples.
        self._first = self._rows_of_shard(
            0, held_out=config.held_out, validation_split=config.validation_split
        )
        if not self._first.num_samples:
            message = (
                "the first shard has no training rows; data.shuffle=all uses all files at once"
            )
            raise ConfigError([ConfigIssue("data.files", message, config.files)])
        self._first_rows = [0, self._first.num_samples]
        self._open: OrderedDict[int, TextRows] = OrderedDict()
        self.num_eval_samples = self._first.num_eval_samples
        self.num_bytes = sum(source.size for source in sources)
        total = size(self.num_bytes)
        later = f"data.shuffle=shards: {total} in {len(sources)} file{'s' * (len(sources) > 1)}; "
        later += (
            "the figures below are for the first shard, the others are tokenized during training"
        )
        self._notes = (later, *self._first.info.notes)

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        return DatasetInfo(
            notes=self._notes,
            is_packed=self._config.packing != "none",
            is_unsized=True,
            order=self.order,
            file_sums=self.file_sums,
            tokenizer=self.tokenizer,
            tokenizing_ahead=self.tokenizing_ahead,
        )

    def order(self, positions: Indices, *, seed: int) -> Indices:
        """Return the row for each global sample index.

        For shards with 3, 2 and 4 rows, indices 0 to 2 are the rows of the first shard, 3 and 4
        those of the second, and 9 to 17 those of the second pass, in which the shards are shuffled.
        """
        return np.array([self._row_at(int(position), seed) for position in positions])

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the rows with these indices, in this order."""
        if split == "eval" or not len(indices):
            return self._first.samples(indices, split=split)
        locations = [self._locate(int(index)) for index in indices]
        batches = [self._rows(shard).samples([row], split=split) for shard, row in locations]
        return Batch.join(batches)

    def sources(self, row: int) -> Iterator[tuple[str, DocumentPart]]:
        """Yield (file and row; document part) for each document in a packed training row."""
        shard, shard_row = self._locate(row)
        yield from self._rows(shard).sources(shard_row)

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return (name, checksum of tokens) of the files of the first shards.

        Args:
            shards: Number of shards, which are tokenized if necessary; None: those tokenized so
                far.
        """
        num_shards = self._corpus.num_known if shards is None else shards
        first: list[Shard] = []
        with explain_failures(self._config):
            while len(first) < num_shards and (shard := self._corpus.shard(len(first))) is not None:
                first.append(shard)
        is_all = self._corpus.is_known and len(first) == self._corpus.num_known
        return FileSums(token_cache.sums_by_file(first), None if is_all else len(first))

    def summaries(self) -> dict[str, TextSummary]:
        """Count documents and tokens of all shards, tokenizing the remaining ones."""
        with explain_failures(self._config):
            shards = range(len([*self._corpus]))
        summaries = [self._rows(shard).summaries()[""] for shard in shards]
        return {"": TextSummary.together(summaries)}

    def shard_rows(self) -> list[tuple[int, int]]:
        """Return (number of rows in the order, number of rows that documents fill) for each shard.

        Tokenizes all shards.
        """
        while self._count_up_to(self._first_rows[-1]):
            pass
        counted = np.diff(self._first_rows).tolist()
        return [(count, self._rows(shard).num_samples) for shard, count in enumerate(counted)]

    def encode(self, text: str) -> list[int]:
        """Convert a prompt to tokens."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text."""
        return self.tokenizer.decode(tokens)

    @contextmanager
    def tokenizing_ahead(self, tokenizer: TokenizerConfig) -> Iterator[subprocess.Popen[bytes]]:
        """Run a separate process that tokenizes the remaining shards in order; end it on exit.

        If it fails, the process that needs the shard fails too and reports the reason.
        """
        command = [sys.executable, "-P", "-m", "axonlaunch.data.texts.tokenize_ahead"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            try:
                process.stdin.write(pickle.dumps((self._config, tokenizer)))
                process.stdin.flush()
                yield process
            finally:
                process.kill()

    def _rows(self, shard: int) -> TextRows:
        """Return the rows of a shard."""
        if shard == 0:
            return self._first
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        rows = self._open[shard] = self._rows_of_shard(shard, held_out=0)
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return rows

    def _rows_of_shard(
        self, number: int, *, held_out: Any, validation_split: str | None = None
    ) -> TextRows:
        """Return the rows of a shard, tokenized if it is missing or has changed.

        Raises:
            ConfigError: The shard can't be tokenized.
        """
        with explain_failures(self._config):
            if self._corpus.shard(number) is not None:
                self._corpus.verify([number])
            shard = self._corpus.shard(number)
        assert shard is not None
        config = replace(self._config, held_out=held_out, validation_split=validation_split)
        return TextRows(config, self.tokenizer, report=self._report, shards=[shard])

    def _count_up_to(self, row: int) -> bool:
        """Count the rows of shards up to one with this row; return whether a pass has it."""
        while self._first_rows[-1] <= row:
            number = len(self._first_rows) - 1
            with explain_failures(self._config):
                shard = self._corpus.shard(number)
            if shard is None:
                return False
            self._first_rows.append(self._first_rows[-1] + self._count(number, shard))
        return True

    def _count(self, number: int, shard: Shard) -> int:
        """Return the number of rows in a shard, from a file next to its tokens if it exists.

        A resumed run therefore opens the shard at its position, and no earlier shards.
        """
        config = self._config
        filling = [_FILLING, config.sequence_length, config.packing, config.too_long]
        filling += [config.min_tokens] if config.min_tokens > 1 else []
        digest = hashlib.sha256(json.dumps(filling).encode()).hexdigest()[:16]
        note = shard.folder / f"rows-{digest}.json"
        try:
            content = json.loads(read_text(note, at_most=_LARGEST_NOTE))
            if content["crc32"] == _sum_of_note(digest, content["rows"]):
                return int(content["rows"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        rows = self._rows(number).num_samples
        with contextlib.suppress(OSError):  # the cache may be read-only
            text = json.dumps({"rows": rows, "crc32": _sum_of_note(digest, rows)})
            replace_text(note, text)
        return rows

    def _locate(self, row: int) -> tuple[int, int]:
        """Return (shard, row within the shard)."""
        self._count_up_to(row)
        shard = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return shard, row - self._first_rows[shard]

    def _row_at(self, position: int, seed: int) -> int:
        if self._count_up_to(position):
            return self._shuffled_row(*self._locate(position), 0, seed)
        epoch, in_epoch = divmod(position, self._first_rows[-1])
        sizes = np.diff(self._first_rows)
        shards = permute(np.arange(len(sizes)), size=len(sizes), key=(seed, _SHARDS_KEY, epoch))
        ends = np.cumsum(sizes[shards])
        number = int(np.searchsorted(ends, in_epoch, side="right"))
        shard = int(shards[number])
        return self._shuffled_row(shard, in_epoch - int(ends[number] - sizes[shard]), epoch, seed)

    def _shuffled_row(self, shard: int, index: int, epoch: int, seed: int) -> int:
        first, end = self._first_rows[shard : shard + 2]
        key = (seed, _ROWS_KEY, epoch, shard)
        return first + int(permute(np.array([index]), size=end - first, key=key)[0])


def _sum_of_note(digest: str, rows: object) -> int:
    """Return the CRC-32 of a file with the number of rows of a shard in one packing."""
    return zlib.crc32(f"{digest} {rows}".encode())
