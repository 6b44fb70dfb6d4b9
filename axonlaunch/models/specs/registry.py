"""Registers models with ``register_model``, in a plug-in or in a package that provides models.

The registry is ``config.options.model.MODELS``; it lists names without importing the model code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from axonlaunch.config.options.model import MODELS
from axonlaunch.models.specs.model_spec import Inputs, ModelSpec, TensorPlan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.models.tensors.initialization import Initializer

_Builder = TypeVar("_Builder", bound=Callable[..., Any])


def register_model(
    name: str,
    *,
    config: type | None = None,
    layers: str | None = None,
    ends: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
    inputs: Inputs = "tokens",
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    initializers: Callable[[nn.Module], Mapping[str, Initializer]] | None = None,
    tensor_plan: TensorPlan | None = None,
    sequence_parallel: bool = False,
    summary: str | None = None,
) -> Callable[[_Builder], _Builder]:
    """Register a module class or a builder function as ``model.name=NAME``.

    Args:
        name: Name of the model.
        config: Dataclass with a ``name`` field that defines the keys of the group ``model``; the
            decorated object is called with an instance. If None, it is called with the keys of
            ``model.arguments``.
        layers: Path of the ``nn.ModuleList`` of repeated blocks; None if the module is one unit.
        ends: Attributes of the module that only the first and only the last pipeline stage keeps.
            The forward must skip blocks and attributes that are None. If None, the module can't be
            cut, unless it is a plain ``nn.Sequential``.
        inputs: Kind of input of the module.
        loss: Maps ``(outputs, targets)`` to the sum over counted targets; None for cross entropy.
        initializers: Maps a module to the initializers of its parameters; None if the module
            initializes itself.
        tensor_plan: Patterns of module names to styles, or a function that returns them for a
            module. None if tensor parallelism can't split the model.
        sequence_parallel: Whether the plan also says which modules see only a part of the sequence.
        summary: One line for ``axonlaunch ls models``; by default the first line of the docstring.

    Raises:
        ValueError: The name is already registered, or ``config`` is not a dataclass with a field
            ``name``.
    """

    def make_spec(build: Callable[[Any], nn.Module]) -> ModelSpec:
        from axonlaunch.models.specs.loss import cross_entropy_sum  # brings torch

        return ModelSpec(
            build=build,
            loss=loss or cross_entropy_sum,
            layers=layers,
            ends=ends,
            inputs=inputs,
            initializers=initializers,
            tensor_plan=tensor_plan,
            sequence_parallel=sequence_parallel,
        )

    return MODELS.register(name, config=config, summary=summary, make_target=make_spec)
