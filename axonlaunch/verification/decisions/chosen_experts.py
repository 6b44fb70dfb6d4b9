"""Compares which experts routers choose, and continues with the choices of the reference.

A rounding error can change the order of two close scores. All later values of the token then
differ. So choices are compared where they are made, and everything else is compared with equal
choices.

Blocks that are computed again in backward must keep the choices of the forward. Choosing again is
an error even if the result is the same, as it is on a device that rounds both times alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from axonlaunch.models.modules.topk_choices import TopkChoices, is_choice
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.torch_internals import in_backward

Place = Callable[[Tensor, torch.Size, int], Tensor | None]


@dataclass(frozen=True)
class OtherExperts:
    """Choices of a block that differ from those of the reference.

    Attributes:
        block: Name of the block.
        tokens: Number of tokens with other experts.
        gap: Largest difference between the scores of both choices, relative to the token's largest
            score.
    """

    block: str
    tokens: int
    gap: float


class ChosenExperts(TopkChoices):
    """Records the choices in forwards of a model's blocks while the mode is active.

    Attributes:
        others: Choices that differ from the expected ones.
    """

    def __init__(self, spec: ModelSpec, modules: Iterable[nn.Module], *, num_experts: int) -> None:
        """Register hooks.

        Args:
            spec: Specification of the model.
            modules: Models or pipeline stages of this process.
            num_experts: Largest number of experts of a layer.
        """
        super().__init__(most_scores=num_experts)
        self.others: list[OtherExperts] = []
        self._choices: dict[str, list[Tensor]] = {}
        self._expected: Mapping[str, Tensor] = {}
        self._select_part: Place = _following_rows
        self._block: str | None = None
        self._tokens, self._num_choices = torch.Size(), 0
        for root in modules:
            for name, block in spec.blocks(root).items():
                block.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                block.register_forward_hook(self._leaving, always_call=True)

    def begin(self, expected: Mapping[str, Tensor], select_part: Place | None = None) -> None:
        """Start a step.

        Args:
            expected: Choices that replace those of the step, from ``choices``.
            select_part: Returns the part of a full choice [B, T, ...] for the n-th call of a block
                with a part of a given shape; None if unknown. By default, calls follow each other
                in the rows.
        """
        self.others, self._choices, self._expected = [], {}, expected
        self._select_part = select_part or _following_rows

    def choices(self) -> dict[str, Tensor]:
        """Return the recorded choices of experts by ``<block>.<number of the choice in a call>``.

        The calls of a block are concatenated: [samples, positions, ...].
        """
        return {key: torch.cat(calls) for key, calls in self._choices.items()}

    def choose(self, scores: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """See ``TopkChoices.choose``."""
        experts = make()
        if self._block is None:
            return experts
        key = f"{self._block}.{self._num_choices}"
        self._num_choices += 1
        tokens = self._tokens.numel()
        if experts.shape[:2] == self._tokens:
            part = experts
        elif experts.shape[:1] == (tokens,):
            part = experts.view(*self._tokens, *experts.shape[1:])
        else:
            return experts
        calls = self._choices.setdefault(key, [])
        full = self._expected.get(key)
        expected = None if full is None else self._select_part(full, part.shape, len(calls))
        if expected is not None:
            expected = expected.to(experts.device).reshape(experts.shape)
            self._compare(self._block, scores.detach(), experts, expected)
            experts = expected
        calls.append(part.cpu())
        return experts

    def _compare(self, block: str, scores: Tensor, experts: Tensor, expected: Tensor) -> None:
        differs = (experts.sort(-1).values != expected.sort(-1).values).any(-1)
        if not differs.any():
            return
        values, others = (
            scores.gather(-1, chosen).sort(-1).values for chosen in (experts, expected)
        )
        size = scores.nan_to_num(posinf=0.0, neginf=0.0).abs().amax(-1).clamp(min=1e-30)
        gaps = ((values - others).abs().amax(-1) / size)[differs]
        gap = float(gaps.nan_to_num(nan=math.inf).max())
        self.others.append(OtherExperts(block, int(differs.sum()), gap))

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, inputs: Any, named_inputs: Any) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            hidden = (
                value
                for value in (*inputs, *named_inputs.values())
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2
            )
            first = next(hidden, None)
            if first is not None:
                self._block, self._num_choices, self._tokens = name, 0, first.shape[:2]

        return enter

    def _leaving(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._block = None


class ChoicesInBackward(TorchDispatchMode):
    """Counts choices that this thread makes in a backward while the mode is active.

    A function mode such as ``ChosenExperts`` does not see a backward.

    Attributes:
        tokens: Number of tokens whose experts were chosen.
    """

    def __init__(self, *, num_experts: int) -> None:
        """Create the mode.

        Args:
            num_experts: Largest number of experts of a layer.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens = 0
        self._num_experts = num_experts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count a call."""
        del types
        if func is torch.ops.aten.topk.default and in_backward():
            scores, dim = args[0], args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
            if is_choice(scores, dim, most_scores=self._num_experts):
                self.tokens += scores.shape[:-1].numel()
        return func(*args, **(kwargs or {}))


def _following_rows(full: Tensor, part: torch.Size, number: int) -> Tensor | None:
    rows = full[number * part[0] : (number + 1) * part[0]]
    return rows if rows.shape == part else None
