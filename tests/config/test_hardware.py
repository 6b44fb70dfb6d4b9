"""Every figure of the hardware groups names where it was published."""

from __future__ import annotations

import pytest

from axonlaunch import config as configs
from axonlaunch.config.compose import packaged_configs

FILES = sorted((packaged_configs() / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_group_composes_under_its_own_name(path: object) -> None:
    name = path.stem  # type: ignore[attr-defined]
    hardware = configs.load([f"hardware={name}"]).hardware
    assert hardware is not None
    assert hardware.name == name


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem != "cpu"], ids=lambda path: path.stem
)
def test_each_figure_stands_below_its_source(path: object) -> None:
    lines = path.read_text().splitlines()[2:]  # type: ignore[attr-defined]
    assert lines[0].startswith("# ")
    nulls = [n for n, line in enumerate(lines) if line.endswith(": null")]
    assert all(any(line.startswith("#") for line in lines[max(0, n - 3) : n]) for n in nulls)


@pytest.mark.parametrize("name", ["a100_40gb", "a100_80gb", "h100_80gb", "h100_96gb", "h200"])
def test_the_common_ones_lack_no_figure(name: str) -> None:
    hardware = configs.load([f"hardware={name}"]).hardware
    assert hardware is not None
    # Not what its speed follows from.
    other = ("device", "allgather_bw_gb_s", "host_memory_gib", "price_per_hour")
    assert None not in [value for name, value in vars(hardware).items() if name not in other]
