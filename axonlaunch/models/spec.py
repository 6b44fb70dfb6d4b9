"""What an engine must know of a model beside the module itself.

It holds plain values and imports no torch, so that listing models stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from axonlaunch.config.data import IGNORE_INDEX
from axonlaunch.config.errors import ConfigError, ConfigIssue

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.models.attention import SequenceParts
    from axonlaunch.models.initialization import Initializer

__all__ = ["IGNORE_INDEX", "BlockFlow", "Dim", "Inputs", "ModelOutputs", "ModelSpec", "TensorPlan"]

Inputs = Literal["tokens", "images", "any"]
TensorPlan: TypeAlias = "Mapping[str, str] | Callable[[nn.Module], Mapping[str, str]]"


class ModelOutputs(NamedTuple):
    """What a forward returns that has a loss of its own beside that of its logits.

    Attributes:
        logits: [..., C].
        auxiliary_loss: 0-dim; what it adds to the mean loss of this micro-batch's targets.
    """

    logits: Tensor
    auxiliary_loss: Tensor


Dim = int | str


@dataclass(frozen=True)
class BlockFlow:
    """What passes through a model's blocks.

    Attributes:
        before: Modules whose parameters are used before the first block, by full names, in turn.
        after: Modules whose parameters are used after the last block.
        shapes: What each of ``before`` returns: numbers, or ``BATCH``, ``LENGTH`` or ``TOKENS``,
            which is their product.
        written: Those of ``before`` whose output the model changes in place.
        returns: Of each block: elements of the tuple that it returns, hidden states first; None:
            it returns them alone.
        problem: Why a pipeline can't cut between the blocks; empty if it can.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    returns: tuple[int | None, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """How a model is built, started, split and judged.

    Attributes:
        build: Typed configuration to module. Called under ``torch.device("meta")`` when
            ``initializers`` is given, on the CPU under the seed otherwise.
        loss: ``(outputs, targets)`` to the *sum* over counted targets, an fp32 scalar; a target of
            ``IGNORE_INDEX`` does not count. Outputs are a tensor, or ``ModelOutputs``.
        layers: Path of the ``nn.ModuleList`` of repeated blocks, the unit of sharding,
            recomputation and compilation; None where the module is one unit.
        inputs: What the module is fed.
        initializers: Module to ``{parameter name: how it starts}``; None where the module starts
            itself. The module may be a pipeline stage that lacks some parts.
        tensor_plan: How tensor parallelism divides it: patterns of module names to styles (see
            ``engines.tensor_plan``), or what gives them for a module, which may be such a stage.
            None: it can't be divided.
        sequence_parallel: Whether the plan says what sees a part of the sequence too.
        ends: Attributes that only the first, and only the last, pipeline stage keeps; the others
            set them, and the blocks that they leave out, to None. None: see ``flow``.
        flow: What passes through its blocks; a stage then runs the whole model's forward, in which
            stand-ins take the place of what other stages keep. None: without ends it can't be cut.
        adapt: The spec and a typed configuration to the spec of the model that it describes; None:
            nothing of the spec depends on it.
        mixes_samples: Whether a sample's loss depends on what else is in its micro-batch, beside
            batch normalisation.
        max_positions: Longest sequence; None: as the configuration says, if it does.
        runs_without_values: Whether a forward that fails on tensors without values fails on others
            too, unless it asks for a value; a model of anybody's may not.
        index_names: Attributes of modules in a block that hold its number, by which it does nothing
            else than the others.
        untraceable: Why it can't be run on tensors without values; empty if it can.
        refused_axes: ``{axis: why}`` of what divides no such model: tensor, pipeline or context.
        positions: Attributes that know of positions, an ``nn.Embedding`` of them or a
            ``RotaryTable``, in a model whose ``Attention`` is causal; None: see ``divide``.
        divide: Lets a module, or a stage, compute on parts of sequences; None: without positions
            they can't be divided.
        head: Path of the module that makes the logits of hidden states, one after another; None:
            it is not known.
        undivided: Why ``divide`` would not give what the whole gives; empty if it does.
        unpackable: Why rows can't hold several documents; empty if its forward takes ``positions``
            of tokens in their documents, and lets none attend to another.
        divides_documents: Whether a part of such a row keeps them apart too: by ``divide``, or by
            the model's attribute ``find_documents``, which engines replace.
    """

    build: Callable[[Any], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    layers: str | None = None
    inputs: Inputs = "tokens"
    initializers: Callable[[nn.Module], Mapping[str, Initializer]] | None = None
    tensor_plan: TensorPlan | None = None
    sequence_parallel: bool = False
    ends: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    flow: Callable[[], BlockFlow] | None = None
    positions: tuple[str, ...] | None = None
    divide: Callable[[nn.Module, SequenceParts], None] | None = None
    undivided: Callable[[], str] = lambda: ""
    head: str | None = None
    unpackable: Callable[[], str] = lambda: "its forward takes no positions"
    divides_documents: bool = False
    adapt: Callable[[ModelSpec, Any], ModelSpec] | None = None
    mixes_samples: bool = False
    max_positions: int | None = None
    runs_without_values: bool = False
    index_names: tuple[str, ...] = ()
    untraceable: str = ""
    refused_axes: Mapping[str, str] = field(default_factory=dict)

    def plan(self, module: nn.Module) -> dict[str, str]:
        """Return the tensor plan for a module; empty where there is none."""
        plan = self.tensor_plan(module) if callable(self.tensor_plan) else self.tensor_plan
        return dict(plan or {})

    def blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the repeated blocks that a module holds, by their full names, in order.

        Raises:
            ConfigError: The module has nothing at ``layers``.
        """
        if self.layers is None:
            return {}
        try:
            container = module.get_submodule(self.layers)
        except AttributeError:
            children = ", ".join(name for name, _ in module.named_children()) or "nothing"
            message = f"{type(module).__name__} has no such module; at its top it has {children}"
            raise ConfigError([ConfigIssue("model.layers", message, self.layers)]) from None
        return {
            f"{self.layers}.{name}": block
            for name, block in container.named_children()
            if not getattr(block, "is_stand_in", False)
        }

    def undivided_sequences(self) -> str:
        """Return why ranks can't each compute a part of its sequences; empty if they can."""
        if why := self.refused_axes.get("context"):
            return why
        if self.divide is not None:
            why = self.undivided()
            return why and f"its sequences can't be divided: {why}"
        if self.positions is None:
            return "the model can't compute on a part of a sequence; use 1"
        return ""

    def head_of(self, module: nn.Module) -> nn.Module | None:
        """Return the head that a module, or a stage of it, has; None where it has none."""
        try:
            head = module.get_submodule(self.head or "")
        except AttributeError:  # None in its place
            return None
        if self.head is None or getattr(head, "is_stand_in", False):
            return None
        return head

    def repeats(self, module: nn.Module) -> bool:
        """Say whether a module's blocks are equal, in all that can be seen without running them.

        They are then in an ``nn.ModuleList``, so that a module can do with fewer.
        """
        if not self.blocks(module):
            return False
        from axonlaunch.models.repeated_blocks import are_alike

        return are_alike(module, self.layers or "", index_names=self.index_names)

    def representative(self, module: nn.Module) -> nn.Module:
        """Return a copy of few blocks where those show what all do, else the module itself."""
        if not self.blocks(module):
            return module
        from axonlaunch.models.repeated_blocks import representative

        return representative(module, self.layers or "", index_names=self.index_names)


def takes_positions() -> str:
    """Say that nothing keeps a model from being fed packed rows."""
    return ""


def not_a_tensor(outputs: object) -> ConfigIssue:
    """Return the problem that a model's forward returned something else than a tensor."""
    kind = type(outputs).__name__
    part = ".logits" if hasattr(outputs, "logits") else "[0]" if isinstance(outputs, tuple) else ""
    example = f", as in return outputs{part}" if part else ""
    message = f"its forward returns {kind}, not a tensor; return the logits alone{example}"
    return ConfigIssue("model", message)
