"""What a configuration trains on in a step, and what it asks of host memory, as plain records.

It reads a configuration alone and estimates nothing; it has no opinion on what is too much.
"""

from __future__ import annotations

from axonlaunch.config import RunConfig
from axonlaunch.config.hardware import GIB
from axonlaunch.config.layout import Layout, estimated_on, num_ranks
from axonlaunch.planning.records import Estimate, HostMemory, Workload


def workload(config: RunConfig, *, searched: bool = False) -> Workload:
    """Return what a step trains on.

    Args:
        config: With ``launch.nproc`` resolved, unless it is searched.
        searched: Whether its layout, micro-batch and recomputation are still looked for.
    """
    train = config.train
    micro = None if searched else Layout.of(config, world_size=num_ranks(config)).micro_batch_size
    length = getattr(config.data, "sequence_length", None)
    return Workload(
        global_batch_size=train.global_batch_size,
        micro_batch_size=micro,
        sequence_length=length if isinstance(length, int) else None,
        precision=train.precision,
        activation_checkpointing=None if searched else train.activation_checkpointing,
    )


def host_memory(config: RunConfig, estimate: Estimate) -> HostMemory | None:
    """Return what a run keeps in host memory; None where nothing is kept in another memory.

    That is what is offloaded, and with ``checkpoint.async_save`` the copy of what is not, from
    which saves are written.

    Args:
        config: With ``launch.nproc`` resolved.
        estimate: Of the run.
    """
    hardware, nproc = config.hardware, config.launch.nproc
    bytes_per_rank = estimate.host_bytes
    if config.checkpoint.every and config.checkpoint.async_save:
        bytes_per_rank += estimate.saved_bytes
    if not bytes_per_rank or estimated_on(config) != "gpu":
        return None
    assert nproc != "auto"
    in_node = nproc
    if hardware is not None and hardware.devices_per_node is not None:
        in_node = min(nproc, hardware.devices_per_node)
    of_node = bytes_per_rank * in_node
    memory = None
    if hardware is not None and hardware.host_memory_gib is not None:
        memory = int(hardware.host_memory_gib * GIB)
    fits = None if memory is None else of_node * (1 + config.estimate.margin) <= memory
    return HostMemory(bytes_per_rank, of_node, memory, fits)
