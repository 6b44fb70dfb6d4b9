"""Checks a run on a Ray cluster, starts it there and follows it to its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.options.launch import RayConfig
from axonlaunch.config.problems.errors import gathering
from axonlaunch.config.values.plain_values import LARGEST_YAML, read_yaml
from axonlaunch.config.values.url import is_url
from axonlaunch.launch.external.followed_job import follow_job
from axonlaunch.launch.external.ray.cluster import check_size, connect_to_cluster
from axonlaunch.launch.external.ray.ray_job import RayJob
from axonlaunch.launch.external.ray.run_spec import RunSpec
from axonlaunch.launch.launcher import (
    LaunchOptions,
    check_anywhere,
    submission_issues,
)
from axonlaunch.launch.run_folder.names import with_folder_of_nodes
from axonlaunch.system.storage.files import read_text
from axonlaunch.system.storage.home import expand_home


def check(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """Run the checks that apply to every node, and those of the settings of the cluster.

    Raises:
        ConfigError: No node can run the configuration, or a setting that the run needs is missing.
    """
    issues = list(_setting_issues(config))
    with gathering(issues):
        read_runtime_env(config.launch.ray)
    if not issues:
        with gathering(issues):
            config = check_anywhere(config, options)
    if issues:
        raise ConfigError(issues)
    return with_folder_of_nodes(config)


def _setting_issues(config: RunConfig) -> Iterator[ConfigIssue]:
    yield from submission_issues(
        config.launch,
        target="cluster",
        run="a run on Ray",
        node="node",
        origin="Ray's nodes get it from the run",
    )
    if config.checkpoint.resume == "never" or config.checkpoint.overwrite:
        message = "a node that is replaced would start over; use another name to start new"
        key, value = ("resume", "never") if not config.checkpoint.overwrite else ("overwrite", True)
        yield ConfigIssue(f"checkpoint.{key}", message, value)
    in_bucket = is_url(config.checkpoint.path or "")
    if not in_bucket and not Path(config.run_dir).is_absolute():
        message = (
            "all nodes of the cluster must share the folder; write run_dir=/shared/run, or save "
            "to a bucket, as checkpoint.path=s3://bucket/run"
        )
        yield ConfigIssue("run_dir", message, config.run_dir)


def read_runtime_env(options: RayConfig) -> dict[str, Any] | None:
    """Return the content of ``launch.ray.runtime_env``; None if the key is not set.

    Raises:
        ConfigError: The file can't be read.
    """
    path, key = options.runtime_env, "launch.ray.runtime_env"
    if path is None:
        return None
    try:
        return read_yaml(read_text(expand_home(path), at_most=LARGEST_YAML))
    except OSError as error:
        raise ConfigError([ConfigIssue(key, f"can't be read: {error.strerror}", path)]) from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError([ConfigIssue(key, f"is no YAML of one object: {reason}", path)]) from None


def launch(config: RunConfig, options: LaunchOptions) -> tuple[int, dict[str, Any] | None]:
    """Start a run on the cluster and follow it to its end. Ctrl-C stops following.

    Args:
        config: Configuration returned by ``check``.
        options: Options of the launch.

    Returns:
        The exit status, and the name, run folder and last state of the run.

    Raises:
        ConfigError: There is no such cluster, it is too small, or it has this run already.
    """
    address = config.launch.ray.address
    output = sys.stderr if options.as_json else sys.stdout
    spec = RunSpec.of(config)
    connect_to_cluster(address, read_runtime_env(config.launch.ray))
    if not config.launch.ray.autoscaling:
        check_size(spec)
    job = RayJob.submit(address, spec)
    print(
        f"{job.name} started on Ray; axonlaunch stop {job.name} stops it, Ctrl-C here only stops "
        "following it",
        file=output,
    )
    status, state = follow_job(job, lambda text: print(text, file=output))
    return status, {"name": job.name, "run_dir": job.run_dir, "state": state}
