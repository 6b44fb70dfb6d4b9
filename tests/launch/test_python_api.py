"""The commands as Python functions: ``ax.load``, ``ax.train``, ``ax.plan``, ``ax.build_engine``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support import served as programs
from support.command import FAULTS, TINY
from support.served import Server
from torch import nn
from torch.distributed.tensor import DTensor

import axonlaunch as ax
from axonlaunch.checkpoint import CorruptCheckpointError
from axonlaunch.config import with_values
from axonlaunch.launch.commands import python_api
from axonlaunch.system.processes.isolated import IsolatedCallError

MOCK = [*TINY, "launch.nproc=2", "launch.backend=mock"]


def run_script(text: str, folder: Path, server: Server) -> str:
    """Run a script at its top level, and return what it printed."""
    (folder / "script.py").write_text(f"import axonlaunch as ax\nTINY = {MOCK}\n{text}")
    ran = programs.Forked(
        programs.served_script, server, "script.py", folder=folder, environment=dict(os.environ)
    )
    output, errors = ran.communicate(timeout=90)
    assert ran.returncode == 0, errors
    return output


TRAINS = """
import json
from pathlib import Path
summary = ax.train(ax.load([*TINY, "name=done", "checkpoint.every=3"]))
assert summary == json.loads(Path("runs/done/summary.json").read_text())
assert (summary["status"], summary["steps"]) == ("done", 6)
print("trained once")
files = ax.export("runs/done", "exported", dtype="bf16")
print([str(file) for file in files])
try:
    ax.export("runs/done", "exported", dtype="fp8")
except ax.ConfigError as error:
    print(error)
"""


def test_script_without_main_guard_trains_once_and_exports(tmp_path: Path, server: Server) -> None:
    printed = run_script(TRAINS, tmp_path, server)
    assert printed.count("trained once") == 1
    assert "['exported/model.safetensors', 'exported/config.json'" in printed
    assert "dtype=fp8: is not supported; use fp32, bf16 or fp16" in printed
    weights = load_file(tmp_path / "exported/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


FAILS = """
faulty = ["plugins=[faults]", "model=faulty", "model.arguments.fault=exception"]
general = [word for word in TINY if not word.startswith("model.")]
try:
    ax.train(ax.load([*general, *faulty, "name=failed", "train.prove=never"]))
except ax.RunFailedError as error:
    print(error)
    print(error.summary["status"])
"""


def test_train_raises_run_failed_error_with_rank_and_reason(tmp_path: Path, server: Server) -> None:
    (tmp_path / "faults.py").write_text(FAULTS.replace('os.environ.get("RANK")', "str(self.rank)"))
    output = run_script(FAILS, tmp_path, server)
    assert "failed: ValueError: the fault of a test; see " in output
    assert output.endswith("\nfailed\n")


STOPS = """
import os, signal, threading, time
from pathlib import Path

def interrupt():
    while not Path("runs/stopped/metrics.jsonl").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
handler = signal.getsignal(signal.SIGINT)
try:
    ax.train(ax.load([*TINY, "name=stopped", "train.steps=100000"]))
except KeyboardInterrupt:
    print("interrupted")
assert signal.getsignal(signal.SIGINT) is handler

trained = []
def train():
    trained.append(ax.train(ax.load([*TINY, "name=thread"])))
