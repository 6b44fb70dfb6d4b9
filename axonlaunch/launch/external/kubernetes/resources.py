"""Memory, cores and grace period of a pod, from the estimate of its run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import estimate_device, is_on_cpu
from axonlaunch.config.options.hardware import GIB
from axonlaunch.config.values.optional_keys import num_data_workers
from axonlaunch.launch.external.save_time import estimate_submitted, seconds_to_save
from axonlaunch.launch.launcher import used_cores
from axonlaunch.planning.records import Estimate

_PARENT = 0.25 * GIB
"""Memory of the command and its fork server.

Measured on a CPU with torch 2.13: the proportional set sizes of both, 150 MiB.
"""
_RANK = {"gloo": 0.25 * GIB, "gpu": 2.0 * GIB}
"""Memory of a rank's process without tensors.

Measured on a CPU with torch 2.13: 155 MiB of proportional set size. With a CUDA context a process
had 2,056,600 kB, pytorch/pytorch#113326.
"""
_DATA_WORKER = 0.25 * GIB
"""Memory of a data worker.

Measured on a CPU with torch 2.13: 70 MB of proportional set size. The rest is for the libraries of
a data set and the samples that are read ahead.
"""


@dataclass(frozen=True)
class PodResources:
    """Resources of one pod.

    Attributes:
        memory: Memory, as a quantity of Kubernetes.
        cpus: Requested cores.
        gpus: Number of accelerators; 0 for ranks on the CPU.
        grace_s: Seconds between the request to stop and the end of the processes.
    """

    memory: str
    cpus: int
    gpus: int
    grace_s: int


def pod_resources(config: RunConfig, context: ForkServerContext) -> PodResources:
    """Return the resources of each pod of a run.

    The memory estimate is computed only if a key is ``auto``.

    Args:
        config: Checked configuration with a number in ``launch.nproc``.
        context: Context of the warm fork server.

    Raises:
        ConfigError: The run can't be estimated.
    """
    launch, options = config.launch, config.launch.kubernetes
    assert launch.nproc != "auto"
    memory, grace = options.memory, options.grace_s
    if memory == "auto" or grace == "auto":
        try:
            estimate = estimate_submitted(config, context)
        except ConfigError as error:
            raise ConfigError([*error.problems, *_no_estimate(memory, grace)]) from None
        if memory == "auto":
            memory = f"{math.ceil(pod_memory_bytes(config, estimate) / GIB)}Gi"
        if grace == "auto":
            grace = seconds_to_save(config, estimate)
    cpus = used_cores(config) if options.cpus == "auto" else options.cpus
    return PodResources(memory, cpus, 0 if is_on_cpu(launch) else launch.nproc, grace)


def pod_memory_bytes(config: RunConfig, estimate: Estimate) -> float:
    """Return the memory of a pod: all processes, tensors in host memory and copies for saves.

    On a CPU all tensors are in it. ``estimate.margin`` is added.
    """
    device, nproc = estimate_device(config), config.launch.nproc
    assert nproc != "auto"
    rank: float = estimate.host_bytes + max(rank.read_bytes for rank in estimate.ranks)
    if device != "gpu":
        rank += estimate.peak_bytes
    rank += num_data_workers(config.data) * _DATA_WORKER
    if config.checkpoint.every and config.checkpoint.async_save:
        rank += estimate.saved_bytes
    return _PARENT + nproc * (_RANK["gpu" if device == "gpu" else "gloo"] + rank) * (
        1 + config.estimate.margin
    )


def _no_estimate(memory: str, grace: int | str) -> list[ConfigIssue]:
    message = "the run can't be estimated; write a value"
    keys = {"memory": memory, "grace_s": grace}
    return [
        ConfigIssue(f"launch.kubernetes.{key}", message, "auto")
        for key, value in keys.items()
        if value == "auto"
    ]
