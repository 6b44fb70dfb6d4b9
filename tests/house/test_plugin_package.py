"""A package outside this repository adds one thing of each kind, and every command supports
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config

from axonlaunch.comm import World
from axonlaunch.data.datasets.dataset import Batch
from axonlaunch.engines.build import build_engine

# Compiled blocks of earlier tests in this process import distutils.
pytestmark = pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")
PACKAGE = Path(__file__).parents[1] / "plugin_package"
CHOSEN = ["model=tiny", "data=squares", "optimizer=signum", "scheduler=inverse_root"]
CHOSEN += ["metrics=[top_two]", "callbacks=[noting]", "loggers=[table]", "launch=noted"]
OVERRIDES = [*CHOSEN, "launch.nproc=2", "train.global_batch_size=8", "train.log_every=1"]
OVERRIDES += ["train.steps=4", "train.eval_batches=1"]
PARAMETERS = 64 * 16 + 2 * (16 * 16 + 16) + 16 * 64 + 64


DRIVER = """
import json, sys
from pathlib import Path

from support import served
from support.command import Served

if __name__ == "__main__":
    with served.serve(others=()) as server:
        for line in sys.stdin:
            process = Served(Path.cwd(), server).start(*json.loads(line))
            output, errors = process.communicate(timeout=90)
            print(json.dumps([process.returncode, output, errors]), flush=True)
