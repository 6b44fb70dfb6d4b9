"""Leases of folders in buckets."""

from __future__ import annotations

import json
import uuid
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from support.command import wait_for

from axonlaunch.checkpoint.format.storage import filesystem, storage_path
from axonlaunch.checkpoint.loading import bucket_lease
from axonlaunch.checkpoint.loading.bucket_lease import LEASE, hold_lease
from axonlaunch.checkpoint.loading.run_lock import lock_checkpoints
from axonlaunch.config import ConfigError, load


@pytest.fixture
def folder() -> Path:
    """Return a new folder in a bucket in memory."""
    pytest.importorskip("upath")
    return storage_path(f"memory://bucket-{uuid.uuid4().hex}/run")


def refused(folder: Path, owner: str, *, creates: bool = True) -> str:
    """Return the error of a run that keeps its checkpoints in a folder; empty if it may."""
    config = load([f"checkpoint.path={folder}", "run_dir=/runs/other"])
    try:
        with lock_checkpoints(config, owner=owner, creates=creates):
            return ""
    except ConfigError as error:
        (problem,) = error.problems
        assert problem.is_transient
        return str(problem)


def age(folder: Path, seconds: float) -> None:
    """Make the last renewal of a lease older."""
    file = filesystem(folder).store[cast("Any", folder / LEASE).path]
    file.modified -= timedelta(seconds=seconds)


def of_killed_run(folder: Path, owner: str) -> None:
    """Leave a lease that is not renewed."""
    bucket_lease._Lease(folder, owner, "/runs/first").take()


@pytest.mark.parametrize("creates", [True, False], ids=["start", "check"])
def test_second_run_in_a_leased_bucket_is_refused_until_the_first_one_ends(
    folder: Path, creates: bool
) -> None:
    with hold_lease(folder, owner="first", run_dir="/runs/first"):
        content = json.loads((folder / LEASE).read_text())
        assert refused(folder, "second", creates=creates) == (
            f"checkpoint.path={folder}: the run of /runs/first on {content['host']} keeps its "
            "checkpoints there; wait for it, or use another. If it was killed, wait 5 minutes, or "
            f"delete {folder}/lease.json"
        )
    assert refused(folder, "second", creates=creates) == ""
    assert [*folder.iterdir()] == []


def test_restarted_run_takes_over_its_lease_at_once(folder: Path) -> None:
    of_killed_run(folder, "first")
    assert "keeps its checkpoints there" in refused(folder, "second")
    assert refused(folder, "first") == ""


def test_lease_of_a_killed_run_ends_without_renewals(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_lease, "_SETTLED_S", 0.0)
    of_killed_run(folder, "first")
    age(folder, 290)
    assert "keeps its checkpoints there" in refused(folder, "second")
    age(folder, 20)
    assert refused(folder, "second") == ""


def test_lease_of_other_content_is_replaced_after_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_lease, "_SETTLED_S", 0.0)
    (folder / LEASE).write_text("[]")
    assert refused(folder, "second")
    age(folder, 301)
    assert refused(folder, "second") == ""


def test_storage_that_can_not_create_on_a_condition_has_leases_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_lease, "_SETTLED_S", 0.0)
    storage = filesystem(folder)
    write = storage.pipe_file

    def pipe_file(path: str, content: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise NotImplementedError("conditional writes")
        write(path, content)

    monkeypatch.setattr(storage, "pipe_file", pipe_file)
    with hold_lease(folder, owner="first", run_dir="/runs/first"):
        assert refused(folder, "second")
    assert refused(folder, "second") == ""


def test_of_two_runs_that_replace_an_ended_lease_one_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_killed_run(folder, "first")
    age(folder, 310)
    third = ExitStack()

    def sleep(seconds: float) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(bucket_lease, "_SETTLED_S", 0.0)
        age(folder, 310)
        third.enter_context(hold_lease(folder, owner="third", run_dir="/runs/third"))

    monkeypatch.setattr(bucket_lease.time, "sleep", sleep)
    with third:
        assert "the run of /runs/third" in refused(folder, "second")
        assert json.loads((folder / LEASE).read_text())["owner"] == "third"


def test_lease_is_renewed_and_its_loss_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bucket_lease, "_RENEWED_S", 0.02)
    storage, path = filesystem(folder), cast("Any", folder / LEASE).path
    with hold_lease(folder, owner="first", run_dir="/runs/first"):
        begun = storage.modified(path)
        wait_for(lambda: storage.modified(path) > begun, seconds=30)
        of_killed_run(folder, "first")
        wait_for(lambda: "has taken over" in capsys.readouterr().err, seconds=30)
    assert (folder / LEASE).exists()  # it is the other's


@pytest.mark.parametrize("content", ["[]", "{", '{"run_dir": "\\u001b[2J", "host": "a"}'])
def test_text_of_a_lease_that_no_run_has_written_is_not_printed(folder: Path, content: str) -> None:
    (folder / LEASE).write_text(content)
    assert ": another run keeps its checkpoints there" in refused(folder, "second")
