"""Builds the engine for a configuration, in one fixed order.

Tensor parallelism, pipeline stages, activation checkpointing, compile, then sharding or
replication. Each step takes the result of the previous one and does not depend on later ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.comm.mesh import Mesh
from axonlaunch.config import RunConfig
from axonlaunch.config.axes import EXPERT
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.config.options.data_parallel import DISPATCHES
from axonlaunch.config.precision import NUMBER_FORMATS, PRECISIONS
from axonlaunch.config.values.optional_keys import balances_by_bias
from axonlaunch.engines.context.context import ContextAxis, length_multiple
from axonlaunch.engines.data_parallel.arriving_gradients import host_norms_of
from axonlaunch.engines.data_parallel.choose_update import choose_update
from axonlaunch.engines.data_parallel.device_mesh import (
    expert_mesh,
    merged_group,
    run_mesh,
    sharding_mesh,
)
from axonlaunch.engines.data_parallel.fsdp import FSDP, CPUOffload, ShardedExperts
from axonlaunch.engines.data_parallel.gradient_synchronizer import GradSyncStrategy
from axonlaunch.engines.data_parallel.replicas import Replicas, make_replicas
from axonlaunch.engines.data_parallel.torch_internals import compile_blocks
from axonlaunch.engines.engine import Engine
from axonlaunch.engines.expert.balance import ExpertCounts
from axonlaunch.engines.expert.experts import (
    dispatch_experts,
    dispatched_experts,
    name_invalid_routes,
)
from axonlaunch.engines.forward_backward import (
    ForwardBackward,
    LocalForwardBackward,
    PipelineForwardBackward,
)
from axonlaunch.engines.mesh_engine import EngineParts, MeshEngine, StepRule
from axonlaunch.engines.optimizer.offload import HOST
from axonlaunch.engines.optimizer.schedules import learning_rate
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.engines.pipeline.split import (
    Part,
    around_blocks,
    crossing_ties,
    ends_of,
    holds,
    parts,
    stage_blocks,
    stage_module,
)
from axonlaunch.engines.pipeline.tied_weights import TiedGradients, tied_names
from axonlaunch.engines.precision.lower_parameters import Forward
from axonlaunch.engines.precision.policy import (
    LossScale,
    keep_parameters_in,
    lower_replicas,
    sharded_policy,
)
from axonlaunch.engines.precision.quantized_products import RoundingStart
from axonlaunch.engines.recomputation.activation_checkpointing import (
    apply_activation_checkpointing,
)
from axonlaunch.engines.recomputation.offloaded_inputs import OffloadedInputs
from axonlaunch.engines.tensor.async_collectives import overlap_exchanges
from axonlaunch.engines.tensor.outputs.deferred_head import HeadLoss
from axonlaunch.engines.tensor.outputs.liger_loss import (
    LinearCrossEntropy,
    linear_cross_entropy_sum,
)
from axonlaunch.engines.tensor.outputs.losses import losses_of
from axonlaunch.engines.tensor.parallelize import parallelize, sharded_classes, without_modules
from axonlaunch.engines.tensor.rounded_layers import round_products
from axonlaunch.models.adapters.quantized_base import (
    quantized_names,
    read_values_in,
    recomputing_weights,
)
from axonlaunch.models.build import construct, initialize_weights, spec_for
from axonlaunch.models.facts.flops import ModelFlops
from axonlaunch.models.facts.parameter_facts import parameter_facts
from axonlaunch.models.facts.scaled_layers import scaled_layers
from axonlaunch.models.source_of import source_of
from axonlaunch.models.specs.metrics import build_metrics
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.specs.router_loss import RouterLoss
from axonlaunch.models.tensors.packed_blocks import logical_numel
from axonlaunch.models.torch_dtypes import torch_dtype

Divide = Callable[[nn.Module], None]
Boundaries = Callable[[Divide, Sequence[Part]], Mapping[int, tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Source:
    """Functions that create modules and allocate storage; can be replaced to build without memory.

    Attributes:
        construct: Creates a model, see ``models.build.construct``.
        initialize_weights: Initializes a model, see ``models.build.initialize_weights``.
        storing: Returns a context for code that allocates storage.
        boundaries: Maps a function that parallelizes a model like a stage, and the list of stages,
            to each stage's input and output for one micro-batch. None passes a micro-batch through
            the ranks to find out.
        loss_kernel: Computes head and loss together, with ``train.loss_kernel``.
    """

    construct: Callable[..., nn.Module] = construct
    initialize_weights: Callable[..., None] = initialize_weights
    storing: Callable[[], AbstractContextManager[Any]] = nullcontext
    boundaries: Boundaries | None = None
    loss_kernel: LinearCrossEntropy = linear_cross_entropy_sum


@dataclass(frozen=True)
class _Plan:
    """State that the build steps share.

    Attributes:
        experts: Mesh of parameters of experts; None if experts are not sharded.
        rounding: Decides in which steps products are rounded.
        context: The ranks that share sequences; None if sequences are not sharded.
        head_loss: Computes the loss from hidden states; None computes it from logits.
    """

    config: RunConfig
    world: World
    layout: Layout
    mesh: Mesh
    experts: Mesh | None
    spec: ModelSpec
    source: Source
    rounding: RoundingStart
    context: ContextAxis | None = None
    head_loss: HeadLoss | None = None

    @property
    def separate_weight_grad(self) -> bool:
        """Whether the schedule computes weight gradients separately from input gradients."""
        return self.layout.pipeline > 1 and SCHEDULES[self.layout.schedule].separate_weight_grad

    @property
    def parameters_on_host(self) -> bool:
        """Whether FSDP keeps parameters in host memory."""
        offload = CPUOffload(self.config.strategy.fsdp.cpu_offload)
        return self.layout.facts.shards_parameters and offload.keeps_parameters_on_host

    def most_experts(self, model: nn.Module) -> int:
        """Return the largest number of experts of a layer on all ranks; 0 without experts."""
        return self.layout.expert * self.spec.most_experts(model)

    def construct(self) -> nn.Module:
        """Create the full model."""
        model = self.source.construct(self.config, seed=self.config.seed)
        stored = NUMBER_FORMATS[self.config.train.param_dtype]
        if stored.is_low:
            # Adapters stay in fp32, like PEFT's adapters of a model in bf16.
            has_adapter = self.config.adapter is not None
            dtype = torch_dtype(stored)
            keep_parameters_in(model, dtype, frozen_only=has_adapter)
        read_values_in(model, torch_dtype(PRECISIONS[self.config.train.precision].compute))
        return model


@dataclass(frozen=True)
class _Wrapped:
    """A rank's wrapped modules.

    Attributes:
        passes: Forward and backward of the modules.
        replicas: Keeps full copies of the parameters equal; None without replicas.
        sharded: Modules that are sharded by fully_shard.
        owners: Global rank of each copy of a weight that two stages share.
    """

    passes: ForwardBackward
    replicas: Replicas | None
    sharded: Sequence[FSDP]
    owners: Mapping[str, int] = field(default_factory=dict)


def build_engine(
    config: RunConfig,
    world: World,
    *,
    sample: Tensor | None = None,
    source: Source | None = None,
) -> Engine:
    """Create a model, parallelize and wrap it, and initialize its weights.

    Args:
        config: A validated configuration.
        world: The ranks of the run. All of them must call this.
        sample: Inputs of one sample [...], used to balance pipeline stages; values do not matter.
        source: Functions that create modules and storage; None for ``models.build``.
    """
    layout = Layout.of(config, world_size=world.world_size)
    offload = config.strategy.fsdp.cpu_offload
    mesh = run_mesh(world, layout, cpu_offload=offload)
    experts = expert_mesh(world, layout, cpu_offload=offload) if layout.expert > 1 else None
    needs_scale = PRECISIONS[config.train.precision].needs_loss_scale
    rounding = RoundingStart(config.train.matmul_start_step)
    context = ContextAxis(merged_group(world, layout, "cp")) if layout.context > 1 else None
    spec, source = spec_for(config), source or Source()
    plan = _Plan(config, world, layout, mesh, experts, spec, source, rounding, context)
    model = plan.construct()
    num_parameters = sum(logical_numel(p) for p in model.parameters())
    flops = ModelFlops.of(model)
    facts, ties = parameter_facts(plan.spec, model), tied_names(model)
    num_experts = {name: _num_experts(model, name) for name in plan.spec.experts(model)}
    counts: list[int] = []
    if layout.pipeline > 1:
        assert sample is not None, "balancing pipeline stages requires a sample"
        counts = stage_blocks(config, layout, model, sample=sample)
    _parallelize(plan, model)
    classes = sharded_classes(model)
    losses = losses_of(
        plan.spec,
        config.train,
        classes=classes,
        group=mesh.group("tp"),
        kernel=source.loss_kernel,
        evaluates_logits=bool(config.metrics),
    )
    plan = dataclasses.replace(plan, head_loss=losses.head_loss)
    crossing = crossing_ties(plan.spec, ties) if layout.pipeline > 1 else {}
    if layout.pipeline == 1:
        wrapped = _build_local(plan, model)
    else:
        wrapped = _build_pipeline(plan, model, counts, crossing)
    modules = wrapped.passes.modules
    parameters = {n: parameter for module in modules for n, parameter in module.named_parameters()}
    update, tied = _choose_update(plan, wrapped, parameters, facts, crossing)
    return MeshEngine(
        EngineParts(
            passes=wrapped.passes,
            update=update,
            losses=losses,
            rule=_step_rule(config),
            world=world,
            mesh=mesh,
            layout=layout,
            num_parameters=num_parameters,
            flops=flops,
            replicas=wrapped.replicas,
            sharded=wrapped.sharded,
            tied=tied,
            aliases={n: crossing[n] for n in parameters if n in crossing},
            context=context,
            input_multiple=length_multiple(config.strategy),
            loss_scale=LossScale(world.device) if needs_scale else None,
            metrics=build_metrics(config),
            router_loss=_router_loss(plan),
            expert_counts=_expert_counts(plan, num_experts, modules),
            saves_frozen=config.saves_frozen,
            rounding=rounding,
            host_norms=host_norms_of(config, layout, wrapped.sharded, world.device),
        )
    )


def _choose_update(
    plan: _Plan,
    wrapped: _Wrapped,
    parameters: Mapping[str, nn.Parameter],
    facts: Mapping[str, ParameterFacts],
    crossing: Mapping[str, str],
) -> tuple[Update, TiedGradients | None]:
    """Return the update of a rank's parameters, and the sum of gradients that stages share."""
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    modules = wrapped.passes.modules
    update = choose_update(
        plan.config,
        trained,
        facts={n: facts[crossing.get(n, n)] for n in trained},
        world=plan.world,
        mesh=plan.mesh,
        replicas=wrapped.replicas,
        modules=modules,
        units=[unit for module in modules for unit in _units(plan, module)],
    )
    if not {*crossing, *crossing.values()} & update.tensors.keys():
        return update, None
    stages = plan.mesh.group("pp")
    return update, TiedGradients(update.tensors, ties=crossing, owners=wrapped.owners, group=stages)


