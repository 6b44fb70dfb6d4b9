"""What the pods of a rendered Job do: processes with their environment, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from command import TINY, Command
from launchers import By, ended

PORT = 23071


@pytest.mark.slow
@pytest.mark.processes
def test_processes_with_the_index_of_a_job_train_to_the_losses_of_a_local_run(
    axonlaunch: Command, tmp_path: Path
) -> None:
    options = ["image=registry.example/train:1", "memory=1Gi", "grace_s=30"]
    overrides = [*TINY, "strategy=fsdp", "launch.device=cpu", "launch.threads=1"]
    rendered = axonlaunch(
        *("train", *overrides, "name=big", "launch=kubernetes", "launch.nnodes=2"),
        *("launch.nproc=1", f"launch.master_port={PORT}", "--render"),
        *(f"launch.kubernetes.{option}" for option in options),
        f"launch.kubernetes.volumes=['runs:{tmp_path}/runs']",
    ).stdout
    config_map = next(each for each in yaml.safe_load_all(rendered) if each)
    text = config_map["data"]["job.yaml"].replace("big-0.big", "127.0.0.1")
    (tmp_path / "config").mkdir()
    token = tmp_path / "config" / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef")
    text = text.replace("/run/axonlaunch/token/token", str(token))
    (tmp_path / "config" / "job.yaml").write_text(text)
    command = ["train", "--config-dir", str(tmp_path / "config"), "--config-name", "job"]
    pods = [
        By(tmp_path, [], {"JOB_COMPLETION_INDEX": str(index)}).start(*command) for index in range(2)
    ]
    for status, output, errors in ended(pods, timeout=200):
        assert status == 0, f"{output}\n{errors}"
    axonlaunch("train", *overrides, "name=local", "launch.nproc=2")
    assert axonlaunch.losses("big") == axonlaunch.losses("local")
