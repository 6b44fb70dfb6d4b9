"""Checks whether a strategy can shard a model: over context, data and tensor axes, and in stages.

The model is on the meta device or on the CPU; no rank is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from axonlaunch.config import ConfigIssue, RunConfig
from axonlaunch.config.axes import EXPERT_SHARD
from axonlaunch.config.consistency.degree_rules import EXPERT_DEGREE, expert_degrees_of_ranks
from axonlaunch.config.consistency.layout import (
    Layout,
    data_parallel_facts,
    num_ranks,
    stages_per_rank,
)
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.optimization.parameter_groups import states_of, with_options
from axonlaunch.config.precision import MatmulFormat, QuantizedFormat, quantizes_states
from axonlaunch.config.problems.errors import divisors, one_of
from axonlaunch.config.values.optional_keys import balances_by_bias
from axonlaunch.engines.context.context import CHUNKS
from axonlaunch.engines.expert.balance import CORRECTION_BIAS, router_with_bias
from axonlaunch.engines.expert.experts import broken_expert_rows
from axonlaunch.engines.pipeline.split import (
    block_names,
    cuttable,
    ends_of,
    holds,
    kept_everywhere,
    missing_ends,
)
from axonlaunch.engines.pipeline.tied_weights import tied_names
from axonlaunch.engines.precision.lower_parameters import has_statistics
from axonlaunch.engines.tensor.division_check import division_problem
from axonlaunch.engines.tensor.parallelize import without_modules
from axonlaunch.engines.tensor.plan_checks import (
    broken_rows,
    plan_issues,
    rank_divisors,
    style_modules,
)
from axonlaunch.models.adapters.lora import linear_layer_sizes
from axonlaunch.models.facts.parameter_facts import parameter_facts
from axonlaunch.models.facts.scaled_layers import scaled_layers, selection_problems
from axonlaunch.models.source_of import source_of
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.packed_blocks import BLOCK, format_of

_LARGEST_GROUP = 256
"""Largest size of a group of weights that messages propose."""


def context_problems(config: RunConfig, spec: ModelSpec, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield the reasons why the model's sequences can't be sharded over ranks."""
    del model
    degree = config.strategy.context.degree
    if degree == 1:
        return
    if why := spec.unshardable_sequences():
        yield ConfigIssue("strategy.context.degree", why, degree)
        return
    if config.train.compile:
        message = "ring attention of strategy.context.degree can't be compiled; use false"
        yield ConfigIssue("train.compile", message, True)
    if not config.strategy.tensor.sequence_parallel:
        yield from _unshardable_length(config)


