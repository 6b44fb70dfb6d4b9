"""Divides the experts of a model among ranks and replaces their forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.autograd import collect_from, scatter_to_group
from axonlaunch.config.options.adapter import EXPERTS
from axonlaunch.engines.expert.dispatch import AllToAll, Dispatch, LostRowsError
from axonlaunch.engines.expert.lost_rows import RowCounts, require_all_rows
from axonlaunch.engines.expert.routing import (
    InvalidRouteError,
    choice_of,
    naming_invalid_route,
    route_weights,
)
from axonlaunch.engines.tensor.parallel_layers.local_parameters import (
    ReadsLocally,
    ShardSpec,
    TensorAxis,
)
from axonlaunch.models.adapters.expert_lora import LoraExperts
from axonlaunch.models.modules.convert_module import convert_module
from axonlaunch.models.tensors.packed_blocks import BLOCK
from axonlaunch.models.torch_internals import is_fake


class DispatchedExperts(ReadsLocally):
    """Experts of which this rank holds some; maps tokens [..., H] to results [..., H].

    The original forward, ``(hidden [T, H], experts [T, K], weights [T, K]) -> [T, H]``, runs on the
    received rows with one expert each and weight 1. The ranks that sent the rows apply the weights.

    Attributes:
        dispatch: Moves rows between the ranks.
        tensor_group: Ranks that have the same tokens. Each of them dispatches a part of the tokens.
        layer: Name of the module, for messages.
        row_counts: Rows that a registered dispatch lost; None for the included dispatch.
    """

    dispatch: Dispatch
    tensor_group: ProcessGroup | None
    layer: str
    row_counts: RowCounts | None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute each token's weighted sum of expert results."""
        top_k = top_k_index.shape[-1]
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts, weights = top_k_index.reshape(-1, top_k), top_k_weights.reshape(-1, top_k)
        tokens = len(hidden)
        if self.tensor_group is not None:
            hidden, experts, weights = (
                self._part(value, self.tensor_group) for value in (hidden, experts, weights)
            )
        # Weights are checked with the experts, because each check makes the host wait.
        experts = experts.masked_fill(~weights.detach().isfinite(), -1)
        try:
            rows, local_experts, ticket = self.dispatch.send(hidden, experts)
        except InvalidRouteError as error:
            raise self._explain(error, weights.detach()) from None
        self._require_rows("send", rows, like=local_experts)
        if self.row_counts is not None:
            self.row_counts.add(experts, local_experts)
        ones = torch.ones_like(local_experts, dtype=weights.dtype).unsqueeze(-1)
        results = super().forward(rows, local_experts.unsqueeze(-1), ones)
        combined = self.dispatch.combine(results, weights, ticket)
        self._require_rows("combine", combined, like=hidden)
        if self.tensor_group is not None:
            combined = collect_from(combined, self.tensor_group, 0)
        # Not a view if possible, because fully_shard warns about views.
        if len(combined) != tokens:
            combined = combined[:tokens].clone()
        return combined if hidden_states.ndim == 2 else combined.view_as(hidden_states).clone()

    def _explain(self, error: InvalidRouteError, weights: Tensor) -> InvalidRouteError:
        """Return the error with the layer and the token's index among all tokens."""
        token, group = error.token, self.tensor_group
        reason = str(error)
        if not weights[token].isfinite().all():
            reason = _weights_reason(weights[token])
        if group is not None:
            token += group.rank * len(weights)
        return InvalidRouteError.of_layer(self.layer, reason, token=token)

    def _require_rows(self, method: str, rows: Tensor, *, like: Tensor) -> None:
        """Refuse another number of rows from a registered dispatch; torch would broadcast them."""
        if len(rows) != len(like):
            name = type(self.dispatch).__name__
            raise LostRowsError(
                f"{name}.{method} of strategy.expert.dispatch returned {len(rows)} rows for "
                f"{self.layer}, not {len(like)}; it must drop no token"
            )

    def _part(self, value: Tensor, group: ProcessGroup) -> Tensor:
        """Return this tensor rank's part of all tokens, padded to equal parts."""
        missing = -len(value) % group.size
        if missing:
            value = functional.pad(value, (0, 0, 0, missing))
        if not value.is_floating_point():
            return value.chunk(group.size)[group.rank]
        return scatter_to_group(value, group, 0)


def dispatch_experts(
    model: nn.Module,
    names: Iterable[str],
    *,
    mesh: DeviceMesh,
    make_dispatch: Callable[..., Dispatch],
    tensor_group: ProcessGroup | None = None,
) -> None:
    """Divide modules of experts among the ranks of a mesh, in place.

    Every parameter becomes a DTensor, sharded along its first dim, [experts, ...]. Adapters are
    divided with their experts.

    Args:
        model: A model or a pipeline stage, identical on every rank or on ``meta``.
        names: Names of the modules; names that a stage lacks are skipped.
        mesh: One-dimensional mesh of the ranks that share the experts.
        make_dispatch: Creates the dispatch of a module from a group and ``num_experts``.
        tensor_group: Ranks with the same tokens; None if each rank has other tokens.
    """
    axis = TensorAxis(mesh)
    modules = dict(model.named_modules())
    for name in names:
        if (module := modules.get(name)) is None:
            continue
        num_experts = module.num_experts
        assert isinstance(num_experts, int)
        dispatch = make_dispatch(axis.group, num_experts=num_experts)
        is_included = type(dispatch) is AllToAll
        module.__dict__.update(
            _axis=axis,
            _sums_gradients=False,
            shard_specs=dict.fromkeys(module._parameters, ShardSpec(0)),
            num_experts=num_experts // axis.group.size,
            dispatch=dispatch,
            tensor_group=tensor_group,
            layer=name,
            row_counts=(
                None if is_included else RowCounts(dispatch, axis.group, num_experts=num_experts)
            ),
        )
        if isinstance(module, LoraExperts):
            _shard_adapters(module, axis, num_experts=num_experts)
        convert_module(module, DispatchedExperts)
        axis.distribute(module)


