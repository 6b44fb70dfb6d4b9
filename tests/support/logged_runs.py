"""Runs with loggers on the mock world."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from axonlaunch.comm import World
from axonlaunch.events import Event, Monitor, Noted, StepLogged
from axonlaunch.training import worker
from support.configured import run_config

TINY = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
TINY += ["data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=8"]
TINY += ["train.log_every=1", "train.eval_batches=1"]
TINY += ["train.eval_every=2", "scheduler=constant", "name=run"]


class KilledError(Exception):
    """Ends a run in a test."""


def train(
    folder: Path, *overrides: str, ranks: int = 1, killed_at: int | None = None
) -> list[Event]:
    """Train on the mock world; return the events that the main rank reported."""
    overrides = (*TINY, f"launch.nproc={ranks}", "strategy=ddp", *overrides)
    chosen = dataclasses.replace(run_config(overrides), run_dir=str(folder))
    folder.mkdir(exist_ok=True)
    events: list[Event] = []

    def report(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepLogged) and event.step == killed_at:
            raise KilledError

    World.mock(ranks).run(lambda world: worker.run(chosen, world, monitor=Monitor(report=report)))
    return events


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Noted)]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
