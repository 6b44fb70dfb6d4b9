"""Weights & Biases: one of its runs for one of ours, however often ours is resumed.

It sends numbers and the configuration, no code and nothing of the console.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import wandb

from axonlaunch.config.loggers import WandbConfig
from axonlaunch.training.loggers.base import Logger, Number, RunInfo


class WandbLogger(Logger):
    """A run of Weights & Biases, whose own files are in ``wandb`` in the run folder."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def start(self, run: RunInfo) -> None:
        """Begin a run, or continue the one that this run was before it was resumed."""
        run_id = run.ids.setdefault("wandb", secrets.token_hex(4))
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            name=run.name,
            dir=run.run_dir,
            config=run.config,
            project=self._config.project,
            entity=self._config.entity,
            group=self._config.group,
            tags=self._config.tags,
            mode=self._config.mode,
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, quiet=True),
        )

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Send the numbers of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        """Send what is left, and wait until it has arrived.

        After ``finish`` wandb's service still writes what an offline run has, and a rank's process
        ends without the ``atexit`` in which wandb would wait for it.
        """
        try:
            self._run.finish(exit_code=int(failed))
        finally:
            wandb.teardown(int(failed))
