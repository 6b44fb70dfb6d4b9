"""Names of runs and paths of their folders."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from axonlaunch.config import RunConfig
from axonlaunch.config.axes import PRINTED
from axonlaunch.config.consistency.layout import Layout, num_ranks

SCRATCH_FOLDER = "/tmp/axonlaunch"
"""Folder of runs on other nodes whose checkpoints are in a bucket."""


def with_run_dir(config: RunConfig) -> RunConfig:
    """Resolve ``name`` and ``run_dir`` without creating the folder."""
    name, folder = str(config.name), Path(config.run_dir)
    if name == config.run_dir == "auto":
        name = free_name(default_name(config))
    if config.run_dir == "auto":
        folder = Path("runs", name)
    name = folder.name if name == "auto" else name
    return dataclasses.replace(config, name=name, run_dir=str(folder.absolute()))


def with_folder_of_nodes(config: RunConfig, *, root: str = SCRATCH_FOLDER) -> RunConfig:
    """Resolve ``name`` and ``run_dir`` of a run on other nodes.

    Args:
        config: Configuration with resolved ``launch.nproc``.
        root: Folder of the nodes in which the run folder is, unless the configuration has one.
    """
    name = default_name(config) if config.name == "auto" else config.name
    folder = f"{root.rstrip('/')}/{name}" if config.run_dir == "auto" else config.run_dir
    return dataclasses.replace(config, name=name, run_dir=folder)


def create_unique(name: str) -> Path:
    """Create a new folder below ``runs`` with this name, plus a number if the name is taken."""
    for number in itertools.count(1):
        folder = Path("runs", name if number == 1 else f"{name}-{number}").absolute()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("count ended")


def free_name(name: str) -> str:
    """Return a name without a folder below ``runs``: this one, or this one with a number."""
    numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(free for free in numbered if not Path("runs", free).exists())


def default_name(config: RunConfig) -> str:
    """Name a run after its model and strategy; ``launch.nproc`` is resolved."""
    layout = Layout.of(config, world_size=num_ranks(config))
    kinds: list[str] = [] if layout.facts.averages == "nothing" else [layout.data_parallel]
    kinds += [axis.word for axis in PRINTED if layout.degrees[axis.name] > 1]
    return "-".join([config.model.name, *(kinds or ["single"])])
