"""Loads, checks and launches the run of a command line, or all runs of a sweep.

All runs are checked before the first is launched.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

from axonlaunch import config as configuration
from axonlaunch.config import Composed, Composer, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.values.url import is_url
from axonlaunch.launch import run_dir
from axonlaunch.launch.cluster_environment import ClusterEnvironment
from axonlaunch.launch.launcher import (
    LaunchOptions,
    check_function,
    launcher,
    launcher_of,
)
from axonlaunch.launch.output import sweep
from axonlaunch.launch.output.spinner import spinner
from axonlaunch.planning import auto_strategy
from axonlaunch.system.processes import forked_call
from axonlaunch.verification.proofs.runner import is_to_be_proved, prove_layout
from axonlaunch.verification.result import Proof

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The parsed arguments of a command line.

    Attributes:
        overrides: Overrides of the run, or of all runs of a sweep.
        config_name: Name of the primary config.
        config_dirs: Folders with the user's YAML files.
        multirun: Whether the overrides describe a sweep.
    """

    overrides: Sequence[str]
    config_name: str = "config"
    config_dirs: Sequence[Path] = ()
    multirun: bool = False

    def refuse_sweep_under(self, environment: ClusterEnvironment) -> None:
        """Refuse a sweep in a process that a launcher started.

        Raises:
            ConfigError: This is a sweep and a launcher started this process.
        """
        if self.multirun and environment.launcher:
            message = f"{environment.launcher} started this process as a part of one run"
            raise ConfigError([ConfigIssue("", f"-m: {message}; start a sweep from one node")])

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose the overrides of one run.

        Raises:
            ConfigError: The files can't be composed.
        """
        return configuration.compose(
            overrides, config_name=self.config_name, config_dirs=self.config_dirs
        )

    def load(
        self,
        overrides: Sequence[str],
        environment: ClusterEnvironment,
        *,
        server: Callable[[], ForkServerContext],
        accelerators: Callable[[], int] | None = None,
    ) -> tuple[Composed, RunConfig]:
        """Compose and type one run as the process that the environment describes.

        Args:
            overrides: Overrides of the run.
            environment: Environment of the launcher that started this process, if any.
            server: Starts the fork server if it does not run yet.
            accelerators: Counts this node's accelerators; None counts them in a forked process.

        Returns:
            Composed files, overrides and environment, and the typed configuration.

        Raises:
            ConfigError: No node can run the configuration.
        """
        count = accelerators or partial(accelerators_of, server)

        def compose(arguments: Sequence[str]) -> Composed:
            return environment.applied_to(self.compose(arguments), accelerators=count)

        return auto_strategy.load_auto_strategy(
            overrides, compose=compose, server=server, config_dirs=self.config_dirs
        )


def accelerators_of(server: Callable[[], ForkServerContext]) -> int:
    """Count this node's accelerators in a forked process."""
    count: int = forked_call.call(
        server(), "axonlaunch.preflight.devices:accelerators", task="counting accelerators"
    )
    return count


