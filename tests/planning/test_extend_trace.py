"""An extended recording of a shallow model equals the deeper model's recording."""

import pytest
from support.configured import estimate_config

from axonlaunch.planning.memory import cuda_process
from axonlaunch.planning.memory.allocation_trace import Recording
from axonlaunch.planning.memory.caching_allocator import Allocator, Change
from axonlaunch.planning.memory.extend_trace import extended
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.system.processes import forked_map

MODEL = (
    "model=llama_debug",
    "model.hidden_size=512",
    "model.intermediate_size=1024",
    "model.vocab_size=1024",
    "data=synthetic_tokens",
    "data.vocab_size=1024",
    "data.sequence_length=256",
    "train.precision=bf16",
    "train.global_batch_size=8",
)
LAYOUTS = {
    "fsdp": (
        "strategy=fsdp",
        "launch.nproc=4",
        "train.micro_batch_size=1",
        "train.activation_checkpointing=full",
    ),
    "tensor": (
        "strategy=fsdp",
        "launch.nproc=4",
        "strategy.tensor.degree=2",
        "strategy.tensor.sequence_parallel=true",
    ),
    "leading": (
        *("model=moe_debug", "model.vocab_size=1024", "model.first_k_dense_replace=1"),
        *("strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=4"),
    ),
    "interleaved": (
        "strategy=pipeline",
        "strategy.pipeline.degree=2",
        "strategy.pipeline.schedule=interleaved_1f1b",
        "strategy.pipeline.split=[8,8,8,8]",
        "train.micro_batch_size=2",
        "launch.nproc=2",
    ),
}


def asked(layout: str, *, full: bool) -> list[Change]:
    """Return the allocations of rank 0 of a model with 8 equal blocks per stage."""
    layers = {"interleaved": 32, "leading": 9}.get(layout, 8)
    overrides = [*MODEL, *LAYOUTS[layout], f"model.num_hidden_layers={layers}"]
    reduced = ReducedRun.of(estimate_config(overrides))
    if full:
        return cuda_process._record_steps(reduced, 0, ())[0].changes
    return cuda_process.record(reduced, rank=0, stages=reduced.stages_of(0)).changes


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            name, marks=pytest.mark.slow
        )  # tests/planning/test_extrapolate_depth.py shows this, too
        for name in LAYOUTS
    ],
)
def test_extended_recording_equals_deep_model_recording(layout: str) -> None:
    short, long = forked_map.map_forked(
        [lambda: asked(layout, full=False), lambda: asked(layout, full=True)], at_once=1
    )
    assert cuda_process._peak_live_bytes(short) == cuda_process._peak_live_bytes(long)
    reserved = []
    for changes in (short, long):
        allocator = Allocator()
        allocator.replay(changes)
        reserved.append(allocator.peak_reserved)
    assert reserved[0] == pytest.approx(reserved[1], rel=0.02)


def test_unsupported_block_order_is_refused() -> None:
    changes = [Change(0, 8), Change(1, 8), Change(1, 0), Change(0, 0)]
    visits = [(0, (0, 3)), (1, (0, 5)), (2, (0, 1)), (3, (0, 4))]
    with pytest.raises(ValueError, match="does not run where"):
        extended(Recording(changes, [*visits], {}), blocks=2, counts={0: 7})
