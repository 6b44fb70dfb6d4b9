"""Compares predicted with published tokens per second and device, and ranks within groups.

For each group it also prints the measured speed of the run with the fastest prediction, divided by
the best.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import published_speed

from axonlaunch.config import ConfigError
from axonlaunch.planning.throughput.throughput import throughput

LEAST_ROWS = 4
"""Minimum number of rows of a group for a meaningful rank correlation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows",
        type=Path,
        action="append",
        required=True,
        help="measurements, in JSON lines or CSV; can be repeated",
    )
    files = parser.parse_args().rows
    if missing := [str(path) for path in files if not path.is_file()]:
        parser.error(f"--rows={missing[0]}: there is no such file")
    groups: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    errors: list[float] = []
    left_out: Counter[str] = Counter()
    print(f"{'row':44}{'predicted':>10}{'measured':>10}{'error':>8}")
    for raw in (row for path in files for row in published_speed.read(path)):
        try:
            row = published_speed.express(raw)
            reported = throughput(row.config, row.hardware)
        except published_speed.NotExpressedError as reason:
            left_out[str(reason)] += 1
            continue
        except ConfigError as error:
            left_out[error.problems[0].key] += 1
            continue
        predicted, measured = reported.tokens_per_s_per_device, row.tokens_per_s
        errors.append(abs(predicted / measured - 1))
        groups[row.group].append((predicted, measured))
        change = predicted / measured - 1
        print(f"{row.id:44}{predicted:10.0f}{measured:10.0f}{change:+8.0%}", flush=True)
    report(groups, errors, left_out)


def report(
    groups: dict[tuple[str, str, int], list[tuple[float, float]]],
    errors: list[float],
    left_out: Counter[str],
) -> None:
    print(f"\n{'group':56}{'rows':>5}{'Spearman':>10}{'first':>7}")
    correlations, firsts = [], []
    for (model, hardware, devices), pairs in sorted(groups.items()):
        if len(pairs) < LEAST_ROWS:
            continue
        rho = spearman([a for a, _ in pairs], [b for _, b in pairs])
        correlations.append(rho)
        first = max(pairs)[1] / max(measured for _, measured in pairs)
        firsts.append(first)
        name = f"{model}, {hardware}, {devices} devices"
        print(f"{name:56}{len(pairs):5}{rho:10.2f}{first:7.2f}")
    print("\nnot expressed")
    for reason, count in left_out.most_common():
        print(f"{count:5}  {reason}")
    if errors:
        print(f"\nrows {len(errors)}, median absolute error {statistics.median(errors):.1%}")
    if correlations:
        print(
            f"groups {len(correlations)}, median Spearman {statistics.median(correlations):.2f}, "
            f"median of the first over the best {statistics.median(firsts):.2f}"
        )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation; equal values share their mean rank."""
    a, b = _ranks(first), _ranks(second)
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(a, b)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


if __name__ == "__main__":
    main()
