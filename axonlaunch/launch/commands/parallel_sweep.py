"""Trains several runs of a sweep at once, each by a command of its own on a share of this node.

Each command starts, watches and ends its ranks, or submits and follows its job, as that of a
single run does. Ctrl-C reaches only this process, which passes it on; if this process is killed,
the kernel asks the commands to stop.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import Any, TextIO

from rich.text import Text

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError
from axonlaunch.launch.commands.node_shares import (
    NodeShare,
    divide_node,
    needed_devices,
    share_problems,
)
from axonlaunch.launch.environment.accelerators import count_accelerators
from axonlaunch.launch.output.summary import resuming_command
from axonlaunch.launch.output.sweep import name_of_sweep
from axonlaunch.launch.request import Request
from axonlaunch.launch.run_folder.names import with_run_dir
from axonlaunch.launch.runs import INTERRUPTED, Run, RunResult, stream_of
from axonlaunch.system.processes.parent_death import end_with_parent
from axonlaunch.system.text.terminal import console_on

_KILLING = 3
"""Number of the signal at which commands are killed. The first asks them to stop after their steps,
the second to end their ranks."""


def share_node(
    runs: Sequence[Run], *, at_once: int, server: Callable[[], ForkServerContext]
) -> tuple[list[Run], list[NodeShare]]:
    """Divide this node among runs; set the number of ranks of runs that use all of their devices.

    Commands that only submit and follow a job share the whole node.

    Args:
        runs: Runs from ``load_runs``.
        at_once: Largest number of runs that train at once.
        server: Starts the fork server, which counts accelerators.

    Raises:
        ConfigError: The node has too few devices or cores.
    """
    at_once = min(at_once, len(runs))
    cores = sorted(os.sched_getaffinity(0))
    if not all(run.is_on_this_node for run in runs):
        return list(runs), [NodeShare(devices=None, cores=tuple(cores))] * at_once
    configs = [run.config for run in runs]
    accelerators = count_accelerators(server)
    problems = [
        *share_problems(configs, at_once=at_once, accelerators=accelerators, cores=len(cores))
    ]
    if problems:
        raise ConfigError(problems)
    uses_devices = any(needed_devices(config, accelerators=accelerators) for config in configs)
    devices = accelerators if uses_devices else 0
    shares = divide_node(at_once, devices=devices, allowed=cores)
    return [_with_ranks(run, devices // at_once, accelerators) for run in runs], shares


def _with_ranks(run: Run, devices: int, accelerators: int) -> Run:
    """Return a run with a rank for each device of a share, if it would use all of the node's."""
    is_auto = run.config.launch.nproc == "auto"
    if not (is_auto and needed_devices(run.config, accelerators=accelerators)):
        return run
    config = configuration.with_values(run.config, {"launch.nproc": devices})
    return dataclasses.replace(run, config=config)


def launch_at_once(
    runs: Sequence[Run], shares: Sequence[NodeShare], request: Request
) -> list[RunResult]:
    """Launch runs in their order, one on each share, and wait for the end of all.

    A failed run ends no other. After an interrupted run no other one is launched.

    Args:
        runs: Checked runs of a sweep.
        shares: Shares of this node.
        request: Command line of the sweep.

    Returns:
        Results of the runs that were launched or had finished before; these are the first ones.
    """
    stream = stream_of(runs[0].options)
    free, waiting = list(shares), list(enumerate(runs))
    running: list[_Command] = []
    results: list[tuple[int, RunResult]] = []
    with _signals() as signals:
        handled = 0
        while True:
            is_stopping = bool(signals) or any(r.status == INTERRUPTED for _, r in results)
            while waiting and free and not is_stopping:
                number, run = waiting.pop(0)
                if run.finished is None:
                    running.append(_Command.start(number, run, free.pop(0), request, stream))
                else:
                    results.append((number, run.launch()))
            if not running:
                break
            wait([command.output for command in running], timeout=0.1)
            ended = [command for command in running if command.process.poll() is not None]
            for command in running:
                command.show_output()
                if len(signals) > handled:
                    command.stop(len(signals))
            handled = len(signals)
            for command in ended:
                running.remove(command)
                free.append(command.share)
                results.append((command.number, command.result()))
    ordered = [result for _, result in sorted(results, key=lambda pair: pair[0])]
    if is_stopping:
        console_on(stream).print(Text(_remaining(runs, ordered, request)), soft_wrap=True)
        ordered.append(RunResult(INTERRUPTED, None))
    return ordered


