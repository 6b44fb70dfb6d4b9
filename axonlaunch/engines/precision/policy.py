"""The arithmetic of forward and backward, and loss scaling where fp16 needs it.

Parameters, gradients that are reduced, and optimizer states stay fp32 in every mode, unless
``train.param_dtype`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from axonlaunch.engines.precision.lower_parameters import Forward, lower_blocks

Precision = Literal["fp32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_FIRST_SCALE, _GROWTH_INTERVAL = 2.0**16, 2000
"""Those of ``torch.amp.GradScaler``."""


def lower_replicas(
    model: nn.Module, precision: Precision, *, device: torch.device, blocks: Sequence[nn.Module]
) -> Callable[[Forward], Forward]:
    """Let whole parameters compute as sharded ones do, which are gathered in the precision.

    In fp16 torch's autocast keeps sums over blocks in fp32: those of many models are beyond 65,504.

    Args:
        model: Or a stage of one.
        precision: ``train.precision``.
        device: Where it computes.
        blocks: Of the model; what recomputes or compiles them comes after this.

    Returns:
        What its own forward is to be wrapped by, around all that is done to it.
    """
    if precision == "bf16":
        return lower_blocks(model, torch.bfloat16, blocks=blocks)
    if precision == "fp16":
        # The forward alone, for a backward under autocast would round where the forward did not.
        return torch.autocast(device.type, dtype=torch.float16)
    return _as_it_is


def _as_it_is(forward: Forward) -> Forward:
    return forward


def keep_parameters_in(model: nn.Module, dtype: torch.dtype, *, frozen_alone: bool = False) -> None:
    """Keep a model's floating-point parameters in another type, tied ones tied; buffers stay.

    Args:
        model: Whole.
        dtype: The type.
        frozen_alone: Leave what is trained as it is.
    """
    converted: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            if frozen_alone and parameter.requires_grad:
                continue
            if parameter not in converted:
                values = parameter.detach().to(dtype)
                converted[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(module, name, converted[parameter])


def sharded_policy(precision: Precision, *, reduce_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return fully_shard's policy: gather in the lower precision, reduce gradients in another."""
    if precision == "fp32":
        return MixedPrecisionPolicy(
            reduce_dtype=None if reduce_dtype is torch.float32 else reduce_dtype
        )
    return MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=reduce_dtype)


class LossScale:
    """Dynamic loss scaling (Micikevicius et al., 2018), with torch.amp.GradScaler's constants.

    The decision to skip is taken on the whole model's gradient norm, which every rank knows, so
    ranks that hold different shards never disagree. All of it stays on the device, so that the host
    does not wait for a step to be computed; tensors are made when the first loss is there, as
    ``GradScaler`` makes them, so that an estimate counts them as a run does.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        value: float | None = None,
        growth_interval: int | None = None,
    ) -> None:
        """Begin with a scale.

        Args:
            device: Where losses are.
            value: The first scale; None: torch's.
            growth_interval: Steps without an overflow until it doubles; None: torch's.
        """
        self._device = device
        self._first = value or _FIRST_SCALE
        self._growth_interval = growth_interval or _GROWTH_INTERVAL

    @cached_property
    def value(self) -> Tensor:
        """What the loss is multiplied by, 0-dim fp32."""
        return torch.full((), self._first, device=self._device)

    @cached_property
    def good_steps(self) -> Tensor:
        """Steps since the last overflow, or since it grew, 0-dim int32."""
        return torch.zeros((), dtype=torch.int32, device=self._device)

    def update(self, has_overflowed: Tensor) -> Tensor:
        """Halve after an overflow, double after ``growth_interval`` steps without one.

        Args:
            has_overflowed: 0-dim bool on the scale's device.

        Returns:
            1 after an overflow, else 0, fp32, as optimizers take it.
        """
        overflowed = has_overflowed.float()
        torch._amp_update_scale_(
            self.value, self.good_steps, overflowed, 2.0, 0.5, self._growth_interval
        )
        return overflowed

    def load(self, counters: Mapping[str, Tensor]) -> None:
        """Take over what ``scale_counters`` gave; of a run in another precision, nothing."""
        if float(counters["loss_scale"]) > 0:
            self.value.fill_(counters["loss_scale"])
            self.good_steps.fill_(counters["good_steps"])


def scale_counters(scale: LossScale | None) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a loss scale, on the host.

    Without fp16 there is none, saved as 0: a run may resume in another precision.
    """
    zero = torch.zeros(())
    value, good = (zero, zero) if scale is None else (scale.value, scale.good_steps)
    return {
        "loss_scale": value.to("cpu", torch.float64, copy=True),
        "good_steps": good.to("cpu", torch.int64, copy=True),
    }