thread = threading.Thread(target=train)
thread.start()
thread.join()
assert trained[0]["status"] == "done"
"""


def test_interrupt_stops_train_in_main_thread_and_train_works_in_another_thread(
    tmp_path: Path, server: Server
) -> None:
    output = run_script(STOPS, tmp_path, server)
    assert "interrupted after step" in output
    assert "\ninterrupted\n" in output


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["strategy=hybrid", "model=llama_debug", "train.epochs=2"],
        ["hardware=h100_80gb", "loggers=[tensorboard]", "optimizer=muon"],
    ],
)
def test_checking_a_loaded_config_again_returns_equal_config(overrides: list[str]) -> None:
    config = ax.load(overrides)
    assert python_api._check_again(config) == config


def test_replaced_invalid_value_is_config_error() -> None:
    config = with_values(ax.load(MOCK), {"train.steps": -1})
    for function in (ax.train, ax.estimate, ax.verify):
        with pytest.raises(ax.ConfigError, match=r"train\.steps=-1: "):
            function(config)


def test_sweep_is_config_error_that_says_to_load_each_run() -> None:
    with pytest.raises(ax.ConfigError, match=r"train\.steps=1,2: several values; .* ax\.load for"):
        ax.load([*MOCK, "train.steps=1,2"])


@pytest.mark.parametrize(
    "error", [CorruptCheckpointError("it is gone"), IsolatedCallError("it is gone")]
)
@pytest.mark.parametrize("function", [ax.train, ax.estimate, ax.verify, ax.plan])
def test_corrupt_file_is_config_error(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., object], error: Exception
) -> None:
    monkeypatch.setattr(python_api, "_check_again", mock.Mock(side_effect=error))
    with pytest.raises(ax.ConfigError, match="it is gone") as raised:
        function(None, **({"devices": 2} if function is ax.plan else {}))
    assert raised.value.__cause__ is error


def test_text_as_overrides_and_list_as_config_are_type_errors() -> None:
    with pytest.raises(TypeError, match=r"pass a list of settings, \['strategy=fsdp'\]"):
        ax.load("strategy=fsdp")
    with pytest.raises(TypeError, match="overrides has 5; write settings as text"):
        ax.load(["strategy=fsdp", 5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"pass a list of folders, \['my_configs'\]"):
        ax.load([], config_dirs="my_configs")
    with pytest.raises(TypeError, match="config is of type list; pass the result of ax"):
        ax.train(["strategy=fsdp"])  # type: ignore[arg-type]


def test_options_that_no_search_has_are_config_errors() -> None:
    config = ax.load(MOCK)
    with pytest.raises(ax.ConfigError, match=r"fixed=\[train.steps\]: is not a setting"):
        ax.plan(config, devices=2, fixed=["train.steps"])
    with pytest.raises(ax.ConfigError, match="devices=0: must be 1 or more"):
        ax.plan(config, devices=0)
    with pytest.raises(ax.ConfigError, match="steps=0: must be 1 or more"):
        ax.verify(config, steps=0)
    with pytest.raises(ax.ConfigError, match="analytic=True contradicts exact=True"):
        ax.estimate(config, exact=True, analytic=True)
    with pytest.raises(ax.ConfigError, match="prompt: is empty; give at least one character"):
        ax.sample("runs/none", "")


def test_train_in_a_rank_of_torchrun_is_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in {**world, **address}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ax.ConfigError, match="torchrun started this process as one rank"):
        ax.train(ax.load(MOCK))


def test_build_engine_refuses_another_number_of_ranks_than_the_world() -> None:
    config = ax.load([*TINY, "launch.nproc=4"])
    with pytest.raises(ax.RankFailedError) as raised:
        ax.World.mock(2).run(lambda world: ax.build_engine(config, world))
    cause = raised.value.__cause__
    assert isinstance(cause, ax.ConfigError)
    assert str(cause) == "launch.nproc=4: the world has 2 ranks on 1 node(s); use auto"


def norms(world: ax.World, *overrides: str) -> dict[str, float]:
    """Build an engine, and return the norm of each of this rank's parameters as a full tensor."""
    state = ax.build_engine(ax.load([*TINY, *overrides]), world).model_state_dict()
    return {
        name: float((value.full_tensor() if isinstance(value, DTensor) else value).norm())
        for name, value in state.items()
    }


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_build_engine_gives_every_layout_the_same_initial_weights(strategy: str) -> None:
    [alone] = ax.World.mock(1).run(norms)
    divided: dict[str, float] = {}
    for part in ax.World.mock(2).run(lambda world: norms(world, f"strategy={strategy}")):
        divided |= part
    assert divided == pytest.approx(alone)


def test_parallelize_without_a_world_is_value_error() -> None:
    with pytest.raises(ValueError, match="there is no world"):
        ax.parallelize(nn.Sequential(nn.Linear(4, 4)), {"0": "column"})


def test_run_failed_error_without_summary_points_to_the_printed_lines() -> None:
    assert str(ax.RunFailedError({})) == "the run failed; the lines printed before tell why"
