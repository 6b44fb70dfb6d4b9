"""Commands of a rendered Job's pods, run as processes with their environment, without a cluster."""

from __future__ import annotations

import signal
import time
from functools import partial

import pytest
import yaml
from support import served as forked
from support.command import TINY, Served, wait_for
from support.launchers import ended, logged, unused_port

pytestmark = [pytest.mark.slow, pytest.mark.processes]


class Pods:
    """Pods of a Job, without a cluster: each is the command with the index of its pod.

    Attributes:
        command: The command.
    """

    def __init__(self, served: Served, *overrides: str, name: str) -> None:
        self.command, folder = served, served.folder
        options = ["image=registry.example/train:1", "memory=1Gi", "grace_s=30"]
        rendered = served(
            *("train", *overrides, f"name={name}", "launch=kubernetes", "launch.nproc=1"),
            *("--render", f"launch.master_port={unused_port()}"),
            *(f"launch.kubernetes.{option}" for option in options),
            f"launch.kubernetes.volumes=['runs:{folder}/runs']",
        ).stdout
        config_map = next(each for each in yaml.safe_load_all(rendered) if each)
        text = config_map["data"]["job.yaml"].replace(f"{name}-0.{name}", "127.0.0.1")
        self._config = folder / f"{name}-config"
        self._config.mkdir()
        token = self._config / "token"
        token.touch(mode=0o600)
        token.write_text("0123456789abcdef")
        text = text.replace("/run/axonlaunch/token/token", str(token))
        (self._config / "job.yaml").write_text(text)

    def start(self, index: int) -> forked.Forked:
        """Start the pod with this index."""
        command = self.command
        return forked.Forked(
            forked.command,
            command.server,
            *("train", "--config-dir", str(self._config), "--config-name", "job"),
            folder=command.folder,
            environment={**command.environment(), "JOB_COMPLETION_INDEX": str(index)},
        )


def test_processes_with_the_index_of_a_job_train_to_the_losses_of_a_local_run(
    served: Served,
) -> None:
    overrides = [*TINY, "strategy=fsdp", "launch.device=cpu", "launch.threads=1"]
    pods = Pods(served, *overrides, "launch.nnodes=2", name="big")
    for status, output, errors in ended([pods.start(index) for index in range(2)], timeout=200):
        assert status == 0, f"{output}\n{errors}"
    served("train", *overrides, "name=local", "launch.nproc=2")
    assert served.losses("big") == served.losses("local")


@pytest.mark.parametrize(
    ("victim", "pause_s"),
    [(1, 0.0), (2, 8.0), (0, 0.0)],
    ids=["replaced at once", "replaced late", "the first pod"],
)
def test_killed_pod_is_replaced_and_the_run_continues_from_its_checkpoint(
    served: Served, faulty: list[str], victim: int, pause_s: float
) -> None:
    overrides = [word for word in faulty if not word.startswith("launch.")]
    overrides += ["strategy=fsdp", "train.steps=30", "train.global_batch_size=12"]
    overrides += ["launch.device=cpu", "launch.threads=1"]
    restarts = ["launch.nnodes=3", "launch.max_restarts=3", "checkpoint.every=4"]
    pods = Pods(served, *overrides, *restarts, "model.arguments={pause:0.2}", name="run")
    running = {index: pods.start(index) for index in range(3)}
    logged(served.folder / "runs/run/metrics.jsonl", 6, seconds=150)
    running[victim].send_signal(signal.SIGKILL)
    running[victim].communicate(timeout=10)
    time.sleep(pause_s)
    running[victim] = pods.start(victim)
    if victim == 0:  # the others end with it, and the controller replaces them too
        for index in (1, 2):
            _, errors = running[index].communicate(timeout=60)
            assert running[index].returncode == 75, errors
            running[index] = pods.start(index)
    for status, output, errors in ended([*running.values()], timeout=200):
        assert status == 0, f"{output}\n{errors}"
    served("train", *overrides, "name=local", "launch.nproc=3")
    assert served.losses("run") == served.losses("local")


def test_pods_that_stop_at_different_times_continue_together(
    served: Served, faulty: list[str]
) -> None:
    """One is replaced while the first still saves, and joins the one that replaces that."""
    overrides = [word for word in faulty if not word.startswith("launch.")]
    overrides += ["strategy=fsdp", "train.steps=30", "launch.device=cpu", "launch.threads=1"]
    settings = ["launch.nnodes=2", "checkpoint.every=100", "model.arguments={pause:0.2}"]
    pods = Pods(served, *overrides, *settings, name="run")
    first, second = pods.start(0), pods.start(1)
    logged(served.folder / "runs/run/metrics.jsonl", 6, seconds=150)
    early = pods.start(1)
    time.sleep(4)
    second.send_signal(signal.SIGTERM)
    assert [status for status, _, _ in ended([first, second])] == [130, 130]
    for status, output, errors in ended([pods.start(0), early], timeout=200):
        assert status == 0, f"{output}\n{errors}"
    assert "node 0 has ended (interrupted)" in output
    served("train", *overrides, "name=local", "launch.nproc=2")
    assert served.losses("run") == served.losses("local")


def printed(pod: forked.Forked, line: str) -> bool:
    return line in pod.printed()


def test_pod_that_waits_for_the_others_ends_at_the_request(
    served: Served, faulty: list[str]
) -> None:
    overrides = [word for word in faulty if not word.startswith("launch.")]
    pods = Pods(served, *overrides, "launch.device=cpu", "launch.nnodes=2", name="run")
    for index, line in enumerate(("waiting for 1 of 2 nodes", "node 1: joining")):
        waiting = pods.start(index)
        wait_for(partial(printed, waiting, line), seconds=120)
        waiting.send_signal(signal.SIGTERM)
        _, errors = waiting.communicate(timeout=10)
        assert waiting.returncode == 130, errors
