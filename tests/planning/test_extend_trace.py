"""An extended recording equals that of the deeper model and of all chunks of its loss."""

import itertools

import pytest
from support.configured import estimate_config

from axonlaunch.planning.memory import cuda_process
from axonlaunch.planning.memory.allocation_trace import Recording
from axonlaunch.planning.memory.caching_allocator import Allocator, Change
from axonlaunch.planning.memory.extend_trace import Shortened, extended
from axonlaunch.planning.tracing.engine_categories import host_categories
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
CHUNKED = {
    "fsdp, cast for each chunk": "strategy=fsdp launch.nproc=4",
    "tied head, weights in bf16": (
        "strategy=fsdp launch.nproc=4 model.tie_word_embeddings=true train.param_dtype=bf16"
    ),
    "tensor": (
        "strategy=fsdp launch.nproc=4 strategy.tensor.degree=2 "
        "strategy.tensor.sequence_parallel=true model.tie_word_embeddings=true"
    ),
    "fp8": "strategy=fsdp launch.nproc=4 train.matmul_dtype=fp8_rowwise",
    "last stage of two": (
        "strategy=pipeline launch.nproc=2 strategy.pipeline.schedule=1f1b train.micro_batch_size=2"
    ),
    # It records all chunks, so only blocks are missing.
    "split backward": (
        "strategy=pipeline launch.nproc=2 strategy.pipeline.schedule=zbv_zero_bubble "
        "train.micro_batch_size=2"
    ),
    "offload": "strategy=fsdp launch.nproc=4 strategy.fsdp.cpu_offload=optimizer_states",
}


def asked(reduced: ReducedRun, *, full: bool, rank: int = 0) -> list[Change]:
    """Return the allocations of a rank, from the recording of a shorter run or of all of it."""
    on_host = host_categories(reduced.config)
    if full:
        return cuda_process._record_steps(reduced, rank, on_host).requests().changes
    stages = reduced.stages_of(reduced.layout.coordinates(rank)["pp"])
    return cuda_process.record(reduced, rank=rank, stages=stages, on_host=on_host).changes


def reserved(changes: list[Change]) -> int:
    allocator = Allocator()
    allocator.replay(changes)
    return allocator.peak_reserved


def short_and_full(overrides: list[str], *, rank: int = 0) -> list[list[Change]]:
    """Return the changes of the two recordings of a run."""
    reduced = ReducedRun.of(estimate_config(overrides))
    return forked_map.map_forked(
        [
            lambda: asked(reduced, full=False, rank=rank),
            lambda: asked(reduced, full=True, rank=rank),
        ],
        at_once=1,
    )


@pytest.mark.slow  # tests/planning/test_extrapolate_depth.py shows this, too
@pytest.mark.parametrize("layout", LAYOUTS)
def test_extended_recording_equals_deep_model_recording(layout: str) -> None:
    """Each stage of the model has 8 equal blocks."""
    layers = {"interleaved": 32, "leading": 9}.get(layout, 8)
    short, full = short_and_full([*MODEL, *LAYOUTS[layout], f"model.num_hidden_layers={layers}"])
    assert cuda_process._peak_live_bytes(short) == cuda_process._peak_live_bytes(full)
    assert reserved(short) == pytest.approx(reserved(full), rel=0.02)


def renumbered(changes: list[Change]) -> list[Change]:
    """Return changes with their storages numbered in the order in which they appear.

    Storages that are freed one after the other are sorted: a split backward keeps them in sets.
    """
    numbers: dict[int, int] = {}
    numbered = [
        change._replace(storage=numbers.setdefault(change.storage, len(numbers)))
        for change in changes
    ]
    groups = itertools.groupby(numbered, key=lambda change: change.num_bytes == 0)
    return [change for frees, group in groups for change in (sorted(group) if frees else group)]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("layout", CHUNKED)
def test_recording_of_few_chunks_equals_that_of_all_chunks(layout: str) -> None:
    """A loss has 22 chunks or more, of which the last one is smaller."""
    run = [*MODEL, *CHUNKED[layout].split(), "model.num_hidden_layers=4", "train.loss_chunk=12"]
    short, full = short_and_full(run, rank=1 if layout == "last stage of two" else 0)
    assert renumbered(short) == renumbered(full)


def test_unsupported_block_order_is_refused() -> None:
    changes = [Change(0, 8), Change(1, 8), Change(1, 0), Change(0, 0)]
    visits = [(0, (0, 3)), (1, (0, 5)), (2, (0, 1)), (3, (0, 4))]
    with pytest.raises(ValueError, match="does not run where"):
        extended(Recording(changes, [*visits], {}), {0: Shortened(missing=2, recorded=7)})
