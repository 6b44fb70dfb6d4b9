"""Builds the engine that a configuration asks for, in one fixed order.

Tensor parallelism, pipeline stages, activation checkpointing, compile, then sharding or
replication: each takes what the one before left, and none knows of the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.comm.mesh import Mesh
from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout
from axonlaunch.config.model import OWN_MODEL_CONFIGS, HuggingFaceConfig
from axonlaunch.config.schedule_rules import SCHEDULES
from axonlaunch.engines.activation_checkpointing import apply_activation_checkpointing
from axonlaunch.engines.base import Engine
from axonlaunch.engines.context.context import ContextAxis, length_multiple
from axonlaunch.engines.data_parallel.choose_update import choose_update
from axonlaunch.engines.data_parallel.fsdp import FSDP, CPUOffload
from axonlaunch.engines.data_parallel.gradient_synchronizer import GradSyncStrategy
from axonlaunch.engines.data_parallel.replicas import Replicas, make_replicas
from axonlaunch.engines.data_parallel.torch_internals import compile_blocks_whole
from axonlaunch.engines.device_mesh import context_group, run_mesh, sharding_mesh
from axonlaunch.engines.forward_backward import (
    ForwardBackward,
    LocalForwardBackward,
    PipelineForwardBackward,
)
from axonlaunch.engines.mesh_engine import MeshEngine, StepRule
from axonlaunch.engines.optimizer.offload import HOST
from axonlaunch.engines.optimizer.optimizers import learning_rate
from axonlaunch.engines.pipeline.split import (
    Part,
    around_blocks,
    crossing_ties,
    cut,
    ends_of,
    holds,
    parts,
    stage_blocks,
)
from axonlaunch.engines.pipeline.tied_weights import TiedGradients, tied_names
from axonlaunch.engines.precision.lower_parameters import Forward
from axonlaunch.engines.precision.policy import (
    DTYPES,
    LossScale,
    keep_parameters_in,
    lower_replicas,
    sharded_policy,
)
from axonlaunch.engines.tensor.async_collectives import overlap_exchanges
from axonlaunch.engines.tensor.chunked_loss import ChunkedLoss
from axonlaunch.engines.tensor.losses import losses_of
from axonlaunch.engines.tensor.parallelize import divided_classes, parallelize
from axonlaunch.models.build import construct, initialize_weights, spec_for
from axonlaunch.models.flops import frozen_parameters, looked_up_parameters
from axonlaunch.models.parameter_facts import parameter_facts
from axonlaunch.models.spec import ModelSpec

Divide = Callable[[nn.Module], None]
Boundaries = Callable[[Divide, Sequence[Part]], Mapping[int, tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Source:
    """Where modules and their storage come from; another one builds an engine without bytes.

    Attributes:
        construct: As ``models.build.construct``.
        initialize_weights: As ``models.build.initialize_weights``.
        storing: What surrounds whatever allocates storage.
        boundaries: What divides a whole model as a stage is, and all stages, to what each stage
            takes and gives of a micro-batch; None: a micro-batch is passed through the ranks to
            see.
    """

    construct: Callable[..., nn.Module] = construct
    initialize_weights: Callable[..., None] = initialize_weights
    storing: Callable[[], AbstractContextManager[Any]] = nullcontext
    boundaries: Boundaries | None = None


@dataclass
class _Plan:
    """What the steps of building share.

    Attributes:
        chunked: Of the loss, if it is computed in chunks.
        owners: The global rank that holds each of the two ends of a tied weight.
        sharded: What of the model fully_shard divides.
    """

    config: RunConfig
    world: World
    layout: Layout
    mesh: Mesh
    spec: ModelSpec
    source: Source
    context: ContextAxis | None = None
    chunked: ChunkedLoss | None = None
    owners: dict[str, int] = field(default_factory=dict)
    sharded: list[FSDP] = field(default_factory=list)

    @property
    def separate_weight_grad(self) -> bool:
        """Whether a schedule computes gradients of weights apart from those of inputs."""
        return self.layout.pipeline > 1 and SCHEDULES[self.layout.schedule].separate_weight_grad

    @property
    def whole_on_host(self) -> bool:
        """Whether FSDP keeps parameters in host memory."""
        offload = CPUOffload(self.config.strategy.fsdp.cpu_offload)
        return self.layout.facts.shards_parameters and offload.keeps_parameters_on_host

    def construct(self) -> nn.Module:
        """Build the whole model, undivided."""
        model = self.source.construct(self.config, seed=self.config.seed)
        if self.config.train.param_dtype != "fp32":
            # Adapters are kept in fp32, as PEFT keeps those of a model in bf16.
            has_adapter = self.config.adapter is not None
            dtype = DTYPES[self.config.train.param_dtype]
            keep_parameters_in(model, dtype, frozen_alone=has_adapter)
        return model


def build_engine(
    config: RunConfig,
    world: World,
    *,
    sample: Tensor | None = None,
    source: Source | None = None,
) -> Engine:
    """Build a model, divide it, wrap it, fill it with its initial weights.

    Args:
        config: A checked configuration.
        world: Its ranks; all of them call this.
        sample: One sample's inputs [...], for balancing the stages of a pipeline; values don't
            matter.
        source: Of modules and their storage; None: as ``models.build`` makes them.
    """
    layout = Layout.of(config, world_size=world.world_size)
    mesh = run_mesh(world, layout, cpu_offload=config.strategy.fsdp.cpu_offload)
    plan = _Plan(config, world, layout, mesh, spec_for(config), source or Source())
    if layout.context > 1:
        plan.context = ContextAxis(context_group(world, layout))
    whole = plan.construct()
    num_parameters = sum(p.numel() for p in whole.parameters())
    num_looked_up, num_frozen = looked_up_parameters(whole), frozen_parameters(whole)
    facts, ties = parameter_facts(plan.spec, whole), tied_names(whole)
    counts: list[int] = []
    if layout.pipeline > 1:
        assert sample is not None, "a pipeline is balanced by what a sample takes"
        counts = stage_blocks(config, layout, whole, sample=sample)
    _parallelize(plan, whole)
    classes = divided_classes(whole)
    losses = losses_of(plan.spec, config.train, classes=classes, group=mesh.group("tp"))
    plan.chunked = losses.chunked
    crossing = crossing_ties(plan.spec, ties) if layout.pipeline > 1 else {}
    passes: ForwardBackward
    if layout.pipeline == 1:
        passes, replicas = _whole(plan, whole)
    else:
        passes, replicas = _pipeline(plan, whole, counts, crossing)
    parameters = {
        n: parameter for module in passes.modules for n, parameter in module.named_parameters()
    }
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    update = choose_update(
        config,
        trained,
        facts={n: facts[crossing.get(n, n)] for n in trained},
        world=world,
        mesh=mesh,
        replicas=replicas,
        modules=passes.modules,
        units=[unit for module in passes.modules for unit in _units(plan, module)],
    )
    tied = None
    if {*crossing, *crossing.values()} & update.tensors.keys():
        stages = mesh.group("pp")
        tied = TiedGradients(update.tensors, ties=crossing, owners=plan.owners, group=stages)
    return MeshEngine(
        passes,
        update=update,
        replicas=replicas,
        sharded=plan.sharded,
        tied=tied,
        aliases={n: crossing[n] for n in parameters if n in crossing},
        losses=losses,
        context=plan.context,
        input_multiple=length_multiple(config.strategy),
        num_parameters=num_parameters,
        num_looked_up=num_looked_up,
        num_frozen=num_frozen,
        world=world,
        mesh=mesh,
        layout=layout,
        loss_scale=LossScale(world.device) if config.train.precision == "fp16" else None,
        saves_frozen=config.saves_frozen,
        rule=StepRule(
            seed=config.seed,
            grad_clip=config.train.grad_clip,
            rate=partial(learning_rate, config.scheduler, steps=config.train.num_steps),
            peak_rate=config.optimizer.lr,
        ),
    )


def _parallelize(plan: _Plan, model: nn.Module) -> None:
    """Divide a whole model's sequences over the context axis, its layers over the tensor axis."""
    if plan.context is not None:
        plan.context.divide(plan.spec, model)
    tensor = plan.config.strategy.tensor
    if tensor.degree > 1:
        if tensor.async_collectives:
            overlap_exchanges(plan.mesh.group("tp"))
        parallelize(
            model,
            tensor.plan or plan.spec.plan(model),
            mesh=plan.mesh.device_mesh["tp"],
            sequence_parallel=tensor.sequence_parallel,
            overlap=not plan.separate_weight_grad,
        )


