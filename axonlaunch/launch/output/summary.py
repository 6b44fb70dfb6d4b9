"""Writes ``summary.json`` and ``crash.json`` at the end of a run and prints its figures."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import checkpoint
from axonlaunch.checkpoint.loading.resume_source import resume_of
from axonlaunch.config import Composed, RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.values.url import is_url, shortened
from axonlaunch.events import (
    Event,
    Listener,
    Started,
    StepLogged,
)
from axonlaunch.launch.failures.outcome import Outcome
from axonlaunch.launch.failures.report import Crash, plain_error
from axonlaunch.launch.output.console import (
    RunConsole,
    show_crash,
    show_hint,
)
from axonlaunch.launch.output.measured_goodput import goodput_of_run
from axonlaunch.launch.run_folder import finished_runs
from axonlaunch.planning.background_estimate import BackgroundEstimate
from axonlaunch.system.processes import forked_call
from axonlaunch.system.processes.targets import load_target
from axonlaunch.system.storage.files import append_text, replace_json
from axonlaunch.system.storage.run_files import CRASH, EVENTS, SUMMARY, append_event
from axonlaunch.system.storage.strict_json import finite
from axonlaunch.system.text.formatting import quantity, size
from axonlaunch.system.text.spinner import spinner
from axonlaunch.system.text.units import Counted
from axonlaunch.verification.result import Proof


class RunRecorder:
    """Passes events on and records the values that the summary needs, even if the run fails.

    Attributes:
        prediction: Background estimate of memory and step time; begins with the first logged step.
        first_step_s: Seconds from the command to the first logged step.
        last: The last logged step.
        counted: Unit that the loss counts: tokens, images, samples or targets.
        proof: Proof of the layout; None if no proof was requested.
        corrupt: A line for each corrupt checkpoint that was moved aside.
    """

    prediction: BackgroundEstimate

    def __init__(self, started: float, listener: Listener, *, proof: Proof | None = None) -> None:
        self._started = started
        self.proof = proof
        self._listener = listener
        self.first_step_s: float | None = None
        self.last: StepLogged | None = None
        self.counted: Counted = "tokens"
        self.corrupt: tuple[str, ...] = ()
        self._kept: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Record an event and pass it on."""
        if isinstance(event, Started):
            self._folder = Path(event.run_dir)
            self._keep_predictions()
            self.counted = event.counted
            self.corrupt += event.corrupt
        if isinstance(event, StepLogged):
            self.last = event
            if self.first_step_s is None:
                self.first_step_s = time.time() - self._started
            self.prediction.begin()
            self._keep_predictions()
        self._listener(event)

    def _keep_predictions(self) -> None:
        """Write new predictions. Errors are ignored here and reported at the end of the run."""
        with suppress(OSError):
            for name, content in self.prediction.files().items():
                if name not in self._kept:
                    replace_json(self._folder / name, content)
                    self._kept.add(name)


class LogTail:
    """Prints new lines of the main rank's log on the console."""

    def __init__(self, log: Path, console: RunConsole) -> None:
        self._log = log
        self._console = console
        self._read = log.stat().st_size if log.exists() else 0

    def __call__(self) -> None:
        """Print complete lines that were added since the last call."""
        try:
            if self._log.stat().st_size <= self._read:
                return
            with self._log.open("rb") as stream:
                stream.seek(self._read)
                lines, newline, _ = stream.read().rpartition(b"\n")
        except OSError:  # The log does not exist now; a later call reads it.
            return
        self._read += len(lines) + len(newline)
        if newline:
            self._console.log(lines.decode(errors="replace"))


def log_of(config: RunConfig, rank: int) -> Path:
    """Return the path of a rank's log."""
    return Path(config.run_dir) / "logs" / f"rank_{rank}.log"


