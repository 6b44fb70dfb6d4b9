"""Decides which row of its data a resumed run reads first, on every rank alike."""

from __future__ import annotations

from axonlaunch.checkpoint import Checkpoint
from axonlaunch.checkpoint.reader import any_rank
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.data.dataset import Dataset
from axonlaunch.data.describe_rows import describe_rows
from axonlaunch.data.loader import Loader
from axonlaunch.data.origin import Origin, changed_data_issues, find_differences


def place_rows(
    loader: Loader, config: RunConfig, dataset: Dataset, resumed: Checkpoint | None, *, world: World
) -> tuple[str, ...]:
    """Set where a loader's rows begin; every rank calls this.

    Args:
        loader: This rank's.
        config: The run's.
        dataset: What ``config.data`` describes.
        resumed: The checkpoint that was loaded; None: the run begins.
        world: The ranks.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: The data is not that of the checkpoint, and the configuration does not say to
            go on from its first row.
    """
    if resumed is None:
        return ()
    loader.first_row_at = resumed.first_row_at
    if resumed.origin is None:
        return ()
    saved = Origin.from_dict(resumed.origin)
    now = describe_rows(config, dataset, like=saved) if world.is_main else None
    is_changed = world.is_main and any(find_differences(saved, now))
    if not any_rank(is_changed, world=world):
        return ()
    if config.checkpoint.changed_data == "error":
        message = f"the main rank found that the data is not that of {resumed.path}"
        issues = [ConfigIssue("checkpoint.changed_data", message, "error")]
        if world.is_main:
            issues = changed_data_issues(saved, now, where=resumed.path, data=config.data)
        raise ConfigError(issues)
    loader.first_row_at = resumed.samples
    return (
        f"checkpoint.changed_data=restart: the data is not that of {resumed.path}; its rows are "
        f"read from the first one, at step {resumed.step}",
    )
