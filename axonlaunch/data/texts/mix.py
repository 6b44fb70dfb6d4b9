"""Combines several text sources in one dataset, each with a weight or a number of epochs.

A sample's source and row follow from its index only. The loader shuffles indices by the seed, and
nothing else affects the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.documents import SourceShare, TextRowsConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.datasets.dataset import Batch, DatasetInfo, FileSums, Kind, Split
from axonlaunch.data.datasets.document_parts import DocumentPart, TextSummary
from axonlaunch.data.datasets.shuffle import Indices, dataset_indices
from axonlaunch.data.selection.file_selection import FileSelection
from axonlaunch.data.shards.encoding import OnProgress
from axonlaunch.data.texts.sharded_rows import ShardedRows
from axonlaunch.data.texts.text_rows import TextRows, held_out_key
from axonlaunch.data.tokenizers.tokenizer import Tokenizer

_PASS_KEY = 2
"""Distinguishes the order of rows in a pass over a source from other orders."""


def build_text(
    config: TextRowsConfig, tokenizer: Tokenizer, *, report: OnProgress, verifies: bool = False
) -> AnyText:
    """Return the rows of files, or of a mix of sources.

    Args:
        config: The group ``data``.
        tokenizer: Tokenizer of the text.
        report: Called from time to time while text is tokenized.
        verifies: Whether to compare cached tokens with their checksums now.

    Raises:
        ConfigError: A file can't be read, a row is invalid, or there are no training rows.
    """
    if config.shuffle == "shards":
        return ShardedRows(config, tokenizer, report=report)
    if not config.mix:
        return TextRows(config, tokenizer, report=report, verifies=verifies)
    _refuse_overlap(config)
    return TextMix(
        {
            name: _source(name, source, tokenizer, report, verifies=verifies)
            for name, source in config.sources().items()
        },
        config.shares(),
    )


class TextMix:
    """Rows of several sources.

    Attributes:
        tokenizer: Tokenizer of all sources.
        folder: Folder of the cached tokens.
    """

    kind: Kind = "tokens"
    is_text = True

    def __init__(self, sources: Mapping[str, TextRows], shares: Mapping[str, SourceShare]) -> None:
        """Compute how many rows each source contributes to one pass."""
        self._names, self._sources = [*sources], [*sources.values()]
        first = self._sources[0]
        self.tokenizer, self.folder = first.tokenizer, first.folder
        self.num_classes, self.sample_shape = first.num_classes, first.sample_shape
        rows = [source.num_samples for source in self._sources]
        counts = _rows_per_source(rows, [shares[name] for name in self._names])
        self._first = {
            "train": np.cumsum([0, *counts]),
            "eval": np.cumsum([0, *(source.num_eval_samples for source in self._sources)]),
        }
        firsts = self._first["eval"].tolist()
        parts = zip(self._names, firsts, firsts[1:], strict=False)
        self._eval_parts = {name: range(start, end) for name, start, end in parts if start < end}
        self._notes = (*self._describe_mix(counts), *self._source_notes())

    @property
    def info(self) -> DatasetInfo:
        """Optional facts."""
        return DatasetInfo(
            notes=self._notes,
            is_packed=self._sources[0].info.is_packed,
            eval_parts=self._eval_parts,
            order=self.order,
            file_sums=self.file_sums,
            tokenizer=self.tokenizer,
        )

    @property
    def num_samples(self) -> int:
        """Rows of a pass over the mix."""
        return int(self._first["train"][-1])

    @property
    def num_eval_samples(self) -> int:
        """Held-out rows of all sources."""
        return int(self._first["eval"][-1])

    def order(self, positions: Indices, *, seed: int) -> Indices:
        """Return the row for each global sample index.

        Row numbers continue across passes. If a pass uses only part of a source, the next pass uses
        the following part.
        """
        rows = dataset_indices(positions, num_samples=self.num_samples, seed=seed)
        return rows + positions // self.num_samples * self.num_samples

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the rows with these indices, in this order."""
        import torch

        owners, rows = self._locate(np.asarray(indices, dtype=np.int64), split)
        batches, order = [], []
        for number in np.unique(owners):
            here = np.flatnonzero(owners == number)
            batches.append(self._sources[number].samples(rows[here], split=split))
            order.append(here)
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        return Batch.join(batches).map(lambda tensor: tensor[back])

    def sources(self, row: int) -> Iterator[tuple[str, DocumentPart]]:
        """Yield (source name, file and row; document part) for each document in a packed row."""
        [number], [source_row] = self._locate(np.array([row]), "train")
        for location, part in self._sources[number].sources(int(source_row)):
            yield f"{self._names[number]}: {location}", part

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return (source and name, checksum of tokens) of all training files."""
        sums = [
            (f"{name}: {file}", digest)
            for name, source in zip(self._names, self._sources, strict=True)
            for file, digest in source.file_sums(shards).sums
        ]
        return FileSums(sums)

    def summaries(self) -> dict[str, TextSummary]:
        """Count documents and tokens per source. Reads all loss masks."""
        summaries = (source.summaries()[""] for source in self._sources)
        return dict(zip(self._names, summaries, strict=True))

    def encode(self, text: str) -> list[int]:
        """Convert a prompt to tokens."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text."""
        return self.tokenizer.decode(tokens)

    def _locate(self, indices: Indices, split: Split) -> tuple[Indices, Indices]:
        """Return (source number, row within that source) for each sample index.

        For a source of 10 rows with 2.5 epochs, samples 0 to 9 and 10 to 19 are each row once, and
        20 to 24 are five of the rows. The samples of the next pass begin with the other five.
        """
        firsts = self._first[split]
        passes, indices = np.divmod(indices, firsts[-1])
        owners = np.searchsorted(firsts, indices, side="right") - 1
        rows = indices - firsts[owners] + passes * np.diff(firsts)[owners]
        for number in np.unique(owners) if split == "train" else ():
            here, size = owners == number, self._sources[number].num_samples
            # The rows in a part of a pass must not depend on the seed of the run.
            rows[here] = dataset_indices(
                rows[here], num_samples=size, seed=int(number), split=_PASS_KEY
            )
        return owners, rows

    def _describe_mix(self, counts: Sequence[int]) -> Iterator[str]:
        shares = []
        for name, source, count in zip(self._names, self._sources, counts, strict=True):
            epochs = f"{count / source.num_samples:.3g}"
            unit = "epoch" if epochs == "1" else "epochs"
            shares.append(f"{count / self.num_samples:.1%} {name} ({epochs} {unit})")
        yield f"data.mix: {self.num_samples:,} rows: {', '.join(shares)}"

    def _source_notes(self) -> Iterator[str]:
        common: dict[str, None] = {}
        for name, source in zip(self._names, self._sources, strict=True):
            for note in source.info.notes:
                if note.startswith("data"):
                    yield f"data.mix.{name}{note.removeprefix('data')}"
                else:
                    common[note] = None
        yield from common


