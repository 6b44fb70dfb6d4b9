"""Logs to MLflow. A resumed run continues the same MLflow run.

Only ``MlflowClient`` is used, because ``mlflow.start_run`` changes global state of the process.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from axonlaunch.config.options.loggers import MLflowConfig
from axonlaunch.config.values.plain_values import flatten
from axonlaunch.training.loggers.logger import Logger, Number, RunInfo

_LONGEST, _MOST = 6000, 100
"""MLflow's limits: characters of a parameter's value, and parameters in a request."""
_REFUSED = re.compile(r"[^/\w.\- ]")
"""Characters that are invalid in names of parameters and metrics on some systems. One invalid name
makes the whole request fail."""
_Value = TypeVar("_Value")


class MLflowLogger(Logger):
    """Logger to an MLflow run."""

    def __init__(self, config: MLflowConfig) -> None:
        self._config = config

    def start(self, run: RunInfo) -> None:
        """Begin an MLflow run, or continue that of the resumed run."""
        uri = self._config.tracking_uri
        if uri is not None and "://" not in uri.replace("file://", ""):
            # The user configured a folder. MLflow rejects folders unless this variable is set.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        if "mlflow" in run.ids:
            self._id = run.ids["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
            if run.resumed_at is not None:
                return
        else:
            created = self._client.create_run(self._experiment(), run_name=run.name)
            self._id = run.ids["mlflow"] = created.info.run_id
        params = [*_params(run.config)]
        for first in range(0, len(params), _MOST):
            self._client.log_batch(self._id, params=params[first : first + _MOST])

    def log(self, metrics: Mapping[str, Number], *, step: int) -> None:
        """Send the metrics of a step."""
        now = int(time.time() * 1000)
        batch = [Metric(name, value, now, step) for name, value in _with_names(metrics).items()]
        self._client.log_batch(self._id, metrics=batch)

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
    """Replace characters that MLflow rejects in names, and keep names distinct.

    Names of patterns and of data sources may have any characters.
    """
    renamed: dict[str, _Value] = {}
    for key, value in values.items():
        name = _REFUSED.sub("_", key)
        while name in renamed:
            name += "_"
        renamed[name] = value
    return renamed
