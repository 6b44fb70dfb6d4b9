"""Origin of each value of a configuration: a file, an override, the environment or a default.

The origin of a value that was ``auto``, or follows from another value, names the original value.
"""

from __future__ import annotations

from axonlaunch.config.composition.compose import DEFAULT_ORIGIN, Composed
from axonlaunch.config.problems.errors import plain
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.validation.validate import validate
from axonlaunch.config.values.plain_values import flatten


def origins_of(composed: Composed, config: RunConfig) -> dict[str, str]:
    """Return the origin of each value of a run.

    Args:
        composed: Composed configuration, from files, overrides and the environment.
        config: Final configuration of the run.

    Returns:
        Origins by dotted key: ``config.yaml``, ``override train.steps=3``, ``environment
        (torchrun)``, ``default``, or ``automatic: default has null`` if the launch decided.
    """
    sources = composed.origins()
    original = flatten(validate(composed.tree, RunConfig).config)
    origins = {}
    for key, value in flatten(config).items():
        origins[key] = sources.get(key, DEFAULT_ORIGIN)
        if key not in original or original[key] != value:
            origins[key] = f"automatic: {origins[key]} has {plain(original.get(key))}"
    return origins
