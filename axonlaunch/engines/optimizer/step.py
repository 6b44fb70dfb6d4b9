"""The update of a training step: gradient clipping, optimizer steps, and named optimizer states.

Works on any tensors that an engine updates, both full parameters and DTensor shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axonlaunch.comm.mesh import local_part
from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.config.optimization.optimizer import OptimizerConfig
from axonlaunch.config.optimization.optimizer_states import OptimizerState, ParameterFacts
from axonlaunch.config.optimization.parameter_groups import sharding_of, states_of
from axonlaunch.config.precision import (
    master_format,
    quantizes_states,
    state_format,
    update_format,
)
from axonlaunch.engines.optimizer.clipping import (
    clipping_factor,
    gradient_norm,
    scale_gradients,
    scales_gradients,
)
from axonlaunch.engines.optimizer.optimizers import (
    PEAK_LR,
    as_sharded,
    build_optimizers,
    chosen_options,
    facts_of,
    new_state,
)
from axonlaunch.engines.optimizer.streaming import (
    STREAMED,
    UpdateArithmetic,
    stream_parameters,
)
from axonlaunch.engines.precision.rounded_states import RoundedStates
from axonlaunch.models.tensors.packed_blocks import STATE_FORMATS
from axonlaunch.models.torch_dtypes import torch_dtype

_MASTER = OptimizerState(name="master")
_NUMBERS: dict[str, Callable[[Any], float]] = {"int": int, "float": float}
"""Kinds of states that are Python numbers; checkpoints store them as tensors."""


class Update:
    """Updates parameters in place.

    For a DTensor, the optimizer gets this rank's shard as a plain tensor with the same storage: an
    elementwise update gives the same result, and plain tensors are updated faster. Optimizers that
    communicate shards themselves get the DTensor.

    With masters, each parameter in 16 bits has a copy in fp32, which the optimizer updates. They
    are allocated when they are first used: after the initial weights.

    Attributes:
        tensors: Updated tensors, by fully-qualified name of the parameter.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        tensors: Mapping[str, Tensor],
        *,
        parameters: Mapping[str, ParameterFacts] | None = None,
        seed: int = 0,
    ) -> None:
        """Create the optimizers of some tensors.

        Args:
            config: Optimizer options, including those of parameter groups.
            tensors: Tensors to update, by name.
            parameters: Facts about the parameters that select their options, by the same names;
                None derives names and shapes from the tensors.
            seed: Seed of the random numbers by which states are rounded.
        """
        self.tensors = dict(tensors)
        facts = parameters or facts_of(tensors)
        self._configs = chosen_options(config, facts)
        self._updated = {
            name: self._tensor_for_optimizer(name, tensor) for name, tensor in tensors.items()
        }
        stored, updated = (
            None if chosen is None else torch_dtype(chosen)
            for chosen in (state_format(config), update_format(config))
        )
        # States of parameters in that format have it anyway.
        is_other = any({t.dtype, updated} != {stored} for t in tensors.values())
        self._quantizes = quantizes_states(config)
        is_other |= self._quantizes
        self._state_dtype = stored if is_other else None
        self._arithmetic = UpdateArithmetic(dtype=updated if is_other else None)
        self._has_masters = master_format(config) is not None
        self._masters: dict[Tensor, Tensor] = {}
        self._rounded: RoundedStates | None = None
        if is_other and stored != updated:
            self._round_states(seed, facts)
        elif self._quantizes:
            self._quantize_states()
        self._created: dict[str, dict[str, Any]] = {}
        self._sharded: dict[str, tuple[Tensor, Tensor]] = {}
        # A pipeline stage may hold no trained parameters.
        self.optimizers = self._build()
        self._owners = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def groups(self) -> list[list[str]]:
        """Return the names of each group of options, in the order of the update."""
        names = {parameter: name for name, parameter in self._updated.items()}
        return [
            [names[parameter] for parameter in group["params"]]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    def _build(self) -> list[Optimizer]:
        optimizers = self._optimizers()
        if self._arithmetic.dtype is not None:
            elementwise = {
                parameter
                for name, parameter in self._updated.items()
                if sharding_of(self._configs[name]) == "elementwise"
            }
            for optimizer in optimizers:
                at_once = optimizer.param_groups[0]["params"][0] not in elementwise
                stream_parameters(optimizer, arithmetic=self._arithmetic, at_once=at_once)
        return optimizers

    def _round_states(self, seed: int, facts: Mapping[str, ParameterFacts]) -> None:
        """Store the states with the shape of their parameter in bf16, see ``RoundedStates``."""
        names = {parameter: name for name, parameter in self._updated.items()}
        rounded = self._rounded = RoundedStates(seed=seed)

        def is_rounded(parameter: Tensor, key: str) -> bool:
            return self._kinds(names[parameter])[key].dtype == "parameter"

        def read(parameter: Tensor, key: str, value: Tensor) -> Tensor:
            return value.float() if is_rounded(parameter, key) else value

        def store(parameter: Tensor, key: str, value: Tensor) -> Tensor:
            if not is_rounded(parameter, key):
                return value
            # Copies of a weight on two pipeline stages have the same name in the full model.
            name = names[parameter]
            return rounded.round(f"{facts[name].name}.{key}", value, self.tensors[name])

        self._arithmetic.read_state, self._arithmetic.store_state = read, store

    def _quantize_states(self) -> None:
        """Store large states in 8 bits."""
        names = {parameter: name for name, parameter in self._updated.items()}

        def read(parameter: Tensor, key: str, value: Tensor) -> Tensor:
            state = self._kinds(names[parameter])[key]
            if not state.is_packed:
                return value
            values = STATE_FORMATS[state.is_positive].dequantize(value, torch.float32)
            # With the strides of the parameter, as fused kernels require.
            return torch.empty_like(parameter, dtype=values.dtype, device=value.device).copy_(
                values
            )

        def store(parameter: Tensor, key: str, value: Tensor) -> Tensor:
            state = self._kinds(names[parameter])[key]
            return STATE_FORMATS[state.is_positive].quantize(value) if state.is_packed else value

        self._arithmetic.read_state, self._arithmetic.store_state = read, store

    def _optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the tensors, before streaming is added."""
        return build_optimizers(self._configs, self._updated)

    def _tensor_for_optimizer(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor that the optimizer sees instead of a parameter."""
        if not isinstance(tensor, DTensor) or sharding_of(self._configs[name]) == "collective":
            return tensor
        parameter = nn.Parameter(_part(tensor))
        parameter.grad_dtype = tensor.grad_dtype
        return parameter

    def begin_backward(self, *, rate: Callable[[float], float], step: int) -> None:
        """Prepare updates that begin in the next backward; takes the arguments of ``apply``."""

    def collect_gradients(self) -> None:
        """Move gradients to the updated tensors; full parameters already have theirs."""

    def apply(
        self, *, rate: Callable[[float], float], step: int = 1, skip: Tensor | None = None
    ) -> None:
        """Update every tensor and free the gradients.

        Args:
            rate: Maps a group's peak learning rate to its learning rate in this step.
            step: Number of this step, from 1, on which the rounding of states depends.
            skip: 1 to skip the update, otherwise 0, 0-dim fp32, as in ``torch.amp``; None never
                skips.
        """
        self._begin_step(rate=rate, step=step)
        for name in self._updated:
            self._hand_over(name)
        if skip is None:
            self._step()
        else:
            self._step_unless(skip)
        self.forget_gradients()

    def _begin_step(self, *, rate: Callable[[float], float], step: int) -> None:
        """Prepare everything that a step needs except gradients."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(group[PEAK_LR])
        self._make_masters()
        if self._rounded is not None:
            self._rounded.step = step
        # The optimizer owns its states, and may replace them; keep no second copy.
        self._created, self._sharded = {}, {}

    def masters(self) -> dict[str, Tensor]:
        """Return the masters by name, sharded like optimizer states; allocate missing ones.

        They have the values of the parameters until the first step.
        """
        self._make_masters()
        return {
            name: as_sharded(_MASTER, self._masters[parameter], self.tensors[name])
            for name, parameter in self._updated.items()
            if parameter in self._masters
        }

    @torch.no_grad()
    def round_masters(self) -> None:
        """Set parameters to the rounded values of their masters; all ranks must call this."""
        for name, parameter in self._updated.items():
            if (master := self._masters.get(parameter)) is not None:
                local_part(self.tensors[name]).copy_(master)

    @torch.no_grad()
    def _make_masters(self) -> None:
        if not self._has_masters or self._masters:
            return
        dtype = self._arithmetic.dtype
        for name, parameter in self._updated.items():
            tensor = self.tensors[name]
            if tensor.dtype != dtype:
                master = new_state(_MASTER, tensor, device=self._states_device(tensor), dtype=dtype)
                self._masters[parameter] = master.copy_(local_part(tensor))
        self._arithmetic.masters = {
            parameter: as_sharded(_MASTER, master, parameter)
            for parameter, master in self._masters.items()
        }

    def finish(self) -> None:
        """Wait for work started by ``apply``; must be called before parameters are read."""

    def _hand_over(self, name: str) -> None:
        """Give the tensor of an optimizer the gradient and the storage of its DTensor."""
        parameter, tensor = self._updated[name], self.tensors[name]
        if parameter is not tensor:
            parameter.data = _part(tensor)  # fully_shard may have reallocated its shards
            parameter.grad = None if tensor.grad is None else local_part(tensor.grad)

    def _step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def _step_unless(self, overflowed: Tensor) -> None:
        """Step or skip the step, as ``torch.amp.GradScaler.step`` does.

        Torch's fused kernels check the flag on the device; for other optimizers the host waits for
        it, and for states in 8 bits, which would change if they were quantized once more.
        """
        are_fused = all(scales_gradients(optimizer) for optimizer in self.optimizers)
        if self._quantizes or not (are_fused and self._has_states()):
            if bool(overflowed == 0):
                self._step()
            return
        for optimizer in self.optimizers:
            step_device = self._step_device(optimizer)
            optimizer.found_inf = overflowed.to(step_device)  # type: ignore[attr-defined]
        self._step()
        for optimizer in self.optimizers:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def _has_states(self) -> bool:
        """Allocate missing states; return whether all states exist.

        If torch's fused SGD creates its momentum in a skipped step, the momentum contains
        uninitialized memory. Therefore states that only the optimizer can create are left to a step
        that is not skipped.
        """
        for name, parameter in self._updated.items():
            if self._states(parameter):
                continue
            if any(kind.initial is None for kind in self._kinds(name).values()):
                return False
            self._create_states(name)
        self._created = {}  # as in _begin_step
        return True

    def forget_gradients(self) -> None:
        """Free all gradients, and forget their factor."""
        for tensor in [*self.tensors.values(), *self._updated.values()]:
            tensor.grad = None
        self._leave_factor_to_update(None)

    def clip_gradients(
        self,
        max_norm: float | None,
        *,
        norm: Tensor | None = None,
        loss_scale: Tensor | None = None,
    ) -> Tensor:
        """Scale gradients to a maximum norm; return the full model's original norm, 0-dim.

        The gradients change in ``apply`` if the update can scale them, which saves a pass over
        them, otherwise here.

        Args:
            max_norm: Maximum norm; None does not clip.
            norm: Norm if already computed; None computes that of ``tensors``.
            loss_scale: Loss scale to divide by, see ``clipping.clipping_factor``.
        """
        if norm is None:
            norm = gradient_norm(self.tensors.values())
        norm, factor = clipping_factor(norm, max_norm=max_norm, loss_scale=loss_scale)
        self._leave_factor_to_update(factor)
        scale_gradients(self._tensors_to_scale(), factor)
        return norm

    def _leave_factor_to_update(self, factor: Tensor | None) -> None:
        """Set the factor by which the next step multiplies gradients; None for 1."""
        self._arithmetic.factor = factor
        for optimizer in filter(scales_gradients, self.optimizers):
            optimizer.grad_scale = (  # type: ignore[attr-defined]
                None if factor is None else factor.reciprocal().to(self._step_device(optimizer))
            )

    def _tensors_to_scale(self) -> list[Tensor]:
        """Return the tensors of optimizers that do not scale gradients in their steps."""
        return [
            self.tensors[name]
            for name, parameter in self._updated.items()
            if not (scales_gradients(owner := self._owners[parameter]) or owner in STREAMED)
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """Return optimizer states as ``{"<parameter>.<state>": tensor}``; allocate missing ones.

        Raises:
            ConfigError: The optimizer has a state that was not found when it was tried.
        """
        states = {}
        for name, parameter in self._updated.items():
            kinds, values = self._kinds(name), self._states(parameter)
            if unknown := sorted(key for key in values.keys() - kinds if values[key] is not None):
                message = (
                    f"keeps {', '.join(unknown)} of {name}, and no such state when it was tried; "
                    "a checkpoint without it would resume with other numbers; register the "
                    "optimizer with its states"
                )
                raise ConfigError(
                    [ConfigIssue("optimizer.name", message, self._configs[name].name)]
                )
            values = values or self._create_states(name)
            for key, state in kinds.items():
                if key in values:
                    states[f"{name}.{key}"] = self._as_saved(f"{name}.{key}", state, values[key])
        return states

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy optimizer states into the optimizers.

        States that only the optimizer can create, and that did not exist when they were saved, are
        left for the optimizer to create.

        Args:
            state: States in the format of ``state_dict``.

        Raises:
            KeyError: A state of one of the tensors is missing.
        """
        for key, value in self.state_dict().items():
            if value is not state[key]:
                value.copy_(state[key])
        for name, parameter in self._updated.items():
            created = self._created.get(name)
            if (
                created
                and not self._states(parameter)
                and not _is_unmade(created, self._kinds(name))
            ):
                self._owners[parameter].state[parameter] = created
            states = self._states(parameter)
            for key, kind in self._kinds(name).items():
                if kind.dtype in _NUMBERS and key in states:
                    states[key] = _NUMBERS[kind.dtype](state[f"{name}.{key}"])

    def _states(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer's states of a tensor; empty before its first step."""
        by_parameter = self._owners[parameter].state
        states: dict[str, Any] = by_parameter.get(parameter, {})
        return states

    def _kinds(self, name: str) -> dict[str, OptimizerState]:
        """Return the declared states of a parameter, by name."""
        return states_of(self._configs[name], tuple(self.tensors[name].shape))

    def _create_states(self, name: str) -> dict[str, Any]:
        """Allocate the states that the first step would create, without a step.

        They are handed to the optimizer at once, unless it must create some of them. In that case
        the allocated tensors only provide shapes to load a checkpoint into, and are saved with a
        marker for "not created yet".
        """
        if name not in self._created:
            tensor, parameter, kinds = self.tensors[name], self._updated[name], self._kinds(name)
            device = self._states_device(tensor)
            created: dict[str, Any] = {
                key: new_state(kind, tensor, device=device, dtype=self._state_dtype)
                for key, kind in kinds.items()
            }
            for key, kind in kinds.items():
                if kind.initial is None and (unmade := _unmade(created[key].dtype)) is not None:
                    created[key].fill_(unmade)
            self._created[name] = created
            if created and all(kind.initial is not None for kind in kinds.values()):
                self._owners[parameter].state[parameter] = created
        return self._created[name]

    def _as_saved(self, key: str, state: OptimizerState, value: Any) -> Tensor:
        """Return a state in checkpoint format: sharded like its parameter, numbers as tensors."""
        if not isinstance(value, Tensor):
            return torch.tensor(value, dtype=torch.int64 if state.dtype == "int" else torch.float64)
        part, sharded = self._sharded.get(key, (None, None))
        if sharded is None or part is not value:
            sharded = as_sharded(state, value, self.tensors[key.rpartition(".")[0]])
            self._sharded[key] = (value, sharded)
        return sharded

    def _step_device(self, optimizer: Optimizer) -> torch.device:
        """Return the device on which an optimizer updates."""
        parameter: Tensor = optimizer.param_groups[0]["params"][0]
        return parameter.device

    def _states_device(self, tensor: Tensor) -> torch.device:
        """Return the device of a tensor's states between updates."""
        return tensor.device


def _unmade(dtype: torch.dtype) -> float | None:
    """Return the marker value of states that do not exist yet; None for types without one."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return None if dtype is torch.bool else torch.iinfo(dtype).min


def _is_unmade(states: Mapping[str, Tensor], kinds: Mapping[str, OptimizerState]) -> bool:
    """Return whether a parameter's states were saved before its optimizer had created any."""
    without_initial = [states[key] for key, kind in kinds.items() if kind.initial is None]
    marked = [
        (state, mark) for state in without_initial if (mark := _unmade(state.dtype)) is not None
    ]
    return bool(marked) and all(
        bool((state.isnan() if math.isnan(mark) else state == mark).all()) for state, mark in marked
    )


@torch.no_grad()
def _part(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, on the same storage."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
