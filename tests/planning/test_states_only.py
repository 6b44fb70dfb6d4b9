"""Closed formulas of states compared with the counts of a trace."""

from __future__ import annotations

import pytest
from support.configured import estimate_config

from axonlaunch.planning.memory import estimate as memory_estimate, states_only

SMALL = [
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "data=synthetic_tokens",
    "data.sequence_length=32",
    "train.global_batch_size=16",
    "hardware=cpu",
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "overrides",
    [
        "strategy=ddp launch.nproc=2",
        "strategy=zero1 launch.nproc=2 optimizer=sgd",
        "strategy=fsdp launch.nproc=4 train.precision=bf16",
        "strategy=fsdp launch.nproc=2 strategy.fsdp.cpu_offload=optimizer_states",
        "strategy=hsdp launch.nproc=4 strategy.fsdp.replicate=2 optimizer=sgd optimizer.momentum=0",
        "strategy=pipeline launch.nproc=4 strategy.data_parallel=fsdp",
        "strategy=tensor launch.nproc=2 model=llama_debug",
        "strategy=fsdp launch.nproc=2 train.optimizer_in_backward=true train.grad_clip=null",
    ],
)
def test_states_formula_equals_trace(overrides: str) -> None:
    chosen = estimate_config([*SMALL, *overrides.split()])
    reported, traced = states_only.estimate_states(chosen), memory_estimate.estimate(chosen)
    assert (reported.mesh, reported.parameters) == (traced.mesh, traced.parameters)
    for rank, other in zip(reported.ranks, traced.ranks, strict=True):
        assert (rank.rank, rank.coords) == (other.rank, other.coords)
        for category in ("parameters", "optimizer"):  # at the peak there may not be gradients yet
            # Norms are not divided by a tensor degree, and shards divide vectors unevenly.
            assert rank.breakdown[category] == pytest.approx(other.breakdown[category], rel=0.02)
        assert rank.host_bytes == pytest.approx(other.host_bytes, rel=0.01)
