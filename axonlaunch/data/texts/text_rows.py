"""Datasets of documents in files, packed into rows of tokens as ``data.datasets.packing`` says.

Documents are tokenized once, into shards that are then memory-mapped. The held-out documents and
the content of each row follow only from the files and the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.documents import ChatConfig, HeldOutConfig, TextRowsConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.datasets import packing
from axonlaunch.data.datasets.dataset import IGNORE_INDEX, Batch, DatasetInfo, FileSums, Kind, Split
from axonlaunch.data.datasets.document_parts import DocumentPart, TextSummary
from axonlaunch.data.datasets.shuffle import Indices, permute
from axonlaunch.data.files.rows import UnreadableFileError
from axonlaunch.data.files.sources import SourceFile
from axonlaunch.data.selection.file_selection import FileSelection
from axonlaunch.data.shards import token_cache
from axonlaunch.data.shards.encoding import OnProgress
from axonlaunch.data.shards.shard_maker import BadRowsError, EncodingError
from axonlaunch.data.shards.token_cache import Corpus, Shard
from axonlaunch.data.texts.encoders import make_encoder
from axonlaunch.data.tokenizers.tokenizer import Tokenizer

_HELD_OUT_KEY = (1,)
"""Fixed, because the held-out documents must not depend on a run's seed."""


@dataclass(frozen=True)
class _InOrder:
    """The order of the files, in every epoch."""

    num_rows: int

    def __call__(self, positions: Indices, *, seed: int) -> Indices:  # noqa: ARG002
        return positions % self.num_rows


