"""Whether a model of transformers may see a part of every sequence, found by running it so.

Divided attention alone may let one token see another, and positions have to be those that the model
is given. The model is run without values on a part of a sequence, and each operation on hidden
states is looked at: what mixes tokens, or counts positions by itself, is reported by name. What
values alone would show is not seen here; ``axonlaunch verify`` compares those.
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

from axonlaunch.models.attention import SequenceParts
from axonlaunch.models.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.hf import library
from axonlaunch.models.hf.divided_attention import divide_attention
from axonlaunch.models.initialization import materialize
from axonlaunch.models.spec import ModelOutputs
from axonlaunch.models.torch_internals import storage_key

_RANKS = 2
_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
"""Lengths of the part that is run: one that no other dim has shows which dim is that of tokens."""
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
"""Operations and which of their arguments' last dims is summed over."""
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
"""Parts of names of operations that mix whatever dims they are given."""
_BY_INDEX = ("index", "gather", "scatter", "grouped_mm")
"""Routers count tokens to bring each to its experts and back: no position comes of it."""


_ATTENDS_BY_ITSELF = "it does not call transformers' attention functions, which are divided"


class _MixingError(Exception):
    """A model can't see a part of a sequence; the text says why."""


def why_undivided(model: nn.Module, *, layers: str) -> str:
    """Return why a model's sequences can't be divided over ranks; empty if they can.

    Args:
        model: Without storage; it is not changed.
        layers: Path of the list of its blocks.
    """
    chosen = library.attention_kernel(getattr(model, "config", None))
    if chosen not in ("sdpa", "eager"):
        return f"its attention is {chosen}, which is not divided; use model.attention=sdpa or eager"
    model = copy.deepcopy(model)
    outputs = _run_on_a_part(model, layers=layers)
    if isinstance(outputs, ModelOutputs):
        return (
            "its auxiliary loss is of all tokens together; use "
            "model.config.output_router_logits=false"
        )
    if isinstance(outputs, str):
        return outputs
    if _finds_positions_in_tokens(model, _length(model)):
        return "it finds positions in the tokens themselves, from the first that is no padding"
    return ""


def why_unpackable(model: nn.Module, *, layers: str) -> str:
    """Return why a row can't hold several documents; empty if it can.

    Masks keep documents apart where transformers' attention functions alone let tokens see others,
    and positions can start again where they are those that the model is given: that is what a
    divided sequence asks for too.

    Args:
        model: Without storage; it is not changed.
        layers: Path of the list of its blocks.
    """
    whole: Any = copy.deepcopy(model)
    library.replace_attention_kernel(whole.config, "eager")  # all that is masked is shown its mask
    outputs = _run_on_a_part(whole, layers=layers, needs_mask=True)
    return outputs if isinstance(outputs, str) else ""


def _run_on_a_part(model: nn.Module, *, layers: str, needs_mask: bool = False) -> object:
    """Return what a model returns for a part of a sequence, or as text why there is nothing.

    Args:
        model: One's own, which is changed.
        layers: Path of the list of its blocks.
        needs_mask: Whether attention without a mask that transformers built is refused.
    """
    silence_fake_tensors()
    watch = _Watch(_length(model))
    divide_attention(
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
    blocks: Any = model.get_submodule(layers)
    for number, block in enumerate(blocks):
        name = f"{layers}.{number}"
        block.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: watch.enter(name, (args, kwargs)), with_kwargs=True
        )
        block.register_forward_hook(lambda *_: watch.leave())
    try:
        with fake_tensor_mode():
            materialize(model, device="cpu")
            tokens = torch.zeros((1, watch.length), dtype=torch.int64)
            with watch:
                outputs = model(tokens)
    except _MixingError as reason:
        return str(reason)
    except Exception as error:  # code of others may need values, or fail in any way
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        before = "" if watch.attended else ", before it calls transformers' attention functions"
        return f"running it on a part of one fails{before} ({said})"
    return outputs if watch.attended else _ATTENDS_BY_ITSELF