def finish_run(
    config: RunConfig,
    outcome: Outcome,
    record: RunRecorder,
    console: RunConsole,
    *,
    context: ForkServerContext | None = None,
    again: str | None = None,
) -> tuple[int, dict[str, Any]]:
    """Write ``summary.json``, print the run's figures, and return the exit status.

    The most important steps come first, because any of them may fail: the failure summary, the
    deletion of an interrupted save, ``summary.json`` without an estimate, the estimate (which takes
    seconds and can be skipped with Ctrl-C), and ``summary.json`` with the estimate.

        every rank done                 status done           exit status 0
        Ctrl-C, or killed by it         status interrupted    130, and how to resume
        a rank crashed                  status failed         1, and the failure summary
        done, but the disk is full      status done           1
        done, but not uploaded          status done           1

    Args:
        config: Configuration of the run.
        outcome: Outcome of its ranks.
        record: Values recorded while the ranks ran.
        console: Console on which the figures are printed.
        context: Context of the fork server, which estimates memory if a rank ran out of it, and
            uploads weights; None gives no estimate, and uploads in this process.
        again: Command that resumes the run; None describes it.
    """
    finished = outcome.finished
    interrupted = outcome.killed or (finished is not None and finished.interrupted)
    status = "interrupted" if interrupted else "failed" if outcome.crash else "done"
    summary = _first_summary(config, outcome, record, console, status=status)
    if outcome.crash is not None:
        report_crash(config, outcome.crash, context)  # first, because the next steps need a disk
    if not is_url(config.checkpoint.path or ""):  # the next run cleans up a remote folder
        try:
            checkpoint.sweep_partial(Path(config.checkpoint.path or config.run_dir))
        except OSError as error:
            _print_error("the files of an interrupted save could not be deleted", error)
    is_written = _write(config, SUMMARY, summary)
    log_event(config, "ended", {"status": status, "step": summary["steps"]})
    summary["goodput"] = finite(goodput_of_run(config))
    is_reported = status == "done" and is_written
    summary |= _estimate_fields(config, record.prediction, console, waits=is_reported)
    is_pushed = True
    if status == "done" and config.checkpoint.push is not None:
        summary["pushed"] = _push(config, console, context)
        is_pushed = summary["pushed"] is not None
    is_written = is_written and _write(config, SUMMARY, summary)
    if finished is not None or outcome.killed:
        rows = _rows(config, summary, counted=record.counted)
        if interrupted:
            rows += _rows_of_resuming(config, again)
        console.summary(rows)
    if console.refusal is not None:
        _log(config, f"the console did not take all that was printed: {console.refusal}\n")
    if interrupted:
        return 130, summary
    # A caller that reads only summary.json must not mistake an older one for that of this run.
    return (0 if outcome.crash is None and is_written and is_pushed else 1), summary


def _first_summary(
    config: RunConfig, outcome: Outcome, record: RunRecorder, console: RunConsole, *, status: str
) -> dict[str, Any]:
    """Return the content of ``summary.json`` without goodput, estimate and upload."""
    finished = outcome.finished
    last = finished or record.last  # a run that failed is reported by its last logged step
    summary: dict[str, Any] = {
        "status": status,
        "steps": last.step if last else 0,
        "loss": last.loss if last else None,
        "eval_loss": finished.eval_loss if finished else None,
        "metrics": finite(finished.metrics) if finished else {},
        f"{record.counted}_per_s": last.tokens_per_s if last else None,
        "first_step_s": record.first_step_s,
        "measured_peak_bytes": finished.peak_memory_bytes if finished else None,
        "proof": None if record.proof is None else dataclasses.asdict(record.proof),
        "corrupt_checkpoints": list(record.corrupt),
        "console_refused": console.refusal,
        "run_dir": config.run_dir,
    }
    if outcome.crash is not None:
        first = outcome.crash.first
        summary |= {"failed_rank": first.rank, "reason": first.reason}
    finite_summary: dict[str, Any] = finite(summary)
    return finite_summary


