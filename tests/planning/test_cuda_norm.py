"""Memory that RMSNorm keeps on a GPU, in an estimate for a GPU that is traced on a CPU.

The tensors that CUDA's kernel keeps were observed on torch 2.11's CUDA build, with fake tensors on
a GPU; a CPU build decomposes the norm there, too. Nothing here has run on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.configured import estimate_config
from torch import Tensor, nn

from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.tracing.devices import cuda_norm

BF16, FP32 = torch.bfloat16, torch.float32
Kept = list[tuple[tuple[int, ...], torch.dtype]]


def kept(x: Tensor, weight: Tensor) -> Kept:
    found: Kept = []

    def note(tensor: Tensor) -> Tensor:
        found.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        normed = F.rms_norm(x, (16,), weight, 1e-5)
    normed.sum().backward()
    assert (x.grad is None, weight.grad is None) == (False, False)
    return found


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "rms_norm", F.rms_norm)  # restored afterwards
    cuda_norm.norm_as_on_cuda()


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_cuda_rms_norm_saves_input_weight_and_row_statistics(dtype: torch.dtype) -> None:
    assert kept(leaf(2, 8, 16, dtype=dtype), leaf(16, dtype=dtype)) == [
        ((2, 8, 16), dtype),
        ((16,), dtype),
        ((2, 8, 1), FP32),
    ]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_cuda_rms_norm_with_other_weight_dtype_is_decomposed(as_on_cuda: None) -> None:
    on_cuda = kept(leaf(2, 8, 16, dtype=BF16), leaf(16, dtype=FP32))
    cuda_norm.nn.functional.rms_norm = cuda_norm._unfused_rms_norm
    assert on_cuda == kept(leaf(2, 8, 16, dtype=BF16), leaf(16, dtype=FP32))
    assert ((2, 8, 16), FP32) in on_cuda


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("is_cast", "dtype"), [(True, FP32), (False, BF16)])
def test_cuda_autocast_list_equals_torch(
    is_cast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_norm, "_IS_CAST", is_cast)
    with torch.autocast("cpu", dtype=BF16):
        normed = F.rms_norm(torch.ones(2, 16, dtype=BF16), (16,), torch.ones(16, dtype=BF16))
    assert normed.dtype == dtype


def test_llama_norms_save_less_memory_on_gpu() -> None:
    run = [
        *("model=llama_debug", "model.num_hidden_layers=2", "strategy=single", "launch.nproc=1"),
        *("data=synthetic_tokens", "data.sequence_length=1024", "train.global_batch_size=1"),
        *("model.num_key_value_heads=4", "model.num_attention_heads=4", "train.precision=fp32"),
        # So that the peak is at the loss.
        *("model.max_position_embeddings=1024", "model.vocab_size=2048", "data.vocab_size=2048"),
    ]
    config = estimate_config(run)
    [on_gpu], [on_cpu] = (
        estimate(estimate_config([*run, f"hardware={name}"])).ranks for name in ("h100_80gb", "cpu")
    )
    sizes: Any = config.model
    tokens = int(config.data.sequence_length)  # type: ignore[attr-defined]
    # For each norm, the decomposed steps keep the normalized values before weighting. The norm's
    # input is kept on both devices for the residual sum, and so is a number for each row.
    less = on_cpu.breakdown["activations"] - on_gpu.breakdown["activations"]
    assert less == (2 * sizes.num_hidden_layers + 1) * tokens * sizes.hidden_size * 4
