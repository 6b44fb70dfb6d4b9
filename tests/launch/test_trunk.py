"""From ``main`` to the first backward: few calls, with configuration and rank passed as values."""

from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import TINY, Command, Served

import axonlaunch
from axonlaunch.config import RunConfig, load, with_values
from axonlaunch.launch.local import launcher
from axonlaunch.launch.local.messages import RankSpec
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.launch.output.summary import RunRecorder
from axonlaunch.system.authentication import Credentials
from axonlaunch.system.processes.forkserver import ForkServerError

PACKAGE = Path(axonlaunch.__file__).parent
MOST_CALLS = 14

RECORDING = f"""
import json, sys, traceback
from pathlib import Path

def record(name):
    # "launch/local/launcher.py: launch", from the outermost call of the package to the innermost.
    calls = [
        f"{{Path(frame.filename).relative_to({str(PACKAGE)!r})}}: {{frame.name}}"
        for frame in traceback.extract_stack()
        if Path(frame.filename).is_relative_to({str(PACKAGE)!r})
    ]
    file = Path(name)
    if not file.exists():
        imported = [module for module in ("torch", "typer") if module in sys.modules]
        file.write_text(json.dumps({{"calls": calls, "imported": imported}}))
"""
PARENT = """
from multiprocessing.process import BaseProcess
from recording import record
from axonlaunch.cli import main
from axonlaunch.system.processes import forkserver

run_server = forkserver._run_server
def recorded_server():
    record("server.json")
    run_server()
forkserver._run_server = recorded_server

start = BaseProcess.start
def recorded(process):
    record(f"started_{process._target._target.partition(':')[0].rpartition('.')[2]}.json")
    start(process)
BaseProcess.start = recorded
if __name__ == "__main__":
    main()
"""
MODEL = """
from torch import nn
from recording import record

class Recorded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: record("backward.json"))
        return self.head(hidden)
"""
OVERRIDES = ["train", "model=custom", "model.target=recorded:Recorded", "data=synthetic_tokens"]
OVERRIDES += ["launch.nproc=2", "train.steps=1", "train.eval_batches=0", "name=run"]
ELASTIC = ["launch.nproc=2", "launch.nnodes='2:4'", "train.global_batch_size=24"]
Recorded = dict[str, Any]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, Recorded, Recorded]:
    """Record three call stacks: the parent when it forked a rank, a rank in its first backward,
    and the parent when it started the fork server.
    """
    command = Command(tmp_path_factory.mktemp("trunk"))
    for name, text in (("recording", RECORDING), ("recorded", MODEL), ("parent", PARENT)):
        (command.folder / f"{name}.py").write_text(text)
    ran = subprocess.run(
        [sys.executable, "parent.py", *OVERRIDES],
        cwd=command.folder,
        env=command.environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    files = ("started_rank_process.json", "backward.json", "server.json")
    parent, rank, before_fork = (json.loads((command.folder / file).read_text()) for file in files)
    return parent, rank, before_fork


@pytest.mark.processes
def test_call_path_from_main_to_first_backward_equals_architecture_page(
    recorded: tuple[Recorded, Recorded, Recorded],
) -> None:
    parent, rank, _ = (part["calls"] for part in recorded)
    calls = parent + rank
    assert len(calls) <= MOST_CALLS, "\n".join(calls)
    text = (PACKAGE / "docs/architecture.md").read_text()
    assert calls == re.findall(r"^(\S+\.py: \w+)  ", text, flags=re.MULTILINE)


@pytest.mark.processes
def test_the_parent_of_ranks_has_no_torch(recorded: tuple[Recorded, Recorded, Recorded]) -> None:
    parent, rank, _ = (part["imported"] for part in recorded)
    assert parent == ["typer"]
    assert "torch" in rank


@pytest.mark.processes
def test_fork_server_imports_torch_before_command_line_parser(
    recorded: tuple[Recorded, Recorded, Recorded],
) -> None:
    assert recorded[2]["imported"] == []


def test_ranks_get_the_configuration_of_their_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The frozen file of an elastic run says 2:4; these are ranks of an attempt on 3 nodes."""
    forked: list[tuple[RunConfig, RankSpec]] = []

    def fork(
        context: object, target: str, pickled: bytes, rank_spec: RankSpec, pipe: object
    ) -> None:
        forked.append((pickle.loads(pickled), rank_spec))
        raise ForkServerError("one is enough")

    monkeypatch.setattr(launcher.forkserver, "fork", fork)
    of_attempt = {"run_dir": str(tmp_path), "launch.nnodes": 3, "launch.threads": 1}
    config = with_values(load(ELASTIC), of_attempt)
    console = RunConsole(stream=io.StringIO())
    outcome = launcher.run_ranks(
        config,
        multiprocessing.get_context("forkserver"),
        launcher.Rendezvous(
            address="10.0.0.1", port=29500, credentials=Credentials.random(sender="a"), node_rank=1
        ),
        RunRecorder(0.0, console),
        console,
        restarted=True,
    )
    assert outcome.crash is not None
    [(resolved, rank_spec)] = forked
    assert resolved == config
    assert (rank_spec.rank, rank_spec.local_rank, rank_spec.world_size, rank_spec.restarted) == (
        2,
        0,
        6,
        True,
    )


def test_rank_does_not_compose_or_validate_configuration(served: Command) -> None:
    """The plugin is also imported by the command, which does all of this, and by its children."""
    (served.folder / "refusing.py").write_text(
        "import multiprocessing\n"
        "from axonlaunch import config\n"
        "def refuse(*args, **kwargs):\n"
        "    raise AssertionError('a rank read its configuration again')\n"
        "if multiprocessing.parent_process().name != 'MainProcess':\n"
        "    config.compose = config.typed = config.validate = refuse\n"
        "else:\n"
        "    from axonlaunch.launch.run_folder import open_folder\n"
        "    open_folder.to_yaml = lambda config: 'nothing: here'\n"
    )
    served.train("strategy=ddp", "launch.nproc=2", "plugins=[refusing]", "name=run")
    assert (served.folder / "runs/run/config.yaml").read_text() == "nothing: here"


def test_prints_of_user_config_import_are_in_log(
    served: Served,
) -> None:
    (served.folder / "sized.py").write_text(
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from axonlaunch import register_model\n"
        "print('sized was imported')\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class SizedConfig:\n"
        "    name: str = 'sized'\n"
        "    width: int = 8\n"
        "    weights: str | None = None\n"
        "@register_model('sized', config=SizedConfig, inputs='tokens')\n"
        "def build(config):\n"
        "    return nn.Sequential(nn.Embedding(256, config.width), nn.Linear(config.width, 256))\n"
    )
    overrides = [word for word in TINY if not word.startswith("model.")]
    overrides += ["plugins=[sized]", "model=sized", "model.width=4", "launch.nproc=2", "name=run"]
    ran = served("train", *overrides, "--json")
    assert json.loads(ran.stdout)["status"] == "done"
    for rank in range(2):
        log = served.folder / "runs/run/logs" / f"rank_{rank}.log"
        assert "sized was imported" in log.read_text()
