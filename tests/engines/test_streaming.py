"""Updates streamed through a simulated GPU: copies, pinned memory and synchronization."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from support.simulated_streams import Done, Stream, is_before, is_over, simulate_streams
from torch import nn

from axonlaunch.comm import World
from axonlaunch.engines.optimizer import streaming
from axonlaunch.planning.memory.cuda_process import DeviceRequests, replay
from axonlaunch.planning.tracing.devices.update_copies import ParameterCopies, update_copies

META, HOST = torch.device("meta"), torch.device("cpu")


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_streamed_states_reuse_host_memory(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are on the host; the update runs on the meta device, which holds no values."""
    waiting: list[bool] = []
    arithmetic = streaming.UpdateArithmetic(dtype=dtype)
    copy: Any = torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> Any:
        if other.is_meta and not self.is_meta:
            waiting.append(not non_blocking)
            return self
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    weight = nn.Parameter(torch.ones(3, device=META))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight] = {"momentum_buffer": torch.ones(3)}
    streaming.stream_parameters(optimizer, device=META, states_on=HOST, arithmetic=arithmetic)
    [first_state] = optimizer.state[weight].values()
    for _ in range(2):
        weight.grad = torch.ones(3, device=META)
        optimizer.step()
    [after] = optimizer.state[weight].values()
    assert after is first_state
    assert waiting == [False, False]


