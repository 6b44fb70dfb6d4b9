"""Parses names of repositories of the Hugging Face Hub, in ``data.files`` and ``checkpoint.push``.

No file is read and nothing is downloaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_URL_START = "hf://datasets/"
_SPECIAL = re.compile(r"refs/(?:convert|pr)/[^/]+")
"""Revisions with slashes that a URL may contain unescaped."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE = re.compile(
    r".*\.(jsonl|ndjson|json|csv|tsv|parquet|arrow|txt|md|py|gz|bz2|xz|zst|zip)", re.I
)
"""A path of a file, which looks like ORG/NAME."""
_LONGEST = 96
"""Longest name of a repository that the Hub accepts."""


@dataclass(frozen=True)
class HubReference:
    """A data set of the Hub, or some of its files.

    Attributes:
        repo: ``ORG/NAME``.
        revision: Branch, tag or commit hash; None: the default branch.
        path: Glob of files in the repository; None: the files of a split.
    """

    repo: str
    revision: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        if self.path is None:
            return self.repo if self.revision is None else f"{self.repo}@{self.revision}"
        revision = "" if self.revision is None else "@" + self.revision.replace("/", "%2F")
        return f"{_URL_START}{self.repo}{revision}/{self.path}"

    @property
    def commit(self) -> str | None:
        """The commit hash, if the revision is one."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None

    def at(self, commit: str) -> HubReference:
        """Return the reference at a commit."""
        return replace(self, revision=commit)


def parse_hub_reference(text: str) -> HubReference | None:
    """Parse ``ORG/NAME[@REVISION]`` or ``hf://datasets/ORG/NAME[@REVISION][/GLOB]``.

    Whether a local file with this name exists, which then has priority, is not checked here.

    Returns:
        The reference; None if the text has neither form.
    """
    if not text.startswith(_URL_START):
        found = None if _FILE.fullmatch(text) else _ID.fullmatch(text)
        return HubReference(found["repo"], found["revision"]) if found else None
    org, _, rest = text.removeprefix(_URL_START).partition("/")
    name, mark, behind = rest.partition("@")
    if not mark or "/" in name:  # an @ in a file's name
        name, _, path = rest.partition("/")
        revision = None
    elif special := _SPECIAL.match(behind):
        revision, path = special[0], behind[special.end() :].lstrip("/")
    else:
        revision, _, path = behind.partition("/")
        revision = revision.replace("%2F", "/").replace("%2f", "/")
    reference = HubReference(f"{org}/{name}", revision, path or None)
    return reference if _REPO.fullmatch(reference.repo) else None


def without_commits(value: Any) -> Any:
    """Remove the commits from a list of data sets of the Hub; return other values unchanged."""
    if not isinstance(value, list):
        return value
    references = [parse_hub_reference(item) if isinstance(item, str) else None for item in value]
    return [
        item if found is None or found.commit is None else str(replace(found, revision=None))
        for item, found in zip(value, references, strict=True)
    ]


def why_no_repo(text: str) -> str | None:
    """Return why a text can't be the name of a repository, ``ORG/NAME``; None if it can."""
    if not _REPO.fullmatch(text):
        return "is not the name of a repository; write ORG/NAME, of letters, digits, -, _ and ."
    if (
        len(text.partition("/")[2]) > _LONGEST
        or "--" in text
        or ".." in text
        or text.endswith(".git")
    ):
        return (
            f"the Hub refuses names above {_LONGEST} characters, with -- or .., or ending in .git"
        )
    return None