def _step_rule(config: RunConfig) -> StepRule:
    return StepRule(
        seed=config.seed,
        grad_clip=config.train.grad_clip,
        rate=partial(learning_rate, config.scheduler, steps=config.train.num_steps),
        peak_rate=config.optimizer.lr,
    )


def _num_experts(model: nn.Module, name: str) -> int:
    num_experts = model.get_submodule(name).num_experts
    assert isinstance(num_experts, int)
    return num_experts


def _router_loss(plan: _Plan) -> RouterLoss | None:
    if plan.spec.mixes_samples != "batch":
        return None
    return RouterLoss(partial(_sum_over, plan, (*plan.layout.division().sum_axes, "pp")))


def _expert_counts(
    plan: _Plan, num_experts: Mapping[str, int], modules: Sequence[nn.Module]
) -> ExpertCounts | None:
    """Observe the experts; not in compiled blocks, whose graphs have no hooks."""
    if not num_experts or plan.config.train.compile:
        return None
    if plan.experts is None:
        name_invalid_routes(modules, num_experts)
    model: Any = plan.config.model
    with plan.source.storing():
        return ExpertCounts(
            num_experts,
            modules,
            device=plan.world.device,
            sum_over_data=partial(_sum_over, plan, plan.layout.division().sum_axes),
            sum_over_stages=partial(_sum_over, plan, ("pp",)),
            bias_rate=model.balance_rate if balances_by_bias(model) else None,
        )


