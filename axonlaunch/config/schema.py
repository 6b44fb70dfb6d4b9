"""The typed tree of a run's configuration: every key, its type, its default and what it means.

It holds values and what a single value may be; rules between values are in ``rules``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from axonlaunch.config.adapter import LoraConfig
from axonlaunch.config.data import DATASETS, PythonSourceConfig
from axonlaunch.config.data_parallel import DATA_PARALLEL
from axonlaunch.config.hardware import HardwareConfig
from axonlaunch.config.launch import LAUNCHERS, LaunchConfig
from axonlaunch.config.loggers import LOGGERS
from axonlaunch.config.losses import LOSSES
from axonlaunch.config.model import MODELS, GPTConfig, HuggingFaceConfig
from axonlaunch.config.optimizer import (
    OPTIMIZERS,
    SCHEDULERS,
    AdamWConfig,
    CosineConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from axonlaunch.config.recording import ProfileConfig, TraceConfig
from axonlaunch.config.registry import Registry
from axonlaunch.config.tokenizer import TokenizerConfig


class Named(Protocol):
    """A configuration whose ``name`` says which variant it is."""

    @property
    def name(self) -> str:
        """The registry's name."""


_NO_GRAPHS = (
    "CUDA graphs overwrite what a compiled block returned when the next one runs, and gradients of "
    "several micro-batches (pytorch/pytorch#152887 and #169545); use default or "
    "max-autotune-no-cudagraphs"
)


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """How replicas agree on gradients."""

    sync: Literal["overlapped", "synchronous", "no_sync"] = "overlapped"
    """overlapped: buckets are reduced during backward (under ddp by torch's DDP); synchronous:
    buckets are reduced at the end of every backward; no_sync: backward sends nothing, gradients are
    reduced once, right before the update
    """
    bucket_size_mb: float = field(default=25.0, metadata={"above": 0})
    """MiB of gradients that are reduced together"""
    broadcast_buffers: bool = True
    """copy rank 0's buffers (BatchNorm's running statistics) to every rank before each forward;
    buffers that are not saved, as tables of positions, are the same without
    """
    gradient_as_bucket_view: bool = True
    """let gradients be views into the buckets, which saves one copy of them (overlapped ddp only:
    zero1 frees what it has sent)
    """


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """What is sharded, and where it lives between uses."""

    sharding: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"] = "full_shard"
    """full_shard: parameters, gradients and optimizer states (ZeRO-3); shard_grad_op: parameters
    stay whole between forward and backward (ZeRO-2); no_shard: everything whole; hybrid_shard:
    sharded inside a replica, replicated across
    """
    cpu_offload: Literal["none", "params", "full", "optimizer_states"] = "none"
    """what lives in host memory between uses. params: parameters and gradients; optimizer_states:
    the optimizer's states; full: all of them, and the update itself runs on the host
    """
    replicate: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """number of replicas under hybrid_shard; auto: one per node of a stage"""


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """How each layer's matrices are divided among ranks."""

    degree: int = field(default=1, metadata={"min": 1})
    """ranks that share every layer; they see the same samples"""
    sequence_parallel: bool = False
    """keep norms and dropout on a part of the sequence: less activation memory, as much traffic"""
    async_collectives: bool = False
    """multiply parts of matrices while the compiled blocks' others are gathered or scattered, by
    torch's symmetric memory: for GPUs of one node, with sequence_parallel and train.compile
    """
    plan: dict[str, str] = field(default_factory=dict)
    """pattern of a module's or a parameter's name to a style: column, row, vocabulary, region, ...;
    empty: the model's own plan
    """


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How layers are divided among ranks, and in which order micro-batches pass through them."""

    degree: int = field(default=1, metadata={"min": 1})
    """ranks that micro-batches pass through, one after another"""
    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ] = "1f1b"
    """order of forwards and backwards; axonlaunch schedule draws it"""
    stages_per_rank: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """stages that each rank holds; auto: 1 for gpipe and 1f1b, 2 for the others"""
    split: list[int] | Literal["auto"] = "auto"
    """repeated blocks of each stage, [8,8,9,7]; auto: balanced by parameters and activations"""
    microbatches: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """micro-batches of one round of the schedule; auto: all of a step's"""


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """How each sample's sequence is divided among ranks."""

    degree: int = field(default=1, metadata={"min": 1})
    """ranks that share every sequence, by ring attention; axonlaunch inspect says if they can"""


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Where the work happens; it never changes what is computed."""

    data_parallel: str | None = field(default=None, metadata={"names": DATA_PARALLEL})
    """what ranks that hold the same parameters do: those that tensor and pipeline leave over, those
    of context among them. none: there is one; ddp: replicas; zero1: replicas with sharded optimizer
    states; fsdp: sharded; null: ddp, or none for one rank
    """
    options: Any = field(
        default=None,
        metadata={"typed_by": "data_parallel", "allowed": "keys of a registered variant, or null"},
    )
    """keys of a data-parallel variant that is not included"""
    ddp: DDPConfig = field(default_factory=DDPConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    tensor: TensorConfig = field(default_factory=TensorConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    auto: bool = False
    """search the layout before anything starts, as `axonlaunch plan` does, for the hardware that is
    given or detected; what overrides set of the layout stays
    """
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """type in which gradients are summed over data-parallel ranks; bf16 halves the traffic"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much a step, and in which arithmetic."""

    steps: int | Literal["auto"] = field(default=1000, metadata={"min": 1})
    """optimizer steps; auto: as many as epochs takes"""
    epochs: float | None = field(default=None, metadata={"above": 0})
    """how often the training rows are seen, in place of steps, rounded up to whole global batches;
    null: as steps says
    """
    global_batch_size: int = field(default=32, metadata={"min": 1, "max": 10_000_000})
    """samples per optimizer step over the whole world, so that a layout never changes what is
    learned
    """
    micro_batch_size: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """samples per forward on one rank; what is left of the global batch is gradient accumulation;
    auto: the rank's whole share, under a pipeline two micro-batches per stage where it allows that
    """
    grad_clip: float | None = field(default=1.0, metadata={"above": 0})
    """largest norm of the whole model's gradient; null: no clipping"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """arithmetic of forward and backward; parameters and optimizer states stay fp32"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """of fp32 matrix products, torch.set_float32_matmul_precision. highest: in fp32; high: on a GPU
    with TF32, several times as fast and with 10 bits of mantissa in place of 23; medium: in bf16
    where there is a kernel for it
    """
    attention_kernel: Literal["auto", "cudnn", "flash", "efficient"] = "auto"
    """which of torch's fused kernels attends on a GPU, and no other. auto: the first that takes the
    tensors, cuDNN's before flash on Hopper and Blackwell, elsewhere in torch's order
    """
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """type in which weights and their gradients are kept. fp32: as the model builds them; bf16:
    half the bytes, and updates smaller than 1/256 of a weight are lost; with precision=bf16
    """
    freeze: list[str] = field(default_factory=list)
    """patterns of names of parameters that are not trained: they have no gradient, no optimizer
    state and no decay; a weight of two names is frozen by either
    """
    unfreeze: list[str] = field(default_factory=list)
    """patterns of names of parameters that are trained although freeze, an adapter or the model
    itself freezes them
    """
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """recompute activations in backward. full: each block keeps its input alone; selective:
    attention, collectives and every second matrix product are kept
    """
    loss: str | None = field(default=None, metadata={"names": LOSSES})
    """a registered loss, which sees the whole batch; null: the model's own"""
    loss_options: Any = field(
        default=None,
        metadata={"typed_by": "loss", "allowed": "keys of a registered loss, or null"},
    )
    """keys of the registered loss"""
    loss_chunk: int | None = field(default=None, metadata={"min": 1})
    """tokens of a micro-batch whose logits exist at a time: the head and the loss are computed in
    such chunks, and again in backward; null: the logits of all are kept
    """
    compile: bool = False
    """torch.compile each block, and the loss where ranks have whole logits"""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = field(
        default="default",
        metadata={"refused": dict.fromkeys(("reduce-overhead", "max-autotune"), _NO_GRAPHS)},
    )
    """torch.compile's mode. max-autotune-no-cudagraphs: measure several kernels for each matrix
    product and take the fastest, which makes the first step minutes longer
    """
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    prove: Literal["auto", "always", "never"] = "auto"
    """compare the layout with one process before the first step, on a small model of the same
    architecture. auto: models of transformers in layouts of several ranks, once; always: every
    model, each time
    """
    deterministic: bool = False
    """refuse operations that are not deterministic, and let NCCL add up in rings alone, not in a
    switch (NVLS); NCCL_ALGO and NCCL_NVLS_ENABLE in the environment have the last word
    """
    gc_every: int = field(default=50, metadata={"min": 0})
    """steps between looks for cycles of Python's objects, on all ranks at once; 0: each rank looks
    whenever Python does, and the others wait for it
    """
    log_every: int = field(default=10, metadata={"min": 1})
    """steps between lines of metrics.jsonl"""
    eval_every: int = field(default=0, metadata={"min": 0})
    """steps between evaluations; 0: at the end alone"""
    eval_batches: int = field(default=16, metadata={"min": 0})
    """global batches per evaluation, at most what is held out; 0: no evaluation"""
    eval_at_start: bool = False
    """evaluate before the first step too"""
    early_stop: int | None = field(default=None, metadata={"min": 1})
    """evaluations in a row without a lower loss after which training ends; null: it does not"""

    @property
    def num_steps(self) -> int:
        """Optimizer steps, which are known once what depends on the data is resolved."""
        assert self.steps != "auto"
        return self.steps

    @property
    def parameter_bytes(self) -> int:
        """Bytes of an element of the weights."""
        return 2 if self.param_dtype == "bf16" else 4


