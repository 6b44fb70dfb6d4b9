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
        CommError as CommError,
        DeadlockError as DeadlockError,
        GradientBucket as GradientBucket,
        MismatchError as MismatchError,
        MockBackend as MockBackend,
        NcclBackend as NcclBackend,
        NcclError as NcclError,
        NcclUniqueId as NcclUniqueId,
        PeerFailedError as PeerFailedError,
        ProcessGroup as ProcessGroup,
        RankFailedError as RankFailedError,
        ReduceOp as ReduceOp,
        World as World,
        all_gather as all_gather,
        all_reduce as all_reduce,
        all_reduce_max as all_reduce_max,
        all_reduce_mean as all_reduce_mean,
        all_reduce_min as all_reduce_min,
        all_reduce_product as all_reduce_product,
        all_reduce_sum as all_reduce_sum,
        barrier as barrier,
        broadcast as broadcast,
        broadcast_from as broadcast_from,
        gather_tensor as gather_tensor,
        is_main_process as is_main_process,
        rank as rank,
        recv as recv,
        reduce_scatter_mean as reduce_scatter_mean,
        reduce_scatter_sum as reduce_scatter_sum,
        scatter_tensor as scatter_tensor,
        send as send,
        sync_gradient as sync_gradient,
        sync_gradients as sync_gradients,
        world_size as world_size,
    )
    from axonlaunch.comm.connection import nccl as nccl
    from axonlaunch.config import (
        ConfigError as ConfigError,
        RunConfig as RunConfig,
        to_yaml as to_yaml,
    )
    from axonlaunch.config.code.callback import Callback as Callback, RunState as RunState
    from axonlaunch.config.optimization.optimizer_states import OptimizerState as OptimizerState
    from axonlaunch.config.options.data import SampleShape as SampleShape
    from axonlaunch.config.options.launch import LaunchConfig as LaunchConfig
    from axonlaunch.data.datasets.dataset import (
        Batch as Batch,
        DatasetWithoutText as DatasetWithoutText,
    )
    from axonlaunch.data.datasets.registry import register_dataset as register_dataset
    from axonlaunch.data.datasets.sampler import DistributedSampler as DistributedSampler
    from axonlaunch.engines.data_parallel.ddp import (
        DDP as DDP,
        DistributedDataParallel as DistributedDataParallel,
    )
    from axonlaunch.engines.data_parallel.fsdp import (
        FSDP as FSDP,
        CPUOffload as CPUOffload,
        FullyShardedDataParallel as FullyShardedDataParallel,
        ShardingStrategy as ShardingStrategy,
    )
    from axonlaunch.engines.data_parallel.fsdp_memory import (
        FSDPMemoryEstimate as FSDPMemoryEstimate,
        FSDPMemoryStats as FSDPMemoryStats,
    )
    from axonlaunch.engines.data_parallel.gradient_synchronizer import (
        GradientSynchronizer as GradientSynchronizer,
        GradSyncStrategy as GradSyncStrategy,
    )
    from axonlaunch.engines.data_parallel.registry import (
        register_data_parallel as register_data_parallel,
    )
    from axonlaunch.engines.data_parallel.replicas import Replicas as Replicas
    from axonlaunch.engines.engine import Engine as Engine
    from axonlaunch.engines.expert.dispatch import AllToAll as AllToAll, Dispatch as Dispatch
    from axonlaunch.engines.expert.registry import register_dispatch as register_dispatch
    from axonlaunch.engines.expert.routing import exchange_routes as exchange_routes
    from axonlaunch.engines.optimizer.registry import (
        register_optimizer as register_optimizer,
        register_scheduler as register_scheduler,
    )
    from axonlaunch.engines.pipeline.pipeline import (
        Pipeline as Pipeline,
        PipelineStage as PipelineStage,
    )
    from axonlaunch.engines.pipeline.schedule import PipelineSchedule as PipelineSchedule
    from axonlaunch.engines.pipeline.timeline import PipelineMemoryStats as PipelineMemoryStats
    from axonlaunch.engines.tensor.outputs.loss import (
        vocab_parallel_cross_entropy_sum as vocab_parallel_cross_entropy_sum,
    )
    from axonlaunch.engines.tensor.parallel_layers.layers import (
        ColumnParallelLinear as ColumnParallelLinear,
        RowParallelLinear as RowParallelLinear,
        TensorParallelAttention as TensorParallelAttention,
        VocabParallelEmbedding as VocabParallelEmbedding,
    )
    from axonlaunch.engines.tensor.parallelize import parallelize as parallelize
    from axonlaunch.launch.commands.build_engine import build_engine as build_engine
    from axonlaunch.launch.commands.python_api import (
        RunFailedError as RunFailedError,
        estimate as estimate,
        export as export,
        load as load,
        plan as plan,
        sample as sample,
        train as train,
        verify as verify,
    )
    from axonlaunch.launch.commands.run_data import (
        RunData as RunData,
        load_run as load_run,
    )
    from axonlaunch.launch.registry import register_launcher as register_launcher
    from axonlaunch.models import (
        ModelSpec as ModelSpec,
        register_model as register_model,
    )
    from axonlaunch.models.specs.custom_loss import register_loss as register_loss
    from axonlaunch.models.specs.metrics import register_metric as register_metric
    from axonlaunch.training.callbacks import register_callback as register_callback
    from axonlaunch.training.loggers.logger import Logger as Logger
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
    "axonlaunch.config": ("ConfigError", "RunConfig", "to_yaml"),
    "axonlaunch.config.code.callback": ("Callback", "RunState"),
    "axonlaunch.config.optimization.optimizer_states": ("OptimizerState",),
    "axonlaunch.config.options.data": ("SampleShape",),
    "axonlaunch.config.options.launch": ("LaunchConfig",),
    "axonlaunch.data.datasets.dataset": ("Batch", "DatasetWithoutText"),
    "axonlaunch.data.datasets.registry": ("register_dataset",),
    "axonlaunch.data.datasets.sampler": ("DistributedSampler",),
    "axonlaunch.engines.engine": ("Engine",),
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
    "axonlaunch.training.callbacks": ("register_callback",),
    "axonlaunch.engines.data_parallel.registry": ("register_data_parallel",),
    "axonlaunch.engines.data_parallel.replicas": ("Replicas",),
    "axonlaunch.engines.expert.dispatch": ("AllToAll", "Dispatch"),
    "axonlaunch.engines.expert.registry": ("register_dispatch",),
    "axonlaunch.engines.expert.routing": ("exchange_routes",),
    "axonlaunch.engines.pipeline.pipeline": ("Pipeline", "PipelineStage"),
    "axonlaunch.engines.pipeline.schedule": ("PipelineSchedule",),
    "axonlaunch.engines.pipeline.timeline": ("PipelineMemoryStats",),
    "axonlaunch.engines.tensor.parallel_layers.layers": (
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
        "export",
        "load",
        "plan",
        "sample",
        "train",
        "verify",
    ),
    "axonlaunch.launch.commands.run_data": ("RunData", "load_run"),
    "axonlaunch.launch.registry": ("register_launcher",),
    "axonlaunch.models": ("ModelSpec", "register_model"),
    "axonlaunch.models.specs.custom_loss": ("register_loss",),
    "axonlaunch.training.loggers.logger": ("Logger",),
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
