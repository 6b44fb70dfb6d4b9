"""Schema of a run's configuration: every key with its type, limits, default and description.

Rules between values are in ``rules``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from axonlaunch.config.optimization.optimizer import OPTIMIZERS, AdamWConfig, OptimizerConfig
from axonlaunch.config.optimization.schedules import SCHEDULERS, CosineConfig, SchedulerConfig
from axonlaunch.config.options.adapter import LoraConfig
from axonlaunch.config.options.data import DATASETS, PythonSourceConfig
from axonlaunch.config.options.data_parallel import DATA_PARALLEL, DISPATCHES
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.config.options.launch import LAUNCHERS, LaunchConfig
from axonlaunch.config.options.loggers import LOGGERS
from axonlaunch.config.options.losses import LOSSES
from axonlaunch.config.options.model import MODELS, GPTConfig, HuggingFaceConfig
from axonlaunch.config.options.recording import ProfileConfig, TraceConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.config.options.training_hooks import CALLBACKS, EVALUATION_METRICS
from axonlaunch.config.precision import (
    NUMBER_FORMATS,
    GradientFormatName,
    MatmulFormatName,
    PrecisionName,
    PrecisionSetting,
    ReducedFormatName,
)
from axonlaunch.config.registry import Registry


class Named(Protocol):
    """A configuration with a ``name`` that selects one of several variants."""

    @property
    def name(self) -> str:
        """Name under which the variant is registered."""


_NO_GRAPHS = (
    "CUDA graphs overwrite the output of a compiled block when the next block runs, and give wrong "
    "gradients over several micro-batches (pytorch/pytorch#152887 and #169545); use default or "
    "max-autotune-no-cudagraphs"
)
_FP8_IS_FOR_PRODUCTS = (
    "fp8 is for matrix products only; use bf16 with train.matmul_dtype=fp8_tensorwise, or "
    "fp8_rowwise"
)
_NO_CUT_CROSS_ENTROPY = (
    "kernels of cut-cross-entropy are not offered, because they were not compared with those of "
    "torch; use liger, or null with train.loss_chunk=1024, which save the memory of logits too"
)

ActivationCheckpointing = Literal["none", "full", "selective", "offload", "selective_offload"]
_RECOMPUTATION: dict[ActivationCheckpointing, Literal["none", "full", "selective"]] = {
    "none": "none",
    "full": "full",
    "selective": "selective",
    "offload": "full",
    "selective_offload": "selective",
}


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """Gradient reduction of replicas."""

    sync: Literal["overlapped", "synchronous", "no_sync"] = "overlapped"
    """when gradients are reduced. overlapped: in buckets during backward (with ddp by torch's DDP);
    synchronous: in buckets at the end of every backward; no_sync: once per step, right before the
    update
    """
    bucket_size_mb: float = field(default=25.0, metadata={"above": 0})
    """size of a gradient bucket, MiB"""
    broadcast_buffers: bool = True
    """copy rank 0's buffers (running statistics of BatchNorm) to every rank before each forward;
    non-persistent buffers (tables of positions) are equal on all ranks anyway
    """


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Sharding and offloading of parameters, gradients and optimizer states."""

    sharding: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"] = "full_shard"
    """tensors that are sharded. full_shard: parameters, gradients and optimizer states (ZeRO-3);
    shard_grad_op: the same, but parameters stay gathered from forward to backward (ZeRO-2);
    no_shard: none; hybrid_shard: full_shard inside each replica
    """
    cpu_offload: Literal["none", "params", "full", "optimizer_states"] = "none"
    """tensors kept in host memory between uses. params: parameters and gradients; optimizer_states:
    optimizer states; full: all of these, and the update runs on the host
    """
    replicate: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """number of replicas with hybrid_shard; auto: one per node of a pipeline stage"""


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """Tensor parallelism: the matrices of each layer are sharded over ranks."""

    degree: int = field(default=1, metadata={"min": 1})
    """number of ranks that each layer is sharded over; these ranks process the same samples"""
    sequence_parallel: bool = False
    """split norms and dropout by sequence positions: less activation memory, the same traffic"""
    async_collectives: bool = False
    """overlap matrix products with the gather or scatter of their operands, with torch's symmetric
    memory; for GPUs of one node, with sequence_parallel and train.compile
    """
    plan: dict[str, str] = field(default_factory=dict)
    """style for each pattern of module or parameter names: column, row, vocabulary, region, ...;
    empty: the plan that the model defines
    """


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism: the layers are split among ranks."""

    degree: int = field(default=1, metadata={"min": 1})
    """number of ranks that the layers are split among"""
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
    """number of stages on each rank; auto: 1 for gpipe and 1f1b, 2 for the others"""
    split: list[int] | Literal["auto"] = "auto"
    """number of repeated blocks in each stage, [8,8,9,7]; auto: stages take equally long, counting
    the head
    """
    microbatches: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """number of micro-batches in one round of the schedule; auto: all micro-batches of a step"""


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Context parallelism: each sequence is split among ranks."""

    degree: int = field(default=1, metadata={"min": 1})
    """number of ranks that each sequence is split among, with ring attention; axonlaunch inspect
    says whether the model supports it
    """


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Expert parallelism: the experts of each layer are split among ranks."""

    degree: int = field(default=1, metadata={"min": 1})
    """number of ranks that the experts of a mixture of experts are split among. They are data,
    context and tensor ranks, so the degree takes no additional ranks; needs data_parallel=fsdp
    """
    dispatch: str = field(default="all_to_all", metadata={"names": DISPATCHES})
    """how tokens travel to the ranks of their experts and back"""


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Layout of the model and the batch on ranks. A layout does not change the results."""

    data_parallel: str | None = field(default=None, metadata={"names": DATA_PARALLEL})
    """how the ranks that remain after tensor and pipeline parallelism (including context ranks)
    share the parameters. none: there is only one such rank; ddp: replicas; zero1: replicas with
    sharded optimizer states; fsdp: sharded parameters; null: none for one rank, else ddp
    """
    options: Any = field(
        default=None,
        metadata={"typed_by": "data_parallel", "allowed": "keys of a registered variant, or null"},
    )
    """keys of a registered data-parallel variant"""
    ddp: DDPConfig = field(default_factory=DDPConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    tensor: TensorConfig = field(default_factory=TensorConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    auto: bool = False
    """search for the fastest layout on the configured or detected hardware before training starts,
    as `axonlaunch plan` does; keys of the layout that overrides set are kept
    """
    reduce_dtype: ReducedFormatName = "fp32"
    """dtype in which gradients are summed over data-parallel ranks; bf16 halves the traffic"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of a run, batch sizes, numerics and evaluation."""

    steps: int | Literal["auto"] = field(default=450, metadata={"min": 1})
    """number of optimizer steps; auto: computed from epochs"""
    epochs: float | None = field(default=None, metadata={"above": 0})
    """number of passes over the training rows, rounded up to whole global batches; replaces steps;
    null: set by steps
    """
    global_batch_size: int = field(default=16, metadata={"min": 1, "max": 10_000_000})
    """samples per optimizer step over all ranks; independent of the layout"""
    micro_batch_size: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """samples per forward on one rank; further micro-batches of the global batch are accumulated;
    auto: the rank's whole share, or with a pipeline two micro-batches per stage if they divide it
    """
    grad_clip: float | None = field(default=1.0, metadata={"above": 0})
    """largest norm of the gradient of all parameters; null: no clipping"""
    precision: PrecisionSetting = field(
        default="fp32", metadata={"refused": dict.fromkeys(("fp8", "float8"), _FP8_IS_FOR_PRODUCTS)}
    )
    """dtype of forward and backward; see param_dtype for parameters. auto: bf16 on devices that
    compute in it, else fp32, as on CPUs; a resumed run keeps the precision that it began with.
    Models of transformers and pretrained language models have auto by default
    """
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """precision of fp32 matrix products (torch.set_float32_matmul_precision). highest: fp32; high:
    TF32 on GPUs, several times as fast, with 10 instead of 23 bits of mantissa; medium: bf16, if
    there is a kernel
    """
    attention_kernel: Literal["auto", "cudnn", "flash", "efficient"] = "auto"
    """the only fused attention kernel that torch may use on a GPU. auto: the first that supports
    the tensors; cuDNN before flash on Hopper and Blackwell, otherwise in torch's order
    """
    param_dtype: PrecisionName = "fp32"
    """dtype in which weights and their gradients are stored. fp32: as the model builds them; bf16:
    half the bytes, but without optimizer.master_weights=fp32 updates smaller than 1/256 of a weight
    are lost; needs precision=bf16; fp16: needs precision=fp16, and masters of trained weights
    """
    grad_dtype: GradientFormatName = "parameter"
    """dtype in which the gradients of micro-batches are added up. parameter: that of the weights;
    fp32: fp32, even if the weights are in 16 bits; needs optimizer.master_weights=fp32
    """
    matmul_dtype: MatmulFormatName | None = None
    """dtype to which linear layers of blocks round the factors of their matrix products. In fp8,
    for GPUs from compute capability 8.9 on, with compile: fp8_tensorwise: each tensor has a scale,
    gradients are in e5m2, other factors in e4m3; fp8_rowwise: each row has a scale, all factors are
    in e4m3. For quantization-aware training (QAT): qat_int8_int4: forward rounds inputs to int8 for
    each token and weights to int4 for each group, as torchao rounds a trained model, and gradients
    pass unchanged. null: the dtype of precision
    """
    matmul_group_size: int = field(default=32, metadata={"min": 2})
    """inputs of a linear layer whose weights share a scale in matmul_dtype=qat_int8_int4"""
    matmul_start_step: int = field(default=0, metadata={"min": 0})
    """first step in which matmul_dtype=qat_int8_int4 rounds; earlier ones train without it"""
    matmul_exclude: list[str] = field(default_factory=list)
    """name patterns of linear layers that matmul_dtype leaves out, for example small ones, which
    fp8 makes slower
    """
    freeze: list[str] = field(default_factory=list)
    """name patterns of parameters that are not trained: no gradient, no optimizer state, no decay;
    a weight with two names is frozen if either matches; -1 in place of a block's number is the last
    """
    unfreeze: list[str] = field(default_factory=list)
    """name patterns of parameters that are trained although freeze, an adapter or the model freezes
    them
    """
    activation_checkpointing: ActivationCheckpointing = "none"
    """recomputation of activations in backward. full: only the input of each block is stored;
    selective: attention, collectives and every second matrix product are stored too; offload and
    selective_offload: as full and selective, with the inputs of blocks in host memory, from which
    they are copied one block ahead
    """
    optimizer_in_backward: bool = False
    """update each parameter in backward when its gradient is complete, and free the gradient, so
    that the gradients of all parameters never exist together; for one device, tensor parallelism
    and fsdp, with one micro-batch and without grad_clip. With cpu_offload=full, the host updates
    parameters when their gradients have arrived, and keeps those that wait for their update
    """
    loss: str | None = field(default=None, metadata={"names": LOSSES})
    """name of a registered loss, which receives the whole batch; null: the loss of the model"""
    loss_options: Any = field(
        default=None,
        metadata={"typed_by": "loss", "allowed": "keys of a registered loss, or null"},
    )
    """keys of the registered loss"""
    label_smoothing: float = field(default=0.0, metadata={"min": 0, "below": 1})
    """share of the target's probability that cross entropy spreads evenly over all classes in
    training; evaluations report the loss without it
    """
    z_loss: float = field(default=0.0, metadata={"min": 0})
    """factor of the squared log of the softmax's denominator, which is added to the cross entropy
    of each target in training, usually 1e-4; evaluations report the loss without it
    """
    dft: bool = False
    """multiply the cross entropy of each target in training by the probability that the model gives
    it, without a gradient through this factor (dynamic fine-tuning, DFT); evaluations report the
    loss without it
    """
    eaft: float = field(default=0.0, metadata={"min": 0})
    """exponent of the factor H / 3 that the cross entropy of each target in training is multiplied
    by, usually 1; H is the entropy in nats of the 20 most likely classes (entropy-adaptive
    fine-tuning, EAFT); 0: no factor. Evaluations report the loss without it
    """
    loss_chunk: int | None = field(default=None, metadata={"min": 1})
    """number of tokens per chunk in which the output head and the loss are computed, and recomputed
    in backward, so that only the logits of one chunk exist at a time; null: no chunks
    """
    loss_kernel: Literal["liger"] | None = field(
        default=None,
        metadata={"refused": dict.fromkeys(("cut_cross_entropy", "cce"), _NO_CUT_CROSS_ENTROPY)},
    )
    """kernels of another package that compute the output head, the loss and their gradients in one
    pass, without all logits. liger: those of Liger-Kernel, on GPUs; null: kernels of torch
    """
    compile: bool = False
    """apply torch.compile to each block, and to the loss if ranks have full logits"""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = field(
        default="default",
        metadata={"refused": dict.fromkeys(("reduce-overhead", "max-autotune"), _NO_GRAPHS)},
    )
    """mode of torch.compile. max-autotune-no-cudagraphs: measure several kernels for each matrix
    product and use the fastest; the first step takes minutes longer
    """
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    prove: Literal["auto", "always", "never"] = "auto"
    """comparison of the layout with one process before the first step, on a small model of the same
    architecture. auto: once for each layout of several ranks, for models of transformers; always:
    before every run, for every model
    """
    deterministic: bool = False
    """refuse nondeterministic operations, and restrict NCCL to ring reductions without NVLS (unless
    NCCL_ALGO or NCCL_NVLS_ENABLE is set in the environment)
    """
    gc_every: int = field(default=50, metadata={"min": 0})
    """steps between Python garbage collections, which run on all ranks at once; 0: Python's
    automatic collections, during which other ranks wait
    """
    log_every: int | Literal["auto"] = field(default="auto", metadata={"min": 1})
    """steps between lines of metrics.jsonl; auto: 10, or a tenth of a run with less than 100 steps
    """
    eval_every: int | str = field(
        default=150, metadata={"min": 0, "allowed": "steps from 0, or epochs as in '0.5 epoch'"}
    )
    """steps between evaluations, or epochs as in '0.5 epoch'; 0: only at the end"""
    eval_batches: int = field(default=16, metadata={"min": 0})
    """global batches per evaluation, limited by the held-out data; 0: no evaluation"""
    eval_at_start: bool = False
    """evaluate before the first step too"""
    early_stop: int | None = field(default=None, metadata={"min": 1})
    """number of successive evaluations without a better value of best_metric after which training
    ends; null: no early stop
    """
    best_metric: str = "loss"
    """value of evaluations by which early_stop and checkpoint.keep_best compare them: loss, or the
    name of one of the metrics, which is lower or higher the better it is
    """

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps; may be read only after ``auto`` was resolved from the data."""
        assert self.steps != "auto"
        return self.steps

    @property
    def recomputation(self) -> Literal["none", "full", "selective"]:
        """What backward recomputes, wherever the inputs of blocks are stored."""
        return _RECOMPUTATION[self.activation_checkpointing]

    @property
    def offloads_inputs(self) -> bool:
        """Whether the inputs of blocks are in host memory from forward to backward."""
        return self.activation_checkpointing != self.recomputation

    @property
    def defers_head(self) -> bool:
        """Whether the loss applies the output head, so that the model never returns logits."""
        return self.loss_chunk is not None or self.loss_kernel is not None

    @property
    def steps_per_log(self) -> int:
        """Steps between lines of metrics.jsonl, at least ten lines for a run of ten steps."""
        if self.log_every != "auto":
            return self.log_every
        return max(1, min(10, self.num_steps // 10))

    @property
    def parameter_bytes(self) -> int:
        """Bytes per element of the weights."""
        return NUMBER_FORMATS[self.param_dtype].nbytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of the gradients of weights in ``param_dtype``."""
        return NUMBER_FORMATS.get(self.grad_dtype, NUMBER_FORMATS[self.param_dtype]).nbytes


@dataclass(frozen=True, kw_only=True)
class EstimateConfig:
    """Assumptions of memory estimates, and the estimate that runs during training."""

    margin: float = field(default=0.1, metadata={"min": 0})
    """fraction by which an estimate of memory may be too low. A run fits if the estimate plus this
    margin is within the device's memory, and is tight if only the estimate is. Compared with
    published runs, 9 of 10 estimates are within 0.1, half of them within 0.035; 0: no margin
    """
    background: bool | None = None
    """predict peak memory and step time in a low-priority process during training; the summary of
    the run reports them; null: only on GPUs, because on CPUs it slows down training
    """
    routing: Literal["balanced", "skewed", "worst"] = "balanced"
    """assumed load of split experts. balanced: all ranks get equally many tokens; skewed: the
    estimated rank gets imbalance times as many, in every layer; worst: it gets all tokens that can
    be sent to it
    """
    imbalance: float = field(default=2.0, metadata={"min": 1})
    """tokens of the rank with the most under routing=skewed, relative to balanced; plan assumes it
    for step times, and for memory unless routing=worst
    """

    @property
    def expert_load(self) -> float:
        """Assumed load of a rank's experts relative to a balanced router; ``inf`` if unlimited."""
        return {"balanced": 1.0, "skewed": self.imbalance, "worst": math.inf}[self.routing]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int | str | list[int] = field(
        default=150,
        metadata={
            "min": 0,
            "allowed": "steps from 0, epochs as in '0.5 epoch', or a list of steps",
        },
    )
    """steps between checkpoints, or epochs as in '0.5 epoch', or a list of steps, whose checkpoints
    are all kept; the last step is saved too; 0: no checkpoints
    """
    keep_last: int = field(default=2, metadata={"min": 1})
    """number of newest checkpoints to keep"""
    keep_every_n_steps: int = field(default=0, metadata={"min": 0})
    """also keep checkpoints of steps that are multiples of this number; 0: none"""
    keep_best: int = field(default=0, metadata={"min": 0})
    """also keep this number of checkpoints with the best evaluations by train.best_metric, among
    those saved at an evaluated step
    """
    async_save: bool = False
    """write checkpoints during training, from a copy in host memory"""
    path: str | None = None
    """folder or fsspec URL (s3://bucket/run) of the checkpoints; null: the run folder"""
    fallback: bool = True
    """if the newest checkpoint is corrupt under resume=auto: move it aside, report it, and resume
    from the newest intact one; false: refuse to start
    """
    resume: str = field(default="auto", metadata={"allowed": "auto, never or a path"})
    """checkpoint to resume from. auto: the newest of this run folder; never: start from step 0; or
    the path of a run folder or a checkpoint
    """
    overwrite: bool = False
    """start from step 0 in a run folder that contains a run, which is first moved aside: to the
    same name with a number, runs/demo.1
    """
    changed_data: Literal["error", "restart"] = "error"
    """behavior if data files, chat template or options of data differ from those of the resumed
    checkpoint. error: refuse to start; restart: keep weights, optimizer states and step, and read
    the data from its first row
    """
    push: str | None = None
    """model repository of the Hugging Face Hub, ORG/NAME, to which the weights of the last
    checkpoint are uploaded at the end of the run; null: none
    """
    push_private: bool = False
    """create the repository of push as a private one; false: as the account's settings say, which
    is public by default, as transformers does. An existing repository stays as it is
    """


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of a run; ``config.load`` creates it from overrides."""

    name: str = "auto"
    """name of the run; auto: model and strategy, with a number if that name is taken"""
    run_dir: str = "auto"
    """folder of the run; auto: runs/<name>"""
    seed: int = field(default=0, metadata={"min": 0, "max": 2**63 - 1})
    """seed of the initial weights (with the parameter's name) and of the order of samples (with the
    global sample index)
    """
    plugins: list[str] = field(default_factory=list)
    """modules to import first, to register models, datasets, optimizers, metrics, loggers, ..."""
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    model: Named = field(default_factory=GPTConfig, metadata={"variants": MODELS})
    adapter: LoraConfig | None = None
    """adapter that is trained while the weights of the model stay fixed, adapter=lora; null: the
    model is trained
    """
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
    """loggers that receive the metrics in addition to metrics.jsonl: [tensorboard, {name: wandb,
    project: mine}]; a user-defined one: [{target: package.module:Class, arguments: {}}]
    """
    metrics: list[Named] = field(
        default_factory=list,
        metadata={
            "each": EVALUATION_METRICS,
            "allowed": "list of metrics, each a name or its keys",
        },
    )
    """metrics of evaluations in addition to the loss: [accuracy, {name: top_k, arguments: {k: 5}}];
    a user-defined one: [{target: package.module:function}]; empty: accuracy for classifiers
    """
    callbacks: list[Named] = field(
        default_factory=list,
        metadata={"each": CALLBACKS, "allowed": "list of callbacks, each a name or its keys"},
    )
    """user code that the training loop calls at its start and end and after steps, evaluations and
    saves: [mine, {target: package.module:Class, arguments: {}}]
    """
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig, metadata={"variants": LAUNCHERS})
    estimate: EstimateConfig = field(default_factory=EstimateConfig)
    hardware: HardwareConfig | None = None

    @property
    def saves_frozen(self) -> bool:
        """Whether checkpoints include frozen weights; false for adapters of pretrained models."""
        return self.adapter is None or not self.is_pretrained or self.model_path is None

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a sample; None for data without ``data.sequence_length``."""
        length = getattr(self.data, "sequence_length", None)
        return length if isinstance(length, int) else None

    @property
    def model_path(self) -> str | None:
        """Folder or model id of ``model=hf``; None for models that code describes."""
        return self.model.path if isinstance(self.model, HuggingFaceConfig) else None

    @property
    def is_pretrained(self) -> bool:
        """Whether training starts from the published weights of the model."""
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
"""Maps each group of options to the registry of its options; None if there is only YAML."""

REGISTRIES: dict[str, Registry[Any, Any]] = {
    **{group: registry for group, registry in GROUPS.items() if registry is not None},
    "loggers": LOGGERS,
    "metrics": EVALUATION_METRICS,
    "callbacks": CALLBACKS,
    "strategy.data_parallel": DATA_PARALLEL,
    "strategy.expert.dispatch": DISPATCHES,
    "train.loss": LOSSES,
}
"""Maps each key with registered names as values to its registry."""
