"""Reads the folder of a run that has finished, is running, has crashed, or is incomplete.

Missing parts are left out. Unreadable files are listed in ``notes`` and raise no error.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from axonlaunch.config import CONFIG
from axonlaunch.config.values.plain_values import flatten, read_yaml
from axonlaunch.diagnostics.report.growing_lines import LARGEST_READ, GrowingLines
from axonlaunch.diagnostics.report.record.node_samples import NodeSamples
from axonlaunch.system.storage.files import is_locked, open_regular, why_no_folder
from axonlaunch.system.storage.run_files import (
    CRASH,
    ESTIMATE,
    EVENTS,
    METRICS,
    ORIGINS,
    STEP_TIME,
    SUMMARY,
)
from axonlaunch.system.storage.strict_json import finite_number, parse_json
from axonlaunch.system.text.units import Counted, rate_in

RunStatus = Literal["running", "done", "interrupted", "failed", "killed", "unknown", "unreadable"]

FILES = (CONFIG, ORIGINS, METRICS, EVENTS, SUMMARY, CRASH, ESTIMATE, STEP_TIME)
"""All files of a run's folder that are read."""
_MAX_BYTES = 1 << 24
"""Maximum size of files that do not grow."""
_LAST_STEP = 2**53
_LAST_TIME = 4e9
"""Seconds since 1970, the year 2096."""
_STARTED, _ENDED = "started", "ended"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of a run's folder.

    Attributes:
        path: Folder of the run.
        name: Name from the configuration, or else of the folder.
        status: Whether the run is running or how it ended. killed: it is not running and recorded
            no end. unknown: it was launched on another node, and either runs or was killed.
            unreadable: no file can be read.
        config: Frozen configuration by dotted key.
        origins: Origin of each value by the same keys; {} if unknown.
        summary: Content of ``summary.json``; {} if it is missing or from an earlier attempt.
        crash: Content of ``crash.json``; None if no rank failed.
        estimate: Content of ``estimate.json``: the estimated peak memory with its parts.
        step_time: Content of ``step_time.json``: the predicted step time with its parts, or the
            reason why it could not be predicted.
        steps: Lines of ``metrics.jsonl`` with a loss, in order of steps.
        evaluations: Lines of ``metrics.jsonl`` with ``eval_loss``.
        events: Lines of ``events.jsonl``, in order of time.
        notes: Files that could not be read, and why.
        node_samples: Samples of the nodes other than that of the main rank; None if the folder
            can't be read.
    """

    path: Path
    name: str
    status: RunStatus
    config: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    crash: dict[str, Any] | None = None
    estimate: dict[str, Any] | None = None
    step_time: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    node_samples: NodeSamples | None = None

    def events_of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind: started, saved, evaluated, failed, ended, ..."""
        return [event for event in self.events if event.get("event") == kind]

    @property
    def started(self) -> dict[str, Any]:
        """Event of the latest attempt whose ranks became ready; {} if no attempt did."""
        return next(iter(reversed(self.events_of_kind(_STARTED))), {})

    @property
    def first_step(self) -> int:
        """Step from which the run began; not 0 if it continues the checkpoint of another run."""
        steps = (event.get("step") for event in self.events_of_kind(_STARTED))
        return min((step for step in steps if isinstance(step, int)), default=0)

    @property
    def metrics(self) -> list[str]:
        """Keys of the metrics in lines of evaluations, such as ``eval_accuracy``."""
        keys = dict.fromkeys(key for line in self.evaluations for key in line)
        return [key for key in keys if key.startswith("eval_") and key != "eval_loss"]

    @property
    def unit(self) -> Counted:
        """What the loss counts (tokens, images, samples or targets), as in ``metrics.jsonl``."""
        counted = self.started.get("counted")
        if isinstance(counted, str) and counted in get_args(Counted):
            return cast("Counted", counted)
        return rate_in(self.steps[-1] if self.steps else {})[0]


