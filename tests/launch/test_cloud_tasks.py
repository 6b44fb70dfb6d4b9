"""Tasks of SkyPilot and dstack: their keys, and what their script does on a node."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError
from axonlaunch.launch.external import cloud_tasks
from axonlaunch.launch.launcher import LaunchOptions

NODES = ["launch.nnodes=2", "launch.nproc=8", "train.global_batch_size=32", "name=Big_Run"]
IMAGE = "registry.example/train:1"
BUCKET = "checkpoint.path=s3://bucket/big"


def rendered(tool: str, *overrides: str) -> tuple[str, dict[str, Any]]:
    node = [f"launch.{tool}.gpu=H100", f"launch.{tool}.image={IMAGE}"]
    config = configuration.load([f"launch={tool}", *node, *NODES, BUCKET, *overrides])
    text = cloud_tasks.render_task(config)
    return text, yaml.safe_load(text)


def test_skypilot_task_names_nodes_accelerators_and_the_secret() -> None:
    text, task = rendered("skypilot", "launch.max_restarts=3")
    assert "sky jobs launch FILE --secret AXONLAUNCH_TOKEN" in text
    assert {**task, "run": None} == {
        "name": "big-run",
        "num_nodes": 2,
        "resources": {
            "accelerators": "H100:8",
            "image_id": f"docker:{IMAGE}",
        },
        "secrets": {"AXONLAUNCH_TOKEN": None},
        "run": None,
    }


def test_dstack_task_names_nodes_accelerators_and_the_secret() -> None:
    text, task = rendered("dstack")
    assert "dstack apply -f FILE" in text
    assert {**task, "commands": None} == {
        "type": "task",
        "name": "big-run",
        "nodes": 2,
        "image": IMAGE,
        "env": ["AXONLAUNCH_TOKEN"],
        "commands": None,
        "resources": {"gpu": "H100:8", "shm_size": "16GB"},
        "retry": {"on_events": ["no-capacity", "interruption"], "duration": "1d"},
    }


@pytest.mark.parametrize("tool", ["skypilot", "dstack"])
def test_script_of_a_task_hands_configuration_and_token_to_the_node(
    tool: str, tmp_path: Path
) -> None:
    _, task = rendered(tool)
    script = task["run"] if tool == "skypilot" else " && ".join(task["commands"]).strip()
    program = tmp_path / "bin" / "axonlaunch"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"; echo "${AXONLAUNCH_TOKEN-unset}"\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "AXONLAUNCH_TOKEN": "not for the log",
    }
    ran = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    folder = tmp_path / ".axonlaunch-job"
    assert ran.stdout == f"train --config-dir {folder} --config-name job\nunset\n"
    launch = yaml.safe_load((folder / "job.yaml").read_text())["launch"]
    assert (launch["name"], launch["nnodes"], launch["nproc"]) == ("auto", 2, 8)
    assert Path(launch["token_file"]).name == "token"
    assert (folder / "token").read_text() == "not for the log"
    assert (folder / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("tool", "name", "task", "is_legal"),
    [
        ("dstack", "llama-3.1", "llama-3-1", True),
        ("dstack", "3rd", "3rd", False),
        ("dstack", "a" * 42, "a" * 42, False),
        ("dstack", "a", "a", False),
        ("skypilot", "3rd", "3rd", False),
        ("skypilot", "a" * 42, "a" * 42, True),
        ("skypilot", "a", "a", True),
    ],
)
def test_name_is_made_legal_for_the_tool_or_refused(
    tool: str, name: str, task: str, is_legal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_tasks, "check_anywhere", lambda config, options: config)
    words = [f"launch={tool}", "launch.nproc=8", f"launch.{tool}.gpu=H100", f"name={name}"]
    words += [f"launch.{tool}.image={IMAGE}", "checkpoint.path=s3://bucket/run"]
    config = configuration.load(words)
    options = LaunchOptions(fork_server=None, started=0.0, render=True)  # type: ignore[arg-type]
    if is_legal:
        config = cloud_tasks.check(config, options)
        assert yaml.safe_load(cloud_tasks.render_task(config))["name"] == task
        return
    with pytest.raises(ConfigError, match=f"name={name}: would be the task {task}; tasks have "):
        cloud_tasks.check(config, options)


def test_settings_that_a_task_needs_are_all_reported() -> None:
    words = ["checkpoint.path=/disk", "launch.nnodes=2:4", "launch.master_port=29500"]
    config = configuration.load(["launch=dstack", *words])
    options = LaunchOptions(fork_server=None, started=0.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        cloud_tasks.check(config, options)
    assert [str(problem) for problem in caught.value.problems] == [
        "launch.name=dstack: only prints the task: add --render, and submit it with dstack apply "
        "-f FILE",
        "launch.nproc=auto: is required for a task; write the number of devices per node",
        "launch.nnodes=2:4: a task has a fixed number of nodes; write one number",
        "launch.master_port=29500: dstack sets it on each node; remove this setting",
        "launch.dstack.gpu: is required, as H100; or write launch.device=cpu",
        "launch.dstack.image: is required: a container image with axonlaunch and your code; "
        "axonlaunch help launchers shows a Containerfile",
        "checkpoint.path=/disk: the disk of a node ends with it, and the other nodes don't see it; "
        "write s3://bucket/run, or gs://bucket/run",
    ]


PACKAGES = {"skypilot": "skypilot==0.14.1", "dstack": "dstack==0.22.5"}
READERS = {
    "skypilot": """
import sky
task = sky.Task.from_yaml_config(content, secrets_overrides=[("AXONLAUNCH_TOKEN", "x")])
(resources,) = task.resources
read = [task.name, task.num_nodes, resources.accelerators, [*task.secrets]]
""",
    "dstack": """
from dstack._internal.core.models.configurations import parse_apply_configuration
task = parse_apply_configuration(content)
gpu = task.resources.gpu
gpus = {gpu.name[0]: gpu.count.min} if gpu and gpu.name else None
read = [task.name, task.nodes, gpus, [*task.env]]
""",
}
"""How each tool reads a task: its name, nodes, accelerators of a node, and secrets."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("tool", ["skypilot", "dstack"])
def test_tool_accepts_its_tasks(tool: str, tmp_path: Path) -> None:
    """The tools don't fit into one environment with axonlaunch."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    python = str(folder / "bin/python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", PACKAGES[tool]]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{PACKAGES[tool]} can't be installed: {installed.stderr[-300:]}")
    script = (
        f"import json, sys\ncontent = json.load(sys.stdin){READERS[tool]}print(json.dumps(read))"
    )

    def read(task: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-c", script],
            input=json.dumps(task),
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    image = f"launch.{tool}.image=registry.example/train:1"
    cases = {("H100",): [image, "launch.max_restarts=3"], (): [image, "launch.device=cpu"]}
    for accelerators, overrides in cases.items():
        _, task = rendered(tool, *overrides)
        ran = read(task)
        assert ran.returncode == 0, ran.stderr
        expected = dict.fromkeys(accelerators, 8) or None
        printed = json.loads(ran.stdout.splitlines()[-1])
        assert printed == ["big-run", 2, expected, ["AXONLAUNCH_TOKEN"]]
    assert read({**task, "nodez": 2}).returncode != 0
