"""A run's token: where it comes from, who can read it, and the warning of a run without one."""

from __future__ import annotations

import base64
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.command import TINY, Command, Served
from support.launchers import SUPPORT, By, NodeNamespaces, ended, logged, torchrun
from support.served import Forked, placed, script

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.options.launch import LaunchConfig
from axonlaunch.launch.external.slurm import launcher as slurm_launcher
from axonlaunch.launch.multinode import token

SECRET = "a secret of sixteen bytes or more"
WARNING = (
    "warning: without launch.token_file, anyone who can connect to 10.77.0.1:29500 can run code"
)


def secret_file(path: Path, content: str = SECRET, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (SECRET, 0o640, r"others can read or write it \(mode 0640\); use chmod 600"),
        (SECRET, 0o604, r"others can read or write it \(mode 0604\); use chmod 600"),
        (SECRET, 0o620, r"others can read or write it \(mode 0620\); use chmod 600"),
        ("short", 0o600, "it is 5 bytes, but a token needs 16 to 4096; create it with"),
        (" \n", 0o600, "it is empty, but a token needs 16"),
        ("x" * 5000, 0o600, "it is 4097 bytes, but a token needs 16 to 4096"),
    ],
)
def test_invalid_token_file_is_refused(
    tmp_path: Path, content: str, mode: int, message: str
) -> None:
    path = secret_file(tmp_path / "token", content, mode)
    with pytest.raises(ConfigError, match=f"launch.token_file=.*: {message}"):
        token.read_token(LaunchConfig(token_file=str(path)))


