"""Describes an estimated layout as a plain record, with the overrides that select it."""

from __future__ import annotations

from axonlaunch.config import RunConfig, flatten
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.config.options.hardware import GIB
from axonlaunch.config.problems.errors import plain
from axonlaunch.models.facts.parameter_facts import checkpoint_bytes
from axonlaunch.planning.records import (
    Estimate,
    FitVerdict,
    Planned,
    describe_recomputation,
    verdict,
)
from axonlaunch.planning.reports.workload import host_memory
from axonlaunch.planning.search import keys
from axonlaunch.planning.search.candidates import Candidate
from axonlaunch.planning.throughput.roofline import figure
from axonlaunch.planning.throughput.throughput import Throughput


def planned_layout(
    candidate: Candidate,
    speed: Throughput,
    result: Estimate,
    *,
    config: RunConfig,
    nodes: RunNodes,
) -> Planned:
    """Return the record of an estimated layout.

    Args:
        candidate: Settings of the layout.
        speed: Predicted speed of the layout.
        result: Memory estimate of the layout.
        config: Configuration of the run as given by the user.
        nodes: Nodes of the run.
    """
    return Planned(
        overrides=_overrides(config, candidate, nodes),
        layout=_describe(candidate),
        mesh=candidate.layout.axes,
        peak_bytes=result.peak_bytes,
        host_bytes=result.host_bytes,
        process_bytes=result.process_bytes,
        verdict=_verdict(result, config),
        tokens_per_s_per_device=speed.tokens_per_s_per_device,
        step_s=speed.step_s,
        rank_factor=candidate.rank_factor,
        mfu=speed.mfu,
        breakdown=speed.breakdown,
        host_memory=host_memory(candidate.config, result),
        saved_bytes=checkpoint_bytes(candidate.config),
        numerics=[*candidate.numerics],
    )


def _verdict(estimate: Estimate, config: RunConfig) -> FitVerdict:
    assert config.hardware is not None
    memory = figure(config.hardware, "memory_gib") * GIB
    return verdict(estimate.process_bytes, memory=memory, margin=config.estimate.margin)


def _describe(candidate: Candidate) -> str:
    """Describe a layout, including settings that its axes do not show."""
    config, layout = candidate.config, candidate.layout
    properties = [str(layout)]
    if config.strategy.pipeline.stages_per_rank != "auto" and layout.pipeline > 1:
        properties.append(f"{layout.stages_per_rank} stages per rank")
    if layout.facts.shards_parameters and config.strategy.fsdp.sharding == "shard_grad_op":
        properties.append("shard_grad_op")
    if candidate.offload != "none":
        properties.append(f"{candidate.offload.replace('_', ' ')} offloaded")
    properties.append(f"micro-batch {layout.micro_batch_size}")
    if config.train.activation_checkpointing != "none":
        properties.append(describe_recomputation(config.train.activation_checkpointing))
    if (chunk := candidate.settings[keys.LOSS_CHUNK]) is not None:
        properties.append(f"loss in chunks of {chunk:,} tokens")
    properties += candidate.numerics
    return ", ".join(properties)


def _overrides(config: RunConfig, candidate: Candidate, nodes: RunNodes) -> list[str]:
    """Return the overrides that turn the configuration of the user into this layout."""
    values = flatten(config)
    overrides = [
        f"{key}={plain(value)}" for key, value in candidate.settings.items() if value != values[key]
    ]
    if nodes.count != values["launch.nnodes"]:
        overrides.append(f"launch.nnodes={nodes.count}")
    return [*overrides, f"launch.nproc={nodes.ranks}"]
