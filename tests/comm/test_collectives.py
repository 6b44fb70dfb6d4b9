from __future__ import annotations

from typing import Any

import pytest
import torch
from support.collective_checks import CHECKS, WORLD_SIZE

from axonlaunch import comm
from axonlaunch.comm import World


@pytest.mark.slow(keep=70)
def test_collectives_on_mock(check_name: str) -> None:
    World.mock(WORLD_SIZE, timeout_s=20).run(CHECKS[check_name])


@pytest.mark.slow(keep=24)
def test_collectives_on_gloo(check_name: str, gloo_outcomes: list[dict[str, Any]]) -> None:
    for rank, outcome in enumerate(gloo_outcomes):
        error = outcome["checks"][check_name].get("error")
        assert error is None, f"rank {rank}: {error}"


def test_gloo_leaves_no_environment_and_no_group(gloo_outcomes: list[dict[str, Any]]) -> None:
    assert [outcome["left"] for outcome in gloo_outcomes] == [
        {"interface": None, "world": False}
    ] * len(gloo_outcomes)


def test_gloo_and_mock_agree(gloo_outcomes: list[dict[str, Any]]) -> None:
    on_mock = World.mock(WORLD_SIZE).run(CHECKS["random_values"])
    for mock, gloo in zip(on_mock, gloo_outcomes, strict=True):
        for index, (ours, from_gloo) in enumerate(
            zip(mock, gloo["checks"]["random_values"]["value"], strict=True)
        ):
            tolerance = 1e-6 if index < 5 else 2e-2  # the second five are bfloat16
            torch.testing.assert_close(
                torch.tensor(ours), torch.tensor(from_gloo), rtol=tolerance, atol=tolerance
            )


def test_collectives_without_world_assume_one_process() -> None:
    assert (comm.rank(), comm.world_size(), comm.is_main_process()) == (0, 1, True)
    with pytest.raises(ValueError, match=r"there is no world: call World.init\(\) first"):
        comm.all_reduce_sum(torch.zeros(2))


def test_a_world_of_one_changes_nothing() -> None:
    with World.init() as world:
        assert world.backend == "gloo"
        tensor = torch.arange(4.0)
        for call in (
            comm.all_reduce_sum,
            comm.all_reduce_mean,
            comm.all_reduce_product,
            comm.broadcast,
            comm.reduce_scatter_sum,
            comm.reduce_scatter_mean,
            comm.scatter_tensor,
        ):
            assert call(tensor.clone()).tolist() == [0.0, 1.0, 2.0, 3.0]
        assert comm.all_gather(tensor).shape == (1, 4)
        gathered = comm.gather_tensor(tensor)
        assert gathered is not None
        assert gathered.shape == (1, 4)
        comm.barrier()
        model = torch.nn.Linear(2, 2)
        model(torch.ones(1, 2)).sum().backward()
        comm.sync_gradients(model)
        assert model.weight.grad.tolist() == [[1.0, 1.0]] * 2


def test_mock_collectives_support_every_movable_dtype() -> None:
    def move(world: World) -> list[bool]:
        matches = []
        for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64):
            tensor = torch.tensor([world.rank]).to(dtype)
            matches.append(comm.all_gather(tensor).to(torch.int64).flatten().tolist() == [0, 1])
        return matches

    assert World.mock(2).run(move) == [[True] * 4] * 2
