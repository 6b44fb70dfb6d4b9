"""Config-driven launcher for distributed PyTorch training.

Public names are imported from their modules at first use, so that importing the package does not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonlaunch.comm import (
        Backend as Backend,
    )
    from axonlaunch.comm import (
        CommError as CommError,
    )
    from axonlaunch.comm import (
        DeadlockError as DeadlockError,
    )
    from axonlaunch.comm import (
        GradientBucket as GradientBucket,
    )
    from axonlaunch.comm import (
        MismatchError as MismatchError,
    )
    from axonlaunch.comm import (
        MockBackend as MockBackend,
    )
    from axonlaunch.comm import (
        NcclBackend as NcclBackend,
    )
    from axonlaunch.comm import (
        NcclError as NcclError,
    )
    from axonlaunch.comm import (
        NcclUniqueId as NcclUniqueId,
    )
    from axonlaunch.comm import (
        PeerFailedError as PeerFailedError,
    )
    from axonlaunch.comm import (
        ProcessGroup as ProcessGroup,
    )
    from axonlaunch.comm import (
        RankFailedError as RankFailedError,
    )
    from axonlaunch.comm import (
        ReduceOp as ReduceOp,
    )
    from axonlaunch.comm import (
        World as World,
    )
    from axonlaunch.comm import (
        all_gather as all_gather,
    )
    from axonlaunch.comm import (
        all_reduce as all_reduce,
    )
    from axonlaunch.comm import (
        all_reduce_max as all_reduce_max,
    )
    from axonlaunch.comm import (
        all_reduce_mean as all_reduce_mean,
    )
    from axonlaunch.comm import (
        all_reduce_min as all_reduce_min,
    )
    from axonlaunch.comm import (
        all_reduce_product as all_reduce_product,
    )
    from axonlaunch.comm import (
        all_reduce_sum as all_reduce_sum,
    )
    from axonlaunch.comm import (
        barrier as barrier,
    )
    from axonlaunch.comm import (
        broadcast as broadcast,
    )
    from axonlaunch.comm import (
        broadcast_from as broadcast_from,
    )
    from axonlaunch.comm import (
        gather_tensor as gather_tensor,
    )
    from axonlaunch.comm import (
        is_main_process as is_main_process,
    )
    from axonlaunch.comm import (
        rank as rank,
    )
    from axonlaunch.comm import (
        recv as recv,
    )
    from axonlaunch.comm import (
        reduce_scatter_mean as reduce_scatter_mean,
    )
    from axonlaunch.comm import (
        reduce_scatter_sum as reduce_scatter_sum,
    )
    from axonlaunch.comm import (
        scatter_tensor as scatter_tensor,
    )
    from axonlaunch.comm import (
        send as send,
    )
    from axonlaunch.comm import (
        sync_gradient as sync_gradient,
    )
    from axonlaunch.comm import (
        sync_gradients as sync_gradients,
    )
    from axonlaunch.comm import (
        world_size as world_size,
    )
    from axonlaunch.comm.connection import nccl as nccl
    from axonlaunch.config import (
        ConfigError as ConfigError,
    )
    from axonlaunch.config import (
        RunConfig as RunConfig,
    )
    from axonlaunch.config.optimization.optimizer_states import OptimizerState as OptimizerState
    from axonlaunch.data.datasets.dataset import Batch as Batch
    from axonlaunch.data.datasets.registry import register_dataset as register_dataset
    from axonlaunch.data.datasets.sampler import DistributedSampler as DistributedSampler
    from axonlaunch.engines.base import Engine as Engine
    from axonlaunch.engines.data_parallel.ddp import (
        DDP as DDP,
    )
    from axonlaunch.engines.data_parallel.ddp import (
        DistributedDataParallel as DistributedDataParallel,
    )
    from axonlaunch.engines.data_parallel.fsdp import (
        FSDP as FSDP,
    )
    from axonlaunch.engines.data_parallel.fsdp import (
        CPUOffload as CPUOffload,
    )
    from axonlaunch.engines.data_parallel.fsdp import (
        FullyShardedDataParallel as FullyShardedDataParallel,
    )
    from axonlaunch.engines.data_parallel.fsdp import (
        ShardingStrategy as ShardingStrategy,
    )
    from axonlaunch.engines.data_parallel.fsdp_memory import (
        FSDPMemoryEstimate as FSDPMemoryEstimate,
    )
    from axonlaunch.engines.data_parallel.fsdp_memory import (
        FSDPMemoryStats as FSDPMemoryStats,
    )
    from axonlaunch.engines.data_parallel.gradient_synchronizer import (
        GradientSynchronizer as GradientSynchronizer,
    )
    from axonlaunch.engines.data_parallel.gradient_synchronizer import (
        GradSyncStrategy as GradSyncStrategy,
    )
    from axonlaunch.engines.data_parallel.registry import (
        register_data_parallel as register_data_parallel,
    )
    from axonlaunch.engines.data_parallel.replicas import Replicas as Replicas
    from axonlaunch.engines.expert.dispatch import AllToAll as AllToAll
    from axonlaunch.engines.expert.dispatch import Dispatch as Dispatch
    from axonlaunch.engines.expert.registry import register_dispatch as register_dispatch
    from axonlaunch.engines.optimizer.registry import register_optimizer as register_optimizer
    from axonlaunch.engines.optimizer.registry import register_scheduler as register_scheduler
    from axonlaunch.engines.pipeline.pipeline import (
        Pipeline as Pipeline,
    )
    from axonlaunch.engines.pipeline.pipeline import (
        PipelineStage as PipelineStage,
    )
    from axonlaunch.engines.pipeline.schedule import PipelineSchedule as PipelineSchedule
    from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats as PipelineMemoryStats
    from axonlaunch.engines.tensor.divided_layers.layers import (
        ColumnParallelLinear as ColumnParallelLinear,
    )
    from axonlaunch.engines.tensor.divided_layers.layers import (
        RowParallelLinear as RowParallelLinear,
    )
    from axonlaunch.engines.tensor.divided_layers.layers import (
        TensorParallelAttention as TensorParallelAttention,
    )
    from axonlaunch.engines.tensor.divided_layers.layers import (
        VocabParallelEmbedding as VocabParallelEmbedding,
    )
    from axonlaunch.engines.tensor.outputs.loss import (
        vocab_parallel_cross_entropy_sum as vocab_parallel_cross_entropy_sum,
    )
    from axonlaunch.engines.tensor.parallelize import parallelize as parallelize
    from axonlaunch.launch.commands.build_engine import build_engine as build_engine
    from axonlaunch.launch.commands.python_api import (
        RunFailedError as RunFailedError,
    )
    from axonlaunch.launch.commands.python_api import (
        estimate as estimate,
    )
    from axonlaunch.launch.commands.python_api import (
        load as load,
    )
    from axonlaunch.launch.commands.python_api import (
        plan as plan,
    )
    from axonlaunch.launch.commands.python_api import (
        train as train,
    )
    from axonlaunch.launch.commands.python_api import (
        verify as verify,
    )
    from axonlaunch.launch.commands.run_data import (
        RunData as RunData,
    )
    from axonlaunch.launch.commands.run_data import (
        load_run as load_run,
    )
    from axonlaunch.launch.registry import register_launcher as register_launcher
    from axonlaunch.models import (
        ModelSpec as ModelSpec,
    )
    from axonlaunch.models import (
        register_model as register_model,
    )
    from axonlaunch.models.specs.custom_loss import register_loss as register_loss
    from axonlaunch.models.specs.metrics import register_metric as register_metric
    from axonlaunch.training.callbacks import Callback as Callback
    from axonlaunch.training.callbacks import RunState as RunState
    from axonlaunch.training.callbacks import register_callback as register_callback
    from axonlaunch.training.loggers.base import Logger as Logger
    from axonlaunch.training.loggers.registry import register_logger as register_logger
    from axonlaunch.training.module_trace.script import trace as trace

_NAMES_BY_MODULE = {
    "axonlaunch.comm": (
        # World and process groups
        "World",
        "ProcessGroup",
        "Backend",
        "MockBackend",
        "NcclBackend",
        "NcclUniqueId",
        "rank",
        "world_size",
        "is_main_process",
        "nccl",
        # Collectives and point-to-point messages
        "ReduceOp",
        "all_reduce",
        "all_reduce_sum",
        "all_reduce_mean",
        "all_reduce_min",
        "all_reduce_max",
        "all_reduce_product",
        "all_gather",
        "gather_tensor",
        "scatter_tensor",
        "reduce_scatter_sum",
        "reduce_scatter_mean",
        "broadcast",
        "broadcast_from",
        "send",
        "recv",
        "barrier",
        # Gradients
        "GradientBucket",
        "sync_gradient",
        "sync_gradients",
        # Errors
        "CommError",
        "DeadlockError",
        "MismatchError",
        "NcclError",
        "PeerFailedError",
        "RankFailedError",
    ),
    "axonlaunch.config": ("ConfigError", "RunConfig"),
    "axonlaunch.config.optimization.optimizer_states": ("OptimizerState",),
    "axonlaunch.data.datasets.dataset": ("Batch",),
    "axonlaunch.data.datasets.registry": ("register_dataset",),
    "axonlaunch.data.datasets.sampler": ("DistributedSampler",),
    "axonlaunch.engines.base": ("Engine",),
    "axonlaunch.engines.data_parallel.ddp": ("DDP", "DistributedDataParallel"),
    "axonlaunch.engines.data_parallel.fsdp": (
        "CPUOffload",
        "FSDP",
        "FullyShardedDataParallel",
        "ShardingStrategy",
    ),
    "axonlaunch.engines.data_parallel.fsdp_memory": ("FSDPMemoryEstimate", "FSDPMemoryStats"),
    "axonlaunch.engines.data_parallel.gradient_synchronizer": (
        "GradSyncStrategy",
        "GradientSynchronizer",
    ),
    "axonlaunch.engines.optimizer.registry": ("register_optimizer", "register_scheduler"),
    "axonlaunch.models.specs.metrics": ("register_metric",),
    "axonlaunch.training.callbacks": ("Callback", "RunState", "register_callback"),
    "axonlaunch.engines.data_parallel.registry": ("register_data_parallel",),
    "axonlaunch.engines.data_parallel.replicas": ("Replicas",),
    "axonlaunch.engines.expert.dispatch": ("AllToAll", "Dispatch"),
    "axonlaunch.engines.expert.registry": ("register_dispatch",),
    "axonlaunch.engines.pipeline.pipeline": ("Pipeline", "PipelineStage"),
    "axonlaunch.engines.pipeline.schedule": ("PipelineSchedule",),
    "axonlaunch.engines.pipeline.timeline": ("PipelineMemoryStats",),
    "axonlaunch.engines.tensor.divided_layers.layers": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "TensorParallelAttention",
        "VocabParallelEmbedding",
    ),
    "axonlaunch.engines.tensor.outputs.loss": ("vocab_parallel_cross_entropy_sum",),
    "axonlaunch.engines.tensor.parallelize": ("parallelize",),
    "axonlaunch.launch.commands.build_engine": ("build_engine",),
    "axonlaunch.launch.commands.python_api": (
        "RunFailedError",
        "estimate",
        "load",
        "plan",
        "train",
        "verify",
    ),
    "axonlaunch.launch.commands.run_data": ("RunData", "load_run"),
    "axonlaunch.launch.registry": ("register_launcher",),
    "axonlaunch.models": ("ModelSpec", "register_model"),
    "axonlaunch.models.specs.custom_loss": ("register_loss",),
    "axonlaunch.training.loggers.base": ("Logger",),
    "axonlaunch.training.loggers.registry": ("register_logger",),
    "axonlaunch.training.module_trace.script": ("trace",),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'axonlaunch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