def _sum_over(plan: _Plan, axes: Iterable[str], tensor: Tensor) -> None:
    """Sum a tensor in place over the ranks along axes of ``Layout.axes``."""
    for axis in plan.layout.mesh_axes(axes):
        if plan.mesh.size(axis) > 1:
            dist.all_reduce(tensor, group=plan.mesh.group(axis).torch_group)


def _parallelize(plan: _Plan, model: nn.Module) -> None:
    """Shard a full model's sequences over the context axis and its layers over the tensor axis.

    Afterwards, linear layers compute in ``train.matmul_dtype``.
    """
    products = precision_of(plan.config).products
    layers = None if products is None else scaled_layers(plan.config, plan.spec, model)
    if plan.context is not None:
        plan.context.shard_sequences(plan.spec, model)
    tensor = plan.config.strategy.tensor
    tensor_plan = tensor.plan or plan.spec.plan(model)
    if plan.experts is not None:
        names = plan.spec.experts(model)
        dispatch_experts(
            model,
            names,
            mesh=plan.experts.device_mesh[EXPERT],
            make_dispatch=DISPATCHES.get(plan.config.strategy.expert.dispatch),
            tensor_group=plan.mesh.group("tp") if tensor.degree > 1 else None,
        )
        tensor_plan = without_modules(tensor_plan, model, names)
    if tensor.degree > 1:
        if tensor.async_collectives:
            overlap_exchanges(plan.mesh.group("tp"))
        parallelize(
            model,
            tensor_plan,
            mesh=plan.mesh.device_mesh["tp"],
            sequence_parallel=tensor.sequence_parallel,
            # Rounded products are fast only if they are compiled, and compiled ones overlap.
            overlap=not plan.separate_weight_grad and products is None,
        )
        if tensor.sequence_parallel:
            plan.spec.split_hidden_states(model)
    if products is not None and layers is not None:
        round_products(layers.values(), products, plan.rounding)


