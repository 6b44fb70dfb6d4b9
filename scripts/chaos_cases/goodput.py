"""Kills ranks at random times of a known rate, and compares the goodput with its prediction.

The run is then ended and resumed with the rate of saves and the time of a restart that it has
measured, as a user would set them. Both depend on the load of this node.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from typing import Any

import pytest
from kills import pids_of, wait
from lab import Lab, Log, check_nothing_is_left, end, steps_logged
from support.command import Command

from axonlaunch.system.storage.run_files import EVENTS

DEVICES = 2
OVERRIDES = [
    *("model.hidden_size=64", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=64", "train.global_batch_size=8"),
    *("train.eval_batches=0", "train.log_every=1", "launch.threads=1", f"launch.nproc={DEVICES}"),
    *("launch.max_restarts=100", "checkpoint.every=20", "hardware=cpu", "name=run"),
]
MTBF_S = 8.0
"""Mean time between failures."""
FAILURES = 9
LARGEST_ERROR = 0.05
"""Largest difference between the measured and the predicted goodput, relative to the predicted."""


def predicted(lab: Lab, seed: int, log: Log) -> None:
    """Compare the goodput of a run that fails at random with its prediction."""
    strategy = ("ddp", "fsdp", "zero1")[seed % 3]
    log(strategy)
    rate = f"hardware.mtbf_gpu_hours={MTBF_S * DEVICES / 3600:.6g}"
    command = lab.quick(lab.new(f"goodput-{seed}"))
    run = ["train", *OVERRIDES, f"strategy={strategy}", rate]
    _fail(command, [*run, "train.steps=100000"], _times(random.Random(seed)), log)
    rates = _goodput(command)["rates"]
    figures = [f"{key}={rates[key]:.4g}" for key in ("hardware.disk_gb_s", "hardware.restart_s")]
    log(" ".join(figures))
    if rates["hardware.restart_s"] > MTBF_S / 3:
        # Then a few failures decide over the goodput, and their mean is far from that of many.
        pytest.skip(f"this node is too busy: restarts take {rates['hardware.restart_s']:.1f} s")
    last = command.lines("run")[-1]["step"]
    ended = end(command.start(*run, *figures, f"train.steps={last + 1}"))
    assert ended.status == 0, ended.text[-1500:]
    goodput = _goodput(command)
    share, expected = goodput["share"], goodput["predicted_share"]
    log(f"goodput {share:.1%}, {expected:.1%} predicted")
    assert goodput["failures"] == FAILURES
    assert abs(share / expected - 1) <= LARGEST_ERROR, (
        f"the goodput is {share:.1%}, and {expected:.1%} were predicted: "
        f"{json.dumps(goodput['measured_s'])} instead of {json.dumps(goodput['predicted_s'])}"
    )


def _times(chance: random.Random) -> list[float]:
    """Return exponentially distributed times between failures in seconds, in random order.

    They are the means of equally probable parts of the distribution, so that the mean of few times
    is that of many.
    """

    def beyond(part: int) -> float:
        """Return the mean of the times above a part, times their probability."""
        share = 1 - part / FAILURES
        return MTBF_S * share * (1 - math.log(share)) if share > 0 else 0.0

    means = [FAILURES * (beyond(part) - beyond(part + 1)) for part in range(FAILURES)]
    return chance.sample(means, FAILURES)


def _fail(command: Command, run: list[str], times: list[float], log: Log) -> None:
    """Run with failures at these times after the first step of each attempt, then end the run.

    On a busy node the first step takes as long as a start, of which it is a part.
    """
    process = command.start(*run)
    for attempt, seconds in enumerate(times, 1):
        wait(process, lambda: _has_trained(command, attempt))  # noqa: B023 - called here
        fails_at = time.monotonic() + seconds
        wait(process, lambda: time.monotonic() >= fails_at)  # noqa: B023
        log(f"SIGKILL of a rank after {seconds:.1f} s", fault=True)
        os.kill(pids_of(command, process.pid, "rank")[-1], signal.SIGKILL)
    wait(process, lambda: _has_trained(command, FAILURES + 1))
    process.send_signal(signal.SIGTERM)
    ended = end(process)
    assert ended.status == 130, ended.text[-1500:]
    check_nothing_is_left(command)


def _goodput(command: Command) -> dict[str, Any]:
    goodput: dict[str, Any] = command.summary("run")["goodput"]
    return goodput


def _has_trained(command: Command, attempt: int) -> bool:
    """Return whether an attempt, counted from 1, has done a step."""
    try:
        lines = (command.folder / "runs/run" / EVENTS).read_text().splitlines()
    except FileNotFoundError:
        return False
    starts = [json.loads(line) for line in lines if '"event": "started"' in line]
    if len(starts) < attempt:
        return False
    return steps_logged(command) > int(starts[attempt - 1]["step"])