def _whole(plan: _Plan, model: nn.Module) -> tuple[LocalForwardBackward, Replicas | None]:
    _wrap_stage(plan, model)
    replicas, forward = None, model
    if plan.layout.facts.shards_parameters:
        [forward] = plan.sharded
    elif (replicas := _replicas(plan, model, sync=plan.config.strategy.ddp.sync)) is not None:
        forward = replicas.module
    passes = LocalForwardBackward(
        model,
        forward=forward,
        micro_batch_size=plan.layout.micro_batch_size,
        device=plan.world.device,
    )
    return passes, replicas


def _pipeline(
    plan: _Plan, whole: nn.Module, counts: list[int], ties: dict[str, str]
) -> tuple[PipelineForwardBackward, Replicas | None]:
    """Cut this rank's stages out of copies of the model."""
    from axonlaunch.engines.pipeline.pipeline import Pipeline  # imports torch's compiler
    from axonlaunch.engines.pipeline.schedule import PipelineSchedule

    layout, group = plan.layout, plan.mesh.group("pp")
    schedule = PipelineSchedule(
        layout.schedule,
        degree=layout.pipeline,
        microbatches=layout.microbatches_per_round,
        stages_per_rank=layout.stages_per_rank,
    )
    stages = parts(counts)
    at_start, _ = ends_of(plan.spec)
    for name in {*ties, *ties.values()}:
        end = 0 if holds(at_start, name) else -1
        plan.owners[name] = group.ranks[schedule.rank_of_stage[end]]
    boundaries = _boundaries(plan, stages)
    mine: dict[int, nn.Module] = {}
    for index in schedule.stages_of(group.rank):
        model = whole
        if mine:
            model = plan.construct()
            _parallelize(plan, model)
        mine[index] = cut(plan.spec, model, stages[index])
    replicas = None
    for stage in mine.values():
        _wrap_stage(plan, stage)
    if not plan.layout.facts.shards_parameters:
        # Schedules split and reorder backwards, so replicas agree when all of them have run.
        replicas = _replicas(plan, nn.ModuleList(mine.values()), sync=GradSyncStrategy.NO_SYNC)
    pipeline = Pipeline(mine, schedule=schedule, group=group, boundaries=boundaries)
    return PipelineForwardBackward(pipeline, micro_batch_size=layout.micro_batch_size), replicas


