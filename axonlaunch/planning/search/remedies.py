"""Searches for the smallest changes that make a run fit its devices, with their costs.

Changes of one setting come first, then of two and three settings, in a fixed order of cost. Those
that may fit according to formulas are estimated until the time limit. Changes that cannot be run,
or need more host memory than available, are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from axonlaunch.config import ConfigError, RunConfig, to_tree, type_config, with_values
from axonlaunch.config.consistency.layout import Layout, estimate_device, num_ranks
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.config.optimization.optimizer import INCLUDED_OPTIMIZERS, OPTIMIZERS
from axonlaunch.config.precision import EIGHT_BITS, SIXTEEN_BITS
from axonlaunch.config.problems.errors import divisors, plain
from axonlaunch.models.build import spec_for
from axonlaunch.planning.records import Estimate, Remedy
from axonlaunch.planning.reports.workload import host_memory
from axonlaunch.planning.search import keys
from axonlaunch.planning.search.low_precision import master_settings

Settings = Mapping[str, Any]

MOST = 3
"""Maximum number of suggested changes."""
TOGETHER = 3
"""Maximum number of settings in one change."""
TRACED = 8
"""Maximum number of changes to estimate, because the user is waiting."""

_SHARDING = "strategy.fsdp.sharding"
_TOLERANCE = 1.15
"""Changes that need more than this multiple of device memory by the formulas are skipped."""


@dataclass(frozen=True)
class Option:
    """A value for one setting that may make a run fit.

    Attributes:
        settings: New values by dotted key.
        cost: Description of the cost, such as slower steps.
    """

    settings: Settings
    cost: str


Options = Sequence[Option]
"""Options for one setting, from the smallest to the largest change."""


def candidate_changes(config: RunConfig) -> list[Options]:
    """Return the possible changes, in the order of their cost.

    Args:
        config: Configuration with ``launch.nproc`` resolved.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    return [
        _micro_batches(layout),
        _recomputing(config),
        _loss_chunk(config, layout),
        _experts(layout),
        _sharding(config, layout),
        _sequence_parallel(config),
        _tensor(config, layout),
        _pipeline(config, layout),
        _offload(config, layout),
        _update_in_backward(config, layout),
        _quantized_base(config),
        _masters(config, layout),
        _states(config),
    ]


def search_changes(
    config: RunConfig,
    current: Estimate,
    *,
    memory: float,
    formula: Callable[[RunConfig], float],
    estimate: Callable[[RunConfig], Estimate | None],
    is_over: Callable[[], bool] = lambda: False,
) -> Generator[Remedy, None, list[str]]:
    """Yield up to three changes after which a run fits, the cheapest first, while searching.

    Args:
        config: Configuration of a run that does not fit, with ``launch.nproc`` resolved.
        current: Estimate of that run.
        memory: Bytes of device memory that an estimate may use.
        formula: Returns the approximate bytes of the highest rank of a changed configuration.
        estimate: Estimates a changed configuration. Returns None if it does not fit. Raises
            ``ConfigError`` if it cannot be run, and ``TimeoutError`` after the time limit.
        is_over: Returns whether the time limit has passed.

    Returns:
        Overrides of the changes that may fit but were not estimated before the time limit.
    """
    fitting: list[set[int]] = []
    traced, untried = 0, list[str]()
    # If the formula is too high for the current run, correct it by the same factor elsewhere.
    correction = min(1.0, current.process_bytes / formula(config))
    for indices, change in _likely_changes(
        config, memory=memory, formula=lambda changed: correction * formula(changed)
    ):
        if len(fitting) == MOST or traced + len(untried) == TRACED:
            break
        if any(fewer <= set(indices) for fewer in fitting):
            continue
        overrides = [f"{key}={plain(value)}" for key, value in change.settings.items()]
        if untried or is_over():
            untried.append(" ".join(overrides))
            continue
        try:
            changed_config = changed(config, change.settings)
            result = estimate(changed_config)
        except ConfigError:
            continue
        except TimeoutError:
            untried.append(" ".join(overrides))
            continue
        traced += 1
        if result is None or result.process_bytes > memory:
            continue
        host = host_memory(changed_config, result)
        if host is not None and host.fits is False:
            continue
        fitting.append(set(indices))
        yield Remedy(overrides, change.costs, result.process_bytes, host)
    return untried