def _push(config: RunConfig, console: RunConsole, context: ForkServerContext | None) -> str | None:
    """Upload the last checkpoint to the Hub; return its page, or None after printing an error."""
    target, repo = "axonlaunch.checkpoint.exchange.hub_push:push_run", config.checkpoint.push
    console.wait(f"uploading to {repo}")
    try:
        if context is None:
            page: str = load_target(target)(config)
        else:
            page = forked_call.call(context, target, config, task="uploading the weights")
    except Exception as error:  # the run is done, and its report must not be lost
        console.stop()
        again = finished_runs.pushing_command(config)
        print(f"error: {error}; the weights are saved, and {again} uploads them", file=sys.stderr)
        return None
    console.stop()
    return page


def _write(config: RunConfig, name: str, content: dict[str, Any]) -> bool:
    """Write a JSON file to the run folder; return whether that succeeded."""
    try:
        replace_json(Path(config.run_dir) / name, content)
    except OSError as error:
        _print_error(f"{name} could not be written", error)
        return False
    return True


def _log(config: RunConfig, text: str) -> None:
    """Append notes to rank 0's log. The summary reports a full disk or a deleted folder."""
    with suppress(OSError):
        append_text(log_of(config, 0), text)


def log_event(config: RunConfig, kind: str, fields: dict[str, Any]) -> None:
    """Append a line to ``events.jsonl``; if that fails, print the error."""
    try:
        append_event(Path(config.run_dir), kind, fields)
    except OSError as error:
        _print_error(f"{EVENTS} could not be written", error)


def _print_error(failure: str, error: OSError) -> None:
    """Print an error of a full disk or a deleted folder, and go on with the report."""
    print(f"{failure}: {plain_error(error)}", file=sys.stderr)


def _estimate_fields(
    config: RunConfig, prediction: BackgroundEstimate, console: RunConsole, *, waits: bool
) -> dict[str, float]:
    """Return the estimate's fields of the summary.

    Args:
        config: Configuration of the run.
        prediction: Predictions about the run, such as its peak of memory.
        console: Console of the run.
        waits: Whether to wait for the estimate, and to say why there is none; false if the run
            failed or its summary can't be written.
    """
    if waits:
        prediction.begin()
        if prediction.is_wanted:
            console.wait("estimating peak memory (Ctrl-C to skip)")
        prediction.wait()
        console.stop()
    else:
        prediction.wait(0)
    for name, content in prediction.files().items():
        _write(config, name, content)
    estimated: dict[str, float] = {}
    if prediction.memory.result is None:
        text = f"summary.json has no predicted_peak_bytes: {prediction.memory.reason}"
        _log(config, f"{text}\n{prediction.memory.traceback}")
        if waits and prediction.is_wanted:
            console.line(text)
    else:
        estimated["predicted_peak_bytes"] = prediction.memory.result.peak_bytes
    if prediction.step.result is not None:
        estimated["predicted_step_s"] = prediction.step.result.step_s
    elif prediction.step.traceback:
        _log(config, f"a step is not predicted: {prediction.step.traceback}\n")
    return estimated


def report_crash(config: RunConfig, crash: Crash, context: ForkServerContext | None = None) -> None:
    """Print the failure summary of a run and write ``crash.json``."""
    from axonlaunch.launch.failures import hints

    ranks = num_ranks(config)
    coords = coordinates(config, crash.first.rank)
    console = show_crash(crash, coords=coords, world_size=ranks)
    content = {
        **dataclasses.asdict(crash.first),
        "coords": coords,
        "world_size": ranks,
        "hint": None,
        "followers": [{"rank": rank, "reason": reason} for rank, reason in crash.followers],
    }
    is_written = _write(config, CRASH, content)
    first = crash.first
    about = {"rank": first.rank, "step": first.step, "kind": first.kind, "reason": first.reason}
    log_event(config, "failed", about)
    # The hint comes after the failure summary, because it may need an estimate that takes seconds.
    with spinner("looking for a hint; for memory that takes an estimate of some seconds"):
        hint = hints.hint(crash.first, config, context)
    if hint:
        show_hint(console, hint)
        if is_written:
            _write(config, CRASH, {**content, "hint": hint})


