"""Cached results of fake tensor operations equal torch's.

If a private name of ``torch._subclasses.fake_tensor`` moved: only
``models/fake/fake_tensor_cache.py`` uses them. ``FakeTensorMode(allow_non_fake_inputs=True)`` is a
slower replacement with the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from axonlaunch.models.fake import fake_tensor_cache
from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode
from axonlaunch.system.processes import forked_map


def base() -> Tensor:
    return torch.empty(6, 4)


def attended() -> Tensor:
    heads = torch.empty(2, 3, 8, 4)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def normed() -> tuple[Tensor, ...]:
    x = base()
    return torch.native_layer_norm(x, [4], torch.empty(4), None, 1e-5)


def copied_out() -> Tensor:
    x, out = base(), torch.empty(6, 4)
    torch.add(x, x, out=out)
    return out


def updated() -> Tensor:
    x = base()
    torch._foreach_add_([x, x], 1.0)
    return x


OPERATIONS: dict[str, Callable[[], Any]] = {
    "fresh": lambda: base() @ base().t(),
    "of another type": lambda: base().to(torch.bfloat16),
    "a view": lambda: base().view(3, 8)[1:],
    "a view of a view": lambda: base()[2:].t()[1],
    "parts": lambda: base().chunk(2, dim=1),
    "unfolded": lambda: base().unfold(0, 2, 1),
    "changed in place": lambda: base().mul_(2),
    "written into": copied_out,
    "changed in a list": updated,
    "a reduction": lambda: base().sum(),
    "attention": attended,
    "several": normed,
    "expanded": lambda: torch.empty(1, 4).expand(6, 4),
    "padded rows": lambda: torch.empty_strided((3, 2), (4, 1)).contiguous(),
}


def reported(result: Any) -> Any:
    if isinstance(result, Tensor):
        storage = result.untyped_storage().nbytes()
        facts = result.shape, result.stride(), result.storage_offset(), result.dtype
        return *facts, storage, result.device, result._is_view()
    return [reported(item) for item in result]


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensor_cache, "recipes", {})


@pytest.mark.parametrize("name", OPERATIONS)
def test_cached_fake_result_equals_torch(name: str) -> None:
    run = OPERATIONS[name]
    with FakeTensorMode():
        expected = reported(run())
    mode = fake_tensor_mode()
    with mode:
        first = reported(run())
        remembered = dict(fake_tensor_cache.recipes)
        again = reported(run())
    assert first == again == expected
    assert remembered == fake_tensor_cache.recipes  # nothing was computed again
    assert all(recipe is not None for recipe in remembered.values())


def test_cached_fake_view_shares_storage() -> None:
    with fake_tensor_mode():
        for _ in range(2):
            x = base()
            assert x.t().untyped_storage() is x.untyped_storage()
            assert x.mul_(2) is x
            assert (x * 2).untyped_storage() is not x.untyped_storage()


def test_cache_distinguishes_repeated_from_separate_arguments() -> None:
    mode, sum_into = fake_tensor_mode(), torch.ops.aten.add.out
    with mode:
        x, y, z = base(), base(), base()
    assert mode.__torch_dispatch__(sum_into, [], (x, y), {"out": y}) is y
    assert mode.__torch_dispatch__(sum_into, [], (x, y), {"out": z}) is z
    assert mode.__torch_dispatch__(sum_into, [], (x, y), {"out": y}) is y


def test_cache_distinguishes_shared_from_separate_storages() -> None:
    with fake_tensor_mode():
        for _ in range(2):
            x = base()
            left, right = x.chunk(2, dim=1)
            torch._foreach_add_([left, right], 1.0)
            assert torch.maximum(left, right).shape == (6, 2)
        worked_out = len(fake_tensor_cache.recipes)
        torch._foreach_add_([left, right], 1.0)
        assert len(fake_tensor_cache.recipes) == worked_out
        torch._foreach_add_([base(), base()], 1.0)
        assert len(fake_tensor_cache.recipes) == worked_out + 1


def test_cache_distinguishes_default_dtypes() -> None:
    with fake_tensor_mode():
        assert torch.empty(2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.empty(2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_cache_results_of_fork_reach_later_forks() -> None:
    def run() -> int:
        num_recipes = len(fake_tensor_cache.recipes)
        with fake_tensor_mode():
            attended()
            normed()
        return len(fake_tensor_cache.recipes) - num_recipes

    first, again = forked_map.map_forked([run, run], at_once=1, memory=fake_tensor_cache.recipes)
    assert (first > 0, again) == (True, 0)
    assert len(fake_tensor_cache.recipes) == first


def test_cache_distinguishes_equal_numbers_of_other_types() -> None:
    with fake_tensor_mode():
        full = torch.empty(3, dtype=torch.int64)
        assert (full + 1).dtype == torch.int64
        assert (full + 1.0).dtype == torch.float32
        assert (full + True).dtype == torch.int64


def test_cached_gradient_shapes_equal_torch() -> None:
    def gradients() -> Any:
        weight = torch.empty(4, 4, requires_grad=True)
        loss = torch.nn.functional.gelu(base() @ weight).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return reported(weight.grad), loss.requires_grad

    def in_both() -> tuple[Any, Any, Any]:
        with FakeTensorMode():
            expected = gradients()
        with fake_tensor_mode():
            return gradients(), gradients(), expected

    # Forked: after a backward in this process, a build for GPUs could not run one in other tests'
    # forks.
    [(first, again, expected)] = forked_map.map_forked([in_both])
    assert first == again == expected


def test_shape_changing_operations_are_not_cached() -> None:
    with fake_tensor_mode():
        for _ in range(2):
            x = base()
            x.resize_(2, 2)
            assert x.shape == (2, 2)
            x.t_()
            assert x.stride() == (1, 2)


def test_cache_is_shared_between_fake_modes() -> None:
    with fake_tensor_mode():
        base()
    recipes = dict(fake_tensor_cache.recipes)
    with fake_tensor_mode() as second:
        assert isinstance(base(), FakeTensor)
        assert base().fake_mode is second  # type: ignore[attr-defined]
    assert recipes == fake_tensor_cache.recipes


def test_fake_tensor_private_names_exist() -> None:
    assert callable(torch._C._dispatch_key_set)
    with fake_tensor_mode() as mode:
        x = base()
    assert isinstance(x, FakeTensor)
    assert (x.fake_mode, x.fake_device, x.constant) == (mode, torch.device("cpu"), None)
    assert torch.ops.aten.lift_fresh.default in mode.lift_fns
    result = fake_tensor_cache._Memory().fake(
        mode, torch.empty(2, device="meta"), torch.device("cpu")
    )
    assert vars(result).keys() == vars(x).keys()


def test_composite_operators_use_torch_rules() -> None:
    from torch._prims.rng_prims import run_and_save_rng_state

    def draw() -> Any:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return run_and_save_rng_state(torch.ops.aten.rand_like.default, base())

    with FakeTensorMode():
        expected = reported(draw()[1])
    with fake_tensor_mode():
        assert reported(draw()[1]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_groups_has_the_shapes_of_a_real_one_both_ways(dtype: torch.dtype) -> None:
    def shapes() -> list[tuple[Any, ...]]:
        rows = torch.zeros(12, 16, dtype=dtype, requires_grad=True)
        experts = torch.zeros(3, 8, 16, dtype=dtype, requires_grad=True)
        ends = torch.tensor([4, 8, 12], dtype=torch.int32)
        result = torch.nn.functional.grouped_mm(rows, experts.transpose(-2, -1), offs=ends)
        result.backward(torch.ones(12, 8, dtype=dtype))
        tensors = [result, rows.grad, experts.grad]
        return [(t.shape, t.stride(), t.dtype) for t in tensors if t is not None]

    expected = shapes()
    with fake_tensor_mode():
        assert shapes() == expected
