"""Every figure of the hardware groups, and every measured constant, names its source."""

from __future__ import annotations

import ast
import itertools
import statistics
from pathlib import Path

import pytest

from axonlaunch import config as configs
from axonlaunch.config.composition.compose import packaged_configs
from axonlaunch.planning import measured_constants

FILES = sorted((packaged_configs() / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_config_group_composes_under_its_name(path: object) -> None:
    name = path.stem  # type: ignore[attr-defined]
    hardware = configs.load([f"hardware={name}"]).hardware
    assert hardware is not None
    assert hardware.name == name


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem not in ("auto", "cpu")], ids=lambda path: path.stem
)
def test_each_figure_is_below_its_source(path: object) -> None:
    lines = path.read_text().splitlines()[2:]  # type: ignore[attr-defined]
    assert lines[0].startswith("# ")
    nulls = [n for n, line in enumerate(lines) if line.endswith(": null")]
    assert all(any(line.startswith("#") for line in lines[max(0, n - 3) : n]) for n in nulls)


def test_each_measured_constant_names_its_source() -> None:
    statements = ast.parse(Path(measured_constants.__file__).read_text()).body
    described = {
        constant.targets[0].id: ast.unparse(text)
        for constant, text in itertools.pairwise(statements)
        if isinstance(constant, ast.Assign) and isinstance(constant.targets[0], ast.Name)
    }
    assert described.keys() == {name for name in vars(measured_constants) if name.isupper()} - {
        "MIB"
    }
    assert [name for name, text in described.items() if "Source: " not in text] == []


@pytest.mark.parametrize("name", ["a100_40gb", "a100_80gb", "h100_80gb", "h100_96gb", "h200"])
def test_the_common_ones_lack_no_figure(name: str) -> None:
    hardware = configs.load([f"hardware={name}"]).hardware
    assert hardware is not None
    # Figures that do not affect its speed.
    other = ("device", "allgather_bw_gb_s", "host_memory_gib", "price_per_hour")
    other += ("context_mib", "communicator_mib", "kwh_per_hour")  # unpublished for most devices
    other += ("disk_gb_s", "restart_s", "mtbf_gpu_hours")  # of a cluster, not of a device
    other += ("fp8_tflops",)  # A100 has no such products
    assert None not in [value for name, value in vars(hardware).items() if name not in other]


@pytest.mark.parametrize("name", measured_constants.DEFAULT_EFFICIENCY)
def test_default_efficiency_is_median_of_published_figures(name: str) -> None:
    published = []
    for path in FILES:
        hardware = configs.load([f"hardware={path.stem}"]).hardware
        if (figure := getattr(hardware, name)) is not None and path.stem != "cpu":
            published.append(figure)
    # Devices with the same chip have the same figure.
    median = statistics.median(set(published))
    assert measured_constants.DEFAULT_EFFICIENCY[name] == pytest.approx(median, abs=0.01)
