"""Ranks on named axes, and the group of each."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.configured import run_config
from support.parity_table import MODELS

from axonlaunch import comm
from axonlaunch.comm import Backend, RankFailedError, World
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.engines.data_parallel.device_mesh import merged_group, run_mesh

MODEL = [*MODELS["llama"], "train.global_batch_size=8"]
AXES = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}


def test_the_last_axis_holds_neighbors_and_the_first_the_farthest() -> None:
    def groups(world: World) -> dict[str, tuple[int, ...]]:
        mesh = world.mesh(**AXES)
        return {axis: mesh.group(axis).ranks for axis in AXES}

    groups_of_rank = World.mock(8).run(groups)
    assert groups_of_rank[0] == {
        "pp": (0, 4),
        "dp_replicate": (0,),
        "dp_shard": (0, 2),
        "cp": (0,),
        "tp": (0, 1),
    }
    assert groups_of_rank[7]["pp"] == (3, 7)
    assert groups_of_rank[7]["dp_shard"] == (5, 7)
    assert groups_of_rank[7]["tp"] == (6, 7)


def test_mesh_has_coordinates_of_rank() -> None:
    def places(world: World) -> tuple[int, ...]:
        mesh = world.mesh(**AXES)
        assert mesh.along(*AXES) == world.rank
        assert all(mesh.group(a).rank == mesh.coordinate(a) for a in AXES if mesh.size(a) > 1)
        return tuple(mesh.coordinate(axis) for axis in AXES)

    assert World.mock(8).run(places) == [
        (pp, 0, shard, 0, tp) for pp in (0, 1) for shard in (0, 1) for tp in (0, 1)
    ]


def test_groups_of_the_axes_communicate_also_those_of_one_rank() -> None:
    def sums(world: World) -> list[float]:
        mesh = world.mesh(**AXES)
        mine = torch.tensor(float(world.rank))
        return [float(comm.all_reduce_sum(mine.clone(), group=mesh.group(a))) for a in AXES]

    assert World.mock(8).run(sums)[5] == [1 + 5, 5, 5 + 7, 5, 4 + 5]


def test_torch_s_mesh_leaves_out_axes_of_one_rank() -> None:
    names = World.mock(8).run(lambda world: world.mesh(**AXES).device_mesh.mesh_dim_names)
    assert names[0] == ("pp", "dp_shard", "tp")


def test_mesh_sizes_that_do_not_match_world_are_refused() -> None:
    with pytest.raises(RankFailedError, match="pp=3 x tp=2 is 6, not the world's 4 ranks"):
        World.mock(4).run(lambda world: world.mesh(pp=3, tp=2))


def test_ranks_with_same_batch_shard_form_one_model_copy() -> None:

    chosen = run_config(
        [
            *("strategy=hsdp", "strategy.fsdp.replicate=2", "strategy.tensor.degree=2"),
            *("strategy.pipeline.degree=2", "launch.nproc=16"),
        ]
    )
    layout = Layout.of(chosen, world_size=16)

    def place(world: World) -> tuple[int, int]:
        mesh = world.mesh(**layout.axes)
        return layout.data_shard(world.rank), mesh.along("dp_replicate", "dp_shard")

    assert all(shard == along for shard, along in World.mock(16).run(place))


class _Options:
    """NCCL's options, which a CPU build of torch lacks."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False


def groups_made(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, overrides: list[str]
) -> list[dict[str, Any]]:
    """Return the arguments of torch's calls for rank 0's groups when a run on 4 ranks is set up."""
    requests: list[dict[str, Any]] = []
    make = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        if dist.get_rank() == 0:
            requests.append({"ranks": ranks, **options})
        return make(ranks, use_local_synchronization=True)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    chosen = run_config(["strategy=fsdp", *MODEL, "launch.nproc=4", *overrides])
    layout = Layout.of(chosen, world_size=4)

    def lay_out(world: World) -> None:
        world.backend, world.timeout_s = backend, 77.0
        run_mesh(world, layout, cpu_offload=chosen.strategy.fsdp.cpu_offload)
        if layout.context > 1:
            merged_group(world, layout, "cp")

    World.mock(4).run(lay_out)
    return requests


NCCL, BOTH = "nccl", None
"""Backends of a group in a world on NCCL: only for device tensors, or also for host tensors."""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tensor=2"], {"dp_shard": NCCL, "tp": NCCL}),
        (["pipeline=2"], {"pp": BOTH, "dp_shard": NCCL}),
        (["tensor=2", "fsdp.cpu_offload=params"], {"dp_shard": BOTH, "tp": BOTH}),
        (["context=2"], {"cp": NCCL}),
        (["tensor=4"], {"alone": "gloo"}),  # dp_shard, which fully_shard requests
        ([], {}),
    ],
    ids=str,
)
def test_nccl_world_uses_gloo_for_groups_of_host_tensors(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: dict[str, str | None]
) -> None:
    keys = [
        f"strategy.{key.replace('=', '.degree=') if '.' not in key else key}" for key in overrides
    ]
    requests = groups_made(monkeypatch, Backend.NCCL, keys)
    named = {group["group_desc"].removeprefix("mesh_"): group for group in requests}
    assert {name: group["backend"] for name, group in named.items()} == expected
    limits = {group["timeout"] for name, group in named.items() if name != "alone"}
    assert limits <= {timedelta(seconds=77)}
    assert all(group["use_local_synchronization"] for group in requests)
    for name, group in named.items():
        is_urgent = group["pg_options"] is not None
        assert is_urgent == (name == "tp")
        if is_urgent:
            assert group["pg_options"].is_high_priority_stream
            assert group["pg_options"]._timeout == timedelta(seconds=77)


def test_gloo_groups_have_timeout_of_world(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = groups_made(monkeypatch, Backend.GLOO, ["strategy.tensor.degree=2"])
    assert [(group["ranks"], group["backend"]) for group in requests] == [
        ([0, 2], None),
        ([0, 1], None),
    ]
    assert {(group["timeout"], group["pg_options"]) for group in requests} == {
        (timedelta(seconds=77), None)
    }


def test_axis_of_one_rank_creates_group_lazily(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    created: list[tuple[int, list[int]]] = []
    make = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        created.append((dist.get_rank(), ranks))
        return make(ranks, **options)

    monkeypatch.setattr(dist, "new_group", new_group)

    def run(world: World) -> None:
        mesh = world.mesh(**AXES)
        assert [mesh.group(axis).size for axis in AXES] == [2, 1, 2, 1, 2]
        assert (world.rank, [world.rank]) not in created
        assert mesh.group("cp").torch_group.size() == 1
        assert (world.rank, [world.rank]) in created

    World.mock(8).run(run)
