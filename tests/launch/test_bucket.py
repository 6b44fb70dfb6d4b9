"""Checkpoints in a bucket: the run resumes from them on any node."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator

import pytest
from support.command import Command, wait_for
from support.launchers import logged

from axonlaunch.checkpoint.format.storage import storage_path
from axonlaunch.checkpoint.loading import bucket_lease
from axonlaunch.checkpoint.loading.bucket_lease import LeaseHeldError

ACCESS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Run an S3 server with a bucket on this node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def bucket(endpoint: str, served: Command, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a bucket; this process's environment and a plugin of the run have its credentials."""
    access = {**ACCESS, "AWS_ENDPOINT_URL": endpoint}
    for name, value in access.items():
        monkeypatch.setenv(name, value)
    # Ranks have the environment of the tests' server.
    (served.folder / "access.py").write_text(f"import os\nos.environ.update({access!r})\n")
    name = f"bucket-{uuid.uuid4().hex}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()
    return f"s3://{name}/run"


@pytest.mark.slow
def test_a_run_continues_from_a_bucket_in_another_folder(
    served: Command, faulty: list[str], bucket: str
) -> None:
    overrides = ["train", *faulty, "plugins=[access,faulty_plugin]", "strategy=fsdp"]
    to_bucket = [f"checkpoint.path={bucket}", "checkpoint.every=2"]
    served(*overrides, "name=whole")
    fault = "model.arguments={fault:SIGKILL,rank:1,step:6}"
    ran = served(*overrides, *to_bucket, "name=first", fault, status=1)
    assert f"saved {bucket}/checkpoints/step_4" in ran.stdout
    assert not (served.folder / "runs/first/checkpoints").exists()
    ran = served(*overrides, *to_bucket, "name=second")
    assert f"{bucket}/checkpoints/step_4" in ran.stdout
    assert served.losses("second") == served.losses("whole")[4:]
    for path in (bucket, "runs/second"):
        reported = json.loads(served("checkpoint", "ls", path, "--json").stdout)
        assert [entry["step"] for entry in reported["checkpoints"]] == [4, 6]
    assert "intact" in served("checkpoint", "check", bucket, "--trust").stdout
    served(*overrides, "name=third", f"checkpoint.resume={bucket}/checkpoints/step_4")
    assert served.losses("third") == served.losses("second")
    ran = served(*overrides, *to_bucket, "name=fourth", "checkpoint.resume=never", status=2)
    assert ran.stderr.startswith(
        f"error: checkpoint.resume=never: {bucket}/checkpoints/step_6 exists"
    )


@pytest.mark.slow
def test_missing_bucket_is_reported_before_start(
    served: Command, faulty: list[str], bucket: str
) -> None:
    overrides = ["train", *faulty, "plugins=[access,faulty_plugin]", "checkpoint.every=2"]
    other = bucket.replace("/run", "-2/run")
    ran = served(*overrides, f"checkpoint.path={other}", status=2)
    assert ran.stderr.startswith(f"error: checkpoint.path={other}: can't be ")
    ran = served(*overrides, "checkpoint.path=gs://nowhere/run", status=2)
    [error] = ran.stderr.splitlines()
    assert error.startswith("error: checkpoint.path=gs://nowhere/run: Please install gcsfs")
    assert "pip install 'axonlaunch[remote]'" in error
    assert not (served.folder / "runs").exists()


def test_lease_in_s3_is_created_once_and_compared_by_the_clock_of_the_server(bucket: str) -> None:
    folder = storage_path(bucket)
    first, second = (bucket_lease._Lease(folder, owner, "/runs/x") for owner in ("first", "second"))
    first.take()
    with pytest.raises(FileExistsError):  # a run that has seen no lease a moment before
        second._write(mode="create")
    with pytest.raises(LeaseHeldError, match="the run of /runs/x"):
        second.take()
    first.release()
    second.take()
    assert [path.name for path in folder.iterdir()] == ["lease.json"]


@pytest.mark.slow
def test_killed_run_in_a_bucket_starts_again_at_once_and_another_run_is_refused(
    served: Command, faulty: list[str], bucket: str
) -> None:
    overrides = ["train", *faulty, "plugins=[access,faulty_plugin]", "strategy=fsdp"]
    overrides += [f"checkpoint.path={bucket}", "checkpoint.every=20"]
    many = [*overrides, "train.steps=5000"]
    first = served.start(*many, "name=first", "model.arguments={pause:0.2}")
    logged(served.folder / "runs/first/metrics.jsonl", 3)
    refused = f"checkpoint.path={bucket}: the run of {served.folder}/runs/first on "
    assert refused in served(*many, "name=second", status=75).stderr
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert refused in served(*many, "name=second", status=75).stderr
    steps = f"train.steps={len(served.losses('first')) + 2}"
    served(*overrides, "name=first", steps)
    assert refused not in served(*overrides, "name=second", steps).stderr
