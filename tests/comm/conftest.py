"""Fixtures of the communication tests: the shared checks, and gloo processes that run them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import axonlaunch.comm

HERE = Path(__file__).parent
MASTER = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test with an environment that describes no world."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *MASTER):
        monkeypatch.delenv(name, raising=False)


def start_ranks(
    script: Path, arguments: list[str], *, world_size: int, **environment: str
) -> list[subprocess.Popen[str]]:
    """Start a script on each rank of a world on this machine."""
    package = str(Path(axonlaunch.comm.__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    inherited = {k: v for k, v in os.environ.items() if k not in MASTER}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), *arguments],
            env={
                **inherited,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]


def finish(ranks: list[subprocess.Popen[str]], *, timeout_s: float = 100) -> list[str]:
    """Wait for all ranks and return what each wrote; none is left behind."""
    try:
        written = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return written


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[tuple[int, str]]]:
    """Run Python text on each rank of a world of processes: status and output of each."""

    def run(text: str, *, world_size: int = 2, **environment: str) -> list[tuple[int, str]]:
        script = tmp_path / "rank.py"
        script.write_text(text)
        ranks = start_ranks(script, [str(tmp_path)], world_size=world_size, **environment)
        written = finish(ranks)
        return [(rank.returncode, text) for rank, text in zip(ranks, written, strict=True)]

    return run


@pytest.fixture(scope="session")
def checks() -> ModuleType:
    """The checks that every backend must pass."""
    return load_checks()


@pytest.fixture(scope="session")
def gloo_outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """How every check went on each rank of one gloo world of processes."""
    folder = tmp_path_factory.mktemp("gloo")
    size = load_checks().WORLD_SIZE
    ranks = start_ranks(
        HERE / "collective_checks.py", [str(folder)], world_size=size, MASTER_ADDR="127.0.0.1"
    )
    written = finish(ranks)
    for rank, text in zip(ranks, written, strict=True):
        assert rank.returncode == 0, text
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def load_checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "axonlaunch_comm_checks", HERE / "collective_checks.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "check_name" in metafunc.fixturenames:
        metafunc.parametrize("check_name", list(load_checks().CHECKS))
