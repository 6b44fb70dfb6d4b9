"""Describes models to engines: loss, blocks, tensor plan and other facts that a module lacks.

This module holds plain values and does not import torch, so listing models stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from axonlaunch.config import RunConfig
from axonlaunch.config.options.data import IGNORE_INDEX
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.models.modules.attention import SequenceParts
    from axonlaunch.models.tensors.initialization import Initializer

__all__ = [
    "IGNORE_INDEX",
    "BlockFlow",
    "Dim",
    "Inputs",
    "MixedSamples",
    "ModelOutputs",
    "ModelSpec",
    "TensorPlan",
]

Inputs = Literal["tokens", "images", "any"]
MixedSamples = Literal["none", "micro_batch", "batch"]
TensorPlan: TypeAlias = "Mapping[str, str] | Callable[[nn.Module], Mapping[str, str]]"


class ModelOutputs(NamedTuple):
    """Logits and auxiliary loss of a forward.

    Attributes:
        logits: Logits [..., C].
        auxiliary_loss: Scalar tensor that is added to the mean loss of this micro-batch.
    """

    logits: Tensor
    auxiliary_loss: Tensor


Dim = int | str


@dataclass(frozen=True)
class BlockFlow:
    """Modules and tensors around a model's blocks, which a pipeline needs to cut the model.

    Attributes:
        before_blocks: Full names of the modules with parameters that are used before the first
            block, in order.
        after_blocks: Full names of the modules with parameters that are used after the last block.
        shapes: Output shape of each module in ``before_blocks``. A dimension is a number, or
            ``BATCH``, ``LENGTH`` or ``TOKENS`` (batch size times length).
        written: Modules in ``before_blocks`` with an output that the model changes in place.
        returns: For each block, the number of elements of the tuple that it returns (hidden states
            first), or None if it returns only hidden states.
        problem: Why a pipeline can't cut between the blocks; empty if it can.
    """

    before_blocks: tuple[str, ...] = ()
    after_blocks: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    returns: tuple[int | None, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Describes how a model is built, initialized, split and trained.

    Attributes:
        build: Maps the typed configuration to a module. It is called under ``torch.device("meta")``
            if ``initializers`` is set, otherwise on the CPU with the seed set.
        loss: Maps ``(outputs, targets)`` to the *sum* over counted targets, an fp32 scalar. Targets
            equal to ``IGNORE_INDEX`` don't count. Outputs are a tensor or ``ModelOutputs``.
        layers: Path of the ``nn.ModuleList`` of repeated blocks, which are the unit of sharding,
            recomputation and compilation; None if the module is one unit.
        inputs: Kind of input of the module.
        initializers: Maps a module to ``{parameter name: initializer}``; None if the module
            initializes itself. The module may be a pipeline stage without some of the parts.
        tensor_plan: Plan for tensor parallelism: patterns of module names to styles
            (see ``engines.tensor.parallelize``), or a function that returns them for a module or
            pipeline stage. None if the model can't be split.
        sequence_parallel: Whether the plan also says which modules see only a part of the sequence.
        unsplittable: Returns why tensor ranks can't each have a part of the hidden states along the
            sequence, although ``sequence_parallel`` is true; empty if they can.
        split_hidden_states: Lets a module with sharded layers take full rows of tokens while its
            blocks see parts of the sequence.
        ends: Attributes that only the first and only the last pipeline stage keeps. Other stages
            set them, and the blocks that they lack, to None. If ``ends`` is None, ``flow`` is used.
        flow: Returns the modules and tensors around the blocks. Each stage then runs the whole
            model's forward, with placeholders for the modules of other stages. If ``flow`` and
            ``ends`` are None, the model can't be cut.
        adapt: Maps this spec and a typed configuration to the spec for that configuration; None if
            the spec does not depend on the configuration.
        mixes_samples: Other samples that a sample's loss depends on, for a reason other than batch
            normalization: those of its micro-batch, or of the global batch through ``RouterLoss``.
        max_positions: Longest sequence; None uses the value in the configuration, if any.
        runs_without_values: Whether a forward that fails on tensors without values also fails on
            tensors with values, unless it needs a value. False for models of unknown origin.
        index_names: Attributes that hold the number of a block without effect on its computation.
        untraceable: Why the model can't be run on tensors without values; empty if it can.
        refused_axes: ``{axis: reason}`` for axes (tensor, pipeline or context) that can't split any
            such model.
        positions: Attributes that depend on positions, an ``nn.Embedding`` of positions or a
            ``RotaryTable``, in a model with causal ``Attention``. If None, ``shard_sequences`` is
            used.
        shard_sequences: Lets a module or stage compute on parts of sequences. If it and
            ``positions`` are None, sequences can't be split.
        head: Path of the module that maps hidden states to logits, position by position; None if
            unknown.
        unshardable: Returns why ``shard_sequences`` would change results; empty if it would not.
        unpackable: Returns why a row can't hold several documents. Empty if the forward takes
            ``positions`` of tokens within their documents and keeps documents from attending to
            each other.
        experts: Returns the full names of a model's modules of experts: modules with an attribute
            ``num_experts``, parameters [experts, ...], and a forward that maps hidden states
            [T, H], experts [T, K] and their weights [T, K] to [T, H].
        use_plain_experts: Makes a model compute its experts one after another, if it has a faster
            way. Results stay the same, except for rounding.
        shards_documents: Whether documents also stay separate in parts of a row, either through
            ``shard_sequences`` or through the model's attribute ``find_documents``, which engines
            replace.
        unquantized: Full names of modules that a quantized base leaves as they are, because their
            weights in the pretrained, quantized files are not quantized.
    """

    build: Callable[[Any], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    layers: str | None = None
    inputs: Inputs = "tokens"
    initializers: Callable[[nn.Module], Mapping[str, Initializer]] | None = None
    tensor_plan: TensorPlan | None = None
    sequence_parallel: bool = False
    unsplittable: Callable[[], str] = lambda: ""
    split_hidden_states: Callable[[nn.Module], None] = lambda _: None
    ends: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    flow: Callable[[], BlockFlow] | None = None
    positions: tuple[str, ...] | None = None
    shard_sequences: Callable[[nn.Module, SequenceParts], None] | None = None
    unshardable: Callable[[], str] = lambda: ""
    head: str | None = None
    unpackable: Callable[[], str] = lambda: "its forward takes no positions"
    experts: Callable[[nn.Module], tuple[str, ...]] = lambda _: ()
    use_plain_experts: Callable[[nn.Module], None] = lambda _: None
    shards_documents: bool = False
    unquantized: frozenset[str] = frozenset()
    adapt: Callable[[ModelSpec, Any], ModelSpec] | None = None
    mixes_samples: MixedSamples = "none"
    max_positions: int | None = None
    runs_without_values: bool = False
    index_names: tuple[str, ...] = ()
    untraceable: str = ""
    refused_axes: Mapping[str, str] = field(default_factory=dict)

    def plan(self, module: nn.Module) -> dict[str, str]:
        """Return the tensor plan for a module, or an empty dict."""
        plan = self.tensor_plan(module) if callable(self.tensor_plan) else self.tensor_plan
        return dict(plan or {})

    def blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return a module's repeated blocks by full name, in order.

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
        from axonlaunch.models.modules.placeholder import Placeholder

        return {
            f"{self.layers}.{name}": block
            for name, block in container.named_children()
            if not isinstance(block, Placeholder)
        }

    def most_experts(self, module: nn.Module) -> int:
        """Return the largest ``num_experts`` of a module's experts; 0 without experts."""
        experts: list[Any] = [module.get_submodule(name) for name in self.experts(module)]
        return max((part.num_experts for part in experts), default=0)

    def unshardable_sequences(self) -> str:
        """Return why ranks can't each compute a part of a sequence; empty if they can."""
        if reason := self.refused_axes.get("context"):
            return reason
        if self.shard_sequences is not None:
            reason = self.unshardable()
            return reason and f"its sequences can't be split: {reason}"
        if self.positions is None:
            return "the model can't compute on a part of a sequence; use 1"
        return ""

    def no_sequence_parallelism(self) -> str:
        """Return why norms can't compute on a part of the sequence; empty if they can."""
        return self.unsplittable() if self.sequence_parallel else "it has no sequence-parallel form"

    def head_of(self, module: nn.Module) -> nn.Module | None:
        """Return the head of a module or stage, or None if it has no head."""
        from axonlaunch.models.modules.placeholder import Placeholder

        try:
            head = module.get_submodule(self.head or "")
        except AttributeError:  # the attribute is None
            return None
        if self.head is None or isinstance(head, Placeholder):
            return None
        return head

    def repeats(self, module: nn.Module) -> bool:
        """Return whether all blocks are equal, as far as can be determined without running them.

        The blocks must be in an ``nn.ModuleList``, so that some of them can be removed.
        """
        return self.leading_blocks(module) == 0

    def leading_blocks(self, module: nn.Module) -> int | None:
        """Return the number of blocks before equal ones; None if the last two blocks differ."""
        if not self.blocks(module):
            return None
        from axonlaunch.models.modules.repeated_blocks import num_leading

        return num_leading(module, self.layers or "", index_names=self.index_names)

    def representative(self, module: nn.Module) -> nn.Module:
        """Return a copy with few blocks if all blocks are equal, otherwise the module itself."""
        if not self.blocks(module):
            return module
        from axonlaunch.models.modules.repeated_blocks import representative

        return representative(module, self.layers or "", index_names=self.index_names)


def model_of(config: Any) -> Any:
    """Return the model's configuration, from a run's configuration or unchanged."""
    return config.model if isinstance(config, RunConfig) else config


def takes_positions() -> str:
    """Return an empty text: the ``ModelSpec.unpackable`` of models that support packed rows."""
    return ""


def not_a_tensor(outputs: object) -> ConfigIssue:
    """Return the message for a forward that does not return a tensor."""
    kind = type(outputs).__name__
    part = ".logits" if hasattr(outputs, "logits") else "[0]" if isinstance(outputs, tuple) else ""
    example = f", as in return outputs{part}" if part else ""
    message = f"its forward returns {kind}, not a tensor; return only the logits{example}"
    return ConfigIssue("model", message)
