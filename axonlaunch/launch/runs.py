"""The runs of a command line: one, or a sweep's; all are checked before the first is launched.

How a run is launched is its launcher's.
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
from axonlaunch.config.url import is_url
from axonlaunch.launch import run_dir
from axonlaunch.launch.cluster_environment import ClusterEnvironment
from axonlaunch.launch.launcher import LaunchOptions, check_function, launcher, launcher_of
from axonlaunch.launch.output import sweep
from axonlaunch.launch.output.spinner import spinner
from axonlaunch.planning import auto_strategy
from axonlaunch.system import forked_call
from axonlaunch.verification.result import Proof
from axonlaunch.verification.runner import is_to_be_proved, prove_layout

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks for.

    Attributes:
        overrides: Of the run, or of a sweep's.
        config_name: The primary config.
        config_dirs: Folders of a user's own YAML.
        multirun: Whether the overrides are a sweep.
    """

    overrides: Sequence[str]
    config_name: str = "config"
    config_dirs: Sequence[Path] = ()
    multirun: bool = False

    def refuse_sweep_under(self, environment: ClusterEnvironment) -> None:
        """Refuse a sweep where a launcher started this process.

        Raises:
            ConfigError: It did, and this is one.
        """
        if self.multirun and environment.launcher:
            message = f"{environment.launcher} started this process as a part of one run"
            raise ConfigError([ConfigIssue("", f"-m: {message}; start a sweep from one node")])

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose the overrides of one run.

        Raises:
            ConfigError: The files themselves can't be composed.
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
        """Compose and type one run, for the process that the environment describes.

        Args:
            overrides: Of the run.
            environment: What started this process.
            server: Starts the fork server, if none runs yet.
            accelerators: Counts this node's; None: a forked process does.

        Returns:
            What the files, the overrides and the environment say, and the configuration.

        Raises:
            ConfigError: The run can't be run anywhere.
        """
        count = accelerators or partial(accelerators_of, server)

        def compose(arguments: Sequence[str]) -> Composed:
            return environment.applied_to(self.compose(arguments), accelerators=count)

        return auto_strategy.load_auto_strategy(
            overrides, compose=compose, server=server, config_dirs=self.config_dirs
        )


def accelerators_of(server: Callable[[], ForkServerContext]) -> int:
    """Count this node's accelerators, in a forked process."""
    count: int = forked_call.call(
        server(), "axonlaunch.preflight.devices:accelerators", task="counting accelerators"
    )
    return count


@dataclass
class Runs:
    """The runs of a command, in turn: iterate, launch each, and say how it ended.

    Attributes:
        loaded: The overrides and the configuration of each.
        options: How they are to be launched.
        composed: What the files, the overrides and the environment say of each, where a command
            asked for them.
        summaries: Of those that ended.
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
        """Compose what a command line asks for, for the node that the environment describes.

        Raises:
            ConfigError: A run can't be run anywhere.
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
        """Check all runs, then yield those to launch, until one ends the command.

        Raises:
            ConfigError: One can't be run; none was launched.
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
            ConfigError: They have several, or the one can't do what is asked for.
        """
        names = {launcher_of(config): config.launch for _, config in self.loaded}
        for name, launch in names.items():
            if not launcher(name).sweeps and len(self.loaded) > 1:
                message = "a sweep runs on one node; use 1, or start its runs one by one"
                raise ConfigError([ConfigIssue("launch.nnodes", message, launch.nnodes)])
            if self.options.render and not launcher(name).renders:
                message = "the script of a SLURM job is asked for; use slurm"
                raise ConfigError([ConfigIssue("launch.name", message, launch.name)])
        if len(names) > 1:
            message = "the runs of a sweep have one launcher; start those of another by themselves"
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
        """Yield a sweep's runs but for those that were done before, and compare all at the end."""
        before = [run_dir.finished_summary(config) for _, config in self.loaded]
        with spinner("checking"):
            pairs = zip(self.loaded, before, strict=True)
            runs = check_all([run for run, summary in pairs if summary is None], self.options)
        left = zip(runs, self._prove_layouts(runs), strict=True)
        varied = sweep.varied_overrides([overrides for overrides, _ in self.loaded])
        again = sweep.again([config for _, config in self.loaded])
        started = self.options.started
        for number, summary in enumerate(before, start=1):
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
            config, proof = next(left)
            yield (
                config,
                dataclasses.replace(
                    self._options(number - 1), again=again, proof=proof, started=started
                ),
            )
            if self._statuses[-1] == INTERRUPTED:  # it means them all; a failure only its own run
                break
            started = time.time()
        sweep.print_sweep_table(varied, self.summaries, stream=self._stream)

    def _prove_layouts(self, configs: Sequence[RunConfig]) -> list[Proof | None]:
        """Prove the layout of each run that asks for it, and say in a line what is known.

        Raises:
            ConfigError: One does not compute what one process does.
        """
        if not any(is_to_be_proved(config) for config in configs):
            return [None] * len(configs)
        with spinner("proving that the layout computes what one process does (Ctrl-C ends it)"):
            proofs = [prove_layout(self.options.context, config) for config in configs]
        for line in dict.fromkeys(str(proof) for proof in proofs if proof is not None):
            print(line, file=self._stream)
        return proofs

    def _options(self, index: int) -> LaunchOptions:
        """Return how one run is to be launched."""
        composed = self.composed[index] if self.composed else None
        return dataclasses.replace(self.options, composed=composed)

    @property
    def _stream(self) -> Any:
        return sys.stderr if self.options.as_json else sys.stdout


