"""Runs on a Ray cluster of several raylets in this machine."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from support.command import Command
from support.launchers import SCRIPTS, By, logged, unused_port

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError
from axonlaunch.launch.external.followed_job import JobState
from axonlaunch.launch.external.ray import launcher, ray_job
from axonlaunch.launch.external.ray.kept_state import delete_state
from axonlaunch.launch.external.ray.node import PROGRAM
from axonlaunch.launch.external.ray.output import KEPT_BYTES, NodeOutput
from axonlaunch.launch.external.ray.ray_job import RayJob
from axonlaunch.launch.external.ray.run_actor import RUNNING, RayRun
from axonlaunch.launch.external.ray.run_spec import RunSpec
from axonlaunch.launch.external.submitted_jobs import find_jobs

CLIENT_PORT = unused_port()
# Ray does not close the logs of the processes that it starts.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file .*/ray/session_:ResourceWarning")


@pytest.fixture(scope="module")
def raylets() -> Iterator[Any]:
    """Return a cluster with a head that has no cores, and three nodes."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    # Otherwise ranks get no core on a busy machine, and their watchdogs end the run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    head = {"num_cpus": 0, "num_gpus": 0, "object_store_memory": 80 << 20}
    head["ray_client_server_port"] = CLIENT_PORT
    cluster = cluster_utils.Cluster(initialize_head=True, connect=False, head_node_args=head)
    try:
        for _ in range(3):
            add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any) -> Any:
    """Add a node with cores for one rank."""
    return cluster.add_node(num_cpus=1, num_gpus=0, object_store_memory=80 << 20)