def name_invalid_routes(stages: Iterable[nn.Module], names: Iterable[str]) -> None:
    """Make experts without an expert axis report the layer and token of an invalid route.

    Values are looked at on CPUs only, because on a GPU each check makes the host wait.

    Args:
        stages: Models or pipeline stages.
        names: Names of the modules of experts; names that a stage lacks are skipped.
    """
    for stage in stages:
        modules = dict(stage.named_modules())
        for name in names:
            if name in modules:
                modules[name].forward = _explained_forward(modules[name], name)


def _explained_forward(module: Any, layer: str) -> Callable[..., Any]:
    forward, num_experts = module.forward, module.num_experts

    @functools.wraps(forward)
    def compute(*args: Any, **kwargs: Any) -> Any:
        _require_finite_weights(layer, route_weights(args, kwargs))
        with naming_invalid_route(layer, choice_of(args, kwargs), num_experts=num_experts):
            return forward(*args, **kwargs)

    return compute


def _require_finite_weights(layer: str, weights: Tensor) -> None:
    if weights.device.type != "cpu" or is_fake(weights):
        return
    weights = weights.detach().flatten(0, -2)
    is_finite = weights.isfinite().all(-1)
    if not is_finite.all():
        token = int((~is_finite).nonzero()[0])
        raise InvalidRouteError.of_layer(layer, _weights_reason(weights[token]), token=token)


def _weights_reason(weights: Tensor) -> str:
    """Return what is wrong with the weights of a token, [K]."""
    return f"the weights of its experts are {weights.tolist()}"


def _shard_adapters(module: LoraExperts, axis: TensorAxis, *, num_experts: int) -> None:
    """Give each rank the rows of A and the columns of B of its experts.

    In B, [outputs, rank x experts], the experts of one rank index are consecutive.
    """
    for matrices in module.matrices().values():
        rank = len(matrices.lora_A.weight) // num_experts
        shard_specs = (
            (matrices.lora_A, ShardSpec(0)),
            (matrices.lora_B, ShardSpec(1, pieces=rank)),
        )
        for matrix, shard in shard_specs:
            convert_module(matrix, ReadsLocally)
            matrix.__dict__.update(_axis=axis, _sums_gradients=False, shard_specs={"weight": shard})


def sharded_dim(shape: Sequence[int], *, shards: int) -> int:
    """Return the dim of a rank's experts that ``fully_shard`` divides: the first that is even.

    If none is, it is 0, along which parts may differ. The bytes of quantized blocks are not
    divided, which are the last of four dims.

    Args:
        shape: Shape of the rank's part, [experts, ...].
        shards: Number of ranks that hold parts of the same experts.
    """
    return next((dim for dim, size in enumerate(shape[:3]) if size % shards == 0), 0)


def broken_expert_rows(
    model: nn.Module, names: Iterable[str], *, degree: int, shards: int
) -> Iterator[str]:
    """Yield the matrices with rows that ranks of experts split within blocks of ``BLOCK`` values.

    Args:
        model: The full model, on any device.
        names: Names of the modules of experts.
        degree: Number of ranks that share the experts.
        shards: Number of ranks that hold parts of the same experts.
    """
    for name in names:
        module = model.get_submodule(name)
        num_experts = module.num_experts
        assert isinstance(num_experts, int)
        adapted = module.matrices() if isinstance(module, LoraExperts) else {}
        by_columns = {f"{key}{EXPERTS}.lora_B.weight" for key in adapted}
        for key, parameter in module.named_parameters():
            if parameter.ndim not in (2, 3):
                continue
            rows, *others = parameter.shape
            part = (rows, others[0] // degree) if key in by_columns else (rows // degree, *others)
            is_cut = key in by_columns and num_experts // degree % BLOCK
            is_last = sharded_dim(part, shards=shards) == len(part) - 1
            is_sharded = is_last and part[-1] // shards % BLOCK
            if is_cut or is_sharded:
                yield f"{name}.{key}"


def dispatched_experts(module: nn.Module) -> list[DispatchedExperts]:
    """Return the divided experts inside a module, in order."""
    return [part for part in module.modules() if isinstance(part, DispatchedExperts)]


def require_no_lost_rows(stages: Iterable[nn.Module]) -> None:
    """Refuse a registered dispatch that dropped rows since the last call.

    Every rank of the world must call this. With a registered dispatch, the host waits for the
    device.

    Args:
        stages: This rank's parts of the model.

    Raises:
        LostRowsError: An expert received fewer rows than tokens chose it.
    """
    parts = (part for stage in stages for part in dispatched_experts(stage))
    require_all_rows({part.layer: part.row_counts for part in parts if part.row_counts is not None})
