"""Traces that an estimate needs: few for runs that can't fit, and one allocator recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.configured import estimate_config

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import estimate_device
from axonlaunch.models.build import construct
from axonlaunch.planning.memory import estimate as memory_estimate
from axonlaunch.planning.memory.cuda_process import Communicators, non_allocator_bytes, record
from axonlaunch.planning.memory.estimate import estimate, estimate_fitting
from axonlaunch.planning.memory.extend_trace import FEWEST
from axonlaunch.planning.tracing.devices.update_copies import ParameterCopies
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.system.processes import forked_map

pytestmark = pytest.mark.processes

TINY = [
    *("model.hidden_size=64", "model.num_hidden_layers=8", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=64", "hardware=h100_80gb"),
    *("launch.nproc=4", "train.global_batch_size=8", "train.micro_batch_size=1"),
]
PIPELINE = ["strategy=pipeline", "strategy.pipeline.degree=4"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the pp coordinates whose allocator is recorded."""
    places: list[int] = []
    record = memory_estimate._recording_run

    def noting(reduced: Any, group: int) -> Callable[[], Any]:
        places.append(group)
        return record(reduced, group)

    monkeypatch.setattr(memory_estimate, "_recording_run", noting)
    return places


def run(*overrides: str) -> RunConfig:
    return estimate_config([*TINY, *overrides])


@pytest.mark.parametrize(
    ("overrides", "on"),
    [
        ([], "gpu"),  # decided by the node
        (["launch.backend=mock"], "mock"),
        (["launch.backend=gloo"], "gloo"),
        (["launch.device=cpu"], "gloo"),
        (["launch.backend=mock", "launch.device=cuda"], "gpu"),
        (["launch.backend=gloo", "hardware=h100_80gb"], "gpu"),  # because of the named hardware
        (["hardware=cpu"], "gloo"),
    ],
)
def test_estimate_is_for_device_of_run(overrides: list[str], on: str) -> None:
    small = [word for word in TINY if not word.startswith("hardware")]
    chosen = estimate_config([*small, "strategy=single", "launch.nproc=1", *overrides])
    assert estimate_device(chosen) == on
    if on == "mock":
        reported = estimate(chosen)
        assert reported.process_bytes == reported.reserved_bytes == reported.peak_bytes


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_estimate_of_one_rank_includes_clipping_memory(optimizer: str) -> None:
    one = ["strategy=single", "launch.nproc=1", f"optimizer={optimizer}"]
    peaks = [estimate(run(*one, f"train.grad_clip={clip}")).peak_bytes for clip in ("null", 1e9)]
    # Clipping computes the norm of each gradient, 4 bytes for each, and their norm.
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


@pytest.mark.slow
def test_estimate_rounds_page_locked_host_memory_like_torch() -> None:
    few = ["model.hidden_size=72", "model.num_hidden_layers=2", "train.global_batch_size=4"]
    config = run("strategy=fsdp", "strategy.fsdp.cpu_offload=params", *few)
    with torch.device("meta"):
        model = construct(config.model, seed=0)
    shards = [-(-p.shape[0] // 4) * p[0].numel() * 4 for p in model.parameters()]
    of_each = [1 << (size - 1).bit_length() for size in shards]
    assert sum(of_each) > 1.2 * sum(shards)
    assert estimate(config).host_bytes == 2 * sum(of_each)  # one gradient each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "on_host", "copied"),
    [("params", 2, 2), ("optimizer_states", 2, 2), ("full", 4, 0)],
)
def test_device_reserves_copies_for_the_update_but_no_tensors_in_host_memory(
    offload: str, on_host: int, copied: int
) -> None:
    """A single rank has no collective after which its gradients are known."""
    wide = ["model.hidden_size=1024", "train.global_batch_size=1", "launch.nproc=1"]
    overrides = ["strategy=fsdp", "train.precision=bf16", *wide]
    # Three consecutive matrices are both of a feed-forward and the next queries, keys and values.
    parameters, in_flight = 4 * 8 * 12 * 1024**2, 4 * (4 + 4 + 3) * 1024**2
    kept, offloaded = (
        estimate(run(*overrides, f"strategy.fsdp.cpu_offload={what}")).reserved_bytes
        for what in ("none", offload)
    )
    saved = on_host * parameters - copied * in_flight
    assert kept - offloaded == pytest.approx(saved, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [["strategy=fsdp"], PIPELINE],
    ids=["fsdp", "pipeline"],
)
def test_fitting_estimate_equals_full_estimate(overrides: list[str]) -> None:
    reported = estimate(run(*overrides))
    assert estimate_fitting(run(*overrides), memory=reported.process_bytes) == reported


@pytest.mark.slow
def test_estimate_stops_early_if_tensors_do_not_fit(recorded: list[int]) -> None:
    chosen = run(*PIPELINE)
    tensors = estimate(chosen).peak_bytes + non_allocator_bytes(Communicators([4]))
    recorded.clear()
    assert estimate_fitting(chosen, memory=tensors - 1) is None
    assert recorded == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "highest"),
    [(["strategy.pipeline.split=[1,5,1,1]"], 1), ([], 0)],
    ids=["the second", "the first"],
)
def test_estimate_records_allocator_of_largest_rank_only(
    recorded: list[int], overrides: list[str], highest: int
) -> None:
    ranks = estimate(run(*PIPELINE, *overrides)).ranks
    assert max(ranks, key=lambda rank: rank.peak_bytes).coords["pp"] == highest
    assert recorded == [highest]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "groups"), [("params", "{'*.q_proj.weight':{lr:1e-4}}"), ("optimizer_states", "{}")]
)
def test_recording_of_fewer_blocks_has_copies_for_the_update_of_all(
    offload: str, groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["strategy=fsdp", f"strategy.fsdp.cpu_offload={offload}", "launch.nproc=1"]
    overrides += [f"optimizer.groups={groups}"]
    reduced = ReducedRun.of(run(*overrides, "train.global_batch_size=1"))
    assert reduced.spare_blocks([0], needed=FEWEST) > 0

    def copies() -> list[ParameterCopies]:
        return [*record(reduced, rank=0, stages=[0]).copies]

    [repeated] = forked_map.map_forked([copies])
    monkeypatch.setattr(ReducedRun, "spare_blocks", lambda *_, **__: 0)
    [complete] = forked_map.map_forked([copies])
    assert repeated == complete
