"""How a launcher joins: ``register_launcher``, in a plug-in or in a package that offers it.

The table itself is ``config.launch``'s; what is listed is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from axonlaunch.config.launch import LAUNCHERS, LaunchConfig, Launcher

Made = TypeVar("Made", bound=Callable[..., Any])


def register_launcher(
    name: str,
    *,
    config: type[LaunchConfig] | None = None,
    on_this_node: bool = False,
    renders: bool = False,
    sweeps: bool = True,
    summary: str | None = None,
) -> Callable[[Made], Made]:
    """Register a class with a method ``launch`` as ``launch=NAME``.

    ``launch(config, options)`` takes a checked ``RunConfig`` and ``LaunchOptions``, and returns the
    exit status and the run's summary, None where another process has it. ``check(config, options)``
    returns the configuration, checked and complete, or raises ``ConfigError``; without one a run is
    checked by what holds on every node. Both are called in the process of the command, which has
    no torch.

    Args:
        name: The name.
        config: Dataclass derived from ``LaunchConfig``, with a ``name`` and keys of its own, that
            types the group ``launch``; None: ``LaunchConfig``.
        on_this_node: Whether ``launch`` runs all ranks here, to their end.
        renders: Whether ``launch`` can print what it would submit (``--render``).
        sweeps: Whether it can launch more than one run of a command.
        summary: One line for ``axonlaunch ls launch``; None: the docstring's first.

    Raises:
        ValueError: The name is taken, or the configuration does not derive from ``LaunchConfig``.
    """
    if config is not None and not issubclass(config, LaunchConfig):
        raise ValueError(
            f"register_launcher({name!r}, config={config.__name__}): it does not derive from "
            "LaunchConfig; write class "
            f"{config.__name__}(axonlaunch.config.launch.LaunchConfig)"
        )

    def register(made: Made) -> Made:
        launcher = made()
        facts = Launcher(
            check=getattr(launcher, "check", "axonlaunch.launch.launcher:check_anywhere"),
            launch=launcher.launch,
            on_this_node=on_this_node,
            renders=renders,
            sweeps=sweeps,
        )
        described = summary or (made.__doc__ or f"from {made.__module__}").splitlines()[0]
        LAUNCHERS.add(name, made, summary=described, config=config, facts=facts)
        return made

    return register
