"""Goodput, intervals between saves and failures agree with published runs and simulations."""

from __future__ import annotations

import dataclasses
import math
import random
import re

import pytest

from axonlaunch.config import ConfigError, RunConfig, load, with_values
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.planning.records import TrainingForecast
from axonlaunch.planning.reports.training_table import training_lines
from axonlaunch.planning.throughput.goodput import (
    Overheads,
    SaveCosts,
    best_interval_s,
    overheads,
    poisson_quantile,
)
from axonlaunch.planning.throughput.training_time import (
    failure_rates,
    save_costs,
    training_forecast,
)

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
LLAMA3_DEVICES = 16_384
LLAMA3_MTBF = 54 * DAY / 419
"""419 unexpected interruptions in 54 days, "The Llama 3 Herd of Models", section 3.3."""
TOKENS = ["data=synthetic_tokens", "data.sequence_length=8192", "train.global_batch_size=128"]


def simulated_goodput(
    costs: SaveCosts, *, interval_s: float, mtbf_s: float, work_s: float
) -> float:
    """Return the goodput of a run that is simulated event by event."""
    chance = random.Random(0)
    clock = saved = 0.0
    failure = chance.expovariate(1 / mtbf_s)
    while saved < work_s:
        save_ends = clock + interval_s + costs.stalled_s
        if save_ends <= failure:
            clock, saved = save_ends, saved + interval_s
        else:
            clock = failure + costs.restart_s
            failure = clock + chance.expovariate(1 / mtbf_s)
    return saved / clock


def trained(*overrides: str, devices: int = 64, **options: float) -> TrainingForecast:
    options = {"tokens": 3e12, "step_s": 2.0, "saved_bytes": 100_000_000_000, **options}
    config = load([*TOKENS, "hardware=h100_80gb", *overrides])
    placed = with_values(config, RunNodes.of_devices(config, devices).settings)
    return training_forecast(placed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("restart_min", "goodput"), [(2, 94.3), (5, 92.8), (10, 90.5), (15, 88.2)])
def test_goodput_of_llama3_is_that_of_simulations_within_a_quarter_of_a_percent(
    restart_min: float, goodput: float
) -> None:
    costs = SaveCosts(stalled_s=12, written_s=12, restart_s=restart_min * MINUTE)
    expected = overheads(costs, interval_s=10 * MINUTE, mtbf_s=LLAMA3_MTBF)
    assert 100 * expected.goodput == pytest.approx(goodput, abs=0.25)


def test_default_rates_predict_the_failures_and_effective_time_that_llama3_reports() -> None:
    """419 failures in 54 days are at the optimistic end, and more than 90% are effective."""
    steps = 54 * DAY / 5.0
    forecast = trained(
        devices=LLAMA3_DEVICES, step_s=5.0, tokens=steps * 128 * 8192, saved_bytes=5_000_000_000_000
    )
    assert forecast.goodput_low < 0.90 < forecast.goodput_high
    rates = forecast.gpu_hours_per_failure
    assert rates.high == pytest.approx(LLAMA3_MTBF / HOUR * LLAMA3_DEVICES, rel=0.02)


@pytest.mark.parametrize(
    ("devices", "hours"), [(1024, 7.9), (16_384, 1.8), (131_072, 14 / 60)], ids=str
)
def test_low_default_rate_gives_published_time_to_failure_of_a_cluster_within_3_percent(
    devices: int, hours: float
) -> None:
    """Kokolis et al., 2024 (arXiv 2410.21680)."""
    hardware = load(["hardware=h100_80gb"]).hardware
    assert hardware is not None
    assert failure_rates(hardware, devices=devices).low / devices == pytest.approx(hours, rel=0.03)


def test_larger_runs_fail_more_often_by_default_rates() -> None:
    hardware = load(["hardware=h100_80gb"]).hardware
    assert hardware is not None
    sizes = [2**power for power in range(18)]
    hours = [failure_rates(hardware, devices=size).expected / size for size in sizes]
    assert hours == sorted(hours, reverse=True)


