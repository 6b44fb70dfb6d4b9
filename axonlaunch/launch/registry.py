"""Registers launchers from plug-ins and from packages with entry points.

The table of launchers is in ``config.options.launch``. A launcher is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from axonlaunch.config.options.launch import LAUNCHERS, LaunchConfig, Launcher

Launchable = TypeVar("Launchable", bound=Callable[..., Any])


def register_launcher(
    name: str,
    *,
    config: type[LaunchConfig] | None = None,
    on_this_node: bool = False,
    renders: bool = False,
    sweeps: bool = True,
    summary: str | None = None,
) -> Callable[[Launchable], Launchable]:
    """Register a class with a method ``launch`` as ``launch=NAME``.

    ``launch(config, options)`` takes a checked ``RunConfig`` and ``LaunchOptions``, and returns the
    exit status and the run's summary, or None if another process has the summary.
    ``check(config, options)`` returns the checked and complete configuration, or raises
    ``ConfigError``. A launcher without ``check`` gets the checks that hold on every node. Both
    methods are called in the process of the command, which does not import torch.

    Args:
        name: Value of ``launch`` that selects the launcher.
        config: Dataclass derived from ``LaunchConfig``, with a ``name`` and custom keys, that
            types the group ``launch``; None selects ``LaunchConfig``.
        on_this_node: Whether ``launch`` runs all ranks on this node and waits for their end.
        renders: Whether ``launch`` can print the script that it would submit (``--render``).
        sweeps: Whether the launcher can launch several runs of one command.
        summary: One line for ``axonlaunch ls launch``; None uses the docstring's first line.

    Raises:
        ValueError: The name is taken, or the configuration does not derive from ``LaunchConfig``.
    """
    if config is not None and not issubclass(config, LaunchConfig):
        raise ValueError(
            f"register_launcher({name!r}, config={config.__name__}): it does not derive from "
            "LaunchConfig; write class "
            f"{config.__name__}(axonlaunch.config.options.launch.LaunchConfig)"
        )

    def register(cls: Launchable) -> Launchable:
        launcher = cls()
        facts = Launcher(
            check=getattr(launcher, "check", "axonlaunch.launch.launcher:check_anywhere"),
            launch=launcher.launch,
            on_this_node=on_this_node,
            renders=renders,
            sweeps=sweeps,
        )
        description = summary or (cls.__doc__ or f"from {cls.__module__}").splitlines()[0]
        LAUNCHERS.add(name, cls, summary=description, config=config, facts=facts)
        return cls

    return register
