"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_BEGUN = 3
"""Least number of letters that count as the beginning of a name."""


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the most similar known name; None if no name is similar.

    The beginning of a name is preferred to similar letters: ``h100`` gives ``h100_80gb``, not
    ``h200``.

    Args:
        name: Name that the user wrote.
        candidates: Known names.
        cutoff: Least similarity, from 0 to 1, of a returned name.
    """
    lowered = {candidate.lower(): candidate for candidate in candidates}
    begun = [candidate for candidate in lowered if candidate.startswith(name.lower())]
    if begun and len(name) >= _BEGUN:
        return lowered[min(begun, key=len)]
    close = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def unknown(kind: str, name: str, candidates: Iterable[str]) -> str:
    """Return the message for an unknown name, with a suggestion and the known names.

    Args:
        kind: Kind of the named object, ``optimizer``.
        name: Name that the user wrote.
        candidates: Known names, in the order in which they are listed.
    """
    candidates = list(candidates)
    close = nearest(name, candidates)
    meant = f"did you mean {close}? " if close else ""
    return f"there is no {kind} {name!r}; {meant}known: {', '.join(candidates) or 'none'}"
