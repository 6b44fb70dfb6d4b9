"""How models join: built in, by decorator, or by an installed package's entry point.

It lists names without importing what stands behind them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from axonlaunch.config.model import MODEL_CONFIGS, FreeModelConfig
from axonlaunch.config.plugins import ENTRY_POINT_GROUP
from axonlaunch.models.spec import Inputs, ModelSpec, TensorPlan
from axonlaunch.registry import Entry, Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.models.initialization import Initializer

Builder = TypeVar("Builder", bound=Callable[..., Any])


class ModelRegistry(Registry[ModelSpec]):
    """Models by name; an entry point's module registers its model when it is first wanted."""

    def add(self, name: str, target: ModelSpec | str, *, summary: str) -> None:
        """List a model; one that an entry point announced takes that entry's place."""
        known = self._entries.get(name)
        if known is not None and isinstance(known.target, _Announced):
            del self._entries[name]
        super().add(name, target, summary=summary)

    def announce(self, name: str, target: str, *, summary: str) -> None:
        """List a model that importing ``package.module[:attribute]`` will register."""
        if name in self:
            warnings.warn(
                f"the entry point {name} = {target} is passed over: {name} is a model already",
                stacklevel=2,
            )
            return
        self._entries[name] = Entry(_Announced(target), summary)

    def get(self, name: str) -> ModelSpec:
        """Import and return what a name stands for.

        Raises:
            UnknownNameError: The name is not listed.
            ValueError: An entry point's module did not register the model that it announced.
        """
        known = self._entries.get(name)
        if known is not None and isinstance(known.target, _Announced):
            importlib.import_module(known.target.partition(":")[0])
            if self._entries[name] is known:
                raise ValueError(
                    f"the entry point {name} = {known.target} registers no model {name!r}; "
                    f'decorate it with @register_model("{name}")'
                )
        return super().get(name)


class _Announced(str):
    """The value of an entry point that has not been imported yet."""

    __slots__ = ()


MODELS = ModelRegistry(
    "model",
    {
        "mlp": Entry("axonlaunch.models.mlp:SPEC", "linear layers with ReLU, for images"),
        "gpt": Entry("axonlaunch.models.gpt:SPEC", "decoder with learned positions, as GPT-2"),
        "llama": Entry("axonlaunch.models.llama:SPEC", "decoder with RoPE and GQA, as Llama 3"),
        "vit": Entry("axonlaunch.models.vit:SPEC", "vision transformer, for images"),
        "hf": Entry("axonlaunch.models.hf.spec:SPEC", "any causal LM of transformers, model.path"),
        "custom": Entry("axonlaunch.models.custom:SPEC", "your own builder, model.target"),
    },
)


def announce_entry_points() -> None:
    """List the models that installed packages announce, without importing them."""
    for point in entry_points(group=ENTRY_POINT_GROUP):
        origin = point.dist.name if point.dist else point.value
        MODELS.announce(point.name, point.value, summary=f"from {origin}")


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
) -> Callable[[Builder], Builder]:
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
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    if config is not None and "name" not in [field.name for field in fields]:
        raise ValueError(
            f"register_model({name!r}, config={config.__name__}): it is not a dataclass with a "
            f'field name; write name: str = "{name}" in one'
        )

    def register(builder: Builder) -> Builder:
        from axonlaunch.models.loss import cross_entropy_sum  # brings torch

        def build_free(free: FreeModelConfig) -> nn.Module:
            module: nn.Module = builder(**free.arguments)
            return module

        spec = ModelSpec(
            build=builder if config else build_free,
            loss=loss or cross_entropy_sum,
            layers=layers,
            ends=ends,
            inputs=inputs,
            initializers=initializers,
            tensor_plan=tensor_plan,
            sequence_parallel=sequence_parallel,
        )
        described = summary or (inspect.getdoc(builder) or f"from {builder.__module__}")
        MODELS.add(name, spec, summary=described.splitlines()[0])
        MODEL_CONFIGS[name] = config or FreeModelConfig
        return builder

    return register
