"""Checks whether a transformers model can run on a part of every sequence, by running it so.

Splitting a sequence is correct only if tokens affect each other through nothing but transformers'
attention functions, and if the model uses the positions that are passed to it. The model is run on
fake tensors for a part of a sequence, and each operation on hidden states is checked. Operations
that mix tokens or count positions are reported by name. Effects that depend on values are not
detected; ``axonlaunch verify`` compares values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axonlaunch.models.fake.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.hf.analysis.context_attention import shard_attention
from axonlaunch.models.hf.reading import library
from axonlaunch.models.modules.attention import SequenceParts
from axonlaunch.models.specs.model_spec import ModelOutputs
from axonlaunch.models.specs.router_loss import RouterLossModel
from axonlaunch.models.tensors.initialization import materialize
from axonlaunch.models.torch_internals import storage_key

_RANKS = 2
_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
"""Possible lengths of the part: one that no other dimension has identifies token dimensions."""
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
"""Operations, with the index of the argument that is summed over its last dimension."""
_ALONG_A_DIM = {
    *("_softmax", "_log_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    *("sort", "topk", "select", "unbind", "unfold"),
}
_REDUCING = {
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "var", "var_mean", "std", "logsumexp"),
    *("norm", "linalg_vector_norm", "argmax", "argmin"),
}
_CUTTING = {"slice", "narrow", "split", "split_with_sizes"}
_MIXING = ("convolution", "_fft", "lstm", "gru", "rnn", "scaled_dot_product", "roll", "flip")
"""Parts of names of operations that mix all of their dimensions."""
_BY_INDEX = ("index", "gather", "scatter", "grouped_mm")
"""Indexing operations, allowed because routers use counts of tokens to sort them by expert."""
_ATTENDS_BY_ITSELF = "it does not call transformers' attention functions"


class MixingError(Exception):
    """A model can't run on a part of a sequence; the message says why."""


def why_unshardable(model: nn.Module, *, layers: str) -> str:
    """Return why a model's sequences can't be split over ranks; empty if they can.

    Args:
        model: Model without storage; it is not changed.
        layers: Path of the list of blocks.
    """
    kernel = library.attention_kernel(getattr(model, "config", None))
    if kernel not in ("sdpa", "eager"):
        return f"its attention is {kernel}, which can't be split; use model.attention=sdpa or eager"
    model = copy.deepcopy(model)
    outputs = _run_on_a_part(model, layers=layers)
    shares_loss = isinstance(model, RouterLossModel) and model.shares_router_loss
    if isinstance(outputs, ModelOutputs) and not shares_loss:
        return "its auxiliary loss needs all tokens; use model.router_aux_loss=false"
    if isinstance(outputs, str):
        return outputs
    if finds_positions_in_tokens(model, part_length(model)):
        return "it computes positions from the tokens, counting those that are not padding"
    return ""


def why_unpackable(model: nn.Module, *, layers: str) -> str:
    """Return why a row can't hold several documents; empty if it can.

    Masks can separate documents only if tokens affect each other through nothing but transformers'
    attention functions, and positions can restart only if the model uses those that are passed to
    it. Splitting a sequence has the same requirements.

    Args:
        model: Model without storage; it is not changed.
        layers: Path of the list of blocks.
    """
    eager_model: Any = copy.deepcopy(model)
    library.replace_attention_kernel(
        eager_model.config, "eager"
    )  # eager attention always gets a mask
    outputs = _run_on_a_part(eager_model, layers=layers, needs_mask=True)
    return outputs if isinstance(outputs, str) else ""


def _run_on_a_part(model: nn.Module, *, layers: str, needs_mask: bool = False) -> object:
    """Return a model's output for a part of a sequence, or the reason (a string) for a failure.

    Args:
        model: Model that may be changed.
        layers: Path of the list of blocks.
        needs_mask: Whether attention without a mask from transformers is an error.
    """
    silence_fake_tensors()
    watch = MixingWatch(part_length(model), instead_of="transformers' attention functions")
    shard_attention(
        model,
        SequenceParts(
            positions=watch.positions,
            gather=lambda part: torch.cat([part] * _RANKS, dim=2),
            attend=lambda query, key, value: query * value.mean() * key.mean(),
            ranks=_RANKS,
            around=watch.attending,
        ),
        needs_mask=needs_mask,
    )
    watch.follow_blocks(model, layers)
    try:
        with fake_tensor_mode():
            materialize(model, device="cpu")
            tokens = torch.zeros((1, watch.length), dtype=torch.int64)
            with watch:
                outputs = model(tokens)
    except MixingError as reason:
        return str(reason)
    except Exception as error:  # third-party code may need values, or fail in any way
        details = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        location = "" if watch.attended else ", before it calls transformers' attention functions"
        return f"running it on a part of a sequence fails{location} ({details})"
    return outputs if watch.attended else _ATTENDS_BY_ITSELF


def finds_positions_in_tokens(model: Any, length: int) -> bool:
    """Return whether a model without given positions counts the tokens that are not padding."""
    model._part_positions = None
    watch = _CountsTokens()  # type: ignore[no-untyped-call]
    with fake_tensor_mode(), watch, suppress(Exception):  # the run with positions succeeded
        model(torch.zeros((1, length), dtype=torch.int64))
    return watch.has_cumsum


class _CountsTokens(TorchDispatchMode):
    """Detects a cumulative sum of integers."""

    has_cumsum = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.has_cumsum |= name == "cumsum" and not args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


