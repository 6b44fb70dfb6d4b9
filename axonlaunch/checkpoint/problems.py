"""What is wrong with what a run is to start from, told before a rank starts.

Sizes, names and shapes are looked at; contents are read, and their checksums held, by the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from axonlaunch.checkpoint import folders, reader, weights
from axonlaunch.checkpoint.folders import Checkpoint
from axonlaunch.config import ConfigError, Problem, RunConfig

if TYPE_CHECKING:
    from torch import nn


def checkpoint_problems(config: RunConfig, model: nn.Module) -> Iterator[Problem]:
    """Yield what keeps a run from its checkpoint, or from the weights that it is to start from.

    Args:
        config: The run's.
        model: As it is to be, on ``meta`` or not.
    """
    yield from _resume(config, model)
    yield from _weights(config, model)


def _weights(config: RunConfig, model: nn.Module) -> Iterator[Problem]:
    path = getattr(config.model, "weights", None)
    if path is None:
        return
    if config.checkpoint.resume not in ("auto", "never"):
        message = (
            f"checkpoint.resume={config.checkpoint.resume} brings weights of its own; use null"
        )
        yield Problem("model.weights", message, path)
        return
    if not Path(path).is_dir():
        message = "there is no such folder; give a run, a checkpoint, or a folder of safetensors"
        yield Problem("model.weights", message, path)
        return
    try:
        wrong = weights.differences(Path(path), config.model, model)
    except ConfigError as error:
        yield from (Problem("model.weights", problem.message, path) for problem in error.problems)
    else:
        if wrong:
            message = f"they are of another model: {weights.first(wrong)}"
            yield Problem("model.weights", message, path)


def _resume(config: RunConfig, model: nn.Module) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    if resume == "never" or (resume == "auto" and config.run_dir == config.name == "auto"):
        return
    folder = Path(resume)
    if resume == "auto":
        folder = Path(config.run_dir if config.run_dir != "auto" else f"runs/{config.name}")
    found = folders.resolve(folder)
    yield from _damaged(resume, folder, found)
    if found is None:
        return
    try:
        yield from _resumable(config, model, found)
    except Exception as error:  # a damaged index fails in many ways
        message = f"{found.path} can't be read: {type(error).__name__}: {error}"
        yield Problem("checkpoint.resume", message, resume)


def _damaged(resume: str, folder: Path, found: Checkpoint | None) -> Iterator[Problem]:
    """Refuse to go on in silence from an older checkpoint, or from nothing."""
    damaged = folders.damaged(folder, after=found)
    if damaged:
        told = "; ".join(f"{path} {reason}" for path, reason in damaged.items())
        instead = f"checkpoint.resume={found.path}, or " if found else ""
        message = f"{told}; use {instead}another name, or remove what is damaged"
        yield Problem("checkpoint.resume", message, resume)
    elif found is None and resume != "auto":
        yield Problem("checkpoint.resume", "there is no complete checkpoint in it", resume)


def _resumable(config: RunConfig, model: nn.Module, found: Checkpoint) -> Iterator[Problem]:
    """Compare a checkpoint with the run that is to go on from it."""
    resume = config.checkpoint.resume
    if found.step >= config.train.steps:
        message = f"{found.path} has done {found.step} already; use more to train on"
        yield Problem("train.steps", message, config.train.steps)
    if found.samples != found.step * config.train.global_batch_size:
        message = (
            f"{found.path} saw {found.samples // max(1, found.step)} samples a step; keep that, "
            "so that no sample is skipped or repeated"
        )
        yield Problem("train.global_batch_size", message, config.train.global_batch_size)
    wanted = {"adamw": "exp_avg_sq", "sgd": "momentum_buffer"}[config.optimizer.name]
    states = reader.saved_states(found)
    if not states:
        message = (
            f"{found.path} holds weights and no run; use never, and model.weights={found.path}"
        )
        yield Problem("checkpoint.resume", message, resume)
    if states and wanted not in states:
        message = f"{found.path} is of another optimizer; it has states {', '.join(sorted(states))}"
        yield Problem("optimizer.name", message, config.optimizer.name)
    differences = reader.differences(found, model)
    if differences:
        message = f"{found.path} is of another model: {weights.first(differences)}"
        yield Problem("checkpoint.resume", message, resume)
