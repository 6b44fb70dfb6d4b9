"""Counts this node's accelerators from a process without torch."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import ForkServerContext

from axonlaunch.system.node.gpu_driver import has_gpu_driver
from axonlaunch.system.processes import forked_call


def count_accelerators(server: Callable[[], ForkServerContext]) -> int:
    """Count the accelerators that NCCL can serve; only a system with a GPU driver can have any.

    Args:
        server: Starts the fork server if it does not run yet. It is called only if there is a
            driver, because the server imports torch.

    Raises:
        ConfigError: There is a driver but CUDA fails.
    """
    if not has_gpu_driver():
        return 0
    count: int = forked_call.call(
        server(), "axonlaunch.preflight.devices:accelerators", task="counting accelerators"
    )
    return count