def test_energy_is_that_which_olmo3_reports_within_1_percent() -> None:
    """OLMo 3 7B: 234,000 H100 hours and 146 MWh."""
    forecast = trained()
    assert forecast.mwh is not None
    assert forecast.mwh / forecast.device_hours * 234_000 == pytest.approx(146, rel=0.01)


@pytest.mark.parametrize("mtbf_s", [60.0, 600.0, 6000.0])
@pytest.mark.parametrize("interval_s", [20.0, 100.0])
def test_goodput_is_that_of_a_simulated_run_within_1_percent(
    interval_s: float, mtbf_s: float
) -> None:
    costs = SaveCosts(stalled_s=5.0, written_s=5.0, restart_s=30.0)
    simulated = simulated_goodput(costs, interval_s=interval_s, mtbf_s=mtbf_s, work_s=3000 * mtbf_s)
    expected = overheads(costs, interval_s=interval_s, mtbf_s=mtbf_s)
    assert expected.goodput == pytest.approx(simulated, abs=0.01)


@pytest.mark.parametrize("save_s", [0.1, 1.0, 10.0, 100.0])
def test_interval_between_saves_loses_less_than_a_thousandth_to_the_best_one(save_s: float) -> None:
    costs = SaveCosts(stalled_s=save_s, written_s=save_s, restart_s=60.0)

    def goodput(interval_s: float) -> float:
        return overheads(costs, interval_s=interval_s, mtbf_s=600.0).goodput

    best = max(goodput(1.05**power) for power in range(200))
    assert goodput(best_interval_s(costs, mtbf_s=600.0)) > best * 0.999
    if save_s < 1:
        young = math.sqrt(2 * save_s * 600.0)
        assert best_interval_s(costs, mtbf_s=600.0) == pytest.approx(young, rel=0.02)


@pytest.mark.parametrize("mean", [0.01, 1.0, 7.8, 419.0])
@pytest.mark.parametrize("probability", [0.05, 0.95])
def test_poisson_quantile_is_the_first_number_that_covers_its_probability(
    mean: float, probability: float
) -> None:
    quantile = poisson_quantile(mean, probability)
    shares, share = [], math.exp(-mean)
    for number in range(quantile + 1):
        shares.append(share)
        share *= mean / (number + 1)
    assert math.fsum(shares) >= probability > math.fsum(shares[:-1])


def test_poisson_quantile_of_many_events_is_that_of_a_normal_distribution() -> None:
    assert poisson_quantile(1e6, 0.95) == pytest.approx(1e6 + 1645, abs=1)


def test_background_saves_cost_less_and_are_written_before_the_next_one() -> None:
    figures = ["hardware=h100_80gb", "hardware.disk_gb_s=0.1", "launch.nproc=8"]
    stalled = save_costs(load(figures), saved_bytes=16e9)
    assert stalled.stalled_s == stalled.written_s == pytest.approx(160)
    config = load([*figures, "checkpoint.async_save=true"])
    background = save_costs(config, saved_bytes=16e9)
    assert background.stalled_s == pytest.approx(2 / (63 * 0.79))
    assert background.written_s == stalled.written_s
    assert best_interval_s(background, mtbf_s=HOUR) >= background.unsaved_s


def test_background_save_waits_until_the_previous_one_is_written() -> None:
    """64 devices write 100 GB in 12.5 s, and a step takes 2 s."""
    forecast = trained("checkpoint.async_save=true", "checkpoint.every=1")
    assert forecast.save_s == pytest.approx(12.5)
    assert forecast.configured_goodput == pytest.approx(2 / 12.5, rel=0.01)
    forecast = trained("checkpoint.async_save=true", "checkpoint.every=7")
    assert forecast.configured_goodput == pytest.approx(14 / (14 + forecast.stalled_s), rel=0.01)


