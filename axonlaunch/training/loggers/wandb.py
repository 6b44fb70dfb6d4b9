"""Logs metrics and the configuration to Weights & Biases. A resumed run continues the same run.

Code and console output are not sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import wandb

from axonlaunch.config.options.loggers import WandbConfig
from axonlaunch.training.loggers.logger import Logger, Number, RunInfo


class WandbLogger(Logger):
    """Logger to a Weights & Biases run. Its local files are in ``wandb`` in the run folder."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def start(self, run: RunInfo) -> None:
        """Begin a W&B run, or continue that of the resumed run."""
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
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        """Send remaining metrics and wait until wandb's service has ended.

        After ``finish`` the service still writes data of an offline run. wandb would wait for that
        in an ``atexit`` handler, but a rank's process ends without calling it.
        """
        try:
            self._run.finish(exit_code=int(failed))
        finally:
            wandb.teardown(int(failed))
