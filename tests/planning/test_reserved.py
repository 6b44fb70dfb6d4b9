"""The replayed allocator keeps the rules of torch's, and what a process holds is kept apart."""

import os
import random

import pytest
from configured import estimate_config

from axonlaunch.config.layout import Layout, num_ranks
from axonlaunch.planning import estimate as planning_estimate
from axonlaunch.planning import estimate_cache
from axonlaunch.planning.memory.caching_allocator import MIB, Allocator, Change
from axonlaunch.planning.memory.cuda_constants import CUDA_CONTEXT, NCCL_PAIR, NCCL_RING
from axonlaunch.planning.memory.cuda_process import communicator_sizes, cublas_workspaces, held
from axonlaunch.system import allocator_settings


def reserved(*sizes: float, expandable: bool = False) -> float:
    """MiB held for storages of so many MiB that live together."""
    allocator = Allocator(expandable=expandable)
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


def test_a_rest_of_at_most_a_mebibyte_of_a_large_block_is_not_used() -> None:
    assert reserved(9.5, 9.5, 1.0) == 22
    allocator = Allocator()
    allocator.replay(
        [Change(0, 13 * MIB), Change(0, 0), Change(1, 12 * MIB + 1), Change(2, 2 * MIB)]
    )
    assert allocator.reserved == (14 + 20) * MIB


def test_a_freed_block_is_used_again_on_its_own_stream_alone() -> None:
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


def test_free_neighbours_become_one_block_again() -> None:
    allocator = Allocator()
    allocator.replay([Change(0, 40 * MIB), Change(0, 0)])
    allocator.replay([Change(1, 20 * MIB), Change(2, 20 * MIB), Change(1, 0), Change(2, 0)])
    allocator.replay([Change(3, 40 * MIB)])
    assert allocator.peak_reserved == 40 * MIB


def test_fragments_cost_memory_that_expandable_segments_save() -> None:
    changes = [Change(n, 30 * MIB) for n in range(8)]
    changes += [Change(n, 0) for n in range(8)] + [Change(9, 240 * MIB)]
    fixed, growing = Allocator(), Allocator(expandable=True)
    fixed.replay(changes)
    growing.replay(changes)
    assert fixed.peak_reserved == 480 * MIB
    assert growing.peak_reserved == 240 * MIB


def test_cached_segments_go_back_before_the_device_is_exceeded() -> None:
    allocator = Allocator(capacity=100 * MIB)
    allocator.replay([Change(0, 60 * MIB), Change(0, 0), Change(1, 80 * MIB)])
    assert allocator.peak_reserved == 80 * MIB


def test_a_storage_that_changes_its_size_frees_what_it_had() -> None:
    allocator = Allocator()
    allocator.replay([Change(0, 40 * MIB), Change(0, 0), Change(0, 40 * MIB)])
    assert allocator.peak_reserved == 40 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_reserved_is_never_less_than_what_lives(expandable: bool) -> None:
    choose = random.Random(0)
    allocator, live = Allocator(expandable=expandable), dict[int, int]()
    for number in range(2000):
        if live and choose.random() < 0.5:
            gone = choose.choice([*live])
            del live[gone]
            allocator.replay([Change(gone, 0)])
        else:
            live[number] = choose.choice([500, 70_000, 3 * MIB, 40 * MIB]) + choose.randrange(999)
            allocator.replay([Change(number, live[number], stream=choose.randrange(3))])
        assert allocator.reserved >= sum(live.values())


def test_a_process_holds_the_context_and_each_communicator_besides() -> None:
    memory = held(
        [Change(0, 30 * MIB)], peak_bytes=50 * MIB, groups=(1, 2, 8), workspaces=[10 * MIB] * 2
    )
    assert memory.allocator == 50 * MIB
    assert memory.process == memory.allocator + CUDA_CONTEXT + NCCL_PAIR + NCCL_RING


@pytest.mark.parametrize(
    ("overrides", "mib"),
    [
        ([], 32),
        (["hardware=h100_80gb"], 32),
        (["hardware=a100_80gb"], 8.125),
        (["hardware=a100_80gb", "train.deterministic=true"], 32),
    ],
)
def test_each_of_two_threads_has_a_workspace_of_cublas(overrides: list[str], mib: float) -> None:
    assert cublas_workspaces(estimate_config([*overrides, "launch.nproc=1"])) == [mib * MIB] * 2


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["strategy=ddp", "launch.nproc=8"], [8]),
        (["strategy=hsdp", "strategy.fsdp.replicate=2", "launch.nproc=8"], [8, 2, 4]),
        (["strategy=fsdp", "strategy.tensor.degree=2", "launch.nproc=8"], [8, 4, 2]),
        (["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=8"], [8, 2]),
        (["strategy=single", "launch.nproc=1"], []),
    ],
)
def test_a_rank_is_in_the_worlds_communicator_in_one_for_each_axis_and_in_its_sequences(
    overrides: list[str], sizes: list[int]
) -> None:
    config = estimate_config(["model=llama_debug", "train.global_batch_size=8", *overrides])
    layout = Layout.of(config, world_size=num_ranks(config))
    assert communicator_sizes(layout) == sizes


@pytest.mark.parametrize(
    ("variables", "grows"),
    [
        ({}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_segments_grow_unless_the_user_has_settings_of_his_own(
    variables: dict[str, str], grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in allocator_settings._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert allocator_settings.segments_grow() is grows
    monkeypatch.setattr("os.environ", before := dict(os.environ))
    allocator_settings.grow_segments()
    assert allocator_settings.segments_grow() is grows
    asked = {n: v for n, v in before.items() if n in allocator_settings._VARIABLES}
    assert asked == (variables or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("expandable_segments:True", []),
        ("max_split_size_mb:512, expandable_segments:True", ["max_split_size_mb"]),
        (
            "roundup_power2_divisions:[256:1,>:4],backend:native",
            ["backend", "roundup_power2_divisions"],
        ),
    ],
)
def test_settings_of_the_allocator_that_are_not_replayed_are_named(
    value: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    assert allocator_settings.not_replayed() == names
    notes = planning_estimate._of_allocator(estimate_config(["launch.nproc=1"]))
    assert bool(notes) == bool(names)
    assert all(name in note for note in notes for name in names)
    on_cpu = estimate_config(["launch.nproc=1", "hardware=cpu"])
    assert planning_estimate._of_allocator(on_cpu) == []


def test_an_estimate_depends_on_whether_segments_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    config = estimate_config(["launch.nproc=1", "hardware=h100_80gb"])
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    growing = estimate_cache._file(config, exact=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert estimate_cache._file(config, exact=False) != growing


def test_what_a_recording_misses_of_the_peak_is_held_besides() -> None:
    whole = held([Change(0, 30 * MIB)], peak_bytes=55 * MIB, groups=(), workspaces=[10 * MIB] * 2)
    assert whole.allocator == 55 * MIB
