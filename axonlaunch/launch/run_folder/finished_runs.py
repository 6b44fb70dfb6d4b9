"""Recognises runs that have no steps left to train, and says what the user can do next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from axonlaunch import checkpoint
from axonlaunch.checkpoint.format import storage
from axonlaunch.checkpoint.loading.resume_source import resume_of
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.resumed_settings import (
    frozen_settings,
    settings_unlike_resumed,
)
from axonlaunch.config.values.plain_values import LARGEST_YAML
from axonlaunch.config.values.url import is_url, shortened
from axonlaunch.launch.run_folder.names import with_run_dir
from axonlaunch.preflight.paths import with_absolute_paths
from axonlaunch.system.storage.files import read_text
from axonlaunch.system.storage.run_files import SUMMARY


def finished_summary(config: RunConfig) -> dict[str, Any] | None:
    """Return the summary of a run that has already trained all steps of this configuration.

    Return None if there is no such run. A run that early stopping ended has no steps left either.

    Raises:
        ConfigError: The run has trained the same number of steps with other settings.
    """
    if config.name == config.run_dir == "auto" or resume_of(config) != "auto":
        return None
    folder = Path(with_run_dir(config).run_dir)
    try:
        summary: dict[str, Any] = json.loads(read_text(folder / SUMMARY, at_most=LARGEST_YAML))
        steps = summary["steps"] if summary["status"] == "done" else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if steps != config.train.steps:
        is_stopped = steps is not None and _is_stopped_early(config, step=steps)
        return summary if is_stopped else None
    try:
        previous = frozen_settings(folder / CONFIG)
        changed = settings_unlike_resumed(with_absolute_paths(config), previous)
    except (OSError, ValueError):
        changed = []  # the settings don't matter, because no step is left to train
    if changed:
        message = (
            f"{folder} has already trained this number of steps with other settings than "
            f"{', '.join(changed)}; use more steps to continue with these settings, or another name"
        )
        raise ConfigError([ConfigIssue("train.steps", message, config.train.steps)])
    return summary


def finished_text(config: RunConfig, summary: dict[str, Any]) -> str:
    """Return the message for a run that has no steps left, from ``finished_summary``'s result."""
    steps, patience = summary["steps"], config.train.early_stop
    reason = f"it has trained all of its {steps} steps; to continue, use more train.steps"
    if steps != config.train.steps:
        reason = (
            f"train.early_stop={patience} ended it after {steps} steps; to continue, use more "
            "evaluations, or null"
        )
    text = (
        f"{with_run_dir(config).name} is finished: {reason}; to start over, use another name or "
        "checkpoint.overwrite=true"
    )
    if config.checkpoint.push is None or summary.get("pushed") is not None:
        return text
    return f"{text}; to upload its weights, use {pushing_command(with_run_dir(config))}"


def pushing_command(config: RunConfig) -> str:
    """Return the command that uploads the weights of a run to ``checkpoint.push``."""
    private = " --private" if config.checkpoint.push_private else ""
    folder = shortened(config.run_dir)
    return f"axonlaunch checkpoint export {folder} --push {config.checkpoint.push}{private}"


def last_saved(config: RunConfig) -> checkpoint.Checkpoint | None:
    """Return the latest checkpoint that a run has saved itself.

    None if there is none, and for remote folders of checkpoints, which are not read.
    """
    if is_url(config.checkpoint.path or ""):
        return None
    return checkpoint.find_checkpoint(storage.root(config))


def _is_stopped_early(config: RunConfig, *, step: int) -> bool:
    """Return whether the newest checkpoint of a run ended it by ``train.early_stop``."""
    patience = config.train.early_stop
    if patience is None:
        return False
    try:
        saved = last_saved(with_run_dir(config))
    except OSError:  # reported where the run is resumed
        return False
    return saved is not None and saved.step == step and saved.evaluations_since >= patience
