"""Describes the exception that ended a rank: its kind, its cause, and where the rank was."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path

import torch.distributed as dist

from axonlaunch import checkpoint
from axonlaunch.checkpoint.saving.saver import SaveError
from axonlaunch.comm import RankFailedError
from axonlaunch.comm.errors import UnreachableRankError
from axonlaunch.config import ConfigError
from axonlaunch.config.problems.errors import PlainError
from axonlaunch.diagnostics.out_of_memory import is_out_of_memory
from axonlaunch.launch.failures.report import Report, cause_of, plain_error, report_of_rank
from axonlaunch.launch.local.messages import RankSpec
from axonlaunch.system.authentication import ForgedMessageError
from axonlaunch.training.ending.nonfinite import NotFiniteError
from axonlaunch.training.measuring.peak_memory import available_to_rank

_PLAIN = (
    checkpoint.CorruptCheckpointError,
    SaveError,
    NotFiniteError,
    PlainError,
    ConfigError,
    ForgedMessageError,
    UnreachableRankError,
)
"""Errors with messages that need no traceback."""
_TYPE_MISMATCH = ("same dtype", "scalar type", "should be the same")
"""Phrases in torch's error messages about tensors of different types."""
_LOST_PEER = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "socket closed",
    "remote process exited",
    "ncclremoteerror",
    "remote error",
)
"""Phrases in the messages of errors that a lost peer causes."""


def report_of(error: BaseException, spec: RankSpec) -> Report:
    """Describe an exception that ends this rank."""
    text: str | None = "".join(traceback.format_exception(error))
    rank = spec.rank
    if isinstance(error, RankFailedError):
        rank, error = error.rank, error.__cause__ or error
    if isinstance(error, _PLAIN):
        text = None
    reason = f"{type(error).__name__}: {str(error).strip() or type(error).__name__}"
    cause = _cause(error)
    if gone := _find_deleted(error, spec.log.parents[1]):
        reason, cause = f"{gone} is gone", "folder"
    elif isinstance(error, OSError) and cause:
        reason = plain_error(error)
    if cause in ("disk", "files", "folder"):
        text = None
    heartbeat = spec.heartbeats.read(spec.local_rank)
    report = report_of_rank(
        rank,
        "connection" if _is_connection(error) else "error",
        reason,
        log=spec.log,
        step=heartbeat.step,
        doing=heartbeat.phase,
    )
    return dataclasses.replace(
        report,
        traceback=text,
        log="" if cause == "folder" else report.log,
        cause=cause,
        memory_bytes=available_to_rank(spec.local_world_size) if is_out_of_memory(error) else None,
    )


def _find_deleted(error: BaseException, run_folder: Path) -> str:
    """Return the deleted file or run folder that caused an error; empty for other errors."""
    if not isinstance(error, OSError | SaveError):
        return ""
    if not (run_folder / "logs").is_dir():
        return f"the run folder {run_folder}"
    file = Path(str(getattr(error, "filename", "")))
    is_missing = isinstance(error, FileNotFoundError) and run_folder in file.parents
    return str(file) if is_missing else ""


def _cause(error: BaseException) -> str:
    """Return the known cause of an error, which selects the hint; empty if unknown."""
    text = str(error).lower()
    if is_out_of_memory(error):
        return "memory"
    if cause := cause_of(error):
        return cause
    if isinstance(error, NotFiniteError):
        return "loss"
    if isinstance(error, ModuleNotFoundError):
        return f"module {error.name}"
    if isinstance(error, ConnectionRefusedError) or "connection refused" in text:
        return "refused"
    if "bfloat16" in text and any(words in text for words in _TYPE_MISMATCH):
        return "types"
    return ""


def _is_connection(error: BaseException) -> bool:
    """Return whether an error is due to a lost peer rather than to this rank."""
    if isinstance(error, UnreachableRankError):
        return False  # this is the first failure
    if isinstance(error, dist.DistNetworkError | ConnectionError):
        return True
    # NCCL also raises DistBackendError for other failures: two ranks on one device, a full
    # /dev/shm, a missing network interface. Only the text distinguishes them.
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _LOST_PEER)
