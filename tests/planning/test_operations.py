from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from axonlaunch.config.precision import MATMUL_FORMATS
from axonlaunch.engines.precision.scaled_products import ScaledProducts
from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode
from axonlaunch.planning.throughput.operations import (
    Amount,
    AttentionOp,
    Kernel,
    OperationTrace,
    Product,
    Rounding,
    _spanned_axes,
    add,
    count_roundings,
)


@pytest.fixture
def trace() -> OperationTrace:
    return OperationTrace({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1})


@pytest.fixture(autouse=True)
def without_bytes() -> Iterator[None]:
    with fake_tensor_mode():
        yield


def test_linear_layer_counts_one_product_forward_and_two_backward(trace: OperationTrace) -> None:
    x = torch.empty(6, 4, requires_grad=True)
    weight = torch.empty(10, 4, requires_grad=True)
    with trace:
        F.linear(x, weight).sum().backward()
    products = {key: amount for key, amount in trace.work.items() if isinstance(key, Product)}
    fp32 = torch.float32
    assert products == {
        Product("forward", 1, 6, 10, 4, fp32): Amount(1, 4 * (6 * 4 + 4 * 10 + 6 * 10), 480),
        Product("backward", 1, 10, 4, 6, fp32): Amount(1, 4 * (10 * 6 + 6 * 4 + 10 * 4), 480),
        Product("backward", 1, 6, 4, 10, fp32): Amount(1, 4 * (6 * 10 + 10 * 4 + 6 * 4), 480),
    }


