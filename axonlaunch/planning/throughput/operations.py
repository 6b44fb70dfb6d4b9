"""Counts the operations of a training step: matrix products, attention, kernels, communication.

Nothing is timed. Operations inside a kernel, and gradients that torch's DDP reduces from C++, are
not visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from axonlaunch.comm.torch_internals import AsyncCollectiveTensor, group_by_name
from axonlaunch.engines.precision.scaled_products import ScaledProducts
from axonlaunch.models.fake.fake_tensor_cache import fake_device
from axonlaunch.models.torch_internals import in_backward
from axonlaunch.planning.tracing.dispatch_mode import UncompiledDispatchMode

Phase = Literal["forward", "recomputation", "backward", "update"]
ExchangeKind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm: 0,
    _aten.bmm: 0,
    _aten.addmm: 1,
    _aten.addmm_: 1,
    _aten.baddbmm: 1,
    _aten._scaled_mm_v2: 0,
}
"""Maps matrix products to the position of their first factor among the arguments."""
_GROUPED = _aten._grouped_mm
_FLASH = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}
_COLLECTIVES: dict[str, ExchangeKind] = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
}
_COMMUNICATION = frozenset({"c10d", "_c10d_functional"})
_NO_KERNEL = frozenset({"prim", "profiler", "inductor"})
_NO_TRAFFIC = frozenset(
    {
        "aten::_unsafe_view",
        "aten::_local_scalar_dense",
        "aten::_assert_async",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::set_",
        "aten::detach_",
    }
)
_NOT_READ = {
    "aten::copy_": ("self",),
    "aten::_foreach_copy_": ("self",),
    "aten::fill_": ("self",),
    "aten::zero_": ("self",),
    "aten::_foreach_zero_": ("self",),
    "aten::embedding": ("weight",),
    "aten::nll_loss_forward": ("self",),
    "aten::nll_loss_backward": ("self",),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
    "fsdp::split_with_sizes_copy": ("out",),
    "fsdp::chunk_cat": ("out",),
}
"""Arguments that are only written, or from which only a few rows are read."""
_FUSED_UPDATES = {f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")}
"""Operations that write their argument ``grads`` only with ``grad_scale``."""


@dataclass(frozen=True)
class Product:
    """A matrix product, [batch, m, k] x [batch, k, n], in one type.

    Attributes:
        phase: Phase of the step.
        batch: Number of products; for experts, the number of experts.
        m: Rows of the result.
        n: Columns of the result.
        k: Depth.
        dtype: Type of the factors.
        tokens: For experts, the size that is the mean number of tokens of an expert: m or k.
    """

    phase: Phase
    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    tokens: Literal["m", "k"] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the factors and the result, which has at least 16 bits."""
        size, of_result = self.dtype.itemsize, max(2, self.dtype.itemsize)
        return self.batch * ((self.m + self.n) * self.k * size + self.m * self.n * of_result)


@dataclass(frozen=True)
class AttentionOp:
    """A fused attention kernel; its ``Amount`` contains the FLOPs."""

    phase: Phase
    heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Kernel:
    """Any other, memory-bound kernel; its ``Amount`` contains the memory traffic."""

    phase: Phase
    name: str


@dataclass(frozen=True)
class Rounding:
    """Rounding of a factor of a product to 8 bits; its ``Amount`` has the traffic of the kernels.

    A compiler fuses these kernels to two: one finds the scales, the other rounds.

    Attributes:
        phase: Phase of the step.
        rows: Rows of the factor.
        columns: Columns of the factor.
        dtype: Type before it is rounded.
        kernels: Number of kernels without a compiler.
    """

    phase: Phase
    rows: int
    columns: int
    dtype: torch.dtype
    kernels: int

    @property
    def fused_bytes(self) -> tuple[int, int]:
        """Traffic of the two fused kernels: both read the factor, the second writes 8 bits."""
        numbers, size = self.rows * self.columns, self.dtype.itemsize
        return numbers * size, numbers * (size + 1)


@dataclass(frozen=True)
class HostWait:
    """The host reads a number from the device, which is idle until the next operation arrives."""

    phase: Phase


@dataclass(frozen=True)
class CollectiveOp:
    """A collective; its ``Amount`` contains the bytes of the full, unsharded tensor.

    Attributes:
        phase: Phase of the step in which it runs.
        kind: Kind of collective.
        axes: Mesh axes of its process group, outermost first.
        overlapping: Matrix products that run between its start and the wait for its result.
    """

    phase: Phase
    kind: ExchangeKind
    axes: tuple[str, ...]
    overlapping: tuple[Product, ...] = ()


@dataclass(frozen=True)
class Send:
    """A message to the neighboring rank along a mesh axis."""

    phase: Phase
    axis: str


Operation = Product | AttentionOp | Kernel | Rounding | HostWait | CollectiveOp | Send