class TextRows:
    """Rows of tokens from documents. Each token of a document except the first is a target once.

    Attributes:
        tokenizer: Tokenizer of the text.
        folder: Folder of the cached tokens.
    """

    kind: Kind = "tokens"
    is_text = True

    def __init__(
        self,
        config: TextRowsConfig,
        tokenizer: Tokenizer,
        *,
        report: OnProgress,
        shards: Sequence[Shard] | None = None,
        verifies: bool = False,
    ) -> None:
        """Tokenize files that are not cached, and pack rows.

        Args:
            config: The group ``data``.
            tokenizer: Tokenizer of the text.
            report: Called from time to time while text is tokenized.
            shards: Shards of ``data.files`` to use, which may have no rows; None: all.
            verifies: Whether to compare all tokens with their checksums now; otherwise they are
                compared when they are mapped.

        Raises:
            ConfigError: A file can't be read, a row is invalid, or there are no training rows.
        """
        self.tokenizer = tokenizer
        self.num_classes = tokenizer.vocab_size
        self.sample_shape = (config.sequence_length,)
        self._is_packed = config.packing != "none"
        self._config = config
        self.folder = token_cache.folder_of(config.cache_dir)
        eval_sources = FileSelection.of_held_out(config).sources()
        is_all = shards is None
        if shards is None:
            sources = FileSelection.of_training(config).sources()
            refuse_overlap(config, sources)
            with explain_failures(config):
                shards = [*_shards(config, sources, tokenizer, report, verifies=verifies)]
        with explain_failures(config, key=held_out_key(config)[0]):
            held_out_shards = _shards(config, eval_sources, tokenizer, report, verifies=verifies)
            self._shards: list[Shard] = [*shards, *held_out_shards]
        self._train_shards = len(shards)
        self._first_token = np.cumsum([0, *(shard.progress.tokens for shard in self._shards)])
        self._first_document = np.cumsum([0, *(shard.num_documents for shard in self._shards)])
        lengths = np.concatenate([shard.lengths() for shard in self._shards]).astype(np.int64)
        self._starts = np.cumsum(lengths) - lengths
        self._places = lengths - 1
        documents = np.arange(len(lengths))
        if eval_sources:
            is_held_out = documents >= self._first_document[self._train_shards]
        else:
            is_held_out = np.zeros(len(lengths), dtype=bool)
            is_held_out[_choose_held_out(config, len(lengths))] = True
        self._num_held_out = int(is_held_out.sum())
        self._too_long = self._too_short = self._uncounted = 0
        self._tables = {
            "train": self._table(documents[~is_held_out]),
            "eval": self._table(documents[is_held_out]),
        }
        if is_all and not len(self._tables["train"]):
            parts = ["there are no training documents", *self._left_out()]
            if self._too_long:
                longer = f"a data.sequence_length above {config.sequence_length}"
                parts.append(f"use {longer}; the longest has {lengths.max():,} tokens")
            message = "; ".join(parts)
            raise ConfigError([ConfigIssue("data.files", message, config.files)])
        self._notes = self._describe()

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        return DatasetInfo(
            notes=self._notes,
            is_packed=self._is_packed,
            order=_InOrder(self.num_samples) if self._config.shuffle == "none" else None,
            file_sums=self.file_sums,
            tokenizer=self.tokenizer,
        )

    @property
    def num_samples(self) -> int:
        """Number of training rows."""
        return len(self._tables["train"])

    @property
    def num_eval_samples(self) -> int:
        """Number of held-out rows."""
        return len(self._tables["eval"])

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the rows with these indices, in this order."""
        shape = (len(indices), *self.sample_shape)
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        # The rest of a row forms a separate document without targets.
        positions = np.zeros(shape, dtype=np.int64)
        present = np.zeros(shape, dtype=np.bool_)
        for row, index in enumerate(indices):
            start = 0
            for piece in self.pieces(int(index), split=split):
                tokens, length = piece.tokens, len(piece.tokens) - 1
                end = start + length
                inputs[row, start:end] = tokens[:-1]
                targets[row, start:end] = np.where(piece.counted[1:], tokens[1:], IGNORE_INDEX)
                positions[row, start:end] = np.arange(length)
                start = end
            present[row, :start] = True
            positions[row, start:] = np.arange(shape[1] - start)
        return Batch.from_numpy(inputs, targets, positions if self._is_packed else None, present)

    def pieces(self, row: int, *, split: Split) -> Iterator[DocumentPart]:
        """Yield the documents, or parts of them, in a row."""
        for start, places in zip(*self._tables[split].pieces(row), strict=True):
            yield DocumentPart(int(start), *self._tokens(int(start), int(places) + 1))

    def sources(self, row: int) -> Iterator[tuple[str, DocumentPart]]:
        """Yield (file and row; document part) for each document in a packed training row."""
        for piece in self.pieces(row, split="train"):
            document = int(np.searchsorted(self._starts, piece.start, side="right")) - 1
            end = int(self._starts[document] + self._places[document]) + 1
            yield self._source(document), replace(piece, left=end - piece.start)

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return (name, checksum of tokens) of all training files, in order."""
        del shards  # all are tokenized
        return FileSums(token_cache.sums_by_file(self._shards[: self._train_shards]))

    def summaries(self) -> dict[str, TextSummary]:
        """Count documents and tokens."""
        summary = TextSummary(
            documents=len(self._places),
            tokens=sum(shard.progress.tokens for shard in self._shards),
            counted_tokens=sum(shard.progress.counted for shard in self._shards),
            longest_document=int(self._places.max(initial=0)) + 1,
            rows=self.num_samples,
            held_out_rows=self.num_eval_samples,
            row_tokens=self.sample_shape[0],
            filled=self._tables["train"].filled,
            too_long=self._too_long,
            skipped_rows=sum(shard.progress.bad for shard in self._shards),
            empty_rows=sum(shard.progress.empty for shard in self._shards),
        )
        return {"": summary}

    def encode(self, text: str) -> list[int]:
        """Convert a prompt to tokens."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text."""
        return self.tokenizer.decode(tokens)

    def _tokens(
        self, start: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return tokens of one document, and whether each counts as a target."""
        number = int(np.searchsorted(self._first_token, start, side="right")) - 1
        shard, first = self._shards[number], start - int(self._first_token[number])
        tokens = shard.tokens()[first : first + count].astype(np.int64)
        counted = shard.counted_tokens()
        if counted is None:
            return tokens, np.ones(count, dtype=bool)
        return tokens, counted[first : first + count] != 0

    def _counts(self, start: int, places: int) -> bool:
        """Return whether a truncated document still has a token that counts."""
        return bool(self._tokens(start, places + 1)[1][1:].any())

    def _table(self, documents: npt.NDArray[np.int64]) -> packing.RowTable:
        """Pack documents into rows.

        A whole document has at most as many tokens as a row has positions, although the last one,
        from which nothing is predicted, takes none: a model never sees more tokens than that.

        Raises:
            ConfigError: A document is too long, and ``data.too_long`` is ``error``.
        """
        (length,) = self.sample_shape
        is_short = self._places[documents] + 1 < self._config.min_tokens
        self._too_short += int(is_short.sum())
        documents = documents[~is_short]
        starts, places = self._starts[documents], self._places[documents]
        if self._config.packing != "concat":
            longest = length - 1
            is_long = places > longest
            self._too_long += int(is_long.sum())
            if is_long.any() and self._config.too_long == "error":
                raise ConfigError([self._length_issue(documents[is_long])])
            if self._config.too_long == "drop":
                starts, places = starts[~is_long], places[~is_long]
            elif is_long.any():
                places = np.minimum(places, longest)
                counts = ~is_long
                counts[is_long] = [
                    self._counts(*span)
                    for span in zip(starts[is_long], places[is_long], strict=True)
                ]
                self._uncounted += int((~counts).sum())
                starts, places = starts[counts], places[counts]
        return packing.PACKERS[self._config.packing](starts, places, length=length)

    def _length_issue(self, documents: npt.NDArray[np.int64]) -> ConfigIssue:
        first = int(documents[0])
        longest = int(self._places[documents].max()) + 1
        more = f" (and {len(documents) - 1} more)" if len(documents) > 1 else ""
        message = (
            f"{self._source(first)}: {int(self._places[first]) + 1} tokens{more}; a row takes "
            f"{self.sample_shape[0]}; use data.sequence_length={longest}, truncate or drop"
        )
        return ConfigIssue("data.too_long", message, "error")

    def _source(self, document: int) -> str:
        number = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return self._shards[number].location(document - int(self._first_document[number]))

    def _describe(self) -> tuple[str, ...]:
        """Return notes on the size of the data, the filling of rows, and omitted documents."""
        config = self._config
        unit = "chat" if isinstance(config, ChatConfig) else "document"
        held_out = f"{self._num_held_out:,} {unit}{'' if self._num_held_out == 1 else 's'}"
        tokens = sum(shard.progress.tokens for shard in self._shards)
        verb = "packed into" if self._is_packed else "in"
        return (
            f"data: {len(self._places):,} {unit}s, {tokens:,} tokens; {verb} "
            f"{self.num_samples:,} rows of {config.sequence_length:,} "
            f"({self._tables['train'].filled:.1%} full); {held_out} held out",
            *self._date(),
            *self._added_tokens(),
            *self._left_out(),
        )

    def _date(self) -> list[str]:
        """Return a note on the day that the chat template writes."""
        if not isinstance(self._config, ChatConfig) or self._config.template_date is None:
            return []
        day = self._config.template_date
        return [f"data.template_date={day}: the chat template writes it; a resumed run keeps it"]

    def _added_tokens(self) -> list[str]:
        """Return a note on tokens that the configuration adds to the tokenizer."""
        added = self.tokenizer.added
        if not added:
            return []
        return [f"tokenizer: tokens added: {len(added)}, so that it has {self.num_classes:,}"]

    def _left_out(self) -> list[str]:
        """Return notes on documents and rows that are left out."""
        notes, config = [], self._config
        if self._too_short:
            key = f"data.min_tokens={config.min_tokens}"
            notes.append(f"{key}: shorter documents left out: {self._too_short:,}")
        if self._too_long:
            done = {"truncate": "truncated", "drop": "left out"}[config.too_long]
            notes.append(f"data.too_long={config.too_long}: documents {done}: {self._too_long:,}")
        if self._uncounted:
            why = "because no token in the remaining part counts"
            notes.append(f"data: of these left out, {why}: {self._uncounted:,}")
        if empty := sum(shard.progress.empty for shard in self._shards):
            notes.append(f"data: rows left out, because they have no token to predict: {empty:,}")
        if bad := sum(shard.progress.bad for shard in self._shards):
            first = next(shard.progress.listed[0] for shard in self._shards if shard.progress.bad)
            notes.append(f"data.on_bad_row=skip: rows left out: {bad:,}, the first: {first}")
        return notes


def refuse_overlap(config: TextRowsConfig, sources: Sequence[SourceFile]) -> None:
    """Refuse held-out files that are also training files.

    Raises:
        ConfigError: A held-out file is also a training file.
    """
    for held_out in FileSelection.of_held_out(config).sources():
        if any(held_out.overlaps(source) for source in sources):
            key, value = held_out_key(config)
            what, use = f"{held_out.name} is", "remove it there"
            if held_out.last is not None:
                what, use = f"rows of {held_out.name} are", "remove them there, as in train[:90%]"
                if held_out.stamp:  # a file outside the Hub has no splits
                    use = "remove the file there, or hold out a part of it: data.held_out=0.05"
            message = f"{what} also in data.files and would be trained on; {use}"
            raise ConfigError([ConfigIssue(key, message, value)])


def held_out_key(config: TextRowsConfig) -> tuple[str, Any]:
    """Return the configuration key of held-out files, and its value."""
    if config.validation_split is not None:
        return "data.validation_split", config.validation_split
    key = "data.held_out.files" if isinstance(config.held_out, HeldOutConfig) else "data.held_out"
    return key, config.held_out_files.files


def corpus(
    config: TextRowsConfig, sources: Sequence[SourceFile], tokenizer: Tokenizer, report: OnProgress
) -> Corpus:
    """Return the shards of files, which are built when requested.

    Args:
        config: Configuration of the encoder and of the cache.
        sources: The files, in order.
        tokenizer: Tokenizer of the run; its fingerprint is part of the cache's key.
        report: Called from time to time while text is tokenized.

    Raises:
        ConfigError: The tokenizer can't encode such rows.
    """
    return Corpus(
        sources,
        make_encoder(config, tokenizer),
        folder=token_cache.folder_of(config.cache_dir),
        skip_bad=config.on_bad_row == "skip",
        report=report,
    )


def _shards(
    config: TextRowsConfig,
    sources: Sequence[SourceFile],
    tokenizer: Tokenizer,
    report: OnProgress,
    *,
    verifies: bool,
) -> Iterator[Shard]:
    """Return the shards of files, after tokenizing files that are not cached."""
    built = corpus(config, sources, tokenizer, report)
    count = len([*built])
    if verifies:
        built.verify(range(count))
    return iter(built)


@contextmanager
def explain_failures(config: TextRowsConfig, *, key: str = "data.files") -> Iterator[None]:
    """Convert errors while a shard is built to errors that name a key and what to write instead.

    Args:
        config: Configuration of the dataset.
        key: Configuration key of the files.

    Raises:
        ConfigError: A shard can't be built.
    """
    try:
        yield
    except BadRowsError as error:
        message = f"{error}; correct the row, or write data.on_bad_row=skip to leave such rows out"
        raise ConfigError([ConfigIssue(key, message)]) from None
    except EncodingError as error:
        raise ConfigError([ConfigIssue("tokenizer.path", str(error))]) from None
    except UnreadableFileError as error:
        raise ConfigError([ConfigIssue(key, str(error))]) from None
    except MemoryError:
        message = "not enough memory for their rows; split the largest file, or use more memory"
        raise ConfigError([ConfigIssue("data.files", message, config.files)]) from None
    except OSError as error:
        folder = error.filename or token_cache.folder_of(config.cache_dir)
        message = f"{folder} can't be used: {error.strerror or error}; choose another folder"
        raise ConfigError([ConfigIssue("data.cache_dir", message, config.cache_dir)]) from None


def _choose_held_out(config: TextRowsConfig, documents: int) -> npt.NDArray[np.int64]:
    """Return the indices of the held-out documents, the same for every seed.

    Raises:
        ConfigError: All documents would be held out.
    """
    held_out = config.held_out
    assert isinstance(held_out, int | float)
    # A small fraction of few documents is rounded up to one, so that evaluation is possible.
    least = 1 if held_out and documents > 1 else 0
    count = held_out if isinstance(held_out, int) else max(least, round(documents * held_out))
    if documents and count >= documents:
        message = f"there are only {documents} documents, so none would be left to train on"
        raise ConfigError([ConfigIssue("data.held_out", message, held_out)])
    if not documents:
        return np.empty(0, dtype=np.int64)
    return permute(np.arange(count), size=documents, key=_HELD_OUT_KEY)