def test_forecast_adds_up() -> None:
    forecast = trained("hardware.price_per_hour=2.5", "checkpoint.every=10")
    assert forecast.steps == math.ceil(3e12 / (128 * 8192))
    parts = forecast.goodput + forecast.saving + forecast.lost + forecast.restarting
    assert parts == pytest.approx(1.0)
    assert forecast.days * 24 * 64 == pytest.approx(forecast.device_hours)
    assert forecast.days == pytest.approx(forecast.steps * 2.0 / DAY / forecast.goodput)
    assert forecast.price == pytest.approx(2.5 * forecast.device_hours)
    assert forecast.days_at_best < forecast.days < forecast.days_at_worst
    assert forecast.goodput_low < forecast.goodput < forecast.goodput_high
    # 64 devices fail each 125 h, and 8 nodes write 100 GB in 12.5 s.
    young_s = math.sqrt(2 * 12.5 * 125 * HOUR)
    assert forecast.checkpoint_every * 2.0 == pytest.approx(young_s, rel=0.01)
    assert forecast.failures == pytest.approx(forecast.days * 24 / 125, rel=0.03)
    assert forecast.configured_goodput is not None
    assert forecast.configured_goodput < forecast.goodput


def test_defaults_of_rates_are_listed_and_own_figures_are_not() -> None:
    assert trained().assumed == {
        "hardware.disk_gb_s": 1.0,
        "hardware.restart_s": 600.0,
        "hardware.mtbf_gpu_hours": None,
    }
    unknown_link = ["hardware=b200", "checkpoint.async_save=true"]
    forecast = trained(*unknown_link)
    assert forecast.assumed["hardware.host_gb_s"] == 63.0
    assert forecast.stalled_s == pytest.approx(100 / 64 / (63 * 0.79))
    configured = trained(
        "hardware.disk_gb_s=2", "hardware.restart_s=60", "hardware.mtbf_gpu_hours=1000"
    )
    assert configured.assumed == {}
    assert configured.hours_between_failures == pytest.approx(1000 / 64)
    assert configured.restart_s == pytest.approx(60 + 100 / 16)


def test_lines_name_interval_spares_price_and_assumptions() -> None:
    lines = [*training_lines(trained("hardware.price_per_hour=2"))]
    text = "\n".join(f"{label} {line}" for label, line in lines)
    assert re.search(r"saves checkpoint.every=\d+, every [\d.]+ min, is best", text)
    assert "spares 1 node of 8 devices for all nodes that fail in a day, on 95% of days" in text
    assert "from hardware.price_per_hour" in text
    assert "assumed hardware.disk_gb_s=1, hardware.restart_s=600, hardware.mtbf_gpu_hours" in text
    many = dataclasses.replace(trained(), failures=3240.0, days=1080.0)
    assert "3,240 expected" in dict(training_lines(many))["failures"]
    assert dict(training_lines(many))["duration"].startswith("1,080 days")
    [label, *_] = [label for label, line in training_lines(trained()) if "price_per_hour" in line]
    assert label == "unknown"


def test_rate_at_which_a_run_fails_before_it_saves_is_refused() -> None:
    message = r"hardware.mtbf_gpu_hours=0.001: .* 64 devices would fail every 0.0563 s"
    with pytest.raises(ConfigError, match=message):
        trained("hardware.mtbf_gpu_hours=0.001")
    assert trained("hardware.mtbf_gpu_hours=30").goodput > 0.01


def test_tokens_of_images_are_refused() -> None:
    config: RunConfig = load(["data=digits", "model=mlp", "hardware=h100_80gb", "launch.nproc=1"])
    with pytest.raises(ConfigError, match=r"--tokens.*are not sequences of tokens"):
        training_forecast(config, tokens=1e9, step_s=1.0, saved_bytes=1)


def test_overheads_of_other_numbers_of_failures_are_in_proportion() -> None:
    expected = Overheads(saving=0.01, lost=0.02, restarting=0.04, failures=2.0)
    assert expected.scaled_to(1.0) == Overheads(0.01, 0.01, 0.02, 1.0)