def _build_local(plan: _Plan, model: nn.Module) -> _Wrapped:
    sharded = _wrap_stage(plan, model)
    replicas, forward = None, model
    if sharded:
        [forward] = sharded
    elif (replicas := _replicas(plan, model, sync=plan.config.strategy.ddp.sync)) is not None:
        forward = replicas.module
    passes = LocalForwardBackward(
        model,
        forward=forward,
        micro_batch_size=plan.layout.micro_batch_size,
        device=plan.world.device,
    )
    return _Wrapped(passes, replicas, sharded)


def _build_pipeline(
    plan: _Plan, full_model: nn.Module, counts: list[int], ties: dict[str, str]
) -> _Wrapped:
    """Create this rank's stages from copies of the model."""
    from axonlaunch.engines.pipeline.pipeline import Pipeline  # imports torch's compiler
    from axonlaunch.engines.pipeline.schedule import PipelineSchedule

    layout, group = plan.layout, plan.mesh.group("pp")
    schedule = PipelineSchedule.of(layout)
    stages = parts(counts)
    at_start, _ = ends_of(plan.spec)
    first, last = (group.ranks[schedule.rank_of_stage[end]] for end in (0, -1))
    owners = {n: first if holds(at_start, n) else last for n in {*ties, *ties.values()}}
    boundaries = _boundaries(plan, stages)
    tensor = plan.config.strategy.tensor
    parts_of_row = tensor.degree if tensor.sequence_parallel else 1
    modules: dict[int, nn.Module] = {}
    for index in schedule.stages_of(group.rank):
        model = full_model
        if modules:
            model = plan.construct()
            _parallelize(plan, model)
        part = stages[index]
        modules[index] = stage_module(plan.spec, model, part, sequence_parts=parts_of_row)
    replicas = None
    sharded = [wrapped for stage in modules.values() for wrapped in _wrap_stage(plan, stage)]
    if not plan.layout.facts.shards_parameters:
        # Schedules split and reorder backward passes, so replicas are averaged after all of them.
        replicas = _replicas(plan, nn.ModuleList(modules.values()), sync=GradSyncStrategy.NO_SYNC)
    pipeline = Pipeline(modules, schedule=schedule, group=group, boundaries=boundaries)
    passes = PipelineForwardBackward(pipeline, micro_batch_size=layout.micro_batch_size)
    return _Wrapped(passes, replicas, sharded, owners)