@dataclass
class Runs:
    """The runs of a command, one after another.

    The caller iterates, launches each run that is yielded, and calls ``record_end`` before the next
    iteration.

    Attributes:
        loaded: Overrides and configuration of each run.
        options: Options of the launch.
        composed: Composed files, overrides and environment of each run; empty if no command
            launches the runs.
        summaries: Summaries of the runs that have ended.
    """

    loaded: list[tuple[list[str], RunConfig]]
    options: LaunchOptions
    composed: list[Composed] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)
    _statuses: list[int] = field(default_factory=list)

    @classmethod
    def load(
        cls, request: Request, environment: ClusterEnvironment, options: LaunchOptions
    ) -> Self:
        """Load the runs of a command line as the node that the environment describes.

        Raises:
            ConfigError: No node can run one of the configurations.
        """
        composed: list[Composed] = []

        def load(overrides: Sequence[str]) -> RunConfig:
            said, loaded = request.load(overrides, environment, server=lambda: options.context)
            composed.append(said)
            return run_dir.resumes_if_restarted(loaded, options.identity)

        return cls(load_all(request, load=load), options, composed)

    @property
    def status(self) -> int:
        """The first exit status that is not 0."""
        return next((status for status in self._statuses if status), 0)

    def record_end(self, status: int, summary: dict[str, Any] | None) -> None:
        """Record how the last launched run ended."""
        self._statuses.append(status)
        if summary is not None:
            self.summaries.append(summary)

    def __iter__(self) -> Iterator[tuple[RunConfig, LaunchOptions]]:
        """Check all runs, then yield each run to launch. Stop early if Ctrl-C ends one.

        Raises:
            ConfigError: A run can't be launched; none was launched.
        """
        if not launcher(self.launcher_name()).on_this_node:
            for config in check_all(self.loaded, self.options):
                yield config, self._options(0)
                if self.status:
                    return
        elif len(self.loaded) == 1:
            yield from self._one()
        else:
            yield from self._each()

    def launcher_name(self) -> str:
        """Return the name of the launcher of all runs.

        Raises:
            ConfigError: The runs have several launchers, or the launcher does not support sweeps or
                ``--render``.
        """
        names = {launcher_of(config): config.launch for _, config in self.loaded}
        for name, launch in names.items():
            if not launcher(name).sweeps and len(self.loaded) > 1:
                message = "a sweep runs on one node; use 1, or start its runs one by one"
                raise ConfigError([ConfigIssue("launch.nnodes", message, launch.nnodes)])
            if self.options.render and not launcher(name).renders:
                message = "--render prints the script of a SLURM job; use slurm"
                raise ConfigError([ConfigIssue("launch.name", message, launch.name)])
        if len(names) > 1:
            message = "all runs of a sweep need the same launcher; start the others separately"
            raise ConfigError([ConfigIssue("launch.name", message, launch.name)])
        return name

    def _one(self) -> Iterator[tuple[RunConfig, LaunchOptions]]:
        [(_, loaded)] = self.loaded
        if (summary := run_dir.finished_summary(loaded)) is None:
            with spinner("checking") as show:
                options = dataclasses.replace(self._options(0), show=show)
                [config] = check_all(self.loaded, options)
            [proof] = self._prove_layouts([config])
            yield config, dataclasses.replace(self._options(0), proof=proof)
            return
        print(run_dir.finished_text(loaded, summary), file=self._stream)
        self.record_end(0, summary)

    def _each(self) -> Iterator[tuple[RunConfig, LaunchOptions]]:
        """Yield the unfinished runs of a sweep, then print a table that compares all runs."""
        earlier_summaries = [run_dir.finished_summary(config) for _, config in self.loaded]
        with spinner("checking"):
            pairs = zip(self.loaded, earlier_summaries, strict=True)
            runs = check_all([run for run, summary in pairs if summary is None], self.options)
        remaining = zip(runs, self._prove_layouts(runs), strict=True)
        varied = sweep.varied_overrides([overrides for overrides, _ in self.loaded])
        again = sweep.again([config for _, config in self.loaded])
        started = self.options.started
        for number, summary in enumerate(earlier_summaries, start=1):
            sweep.print_run_header(
                varied[number - 1],
                number=number,
                of=len(self.loaded),
                stream=self._stream,
                is_done=summary is not None,
            )
            if summary is not None:
                self.record_end(0, summary)
                continue
            config, proof = next(remaining)
            yield (
                config,
                dataclasses.replace(
                    self._options(number - 1), again=again, proof=proof, started=started
                ),
            )
            if self._statuses[-1] == INTERRUPTED:  # Ctrl-C ends the sweep, a failure only one run
                break
            started = time.time()
        sweep.print_sweep_table(varied, self.summaries, stream=self._stream)

    def _prove_layouts(self, configs: Sequence[RunConfig]) -> list[Proof | None]:
        """Prove the layout of each run that requests it, and print the results.

        Raises:
            ConfigError: A layout does not compute the same as a single process.
        """
        if not any(is_to_be_proved(config) for config in configs):
            return [None] * len(configs)
        with spinner("proving that the layout computes what one process does (Ctrl-C ends it)"):
            proofs = [prove_layout(self.options.context, config) for config in configs]
        for line in dict.fromkeys(str(proof) for proof in proofs if proof is not None):
            print(line, file=self._stream)
        return proofs

    def _options(self, index: int) -> LaunchOptions:
        """Return the launch options of one run."""
        composed = self.composed[index] if self.composed else None
        return dataclasses.replace(self.options, composed=composed)

    @property
    def _stream(self) -> Any:
        return sys.stderr if self.options.as_json else sys.stdout


