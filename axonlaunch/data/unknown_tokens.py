"""A token or class that the model does not know, named with its sample and the model's size.

Where the sizes can be known before there is a rank they are compared there; this is for the rest,
and on a CPU alone: on a GPU an index out of range ends the device's work without saying which.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.data.dataset import IGNORE_INDEX, AnyBatch, Batch
from axonlaunch.data.loader import Loader

UNKNOWN_TOKEN = "a token is not in the vocabulary"
"""What an embedding says that ranks divide, each of which looks up its own rows alone."""
UNKNOWN_TARGET = "a target is not in the vocabulary"
"""The same of a loss."""
_TARGET = re.compile(rf"Target -?\d+ is out of bounds|{UNKNOWN_TARGET}")


@contextmanager
def naming_unknown_tokens(batch: AnyBatch, data: Loader, *, step: int) -> Iterator[None]:
    """Say of an index out of range which token of which sample it is, if it is one.

    Args:
        batch: This rank's, of the step that is run inside.
        data: It knows which of the dataset's samples the batch's rows are.
        step: Steps done before this one.

    Raises:
        ConfigError: In place of torch's ``IndexError``, or what an embedding or a loss raises that
            ranks divide, where the batch holds the token.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        is_divided = str(error).startswith((UNKNOWN_TOKEN, UNKNOWN_TARGET))
        if not isinstance(batch, Batch) or not (is_divided or isinstance(error, IndexError)):
            raise
        is_target = bool(_TARGET.match(str(error)))
        tokens = batch.targets if is_target else batch.inputs
        size = _classes(error) if is_target else _embedding_rows(error, batch)
        if size is None or (unknown := _first_unknown(tokens, size)) is None:
            raise  # another index of the model's own
        row, token = unknown
        what = "target" if is_target else "token"
        knows = "outputs have" if is_target else "embedding has"
        message = (
            f"{what} {token} of sample {data.indices(step)[row]} is out of range: the model's "
            f"{knows} {size}; the data has {data.dataset.num_classes}, make it as many"
        )
        raise ConfigError([ConfigIssue("model", message)]) from error


def _classes(error: Exception) -> int | None:
    """Return C of the logits [N, C, ...] or [C] whose cross entropy failed; None: not seen."""
    divided = [arguments["classes"] for _, arguments in _calls(error) if "classes" in arguments]
    if divided and str(error).startswith(UNKNOWN_TARGET):
        return int(divided[-1])
    logits = [
        arguments["input"] for code, arguments in _calls(error) if code is F.cross_entropy.__code__
    ]
    return logits[-1].shape[1 if logits[-1].dim() > 1 else 0] if logits else None


def _embedding_rows(error: Exception, batch: Batch) -> int | None:
    """Return the rows of the embedding that failed on the batch's own tokens; None: not seen.

    One of positions that is too short fails on what the model made, and is no matter of tokens.
    """
    calls = [
        arguments
        for code, arguments in _calls(error)
        if code.co_name == "forward" and isinstance(arguments.get("self"), nn.Embedding)
    ]
    if not calls:
        return None
    looked_up = next(value for name, value in calls[-1].items() if name in ("input", "tokens"))
    storage = batch.inputs.untyped_storage()
    is_of_batch = looked_up.untyped_storage().data_ptr() == storage.data_ptr()
    return int(calls[-1]["self"].num_embeddings) if is_of_batch else None


def _calls(error: Exception) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the code and the local variables of each call that an error passed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame.f_code, frame.f_locals


def _first_unknown(tokens: Tensor, size: int) -> tuple[int, int] | None:
    """Return the row and the value of the first token that is out of range; None: none is."""
    unknown = ((tokens < 0) | (tokens >= size)) & (tokens != IGNORE_INDEX)
    if not bool(unknown.any()):
        return None
    row, *rest = unknown.nonzero()[0].tolist()
    return row, int(tokens[(row, *rest)])