def _unshardable_length(config: RunConfig) -> Iterator[ConfigIssue]:
    strategy, length = config.strategy, config.sequence_length
    pieces, sharers = 1, []
    if strategy.context.degree > 1:
        pieces *= CHUNKS * strategy.context.degree
        sharers.append(f"strategy.context.degree={strategy.context.degree}")
    if strategy.tensor.sequence_parallel:
        pieces *= strategy.tensor.degree
        sharers.append(f"strategy.tensor.degree={strategy.tensor.degree}")
    if isinstance(length, int) and length % pieces:
        near = -(-length // pieces) * pieces
        needs = "needs" if len(sharers) == 1 else "need"
        message = f"{' and '.join(sharers)} {needs} a multiple of {pieces}; use {near}"
        yield ConfigIssue("data.sequence_length", message, length)


def sharding_problems(
    config: RunConfig, spec: ModelSpec, model: nn.Module
) -> Iterator[ConfigIssue]:
    """Yield the reasons why ``fully_shard`` can't shard the model's parameters."""
    if not data_parallel_facts(config.strategy).shards_parameters:
        return
    key, kind = "strategy.data_parallel", config.strategy.data_parallel
    if scalars := [name for name, tensor in model.named_parameters() if tensor.ndim == 0]:
        message = (
            f"{first_four(scalars)} has no dim that can be sharded; give it the shape [1], or "
            "use ddp or zero1"
        )
        yield ConfigIssue(key, message, kind)
    # Each block is gathered separately, and all other parameters together. All parameters of a
    # gather must have the same type, except quantized ones, which are gathered as bytes.
    blocks = {f"{name}.": block for name, block in spec.blocks(model).items()}
    units: dict[str, dict[torch.dtype, str]] = {}
    for name, parameter in model.named_parameters():
        unit = next((prefix for prefix in blocks if name.startswith(prefix)), "")
        if format_of(parameter) is None:
            units.setdefault(unit, {}).setdefault(parameter.dtype, name)
    for types in units.values():
        if len(types) > 1:
            dtypes = " and ".join(f"{name} is {dtype}" for dtype, name in types.items())
            message = f"{dtypes}, but they are gathered together; give them one type, or use ddp"
            yield ConfigIssue(key, message.replace("torch.", ""), kind)


def statistics_problems(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield a problem for BatchNorm with weights of another type than its statistics."""
    precision, strategy = precision_of(config), config.strategy
    stored = precision.parameters
    gathers = data_parallel_facts(strategy).shards_parameters and precision.gather.is_low
    if not gathers and not stored.is_low:
        return
    norms = {name: part for name, part in model.named_modules() if has_statistics(part)}
    if names := [name for name, part in norms.items() if [*part.parameters(recurse=False)]]:
        have = f"{first_four(names)} has running statistics in fp32, and torch refuses weights in "
        if stored.is_low:
            message = f"{have}{stored.name} with them; use fp32"
            yield ConfigIssue("train.param_dtype", message, stored.name)
            return
        message = (
            f"{have}{precision.name} with them, the type in which fsdp gathers weights; use ddp "
            "or zero1, which keep them in fp32, or train.precision=fp32"
        )
        yield ConfigIssue("strategy.data_parallel", message, strategy.data_parallel)


def product_problems(config: RunConfig, spec: ModelSpec, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield the reason why layers can't use ``train.matmul_dtype``.

    It may be a setting, or the first layer with a size that the dtype does not allow.
    """
    if config.train.matmul_dtype is None:
        return
    products = precision_of(config).products
    assert products is not None
    if issues := [*selection_problems(config, spec, model)]:
        yield from issues
        return
    tensor, divisors_of = config.strategy.tensor, {}
    if tensor.degree > 1:
        plan = tensor.plan or spec.plan(model)
        divisors_of = rank_divisors(model, plan, degree=tensor.degree)
    layers = scaled_layers(config, spec, model)
    sizes = {
        name: dict(zip(("inputs", "outputs"), linear_layer_sizes(layer), strict=True))
        for name, layer in layers.items()
    }
    multiples = {"inputs": products.input_multiple, "outputs": products.output_multiple}
    inputs = [
        numbers["inputs"] // divisors_of.get(name, (1, 1))[0] for name, numbers in sizes.items()
    ]
    for name, numbers in sizes.items():
        for side, divisor in zip(numbers, divisors_of.get(name, (1, 1)), strict=True):
            size, rest = divmod(numbers[side], divisor)
            if rest or not size % multiples[side]:
                continue  # other checks report sizes that can't be divided
            share = f" on each of {tensor.degree} tensor ranks" if divisor > 1 else ""
            message = f"{name} has {size} {side}{share}, not a multiple of "
            yield _unsuitable_size(products, message, fitting=math.gcd(*inputs))
            return


def _unsuitable_size(products: MatmulFormat, message: str, *, fitting: int) -> ConfigIssue:
    """Return the problem of a layer's size.

    Args:
        products: Format that factors are rounded to.
        message: Beginning of the message; the function appends the required multiple.
        fitting: Greatest common divisor of the inputs of all layers on a rank.
    """
    if isinstance(products, QuantizedFormat):
        key, value = "train.matmul_group_size", products.input_multiple
        sizes = [size for size in divisors(fitting)[1:] if size <= _LARGEST_GROUP]
        use = f"use {one_of(sizes[-4:])}, or " if sizes else ""
        return ConfigIssue(key, f"{message}it; {use}add the layer to train.matmul_exclude", value)
    message = f"{message}{products.input_multiple}; add it to train.matmul_exclude, or use null"
    return ConfigIssue("train.matmul_dtype", message, products.name)


def first_four(names: Sequence[str]) -> str:
    """Return the first four names as text, with dots if there are more."""
    return ", ".join([*names[:4], "..."] if len(names) > 4 else names)


def tensor_problems(config: RunConfig, spec: ModelSpec, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield the reasons why a tensor axis can't shard the model."""
    tensor = config.strategy.tensor
    if tensor.degree == 1:
        return
    if why := spec.refused_axes.get("tensor"):
        yield ConfigIssue("strategy.tensor.degree", why, tensor.degree)
        return
    plan = tensor.plan or spec.plan(model)
    if config.strategy.expert.degree > 1:  # experts are checked by expert_problems
        plan = without_modules(plan, model, spec.experts(model))
    if not plan:
        message = (
            f"model={config.model.name} brings no tensor plan; give one as strategy.tensor.plan, "
            "patterns of names to styles such as column, row and vocabulary"
        )
        yield ConfigIssue("strategy.tensor.degree", message, tensor.degree)
        return
    if tensor.sequence_parallel and not tensor.plan and (why := spec.no_sequence_parallelism()):
        message = f"hidden states of {_model_name(config, model)} can't be split: {why}; use false"
        yield ConfigIssue("strategy.tensor.sequence_parallel", message, True)
        return
    yield from _unshardable_length(config)
    issues = plan_issues(
        model, plan, degree=tensor.degree, sequence_parallel=tensor.sequence_parallel
    )
    for pattern, message in issues:
        if pattern and tensor.plan:
            yield ConfigIssue(f"strategy.tensor.plan.{pattern}", message, plan[pattern])
        else:
            yield ConfigIssue("strategy.tensor.degree", message, tensor.degree)
    if issues:
        return
    yield from state_problems(config, spec, plan, model)
    if spec.loss is not cross_entropy_sum:
        yield from _custom_loss_problems(config, plan, model)
    if source_of(config).code == "included":
        return
    # A user's plan may name any block, so it needs the complete model.
    reduced = model if tensor.plan else spec.representative(model)
    plan = tensor.plan or spec.plan(reduced)
    if config.strategy.expert.degree > 1:
        plan = without_modules(plan, reduced, spec.experts(reduced))
    if difference := division_problem(
        reduced, plan, degree=tensor.degree, blocks=spec.blocks(reduced)
    ):
        yield ConfigIssue("strategy.tensor.degree", difference, tensor.degree)


def _model_name(config: RunConfig, model: nn.Module) -> str:
    """Return the model's option, with its family for transformers models."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    return f"model={config.model.name}" + (f" of model_type={family}" if family else "")


def expert_problems(config: RunConfig, spec: ModelSpec, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield the reasons why the experts of the model can't be sharded over ranks."""
    degree = config.strategy.expert.degree
    if degree == 1:
        return
    degrees = expert_degrees(spec, model)
    if not degrees:
        message = f"{type(model).__name__} has no experts that can be split; use 1"
        yield ConfigIssue(EXPERT_DEGREE, message, degree)
    elif degree not in degrees:
        of_ranks = expert_degrees_of_ranks(config, world_size=num_ranks(config))
        legal = [count for count in degrees if count in of_ranks]
        message = f"the experts of a layer can't be split evenly; use {one_of(legal)}"
        yield ConfigIssue(EXPERT_DEGREE, message, degree)
    else:
        yield from expert_state_problems(config, spec, model)


def expert_degrees(spec: ModelSpec, model: nn.Module) -> list[int]:
    """Return the degrees that divide the experts of every layer; [] without such experts."""
    experts: list[Any] = [model.get_submodule(name) for name in spec.experts(model)]
    return divisors(math.gcd(*(part.num_experts for part in experts))) if experts else []


def balance_problems(config: RunConfig, spec: ModelSpec, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield why experts can't be compiled or recomputed, or routers not balance them by biases."""
    described: Any = config.model
    is_included = source_of(config).code == "included" and bool(spec.experts(model))
    precision = precision_of(config)
    is_bf16 = precision.compute.is_low and not precision.needs_loss_scale
    if is_included and config.train.compile and not is_bf16:
        message = "torch compiles products of experts only in bf16; use train.precision=bf16"
        yield ConfigIssue("train.compile", message, True)
        return
    mode = config.train.activation_checkpointing
    if config.train.compile and mode != "none" and spec.most_experts(model):
        message = (
            "a compiled block would choose experts again in backward, and rounding can change the "
            "choice; use none, or train.compile=false"
        )
        yield ConfigIssue("train.activation_checkpointing", message, mode)
    with_choices: list[str] = []
    if is_included and spec.mixes_samples == "batch":
        with_choices.append("model.router_aux_loss=false")
    if balances_by_bias(described):
        problems = [*_bias_problems(config, spec, model)]
        yield from problems
        with_choices += [] if problems else ["model.balance=none"]
    if config.train.compile and with_choices:
        message = (
            "compiled blocks can't pass on the choices of their routers; use false, or "
            f"{' and '.join(with_choices)}"
        )
        yield ConfigIssue("train.compile", message, True)


def _bias_problems(config: RunConfig, spec: ModelSpec, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield why biases can't balance the experts of a model."""
    experts = spec.experts(model)
    if not experts or any(router_with_bias(model, name) is None for name in experts):
        message = (
            f"{type(model).__name__} has no routers with an {CORRECTION_BIAS}; use none, and "
            "model.router_aux_loss if it has such a loss"
        )
        yield ConfigIssue("model.balance", message, "bias")
    elif config.adapter is not None:
        message = "an exported adapter does not contain the biases of routers; use none"
        yield ConfigIssue("model.balance", message, "bias")


def state_problems(
    config: RunConfig, spec: ModelSpec, plan: Mapping[str, str], model: nn.Module
) -> Iterator[ConfigIssue]:
    """Yield a problem if the tensor axis would split blocks of optimizer states in 8 bits."""
    degree = config.strategy.tensor.degree
    if quantizes_states(config.optimizer):
        names = broken_rows(model, plan, degree=degree)
        yield from _split_blocks(config, spec, model, names, by=f"strategy.tensor.degree={degree}")


def expert_state_problems(
    config: RunConfig, spec: ModelSpec, model: nn.Module
) -> Iterator[ConfigIssue]:
    """Yield a problem if ranks of experts would split blocks of optimizer states in 8 bits."""
    degree = config.strategy.expert.degree
    if degree > 1 and quantizes_states(config.optimizer):
        shards = Layout.of(config, world_size=num_ranks(config)).ranks_along((EXPERT_SHARD,))
        experts = spec.experts(model)
        names = broken_expert_rows(model, experts, degree=degree, shards=shards)
        yield from _split_blocks(config, spec, model, names, by=f"{EXPERT_DEGREE}={degree}")


def _split_blocks(
    config: RunConfig, spec: ModelSpec, model: nn.Module, names: Iterable[str], *, by: str
) -> Iterator[ConfigIssue]:
    """Yield a problem for the first of these trained parameters that has states in 8 bits."""
    facts = parameter_facts(spec, model)
    for name in names:
        if (entry := facts.get(name)) is None:
            continue
        states = states_of(with_options(config.optimizer, entry), entry.shape).values()
        if any(state.is_packed for state in states):
            message = (
                f"{name} has rows of {entry.shape[-1]} values, and {by} shards them within blocks "
                f"of {BLOCK}; use bf16 or parameter, or a smaller degree"
            )
            yield ConfigIssue("optimizer.state_dtype", message, config.optimizer.state_dtype)
            return


def _custom_loss_problems(
    config: RunConfig, plan: dict[str, str], model: nn.Module
) -> Iterator[ConfigIssue]:
    for module in style_modules(model, plan):
        if module.style == "vocabulary" and isinstance(module.module, nn.Linear):
            message = (
                f"{module.name} would compute only a part of the logits, but the custom loss of "
                f"model={config.model.name} needs all of them; remove this setting"
            )
            yield ConfigIssue(f"strategy.tensor.plan.{module.pattern}", message, module.style)


def pipeline_problems(
    config: RunConfig, spec: ModelSpec, model: nn.Module
) -> Iterator[ConfigIssue]:
    """Yield the reasons why the model can't be split into pipeline stages."""
    pipeline = config.strategy.pipeline
    if pipeline.degree == 1:
        return
    if why := spec.refused_axes.get("pipeline"):
        yield ConfigIssue("strategy.pipeline.degree", why, pipeline.degree)
        return
    if spec.flow is not None and (why := spec.flow().problem):
        message = f"{type(model).__name__} can't be split into stages: {why}"
        yield ConfigIssue("strategy.pipeline.degree", message, pipeline.degree)
        return
    if not cuttable(spec, model):
        message = (
            f"model={config.model.name} can't be split into stages: it is not an nn.Sequential and "
            "names no ends; register it with layers= and ends="
        )
        yield ConfigIssue("strategy.pipeline.degree", message, pipeline.degree)
        return
    if missing := missing_ends(spec, model):
        children = ", ".join(name for name, _ in model.named_children())
        message = f"{type(model).__name__} has no such attribute; at its top it has {children}"
        yield ConfigIssue("model.ends", message, one_of(missing))
        return
    if names := kept_everywhere(spec, model):
        each = first_four(names)
        message = f"every stage would train a separate {each}; add the module with it to the ends"
        yield ConfigIssue("model.ends", message)
    per_rank = stages_per_rank(config.strategy)
    stages, blocks = pipeline.degree * per_rank, len(block_names(spec, model))
    if blocks < stages:
        legal = list(range(2, blocks // per_rank + 1))
        use = f"use {one_of(legal)}" if legal else "use fewer stages per rank, or no pipeline"
        message = f"the model has {blocks} blocks, too few for {stages} stages; {use}"
        yield ConfigIssue("strategy.pipeline.degree", message, pipeline.degree)
    elif pipeline.split != "auto" and sum(pipeline.split) != blocks:
        message = f"sums to {sum(pipeline.split)}, but the model has {blocks} blocks"
        yield ConfigIssue("strategy.pipeline.split", message, pipeline.split)
    for other, owner in tied_names(model).items():
        if not all(any(holds(end, name) for end in ends_of(spec)) for name in (owner, other)):
            message = f"{other} is tied to {owner}, but they may be on different stages; untie them"
            yield ConfigIssue("strategy.pipeline.degree", message, pipeline.degree)


AXIS_PROBLEMS: Mapping[str, Callable[[RunConfig, ModelSpec, nn.Module], Iterator[ConfigIssue]]] = {
    "tp": tensor_problems,
    "pp": pipeline_problems,
    "cp": context_problems,
}
"""Yields why a model cannot be sharded over an axis, by the name of the axis."""
