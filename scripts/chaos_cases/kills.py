"""Kills, pauses or asks to end any process of a run, at any moment.

Afterwards the same command is run again. The last run is undisturbed, and must end as if nothing
had happened.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import (
    COMMON,
    STEPS,
    STRATEGIES,
    Lab,
    Log,
    check_no_partial,
    check_nothing_is_left,
    check_steps_so_far,
    complete,
    end,
    plain,
    steps_logged,
    wait_quietly,
)
from support.command import Command

VICTIMS = ("launcher", "fork server", "rank", "resource tracker")
ACTIONS = ("SIGKILL", "SIGTERM", "SIGSTOP")
PAIRS = list(itertools.product(VICTIMS, ACTIONS))
HARMLESS = {
    *((victim, "SIGSTOP") for victim in VICTIMS),
    *((victim, "SIGTERM") for victim in ("fork server", "resource tracker")),
}
"""Seconds after which a paused process continues."""
FAULTS = 4
"""Number of faults in a run before it may complete."""

Moment = Callable[[random.Random, Command, Any, Log], None]


def anywhere(lab: Lab, seed: int, log: Log) -> None:
    """Disturb a run at random moments."""
    _disturb(lab, seed, log, pairs=PAIRS, moment=_any_moment)


def while_saving(lab: Lab, seed: int, log: Log) -> None:
    """Kill all of the node's processes or one of them while a checkpoint is written."""
    pairs = [(victim, "SIGKILL") for victim in ("launcher", "rank", "all")]
    _disturb(lab, seed, log, pairs=pairs, moment=_a_save)


def _disturb(
    lab: Lab, seed: int, log: Log, *, pairs: list[tuple[str, str]], moment: Moment
) -> None:
    chance = random.Random(seed)
    strategy = list(STRATEGIES)[seed % len(STRATEGIES)]
    saves = f"checkpoint.async_save={str(chance.random() < 0.5).lower()}"
    log(f"{strategy} {saves}")
    overrides = [*COMMON, *STRATEGIES[strategy], saves]
    folder = lab.new(f"kill-{seed}")
    # Every second round of strategies runs programs that a user's shell would start; the others
    # have no separate fork server, and start in a third of the time.
    shell = pairs is PAIRS and (seed // len(STRATEGIES) + seed) % 2 == 0
    command = plain(folder) if shell else lab.quick(folder)
    if not shell:
        pairs = [pair for pair in pairs if pair[0] in ("launcher", "rank", "all")]
    process = None
    for _ in range(FAULTS):
        victim, action = chance.choice(pairs)
        process = process or command.start("train", *overrides)
        moment(chance, command, process, log)
        act(chance, command, process, victim, action, log)
        if (victim, action) in HARMLESS and is_alive(process.pid):
            continue  # continue with the next fault to the same processes
        judge(command, end(process), victim, action)
        process = None
        if steps_logged(command) >= STEPS:
            break
    if process is not None:
        judge(command, end(process), victim, action)
    complete(command, overrides, lab.losses(strategy))


def _any_moment(chance: random.Random, command: Command, process: Any, log: Log) -> None:
    if chance.random() < 0.3:
        seconds = chance.uniform(0.1, 8)
        log(f"after {seconds:.1f} s")
        time.sleep(seconds)
        return
    lines = steps_logged(command) + chance.randint(1, STEPS // 4)
    log(f"at line {lines}")
    wait(process, lambda: steps_logged(command) >= lines)
    time.sleep(chance.uniform(0, 0.05))


def _a_save(chance: random.Random, command: Command, process: Any, log: Log) -> None:
    folder = command.folder / "runs/run/checkpoints"
    begun = steps_logged(command)
    later = begun + chance.randint(0, 6)
    wait(process, lambda: steps_logged(command) >= later)
    wait(process, lambda: any(folder.glob("*.partial*")), turn_s=0.001)
    seconds = chance.uniform(0, 0.08)
    log(f"{1000 * seconds:.0f} ms into a save")
    time.sleep(seconds)


def wait(process: Any, condition: Callable[[], bool], *, turn_s: float = 0.01) -> None:
    """Wait until a condition holds or the command has ended, with any status."""
    deadline = time.monotonic() + 90
    while not condition() and is_alive(process.pid):
        assert time.monotonic() < deadline, "hangs: no step for 90 s"
        time.sleep(turn_s)


def act(
    chance: random.Random, command: Command, process: Any, victim: str, action: str, log: Log
) -> None:
    """Act on a process of a run, as soon as there is one."""
    chosen: list[int] = []

    def choose() -> bool:
        chosen[:] = pids_of(command, process.pid, victim)
        return bool(chosen) or not is_alive(process.pid)

    if not wait_quietly(choose, seconds=90) or not chosen:
        log(f"there was no {victim} any more")
        return
    log(f"{action} of {victim}", fault=True)
    for pid in chosen if victim == "all" else [chance.choice(chosen)]:
        _send(pid, action)
        if action == "SIGSTOP":
            time.sleep(chance.uniform(0.2, 1.5))
            _send(pid, "SIGCONT")


def _send(pid: int, name: str) -> None:
    try:
        os.kill(pid, getattr(signal, name))
    except ProcessLookupError:
        return  # it has ended meanwhile, which is also a valid moment


def judge(command: Command, ended: Any, victim: str, action: str) -> None:
    about = f"{action} of {victim}: exit status {ended.status}: {ended.text[-1500:]}"
    if victim in ("launcher", "all") and action != "SIGSTOP":
        # Before its handler is installed, SIGTERM ends it like any program.
        expected = {-signal.SIGKILL, 0} if action == "SIGKILL" else {130, 0, -signal.SIGTERM, 143}
    elif action == "SIGSTOP":
        expected = {0}
    else:
        expected = {0, 1, 130}
    assert ended.status in expected, about
    check_nothing_is_left(command)
    check_steps_so_far(command)
    if ended.status >= 0:  # a killed command could not clean up; the next start does
        check_no_partial(command)


def pids_of(command: Command, launcher: int, victim: str) -> list[int]:
    """Return the processes of a kind that belong to a run."""
    if victim == "launcher":
        return [launcher] if is_alive(launcher) else []
    pids = [pid for pid in command.processes() if pid != launcher]
    if victim == "all":
        return [launcher, *pids] if is_alive(launcher) else []
    return [pid for pid in pids if _is(pid, victim)]


def _is(pid: int, victim: str) -> bool:
    try:
        if victim == "rank":
            output = Path(f"/proc/{pid}/fd/1").readlink().name
            return output.startswith("rank_") and output.endswith(".log")
        arguments = Path(f"/proc/{pid}/cmdline").read_text()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        module = {"fork server": "forkserver", "resource tracker": "resource_tracker"}[victim]
        # Forks of the server have its arguments, but another parent.
        above = Path(f"/proc/{parent}/cmdline").read_text()
    except OSError:
        return False
    return f"multiprocessing.{module}" in arguments and "multiprocessing." not in above


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
