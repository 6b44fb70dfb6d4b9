"""A failed run reports the rank, place and cause, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from support.command import TINY, Command, Served, wait_for
from support.served import Server

REASONS = {
    "exception": "ValueError: the fault of a test",
    "SIGKILL": "killed by SIGKILL",
}


@pytest.mark.parametrize(("fault", "rank"), [("SIGKILL", 0), ("exception", 1)])
def test_the_rank_that_failed_first_is_named(
    served: Command, faulty: list[str], fault: str, rank: int
) -> None:
    arguments = f"model.arguments={{fault:{fault},rank:{rank},step:3}}"
    ran = served("train", *faulty, "name=run", "checkpoint.every=2", arguments, status=1)
    assert f"rank {rank} of 2 failed first" in ran.stderr
    assert REASONS[fault] in ran.stderr
    assert f"runs/run/logs/rank_{rank}.log" in ran.stderr
    assert ran.stderr.count("Traceback (most recent call last)") == int(fault == "exception")
    summary = served.summary("run")
    assert (summary["status"], summary["failed_rank"]) == ("failed", rank)
    names = [path.name for path in (served.folder / "runs/run/checkpoints").iterdir()]
    assert names == ["step_2"]
    served.wait_until_gone(seconds=3)


def test_a_rank_that_fails_on_the_mock_backend_is_named(served: Command, faulty: list[str]) -> None:
    (served.folder / "faulty_plugin.py").write_text(
        "import torch.distributed as dist\n"
        "from torch import nn\n"
        "from axonlaunch import register_model\n"
        "class Faulty(nn.Embedding):\n"
        "    def forward(self, tokens):\n"
        "        if dist.get_rank() == 1:\n"
        "            raise ValueError('the fault of a test')\n"
        "        return super().forward(tokens)\n"
        "@register_model('faulty', inputs='tokens')\n"
        "def build():\n"
        "    return Faulty(256, 256)\n"
    )
    ran = served("train", *faulty, "launch.backend=mock", status=1)
    assert "rank 1 of 2 failed first: ValueError: the fault of a test" in ran.stderr


def test_ctrl_c_saves_and_run_resumes_bitwise(served: Command, faulty: list[str]) -> None:
    run = [*faulty, "checkpoint.every=100", "train.steps=8", "strategy=fsdp"]
    served("train", *run, "name=whole")
    slow = "model.arguments={pause:0.3}"
    process = served.start("train", *run, "name=parts", slow)
    metrics = served.folder / "runs" / "parts" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "stopping after this step" in output
    assert served.summary("parts")["status"] == "interrupted"
    assert served.summary("parts")["steps"] < 8
    pasted = re.search(r"^to resume +(axonlaunch train .*)", output, re.MULTILINE)
    assert pasted, output
    served(*shlex.split(pasted[1])[1:])
    assert served.losses("parts") == served.losses("whole")


def test_a_second_ctrl_c_ends_at_once(served: Served, faulty: list[str]) -> None:
    process = served.start("train", *faulty, "name=run", "model.arguments={pause:30.0}")
    logs = served.folder / "runs" / "run" / "logs"
    wait_for(lambda: len(served.processes()) >= 3 and (logs / "rank_1.log").exists())
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping" in process.printed())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    served.wait_until_gone(seconds=3)


@pytest.mark.slow
def test_ranks_die_with_a_launcher_that_is_killed(axonlaunch: Command, faulty: list[str]) -> None:
    process = axonlaunch.start("train", *faulty, "name=run", "model.arguments={pause:1.0}")
    metrics = axonlaunch.folder / "runs" / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and bool(metrics.read_text()))
    assert len(axonlaunch.processes()) >= 4
    process.kill()
    process.communicate()
    axonlaunch.wait_until_gone(seconds=5)


def test_killed_run_resumes_bitwise_from_last_checkpoint(
    served: Command, faulty: list[str]
) -> None:
    run = [*faulty, "checkpoint.every=2", "train.steps=6", "strategy=fsdp"]
    served("train", *run, "name=whole")
    fault = "model.arguments={fault:SIGKILL,rank:1,step:4}"
    served("train", *run, "name=parts", fault, status=1)
    served("train", *run, "name=parts")
    assert served.losses("parts") == served.losses("whole")


def test_invalid_overrides_start_no_rank(axonlaunch: Command) -> None:
    process = axonlaunch.start("train", *TINY, "train.stepz=3")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.strip() == "error: train.stepz=3: there is no such key; did you mean train.steps?"
    axonlaunch.wait_until_gone(seconds=1)
    assert list(axonlaunch.folder.iterdir()) == []


def test_run_folder_in_use_refuses_second_run(served: Command, faulty: list[str]) -> None:
    overrides = [*faulty, "name=run", "train.steps=1000"]
    first = served.start("train", *overrides, "model.arguments={pause:0.2}")
    metrics = served.folder / "runs" / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and bool(metrics.read_text()))
    ran = served("train", *overrides, status=75)
    assert "another process is training in" in ran.stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130
    assert len(served.losses("run")) == served.summary("run")["steps"]


@pytest.mark.slow
def test_resumed_run_reports_changed_settings(served: Command) -> None:
    overrides = ["strategy=single", "name=run", "checkpoint.every=3"]
    assert "other settings" not in served.train(*overrides, "train.steps=3").stdout
    assert "other settings" not in served.train(*overrides, "strategy=ddp").stdout
    reported = served.train(*overrides, "train.steps=9", "seed=4", "optimizer.lr=1e-5").stdout
    said = "resuming with changed settings: seed=4 (was 0), optimizer.lr=1e-05 (was 0.003)"
    assert said in " ".join(reported.split())


@pytest.mark.slow
def test_corrupt_checkpoint_is_reported_before_training(served: Command) -> None:
    overrides = ["strategy=fsdp", "name=run", "checkpoint.every=6", "checkpoint.keep_last=1"]
    served.train(*overrides)
    shard = next((served.folder / "runs/run/checkpoints/step_6").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    ran = served.train(*overrides, "train.steps=8", status=2)
    assert ran.stderr.startswith(
        "error: checkpoint.resume=auto: runs/run/checkpoints/step_6 has 100 bytes of "
    )
    assert len(served.losses("run")) == 6


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 4
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, 100)


DAMAGE = {
    "a bit": (flip, "__1_0.distcp", "__1_0.distcp is not what was written (its CRC-32 differs)"),
    "a cut": (cut, "__0_0.distcp", "has 100 bytes of __0_0.distcp instead of"),
    "the index": (flip, "index.json", "has an index.json that is not what was written"),
    "no manifest": (Path.unlink, "manifest.json", "lacks manifest.json"),
}


SAVED_TWICE = ["strategy=fsdp", "name=run", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    """Return a folder in which a run was killed after its last step, before it reported the end."""
    folder = tmp_path_factory.mktemp("saved")
    Served(folder, server).train(*SAVED_TWICE)
    (folder / "runs/run/summary.json").unlink()
    return folder


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("damage", DAMAGE)
def test_corrupt_newest_checkpoint_falls_back_to_previous(
    damage: str, served: Command, saved_twice: Path
) -> None:
    change, name, reason = DAMAGE[damage]
    shutil.copytree(saved_twice / "runs", served.folder / "runs")
    first_losses = served.losses("run")
    folder = served.folder / "runs/run/checkpoints"
    change(folder / "step_6" / name)
    ran = served.train(*SAVED_TWICE, "checkpoint.keep_last=1")
    reported = " ".join(ran.stdout.split())
    assert f"corrupt runs/run/checkpoints/step_6 is corrupt: {reason}" in reported
    assert "it is kept as step_6.corrupt" in reported
    assert "resumed from runs/run/checkpoints/step_4" in reported
    assert served.losses("run") == first_losses
    [line] = served.summary("run")["corrupt_checkpoints"]
    assert reason in line
    assert sorted(path.name for path in folder.iterdir()) == ["step_6", "step_6.corrupt"]
    listed = json.loads(served("checkpoint", "ls", "runs/run", "--json").stdout)
    assert [entry["step"] for entry in listed["checkpoints"]] == [6]
    [(path, why)] = listed["aside"].items()
    assert path == "runs/run/checkpoints/step_6.corrupt"
    assert why.startswith(reason)
    assert f"moved aside  {path} {reason}" in served("checkpoint", "ls", "runs/run").stdout


@pytest.mark.slow
def test_without_good_checkpoint_run_is_refused(served: Command) -> None:
    overrides = ["strategy=fsdp", "name=run", "checkpoint.every=3"]
    served.train(*overrides)
    for step in (3, 6):
        flip(served.folder / f"runs/run/checkpoints/step_{step}/__1_0.distcp")
    for status in (1, 2):  # found while loading, and reported at the next start
        ran = served.train(*overrides, "train.steps=8", status=status)
        reported = ran.stderr if status == 2 else served.summary("run")["reason"]
        assert "step_3.corrupt __1_0.distcp is not what was written" in reported
        assert "; use another name, or remove the corrupt files" in reported
        assert len(served.losses("run")) == 6


@pytest.mark.slow
def test_flipped_bit_is_reported_with_previous_checkpoint(served: Command) -> None:
    overrides = ["strategy=fsdp", "name=run", "checkpoint.every=3", "checkpoint.fallback=false"]
    served.train(*overrides)
    flip(served.folder / "runs/run/checkpoints/step_6/__1_0.distcp")
    ran = served.train(*overrides, "train.steps=8", status=1)
    assert "failed first: CorruptCheckpointError: " in ran.stderr
    assert "Traceback" not in ran.stderr
    reason = served.summary("run")["reason"]
    assert "step_6: __1_0.distcp is not what was written" in reason
    offered = reason.rpartition(" with ")[2]
    assert offered.endswith("runs/run/checkpoints/step_3")
    served.train(*overrides, "train.steps=8", offered)
    assert len(served.losses("run")) == 8


@pytest.mark.slow
def test_unlistable_checkpoints_refuse_start(served: Command) -> None:
    """A loop of links has the same effect as a stale mount or folders of other users."""
    overrides = ["strategy=fsdp", "name=run", "checkpoint.every=3"]
    served.train(*overrides)
    folder = served.folder / "runs/run/checkpoints"
    folder.rename(served.folder / "aside")
    folder.symlink_to(folder)
    old_metrics = (served.folder / "runs/run/metrics.jsonl").read_bytes()
    ran = served.train(*overrides, "train.steps=8", status=2)
    assert ran.stderr.startswith("error: checkpoint.resume=auto: ")
    assert "can't be read: Too many levels of symbolic links" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert (served.folder / "runs/run/metrics.jsonl").read_bytes() == old_metrics
    for command in ("ls", "check"):
        ran = served("checkpoint", command, "runs/run", status=2)
        assert ran.stderr.startswith("error: runs/run: can't be read: Too many levels")
        assert len(ran.stderr.splitlines()) == 1


@pytest.mark.slow
def test_run_without_resume_keeps_old_metrics(served: Command) -> None:
    overrides = ["strategy=single", "name=run", "train.steps=3", "checkpoint.every=0"]
    served.train(*overrides)
    first_losses = served.losses("run")
    metrics = served.folder / "runs/run/metrics.jsonl"
    (served.folder / "runs/run/summary.json").unlink()  # it was killed
    ran = served.train(*overrides, "seed=4")
    assert "metrics.jsonl: it is from an earlier run, which this run does not resume; " in (
        " ".join(ran.stdout.split())
    )
    assert served.losses("run") != first_losses
    previous = metrics.with_name("metrics.1.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in previous if '"loss"' in line] == first_losses


@pytest.mark.slow
def test_invalid_bytes_in_metrics_are_kept(served: Command) -> None:
    overrides = ["strategy=single", "name=run", "checkpoint.every=3"]
    served.train(*overrides)
    metrics = served.folder / "runs/run/metrics.jsonl"
    full = metrics.read_bytes()
    lines = full.splitlines(keepends=True)
    broken = b"".join([b"\xff\xfe\x00\n", b"[" * 15_000 + b"\n", b"3\n", *lines])
    metrics.write_bytes(broken)
    ran = served.train(*overrides, "train.steps=7")
    assert "metrics.jsonl: 3 of its lines can't be read; it is kept as metrics.1.jsonl" in " ".join(
        ran.stdout.split()
    )
    assert metrics.with_name("metrics.1.jsonl").read_bytes() == broken
    assert metrics.read_bytes().startswith(full)
    assert len(served.losses("run")) == 7


def test_states_of_other_optimizer_are_refused_before_start(served: Command) -> None:
    served.train("strategy=single", "name=run", "checkpoint.every=6")
    overrides = [word for word in TINY if not word.startswith("optimizer.")]
    overrides += ["optimizer=sgd", "strategy=single", "checkpoint.resume=runs/run", "train.steps=8"]
    ran = served("train", *overrides, status=2)
    assert "error: optimizer.name=sgd:" in ran.stderr
    assert (
        "was saved with a different optimizer; it has states exp_avg, exp_avg_sq, step"
        in ran.stderr
    )


def test_sgd_without_momentum_resumes_only_without_momentum(served: Command) -> None:
    overrides = [word for word in TINY if not word.startswith("optimizer.")]
    overrides += ["optimizer=sgd", "strategy=single", "checkpoint.every=3", "name=run"]
    served("train", *overrides, "optimizer.momentum=0", "train.steps=3")
    refused = served("train", *overrides, status=2).stderr
    assert "error: optimizer.momentum=0.9: runs/run/checkpoints/step_3 has no states; use 0" in (
        refused
    )
    served("train", *overrides, "optimizer.momentum=0")
    assert len(served.losses("run")) == 6


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_nan_loss_ends_run_and_names_first_parameter(served: Command, strategy: str) -> None:
    overrides = ["name=run", "optimizer.lr=1e30", "train.grad_clip=null", f"strategy={strategy}"]
    ran = served.train(*overrides, "scheduler.warmup_steps=0", "launch.nproc=2", status=1)
    reported = " ".join(ran.stderr.replace("│", " ").split())
    assert "failed first: NotFiniteError: the loss of step 2 is " in reported
    assert " is the first parameter whose gradient is not finite (" in reported
    assert "Traceback" not in reported
    assert (
        "or train.grad_clip; train.log_every=1 finds" in reported
    )  # there is nothing to resume from
    assert served.summary("run")["status"] == "failed"
    assert len(served.losses("run")) == 1


def test_nan_loss_prevents_saving(served: Command) -> None:
    overrides = ["strategy=single", "name=run", "checkpoint.every=1", "checkpoint.keep_last=1"]
    ruined = ["optimizer.lr=1e30", "train.grad_clip=null", "scheduler.warmup_steps=0"]
    served.train(*overrides, *ruined, "train.steps=9", "train.log_every=9", status=1)
    assert [path.name for path in (served.folder / "runs/run/checkpoints").iterdir()] == ["step_1"]


@pytest.mark.slow
def test_old_crash_is_not_reported_for_next_run(served: Command) -> None:
    ruined = ["optimizer.lr=1e30", "train.grad_clip=null", "scheduler.warmup_steps=0"]
    served.train("strategy=single", "name=run", *ruined, status=1)
    assert (served.folder / "runs/run/crash.json").exists()
    served.train("strategy=single", "name=run")
    assert not (served.folder / "runs/run/crash.json").exists()


def test_run_resumes_from_before_nan_loss(served: Command) -> None:
    overrides = ["strategy=single", "name=run", "train.steps=4", "checkpoint.every=2"]
    served.train(*overrides)
    ruined = [*overrides, "train.steps=9", "optimizer.lr=1e30", "train.grad_clip=null"]
    reported = served.train(*ruined, status=1).stderr
    assert "with name=run it resumes from step 4" in " ".join(reported.split())


@pytest.mark.slow
def test_failed_sweep_run_does_not_stop_others(served: Command) -> None:
    overrides = [
        "train.grad_clip=null",
        "scheduler.warmup_steps=0",
        "strategy=single",
        "name=sweep",
    ]
    served.train("-m", "optimizer.lr=1e30,1e-3", *overrides, status=1)
    assert [served.summary(f"sweep/{index}")["status"] for index in range(2)] == ["failed", "done"]
