"""Tests of the table of axes, and of values that layouts derive from it."""

import math

import pytest

from axonlaunch import config
from axonlaunch.config.axes import AXES, DATA_AXES, INNER, LIKE_DATA, OUTER, PRINTED, Axis
from axonlaunch.config.consistency.layout import Layout

TENSOR, PIPELINE, CONTEXT = (
    f"strategy.{word}.degree=2" for word in ("tensor", "pipeline", "context")
)
HYBRID = ["strategy=hsdp", "strategy.fsdp.replicate=2"]
NO_SHARD = ["strategy=fsdp", "strategy.fsdp.sharding=no_shard"]
REPLICAS = ("dp_replicate", "cp")


def _layout(overrides: list[str], world_size: int) -> Layout:
    return Layout.of(config.load(overrides), world_size=world_size)


def test_axes_with_the_same_parameters_are_next_to_the_data_axes() -> None:
    """Otherwise ranks of a merged axis would not be consecutive in the mesh."""
    assert tuple(axis.name for axis in INNER[: len(LIKE_DATA)]) == LIKE_DATA
    assert not any(axis.sums_gradients for axis in OUTER)
    assert set(PRINTED) == set(AXES)


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_degree_of_each_axis_is_read_from_its_key(axis: Axis) -> None:
    layout = _layout([f"{axis.key}=2"], 4)
    assert {name for name, degree in layout.degrees.items() if degree > 1} == {axis.name}
    assert f"{axis.word} 2" in str(layout)


@pytest.mark.parametrize(
    ("overrides", "world_size", "shard_axes", "replicate_axes"),
    [
        (["strategy=ddp", CONTEXT], 4, (), REPLICAS),
        (["strategy=zero1", CONTEXT], 4, REPLICAS, ()),
        (["strategy=fsdp", CONTEXT], 4, ("dp_shard", "cp"), ("dp_replicate",)),
        ([*HYBRID, CONTEXT], 8, ("dp_shard", "cp"), ("dp_replicate",)),
        ([*NO_SHARD, CONTEXT], 4, ("dp_shard",), REPLICAS),
        (["strategy=hybrid"], 8, ("dp_shard", "cp"), ("dp_replicate",)),
    ],
)
def test_division_names_the_axes_of_shards_and_of_gradient_sums(
    overrides: list[str],
    world_size: int,
    shard_axes: tuple[str, ...],
    replicate_axes: tuple[str, ...],
) -> None:
    layout = _layout(overrides, world_size)
    division = layout.division()
    assert (division.shard_axes, division.replicate_axes) == (shard_axes, replicate_axes)
    assert set(division.sum_axes) == {*shard_axes, *replicate_axes}
    assert layout.gradient_ranks == layout.data_ranks * layout.context
    assert layout.division(is_expert=True) == division


@pytest.mark.parametrize(
    ("overrides", "world_size", "sizes"),
    [
        (["strategy=ddp", CONTEXT], 4, {"dp_replicate": 4}),
        (["strategy=fsdp", CONTEXT], 4, {"dp_shard": 4}),
        (["strategy=fsdp", CONTEXT], 2, {"dp_shard": 2}),
        ([*HYBRID, CONTEXT, TENSOR], 16, {"dp_replicate": 2, "dp_shard": 4, "tp": 2}),
        ([*HYBRID, CONTEXT], 4, {"dp_replicate": 4}),
        ([*NO_SHARD, CONTEXT], 4, {"dp_replicate": 4}),
        (["strategy=hybrid", CONTEXT], 16, {"pp": 2, "dp_shard": 4, "tp": 2}),
    ],
)
def test_mesh_merges_context_ranks_into_a_data_axis(
    overrides: list[str], world_size: int, sizes: dict[str, int]
) -> None:
    layout = _layout(overrides, world_size)
    mesh = layout.mesh_sizes()
    assert {axis: size for axis, size in mesh.items() if size > 1} == sizes
    assert "cp" not in mesh
    division = layout.division()
    merged = math.prod(mesh[axis] for axis in layout.mesh_axes(division.sum_axes))
    assert merged == layout.gradient_ranks
    shards = math.prod(mesh[axis] for axis in layout.mesh_axes(division.shard_axes))
    assert shards == layout.ranks_along(division.shard_axes)


def test_only_tensor_ranks_draw_the_same_random_numbers() -> None:
    layout = _layout(["strategy=hybrid", CONTEXT], 16)
    streams = [layout.random_stream(rank) for rank in range(16)]
    assert streams == [rank // 2 for rank in range(16)]


def test_one_of_the_ranks_that_share_layers_reports_their_outputs() -> None:
    layout = _layout(["strategy=hybrid", CONTEXT], 16)
    assert [rank for rank in range(16) if layout.reports_outputs(rank)] == [*range(0, 16, 2)]


@pytest.mark.parametrize("axis", ["pp", "dp_shard", "cp", "tp"])
def test_neighbors_along_an_axis_differ_by_its_stride(axis: str) -> None:
    layout = _layout(["strategy=hybrid", CONTEXT], 16)
    coordinates = layout.coordinates(layout.stride(axis))
    assert {name for name, index in coordinates.items() if index} == {axis}


def test_divisor_of_parameters_leaves_out_ranks_with_the_same_parameters() -> None:
    layout = _layout(["strategy=hybrid", CONTEXT], 16)
    assert layout.parameter_divisor == 4
    assert layout.divisor("sequences") == layout.context == 2
    assert DATA_AXES == ("dp_replicate", "dp_shard", "cp")