def _remaining(runs: Sequence[Run], results: Sequence[RunResult], request: Request) -> str:
    """Return a line that says how an interrupted sweep goes on."""
    if not runs[0].is_on_this_node:
        submitted = [result for result in results if "state" in (result.summary or {})]  # of a job
        left = f"{len(runs) - len(submitted)} of {len(runs)} runs were not submitted"
        return f"{left}; axonlaunch jobs lists the others" if submitted else left
    name = name_of_sweep([run.config for run in runs])
    again = resuming_command(runs[0].config, request.words(), composed=runs[0].composed, name=name)
    return f"to resume  {again}"


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list to which the signals are added that ask this process to stop."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
        numbers.append(signal.SIGHUP)
    previous = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in numbers
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class _Command:
    """The command that trains a run.

    Attributes:
        number: Number of the run in the sweep, counted from 0.
        run: Run with its checked configuration.
        share: Share of the node that it uses.
        process: Process that trains; standard output is its summary as JSON, standard error its
            console.
        stream: Output stream of this process.
    """

    number: int
    run: Run
    share: NodeShare
    process: subprocess.Popen[bytes]
    stream: TextIO
    _line: bytes = b""

    @classmethod
    def start(
        cls, number: int, run: Run, share: NodeShare, request: Request, stream: TextIO
    ) -> _Command:
        """Start the command and print the run's header."""
        on = "" if share.devices is None else f"  (devices {share.devices})"
        if run.header:
            console_on(stream).print(Text(run.header + on, style="bold"), soft_wrap=True)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *_words(run, request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **share.environment()},
            start_new_session=True,  # Ctrl-C reaches only this process
            preexec_fn=partial(_become_share, end_with_parent(signal.SIGTERM), share.cores),
        )
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return cls(number, run, share, process, stream)

    @property
    def output(self) -> int:
        """Descriptor of the console."""
        assert self.process.stderr is not None
        return self.process.stderr.fileno()

    def show_output(self) -> None:
        """Print the complete lines that the console has written since the last call."""
        with suppress(BlockingIOError):
            while content := os.read(self.output, 1 << 16):
                self._line += content
        *lines, self._line = self._line.split(b"\n")
        for line in lines:
            self._print(line)

    def _print(self, line: bytes) -> None:
        prefix = Text(f"[{self.number + 1}] ", style="dim")
        text = prefix + Text(line.decode(errors="replace"), style="default")
        console_on(self.stream).print(text, soft_wrap=True)

    def stop(self, times: int) -> None:
        """Pass on the given number of signals."""
        if self.process.poll() is None:
            number = signal.SIGINT if times < _KILLING else signal.SIGKILL
            self.process.send_signal(number)

    def result(self) -> RunResult:
        """Return how the run ended, and print the end of its console.

        Called after the process has ended and after ``show_output``.
        """
        if self._line:  # its end had no line break
            self._print(self._line)
        assert self.process.stdout is not None
        with self.process as process:
            content = self.process.stdout.read() or b""
        status = process.returncode
        try:
            summary = json.loads(content)
        except ValueError:
            summary = {}
        if "run_dir" not in summary:  # the command refused the run, or ended before it began
            how = "interrupted" if status == INTERRUPTED else "failed"
            summary = {"status": how, "run_dir": with_run_dir(self.run.config).run_dir}
        return RunResult(status if status >= 0 else 1, summary)


def _words(run: Run, request: Request) -> list[str]:
    """Return the words of the command that trains one run of a sweep in its own folder."""
    config = run.config
    settings: dict[str, Any] = {"name": config.name, "run_dir": config.run_dir}
    if config.checkpoint.path is not None:
        settings["checkpoint.path"] = config.checkpoint.path
    if config.launch.nproc != "auto":
        settings["launch.nproc"] = config.launch.nproc
    kept = [word for word in run.overrides if word.lstrip("+").partition("=")[0] not in settings]
    written = [f"{key}={_quote(value)}" for key, value in settings.items()]
    one = dataclasses.replace(
        request, overrides=[*kept, *written], multirun=False, samples=None, parallel=None
    )
    program, command, *words = one.words()
    return [program, command, "--json", *words]


def _quote(value: Any) -> str:
    """Return a value as Hydra's parser reads it, with any characters."""
    if not isinstance(value, str) or re.fullmatch(r"[-\w./]*[a-zA-Z_/][-\w./]*", value):
        return str(value)
    # Only backslashes before a quote are doubled. The closing quote counts too.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def _become_share(request_death: Callable[[], None], cores: Sequence[int]) -> None:
    """Use only some cores, and end with the parent; called in a new process before its program."""
    request_death()
    os.sched_setaffinity(0, cores)
