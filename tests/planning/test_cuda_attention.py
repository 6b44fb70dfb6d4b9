"""Memory of CUDA's attention kernels in an estimate for a GPU that is traced on a CPU.

The allocations of CUDA's kernels were read in PyTorch's source: see ``cuda_attention``. Nothing
here has run on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.configured import estimate_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from axonlaunch.config import load
from axonlaunch.models.build import construct
from axonlaunch.models.modules.attention import Rotary, RotaryTable
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.tracing.devices import cuda_norm
from axonlaunch.planning.tracing.devices.cuda_attention import backward_workspaces, workspaces
from axonlaunch.planning.tracing.storage_trace import StorageTrace, on_device
from axonlaunch.system.processes import forked_map

KIB = 1024
LONG = [
    *("model=llama_debug", "model.num_hidden_layers=2", "model.vocab_size=64"),
    *("data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=1024"),
    *("model.max_position_embeddings=1024", "model.intermediate_size=32", "strategy=single"),
    *("train.global_batch_size=1", "launch.nproc=1", "model.num_attention_heads=4"),
    "model.num_key_value_heads=2",
]
HEADS, SHARED, WIDTH = 4, 2, 32
"""Number of query heads, and of key and value heads, and the width of each."""


def heads(number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(1, number, 1024, WIDTH, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("dtype", "of_keys", "multiprocessors", "kib"),
    [
        # One number per query, an fp32 sum for the queries' gradient, and full gradients of keys
        # and values if they are shared.
        (torch.bfloat16, SHARED, None, [16, 512, 256, 256]),
        (torch.bfloat16, HEADS, None, [16, 512]),
        (torch.bfloat16, HEADS, 12, [16, 3 * 512]),
        # fp32's kernel takes no shared heads: a product as large as the output.
        (torch.float32, HEADS, None, [512, 16]),
    ],
)
def test_attention_backward_workspace_equals_torch_source(
    dtype: torch.dtype, of_keys: int, multiprocessors: int | None, kib: list[int]
) -> None:
    sizes = backward_workspaces(
        heads(HEADS, dtype), heads(of_keys, dtype), multiprocessors=multiprocessors
    )
    assert sizes == [size * KIB for size in kib]


def test_other_kernels_and_cpu_have_no_attention_workspace() -> None:
    q, k = heads(HEADS, torch.bfloat16), heads(SHARED, torch.bfloat16)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    of_gpu = workspaces(estimate_config([*LONG, "hardware=h100_80gb"]))
    assert of_gpu(torch.ops.aten.mm.default, (q, q, k)) == []
    assert sum(of_gpu(backward, (q, q, k))) == (16 + 512 + 2 * 256) * KIB
    assert workspaces(estimate_config([*LONG, "hardware=cpu"]))(backward, (q, q, k)) == []


def attention_peak(hardware: str) -> int:
    """Return the bytes at the peak of attention's backward, traced for some hardware."""
    config = estimate_config([*LONG, f"hardware={hardware}"])
    q, k, v = (
        torch.randn(1, count, 1024, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        for count in (HEADS, SHARED, SHARED)
    )
    with StorageTrace(workspaces=workspaces(config)) as trace:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        trace.forget()
        attended.backward(torch.ones_like(attended))
        trace.finish()
    return max(on_device(point) for event in trace.events for point in event.points)


def test_attention_workspaces_are_held_only_during_kernel() -> None:
    least = sum(backward_workspaces(heads(HEADS, torch.bfloat16), heads(SHARED, torch.bfloat16)))
    gradients = (HEADS + 2 * SHARED) * 1024 * WIDTH * 2
    besides = attention_peak("h100_80gb") - attention_peak("cpu")
    # A CPU's peak is after the kernel, where each gradient is copied: all except the last two.
    assert least - gradients <= besides <= least


def test_in_fp32_the_keys_and_values_that_a_gpu_repeats_are_kept_for_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_norm, "norm_as_on_cuda", lambda: None)  # makes the norms equal
    run = [*LONG, "train.precision=fp32"]
    [on_gpu], [on_cpu] = (
        estimate(estimate_config([*run, f"hardware={name}"])).ranks for name in ("h100_80gb", "cpu")
    )
    repeated = 2 * (HEADS - SHARED) * 1024 * WIDTH * 4
    more = on_gpu.breakdown["activations"] - on_cpu.breakdown["activations"]
    assert more == 2 * repeated  # in each of two layers
    assert on_gpu.peak_bytes - on_cpu.peak_bytes >= more + 2 * 32 * KIB**2  # and cuBLAS's workspace


class _Results(TorchDispatchMode):
    """Records the names, dtypes and shapes of operations' results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.found.append((str(func), tensor.dtype, tuple(tensor.shape)))
        return out


def _in_fp32(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    assert x.dtype == torch.float32
    return torch.empty_like(x)


def _forward(model: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Any:
    """Run a forward under a device's autocast, in a separate process, because it patches torch."""
    torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_: True
    # The replaced functions have other kernels on CUDA, and a CPU build of torch can't slice
    # tensors of a fake GPU. Both devices get norms in fp32, so CUDA's list has nothing to cast.
    F.rms_norm = _in_fp32
    F.scaled_dot_product_attention = lambda q, *_, **__: torch.empty_like(q.to(torch.bfloat16))
    table = partial(torch.empty, dtype=torch.float32, device=device)
    RotaryTable.forward = lambda self, length, positions=None: Rotary(  # type: ignore[method-assign]
        *(table(length, 1, self.head_dim) for _ in range(2))
    )
    config = load([f"model={model}"])
    with torch.device("meta"):
        module = construct(config.model, seed=0).requires_grad_(False)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        module.to_empty(device=device)
        inputs = torch.empty(2, *shape, dtype=dtype, device=device)
        with _Results() as results, torch.autocast(device, dtype=torch.bfloat16):
            module(inputs)
    return results.found


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [
        ("gpt", (32,), torch.int64),
        ("mlp", (784,), torch.float32),
        ("llama_debug", (32,), torch.int64),
        ("vit", (1, 28, 28), torch.float32),
    ],
)
def test_autocast_dtypes_are_equal_on_cuda_and_cpu(
    model: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The lists of the two differ in norms and softmax, but not for these models."""
    runs = [partial(_forward, model, shape, dtype, device) for device in ("cuda", "cpu")]
    on_cuda, on_cpu = forked_map.map_forked(runs)
    assert on_cuda == on_cpu
    assert torch.bfloat16 in {kind for _, kind, _ in on_cuda}
