"""Tests which causal language models of transformers each layout trains as one process does.

Every class is built with a tiny configuration and proved as by ``axonlaunch verify``. If it can't
be built or divided, the reason is recorded. Each result is appended to a file at once, so an
interrupted sweep continues. Once every class and layout has a result for these versions, in this
file or in the existing table, the table for ``axonlaunch ls hf`` and its page are written.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import hf_table
import hf_tiny
from hf_table import Row

if TYPE_CHECKING:
    from axonlaunch.config import RunConfig
    from axonlaunch.verification.result import ParityResult

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "build" / "hf_rows.jsonl"
EXPORT = "export"
_FSDP = ["strategy=fsdp", "launch.nproc=2"]
LAYOUTS: dict[str, list[str]] = {
    "fsdp 2": _FSDP,
    "zero1 2": ["strategy=zero1", "launch.nproc=2"],
    "tensor 2": ["strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2"],
    "tensor 4": ["strategy=tensor", "strategy.tensor.degree=4", "launch.nproc=4"],
    "sequence 2": [
        *("strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2"),
        "strategy.tensor.sequence_parallel=true",
    ],
    "pipeline 2": ["strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"],
    "zero bubble 2": [
        *("strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"),
        "strategy.pipeline.schedule=zbv_zero_bubble",
    ],
    "context 2": ["strategy=ddp", "strategy.context.degree=2", "launch.nproc=2"],
    "expert 2 x 2": ["strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=4"],
    "hybrid 2x2x2": [
        *("strategy=hybrid", "strategy.tensor.degree=2", "strategy.pipeline.degree=2"),
        "launch.nproc=8",
    ],
    EXPORT: _FSDP,
}
"""Settings under which each class is proved, by column name."""

INSTEAD = {"context 2": ["strategy.ddp.sync=synchronous"]}
"""Setting for models with parameters without gradients, as their error message recommends."""

SETTINGS = [
    *("model=hf", "model.init=random", "data=synthetic_tokens", "data.sequence_length=32"),
    *("train.global_batch_size=4", "train.steps=10", "scheduler=constant"),
    *("optimizer.lr=3e-3", "optimizer.eps=1e-6", "checkpoint.every=0"),
]
STEPS = 2
ONE_BY_ONE = ["strategy=single", "launch.nproc=1", "train.micro_batch_size=1"]
_BEYOND_ROUNDING, _MOST_ROUNDING = 10.0, 3e-4


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a result depends on."""
    return {
        name: importlib.metadata.version(name).partition("+")[0]
        for name in ("transformers", "torch")
    }


def _here() -> str:
    return hf_table.label(versions())


def chosen_of(kind: str, layout: str, *more: str) -> RunConfig:
    """Return the checked configuration of a class under a layout.

    Raises:
        ConfigError: The configuration is refused.
    """
    from support.configured import run_config

    from axonlaunch.config.problems.errors import plain

    overrides = [
        *SETTINGS,
        f"model.config={plain(hf_tiny.tiny(kind))}",
        "model.router_aux_loss=false",  # a pipeline and sequence parts can't compute it
        *LAYOUTS.get(layout, []),
        *more,
    ]
    return run_config(overrides)


def prove(kind: str, layout: str) -> Row:
    """Compare training in a layout with one process, or export the model and load it again."""
    from axonlaunch.config import ConfigError
    from axonlaunch.verification.comparison.compare import on_mock
    from axonlaunch.verification.references.comparison_plan import ComparisonPlan

    try:
        chosen = chosen_of(kind, layout)
        if layout == EXPORT:
            import hf_export

            with tempfile.TemporaryDirectory() as folder:
                lost = hf_export.difference(chosen, Path(folder))
            return Row(kind, layout, "different" if lost else "equal", lost)
        result, note = on_mock(chosen, ComparisonPlan(steps=STEPS)), hf_tiny.NOTES.get(kind, "")
        if layout in INSTEAD and "got no gradient" in (result.failure or ""):
            result = on_mock(chosen_of(kind, layout, *INSTEAD[layout]), ComparisonPlan(steps=STEPS))
            note = f"with {' '.join(INSTEAD[layout])}"
    except ConfigError as error:
        return Row(kind, layout, "refused", "; ".join(map(str, error.problems)))
    if result.passed:
        return Row(kind, layout, "equal", note)
    if result.failure is None and (rounding := explanation(kind, result)):
        return Row(kind, layout, "equal", "; ".join(filter(None, [note, rounding])))
    return Row(kind, layout, "different", result.failure or "; ".join(result.differences[:2]))


