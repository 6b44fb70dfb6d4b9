"""Selects the update of this rank's parameters by how parameters and states are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from axonlaunch.comm import World
from axonlaunch.comm.mesh import Mesh
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.engines.data_parallel.arriving_gradients import UpdateOnArrival
from axonlaunch.engines.data_parallel.fsdp import CPUOffload, sharded_units
from axonlaunch.engines.data_parallel.replicas import Replicas
from axonlaunch.engines.data_parallel.zero1 import ShardedUpdate
from axonlaunch.engines.optimizer.in_backward import UpdateInBackward
from axonlaunch.engines.optimizer.offload import HOST, StreamedUpdate
from axonlaunch.engines.optimizer.step import Update


def choose_update(
    config: RunConfig,
    trained: Mapping[str, nn.Parameter],
    *,
    facts: Mapping[str, ParameterFacts],
    world: World,
    mesh: Mesh,
    replicas: Replicas | None,
    modules: Sequence[nn.Module],
    units: Sequence[nn.Module],
) -> Update:
    """Create the update of a rank's trained parameters.

    Args:
        config: Configuration of the run.
        trained: Trained parameters, by name in the full model.
        facts: Facts about the parameters that select optimizer options, by the same names.
        world: This rank's process and device.
        mesh: Mesh of all ranks.
        replicas: The object that averages gradients of full parameters; None if parameters are
            sharded.
        modules: This rank's parts of the model, in order.
        units: Submodules whose parameters no other module uses, in the order of their forwards.
    """
    layout, device = Layout.of(config, world_size=world.world_size), world.device
    offload = CPUOffload.NONE
    if layout.facts.shards_parameters:
        offload = CPUOffload(config.strategy.fsdp.cpu_offload)
    if config.train.optimizer_in_backward:
        assert layout.micro_batches == layout.pipeline == 1
        assert replicas is None
        if offload is CPUOffload.FULL:
            return UpdateOnArrival(
                config.optimizer,
                trained,
                units=[unit for part in modules for unit in sharded_units(part)],
                device=device,
                parameters=facts,
                seed=config.seed,
            )
        return UpdateInBackward(config.optimizer, trained, parameters=facts, seed=config.seed)
    if layout.facts.divides_update:
        [axis] = layout.mesh_axes(layout.division().shard_axes)
        return ShardedUpdate(
            config.optimizer,
            trained,
            mesh=mesh.device_mesh,
            axis=axis,
            gradients=None if replicas is None else replicas.rows,
            facts=facts,
            modules=modules,
            units=units,
            seed=config.seed,
        )
    if offload.streams_the_update:
        states_on = device if offload is CPUOffload.PARAMS else HOST
        return StreamedUpdate(
            config.optimizer,
            trained,
            device=device,
            states_on=states_on,
            parameters=facts,
            seed=config.seed,
        )
    return Update(config.optimizer, trained, parameters=facts, seed=config.seed)
