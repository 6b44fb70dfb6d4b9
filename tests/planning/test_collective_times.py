from __future__ import annotations

from dataclasses import replace

import pytest

from axonlaunch.config import ConfigError
from axonlaunch.config.options.hardware import HardwareConfig
from axonlaunch.planning.throughput.collectives import Links
from axonlaunch.planning.throughput.operations import Amount, CollectiveOp, ExchangeKind

HARDWARE = HardwareConfig(
    name="round",
    link_gb_s=100,
    link_efficiency=1.0,
    link_latency_us=1.0,
    network_gb_s=10,
    network_efficiency=1.0,
    network_latency_us=10.0,
)
GB = 1e9


def seconds(kind: ExchangeKind, axes: dict[str, int], axis: str, num_bytes: float = GB) -> float:
    links = Links(HARDWARE, axes, ranks_per_node=8)
    # Two messages of different sizes: their difference does not contain the latency.
    key = CollectiveOp("forward", kind, (axis,))
    return links.seconds(key, Amount(1, num_bytes)) - links.seconds(key, Amount(1, 0))


def test_ring_all_gather_receives_other_shards() -> None:
    assert seconds("all_gather", {"tp": 4}, "tp") == pytest.approx(0.75 / 100)


def test_all_reduce_costs_twice_reduce_scatter() -> None:
    once, two = (seconds(kind, {"tp": 4}, "tp") for kind in ("reduce_scatter", "all_reduce"))
    assert two == pytest.approx(2 * once)


def test_between_nodes_a_ring_runs_through_every_adapter_of_the_group() -> None:
    whole_nodes = seconds("all_gather", {"dp_shard": 16}, "dp_shard")
    one_a_node = seconds("all_gather", {"dp_shard": 16, "tp": 8}, "dp_shard")
    assert whole_nodes == pytest.approx(15 / 16 / 80 * (1 + 2 / 58))
    assert one_a_node == pytest.approx(15 / 16 / 10 * (1 + 16 / 58))


def test_network_bandwidth_is_halved_between_58_nodes() -> None:
    few, many = (seconds("all_gather", {"dp_shard": 8 * nodes}, "dp_shard") for nodes in (2, 58))
    assert few == pytest.approx(15 / 16 / 80 * (1 + 2 / 58))
    assert many == pytest.approx(463 / 464 / 40)


def test_the_innermost_axis_stays_inside_a_node() -> None:
    inside = seconds("all_gather", {"dp_shard": 4, "tp": 8}, "tp")
    assert inside == pytest.approx(7 / 8 / 100)


@pytest.mark.parametrize(
    ("ranks_per_node", "axes", "spread"),
    [
        (4, {"dp_shard": 12}, (4, 3)),
        (4, {"pp": 2, "dp_shard": 6}, (2, 2)),  # ranks 0 to 3 and 4, 5
        (6, {"dp_replicate": 3, "dp_shard": 4}, (2, 2)),  # ranks 4, 5 and 6, 7
        (6, {"dp_replicate": 4, "dp_shard": 3}, (3, 1)),
        (6, {"dp_shard": 3, "tp": 4}, (1, 2)),  # ranks 0, 4 and 8
        (6, {"dp_shard": 2, "tp": 6}, (1, 2)),
    ],
)
def test_groups_are_spread_over_the_nodes_of_the_run(
    ranks_per_node: int, axes: dict[str, int], spread: tuple[int, int]
) -> None:
    links = Links(HARDWARE, axes, ranks_per_node=ranks_per_node)
    assert links._spread(*links._extent(("dp_shard",))) == spread


def test_adapters_never_beat_the_links_that_feed_them() -> None:
    fast = Links(replace(HARDWARE, network_gb_s=50), {"dp_shard": 16}, ranks_per_node=8)
    key = CollectiveOp("forward", "all_gather", ("dp_shard",))
    moving = fast.seconds(key, Amount(1, GB)) - fast.seconds(key, Amount(1, 0))
    assert moving == pytest.approx(15 / 16 / 100)


def test_exchange_between_nodes_uses_one_adapter_per_rank() -> None:
    inside = seconds("all_to_all", {"dp_shard": 8}, "dp_shard")
    across = seconds("all_to_all", {"dp_shard": 16}, "dp_shard")
    assert inside == pytest.approx(7 / 8 / 100)
    assert across == pytest.approx(8 / 16 / 10)  # half of the ranks are in the other node


def test_axis_of_experts_is_inside_a_node() -> None:
    links = Links(HARDWARE, {"dp_shard": 32}, {"efsdp": 4, "ep": 8}, ranks_per_node=8)
    key = CollectiveOp("forward", "all_to_all", ("ep",))
    moving = links.seconds(key, Amount(1, GB)) - links.seconds(key, Amount(1, 0))
    assert moving == pytest.approx(7 / 8 / 100)


def test_small_all_reduce_uses_tree() -> None:
    links = Links(HARDWARE, {"dp_replicate": 512}, ranks_per_node=8)
    small = links.seconds(CollectiveOp("forward", "all_reduce", ("dp_replicate",)), Amount(1, 0))
    # Up and down 7 hops in a node and 6 halvings of 64 nodes.
    assert small == pytest.approx(6.6e-6 + 2 * (7 * 1e-6 + 6 * 10e-6))


def test_a_group_of_one_costs_nothing() -> None:
    key = CollectiveOp("forward", "all_reduce", ("tp",))
    assert Links(HARDWARE, {"tp": 1}, ranks_per_node=8).seconds(key, Amount(1, GB)) == 0.0


def test_message_time_uses_link_or_network() -> None:
    inside = Links(HARDWARE, {"pp": 2, "tp": 4}, ranks_per_node=8).message(GB, axis="pp")
    between = Links(HARDWARE, {"pp": 2, "tp": 8}, ranks_per_node=8).message(GB, axis="pp")
    assert inside == pytest.approx(0.01, rel=0.01)
    assert between == pytest.approx(0.1, rel=0.01)


def test_missing_network_figure_is_error() -> None:
    links = Links(replace(HARDWARE, network_gb_s=None), {"dp_shard": 16}, ranks_per_node=8)
    with pytest.raises(ConfigError, match=r"hardware\.network_gb_s=null: .*write hardware\."):
        links.seconds(CollectiveOp("forward", "all_gather", ("dp_shard",)), Amount(1, GB))


GLOO = replace(HARDWARE, link="loopback", link_gb_s=1, allgather_bw_gb_s=0.5, link_latency_us=100.0)


def test_gloo_reduce_scatter_time_is_that_of_all_reduce() -> None:
    links = Links(GLOO, {"dp_shard": 2}, ranks_per_node=8)

    def seconds(kind: ExchangeKind) -> float:
        return links.seconds(CollectiveOp("backward", kind, ("dp_shard",)), Amount(1, GB))

    hops = 2 * 100e-6
    assert seconds("all_reduce") == pytest.approx(1 + hops)
    assert seconds("reduce_scatter") == pytest.approx(1 + hops)
    assert seconds("all_gather") == pytest.approx(1 + hops)
