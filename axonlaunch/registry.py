"""Names that stand for code: a name maps to ``"module:attribute"``, imported on first use.

It knows nothing of what it holds; importing a registry never imports what it lists.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
_BEGUN = 3
"""Letters that are the beginning of a name, rather than any letters."""


class UnknownNameError(ValueError):
    """A name that the registry does not list; the message lists those that it does."""


@dataclass(frozen=True)
class Entry:
    """What a registry knows about a name before its code is imported.

    Attributes:
        target: The object itself, or where to import it from as ``"module:attribute"``.
        summary: One line that says what it is, for ``axonlaunch ls``.
    """

    target: Any
    summary: str


class Registry(Generic[T]):
    """A table of lazily imported things of one kind."""

    def __init__(self, kind: str, entries: dict[str, Entry] | None = None) -> None:
        self.kind = kind
        self._entries = dict(entries or {})

    def add(self, name: str, target: T | str, *, summary: str) -> None:
        """List a thing under a name.

        Raises:
            ValueError: The name is taken by something else.
        """
        known = self._entries.get(name)
        if known is not None and known.target != target:
            raise ValueError(f"{self.kind} {name!r} is registered already ({known.summary})")
        self._entries[name] = Entry(target, summary)

    def get(self, name: str) -> T:
        """Import and return what a name stands for.

        Raises:
            UnknownNameError: The name is not listed.
        """
        if name not in self._entries:
            raise UnknownNameError(unknown(self.kind, name, self.names()))
        target = self._entries[name].target
        return cast("T", load(target) if isinstance(target, str) else target)

    def names(self) -> list[str]:
        """Return the listed names, sorted."""
        return sorted(self._entries)

    def summaries(self) -> dict[str, str]:
        """Return ``{name: summary}``, sorted by name."""
        return {name: self._entries[name].summary for name in self.names()}

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def load(target: str) -> Any:
    """Import ``"package.module:attribute"``.

    Raises:
        ValueError: The text is not of that form.
        ImportError: The module or the attribute does not exist.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{target!r} is not of the form package.module:attribute")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ImportError(f"module {module_name!r} has no attribute {attribute!r}")
    return getattr(module, attribute)


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like ``name``, or None where none is like it.

    A name that was begun is nearer than one of other letters: ``h100`` is ``h100_80gb``, and not
    ``h200``.

    Args:
        name: As a user wrote it.
        known: What it may stand for.
        cutoff: Similarity, from 0 to 1, below which a name is too far to be what was meant.
    """
    lowered = {candidate.lower(): candidate for candidate in known}
    begun = [candidate for candidate in lowered if candidate.startswith(name.lower())]
    if begun and len(name) >= _BEGUN:
        return lowered[min(begun, key=len)]
    close = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that a name is not known, which ones are, and which was probably meant."""
    known = list(known)
    close = nearest(name, known)
    meant = f"did you mean {close}? " if close else ""
    return f"there is no {kind} {name!r}; {meant}known: {', '.join(known)}"
