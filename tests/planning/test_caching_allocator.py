"""The replayed allocator follows the rules of torch's allocator."""

import os
import random
from functools import partial

import pytest
from support.configured import estimate_config

from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.planning import estimate as planning_estimate, estimate_cache
from axonlaunch.planning.measured_constants import CUDA_CONTEXT, NCCL_PAIR, NCCL_RING
from axonlaunch.planning.memory import estimate as memory_estimate
from axonlaunch.planning.memory.caching_allocator import MIB, Allocator, Change
from axonlaunch.planning.memory.cuda_process import (
    Communicators,
    DeviceRequests,
    communicator_bytes,
    communicators_of,
    cublas_workspaces,
    non_allocator_bytes,
    peak_device_memory,
    record,
    replay,
    symmetric_memory,
)
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.system.node import allocator_settings
from axonlaunch.system.node.allocator_settings import AllocatorSettings
from axonlaunch.system.processes import forked_map

GROWING = AllocatorSettings(expandable=True)


def reserved(*sizes: float, settings: str = "") -> float:
    """Return the MiB reserved for storages of these sizes (MiB) that live at the same time."""
    allocator = Allocator(AllocatorSettings.of(settings))
    allocator.replay(Change(number, round(size * MIB)) for number, size in enumerate(sizes))
    return allocator.peak_reserved / MIB


@pytest.mark.parametrize(
    ("size", "segment"), [(1e-6, 2), (1, 2), (1.1, 20), (9.9, 20), (10, 10), (11, 12), (300.5, 302)]
)
def test_a_lone_storage_takes_a_segment_of_its_pool(size: float, segment: int) -> None:
    assert reserved(size) == segment


def test_small_storages_share_a_segment_and_large_ones_another() -> None:
    assert reserved(0.5, 0.5, 0.5, 0.5) == 2
    assert reserved(9, 9) == 20
    assert reserved(0.5, 9, 9) == 22


def test_allocator_keeps_rest_up_to_1_mib_unused() -> None:
    assert reserved(9.5, 9.5, 1.0) == 22
    allocator = Allocator()
    allocator.replay(
        [Change(0, 13 * MIB), Change(0, 0), Change(1, 12 * MIB + 1), Change(2, 2 * MIB)]
    )
    assert allocator.reserved == (14 + 20) * MIB


def test_freed_block_is_reused_only_on_same_stream() -> None:
    for stream, expected in ((0, 30), (1, 60)):
        allocator = Allocator()
        allocator.replay([Change(0, 30 * MIB), Change(0, 0), Change(1, 30 * MIB, stream)])
        assert allocator.peak_reserved == expected * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = Allocator()
    allocator.replay(Change(n, size * MIB) for n, size in enumerate((60, 40, 50)))
    allocator.replay([Change(n, 0) for n in range(3)])
    allocator.replay([Change(3, 40 * MIB), Change(4, 50 * MIB), Change(5, 60 * MIB)])
    assert allocator.peak_reserved == 150 * MIB


def test_free_neighbors_become_one_block_again() -> None:
    allocator = Allocator()
    allocator.replay([Change(0, 40 * MIB), Change(0, 0)])
    allocator.replay([Change(1, 20 * MIB), Change(2, 20 * MIB), Change(1, 0), Change(2, 0)])
    allocator.replay([Change(3, 40 * MIB)])
    assert allocator.peak_reserved == 40 * MIB


def test_fragments_cost_memory_that_expandable_segments_save() -> None:
    changes = [Change(n, 30 * MIB) for n in range(8)]
    changes += [Change(n, 0) for n in range(8)] + [Change(9, 240 * MIB)]
    fixed, growing = Allocator(), Allocator(GROWING)
    fixed.replay(changes)
    growing.replay(changes)
    assert fixed.peak_reserved == 480 * MIB
    assert growing.peak_reserved == 240 * MIB


def test_cached_segments_go_back_before_the_device_is_exceeded() -> None:
    allocator = Allocator(capacity=100 * MIB)
    allocator.replay([Change(0, 60 * MIB), Change(0, 0), Change(1, 80 * MIB)])
    assert allocator.peak_reserved == 80 * MIB


def growing(*changes: Change, capacity: int = 100) -> Allocator:
    allocator = Allocator(GROWING, capacity=capacity * MIB)
    allocator.replay(changes)
    return allocator


def test_free_pages_of_growing_segments_go_back_before_the_device_is_exceeded() -> None:
    freed = [Change(0, 60 * MIB), Change(0, 0)]
    other = growing(*freed, Change(1, 80 * MIB, stream=1))
    assert (other.reserved, other.peak_reserved) == (80 * MIB, 80 * MIB)
    assert growing(*freed, Change(1, 40 * MIB, stream=1)).reserved == 100 * MIB  # there is room
    # Pages have 20 MiB: the one in which another storage begins stays.
    part = [Change(0, 30 * MIB), Change(1, 30 * MIB), Change(0, 0), Change(2, 60 * MIB, stream=1)]
    assert growing(*part).reserved == 100 * MIB


