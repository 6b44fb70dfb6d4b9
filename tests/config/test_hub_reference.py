"""Names of data sets and repositories of the Hub, told apart from files."""

from __future__ import annotations

import pytest

from axonlaunch.config.values.hub_reference import (
    HubReference,
    parse_hub_reference,
    why_no_repo,
    without_commits,
)

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("team/rows", HubReference("team/rows")),
        ("team/rows-1.5_b@v1.0", HubReference("team/rows-1.5_b", "v1.0")),
        ("team/rows@refs/convert/parquet", HubReference("team/rows", "refs/convert/parquet")),
        ("hf://datasets/team/rows", HubReference("team/rows")),
        ("hf://datasets/team/rows@v1", HubReference("team/rows", "v1")),
        ("hf://datasets/team/rows/a/*.jsonl", HubReference("team/rows", None, "a/*.jsonl")),
        ("hf://datasets/team/rows/a@b.csv", HubReference("team/rows", None, "a@b.csv")),
        ("hf://datasets/team/rows@v1/a.csv", HubReference("team/rows", "v1", "a.csv")),
        (
            "hf://datasets/team/rows@refs/pr/3/a.csv",
            HubReference("team/rows", "refs/pr/3", "a.csv"),
        ),
        (
            "hf://datasets/team/rows@refs%2Fpr%2F3/a.csv",
            HubReference("team/rows", "refs/pr/3", "a.csv"),
        ),
        *(
            (text, None)
            for text in ("rows", "./a/b", "/a/b", "a/b/c", "team/rows.jsonl", "a/*.csv")
        ),
        *(
            (text, None)
            for text in ("s3://a/b", "team/", "hf://team/rows/a.csv", "-", "a/b.JSON.gz")
        ),
    ],
)
def test_hub_id_is_distinguished_from_a_file(text: str, reference: HubReference | None) -> None:
    assert parse_hub_reference(text) == reference
    if reference is not None:
        assert parse_hub_reference(str(reference)) == reference
        assert parse_hub_reference(str(reference.at(COMMIT))) == reference.at(COMMIT)


def test_commits_are_left_out_of_lists_only() -> None:
    files = [f"team/rows@{COMMIT}", "team/rows@v1", "a.jsonl", f"hf://datasets/a/b@{COMMIT}/c.csv"]
    shortened = ["team/rows", "team/rows@v1", "a.jsonl", "hf://datasets/a/b/c.csv"]
    assert without_commits(files) == shortened
    assert without_commits(files[0]) == files[0]


@pytest.mark.parametrize("text", ["team/model", "a/b", "team/Model_1.5-x"])
def test_legal_repository_name_is_accepted_as_by_the_library(text: str) -> None:
    library = pytest.importorskip("huggingface_hub.utils")
    library.validate_repo_id(text)
    assert why_no_repo(text) is None


@pytest.mark.parametrize(
    "text", ["team/a--b", "team/a..b", "team/-a", "team/a.git", "a/" + "b" * 97]
)
def test_illegal_repository_name_is_refused_as_by_the_library(text: str) -> None:
    library = pytest.importorskip("huggingface_hub.utils")
    with pytest.raises(ValueError, match=r"(?i)repo.id"):
        library.validate_repo_id(text)
    assert why_no_repo(text) is not None
