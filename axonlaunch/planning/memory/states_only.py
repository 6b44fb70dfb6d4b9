"""What a run's parameters, gradients and optimizer states take, of a model that can't be traced.

It counts parameters and divides them; of activations, messages and temporaries it knows nothing,
and whoever shows it has to say so.
"""

from __future__ import annotations

import math

from torch import nn

from axonlaunch.config import RunConfig
from axonlaunch.config.parameter_groups import state_bytes
from axonlaunch.engines.pipeline.split import cut, parts
from axonlaunch.engines.pipeline.tied_weights import tied_names
from axonlaunch.models.build import spec_for
from axonlaunch.models.flops import looked_up_parameters
from axonlaunch.models.parameter_facts import TrainingShares, parameter_facts, small_bytes
from axonlaunch.planning.memory.analytic_states import moments, states
from axonlaunch.planning.records import Estimate, RankEstimate
from axonlaunch.planning.tracing.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import CATEGORIES


def estimate_states(config: RunConfig) -> Estimate:
    """Estimate the states of every rank of a run.

    Args:
        config: Checked, with ``launch.nproc`` resolved: the ranks of the world.

    Raises:
        ConfigError: The model is to be cut into stages, and can't be traced for that.
    """
    reduced = ReducedRun.of(config)
    ranks = [_of_rank(reduced, place) for place in range(reduced.layout.pipeline)]
    peak = max(rank.peak_bytes for rank in ranks)
    return Estimate(
        world_size=reduced.world_size,
        mesh=reduced.layout.axes,
        parameters=sum(p.numel() for p in reduced.model.parameters()),
        peak_bytes=peak,
        reserved_bytes=peak,
        process_bytes=peak,
        ranks=ranks,
    )


def _of_rank(reduced: ReducedRun, place: int) -> RankEstimate:
    config, layout = reduced.config, reduced.layout
    spec, modules = spec_for(config), [reduced.build()]
    if layout.pipeline > 1:
        stages = parts(reduced.counts)
        modules = [cut(spec, reduced.build(), stages[n]) for n in reduced.stages_of(place)]
    element = config.train.parameter_bytes
    whole = element * sum(_elements(module) for module in modules)
    blocks = [
        element * _elements(block) for module in modules for block in spec.blocks(module).values()
    ]
    facts = parameter_facts(spec, reduced.model)
    ties = tied_names(reduced.model)
    names = [ties.get(n, n) for module in modules for n, _ in module.named_parameters()]
    trained = [facts[name] for name in names if name in facts]
    size = element if config.adapter is None else 4  # what is trained beside an adapter is fp32
    shares = TrainingShares(
        gradients=size * sum(math.prod(parameter.shape) for parameter in trained) / max(1, whole),
        states=state_bytes(config.optimizer, trained, parameter_bytes=size) / max(1, whole),
        small=sum(small_bytes(m, element=element) for m in modules) / max(1, whole),
        looked_up=element * sum(map(looked_up_parameters, modules)) / max(1, whole),
    )
    layer, ends = max(blocks, default=0), whole - sum(blocks)
    bytes_of = states(moments(config, layout, whole=whole, layer=layer, ends=ends, shares=shares))
    breakdown = {category: round(bytes_of.get(category, 0)) for category in CATEGORIES}
    breakdown["parameters"] += sum(b.nbytes for module in modules for b in module.buffers())
    total = sum(bytes_of[category] for category in ("parameters", "gradients", "optimizer"))
    host = 0.0
    if layout.facts.shards_parameters and config.strategy.fsdp.cpu_offload != "none":
        shard = whole / layout.tensor / layout.parameter_shards
        host = (1 + shares.gradients + shares.states) * shard - total
    rank = place * reduced.world_size // layout.pipeline
    return RankEstimate(
        rank=rank,
        coords=layout.coordinates(rank),
        peak_bytes=sum(breakdown.values()),
        host_bytes=round(host),
        breakdown=breakdown,
    )


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
