"""Fixtures of the communication tests: the shared checks, and gloo processes that run them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import collective_checks, served
from support.served import Server

MASTER = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test with an environment that describes no world."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *MASTER):
        monkeypatch.delenv(name, raising=False)


def run_script(
    script: Path, *, world_size: int, **environment: str
) -> list[tuple[int | None, str]]:
    """Run a script, given its folder, on each rank of a world; return status and output of each.

    The ranks are forked from the server of the tests.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in MASTER}
    ranks = [
        served.Forked(
            served.script,
            *(str(script), str(script.parent)),
            folder=script.parent,
            environment={
                **inherited,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                **environment,
            },
        )
        for rank in range(world_size)
    ]
    written = ["".join(rank.communicate(timeout=100)) for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, written, strict=True)]


@pytest.fixture
def run_ranks(tmp_path: Path, server: Server) -> Callable[..., list[tuple[int | None, str]]]:
    """Run Python text on each rank of a world of processes: return status and output of each."""

    def run(text: str, *, world_size: int = 2, **environment: str) -> list[tuple[int | None, str]]:
        script = tmp_path / "rank.py"
        script.write_text(text)
        return run_script(script, world_size=world_size, **environment)

    return run


@pytest.fixture(scope="session")
def gloo_outcomes(tmp_path_factory: pytest.TempPathFactory, server: Server) -> list[dict[str, Any]]:
    """Return the outcome of every check on each rank of one gloo world of processes."""
    folder = tmp_path_factory.mktemp("gloo")
    script = Path(shutil.copy(collective_checks.__file__, folder))
    size = collective_checks.WORLD_SIZE
    for status, text in run_script(script, world_size=size, MASTER_ADDR="127.0.0.1"):
        assert status == 0, text
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "check_name" in metafunc.fixturenames:
        metafunc.parametrize("check_name", list(collective_checks.CHECKS))
