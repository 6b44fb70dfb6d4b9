"""Where a rank is that makes no progress, asked from outside: its stack, its open collectives.

A rank's ``faulthandler`` writes its threads' stacks to its log when it gets ``SIGNAL``, even while
it waits in C code, and a thread of it writes what torch recorded of its collectives. A process that
is stopped says nothing; the system says so in its place.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from pathlib import Path

from axonlaunch.diagnostics import flight_recorder
from axonlaunch.diagnostics.flight_recorder import Record
from axonlaunch.diagnostics.wait_detection import is_passed_through, waits
from axonlaunch.launch.failures.report import FailureKind, Report
from axonlaunch.system import files
from axonlaunch.system.frame_origin import frame_owner
from axonlaunch.system.process_state import state

SIGNAL = signal.SIGUSR1
FLIGHT_RECORD = ".flight_record"
"""What a log's name ends in where it is not a log but torch's dump of collectives."""
_ANSWER_S = 2.0
_RECORD_S = 15.0
"""For the record of a rank whose stack has come: NCCL's asks the device, which may be busy, what of
each collective is done."""
_PREFIX = "axonlaunch collectives: "
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
_RANK = re.compile(r"axonlaunch[/\\]launch[/\\](local[/\\]rank_process|external[/\\]rank)\.py")
_BACKWARD = re.compile(r"[/\\]torch[/\\]autograd[/\\]graph\.py")
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
        folders = Path(self.file).parts
        return f"{self.name} ({'/'.join(folders[-2:])}:{self.line})"


@dataclass(frozen=True)
class HangLocation:
    """Where a rank is.

    Attributes:
        is_waiting: For other ranks.
        doing: What it does, in half a sentence.
        stack: Its main thread's frames for people, the innermost last.
        record: Of its collectives; None where it reported none.
    """

    is_waiting: bool
    doing: str
    stack: str
    record: Record | None = None

    def to_report(self, about: Report, *, timeout_s: float) -> Report:
        """Return the report of a rank that made no progress for some seconds."""
        kind: FailureKind = "waiting" if self.is_waiting else "hang"
        reason = self.doing
        if not self.is_waiting:
            reason = f"made no progress for {timeout_s:g} s (hang): it {reason}"
        return replace(
            about, kind=kind, reason=reason, traceback=self.stack or None, record=self.record
        )


def ask(pids: dict[int, int], logs: dict[int, Path]) -> dict[int, HangLocation]:
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
    places: dict[int, HangLocation] = {}
    silent = dict(pids)
    asked = time.monotonic()
    while silent:
        waited = time.monotonic() - asked
        if waited > (_RECORD_S if places.keys() & silent.keys() else _ANSWER_S):
            break
        time.sleep(0.05)
        for rank, pid in list(silent.items()):
            written = _since(logs[rank], sizes[rank])
            if frames := main_stack(written):
                where, record = locate(frames, is_asleep=state(pid) == "S"), _record(written)
                places[rank] = replace(where, record=record)
                if record is not None:
                    del silent[rank]
    return {rank: places.get(rank) or _silent(state(pid)) for rank, pid in pids.items()}


def write(log: Path) -> None:
    """Add this process's record to its log, and put torch's own form of it beside the log."""
    line = f"{_PREFIX}{flight_recorder.take().to_json()}\n".encode()
    with os.fdopen(files.appending_descriptor(log), "ab", buffering=0) as stream:
        stream.write(line)
    files.replace(log.with_suffix(FLIGHT_RECORD), flight_recorder.dump())


def locate(frames: list[Frame], *, is_asleep: bool) -> HangLocation:
    """Say from a rank's frames, the innermost first, whether it waits for others, and in what."""
    frames = [*dropwhile(lambda frame: is_passed_through(frame.file), frames)] or frames
    own = [frames[0], *(frame for frame in frames[1:] if frame_owner(frame.file) != "torch")]
    stack = "\n".join(f"  {frame}" for frame in reversed(own[:_SHOWN]))
    if not waits((frame.file for frame in frames), is_asleep=is_asleep):
        return HangLocation(False, f"is in {frames[0]}", stack)
    if _BACKWARD.search(frames[0].file):
        return HangLocation(True, "waiting in a collective of backward", stack)
    inside = [*takewhile(lambda frame: frame_owner(frame.file) == "torch", frames)]
    named = [frame.name for frame in inside if frame.name not in _WRAPPERS]
    if not named or len(inside) == len(frames):
        return HangLocation(True, f"waiting in {frames[0]}", stack)
    return HangLocation(True, f"waiting in {named[-1]}, called by {frames[len(inside)]}", stack)


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


def _record(text: str) -> Record | None:
    for line in text.splitlines(keepends=True):
        if line.startswith(_PREFIX) and line.endswith("\n"):
            with suppress(ValueError, LookupError, TypeError):  # a user's own line may look so
                return Record.of(json.loads(line.removeprefix(_PREFIX)))
    return None


def _silent(letter: str) -> HangLocation:
    if letter in ("T", "t"):
        return HangLocation(False, "is stopped by a signal (SIGSTOP or SIGTSTP)", "")
    if letter == "D":
        return HangLocation(False, "waits for a disk or a device and can't be interrupted", "")
    return HangLocation(False, "is unresponsive (stuck in native code)", "")


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _since(log: Path, size: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(size)
        return stream.read().decode(errors="replace")
