"""Several sources of text in one dataset, each with a weight or epochs of its own.

Which row of which source a sample is follows from its index alone; the loader shuffles indices by
the seed, so that the order of a mix depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from axonlaunch.config.documents import SourceShare, TextRowsConfig
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.data.dataset import Batch, DatasetInfo, FileSums, Kind, Split
from axonlaunch.data.document_parts import DocumentPart, TextSummary
from axonlaunch.data.encoding import OnProgress
from axonlaunch.data.sharded_rows import ShardedRows
from axonlaunch.data.shuffle import Indices, dataset_indices
from axonlaunch.data.sources import find_sources
from axonlaunch.data.text_rows import TextRows
from axonlaunch.data.tokenizer import Tokenizer

_PASS_KEY = 2
"""Distinguishes the order of rows in a pass over a source from other orders."""


def build_text(
    config: TextRowsConfig, tokenizer: Tokenizer, *, report: OnProgress, verifies: bool = False
) -> AnyText:
    """Return the rows of files, or of a mix of sources.

    Args:
        config: The group ``data``.
        tokenizer: Makes tokens of text.
        report: Is called now and then while that happens.
        verifies: Whether to compare tokens of the cache with their checksums now.

    Raises:
        ConfigError: A file can't be read, a row is none, or nothing is left to train on.
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
        tokenizer: What made the tokens.
        folder: Where the tokens are kept.
    """

    kind: Kind = "tokens"
    is_text = True

    def __init__(self, sources: Mapping[str, TextRows], shares: Mapping[str, SourceShare]) -> None:
        """Decide how many rows of a pass over the mix are of which source."""
        self._names, self._sources = [*sources], [*sources.values()]
        first = self._sources[0]
        self.tokenizer, self.folder = first.tokenizer, first.folder
        self.num_classes, self.sample_shape = first.num_classes, first.sample_shape
        rows = [source.num_samples for source in self._sources]
        counts = _counts(rows, [shares[name] for name in self._names])
        self._first = {
            "train": np.cumsum([0, *counts]),
            "eval": np.cumsum([0, *(source.num_eval_samples for source in self._sources)]),
        }
        firsts = self._first["eval"].tolist()
        parts = zip(self._names, firsts, firsts[1:], strict=False)
        self._eval_parts = {name: range(start, end) for name, start, end in parts if start < end}
        self._notes = (*self._describe_mix(counts), *self._of_sources())

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
        """Return which row stands at each global sample index.

        Those of the second pass are counted on from those of the first: of a source of which a pass
        has a part, each has another one.
        """
        rows = dataset_indices(positions, num_samples=self.num_samples, seed=seed)
        return rows + positions // self.num_samples * self.num_samples

    def samples(self, indices: Sequence[int] | npt.NDArray[np.int64], *, split: Split) -> Batch:
        """Return the rows of these indices, in their order."""
        import torch

        owners, rows = self._places(np.asarray(indices, dtype=np.int64), split)
        batches, order = [], []
        for number in np.unique(owners):
            here = np.flatnonzero(owners == number)
            batches.append(self._sources[number].samples(rows[here], split=split))
            order.append(here)
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        positions = [batch.positions for batch in batches if batch.positions is not None]
        return Batch(
            torch.cat([batch.inputs for batch in batches])[back],
            torch.cat([batch.targets for batch in batches])[back],
            torch.cat(positions)[back] if positions else None,
        )

    def sources(self, row: int) -> Iterator[tuple[str, DocumentPart]]:
        """Yield the source, the file and the row that each piece of a row to train on is of."""
        [number], [own] = self._places(np.array([row]), "train")
        for where, piece in self._sources[number].sources(int(own)):
            yield f"{self._names[number]}: {where}", piece

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return (source and name, checksum of tokens) of all training files."""
        sums = [
            (f"{name}: {file}", digest)
            for name, source in zip(self._names, self._sources, strict=True)
            for file, digest in source.file_sums(shards).sums
        ]
        return FileSums(sums)

    def summaries(self) -> dict[str, TextSummary]:
        """Count what there is of each source, by reading through which tokens count."""
        of_each = (source.summaries()[""] for source in self._sources)
        return dict(zip(self._names, of_each, strict=True))

    def encode(self, text: str) -> list[int]:
        """Turn text that is to be continued into tokens."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text."""
        return self.tokenizer.decode(tokens)

    def _places(self, indices: Indices, split: Split) -> tuple[Indices, Indices]:
        """Return which source, and which of its rows, samples are.

        Of a source of 10 rows with 2.5 epochs the samples 0 to 9 and 10 to 19 are each row once,
        and 20 to 24 five of them; those of the next pass begin with the other five.
        """
        firsts = self._first[split]
        passes, indices = np.divmod(indices, firsts[-1])
        owners = np.searchsorted(firsts, indices, side="right") - 1
        rows = indices - firsts[owners] + passes * np.diff(firsts)[owners]
        for number in np.unique(owners) if split == "train" else ():
            here, size = owners == number, self._sources[number].num_samples
            # Which rows a part of a pass has must not depend on a run's seed.
            rows[here] = dataset_indices(
                rows[here], num_samples=size, seed=int(number), split=_PASS_KEY
            )
        return owners, rows

    def _describe_mix(self, counts: Sequence[int]) -> Iterator[str]:
        """Say what the mix is of."""
        shares = [
            f"{count / self.num_samples:.1%} {name} ({count / source.num_samples:.3g} epochs)"
            for name, source, count in zip(self._names, self._sources, counts, strict=True)
        ]
        yield f"data.mix: {self.num_samples:,} rows: {', '.join(shares)}"

    def _of_sources(self) -> Iterator[str]:
        for name, source in zip(self._names, self._sources, strict=True):
            for note in source.info.notes:
                yield f"data.mix.{name}{note.removeprefix('data')}"


def _counts(rows: Sequence[int], shares: Sequence[SourceShare]) -> list[int]:
    """Return how many rows of each source a pass over the mix has.

    By weights a pass is as long as it takes to see each row of the source that lasts longest.
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
        ConfigError: It is of the source's keys.
    """
    try:
        return TextRows(config, tokenizer, report=report, verifies=verifies)
    except ConfigError as error:
        problems = [
            replace(problem, key=f"data.mix.{name}{problem.key.removeprefix('data')}")
            if problem.key.startswith("data.")
            else problem
            for problem in error.problems
        ]
        raise ConfigError(problems) from None


def _refuse_overlap(config: TextRowsConfig) -> None:
    """Refuse to evaluate a source on a file that another one is trained on.

    Raises:
        ConfigError: One is.
    """
    sources = config.sources()
    trained = {
        file.name: name for name, source in sources.items() for file in find_sources(source.files)
    }
    for name, source in sources.items():
        held_out = source.held_out if isinstance(source.held_out, list) else []
        for file in find_sources(held_out, key=f"data.mix.{name}.held_out"):
            if file.name in trained:
                message = f"{file.name} is in data.mix.{trained[file.name]}.files too, and would "
                message += "be trained on; take it out there"
                raise ConfigError([ConfigIssue(f"data.mix.{name}.held_out", message, held_out)])


AnyText = TextRows | TextMix | ShardedRows
"""A dataset of text with a tokenizer."""
