"""Typed configurations of loggers, and the registry of loggers.

``axonlaunch.training.loggers`` implements them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config.problems.errors import target_problems
from axonlaunch.config.registry import Entry, Needs, RegisteredConfig, Registry


@dataclass(frozen=True, kw_only=True)
class JSONLConfig:
    """Lines of JSON, ``metrics.jsonl`` in the run folder; always written, even if not listed."""

    name: str = "jsonl"
    """name of the logger"""


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """TensorBoard events, in ``tensorboard`` in the run folder."""

    name: str = "tensorboard"
    """name of the logger"""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    name: str = "wandb"
    """name of the logger"""
    project: str = "axonlaunch"
    """project of the run"""
    entity: str | None = None
    """user or team that owns the project; null: the default of the account"""
    group: str | None = None
    """group of runs that are displayed together; null: none"""
    tags: list[str] = field(default_factory=list)
    """labels of the run"""
    mode: Literal["online", "offline"] | None = None
    """destination. online: the server; offline: the run folder, for `wandb sync`; null: set by the
    environment variable WANDB_MODE, else online
    """


@dataclass(frozen=True, kw_only=True)
class MLflowConfig:
    """MLflow."""

    name: str = "mlflow"
    """name of the logger"""
    tracking_uri: str | None = None
    """storage of runs: http://HOST:5000, sqlite:///FILE or file:FOLDER; null: set by the
    environment variable MLFLOW_TRACKING_URI, else MLflow's default
    """
    experiment: str = "axonlaunch"
    """experiment of the run; created if it does not exist"""


@dataclass(frozen=True, kw_only=True)
class CustomLoggerConfig(RegisteredConfig):
    """User-defined logger, named by its import path."""

    name: str = "custom"
    """name of the logger"""
    target: str
    """import path of the logger, package.module:Class; it is called with the arguments"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid value."""
        return target_problems(self.target, "Class")


_HERE = "axonlaunch.training.loggers"

LOGGERS: Registry[Callable[[Any], Any], None] = Registry(
    "logger",
    {
        "jsonl": Entry(
            f"{_HERE}.jsonl:JSONLLogger",
            "metrics.jsonl in the run folder, always written",
            JSONLConfig,
        ),
        "tensorboard": Entry(
            f"{_HERE}.tensorboard:TensorBoardLogger",
            "TensorBoard events in the run folder",
            TensorBoardConfig,
            needs=Needs("tensorboard", "TensorBoard", "axonlaunch[tensorboard]"),
        ),
        "wandb": Entry(
            f"{_HERE}.wandb:WandbLogger",
            "Weights & Biases, online or offline",
            WandbConfig,
            needs=Needs("wandb", "wandb", "axonlaunch[wandb]"),
        ),
        "mlflow": Entry(
            f"{_HERE}.mlflow:MLflowLogger",
            "MLflow, a server or a local store",
            MLflowConfig,
            needs=Needs("mlflow", "MLflow", "axonlaunch[mlflow]"),
        ),
        "custom": Entry(
            f"{_HERE}.custom:make_custom",
            "your logger, target and arguments",
            CustomLoggerConfig,
        ),
    },
    entry_points="axonlaunch.loggers",
)
