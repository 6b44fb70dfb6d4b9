"""Logs metrics and the configuration to Trackio. A resumed run continues the same Trackio run.

Trackio's monitoring of CPU and GPU is off.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import trackio

from axonlaunch.config.options.loggers import TrackioConfig
from axonlaunch.training.loggers.base import Logger, Number, RunInfo


class TrackioLogger(Logger):
    """Logger to a Trackio run, which is stored in ``TRACKIO_DIR`` or in Hugging Face's cache."""

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config

    def start(self, run: RunInfo) -> None:
        """Begin a Trackio run, or continue that of the resumed run."""
        resume = "must" if "trackio" in run.ids else "never"
        # Trackio identifies runs by name, and runs in other folders may have the same name.
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
        run.ids["trackio"] = name  # only after success, because a failed start is tried again

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        """Send remaining metrics and end the run."""
        del failed
        self._run.finish()
