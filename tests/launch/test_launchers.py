"""Ranks of any launcher train like the local launcher's, to the bit."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import TINY, Command, Served, wait_for
from support.launchers import By, ended, have_sbatch, logged, needs, slurm, torchrun, unused_port
from support.served import Server

from axonlaunch import config as configuration
from axonlaunch.launch.external.slurm import batch_script
from axonlaunch.system.node import host

RUN = ["train", *TINY, "strategy=fsdp"]
SUBMITTED = ["launch=slurm", "launch.backend=gloo", "launch.slurm.grace_s=120"]
"""Settings of a job of SLURM that needs no estimate."""
GATHERED = 55_000
"""Bytes of a gathered block that remain allocated until gloo's thread releases it late."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, server: Server) -> list[float]:
    """Return the losses of the local launcher's ranks."""
    command = Served(tmp_path_factory.mktemp("local"), server)
    command(*RUN, "launch.nproc=2", "name=run")
    return command.losses("run")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


def mpirun(folder: Path, nproc: int) -> By:
    needs("mpirun", root=False)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return By(folder, ["mpirun", "--oversubscribe", "-np", str(nproc)], as_root)


@pytest.mark.slow
def test_torchrun_equals_local_launcher(axonlaunch: Command, expected: list[float]) -> None:
    torchrun(axonlaunch.folder, 2)(*RUN, "name=run")
    assert axonlaunch.losses("run") == expected
    logs = sorted(path.name for path in (axonlaunch.folder / "runs/run/logs").iterdir())
    assert logs == ["rank_0.log", "rank_1.log"]


def test_mpirun_equals_local_launcher(
    axonlaunch: Command, server: Server, expected: list[float]
) -> None:
    # During a run, an estimate only gets CPU time that ranks leave, possibly too little: it is
    # cached.
    on_cpus = [*RUN[1:], "launch.nproc=2", "hardware=cpu"]
    Served(axonlaunch.folder, server)("estimate", *on_cpus)
    run = mpirun(axonlaunch.folder, 2).served(server)
    reported = run(*RUN, "name=run", "estimate.background=true", "--json")
    summary = json.loads(reported.stdout)
    assert summary["status"] == "done"
    assert 0 <= summary["measured_peak_bytes"] - summary["predicted_peak_bytes"] < GATHERED
    assert axonlaunch.losses("run") == expected


def test_srun_on_two_nodes_equals_local_launcher(
    axonlaunch: Command, server: Server, cluster: dict[str, str], expected: list[float]
) -> None:
    # A single rank on a node would use all cores, and products of two threads round differently.
    srun = By(axonlaunch.folder, ["srun", "-N2", "--ntasks-per-node=1"], cluster)
    srun.served(server)(*RUN, "name=run", f"launch.threads={host.threads(ranks=2)}")
    assert axonlaunch.losses("run") == expected


@pytest.mark.parametrize("kind", ["torchrun", "mpirun", "srun", "srun of nodes", "sbatch"])
@pytest.mark.slow
def test_four_ranks_of_any_launcher_agree_with_the_local_one_to_the_bit(
    axonlaunch: Command, cluster: dict[str, str], kind: str
) -> None:
    folder, overrides = (
        axonlaunch.folder,
        ["train", *TINY, "strategy=hsdp", "strategy.tensor.degree=2"],
    )
    if kind == "torchrun":
        command = torchrun(folder, 4)
    elif kind == "mpirun":
        command = mpirun(folder, 4)
    elif kind == "sbatch":
        command = By(folder, [], cluster)
        overrides += [*SUBMITTED, "launch.nnodes=2", "launch.nproc=2"]
    elif kind == "srun of nodes":
        command = By(folder, ["srun", "-N2", "--ntasks-per-node=1"], cluster)
        overrides.append("launch.nproc=2")
    else:
        command = By(folder, ["srun", "-N2", "--ntasks-per-node=2"], cluster)
    overrides.append("strategy.fsdp.replicate=2")
    command(*overrides, "name=run")
    there = [word for word in overrides if not word.startswith("launch")]
    axonlaunch(*there, "name=local", "launch.nproc=4")
    assert axonlaunch.losses("run") == axonlaunch.losses("local")


