"""Loss that balances the experts of the global batch, computed in parts by any layout.

With E experts it is ``E * sum(f_e * P_e)``: f_e is the number of choices of expert e per token, and
P_e is its mean probability, both over all layers and tokens of the global batch (Fedus et al.,
"Switch Transformers", 2021, equations 4 to 6; transformers' ``load_balancing_loss_func``). Choices
have no gradient. With f_e known, the loss is therefore a sum over tokens, and each rank adds the
terms of the tokens in each of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

RoutingMode = Literal["count", "share", "off"]
_CURRENT: ContextVar[RouterLoss | None] = ContextVar("router loss", default=None)


class RouterChoices(NamedTuple):
    """Choices of a layer's router.

    Attributes:
        probabilities: Probability of each expert for each token, [tokens, E].
        experts: Chosen experts of each token, [tokens, K].
    """

    probabilities: Tensor
    experts: Tensor


def choices_of_logits(gate_logits: Iterable[Tensor], *, top_k: int) -> Iterator[RouterChoices]:
    """Yield the choices of routers that take the experts with the largest logits.

    Args:
        gate_logits: Logits of each layer's router, [tokens, E].
        top_k: Number of experts of a token, K.
    """
    for logits in gate_logits:
        probabilities = logits.softmax(-1)
        yield RouterChoices(probabilities, probabilities.detach().topk(top_k, dim=-1).indices)


def router_loss_of_batch(
    layers: Sequence[RouterChoices], *, num_experts: int, mask: Tensor | None
) -> Tensor:
    """Return the loss of a global batch that one process computes at once, 0-dim.

    Args:
        layers: Choices of each layer with experts.
        num_experts: Number of experts, E.
        mask: Whether each token counts, of any shape with as many elements; None: all do.
    """
    probabilities = torch.cat([layer.probabilities for layer in layers])
    experts = torch.cat([layer.experts for layer in layers])
    if mask is not None:
        is_counted = mask.flatten().bool().repeat(len(layers))
        probabilities, experts = probabilities[is_counted], experts[is_counted]
    if not len(experts):
        return probabilities.sum()
    # Not bincount, which torch can't run on tensors without values.
    counts = nn.functional.one_hot(experts, num_experts).sum((0, 1))
    frequencies = counts / len(experts)
    return num_experts * (frequencies * probabilities.mean(0)).sum()


def current_router_loss() -> RouterLoss | None:
    """Return the loss that a running forward adds to; None outside of an engine's forward."""
    return _CURRENT.get()


class RouterLossModel(nn.Module):
    """Base class of models that may have an auxiliary loss of their routers.

    Attributes:
        shares_router_loss: Whether ``RouterLoss`` computes it.
    """

    shares_router_loss = False

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of a pipeline stage, with the loss of its blocks attached."""
        return hidden


class RouterLoss:
    """Sums the choices of a step over its micro-batches and ranks, and returns shares of the loss.

    Models call ``share`` and ``add`` in their forward, or ``attach`` on a pipeline stage that
    returns hidden states. With several micro-batches or stages, the engine first runs all
    micro-batches without gradients to count the choices.

    Attributes:
        gradient: Gradient of attached shares, 0-dim; the engine sets it for each step.
    """

    gradient: Tensor

    def __init__(self, sum_over_ranks: Callable[[Tensor], None]) -> None:
        """Create the loss of an engine.

        Args:
            sum_over_ranks: Sums a tensor in place over the ranks with other tokens; a collective.
        """
        self._sum_over_ranks = sum_over_ranks
        self._mode: RoutingMode = "off"
        self._counts: Tensor | None = None
        self._share: Tensor | None = None
        self._attached: Tensor | None = None

    @contextmanager
    def running(self, mode: RoutingMode) -> Iterator[None]:
        """Return a context in which forwards count choices or compute their share of the loss.

        Args:
            mode: ``count`` counts the choices of experts; on exit they are summed over ranks.
                ``share`` computes the loss from these counts, or without them from the choices of
                the first forward. ``off`` does neither.
        """
        token, self._mode = _CURRENT.set(self), mode
        try:
            yield
            if mode == "count":
                assert self._counts is not None, "no forward called share()"
                self._sum_counts(self._counts)
        finally:
            self._mode = "off"
            _CURRENT.reset(token)

    def begin_step(self) -> None:
        """Forget the counts of the last step."""
        self._counts = self._share = self._attached = None

    def share(
        self,
        layers: Iterable[RouterChoices],
        *,
        num_experts: int,
        mask: Tensor | None,
        device: torch.device,
    ) -> Tensor:
        """Return the share of a micro-batch in the loss, 0-dim.

        Args:
            layers: Choices of each layer with experts, one after another to save memory.
            num_experts: Number of experts, E.
            mask: Whether each token counts, of any shape with as many elements; None: all do.
            device: Device of the choices.
        """
        probabilities = torch.zeros(num_experts, device=device)
        if self._mode == "off":
            return probabilities.sum()
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        for layer in layers:
            is_counted = torch.ones_like(layer.experts[:, 0])
            if mask is not None:
                is_counted = mask.flatten().long()
            chosen_counts = is_counted.repeat_interleave(layer.experts.shape[-1])
            counts[:num_experts].scatter_add_(0, layer.experts.flatten(), chosen_counts)
            counts[num_experts] += is_counted.sum()
            weighted = layer.probabilities.float() * is_counted.unsqueeze(-1)
            probabilities = probabilities + weighted.sum(0)
        if self._mode == "count":
            self._counts = counts if self._counts is None else self._counts + counts
            return probabilities.new_zeros(())
        if self._counts is None:
            self._counts = self._sum_counts(counts)
        tokens = self._counts[num_experts].clamp(min=1)
        frequencies = self._counts[:num_experts] / tokens
        return num_experts * (frequencies * probabilities / tokens).sum()

    def share_nothing(self, *, num_experts: int, device: torch.device) -> None:
        """Take part in the sum of counts over ranks, in a pipeline stage without routers.

        Args:
            num_experts: Number of experts, E.
            device: Device of the stage.
        """
        if self._mode == "off" or self._counts is not None:
            return
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        self._counts = counts if self._mode == "count" else self._sum_counts(counts)

    def _sum_counts(self, counts: Tensor) -> Tensor:
        """Sum counts over ranks, in place."""
        self._sum_over_ranks(counts)
        return counts

    def add(self, loss: Tensor) -> None:
        """Add a forward's weighted share to the loss of its micro-batch."""
        if self._mode == "share" and torch.is_grad_enabled():
            self._share = loss if self._share is None else self._share + loss

    def attach(self, hidden: Tensor, loss: Tensor) -> Tensor:
        """Return hidden states whose backward also computes the gradients of a weighted share."""
        if self._mode != "share" or not torch.is_grad_enabled():
            return hidden
        value = loss.detach()
        self._attached = value if self._attached is None else self._attached + value
        attached: Tensor = _attach(hidden, loss, self.gradient)
        return attached

    def attached_loss(self) -> Tensor | None:
        """Return the sum of the step's attached shares; None if there are none."""
        return self._attached

    def take(self) -> Tensor | None:
        """Return the share that was added since the last call; None if there is none."""
        share, self._share = self._share, None
        return share


class _Attach(torch.autograd.Function):
    """Returns hidden states, and gives a loss that they don't depend on a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient, ctx.dtype = gradient, loss.dtype
        return hidden.clone()  # torch's stages detach their outputs in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, ctx.gradient.to(ctx.dtype), None


_attach: Any = _Attach.apply
