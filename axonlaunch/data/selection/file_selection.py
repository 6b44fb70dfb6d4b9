"""Finds the training and the held-out files of a text dataset, also data sets of the Hub.

A split and a limit select rows. Files of the Hub are downloaded to its cache if they are missing;
``preflight`` has done so before a rank reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from axonlaunch.config.options.documents import TextRowsConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.config.values.hub_reference import HubReference, parse_hub_reference
from axonlaunch.config.values.split_text import SplitSlice, parse_splits
from axonlaunch.data.files.formats import suffixes
from axonlaunch.data.files.row_ranges import count_all_rows, take_rows
from axonlaunch.data.files.rows import UnreadableFileError
from axonlaunch.data.files.sources import (
    SourceFile,
    UnreachableStorageError,
    match_files,
    unknown_format,
)
from axonlaunch.data.hub import repository
from axonlaunch.data.hub.layout import (
    UnknownSplitError,
    UnknownSubsetError,
    files_of_split,
    find_layout,
    matching,
)
from axonlaunch.data.hub.repository import HubError, OnDownload

_Expand = Callable[[HubReference], list[SourceFile]]


@dataclass(frozen=True)
class FileSelection:
    """Files of rows, and which of their rows are read.

    Attributes:
        files: Paths, globs, URLs and data sets of the Hub, as written by the user.
        subset: Subset of the data sets of the Hub; None: the default one.
        split: Splits of the data sets of the Hub, as in ``train[:20%]``; None: ``train``.
        limit: Number of rows that are read, from the first one; None: all.
        key: Configuration key of ``files``.
        subset_key: Configuration key of ``subset``.
        split_key: Configuration key of ``split``.
    """

    files: Sequence[str]
    subset: str | None = None
    split: str | None = None
    limit: int | None = None
    key: str = "data.files"
    subset_key: str = "data.subset"
    split_key: str = "data.split"

    @classmethod
    def of_training(cls, config: TextRowsConfig, *, key: str = "data") -> FileSelection:
        """Return the selection of the training rows; ``key`` is that of the dataset."""
        return cls(
            config.files,
            config.subset,
            config.split,
            config.limit,
            f"{key}.files",
            f"{key}.subset",
            f"{key}.split",
        )

    @classmethod
    def of_held_out(cls, config: TextRowsConfig, *, key: str = "data") -> FileSelection:
        """Return the selection of held-out rows; without files if a share is held out."""
        if config.validation_split is not None:
            files = [file for file in config.files if hub_reference(file) is not None]
            keys = (f"{key}.files", f"{key}.subset", f"{key}.validation_split")
            return cls(files, config.subset, config.validation_split, None, *keys)
        held_out = config.held_out_files
        files_key = f"{key}.held_out" + (".files" if held_out is config.held_out else "")
        keys = (files_key, f"{key}.held_out.subset", f"{key}.held_out.split")
        return cls(held_out.files, held_out.subset, held_out.split, held_out.limit, *keys)

    def check(self) -> None:
        """Check that the files exist, without downloading or reading rows.

        Raises:
            ConfigError: A pattern matches nothing, a file has an unknown format, or a data set of
                the Hub, its subset or its split does not exist; lists all problems.
        """

        def find(reference: HubReference) -> list[SourceFile]:
            for _ in self._names(repository.pin(reference)):
                pass
            return []

        self._each(find)

    def fetch(self, report: OnDownload = lambda state: None) -> None:
        """Download the files of data sets of the Hub that are not in its cache.

        Raises:
            ConfigError: A file can't be downloaded.
        """

        def download(reference: HubReference) -> list[SourceFile]:
            pinned = repository.pin(reference)
            names = [name for _, names in self._names(pinned) for name in names]
            repository.fetch_files(pinned, names, report=report)
            return []

        self._each(download)

    def sources(self) -> list[SourceFile]:
        """Return the files, each part once, ordered by pattern, then by name.

        Raises:
            ConfigError: ``check`` fails, a file can't be counted, or no row is selected.
        """
        found = self._each(self._sources_of_hub)
        distinct = [*{tuple(source.identity): source for source in found}.values()]
        if self.limit is None:
            return distinct
        try:
            return take_rows(distinct, 0, self.limit)
        except UnreadableFileError as error:
            raise ConfigError([ConfigIssue(self.key, str(error))]) from None

    def _each(self, expand: _Expand) -> list[SourceFile]:
        """Return the files of each pattern; ``expand`` returns those of a data set of the Hub."""
        problems: list[ConfigIssue] = []
        sources: list[SourceFile] = []
        for pattern in self.files:
            reference = hub_reference(pattern)
            try:
                if reference is None and pattern.startswith("hf://"):
                    raise ValueError("is no data set; write hf://datasets/ORG/NAME/FILES")
                sources += match_files(pattern) if reference is None else expand(reference)
            except UnknownSubsetError as reason:
                message = f"{reference}: {reason}"
                problems.append(ConfigIssue(self.subset_key, message, self.subset))
            except UnknownSplitError as reason:
                message = f"{reference}: {reason}"
                problems.append(ConfigIssue(self.split_key, message, self.split))
            except (ValueError, OSError, ImportError) as reason:
                is_transient = isinstance(reason, HubError) and reason.is_transient
                is_transient |= isinstance(reason, UnreachableStorageError)
                problem = ConfigIssue(self.key, str(reason), pattern, is_transient=is_transient)
                problems.append(problem)
        if problems:
            raise ConfigError(problems)
        return sources

    def _names(self, reference: HubReference) -> Iterator[tuple[SplitSlice | None, Sequence[str]]]:
        """Yield each selected split of a data set at a commit with the names of its files.

        Raises:
            ValueError: There is no such file, subset or split, or a file has an unknown format.
        """
        files = repository.list_files(reference)
        if reference.path is not None:
            names = matching(reference.path, sorted(files))
            if not names:
                raise ValueError(f"no file of it matches; it has {_first(files)}")
            if unknown := [why for name in names if (why := unknown_format(name)) is not None]:
                raise ValueError(unknown[0])
            yield None, names
            return
        layout = find_layout(files, repository.read_card(reference), repo=reference.repo)
        splits = layout.splits(self.subset)
        if self.split is None:
            yield None, files_of_split(splits, None)
            return
        for part in parse_splits(self.split):
            yield part, files_of_split(splits, part.name)

    def _sources_of_hub(self, reference: HubReference) -> list[SourceFile]:
        pinned = repository.pin(reference)
        chosen = [*self._names(pinned)]
        paths = repository.fetch_files(pinned, [name for _, names in chosen for name in names])
        found: list[SourceFile] = []
        for part, names in chosen:
            sources = [_source_of_hub(pinned, name, paths[name]) for name in names]
            if part is not None and not part.is_whole:
                count = None if part.needs_count else part.stop
                start, stop = part.bounds(count_all_rows(sources) if count is None else count)
                sources = take_rows(sources, start, stop)
                if not sources:
                    raise UnknownSplitError(f"{part.name} has no row in this part")
            found += sources
        return found


def hub_reference(pattern: str) -> HubReference | None:
    """Return the data set of the Hub that a pattern names; None for files here or elsewhere."""
    reference = parse_hub_reference(pattern)
    return None if reference is None or Path(pattern).exists() else reference


def _source_of_hub(reference: HubReference, name: str, path: Path) -> SourceFile:
    url = f"hf://datasets/{reference.repo}@{reference.commit}/{name}"
    return SourceFile(url, *suffixes(name), path.stat().st_size, "", path=str(path))


def _first(files: Iterable[str]) -> str:
    names = sorted(files)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
