"""The parsed arguments of a command line, and the configuration that they describe on a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

from axonlaunch import config as configuration
from axonlaunch.config import Composed, Composer, ConfigError, ConfigIssue, RunConfig
from axonlaunch.launch.environment.accelerators import count_accelerators
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.planning import auto_strategy
from axonlaunch.planning.tracing.shape_only_data import with_file_placeholders


@dataclass(frozen=True, kw_only=True)
class Request:
    """The parsed arguments of a command line.

    Attributes:
        overrides: Overrides of the run, or of all runs of a sweep.
        config_name: Name of the primary config.
        config_dirs: Folders with the user's YAML files.
        multirun: Whether the overrides describe a sweep.
        samples: Number of runs of a sweep that are drawn at random; None for every combination.
        parallel: Number of runs of a sweep that train at once; None for one after another.
    """

    overrides: Sequence[str]
    config_name: str = "config"
    config_dirs: Sequence[Path] = ()
    multirun: bool = False
    samples: int | None = None
    parallel: int | None = None
    _composed: dict[tuple[str, ...], Composed] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def words(self) -> list[str]:
        """Return the words of a command line with these arguments."""
        options = [word for path in self.config_dirs for word in ("--config-dir", str(path))]
        if self.config_name != "config":
            options += ["--config-name", self.config_name]
        return [
            "axonlaunch",
            "train",
            *(["-m"] if self.multirun else []),
            *([] if self.samples is None else ["--samples", str(self.samples)]),
            *([] if self.parallel is None else ["--parallel", str(self.parallel)]),
            *options,
            *self.overrides,
        ]

    def refuse_sweep_under(self, environment: ClusterEnvironment) -> None:
        """Refuse a sweep in a process that a launcher started.

        Raises:
            ConfigError: This is a sweep and a launcher started this process.
        """
        if self.multirun and environment.launcher:
            message = f"{environment.launcher} started this process as a part of one run"
            raise ConfigError([ConfigIssue("", f"-m: {message}; start a sweep from one node")])

    def overrides_of_runs(self) -> list[list[str]]:
        """Return the overrides of each run.

        Raises:
            ConfigError: An override of a sweep is invalid.
        """
        if not self.multirun:
            return [list(self.overrides)]
        composer = Composer(config_dirs=self.config_dirs)
        return composer.sweep(self.overrides, samples=self.samples)

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose the overrides of one run; the same overrides are composed once.

        Raises:
            ConfigError: The files can't be composed.
        """
        key = tuple(overrides)
        if key not in self._composed:
            self._composed[key] = configuration.compose(
                overrides, config_name=self.config_name, config_dirs=self.config_dirs
            )
        return self._composed[key]


def load_config(
    request: Request,
    overrides: Sequence[str],
    environment: ClusterEnvironment,
    *,
    server: Callable[[], ForkServerContext],
    needs_files: bool = True,
) -> tuple[Composed, RunConfig]:
    """Compose and type one configuration as the process that the environment describes.

    Args:
        request: The parsed command line.
        overrides: Overrides of the run.
        environment: Environment of the launcher that started this process, if any.
        server: Starts the fork server if it does not run yet. It is called only to count
            accelerators or to search a layout.
        needs_files: Whether missing settings of data files are an error.

    Raises:
        ConfigError: No node can run the configuration.
    """

    def compose_here(arguments: Sequence[str]) -> Composed:
        """Compose overrides, to which ``strategy=auto`` adds those of the layout."""
        composed = environment.applied_to(
            request.compose(arguments), accelerators=partial(count_accelerators, server)
        )
        if needs_files:
            return composed
        return dataclasses.replace(composed, tree=with_file_placeholders(composed.tree))

    return auto_strategy.load_auto_strategy(
        overrides, compose=compose_here, server=server, config_dirs=request.config_dirs
    )
