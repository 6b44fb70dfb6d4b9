"""Runs of a sweep that train at once: each on a share of the node, and all end together."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import TINY, Command, wait_for

from axonlaunch.config import ConfigError, load, with_values
from axonlaunch.launch.commands import parallel_sweep
from axonlaunch.launch.commands.node_shares import NodeShare, divide_node
from axonlaunch.launch.commands.parallel_sweep import _remaining, _words, share_node
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.request import Request
from axonlaunch.launch.runs import Run, RunResult

CONTEXT = multiprocessing.get_context("forkserver")


def runs_of(*overrides: str, number: int = 2) -> list[Run]:
    options = LaunchOptions(fork_server=CONTEXT, started=0.0)
    run = partial(Run, composed=None, options=options)
    return [run(overrides=[f"seed={n}", *overrides], config=load(overrides)) for n in range(number)]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Simulate a node with accelerators and 8 cores."""

    def simulate(accelerators: int) -> None:
        monkeypatch.setattr(parallel_sweep, "count_accelerators", lambda server: accelerators)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return simulate


def shared(runs: list[Run], *, at_once: int) -> tuple[list[Any], list[NodeShare]]:
    runs, shares = share_node(runs, at_once=at_once, server=lambda: CONTEXT)
    return [run.config.launch.nproc for run in runs], shares


@pytest.mark.parametrize(
    ("overrides", "accelerators", "ranks", "devices"),
    [
        ([], 4, 2, ["0,1", "2,3"]),
        (["launch.nproc=1"], 4, 1, ["0,1", "2,3"]),
        ([], 5, 2, ["0,1", "2,3"]),  # the fifth stays unused
        ([], 0, "auto", [None, None]),
        (["launch.device=cpu"], 4, "auto", [None, None]),
    ],
)
def test_devices_are_divided_and_give_the_number_of_ranks(
    overrides: list[str], accelerators: int, ranks: Any, devices: list[Any], node: Any
) -> None:
    node(accelerators)
    nproc, shares = shared(runs_of(*overrides), at_once=2)
    assert nproc == [ranks, ranks]
    assert [share.devices for share in shares] == devices
    assert not set(shares[0].cores) & set(shares[1].cores)
    assert sorted(shares[0].cores + shares[1].cores) == list(range(8))


def test_visible_devices_are_divided_by_their_names() -> None:
    shares = divide_node(
        2, devices=2, allowed=[0, 1], variables={"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}
    )
    assert [share.environment() for share in shares] == [
        {"CUDA_VISIBLE_DEVICES": "GPU-b"},
        {"CUDA_VISIBLE_DEVICES": "GPU-a"},
    ]


def test_more_devices_than_cores_share_the_cores_of_a_run() -> None:
    shares = divide_node(2, devices=8, allowed=[0, 1], variables={})
    assert [share.cores for share in shares] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("overrides", "accelerators", "at_once", "problem"),
    [
        (
            ["launch.nproc=2"],
            3,
            2,
            "--parallel 2: 2 runs of 2 ranks need 4 accelerators, and this node has 3; "
            "use --parallel 1",
        ),
        ([], 0, 9, "--parallel 9: each run needs a core, and this process may use 8; use "),
        (["launch.master_port=2000"], 0, 2, "launch.master_port=2000: runs that train at once"),
    ],
)
def test_too_few_devices_or_cores_are_refused(
    overrides: list[str], accelerators: int, at_once: int, problem: str, node: Any
) -> None:
    node(accelerators)
    with pytest.raises(ConfigError) as raised:
        shared(runs_of(*overrides, number=9), at_once=at_once)
    [issue] = raised.value.problems
    assert str(issue).startswith(problem)


def test_runs_that_are_submitted_as_jobs_need_no_share_of_this_node(node: Any) -> None:
    node(0)
    nproc, shares = shared(
        runs_of("launch=slurm", "launch.nproc=16", "launch.master_port=2000"), at_once=2
    )
    assert nproc == [16, 16]
    assert shares == [NodeShare(devices=None, cores=tuple(range(8)))] * 2


def test_interrupted_sweep_of_jobs_counts_only_the_submitted_ones() -> None:
    runs = runs_of("launch=slurm", "launch.nproc=1", number=3)
    request = Request(overrides=[], multirun=True)
    submitted = RunResult(130, {"job_id": 7, "run_dir": "runs/a", "state": "PENDING"})
    checking = RunResult(130, {"status": "interrupted", "run_dir": "runs/b"})
    left = "2 of 3 runs were not submitted; axonlaunch jobs lists the others"
    assert _remaining(runs, [submitted, checking], request) == left
    assert _remaining(runs, [checking], request) == "3 of 3 runs were not submitted"