def explanation(kind: str, result: ParityResult) -> str:
    """Return a text if rounding explains a difference; empty if it does not.

    Some models amplify rounding more than others. A process that computes samples one by one only
    sums gradients in another order. Layouts that divide layers also round differently in forward,
    so they may differ by several times that amount.
    """
    from axonlaunch.verification.comparison.compare import on_mock
    from axonlaunch.verification.references.comparison_plan import ComparisonPlan

    rounding = on_mock(chosen_of(kind, "", *ONE_BY_ONE), ComparisonPlan(steps=STEPS))
    sizes = ("max_loss_difference", "max_gradient_difference", "max_parameter_difference")
    for name in sizes:
        allowed = max(result.tolerance, _BEYOND_ROUNDING * getattr(rounding, name))
        if getattr(result, name) > min(allowed, _MOST_ROUNDING):
            return ""
    seen, usual = result.max_gradient_difference, rounding.max_gradient_difference
    return f"to {seen:.0e}: one process that takes a sample after the other differs by {usual:.0e}"


def _in_process(kind: str, layouts: list[str], answers: Connection) -> None:
    import torch

    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    torch.set_num_threads(1)
    for layout in layouts:
        try:
            row = prove(kind, layout)
        except Exception as error:  # an exception of the model's code is a result
            reason = " ".join(str(error).split())
            row = Row(kind, layout, "failed", f"{type(error).__name__}: {reason}"[:300])
        answers.send(asdict(row))


def rows(kind: str, layouts: list[str], *, seconds: float) -> Iterator[Row]:
    """Yield a class's result for each layout. After a crash, a new process continues."""
    context = multiprocessing.get_context("fork")
    left = list(layouts)
    while left:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_in_process, args=(kind, left, there))
        process.start()
        there.close()
        alive = True
        while left and alive:
            row = Row(kind, left[0], "late", f"took more than {seconds:.0f} s")
            alive = here.poll(seconds)
            if alive:
                try:
                    row = Row(**here.recv())
                except EOFError:
                    row, alive = Row(kind, left[0], "failed", "its process died"), False
            left.pop(0)
            yield row
        process.kill()
        process.join()


def sweep(kinds: list[str], layouts: list[str], file: Path, *, seconds: float) -> list[Row]:
    """Prove all cases without a row in a file, one line each; return all rows of these classes."""
    here = _here()
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {(r.model_type, r.layout): r for r in read(file) if r.versions == here}
    with file.open("a") as out:
        for kind in kinds:
            missing = [layout for layout in layouts if (kind, layout) not in known]
            for row in rows(kind, missing, seconds=seconds):
                known[kind, row.layout] = row = Row(**{**asdict(row), "versions": here})
                out.write(json.dumps(asdict(row)) + "\n")
                out.flush()
                print(f"{kind:24} {row.layout:13} {row.outcome:10} {row.reason}", flush=True)
    return [known[kind, layout] for kind in kinds for layout in layouts]


def read(file: Path) -> list[Row]:
    """Return the rows of a file; the last one of each class and layout counts."""
    if not file.exists():
        return []
    every_row = [Row(**json.loads(line)) for line in file.read_text().splitlines()]
    return list({(row.model_type, row.layout): row for row in every_row}.values())


def main() -> None:
    """Print a line for each class and layout, then the number of equal results for each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="MODEL_TYPE", default=None)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="time limit of one class and layout"
    )
    parser.add_argument("--rows", type=Path, default=ROWS, help="file that results are appended to")
    parser.add_argument(
        "--again", action="store_true", help="repeat proofs whose results the file contains"
    )
    chosen = parser.parse_args()
    kinds = hf_tiny.model_types()
    # Imported once before the forks, because every process needs it.
    importlib.import_module("axonlaunch.verification.comparison.compare")
    chosen_of("gpt2", "fsdp 2")
    wanted = chosen.only or kinds
    if chosen.again:
        forget(chosen.rows, wanted, chosen.layouts)
    seen = sweep(wanted, chosen.layouts, chosen.rows, seconds=chosen.seconds)
    for layout in chosen.layouts:
        equal = sum(row.outcome == "equal" for row in seen if row.layout == layout)
        print(f"{layout}: {equal} of {sum(row.layout == layout for row in seen)}")
    write(chosen.rows, kinds)


def write(file: Path, kinds: list[str]) -> None:
    """Write the packaged table, once every class was run under every layout."""
    rows = [row for row in (*hf_table.shipped(), *read(file)) if row.versions == _here()]
    latest = {(row.model_type, row.layout): row for row in rows if row.model_type in kinds}
    left = [kind for kind in kinds if any((kind, layout) not in latest for layout in LAYOUTS)]
    if left:
        print(f"{len(left)} of {len(kinds)} classes are left, and no table is written")
        return
    hf_table.write(latest.values(), versions=versions(), classes=len(kinds), layouts=LAYOUTS)


def forget(file: Path, kinds: list[str], layouts: list[str]) -> None:
    """Remove rows from a file."""
    rest = [x for x in read(file) if x.model_type not in kinds or x.layout not in layouts]
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rest))


if __name__ == "__main__":
    main()