def load_all(
    request: Request, *, load: Callable[[Sequence[str]], RunConfig]
) -> list[tuple[list[str], RunConfig]]:
    """Return the overrides and the configuration of each run of a command line.

    Raises:
        ConfigError: No node can run one of the configurations.
    """
    batches = [list(request.overrides)]
    if request.multirun:
        batches = Composer(config_dirs=request.config_dirs).sweep(request.overrides)
    configs = _all([(batch, partial(load, batch)) for batch in batches])
    configs = _numbered(configs) if request.multirun else configs
    return list(zip(batches, configs, strict=True))


def check_all(
    loaded: Sequence[tuple[list[str], RunConfig]], options: LaunchOptions
) -> list[RunConfig]:
    """Check and complete each run's configuration with its launcher.

    Raises:
        ConfigError: A run can't be launched.
    """
    return _all(
        [
            (overrides, partial(check_function(config), config, options))
            for overrides, config in loaded
        ]
    )


def _all(runs: Sequence[tuple[list[str], Callable[[], RunConfig]]]) -> list[RunConfig]:
    """Build the configuration of each run and collect the problems of all.

    If there are several runs, each problem names the overrides of its run.

    Args:
        runs: Overrides of each run and a function that builds its configuration.

    Raises:
        ConfigError: A configuration has problems.
    """
    configs: list[RunConfig] = []
    problems: list[ConfigIssue] = []
    for overrides, build in runs:
        try:
            configs.append(build())
        except ConfigError as error:
            if len(runs) == 1:
                raise
            prefix = sweep.as_written(overrides)
            problems += [
                dataclasses.replace(problem, key="", message=f"{prefix}: {problem}")
                for problem in error.problems
            ]
    if problems:
        raise ConfigError(problems)
    return configs


def _numbered(configs: list[RunConfig]) -> list[RunConfig]:
    """Give each run of a sweep a separate folder: that of its name, or a numbered one.

    Raises:
        ConfigError: Some but not all runs share a name, or runs with different names share a
            folder.
    """
    names = {(config.name, config.run_dir) for config in configs}
    if len(names) == len(configs) > 1:
        _refuse_shared(configs)
        return configs
    first = configs[0]
    if len(names) > 1:
        message = "some runs of the sweep share it; give all runs the same name, or each its own"
        raise ConfigError([ConfigIssue("name", message, first.name)])
    name, parent = first.name, first.run_dir
    if name == parent == "auto":
        name = run_dir.free_name(f"{first.model.name}-sweep")
    name = Path(parent).name if name == "auto" else name
    parent = str(Path("runs", name)) if parent == "auto" else parent
    numbered = []
    for index, config in enumerate(configs):
        settings: dict[str, Any] = {
            "name": f"{name}/{index}",
            "run_dir": str(Path(parent, str(index))),
        }
        if config.checkpoint.path is not None:
            settings["checkpoint.path"] = f"{config.checkpoint.path.rstrip('/')}/{index}"
        numbered.append(configuration.with_values(config, settings))
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
