"""Names the signals that end processes, with their likely causes and remedies."""

from __future__ import annotations

import signal

_COMPILED_CODE = (
    "compiled code failed, of torch or of another package",
    "set PYTHONFAULTHANDLER=1 and run the command again to see where",
)
_CAUSES_AND_REMEDIES = {
    "SIGKILL": (
        "the system may have run out of memory",
        "end other programs, or ask for less",
    ),
    "SIGBUS": (
        "a file that it read may have been cut short, or a disk is full",
        "look at both, and run the command again",
    ),
    "SIGXCPU": ("it reached the limit of processor time", "raise the limit (ulimit -t)"),
    "SIGXFSZ": ("it reached the limit of file sizes", "raise the limit (ulimit -f)"),
    **dict.fromkeys(
        ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"), _COMPILED_CODE
    ),
}


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9, ``SIGRTMIN+6`` for 40 on Linux."""
    try:
        return signal.Signals(number).name
    except ValueError:  # Python names only the first and the last real-time signal
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def cause_of_signal(number: int) -> str:
    """Return the likely cause of a process's end by a signal; empty if unknown."""
    cause, _ = _CAUSES_AND_REMEDIES.get(signal_name(number), ("", ""))
    return cause


def cause_and_remedy(number: int) -> str:
    """Return the likely cause and what to do: ``it reached the limit of ...: raise the limit``."""
    unknown = ("another program ended it", "run the command again")
    return ": ".join(_CAUSES_AND_REMEDIES.get(signal_name(number), unknown))
