"""Assigns the storages of an engine to the categories of a trace.

Ranks use it too, so it imports neither pipelines nor the fake world of a trace.
"""

from __future__ import annotations

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import data_parallel_facts
from axonlaunch.engines.data_parallel.fsdp import CPUOffload
from axonlaunch.engines.engine import Engine
from axonlaunch.planning.tracing.storage_trace import Category, StorageTrace

_ON_HOST: dict[CPUOffload, tuple[Category, ...]] = {
    CPUOffload.NONE: (),
    CPUOffload.PARAMS: ("parameters", "gradients"),
    CPUOffload.OPTIMIZER_STATES: ("optimizer",),
    CPUOffload.FULL: ("parameters", "gradients", "optimizer"),
}


def categorize_engine(engine: Engine, trace: StorageTrace) -> None:
    """Set the categories of an engine's tensors in an entered trace.

    This creates the optimizer states if they do not exist yet.
    """
    for module in engine.modules:
        trace.tag([*module.parameters(), *module.buffers()], "parameters")
    trace.tag(engine.optimizer_states(), "optimizer")
    categorize_gradients(engine, trace)


def categorize_gradients(engine: Engine, trace: StorageTrace) -> None:
    """Count accumulated gradients and those used by the optimizer as gradients from now on."""
    accumulated, updated = engine.named_parameters(), engine.named_updated()
    trace.count_gradients_of(tensor for _, tensor in (*accumulated, *updated))


def host_categories(config: RunConfig) -> tuple[Category, ...]:
    """Return the categories that a run keeps in host memory."""
    if not data_parallel_facts(config.strategy).shards_parameters:
        return ()
    return _ON_HOST[CPUOffload(config.strategy.fsdp.cpu_offload)]
