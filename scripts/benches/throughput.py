"""Compares predicted with published tokens per second and device, by source and within groups.

For each source it also prints the errors with one factor for its cluster and software: each
prediction is divided by the median ratio of the source's other runs. For each group of runs of one
table with the same model, device and number of devices it prints the rank correlation, and the
measured speed of the run with the fastest prediction, divided by the best.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import published
import published_speed
from published_speed import Row

from axonlaunch.config import ConfigError
from axonlaunch.config.consistency.layout import num_ranks
from axonlaunch.planning.throughput.step_work import step_works
from axonlaunch.planning.throughput.throughput import speed_of

Result = dict[str, Any]

LEAST_ROWS = 4
"""Minimum number of rows of a group for a meaningful rank correlation."""
AT_ONCE = 8
"""Number of runs whose steps are traced together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows",
        type=Path,
        action="append",
        required=True,
        help="measurements, in JSON lines or CSV; can be repeated",
    )
    parser.add_argument(
        "--results",
        type=Path,
        help=(
            "JSON lines to which results are added; rows that it has are not predicted again, as "
            "long as the row, its configuration and the source of axonlaunch stay the same"
        ),
    )
    arguments = parser.parse_args()
    if missing := [str(path) for path in arguments.rows if not path.is_file()]:
        parser.error(f"--rows={missing[0]}: there is no such file")
    left_out: Counter[str] = Counter()
    earlier = _earlier(arguments.results)
    rows = list(_expressed(arguments.rows, left_out))
    results = [earlier[published.digest(row)] for row in rows if published.digest(row) in earlier]
    rows = [row for row in rows if published.digest(row) not in earlier]
    print(f"{'row':44}{'predicted':>10}{'measured':>10}{'error':>8}")
    for result in _predicted(rows, left_out):
        results.append(result)
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
        predicted, measured = result["predicted"], result["measured"]
        error = predicted / measured - 1
        print(f"{result['id']:44}{predicted:10.0f}{measured:10.0f}{error:+8.0%}", flush=True)
    _report_sources(results)
    _report_groups(results)
    print("\nnot expressed")
    for reason, count in left_out.most_common():
        print(f"{count:5}  {reason}")


def _expressed(files: Iterable[Path], left_out: Counter[str]) -> Iterator[Row]:
    seen: set[tuple[str, float]] = set()
    for raw in (row for path in files for row in published_speed.read(path)):
        try:
            row = published_speed.express(raw)
        except published_speed.NotExpressedError as reason:
            left_out[str(reason)] += 1
            continue
        content = repr((row.config, row.hardware)), row.tokens_per_s
        if content in seen:
            left_out["a measurement that is listed twice"] += 1
            continue
        seen.add(content)
        yield row


def _earlier(file: Path | None) -> dict[str, Result]:
    """Return earlier results by digest."""
    if file is None or not file.exists():
        return {}
    results = [json.loads(line) for line in file.read_text().splitlines()]
    return {result.get("digest", ""): result for result in results}


def _predicted(rows: Sequence[Row], left_out: Counter[str]) -> Iterator[Result]:
    """Yield the results of runs. Those with equal steps, apart from their number, are traced once.

    Args:
        rows: Runs to predict.
        left_out: Counts of reasons, to which runs that can't be predicted are added.
    """
    by_ranks: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_ranks[num_ranks(row.config)].append(row)
    earlier: list[tuple[Any, Any]] = []
    for ranks, same in by_ranks.items():
        for start in range(0, len(same), AT_ONCE):
            part = same[start : start + AT_ONCE]
            works = step_works([row.config for row in part], world_size=ranks, earlier=earlier)
            for row, work in zip(part, works, strict=True):
                try:
                    if isinstance(work, ConfigError):
                        raise work
                    speed = speed_of(row.config, row.hardware, work)
                except ConfigError as error:
                    left_out[error.problems[0].key] += 1
                    continue
                yield {
                    "digest": published.digest(row),
                    "id": row.id,
                    "source": row.source,
                    "group": row.group,
                    "layout": row.layout,
                    "predicted": speed.tokens_per_s_per_device,
                    "measured": row.tokens_per_s,
                }


def _report_sources(results: Sequence[Result]) -> None:
    by_source: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_source[result["source"]].append(result)
    print(f"\n{'source':20}{'rows':>5}{'ratio':>7}{'median':>8}{'90%':>7}   with its factor")
    every: list[float] = []
    every_scaled: list[float] = []
    for source, members in sorted(by_source.items()):
        ratios = [result["predicted"] / result["measured"] for result in members]
        scaled = scaled_ratios(ratios)
        every += ratios
        every_scaled += scaled
        ratio = statistics.median(ratios)
        print(f"{source:20}{len(ratios):5}{ratio:7.2f}{_errors(ratios)}   {_errors(scaled)}")
    if every:
        print(f"{'all':20}{len(every):5}{'':7}{_errors(every)}   {_errors(every_scaled)}")


def scaled_ratios(ratios: Sequence[float]) -> list[float]:
    """Return each ratio, divided by the median of the others; empty if there are no others."""
    if len(ratios) == 1:
        return []
    return [
        ratio / statistics.median([*ratios[:index], *ratios[index + 1 :]])
        for index, ratio in enumerate(ratios)
    ]


def _errors(ratios: Sequence[float]) -> str:
    if not ratios:
        return f"{'':15}"
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return f"{statistics.median(errors):8.1%}{errors[int(0.9 * len(errors))]:7.0%}"


def _report_groups(results: Sequence[Result]) -> None:
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for result in results:
        groups[tuple(result["group"])].append((result["predicted"], result["measured"]))
    print(f"\n{'group':64}{'rows':>5}{'Spearman':>10}{'first':>7}")
    correlations, firsts = [], []
    for (table, model, hardware, devices), pairs in sorted(groups.items()):
        if len(pairs) < LEAST_ROWS:
            continue
        rho = spearman([a for a, _ in pairs], [b for _, b in pairs])
        correlations.append(rho)
        first = max(pairs)[1] / max(measured for _, measured in pairs)
        firsts.append(first)
        name = f"{table}: {model}, {hardware}, {devices} devices"
        print(f"{name:64}{len(pairs):5}{rho:10.2f}{first:7.2f}")
    if correlations:
        print(
            f"groups {len(correlations)}, median Spearman {statistics.median(correlations):.2f}, "
            f"first over the best: median {statistics.median(firsts):.2f}, worst {min(firsts):.2f}"
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