def test_linear_layer_in_8_bits_counts_its_products_in_these_types(trace: OperationTrace) -> None:
    products = ScaledProducts(MATMUL_FORMATS["fp8_tensorwise"])
    x = torch.empty(48, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(32, 16, dtype=torch.bfloat16, requires_grad=True)
    with trace:
        products(x, weight).sum().backward()
    counted = {key: amount for key, amount in trace.work.items() if isinstance(key, Product)}
    forward, backward, flops = torch.float8_e4m3fn, torch.float8_e5m2, 2.0 * 48 * 32 * 16

    def amount(m: int, n: int, k: int) -> Amount:
        return Amount(1, m * k + k * n + 2 * m * n, flops)

    assert counted == {
        Product("forward", 1, 48, 32, 16, forward): amount(48, 32, 16),
        Product("backward", 1, 48, 16, 32, backward): amount(48, 16, 32),
        Product("backward", 1, 32, 16, 48, backward): amount(32, 16, 48),
    }


def test_rounding_is_counted_with_separate_and_with_fused_kernels(trace: OperationTrace) -> None:
    products = ScaledProducts(MATMUL_FORMATS["fp8_tensorwise"])
    x = torch.empty(48, 16, dtype=torch.bfloat16)
    weight = torch.empty(32, 16, dtype=torch.bfloat16, requires_grad=True)
    with trace, count_roundings(trace):
        products(x, weight).backward(torch.empty(48, 32, dtype=torch.bfloat16))
    found = {
        (key.phase, key.rows, key.columns): (key, amount)
        for key, amount in trace.work.items()
        if isinstance(key, Rounding)
    }
    assert found.keys() == {
        *(("forward", 48, 16), ("forward", 32, 16)),
        *(("backward", 32, 48), ("backward", 16, 48)),  # factors of the weight's gradient
    }
    for (phase, rows, columns), (key, amount) in found.items():
        numbers = rows * columns
        # The largest magnitude is found in 2 bytes; bf16 to fp32 is 2 + 4, times the scale 4 + 4,
        # to 8 bits 4 + 1. Transposed factors are copied: 1 + 1.
        separate = (21 if phase == "forward" else 23) * numbers
        assert separate <= amount.num_bytes < separate + 100  # the rest is of single numbers
        assert key.fused_bytes == (2 * numbers, (2 + 1) * numbers)


def test_equal_products_are_merged(trace: OperationTrace) -> None:
    a, b = torch.empty(2, 3), torch.empty(3, 5)
    with trace:
        a @ b
        a @ b
    assert trace.work[Product("forward", 1, 2, 5, 3, torch.float32)].count == 2


def test_a_batch_of_products_counts_each(trace: OperationTrace) -> None:
    with trace:
        torch.bmm(torch.empty(7, 2, 3), torch.empty(7, 3, 5))
    (key,) = trace.work
    assert trace.work[key].flops == 7 * 2 * 2 * 3 * 5


def test_products_of_experts_count_each_expert_with_its_mean_of_tokens(
    trace: OperationTrace,
) -> None:
    rows = torch.empty(80, 16, requires_grad=True)
    experts = torch.empty(8, 16, 32, requires_grad=True)
    with trace:
        F.grouped_mm(rows, experts, offs=torch.empty(8, dtype=torch.int32)).sum().backward()
    found = {
        (key.phase, key.tokens, key.batch, key.m, key.n, key.k): amount.flops
        for key, amount in trace.work.items()
        if isinstance(key, Product)
    }
    assert found == {
        ("forward", "m", 8, 10, 32, 16): 2 * 80 * 16 * 32,
        ("backward", "m", 8, 10, 16, 32): 2 * 80 * 16 * 32,
        ("backward", "k", 8, 16, 32, 10): 2 * 80 * 16 * 32,
    }


def test_groups_of_ranks_get_axes_of_first_mesh_that_has_them() -> None:
    run = {"pp": 1, "dp_shard": 4, "tp": 2}
    experts = {"pp": 1, "efsdp": 2, "ep": 4}
    assert _spanned_axes(run, [0, 1]) == ("tp",)
    assert _spanned_axes(run, [1, 3, 5, 7]) == ("dp_shard",)
    assert _spanned_axes(run, [0, 1, 2, 3]) is None
    assert _spanned_axes(experts, [0, 1, 2, 3]) == ("ep",)
    assert _spanned_axes(experts, [1, 5]) == ("efsdp",)
    assert _spanned_axes(run, [*range(8)]) == ("dp_shard", "tp")


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, 0.5)])
def test_attention_counts_two_products_forward_and_five_backward(
    trace: OperationTrace, causal: bool, share: float
) -> None:
    q, k, v = (torch.empty(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    with trace:
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
    product = 2 * 2 * 4 * 16 * 16 * 8
    flops = {key.phase: a.flops for key, a in trace.work.items() if isinstance(key, AttentionOp)}
    assert flops == {"forward": 2 * product * share, "backward": 5 * product * share}


def test_shared_keys_cost_no_fewer_flops(trace: OperationTrace) -> None:
    q, k = torch.empty(2, 4, 16, 8), torch.empty(2, 2, 16, 8)
    with trace:
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    (flops,) = [a.flops for key, a in trace.work.items() if isinstance(key, AttentionOp)]
    assert flops == 2 * 2 * 2 * 4 * 16 * 16 * 8


def test_kernel_bytes_are_reads_plus_writes(trace: OperationTrace) -> None:
    a, b = torch.empty(100), torch.empty(100)
    with trace:
        a + b
        a.mul_(2.0)
        a.copy_(b)
    moved = {key.name: amount.num_bytes for key, amount in trace.work.items()}
    assert moved == {"aten::add": 1200, "aten::mul_": 800, "aten::copy_": 800}


def test_an_expanded_tensor_is_read_once(trace: OperationTrace) -> None:
    a, b = torch.empty(10, 10), torch.empty(10)
    with trace:
        a + b.expand(10, 10)
    (moved,) = [amount.num_bytes for amount in trace.work.values()]
    assert moved == 400 + 40 + 400


def test_views_and_empty_tensors_cost_nothing(trace: OperationTrace) -> None:
    a = torch.empty(4, 6)
    with trace:
        a.view(24).unsqueeze(0).transpose(0, 1)
        torch.empty(1000)
    assert trace.work == {}


def test_embedding_bytes_count_only_read_rows(trace: OperationTrace) -> None:
    table, tokens = torch.empty(1000, 8), torch.empty(5, dtype=torch.int64)
    with trace:
        F.embedding(tokens, table)
    (moved,) = [amount.num_bytes for amount in trace.work.values()]
    assert moved == 5 * 8 + 5 * 8 * 4


def test_activation_checkpointing_counts_as_recomputation(trace: OperationTrace) -> None:
    x = torch.empty(4, 4, requires_grad=True)
    weight = torch.empty(4, 4, requires_grad=True)
    with trace:
        y = torch.utils.checkpoint.checkpoint(
            lambda t: F.linear(t, weight).relu() @ weight, x, use_reentrant=False
        )
        y.sum().backward()
    counts = {
        phase: sum(
            a.count for k, a in trace.work.items() if isinstance(k, Product) and k.phase == phase
        )
        for phase in ("forward", "recomputation", "backward")
    }
    assert counts == {"forward": 2, "recomputation": 1, "backward": 4}


@pytest.mark.parametrize("scales", [False, True])
def test_optimizer_update_is_counted_separately(scales: bool, trace: OperationTrace) -> None:
    weight = torch.nn.Parameter(torch.empty(100))
    weight.grad = torch.empty(100)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    if scales:
        optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
    with trace, trace.updating():
        optimizer.step()
    moved = trace.work[Kernel("update", "aten::_fused_adamw_")].num_bytes
    # Reads and writes parameter and two moments, reads the gradient and the step count, and writes
    # the gradient if the update scales it.
    assert 0 <= moved - (8 if scales else 7) * 400 < 16


def test_work_is_added_operation_by_operation() -> None:
    product = Product("forward", 1, 2, 3, 4, torch.float32)
    kernel = Kernel("forward", "aten::add")
    total = add({product: Amount(1, 2, 3)}, {product: Amount(1, 1, 1), kernel: Amount(2)}, factor=2)
    assert total == {product: Amount(3, 4, 5), kernel: Amount(4)}


def test_cancelled_work_is_dropped() -> None:
    work = {Kernel("forward", "aten::add"): Amount(1, 8)}
    assert add(work, work, factor=-1) == {}
