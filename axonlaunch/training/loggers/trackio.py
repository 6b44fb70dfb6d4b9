"""Trackio: one of its runs for one of ours, however often ours is resumed.

It sends numbers and the configuration; what the machine does Trackio is not asked to watch.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import trackio

from axonlaunch.config.loggers import TrackioConfig
from axonlaunch.training.loggers.base import Logger, Number, RunInfo


class TrackioLogger(Logger):
    """A run of Trackio, which keeps it in ``TRACKIO_DIR``, or in Hugging Face's cache."""

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config

    def start(self, run: RunInfo) -> None:
        """Begin a run, or continue the one that this run was before it was resumed."""
        resume = "must" if "trackio" in run.ids else "never"
        # It finds runs by their names, which runs of other folders may have too.
        name = run.ids.get("trackio", f"{run.name}-{secrets.token_hex(3)}")
        self._run = trackio.init(
            project=self._config.project,
            name=name,
            config=run.config,
            resume=resume,
            space_id=self._config.space_id,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        run.ids["trackio"] = name  # not earlier: a start that fails is tried again

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Send the numbers of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        """Send what is left."""
        del failed
        self._run.finish()