def _boundaries(plan: _Plan, stages: Sequence[Part]) -> Mapping[int, tuple[Tensor, Tensor]] | None:
    if plan.source.boundaries is None:
        return None

    def divide(model: nn.Module) -> None:
        _parallelize(plan, model)
        if plan.head_loss is not None and (head := plan.spec.head_of(model)) is not None:
            HeadLoss().defer(head, model)
        if plan.layout.facts.shards_parameters:
            model.to(torch_dtype(PRECISIONS[plan.config.train.precision].gather))
        else:
            model.forward = _replicated_arithmetic(plan, model)(model.forward)
        if plan.spec.mixes_samples == "batch":  # with the loss in its outputs outside of an engine
            model.forward = RouterLoss(lambda _: None).running("off")(model.forward)

    return plan.source.boundaries(divide, stages)


def _wrap_stage(plan: _Plan, stage: nn.Module) -> list[FSDP]:
    """Add recomputation, compilation and sharding to a model or stage, and initialize weights.

    Returns:
        The sharded stage, or nothing if the layout does not shard parameters.
    """
    shards = plan.layout.facts.shards_parameters
    lowered = None if shards else _replicated_arithmetic(plan, stage)
    if plan.head_loss is not None and (head := plan.spec.head_of(stage)) is not None:
        plan.head_loss.defer(head, stage)
    _wrap_blocks(plan, stage)
    sharded = [] if lowered else [_shard(plan, stage)]
    if lowered:
        stage.forward = lowered(stage.forward)
        _initialize(plan, stage)
    _set_gradient_dtype(plan, stage, sharded)
    return sharded


def _set_gradient_dtype(plan: _Plan, stage: nn.Module, sharded: Sequence[FSDP]) -> None:
    """Let gradients of parameters in 16 bits be added up in another type, if that is chosen."""
    precision = precision_of(plan.config)
    if precision.gradients == precision.parameters or plan.config.adapter is not None:
        return
    dtype = torch_dtype(precision.gradients)
    for module in sharded:
        module.accumulate_in(dtype)
    if sharded:
        return
    for parameter in stage.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = dtype


