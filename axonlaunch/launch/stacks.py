"""Where the Python code of a rank is that makes no progress, asked from outside.

A rank's ``faulthandler`` writes its threads' stacks to its log when it gets ``SIGNAL``, even while
it waits in C code. A process that is stopped says nothing; the system says so in its place.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

from axonlaunch.whereabouts import is_passed_through, state, waits

SIGNAL = signal.SIGUSR1
_ANSWER_S = 2.0
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
_RANK = re.compile(r"axonlaunch[/\\]launch[/\\](rank|alone)\.py")
_BACKWARD = re.compile(r"[/\\]torch[/\\]autograd[/\\]graph\.py")
_TORCH = re.compile(r"[/\\]site-packages[/\\]torch[/\\]")
_WRAPPERS = ("wrapper", "_call_with_frames_removed", "inner")
_SHOWN = 7
"""Frames of a stack that people are shown, the innermost."""


@dataclass(frozen=True)
class Frame:
    """One call: what, and where in the source."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        parts = Path(self.file).parts
        return f"{self.name} ({'/'.join(parts[-2:])}:{self.line})"


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is.

    Attributes:
        is_waiting: For other ranks.
        words: What it does, in half a sentence.
        stack: Its main thread's frames for people, the innermost last.
    """

    is_waiting: bool
    words: str
    stack: str


def ask(pids: dict[int, int], logs: dict[int, Path]) -> dict[int, Whereabouts]:
    """Ask ranks where they are.

    Args:
        pids: Process of each rank.
        logs: Log of each rank.
    """
    sizes = {rank: _size(logs[rank]) for rank in pids}
    for pid in pids.values():
        try:
            os.kill(pid, SIGNAL)
        except ProcessLookupError:
            continue
    found: dict[int, Whereabouts] = {}
    deadline = time.monotonic() + _ANSWER_S
    while len(found) < len(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank, pid in pids.items():
            if rank in found:
                continue
            frames = main_stack(_since(logs[rank], sizes[rank]))
            if frames:
                found[rank] = locate(frames, is_asleep=state(pid) == "S")
    for rank, pid in pids.items():
        if rank not in found:
            found[rank] = _silent(state(pid))
    return found


def locate(frames: list[Frame], *, is_asleep: bool) -> Whereabouts:
    """Say from a rank's frames, the innermost first, whether it waits for others, and in what."""
    frames = [*dropwhile(lambda frame: is_passed_through(frame.file), frames)] or frames
    own = [frames[0], *(frame for frame in frames[1:] if not _TORCH.search(frame.file))]
    told = "\n".join(f"  {frame}" for frame in reversed(own[:_SHOWN]))
    if not waits((frame.file for frame in frames), is_asleep=is_asleep):
        return Whereabouts(False, f"is in {frames[0]}", told)
    if _BACKWARD.search(frames[0].file):
        return Whereabouts(True, "waiting in a collective of backward", told)
    inside = [*takewhile(lambda frame: _TORCH.search(frame.file), frames)]
    named = [frame.name for frame in inside if frame.name not in _WRAPPERS]
    if not named or len(inside) == len(frames):
        return Whereabouts(True, f"waiting in {frames[0]}", told)
    return Whereabouts(True, f"waiting in {named[-1]}, called by {frames[len(inside)]}", told)


def main_stack(text: str) -> list[Frame]:
    """Return the frames of the thread that trains, the innermost first, of ``faulthandler``'s."""
    for block in text.split("most recent call first):\n")[1:]:
        frames = []
        for line in block.splitlines():
            match = _FRAME.fullmatch(line)
            if match is None:
                break
            frames.append(Frame(match["file"], int(match["line"]), match["name"]))
        if any(_RANK.search(frame.file) and frame.name == "main" for frame in frames):
            return frames
    return []


def _silent(letter: str) -> Whereabouts:
    if letter in ("T", "t"):
        return Whereabouts(False, "is stopped by a signal (SIGSTOP or SIGTSTP)", "")
    if letter == "D":
        return Whereabouts(False, "waits for a disk or a device and can't be interrupted", "")
    return Whereabouts(False, "does not answer: it may be inside C code that never returns", "")


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _since(log: Path, size: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(size)
        return stream.read().decode(errors="replace")
