"""Typed configurations of loggers, and the table of them.

It holds values; ``axonlaunch.training.loggers`` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from axonlaunch.config.errors import target_problems
from axonlaunch.config.registry import Entry, Needs, Registry


@dataclass(frozen=True, kw_only=True)
class JSONLConfig:
    """Lines of JSON, ``metrics.jsonl`` in the run folder; always written, listed or not."""

    name: str = "jsonl"
    """name in the registry of loggers"""


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """Events of TensorBoard, in ``tensorboard`` in the run folder."""

    name: str = "tensorboard"
    """name in the registry of loggers"""


@dataclass(frozen=True, kw_only=True)
class CSVConfig:
    """A table, ``metrics.csv`` in the run folder."""

    name: str = "csv"
    """name in the registry of loggers"""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    name: str = "wandb"
    """name in the registry of loggers"""
    project: str = "axonlaunch"
    """project that the run is shown in"""
    entity: str | None = None
    """user or team that owns the project; null: the account's default"""
    group: str | None = None
    """group of runs that are shown together"""
    tags: list[str] = field(default_factory=list)
    """labels of the run"""
    mode: Literal["online", "offline"] | None = None
    """offline: written to the run folder, for `wandb sync`; null: WANDB_MODE, else online"""


@dataclass(frozen=True, kw_only=True)
class MLflowConfig:
    """MLflow."""

    name: str = "mlflow"
    """name in the registry of loggers"""
    tracking_uri: str | None = None
    """where runs are kept: http://HOST:5000, sqlite:///FILE, file:FOLDER; null: what
    MLFLOW_TRACKING_URI says, else MLflow's default
    """
    experiment: str = "axonlaunch"
    """experiment that the run belongs to; made where there is none"""


@dataclass(frozen=True, kw_only=True)
class TrackioConfig:
    """Trackio, Hugging Face's local tracker."""

    name: str = "trackio"
    """name in the registry of loggers"""
    project: str = "axonlaunch"
    """project that the run is shown in"""
    space_id: str | None = None
    """Hugging Face Space that shows it; null: on this machine alone"""


@dataclass(frozen=True, kw_only=True)
class CustomLoggerConfig:
    """A user's own logger, named by where it is imported from."""

    name: str = "custom"
    """name in the registry of loggers"""
    target: str
    """what makes the logger, package.module:Class; called with the arguments"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the target"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for values that don't fit each other."""
        return target_problems(self.target, "Class")


@dataclass(frozen=True, kw_only=True)
class FreeLoggerConfig:
    """Configuration of a registered logger that brought no dataclass of its own."""

    name: str
    """name in the registry of loggers"""
    arguments: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the logger"""


_HERE = "axonlaunch.training.loggers"

LOGGERS: Registry[Callable[[Any], Any], None] = Registry(
    "logger",
    {
        "jsonl": Entry(
            f"{_HERE}.jsonl:JSONLLogger", "metrics.jsonl in the run folder, always", JSONLConfig
        ),
        "tensorboard": Entry(
            f"{_HERE}.tensorboard:TensorBoardLogger",
            "TensorBoard's events, in the run folder",
            TensorBoardConfig,
            needs=Needs("tensorboard", "TensorBoard", "axonlaunch[tensorboard]"),
        ),
        "csv": Entry(f"{_HERE}.csv:CSVLogger", "metrics.csv in the run folder", CSVConfig),
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
        "trackio": Entry(
            f"{_HERE}.trackio:TrackioLogger",
            "Trackio, local or in a Hugging Face Space",
            TrackioConfig,
            needs=Needs("trackio", "Trackio", "axonlaunch[trackio]"),
        ),
        "custom": Entry(
            f"{_HERE}.custom:make_custom",
            "your own logger, target and arguments",
            CustomLoggerConfig,
        ),
    },
    entry_points="axonlaunch.loggers",
    free_config=FreeLoggerConfig,
)
