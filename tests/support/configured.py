"""Builds configurations as the commands do, for tests that build an engine or start a run.

These functions refuse the same configurations as the commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from axonlaunch import config as configuration
from axonlaunch.config import RunConfig
from axonlaunch.planning import auto_strategy
from axonlaunch.planning.tracing.shape_only_data import replace_with_synthetic
from axonlaunch.preflight import checks


def run_config(overrides: Sequence[str]) -> RunConfig:
    """Return the configuration that ``axonlaunch train`` and ``axonlaunch verify`` give to the
    ranks.

    Raises:
        ConfigError: The commands refuse the configuration.
    """
    return checks.resolve(_loaded(overrides, ()))


def estimate_config(overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> RunConfig:
    """Return the configuration that ``axonlaunch estimate`` traces.

    Raises:
        ConfigError: The command refuses the configuration.
    """
    return checks.resolve_anywhere(replace_with_synthetic(_loaded(overrides, config_dirs)))


def _loaded(overrides: Sequence[str], config_dirs: Sequence[Path]) -> RunConfig:
    def compose(arguments: Sequence[str]) -> configuration.Composed:
        return configuration.compose(arguments, config_dirs=config_dirs)

    def server() -> ForkServerContext:
        raise AssertionError("only strategy=auto asks for processes")

    _, config = auto_strategy.load_auto_strategy(
        overrides, compose=compose, server=server, config_dirs=config_dirs
    )
    return config
