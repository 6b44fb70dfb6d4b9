"""Communication between ranks: the world, process groups, collectives and an in-process mock.

This package builds on ``torch.distributed`` without hiding it. It starts no processes.
"""

from axonlaunch.comm.averaging.gradient_bucket import GradientBucket
from axonlaunch.comm.averaging.gradients import sync_gradient, sync_gradients
from axonlaunch.comm.backend import Backend, MockBackend, NcclBackend, ReduceOp
from axonlaunch.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_product,
    all_reduce_sum,
    barrier,
    broadcast,
    broadcast_from,
    gather_tensor,
    is_main_process,
    rank,
    recv,
    reduce_scatter_mean,
    reduce_scatter_sum,
    scatter_tensor,
    send,
    world_size,
)
from axonlaunch.comm.connection import nccl
from axonlaunch.comm.connection.nccl import NcclUniqueId
from axonlaunch.comm.errors import (
    CommError,
    DeadlockError,
    MismatchError,
    NcclError,
    PeerFailedError,
    RankFailedError,
)
from axonlaunch.comm.process_group import ProcessGroup
from axonlaunch.comm.world import World

__all__ = [
    "Backend",
    "CommError",
    "DeadlockError",
    "GradientBucket",
    "MismatchError",
    "MockBackend",
    "NcclBackend",
    "NcclError",
    "NcclUniqueId",
    "PeerFailedError",
    "ProcessGroup",
    "RankFailedError",
    "ReduceOp",
    "World",
    "all_gather",
    "all_reduce",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_product",
    "all_reduce_sum",
    "barrier",
    "broadcast",
    "broadcast_from",
    "gather_tensor",
    "is_main_process",
    "nccl",
    "rank",
    "recv",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
    "scatter_tensor",
    "send",
    "sync_gradient",
    "sync_gradients",
    "world_size",
]
