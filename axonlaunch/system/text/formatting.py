"""Formats bytes, counts and times in the same way for all tables and messages."""

from __future__ import annotations

import math

GIB, MIB = 1024**3, 1024**2
UNITS = {GIB: "GiB", MIB: "MiB"}
_MULTIPLES = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}


def size(number: float) -> str:
    """Format bytes as MiB or GiB with three significant digits."""
    unit = unit_of(number)
    return f"{figures(number / unit)} {UNITS[unit]}"


def figures(number: float) -> str:
    """Format a number without an exponent: ``0.00123``, ``12.3``, ``12,345``.

    Numbers below 100 have three significant digits but at most six decimal places, others have no
    decimal places.
    """
    if number == 0:
        return "0"
    if abs(number) >= 100:
        return f"{number:,.0f}"
    text = f"{number:.3g}"
    return text if "e" not in text else f"{number:.6f}"


def unit_of(number: float) -> int:
    """Return GiB or MiB, so that the number has few digits before the decimal point."""
    return GIB if number >= 999.5 * MIB else MIB


def quantity(number: float) -> str:
    """Format a count with three significant digits: ``813``, ``1.84M``, ``41.2k``."""
    for unit, size in _MULTIPLES.items():
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def parse_quantity(text: str) -> float | None:
    """Return the number in a text like ``3T``, ``500b``, ``41.2k`` or ``1e9``; None without one."""
    units = {unit.lower(): size for unit, size in _MULTIPLES.items()}
    digits = text.strip().lower()
    scale = units.get(digits[-1:], 1.0)
    try:
        number = float(digits[:-1] if scale != 1.0 else digits) * scale
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def ago(seconds: float) -> str:
    """Format a past time: ``3 min ago``."""
    seconds = max(0.0, seconds)
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
