"""The files of a module trace: one a step, of whole tensors, so that every layout writes the same.

It reads and writes; it computes no statistic and compares nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from axonlaunch.config.precision import PrecisionName
from axonlaunch.system.files import open_regular, replace, replace_text

if TYPE_CHECKING:
    from torch import Tensor

TRACE_FOLDER = "module_trace"
"""In a run's folder."""
TracedKind = Literal["batch", "parameter", "output", "loss", "output gradient", "gradient"]
_FORMAT = 1
_FILE = re.compile(r"step_(\d{1,9})\.json")
_LARGEST = 1 << 28
"""Bytes of a file that is read: a million rows are 100 MB."""


class UnreadableModuleTraceError(Exception):
    """A file is corrupt, or not a module trace; the text says which and why."""


@dataclass(frozen=True)
class TracedTensor:
    """What a tensor of a step was, over all its elements.

    Attributes:
        kind: What of the module it is.
        name: The module's or the parameter's in the whole model.
        rms: Root mean square of the elements; None where one is not finite. The norm is this times
            the root of the number of elements.
        mean: Of the elements.
        absmax: The largest absolute value.
        size: Number of elements, of parameters and their gradients.
    """

    kind: TracedKind
    name: str
    rms: float | None
    mean: float | None
    absmax: float | None
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """A step.

    Attributes:
        step: Updates that were done before it.
        arithmetic: The lowest precision in use.
        layout: In words.
        axes: Sizes of the mesh axes.
        tensors: In order of computation: batch, parameters, forward, backward.
    """

    step: int
    arithmetic: PrecisionName
    layout: str
    axes: Mapping[str, int] = field(default_factory=dict)
    tensors: Sequence[TracedTensor] = ()


def traced_steps(folder: Path) -> dict[int, Path]:
    """Return the files of a run's folder by step."""
    paths = (
        (_FILE.fullmatch(path.name), path) for path in (folder / TRACE_FOLDER).glob("step_*.json")
    )
    return dict(sorted((int(match[1]), path) for match, path in paths if match))


def write_step(
    folder: Path,
    trace: StepTrace,
    elements: Mapping[tuple[TracedKind, str], Tensor] | None = None,
) -> None:
    """Write a step's files in a run's folder, in place of earlier ones.

    Args:
        folder: The run's.
        trace: The step's statistics.
        elements: All elements of its tensors, written as safetensors under ``element_name``; None:
            they are not, and those of an earlier run are removed.

    Raises:
        OSError: They can't be written.
    """
    target = folder / TRACE_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"step_{trace.step}.json"
    if elements is None:
        elements_path(path).unlink(missing_ok=True)
    else:
        from safetensors.torch import save

        named = {element_name(*key): tensor.contiguous() for key, tensor in elements.items()}
        replace(elements_path(path), save(named, metadata={"format": "pt"}))
    content = {**vars(trace), "tensors": [_row(tensor) for tensor in trace.tensors]}
    text = json.dumps({"format": _FORMAT, **content}, allow_nan=False)
    replace_text(path, text + "\n")


def elements_path(path: Path) -> Path:
    """Return where the elements of a step are, if they were written, from its file."""
    return path.with_suffix(".safetensors")


def element_name(kind: TracedKind, name: str) -> str:
    """Return a tensor's name in a file of elements."""
    return f"{kind.replace(' ', '_')}/{name}"


def read_step(path: Path) -> StepTrace:
    """Read a step's file.

    Raises:
        UnreadableModuleTraceError: It is corrupt, or of another kind.
    """
    try:
        with open_regular(path) as stream:
            content = stream.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UnreadableModuleTraceError(f"{path}: is larger than {_LARGEST} bytes")
        return _check_content(json.loads(content))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnreadableModuleTraceError(f"{path}: is not a module trace ({reason})") from None


def _row(tensor: TracedTensor) -> list[Any]:
    values = (tensor.rms, tensor.mean, tensor.absmax)
    finite = [None if value is None or not math.isfinite(value) else value for value in values]
    return [tensor.kind, tensor.name, *finite, tensor.size]


def _check_content(content: Any) -> StepTrace:
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']!r}; this version reads {_FORMAT}")
    tensors = tuple(_tensor(*row) for row in content["tensors"])
    axes = {ascii(axis)[1:-1]: int(size) for axis, size in content["axes"].items()}
    if content["arithmetic"] not in get_args(PrecisionName):
        raise ValueError(f"arithmetic {content['arithmetic']!r}")
    return StepTrace(
        step=int(content["step"]),
        arithmetic=content["arithmetic"],
        layout=ascii(content["layout"])[1:-1],
        axes=axes,
        tensors=tensors,
    )


def _tensor(kind: Any, name: Any, *values: Any) -> TracedTensor:
    is_name = isinstance(name, str) and name.isprintable()
    if kind not in get_args(TracedKind) or not is_name or len(values) != 4:
        raise ValueError(f"a row of {kind!r}, {name!r}")
    rms, mean, absmax, size = (None if value is None else float(value) for value in values)
    return TracedTensor(kind, name, rms, mean, absmax, None if size is None else int(size))