@dataclass(frozen=True, kw_only=True)
class EstimateConfig:
    """What an estimate of memory is worth, and whether a run is estimated beside itself."""

    margin: float = field(default=0.1, metadata={"min": 0})
    """share by which an estimate may be too low: a run fits where this much more would, and is
    tight up to the device's memory. Beside published runs 9 of 10 estimates are within 0.1, half
    of them within 0.035; 0: none
    """
    background: bool | None = None
    """predict peak memory and step time in a low-priority process while the run trains, for its
    summary; null: on GPUs only, because on CPUs it takes time from the training steps
    """


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run is saved, and what it starts from."""

    every: int = field(default=0, metadata={"min": 0})
    """steps between checkpoints, the last step included; 0: none"""
    keep_last: int = field(default=2, metadata={"min": 1})
    """newest checkpoints kept"""
    keep_every_n_steps: int = field(default=0, metadata={"min": 0})
    """also keep the checkpoint of every step that this divides; 0: none"""
    keep_best: int = field(default=0, metadata={"min": 0})
    """also keep so many with the lowest evaluation loss, of those saved at an evaluated step"""
    async_save: bool = False
    """write while training continues, from a copy in host memory"""
    path: str | None = None
    """folder or fsspec URL (s3://bucket/run) that checkpoints are kept in and resumed from; null:
    the run folder
    """
    fallback: bool = True
    """where resume=auto finds that the newest checkpoint is corrupt: move it aside, report it, and
    resume from the newest good one; false: refuse to start
    """
    resume: str = field(default="auto", metadata={"allowed": "auto, never or a path"})
    """auto: resume where this run folder stopped; never: start from step 0; or the path of a run
    folder or a checkpoint
    """
    changed_data: Literal["error", "restart"] = "error"
    """what to do where data files, chat template or options of data are not those of the checkpoint
    that the run resumes from. error: refuse to start; restart: keep weights, optimizer and step,
    and read the data from its first row
    """


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run; ``config.load`` makes one from overrides."""

    name: str = "auto"
    """name of the run; auto: model and strategy, numbered where that is taken"""
    run_dir: str = "auto"
    """folder of the run; auto: runs/<name>"""
    seed: int = field(default=0, metadata={"min": 0, "max": 2**63 - 1})
    """initial weights depend on it and the parameter's name, the order of samples on it and the
    global sample index
    """
    plugins: list[str] = field(default_factory=list)
    """modules to import first: they register models, datasets, optimizers, loggers and launchers"""
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    model: Named = field(default_factory=GPTConfig, metadata={"variants": MODELS})
    adapter: LoraConfig | None = None
    """what is trained beside a model whose own weights stay, adapter=lora; null: the model"""
    data: Named = field(default_factory=PythonSourceConfig, metadata={"variants": DATASETS})
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(
        default_factory=AdamWConfig, metadata={"variants": OPTIMIZERS}
    )
    scheduler: SchedulerConfig = field(
        default_factory=CosineConfig, metadata={"variants": SCHEDULERS}
    )
    train: TrainConfig = field(default_factory=TrainConfig)
    loggers: list[Named] = field(
        default_factory=list,
        metadata={"each": LOGGERS, "allowed": "list of loggers, each a name or its keys"},
    )
    """where numbers are logged beside metrics.jsonl: [tensorboard, {name: wandb, project: mine}];
    your own: [{target: package.module:Class, arguments: {}}]
    """
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig, metadata={"variants": LAUNCHERS})
    estimate: EstimateConfig = field(default_factory=EstimateConfig)
    hardware: HardwareConfig | None = None

    @property
    def saves_frozen(self) -> bool:
        """Whether checkpoints hold what is not trained; of an adapter's pretrained model not."""
        path = getattr(self.model, "path", None)
        return self.adapter is None or not self.is_pretrained or path is None

    @property
    def is_pretrained(self) -> bool:
        """Whether the model begins with the weights that it was published with."""
        return isinstance(self.model, HuggingFaceConfig) and self.model.init == "pretrained"


GROUPS: dict[str, Registry[Any, Any] | None] = {
    "strategy": None,
    "model": MODELS,
    "adapter": None,
    "data": DATASETS,
    "tokenizer": None,
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
    "launch": LAUNCHERS,
    "hardware": None,
    "experiment": None,
}
"""The groups of options, and the registry of those whose options are entries of one."""

REGISTRIES: dict[str, Registry[Any, Any]] = {
    **{group: registry for group, registry in GROUPS.items() if registry is not None},
    "loggers": LOGGERS,
    "strategy.data_parallel": DATA_PARALLEL,
    "train.loss": LOSSES,
}
"""The keys whose values are entries of a registry, and the registry."""