def coordinates(config: RunConfig, rank: int) -> dict[str, int]:
    """Return a rank's coordinates on the mesh axes of more than one rank.

    The last axis varies fastest.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    return {axis: n for axis, n in layout.coordinates(rank).items() if layout.axes[axis] > 1}


def _rows(config: RunConfig, summary: dict[str, Any], *, counted: str) -> list[tuple[str, str]]:
    rows = [("status", f"{summary['status']} after step {summary['steps']}")]
    if summary["loss"] is not None:
        rows.append(("loss", f"{summary['loss']:.4f}"))
    if summary["eval_loss"] is not None:
        rows.append(("evaluation loss", f"{summary['eval_loss']:.4f}"))
    rows += [
        (name, f"{value:.4f}") for name, value in summary["metrics"].items() if value is not None
    ]
    if rate := summary[f"{counted}_per_s"]:
        rows.append((f"{counted}/s", quantity(rate)))
    if summary["first_step_s"]:
        rows.append(("time to first step", f"{summary['first_step_s']:.1f} s"))
    rows += _rows_of_goodput(summary["goodput"])
    peak, estimated = summary["measured_peak_bytes"], summary.get("predicted_peak_bytes")
    if peak is not None:
        estimate = "" if estimated is None else f", {size(estimated)} estimated"
        # On a CPU, step lines show memory of the process, but this row only memory of tensors. On a
        # GPU both come from torch's allocator.
        tensors = "" if config.launch.device == "cuda" else " of tensors"
        rows.append(("peak memory", f"{size(peak)}{tensors} per rank{estimate}"))
    elif estimated is not None:
        rows.append(("peak memory", f"{size(estimated)} per rank estimated"))
    if summary.get("pushed"):
        rows.append(("uploaded to", summary["pushed"]))
    rows.append(("run folder", shortened(config.run_dir)))
    return rows


def _rows_of_goodput(goodput: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the goodput of a run with failures, and how far its prediction was off."""
    if goodput is None or not goodput["failures"]:
        return []
    failures = goodput["failures"]
    text = f"{goodput['share']:.1%} with {failures} failure{'s' * (failures > 1)}"
    if goodput["predicted_share"] is not None:
        text += f", {goodput['predicted_share']:.1%} predicted"
        if goodput["assumed"]:
            text += f" with typical {', '.join(goodput['assumed'])}"
    return [("goodput", text)]


def resuming_command(
    config: RunConfig, words: Sequence[str], *, composed: Composed | None, name: str | None
) -> str | None:
    """Return the command that resumes a run, ready to paste into a shell; None if it is unknown.

    Args:
        config: Configuration of the run.
        words: Words of the command that launched the run; empty for a script.
        composed: Composed files and overrides of that command; None for a script.
        name: Name that the command needs; None for the run's name, empty for no name.
    """
    if not words:
        return None
    name = str(config.name) if name is None else name
    settings = [f"name={name}"] if name else []
    if resume_of(config) != "auto":  # never, or an earlier checkpoint of the same run
        settings.append("checkpoint.resume=auto")
    saving = {} if composed is None else composed.tree.get("checkpoint", {})
    if saving.get("overwrite"):
        settings.append("checkpoint.overwrite=false")
    replaced = {setting.partition("=")[0] for setting in settings}
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in replaced]
    return shlex.join([*kept, *settings])


def _rows_of_resuming(config: RunConfig, command: str | None) -> list[tuple[str, str]]:
    """Return the command that resumes a run, and the step at which it begins."""
    again = command or f"the same command with name={config.name}"
    if is_url(config.checkpoint.path or ""):
        return [("to resume", again)]
    try:
        last = finished_runs.last_saved(config)
    except OSError as error:
        return [("to resume", again), ("resumes from", f"unknown: {error}")]
    if last is None:
        return [("to start over", again), ("checkpoints", "none was saved")]
    return [("to resume", again), ("resumes from", f"step {last.step}")]
