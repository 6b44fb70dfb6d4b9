"""Formats the predicted duration, goodput and cost of training as labeled lines."""

from __future__ import annotations

from collections.abc import Iterator

from axonlaunch.planning.records import TrainingForecast
from axonlaunch.system.text.formatting import quantity, size

_MINUTE_S, _HOUR_S = 60.0, 3600.0


def training_lines(training: TrainingForecast) -> Iterator[tuple[str, str]]:
    """Yield the lines of a prediction, each as a label and a text."""
    steps = f"{training.steps:,} steps of {training.step_s:.3g} s"
    yield (
        "tokens",
        f"{quantity(training.tokens)} in {steps} on {_count(training.devices, 'device')}",
    )
    range_text = f"{_number(training.days_at_best)} to {_number(training.days_at_worst)}"
    hours = f"{quantity(training.device_hours)} device hours"
    yield "duration", f"{_number(training.days)} days ({range_text}), {hours}"
    parts = (
        f"{training.saving:.2%} saving, {training.lost:.2%} repeating lost steps, "
        f"{training.restarting:.2%} restarting"
    )
    band = f"{training.goodput_low:.1%} to {training.goodput_high:.1%}"
    yield "goodput", f"{training.goodput:.1%} ({band}): {parts}"
    rate = f"{quantity(training.gpu_hours_per_failure.expected)} device hours each"
    between = f"one in {_time(training.hours_between_failures * _HOUR_S)}"
    expected = f"{_number(training.failures)} expected"
    yield "failures", f"{expected}, {between}, {rate}"
    yield "saves", _saves(training)
    if training.configured_every not in (None, training.checkpoint_every):
        now = f"checkpoint.every={training.configured_every}"
        yield "", f"{now}, as configured, gives a goodput of {training.configured_goodput:.1%}"
    yield "spares", _spares(training)
    if training.price is not None:
        yield "price", f"{quantity(training.price)}, from hardware.price_per_hour"
    if training.mwh is not None:
        yield "energy", f"{quantity(training.mwh)} MWh, from hardware.kwh_per_hour"
    totals = {"price": ("price", training.price), "energy": ("kwh", training.mwh)}
    unknown = {name: key for name, (key, total) in totals.items() if total is None}
    if unknown:
        keys = [f"hardware.{key}_per_hour" for key in unknown.values()]
        yield "unknown", f"{' and '.join(unknown)}; set {' and '.join(keys)}"
    if training.assumed:
        figures = ", ".join(
            key if value is None else f"{key}={value:g}" for key, value in training.assumed.items()
        )
        yield "assumed", f"{figures} (typical figures; set them to yours)"


def _saves(training: TrainingForecast) -> str:
    seconds = training.checkpoint_every * training.step_s
    every = f"checkpoint.every={training.checkpoint_every}, every {_time(seconds)}"
    written = f"{size(training.checkpoint_bytes)} in {_time(training.save_s)}"
    if training.stalled_s < training.save_s:
        written += f", for which training waits {_time(training.stalled_s)}"
    return f"{every}, is best: {written}"


def _spares(training: TrainingForecast) -> str:
    devices = training.devices_per_spare
    kind = "device" if devices == 1 else "node"
    what = _count(training.spares, kind) + ("" if devices == 1 else f" of {devices} devices")
    return f"{what} for all {kind}s that fail in a day, on 95% of days"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.3g} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.3g} min"
    return f"{_number(seconds / _HOUR_S)} h"