def load_all(
    request: Request, *, load: Callable[[Sequence[str]], RunConfig]
) -> list[tuple[list[str], RunConfig]]:
    """Return each run of a command line: its overrides, and its configuration as they say it.

    Raises:
        ConfigError: One can't be run anywhere.
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
    """Let each run's launcher check and complete its configuration.

    Raises:
        ConfigError: One can't be run.
    """
    return _all(
        [
            (overrides, partial(check_function(config), config, options))
            for overrides, config in loaded
        ]
    )


def _all(runs: Sequence[tuple[list[str], Callable[[], RunConfig]]]) -> list[RunConfig]:
    """Make each run's configuration; of several, say which ones are wrong.

    Args:
        runs: Its overrides, and what makes its configuration.

    Raises:
        ConfigError: All that is wrong with any.
    """
    made: list[RunConfig] = []
    problems: list[ConfigIssue] = []
    for overrides, make in runs:
        try:
            made.append(make())
        except ConfigError as error:
            if len(runs) == 1:
                raise
            where = sweep.as_written(overrides)
            problems += [
                dataclasses.replace(problem, key="", message=f"{where}: {problem}")
                for problem in error.problems
            ]
    if problems:
        raise ConfigError(problems)
    return made


def _numbered(configs: list[RunConfig]) -> list[RunConfig]:
    """Give each run of a sweep a folder of its own: its own name's, else numbered ones.

    Raises:
        ConfigError: Some runs, not all, share a name; or runs of several names share a folder.
    """
    named = {(config.name, config.run_dir) for config in configs}
    if len(named) == len(configs) > 1:
        _refuse_shared(configs)
        return configs
    first = configs[0]
    if len(named) > 1:
        message = "some runs of the sweep share it; name all alike, or each for itself"
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
    """Refuse runs that have names of their own, and would write into one folder.

    Raises:
        ConfigError: Some would.
    """
    folders = [None if config.run_dir == "auto" else config.run_dir for config in configs]
    paths = [config.checkpoint.path for config in configs]
    for key, values in (("run_dir", folders), ("checkpoint.path", paths)):
        seen: set[str] = set()
        for value in values:
            if value is None:
                continue
            place = value.rstrip("/") if is_url(value) else str(Path(value).resolve())
            if place in seen:
                message = (
                    "runs of the sweep would share it; give each its own, as in "
                    f"'{key}={value.rstrip('/')}/${{name}}'"
                )
                raise ConfigError([ConfigIssue(key, message, value)])
            seen.add(place)
