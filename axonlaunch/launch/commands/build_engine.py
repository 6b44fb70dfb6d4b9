"""Builds the engine of a configuration for scripts that write their own training loop."""

from __future__ import annotations

from axonlaunch import config as configuration
from axonlaunch.comm import Backend, World
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import nodes
from axonlaunch.launch.failures.user_errors import config_errors
from axonlaunch.preflight import checks
from axonlaunch.training.script_engine import Engine, engine_with_weights


@config_errors()
def build_engine(config: RunConfig, world: World) -> Engine:
    """Check a configuration, and build this rank's engine with initial weights.

    The world determines ``launch.backend``, ``launch.device`` and, if it is ``auto``,
    ``launch.nproc``. Checkpoints are neither loaded nor saved.

    Args:
        config: Result of ``load``.
        world: The ranks that train. All of them must call this.

    Raises:
        ConfigError: The configuration can't be run, or has another number of ranks than the world.
    """
    _, num_nodes = nodes(config)
    nproc = config.launch.nproc
    ranks = world.world_size if nproc == "auto" else nproc * num_nodes
    if ranks != world.world_size or ranks % num_nodes:
        message = f"the world has {world.world_size} ranks on {num_nodes} node(s); use auto"
        raise ConfigError([ConfigIssue("launch.nproc", message, nproc)])
    settings = {
        "launch.nproc": ranks // num_nodes,
        "launch.backend": world.backend.value,
        "launch.device": world.device.type,
    }
    config = configuration.with_values(config, settings)
    # On NCCL every rank of the world has a device, possibly on another node.
    devices = ranks // num_nodes if world.backend is Backend.NCCL else None
    return engine_with_weights(checks.resolve(config, devices=devices), world)
