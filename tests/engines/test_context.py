"""Context parallelism: torch's ring attention on the CPU, positions, and gathered outputs.

If a test here fails after an upgrade of torch, look at the changes to
``torch.distributed.tensor.experimental._context_parallel._attention``: ``ring_attention`` calls its
two templates, ``_templated_ring_attention`` and ``..._backward``, with kernels of axonlaunch.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention

from axonlaunch.comm import World
from axonlaunch.data.datasets.dataset import Batch
from axonlaunch.engines.context import context, ring_attention as ring
from axonlaunch.engines.context.context import ContextAxis
from axonlaunch.engines.context.ring_attention import ring_attention


def test_torch_ring_attention_templates_accept_our_arguments() -> None:
    forward = inspect.signature(_attention._templated_ring_attention).parameters
    assert list(forward)[:7] == ["group", "seq_dim", "op", "query", "key", "value", "is_causal"]
    backward = inspect.signature(_attention._templated_ring_attention_backward).parameters
    assert {"grad_out", "grad_out_name", "out", "logsumexp", "is_causal"} <= backward.keys()
    assert _attention._cp_options.enable_load_balance, "positions assume torch's balance"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_ring_attention_equals_one_process(ranks: int, key_value_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 16, 8, generator=generator)
    k, v = torch.randn(2, 2, key_value_heads, 16, 8, generator=generator)
    weight = torch.randn(q.shape, generator=generator)
    full = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*full, is_causal=True, enable_gqa=True)
    (expected * weight).sum().backward()

    def run(world: World) -> None:
        at = ContextAxis(world.default_group).positions(16)
        mine = [x[:, :, at].clone().requires_grad_() for x in (q, k, v)]
        out = ring_attention(*mine, group=world.default_group)
        (out * weight[:, :, at]).sum().backward()
        torch.testing.assert_close(out, expected[:, :, at], rtol=1e-5, atol=1e-6)
        for tensor, other in zip(mine, full, strict=True):
            assert other.grad is not None
            torch.testing.assert_close(tensor.grad, other.grad[:, :, at], rtol=1e-4, atol=1e-5)

    World.mock(ranks).run(run)


def test_ring_attention_sends_each_key_value_head_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    heads_of_kernels: set[int] = set()
    on_cpu = ring._on_cpu

    def kernel(*tensors: Tensor, **options: bool) -> Any:
        heads_of_kernels.update(tensor.shape[1] for tensor in tensors)
        return on_cpu(*tensors, **options)

    monkeypatch.setattr(ring, "_on_cpu", kernel)
    create = _attention._create_rotater

    def spied(*args: Any, **options: Any) -> Any:
        rotater = create(*args, **options)
        exchange = rotater.exchange_buffers

        def exchanged(buffer: Tensor) -> Tensor:
            sent.append(buffer.numel())
            return exchange(buffer)

        rotater.exchange_buffers = exchanged
        return rotater

    monkeypatch.setattr(_attention, "_create_rotater", spied)

    def run(world: World) -> None:
        q, k, v = (torch.ones(1, heads, 4, 8, requires_grad=True) for heads in (4, 2, 2))
        ring_attention(q, k, v, group=world.default_group).sum().backward()

    World.mock(2).run(run)
    # Each rank sends its keys and values in forward, again in backward, and their gradients twice.
    assert sent == [2 * 2 * 4 * 8] * len(sent)
    assert len(sent) == 2 * 4
    assert heads_of_kernels == {4}


def test_ring_attention_autocast_equals_one_process() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    v = v.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def run(world: World) -> None:
        at = ContextAxis(world.default_group).positions(8)
        with torch.autocast("cpu", torch.bfloat16):
            mine = (x[:, :, at] for x in (q, k, v))
            out = ring_attention(*mine, group=world.default_group)
        torch.testing.assert_close(out, expected[:, :, at], rtol=2e-2, atol=2e-2)

    World.mock(2).run(run)


def test_context_shards_balance_start_and_end_of_sequence() -> None:
    positions = World.mock(4).run(lambda w: ContextAxis(w.default_group).positions(16).tolist())
    assert positions == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_gathered_context_outputs_equal_full_outputs() -> None:
    full = torch.arange(2 * 12 * 3).view(2, 12, 3)

    def run(world: World) -> Tensor:
        axis = ContextAxis(world.default_group)
        part = axis.split(Batch(full, full[..., 0]))
        assert torch.equal(part.targets, part.inputs[..., 0])
        return axis.join(part.inputs)

    for joined in World.mock(3).run(run):
        assert torch.equal(joined, full)


def test_indivisible_sequence_length_is_refused() -> None:
    with pytest.raises(Exception, match="use a multiple of 4"):
        World.mock(2).run(lambda world: ContextAxis(world.default_group).positions(6))


def test_context_positions_are_shared_by_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tensors created on the host, or copied from it, would wait for the device in each layer.
    def run(world: World) -> None:
        axis = ContextAxis(world.default_group)
        assert axis._local_positions(4) is axis._local_positions(4)
        assert axis._local_positions(4).tolist() == axis.positions(8).tolist()

    World.mock(2).run(run)
    monkeypatch.setattr(context, "device_of", lambda group: torch.device("meta"))
    parts = World.mock(2).run(lambda world: ContextAxis(world.default_group)._local_positions(4))
    assert [part.device.type for part in parts] == ["meta"] * 2
