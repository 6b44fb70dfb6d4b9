"""Divided layers equal the undivided layer, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.counted_collectives import Collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import axonlaunch as ax
from axonlaunch.comm import ProcessGroup
from axonlaunch.engines.tensor.parallel_layers import fused_region
from axonlaunch.engines.tensor.parallel_layers.local_parameters import to_local
from axonlaunch.models.modules.attention import Attention, RotaryTable

SIZES = pytest.mark.parametrize("size", [2, 4])


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)


def on_ranks(size: int, fn: Callable[[ax.World], Any]) -> list[Any]:
    return ax.World.mock(size).run(fn)


def drawn(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_start(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def assert_same_training(divided: nn.Module, full: nn.Module, x: Tensor) -> None:
    """Compare outputs, the input's gradient and every parameter's gradient."""
    results = []
    for module in (divided, full):
        fed = x.clone().requires_grad_(x.is_floating_point())
        y = module(fed)
        (y * drawn(*y.shape, seed=9)).sum().backward()
        results.append((y, fed.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    pairs = zip(divided.named_parameters(), full.named_parameters(), strict=True)
    for (name, parameter), (expected_name, expected) in pairs:
        assert name == expected_name
        assert isinstance(parameter, DTensor)
        assert parameter.shape == expected.shape
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


@SIZES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (3,), (3, 2), (2, 3, 2)])
def test_column_then_row_is_two_linear_layers(
    size: int, bias: bool, leading: tuple[int, ...]
) -> None:
    def rank(world: ax.World) -> None:
        divided = same_start(
            lambda: nn.Sequential(
                ax.ColumnParallelLinear(6, 8, bias=bias, gather_output=False),
                nn.GELU(),
                ax.RowParallelLinear(8, 5, bias=bias, input_is_parallel=True),
            )
        )
        full = same_start(
            lambda: nn.Sequential(nn.Linear(6, 8, bias=bias), nn.GELU(), nn.Linear(8, 5, bias=bias))
        )
        assert_same_training(divided, full, drawn(*leading, 6))

    on_ranks(size, rank)


@SIZES
def test_single_parallel_linear_takes_and_returns_full_tensors(size: int) -> None:
    def rank(world: ax.World) -> None:
        for kind in (ax.ColumnParallelLinear, ax.RowParallelLinear):
            divided = same_start(lambda kind=kind: nn.Sequential(kind(8, 4), nn.Tanh(), kind(4, 8)))
            full = same_start(lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8)))
            assert_same_training(divided, full, drawn(3, 8))

    on_ranks(size, rank)


@SIZES
def test_parallel_parameters_are_shards_of_undivided_initialization(size: int) -> None:
    def rank(world: ax.World) -> None:
        part = {Shard(0): (slice(world.rank * 8 // size, (world.rank + 1) * 8 // size),)}
        part[Shard(1)] = (slice(None), *part[Shard(0)])
        part[Replicate()] = ()
        for kind, expected in (
            (ax.ColumnParallelLinear, {"weight": Shard(0), "bias": Shard(0)}),
            (ax.RowParallelLinear, {"weight": Shard(1), "bias": Replicate()}),
        ):
            layer = same_start(lambda kind=kind: kind(8, 8))
            full = same_start(lambda: nn.Linear(8, 8))
            for name, placement in expected.items():
                parameter, original = layer.get_parameter(name), full.get_parameter(name)
                assert isinstance(parameter, DTensor)
                assert parameter.placements == (placement,)
                assert parameter.device_mesh.mesh_dim_names == ("tp",)
                assert torch.equal(parameter.to_local(), original[part[placement]])
                assert torch.equal(parameter.full_tensor(), original)

    on_ranks(size, rank)


@SIZES
def test_row_parallel_bias_is_added_once(size: int) -> None:
    def rank(world: ax.World) -> None:
        row = ax.RowParallelLinear(8, 3)
        with torch.no_grad():
            row.weight.zero_()
            row.bias.fill_(1.0)
        y = row(drawn(2, 8))
        assert torch.equal(y, torch.ones(2, 3))
        y.sum().backward()
        assert isinstance(row.bias.grad, DTensor)
        assert row.bias.grad.to_local().tolist() == [2.0] * 3

    on_ranks(size, rank)


def test_tensor_parallelism_works_on_subgroup() -> None:
    def rank(world: ax.World) -> None:
        first, last = world.new_group([0, 1]), world.new_group([2, 3])
        group = first if world.rank < 2 else last
        divided = same_start(lambda: ax.RowParallelLinear(8, 4, group=group))
        full = same_start(lambda: nn.Linear(8, 4))
        x = drawn(3, 8, seed=world.rank // 2)
        torch.testing.assert_close(divided(x), full(x))

    on_ranks(4, rank)


def test_tensor_parallel_gradients_accumulate_and_pass_frozen_layers() -> None:
    def rank(world: ax.World) -> None:
        column = same_start(lambda: ax.ColumnParallelLinear(6, 8))
        full = same_start(lambda: nn.Linear(6, 8))
        for seed in range(3):
            for layer in (column, full):
                layer(drawn(2, 6, seed=seed)).square().sum().backward()
        assert isinstance(column.weight.grad, DTensor)
        torch.testing.assert_close(column.weight.grad.full_tensor(), full.weight.grad)
        column.requires_grad_(False)
        x = drawn(2, 6).requires_grad_()
        column(x).sum().backward()
        torch.testing.assert_close(x.grad, full.weight.sum(0).expand(2, 6))

    on_ranks(2, rank)


def test_bf16_gradient_of_replicated_parameter_is_summed_in_fp32() -> None:
    def rank(world: ax.World) -> None:
        mesh = init_device_mesh("cpu", (world.world_size,))
        ones = torch.ones(1, dtype=torch.bfloat16)
        weight = nn.Parameter(DTensor.from_local(ones, mesh, [Replicate()]))
        # bf16 has 256, 258 and 260: a sum in bf16 would stay at 256.
        partial = [256.0, 1.0, 1.0, 1.0][world.rank]
        (
            to_local(weight, summed_over=ProcessGroup.from_torch(mesh.get_group())) * partial
        ).sum().backward()
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.dtype == torch.bfloat16
        assert weight.grad.to_local().item() == 260.0

    on_ranks(4, rank)


def test_autocast_row_parallel_has_dtype_of_linear() -> None:
    def rank(world: ax.World) -> None:
        divided = same_start(lambda: ax.RowParallelLinear(8, 4, dtype=torch.float32))
        full = same_start(lambda: nn.Linear(8, 4, dtype=torch.float32))
        x = drawn(3, 8).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, expected = divided(x), full(x)
        assert y.dtype is expected.dtype is torch.bfloat16
        torch.testing.assert_close(y, expected, rtol=0.01, atol=0.01)

    on_ranks(2, rank)


def test_autocast_parallel_linears_round_like_one_linear() -> None:
    def rank(world: ax.World) -> None:
        outputs = []
        for build in (ax.ColumnParallelLinear, nn.Linear):
            layer = same_start(lambda build=build: build(8, 4, dtype=torch.float32))
            x = drawn(3, 8).float().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = layer(x)
            y.sum().backward()
            assert y.dtype == torch.bfloat16
            assert x.grad is not None
            assert layer.weight.grad.dtype == x.grad.dtype == torch.float32
            outputs.append((y, x.grad))
        for got, expected in zip(*outputs, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)

    on_ranks(2, rank)


@SIZES
def test_vocabulary_parallel_embedding_equals_embedding(size: int) -> None:
    def rank(world: ax.World) -> None:
        divided = same_start(lambda: ax.VocabParallelEmbedding(12, 5))
        full = same_start(lambda: nn.Embedding(12, 5))
        tokens = torch.tensor([[0, 11, 5], [6, 5, 3]])
        assert_same_training(divided, full, tokens)
        assert divided.get_parameter("weight").placements == (Shard(0),)

    on_ranks(size, rank)


@pytest.mark.parametrize("token", [-1, 12])
def test_a_token_outside_of_the_vocabulary_is_an_error(token: int) -> None:
    def rank(world: ax.World) -> None:
        with pytest.raises(RuntimeError, match="a token is not in the vocabulary"):
            ax.VocabParallelEmbedding(12, 5)(torch.tensor([token]))

    on_ranks(2, rank)


@pytest.mark.parametrize(("size", "fewer"), [(2, None), (4, None), (2, 2), (4, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_with_divided_heads_equals_attention(
    size: int, fewer: int | None, bias: bool
) -> None:
    def rank(world: ax.World) -> list[str]:
        divided = same_start(lambda: ax.TensorParallelAttention(16, 8, fewer, bias=bias))
        full = same_start(lambda: Attention(16, num_heads=8, num_key_value_heads=fewer, bias=bias))
        assert_same_training(divided, full, drawn(2, 6, 16))
        rotary, x = RotaryTable(2, max_positions=6, theta=10.0), drawn(2, 6, 16)
        torch.testing.assert_close(divided(x, rotary), full(x, rotary))
        with Collectives() as collectives:
            divided(x.requires_grad_()).sum().backward()
        return collectives.names

    # q, k and v enter the parallel region as one.
    assert on_ranks(size, rank) == [["all_reduce", "all_reduce"]] * size


def test_region_input_gradient_is_reduced_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An out-of-place sum would copy it first."""
    computed: set[int] = set()
    arrived: set[int] = set()
    of_input = fused_region._input_gradient

    def noted(*given: Any) -> Tensor:
        gradient = of_input(*given)
        computed.add(gradient.data_ptr())
        return gradient

    monkeypatch.setattr(fused_region, "_input_gradient", noted)

    def rank(world: ax.World) -> None:
        x = drawn(2, 6, 16).requires_grad_()
        x.register_hook(lambda gradient: arrived.add(gradient.data_ptr()))
        ax.TensorParallelAttention(16, 8)(x).sum().backward()

    on_ranks(2, rank)
    assert arrived == computed
    assert len(computed) == 2


