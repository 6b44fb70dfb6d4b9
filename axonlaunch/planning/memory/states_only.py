"""Estimates parameters, gradients and optimizer states of models that cannot be traced.

Parameters are counted and divided by the layout. The result does not include activations, messages
and temporaries; reports must say so.
"""

from __future__ import annotations

import math

from axonlaunch.config import RunConfig
from axonlaunch.config.optimization.parameter_groups import state_bytes
from axonlaunch.engines.pipeline.split import parts, stage_module
from axonlaunch.engines.pipeline.tied_weights import tied_names
from axonlaunch.models.build import spec_for
from axonlaunch.models.facts.flops import looked_up_parameters
from axonlaunch.models.facts.parameter_facts import (
    TrainingShares,
    parameter_facts,
    small_bytes,
    stored_bytes,
)
from axonlaunch.models.tensors.packed_blocks import logical_numel
from axonlaunch.planning.memory.analytic_states import moments, states
from axonlaunch.planning.records import Estimate, RankEstimate
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import CATEGORIES


def estimate_states(config: RunConfig) -> Estimate:
    """Estimate parameters, gradients and optimizer states of every rank of a run.

    Args:
        config: Checked configuration with ``launch.nproc`` resolved to the number of ranks.

    Raises:
        ConfigError: The model must be split into pipeline stages, and cannot be traced for that.
    """
    reduced = ReducedRun.of(config)
    ranks = [_rank_estimate(reduced, pp_rank) for pp_rank in range(reduced.layout.pipeline)]
    peak = max(rank.peak_bytes for rank in ranks)
    return Estimate(
        world_size=reduced.world_size,
        mesh=reduced.layout.axes,
        parameters=sum(logical_numel(p) for p in reduced.model.parameters()),
        peak_bytes=peak,
        reserved_bytes=peak,
        process_bytes=peak,
        ranks=ranks,
    )


def _rank_estimate(reduced: ReducedRun, pp_rank: int) -> RankEstimate:
    config, layout = reduced.config, reduced.layout
    spec, modules = spec_for(config), [reduced.build()]
    if layout.pipeline > 1:
        stages = parts(reduced.counts)
        modules = [
            stage_module(spec, reduced.build(), stages[n]) for n in reduced.stages_of(pp_rank)
        ]
    element = config.train.parameter_bytes
    total = sum(stored_bytes(module, element=element) for module in modules)
    blocks = [
        stored_bytes(block, element=element)
        for module in modules
        for block in spec.blocks(module).values()
    ]
    facts = parameter_facts(spec, reduced.model)
    tied = tied_names(reduced.model)
    names = [tied.get(n, n) for module in modules for n, _ in module.named_parameters()]
    trained = [facts[name] for name in names if name in facts]
    size = element if config.adapter is None else 4  # trained parameters are fp32
    gradient = config.train.gradient_bytes if config.adapter is None else size
    shares = TrainingShares(
        gradients=gradient
        * sum(math.prod(parameter.shape) for parameter in trained)
        / max(1, total),
        states=state_bytes(config.optimizer, trained, parameter_bytes=size) / max(1, total),
        small=sum(small_bytes(m, element=element) for m in modules) / max(1, total),
        looked_up=element * sum(map(looked_up_parameters, modules)) / max(1, total),
    )
    layer, ends = max(blocks, default=0), total - sum(blocks)
    bytes_by_category = states(
        moments(config, layout, total=total, layer=layer, ends=ends, shares=shares)
    )
    breakdown = {category: round(bytes_by_category.get(category, 0)) for category in CATEGORIES}
    breakdown["parameters"] += sum(b.nbytes for module in modules for b in module.buffers())
    device_bytes = sum(
        bytes_by_category[category] for category in ("parameters", "gradients", "optimizer")
    )
    host = 0.0
    if layout.facts.shards_parameters and config.strategy.fsdp.cpu_offload != "none":
        shard = total / layout.tensor / layout.parameter_shards
        host = (1 + shares.gradients + shares.states) * shard - device_bytes
    rank = pp_rank * layout.stride("pp")
    return RankEstimate(
        rank=rank,
        coords=layout.coordinates(rank),
        peak_bytes=sum(breakdown.values()),
        host_bytes=round(host),
        breakdown=breakdown,
    )