def test_a_fifo_a_folder_and_a_missing_file_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, message in (
        ("fifo", "is not a file"),
        (".", "can't read it"),
        ("no", "can't read it"),
    ):
        with pytest.raises(ConfigError, match=message):
            token.read_token(LaunchConfig(token_file=str(tmp_path / name)))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "token")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345; make a file of your own"):
        token.read_token(LaunchConfig(token_file=str(path)))


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of root")
@pytest.mark.parametrize(("mode", "is_read"), [(0o444, True), (0o440, True), (0o464, False)])
def test_secret_of_a_pod_may_be_readable_by_everyone_but_not_writable(
    mode: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes mounts Secrets as files of root, and adds the group of ``fsGroup``."""
    path = secret_file(tmp_path / "token", mode=mode)
    launch = LaunchConfig(token_file=str(path))
    with pytest.raises(ConfigError, match="others can read or write it"):
        token.read_token(launch)
    monkeypatch.setattr(token, "POD_FILE", str(path))
    if is_read:
        assert token.read_token(launch) == SECRET.encode()
    else:
        with pytest.raises(ConfigError, match="others can read or write it"):
            token.read_token(launch)


def test_ranks_of_one_node_find_one_token_that_others_cannot_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    umask = os.umask(0)
    try:
        tokens = [token.user_token() for _ in range(2)]
    finally:
        os.umask(umask)
    assert tokens[0] == tokens[1]
    assert tokens[0] is not None
    assert len(tokens[0]) == 64
    folder = tmp_path / "axonlaunch"
    assert [path.name for path in folder.iterdir()] == ["token"]
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    (folder / "token").chmod(0o644)
    with pytest.raises(ConfigError, match="others can read or write it"):
        token.user_token()


def test_job_token_is_readable_only_by_owner(tmp_path: Path) -> None:
    config = configuration.with_values(RunConfig(), {"run_dir": str(tmp_path), "name": "job"})
    for _ in range(2):  # kept when the job is requeued or submitted again
        slurm_launcher._write(config, tmp_path)
        launch = configuration.read_frozen(tmp_path / "job.yaml").launch
        assert launch.token_file == str(tmp_path / "token")
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        secret = token.read_token(launch)
        assert secret is not None
        assert secret not in (tmp_path / "job.yaml").read_bytes()
        assert secret not in (tmp_path / "job.sbatch").read_bytes()


def test_run_without_token_warns_or_is_refused() -> None:
    reported = token.missing_token(LaunchConfig(), address="10.77.0.1:29500")
    assert reported.startswith(WARNING)
    assert "\n" not in reported
    with pytest.raises(ConfigError, match=r"launch\.require_token=true: the nodes share no secret"):
        token.missing_token(LaunchConfig(require_token=True), address="10.77.0.1:29500")


def visible(command: Command) -> bytes:
    """Return arguments and environment of a run's processes, and its files that other users can
    read.
    """
    shown = [
        (Path("/proc") / str(pid) / name).read_bytes()
        for pid in command.processes()
        for name in ("cmdline", "environ")
    ]
    files = [path for path in command.folder.rglob("*") if path.is_file()]
    shown += [path.read_bytes() for path in files if path.stat().st_mode & 0o077]
    return b"".join(shown)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["local", "torchrun"])
def test_signing_key_is_in_no_argument_variable_or_readable_file(
    axonlaunch: Command, faulty: list[str], by: str
) -> None:
    # The plugin passes the key to this test in a private file.
    plugin = axonlaunch.folder / "faulty_plugin.py"
    plugin.write_text(plugin.read_text() + KEY)
    command = axonlaunch if by == "local" else torchrun(axonlaunch.folder, 2)
    overrides = [word for word in faulty if by == "local" or not word.startswith("launch.")]
    process = command.start(
        "train", *overrides, "train.steps=1000", "name=run", "model.arguments={pause:0.1}"
    )
    logged(axonlaunch.folder / "runs/run/metrics.jsonl", 2)
    key = (axonlaunch.folder / "key").read_bytes()
    shown = visible(axonlaunch)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert len(key) == 32
    assert b"axonlaunch" in shown
    for secret in (key, key.hex().encode(), base64.b64encode(key)):
        assert secret not in shown


KEY = """
import gc, os
from axonlaunch.system.authentication import Credentials
from axonlaunch.comm.connection import gloo

prove = gloo._prove
def note(group, store, challenge, key, **rest):
    with os.fdopen(os.open("key", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(key)
    prove(group, store, challenge, key, **rest)
gloo._prove = note
"""


def start(two: NodeNamespaces, node: int, *overrides: str) -> Any:
    world = ["launch.nnodes=2", "launch.nproc=1", f"launch.master_addr={two.addresses[0]}"]
    return two.command(node).start("train", *TINY, *world, f"launch.node_rank={node}", *overrides)


@pytest.mark.slow
def test_nodes_with_same_token_in_different_files_train_without_warning(
    two: NodeNamespaces, axonlaunch: Command
) -> None:
    files = [secret_file(axonlaunch.folder / f"token{node}") for node in range(2)]
    reported = ended(
        [start(two, node, "name=run", f"launch.token_file={files[node]}") for node in range(2)]
    )
    assert [status for status, _, _ in reported] == [0, 0], reported
    assert all("launch.token_file" not in output + errors for _, output, errors in reported)


@pytest.mark.slow
def test_nodes_without_token_warn_once(two: NodeNamespaces) -> None:
    reported = ended([start(two, node, "name=run") for node in range(2)])
    assert [status for status, _, _ in reported] == [0, 0], reported
    assert [(output + errors).count(WARNING) for _, output, errors in reported] == [1, 0]


@pytest.mark.parametrize("node", [0, 1])
def test_nodes_without_required_token_are_refused(served: Command, node: int) -> None:
    """Each node is refused without waiting for the other."""
    overrides = ["launch.nnodes=2", "launch.nproc=1", "launch.master_addr=127.0.0.1"]
    overrides += [f"launch.node_rank={node}", "launch.require_token=true"]
    ran = served("train", *TINY, *overrides, status=2)
    assert "launch.require_token=true: the nodes share no secret" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_node_never_runs_forged_configuration(two_served: NodeNamespaces, served: Served) -> None:
    two, folder = two_served, served.folder
    file = secret_file(folder / "token")
    executed = folder / "executed"
    (folder / "evil.py").write_text(f"open({str(executed)!r}, 'w')\n")
    overrides = ["name=run", f"launch.token_file={file}", "launch.timeout_s=60"]
    first = start(two, 0, *overrides)
    ours = served("config", *TINY, "launch.nproc=1").stdout
    assert "plugins: []" in ours
    evil = ours.replace("plugins: []", "plugins: [evil]")
    written = Forked(
        *(placed, two.names[1], script, str(SUPPORT / "stranger.py")),
        *("frozen", two.addresses[0], "29500", evil.encode().hex()),
        folder=folder,
        environment=served.environment(),
    )
    assert "frozen" in written.communicate(timeout=60)[0]
    second = start(two, 1, *overrides)
    reported = ended([second, first])
    assert reported[0][0] == 2
    assert "was not written by a node of this run" in reported[0][2]
    assert reported[1][0] != 0
    assert not executed.exists()


@pytest.mark.slow
def test_torchrun_token_file_of_one_rank_is_refused(
    axonlaunch: Command,
) -> None:
    file = secret_file(axonlaunch.folder / "token")
    other = secret_file(axonlaunch.folder / "other", SECRET[::-1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613", "WORLD_SIZE": "2"}
    ranks = [
        By(axonlaunch.folder, [], {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}).start(
            "train", *TINY, f"launch.token_file={path}"
        )
        for rank, path in enumerate((file, other))
    ]
    ranks[0].send_signal(0)
    status, _, errors = ended([ranks[1]])[0]
    ranks[0].kill()
    ranks[0].communicate(timeout=20)
    assert status == 2
    assert "MASTER_ADDR=127.0.0.1:29613: what is in the store there was not written" in errors