@dataclass(frozen=True)
class Amount:
    """Number of runs of an operation, and the total traffic and FLOPs of these runs.

    Attributes:
        count: Number of runs.
        num_bytes: Bytes read and written, or sent.
        flops: Floating point operations.
    """

    count: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.count + other.count,
            self.num_bytes + other.num_bytes,
            self.flops + other.flops,
        )

    def __mul__(self, factor: float) -> Amount:
        return Amount(self.count * factor, self.num_bytes * factor, self.flops * factor)


Work = dict[Operation, Amount]


def add(first: Work, second: Work, *, factor: float = 1.0) -> Work:
    """Return ``first + factor * second``, operation by operation."""
    total = dict(first)
    for key, amount in second.items():
        total[key] = total.get(key, Amount()) + amount * factor
    return {key: amount for key, amount in total.items() if amount != Amount()}


class OperationTrace(UncompiledDispatchMode):
    """Counts operations while it is entered. Other dispatch modes may be active as well.

    Attributes:
        work: Amount of each operation so far.
    """

    def __init__(self, *meshes: Mapping[str, int]) -> None:
        """Begin to count.

        Args:
            meshes: Sizes of the axes of each mesh of the run, outermost first. A group that is in
                several meshes gets the axes of the first one.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: Work = {}
        self._meshes = [dict(axes) for axes in meshes]
        self._updating = False
        self._repeats = 1
        self._kernels_of_rounding: list[int] | None = None
        self._pending: dict[int, tuple[CollectiveOp, Amount, list[Product]]] = {}

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Count operations inside the context as part of the optimizer update."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    @contextmanager
    def rounding(self, factor: Tensor) -> Iterator[None]:
        """Count kernels inside the context as one rounding of a product's factor."""
        traffic: list[int] = []
        self._kernels_of_rounding = traffic
        try:
            yield
        finally:
            self._kernels_of_rounding = None
        rows, columns = factor.shape
        key = Rounding(self._phase, rows, columns, factor.dtype, len(traffic))
        self._count(key, Amount(1, sum(traffic)))

    def repeat(self, times: int) -> None:
        """Count each later operation this many times."""
        self._repeats = times

    def count_host_wait(self) -> None:
        """Count that the host waits for a number."""
        self._count(HostWait(self._phase), Amount(1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := fake_device(func, args)) is not None:
            return device
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # the tensors they contain are dispatched again
        out = func(*args, **(kwargs or {}))
        if func.namespace in _COMMUNICATION:
            self._record_collective(func, args, kwargs or {}, out)
        elif func.namespace not in _NO_KERNEL and not func.is_view:
            self._record_compute(func, args, kwargs or {}, out)
        return out

    @property
    def _phase(self) -> Phase:
        """Phase of the running operation.

        Recomputation is a forward inside backward, with gradients enabled. Recomputation inside a
        custom autograd function counts as backward, because it cannot be distinguished.
        """
        if self._updating:
            return "update"
        if not in_backward():
            return "forward"
        return "recomputation" if torch.is_grad_enabled() else "backward"

    def _count(self, key: Operation, amount: Amount) -> None:
        self.work[key] = self.work.get(key, Amount()) + amount * self._repeats

    def _record_compute(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name
        if func.overloadpacket in _PRODUCTS:
            self._record_product(args[_PRODUCTS[func.overloadpacket] :])
        elif func.overloadpacket is _GROUPED:
            ends = args[2] if len(args) > 2 else kwargs["offs"]
            self._record_grouped_product(args[0], args[1], ends)
        elif name.removesuffix("_backward") in _FLASH:
            self._record_attention(func, args, kwargs, backward=name.endswith("_backward"))
        elif name not in _NO_TRAFFIC:
            traffic = _traffic(func, args, kwargs, out)
            if traffic and self._kernels_of_rounding is not None:
                self._kernels_of_rounding.append(traffic)
            elif traffic:
                self._count(Kernel(self._phase, name), Amount(1, traffic))

    def _record_product(self, factors: Any) -> None:
        a, b = factors[0], factors[1]
        batch = a.shape[0] if a.ndim == 3 else 1
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        self._add_product(Product(self._phase, batch, m, n, k, a.dtype))

    def _record_grouped_product(self, a: Tensor, b: Tensor, ends: Tensor) -> None:
        """Count products of experts [G, ...], whose tokens are consecutive rows of ``a``.

        With [S, K] x [G, K, N] the tokens are the S rows of the result; with [K, S] x [S, N], which
        is the gradient of the experts, they are the depth.
        """
        experts, (m, k), n = len(ends), a.shape[-2:], b.shape[-1]
        if b.ndim == 3:
            key = Product(self._phase, experts, -(-m // experts), n, k, a.dtype, "m")
        else:
            key = Product(self._phase, experts, m, n, -(-k // experts), a.dtype, "k")
        self._add_product(key)

    def _add_product(self, key: Product) -> None:
        batch, m, n, k = key.batch, key.m, key.n, key.k
        self._count(key, Amount(1, key.num_bytes, 2.0 * batch * m * n * k))
        for _, _, products in self._pending.values():
            products.append(key)

    def _record_attention(self, func: Any, args: Any, kwargs: Any, *, backward: bool) -> None:
        arguments = dict(kwargs)
        arguments.update(zip((a.name for a in func._schema.arguments), args, strict=False))
        q, k, v = arguments["query"], arguments["key"], arguments["value"]
        # The formulas expect equal head counts. Shared key-value heads need the same FLOPs.
        shapes = [(q.shape[0], q.shape[1], *x.shape[2:]) for x in (q, k, v)]
        flops = (
            sdpa_backward_flop_count(shapes[0], *shapes) if backward else sdpa_flop_count(*shapes)
        )
        queries, keys = q.shape[2], k.shape[2]
        if arguments.get("is_causal"):
            # Kernels skip blocks above the diagonal, so half the square is left.
            flops /= 2
        key = AttentionOp(self._phase, q.shape[0] * q.shape[1], queries, keys, q.shape[-1], q.dtype)
        traffic = _num_bytes([q, k, v]) * (2 if backward else 1)
        self._count(key, Amount(1, traffic, float(flops)))

    def _record_collective(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name == "wait_tensor":
            pending = self._pending.pop(id(args[0].untyped_storage()), None)
            if pending is not None:
                key, amount, overlapping = pending
                self._count(replace(key, overlapping=tuple(overlapping)), amount)
        elif name == "send":
            self._count(Send(self._phase, "pp"), Amount(1, _num_bytes(args[0])))
        elif name in _COLLECTIVES:
            kind = _COLLECTIVES[name]
            key = CollectiveOp(self._phase, kind, self._axes_of(_ranks([*args, *kwargs.values()])))
            sizes = [_size(t) for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            # The rank with the most experts' tokens receives more than it sends.
            is_uneven = kind in ("all_gather", "reduce_scatter", "all_to_all")
            num_bytes = max(sizes) if is_uneven else _num_bytes((args, kwargs))
            amount = Amount(1, num_bytes)
            if func.namespace == "_c10d_functional":
                self._pending[id(out.untyped_storage())] = (key, amount, [])
            else:
                self._count(key, amount)

    def _axes_of(self, ranks: list[int]) -> tuple[str, ...]:
        """Return the adjacent mesh axes of a process group."""
        if len(ranks) == 1:
            return ()
        for mesh in self._meshes:
            if (axes := _spanned_axes(mesh, ranks)) is not None:
                return axes
        raise AssertionError(f"ranks {ranks} are not along {self._meshes}")


@contextmanager
def count_roundings(trace: OperationTrace) -> Iterator[None]:
    """Count roundings of products' factors as such while the context is entered."""
    original = ScaledProducts.round_factor

    def count_and_round(
        products: ScaledProducts, matrix: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        with trace.rounding(matrix):
            return original(products, matrix, dtype)

    ScaledProducts.round_factor = count_and_round  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        ScaledProducts.round_factor = original  # type: ignore[method-assign]


def _spanned_axes(mesh: dict[str, int], ranks: list[int]) -> tuple[str, ...] | None:
    """Return the adjacent axes of a mesh that a process group spans; None if it spans none."""
    stride, size = ranks[1] - ranks[0], len(ranks)
    inner, spanned = 1, 1
    axes: list[str] = []
    for axis, extent in reversed(mesh.items()):
        if extent > 1 and spanned < size and (inner == stride or axes):
            axes.append(axis)
            spanned *= extent
        inner *= extent
    return tuple(reversed(axes)) if spanned == size else None


def _ranks(arguments: Iterable[Any]) -> list[int]:
    """Return the ranks of the process group among an operation's arguments."""
    for argument in arguments:
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product"):
            return sorted(dist.get_process_group_ranks(group_by_name(argument)))
        if isinstance(argument, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(argument)
            except RuntimeError:
                continue  # a reduction, which is wrapped in the same way
            return sorted(dist.get_process_group_ranks(group))
    raise AssertionError("an operation between ranks has no group")


def _traffic(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operation reads and writes, counting each tensor once."""
    name = func._schema.name
    total, written = 0, set()
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        if argument.name not in _NOT_READ.get(name, ()):
            total += sum(map(_size, tensors))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if name in _FUSED_UPDATES and argument.name == "grads":
            writes = kwargs.get("grad_scale") is not None
        if writes:
            total += sum(map(_size, tensors))
            written |= {id(t.untyped_storage()) for t in tensors}
    if name == "fsdp::all_gather_copy_in":
        return 2 * total  # it writes only this rank's part of the returned buffer
    results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    return total + sum(_size(t) for t in results if id(t.untyped_storage()) not in written)


def _num_bytes(tree: Any) -> int:
    return sum(_size(t) for t in tree_leaves(tree) if isinstance(t, Tensor))


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; an expanded tensor has fewer than its shape suggests."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