def _finds_positions_in_tokens(model: Any, length: int) -> bool:
    """Say whether a model that is given no positions counts those tokens that are no padding."""
    model._part_positions = None
    watch = _CountsTokens()  # type: ignore[no-untyped-call]
    with fake_tensor_mode(), watch, suppress(Exception):  # it ran before with positions
        model(torch.zeros((1, length), dtype=torch.int64))
    return watch.seen


class _CountsTokens(TorchDispatchMode):
    """Sees whether whole numbers are counted."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen |= name == "cumsum" and not args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Refuses operations that let a token see others, or that count positions.

    Attributes:
        length: Tokens of the part.
        attended: How often divided attention was called.
    """

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.attended = 0
        self._block = ""
        self._aside = False
        self._counted: dict[int, Any] = {}

    def positions(self, length: int) -> Tensor:
        """Return a part's positions, which the model is to use."""
        with self._set_aside():
            return torch.arange(length) * 1

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Surround divided attention and its masks."""
        self.attended += bool(self._block)
        with self._set_aside():
            yield

    def enter(self, block: str, arguments: Any) -> None:
        """Begin a block.

        Raises:
            _MixingError: It is given positions that are not the model's argument.
        """
        for tensor in tree_leaves(arguments):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._refuse_counted([tensor])
        self._block = block

    def leave(self) -> None:
        """End a block."""
        self._block = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._aside:
            return result
        name: str = func.overloadpacket.__name__
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        is_hidden = any(tensor.requires_grad for tensor in inputs)
        if self._block and is_hidden and self._mixes(name, args, made):
            raise _MixingError(
                f"{self._block} lets tokens see others by {name}, not by transformers' attention "
                "functions"
            )
        if is_hidden and not (self._block and any(part in name for part in _BY_INDEX)):
            self._refuse_counted(inputs)
        if self._counts(name, inputs, made) or (
            any(storage_key(tensor) in self._counted for tensor in inputs)
            and not name.startswith("new_")
            and not name.endswith("_like")
        ):
            for tensor in made:
                self._counted[storage_key(tensor)] = tensor.untyped_storage()
        return result

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def _refuse_counted(self, tensors: list[Tensor]) -> None:
        if any(storage_key(tensor) in self._counted for tensor in tensors):
            where = f"{self._block} counts" if self._block else "it counts"
            raise _MixingError(f"{where} positions by itself, from 0, whatever it is given")

    def _counts(self, name: str, inputs: list[Tensor], made: list[Tensor]) -> bool:
        """Say whether an operation makes positions: a count up, or the first rows of a table."""
        if name == "arange":
            return any(tensor.numel() == self.length for tensor in made)
        if not inputs or not made or self.length not in made[0].shape:
            return False
        if name == "cumsum":
            return not inputs[0].is_floating_point()
        return (
            name in ("slice", "narrow") and not self._block and self.length not in inputs[0].shape
        )

    def _mixes(self, name: str, args: Any, made: list[Tensor]) -> bool:
        """Say whether an operation on hidden states lets one token see another."""
        tensors = [value for value in args if isinstance(value, Tensor)]
        if (place := _PRODUCTS.get(name)) is not None:
            return tensors[place].shape[-1] == self.length
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
                _count(value, self.length) < _count(first, self.length) for value in made[:1]
            )
        if name == "constant_pad_nd":  # it is given two numbers a dim, the last dim's first
            dims = range(-1, -1 - len(args[1]) // 2, -1)
            pads = zip(args[1][::2], args[1][1::2], strict=True)
            return any(
                first.shape[dim] == self.length and any(pad)
                for dim, pad in zip(dims, pads, strict=True)
            )
        if name in _CUTTING:
            return any(self.length not in value.shape for value in made)
        return False


def _count(tensor: Tensor, size: int) -> int:
    return sum(dim == size for dim in tensor.shape)


def _length(model: Any) -> int:
    """Return a length that no other dim has."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {value for value in model.config.to_dict().values() if type(value) is int}
    return next((prime for prime in _PRIMES if prime not in sizes), 101)
