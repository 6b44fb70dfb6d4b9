"""Reads the checked-out git commit of a folder from files.

git is not run, because a repository's configuration may name programs that git would start.
"""

from __future__ import annotations

from pathlib import Path

_LARGEST = 1 << 20


def commit_of(folder: Path) -> str | None:
    """Return the commit checked out in a folder or a folder above; None without a repository.

    Uncommitted changes are ignored.
    """
    for parent in (folder, *folder.parents):
        try:
            git = _git_folder(parent / ".git")
            return None if git is None else _commit(git)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
    return None


def _git_folder(path: Path) -> Path | None:
    if path.is_dir():
        return path
    kind, _, folder = _read(path).partition(": ")  # a worktree has a file with "gitdir: /path"
    return path.parent / folder.strip() if kind == "gitdir" else None


def _commit(git: Path) -> str | None:
    head = _read(git / "HEAD").strip()
    if not head.startswith("ref: "):
        return _hash(head)
    name = head.removeprefix("ref: ")
    common = git / "commondir"
    folders = [git, git / _read(common).strip()] if common.exists() else [git]
    for folder in folders:
        if (folder / name).is_file():
            return _hash(_read(folder / name).strip())
        if (folder / "packed-refs").is_file():
            for line in _read(folder / "packed-refs").splitlines():
                if line.endswith(f" {name}"):
                    return _hash(line.split()[0])
    return None


def _hash(text: str) -> str | None:
    is_hash = len(text) in (40, 64) and all(c in "0123456789abcdef" for c in text)
    return text if is_hash else None


def _read(path: Path) -> str:
    with path.open(encoding="utf-8") as stream:
        return stream.read(_LARGEST)