def raylet_of(cluster: Any, actor: int) -> Any:
    """Return the node of a cluster whose raylet has started the process of an actor."""
    parent = int(Path(f"/proc/{actor}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return next(
        node
        for node in cluster.list_all_nodes()
        if node.all_processes["raylet"][0].process.pid == parent
    )


def actor_of(number: int) -> int:
    """Return the process of the actor of a node that trains."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode().split("\0")
        except OSError:
            continue
        if PROGRAM in words and f"launch.node_rank={number}" in words:
            return int((entry.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
    raise AssertionError(f"node {number} does not train")


class OnRay:
    """Starts runs of three nodes with one rank each.

    Attributes:
        command: The command.
        local: The same command without a cluster.
    """

    def __init__(self, axonlaunch: Command, cluster: Any, faulty: list[str]) -> None:
        self.command, self.local = By(axonlaunch.folder), axonlaunch
        self._cluster, self._address = cluster, cluster.address
        self._settings = [word for word in faulty if not word.startswith("launch.")]
        self._settings += ["strategy=fsdp", "train.steps=30", "train.global_batch_size=12"]
        self._settings += ["launch.device=cpu", "launch.threads=1"]
        environment = {"env_vars": {"PYTHONPATH": f"{axonlaunch.folder}:{SCRIPTS.parent}"}}
        (axonlaunch.folder / "env.yaml").write_text(yaml.safe_dump(environment))

    def arguments(self, name: str, *overrides: str) -> list[str]:
        return [
            *("train", *self._settings, f"name={name}", "launch=ray", "launch.nnodes=3"),
            *("launch.nproc=1", f"launch.ray.address={self._address}"),
            *(f"run_dir={self.local.folder}/runs/{name}", "launch.ray.runtime_env=env.yaml"),
            *overrides,
        ]

    def __call__(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command for jobs of the cluster."""
        return self.command(*words, "--ray", self._address, status=status)

    def start(self, name: str, *overrides: str) -> Any:
        return self.command.start(*self.arguments(name, *overrides))

    def nodes(self) -> list[Any]:
        """Return the nodes of the cluster, the head too."""
        return list(self._cluster.list_all_nodes())

    def disturbed(self, name: str, *overrides: str) -> Any:
        """Start a run that saves checkpoints, and wait until it has trained some steps."""
        settings = ["launch.max_restarts=3", "checkpoint.every=4", "model.arguments={pause:0.3}"]
        follower = self.start(name, *settings, *overrides)
        logged(self.local.folder / "runs" / name / "metrics.jsonl", 6, seconds=200)
        return follower

    def undisturbed(self) -> list[float]:
        """Return the losses of a run on this node."""
        self.local("train", *self._settings, "name=local", "launch.nproc=3")
        return self.local.losses("local")


@pytest.fixture
def on_ray(axonlaunch: Command, raylets: Any, faulty: list[str]) -> OnRay:
    """Return the command that starts runs of a model with a pause in each step."""
    return OnRay(axonlaunch, raylets, faulty)


def finished(follower: Any) -> str:
    """Wait for a run that succeeds, and return what its command printed."""
    output, errors = follower.communicate(timeout=300)
    assert follower.returncode == 0, f"{output}\n{errors}"
    return str(output) + str(errors)


@pytest.mark.slow
@pytest.mark.processes
def test_run_on_ray_trains_to_the_losses_of_a_local_run_and_its_log_is_kept(on_ray: OnRay) -> None:
    printed = finished(on_ray.start("steady", f"launch.ray.address=ray://127.0.0.1:{CLIENT_PORT}"))
    assert "steady started on Ray" in printed
    assert "steady: completed" in printed
    assert on_ray.local.losses("steady") == on_ray.undisturbed()
    rows = {row["name"]: row for row in json.loads(on_ray("jobs", "--json").stdout)["jobs"]}
    assert (rows["steady"]["job"], rows["steady"]["state"]) == ("Ray", "COMPLETED")
    assert "step 30" in on_ray("logs", "steady").stdout
    assert "node 2 of 3: rank 2 of 3" in on_ray("logs", "steady", "--rank", "2").stdout


@pytest.mark.slow
@pytest.mark.processes
def test_killed_raylet_is_replaced_by_another_and_the_run_continues(
    on_ray: OnRay, raylets: Any
) -> None:
    follower = on_ray.disturbed("lost")
    add_node(raylets)
    raylets.remove_node(raylet_of(raylets, actor_of(1)), allow_graceful=False)
    assert "resumed from" in finished(follower)
    assert on_ray.local.losses("lost") == on_ray.undisturbed()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", [2, 0])
def test_killed_actor_is_replaced_and_the_run_continues(on_ray: OnRay, number: int) -> None:
    follower = on_ray.disturbed(f"killed-{number}")
    os.kill(actor_of(number), signal.SIGKILL)
    printed = finished(follower)
    assert "resumed from" in printed
    assert "a node was lost" in printed or "was lost (1 of launch.max_restarts=3)" in printed
    assert on_ray.local.losses(f"killed-{number}") == on_ray.undisturbed()


def kill_run_actor(on_ray: OnRay) -> None:
    """Kill the process of the actor of the only run that goes on."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in on_ray.nodes()}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            parent = int((entry.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent in raylets and entry.read_bytes().startswith(b"ray::RayRun"):
                os.kill(int(entry.parent.name), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.processes
def test_restarted_actor_of_a_run_remembers_how_many_nodes_were_lost(on_ray: OnRay) -> None:
    follower = on_ray.disturbed("forgetful", "launch.max_restarts=1")
    metrics = on_ray.local.folder / "runs/forgetful/metrics.jsonl"
    kill_run_actor(on_ray)
    logged(metrics, 14, seconds=200)
    kill_run_actor(on_ray)
    output, errors = follower.communicate(timeout=200)
    assert follower.returncode == 1, output + errors
    assert "forgetful: failed (a node was lost)" in output


@pytest.mark.slow
@pytest.mark.processes
def test_restarted_actor_of_a_run_remembers_that_it_was_stopped(on_ray: OnRay) -> None:
    follower = on_ray.disturbed("halted", "model.arguments={pause:1.5}")
    assert "saves a checkpoint" in on_ray("stop", "halted").stdout
    kill_run_actor(on_ray)
    output, errors = follower.communicate(timeout=200)
    assert follower.returncode == 130, output + errors
    assert "halted is stopped; resume it with axonlaunch resume halted" in output


@pytest.mark.slow
@pytest.mark.processes
def test_stopped_run_on_ray_resumes_in_the_same_folder(on_ray: OnRay) -> None:
    # Two commands have to answer before it ends.
    overrides = ["checkpoint.every=100", "model.arguments={pause:1.5}"]
    follower = on_ray.start("stopped", *overrides)
    logged(on_ray.local.folder / "runs/stopped/metrics.jsonl", 6, seconds=200)
    again = on_ray.command(
        *on_ray.arguments("other", f"run_dir={on_ray.local.folder}/runs/stopped"), status=2
    )
    assert "run_dir" in again.stderr
    assert "the run stopped uses it" in again.stderr
    assert "saves a checkpoint" in on_ray("stop", "stopped").stdout
    output, _ = follower.communicate(timeout=60)
    assert follower.returncode == 130, output
    assert "stopped is stopped; resume it with axonlaunch resume stopped" in output
    assert "stopped resumes" in on_ray("resume", "stopped").stdout
    assert "stopped: completed" in on_ray("logs", "stopped", "--follow").stderr
    assert on_ray.local.losses("stopped") == on_ray.undisturbed()


BLOCKER = """
import os, sys
class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "axonlaunch":
            raise ImportError("No module named 'axonlaunch' (hidden by a test)")
if str(os.getppid()) == open({file!r}).read():
    sys.meta_path.insert(0, Missing)
"""
"""Module that Python imports at its start; hides axonlaunch from the processes of one raylet."""


@pytest.mark.slow
@pytest.mark.processes
def test_node_that_cannot_import_axonlaunch_ends_the_run(on_ray: OnRay, raylets: Any) -> None:
    folder, blocked = on_ray.local.folder, add_node(raylets)
    try:
        raylet = blocked.all_processes["raylet"][0].process.pid
        (folder / "raylet").write_text(str(raylet))
        (folder / "sitecustomize.py").write_text(BLOCKER.format(file=str(folder / "raylet")))
        follower = on_ray.start("hidden", "launch.nnodes=4")
        output, errors = follower.communicate(timeout=200)
    finally:
        raylets.remove_node(blocked)
    if follower.returncode == 2:  # Ray has placed the actor of the run there
        assert "can't run axonlaunch (" in errors
        return
    assert follower.returncode == 1, errors
    assert "hidden: failed (a node can't run axonlaunch: ImportError: No module named" in output


@pytest.mark.slow
@pytest.mark.processes
def test_cluster_that_is_too_small_is_an_error_before_waiting(on_ray: OnRay) -> None:
    many = ["launch.nnodes=6", "launch.max_restarts=3"]
    wrong = on_ray.command(*on_ray.arguments("big", *many), status=2).stderr
    assert "launch.nnodes=6: 3 of the cluster's 4 nodes have 1 CPU; use fewer nodes" in wrong
    wrong = on_ray.command(*on_ray.arguments("big", "launch.ray.cpus=2"), status=2).stderr
    assert "launch.nnodes=3: 0 of the cluster's 4 nodes have 2 CPU" in wrong


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 (Connection refused)"),
        ("ray://127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 (Connection refused)"),
        ("http://127.0.0.1", "is no address of a cluster; write ray://HOST:10001"),
    ],
)
def test_address_without_ray_cluster_is_an_error_at_once(address: str, message: str) -> None:
    pytest.importorskip("ray")
    from axonlaunch.launch.external.ray.cluster import connect_to_cluster

    with pytest.raises(ConfigError, match=r"launch\.ray\.address") as refused:
        connect_to_cluster(address)
    assert message in str(refused.value)


def test_cluster_with_another_version_of_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, utils = pytest.importorskip("ray"), pytest.importorskip("ray._private.utils")
    from axonlaunch.launch.external.ray.cluster import connect_to_cluster

    def init(**options: Any) -> None:
        about = {"ray_version": "2.40.0", "python_version": "3.11.2", "commit": ""}
        utils.check_version_info(about, "Ray Client", raise_on_mismatch=True)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    versions = rf"different versions \(Ray 2\.40\.0, Python 3\.11\.2, Ray {ray.__version__}, "
    with pytest.raises(ConfigError, match=versions):
        connect_to_cluster("auto")


def test_each_start_of_a_run_on_ray_by_a_user_is_another_submission() -> None:
    words = ["name=job", "launch=ray", "launch.nnodes=2", "launch.nproc=1", "run_dir=/runs/job"]
    spec = RunSpec.of(configuration.load([*words, "launch.backend=gloo"]))
    assert spec.submission == pickle.loads(pickle.dumps(spec)).submission
    assert spec.submission != spec.with_new_token().submission


def test_ray_is_not_imported_without_an_address() -> None:
    program = (
        "import sys; import axonlaunch.launch.external.submitted_jobs as jobs; "
        "from pathlib import Path; jobs.find_jobs(Path('nowhere'), None); "
        "import axonlaunch.launch.external.ray.launcher; sys.exit('ray' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unusable_address_in_environment_hides_no_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"launch\.ray\.address"):
        find_jobs(tmp_path, None, "http://head:8265")
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    assert find_jobs(tmp_path, None, "http://head:8265") == ([], [])
    assert (
        "note: jobs on Ray are left out (RAY_ADDRESS=http://head:8265)" in capsys.readouterr().err
    )


def test_files_of_a_node_are_deleted_when_its_actor_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "token").write_text("secret")
    waiting = [sys.executable, "-m", PROGRAM, str(folder), "watch", "later"]
    with subprocess.Popen(
        waiting, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as node:
        assert node.stdin is not None
        assert node.stderr is not None
        assert node.stderr.readline().startswith(b"waiting for a run in later to start")
        node.stdin.close()
        assert node.wait(timeout=30) == 128 + signal.SIGKILL
    assert not folder.exists()


def test_output_keeps_its_last_bytes_at_their_positions() -> None:
    output = NodeOutput().with_text(b"first\n")
    assert output.read(0) == (6, b"first\n")
    assert output.read(6) == (6, b"")
    later = NodeOutput(start=100).with_text(b"again\n")
    assert later.read(output.read(0)[0]) == (106, b"again\n")
    output = output.with_text(b"x" * KEPT_BYTES)
    assert output.read(0) == (6 + KEPT_BYTES, b"x" * KEPT_BYTES)
    assert output.read(KEPT_BYTES + 4) == (6 + KEPT_BYTES, b"xx")


def problems(*overrides: str) -> list[str]:
    config = configuration.load(["launch=ray", *overrides])
    with pytest.raises(ConfigError) as refused:
        launcher.check(config, cast("Any", None))
    return [str(problem) for problem in refused.value.problems]


def test_settings_that_a_run_on_ray_needs_are_all_reported(tmp_path: Path) -> None:
    words = ["launch.nnodes=2:4", "launch.node_rank=1", "launch.backend=mock"]
    words.append("launch.master_port=29500")
    assert problems(*words, "checkpoint.resume=never") == [
        "launch.nproc=auto: is required for a cluster; write the number of devices per node",
        "launch.nnodes=2:4: a run on Ray has a fixed number of nodes; write one number",
        "launch.backend=mock: its ranks are threads of one process; use auto, gloo or nccl",
        "launch.node_rank=1: Ray's nodes get it from the run; remove this setting",
        "launch.master_port=29500: Ray's nodes get it from the run; remove this setting",
        "checkpoint.resume=never: a node that is replaced would start over; use another name to "
        "start new",
        "run_dir=auto: all nodes of the cluster must share the folder; write run_dir=/shared/run, "
        "or save to a bucket, as checkpoint.path=s3://bucket/run",
    ]
    (tmp_path / "env.yaml").write_text("[1]")
    shared = [f"run_dir={tmp_path}/run", "launch.nproc=8"]
    for name, reason in (("none.yaml", "can't be read: No such file"), ("env.yaml", "is no YAML")):
        [line] = problems(*shared, f"launch.ray.runtime_env={tmp_path / name}")
        assert line.startswith(f"launch.ray.runtime_env={tmp_path / name}: {reason}")


@pytest.mark.parametrize(
    ("status", "lost", "state"),
    [(2, 0, "FAILED"), (2, 1, "FAILED"), (75, 0, None), (75, 1, None), (75, 2, "FAILED")],
)
def test_only_transient_problems_of_the_start_are_retried_as_often_as_restarts(
    status: int, lost: int, state: str | None
) -> None:
    """Node 0 waits for a lost node in vain, and then reports that it did not join."""
    words = ["launch=ray", "name=big", "launch.nnodes=2", "run_dir=/shared/big"]
    words += ["launch.nproc=1", "launch.device=cpu", "launch.max_restarts=1"]
    run = RayRun(RunSpec.of(configuration.load(words)), JobState("RUNNING"))
    run._lost = lost
    judged = run._judge({0: status, 1: -lost})
    assert (judged and judged.name) == state
    assert judged is None or judged.status == status


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the store of a cluster's head, as an actor of a run sees it."""
    ray = pytest.importorskip("ray")
    kv = pytest.importorskip("ray.experimental.internal_kv")
    kept: dict[str, str] = {}
    context = SimpleNamespace(get_actor_id=lambda: "0123", current_actor=None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(kv, "_internal_kv_get", lambda key, namespace: kept.get(key))
    monkeypatch.setattr(
        kv, "_internal_kv_put", lambda key, value, namespace: kept.update({key: value})
    )
    monkeypatch.setattr(kv, "_internal_kv_del", lambda key, namespace: kept.pop(key))
    monkeypatch.setattr(RayRun, "_supervise", lambda self: None)
    return kept


def test_actor_that_ray_restarts_remembers_losses_and_the_request_to_stop(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["launch=ray", "name=big", "launch.nnodes=2", "run_dir=/shared/big"]
    words += ["launch.nproc=1", "launch.device=cpu", "launch.max_restarts=2"]
    spec = RunSpec.of(configuration.load(words))
    first = RayRun(spec)
    assert (first._lost, first._is_stopping, first._goes_on) == (0, False, True)
    first._note_loss(1)
    restarted = RayRun(spec)  # and its node
    assert (restarted._lost, restarted._goes_on) == (2, True)
    assert restarted.state().note == "big: starts again, because a node was lost"
    monkeypatch.setattr("axonlaunch.launch.external.ray.run_actor._remove_group", lambda name: None)
    again = RayRun(spec)
    assert again._run() == JobState("FAILED", "big: failed (a node was lost)", 1)
    again.stop()
    assert RayRun(spec)._run().note == "big is stopped; resume it with axonlaunch resume big"
    delete_state()
    assert RayRun(spec)._lost == 0


def test_actor_that_ray_restarts_remembers_starts_that_failed(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["launch=ray", "name=big", "run_dir=/shared/big", "launch.nproc=1"]
    spec = RunSpec.of(configuration.load([*words, "launch.device=cpu", "launch.max_restarts=1"]))
    util, actor = pytest.importorskip("ray.util"), "axonlaunch.launch.external.ray.run_actor"
    for name in ("placement_group", "remove_placement_group"):
        monkeypatch.setattr(util, name, lambda *group, **options: None)
    monkeypatch.setattr(pytest.importorskip("ray"), "kill", lambda node: None)
    monkeypatch.setattr(f"{actor}._remove_group", lambda name: None)
    monkeypatch.setattr(RayRun, "_is_placed", lambda self, group: True)
    monkeypatch.setattr(RayRun, "_place_node", lambda self, number, group: None)
    attempts: list[str] = []

    def attempt(self: RayRun, nodes: Any) -> dict[int, int]:
        attempts.append(store["0123"])
        return {0: 75}

    monkeypatch.setattr(RayRun, "_attempt", attempt)
    assert RayRun(spec)._run() == JobState("FAILED", "big: failed (exit status 75 of node 0)", 75)
    assert [json.loads(kept)["lost"] for kept in attempts] == [0, 1]


def test_second_run_of_a_name_that_is_starting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray knows the actor, but it has no state while its environment is set up."""
    ray = pytest.importorskip("ray")
    actors: dict[str, str] = {}

    def create(name: str, namespace: str, **options: Any) -> Any:
        def remote(spec: RunSpec) -> None:
            raise ValueError(f"The name {name} (namespace={namespace}) is already taken.")

        return SimpleNamespace(remote=remote)

    def find(name: str, namespace: str) -> str:
        if namespace not in actors:
            raise ValueError("no such actor")
        return actors[namespace]

    monkeypatch.setattr(ray, "remote", lambda kind: SimpleNamespace(options=create))
    monkeypatch.setattr(ray, "get_actor", find)
    words = ["launch=ray", "name=big", "launch.nproc=1", "run_dir=/shared/big"]
    job = RayJob("auto", RunSpec.of(configuration.load([*words, "launch.device=cpu"])))
    with pytest.raises(ValueError, match="already taken"):  # not by a run of axonlaunch
        job._start()
    actors[RUNNING] = "the actor"
    with pytest.raises(ConfigError, match="name=big: a run of this name is starting"):
        job._start()


def test_output_of_a_node_is_read_by_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    line = "übung\n".encode()
    outputs = iter([NodeOutput(line[:1]), NodeOutput(line), NodeOutput(line)])
    read = SimpleNamespace(remote=lambda node, start: next(outputs).read(start))
    actor = SimpleNamespace(read=read)
    monkeypatch.setattr(ray_job, "_actor_of", lambda name: actor)
    monkeypatch.setattr(ray_job, "_answer", lambda answer: answer)
    words = ["launch=ray", "name=big", "launch.nproc=1", "run_dir=/shared/big"]
    job = RayJob("auto", RunSpec.of(configuration.load([*words, "launch.device=cpu"])))
    assert [job.read_log() for _ in range(3)] == ["", "übung\n", ""]


def test_bundle_of_a_node_has_its_devices_cores_and_resources() -> None:
    words = ["launch=ray", "name=big", "launch.nproc=8", "launch.nnodes=4", "run_dir=/shared/big"]
    words.append("train.global_batch_size=32")
    on_gpus = [*words, "launch.device=cuda", "launch.ray.resources={fast:0.5}"]
    spec = RunSpec.of(configuration.load(on_gpus))
    assert spec.bundle == {"CPU": 8.0, "GPU": 8.0, "fast": 0.5}
    assert spec.needs == "8 CPU, 8 GPU, 0.5 fast"
    assert spec.token not in repr(spec)
    spec = RunSpec.of(configuration.load([*words, "launch.device=cpu", "launch.ray.cpus=32"]))
    assert spec.bundle == {"CPU": 32.0}
    assert configuration.parse_frozen(spec.config).launch.threads == 4
