"""How a model joins: ``register_model``, in a plug-in or in a package that offers it.

The table itself is ``config.model``'s; it lists names without importing what stands behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from axonlaunch.config.model import MODELS
from axonlaunch.models.spec import Inputs, ModelSpec, TensorPlan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.models.initialization import Initializer

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
        name: The name.
        config: Dataclass with a ``name`` field that types the group ``model``; what is decorated
            is called with one. None: it is called with the keys of ``model.arguments``.
        layers: Path of the ``nn.ModuleList`` of repeated blocks; None: the module is one unit.
        ends: Attributes of the module that only the first, and only the last, pipeline stage keeps
            (the forward passes over those that are None, and over blocks that are); None: the
            module can't be cut, unless it is a plain ``nn.Sequential``.
        inputs: What the module is fed.
        loss: ``(outputs, targets)`` to the sum over counted targets; None: cross entropy.
        initializers: Module to how each parameter starts; None: the module starts itself.
        tensor_plan: Patterns of module names to styles, or what gives them for a module; None:
            tensor parallelism can't divide it.
        sequence_parallel: Whether the plan says what sees a part of the sequence too.
        summary: One line for ``axonlaunch ls models``; None: the docstring's first.

    Raises:
        ValueError: The name is taken, or the configuration is no dataclass with a name.
    """

    def make_spec(build: Callable[[Any], nn.Module]) -> ModelSpec:
        from axonlaunch.models.loss import cross_entropy_sum  # brings torch

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
