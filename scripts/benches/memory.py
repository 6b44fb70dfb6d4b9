"""Compares memory estimates with published measurements: each error, medians by source and kind.

Every row that a configuration of axonlaunch can express is estimated; the others are counted by the
missing features. ``peak`` and ``active`` are compared with the estimate's peak, ``reserved`` with
the estimate of the allocator, ``steady`` with parameters, gradients and optimizer states.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import published

from axonlaunch.config import ConfigError, load
from axonlaunch.config.consistency.layout import resolved
from axonlaunch.engines.data_parallel import fsdp
from axonlaunch.engines.tensor.outputs import losses
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.planning.memory import cuda_process, estimate as memory_estimate
from axonlaunch.planning.tracing.devices import cuda_norm
from axonlaunch.planning.tracing.engine_categories import host_categories
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import Category
from axonlaunch.system.node.allocator_settings import AllocatorSettings
from axonlaunch.system.processes import forked_map

GIB = 1024**3

Estimated = Mapping[str, int]
STEADY: tuple[Category, ...] = ("parameters", "gradients", "optimizer")


def estimate_run(run: published.Run, capacity: int | None) -> Estimated:
    """Return the measured rank's bytes by kind; runs in a separate process."""
    if run.of_2024:
        _as_torchtitan_of_2024()
    config = resolved(load(list(run.overrides)), accelerators=0)
    ranks = memory_estimate.estimate(config).ranks
    rank = {"first": ranks[0], "last": ranks[-1]}.get(run.scope) or max(
        ranks, key=lambda rank: rank.peak_bytes
    )
    reduced = ReducedRun.of(config)
    stages = reduced.stages_of(rank.coords["pp"])
    on_host = host_categories(config)
    (recorded,) = forked_map.map_forked(
        [partial(cuda_process.record, reduced, rank=rank.rank, stages=stages, on_host=on_host)]
    )
    replayed = cuda_process.replay(
        recorded,
        capacity=capacity,
        settings=AllocatorSettings(expandable=run.expandable),
        workspaces=cuda_process.cublas_workspaces(config),
    )
    memory = cuda_process.peak_device_memory(
        replayed,
        peak_bytes=rank.peak_bytes,
        communicators=cuda_process.communicators_of(config, reduced.layout),
    )
    return {
        "allocated": rank.peak_bytes,
        "active": rank.peak_bytes,
        "reserved": memory.allocator,
        "nvidia-smi": memory.process,
        "steady": sum(rank.breakdown[name] for name in STEADY),
    }


def _as_torchtitan_of_2024() -> None:
    """Gather, compile and normalize in this process as those runs did; no key selects that.

    Source: pytorch/torchtitan@9dec370, ``parallelisms/parallelize_llama.py``; torch had no kernel
    for RMSNorm before 2.9, of October 2025.
    """
    cuda_norm.norm_as_on_cuda = lambda: None
    fsdp.LARGE_UNIT = sys.maxsize
    vars(losses)["cross_entropy_sum"] = partial(
        cross_entropy_sum
    )  # not a model's loss, which is compiled


def cached(run: published.Run, capacity: int | None, folder: Path | None) -> Estimated:
    """Return ``estimate_run``'s answer, from a folder if the same source has put it there."""
    if folder is None:
        return estimate_run(run, capacity)
    file = folder / f"{published.digest(run, capacity)}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(estimate_run(run, capacity)))
    estimate: Estimated = json.loads(file.read_text())
    return estimate


def main() -> None:
    """Print the error of every row, then a summary, then the features that the other rows need."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="measurements, in JSON lines")
    parser.add_argument("--only", default="", help="prefix of the ids of the rows to estimate")
    parser.add_argument("--cache", type=Path, help="folder of estimates, which are reused")
    args = parser.parse_args()
    lines = args.rows.read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["id"].startswith(args.only)]
    rows = [row for row in rows if any(key.startswith(("peak_", "steady_")) for key in row)]
    against = {row["id"]: published.reasons(row) or _refusals(row) for row in rows}
    said = [row for row in rows if not against[row["id"]]]
    jobs = [
        partial(cached, published.run(row), published.device_bytes(row), args.cache) for row in said
    ]
    answers = forked_map.map_forked(jobs, at_once=2)
    _print_errors(said, answers)
    _print_reasons(against)


def _refusals(row: Mapping[str, Any]) -> list[str]:
    """Return why axonlaunch can't run the configuration of a row."""
    try:
        resolved(load(list(published.run(row).overrides)), accelerators=0)
    except ConfigError as error:
        return [problem.key for problem in error.problems]
    return []


def _print_errors(rows: list[dict[str, Any]], answers: list[Estimated]) -> None:
    errors: dict[tuple[str, str], list[float]] = {}
    print(f"{'row':<22} {'kind':<10} {'measured':>9} {'estimated':>9}  GiB  error")
    misfits = []
    for row, answer in zip(rows, answers, strict=True):
        capacity = published.device_bytes(row)
        if capacity is not None and answer["reserved"] > capacity:
            misfits.append(row["id"])
        for kind, bytes_ in published.measured(row).items():
            error = answer[kind] / bytes_ - 1
            errors.setdefault((row["id"].split("-")[0], kind), []).append(abs(error))
            print(
                f"{row['id']:<22} {kind:<10} {bytes_ / GIB:>9.2f} {answer[kind] / GIB:>9.2f}"
                f"  {error:>+10.1%}"
            )
    print(f"\n{'source':<10} {'kind':<10} {'rows':>4} {'median':>7} {'90th':>7}")
    groups = sorted(errors.items())
    full = [error for _, of_group in groups for error in of_group]
    for (source, name), of_group in [*groups, (("all", ""), full)]:
        if of_group:
            print(
                f"{source:<10} {name:<10} {len(of_group):>4} {statistics.median(of_group):>7.1%} "
                f"{_percentile(of_group, 0.9):>7.1%}"
            )
    print(f"\nestimated not to fit their GPU: {', '.join(misfits) or 'none'}")


def _print_reasons(against: Mapping[str, list[str]]) -> None:
    """Print the features that rows need, and for how many rows each is the only missing one."""
    every = Counter(reason for reasons in against.values() for reason in reasons)
    alone = Counter(reasons[0] for reasons in against.values() if len(reasons) == 1)
    print(f"\n{'rows':>5} {'alone':>5}  can't be said")
    for reason, count in every.most_common():
        print(f"{count:>5} {alone[reason]:>5}  {reason}")


def _percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


if __name__ == "__main__":
    main()
