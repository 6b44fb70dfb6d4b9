"""Types of forward and backward, and dynamic loss scaling for fp16.

Parameters, reduced gradients and optimizer states are fp32 in every mode, unless
``train.param_dtype`` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from axonlaunch.config.precision import Precision
from axonlaunch.engines.precision.lower_parameters import Forward, lower_blocks
from axonlaunch.engines.precision.torch_internals import amp_update_scale
from axonlaunch.models.torch_dtypes import torch_dtype

_FIRST_SCALE, _GROWTH_INTERVAL = 2.0**16, 2000
"""Constants of ``torch.amp.GradScaler``."""


def lower_replicas(
    model: nn.Module, precision: Precision, *, device: torch.device, blocks: Sequence[nn.Module]
) -> Callable[[Forward], Forward]:
    """Make full parameters compute as sharded ones do, which are gathered in the lower precision.

    Args:
        model: The model or pipeline stage.
        precision: Precision of the run.
        device: Device of the computation.
        blocks: Blocks of the model, before they are compiled or wrapped for recomputation.

    Returns:
        A wrapper for the model's forward; apply it outermost.
    """
    dtype = torch_dtype(precision.compute)
    if precision.replica_arithmetic == "copies":
        return lower_blocks(model, dtype, blocks=blocks)
    if precision.replica_arithmetic == "autocast":
        # Only the forward, because a backward under autocast would round where the forward did not.
        return torch.autocast(device.type, dtype=dtype)
    return _identity


def _identity(forward: Forward) -> Forward:
    return forward


def keep_parameters_in(model: nn.Module, dtype: torch.dtype, *, frozen_only: bool = False) -> None:
    """Convert a model's floating-point parameters to another type. Tied parameters stay tied.

    Buffers are not converted.

    Args:
        model: The full model.
        dtype: The type of the parameters.
        frozen_only: Convert only frozen parameters.
    """
    converted: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            if frozen_only and parameter.requires_grad:
                continue
            if parameter not in converted:
                values = parameter.detach().to(dtype)
                converted[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(module, name, converted[parameter])


def sharded_policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return fully_shard's policy: the dtypes in which it gathers parameters and reduces gradients.

    A dtype of the policy is None if it is that of the parameters.
    """
    reduce_dtype = torch_dtype(precision.reduce)
    if not precision.gather.is_low:
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype if precision.reduce.is_low else None)
    param_dtype = torch_dtype(precision.gather)
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


class LossScale:
    """Dynamic loss scaling (Micikevicius et al., 2018), with torch.amp.GradScaler's constants.

    Whether a step is skipped depends on the gradient norm of the full model, which every rank
    knows, so ranks with different shards always agree. All state stays on the device, so the host
    does not wait for steps. Like ``GradScaler``, it allocates its tensors at the first loss, so
    memory estimates count them at the same time as a run does.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        value: float | None = None,
        growth_interval: int | None = None,
    ) -> None:
        """Create a loss scale.

        Args:
            device: Device of the losses.
            value: Initial scale; None for torch's.
            growth_interval: Number of steps without overflow until the scale doubles; None for
                torch's.
        """
        self._device = device
        self._first = value or _FIRST_SCALE
        self._growth_interval = growth_interval or _GROWTH_INTERVAL

    @cached_property
    def value(self) -> Tensor:
        """Current factor of the loss, 0-dim fp32."""
        return torch.full((), self._first, device=self._device)

    @cached_property
    def good_steps(self) -> Tensor:
        """Steps since the last overflow or the last growth, 0-dim int32."""
        return torch.zeros((), dtype=torch.int32, device=self._device)

    def update(self, has_overflowed: Tensor) -> Tensor:
        """Halve the scale after an overflow; double it after ``growth_interval`` steps without one.

        Args:
            has_overflowed: 0-dim bool on the scale's device.

        Returns:
            1 after an overflow, otherwise 0, in fp32, as optimizers expect it.
        """
        overflowed = has_overflowed.float()
        amp_update_scale(self.value, self.good_steps, overflowed, 2.0, 0.5, self._growth_interval)
        return overflowed

    def load(self, counters: Mapping[str, Tensor]) -> None:
        """Restore the result of ``scale_counters``; ignore one saved without a loss scale."""
        if float(counters["loss_scale"]) > 0:
            self.value.fill_(counters["loss_scale"])
            self.good_steps.fill_(counters["good_steps"])


def scale_counters(scale: LossScale | None) -> dict[str, Tensor]:
    """Return a loss scale's entries for a checkpoint, on the host.

    Without fp16 the entries are 0, so that a run can resume in a different precision.
    """
    zero = torch.zeros(())
    value, good = (zero, zero) if scale is None else (scale.value, scale.good_steps)
    return {
        "loss_scale": value.to("cpu", torch.float64, copy=True),
        "good_steps": good.to("cpu", torch.int64, copy=True),
    }
