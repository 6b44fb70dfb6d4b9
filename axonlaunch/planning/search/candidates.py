"""The layouts that a model, a number of devices and a batch allow, as settings to paste.

It lists what divides evenly and lies in the usual reach: tensor parallelism inside a node, whole
blocks in each stage, micro-batches of powers of two. It says nothing of memory or speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from axonlaunch.config import RunConfig
from axonlaunch.config.data_parallel import DATA_PARALLEL
from axonlaunch.config.errors import divisors
from axonlaunch.config.layout import Layout, of_ranks
from axonlaunch.config.plain import with_values
from axonlaunch.config.schedule_rules import SCHEDULES
from axonlaunch.models.figures import ModelFigures, model_figures
from axonlaunch.preflight.optimizer import layout_problems

_SCHEDULES = ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")
_MOST_STAGES = 32
_SHARDINGS = ("full_shard", "shard_grad_op", "hybrid_shard")
_LONG = 32_768
"""Positions of a sequence from which a ring of ranks is worth its merges, samples or not."""
_CONTEXT = "strategy.context.degree"
_KIND = "strategy.data_parallel"
_OFFLOAD = "strategy.fsdp.cpu_offload"
_OFFLOADED = ("none", "optimizer_states", "params")
_RECOMPUTE = "train.activation_checkpointing"
_RECOMPUTATION = ("none", "selective", "full")

SEARCHED = (
    "strategy.data_parallel",
    "strategy.fsdp.sharding",
    "strategy.fsdp.replicate",
    _OFFLOAD,
    "strategy.tensor.degree",
    "strategy.tensor.sequence_parallel",
    _CONTEXT,
    "strategy.pipeline.degree",
    "strategy.pipeline.schedule",
    "train.micro_batch_size",
    _RECOMPUTE,
)
"""Keys that a search sets; one that the user has set stays as it is."""


@dataclass(frozen=True)
class Candidate:
    """One layout.

    Attributes:
        config: The whole run.
        layout: Its layout.
        settings: What it sets, by dotted key.
    """

    config: RunConfig
    layout: Layout
    settings: Mapping[str, Any]

    @property
    def family(self) -> tuple[Any, ...]:
        """Return what it shares with candidates that recompute or offload more or less."""
        return tuple(v for k, v in self.settings.items() if k not in (_RECOMPUTE, _OFFLOAD))

    @property
    def offload(self) -> str:
        """Return what it keeps in host memory."""
        return str(self.settings.get(_OFFLOAD, "none"))


def candidates(
    config: RunConfig,
    *,
    devices: int,
    in_node: int,
    fixed: Mapping[str, Any],
    offloads: bool = False,
) -> Iterator[Candidate]:
    """Yield every layout worth a look.

    Args:
        config: The run, but for its layout.
        devices: Ranks.
        in_node: Devices of a node.
        fixed: What the user has set of ``SEARCHED``.
        offloads: Whether a device has a host whose memory it could use.
    """
    batch, figures = config.train.global_batch_size, model_figures(config.model)
    for tensor, pipeline, context in _degrees(
        config, figures, devices=devices, in_node=in_node, context=fixed.get(_CONTEXT)
    ):
        ranks = devices // (tensor * pipeline * context)
        if batch % ranks:
            continue
        for schedule, parallel, size, recompute in itertools.product(
            _SCHEDULES if pipeline > 1 else ("1f1b",),
            _kinds(
                ranks * context,
                in_node=max(1, in_node // tensor),
                offloads=offloads,
                chosen=fixed.get(_KIND),
            ),
            _powers(batch // ranks),
            _RECOMPUTATION,
        ):
            if not _fits(figures.num_blocks, schedule, pipeline, batch // ranks // size):
                continue
            if SCHEDULES[schedule].separate_weight_grad and recompute != "none":
                continue  # both halves of a backward would recompute
            settings = {
                **parallel,
                "strategy.tensor.degree": tensor,
                "strategy.tensor.sequence_parallel": tensor > 1 and takes_sequences(config),
                _CONTEXT: context,
                "strategy.pipeline.degree": pipeline,
                "strategy.pipeline.schedule": schedule,
                "train.micro_batch_size": size,
                _RECOMPUTE: recompute,
            }
            if all(settings.get(key, value) == value for key, value in fixed.items()):
                made = with_values(config, {**settings, **of_ranks(devices)})
                layout = Layout.of(made, world_size=devices)
                if not any(layout_problems(made, layout)):
                    yield Candidate(made, layout, settings)


def _degrees(
    config: RunConfig, figures: ModelFigures, *, devices: int, in_node: int, context: int | None
) -> Iterator[tuple[int, int, int]]:
    heads = figures.num_attention_heads  # without any, none are divided
    shared, depth = figures.num_key_value_heads, max(1, figures.num_blocks)
    length = getattr(config.data, "sequence_length", 1)
    batch, contexts = config.train.global_batch_size, [1]
    if context is not None:
        contexts = [context]
    elif takes_sequences(config):
        contexts = _powers(in_node)
    for tensor, pipeline, around in itertools.product(
        _powers(in_node), divisors(devices), contexts
    ):
        if devices % (tensor * pipeline * around) or pipeline > min(depth, _MOST_STAGES):
            continue
        if heads % tensor or shared % tensor:
            continue
        if around > 1:
            if length % (2 * around * tensor) or config.train.compile:
                continue
            if context is None and length < _LONG and devices // (tensor * pipeline) <= batch:
                continue  # its merges cost, and there are samples for everyone
        yield tensor, pipeline, around


def takes_sequences(config: RunConfig) -> bool:
    """Say whether a model's sequences can be divided over ranks."""
    return config.model.name in ("gpt", "llama")


def _kinds(
    ranks: int, *, in_node: int, offloads: bool, chosen: str | None
) -> Iterator[dict[str, Any]]:
    """Yield what the data-parallel ranks can do.

    Args:
        ranks: How many there are.
        in_node: How many of them are on a node.
        offloads: Whether what is sharded may be kept in host memory.
        chosen: The variant that the user has set, which alone need not be exact; None: none is.
    """
    for name, facts in DATA_PARALLEL.known_facts().items():
        if (facts.averages == "nothing") != (ranks == 1) or not (facts.is_exact or name == chosen):
            continue
        if facts.shards_parameters:
            yield from _sharded(name, ranks, in_node=in_node, offloads=offloads)
        else:
            yield {_KIND: name}


def _sharded(kind: str, ranks: int, *, in_node: int, offloads: bool) -> Iterator[dict[str, Any]]:
    for sharding, offload in itertools.product(_SHARDINGS, _OFFLOADED if offloads else ("none",)):
        settings = {_KIND: kind, "strategy.fsdp.sharding": sharding, _OFFLOAD: offload}
        if sharding != "hybrid_shard":
            yield settings
        elif ranks > in_node > 1 and ranks % in_node == 0:
            yield settings | {"strategy.fsdp.replicate": ranks // in_node}


def _fits(num_blocks: int, schedule: str, pipeline: int, micro_batches: int) -> bool:
    if pipeline == 1:
        return True
    rule = SCHEDULES[schedule]
    stages = pipeline * rule.stages_per_rank
    return stages <= num_blocks and rule.fits(
        micro_batches, degree=pipeline, stages_per_rank=rule.stages_per_rank
    )


def _powers(most: int) -> list[int]:
    """Return the powers of two that divide a number."""
    powers = [1]
    while most % (2 * powers[-1]) == 0:
        powers.append(2 * powers[-1])
    return powers
