"""What a run would take anywhere, and what would stop it on this node; nothing is started.

It refuses what can't be run on any node, and only reports what is missing here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext

from axonlaunch import config as configuration
from axonlaunch.config import Composed, ConfigError, ConfigIssue, RunConfig
from axonlaunch.launch.external import slurm
from axonlaunch.launch.runs import Request, load_all
from axonlaunch.planning import auto_strategy
from axonlaunch.planning.estimate import forecast, prepared
from axonlaunch.planning.records import Forecast
from axonlaunch.planning.tracing.shape_only_data import naming_files, replace_with_synthetic
from axonlaunch.system import forked_call
from axonlaunch.verification.result import Proof
from axonlaunch.verification.runner import foresee_proof


@dataclass(frozen=True)
class DryRun:
    """A run that was checked and estimated.

    Attributes:
        config: As ``estimate.forecast`` took it.
        forecast: Its estimate.
        proof: What a start would prove of the layout first; None: nothing.
        obstacles: What would stop a start on this node, each with its remedy.
    """

    config: RunConfig
    forecast: Forecast
    obstacles: list[ConfigIssue]
    proof: Proof | None


def dry_runs(context: ForkServerContext, request: Request) -> list[DryRun]:
    """Check and estimate what a command line asks for: one run, or each of a sweep.

    Raises:
        ConfigError: A configuration can't be run on any node.
    """

    def with_files(overrides: Sequence[str]) -> Composed:
        composed = request.compose(overrides)
        return dataclasses.replace(composed, tree=naming_files(composed.tree))

    load = partial(
        auto_strategy.load_auto_strategy,
        compose=with_files,
        server=lambda: context,
        config_dirs=request.config_dirs,
    )
    return [
        _dry_run(context, config, missing=_missing(request.compose(overrides)))
        for overrides, config in load_all(request, load=load)
    ]


def _dry_run(
    context: ForkServerContext, config: RunConfig, *, missing: list[ConfigIssue]
) -> DryRun:
    ready = prepared(context, config)
    # Files that are not named can't be checked; those that are, are read as a start reads them.
    data = replace_with_synthetic(ready).data if missing else config.data
    here = _here(context, config, dataclasses.replace(ready, data=data))
    return DryRun(
        ready, _estimated(context, ready), [*missing, *here], foresee_proof(context, ready)
    )


def _estimated(context: ForkServerContext, config: RunConfig) -> Forecast:
    """Estimate a run; of one that can't be traced, its states alone."""
    try:
        return forecast(context, config)
    except ConfigError as error:
        estimate = forecast(context, config, analytic=True)  # refuses what can't be run anywhere
        reasons = [str(problem) for problem in error.problems]
        return dataclasses.replace(estimate, notes=[*reasons, *estimate.notes])


def _here(context: ForkServerContext, config: RunConfig, ready: RunConfig) -> list[ConfigIssue]:
    """Return what would keep the run from starting on this node.

    Args:
        context: Of the warm fork server.
        config: As loaded.
        ready: The same, with the ranks that it would have here.
    """
    if config.launch.name == "slurm":
        return slurm.job_issues(config)  # a job's nodes are not this node
    issues: list[ConfigIssue] = forked_call.call(
        context, "axonlaunch.preflight.checks:obstacles", ready
    )
    return issues


def _missing(composed: Composed) -> list[ConfigIssue]:
    """Report missing data files, which a start needs and an estimate does not."""
    if naming_files(composed.tree) == composed.tree:
        return []
    try:
        configuration.typed(composed.tree, composed.problems, origins=composed.origins)
    except ConfigError as error:
        return [problem for problem in error.problems if problem.key.startswith("data.")]
    return []