def test_offloaded_parameter_is_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    copy: Any = torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> Any:
        if other.is_meta and not self.is_meta:
            written.append(self.data_ptr())
            return self
        return copy(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    streaming.stream_parameters(optimizer, device=META)
    optimizer.step()
    assert written == [weight.data_ptr()]


# Copies in both directions overlap the update, on simulated streams.


Steps = dict[str, list[Done]]


def update_on_simulated_streams(
    monkeypatch: pytest.MonkeyPatch,
    shapes: list[tuple[int, ...]],
    *,
    copied: Callable[..., torch.Tensor] = lambda tensor, device: tensor.clone(),
    dtype: torch.dtype | None = None,
) -> tuple[Done, Steps, list[list[bool]]]:
    """Update parameters of these shapes with states on the host.

    ``copied`` copies a tensor to the device, and ``dtype`` is the type of the update.

    Returns:
        The backward, the operations on each parameter in order, and for each parameter, whether
        the earlier ones had left the device when its copy was started.
    """
    done: Steps = {"brought": [], "updated": [], "taken back": []}
    over: list[list[bool]] = []
    simulate_streams(monkeypatch)
    backward = Stream.current.do()
    monkeypatch.setattr(streaming, "_copied", copied)

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name == "brought":
                over.append([is_over(taken) for taken in done["taken back"]])
            done[name].append(Stream.current.do())
            return function(*args)

        return call

    monkeypatch.setattr(streaming, "_brought", noted("brought", streaming._brought))
    take_back = noted("taken back", streaming._take_back_values)
    monkeypatch.setattr(streaming, "_take_back_values", take_back)
    weights = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    monkeypatch.setattr(optimizer, "step", noted("updated", optimizer.step))
    gpu, arithmetic = torch.device("cuda", 0), streaming.UpdateArithmetic(dtype=dtype)
    streaming.stream_parameters(optimizer, device=gpu, states_on=HOST, arithmetic=arithmetic)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert all(map(is_over, done["taken back"]))
    return backward, done, over


def test_streaming_copies_updates_and_copies_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    backward, streamed, _ = update_on_simulated_streams(monkeypatch, [(3, 2)] * 4)
    for brought, updated, taken in zip(*streamed.values(), strict=True):
        assert is_before(brought, updated)
        assert is_before(backward, updated)
        assert is_before(updated, taken)


def test_streaming_overlaps_copies_with_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    _, streamed, _ = update_on_simulated_streams(monkeypatch, [(3, 2)] * 4)
    third = streamed["brought"][2]
    second = streamed["updated"][1]
    first = streamed["taken back"][0]
    for later, other in ((third, second), (second, first)):
        assert not is_before(later, other)
        assert not is_before(other, later)
    second_left = streamed["taken back"][1]
    assert not is_before(second_left, third)
    assert not is_before(third, second_left)


def test_streaming_copies_from_host_do_not_wait_for_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backward, streamed, _ = update_on_simulated_streams(monkeypatch, [(3, 2)] * 4)
    assert not any(is_before(backward, brought) for brought in streamed["brought"])


@pytest.mark.parametrize(
    ("shapes", "left_before"),
    [
        ([(3, 2)] * 5, [0, 0, 0, 1, 2]),  # room for three
        ([(3, 2), (1, 2), (9, 2), (1, 2)], [0, 0, 0, 1]),  # whatever their sizes
        ([(3, 2), (3,), (3,), (3, 2), (3, 2), (3, 2)], [0, 0, 0, 0, 0, 1]),  # vectors do not count
        ([(3,), (3, 2), (3, 2), (3, 2), (3, 2)], [0, 0, 0, 0, 2]),  # but leave in order
    ],
)
def test_streaming_waits_only_for_room_of_three_matrices(
    shapes: list[tuple[int, ...]], left_before: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, over = update_on_simulated_streams(monkeypatch, shapes)
    assert [sum(each) for each in over] == left_before


def test_estimates_count_the_copies_that_an_update_has_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The most bytes of live copies on simulated streams, of a parameter and its gradient."""
    shapes = [(64, 8), (8, 8), (8,), (8, 16), (16, 8), (8,), (8, 8), (8, 8), (8,), (64, 8)]
    live: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        nonlocal most
        copy = tensor.clone()
        live.add(copy)
        most = max(most, sum(each.nbytes for each in live))
        return copy

    update_on_simulated_streams(monkeypatch, shapes, copied=copied)
    assert not live
    sizes = [4 * math.prod(shape) for shape in shapes]
    copies = [
        ParameterCopies(len(shape) > 1, (size, size))
        for shape, size in zip(shapes, sizes, strict=True)
    ]
    assert replay(DeviceRequests([], copies=copies)).live == most == 2 * sum(sizes[:4])


def test_update_in_another_type_has_working_copies_of_one_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of parameters that wait for their way back would be memory that no estimate counts."""
    convert, live = streaming._working_copy, weakref.WeakSet[nn.Parameter]()
    alive: list[int] = []

    def converted(*arguments: Any) -> nn.Parameter:
        working = convert(*arguments)
        live.add(working)
        alive.append(len(live))
        return working

    monkeypatch.setattr(streaming, "_working_copy", converted)
    update_on_simulated_streams(monkeypatch, [(3, 2)] * 5, dtype=torch.float64)
    assert alive == [1] * 5


def test_estimated_copies_are_in_the_order_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of options moves the head of a model from its end next to its embedding."""
    alike = "optimizer.groups={embed_tokens.weight:{lr:1e-4},lm_head.weight:{lr:1e-4}}"
    layout = ["strategy=fsdp", "launch.nproc=1", "strategy.fsdp.cpu_offload=params", alike]
    chosen = run_config(["model=llama_debug", "data=synthetic_tokens", *layout])
    bring, updated = streaming._brought, []

    def brought(optimizer: Any, tensor: torch.Tensor, *unused: Any) -> Any:
        updated.append((tensor.nbytes, tensor.nbytes))  # with its gradient
        return bring(optimizer, tensor, *unused)

    def estimated(world: World) -> list[tuple[int, ...]]:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))
        return [copies.sizes for copies in update_copies(chosen, engine)]

    monkeypatch.setattr(streaming, "_brought", brought)
    [sizes] = World.mock(1).run(estimated)
    assert sizes == updated
    assert sizes[0] == sizes[1]  # embedding and head


@pytest.mark.parametrize("offload", ["params", "full"])
def test_no_hook_makes_gradients_wait_on_their_way_to_the_host(offload: str) -> None:
    """``fully_shard`` copies the gradient of a parameter with a hook while the backward waits."""
    layout = ["strategy=fsdp", "launch.nproc=1", f"strategy.fsdp.cpu_offload={offload}"]
    chosen = run_config(["model=mlp", "data=synthetic_images", *layout])

    def hooks(world: World) -> dict[str, Any]:
        engine, _ = rank_engine(chosen, world)
        return {
            name: hooks
            for name, parameter in engine.named_parameters()
            if (hooks := getattr(parameter, "_post_accumulate_grad_hooks", None))
        }

    assert World.mock(1).run(hooks) == [{}]
