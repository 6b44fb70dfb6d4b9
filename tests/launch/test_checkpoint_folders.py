"""Two runs never share a folder of checkpoints."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from axonlaunch.checkpoint.format import storage
from axonlaunch.config import ConfigError, RunConfig, load
from axonlaunch.launch import runs
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.request import Request
from axonlaunch.launch.run_folder.open_folder import check_run_dir, open_run_dir

Begin = Callable[[RunConfig], AbstractContextManager[object]]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*overrides: str) -> RunConfig:
    return load(["launch.nproc=1", *overrides])


def opened(config: RunConfig) -> AbstractContextManager[RunConfig]:
    return open_run_dir(config, announce=lambda line: None)


def checked(config: RunConfig) -> AbstractContextManager[None]:
    return nullcontext(check_run_dir(config))


def refusal(begin: Begin, config: RunConfig) -> str:
    with pytest.raises(ConfigError) as raised, begin(config):
        pass
    [issue] = raised.value.problems
    return str(issue)


@pytest.mark.parametrize("begin", [opened, checked])
@pytest.mark.parametrize("path", ["shared", "shared/", "link", "runs/a/../../shared"])
def test_checkpoint_path_of_active_run_is_refused(path: str, begin: Begin) -> None:
    Path("link").symlink_to("shared")
    second = run("name=b", f"checkpoint.path={path}")
    with opened(run("name=a", "checkpoint.path=shared")) as first:
        storage.describe(first)
        assert refusal(begin, second) == (
            f"checkpoint.path={path}: the run of {Path('runs/a').absolute()} keeps its checkpoints "
            "there; wait for it, or use another"
        )
    with begin(second):
        pass


def test_run_folder_of_other_run_is_refused_as_checkpoint_path() -> None:
    with opened(run("name=a")):
        refused = refusal(opened, run("name=b", "checkpoint.path=runs/a"))
    assert refused.startswith("checkpoint.path=runs/a: the run of ")


@pytest.mark.parametrize("begin", [opened, checked])
def test_run_folder_with_a_file_as_parent_is_refused_with_advice(begin: Begin) -> None:
    Path("file").touch()
    refused = refusal(begin, run("run_dir=file/a"))
    assert refused.startswith("run_dir: can't make the run folder: Not a directory: ")
    assert refused.endswith("; a file is in the way; use another folder")


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
def test_run_folder_that_can_not_be_written_is_refused_with_advice(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(Path, "mkdir", fail)
    assert refusal(opened, run("run_dir=/shared/a")) == (
        f"run_dir: can't make the run folder: {os.strerror(error)}: /shared/a; make it writable, "
        "or use another folder"
    )


def test_unreachable_bucket_is_left_to_later_checks() -> None:
    check_run_dir(run("name=a", "checkpoint.path=gs://nowhere/run"))


SHARED = ["checkpoint.path=shared", "checkpoint.path=s3://bucket/shared/", "run_dir=shared"]


def sweep(*overrides: str) -> list[RunConfig]:
    request = Request(overrides=["name=a,b", *overrides], multirun=True)
    context = multiprocessing.get_context("forkserver")
    options = LaunchOptions(fork_server=context, started=0.0)
    return [run.config for run in runs.load_runs(request, ClusterEnvironment(), options)]


@pytest.mark.parametrize("shared", SHARED)
def test_runs_of_a_sweep_that_would_share_a_folder_are_refused(shared: str) -> None:
    key, _, value = shared.partition("=")
    with pytest.raises(ConfigError) as raised:
        sweep(shared)
    [issue] = raised.value.problems
    advice = f"'{key}={value.rstrip('/')}/${{name}}'"
    assert str(issue) == (
        f"{shared}: runs of the sweep would share it; give each its own, as in {advice}"
    )


def test_shared_checkpoint_path_refusal_suggests_folder_by_name() -> None:
    paths = [config.checkpoint.path for config in sweep("checkpoint.path=shared/${name}")]
    assert paths == ["shared/a", "shared/b"]