@SIZES
@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 1, 5)])
@pytest.mark.parametrize("classes", [12, 11])
def test_vocabulary_parallel_cross_entropy_equals_torch(
    size: int, shape: tuple[int, ...], classes: int
) -> None:
    def rank(world: ax.World) -> Tensor:
        logits = (drawn(*shape, classes) * 10).requires_grad_()
        targets = torch.randint(classes, shape, generator=torch.Generator().manual_seed(3))
        targets.view(-1)[1] = -100
        expected = F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        expected.backward()
        mine = logits.detach().chunk(size, -1)[world.rank].clone().requires_grad_()
        group = world.default_group
        loss = ax.vocab_parallel_cross_entropy_sum(mine, targets, group=group, classes=classes)
        assert loss.shape == ()
        torch.testing.assert_close(loss, expected)
        (2 * loss).backward()
        assert logits.grad is not None
        torch.testing.assert_close(mine.grad, 2 * logits.grad.chunk(size, -1)[world.rank])
        return loss.detach()

    losses = on_ranks(size, rank)
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_cross_entropy_is_stable_and_in_fp32() -> None:
    def rank(world: ax.World) -> None:
        full = torch.tensor([[3e4, -3e4, 2e4, 2.9e4], [1.0, 2.0, 3.0, 4.0]], dtype=torch.bfloat16)
        targets = torch.tensor([3, 0])
        mine = full.chunk(2, -1)[world.rank].clone().requires_grad_()
        loss = ax.vocab_parallel_cross_entropy_sum(mine, targets, group=world.default_group)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(
            loss, F.cross_entropy(full.float(), targets, reduction="sum"), rtol=1e-6, atol=0
        )
        loss.backward()
        assert mine.grad is not None
        assert mine.grad.dtype == torch.bfloat16
        assert mine.grad.isfinite().all()

    on_ranks(2, rank)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.3), (torch.float16, 7e4)])