def test_pages_that_went_back_are_mapped_again_before_a_segment_grows_at_its_end() -> None:
    gone = [Change(0, 60 * MIB), Change(1, 20 * MIB), Change(0, 0), Change(2, 60 * MIB, stream=1)]
    allocator = growing(*gone, Change(2, 0))
    assert allocator.reserved == 80 * MIB
    allocator.replay([Change(3, 40 * MIB), Change(4, 20 * MIB), Change(5, 20 * MIB, stream=1)])
    assert (
        allocator.reserved == 100 * MIB
    )  # next to storage 1, the 20 MiB that were always in use: 3, 4 and 5
    allocator.replay([Change(1, 0), Change(3, 0), Change(4, 0), Change(6, 80 * MIB)])
    assert allocator.reserved == 100 * MIB  # where these three were


def test_a_block_that_is_too_large_to_be_split_is_taken_where_a_segment_would_grow() -> None:
    settings = AllocatorSettings.of("expandable_segments:True,max_split_size_mb:32")
    allocator = Allocator(settings)
    allocator.replay([Change(0, 100 * MIB), Change(0, 0), Change(1, 10 * MIB)])
    assert allocator.reserved == 100 * MIB


def test_resized_storage_frees_old_block() -> None:
    allocator = Allocator()
    allocator.replay([Change(0, 40 * MIB), Change(0, 0), Change(0, 40 * MIB)])
    assert allocator.peak_reserved == 40 * MIB


@pytest.mark.parametrize(
    "text",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:32,roundup_power2_divisions:4",
        "expandable_segments:True,max_split_size_mb:32,large_segment_size_mb:30",
    ],
)
@pytest.mark.parametrize("capacity", [None, 600 * MIB])
def test_reserved_memory_is_never_below_allocated(text: str, capacity: int | None) -> None:
    choose = random.Random(0)
    settings = AllocatorSettings.of(text)
    allocator, live = Allocator(settings, capacity=capacity), dict[int, int]()
    for number in range(2000):
        if live and choose.random() < 0.5:
            gone = choose.choice([*live])
            del live[gone]
            allocator.replay([Change(gone, 0)])
        else:
            live[number] = choose.choice([500, 70_000, 3 * MIB, 40 * MIB]) + choose.randrange(999)
            allocator.replay([Change(number, live[number], stream=choose.randrange(3))])
        assert allocator.reserved >= sum(live.values())


def test_estimate_includes_cuda_context_and_communicators() -> None:
    recorded = DeviceRequests([Change(0, 30 * MIB)], symmetric=4 * MIB)
    memory = peak_device_memory(
        replay(recorded, workspaces=[10 * MIB] * 2),
        peak_bytes=50 * MIB,
        communicators=Communicators((1, 2, 8)),
    )
    assert memory.allocator == 50 * MIB
    assert memory.process == memory.allocator + CUDA_CONTEXT + NCCL_PAIR + NCCL_RING + 4 * MIB


def test_nccl_memory_equals_measurements() -> None:
    """On 8 H100 a process held 1.06 GB outside of the allocator, NVIDIA/nccl#1685."""
    before = non_allocator_bytes(Communicators([8]))
    assert before == pytest.approx(1.06e9, rel=0.15)
    # After an all-to-all with the 7 other GPUs it held 4.34 GB.
    after = non_allocator_bytes(Communicators([8], exchange_peers=[7]))
    assert after - before == pytest.approx(4.34e9 - 1.06e9, rel=0.01)
    # Measured on 4 A100: the first two ranks, then all ranks, NVIDIA/nccl#964.
    assert communicator_bytes(Communicators([2])) == 544 * MIB
    assert communicator_bytes(Communicators([4])) == 688 * MIB


def test_measured_context_memory_overrides_defaults() -> None:
    own = HardwareConfig(name="own", context_mib=600, communicator_mib=300)
    assert non_allocator_bytes(Communicators((1, 2, 8)), own) == (600 + 2 * 300) * MIB
    only_context = HardwareConfig(name="own", context_mib=600)
    communicators = non_allocator_bytes(Communicators((1, 2, 8)), only_context)
    assert communicators == 600 * MIB + NCCL_PAIR + NCCL_RING
    replayed = replay(DeviceRequests([Change(0, 30 * MIB)]))
    memory = peak_device_memory(
        replayed, peak_bytes=30 * MIB, communicators=Communicators([2]), hardware=own
    )
    assert (memory.context, memory.communicators) == (600 * MIB, 300 * MIB)


