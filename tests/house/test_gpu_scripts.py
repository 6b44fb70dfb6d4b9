"""``scripts/gpu``: the values in its tables, and that a node would accept the runs of its cases."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from axonlaunch import config as configuration
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.models.architectures.moe import Experts, MoEConfig

ROOT = Path(__file__).parents[2]
PARTS = ("memory", "speed", "check", "failures")
NAMES = ("table", *PARTS, "transfers", "mixture")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Return the modules of ``scripts/gpu_cases`` by name; they hide no other module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu_cases"))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the scripts set it
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


def test_every_case_is_a_configuration_that_a_node_would_take(
    modules: dict[str, ModuleType],
) -> None:
    memory, speed, check = modules["memory"], modules["speed"], modules["check"]
    transfers = modules["transfers"]
    for more in [*transfers.OFFLOADED.values(), transfers.SAVED]:
        configuration.load([*transfers.MODEL, *more, "launch.nproc=1"])
    for ranks, overrides in [*memory.CASES.values(), *speed.CASES.values()]:
        configuration.load([*overrides, f"launch.nproc={ranks}"])
    runs = [[*check.SMALL, *overrides] for overrides in check.RUNS.values()]
    for overrides in [*runs, check.RACING, check.RESUMED, *check.LAYOUTS.values()]:
        configuration.load(overrides)


def test_bench_contestants_do_equal_work_per_forward(
    modules: dict[str, ModuleType],
) -> None:
    speed = modules["speed"]
    for cases in (speed.CASES, speed.CASES_OF_CPU):
        for ranks, overrides in cases.values():
            config = configuration.load([*overrides, f"launch.nproc={ranks}"])
            layout = Layout.of(config, world_size=ranks)
            full = layout.micro_batch_size * layout.gradient_ranks
            assert full == config.train.global_batch_size, overrides


def test_a_case_is_measured_and_estimated_with_the_same_allocator(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, settings = modules["memory"], {}

    def ended(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        settings["estimate" in command] = environment
        return subprocess.CompletedProcess(command, 1, "", "nothing is run here")

    monkeypatch.setattr(memory.table, "ended", ended)
    monkeypatch.setattr(sys, "argv", ["memory.py", "--only", "1.2B fixed segments"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert memory.main() == 1
    assert settings[True] == settings[False] == {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}


def test_memory_has_to_be_within_two_percent_and_64_mib(modules: dict[str, ModuleType]) -> None:
    mib, compared = 2**20, modules["memory"].compared
    peaks = {"allocated": 10_000 * mib, "reserved": 12_000 * mib, "context": 852 * mib}
    estimate = {"reserved_bytes": 12_000 * mib, "context_bytes": 426 * mib}
    good = compared("x", peaks, {**estimate, "peak_bytes": 10_264 * mib})
    assert good.problem == ""
    assert good.cells["allocated, estimated"] == "10,264.0 (+2.6%)"
    assert good.cells["context, estimated"] == "426.0 (-50.0%)"  # no limit is set for it
    assert compared("x", peaks, {**estimate, "peak_bytes": 10_265 * mib}).problem
    low = {**estimate, "reserved_bytes": 11_399 * mib, "peak_bytes": 10_000 * mib}
    assert compared("x", peaks, low).problem == "reserved is -5.0% off"


def test_gpu_speed_reaches_required_ratio(modules: dict[str, ModuleType]) -> None:
    judged = modules["speed"].judged
    rates = {"axonlaunch": 94.0, "by hand": 100.0, "as torchtitan": 94.0}
    row = judged("1.2B", rates, 1e10, 2e12)
    assert row.cells["MFU"] == "47.0%"
    assert row.problem == "0.940 of by hand, 0.99 is required"
    assert judged("1.2B compiled", {**rates, "by hand": 94.0}, 1e10, 2e12).problem == (
        "MFU 47.0%, 48% is required"
    )
    on_a_cpu = judged("1.2B", rates, 1e10, None, launches=4546, parts={"idle": 0.051})
    assert on_a_cpu.problem == ""  # no limit for a CPU
    assert (on_a_cpu.cells["kernels"], on_a_cpu.cells["idle"]) == ("4,546", "5.1%")


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({}, ""),
        ({"passed": False}, ""),  # on a GPU, other roundings pass
        ({"passed": False, "gradient": 3e-4}, "gradient is 3.0e-04 off"),
        ({"passed": False, "checkpoint": float("nan")}, "checkpoint is nan off"),
        ({"passed": False, "rate": 1e-6}, "rate is 1.0e-06 off"),
        ({"passed": False, "reason": "no gradient"}, "no gradient"),
        ({"passed": False, "failure": "rank 1 failed"}, "rank 1 failed"),
    ],
)
def test_gpu_layouts_equal_cpu_up_to_rounding(
    modules: dict[str, ModuleType], result: dict[str, Any], problem: str
) -> None:
    off = {"rate": 0.0, "loss": 2e-5, "gradient": 5e-5, "parameter": 1e-6, "checkpoint": 0.0}
    limits = {kind: 1e-9 if kind == "rate" else 1e-5 for kind in off}
    off |= {kind: value for kind, value in result.items() if kind in off}
    said = {"passed": True, "reason": "", "failure": None, **result}
    judged = modules["check"].judged
    assert (
        judged("x", {**said, "max_differences": off, "tolerances": limits}, 1e-4).problem == problem
    )


def test_of_failures_those_of_a_gpu_are_named_as_it_reports_them(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failures = modules["failures"]
    case = failures.CASES["a token out of range"]
    assert case.has_to_report(on_cuda=True) == "device-side assert"
    assert case.has_to_report(on_cuda=False) == "out of range"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    devices = [(task["LOCAL_RANK"], task["CUDA_VISIBLE_DEVICES"]) for task in failures._tasks(2)]
    assert devices == [("0", "4"), ("1", "4")]
    started: list[list[str]] = []

    def train(arguments: list[str], folder: Path, environment: dict[str, str]) -> Any:
        del folder, environment
        started.append(arguments)
        return subprocess.Popen(["true"], stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr(failures, "_train", train)
    report = f"OutOfMemoryError\n{failures.LESS}  a.b=1 c=2\n  d=3\n"
    assert failures._retried(["x=1"], report, tmp_path) == ("a.b=1 c=2", "")
    assert started[0][:3] == ["x=1", "a.b=1", "c=2"]
    assert failures._retried(["x=1"], "OutOfMemoryError", tmp_path)[1].startswith("no changes are")


def test_of_the_processes_on_the_device_those_of_one_run_are_counted(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "driver"
    driver.touch()
    monkeypatch.setattr(modules["table"], "DRIVER", driver)
    contexts_of, runs_in = modules["check"].contexts_of, modules["failures"]._runs_in
    with driver.open() as opened:
        rank = subprocess.Popen(["sleep", "60"], stdin=opened, cwd=tmp_path)
    try:
        assert contexts_of(os.getpid()) == contexts_of(rank.pid) == [rank.pid]
        assert contexts_of(2**22) == []
        assert runs_in(tmp_path, rank.pid)
        assert not runs_in(tmp_path / "another", rank.pid)
    finally:
        rank.kill()
        rank.wait()
    assert contexts_of(os.getpid()) == []


def test_host_memory_equals_offloaded_bytes(
    modules: dict[str, ModuleType],
) -> None:
    mib, compared = 2**20, modules["memory"].compared
    peaks = {"allocated": 10 * mib, "reserved": 10 * mib, "host": 1080 * mib}
    estimate = {"peak_bytes": 10 * mib, "reserved_bytes": 10 * mib}
    offloaded = {**estimate, "ranks": [{"peak_bytes": 10 * mib, "host_bytes": 1000 * mib}]}
    assert compared("x", peaks, offloaded).cells["host, MiB"] == "1,080.0"
    assert compared("x", peaks, offloaded).problem == ""
    assert compared("x", {**peaks, "host": 1100 * mib}, offloaded).problem == "host is -9.1% off"
    assert "host, MiB" not in compared("x", peaks, estimate).cells  # only batches


def test_host_device_traffic_is_compared_with_link_bandwidth(
    modules: dict[str, ModuleType],
) -> None:
    transfers = modules["transfers"]
    events = [
        {"cat": "gpu_memcpy", "name": f"Memcpy {way}", "args": {"bytes": size}}
        for way, size in (("HtoD (Pinned -> Device)", 10), ("DtoH (Device -> Pinned)", 7))
    ]
    ignored = [{"cat": "kernel", "name": "Memcpy HtoD"}, {"name": "process_name"}]
    assert transfers.bytes_each_way([*events, *events, *ignored]) == (20, 14)
    links = {"host": 50.0, "device": 25.0}
    assert transfers.floor(100_000_000_000, 75_000_000_000, links) == 3.0  # both directions at once
    assert transfers.floor(1, 1, {}) == 0.0
    found = {"step": 0.5, "there": 0.0, "back": 0.0, "floor": 0.0}
    row = transfers.of_offload("offload params", found, on_cuda=True)
    assert row.problem == "nothing passes between host and device"
    assert transfers.of_offload("offload none", found, on_cuda=True).problem == ""
    saves = [{"stalled_s": stall, "seconds": 2.0} for stall in (1.0, 0.3, 0.4)]
    cells = transfers.of_saves(saves, 0.25).cells
    assert [*cells.values()] == ["1000.0", "400.0", "2000.0", "250.0"]
    assert transfers.of_saves(saves[:2], 0.25).problem == "2 checkpoints were written, not 3"


@pytest.mark.parametrize(
    ("ratio", "off", "on_cuda", "problem"),
    [
        (0.99, 0.002, True, ""),
        (0.98, 0.002, True, "0.980 of as torchtitan, 0.99 is required"),
        (0.98, 0.02, False, "results differ by 2.0%"),
    ],
)
def test_experts_have_the_results_and_speed_of_torchtitan(
    modules: dict[str, ModuleType], ratio: float, off: float, on_cuda: bool, problem: str
) -> None:
    found = {"axonlaunch": 1000 * ratio, "as torchtitan": 1000.0, "off": off}
    assert modules["mixture"].judged("experts", found, on_cuda=on_cuda).problem == problem


@pytest.mark.parametrize("dispatched", [False, True])
def test_torchtitan_s_experts_equal_included_ones(
    modules: dict[str, ModuleType], dispatched: bool
) -> None:
    experts = Experts(MoEConfig(hidden_size=16, moe_intermediate_size=8, num_experts=4))
    for matrix in experts.parameters():
        torch.nn.init.normal_(matrix)
    weights, choice = torch.rand(6, 4).topk(2)
    routed = torch.randn(6, 16), choice, weights
    theirs = modules["mixture"].as_torchtitan(
        routed, experts.gate_up_proj, experts.down_proj, is_dispatched=dispatched
    )
    torch.testing.assert_close(theirs, experts(*routed))


def test_a_part_ends_in_a_table_and_a_status(
    modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    table = modules["table"]
    rows = {"a": table.Row("a", {"MFU": "40%"}), "b": table.Row("b", problem="it broke")}
    assert table.run([*rows], "", rows.__getitem__) == 1
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "| case | MFU | verdict |",
        "| --- | --- | --- |",
        "| a | 40% | ok |",
        "| b |  | it broke |",
    ]
    assert table.run([*rows], "a", rows.__getitem__) == 0
    capsys.readouterr()
    assert table.run([*rows], "c", rows.__getitem__) == 2
    assert capsys.readouterr().err == "error: no case's name begins with 'c': a, b\n"


def test_interrupted_bench_prints_table_of_finished_rows(
    modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    table = modules["table"]

    def case(name: str) -> Any:
        if name == "b":
            raise KeyboardInterrupt
        return table.Row(name)

    assert table.run(["a", "b", "c"], "", case) == 130
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert rows == ["| a | ok |", "| b | interrupted |", "| c | interrupted |"]


def test_a_part_ends_when_its_time_is_over(
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = modules["table"]

    def stopped(name: str) -> None:
        monkeypatch.setattr(table, "_ENDS", 0.0)
        raise subprocess.TimeoutExpired(name, 1)

    assert table.run(["a", "b"], "", stopped) == 1
    rows = [line.split(" | ")[-1] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert rows == ["stopped: no time was left |", "not run: no time was left |"]


@pytest.mark.parametrize("part", ["", "nonsense"])
def test_a_part_that_does_not_exist_is_refused_in_one_line(part: str) -> None:
    command = [ROOT / "scripts/gpu", *part.split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == "error: name a part: check memory speed failures, or all\n"


def test_a_folder_without_wheels_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    command = [ROOT / "scripts/gpu", "--wheels", tmp_path, "all"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    said = f"error: there is no wheel of axonlaunch in {tmp_path}; --help says how"
    assert ran.stderr.startswith(said)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_all_of_it_says_so_once() -> None:
    ran = subprocess.run([ROOT / "scripts/gpu", "all"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == "error: torch sees no GPU here; --device cpu runs a small scale\n"


def test_its_help_names_every_part() -> None:
    ran = subprocess.run(
        [ROOT / "scripts/gpu", "--help"], capture_output=True, text=True, check=True
    )
    for name in ("all", *PARTS):
        assert f"\n  {name} " in ran.stdout


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("part", PARTS)
def test_on_a_cpu_a_part_runs_on_a_small_scale(part: str) -> None:
    """For memory: rank 0 of 4 has the estimated memory without the other ranks."""
    ran = subprocess.run(
        [ROOT / "scripts/gpu", part, "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "| ok |" in ran.stdout