@pytest.mark.slow
def test_manually_started_ranks_equal_local_launcher(
    axonlaunch: Command, expected: list[float]
) -> None:
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "WORLD_SIZE": "2"}
    ranks = [
        By(axonlaunch.folder, [], {**world, "RANK": rank, "LOCAL_RANK": rank}).start(
            *RUN, "name=run"
        )
        for rank in "01"
    ]
    assert [status for status, _, _ in ended(ranks)] == [0, 0]
    assert axonlaunch.losses("run") == expected


@pytest.mark.slow
def test_torchrun_failure_is_reported_once(
    axonlaunch: Command, server: Server, faulty: list[str]
) -> None:
    overrides = [word for word in faulty if not word.startswith("launch.")]
    fault = "model.arguments={fault:exception,rank:1,step:3}"
    by_torchrun = torchrun(axonlaunch.folder, 2).served(server)
    ran = by_torchrun("train", *overrides, "name=run", fault, status=1)
    assert ran.stderr.count("rank 1 of 2 failed first: ValueError: the fault of a test") == 1
    crash = json.loads((axonlaunch.folder / "runs/run/crash.json").read_text())
    assert (crash["rank"], crash["step"], crash["kind"]) == (1, 2, "error")


@pytest.mark.slow  # like a failing one, above
def test_torchrun_hang_is_reported_with_place(
    axonlaunch: Command, server: Server, faulty: list[str]
) -> None:
    overrides = [word for word in faulty if not word.startswith("launch.")]
    overrides += ["launch.timeout_s=3", "model.arguments={fault:SIGALRM,rank:9,pause:60.0}"]
    ran = torchrun(axonlaunch.folder, 2).served(server)("train", *overrides, "name=run", status=1)
    reported = " ".join(ran.stderr.replace("│", " ").split())
    assert "made no progress for 3 s (hang): it is in forward (" in reported


@pytest.mark.slow
def test_the_mock_backend_is_refused_under_torchrun(axonlaunch: Command, server: Server) -> None:
    by_torchrun = torchrun(axonlaunch.folder, 2).served(server)
    ran = by_torchrun(*RUN, "name=run", "launch.backend=mock", status=1)
    assert "error: launch.backend=mock: its ranks are threads of one process" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_stops_under_mpirun_leaves_nothing(
    axonlaunch: Command, faulty: list[str], fault: str
) -> None:
    overrides = [word for word in faulty if not word.startswith("launch.")]
    arguments = f"model.arguments={{fault:{fault},rank:1,step:3}}"
    process = mpirun(axonlaunch.folder, 2).start(
        "train", *overrides, "name=run", "launch.timeout_s=4", arguments
    )
    process.communicate(timeout=60)
    assert process.returncode != 0
    axonlaunch.wait_until_gone(seconds=10)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_no_rank_outlives_a_launcher_that_was_killed(
    axonlaunch: Command, faulty: list[str], launcher: str
) -> None:
    overrides = [word for word in faulty if not word.startswith(("launch.", "train.steps"))]
    by = {"mpirun": mpirun, "torchrun": torchrun}[launcher](axonlaunch.folder, 2)
    process = by.start(
        "train", *overrides, "train.steps=9999", "name=run", "model.arguments={pause:0.2}"
    )
    logged(axonlaunch.folder / "runs/run/metrics.jsonl", 2, seconds=120)
    process.kill()
    process.communicate()
    axonlaunch.wait_until_gone(seconds=15)
    summary = axonlaunch.summary("run")
    assert summary["status"] == "failed"
    assert f"its launcher {launcher} (process " in summary["reason"]


@pytest.mark.slow
def test_invalid_override_under_torchrun_is_reported_once(axonlaunch: Command) -> None:
    ran = torchrun(axonlaunch.folder, 2)("train", "train.stepz=3", status=1)
    reported = "error: train.stepz=3: there is no such key; did you mean train.steps?"
    assert ran.stderr.count(reported) == 1
    assert not (axonlaunch.folder / "runs").exists()


