"""Prepares every test: one thread, no launcher's environment, and cleaning up afterwards."""

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
from support import served

from axonlaunch.config.schema import REGISTRIES

# Read when torch is imported, here and in processes that tests start: threads sleep while they wait
# for each other. By default they spin, and a rank with two threads took five times as long as a
# rank with one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Overrides PYTHONDONTWRITEBYTECODE: rewriting the assertions of these files in every worker takes
# as long as the rest of collection.
sys.dont_write_bytecode = False

PROCESSES = {"server", "served", "axonlaunch", "command", "run_ranks"}
"""Fixtures of tests that start commands or ranks."""
LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run only the slow tests")
    parser.addoption("--all", action="store_true", help="run the default and the slow tests")
    parser.addoption(
        "--quick", action="store_true", help="run one case of each test of one process"
    )
    parser.addoption("--part", metavar="K/N", default="1/1", help="run the K-th of N equal parts")


_SERVER = pytest.StashKey[served.Server]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep one server for all workers, because imports in each of them would take seconds."""
    # Processes of tests inherit ignored signals. nohup ignores SIGHUP, and shells without job
    # control ignore SIGINT for a command in the background (&).
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    has_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not has_workers:
        gc.disable()  # until collection ends, because imported modules stay
    if has_workers and not (config.getoption("--quick") or config.getoption("--collect-only")):
        stack = ExitStack()
        config.stash[_SERVER] = stack.enter_context(served.serve())
        config.add_cleanup(stack.close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["server"] = node.config.stash.get(_SERVER, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if PROCESSES & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
    # Long tests begin first, so that at the end no worker has to wait for one.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    if config.getoption("--all"):
        return
    slow = _slow(items)
    chosen = [item for item in items if (item in slow) == config.getoption("--slow")]
    if config.getoption("--quick"):
        single = [item for item in chosen if not item.get_closest_marker("processes")]
        chosen = [*{_test(item): item for item in reversed(single)}.values()]
    part, parts = map(int, config.getoption("--part").split("/"))
    chosen = chosen[part - 1 :: parts]
    selected = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = chosen


def _slow(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return items marked ``slow``, except the number of cases per test that the mark keeps.

    The kept cases are spread evenly: of 10 cases ``slow(keep=4)`` keeps the first, fourth, sixth
    and ninth.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("slow"):
            cases.setdefault((_test(item), mark.kwargs.get("keep", 0)), []).append(item)
    return {
        item
        for (_, keep), ones in cases.items()
        for i, item in enumerate(ones)
        if i * keep // len(ones) == (i - 1) * keep // len(ones)
    }


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def pytest_collection_finish() -> None:
    """Restrict garbage collection to objects of tests, and keep memory pages shared with forks."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish() -> Generator[None, None, None]:
    gc.unfreeze()  # hypothesis looks for references to one of its objects
    yield
    gc.freeze()  # pytest collects garbage once more


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[served.Server]:
    """Return the server that commands of tests are forked from."""
    shared = getattr(request.config, "workerinput", {}).get("server")
    if shared:
        with served.reached(shared):
            yield shared
    else:
        with served.serve() as server:
            yield server


@pytest.fixture(autouse=True, scope="session")
def _no_thread_for_a_gpu_that_is_not_there() -> None:
    """Let forks of this process compute gradients, as a command's forks can.

    After a fake tensor, a CUDA build counts one GPU even if there are zero. Autograd then starts a
    thread for that GPU, and a fork without this thread refuses to run backward.
    """
    import torch

    if not torch.cuda.device_count():
        torch._C._ensureCUDADeviceGuardSet = lambda: None


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo a test's registrations at its end."""
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep cached estimates in the tests' temporary folder, shared by all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    # Compiled kernels, which take minutes, stay in torch's default folder after the tests.
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    )


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