@dataclass(frozen=True)
class _Change:
    """Settings that are changed together, with their costs."""

    settings: Settings
    costs: list[str]


def _likely_changes(
    config: RunConfig, *, memory: float, formula: Callable[[RunConfig], float]
) -> list[tuple[tuple[int, ...], _Change]]:
    """Return the changes that may fit, in the order in which to try them.

    Changes that fit according to the formulas come first, ordered by cost. Changes that exceed the
    memory by less than the tolerance come last, because most of them do not fit.

    Returns:
        Pairs of the indices of the changed settings and the change.
    """
    changes: list[tuple[tuple[int, ...], _Change]] = []
    unlikely: list[tuple[tuple[int, ...], _Change]] = []
    for indices, options in _candidates(candidate_changes(config)):
        settings = {key: value for option in options for key, value in option.settings.items()}
        num_bytes = formula(with_values(config, settings))
        if num_bytes <= _TOLERANCE * memory:
            target = changes if num_bytes <= memory else unlikely
            target.append((indices, _Change(settings, [option.cost for option in options])))
    return changes + unlikely


def _candidates(
    available: Sequence[Options],
) -> Iterator[tuple[tuple[int, ...], tuple[Option, ...]]]:
    """Yield combinations of options, with fewer settings first, then with smaller changes first."""
    for count in range(1, TOGETHER + 1):
        for indices in combinations(range(len(available)), count):
            choices = product(*(enumerate(available[index]) for index in indices))
            for choice in sorted(choices, key=lambda choice: sum(amount for amount, _ in choice)):
                yield indices, tuple(option for _, option in choice)


def changed(config: RunConfig, settings: Settings) -> RunConfig:
    """Return a configuration with some settings changed.

    Raises:
        ConfigError: The settings are invalid together.
    """
    return type_config(to_tree(with_values(config, settings)))


def _micro_batches(layout: Layout) -> Options:
    options = []
    size, count = layout.micro_batch_size, layout.micro_batches
    while size % 2 == 0:
        size, count = size // 2, count * 2
        cost = f"{count} smaller micro-batches: smaller matrix products, the same compute"
        options.append(Option({"train.micro_batch_size": size}, cost))
    return options


def _recomputing(config: RunConfig) -> Options:
    """Return options to recompute more.

    Backward needs twice the compute of forward: Kaplan et al., 2020, section 2.1.
    """
    key, current = "train.activation_checkpointing", config.train.activation_checkpointing
    selective = "recomputes every second matrix product of the forward: about 1/6 more compute"
    full = "recomputes the forward: about 1/3 more compute"
    crossing = "inputs of blocks cross the link to host memory"
    costs = {
        "selective": selective,
        "selective_offload": f"{selective}; {crossing}",
        "full": full,
        "offload": f"{full}; {crossing}",
    }
    modes = [*costs]
    remaining = modes[modes.index(current) + 1 :] if current in costs else modes
    if estimate_device(config) != "gpu":  # host and device are one memory
        remaining = [mode for mode in remaining if not mode.endswith("offload")]
    return [Option({key: mode}, costs[mode]) for mode in remaining]


def _loss_chunk(config: RunConfig, layout: Layout) -> Options:
    """Return the option to compute the head and the loss for some tokens at a time."""
    train, length = config.train, config.sequence_length
    if train.defers_head or train.loss or length is None or spec_for(config).head is None:
        return []
    if length * layout.micro_batch_size // layout.divisor("sequences") <= keys.CHUNK:
        return []
    return [Option({keys.LOSS_CHUNK: keys.CHUNK}, "recomputes the head, without most logits")]


