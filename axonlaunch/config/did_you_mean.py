"""What was probably meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_BEGUN = 3
"""Letters that are the beginning of a name, rather than any letters."""


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
    """Say that a name is not known, which ones are, and which was probably meant.

    Args:
        kind: What it would be the name of, ``optimizer``.
        name: As a user wrote it.
        known: What there is, in the order in which it is listed.
    """
    known = list(known)
    close = nearest(name, known)
    meant = f"did you mean {close}? " if close else ""
    return f"there is no {kind} {name!r}; {meant}known: {', '.join(known) or 'none'}"