def test_launch_env_without_a_world_is_refused(served: Command) -> None:
    ran = served.train("launch=env", status=2)
    assert ran.stderr == (
        "error: launch.name=env: the environment names no world; "
        "set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT\n"
    )


def test_launch_local_starts_ranks_whatever_the_environment_says(served: Command) -> None:
    class Half(type(served)):  # type: ignore[misc]
        def environment(self) -> dict[str, str]:
            return {**super().environment(), "RANK": "3", "MASTER_ADDR": "nowhere"}

    half: Any = Half(served.folder, served.server)  # type: ignore[attr-defined]
    ran = half.train("name=run", status=2)
    assert ran.stderr.splitlines() == [
        "error: WORLD_SIZE: is not set, but RANK, MASTER_ADDR are; set it, or write launch=local",
        "error: MASTER_PORT: is not set, but RANK, MASTER_ADDR are; set it, or write launch=local",
    ]
    half.train("name=run", "launch=local", "launch.nproc=2")
    assert served.summary("run")["status"] == "done"


def test_job_script_follows_configuration(served: Command) -> None:
    overrides = ["launch=slurm", "launch.nnodes=4", "launch.nproc=8", "launch.slurm.partition=gpu"]
    overrides += [
        "name=big",
        "strategy=fsdp",
        "train.global_batch_size=32",
        "launch.slurm.time=8:00:00",
    ]
    overrides += [
        "launch.slurm.extra_args=['--qos=high']",
        "launch.slurm.prologue=['module load cuda']",
    ]
    overrides = [word for word in TINY if not word.startswith("train.global")] + overrides
    script = served("train", *overrides, "--render").stdout
    folder = f"{served.folder}/runs/big"
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]
    assert options == [
        "--job-name=big",
        "--nodes=4",
        "--ntasks-per-node=1",
        f"--output={served.folder}/slurm-%j.out",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@120",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--partition=gpu",
        "--time=8:00:00",
        "--qos=high",
    ]
    assert "\nmodule load cuda\n" in script
    assert f"--config-dir {folder} --config-name job launch.name=auto" in script
    assert not (served.folder / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ([], ["--gpus-per-node=4"]),
        (["launch.device=cuda"], ["--gpus-per-node=4"]),
        (["launch.device=cuda", "launch.backend=gloo"], ["--gpus-per-node=1"]),  # they share it
        (["launch.device=cpu"], []),
        (["launch.backend=gloo"], []),
    ],
)
def test_job_script_requests_devices_of_ranks(overrides: list[str], devices: list[str]) -> None:
    script = batch_script.render(configuration.load(["launch=slurm", "launch.nproc=4", *overrides]))
    assert [o.removeprefix("#SBATCH ") for o in script.splitlines() if "--gpus" in o] == devices


