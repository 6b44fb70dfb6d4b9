"""What a model makes of one micro-batch, found on fake tensors, before there is a rank.

It is for models of others: what ours return follows from their configuration. What can't be run so
is not judged; an estimate or the rank itself reports it, with its place in the code.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from axonlaunch.config import ConfigIssue
from axonlaunch.data.dataset import Dataset, sample_inputs
from axonlaunch.engines.tensor.after_head import LogitsUsedError
from axonlaunch.engines.tensor.chunked_loss import ChunkedLoss
from axonlaunch.models.fake_tensor_cache import fake_tensor_mode, silence_fake_tensors
from axonlaunch.models.initialization import materialize
from axonlaunch.models.loss import cross_entropy_sum
from axonlaunch.models.spec import ModelOutputs, ModelSpec, not_a_tensor
from axonlaunch.models.torch_internals import UNTRACEABLE

_SAMPLES = 2
"""Of the micro-batch: batch normalisation refuses one."""


@dataclass(frozen=True)
class _Forward:
    """What one forward did.

    Attributes:
        returned: What the model returned; a tensor, if it is one, has no values.
        embeddings: ``{name: rows}`` of the embeddings that looked the inputs themselves up.
    """

    returned: Any
    embeddings: dict[str, int]


def output_problems(model: nn.Module, spec: ModelSpec, dataset: Dataset) -> Iterator[ConfigIssue]:
    """Yield why a model can't be trained on a dataset: what it returns, or knows too little of.

    Args:
        model: On the meta device; it is not changed.
        spec: Its loss decides what the outputs have to be.
        dataset: Its samples' shape and the number of its classes are used, no sample.
    """
    if spec.untraceable:
        return
    forward = _forward(spec.representative(model), sample_inputs(dataset))
    if isinstance(forward, Exception):
        if spec.runs_without_values and not isinstance(forward, UNTRACEABLE):
            reason = " ".join(str(forward).split())[:400]
            message = f"its forward fails with {type(forward).__name__}: {reason}"
            yield ConfigIssue("model", message)
        return
    returned = forward.returned
    outputs = returned.logits if isinstance(returned, ModelOutputs) else returned
    if not isinstance(outputs, Tensor):
        yield not_a_tensor(outputs)
        return
    sizes = {f"its embedding {name} has": rows for name, rows in forward.embeddings.items()}
    if spec.loss is cross_entropy_sum and outputs.dim():
        sizes["its outputs have"] = outputs.shape[-1]
    needed, what = dataset.num_classes, "tokens" if dataset.kind == "tokens" else "classes"
    if small := [f"{has} {size}" for has, size in sizes.items() if size < needed]:
        message = f"{', '.join(small)}, and the data {needed} {what}; make it {needed} or more"
        yield ConfigIssue("model", message)


def head_problems(
    model: nn.Module, spec: ModelSpec, dataset: Dataset, *, chunk: int
) -> Iterator[ConfigIssue]:
    """Yield why a model's loss can't be computed in chunks of so many tokens.

    Args:
        model: As ``output_problems`` takes it.
        spec: Says which module the head is.
        dataset: Its samples' shape is used.
        chunk: ``train.loss_chunk``.
    """
    why = ""
    if spec.loss is not cross_entropy_sum:
        why = "the model has a loss of its own"
    elif spec.head is None or spec.head_of(model) is None:
        why = "which module makes the model's logits is not known"
    elif spec.untraceable:
        why = spec.untraceable
    else:
        forward = _forward(spec.representative(model), sample_inputs(dataset), head=spec.head)
        if isinstance(forward, LogitsUsedError):
            why = f"{forward} after {spec.head}, which takes them whole"
        elif isinstance(forward, Exception):
            why = f"the model can't be run without values: {' '.join(str(forward).split())[:200]}"
    if why:
        yield ConfigIssue("train.loss_chunk", f"{why}; use null", chunk)


def _forward(model: nn.Module, sample: Tensor, *, head: str | None = None) -> _Forward | Exception:
    """Run a copy of the model on as good as nothing; return what it fails with if it does."""
    silence_fake_tensors()
    try:
        model = copy.deepcopy(model)
        with _silence(), torch.no_grad(), fake_tensor_mode():
            materialize(model, device="cpu")
            inputs = torch.empty((_SAMPLES, *sample.shape), dtype=sample.dtype)
            if head is not None:
                ChunkedLoss(cross_entropy_sum, chunk=1).defer(model.get_submodule(head), model)
            with _Lookups(model, inputs.untyped_storage()) as lookups:
                returned = model(inputs)
            return _Forward(returned, lookups.rows)
    except Exception as error:  # a model of others may fail in any way without values
        return error


class _Lookups(TorchFunctionMode):
    """Notes the embeddings in which the inputs, or a view of them, are looked up.

    What is looked up in one of positions is something else, and it may be of any size.

    Attributes:
        rows: Of each embedding, by its name.
    """

    def __init__(self, model: nn.Module, inputs: torch.UntypedStorage) -> None:
        super().__init__()
        self.rows: dict[str, int] = {}
        self._inputs = inputs
        self._names = {
            id(module.weight): name
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and isinstance(args[0], Tensor):
            name = self._names.get(id(args[1]))
            if name is not None and args[0].untyped_storage() is self._inputs:
                self.rows[name] = len(args[1])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what the model prints and warns of for its ranks, which do so again."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
