"""Counts the tokens of each expert in a step, and balances experts with a bias of their router."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.data.datasets.dataset import takes_present
from axonlaunch.engines.expert.routing import choice_of, naming_invalid_route
from axonlaunch.models.torch_internals import in_backward

CORRECTION_BIAS = "e_score_correction_bias"
"""Name of the buffer of routers that choose experts by scores plus a bias."""


def router_with_bias(model: nn.Module, experts: str) -> nn.Module | None:
    """Return the module with the correction bias beside a module of experts, or None.

    Args:
        model: Model or stage.
        experts: Full name of the module of experts.
    """
    layer = model.get_submodule(experts.rpartition(".")[0])
    routers = (part for part in layer.modules() if CORRECTION_BIAS in part._buffers)
    return next(routers, None)


@dataclass(frozen=True)
class ExpertLoad:
    """Load of the fullest expert of a layer in a step.

    Attributes:
        relative: Number of tokens of this expert, divided by the mean over the layer's experts.
        share: The fraction of all tokens that chose it.
        most: Largest possible ``relative``, rounded down.
    """

    relative: float
    share: float
    most: int


class ExpertCounts:
    """Number of tokens that chose each expert in a step, over all micro-batches and ranks.

    Tokens of padding are not counted: they are alike, and would choose the same experts.

    Attributes:
        layers: Full names of the modules of experts of the full model.
    """

    def __init__(
        self,
        experts: Mapping[str, int],
        stages: Sequence[nn.Module],
        *,
        device: torch.device,
        sum_over_data: Callable[[Tensor], None],
        sum_over_stages: Callable[[Tensor], None],
        bias_rate: float | None = None,
    ) -> None:
        """Observe the modules of experts of this rank.

        Args:
            experts: Number of experts of each module of experts of the full model.
            stages: This rank's parts of the model.
            device: Device of the counts.
            sum_over_data: Sums a tensor in place over the ranks with other tokens; a collective.
            sum_over_stages: Sums a tensor in place over the ranks with other blocks; a collective.
            bias_rate: Step of the bias of routers; None leaves the bias unchanged.
        """
        self.layers = tuple(experts)
        self._experts = experts
        self._bias_rate = bias_rate
        self._sum_over_data, self._sum_over_stages = sum_over_data, sum_over_stages
        self._is_counting = False
        self._is_summed = False
        self._top_k = 1
        self._device = device
        self._counts: dict[str, Tensor] = {}
        self._routers: dict[str, nn.Module] = {}
        self._present: Tensor | None = None
        for stage in stages:
            self._receive_padding(stage)
            modules = dict(stage.named_modules())
            for name, size in experts.items():
                if name not in modules:
                    continue
                counts = torch.zeros(size, dtype=torch.int64, device=device)
                # The module holds its counts, so that estimates know which block they belong to.
                modules[name].num_chosen = counts
                self._counts[name] = counts
                modules[name].register_forward_hook(self._counter(name, counts), with_kwargs=True)
                if bias_rate is not None:
                    router = router_with_bias(stage, name)
                    assert router is not None, f"{name} has no router with a bias"
                    self._routers[name] = router

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Return a context for the forwards of a step; forget the counts of the last step."""
        for counts in self._counts.values():
            counts.zero_()
        self._is_summed, self._is_counting = False, True
        try:
            yield
        finally:
            self._is_counting = False

    @torch.no_grad()
    def move_biases(self, *, skipped: Tensor | None = None) -> None:
        """Raise the bias of experts with fewer tokens than the mean and lower that of the others.

        Every rank of the world must call this, before the update of the parameters.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
        2024, algorithm 1; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2.

        Args:
            skipped: 1 if the update is skipped (fp16), otherwise 0; None if it never is.
        """
        if self._bias_rate is None:
            return
        self._sum()
        for name, router in self._routers.items():
            bias = getattr(router, CORRECTION_BIAS)
            counts = self._counts[name].double()
            step = self._bias_rate * torch.sign(counts.mean() - counts)
            bias += (
                step.to(bias.dtype) if skipped is None else (step * (1 - skipped)).to(bias.dtype)
            )

    def loads(self) -> dict[str, ExpertLoad]:
        """Return the load of each layer's fullest expert.

        Every rank of the world must call this after a step. The host waits for the device.
        """
        self._sum()
        largest = max(self._experts.values())
        # The last column has the experts of a token, which only the stage of a layer knows.
        counts = torch.zeros(len(self.layers), largest + 1, dtype=torch.int64, device=self._device)
        for number, name in enumerate(self.layers):
            if name in self._counts:
                counts[number, : self._experts[name]] = self._counts[name]
                counts[number, -1] = self._top_k
        self._sum_over_stages(counts)
        rows, loads = counts.tolist(), {}
        for (name, size), (*row, top_k) in zip(self._experts.items(), rows, strict=True):
            choices = max(1, sum(row))
            loads[name] = ExpertLoad(
                max(row) * size / choices, max(row) * top_k / choices, size // max(1, top_k)
            )
        return loads

    def _sum(self) -> None:
        if not self._is_summed and self._counts:
            counts = [*self._counts.values()]
            together = torch.cat(counts)
            self._sum_over_data(together)
            torch._foreach_copy_(counts, together.split([len(each) for each in counts]))
        self._is_summed = True

    def _receive_padding(self, stage: nn.Module) -> None:
        """Let the forward of a stage take the mask of padding, see ``Batch.present``."""
        forward = stage.forward
        forward_takes_present = takes_present(stage)

        @functools.wraps(forward)
        def with_padding(*inputs: Any, present: Tensor | None = None, **named: Any) -> Any:
            if forward_takes_present and present is not None:
                named["present"] = present
            self._present = present
            return forward(*inputs, **named)

        stage.forward = with_padding
        stage.__dict__["takes_present"] = True

    def _counter(self, layer: str, counts: Tensor) -> Callable[..., None]:
        """Return a forward hook that counts the choices of one layer."""

        def count(_: nn.Module, args: Any, kwargs: Any, __: Any) -> None:
            # Recomputation in backward repeats choices that are counted already, and forwards
            # without gradients only find out shapes.
            if self._is_counting and torch.is_grad_enabled() and not in_backward():
                chosen = choice_of(args, kwargs)
                self._top_k = chosen.shape[-1]
                flat = chosen.detach().flatten()
                counted = torch.ones_like(flat)
                if self._present is not None:
                    counted = self._present.flatten().to(flat.dtype).repeat_interleave(self._top_k)
                with naming_invalid_route(layer, chosen, num_experts=len(counts)):
                    counts.scatter_add_(0, flat, counted)

        return count
