"""Checks and estimates runs without starting them.

A configuration that no node can run is an error. Problems of this node, found by the checks of the
launcher, are reported as obstacles.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext

from axonlaunch import config as configuration
from axonlaunch.config import Composed, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.composition.selected_options import name_selected_options
from axonlaunch.config.problems.errors import gathering
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.launcher import LaunchOptions, check_function
from axonlaunch.launch.request import Request
from axonlaunch.launch.run_folder import finished_runs
from axonlaunch.launch.runs import Run, load_runs, refuse_mixed_launchers
from axonlaunch.planning.estimate import forecast, resolve_for_node
from axonlaunch.planning.records import Forecast
from axonlaunch.planning.tracing.shape_only_data import (
    replace_with_synthetic,
    with_file_placeholders,
)
from axonlaunch.verification.proofs.runner import preview_proof
from axonlaunch.verification.result import Proof


@dataclass(frozen=True)
class DryRun:
    """A run that was checked and estimated.

    Attributes:
        config: Configuration that was estimated, with automatic settings resolved.
        forecast: Estimated memory and time.
        obstacles: Problems that prevent a launch on this node, each with its remedy.
        proof: Proof of the layout that a launch would run first; None if it would run none.
        finished: Message that the run is already finished; empty if it is not.
    """

    config: RunConfig
    forecast: Forecast
    obstacles: list[ConfigIssue]
    proof: Proof | None
    finished: str = ""


def dry_runs(
    request: Request, environment: ClusterEnvironment, options: LaunchOptions
) -> list[DryRun]:
    """Check and estimate the run of a command line, or each run of a sweep.

    Args:
        request: The parsed command line.
        environment: Environment of the launcher that started this process, if any. The ranks of
            this node would be started here.
        options: Options of the launch.

    Raises:
        ConfigError: No node can run a configuration, or no single launcher can launch all runs.
    """
    runs = load_runs(request, environment, options)
    refuse_mixed_launchers(runs)
    return [_dry_run(run, missing=_missing(request.compose(run.overrides))) for run in runs]


def _dry_run(run: Run, *, missing: list[ConfigIssue]) -> DryRun:
    config, context, issues, finished = run.config, run.options.fork_server, list(missing), ""
    ready = resolve_for_node(context, config)
    if missing:  # missing data files can't be checked
        synthetic = replace_with_synthetic(config)
        config = dataclasses.replace(config, data=synthetic.data, train=synthetic.train)
    with gathering(issues), name_selected_options(run.composed):
        if run.is_on_this_node:
            finished = _text_if_finished(config)
        if not finished:
            checked = check_function(config)(config, run.options)
            if run.is_on_this_node:  # steps of train.epochs are known only now
                finished = _text_if_finished(checked)
    proof = preview_proof(context, ready)
    return DryRun(ready, _estimate(context, ready), issues, proof, finished)


def _text_if_finished(config: RunConfig) -> str:
    summary = finished_runs.finished_summary(config)
    return "" if summary is None else finished_runs.finished_text(config, summary)


def _estimate(context: ForkServerContext, config: RunConfig) -> Forecast:
    """Estimate a run; if it can't be traced, estimate only its parameters and states."""
    try:
        return forecast(context, config)
    except ConfigError as error:
        # Raises ConfigError if no node can run the configuration.
        estimate = forecast(context, config, analytic=True)
        reasons = [str(problem) for problem in error.problems]
        return dataclasses.replace(estimate, notes=[*reasons, *estimate.notes])


def _missing(composed: Composed) -> list[ConfigIssue]:
    """Return the problems of missing data files, which a launch needs but an estimate does not."""
    if with_file_placeholders(composed.tree) == composed.tree:
        return []
    try:
        configuration.type_config(composed.tree, composed.problems, origins=composed.origins)
    except ConfigError as error:
        return [problem for problem in error.problems if problem.key.startswith("data.")]
    return []
