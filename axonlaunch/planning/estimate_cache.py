"""Caches estimates in the user's cache folder.

The key of an estimate is a hash of everything that it depends on: the configuration, the source of
axonlaunch and the versions. Estimates of user-defined models are not cached, because their source
may change. Corrupt files are ignored.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from axonlaunch.config import RunConfig, to_tree
from axonlaunch.config.consistency.layout import estimate_device, num_ranks
from axonlaunch.config.options.data_parallel import DATA_PARALLEL, DISPATCHES
from axonlaunch.config.schema import REGISTRIES
from axonlaunch.config.values.optional_keys import custom_target
from axonlaunch.planning.records import Estimate, RankEstimate
from axonlaunch.system.node import allocator_settings
from axonlaunch.system.storage import cache
from axonlaunch.system.storage.cache import keep

_MAX_ESTIMATES = 1000
"""Maximum number of cached estimates, of some kilobytes each.

Estimates of older versions of the source or of torch are never read again.
"""
# Keys of ``train`` that do not affect a step.
_IGNORED_KEYS = (
    *("name", "run_dir", "seed", "plugins", "scheduler", "loggers", "metrics", "callbacks"),
    *("checkpoint", "launch", "estimate", "hardware"),
)
"""Keys of a configuration that an estimate does not depend on; of some, a part is in its key."""
_IGNORED_TRAIN_KEYS = (
    "steps",
    "log_every",
    "eval_every",
    "eval_batches",
)
_HARDWARE_KEYS = (
    *("memory_gib", "multiprocessors"),
    *("cublas_workspace_mib", "context_mib", "communicator_mib"),
)


def read_estimate(config: RunConfig, *, exact: bool = False) -> Estimate | None:
    """Return the cached estimate of a configuration, if there is one.

    Args:
        config: Configuration with ``launch.nproc`` resolved.
        exact: Whether every layer must have been traced.
    """
    if not _is_ours(config):
        return None
    try:
        digest, _, content = _file(config, exact).read_text().partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if digest != _hash(content):
        return None
    fields: dict[str, Any] = json.loads(content)
    ranks = [RankEstimate(**rank) for rank in fields.pop("ranks")]
    return Estimate(**fields, ranks=ranks)


def write_estimate(config: RunConfig, estimate: Estimate, *, exact: bool = False) -> None:
    """Cache an estimate, if the cache folder is writable."""
    if not _is_ours(config):
        return
    content = json.dumps(dataclasses.asdict(estimate))
    keep(_file(config, exact), f"{_hash(content)}\n{content}")
    _delete_old()


def _delete_old() -> None:
    """Delete the oldest estimates beyond the limit; other processes may do the same."""
    with suppress(OSError):
        files = [*estimates_folder().glob("*.json")]
        if len(files) > _MAX_ESTIMATES:
            for file in sorted(files, key=lambda path: path.stat().st_mtime)[:-_MAX_ESTIMATES]:
                file.unlink()


def estimates_folder() -> Path:
    """Return the folder of the cache."""
    return cache.cache_folder() / "estimates"


def _is_ours(config: RunConfig) -> bool:
    """Return whether all traced code belongs to this package."""
    kind = config.strategy.data_parallel
    if kind is not None and not DATA_PARALLEL.is_included(kind):
        return False
    return (
        DISPATCHES.is_included(config.strategy.expert.dispatch)
        and config.train.loss is None
        and not config.plugins
        and all(
            REGISTRIES[group].is_included(getattr(config, group).name)
            and custom_target(getattr(config, group)) is None
            for group in ("model", "data", "optimizer")
        )
    )


def _file(config: RunConfig, exact: bool) -> Path:
    hardware, target = config.hardware, estimate_device(config)
    figures = _HARDWARE_KEYS if target == "gpu" else ()
    tree = {key: value for key, value in to_tree(config).items() if key not in _IGNORED_KEYS}
    relevant = {
        **tree,
        "train": {k: v for k, v in tree["train"].items() if k not in _IGNORED_TRAIN_KEYS},
        "world_size": num_ranks(config),
        "on": target,
        "expert_load": config.estimate.expert_load if config.strategy.expert.degree > 1 else 1.0,
        "hardware": {name: getattr(hardware, name, None) for name in figures},
        "exact": exact,
        "allocator": dataclasses.asdict(allocator_settings.settings_of_ranks()),
        "axonlaunch": version("axonlaunch"),
        "torch": version("torch"),
        "source": cache.source_hash(),
    }
    return estimates_folder() / f"{_hash(json.dumps(relevant, sort_keys=True))[:32]}.json"


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()
