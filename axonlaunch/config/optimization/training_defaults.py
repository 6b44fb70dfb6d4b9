"""Chooses the optimizer, schedule and precision of a run by what it trains, where nothing is set.

The values follow published recipes: of 19 for LoRA the learning rate is 1e-5 to 3e-4 (most often
2e-4 or 1e-4), of 14 for full fine-tuning 5e-7 to 5e-4 (most often 1e-5 or 2e-5), all 44 that name a
precision use bf16, and most decay to 0 after a warm-up of 3 to 10% of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from axonlaunch.config.optimization.optimizer import (
    OPTIMIZERS,
    AdamWConfig,
    FreeOptimizerConfig,
)
from axonlaunch.config.optimization.schedules import CosineConfig
from axonlaunch.config.options.model import (
    LANGUAGE_MODELS,
    has_initial_weights,
    is_of_transformers,
)
from axonlaunch.config.precision import automatic_precision
from axonlaunch.config.problems.errors import plain
from axonlaunch.config.registry import EntryPointError, UnknownNameError
from axonlaunch.config.values.plain_values import flatten

Trained = Literal["full", "adapter", "scratch"]

TRAINED_NAMES: dict[Trained, str] = {
    "full": "full fine-tuning",
    "adapter": "an adapter of a pretrained model",
    "scratch": "a model of transformers from scratch",
}
"""Names of what a run trains, for messages."""

_LEARNING_RATES: dict[str, dict[Trained, float]] = {
    # An adapter begins as zero and has to move further than weights that are nearly right.
    "adamw": {"full": 2e-5, "adapter": 2e-4, "scratch": 3e-4},
    "adam": {"full": 2e-5, "adapter": 2e-4, "scratch": 3e-4},
    "nadam": {"full": 2e-5, "adapter": 2e-4, "scratch": 3e-4},
    # Its updates are as large as AdamW's (MuonConfig.adjust_lr_fn).
    "muon": {"full": 2e-5, "adapter": 2e-4, "scratch": 3e-4},
    # A sign has full size in every element: a tenth of AdamW's rate (LionConfig.lr).
    "lion": {"full": 2e-6, "adapter": 2e-5, "scratch": 3e-5},
    # Relative to the root mean square of a matrix, usually 0.02: moves it as far as 2e-5.
    "adafactor": {"full": 1e-3},
    # A step of a gradient clipped to norm 1 changes billions of weights by less than AdamW's.
    "sgd": {"full": 1e-2, "adapter": 1e-2},
}
_UNKNOWN_OPTIMIZER = _LEARNING_RATES["adamw"]
"""Learning rates of a user's class: most are variants of AdamW, such as 8-bit ones."""

# In 3,000 steps at a peak of 2e-5, a decay of 0.1 shrinks weights by 0.3%: it has no effect that a
# pretrained model needs. The squared gradients of small batches need the longer average.
_FINE_TUNING_OPTIMIZER: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.0, "betas": [0.9, 0.999]},
    "nadam": {"weight_decay": 0.0, "betas": [0.9, 0.999]},
    "muon": {"weight_decay": 0.0, "adamw_betas": [0.9, 0.999]},
    "lion": {"weight_decay": 0.0},
}
_WARMUP = {"warmup_ratio": 0.03}
_FINE_TUNING_SCHEDULER: dict[str, dict[str, Any]] = {
    "cosine": {**_WARMUP, "final_lr_ratio": 0.0},
    "linear": {**_WARMUP, "final_lr_ratio": 0.0},
    "constant": _WARMUP,
    "wsd": _WARMUP,
    "inverse_sqrt": _WARMUP,
}


def what_is_trained(tree: Mapping[str, Any]) -> Trained | None:
    """Return what a run trains; None for models without defaults of their own.

    Args:
        tree: Nested plain values of the configuration, typed or not.
    """
    model = tree.get("model")
    if not isinstance(model, Mapping):
        return None
    if has_initial_weights(model):
        return "full" if tree.get("adapter") is None else "adapter"
    return "scratch" if is_of_transformers(model) else None


def training_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults by dotted key for what a run trains.

    Args:
        tree: Nested plain values of the configuration, typed or not.
    """
    trained = what_is_trained(tree)
    if trained is None:
        return {}
    optimizer = _name(tree.get("optimizer"), AdamWConfig.name)
    scheduler = _name(tree.get("scheduler"), CosineConfig.name)
    chosen: dict[str, Any] = {}
    if (rate := _learning_rates(optimizer).get(trained)) is not None:
        chosen["optimizer.lr"] = rate
    if trained != "scratch":
        options = _FINE_TUNING_OPTIMIZER.get(optimizer, {})
        chosen |= {f"optimizer.{key}": value for key, value in options.items()}
        options = _FINE_TUNING_SCHEDULER.get(scheduler, {})
        chosen |= {f"scheduler.{key}": value for key, value in options.items()}
    if tree["model"].get("name") in LANGUAGE_MODELS:
        chosen["train.precision"] = "auto"
    return chosen


def note_on_defaults(tree: Mapping[str, Any]) -> str:
    """Return a line with the values of a run that are defaults for what it trains, else "".

    Args:
        tree: Nested plain values of the run's configuration, with a resolved precision.
    """
    trained, values, shown = what_is_trained(tree), flatten(tree), []
    for key, value in training_defaults(tree).items():
        reason = ""
        if key == "train.precision":
            on_cpu = values["launch.device"] == "cpu"
            value, reason = automatic_precision(has_bf16=not on_cpu), " (on a CPU)" * on_cpu
        if plain(values[key]) == plain(value):
            shown.append(f"{key}={plain(value)}{reason}")
    if trained is None or not shown:
        return ""
    first, *others = shown
    also = f"; also {', '.join(others)}" if others else ""
    return f"{first}, the default for {TRAINED_NAMES[trained]}{also}"


def _name(group: Any, default: str) -> str:
    return str(group.get("name", default)) if isinstance(group, Mapping) else default


def _learning_rates(optimizer: str) -> Mapping[Trained, float]:
    """Return the learning rates of an optimizer; empty if its author has defined a default."""
    if optimizer in _LEARNING_RATES:
        return _LEARNING_RATES[optimizer]
    try:
        schema = OPTIMIZERS.config(optimizer)
    except (UnknownNameError, EntryPointError):  # typing the configuration reports it
        return {}
    return _UNKNOWN_OPTIMIZER if issubclass(schema, FreeOptimizerConfig) else {}
