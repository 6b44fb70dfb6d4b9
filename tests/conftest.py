"""What every test starts from: one thread, no launcher's environment, nothing left behind."""

from __future__ import annotations

import gc
import getpass
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import served

from axonlaunch.config.schema import REGISTRIES

# Read when torch is imported, here and in all that tests start: its threads sleep while they wait
# for each other. By default they spin, and a rank of two threads took five times what one of one
# did.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Whatever PYTHONDONTWRITEBYTECODE says: to write these files' assertions again takes as long as all
# else of collecting them, in every worker.
sys.dont_write_bytecode = False

PROCESSES = {"server", "served", "axonlaunch", "command", "run_ranks"}
"""Fixtures of tests that start commands or ranks."""
LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every test")
    parser.addoption("--deferred", action="store_true", help="run what is deferred, and that alone")
    parser.addoption("--quick", action="store_true", help="run a cover of what starts no process")


_SERVER = pytest.StashKey[served.Server]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep one server for all workers: what each would import by itself takes seconds."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, what tests start would ignore it
    has_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not has_workers:
        gc.disable()  # until all is collected: what is imported stays
    if has_workers and not (config.getoption("--quick") or config.getoption("--collect-only")):
        stack = ExitStack()
        config.stash[_SERVER] = stack.enter_context(served.serve())
        config.add_cleanup(stack.close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["server"] = node.config.stash.get(_SERVER, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What may take long begins first, so that no worker is left alone with it at the end.
    items.sort(key=_time_limit, reverse=True)
    if config.getoption("--all"):
        return
    chosen = [item for item in items if not item.get_closest_marker("slow")]
    deferred = _deferred(chosen)
    is_asked_for = config.getoption("--deferred")
    chosen = [item for item in chosen if (item in deferred) == is_asked_for]
    if config.getoption("--quick"):
        chosen = _cover(chosen)
    selected = set(chosen)
    if left := [item for item in items if item not in selected]:
        config.hook.pytest_deselected(items=left)
        items[:] = chosen


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make alone, and leave shared pages to forks alone."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish() -> Generator[None, None, None]:
    gc.unfreeze()  # hypothesis looks for what refers to an object of its own
    yield
    gc.freeze()  # pytest looks for garbage once more


def _deferred(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return those that are marked so, but for as many cases of a test as its mark keeps.

    They are spread evenly: of 10 cases ``deferred(keep=4)`` keeps the third, fifth, eighth, tenth.
    """
    cases: dict[str, list[pytest.Item]] = {}
    keep: dict[str, int] = {}
    for item in items:
        if mark := item.get_closest_marker("deferred"):
            test = item.nodeid.partition("[")[0]
            cases.setdefault(test, []).append(item)
            keep[test] = mark.kwargs.get("keep", 0)
    return {
        item
        for test, ones in cases.items()
        for i, item in enumerate(ones)
        if i * keep[test] // len(ones) == (i + 1) * keep[test] // len(ones)
    }


def _cover(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return one case of every test that computes and waits little and starts no command."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        takes_long = _time_limit(item) > 0 or item.get_closest_marker("costly")
        if not takes_long and not PROCESSES & set(getattr(item, "fixturenames", ())):
            first.setdefault(item.nodeid.partition("[")[0], item)
    return [*first.values()]


def _time_limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[served.Server]:
    """The server that commands of tests are forked from."""
    shared = getattr(request.config, "workerinput", {}).get("server")
    if shared:
        with served.reached(shared):
            yield shared
    else:
        with served.serve() as server:
            yield server


@pytest.fixture(autouse=True, scope="session")
def _no_thread_for_a_gpu_that_is_not_there() -> None:
    """Let forks of this process compute gradients, as those of a command do.

    A build for GPUs counts one where there is none once a tensor was fake: its autograd then starts
    a thread for it, and without that a fork refuses.
    """
    import torch

    if not torch.cuda.device_count():
        torch._C._ensureCUDADeviceGuardSet = lambda: None


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers ends with it."""
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Estimates are kept beside the tests' folders, not in the user's, by all workers for all."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    # Compiled kernels outlive the tests where torch keeps them by itself: they take minutes.
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    )


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