@pytest.mark.parametrize(
    ("overrides", "mib"),
    [
        ([], 32),
        (["hardware=h100_80gb"], 32),
        (["hardware=a100_80gb"], 8.125),
        (["hardware=a100_80gb", "train.deterministic=true"], 32),
    ],
)
def test_cublas_workspace_is_counted_per_thread(overrides: list[str], mib: float) -> None:
    assert cublas_workspaces(estimate_config([*overrides, "launch.nproc=1"])) == [mib * MIB] * 2


EXPERT = "strategy.expert.degree"
REPLICATED = ["strategy=hsdp", "strategy.fsdp.replicate=2", "launch.nproc=8"]


@pytest.mark.parametrize(
    ("overrides", "communicators"),
    [
        (["strategy=ddp", "launch.nproc=8"], Communicators([8])),
        (
            REPLICATED,
            Communicators([8, 2, 4]),
        ),
        (
            ["strategy=fsdp", "strategy.tensor.degree=2", "launch.nproc=8"],
            Communicators([8, 4, 2]),
        ),
        (
            ["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=8"],
            Communicators([8, 2]),
        ),
        (["strategy=single", "launch.nproc=1"], Communicators()),
        (
            ["strategy=fsdp", f"{EXPERT}=4", "model=moe_debug", "launch.nproc=8"],
            Communicators([8, 2, 4], [3]),
        ),
        (
            [*REPLICATED, f"{EXPERT}=2", "model=moe_debug"],
            Communicators([8, 2, 4, 2, 2, 2], [1]),
        ),
        (
            ["strategy=fsdp", f"{EXPERT}=8", "model=moe_debug", "launch.nproc=8"],
            Communicators([8], [7]),
        ),
        (
            ["strategy=fsdp", "optimizer=muon", "launch.nnodes=2", "launch.nproc=4"],
            Communicators([8], [3]),
        ),
        (
            ["strategy=fsdp", "optimizer=muon", "launch.nproc=8", "hardware=rtx4090"],
            Communicators([8]),
        ),
    ],
)
def test_communicators_of_rank_follow_from_meshes_and_exchanges(
    overrides: list[str], communicators: Communicators
) -> None:
    config = estimate_config(["model=llama_debug", "train.global_batch_size=8", *overrides])
    layout = Layout.of(config, world_size=num_ranks(config))
    assert communicators_of(config, layout) == communicators


def test_the_block_at_the_end_of_a_growing_segment_is_taken_last() -> None:
    # A gap of 30 MiB, and 25 MiB free at the end, which would fit 22 MiB better.
    storages = [Change(0, 30 * MIB), Change(1, 5 * MIB), Change(2, 25 * MIB)]
    allocator = Allocator(GROWING)
    allocator.replay([*storages, Change(0, 0), Change(2, 0), Change(3, 22 * MIB)])
    allocator.replay([Change(4, 45 * MIB)])
    assert allocator.peak_reserved == 80 * MIB


def test_unsplittable_block_is_kept_for_same_size() -> None:
    def after(size: float) -> float:
        allocator = Allocator(AllocatorSettings.of("max_split_size_mb:100"))
        allocator.replay([Change(0, 120 * MIB), Change(0, 0), Change(1, round(size * MIB))])
        return allocator.reserved / MIB

    assert after(50) == 120 + 50
    assert after(101) == 120
    assert after(100) == 120 + 100  # 20 MiB would remain


@pytest.mark.parametrize(
    ("settings", "size", "segment"),
    [
        ("roundup_power2_divisions:4", 33, 40),
        ("roundup_power2_divisions:4", 40, 40),
        ("roundup_power2_divisions:1", 33, 34),
        ("roundup_power2_divisions:[16:8,32:2,>:4]", 33, 48),
        ("roundup_power2_divisions:[16:8,32:2,>:4]", 65, 80),
        ("large_segment_size_mb:30", 5, 30),
    ],
)
def test_roundup_setting_rounds_sizes(settings: str, size: float, segment: float) -> None:
    assert reserved(size, settings=settings) == segment


