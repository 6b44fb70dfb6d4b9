"""States in bf16 are rounded up or down at random, without bias and the same in every layout."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from axonlaunch.comm import World
from axonlaunch.engines.precision.rounded_states import element_bits, round_to_bf16
from axonlaunch.models.tensors.dtensor_regions import full_tensor, packed_placement

CPU = torch.device("cpu")
SETTINGS = [
    *("model=gpt", "model.num_hidden_layers=2", "model.hidden_size=32", "data=synthetic_tokens"),
    *("data.sequence_length=16", "train.global_batch_size=8", "scheduler=constant"),
    *("optimizer.state_dtype=bf16", "train.steps=8", "checkpoint.every=0"),
]
LAYOUTS = {
    "zero1": ["strategy=zero1", "launch.nproc=2"],
    "fsdp": ["strategy=fsdp", "launch.nproc=4"],
    "tensor": ["strategy=tensor", "launch.nproc=2"],
    "pipeline": ["strategy=pipeline", "launch.nproc=2"],
}


def by_numpy(shape: tuple[int, ...], text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Hash the indices of each element with lowbias32, in numpy."""
    seed = int.from_bytes(blake2b(text.encode(), digest_size=4).digest())
    numbers = np.uint32(seed)
    with np.errstate(over="ignore"):
        for size in shape:
            numbers = numbers[..., None] + np.arange(size, dtype=np.uint32)
            numbers = (numbers ^ (numbers >> np.uint32(16))) * np.uint32(0x7FEB352D)
            numbers = (numbers ^ (numbers >> np.uint32(15))) * np.uint32(0x846CA68B)
            numbers ^= numbers >> np.uint32(16)
    return numbers


@pytest.mark.parametrize("shape", [(7,), (5, 6), (2, 3, 4)])
def test_element_bits_are_the_published_hash(shape: tuple[int, ...]) -> None:
    bits = element_bits(torch.empty(shape), "0/1/a.exp_avg", device=CPU)
    expected = by_numpy(shape, "0/1/a.exp_avg").astype(np.int32)
    assert np.array_equal(bits.numpy(), expected)


def test_element_bits_of_shards_are_those_of_the_full_tensor() -> None:
    full = torch.empty(8, 12)
    expected = element_bits(full, "key", device=CPU)

    def run(world: World) -> bool:
        mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("a", "b")
        )
        for placements in ([Shard(0), Shard(1)], [Shard(1), packed_placement(0, pieces=2)]):
            part: Any = distribute_tensor(expected.clone(), mesh, placements)
            bits = element_bits(part, "key", device=CPU)
            if not torch.equal(bits, part.to_local()):
                return False
        return True

    assert World.mock(4).run(run) == [True] * 4


def test_rounding_gives_a_neighbor_with_the_probability_of_its_distance() -> None:
    low, high = (torch.tensor(value, dtype=torch.bfloat16) for value in (1.0, 1.0078125))
    value = torch.full((200_000,), 1.0 + 0.3 * 0.0078125)
    rounded = round_to_bf16(value, element_bits(value, "key", device=CPU))
    assert {*rounded.unique().tolist()} == {float(low), float(high)}
    assert float((rounded == high).float().mean()) == pytest.approx(0.3, abs=0.005)
    negative = round_to_bf16(-value, element_bits(value, "key", device=CPU))
    assert torch.equal(negative, -rounded)


def test_numbers_of_bf16_infinities_and_nan_are_not_changed() -> None:
    exact = torch.randn(1000).bfloat16()
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0], dtype=torch.bfloat16)
    for values in (exact, special):
        bits = torch.full(values.shape, -1, dtype=torch.int32)
        assert torch.equal(
            round_to_bf16(values.float(), bits).nan_to_num(7.0), values.nan_to_num(7.0)
        )


def states(overrides: list[str]) -> dict[str, Tensor]:
    chosen = run_config([*SETTINGS, *overrides])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> dict[str, Tensor]:
        engine, loader = rank_engine(chosen, world)
        for step in range(3):
            engine.train_step(loader.batch(step))
        return {k: full_tensor(v) for k, v in engine.state_dict()["optimizer"].items()}

    return {k: v for rank in World.mock(chosen.launch.nproc).run(run) for k, v in rank.items()}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounded_states_agree_in_every_layout(layout: str) -> None:
    expected = states(["strategy=single"])
    actual = states(LAYOUTS[layout])
    for name, state in actual.items():
        if name.endswith(".step") or "k_proj.bias" in name:  # whose gradient is only rounding
            continue
        assert state.dtype is torch.bfloat16
        # Sums in another order differ by 1e-7, which the rounding of few elements shows.
        different = int((state != expected[name]).sum())
        assert different <= 1 + state.numel() // 100, name


def test_rounding_depends_on_seed_and_step() -> None:
    value = torch.full((1000,), 1.003)
    rounded = [
        round_to_bf16(value, element_bits(value, key, device=CPU))
        for key in ("0/1/a.exp_avg", "0/2/a.exp_avg", "1/1/a.exp_avg", "0/1/a.exp_avg_sq")
    ]
    for index, one in enumerate(rounded):
        assert not any(torch.equal(one, other) for other in rounded[:index])
