"""Rows of files that are tokenised while a run trains on those before them.

The order is such that the first sample needs the first shard alone: the shards of a pass one after
another, in the first pass as the files lie, the rows of each shuffled among themselves. It follows
from the seed and the global sample index, as any order does.
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

import numpy as np
import numpy.typing as npt

from axonlaunch.config.documents import TextRowsConfig
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.tokenizer import TokenizerConfig
from axonlaunch.data import token_cache
from axonlaunch.data.dataset import Batch, DatasetInfo, FileSums, Kind, Split
from axonlaunch.data.document_parts import DocumentPart, TextSummary
from axonlaunch.data.encoding import OnProgress
from axonlaunch.data.shuffle import Indices, permute
from axonlaunch.data.sources import find_sources
from axonlaunch.data.text_rows import TextRows, corpus, explain_failures, refuse_overlap
from axonlaunch.data.token_cache import Shard
from axonlaunch.data.tokenizer import Tokenizer
from axonlaunch.system.files import read_text, replace_text
from axonlaunch.system.formatting import size

_SHARDS_KEY, _ROWS_KEY = 3, 4
"""Distinguish the order of shards, and of the rows in them, from other orders."""
_LARGEST_NOTE = 1 << 10
_OPEN = 4
"""Shards whose rows are at hand; others are mapped again when they are needed."""


class ShardedRows:
    """Rows of shards, of which each is tokenised when it is needed, if nobody has done it before.

    Attributes:
        tokenizer: What makes the tokens.
        folder: Where the tokens are kept.
        num_bytes: Bytes of all files.
    """

    kind: Kind = "tokens"
    is_text = True
    num_samples = 0

    def __init__(self, config: TextRowsConfig, tokenizer: Tokenizer, *, report: OnProgress) -> None:
        """Tokenise the first shard, and what is held out; verify each shard when it is opened.

        Raises:
            ConfigError: A file of these can't be read, a row is none, or nothing is left to train
                on.
        """
        self._config, self._report = config, report
        self.tokenizer = tokenizer
        self.num_classes = tokenizer.vocab_size
        self.sample_shape = (config.sequence_length,)
        self.folder = token_cache.folder_of(config.cache_dir)
        sources = find_sources(config.files)
        refuse_overlap(config, sources)
        self._corpus = corpus(config, sources, tokenizer, report)
        # It is at hand for good: what is held out is of it, which another thread evaluates.
        self._first = self._rows_of_shard(0, held_out=config.held_out)
        if not self._first.num_samples:
            message = "the first shard has no row to train on; data.shuffle=all takes all files"
            raise ConfigError([ConfigIssue("data.files", message, config.files)])
        self._first_rows = [0, self._first.num_samples]
        self._open: OrderedDict[int, TextRows] = OrderedDict()
        self.num_eval_samples = self._first.num_eval_samples
        self.num_bytes = sum(source.size for source in sources)
        total = size(self.num_bytes)
        later = f"data.shuffle=shards: {total} in {len(sources)} file{'s' * (len(sources) > 1)}; "
        later += "below is the first shard, the others are tokenised while it trains"
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
            tokenising_ahead=self.tokenising_ahead,
        )

    def order(self, positions: Indices, *, seed: int) -> Indices:
        """Return which row stands at each global sample index.

        Of shards with 3, 2 and 4 rows the indices 0 to 2 are the rows of the first one, 3 and 4
        those of the second, 9 to 17 those of the second pass, whose shards are shuffled.
        """
        return np.array([self._row_at(int(position), seed) for position in positions])

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the rows of these indices, in their order."""
        if split == "eval" or not len(indices):
            return self._first.samples(indices, split=split)
        import torch

        places = [self._place(int(index)) for index in indices]
        batches = [self._rows(shard).samples([row], split=split) for shard, row in places]
        positions = [part.positions for part in batches if part.positions is not None]
        return Batch(
            torch.cat([part.inputs for part in batches]),
            torch.cat([part.targets for part in batches]),
            torch.cat(positions) if positions else None,
        )

    def sources(self, row: int) -> Iterator[tuple[str, DocumentPart]]:
        """Yield the file and the row that each piece of a row to train on is of, and the piece."""
        shard, own = self._place(row)
        yield from self._rows(shard).sources(own)

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return (name, checksum of tokens) of the files of the first shards, and their number.

        Args:
            shards: How many; tokenised if they are not yet. None: those that are known by now.

        Returns:
            The checksums, and how many shards they cover; None: all.
        """
        known = self._corpus.num_known if shards is None else shards
        first: list[Shard] = []
        with explain_failures(self._config):
            while len(first) < known and (shard := self._corpus.shard(len(first))) is not None:
                first.append(shard)
        is_all = self._corpus.is_known and len(first) == self._corpus.num_known
        return FileSums(token_cache.sums_by_file(first), None if is_all else len(first))

    def summaries(self) -> dict[str, TextSummary]:
        """Count what there is of all shards, which are tokenised for it."""
        with explain_failures(self._config):
            shards = range(len([*self._corpus]))
        summaries = [self._rows(shard).summaries()[""] for shard in shards]
        return {"": TextSummary.together(summaries)}

    def shard_rows(self) -> list[tuple[int, int]]:
        """Return the rows that orders count in each shard, and those that its documents fill.

        All shards are tokenised for it.
        """
        while self._know(self._first_rows[-1]):
            pass
        counted = np.diff(self._first_rows).tolist()
        return [(count, self._rows(shard).num_samples) for shard, count in enumerate(counted)]

    def encode(self, text: str) -> list[int]:
        """Turn text that is to be continued into tokens."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text."""
        return self.tokenizer.decode(tokens)

    @contextmanager
    def tokenising_ahead(self, tokenizer: TokenizerConfig) -> Iterator[subprocess.Popen[bytes]]:
        """Let a process of its own tokenise what is left, in turn; it ends with this one.

        Whatever it fails with, who needs that shard fails with too.
        """
        command = [sys.executable, "-P", "-m", "axonlaunch.data.tokenise_ahead"]
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

    def _rows_of_shard(self, number: int, *, held_out: int | float | list[str]) -> TextRows:
        """Return the rows of a shard, tokenised if it is not yet, and again if it has changed.

        Raises:
            ConfigError: It can't be.
        """
        with explain_failures(self._config):
            if self._corpus.shard(number) is not None:
                self._corpus.verify([number])
            shard = self._corpus.shard(number)
        assert shard is not None
        config = replace(self._config, held_out=held_out)
        return TextRows(config, self.tokenizer, report=self._report, shards=[shard])

    def _know(self, row: int) -> bool:
        """Count shards until one has a row; return whether there is such a row in a pass."""
        while self._first_rows[-1] <= row:
            number = len(self._first_rows) - 1
            with explain_failures(self._config):
                shard = self._corpus.shard(number)
            if shard is None:
                return False
            self._first_rows.append(self._first_rows[-1] + self._count(number, shard))
        return True

    def _count(self, number: int, shard: Shard) -> int:
        """Return how many rows a shard has, from the note beside its tokens if there is one.

        So a run that resumes opens the shard it has come to, and none of those before it.
        """
        config = self._config
        filling = [config.sequence_length, config.packing, config.too_long]
        digest = hashlib.sha256(json.dumps(filling).encode()).hexdigest()[:16]
        note = shard.folder / f"rows-{digest}.json"
        try:
            content = json.loads(read_text(note, at_most=_LARGEST_NOTE))
            if content["crc32"] == _sum_of_note(digest, content["rows"]):
                return int(content["rows"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        rows = self._rows(number).num_samples
        with contextlib.suppress(OSError):  # a cache may be one that can only be read
            text = json.dumps({"rows": rows, "crc32": _sum_of_note(digest, rows)})
            replace_text(note, text)
        return rows

    def _place(self, row: int) -> tuple[int, int]:
        """Return the shard of a row, and its place there."""
        self._know(row)
        shard = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return shard, row - self._first_rows[shard]

    def _row_at(self, position: int, seed: int) -> int:
        if self._know(position):
            shard, place = self._place(position)
            return self._shuffled_place(shard, place, 0, seed)
        epoch, place = divmod(position, self._first_rows[-1])
        sizes = np.diff(self._first_rows)
        shards = permute(np.arange(len(sizes)), size=len(sizes), key=(seed, _SHARDS_KEY, epoch))
        ends = np.cumsum(sizes[shards])
        number = int(np.searchsorted(ends, place, side="right"))
        shard = int(shards[number])
        return self._shuffled_place(shard, place - int(ends[number] - sizes[shard]), epoch, seed)

    def _shuffled_place(self, shard: int, place: int, epoch: int, seed: int) -> int:
        first, end = self._first_rows[shard : shard + 2]
        key = (seed, _ROWS_KEY, epoch, shard)
        return first + int(permute(np.array([place]), size=end - first, key=key)[0])


def _sum_of_note(digest: str, rows: object) -> int:
    """Return the CRC-32 of a note beside a shard: how many rows it has in one packing."""
    return zlib.crc32(f"{digest} {rows}".encode())