def _boundaries(plan: _Plan, stages: Sequence[Part]) -> Mapping[int, tuple[Tensor, Tensor]] | None:
    if plan.source.boundaries is None:
        return None

    def divide(model: nn.Module) -> None:
        _parallelize(plan, model)
        if plan.chunked is not None and (head := plan.spec.head_of(model)) is not None:
            ChunkedLoss(plan.spec.loss, chunk=1).defer(head, model)
        if plan.layout.facts.shards_parameters:
            model.to(DTYPES[plan.config.train.precision])  # as it is gathered
        else:
            model.forward = _replicated_arithmetic(plan, model)(model.forward)

    return plan.source.boundaries(divide, stages)


def _wrap_stage(plan: _Plan, stage: nn.Module) -> None:
    """Recompute, compile, then shard; and fill the model, or a stage, with its weights."""
    shards = plan.layout.facts.shards_parameters
    lowered = None if shards else _replicated_arithmetic(plan, stage)
    if plan.chunked is not None and (head := plan.spec.head_of(stage)) is not None:
        plan.chunked.defer(head, stage)
    _wrap_blocks(plan, stage)
    if lowered is None:
        _shard(plan, stage)
    else:
        stage.forward = lowered(stage.forward)
        _fill(plan, stage)


def _wrap_blocks(plan: _Plan, model: nn.Module) -> None:
    train, blocks = plan.config.train, [*plan.spec.blocks(model).values()]
    apply_activation_checkpointing(blocks, mode=train.activation_checkpointing)
    if train.compile:
        compile_blocks_whole()
        # The compiler runs `python -c "from ctypes"`, in any step: not what lies in this folder.
        os.environ["PYTHONSAFEPATH"] = "1"
        for block in blocks or [model]:
            # Not the module: what fully_shard hooks to its call is not for a compiler.
            block.forward = torch.compile(block.forward, mode=train.compile_mode)


