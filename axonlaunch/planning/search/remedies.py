"""The smallest changes that make a run fit its devices, each with what it costs.

Of one setting, then of two and three together, it takes those that may fit by analytic formulas, in
a fixed order of cost, and has each estimated until its time is over. It refuses nothing: what can't
be run is passed over, and so is what needs more host memory than there is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from axonlaunch.config import ConfigError, RunConfig, to_tree, type_config, with_values
from axonlaunch.config.errors import plain
from axonlaunch.config.layout import Layout, estimated_on, num_ranks
from axonlaunch.models.build import spec_for
from axonlaunch.planning.records import Estimate, Remedy
from axonlaunch.planning.search.workload import host_memory

Settings = Mapping[str, Any]

MOST = 3
TOGETHER = 3
"""Settings that are changed at once, at most."""
TRACED = 8
"""Changes that are estimated, at most: a person waits."""

_SHARDING = "strategy.fsdp.sharding"
_LIKELY = 1.15
"""Times the memory of a device that formulas may find at most: they are not right to the byte."""


@dataclass(frozen=True)
class Option:
    """One setting changed.

    Attributes:
        settings: Dotted keys and values.
        cost: What it costs, in words.
    """

    settings: Settings
    cost: str


Options = Sequence[Option]
"""One thing to change, by more and more."""


def candidate_changes(config: RunConfig) -> list[Options]:
    """Return what could be changed, in the order of what it costs.

    Args:
        config: With ``launch.nproc`` resolved.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    return [
        _micro_batches(layout),
        _recomputing(config),
        _sharding(config, layout),
        _sequence_parallel(config),
        _tensor(config, layout),
        _pipeline(config, layout),
        _offload(config, layout),
    ]


def search_changes(
    config: RunConfig,
    now: Estimate,
    *,
    memory: float,
    formula: Callable[[RunConfig], float],
    estimate: Callable[[RunConfig], Estimate | None],
    is_over: Callable[[], bool] = lambda: False,
) -> Generator[Remedy, None, int]:
    """Yield up to three changes after which a run fits, the cheapest first, as they are found.

    Args:
        config: Of a run that does not fit, with ``launch.nproc`` resolved.
        now: Its estimate.
        memory: Bytes of a device that a run may be estimated to take.
        formula: The bytes of the highest rank of a changed configuration, about.
        estimate: Of a changed configuration; None where it is seen early not to fit; raises
            ``ConfigError`` where it can't be run, ``TimeoutError`` where the time is over.
        is_over: Whether no more is to be estimated.

    Returns:
        How many changes may fit and were not estimated when the time was over.
    """
    fitting: list[set[int]] = []
    traced = untried = 0
    # Formulas are judged by themselves and by how far they are off where the answer is known.
    off = min(1.0, now.process_bytes / formula(config))
    for which, change in _likely(
        config, memory=memory, formula=lambda changed: off * formula(changed)
    ):
        if len(fitting) == MOST or traced + untried == TRACED:
            break
        if any(fewer <= set(which) for fewer in fitting):
            continue
        if untried or is_over():
            untried += 1
            continue
        try:
            altered = changed(config, change.settings)
            after = estimate(altered)
        except ConfigError:
            continue
        except TimeoutError:
            untried += 1
            continue
        traced += 1
        if after is None or after.process_bytes > memory:
            continue
        host = host_memory(altered, after)
        if host is not None and host.fits is False:
            continue
        fitting.append(set(which))
        overrides = [f"{key}={plain(value)}" for key, value in change.settings.items()]
        yield Remedy(overrides, change.costs, after.process_bytes, host)
    return untried


@dataclass(frozen=True)
class _Change:
    """Some settings changed together, and what each costs."""

    settings: Settings
    costs: list[str]


def _likely(
    config: RunConfig, *, memory: float, formula: Callable[[RunConfig], float]
) -> list[tuple[tuple[int, ...], _Change]]:
    """Return which changes are made how far, of those that may fit, in the order to try them.

    Those that fit by the formulas come first, the cheapest of them before the others; those that
    don't by little come last, for most of their traces would be in vain.
    """
    changes: list[tuple[tuple[int, ...], _Change]] = []
    last: list[tuple[tuple[int, ...], _Change]] = []
    for which, options in _candidates(candidate_changes(config)):
        settings = {key: value for option in options for key, value in option.settings.items()}
        num_bytes = formula(with_values(config, settings))
        if num_bytes <= _LIKELY * memory:
            members = changes if num_bytes <= memory else last
            members.append((which, _Change(settings, [option.cost for option in options])))
    return changes + last


def _candidates(
    available: Sequence[Options],
) -> Iterator[tuple[tuple[int, ...], tuple[Option, ...]]]:
    """Yield which changes are made, and how far: the fewest first, of as many the least."""
    for count in range(1, TOGETHER + 1):
        for which in combinations(range(len(available)), count):
            ways = product(*(enumerate(available[index]) for index in which))
            for way in sorted(ways, key=lambda way: sum(far for far, _ in way)):
                yield which, tuple(option for _, option in way)


