"""Compares the settings and results of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from axonlaunch.config.problems.errors import plain
from axonlaunch.diagnostics.report.record.run_record import RunRecord
from axonlaunch.diagnostics.report.record.run_timeline import cost
from axonlaunch.system.storage.strict_json import plain_number
from axonlaunch.system.text.formatting import quantity, size
from axonlaunch.system.text.units import rate_in

_UNIQUE = ("name", "run_dir")
"""Settings that differ between all runs and are not compared."""
_ABSENT = "(absent)"
_BYTES = " (bytes)"


def changed_settings(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the keys with different values, each with the values of all runs.

    Args:
        runs: Two or more runs.
    """
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    rows = [
        (key, [_value_text(run.config, key) for run in runs]) for key in keys if key not in _UNIQUE
    ]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def results(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """Return rows of a name and the values of all runs, None if a run has no value.

    Rows without any value are left out.
    """
    rows: list[tuple[str, list[Any]]] = [
        ("status", [run.status for run in runs]),
        ("steps", [_last(run, "step") for run in runs]),
        ("loss", [_last(run, "loss") for run in runs]),
        ("evaluation loss", [_last_evaluation(run, "eval_loss") for run in runs]),
        *(
            (metric_title(key), [_last_evaluation(run, key) for run in runs])
            for key in dict.fromkeys(key for run in runs for key in run.metrics)
        ),
        ("lowest loss", [_lowest(run) for run in runs]),
        *_rates(runs),
        ("time to first step (s)", [run.summary.get("first_step_s") for run in runs]),
        ("cost", [cost(run) for run in runs]),
        (
            "peak memory of tensors (bytes)",
            [run.summary.get("measured_peak_bytes") for run in runs],
        ),
        (
            "estimated peak memory (bytes)",
            [run.summary.get("predicted_peak_bytes") for run in runs],
        ),
        ("predicted step (s)", [run.summary.get("predicted_step_s") for run in runs]),
    ]
    return [row for row in rows if any(value is not None for value in row[1])]


@dataclass(frozen=True)
class Ranking:
    """The metric by which runs are compared.

    Attributes:
        name: Title of the metric.
        values: Value of each run; None if a run has none.
        is_highest: Whether the highest value is the best.
    """

    name: str
    values: list[float | None]
    is_highest: bool = False

    def order(self) -> list[int]:
        """Return the numbers of the runs, the best first and those without a value last."""
        sign = -1 if self.is_highest else 1
        keys = [math.inf if value is None else sign * value for value in self.values]
        return sorted(range(len(keys)), key=keys.__getitem__)


def ranking(runs: Sequence[RunRecord]) -> Ranking:
    """Rank runs by ``train.best_metric``, else by the evaluation loss, else by the loss.

    The last evaluation counts. A metric is used if all runs name the same one and one was measured.
    """
    metric = runs[0].config.get("train.best_metric")
    if all(run.config.get("train.best_metric") == metric for run in runs):
        values = [plain_number(_last_evaluation(run, f"eval_{metric}")) for run in runs]
        if metric != "loss" and any(value is not None for value in values):
            return Ranking(str(metric), values, _is_highest(runs[0], str(metric)))
    losses = [plain_number(_last_evaluation(run, "eval_loss")) for run in runs]
    if any(loss is not None for loss in losses):
        return Ranking("evaluation loss", losses)
    return Ranking("loss", [plain_number(_last(run, "loss")) for run in runs])


def _is_highest(run: RunRecord, metric: str) -> bool:
    """Return whether a higher value is better, as for all metrics that say nothing else.

    Code of metrics is not imported, because a run may be from somebody else.
    """
    listed = run.config.get("metrics")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and entry.get("higher_is_better") is False:
            target = str(entry.get("target", ""))
            if metric in (entry.get("name"), target.rpartition(":")[2].rpartition(".")[2]):
                return False
    return True


@dataclass(frozen=True)
class RunRow:
    """A row of the table of several runs.

    Attributes:
        run: Number of the run among all, counted from 0.
        is_best: Whether the run is the best by ``ranking``.
        cells: Texts by column.
    """

    run: int
    is_best: bool
    cells: list[str]


def run_table(runs: Sequence[RunRecord], names: Sequence[str]) -> tuple[list[str], list[RunRow]]:
    """Return the head and the rows of a table of runs, the best first, those without a loss last.

    The last columns are the settings in which the runs differ.

    Args:
        runs: Two or more runs.
        names: Labels of the runs, in the same order.
    """
    settings = changed_settings(runs)
    metrics = dict.fromkeys(key for run in runs for key in run.metrics)
    ranked = ranking(runs)
    order = ranked.order()
    head = [
        "run",
        "status",
        "step",
        "loss",
        "evaluation loss",
        *map(metric_title, metrics),
        "speed",
    ]
    rows = []
    for number in order:
        run, rate = runs[number], rate_of(runs[number])
        values = [_last(run, "loss"), _last_evaluation(run, "eval_loss")]
        values += [_last_evaluation(run, key) for key in metrics]
        texts = ["" if plain_number(value) is None else f"{value:.4f}" for value in values]
        speed = "" if plain_number(rate) is None else f"{quantity(rate)} {run.unit}/s"
        step = str(_last(run, "step") or 0)
        cells = [names[number], run.status, step, *texts, speed]
        is_best = number == order[0] and ranked.values[number] is not None
        cells += [brief(run.config.get(key), texts[number]) for key, texts in settings]
        rows.append(RunRow(number, is_best, cells))
    return head + [key for key, _ in settings], rows


def brief(value: Any, text: str) -> str:
    """Return a value as text; one with many digits, as those drawn at random have, with six."""
    return f"{value:.6g}" if isinstance(value, float) and len(text) > 8 else text


def _rates(runs: Sequence[RunRecord]) -> Iterator[tuple[str, list[Any]]]:
    """Yield a row for what the runs count: tokens/s, images/s, samples/s, targets/s."""
    for unit in dict.fromkeys(run.unit for run in runs):
        yield f"{unit}/s", [rate_of(run) if run.unit == unit else None for run in runs]


def rate_of(run: RunRecord) -> Any:
    """Return the number of counted tokens, images, ... per second; None if unknown."""
    rate = rate_in(run.summary)[1]
    return rate_in(run.steps[-1])[1] if rate is None and run.steps else rate


def with_units(rows: Sequence[tuple[str, list[Any]]]) -> list[tuple[str, list[Any]]]:
    """Return results with bytes formatted as text such as ``1.5 GiB``."""
    return [
        (name.removesuffix(_BYTES), [_size(value) for value in values])
        if name.endswith(_BYTES)
        else (name, values)
        for name, values in rows
    ]


def _size(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return size(value) if is_number and value else value


def _value_text(config: dict[str, Any], key: str) -> str:
    return plain(config[key]) if key in config else _ABSENT


def _last(run: RunRecord, key: str) -> Any:
    return run.steps[-1].get(key) if run.steps else None


def _last_evaluation(run: RunRecord, key: str) -> Any:
    return run.evaluations[-1].get(key) if run.evaluations else None


def metric_title(key: str) -> str:
    """Return the name of a metric from its key in lines of evaluations."""
    return key.removeprefix("eval_")


def _lowest(run: RunRecord) -> float | None:
    losses = [line["loss"] for line in run.steps if isinstance(line.get("loss"), int | float)]
    return min(losses, default=None)