def _around_blocks(plan: _Plan, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return what forward calls before the blocks and after them, where no weight is used alone."""
    if type(plan.config.model) not in OWN_MODEL_CONFIGS:  # of others it is not known
        return [], []
    before, after = around_blocks(plan.spec, model)
    return before, after if plan.chunked is None else []  # a head in chunks runs after forward


def _units(plan: _Plan, model: nn.Module) -> list[nn.Module]:
    """Return blocks, and what forward calls after them, whose weights nothing else reads."""
    is_known = type(plan.config.model) in (*OWN_MODEL_CONFIGS, HuggingFaceConfig)
    blocks = plan.spec.blocks(model).values() if is_known else ()
    return [*blocks, *_around_blocks(plan, model)[1]]


def _shard(plan: _Plan, model: nn.Module) -> None:
    config, fsdp = plan.config, plan.config.strategy.fsdp
    before, after = _around_blocks(plan, model)
    sharded = FSDP(
        model,
        world=plan.world,
        mesh=sharding_mesh(plan.mesh),
        layers=[*plan.spec.blocks(model).values()],
        before=before,
        after=after,
        sharding=fsdp.sharding,
        cpu_offload=fsdp.cpu_offload,
        mixed_precision=sharded_policy(
            config.train.precision, reduce_dtype=DTYPES[config.strategy.reduce_dtype]
        ),
        # torch's schedules of several stages per rank gather a stage before its first micro-batch
        # and reshard it after its last; they look for the gathered parameters in between. With one
        # stage per rank they would be gathered again for each micro-batch.
        keep_gathered=plan.layout.pipeline > 1,
    )
    sharded.ignore_returned_view()
    _fill(plan, model)
    plan.sharded.append(sharded)


def _replicated_arithmetic(plan: _Plan, model: nn.Module) -> Callable[[Forward], Forward]:
    blocks = [*plan.spec.blocks(model).values()]
    precision, device = plan.config.train.precision, plan.world.device
    return lower_replicas(model, precision, device=device, blocks=blocks)


def _replicas(plan: _Plan, module: nn.Module, *, sync: GradSyncStrategy | str) -> Replicas | None:
    with plan.source.storing():
        return make_replicas(
            plan.config.strategy,
            module,
            kind=plan.layout.data_parallel,
            group=plan.mesh.group("dp_replicate"),
            sync=sync,
        )


def _fill(plan: _Plan, model: nn.Module) -> None:
    """Put a model on its device and give it its initial weights."""
    config, world = plan.config, plan.world
    filled = not any(parameter.is_meta for parameter in model.parameters())
    if filled and plan.layout.facts.shards_parameters:
        return  # fully_shard has moved what the model filled itself
    device = HOST if plan.whole_on_host else world.device
    with plan.source.storing():
        plan.source.initialize_weights(model, config, seed=config.seed, device=device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(world.device))