def test_job_without_ranks_per_node_is_refused(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_sbatch(served.folder, monkeypatch)
    ran = served.train("launch=slurm", status=2)
    reported = "error: launch.nproc=auto: is required for a job; "
    assert ran.stderr == reported + "write the number of devices per node\n"


@pytest.mark.slow
def test_rendered_script_trains_without_files_of_a_submission(
    axonlaunch: Command, cluster: dict[str, str], faulty: list[str]
) -> None:
    job = [word for word in faulty if not word.startswith("launch.")]
    job += [*SUBMITTED, "launch.nnodes=2", "launch.nproc=1"]
    script = axonlaunch.folder / "printed.sbatch"
    there = By(axonlaunch.folder, [], cluster)
    script.write_text(there("train", *job, "strategy=fsdp", "name=job", "--render").stdout)
    subprocess.run(
        ["sbatch", "--wait", str(script)],
        cwd=axonlaunch.folder,
        env={**os.environ, **cluster},
        check=True,
        timeout=120,
    )
    assert axonlaunch.summary("job")["status"] == "done"
    assert stat.S_IMODE((axonlaunch.folder / "runs/job/token").stat().st_mode) == 0o600


@pytest.mark.slow
@pytest.mark.parametrize(
    "reported", [["scontrol", "requeue"], ["scancel", "--batch", "--signal=USR1"]]
)
def test_requeued_job_saves_and_continues_in_its_folder(
    axonlaunch: Command, cluster: dict[str, str], faulty: list[str], reported: list[str]
) -> None:
    """Requeued by hand, by pre-emption, or shortly before the time limit, when SLURM sends USR1."""
    overrides = ["train", *faulty, "checkpoint.every=100", "train.steps=30", "strategy=fsdp"]
    axonlaunch(*overrides, "name=whole")
    job = [*overrides[:1], *(word for word in overrides[1:] if not word.startswith("launch."))]
    job += [*SUBMITTED, "launch.nnodes=2", "launch.nproc=1"]
    process = By(axonlaunch.folder, [], cluster).start(
        *job, "name=job", "model.arguments={pause:0.2}"
    )
    logged(axonlaunch.folder / "runs/job/metrics.jsonl", 5)
    slurm_environment = {**os.environ, **cluster}
    listed = subprocess.run(
        ["squeue", "-h", "-o", "%i"], env=slurm_environment, capture_output=True, text=True
    )
    number = listed.stdout.split()[0]
    subprocess.run([*reported, number], env=slurm_environment, check=True)
    summary = axonlaunch.folder / "runs/job/summary.json"
    wait_for(lambda: summary.exists() and axonlaunch.summary("job")["status"] == "interrupted")
    time.sleep(3)
    # otherwise it would wait 2 minutes
    now = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
    subprocess.run(now, env=slurm_environment, check=True)
    process.communicate(timeout=100)
    assert process.returncode == 0
    assert axonlaunch.losses("job") == axonlaunch.losses("whole")


@pytest.mark.slow
def test_stopped_job_of_slurm_saves_and_resumes_with_the_same_losses(
    axonlaunch: Command, cluster: dict[str, str], faulty: list[str]
) -> None:
    overrides = ["train", *faulty, "checkpoint.every=100", "train.steps=30", "strategy=fsdp"]
    axonlaunch(*overrides, "name=whole")
    job = [*overrides[:1], *(word for word in overrides[1:] if not word.startswith("launch."))]
    job += [*SUBMITTED, "launch.nnodes=2", "launch.nproc=1", "name=job"]
    there = By(axonlaunch.folder, [], cluster)
    # Three commands have to answer before it ends.
    follower = there.start(*job, "model.arguments={pause:1.5}")
    logged(axonlaunch.folder / "runs/job/metrics.jsonl", 2)
    second = there("train", *job[1:], status=2)
    assert "of this folder is running; follow it with axonlaunch logs job -f" in second.stderr
    assert "job" in there("jobs").stdout
    assert "saves a checkpoint and ends" in there("stop", "job").stdout
    follower.communicate(timeout=60)
    assert axonlaunch.summary("job")["status"] == "interrupted"
    assert "is stopped; resume it with" in there("stop", "job", status=2).stderr
    assert "it resumes in" in there("resume", "job").stdout
    log = there("logs", "job", "--follow").stdout
    assert "step 30" in log
    assert axonlaunch.losses("job") == axonlaunch.losses("whole")
    of_rank_1 = (axonlaunch.folder / "runs/job/logs/rank_1.log").read_text()
    assert there("logs", "job", "--rank", "1").stdout == of_rank_1


@pytest.mark.slow
def test_job_of_slurm_that_is_stopped_in_its_prologue_does_not_train(
    axonlaunch: Command, cluster: dict[str, str], faulty: list[str]
) -> None:
    job = [*(word for word in faulty if not word.startswith("launch.")), "launch.nproc=1"]
    job += [*SUBMITTED, "name=job"]
    there = By(axonlaunch.folder, [], cluster)
    follower = there.start("train", *job, "launch.slurm.prologue=['touch begun; sleep 5']")
    wait_for(lambda: (axonlaunch.folder / "begun").exists(), seconds=60)
    assert "saves a checkpoint and ends" in there("stop", "job").stdout
    [(status, output, _)] = ended([follower], timeout=120)
    assert status == 130
    assert "is stopped; resume it with axonlaunch resume job" in output
    assert not (axonlaunch.folder / "runs/job/metrics.jsonl").exists()


@pytest.mark.slow
def test_job_of_slurm_exits_with_the_status_of_the_node_that_failed_first(
    axonlaunch: Command, cluster: dict[str, str], faulty: list[str]
) -> None:
    """The other node is ended by SLURM, and has a higher status."""
    job = [*(word for word in faulty if not word.startswith(("launch.", "plugins")))]
    job += [*SUBMITTED, "launch.nnodes=2", "launch.nproc=1", "name=job"]
    job.append("plugins=[faulty_plugin,broken_on_a_node]")
    (axonlaunch.folder / "broken_on_a_node.py").write_text(
        "import os\nif os.environ.get('SLURM_NODEID') == '1':\n    raise RuntimeError('broken')\n"
    )
    there = By(axonlaunch.folder, [], cluster)
    ran = there("train", *job, status=2)
    assert "failed (configuration error)" in ran.stdout
    axonlaunch.wait_until_gone(seconds=20)  # SLURM kills the other node


@pytest.mark.slow
def test_each_run_of_a_sweep_is_a_job_of_slurm(
    axonlaunch: Command, cluster: dict[str, str], faulty: list[str]
) -> None:
    run = [*(word for word in faulty if not word.startswith("launch.")), "launch.nproc=1"]
    run += ["launch.threads=1", "launch.backend=gloo"]
    there = By(axonlaunch.folder, [], cluster)
    sweep = ["-m", "--parallel", "2", *run, *SUBMITTED, "name=sweep", "seed=1,2,3"]
    output, errors = there.start("train", *sweep).communicate(timeout=500)
    assert "run 3 of 3: seed=3" in output, errors
    listed = json.loads(there("jobs", "--json").stdout)["jobs"]
    names = [f"sweep/{number}" for number in range(3)]
    assert [(row["name"], row["state"]) for row in listed] == [(n, "COMPLETED") for n in names]
    assert "step 6" in there("logs", "sweep/2").stdout
    axonlaunch("train", *run, "name=alone", "seed=2")
    assert axonlaunch.losses("sweep/1") == axonlaunch.losses("alone")


@pytest.mark.slow  # the local launcher's are in test_train_command.py
def test_finished_run_is_not_repeated_and_killed_run_is_completed(
    axonlaunch: Command, served: Command, server: Server
) -> None:
    overrides = [*RUN, "name=run", "checkpoint.every=6"]
    served(*overrides, "launch.nproc=2")
    folder = axonlaunch.folder / "runs/run"
    finished, losses = axonlaunch.summary("run"), axonlaunch.losses("run")
    by_torchrun = torchrun(axonlaunch.folder, 2).served(server)
    nodes = ["launch.nnodes=2", "launch.nproc=1", "launch.master_addr=127.0.0.1"]
    port = [f"launch.master_port={unused_port()}"]

    def on_two_nodes() -> list[tuple[int, str, str]]:
        started = [
            served.start(*overrides, *nodes, *port, f"launch.node_rank={node}") for node in range(2)
        ]
        return ended(started)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    for start in (lambda: ended([by_torchrun.start(*overrides)]), on_two_nodes):
        (folder / "summary.json").unlink()  # a killed run has not written it
        assert all(status == 0 for status, _, _ in start())
        assert axonlaunch.summary("run")["eval_loss"] == finished["eval_loss"]
        assert axonlaunch.losses("run") == losses
        old_files = files()
        for status, output, _ in start():
            assert status == 0
            assert "run is finished: it has trained all of its 6 steps" in " ".join(output.split())
        assert files() == old_files