class NotARunError(Exception):
    """A path is not the folder of a run.

    Attributes:
        notes: Files in the folder that can't be read, and why.
    """

    def __init__(self, message: str, notes: Sequence[str] = ()) -> None:
        super().__init__("; ".join([message, *notes]))
        self.notes = [*notes]


def read_run(path: Path) -> RunRecord:
    """Read a run's folder.

    Args:
        path: Local or remote folder (``upath``).

    Raises:
        NotARunError: The folder is missing or contains neither a configuration nor metrics.
    """
    return RunReader(path).read()


class RunReader:
    """Reads a run's folder repeatedly. Only new lines of growing files are read."""

    def __init__(self, path: Path) -> None:
        """Remember the local or remote folder (``upath``)."""
        self._path = path
        self._growing = {name: GrowingLines(path / name) for name in (METRICS, EVENTS)}
        self._samples = NodeSamples(path)

    def read(self) -> RunRecord:
        """Read the folder.

        Raises:
            NotARunError: The folder is missing or contains neither a configuration nor metrics.
        """
        notes: list[str] = []
        files = _Files(self._path, notes)
        config = files.config()
        lines, events = (files.lines(self._growing[name], name) for name in (METRICS, EVENTS))
        if config is None and not lines:
            reason = f"contains neither {CONFIG} nor {METRICS} of a run"
            if not self._path.is_dir():
                reason = why_no_folder(self._path)
            raise NotARunError(f"{self._path}: {reason}", notes)
        return _record(self._path, files, config or {}, lines, events, self._samples)


def _record(
    path: Path,
    files: _Files,
    config: dict[str, Any],
    lines: list[dict[str, Any]],
    events: list[dict[str, Any]],
    samples: NodeSamples,
) -> RunRecord:
    events = [
        event
        for event in events
        if isinstance(event.get("event"), str) and is_time(event.get("time"))
    ]
    summary = files.object(SUMMARY) or {}
    crash = files.object(CRASH)
    status = _status(path, config, summary, crash, events)
    if status in ("running", "killed", "unknown"):
        summary = {}  # it is from an earlier attempt
    return RunRecord(
        path=path,
        name=str(config.get("name", path.name)),
        status=status,
        config=config,
        origins=files.object(ORIGINS) or {},
        summary=summary,
        crash=crash,
        estimate=files.object(ESTIMATE),
        step_time=files.object(STEP_TIME),
        steps=_in_order([line for line in lines if _is_step(line.get("step")) and "loss" in line]),
        evaluations=[line for line in lines if _is_step(line.get("step")) and "eval_loss" in line],
        events=events,
        notes=files.notes,
        node_samples=samples,
    )


def find_runs(folder: Path) -> Iterator[RunRecord]:
    """Yield the runs in a folder at any depth, except inside of other runs.

    A run without metrics and without a readable configuration has the status ``unreadable``; its
    ``notes`` contain the reason.
    """
    for parent, names, files in os.walk(folder):
        if CONFIG in files:
            path = Path(parent)
            try:
                yield read_run(path)
            except NotARunError as error:
                notes = error.notes or [str(error)]
                yield RunRecord(path=path, name=path.name, status="unreadable", notes=notes)
            names.clear()
        names.sort()


def find_launched(folder: Path, *, by: str) -> Path | None:
    """Return the newest run in a folder whose last launch was made by ``by``, or None."""
    runs = {path.parent: path.stat().st_mtime for path in folder.glob(f"*/{EVENTS}")}
    for path in sorted(runs, key=lambda run: runs[run], reverse=True):
        with suppress(NotARunError):
            launches = read_run(path).events_of_kind("launched")
            if launches and launches[-1].get("by") == by:
                return path
    return None


def is_running(folder: Path) -> bool:
    """Return whether a process of this node runs the run, which it shows by a lock on ``logs``."""
    return is_locked(folder / "logs")