def changed(config: RunConfig, settings: Settings) -> RunConfig:
    """Return a configuration with some settings changed.

    Raises:
        ConfigError: They don't go together.
    """
    return type_config(to_tree(with_values(config, settings)))


def _micro_batches(layout: Layout) -> Options:
    options = []
    size, count = layout.micro_batch_size, layout.micro_batches
    while size % 2 == 0:
        size, count = size // 2, count * 2
        cost = f"{count} smaller micro-batches: smaller matrix products, as much compute"
        options.append(Option({"train.micro_batch_size": size}, cost))
    return options


def _recomputing(config: RunConfig) -> Options:
    """Backward computes twice what forward does: Kaplan et al., 2020, section 2.1."""
    key, now = "train.activation_checkpointing", config.train.activation_checkpointing
    options = [
        Option(
            {key: "selective"},
            "recomputes every second matrix product of the forward: about 1/6 more compute",
        ),
        Option({key: "full"}, "recomputes the forward: about 1/3 more compute"),
    ]
    return options[("none", "selective", "full").index(now) :]


def _sharding(config: RunConfig, layout: Layout) -> Options:
    """Traffic beside that of replicas: Rajbhandari et al., "ZeRO", 2020, section 7.

    Shards are summed in every micro-batch, replicas and ZeRO-1's gradients once a step.
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
    after = {"no_shard": 1, "shard_grad_op": 2, "hybrid_shard": 2, "full_shard": 3}
    return options[after[config.strategy.fsdp.sharding] :]


def _traffic(times: float) -> str:
    return "as much traffic as replicas" if times == 1 else f"{times:g} times replicas' traffic"


def _sequence_parallel(config: RunConfig) -> Options:
    """Source: Korthikanti et al., 2022, section 4.2.2."""
    tensor = config.strategy.tensor
    can_divide = tensor.plan or spec_for(config).sequence_parallel
    if tensor.degree == 1 or tensor.sequence_parallel or not can_divide:
        return []
    cost = "an all-gather and a reduce-scatter for each all-reduce: as much traffic"
    return [Option({"strategy.tensor.sequence_parallel": True}, cost)]


def _tensor(config: RunConfig, layout: Layout) -> Options:
    """Source: Shoeybi et al., "Megatron-LM", 2019, section 3.

    What it does not divide, sequence parallelism does, for as much traffic.
    """
    cost = "4 all-reduces of activations more per layer and micro-batch"
    more: Settings = {}
    if layout.tensor > 1:
        cost = "smaller matrix products between as many all-reduces, over more ranks"
    elif spec_for(config).sequence_parallel:
        cost = f"all-gathers and reduce-scatters: as much as {cost}"
        more = {"strategy.tensor.sequence_parallel": True}
    return [
        Option(
            {"strategy.tensor.degree": degree, **more, **_same_micro_batch(config, layout)}, cost
        )
        for degree in _larger_degrees(layout.tensor, layout)
    ]


def _pipeline(config: RunConfig, layout: Layout) -> Options:
    """Ranks are idle for (p - 1) / (v m + p - 1): Narayanan et al., 2021, section 2.2."""
    options = []
    for degree in _larger_degrees(layout.pipeline, layout):
        settings = {"strategy.pipeline.degree": degree, **_same_micro_batch(config, layout)}
        try:
            new = Layout.of(changed(config, settings), world_size=num_ranks(config))
        except ConfigError:
            continue
        idle = (degree - 1) / (new.stages_per_rank * new.microbatches_per_round + degree - 1)
        cost = f"ranks wait {idle:.0%} of a step for each other"
        options.append(Option(settings, cost))
    return options


def _offload(config: RunConfig, layout: Layout) -> Options:
    """What crosses the link to the host: Ren et al., "ZeRO-Offload", 2021, section 4."""
    if estimated_on(config) != "gpu":
        return []  # host and device are one memory
    key, now = "strategy.fsdp.cpu_offload", config.strategy.fsdp.cpu_offload
    costs = {
        "params": "parameters and gradients cross the link to host memory every step",
        "optimizer_states": "optimizer states cross the link to host memory both ways every step",
        "full": "parameters and gradients cross the link to host memory, whose cores do the update",
    }
    if not layout.facts.shards_parameters:
        if layout.data_ranks == 1:
            return []
        before: Settings = {"strategy.data_parallel": "fsdp", _SHARDING: "full_shard"}
        return [
            Option({**before, key: value}, f"parameters are sharded, and {cost}")
            for value, cost in costs.items()
        ]
    left = {"none": [*costs], "full": []}.get(now, ["full"])
    return [Option({key: value}, costs[value]) for value in left]


def _same_micro_batch(config: RunConfig, layout: Layout) -> Settings:
    """A rank's share of the batch grows with fewer data-parallel ranks; what it holds must not."""
    is_set = config.train.micro_batch_size != "auto"
    return {} if is_set else {"train.micro_batch_size": layout.micro_batch_size}


def _larger_degrees(degree: int, layout: Layout) -> list[int]:
    """Return degrees that data-parallel ranks can be turned into."""
    doubled, left = [], layout.data_ranks
    while left % 2 == 0:
        degree, left = degree * 2, left // 2
        doubled.append(degree)
    return doubled
