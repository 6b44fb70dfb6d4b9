"""Finds the files of each subset and split of a data set, from file names and its README.md.

The rules are those of ``datasets``: ``configs`` in the head of README.md, else names of files and
folders. Source: https://huggingface.co/docs/hub/datasets-data-files-configuration. Data sets that a
script makes, archives and images are not read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from axonlaunch.config.values.plain_values import read_yaml
from axonlaunch.data.files.formats import suffixes

Splits = Mapping[str, Sequence[str]]
"""File names by split."""

_KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **{suffix: suffix for suffix in (".parquet", ".arrow", ".csv", ".tsv", ".txt")},
}
"""Formats of which a split has one, by the suffix of a file."""
_NOT_DATA = {
    *("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"),
    "state.json",
}
_DEFAULT, _TRAIN = "default", "train"
_WORDS = {
    _TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names of files and folders, by split."""
_SHARD = re.compile(r"data/([\w.]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_CONVERTED = re.compile(r"([^/]+)/(?:partial-)?([^/]+)/\d{4}\.parquet")
"""A file of the branch ``refs/convert/parquet``: SUBSET/SPLIT/0000.parquet."""
_UNREAD = ("sep", "delimiter", "field", "names", "column_names", "header", "skiprows", "encoding")
"""Options of a subset in README.md that change how its files would have to be read."""
_LISTED = 30


@dataclass(frozen=True)
class HubLayout:
    """Subsets of a data set.

    Attributes:
        subsets: Splits by name of the subset.
        default: Subset that is read if none is named; None: one must be named.
    """

    subsets: Mapping[str, Splits]
    default: str | None

    def splits(self, subset: str | None) -> Splits:
        """Return the splits of a subset; None: the default one.

        Raises:
            UnknownSubsetError: There is no such subset, or no default.
        """
        chosen = self.default if subset is None else subset
        if chosen is not None and chosen in self.subsets:
            return self.subsets[chosen]
        what = "has several subsets" if subset is None else "there is no such subset"
        raise UnknownSubsetError(f"{what}; use {_list_names(self.subsets)}")


class UnknownSubsetError(ValueError):
    """A data set has no such subset; the text lists those that it has."""


class UnknownSplitError(ValueError):
    """A subset has no such split; the text lists those that it has."""


def files_of_split(splits: Splits, name: str | None) -> Sequence[str]:
    """Return the files of a split; None: those of ``train``, or of the only split.

    Raises:
        UnknownSplitError: There is no such split, or no split of this name has files.
    """
    chosen = name
    if chosen is None:
        chosen = _TRAIN if _TRAIN in splits else next(iter(splits)) if len(splits) == 1 else None
    if chosen is None or not splits.get(chosen):
        what = "has no split train" if name is None else "there is no such split"
        filled = [split_name for split_name, files in splits.items() if files]
        raise UnknownSplitError(f"{what}; use {_list_names(filled)}")
    return splits[chosen]


def find_layout(names: Iterable[str], card: str = "", *, repo: str = "") -> HubLayout:
    """Return the subsets and splits of a data set.

    Args:
        names: Paths of all files in the repository.
        card: Content of README.md.
        repo: Name of the repository, ``ORG/NAME``. A file NAME.py is its script.

    Raises:
        ValueError: README.md can't be understood, or there is no file of a known format.
    """
    files = sorted(names)
    if configs := _configs(card):
        subsets = {
            name: _splits_of_config(options, files, subset=name)
            for name, options in configs.items()
        }
        return HubLayout(subsets, _default_of(configs))
    data = [name for name in files if _is_data(name)]
    script = f"{repo.rpartition('/')[2]}.py"
    if script in files:
        raise ValueError(
            f"a script makes this data set, {script}, which is not run; the Hub's own conversion, "
            f"if there is one, is {repo}@refs/convert/parquet"
        )
    if not data:
        raise ValueError(_without_data(files))
    if all(_CONVERTED.fullmatch(name) for name in data):
        return _converted_layout(data)
    return HubLayout({_DEFAULT: _splits_of_names(data)}, _DEFAULT)


def matching(pattern: str, files: Iterable[str]) -> list[str]:
    """Return the files that a glob matches; ``**`` matches any depth of folders.

    Files that begin with a dot, and those in folders that begin with two underscores, are matched
    only if the pattern names them.
    """
    expression = re.compile(_regex(pattern.removeprefix("./")))
    return [
        name
        for name in files
        if expression.fullmatch(name) and _hidden_parts(name) == _hidden_parts(pattern)
    ]


def _regex(pattern: str) -> str:
    """Return the regular expression of a glob."""
    parts = []
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]]+\]|.", pattern):
        if token == "**/":
            parts.append(r"(?:[^/]+/)*")
        elif token == "**":
            parts.append(r".*")
        elif token in "*?":
            parts.append(r"[^/]*" if token == "*" else r"[^/]")
        elif token.startswith("["):
            parts.append(token.replace("[!", "[^"))
        else:
            parts.append(re.escape(token))
    return "".join(parts)


def _hidden_parts(path: str) -> int:
    parts = PurePosixPath(path).parts
    dotted = sum(part.startswith(".") for part in parts)
    return dotted + sum(part.startswith("__") for part in parts[:-1])


def _is_data(name: str) -> bool:
    is_read = suffixes(name)[0] in _KINDS and PurePosixPath(name).name not in _NOT_DATA
    return is_read and not _hidden_parts(name)