def test_factor_of_the_loss_is_not_rounded_to_half_precision(
    dtype: torch.dtype, factor: float
) -> None:
    full = drawn(64, 40).to(dtype)
    targets = torch.randint(40, (64,), generator=torch.Generator().manual_seed(3))

    def rank(world: ax.World) -> None:
        mine = full.chunk(2, -1)[world.rank].clone().requires_grad_()
        loss = ax.vocab_parallel_cross_entropy_sum(mine, targets, group=world.default_group)
        (unscaled,) = torch.autograd.grad(loss, mine, retain_graph=True)
        (scaled,) = torch.autograd.grad(factor * loss, mine)
        assert torch.equal(scaled, (factor * unscaled.float()).to(dtype))

    on_ranks(2, rank)


class Largest(TorchDispatchMode):
    """Records the size of the largest new storage, and all tensors with a given dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.found = dim, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            self.found += isinstance(tensor, Tensor) and self.dim in tensor.shape
        return out


def test_vocabulary_parallel_loss_keeps_one_logits_shard() -> None:
    def rank(world: ax.World) -> list[tuple[tuple[int, ...], torch.dtype]]:
        mine = torch.randn(7, 10, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(20, (7,), generator=torch.Generator().manual_seed(0))
        saved = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append((tuple(tensor.shape), tensor.dtype))
            return tensor

        with Largest(20) as watched, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = ax.vocab_parallel_cross_entropy_sum(mine, targets, group=world.default_group)
            loss.backward()
        assert not watched.found
        return saved

    assert on_ranks(2, rank) == [[((7, 10), torch.bfloat16)]] * 2


def test_invalid_targets_are_refused() -> None:
    def rank(world: ax.World) -> None:
        logits, group = torch.zeros(2, 4), world.default_group
        with pytest.raises(RuntimeError, match="a target is not in the vocabulary"):
            ax.vocab_parallel_cross_entropy_sum(logits, torch.tensor([0, 8]), group=group)
        with pytest.raises(ValueError, match=r"logits \[2, 4\] do not fit targets \[3\]"):
            ax.vocab_parallel_cross_entropy_sum(
                logits, torch.zeros(3, dtype=torch.long), group=group
            )

    on_ranks(2, rank)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ax.ColumnParallelLinear(8, 130),
            "out_features=130 is not divisible by the group's 4 ranks; use a group of "
            "1, 2, 5, 10, 13, 26, 65 or 130",
        ),
        (lambda: ax.RowParallelLinear(6, 8), "in_features=6 .* 1, 2, 3 or 6"),
        (
            lambda: ax.VocabParallelEmbedding(5, 8),
            "num_embeddings=5 leaves the last of 4 ranks without any; use 1 or 5",
        ),
        (lambda: ax.TensorParallelAttention(24, 6), "num_heads=6 .* 1, 2, 3 or 6"),
        (lambda: ax.TensorParallelAttention(32, 8, 2), "num_key_value_heads=2 .* 1 or 2"),
        (lambda: ax.TensorParallelAttention(30, 8), "hidden_size=30 is not divisible by 8 heads"),
        (lambda: ax.TensorParallelAttention(32, 8, 3), "num_heads=8 is not divisible by 3 key"),
    ],
)
def test_indivisible_tensor_parallel_sizes_are_refused(
    build: Callable[[], nn.Module], message: str
) -> None:
    def rank(world: ax.World) -> None:
        with pytest.raises(ValueError, match=message):
            build()

    on_ranks(4, rank)


def test_row_parallel_with_full_features_is_error() -> None:
    def rank(world: ax.World) -> None:
        with pytest.raises(ValueError, match="takes 4 features per rank, got 8"):
            ax.RowParallelLinear(8, 3, input_is_parallel=True)(torch.zeros(2, 8))

    on_ranks(2, rank)
