"""A trace counts every storage once, during its lifetime, in the right category."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from axonlaunch.planning.tracing.storage_trace import CATEGORIES, StorageTrace, on_device
from axonlaunch.system.processes import forked_map

KIB = 1024


def held(trace: StorageTrace) -> dict[str, int]:
    return {name: size for name, size in trace.now.items() if size}


def peak(trace: StorageTrace) -> dict[str, int]:
    point = max((p for event in trace.events for p in event.points), key=on_device)
    return {name: size for name, size in zip(CATEGORIES, point, strict=False) if size}


def test_views_of_a_storage_count_once_and_only_while_one_lives() -> None:
    with StorageTrace() as trace:
        base = torch.zeros(KIB)
        part = base[10:].view(-1)
        assert held(trace) == {"activations": 4 * KIB}
        del base
        assert held(trace) == {"activations": 4 * KIB}
        del part
        assert held(trace) == {}
    assert peak(trace) == {"activations": 4 * KIB}


def test_backward_results_are_temporary_until_gradient() -> None:
    layer = nn.Linear(KIB, 1, bias=False)
    with StorageTrace() as trace:
        trace.tag(layer.parameters(), "parameters")
        trace.count_gradients_of(layer.parameters())
        loss = layer(torch.ones(2, KIB)).sum()
        trace.begin("backward")
        loss.backward()
        trace.finish()
    # The weight, activations of the forward (inputs, outputs, loss), the gradient.
    assert held(trace)["parameters"] == held(trace)["gradients"] == 4 * KIB


def test_storage_resize_is_restored_after_the_last_trace_also_after_an_error() -> None:
    resize = torch.UntypedStorage.resize_
    first, second = StorageTrace(), StorageTrace()
    first.__enter__()
    with pytest.raises(ValueError, match="a step fails"), second:
        raise ValueError("a step fails")
    assert torch.UntypedStorage.resize_ is not resize
    first.__exit__(None, None, None)
    assert torch.UntypedStorage.resize_ is resize


def test_clearing_a_gradient_at_the_peak_reads_no_freed_memory() -> None:
    def gradients_before_and_after() -> list[dict[str, int]]:
        parameter = nn.Parameter(torch.ones(KIB))
        with StorageTrace() as trace:
            trace.tag([parameter], "parameters")
            trace.count_gradients_of([parameter])
            for _ in range(3):
                trace.forget()
                parameter.grad = torch.ones(KIB)
                parameter.grad = None  # frees it while ``parameter.grad`` still points to it
            after = held(trace)
            parameter.grad = torch.ones(KIB)
            trace.finish()
            return [held(trace), after]

    # In a separate process, because reading freed memory would end it with signal 11.
    [(full, after)] = forked_map.map_forked([gradients_before_and_after])
    assert full == {"parameters": 4 * KIB, "gradients": 4 * KIB}
    assert after == {"parameters": 4 * KIB}


def test_a_new_storage_with_the_id_of_a_freed_one_is_counted() -> None:
    with StorageTrace() as trace:
        for number in range(1, 20):
            tensor = torch.zeros(number * KIB)
            assert held(trace) == {"activations": 4 * number * KIB}
            del tensor
    assert held(trace) == {}


def test_resized_storage_counts_current_size() -> None:
    with StorageTrace() as trace:
        gathered = torch.zeros(KIB)
        gathered.untyped_storage().resize_(0)
        assert held(trace) == {}
        gathered.untyped_storage().resize_(8 * KIB)
        assert held(trace) == {"communication": 8 * KIB}


def test_offloaded_storage_counts_on_host() -> None:
    with StorageTrace(on_host={"optimizer"}) as trace:
        with trace.during("optimizer"):
            state = torch.zeros(KIB)
        trace.finish()
        assert held(trace) == {}
        assert trace.host == {"optimizer": 4 * KIB, "offloaded": 0}
        assert trace.events[-1].points[-1][-1] == 4 * KIB
        del state


def test_an_event_holds_the_moments_between_its_beginning_and_the_next() -> None:
    with StorageTrace() as trace:
        torch.zeros(KIB)
        trace.begin("second", 1)
        tensor = torch.zeros(KIB)
        trace.finish()
    assert [event.name for event in trace.events] == [("start",), ("second", 1)]
    assert [on_device(p) for p in trace.events[1].points] == [0, 4 * KIB]
    del tensor


@pytest.mark.parametrize("width", [64, 200])
def test_the_allocator_itself_reports_the_same_peak(width: int) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)])
    inputs = torch.randn(32, width)

    def step() -> None:
        model(inputs).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    kinds = [ProfilerActivity.CPU]
    # Events of earlier cycles do not matter, but torch 2.11 warns about them.
    with profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        step()
    assert profiler.profiler is not None
    reported = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in reported if event.name() == "[memory]"]
    total, highest = 0, 0
    for size in sizes:
        total += size
        highest = max(highest, total)
    with StorageTrace() as trace:
        trace.tag([*model.parameters(), inputs], "parameters")
        step()
        trace.finish()
    traced = peak(trace)
    del traced["parameters"]  # existed before
    assert sum(traced.values()) == highest