class MixingWatch(TorchDispatchMode):
    """Raises an error for operations that mix tokens or count positions.

    Attributes:
        length: Tokens of the part.
        attended: Number of calls of split attention.
    """

    def __init__(self, length: int, *, instead_of: str, everywhere: bool = False) -> None:
        """Create the watch.

        Args:
            length: Tokens of the part.
            instead_of: Name of the functions or layers that may mix tokens, for messages.
            everywhere: Whether tokens must not be mixed outside of blocks either.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self._instead_of = instead_of
        self._everywhere = everywhere
        self.attended = 0
        self._block = ""
        self._is_paused = False
        self._counted: dict[int, Any] = {}

    def follow_blocks(self, model: nn.Module, layers: str) -> None:
        """Let hooks tell which block is running."""
        blocks: Any = model.get_submodule(layers)
        for number, block in enumerate(blocks):
            name = f"{layers}.{number}"
            block.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self.enter(name, (args, kwargs)),
                with_kwargs=True,
            )
            block.register_forward_hook(lambda *_: self.leave())

    def positions(self, length: int) -> Tensor:
        """Return the positions of a part, which the model must use."""
        with self.pause():
            return torch.arange(length) * 1

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Context around split attention and its masks, in which operations are not checked."""
        self.attended += bool(self._block)
        with self.pause():
            yield

    def enter(self, block: str, arguments: Any) -> None:
        """Begin a block.

        Raises:
            MixingError: An argument of the block depends on positions that the model counted
                itself.
        """
        for tensor in tree_leaves(arguments):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._refuse_counted([tensor])
        self._block = block

    def leave(self) -> None:
        """End a block."""
        self._block = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = func.overloadpacket.__name__
        if name == "index" and not self._block:
            self._refuse_absent(*args)
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        outputs = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        is_hidden = any(tensor.requires_grad for tensor in inputs)
        is_watched = is_hidden and (self._everywhere or bool(self._block))
        if is_watched and self._mixes(name, args, outputs):
            subject = self._block or "it"
            raise MixingError(f"{subject} mixes tokens by {name} instead of {self._instead_of}")
        if is_hidden and not (self._block and any(part in name for part in _BY_INDEX)):
            self._refuse_counted(inputs)
        if self._counts(name, inputs, outputs) or (
            any(storage_key(tensor) in self._counted for tensor in inputs)
            and not name.startswith("new_")
            and not name.endswith("_like")
        ):
            for tensor in outputs:
                self._counted[storage_key(tensor)] = tensor.untyped_storage()
        return result

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which operations are not checked."""
        previous, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = previous

    def _refuse_counted(self, tensors: list[Tensor]) -> None:
        if any(storage_key(tensor) in self._counted for tensor in tensors):
            subject = f"{self._block} counts" if self._block else "it counts"
            raise MixingError(
                f"{subject} positions from 0 instead of using the positions it is given"
            )

    def _refuse_absent(self, table: Tensor, indices: Any) -> None:
        """Refuse to look up all positions of a sequence in values of a part, as masks may do.

        Rows of tokens that routers sort are looked up too, but inside of blocks.
        """
        sizes = {size for index in indices if index is not None for size in index.shape}
        if self.length in table.shape and self.length * _RANKS in sizes:
            raise MixingError("its mask looks up values of tokens that are on other ranks")

    def _counts(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        """Return whether an operation creates positions: ``arange``, or a table's first rows."""
        if name == "arange":
            return any(tensor.numel() == self.length for tensor in outputs)
        if not inputs or not outputs or self.length not in outputs[0].shape:
            return False
        if name == "cumsum":
            return not inputs[0].is_floating_point()
        return (
            name in ("slice", "narrow") and not self._block and self.length not in inputs[0].shape
        )

    def _mixes(self, name: str, args: Any, outputs: list[Tensor]) -> bool:
        """Return whether an operation on hidden states mixes tokens."""
        tensors = [value for value in args if isinstance(value, Tensor)]
        if (summed := _PRODUCTS.get(name)) is not None:
            return tensors[summed].shape[-1] == self.length
        first = next(iter(tensors), None)
        if first is None or self.length not in first.shape or not first.is_floating_point():
            return False
        if any(part in name for part in _MIXING):
            return True
        if name in _ALONG_A_DIM:
            dim = next(
                (value for value in args[1:] if type(value) is int and value < first.ndim), -1
            )
            dim = args[2] if name == "topk" and len(args) > 2 else -1 if name == "topk" else dim
            return first.shape[dim] == self.length
        if name in _REDUCING:
            return any(
                _count(value, self.length) < _count(first, self.length) for value in outputs[:1]
            )
        if name == "constant_pad_nd":  # pads are two numbers for each dim, from the last dim
            dims = range(-1, -1 - len(args[1]) // 2, -1)
            pads = zip(args[1][::2], args[1][1::2], strict=True)
            return any(
                first.shape[dim] == self.length and any(pad)
                for dim, pad in zip(dims, pads, strict=True)
            )
        if name in _CUTTING:
            return any(self.length not in value.shape for value in outputs)
        return False


def _count(tensor: Tensor, size: int) -> int:
    return sum(dim == size for dim in tensor.shape)


def part_length(model: Any, *, parts: int = 1) -> int:
    """Return a length that no dimension has, and no dimension has ``parts`` times this length."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {value for value in model.config.to_dict().values() if type(value) is int}
    return next((n for n in _PRIMES if sizes.isdisjoint((n, n * parts))), 101)
