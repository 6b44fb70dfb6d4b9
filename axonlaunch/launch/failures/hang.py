"""Locates a rank that makes no progress, by its stack and its open collectives.

On ``SIGNAL`` a rank's ``faulthandler`` writes the stacks of its threads to the log, even while C
code runs, and one of its threads writes torch's record of collectives. The state of a process that
does not respond, such as a stopped one, is read from the operating system.
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
from axonlaunch.system.frame_origin import frame_owner
from axonlaunch.system.processes.process_state import state
from axonlaunch.system.storage import files

SIGNAL = signal.SIGUSR1
FLIGHT_RECORD = ".flight_record"
"""File name suffix of torch's dump of collectives, which is next to the rank's log."""
_ANSWER_S = 2.0
_RECORD_S = 15.0
"""Seconds to wait for the record of a rank that has written its stack. NCCL queries the state of
each collective on the device, which may be busy."""
_PREFIX = "axonlaunch collectives: "
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
_RANK = re.compile(r"axonlaunch[/\\]launch[/\\](local[/\\]rank_process|external[/\\]rank)\.py")
_BACKWARD = re.compile(r"[/\\]torch[/\\]autograd[/\\]graph\.py")
_WRAPPERS = ("wrapper", "_call_with_frames_removed", "inner")
_SHOWN = 7
"""Number of stack frames to show, counted from the innermost."""


@dataclass(frozen=True)
class Frame:
    """One frame of a stack: function name and source location."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        folders = Path(self.file).parts
        return f"{self.name} ({'/'.join(folders[-2:])}:{self.line})"


@dataclass(frozen=True)
class HangLocation:
    """The location of a rank in its code.

    Attributes:
        is_waiting: Whether the rank waits for other ranks.
        doing: Description of its activity, as a part of a sentence.
        stack: Frames of its main thread as text, the innermost last.
        record: Record of its collectives; None if it wrote none.
    """

    is_waiting: bool
    doing: str
    stack: str
    record: Record | None = None

    def to_report(self, about: Report, *, timeout_s: float) -> Report:
        """Add the location to the report of a rank that made no progress for ``timeout_s``."""
        kind: FailureKind = "waiting" if self.is_waiting else "hang"
        reason = self.doing
        if not self.is_waiting:
            reason = f"made no progress for {timeout_s:g} s (hang): it {reason}"
        return replace(
            about, kind=kind, reason=reason, traceback=self.stack or None, record=self.record
        )


def ask(pids: dict[int, int], logs: dict[int, Path]) -> dict[int, HangLocation]:
    """Locate ranks by sending ``SIGNAL`` and reading their logs.

    Args:
        pids: Process id of each rank.
        logs: Path of each rank's log.
    """
    sizes = {rank: _size(logs[rank]) for rank in pids}
    for pid in pids.values():
        try:
            os.kill(pid, SIGNAL)
        except ProcessLookupError:
            continue
    locations: dict[int, HangLocation] = {}
    pending = dict(pids)
    began = time.monotonic()
    while pending:
        waited = time.monotonic() - began
        if waited > (_RECORD_S if locations.keys() & pending.keys() else _ANSWER_S):
            break
        time.sleep(0.05)
        for rank, pid in list(pending.items()):
            written = _text_after(logs[rank], sizes[rank])
            if frames := main_stack(written):
                location, record = locate(frames, is_asleep=state(pid) == "S"), _record(written)
                locations[rank] = replace(location, record=record)
                if record is not None:
                    del pending[rank]
    return {rank: locations.get(rank) or _unresponsive(state(pid)) for rank, pid in pids.items()}


def write(log: Path) -> None:
    """Append this process's record to its log, and write torch's dump next to the log."""
    line = f"{_PREFIX}{flight_recorder.take().to_json()}\n".encode()
    with os.fdopen(files.appending_descriptor(log), "ab", buffering=0) as stream:
        stream.write(line)
    files.replace(log.with_suffix(FLIGHT_RECORD), flight_recorder.dump())


def locate(frames: list[Frame], *, is_asleep: bool) -> HangLocation:
    """Return a rank's location from its frames, the innermost first."""
    frames = [*dropwhile(lambda frame: is_passed_through(frame.file), frames)] or frames
    shown = [frames[0], *(frame for frame in frames[1:] if frame_owner(frame.file) != "torch")]
    stack = "\n".join(f"  {frame}" for frame in reversed(shown[:_SHOWN]))
    if not waits((frame.file for frame in frames), is_asleep=is_asleep):
        return HangLocation(False, f"is in {frames[0]}", stack)
    if _BACKWARD.search(frames[0].file):
        return HangLocation(True, "waiting in a collective of backward", stack)
    in_torch = [*takewhile(lambda frame: frame_owner(frame.file) == "torch", frames)]
    names = [frame.name for frame in in_torch if frame.name not in _WRAPPERS]
    if not names or len(in_torch) == len(frames):
        return HangLocation(True, f"waiting in {frames[0]}", stack)
    return HangLocation(True, f"waiting in {names[-1]}, called by {frames[len(in_torch)]}", stack)


def main_stack(text: str) -> list[Frame]:
    """Return the training thread's frames from ``faulthandler`` output, the innermost first."""
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
            with suppress(ValueError, LookupError, TypeError):  # user output may look the same
                return Record.of(json.loads(line.removeprefix(_PREFIX)))
    return None


def _unresponsive(letter: str) -> HangLocation:
    if letter in ("T", "t"):
        return HangLocation(False, "is stopped by a signal (SIGSTOP or SIGTSTP)", "")
    if letter == "D":
        return HangLocation(False, "waits for a disk or a device and can't be interrupted", "")
    return HangLocation(False, "is unresponsive (stuck in native code)", "")


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _text_after(log: Path, size: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(size)
        return stream.read().decode(errors="replace")