"""


class Environment:
    """A fresh environment with the installed package, and a working folder.

    One process in it forks all commands, so that torch is imported once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        venv.create(folder / "venv", with_pip=find_spec("pip") is None)
        # Packages installed here, including this one, are available there, too: nothing is
        # downloaded.
        [site] = (folder / "venv/lib").glob("python*/site-packages")
        outer = [path for path in sys.path if path.endswith("site-packages")]
        (site / "outer.pth").write_text("\n".join([*outer, str(PACKAGE.parents[1])]))
        python = folder / "venv/bin/python"
        install = ["-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"]
        subprocess.run([python, *install, "--quiet", PACKAGE], check=True, timeout=100)
        (folder / "driver.py").write_text(DRIVER)
        self._driver = subprocess.Popen(
            [python, folder / "driver.py"],
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        )

    def __call__(self, *overrides: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the command."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(overrides) + "\n")
        self._driver.stdin.flush()
        returned, output, errors = json.loads(self._driver.stdout.readline())
        assert returned == status, f"{output}\n{errors}"
        return subprocess.CompletedProcess(overrides, returned, output, errors)

    def close(self) -> None:
        """End the driver and its server."""
        self._driver.communicate(timeout=30)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """Return the command in a fresh environment with the package."""
    pytest.importorskip("hatchling")
    environment = Environment(tmp_path_factory.mktemp("environment"))
    yield environment
    environment.close()


@pytest.mark.slow
def test_plugin_package_works_with_every_command(command: Environment) -> None:
    listed = json.loads(command("ls", "--json").stdout)
    for group, name in (
        ("models", "tiny"),
        ("data", "squares"),
        ("losses", "smoothed"),
        ("optimizers", "signum"),
        ("schedulers", "inverse_root"),
        ("metrics", "top_two"),
        ("callbacks", "noting"),
        ("loggers", "table"),
        ("loggers", "broken"),
        ("launchers", "noted"),
        ("data_parallel", "local_sgd"),
        ("dispatches", "counted"),
    ):
        assert listed[group][name] == "from axonlaunch-example"

    described = command("config", *OVERRIDES, "--describe").stdout
    assert "steps between" in described
    assert "file that the names of runs are appended to" in " ".join(described.split())
    loss = ["train.loss=smoothed", "train.loss_options.bye=0.5"]
    misspelled = ["optimizer.momentun=0.5", "data.sequence_lenght=4", *loss]
    wrong = command("train", *OVERRIDES, *misspelled, status=2)
    assert "did you mean train.loss_options.by?" in wrong.stderr
    assert "did you mean optimizer.momentum?" in wrong.stderr
    assert "did you mean data.sequence_length?" in wrong.stderr
    broken = command("train", *OVERRIDES, "loggers=[table,broken]", status=2)
    assert broken.stderr.startswith(
        "error: loggers[1].name=broken: it is offered by axonlaunch-example (entry point broken = "
        "axonlaunch_example.broken); importing it failed with RuntimeError: no license ("
    )
    assert broken.stderr.endswith("axonlaunch_example/broken.py:3)\n")

    estimate = json.loads(command("estimate", *OVERRIDES, "--json").stdout)
    assert estimate["parameters"] == PARAMETERS
    assert estimate["ranks"][0]["breakdown"]["optimizer"] == 4 * PARAMETERS  # one momentum
    plan = json.loads(
        command(
            *("plan", *OVERRIDES, "hardware=h100_80gb", "--devices", "2", "--json"),
            *("strategy.data_parallel=fsdp", "strategy.pipeline.degree=1"),
            *("train.micro_batch_size=1", "train.activation_checkpointing=none"),
        ).stdout
    )
    assert plan["candidates"]
    verified = json.loads(
        command(
            "verify", *OVERRIDES, "train.loss=smoothed", "strategy=fsdp", "--steps=2", "--json"
        ).stdout
    )
    assert verified["passed"]

    overrides = [*OVERRIDES, "strategy=fsdp", "name=run", "checkpoint.every=4"]
    command("train", *overrides)
    command("train", *overrides, "train.steps=6")
    run = command.folder / "runs/run"
    logged = (run / "table.txt").read_text().split("\n")
    assert [line.split()[0] for line in logged if " " in line] == ["1", "2", "3", "4", "5", "6"]
    assert logged.count("closed") == 2
    assert (command.folder / "launched.txt").read_text() == "run\nrun\n"
    noted = (command.folder / "runs/run/noted.txt").read_text().splitlines()
    assert [line.split()[0] for line in noted] == ["4", "6"]
    assert "top_two" in noted[0]


@pytest.mark.slow
def test_a_variant_of_data_parallelism_trains_and_is_estimated(command: Environment) -> None:
    overrides = [*OVERRIDES, "strategy.data_parallel=local_sgd", "strategy.options.period=2"]
    assert "steps between two averages" in command("config", *overrides, "--describe").stdout
    wrong = command("estimate", *overrides, "strategy.options.perod=2", status=2)
    assert "did you mean strategy.options.period?" in wrong.stderr
    estimate = json.loads(command("estimate", *overrides, "--json").stdout)
    held = estimate["ranks"][0]["breakdown"]
    assert held["parameters"] == held["optimizer"] == 4 * PARAMETERS  # in a replica
    command("train", *overrides, "name=local", "checkpoint.every=4")


# Local SGD itself


@pytest.fixture
def local_sgd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Register the package's variant."""
    monkeypatch.syspath_prepend(PACKAGE / "src")
    import axonlaunch_example.local_sgd as module

    yield module
    for name in [name for name in sys.modules if name.startswith("axonlaunch_example")]:
        del sys.modules[name]


def test_local_sgd_averages_replicas(local_sgd: Any) -> None:
    """The reference is plain torch in fp64: each rank does 2 steps on its samples, then all
    average.
    """
    overrides = ["model=mlp", "model.input_size=6", "model.hidden_size=4", "model.num_classes=3"]
    overrides += ["data=synthetic_images", "data.image_size=1", "data.num_channels=6"]
    overrides += ["data.num_classes=3", "optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.1"]
    overrides += ["train.global_batch_size=8", "train.grad_clip=null", "scheduler=constant"]
    overrides += ["scheduler.warmup_steps=0", "launch.nproc=2", "train.steps=4"]
    overrides += ["strategy.data_parallel=local_sgd", "strategy.options.period=2"]
    config = run_config(overrides)
    torch.manual_seed(0)
    batches = [
        [Batch(torch.randn(4, 6, 1, 1), torch.randint(3, (4,))) for _ in range(4)] for _ in range(2)
    ]

    def on_rank(world: World) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.nn.Module]:
        engine = build_engine(config, world)
        [model] = engine.modules
        first = [p.detach().clone() for p in model.parameters()]
        for batch in batches[world.rank]:
            engine.train_step(batch)
        return first, [p.detach().clone() for p in model.parameters()], model

    (first, mine, model), (_, other, _) = World.mock(2).run(on_rank)
    model = model.double()
    weights = [[p.double() for p in first] for _ in range(2)]
    for step in range(4):
        for rank in range(2):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), weights[rank], strict=True):
                    parameter.copy_(value)
            batch = batches[rank][step]
            model.zero_grad()
            torch.nn.functional.cross_entropy(
                model(batch.inputs.double()), batch.targets
            ).backward()
            weights[rank] = [(p - 0.1 * p.grad).detach().clone() for p in model.parameters()]
        if step % 2:
            weights = [[(a + b) / 2 for a, b in zip(*weights, strict=True)]] * 2
    for ours, same, plain in zip(mine, other, weights[0], strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-6)
