"""Kills a mixture of experts again and again, and continues it in another layout each time.

Its losses must be those of one process that is never stopped, to rounding, and each layout must
have continued from a checkpoint.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

from kills import act, is_alive, judge
from lab import Lab, Log, check_no_partial, checkpoints, end, steps_logged
from support.command import Command

STEPS, SOAK_STEPS = 48, 500
MODEL = [
    *("model=moe_debug", "model.hidden_size=32", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=4", "model.moe_intermediate_size=16", "model.vocab_size=64"),
    *("data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=16"),
    *("train.global_batch_size=8", "train.log_every=1", "train.eval_batches=0"),
    *("scheduler=constant", "optimizer.lr=1e-3", "optimizer.eps=1e-5", "launch.threads=1"),
    *("checkpoint.every=3", "name=run"),
]
LAYOUTS = {
    "4 experts": ["strategy=fsdp", "strategy.expert.degree=4", "launch.nproc=4"],
    "1 expert": ["strategy=fsdp", "launch.nproc=2"],
    "tensor": ["strategy=fsdp", "strategy.tensor.degree=2", "launch.nproc=2"],
    "pipeline": ["strategy=fsdp", "strategy.pipeline.degree=2", "launch.nproc=2"],
    "2 experts": [
        *("strategy=hsdp", "strategy.fsdp.replicate=2", "strategy.expert.degree=2"),
        "launch.nproc=4",
    ],
    "tensor with experts": [
        *("strategy=fsdp", "strategy.tensor.degree=2", "strategy.expert.degree=4"),
        "launch.nproc=4",
    ],
}
"""Layouts of a run, in this order; the last one is followed by the first."""
TOLERANCE = 2e-5
"""Largest relative difference of a loss; 500 steps differ by 4e-7."""
MINUTES = 30
"""Time limit of an undisturbed run."""
STILL_S = 300
"""Time without a step that is a hang on a busy node; resuming takes the longest."""


def few(lab: Lab, seed: int, log: Log) -> None:
    """Move a short run."""
    _move(lab, seed, log, steps=STEPS)


def soak(lab: Lab, seed: int, log: Log) -> None:
    """Move a long run."""
    _move(lab, seed, log, steps=SOAK_STEPS)


def _move(lab: Lab, seed: int, log: Log, *, steps: int) -> None:
    chance = random.Random(seed)
    command = lab.quick(lab.new(f"move-{seed}"))
    # Each layout continues, also the first one, which begins the run.
    least, layouts = steps // (3 * (len(LAYOUTS) + 1)), list(LAYOUTS)
    total = steps
    for number in range(steps):
        layout = layouts[number % len(layouts)]
        overrides = [*MODEL, f"train.steps={total}", f"seed={seed}"]
        process = command.start("train", *overrides, *LAYOUTS[layout])
        begun = steps_logged(command)
        stop = begun + chance.randint(least, 2 * least)
        log(f"{layout} from step {begun}")
        _wait_for_step(command, process, min(stop, total))
        if steps_logged(command) < total:
            act(chance, command, process, "all", "SIGKILL", log)
            judge(command, end(process), "all", "SIGKILL")
            continue
        done = end(process)
        assert done.status == 0, f"exit status {done.status}: {done.text[-1500:]}"
        if len(_resumed(command)) == len(LAYOUTS):
            break
        total += steps // 2  # too fast for some layouts
    else:
        raise AssertionError(f"{steps_logged(command)} of {total} steps")
    log(f"resumed as {', '.join(_resumed(command))}")
    expected = _undisturbed(lab, overrides, name=f"single-{total}-{seed}")
    _check_losses(command, expected, log)
    check_no_partial(command)


def _wait_for_step(command: Command, process: Any, step: int) -> None:
    """Wait until a step is logged and the next layout can resume, or the command has ended."""
    seen, since = steps_logged(command), time.monotonic()
    while (seen < step or not checkpoints(command)) and is_alive(process.pid):
        time.sleep(0.05)
        if (logged := steps_logged(command)) != seen:
            seen, since = logged, time.monotonic()
        assert time.monotonic() < since + STILL_S, f"hangs: no step for {STILL_S} s"


def _undisturbed(lab: Lab, overrides: list[str], *, name: str) -> list[float]:
    """Return the losses of one process."""
    command = lab.quick(lab.new(name))
    process = command.start("train", *overrides, "strategy=single", "launch.nproc=1")
    done = end(process, seconds=60 * MINUTES)
    assert done.status == 0, f"the undisturbed run failed: {done.text}"
    return command.losses("run")


def _resumed(command: Command) -> list[str]:
    """Return the layouts whose ranks have continued the run from a checkpoint."""
    lines = (command.folder / "runs/run/events.jsonl").read_text().splitlines()
    starts = [event for event in map(json.loads, lines) if event["event"] == "started"]
    return sorted({event["layout"] for event in starts if event["resumed_from"]})


def _check_losses(command: Command, expected: list[float], log: Log) -> None:
    lines = [line for line in command.lines("run") if "loss" in line]
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(expected) + 1)), f"steps in metrics.jsonl: {steps}"
    off = [abs(line["loss"] - loss) / loss for line, loss in zip(lines, expected, strict=True)]
    log(f"losses differ by at most {max(off):.1e}")
    wrong = [step for step, each in zip(steps, off, strict=True) if each > TOLERANCE]
    assert not wrong, f"other losses from step {wrong[0]} on, by {max(off):.1e}"
