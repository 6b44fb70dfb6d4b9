"""Copies of host tensors that an update on a GPU makes; on a CPU it needs none.

They are in streams of their own, whose memory no other stream uses. Copies that the update itself
makes, in its own type, are recorded with the other work of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from axonlaunch.comm.mesh import local_part
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import data_parallel_facts
from axonlaunch.config.precision import master_format
from axonlaunch.engines.data_parallel.fsdp import CPUOffload
from axonlaunch.engines.engine import Engine


@dataclass(frozen=True)
class ParameterCopies:
    """Copies for the update of one parameter.

    Attributes:
        is_matrix: Whether the parameter has two dims or more.
        sizes: Bytes of each copy.
        rounded: Bytes of the parameter in its own type, if it differs from that of the update and
            no copy has it. It exists only while its copy to the host is enqueued.
    """

    is_matrix: bool
    sizes: tuple[int, ...]
    rounded: int = 0


def update_copies(
    config: RunConfig, engine: Engine, *, last_blocks: Sequence[nn.Module] = (), lacking: int = 0
) -> list[ParameterCopies]:
    """Return the copies for each parameter, in the order of the update.

    An update on the host makes none.

    Args:
        config: Configuration of the run.
        engine: Engine of a model that may lack blocks, with its optimizer states.
        last_blocks: The last block of each pipeline stage, which stands for the lacking ones.
        lacking: Number of blocks that each stage lacks.
    """
    offload = CPUOffload(config.strategy.fsdp.cpu_offload)
    is_sharded = data_parallel_facts(config.strategy).shards_parameters
    if not is_sharded or not offload.streams_the_update:
        return []
    keeps_parameters = offload is CPUOffload.OPTIMIZER_STATES
    sizes = (_copied_states if keeps_parameters else _copied_parameters)(config, engine)
    rounded = {} if keeps_parameters else _rounded_parameters(config, engine)
    by_name = {
        name: ParameterCopies(tensor.ndim > 1, sizes.get(name, ()), rounded.get(name, 0))
        for name, tensor in engine.named_updated()
    }
    copies: list[ParameterCopies] = []
    for group in engine.update_groups():
        repeated = _names_by_last(engine, last_blocks, group)
        for name in group:
            copies.append(by_name[name])
            copies += [by_name[other] for other in repeated.get(name, ())] * lacking
    return copies


def _copied_parameters(config: RunConfig, engine: Engine) -> dict[str, tuple[int, ...]]:
    """Return the bytes of each parameter and its gradient by name.

    Masters are on the device, and take the place of the parameters.
    """
    sizes = {}
    for name, tensor in engine.named_updated():
        numel, dtype = _numel(tensor), tensor.grad_dtype or tensor.dtype
        parameter = () if _has_master(config, tensor) else (numel * tensor.itemsize,)
        sizes[name] = (*parameter, numel * dtype.itemsize)
    return sizes


def _rounded_parameters(config: RunConfig, engine: Engine) -> dict[str, int]:
    """Return the bytes of each parameter with a master, by name."""
    return {
        name: _numel(tensor) * tensor.itemsize
        for name, tensor in engine.named_updated()
        if _has_master(config, tensor)
    }


def _has_master(config: RunConfig, tensor: Tensor) -> bool:
    masters = master_format(config.optimizer)
    return masters is not None and tensor.itemsize != masters.nbytes


def _copied_states(config: RunConfig, engine: Engine) -> dict[str, tuple[int, ...]]:
    """Return the bytes of each parameter's states and master by name."""
    masters = master_format(config.optimizer)
    sizes: dict[str, tuple[int, ...]] = {}
    for key, state in engine.state_dict()["optimizer"].items():
        name = key.rpartition(".")[0]
        sizes[name] = (*sizes.get(name, ()), local_part(state.detach()).nbytes)
    if masters is not None:
        for name, tensor in engine.named_updated():
            sizes[name] = (*sizes.get(name, ()), _numel(tensor) * masters.nbytes)
    return sizes


def _names_by_last(
    engine: Engine, blocks: Sequence[nn.Module], group: Sequence[str]
) -> dict[str, list[str]]:
    """Return the parameters of each block in a group by the name of the last one of them."""
    names = {id(parameter): name for name, parameter in engine.named_parameters()}
    by_last = {}
    for block in blocks:
        of_block = {names.get(id(parameter)) for parameter in block.parameters()}
        if members := [name for name in group if name in of_block]:
            by_last[members[-1]] = members
    return by_last


def _numel(tensor: Tensor) -> int:
    return local_part(tensor.detach()).numel()