def test_roundup_lists_are_parsed_like_torch() -> None:
    """Values of PyTorch's test, ``c10/test/core/AllocatorConfig_test.cpp``."""
    text = "roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:2]"
    of_interval = AllocatorSettings.of(text).divisions
    assert of_interval[6:13] == (8, 8, 16, 1, 0, 8, 2)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        (
            {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:40"},
            "large_segment_size_mb:40",
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_expandable_segments_are_default_without_user_settings(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in allocator_settings._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert allocator_settings.settings_of_ranks() == AllocatorSettings.of(text)
    monkeypatch.setattr("os.environ", before := dict(os.environ))
    allocator_settings.grow_segments()
    assert allocator_settings.settings_of_ranks() == AllocatorSettings.of(text)
    asked = {n: v for n, v in before.items() if n in allocator_settings._VARIABLES}
    assert asked == (variables or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("expandable_segments:True,max_split_size_mb:512,pinned_use_background_threads:True", ()),
        ("backend:native", ()),
        (
            "garbage_collection_threshold:0.8,backend:cudaMallocAsync",
            ("backend", "garbage_collection_threshold"),
        ),
        ("max_split_size_mb:much", ("max_split_size_mb",)),
    ],
)
def test_unsupported_allocator_settings_are_named(
    value: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    assert allocator_settings.settings_of_ranks().not_replayed == names
    notes = planning_estimate._allocator_notes(estimate_config(["launch.nproc=1"]))
    assert bool(notes) == bool(names)
    assert all(name in note for note in notes for name in names)
    on_cpu = estimate_config(["launch.nproc=1", "hardware=cpu"])
    assert planning_estimate._allocator_notes(on_cpu) == []


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ("", None),
        ("pinned_max_round_threshold_mb:32", 32),
        ("pinned_max_round_threshold_mb:32,pinned_max_cached_size_mb:8", 8),
    ],
)
def test_page_locked_sizes_are_powers_of_two_up_to_limit(
    settings: str, largest: int | None
) -> None:
    locked = AllocatorSettings.of(settings).page_locked
    assert [locked(size) for size in (0, 1, 3, 4)] == [0, 1, 4, 4]
    size = 33 * MIB
    assert locked(size) == (size if largest else 64 * MIB)
    assert locked(7 * MIB) == 8 * MIB
    assert locked(9 * MIB) == (9 * MIB if largest == 8 else 16 * MIB)


def test_an_estimate_depends_on_the_allocators_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = estimate_config(["launch.nproc=1", "hardware=h100_80gb"])
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    growing = estimate_cache._file(config, exact=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert estimate_cache._file(config, exact=False) != growing


def test_peak_outside_recording_is_added() -> None:
    recorded = DeviceRequests([Change(0, 30 * MIB)])
    replayed = replay(recorded, workspaces=[10 * MIB] * 2)
    full = peak_device_memory(replayed, peak_bytes=55 * MIB, communicators=Communicators())
    assert full.allocator == 55 * MIB


def test_estimate_replays_allocator_in_remaining_device_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "large_segment_size_mb:30")
    sizes = (
        (0, 40),
        (0, 0),
        (1, 50),
        (2, 5),
    )  # the first is released, because 85 MiB are not enough
    changes = [Change(storage, size * MIB) for storage, size in sizes]
    free = ["hardware.memory_gib=0.1220703125", "hardware.context_mib=30"]  # 125 MiB
    free += ["hardware.communicator_mib=10", "hardware.cublas_workspace_mib=0"]
    run = estimate_config(["hardware=h100_80gb", "launch.nproc=2", "strategy=ddp", *free])
    monkeypatch.setattr(
        memory_estimate.cuda_process, "record", lambda *_, **__: DeviceRequests(changes)
    )
    replayed = memory_estimate._recording_run(ReducedRun.of(run), 0)()
    assert replayed.reserved == (50 + 30) * MIB


def test_symmetric_memory_has_full_pages_only_for_fused_collectives() -> None:
    run = ["model=llama_debug", "strategy=tensor", "launch.nproc=2", "train.compile=true"]
    sequence = "strategy.tensor.sequence_parallel=true"
    fused = [*run, sequence, "strategy.tensor.async_collectives=true"]
    assert symmetric_memory(estimate_config(fused), 3 * MIB // 2 + 1) == 4 * MIB
    assert symmetric_memory(estimate_config([*run, sequence]), 3 * MIB) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fused_collective_products_hold_two_symmetric_buffers() -> None:
    run = [
        *("model=llama_debug", "model.num_hidden_layers=1", "strategy=tensor", "launch.nproc=2"),
        *("data=synthetic_tokens", "data.sequence_length=1024", "train.global_batch_size=5"),
        *("model.max_position_embeddings=1024", "train.micro_batch_size=5", "train.compile=true"),
        "strategy.tensor.sequence_parallel=true",
    ]
    part = 5 * 1024 * 128 * 4 // 2  # samples, tokens, hidden size, fp32: half of the tokens

    def symmetric(*more: str) -> int:
        reduced = ReducedRun.of(estimate_config([*run, *more]))
        return record(reduced, rank=0, stages=reduced.stages_of(0)).symmetric

    without, those = forked_map.map_forked(
        [symmetric, partial(symmetric, "strategy.tensor.async_collectives=true")]
    )
    assert without == 0
    assert 2 * part < those == 4 * MIB
