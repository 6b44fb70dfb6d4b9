"""Reads and writes the files of a module trace.

Each traced step has a file with statistics of full tensors, which do not depend on the layout.
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
from axonlaunch.system.storage.files import open_regular, replace, replace_text

if TYPE_CHECKING:
    from torch import Tensor

TRACE_FOLDER = "module_trace"
"""Name of the folder in a run's folder."""
TracedKind = Literal["batch", "parameter", "output", "loss", "output gradient", "gradient"]
_FORMAT = 1
_FILE = re.compile(r"step_(\d{1,9})\.json")
_MAX_BYTES = 1 << 28
"""Maximum size of a file that is read; a million rows take 100 MB."""


class UnreadableModuleTraceError(Exception):
    """A file is corrupt or not a module trace; the message contains the file and the reason."""


@dataclass(frozen=True)
class TracedTensor:
    """Statistics of one tensor of a step, over all its elements.

    Attributes:
        kind: Role of the tensor in its module.
        name: Name of the module or parameter in the full model.
        rms: Root mean square of the elements; None if an element is not finite. The norm is this
            value times the square root of the number of elements.
        mean: Mean of the elements; None as for ``rms``.
        absmax: Largest absolute value; None as for ``rms``.
        size: Number of elements; only for parameters and their gradients.
    """

    kind: TracedKind
    name: str
    rms: float | None
    mean: float | None
    absmax: float | None
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The trace of one step.

    Attributes:
        step: Number of updates before the step.
        arithmetic: Lowest precision in use.
        layout: Description of the layout.
        axes: Sizes of the mesh axes.
        tensors: Tensors in order of computation: batch, parameters, forward, backward.
    """

    step: int
    arithmetic: PrecisionName
    layout: str
    axes: Mapping[str, int] = field(default_factory=dict)
    tensors: Sequence[TracedTensor] = ()


def traced_steps(folder: Path) -> dict[int, Path]:
    """Return the trace files in a run's folder, by step."""
    paths = (
        (_FILE.fullmatch(path.name), path) for path in (folder / TRACE_FOLDER).glob("step_*.json")
    )
    return dict(sorted((int(match[1]), path) for match, path in paths if match))


def write_step(
    folder: Path,
    trace: StepTrace,
    elements: Mapping[tuple[TracedKind, str], Tensor] | None = None,
) -> None:
    """Write the files of a step to a run's folder, replacing earlier ones.

    Args:
        folder: Folder of the run.
        trace: Statistics of the step.
        elements: Full tensors of the step, written as safetensors with names of ``element_name``;
            None removes the file of an earlier run.

    Raises:
        OSError: A file can't be written.
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
    """Return the path of a step's elements from the path of its trace; it may not exist."""
    return path.with_suffix(".safetensors")


def element_name(kind: TracedKind, name: str) -> str:
    """Return a tensor's name in a file of elements."""
    return f"{kind.replace(' ', '_')}/{name}"


def read_step(path: Path) -> StepTrace:
    """Read the file of a step.

    Raises:
        UnreadableModuleTraceError: The file is corrupt or not a module trace.
    """
    try:
        with open_regular(path) as stream:
            content = stream.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise UnreadableModuleTraceError(f"{path}: is larger than {_MAX_BYTES} bytes")
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
        raise ValueError(f"invalid row {kind!r}, {name!r}")
    rms, mean, absmax, size = (None if value is None else float(value) for value in values)
    return TracedTensor(kind, name, rms, mean, absmax, None if size is None else int(size))