def _sharding(config: RunConfig, layout: Layout) -> Options:
    """Return options to shard more, with their traffic compared with replicas.

    Sharded gradients are reduced in every micro-batch, those of replicas and ZeRO-1 once per step.

    Source: Rajbhandari et al., "ZeRO", 2020, section 7.
    """
    if layout.data_ranks == 1:
        return []
    kind, sharding = "strategy.data_parallel", _SHARDING
    count = layout.micro_batches
    options = [
        Option({kind: "zero1"}, f"gathers updated parameters: {_traffic(1)}"),
        Option(
            {kind: "fsdp", sharding: "shard_grad_op"},
            f"gathers parameters for every micro-batch: {_traffic(count)}",
        ),
        Option(
            {kind: "fsdp", sharding: "full_shard"},
            f"gathers parameters in every forward and backward: {_traffic(1.5 * count)}",
        ),
    ]
    if not layout.facts.shards_parameters:
        return options[int(layout.facts.shards_optimizer) :]
    next_option = {"no_shard": 1, "shard_grad_op": 2, "hybrid_shard": 2, "full_shard": 3}
    return options[next_option[config.strategy.fsdp.sharding] :]


def _experts(layout: Layout) -> Options:
    """Return options to divide experts among fewer ranks, which limits the load of each rank.

    See ``tracing.fake_world.assume_routes``.
    """
    key, degree = "strategy.expert.degree", layout.expert
    smaller = [n for n in divisors(degree) if n < degree and n % layout.tensor == 0]
    cost = "tokens are exchanged among fewer ranks, which gather more experts"
    return [Option({key: n}, cost) for n in reversed(smaller) if n > 1]


def _traffic(times: float) -> str:
    return "as much traffic as replicas" if times == 1 else f"{times:g} times replicas' traffic"


def _sequence_parallel(config: RunConfig) -> Options:
    """Return the option of sequence parallelism.

    Source: Korthikanti et al., 2022, section 4.2.2.
    """
    tensor = config.strategy.tensor
    if tensor.degree == 1 or tensor.sequence_parallel or not _divides_hidden_states(config):
        return []
    cost = (
        "an all-gather and a reduce-scatter for each all-reduce: as much traffic, and more of it "
        "for modules that need full sequences"
    )
    return [Option({"strategy.tensor.sequence_parallel": True}, cost)]


def _divides_hidden_states(config: RunConfig) -> bool:
    has_plan = bool(config.strategy.tensor.plan)
    return has_plan or not spec_for(config).no_sequence_parallelism()


def _tensor(config: RunConfig, layout: Layout) -> Options:
    """Return options of larger tensor degrees.

    Sequence parallelism divides the remaining activations, with the same traffic.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """
    cost = "4 more all-reduces of activations per layer and micro-batch"
    more: Settings = {}
    if layout.tensor > 1:
        cost = "smaller matrix products, and the same all-reduces over more ranks"
    elif _divides_hidden_states(config):
        cost = f"all-gathers and reduce-scatters: as much as {cost}"
        more = {"strategy.tensor.sequence_parallel": True}
    return [
        Option(
            {"strategy.tensor.degree": degree, **more, **_same_micro_batch(config, layout)}, cost
        )
        for degree in _larger_degrees(layout.tensor, layout)
    ]


def _pipeline(config: RunConfig, layout: Layout) -> Options:
    """Return options of larger pipeline degrees.

    Ranks are idle for (p - 1) / (v m + p - 1) of a step: Narayanan et al., 2021, section 2.2.
    """
    options = []
    for degree in _larger_degrees(layout.pipeline, layout):
        settings = {"strategy.pipeline.degree": degree, **_same_micro_batch(config, layout)}
        try:
            new_layout = Layout.of(changed(config, settings), world_size=num_ranks(config))
        except ConfigError:
            continue
        idle = (degree - 1) / (
            new_layout.stages_per_rank * new_layout.microbatches_per_round + degree - 1
        )
        cost = f"ranks wait {idle:.0%} of a step for each other"
        options.append(Option(settings, cost))
    return options


def _offload(config: RunConfig, layout: Layout) -> Options:
    """Return options to offload to host memory.

    Source: Ren et al., "ZeRO-Offload", 2021, section 4.
    """
    if estimate_device(config) != "gpu":
        return []  # host and device are one memory
    key, current = "strategy.fsdp.cpu_offload", config.strategy.fsdp.cpu_offload
    costs = {
        "params": "parameters and gradients cross the link to host memory every step",
        "optimizer_states": "optimizer states cross the link to host memory both ways every step",
        "full": "parameters and gradients cross the link to host memory, and the host updates them",
    }
    if not layout.facts.shards_parameters:
        sharded: Settings = {"strategy.data_parallel": "fsdp", _SHARDING: "full_shard"}
        shards = "parameters are sharded, and " if layout.data_ranks > 1 else ""
        return [Option({**sharded, key: value}, f"{shards}{cost}") for value, cost in costs.items()]
    remaining = {"none": [*costs], "full": []}.get(current, ["full"])
    return [Option({key: value}, costs[value]) for value in remaining]


