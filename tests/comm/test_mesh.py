"""Ranks on named axes, and the group of each."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from configured import run_config

from axonlaunch import comm
from axonlaunch.comm import Backend, RankFailedError, World
from axonlaunch.comm import mesh as meshes
from axonlaunch.config.layout import Layout
from axonlaunch.engines.device_mesh import run_mesh

AXES = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}


def test_the_last_axis_holds_neighbours_and_the_first_the_farthest() -> None:
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


def test_a_rank_knows_its_place_on_every_axis() -> None:
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


def test_sizes_that_are_not_the_world_are_refused() -> None:
    with pytest.raises(RankFailedError, match="pp=3 x tp=2 is 6, not the world's 4 ranks"):
        World.mock(4).run(lambda world: world.mesh(pp=3, tp=2))


def test_ranks_of_one_shard_of_the_batch_are_those_of_one_copy_of_the_model() -> None:

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
    """NCCL's, which a torch for CPUs has not."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False


@pytest.mark.parametrize(
    ("backend", "degrees", "prioritised"),
    [
        (Backend.NCCL, {"tensor": 2}, ["tp"]),
        (Backend.NCCL, {"tensor": 2, "pipeline": 2}, ["tp"]),
        (Backend.NCCL, {"tensor": 4}, []),  # nothing competes with the whole world's
        (Backend.NCCL, {"pipeline": 2}, []),
        (Backend.GLOO, {"tensor": 2}, []),
    ],
)
def test_nccl_sums_of_tensor_ranks_come_before_other_kernels(
    monkeypatch: pytest.MonkeyPatch,
    backend: Backend,
    degrees: dict[str, int],
    prioritised: list[str],
) -> None:
    asked: list[Any] = []

    def make(*args: object, backend_override: Any, **kwargs: object) -> Any:
        asked.append(backend_override)
        group = SimpleNamespace()
        return SimpleNamespace(get_group=lambda axis: group)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    monkeypatch.setattr(meshes, "init_device_mesh", make)
    monkeypatch.setattr(meshes, "set_timeout", lambda group, timeout_s: None)
    overrides = [f"strategy.{axis}.degree={degree}" for axis, degree in degrees.items()]
    chosen = run_config(["strategy=fsdp", "launch.nproc=4", *overrides])

    def lay_out(world: World) -> None:
        world.backend, world.timeout_s = backend, 77.0
        run_mesh(world, Layout.of(chosen, world_size=4))

    World.mock(4).run(lay_out)
    for overridden in asked:
        assert [*(overridden or {})] == prioritised
        for options in (overridden or {}).values():
            assert options.is_high_priority_stream
            assert options._timeout == timedelta(seconds=77)
