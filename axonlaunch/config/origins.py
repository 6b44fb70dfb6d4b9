"""Where each value of a configuration comes from: a file, an override, the environment, a default.

What was ``auto``, or followed from another value, names what was written before.
"""

from __future__ import annotations

from axonlaunch.config.compose import DEFAULT_ORIGIN, Composed
from axonlaunch.config.errors import plain
from axonlaunch.config.plain import flatten
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.validate import validate


def origins_of(composed: Composed, config: RunConfig) -> dict[str, str]:
    """Return what set each value of a run.

    Args:
        composed: What the run's files, overrides and environment say.
        config: What became of it: as it is run.

    Returns:
        By dotted key: ``config.yaml``, ``override train.steps=3``, ``environment (torchrun)``,
        ``default``, or ``automatic: default has null`` where the launch has decided.
    """
    sources = composed.origins()
    written = flatten(validate(composed.tree, RunConfig).config)
    origins = {}
    for key, value in flatten(config).items():
        origins[key] = sources.get(key, DEFAULT_ORIGIN)
        if key not in written or written[key] != value:
            origins[key] = f"automatic: {origins[key]} has {plain(written.get(key))}"
    return origins