def _status(
    path: Path,
    config: dict[str, Any],
    summary: dict[str, Any],
    crash: dict[str, Any] | None,
    events: list[dict[str, Any]],
) -> RunStatus:
    """Return the status of the latest attempt, ignoring a summary of an earlier one."""
    if is_running(path):
        return "running"
    marks = [event for event in events if event["event"] in (_STARTED, _ENDED, "failed")]
    if marks and marks[-1]["event"] == _STARTED:
        return _status_unended(path, config, events)
    # A run that is interrupted before its ranks are ready writes no summary.
    status = summary.get("status") or (marks[-1].get("status") if marks else None)
    if status in ("done", "interrupted", "failed"):
        return status  # type: ignore[no-any-return]
    return _status_unended(path, config, events) if crash is None else "failed"


def _status_unended(path: Path, config: dict[str, Any], events: list[dict[str, Any]]) -> RunStatus:
    """Return the status of a run without a recorded end that no process of this node runs.

    Locks of other nodes are not visible. A run of another node counts as running if it wrote a file
    within ``launch.timeout_s``, after which a run without progress is ended.
    """
    hosts = [event.get("host") for event in events if event["event"] == "launched"]
    if not hosts or hosts[-1] == socket.gethostname():
        return "killed"
    within_s = config.get("launch.timeout_s")
    files = [path / name for name in (METRICS, EVENTS)]
    try:
        written = max(file.stat().st_mtime for file in files if file.exists())
    except (OSError, AttributeError):  # remote storage without modification times
        return "unknown"
    is_recent = _is_number(within_s) and time.time() - written < float(str(within_s))
    return "running" if is_recent else "unknown"


def _in_order(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line per step; for a step repeated after a restart, the last line."""
    return [line for _, line in sorted({line["step"]: line for line in steps}.items())]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LAST_STEP


def is_time(value: object) -> bool:
    """Return whether a value is a valid time in seconds since 1970."""
    return _is_number(value) and 0 <= float(str(value)) <= _LAST_TIME


def _representable(value: Any) -> Any:
    """Return a value of the configuration; None for a number outside the range of a float."""
    return finite_number(value) if _is_number(value) else value


@dataclass
class _Files:
    """Reads a run's files, and adds a note for each file that can't be read."""

    folder: Path
    notes: list[str]

    def config(self) -> dict[str, Any] | None:
        content = self._content(CONFIG)
        if content is None:
            return None
        try:
            values = flatten(read_yaml(content.decode()))
            return {key: _representable(value) for key, value in values.items()}
        except (ValueError, RecursionError) as error:
            self.notes.append(f"{CONFIG} can't be read: {error}")
            return None

    def object(self, name: str) -> dict[str, Any] | None:
        content = self._content(name)
        if content is None:
            return None
        try:
            value = parse_json(content)
            if not isinstance(value, dict):
                raise TypeError("not an object")
        except (ValueError, TypeError, RecursionError) as error:
            self.notes.append(f"{name} can't be read: {error}")
            return None
        return value

    def lines(self, growing: GrowingLines, name: str) -> list[dict[str, Any]]:
        try:
            growing.read()
        except OSError as error:
            self.notes.append(f"{name} can't be read: {error.strerror or error}")
            return []
        if growing.unreadable:
            self.notes.append(f"{growing.unreadable} lines of {name} can't be read")
        if growing.is_cut:
            self.notes.append(
                f"{name} is larger than {LARGEST_READ} bytes; only its beginning is shown"
            )
        return growing.lines

    def _content(self, name: str) -> bytes | None:
        try:
            with open_regular(self.folder / name) as stream:
                content = stream.read(_MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.notes.append(f"{name} can't be read: {error.strerror or error}")
            return None
        if len(content) > _MAX_BYTES:
            self.notes.append(f"{name} is larger than {_MAX_BYTES} bytes")
            return None
        return content