def _quantized_base(config: RunConfig) -> Options:
    """Return options to store the frozen weights of a run with an adapter in fewer bits.

    The changes of 0.6% and 9% were computed for normally distributed weights.
    """
    if config.adapter is None or config.adapter.base == "nf4":
        return []
    precision = precision_of(config)
    rounded = []
    if precision.compute.is_low and not precision.parameters.is_low:
        name = precision.compute.name
        cost = f"stores frozen weights in {name}, to which matrix products round them anyway"
        rounded = [Option({"train.param_dtype": name}, cost)]
    options = {
        "int8": "stores frozen weights in 8.5 bits: they change by about 0.6%",
        "nf4": "stores frozen weights in 4.5 bits: they change by about 9%",
    }
    remaining = ["int8", "nf4"] if config.adapter.base is None else ["nf4"]
    return rounded + [Option({"adapter.base": base}, options[base]) for base in remaining]


def _update_in_backward(config: RunConfig, layout: Layout) -> Options:
    """Return the option to update parameters in backward, which frees their gradients."""
    train, facts = config.train, layout.facts
    keeps_until_end = layout.pipeline > 1 or layout.micro_batches > 1
    keeps_until_end |= facts.averages != "nothing" and not facts.shards_parameters
    if train.optimizer_in_backward or keeps_until_end or not _updates_elements(config):
        return []
    settings: Settings = {"train.optimizer_in_backward": True}
    cost = "an update has kernels of its own for each parameter"
    if train.grad_clip is not None:
        settings, cost = {**settings, "train.grad_clip": None}, f"gradients are not clipped; {cost}"
    return [Option(settings, cost)]


def _masters(config: RunConfig, layout: Layout) -> Options:
    """Return the option to store weights in 16 bits, with masters that are divided like states.

    With full weights on every rank it saves memory from two ranks on, and with shards nothing.
    """
    settings = master_settings(config)
    divides = layout.facts.divides_update and layout.optimizer_shards > 1
    if not settings or not divides or not _updates_elements(config):
        return []
    name = precision_of(config).compute.name
    return [Option(settings, f"gradients round to {name} between micro-batches and in sums")]


def _states(config: RunConfig) -> Options:
    """Return options to store optimizer states in fewer bits.

    The difference in 8 bits is that of normally distributed states.
    """
    current = getattr(config.optimizer, "state_dtype", None)
    if current is None or not _updates_elements(config):
        return []
    costs = {
        SIXTEEN_BITS: "optimizer states round to 16 bits, up or down at random",
        EIGHT_BITS: "optimizer states round to 8 bits: they change by about 1%",
    }
    remaining = [*costs][[*costs].index(current) + 1 :] if current in costs else [*costs]
    return [Option({"optimizer.state_dtype": name}, costs[name]) for name in remaining]


def _updates_elements(config: RunConfig) -> bool:
    """Return whether weights are trained by an included optimizer that can update in fp32."""
    name = config.optimizer.name
    is_included = name in INCLUDED_OPTIMIZERS and OPTIMIZERS.facts(name).sharding == "elementwise"
    return is_included and config.adapter is None


def _same_micro_batch(config: RunConfig, layout: Layout) -> Settings:
    """Return the setting that keeps the micro-batch size with fewer data-parallel ranks."""
    is_set = config.train.micro_batch_size != "auto"
    return {} if is_set else {"train.micro_batch_size": layout.micro_batch_size}


def _larger_degrees(degree: int, layout: Layout) -> list[int]:
    """Return ``degree`` times 2, 4, 8, ... while the data-parallel size stays divisible."""
    degrees, remaining = [], layout.data_ranks
    while remaining % 2 == 0:
        degree, remaining = degree * 2, remaining // 2
        degrees.append(degree)
    return degrees
