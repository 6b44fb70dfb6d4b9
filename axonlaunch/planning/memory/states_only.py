"""What a run's parameters, gradients and optimizer states take, of a model that can't be traced.

It counts parameters and divides them; of activations, messages and temporaries it knows nothing,
and whoever shows it has to say so.
"""

from __future__ import annotations

from torch import nn

from axonlaunch.config import RunConfig
from axonlaunch.config.parameter_groups import state_share
from axonlaunch.engines.pipeline.split import cut, parts
from axonlaunch.engines.pipeline.tied_weights import tied_names
from axonlaunch.models.build import spec_for
from axonlaunch.models.parameter_facts import parameter_facts
from axonlaunch.planning.memory.analytic import states
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
    blueprint = ReducedRun.of(config)
    ranks = [_of_rank(blueprint, place) for place in range(blueprint.shares.pipeline)]
    peak = max(one.peak_bytes for one in ranks)
    return Estimate(
        world_size=blueprint.world_size,
        mesh=blueprint.shares.axes,
        parameters=sum(p.numel() for p in blueprint.model.parameters()),
        peak_bytes=peak,
        reserved_bytes=peak,
        process_bytes=peak,
        ranks=ranks,
    )


def _of_rank(blueprint: ReducedRun, place: int) -> RankEstimate:
    config, shares = blueprint.config, blueprint.shares
    spec, modules = spec_for(config.model), [blueprint.built()]
    if shares.pipeline > 1:
        stages = parts(blueprint.counts)
        modules = [cut(spec, blueprint.built(), stages[n]) for n in blueprint.stages_of(place)]
    element = config.train.parameter_bytes
    whole = sum(_elements(module) for module in modules) * element
    blocks = [
        element * _elements(block) for module in modules for block in spec.blocks(module).values()
    ]
    facts = parameter_facts(spec, blueprint.model)
    ties = tied_names(blueprint.model)
    names = [ties.get(n, n) for module in modules for n, _ in module.named_parameters()]
    share = state_share(
        config.optimizer, [facts[name] for name in names if name in facts], parameter_bytes=element
    )
    held = states(
        config,
        shares,
        whole=whole,
        layer=max(blocks, default=0),
        ends=whole - sum(blocks),
        state_share=share,
    )
    breakdown = {category: round(held.get(category, 0)) for category in CATEGORIES}
    breakdown["parameters"] += sum(b.nbytes for module in modules for b in module.buffers())
    kept = sum(held[category] for category in ("parameters", "gradients", "optimizer"))
    host = 0.0
    if shares.facts.shards_parameters and config.strategy.fsdp.cpu_offload != "none":
        shard = whole / shares.tensor / shares.parameter_shards
        host = (2 + share) * shard - kept
    rank = place * blueprint.world_size // shares.pipeline
    return RankEstimate(
        rank=rank,
        coords=shares.coordinates(rank),
        peak_bytes=sum(breakdown.values()),
        host_bytes=round(host),
        breakdown=breakdown,
    )


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
