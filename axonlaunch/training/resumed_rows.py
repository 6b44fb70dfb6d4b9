"""Determines the first row of data that a resumed run reads; all ranks agree on it."""

from __future__ import annotations

from axonlaunch.checkpoint import Checkpoint
from axonlaunch.checkpoint.loading.reader import any_rank
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.data.datasets.dataset import Dataset
from axonlaunch.data.datasets.describe_rows import describe_rows
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.data.datasets.origin import Origin, changed_data_issues, is_other_data


def place_rows(
    loader: Loader, config: RunConfig, dataset: Dataset, resumed: Checkpoint | None, *, world: World
) -> tuple[str, ...]:
    """Set the first row that a loader reads. Every rank calls this.

    Args:
        loader: Loader of this rank.
        config: Configuration of the run.
        dataset: Dataset described by ``config.options.data``.
        resumed: Checkpoint that was loaded; None if the run starts from step 0.
        world: The ranks that train.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: The data differs from that of the checkpoint and
            ``checkpoint.changed_data`` is ``error``.
    """
    if resumed is None:
        return ()
    loader.first_row_at = resumed.first_row_at
    saved = None if resumed.origin is None else Origin.from_dict(resumed.origin)
    current = describe_rows(config, dataset, like=saved) if world.is_main else None
    restarts = config.checkpoint.changed_data == "restart"
    is_changed = current is not None and is_other_data(saved, current, restarts=restarts)
    if not any_rank(is_changed, world=world):
        return ()
    if not restarts:
        message = f"the main rank found that the data is not that of {resumed.path}"
        issues = [ConfigIssue("checkpoint.changed_data", message, "error")]
        if current is not None and saved is not None:
            issues = changed_data_issues(saved, current, checkpoint=resumed.path, data=config.data)
        raise ConfigError(issues)
    loader.first_row_at = resumed.samples
    return (
        f"checkpoint.changed_data=restart: the data is not that of {resumed.path}; its rows are "
        f"read from the first one, at step {resumed.step}",
    )
