"""Prints a run as a task of SkyPilot or dstack, which start one process on each node.

These tools have commands of their own to submit, follow and stop it. The task reads the secret that
the nodes share from the environment, so that it is not in the YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.layout import is_on_cpu
from axonlaunch.config.options.launch import DstackConfig, LaunchConfig, SkyPilotConfig
from axonlaunch.config.problems.errors import gathering
from axonlaunch.config.values.url import is_url
from axonlaunch.launch.launcher import (
    LaunchOptions,
    check_anywhere,
    submission_issues,
)
from axonlaunch.launch.run_folder.names import with_folder_of_nodes
from axonlaunch.system.text.yaml_blocks import to_block_yaml

SECRET_VARIABLE = "AXONLAUNCH_TOKEN"
"""Environment variable of the task with the secret of the nodes; the ranks do not see it."""
_FOLDER = "$HOME/.axonlaunch-job"
_NAMES = {
    "skypilot": (r"[a-z][a-z0-9-]*", "letters a-z"),  # it shortens long ones
    "dstack": (r"[a-z][a-z0-9-]{1,40}", "2 to 41 letters a-z"),
}
"""Names of tasks that a tool accepts, as a pattern and in words."""
_SUBMIT = {
    "skypilot": "sky jobs launch FILE",
    "dstack": "dstack apply -f FILE",
}


def check(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Run the checks that apply to every node, and those of the settings of a task.

    Raises:
        ConfigError: No node can run the configuration, or a setting that a task needs is missing.
    """
    launch, name = config.launch, config.launch.name
    issues: list[ConfigIssue] = []
    if not options.render and not options.dry_run:
        message = f"only prints the task: add --render, and submit it with {_SUBMIT[name]}"
        issues.append(ConfigIssue("launch.name", message, name))
    origin = f"{name} sets it on each node"
    issues += submission_issues(launch, target="task", run="a task", node="node", origin=origin)
    if not is_on_cpu(launch) and _options(launch).gpu is None:
        message = "is required, as H100; or write launch.device=cpu"
        issues.append(ConfigIssue(f"launch.{name}.gpu", message))
    if _options(launch).image is None:
        message = (
            "is required: a container image with axonlaunch and your code; "
            "axonlaunch help launchers shows a Containerfile"
        )
        issues.append(ConfigIssue(f"launch.{name}.image", message))
    if not is_url(config.checkpoint.path or ""):
        message = (
            "the disk of a node ends with it, and the other nodes don't see it; write "
            "s3://bucket/run, or gs://bucket/run"
        )
        issues.append(ConfigIssue("checkpoint.path", message, config.checkpoint.path))
    if not issues:
        with gathering(issues):
            config = check_anywhere(config, options)
            issues += _name_issues(with_folder_of_nodes(config))
    if issues:
        raise ConfigError(issues)
    return config


def launch(config: RunConfig, options: LaunchOptions) -> tuple[int, dict[str, Any] | None]:
    """Print the task of a run.

    Args:
        config: Configuration returned by ``check``.
        options: Options of the launch.

    Returns:
        The exit status, and None: no run was started.
    """
    del options
    print(render_task(config), end="")
    return 0, None


def render_task(config: RunConfig) -> str:
    """Return the YAML of a run's task, for the tool in ``launch.name``."""
    config = with_folder_of_nodes(config)
    tool, legal = config.launch.name, _task_name(config)
    task = _sky_task(config, legal) if tool == "skypilot" else _dstack_task(config, legal)
    header = f"# {_SUBMIT[tool]}"
    if int(config.launch.nnodes) > 1:
        secret = f" --secret {SECRET_VARIABLE}" if tool == "skypilot" else ""
        header = f'# export {SECRET_VARIABLE}="$(openssl rand -hex 32)"\n{header}{secret}'
    return f"{header}\n{to_block_yaml(task)}"


def _task_name(config: RunConfig) -> str:
    """Return the name of a run in lower case, with ``-`` for all other characters."""
    return re.sub(r"[^a-z0-9]+", "-", str(config.name).lower()).strip("-")


def _name_issues(config: RunConfig) -> Iterator[ConfigIssue]:
    name = _task_name(config)
    pattern, letters = _NAMES[config.launch.name]
    if not re.fullmatch(pattern, name):
        message = (
            f"would be the task {name or 'without a name'}; tasks have {letters}, digits and -, "
            "and begin with a letter"
        )
        yield ConfigIssue("name", message, config.name)


def _options(launch: LaunchConfig) -> SkyPilotConfig | DstackConfig:
    return launch.skypilot if launch.name == "skypilot" else launch.dstack


def _script(config: RunConfig) -> str:
    """Return a script that writes the configuration and the token, and trains."""
    settings: dict[str, Any] = {"launch.name": "auto"}
    token = []
    if int(config.launch.nnodes) > 1:
        # The home folder differs between images, and no file of the node is in the YAML.
        settings["launch.token_file"] = "~/.axonlaunch-job/token"
        token = [
            f'(umask 077; printf %s "${SECRET_VARIABLE}" > "{_FOLDER}/token")',
            f"unset {SECRET_VARIABLE}",
        ]
    text = configuration.to_yaml(configuration.with_values(config, settings))
    lines = [
        "set -e",
        f'mkdir -p "{_FOLDER}"',
        *token,
        f"cat > \"{_FOLDER}/job.yaml\" <<'AXONLAUNCH_END'\n{text}AXONLAUNCH_END",
        f'axonlaunch train --config-dir "{_FOLDER}" --config-name job',
    ]
    return "\n".join(lines) + "\n"


def _sky_task(config: RunConfig, name: str) -> dict[str, Any]:
    launch, options = config.launch, config.launch.skypilot
    resources: dict[str, Any] = {}
    if options.infra:
        resources["infra"] = options.infra
    if not is_on_cpu(launch):
        resources["accelerators"] = f"{options.gpu}:{launch.nproc}"
    resources["image_id"] = f"docker:{options.image}"
    # SkyPilot replaces lost nodes by default. A failure ends the job, because the nodes have
    # restarted the run before; SkyPilot would also repeat configuration errors.
    task: dict[str, Any] = {"name": name, "num_nodes": int(launch.nnodes), "resources": resources}
    if int(launch.nnodes) > 1:
        task["secrets"] = {SECRET_VARIABLE: None}
    task["run"] = _script(config)
    return task


def _dstack_task(config: RunConfig, name: str) -> dict[str, Any]:
    launch, options = config.launch, config.launch.dstack
    task: dict[str, Any] = {"type": "task", "name": name, "nodes": int(launch.nnodes)}
    task["image"] = options.image
    if int(launch.nnodes) > 1:
        task["env"] = [SECRET_VARIABLE]
    # dstack joins commands with &&, which a text that is written to a file does not survive.
    task["commands"] = [_script(config)]
    if not is_on_cpu(launch):
        task["resources"] = {"gpu": f"{options.gpu}:{launch.nproc}", "shm_size": "16GB"}
    task["retry"] = {"on_events": ["no-capacity", "interruption"], "duration": "1d"}
    return task
