"""Describes the workload of a step and the host memory of a run as plain records.

Everything follows from the configuration and an existing estimate.
"""

from __future__ import annotations

from pathlib import Path

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout, estimate_device, num_ranks
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.config.options.hardware import GIB
from axonlaunch.config.options.model import TransformersModel
from axonlaunch.planning.records import Estimate, HostMemory, Workload


def workload(config: RunConfig, *, searched: bool = False) -> Workload:
    """Return the workload of a step.

    Args:
        config: Configuration with ``launch.nproc`` resolved, unless the layout is searched.
        searched: Whether layout, micro-batch size and recomputation are still to be found.
    """
    train = config.train
    micro_batch_size = (
        None if searched else Layout.of(config, world_size=num_ranks(config)).micro_batch_size
    )
    return Workload(
        global_batch_size=train.global_batch_size,
        micro_batch_size=micro_batch_size,
        sequence_length=config.sequence_length,
        precision=train.precision,
        activation_checkpointing=None if searched else train.activation_checkpointing,
        model=_model_name(config),
    )


def _model_name(config: RunConfig) -> str:
    """Return the name of a model: the folder, id or type of a model of transformers."""
    model = config.model
    if isinstance(model, TransformersModel):
        if model.path is None:
            return str(model.config["model_type"])
        folder = Path(model.path)
        return folder.name if folder.is_dir() else model.path
    return model.name


def host_memory(config: RunConfig, estimate: Estimate) -> HostMemory | None:
    """Return the host memory of a GPU run; None if the run uses none.

    Host memory holds offloaded tensors and, with ``checkpoint.async_save``, a copy of all other
    saved tensors, from which checkpoints are written.

    Args:
        config: Configuration with ``launch.nproc`` resolved.
        estimate: Estimate of the run.
    """
    hardware = config.hardware
    bytes_per_rank = estimate.host_bytes
    if config.checkpoint.every and config.checkpoint.async_save:
        bytes_per_rank += estimate.saved_bytes
    if not bytes_per_rank or estimate_device(config) != "gpu":
        return None
    bytes_per_node = bytes_per_rank * RunNodes.of(config, hardware).ranks
    memory = None
    if hardware is not None and hardware.host_memory_gib is not None:
        memory = int(hardware.host_memory_gib * GIB)
    fits = None if memory is None else bytes_per_node * (1 + config.estimate.margin) <= memory
    return HostMemory(bytes_per_rank, bytes_per_node, memory, fits)
