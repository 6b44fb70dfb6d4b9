"""Loads, checks and launches the run of a command line, or all runs of a sweep.

    runs = prepare_runs(load_runs(request, environment, options))
    for run in runs:
        results.append(run.launch())

All runs are checked before the first is launched.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from axonlaunch import config as configuration
from axonlaunch.config import Composed, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.composition.selected_options import name_selected_options
from axonlaunch.config.options.launch import LaunchConfig
from axonlaunch.config.options.training_hooks import is_best_highest
from axonlaunch.config.values.url import is_url
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.launcher import (
    LaunchOptions,
    check_function,
    launch_function,
    launcher,
    launcher_of,
)
from axonlaunch.launch.output import sweep
from axonlaunch.launch.request import Request, load_config
from axonlaunch.launch.run_folder import finished_runs
from axonlaunch.launch.run_folder.moved_runs import refuse_moved_run
from axonlaunch.launch.run_folder.names import free_name
from axonlaunch.launch.run_folder.restarts import resumes_if_restarted
from axonlaunch.system.text.spinner import spinner
from axonlaunch.verification.proofs.runner import is_to_be_proved, prove_layout
from axonlaunch.verification.result import Proof

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        status: Exit status.
        summary: Content of ``summary.json``; None if another process has it.
        is_last: Whether the command launches no later run.
    """

    status: int
    summary: dict[str, Any] | None
    is_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a command.

    Attributes:
        overrides: Overrides of the run.
        composed: Composed files, overrides and environment; None if a script passed the
            configuration.
        config: Configuration, which ``prepare_runs`` checks and completes.
        options: Options of the launch.
        finished: Summary of an earlier launch that trained all steps; None if steps are left.
        header: Line that is printed before a run of a sweep; empty for a single run.
        is_timed_alone: Whether its times count from its launch, not from ``options.started``.
    """

    overrides: list[str]
    composed: Composed | None
    config: RunConfig
    options: LaunchOptions
    finished: dict[str, Any] | None = None
    header: str = ""
    is_timed_alone: bool = False

    @property
    def is_on_this_node(self) -> bool:
        """Whether the launcher runs all ranks on this node and waits for them."""
        return launcher(launcher_of(self.config)).on_this_node

    def launch(self) -> RunResult:
        """Launch the run and wait for its end. A finished run is only reported.

        Raises:
            ConfigError: The run can't be launched.
        """
        if self.header:
            sweep.print_run_header(self.header, stream=stream_of(self.options))
        if self.finished is not None:
            if not self.header:
                text = finished_runs.finished_text(self.config, self.finished)
                print(text, file=stream_of(self.options))
            return RunResult(0, self.finished)
        started = time.time() if self.is_timed_alone else self.options.started
        options = dataclasses.replace(self.options, composed=self.composed, started=started)
        status, summary = launch_function(self.config)(self.config, options)
        # A failure ends only one run of a sweep.
        return RunResult(status, summary, is_last=status == INTERRUPTED)


def stream_of(options: LaunchOptions) -> TextIO:
    """Return the stream for the user: standard error if standard output is reserved for JSON."""
    return sys.stderr if options.as_json else sys.stdout


def load_runs(
    request: Request, environment: ClusterEnvironment, options: LaunchOptions
) -> list[Run]:
    """Compose and type the runs of a command line as the node that the environment describes.

    Raises:
        ConfigError: No node can run one of the configurations.
    """
    runs: list[Run] = []
    problems: list[ConfigIssue] = []
    options = dataclasses.replace(options, command=request.words())
    batches = request.overrides_of_runs()
    for overrides in batches:
        with _gathering(problems, overrides, is_sweep=len(batches) > 1):
            composed, config = load_config(
                request,
                overrides,
                environment,
                server=lambda: options.fork_server,
                needs_files=not options.dry_run,
            )
            refuse_moved_run(composed, config)
            config = resumes_if_restarted(config, options.identity)
            runs.append(Run(overrides=overrides, composed=composed, config=config, options=options))
    if problems:
        raise ConfigError(problems)
    return _with_folders(runs) if request.multirun else runs


def prepare_runs(runs: Sequence[Run]) -> list[Run]:
    """Check and complete all runs with their launcher, and prove their layouts if requested.

    Raises:
        ConfigError: A run can't be launched.
    """
    refuse_mixed_launchers(runs)
    if not runs[0].is_on_this_node:
        runs = _check(runs)
        is_alone = len(runs) == 1 or runs[0].options.render
        return runs if is_alone else _with_headers(runs)
    runs = [_with_finished(run) for run in runs]
    with spinner("checking") as show:
        runs = _check([_with_options(run, show=show) for run in runs])
    # Steps of train.epochs are known only now.
    runs = [_with_finished(run) for run in runs]
    runs = _prove(runs)
    return runs if len(runs) == 1 else _with_headers(runs)


def refuse_mixed_launchers(runs: Sequence[Run]) -> None:
    """Refuse runs that no single launcher can launch in one command.

    Raises:
        ConfigError: The runs have several launchers, or the launcher does not support sweeps or
            ``--render``.
    """
    names = {launcher_of(run.config): run.config.launch for run in runs}
    for name, launch in names.items():
        if not launcher(name).sweeps and len(runs) > 1:
            raise ConfigError([_refused_sweep(name, launch, len(runs))])
        if runs[0].options.render and not launcher(name).renders:
            message = (
                "--render prints what would be submitted; use slurm, kubernetes, skypilot or dstack"
            )
            raise ConfigError([ConfigIssue("launch.name", message, launch.name)])
        if runs[0].options.render and len(runs) > 1 and not launcher(name).renders_sweeps:
            message = f"--render prints one job of {name}; print those of the sweep one by one"
            raise ConfigError([ConfigIssue("launch.name", message, launch.name)])
    if len(names) > 1:
        message = "all runs of a sweep need the same launcher; start the others separately"
        raise ConfigError([ConfigIssue("launch.name", message, launch.name)])


def _refused_sweep(name: str, launch: LaunchConfig, runs: int) -> ConfigIssue:
    if launch.name == name:
        message = f"launches one run per command, not {runs}; start them one by one"
        return ConfigIssue("launch.name", message, name)
    message = "a sweep runs on one node; use 1, or start its runs one by one"
    return ConfigIssue("launch.nnodes", message, launch.nnodes)


def print_comparison(runs: Sequence[Run], results: Sequence[RunResult]) -> None:
    """Print the table that compares the runs of a sweep on this node.

    Args:
        runs: All runs of the command.
        results: Results of the runs that were launched, in the same order.
    """
    if len(runs) > 1 and runs[0].is_on_this_node:
        best = runs[0].config.train.best_metric
        sweep.print_sweep_table(
            sweep.varied_overrides([run.overrides for run in runs]),
            [result.summary for result in results if result.summary is not None],
            stream=stream_of(runs[0].options),
            metric=best,
            is_highest=is_best_highest(runs[0].config.metrics, best),
        )


def _check(runs: Sequence[Run]) -> list[Run]:
    """Check and complete each unfinished run with its launcher.

    Raises:
        ConfigError: A run can't be launched.
    """
    checked: list[Run] = []
    problems: list[ConfigIssue] = []
    for run in runs:
        with _gathering(problems, run.overrides, is_sweep=len(runs) > 1):
            config = run.config
            if run.finished is None:
                with name_selected_options(run.composed):
                    config = check_function(config)(config, run.options)
            checked.append(dataclasses.replace(run, config=config))
    if problems:
        raise ConfigError(problems)
    return checked


def _prove(runs: list[Run]) -> list[Run]:
    """Prove the layout of each unfinished run that requests it, and print the results.

    Raises:
        ConfigError: A layout does not compute the same as a single process.
    """
    proofs: list[Proof | None] = [None] * len(runs)
    unproved = [run.finished is None and is_to_be_proved(run.config) for run in runs]
    if not any(unproved):
        return runs
    with spinner("proving that the layout computes what one process does (Ctrl-C ends it)"):
        proofs = [
            prove_layout(run.options.fork_server, run.config) if is_unproved else None
            for run, is_unproved in zip(runs, unproved, strict=True)
        ]
    for line in dict.fromkeys(str(proof) for proof in proofs if proof is not None):
        print(line, file=stream_of(runs[0].options))
    return [_with_options(run, proof=proof) for run, proof in zip(runs, proofs, strict=True)]


def _with_headers(runs: Sequence[Run]) -> list[Run]:
    """Give each run of a sweep its header and the name that resumes the whole sweep."""
    variations = sweep.varied_overrides([run.overrides for run in runs])
    name = sweep.name_of_sweep([run.config for run in runs])
    first = next((index for index, run in enumerate(runs) if run.finished is None), 0)
    return [
        dataclasses.replace(
            _with_options(run, resumed_name=name),
            header=sweep.run_header(
                variation, number=index + 1, of=len(runs), is_done=run.finished is not None
            ),
            is_timed_alone=index > first,
        )
        for index, (run, variation) in enumerate(zip(runs, variations, strict=True))
    ]


def _with_finished(run: Run) -> Run:
    if run.finished is not None:
        return run
    return dataclasses.replace(run, finished=finished_runs.finished_summary(run.config))


def _with_options(run: Run, **changed: Any) -> Run:
    return dataclasses.replace(run, options=dataclasses.replace(run.options, **changed))


@contextmanager
def _gathering(
    problems: list[ConfigIssue], overrides: Sequence[str], *, is_sweep: bool
) -> Iterator[None]:
    """Add the problems of a run of a sweep to those of others, with the overrides of the run."""
    try:
        yield
    except ConfigError as error:
        if not is_sweep:
            raise
        prefix = sweep.as_written(overrides)
        problems += [
            dataclasses.replace(problem, key="", message=f"{prefix}: {problem}")
            for problem in error.problems
        ]


def _with_folders(runs: list[Run]) -> list[Run]:
    """Give each run of a sweep a separate folder: that of its name, or a numbered one.

    Raises:
        ConfigError: Some but not all runs share a name, or runs with different names share a
            folder.
    """
    configs = [run.config for run in runs]
    names = {(config.name, config.run_dir) for config in configs}
    if len(names) == len(configs) > 1:
        _refuse_shared(configs)
        return runs
    first = configs[0]
    if len(names) > 1:
        message = "some runs of the sweep share it; give all runs the same name, or each its own"
        raise ConfigError([ConfigIssue("name", message, first.name)])
    name, parent = first.name, first.run_dir
    if name == parent == "auto":
        name = free_name(f"{first.model.name}-sweep")
    name = Path(parent).name if name == "auto" else name
    numbered = []
    for index, run in enumerate(runs):
        settings: dict[str, Any] = {"name": f"{name}/{index}"}
        if parent != "auto":  # otherwise the launcher finds the folder of the name
            settings["run_dir"] = str(Path(parent, str(index)))
        if run.config.checkpoint.path is not None:
            settings["checkpoint.path"] = f"{run.config.checkpoint.path.rstrip('/')}/{index}"
        config = configuration.with_values(run.config, settings)
        numbered.append(dataclasses.replace(run, config=config))
    return numbered


def _refuse_shared(configs: Sequence[RunConfig]) -> None:
    """Refuse runs with different names that would write into the same folder.

    Raises:
        ConfigError: Two runs share a run folder or a checkpoint folder.
    """
    folders = [None if config.run_dir == "auto" else config.run_dir for config in configs]
    paths = [config.checkpoint.path for config in configs]
    for key, values in (("run_dir", folders), ("checkpoint.path", paths)):
        locations: set[str] = set()
        for value in values:
            if value is None:
                continue
            location = value.rstrip("/") if is_url(value) else str(Path(value).resolve())
            if location in locations:
                message = (
                    "runs of the sweep would share it; give each its own, as in "
                    f"'{key}={value.rstrip('/')}/${{name}}'"
                )
                raise ConfigError([ConfigIssue(key, message, value)])
            locations.add(location)
