"""Attention uses a fused kernel if there is one, and rotary positions need few kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from axonlaunch.models.modules.attention import Attention, RotaryTable


@pytest.mark.parametrize(
    ("device", "dtype", "is_masked", "repeats"),
    [
        ("cuda", torch.float32, False, True),  # its fused kernels refuse grouped heads
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.bfloat16, True, True),
        ("cpu", torch.float32, False, False),
        ("cpu", torch.bfloat16, True, False),
    ],
)
def test_grouped_heads_are_repeated_where_kernels_of_cuda_refuse_them(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    is_masked: bool,
    repeats: bool,
) -> None:
    calls: list[tuple[int, bool]] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        assert k.shape == v.shape
        calls.append((k.shape[1], options["enable_gqa"]))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    layer = Attention(32, num_heads=8, num_key_value_heads=2)
    with FakeTensorMode():
        q = torch.empty(1, 8, 4, 4, device=device, dtype=dtype)
        k, v = torch.empty(2, 1, 2, 4, 4, device=device, dtype=dtype)
        mask = torch.ones(4, 4, device=device, dtype=torch.bool) if is_masked else None
        layer.attend(q, k, v, mask)
    assert calls == [(8, False) if repeats else (2, True)]


def test_repeated_heads_are_those_of_the_group() -> None:
    q = torch.randn(1, 4, 8, 4)
    k, v = torch.randn(2, 1, 2, 8, 4)
    repeated = [heads.repeat_interleave(2, dim=1) for heads in (k, v)]
    full = F.scaled_dot_product_attention(q, *repeated, is_causal=True)
    layer = Attention(16, num_heads=4, num_key_value_heads=2)
    torch.testing.assert_close(layer.attend(q, k, v), full)


class _Launches(TorchDispatchMode):
    """Counts the kernels that a GPU would launch: operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "launches"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_rotary_embedding_launches_few_kernels_and_is_exact(
    dtype: torch.dtype, launches: int
) -> None:
    table = RotaryTable(8, max_positions=5, theta=10.0)
    x = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_()
    gradient = torch.ones_like(x)
    with _Launches() as counted:
        turned = table(5).turn(x)
        turned.backward(gradient)
    assert counted.count <= launches

    angles = torch.arange(5)[:, None] * 10.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    pairs = torch.complex(*x.detach().double().chunk(2, dim=-1))
    expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    full = torch.cat((expected.real, expected.imag), dim=-1)
    torch.testing.assert_close(turned.detach(), full.to(dtype))
