"""Ranks on this machine: a port nobody can take, a share of the cores each, one supervisor.

The parent imports no torch; whatever needs it runs in a process forked from the warm server.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import checkpoint
from axonlaunch.config import ConfigError, Problem, RunConfig
from axonlaunch.events import Event, Stepped, finite
from axonlaunch.launch import forkserver, run_folder
from axonlaunch.launch.console import RunConsole, gibibytes, quantity, shortened, show_crash
from axonlaunch.launch.prediction import Prediction
from axonlaunch.launch.rank_messages import Place
from axonlaunch.launch.supervisor import Outcome, Rank, Supervisor

LOOPBACK = "127.0.0.1"


def train(
    config: RunConfig, context: ForkServerContext, *, started: float, as_json: bool = False
) -> tuple[int, dict[str, Any]]:
    """Run a configuration's ranks and tell how it went.

    Args:
        config: Checked and resolved by ``preflight``.
        context: Of the warm fork server.
        started: ``time.time()`` when the user's command began.
        as_json: Keep standard output free; the console goes to standard error.

    Returns:
        The exit status and what was written to ``summary.json``.

    Raises:
        ConfigError: The port is taken or the folder can't be made; nothing was started.
    """
    with _listener(config) as listener, run_folder.create(config) as config:
        console = RunConsole(run_dir=config.run_dir, stream=sys.stderr if as_json else sys.stdout)
        prediction = Prediction(context, config)
        record = _Record(started, console, prediction)
        try:
            supervisor = Supervisor(
                ranks=_spawn(config, context, listener),
                report=record,
                tick=_Tail(_log(config, 0), console),
                announce=console.line,
            )
            outcome = supervisor.run()
        finally:
            console.stop()
            prediction.end()
        return _conclude(config, outcome, record, console)


def _spawn(
    config: RunConfig, context: ForkServerContext, listener: socket.socket | None
) -> list[Rank]:
    assert config.launch.nproc != "auto"
    nproc = config.launch.nproc
    processes = 1 if config.launch.backend == "mock" else nproc
    ranks = []
    for number in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        cores = _cores(number, processes) if config.launch.pin_cores else None
        place = Place(
            rank=number,
            world_size=nproc,
            port=listener.getsockname()[1] if listener else 0,
            listener=listener if number == 0 else None,
            log=_log(config, number),
            threads=max(1, len(os.sched_getaffinity(0)) // processes),
            cores=cores,
        )
        process = forkserver.fork(
            context, "axonlaunch.launch.rank:main", Path(config.run_dir), place, theirs
        )
        theirs.close()
        ranks.append(Rank(number, process, ours))
    return ranks


def _cores(number: int, processes: int) -> tuple[int, ...] | None:
    """Return a rank's share of the cores; None where there are fewer cores than ranks."""
    available = sorted(os.sched_getaffinity(0))
    share = len(available) // processes
    if processes == 1 or share == 0:
        return None
    return tuple(available[number * share : (number + 1) * share])


@contextmanager
def _listener(config: RunConfig) -> Iterator[socket.socket | None]:
    """Hold the rendezvous' port, on loopback, until rank 0 has taken it over.

    Raises:
        ConfigError: The port is taken.
    """
    if config.launch.backend == "mock":
        yield None
        return
    port = config.launch.master_port
    with socket.socket() as bound:
        try:
            bound.bind((LOOPBACK, 0 if port == "auto" else port))
        except OSError as error:
            message = f"can't listen on it ({error.strerror}); use another, or auto"
            raise ConfigError([Problem("launch.master_port", message, port)]) from None
        bound.listen()
        yield bound


def _log(config: RunConfig, rank: int) -> Path:
    return Path(config.run_dir) / "logs" / f"rank_{rank}.log"


class _Record:
    """Passes events on and keeps what the summary of a run that fails can still say."""

    def __init__(
        self, started: float, listener: Callable[[Event], None], prediction: Prediction
    ) -> None:
        self._started = started
        self._listener = listener
        self.prediction = prediction
        self.first_step_s: float | None = None
        self.last: Stepped | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.last = event
            if self.first_step_s is None:
                self.first_step_s = time.time() - self._started
            self.prediction.begin()
        self._listener(event)


class _Tail:
    """Prints what is added to a log: the main rank's words reach the console."""

    def __init__(self, log: Path, console: RunConsole) -> None:
        self._log = log
        self._console = console
        self._read = log.stat().st_size if log.exists() else 0

    def __call__(self) -> None:
        if not self._log.exists() or self._log.stat().st_size <= self._read:
            return
        with self._log.open("rb") as stream:
            stream.seek(self._read)
            whole, newline, _ = stream.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        if newline:
            self._console.log(whole.decode(errors="replace"))


def _conclude(
    config: RunConfig, outcome: Outcome, record: _Record, console: RunConsole
) -> tuple[int, dict[str, Any]]:
    """Write ``summary.json``, print the run's figures, and return the exit status."""
    finished = outcome.finished
    told = finished or record.last  # a run that failed is told by its last logged step
    folder = Path(config.run_dir)
    checkpoint.sweep_partial(folder)
    interrupted = outcome.killed or (finished is not None and finished.interrupted)
    status = "interrupted" if interrupted else "failed" if outcome.crash else "done"
    summary: dict[str, Any] = {
        "status": status,
        "steps": told.step if told else 0,
        "loss": told.loss if told else None,
        "eval_loss": finished.eval_loss if finished else None,
        "tokens_per_s": told.tokens_per_s if told else None,
        "first_step_s": record.first_step_s,
        "measured_peak_bytes": finished.peak_memory_bytes if finished else None,
        "run_dir": config.run_dir,
    }
    prediction = record.prediction
    if prediction.peak_bytes is not None:
        summary["predicted_peak_bytes"] = prediction.peak_bytes
    else:
        with _log(config, 0).open("a") as log:
            log.write(f"summary.json has no predicted_peak_bytes: {prediction.reason}\n")
    if outcome.crash is not None:
        crash = outcome.crash
        summary["failed_rank"], summary["reason"] = crash.rank, crash.reason
        assert config.launch.nproc != "auto"
        process = 0 if config.launch.backend == "mock" else crash.rank
        where = shortened(str(_log(config, process)))
        show_crash(crash, log=where, world_size=config.launch.nproc)
    summary = finite(summary)
    run_folder.write_json(folder / "summary.json", summary)
    if finished is not None:
        console.summary(_rows(config, summary))
    if interrupted:
        return 130, summary
    return (1 if outcome.crash else 0), summary


def _rows(config: RunConfig, summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("status", f"{summary['status']} after step {summary['steps']}")]
    if summary["loss"] is not None:
        rows.append(("loss", f"{summary['loss']:.4f}"))
    if summary["eval_loss"] is not None:
        rows.append(("evaluation loss", f"{summary['eval_loss']:.4f}"))
    if summary["tokens_per_s"]:
        rows.append(("tokens/s", quantity(summary["tokens_per_s"])))
    if summary["first_step_s"]:
        rows.append(("first step after", f"{summary['first_step_s']:.1f} s"))
    peak, foretold = summary["measured_peak_bytes"], summary.get("predicted_peak_bytes")
    if peak is not None:
        words = "" if foretold is None else f", {gibibytes(foretold)} foretold"
        rows.append(("peak memory", f"{gibibytes(peak)} a rank{words}"))
    rows.append(("run folder", shortened(config.run_dir)))
    return rows
