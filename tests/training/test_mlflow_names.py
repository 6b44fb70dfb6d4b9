"""MLflow refuses invalid names of parameters and metrics together with the rest of the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonlaunch.config.options.loggers import MLflowConfig
from axonlaunch.training.loggers.logger import RunInfo


def test_keys_and_sources_of_any_characters_are_logged_to_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    from axonlaunch.training.loggers.mlflow import MLflowLogger

    uri = f"file:{tmp_path}/store"
    plan = {"*.query": "column", "?.query": "row"}
    logger = MLflowLogger(MLflowConfig(tracking_uri=uri, experiment="mine"))
    config = {"seed": 0, "strategy": {"tensor": {"plan": plan}}}
    run = RunInfo(name="run", run_dir=tmp_path, config=config, resumed_at=None, ids={})
    logger.start(run)
    logger.log({"loss": 1.0, "eval_loss/web, 50%": 2.0}, step=1)
    data = MlflowClient(tracking_uri=uri).get_run(run.ids["mlflow"]).data
    tensor = "strategy.tensor.plan"
    expected = {f"{tensor}._.query": "column", f"{tensor}._.query_": "row"}
    assert data.params == {"seed": "0", **expected}
    assert data.metrics == {"loss": 1.0, "eval_loss/web_ 50_": 2.0}
