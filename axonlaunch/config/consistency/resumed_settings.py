"""Compares the settings of a run with those of the run that it resumes.

Compares the settings that the result depends on, and the number of threads.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from axonlaunch.config.problems.errors import plain
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.values.environment_values import to_interpolations
from axonlaunch.config.values.hub_reference import without_commits
from axonlaunch.config.values.plain_values import LARGEST_YAML, flatten, read_yaml, to_tree
from axonlaunch.system.storage.files import read_text

_LEARNED = ("seed", "model", "adapter", "data", "optimizer", "scheduler")
_LEARNED_OF_TRAIN = (
    *("global_batch_size", "grad_clip", "precision", "param_dtype", "grad_dtype"),
    *("matmul_dtype", "matmul_group_size", "matmul_start_step", "matmul_exclude"),
    *("loss", "label_smoothing", "z_loss", "dft", "eaft"),
)
"""Settings that the result depends on; the layout and the number of steps are not included."""
_OF_PEFT = tuple(f"adapter.{name}" for name in ("rank", "alpha", "rslora", "dora", "targets"))
"""Settings that the folder in ``adapter.path`` decides."""
_DECIDED = ("data.packing", "train.precision")
"""Settings of which ``auto`` is decided for the model, or by the resumed run."""


def settings_unlike_resumed(config: RunConfig, resumed: dict[str, Any]) -> list[str]:
    """Return settings that differ and affect the result, each as ``key=new (was old)``.

    Keys that an earlier version of the program did not write count as their defaults.

    Args:
        config: Configuration of the run.
        resumed: Frozen configuration of the resumed run, by dotted key.
    """
    now = _without_empty(flatten(to_interpolations(to_tree(config))))
    resumed = _without_empty({**resumed, **_defaults(config, resumed), **resumed})
    keys = [key for key in {**resumed, **now} if key.partition(".")[0] in _LEARNED]
    keys += [f"train.{name}" for name in _LEARNED_OF_TRAIN]
    return [
        f"{key}={plain(now.get(key))} (was {plain(resumed.get(key))})"
        for key in keys
        if not _is_same(now.get(key), resumed.get(key))
        and not (key in _DECIDED and now.get(key) == "auto")
        and not (key in _OF_PEFT and now.get("adapter.path") is not None)
    ]


def _is_same(now: Any, resumed: Any) -> bool:
    """Return whether a value is that of the resumed run, which may have added a commit to it."""
    return bool(now == resumed or (without_commits(now) == now == without_commits(resumed)))


def _defaults(config: RunConfig, resumed: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of sections with the same option in both configurations.

    If the option differs (``model.name``), all of its keys are reported.
    """
    defaults: dict[str, Any] = {}
    for name in (*_LEARNED, "train"):
        section = getattr(config, name)
        if not dataclasses.is_dataclass(section):
            continue
        if getattr(section, "name", None) != resumed.get(f"{name}.name"):
            continue
        for field in dataclasses.fields(section):
            if field.default is not dataclasses.MISSING:
                defaults |= flatten({field.name: field.default}, name)
            elif field.default_factory is not dataclasses.MISSING:
                defaults |= flatten({field.name: field.default_factory()}, name)
    return defaults


def _without_empty(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove empty mappings; others are flattened to keys like ``optimizer.groups.a.lr``."""
    return {key: value for key, value in settings.items() if value != {}}


def other_threads(config: RunConfig, resumed: dict[str, Any]) -> list[str]:
    """Return a note that a run resumed with a different number of threads differs in last bits."""
    was, now = resumed.get("launch.threads"), config.launch.threads
    if was in (None, "auto", now):
        return []
    return [
        f"resuming with launch.threads={now} (was {was}): sums round otherwise, so losses may "
        "differ in their last bits from those of a run that was not stopped; "
        f"launch.threads={was} keeps them"
    ]


def frozen_settings(file: Path) -> dict[str, Any]:
    """Return the frozen configuration of a run, by dotted key.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is not a configuration.
    """
    return flatten(read_yaml(read_text(file, at_most=LARGEST_YAML), is_frozen=True))