def _wrap_blocks(plan: _Plan, model: nn.Module) -> None:
    train, blocks = plan.config.train, [*plan.spec.blocks(model).values()]
    if quantized_names(model):
        is_checkpointed = bool(blocks) and train.activation_checkpointing != "none"
        for block in blocks or [model]:
            block.forward = recomputing_weights(block.forward, is_checkpointed=is_checkpointed)
    recompute = partial(
        apply_activation_checkpointing,
        blocks,
        mode=train.recomputation,
        num_experts=plan.most_experts(model),
    )
    compile_all = partial(compile_blocks, blocks or [model], mode=train.compile_mode)
    steps = [recompute, compile_all] if train.compile else [recompute]
    if train.recomputation == "full" and plan.layout.tensor > 1:
        # torch's compiler can't recompute a block that saves a mesh, as those of tensor ranks do.
        # Here backward calls the compiled forward again.
        steps.reverse()
    for step in steps:
        step()
    if train.offloads_inputs:
        offloaded = OffloadedInputs(plan.world.device)
        for block in blocks:
            block.forward = offloaded.wrap(block.forward, is_first=block is blocks[0])


def _around_blocks(plan: _Plan, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return modules called before and after the blocks, if their weights are used only there."""
    if source_of(plan.config).code != "included":  # unknown for other models
        return [], []
    before_blocks, after_blocks = around_blocks(plan.spec, model)
    # A deferred head runs after forward.
    return before_blocks, after_blocks if plan.head_loss is None else []


def _units(plan: _Plan, model: nn.Module) -> list[nn.Module]:
    """Return blocks, and modules called after them, whose weights no other module reads."""
    is_unknown = source_of(plan.config).code == "user"
    blocks = () if is_unknown else plan.spec.blocks(model).values()
    return [*blocks, *_around_blocks(plan, model)[1]]


def _shard(plan: _Plan, model: nn.Module) -> FSDP:
    config, fsdp = plan.config, plan.config.strategy.fsdp
    before_blocks, after_blocks = _around_blocks(plan, model)
    sharded = FSDP(
        model,
        world=plan.world,
        mesh=sharding_mesh(plan.mesh, plan.layout),
        layers=[*plan.spec.blocks(model).values()],
        before_blocks=before_blocks,
        after_blocks=after_blocks,
        sharding=fsdp.sharding,
        cpu_offload=fsdp.cpu_offload,
        mixed_precision=sharded_policy(precision_of(config)),
        # torch's schedules with several stages per rank gather a stage before its first micro-batch
        # and reshard it after its last, and require gathered parameters in between. With one stage
        # per rank, parameters would otherwise be gathered again for each micro-batch.
        keep_gathered=plan.layout.pipeline > 1,
        experts=_sharded_experts(plan, model),
    )
    sharded.ignore_returned_view()
    _initialize(plan, model)
    return sharded


def _sharded_experts(plan: _Plan, model: nn.Module) -> ShardedExperts | None:
    if plan.experts is None:
        return None
    return ShardedExperts(
        modules=dispatched_experts(model),
        mesh=sharding_mesh(plan.experts, plan.layout, is_expert=True),
        gradient_ranks=plan.layout.gradient_ranks,
    )


def _replicated_arithmetic(plan: _Plan, model: nn.Module) -> Callable[[Forward], Forward]:
    blocks = [*plan.spec.blocks(model).values()]
    precision, device = precision_of(plan.config), plan.world.device
    return lower_replicas(model, precision, device=device, blocks=blocks)


def _replicas(plan: _Plan, module: nn.Module, *, sync: GradSyncStrategy | str) -> Replicas | None:
    [axis] = plan.layout.mesh_axes(plan.layout.division().sum_axes)
    with plan.source.storing():
        return make_replicas(
            plan.config.strategy,
            module,
            kind=plan.layout.data_parallel,
            group=plan.mesh.group(axis),
            sync=sync,
        )


def _initialize(plan: _Plan, model: nn.Module) -> None:
    """Move a model to its device and initialize its weights."""
    config, world = plan.config, plan.world
    filled = not any(parameter.is_meta for parameter in model.parameters())
    if filled and plan.layout.facts.shards_parameters:
        return  # fully_shard has moved parameters that the model initialized itself
    device = HOST if plan.parameters_on_host else world.device
    with plan.source.storing():
        plan.source.initialize_weights(model, config, seed=config.seed, device=device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(world.device))