def _configs(card: str) -> dict[str, dict[str, Any]]:
    """Return ``configs`` in the head of README.md, by name.

    Raises:
        ValueError: The head is not YAML, or its ``configs`` have another form.
    """
    lines = card.splitlines()
    if not lines or lines[0] != "---" or "---" not in lines[1:]:
        return {}
    head = lines[1 : lines.index("---", 1)]
    start = next((n for n, line in enumerate(head) if line.startswith("configs:")), None)
    if start is None:
        return {}
    # Other keys, such as the features of each subset, may be larger than any configuration.
    ends = (n for n in range(start + 1, len(head)) if re.match(r"[^\s#-]", head[n]))
    block = "\n".join(head[start : next(ends, len(head))])
    try:
        configs = read_yaml(block).get("configs") or []
        return {_name(options["config_name"]): dict(options) for options in configs}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"configs in its README.md can't be read: {error}") from None


def _name(text: object) -> str:
    """Return the name of a subset or a split, which is printed.

    Raises:
        ValueError: The name has control characters.
    """
    if not str(text).isprintable():
        raise ValueError("a name in its README.md has control characters")
    return str(text)


def _default_of(configs: Mapping[str, Mapping[str, Any]]) -> str | None:
    if len(configs) == 1:
        return next(iter(configs))
    chosen = [name for name, options in configs.items() if options.get("default")]
    return chosen[0] if chosen else _DEFAULT if _DEFAULT in configs else None


def _splits_of_config(options: Mapping[str, Any], files: Sequence[str], *, subset: str) -> Splits:
    """Return the splits of a subset that README.md describes.

    Raises:
        ValueError: README.md describes files that can't be read.
    """
    if unread := [key for key in _UNREAD if key in options]:
        message = f"its README.md sets {unread[0]} for {subset}, which is not read"
        raise ValueError(f"{message}; download the files, and convert them to .jsonl")
    folder = str(options.get("data_dir") or "").strip("./")
    inside = {name.removeprefix(f"{folder}/"): name for name in files if _is_below(name, folder)}
    described = options.get("data_files")
    if described is None:
        found = _splits_of_names([name for name in inside if _is_data(name)])
    else:
        found = {
            split: [name for pattern in patterns for name in matching(pattern, inside)]
            for split, patterns in _patterns(described).items()
        }
    return {
        split: _files_of_main_format([inside[name] for name in names])
        for split, names in found.items()
    }


def _is_below(name: str, folder: str) -> bool:
    return not folder or name.startswith(f"{folder}/")


def _patterns(described: Any) -> dict[str, list[str]]:
    """Return ``data_files`` of README.md as globs by split.

    Raises:
        ValueError: ``data_files`` has an unknown form.
    """
    entries = described if isinstance(described, list) else [described]
    if all(isinstance(entry, str) for entry in entries):
        return {_TRAIN: entries}
    patterns: dict[str, list[str]] = {}
    for entry in entries:
        if not isinstance(entry, dict) or {"split", "path"} - entry.keys():
            raise ValueError(f"data_files in its README.md has no split and path: {entry}")
        paths = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        patterns.setdefault(_name(entry["split"]), []).extend(map(str, paths))
    return patterns


def _splits_of_names(data: Sequence[str]) -> Splits:
    """Return the splits that names of files tell; without a known word, all are ``train``."""
    shards = [(found[1], name) for name in data if (found := _SHARD.fullmatch(name))]
    if shards:
        splits = {split: [name for s, name in shards if s == split] for split, _ in shards}
    else:
        splits = _by_words(data, in_folders=True) or _by_words(data, in_folders=False)
        splits = splits or {_TRAIN: [*data]}
    return {split: _files_of_main_format(names) for split, names in splits.items()}


def _by_words(data: Sequence[str], *, in_folders: bool) -> dict[str, list[str]]:
    """Return the files whose folders, or whose own names, contain a word of a split."""
    splits = {}
    for split, words in _WORDS.items():
        end = r"(?:[-._ 0-9].*)?" if in_folders else r"[-._ 0-9].*"
        word = re.compile(rf"(?:.*[-._ 0-9])?(?:{'|'.join(words)}){end}")
        found = []
        for name in data:
            *folders, file = name.split("/")
            if any(word.fullmatch(part) for part in (folders if in_folders else [file])):
                found.append(name)
        if found:
            splits[split] = found
    return splits


def _converted_layout(data: Sequence[str]) -> HubLayout:
    """Return the layout of the Hub's own conversion to Parquet."""
    subsets: dict[str, dict[str, list[str]]] = {}
    for name in data:
        found = _CONVERTED.fullmatch(name)
        assert found is not None
        subsets.setdefault(found[1], {}).setdefault(found[2], []).append(name)
    default = next(iter(subsets)) if len(subsets) == 1 else _DEFAULT
    return HubLayout(subsets, default if default in subsets else None)


def _files_of_main_format(names: Sequence[str]) -> list[str]:
    """Return the files of the most frequent format; Parquet wins a tie."""
    kinds = Counter(kind for name in names if (kind := _KINDS.get(suffixes(name)[0])))
    if not kinds:
        return []
    order = [".parquet", ".arrow", "json", ".csv"]
    rank = {kind: -order.index(kind) if kind in order else -len(order) for kind in kinds}
    chosen = max(kinds, key=lambda kind: (kinds[kind], rank[kind], kind))
    return [name for name in names if _KINDS.get(suffixes(name)[0]) == chosen]


def _without_data(files: Sequence[str]) -> str:
    """Return why a repository has no rows that can be read."""
    others = Counter(PurePosixPath(name).suffix for name in files if not _hidden_parts(name))
    found = ", ".join(suffix for suffix, _ in others.most_common(5) if suffix not in ("", ".md"))
    return f"has no file of rows (found: {found or 'none'}); known: {', '.join(_KINDS)}"


def _list_names(names: Iterable[str]) -> str:
    listed = [*names]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more if listed else "another data set: it has none"
