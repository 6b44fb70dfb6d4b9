"""Entry point of a rank that another launcher started, before it imports torch.

Rank 0 composes the configuration after it has met the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

from axonlaunch.config import Composed, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.composition.selected_options import name_selected_options
from axonlaunch.config.options.launch import LaunchConfig
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.environment.launcher_process import LauncherProcess
from axonlaunch.launch.request import Request, load_config
from axonlaunch.launch.run_folder.moved_runs import refuse_moved_run
from axonlaunch.launch.run_folder.restarts import resumes_if_restarted
from axonlaunch.system.node import allocator_settings
from axonlaunch.system.processes import forkserver


def be_rank(
    request: Request,
    environment: ClusterEnvironment,
    launcher: LauncherProcess,
    *,
    server: Callable[[], ForkServerContext],
    started: float,
    as_json: bool,
) -> tuple[int, dict[str, Any] | None]:
    """Run this process as the rank that the environment describes.

    Args:
        request: The parsed command line.
        environment: Environment that describes this rank.
        launcher: Launcher that started this process, which is watched.
        server: Starts the fork server if a layout is searched.
        started: ``time.time()`` at the start of the command.
        as_json: Whether standard output is reserved for JSON.

    Returns:
        The exit status and, on rank 0, the run's summary.

    Raises:
        ConfigError: The ranks can't meet or the configuration can't be run.
    """

    def resolve(counted: ClusterEnvironment) -> tuple[Composed, RunConfig]:
        from axonlaunch.preflight import checks

        composed, config = load_config(request, request.overrides, counted, server=server)
        refuse_moved_run(composed, config)
        config = resumes_if_restarted(config, launcher.identity)
        with name_selected_options(composed):
            resolved = checks.resolve(config, devices=counted.devices)
        if resolved.launch.backend == "mock":
            message = f"its ranks are threads of one process, and {environment.launcher} starts "
            message += "a process for each; use auto, gloo or nccl"
            raise ConfigError([ConfigIssue("launch.backend", message, "mock")])
        return composed, resolved

    allocator_settings.grow_segments()
    with forkserver.private_files():
        launch = _token_settings(request)
        from axonlaunch.launch.local.torch_internals import defer_compiler

        defer_compiler()
        from axonlaunch.launch.external import rank

        return rank.main(
            environment,
            resolve,
            launch=launch,
            launcher=launcher,
            started=started,
            as_json=as_json,
        )


def _token_settings(request: Request) -> LaunchConfig:
    """Return a launch configuration with the settings of the token.

    The configuration is composed only if the user may have set them. Otherwise only rank 0
    composes.
    """
    is_default = request.config_name == "config" and not request.config_dirs
    if is_default and not any("token" in override for override in request.overrides):
        return LaunchConfig()
    launch = request.compose(request.overrides).tree.get("launch", {})
    file, required = launch.get("token_file"), launch.get("require_token", False)
    return LaunchConfig(
        token_file=None if file is None else str(file), require_token=required is True
    )
