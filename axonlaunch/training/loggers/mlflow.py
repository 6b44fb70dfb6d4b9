"""MLflow: one of its runs for one of ours, however often ours is resumed.

It uses the client alone, and sets nothing of the process that ``mlflow.start_run`` would.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from axonlaunch.config.loggers import MLflowConfig
from axonlaunch.config.plain import flatten
from axonlaunch.training.loggers.base import Logger, Number, RunInfo

_LONGEST, _MOST = 6000, 100
"""Characters of a parameter's value and parameters of one request, as MLflow takes them."""


_REFUSED = re.compile(r"[^/\w.\- ]")
"""What no name of a parameter or a metric may have on every system; one request refuses all."""
_Value = TypeVar("_Value")


class MLflowLogger(Logger):
    """A run of MLflow."""

    def __init__(self, config: MLflowConfig) -> None:
        self._config = config

    def start(self, run: RunInfo) -> None:
        """Begin a run, or continue the one that this run was before it was resumed."""
        uri = self._config.tracking_uri
        if uri is not None and "://" not in uri.replace("file://", ""):
            # A folder was asked for by name, and MLflow refuses those to who does not insist.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        if "mlflow" in run.ids:
            self._id = run.ids["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
            if run.resumed_at is not None:
                return
        else:
            made = self._client.create_run(self._experiment(), run_name=run.name)
            self._id = run.ids["mlflow"] = made.info.run_id
        params = [*_params(run.config)]
        for first in range(0, len(params), _MOST):
            self._client.log_batch(self._id, params=params[first : first + _MOST])

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Send the numbers of a step."""
        now = int(time.time() * 1000)
        sent = [Metric(name, value, now, step) for name, value in _with_names(metrics).items()]
        self._client.log_batch(self._id, metrics=sent)

    def close(self, *, failed: bool) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def _experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(self._config.experiment)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(self._config.experiment))


def _params(config: dict[str, Any]) -> Iterator[Param]:
    for name, value in _with_names(flatten(config)).items():
        yield Param(name, str(value)[:_LONGEST])


def _with_names(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return values by names that MLflow takes, as many: patterns and sources have any."""
    named: dict[str, _Value] = {}
    for key, value in values.items():
        name = _REFUSED.sub("_", key)
        while name in named:
            name += "_"
        named[name] = value
    return named
