"""Fills in values that neither a file of the user nor an override sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axonlaunch.config.composition.compose import OVERRIDE_ORIGIN, Composed
from axonlaunch.config.optimization.training_defaults import (
    TRAINED_NAMES,
    training_defaults,
    what_is_trained,
)

_FOR_PRESETS = ("adamw", "adam", "nadam", "muon")
"""Optimizers that the learning rate in a model's preset suits."""


def without_alternatives(composed: Composed) -> Composed:
    """Let a key that is set replace another key, unless the user set that key too.

    | key | replaces |
    | --- | --- |
    | ``data.mix`` | ``data.files`` |
    | ``train.epochs`` | ``train.steps`` |
    | ``data.held_out=0`` | ``train.eval_batches``, which becomes 0: there is nothing to evaluate |
    """
    data, train = composed.tree.get("data"), composed.tree.get("train")
    data, train = (part if isinstance(part, dict) else {} for part in (data, train))
    values: dict[str, Any] = {}
    if data.get("mix") and data.get("files") == "???":
        values["data.files"] = []
    replaced: dict[str, Any] = {}
    if train.get("epochs") is not None:
        replaced["train.steps"] = "auto"
    if _holds_nothing_out(data):
        replaced["train.eval_batches"] = 0
    origins = composed.origins() if replaced else {}
    values |= {key: value for key, value in replaced.items() if not _is_set(key, origins)}
    chosen = {"train.eval_batches": "default without held-out data"}
    return dataclasses.replace(
        composed,
        tree=_with_leaves(composed.tree, values),
        chosen={key: reason for key, reason in chosen.items() if key in values},
    )


def _holds_nothing_out(data: Mapping[str, Any]) -> bool:
    """Return whether neither the data nor a source of a mix has held-out samples."""
    mix = data.get("mix")
    sources = list(mix.values()) if isinstance(mix, dict) else []
    sources = [source for source in sources if isinstance(source, dict)]
    shares = [data.get("held_out"), *(s["held_out"] for s in sources if "held_out" in s)]
    is_zero = all(isinstance(share, int | float) and share == 0 for share in shares)
    return is_zero and not any(part.get("validation_split") for part in (data, *sources))


def with_training_defaults(composed: Composed) -> Composed:
    """Return a configuration with the optimizer, schedule and precision for what it trains.

    They replace defaults only. A value of an override, an experiment, a preset or a file of the
    user stays, and ``scheduler.warmup_steps`` also stands for ``scheduler.warmup_ratio``.
    """
    trained = what_is_trained(composed.tree)
    values = training_defaults(composed.tree)
    reason = "" if trained is None else f"default for {TRAINED_NAMES[trained]}"
    if trained is None and (values := _rate_of_preset(composed)):
        reason = "default for the size of the model"
    if not values:
        return composed
    origins = composed.origins()
    unset = {key: value for key, value in values.items() if not _is_set(key, origins)}
    if _is_set("scheduler.warmup_steps", origins):
        unset.pop("scheduler.warmup_ratio", None)
    tree = _with_leaves(composed.tree, unset)
    chosen = {**composed.chosen, **dict.fromkeys(unset, reason)}
    return dataclasses.replace(composed, tree=tree, chosen=chosen)


def _rate_of_preset(composed: Composed) -> dict[str, Any]:
    """Return the learning rate of the model's preset, if it suits the optimizer."""
    optimizer = composed.tree.get("optimizer")
    name = optimizer.get("name") if isinstance(optimizer, Mapping) else None
    if "lr" not in composed.preset or name not in _FOR_PRESETS:
        return {}
    return {"optimizer.lr": composed.preset["lr"]}


def _is_set(key: str, origins: Mapping[str, str]) -> bool:
    """Return whether something other than a default of an included group sets a key."""
    inside = f"{key}."
    for other, origin in origins.items():
        is_key = other == key or other.startswith(inside)
        group = origin.partition("/")[0]
        if is_key and (
            origin.startswith(OVERRIDE_ORIGIN)
            or Path(origin).is_absolute()
            or group in ("experiment", "model")
        ):
            return True
    return False


def _with_leaves(tree: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tree with values at dotted keys of its groups."""
    tree = dict(tree)
    for key, value in values.items():
        group, _, name = key.partition(".")
        section = tree.get(group, {})
        if isinstance(section, dict):  # otherwise an error that the schema reports
            tree[group] = {**section, name: value}
    return tree
