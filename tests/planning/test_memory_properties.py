"""More work never takes less memory, and more sharding never takes more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.configured import estimate_config

from axonlaunch.planning.memory.estimate import estimate

TINY = ["model.num_attention_heads=2", "data=synthetic_tokens", "hardware=cpu"]
GROWING = {
    "samples": "train.micro_batch_size",
    "length": "data.sequence_length",
    "depth": "model.num_hidden_layers",
}


def peak(*, ranks: int, samples: int, length: int, depth: int, overrides: tuple[str, ...]) -> int:
    chosen = estimate_config(
        [
            *TINY,
            *overrides,
            f"launch.nproc={ranks}",
            f"model.hidden_size={32}",
            f"model.num_hidden_layers={depth}",
            f"data.sequence_length={length}",
            f"train.micro_batch_size={samples}",
            f"train.global_batch_size={8 * samples}",
        ]
    )
    return estimate(chosen).peak_bytes


STRATEGIES = st.sampled_from(
    [
        ("strategy=ddp",),
        ("strategy=zero1",),
        ("strategy=fsdp", "train.activation_checkpointing=full"),
        ("strategy=zero2", "train.precision=bf16"),
        ("strategy=tensor",),
        ("strategy=pipeline", "strategy.pipeline.schedule=gpipe"),
    ]
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    overrides=STRATEGIES,
    size=st.fixed_dictionaries(
        {
            "samples": st.integers(1, 3),
            "length": st.sampled_from([8, 16, 24]),
            "depth": st.integers(2, 4),
        }
    ),
    grown=st.sampled_from(sorted(GROWING)),
)
def test_memory_estimate_never_decreases_with_more_work(
    overrides: tuple[str, ...], size: dict[str, Any], grown: str
) -> None:
    more = {**size, grown: 2 * size[grown]}
    assert peak(ranks=2, overrides=overrides, **more) >= peak(ranks=2, overrides=overrides, **size)


@pytest.mark.parametrize(
    "strategy",
    ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "zero2"))],
)
def test_memory_estimate_never_increases_with_more_sharding(strategy: str) -> None:
    overrides = (f"strategy={strategy}",)
    size = {"samples": 1, "length": 16, "depth": 2}
    few, more = (peak(ranks=ranks, overrides=overrides, **size) for ranks in (2, 4))
    assert more <= few
