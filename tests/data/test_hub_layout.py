"""Subsets and splits of a data set: the files that ``datasets`` finds in the same folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from axonlaunch.data.hub.layout import (
    UnknownSplitError,
    UnknownSubsetError,
    files_of_split,
    find_layout,
    matching,
)

ROW = json.dumps({"text": "a"}) + "\n"

CARD = """---
license: mit
configs:
- config_name: chat
  default: true
  data_files:
  - split: train
    path: chats/part-*.jsonl
  - split: test
    path:
    - chats/last.jsonl
    - more/*.jsonl
- config_name: plain
  data_files: "texts/**"
- config_name: folder
  data_dir: other
---
# A data set
"""

CASES: dict[str, dict[str, str]] = {
    "sharded": dict.fromkeys(
        [
            "data/train-00000-of-00002.jsonl",
            "data/train-00001-of-00002.jsonl",
            "data/odd.name-00000-of-00001.jsonl",
            "notes.jsonl",
        ],
        ROW,
    ),
    "file names": dict.fromkeys(["train.jsonl", "my-dev.jsonl", "eval_2.jsonl", "x.jsonl"], ROW),
    "folder names": dict.fromkeys(["a/train/1.jsonl", "a/validation/1.jsonl", "a/2.jsonl"], ROW),
    "no words": dict.fromkeys(["one.jsonl", "deep/er/two.jsonl", ".hidden.jsonl"], ROW),
    "several formats": {"a.jsonl": ROW, "b.jsonl": ROW, "c.csv": "text\na\n", "README.md": "# hi"},
    "as many of two formats": {"a.csv": "text\na\n", "b.jsonl": ROW},
    "card": {
        "README.md": CARD,
        **dict.fromkeys(
            [
                *("chats/part-1.jsonl", "chats/part-2.jsonl", "chats/last.jsonl", "more/a.jsonl"),
                *("texts/a.jsonl", "texts/b/c.jsonl", "other/train.jsonl", "other/test.jsonl"),
            ],
            ROW,
        ),
    },
    "compressed": {"train.jsonl.gz": "", "test.jsonl.gz": ""},
    "private folder": dict.fromkeys(["__data/a.jsonl", "b.jsonl"], ROW),
}


def by_datasets(folder: Path, files: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """Return the files by subset and split, as ``datasets`` finds them."""
    datasets = pytest.importorskip("datasets")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    found = {}
    for subset in datasets.get_dataset_config_names(str(folder)):
        builder = datasets.load_dataset_builder(str(folder), subset, cache_dir=str(folder / ".c"))
        found[subset] = {
            str(split): sorted(str(Path(file).relative_to(folder)) for file in names)
            for split, names in builder.config.data_files.items()
        }
    return found


@pytest.mark.parametrize("name", CASES)
def test_layout_is_that_of_datasets(name: str, tmp_path: Path) -> None:
    files = CASES[name]
    layout = find_layout(files, files.get("README.md", ""))
    ours = {
        subset: {split: sorted(names) for split, names in splits.items()}
        for subset, splits in layout.subsets.items()
    }
    assert ours == by_datasets(tmp_path, files)


def test_default_subset_is_the_marked_one() -> None:
    layout = find_layout(CASES["card"], CARD)
    assert files_of_split(layout.splits(None), None) == ["chats/part-1.jsonl", "chats/part-2.jsonl"]
    assert files_of_split(layout.splits("plain"), None) == ["texts/a.jsonl", "texts/b/c.jsonl"]


def test_branch_of_the_hubs_conversion_has_subsets_and_splits_as_folders() -> None:
    names = ["en/train/0000.parquet", "en/train/0001.parquet", "en/partial-test/0000.parquet"]
    layout = find_layout([*names, "de/train/0000.parquet"])
    assert files_of_split(layout.splits("en"), "train") == names[:2]
    assert files_of_split(layout.splits("en"), "test") == names[2:]
    with pytest.raises(UnknownSubsetError, match="several subsets; use de, en"):
        layout.splits(None)


def test_unknown_split_lists_those_with_files() -> None:
    splits = {"train": ["a"], "test": ["b"], "empty": []}
    with pytest.raises(UnknownSplitError, match=r"there is no such split; use train, test$"):
        files_of_split(splits, "validation")
    with pytest.raises(UnknownSplitError, match="has no split train; use a, b"):
        files_of_split({"a": ["1"], "b": ["2"]}, None)
    assert files_of_split({"test": ["b"]}, None) == ["b"]


@pytest.mark.parametrize(
    ("files", "card", "reason"),
    [
        (["rows.py", "a.jsonl"], "", "a script makes this data set, rows.py, which is not run"),
        (["a.zip", "b.tar", "README.md"], "", r"no file of rows \(found: .zip, .tar\)"),
        (["a.csv"], "---\nconfigs: 3\n---", "configs in its README.md can't be read"),
        (["a.csv"], "---\nconfigs:\n- {config_name: a, sep: ;}\n---", "sets sep for a, which is"),
        (["a.csv"], '---\nconfigs:\n- {config_name: "\\e[31m"}\n---', "control characters"),
        (["a.csv"], "---\nconfigs:\n- [\n---", "configs in its README.md can't be read: not YAML"),
        (
            ["a.csv"],
            "---\nconfigs:\n- {config_name: a, data_files: [{path: a}]}\n---",
            "has no split and path",
        ),
    ],
)
def test_unreadable_layout_is_refused(files: list[str], card: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_layout(files, card, repo="team/rows")


def test_glob_matches_folders_as_datasets_does() -> None:
    files = ["a.jsonl", "d/a.jsonl", "d/e/b.jsonl", "d/.x/c.jsonl"]
    assert matching("*.jsonl", files) == ["a.jsonl"]
    assert matching("**/*.jsonl", files) == ["a.jsonl", "d/a.jsonl", "d/e/b.jsonl"]
    assert matching("d/**", files) == ["d/a.jsonl", "d/e/b.jsonl"]
    assert matching("d/[ab].jsonl", files) == ["d/a.jsonl"]
    assert matching("d/.x/*", files) == ["d/.x/c.jsonl"]
