"""Kills and deletes pods of a Job on a real API server and suspends the Job, at any moment.

The Job's controller replaces them, at different times. The run must continue from its checkpoints,
lose no step and have the losses of an undisturbed run. Needs the programs of scripts/kube-up.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from kills import is_alive
from lab import STEPS, Lab, Log, check_complete, end, plain, steps_logged
from support.command import Command
from support.launchers import By, kubernetes

from axonlaunch.launch.external.kubernetes.cluster import Cluster

NODES, FAULTS = 2, 5
PATIENCE_S = 600
"""Seconds in which a disturbed run ends; a controller waits longer after each failure."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
"""The user's cache; the lab has another one."""
_INDEX = "batch.kubernetes.io/job-completion-index"
_MODEL = [
    *("model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=64", "train.global_batch_size=32"),
    *(f"train.steps={STEPS}", "train.log_every=1", "train.eval_batches=0", "optimizer.eps=1e-5"),
    *("launch.threads=1", "launch.device=cpu", "strategy=fsdp", "checkpoint.every=4", "name=run"),
    "train.micro_batch_size=1",  # steps that take long enough to be disturbed
]


def run(lab: Lab, seed: int, log: Log) -> None:
    """Disturb the pods of a run until it has had its faults."""
    chance = random.Random(seed)
    folder = lab.new(f"pods-{seed}")
    command = By(folder, [])
    os.environ.setdefault("AXONLAUNCH_KUBE", str(_CACHE / "axonlaunch" / "kube"))
    with kubernetes(folder / "kube") as cluster:
        command.variables["KUBECONFIG"] = str(cluster / "kubeconfig")
        os.environ["KUBECONFIG"] = command.variables["KUBECONFIG"]
        api = Cluster()
        runs = folder / "runs"
        runs.mkdir()
        (cluster / "claims").mkdir()
        (cluster / "claims" / "runs").symlink_to(runs)
        follower = command.start(
            *("train", *_MODEL, "launch=kubernetes", f"launch.nnodes={NODES}", "launch.nproc=1"),
            *("launch.max_restarts=20", "launch.timeout_s=120"),
            "launch.kubernetes.image=registry.example/train:1",
            f"launch.kubernetes.volumes=['runs:{runs}']",
            *("launch.kubernetes.memory=1Gi", "launch.kubernetes.grace_s=30"),
            f"launch.master_port={chance.randrange(20000, 30000)}",
        )
        for _ in range(FAULTS):
            if not _disturb(chance, command, api, cluster, follower, log):
                break
        done = end(follower, seconds=PATIENCE_S)
        assert done.status == 0, f"the job failed: {done.text[-3000:]}"
        check_complete(command, _losses(lab))


def _disturb(
    chance: random.Random, command: Command, api: Cluster, cluster: Path, follower: Any, log: Log
) -> bool:
    """Harm the run at a random moment; return whether it went on until then."""
    later = steps_logged(command) + chance.randint(0, STEPS // FAULTS)
    pods: list[dict[str, Any]] = []
    deadline = time.monotonic() + PATIENCE_S
    while not pods or steps_logged(command) < later:
        assert time.monotonic() < deadline, f"hangs: no step {later}"
        if not is_alive(follower.pid) or steps_logged(command) >= STEPS - 2:
            return False
        pods = _running(api)
        time.sleep(0.2)
    time.sleep(chance.uniform(0, 8 if later == steps_logged(command) else 0.5))
    pod = chance.choice(pods)
    name, index = pod["metadata"]["name"], pod["metadata"]["annotations"][_INDEX]
    action = chance.choice(["kill", "kill", "delete", "suspend", "suspend"])
    what = "" if action == "suspend" else f" pod {index}"
    log(f"{action}{what} at line {steps_logged(command)}", fault=True)
    if action == "suspend":
        _suspend(api, seconds=chance.uniform(0, 15))
    elif action == "delete":
        api.delete("Pod", name)
    else:
        with suppress(ProcessLookupError):
            os.kill(int((cluster / "pods" / name / "pid").read_text()), signal.SIGKILL)
    return True


def _suspend(api: Cluster, *, seconds: float) -> None:
    """Suspend the Job as a queue does that pre-empts it, and admit it again."""
    api.patch("Job", "run", {"spec": {"suspend": True}})
    time.sleep(seconds)
    api.patch("Job", "run", {"spec": {"suspend": False}})


def _running(api: Cluster) -> list[dict[str, Any]]:
    return [
        pod
        for pod in api.find("Pod", "axonlaunch/run=run")
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]


@cache
def _losses(lab: Lab) -> list[float]:
    """Return the losses of an undisturbed run."""
    command = plain(lab.new("undisturbed-pods"))
    process = command.start("train", *_MODEL, f"launch.nproc={NODES}")
    done = end(process, seconds=PATIENCE_S)
    assert done.status == 0, f"the undisturbed run failed: {done.text}"
    return command.losses("run")
