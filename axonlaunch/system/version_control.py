"""The commit of the folder that a program is started in, read from files.

Git itself is not run: a repository's own configuration may name programs that it would start.
"""

from __future__ import annotations

from pathlib import Path

_LARGEST = 1 << 20


def commit_of(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder or above it; None where there is none.

    Changes that are not committed are not seen.
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
    kind, _, where = _read(path).partition(": ")  # of a worktree: "gitdir: /path"
    return path.parent / where.strip() if kind == "gitdir" else None


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