def _rows_per_source(rows: Sequence[int], shares: Sequence[SourceShare]) -> list[int]:
    """Return how many rows each source contributes to a pass over the mix.

    With weights, a pass is long enough to use every row of each source at least once.
    """
    weights = [share.weight for share in shares if share.weight is not None]
    if not weights:
        epochs = [1.0 if share.epochs is None else share.epochs for share in shares]
        return [max(1, round(count * often)) for count, often in zip(rows, epochs, strict=True)]
    longest = max(count / weight for count, weight in zip(rows, weights, strict=True))
    return [max(1, round(weight * longest)) for weight in weights]


def _source(
    name: str,
    config: TextRowsConfig,
    tokenizer: Tokenizer,
    report: OnProgress,
    *,
    verifies: bool,
) -> TextRows:
    """Return the rows of a source.

    Raises:
        ConfigError: The source is invalid; keys are those of the source.
    """
    try:
        return TextRows(config, tokenizer, report=report, verifies=verifies)
    except ConfigError as error:
        problems = [replace(p, key=_key_of_source(name, p.key)) for p in error.problems]
        raise ConfigError(problems) from None


def _key_of_source(name: str, key: str) -> str:
    is_of_data = key.startswith("data.")
    return f"data.mix.{name}{key.removeprefix('data')}" if is_of_data else key


def _refuse_overlap(config: TextRowsConfig) -> None:
    """Refuse a held-out file of one source that is a training file of another.

    Raises:
        ConfigError: A held-out file of one source is a training file of another.
    """
    sources = config.sources()
    trained = [
        (name, file)
        for name, source in sources.items()
        for file in FileSelection.of_training(source, key=f"data.mix.{name}").sources()
    ]
    for name, source in sources.items():
        for file in FileSelection.of_held_out(source, key=f"data.mix.{name}").sources():
            for other, trained_file in trained:
                if file.overlaps(trained_file):
                    key, value = held_out_key(source)
                    message = f"{file.name} is also in data.mix.{other}.files and would be trained "
                    message += "on; remove it there"
                    raise ConfigError([ConfigIssue(_key_of_source(name, key), message, value)])


AnyText = TextRows | TextMix | ShardedRows
"""A text dataset with a tokenizer."""