def test_more_runs_at_once_than_the_sweep_has_give_each_a_larger_share(node: Any) -> None:
    node(4)
    nproc, shares = shared(runs_of(), at_once=4)
    assert (nproc, len(shares)) == ([2, 2], 2)


def test_last_line_of_a_run_is_shown_without_a_line_break_too() -> None:
    program = "import sys; sys.stderr.write('first\\nkilled here')"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.wait()
    stream = io.StringIO()
    share = NodeShare(devices=None, cores=(0,))
    command = parallel_sweep._Command(1, runs_of("name=demo")[0], share, process, stream)
    command.show_output()
    command.result()
    assert stream.getvalue() == "[2] first\n[2] killed here\n"


def test_command_of_a_run_has_its_name_and_folder_once() -> None:
    folder = "it's \\\\here\\"
    config = with_values(load(["launch.nproc=2"]), {"name": "a/0", "run_dir": folder})
    options = LaunchOptions(fork_server=CONTEXT, started=0.0)
    run = Run(overrides=["seed=3", "name=a"], composed=None, config=config, options=options)
    request = Request(
        overrides=["seed=3,4", "name=a"], multirun=True, parallel=2, config_dirs=[Path("mine")]
    )
    program, command, option, *words = _words(run, request)
    assert [program, command, option] == ["axonlaunch", "train", "--json"]
    assert words[:4] == ["--config-dir", "mine", "seed=3", "name=a/0"]
    again = load(words[2:])
    assert (again.name, again.run_dir, again.seed) == ("a/0", folder, 3)


SWEEP = ["train", "-m", "--parallel", "2", "name=sweep", "strategy=single", *TINY]


def test_runs_train_at_once_on_their_own_cores_and_the_best_is_marked(served: Command) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is not enough for two runs")
    ran = served(*SWEEP, "seed=0,1", "train.steps=2", "launch.device=cpu")
    lines = [line.strip() for line in ran.stdout.splitlines()]
    assert {"run 1 of 2: seed=0", "run 2 of 2: seed=1"} < set(lines)
    assert sum(bool(re.match(r"\[2\] step \d  loss ", line)) for line in lines) == 2
    assert sum(" (best)" in line for line in lines[-2:]) == 1
    losses = [served.losses(f"sweep/{index}")[-1] for index in range(2)]
    table = [line.replace(" (best)", "").split()[:2] for line in lines[-2:]]
    assert table == [[f"seed={n}", f"{loss:.4f}"] for n, loss in enumerate(losses)]
    configs = [
        yaml.safe_load((served.folder / f"runs/sweep/{n}/config.yaml").read_text()) for n in (0, 1)
    ]
    threads = len(os.sched_getaffinity(0)) // 2
    assert [config["launch"]["threads"] for config in configs] == [threads, threads]
    ended = [line.startswith("[1] status") for line in lines].index(True)
    assert lines.index("run 2 of 2: seed=1") < ended


@pytest.mark.slow
def test_failing_run_leaves_the_others_to_the_end(axonlaunch: Command) -> None:
    ran = axonlaunch(*SWEEP, "optimizer.lr=1e30,1e-3,2e-3", "train.steps=4", status=1)
    assert "optimizer.lr=1e+30 (failed)" in ran.stdout
    assert [axonlaunch.summary(f"sweep/{n}")["status"] for n in (1, 2)] == ["done", "done"]


LONG = ["train.steps=100000", "train.log_every=100"]


def has_steps(command: Command, run: int) -> bool:
    file = command.folder / f"runs/sweep/{run}/metrics.jsonl"
    return file.exists() and file.stat().st_size > 0


@pytest.mark.slow
def test_ctrl_c_stops_all_runs_and_the_command_resumes_them(axonlaunch: Command) -> None:
    overrides = ["seed=0,1,2", *LONG, "checkpoint.every=100000"]
    process = axonlaunch.start(*SWEEP, *overrides)
    wait_for(lambda: has_steps(axonlaunch, 0) and has_steps(axonlaunch, 1))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130
    assert [axonlaunch.summary(f"sweep/{n}")["status"] for n in (0, 1)] == ["interrupted"] * 2
    assert "seed=2 (not started)" in output
    assert "to resume  axonlaunch train -m --parallel 2 " in output
    axonlaunch.wait_until_gone()


@pytest.mark.slow
def test_runs_end_when_the_command_is_killed(axonlaunch: Command) -> None:
    process = axonlaunch.start(*SWEEP, "seed=0,1", *LONG)
    wait_for(lambda: has_steps(axonlaunch, 0) and has_steps(axonlaunch, 1))
    process.kill()
    process.communicate(timeout=30)
    axonlaunch.wait_until_gone(seconds=30)
