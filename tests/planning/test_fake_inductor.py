"""Compiled blocks allocate the same memory in a fake world as in a real one.

If one of these fails after an update of torch: only ``planning/tracing/devices/fake_inductor.py``
replaces parts of Inductor. Look at its generated code (``TORCH_LOGS=output_code``) for allocations
and for the construction of kernels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configured import estimate_config
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._inductor import async_compile
from torch.profiler import ProfilerActivity, profile
from torch.utils import _triton

from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.tracing import fake_world
from axonlaunch.planning.tracing.devices import cuda_attention, cuda_dropout, fake_inductor
from axonlaunch.planning.tracing.dry_run import FakeRank
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import StorageTrace
from axonlaunch.system.processes import forked_map

HIDDEN, HEADS = 64, 4

# torch's compiler warns about its own imports and calls.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]


class Block(nn.Module):
    """A layer with all that affects saved activations: norms, attention, a gate, residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.project = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.project(self.norms[0](x)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        hidden = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


def compiled(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return a model of two compiled blocks, and its input."""
    torch.set_default_dtype(dtype)
    blocks = [Block(), Block()]
    for block in blocks:
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    model = nn.Sequential(nn.Embedding(32, HIDDEN), *blocks)
    return model, torch.zeros(4, 32, dtype=torch.int64)


def step(model: nn.Module, tokens: Tensor) -> None:
    model(tokens).sum().backward()


def really(dtype: torch.dtype) -> int:
    """Return the peak of torch's allocator in a second step, minus the memory held before."""
    torch.set_num_threads(1)
    model, tokens = compiled(dtype)
    step(model, tokens)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(model, tokens)
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    in_order = sorted(events, key=lambda event: event.start_ns())
    steps = [event.nbytes() if event.name() == "[memory]" else event.name() for event in in_order]
    live = peak = 0
    for previous, change, after in zip(["", *steps], steps, [*steps[1:], ""], strict=False):
        if isinstance(change, str):
            continue
        live += change
        # Temporary allocations of oneDNN's bf16 products depend on the processor.
        if not (isinstance(previous, str) and after == -change):
            peak = max(peak, live)
    return peak


def estimated(dtype: torch.dtype) -> int:
    fake_world.join_fake_world(rank=0, world_size=1)
    fake_inductor.install_fake_inductor(for_gpu=False)
    with fake_tensor_mode():
        model, tokens = compiled(dtype)
        step(model, tokens)
        model.zero_grad()
        with StorageTrace() as trace:
            trace.tag([*model.parameters(), tokens], "parameters")
            trace.forget()
            initial = sum(trace.now.values())
            step(model, tokens)
            trace.finish()
    return max(sum(point) for event in trace.events for point in event.points) - initial


@pytest.mark.skipif(shutil.which("g++") is None, reason="nothing builds what is compiled")
@pytest.mark.slow  # half a minute, in which g++ reads torch's headers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_blocks_estimate_equals_memory(dtype: torch.dtype) -> None:
    reported, peak = forked_map.map_forked([partial(estimated, dtype), partial(really, dtype)])
    assert reported == peak


def writers(*, for_gpu: bool) -> set[str]:
    """Return the languages of a step's kernels."""
    fake_world.join_fake_world(rank=0, world_size=1)
    fake_inductor.install_fake_inductor(for_gpu=for_gpu)
    written: set[str] = set()

    def note(name: str, build: Callable[..., Any], *source: Any, **options: Any) -> Any:
        written.add(name)
        return build(*source, **options)

    for name in ("triton", "cpp_pybinding"):
        build = getattr(async_compile.AsyncCompile, name)
        setattr(async_compile.AsyncCompile, name, partial(note, name, build))
    with fake_tensor_mode():
        step(*compiled(torch.bfloat16))
    return written


@pytest.mark.slow
def test_fake_inductor_writes_kernels_for_target_device_without_building(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    runs = [partial(writers, for_gpu=for_gpu) for for_gpu in (True, False)]
    assert forked_map.map_forked(runs) == [{"triton"}, {"cpp_pybinding"}]


@pytest.mark.parametrize(("hardware", "for_gpu"), [("h100_80gb", True), ("cpu", False)])
def test_fake_inductor_kernels_follow_device_of_estimate(
    hardware: str, for_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*, for_gpu: bool) -> None:
        raise InterruptedError(f"for a GPU: {for_gpu}")

    monkeypatch.setattr(fake_inductor, "install_fake_inductor", asked)
    monkeypatch.setattr(cuda_attention, "repeat_heads_as_on_cuda", lambda: None)
    monkeypatch.setattr(cuda_dropout, "drop_as_on_cuda", lambda: None)
    chosen = ["strategy=single", "launch.nproc=1", "train.compile=true", f"hardware={hardware}"]
    world: Any = SimpleNamespace(rank=0, world_size=1)
    with pytest.raises(InterruptedError, match=f"for a GPU: {for_gpu}"):
        FakeRank(ReducedRun.of(estimate_config(chosen)), world)


def devices_asked() -> list[str]:
    """Return the devices that torch queries Triton for, on a node with Triton."""
    devices: list[str] = []
    vars(_triton)["has_triton_package"] = lambda: True
    vars(device_interface)["get_interface_for_device"] = devices.append
    fake_inductor.install_fake_inductor(for_gpu=True)
    _triton.has_triton.cache_clear()
    with suppress(AttributeError):  # the interface's attributes do not exist
        _triton.has_triton()
    return devices


def test_fake_inductor_does_not_query_gpu_for_triton() -> None:
    assert forked_map.map_forked([devices_asked]) == [[]]


LLAMA = [
    *("model=llama_debug", "model.num_hidden_layers=2", "data=synthetic_tokens"),
    *("data.sequence_length=32", "train.global_batch_size=8", "launch.nproc=2", "hardware=cpu"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "strategy=fsdp",
        "strategy=ddp train.precision=bf16",
        "strategy=tensor",
        "strategy=pipeline",
        "strategy=zero2 train.activation_checkpointing=selective",
        "strategy=fsdp train.activation_checkpointing=full",
    ],
)
def test_compiler_recomputation_saves_no_activations(layout: str) -> None:
    def peak(compile_: str) -> int:
        overrides = [*LLAMA, *layout.split(), f"train.compile={compile_}"]
        return estimate(estimate_config(overrides)).peak_bytes

    eager, fused = peak("false"), peak("true")
    assert fused < eager or (fused == eager and "full" in layout)
