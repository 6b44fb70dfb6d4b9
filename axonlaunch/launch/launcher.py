"""From a command's overrides to runs: one, or a sweep's, in turn.

It chooses the launcher; the launcher does the work.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

from axonlaunch import config as configuration
from axonlaunch.config import Composed, Composer, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.layout import nodes
from axonlaunch.config.schema import LaunchConfig
from axonlaunch.launch import cluster_environment, run_dir, sweep
from axonlaunch.launch.cluster_environment import ClusterEnvironment
from axonlaunch.launch.external.launcher_process import LauncherProcess
from axonlaunch.launch.local import launcher as local_launcher
from axonlaunch.launch.output.spinner import spinner
from axonlaunch.planning import auto_strategy
from axonlaunch.planning.auto_strategy import Compose
from axonlaunch.system import forked_call, forkserver


def start(
    context: ForkServerContext | None,
    overrides: Sequence[str],
    *,
    config_name: str,
    config_dirs: Sequence[Path],
    multirun: bool,
    started: float,
    as_json: bool,
    render: bool = False,
) -> tuple[int, list[dict[str, Any]]]:
    """Run what a command line asks for, as that for which this process was started.

    Every configuration of a sweep is checked before the first run starts.

    Args:
        context: Of the warm fork server; None where it was not started yet.
        overrides: The words.
        config_name: The primary config.
        config_dirs: Folders of a user's own YAML.
        multirun: Whether the words are a sweep.
        started: ``time.time()`` when the command began.
        as_json: Keep standard output free.
        render: Print the script of a SLURM job, and start nothing.

    Returns:
        The first exit status that is not 0, and the summary of each run that this process leads.

    Raises:
        ConfigError: A configuration can't be run.
    """
    where = _Where.read()
    launcher = LauncherProcess("" if where.found is None else where.found.launcher)
    launcher.watch()  # before torch is imported, which takes seconds
    compose = partial(configuration.compose, config_name=config_name, config_dirs=config_dirs)
    if multirun and where.found is not None:
        message = f"{where.found.launcher} started this process as a part of one run"
        raise ConfigError([ConfigIssue("", f"-m: {message}; start a sweep from one node")])
    with ExitStack() as stack:

        def server() -> ForkServerContext:
            nonlocal context
            context = context or stack.enter_context(forkserver.warm())
            return context

        if where.is_rank(lambda: compose(overrides), accelerators=partial(_accelerators, server)):
            load = partial(auto_strategy.load, overrides, server=server, config_dirs=config_dirs)
            stack.enter_context(forkserver.private_files())
            # Only rank 0 composes, unless somebody may have said where the token is.
            is_ours = config_name == "config" and not config_dirs
            if is_ours and not any("token" in word for word in overrides):
                launch = LaunchConfig()
            else:
                launch = _of_token(compose(overrides))
            return _as_rank(
                load, compose, where, launch, launcher, started=started, as_json=as_json
            )
        server()
        # What torch's store says of strangers that knock is not for the user; set after the server
        # was started, whose ranks keep their words.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        load = partial(
            auto_strategy.load,
            compose=where.composing(compose, accelerators=partial(_accelerators, server)),
            server=server,
            config_dirs=config_dirs,
        )
        configs = loaded(overrides, load=load, config_dirs=config_dirs, multirun=multirun)
        if render or any(config.launch.name == "slurm" for _, config in configs):
            return _submit(server(), [config for _, config in configs], render, as_json)
        return _run(server(), configs, started=started, as_json=as_json)


def _run(
    context: ForkServerContext,
    loaded: list[tuple[list[str], RunConfig]],
    *,
    started: float,
    as_json: bool,
) -> tuple[int, list[dict[str, Any]]]:
    if any(nodes(config)[1] > 1 for _, config in loaded):
        from axonlaunch.launch.multinode import launcher as multinode_launcher

        if len(loaded) > 1:
            message = "a sweep runs on one node; use 1, or start its runs one by one"
            raise ConfigError([ConfigIssue("launch.nnodes", message, loaded[0][1].launch.nnodes)])
        [(_, config)] = loaded
        problems: list[ConfigIssue] = []
        try:
            config = forked_call.call(context, "axonlaunch.preflight.checks:resolve", config)
        except ConfigError as error:  # reported to the other nodes
            problems = error.problems
        status, summary = multinode_launcher.train(
            config, problems, context, started=started, as_json=as_json
        )
        return status, [summary] if summary else []
    if len(loaded) > 1:
        return _sweep(context, loaded, started=started, as_json=as_json)
    [(_, given)] = loaded
    if (summary := run_dir.finished(given)) is not None:
        name = run_dir.with_run_dir(given).name
        text = (
            f"{name} is finished: it has trained all of its {summary['steps']} steps; to continue, "
        )
        text += "use more train.steps; to start over, use another name"
        print(text, file=sys.stderr if as_json else sys.stdout)
        return 0, [summary]
    with spinner("checking"):
        [config] = resolved(context, loaded)
    status, summary = local_launcher.train(config, context, started=started, as_json=as_json)
    return status, [summary]


def _sweep(
    context: ForkServerContext,
    loaded: list[tuple[list[str], RunConfig]],
    *,
    started: float,
    as_json: bool,
) -> tuple[int, list[dict[str, Any]]]:
    """Run a sweep's configurations in turn, but for those that were done before."""
    before = [run_dir.finished(config) for _, config in loaded]
    with spinner("checking"):
        pairs = zip(loaded, before, strict=True)
        left = iter(resolved(context, [one for one, summary in pairs if summary is None]))
    stream = sys.stderr if as_json else sys.stdout
    words = sweep.varied([batch for batch, _ in loaded])
    again = sweep.again([config for _, config in loaded])
    summaries: list[dict[str, Any]] = []
    statuses: list[int] = []
    for number, summary in enumerate(before, start=1):
        sweep.announce(
            words[number - 1],
            number=number,
            of=len(loaded),
            stream=stream,
            is_done=summary is not None,
        )
        if summary is not None:
            summaries.append(summary)
            continue
        status, summary = local_launcher.train(
            next(left), context, started=started, as_json=as_json, again=again
        )
        summaries.append(summary)
        statuses.append(status)
        if status == 130:  # Ctrl-C means them all; a run that fails takes no other's turn
            break
        started = time.time()
    sweep.compare(words, summaries, stream=stream)
    return next((status for status in statuses if status), 0), summaries


def _submit(
    context: ForkServerContext, configs: list[RunConfig], render: bool, as_json: bool
) -> tuple[int, list[dict[str, Any]]]:
    """Submit jobs, or print their scripts."""
    from axonlaunch.launch import slurm

    output, summaries = (sys.stderr if as_json else sys.stdout), []
    for config in configs:
        if config.launch.name != "slurm":
            message = "the script of a SLURM job is asked for; use slurm"
            raise ConfigError([ConfigIssue("launch.name", message, config.launch.name)])
        if problems := slurm.problems(config):
            raise ConfigError(problems)
    resolve = partial(forked_call.call, context, "axonlaunch.preflight.checks:resolve_anywhere")
    configs = [resolve(config) for config in configs]
    status = 0
    for config in configs:
        if render:
            print(slurm.render(run_dir.with_run_dir(config)), end="")
            continue
        status, summary = slurm.submit(config, announce=lambda text: print(text, file=output))
        summaries.append(summary)
        if status:
            break
    return status, summaries


def _as_rank(
    load: Callable[..., RunConfig],
    compose: Compose,
    where: _Where,
    launch: LaunchConfig,
    launcher: LauncherProcess,
    *,
    started: float,
    as_json: bool,
) -> tuple[int, list[dict[str, Any]]]:
    from axonlaunch.launch.external import rank

    assert where.found is not None

    def make(found: ClusterEnvironment) -> RunConfig:
        from axonlaunch.preflight import checks

        here = dataclasses.replace(where, found=found)

        def settled(words: Sequence[str]) -> Composed:
            return here.settled(compose(words), accelerators=checks.accelerators)

        return checks.resolve(load(compose=settled))

    status, summary = rank.train(
        where.found, make, launch=launch, launcher=launcher, started=started, as_json=as_json
    )
    return status, [summary] if summary else []


def _of_token(composed: Composed) -> LaunchConfig:
    """Return what a rank has to know of the token before it can meet the others."""
    launch = composed.tree.get("launch", {})
    file, required = launch.get("token_file"), launch.get("require_token", False)
    return LaunchConfig(
        token_file=None if file is None else str(file), require_token=required is True
    )


@dataclass(frozen=True)
class _Where:
    """What the environment says, and what is wrong with what they say."""

    found: ClusterEnvironment | None
    problems: tuple[ConfigIssue, ...] = ()

    @classmethod
    def read(cls) -> Self:
        try:
            return cls(cluster_environment.detect(os.environ))
        except ConfigError as error:
            return cls(None, tuple(error.problems))

    def is_rank(self, compose: Callable[[], Composed], *, accelerators: Callable[[], int]) -> bool:
        """Whether this process is one rank, rather than to start those of its node."""
        if self.found is None or self.found.local_rank is None:
            return False
        if not self.found.one_per_node:
            return True
        nproc = compose().tree.get("launch", {}).get("nproc", "auto")
        count = accelerators() if nproc == "auto" else nproc
        return not (isinstance(count, int) and count > 1)

    def settled(self, composed: Composed, *, accelerators: Callable[[], int]) -> Composed:
        """Return the composed configuration with what the environment says of ``launch``."""
        tree: dict[str, Any] = {**composed.tree, "launch": {**composed.tree.get("launch", {})}}
        name, problems = tree["launch"].get("name", "auto"), list(self.problems)
        if self.found is not None and self.found.local_rank is not None and name == "local":
            message = f"each of the processes of {self.found.launcher} would start a run; use auto"
            problems = [ConfigIssue("launch.name", message, name)]
        elif name == "local":
            problems = []
        elif self.found is not None:
            problems += cluster_environment.apply_to_config(
                tree, self.found, accelerators=accelerators
            )
        elif name == "env" and not problems and tree["launch"].get("nnodes", 1) == 1:
            message = (
                "the environment names no world; set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT"
            )
            problems.append(ConfigIssue("launch.name", message, name))
        return dataclasses.replace(composed, tree=tree, problems=[*composed.problems, *problems])

    def composing(self, compose: Compose, *, accelerators: Callable[[], int]) -> Compose:
        """Return what composes words for a node that starts its ranks itself."""
        where = self
        if self.found is not None and self.found.one_per_node:
            where = dataclasses.replace(
                self, found=dataclasses.replace(self.found, local_rank=None)
            )
        return lambda words: where.settled(compose(words), accelerators=accelerators)


def _accelerators(server: Callable[[], ForkServerContext]) -> int:
    count: int = forked_call.call(server(), "axonlaunch.preflight.checks:accelerators")
    return count


def loaded(
    overrides: Sequence[str],
    *,
    load: Callable[[Sequence[str]], RunConfig],
    config_dirs: Sequence[Path],
    multirun: bool,
) -> list[tuple[list[str], RunConfig]]:
    """Return each run of a command line: its words, and its configuration as they say it.

    Raises:
        ConfigError: One can't be run anywhere.
    """
    batches = [list(overrides)]
    if multirun:
        batches = Composer(config_dirs=config_dirs).sweep(overrides)
    configs = _each([(batch, partial(load, batch)) for batch in batches])
    configs = _numbered(configs) if multirun else configs
    return list(zip(batches, configs, strict=True))


def resolved(
    context: ForkServerContext, loaded: list[tuple[list[str], RunConfig]]
) -> list[RunConfig]:
    """Check runs by what this node has, and decide what was left to it.

    Raises:
        ConfigError: One can't be run here.
    """
    resolve = partial(forked_call.call, context, "axonlaunch.preflight.checks:resolve")
    return _each([(batch, partial(resolve, config)) for batch, config in loaded])


def _each(runs: Sequence[tuple[list[str], Callable[[], RunConfig]]]) -> list[RunConfig]:
    """Make each run's configuration; of several, say which ones are wrong.

    Args:
        runs: Its words, and what makes its configuration.

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
            where = sweep.written(overrides)
            problems += [ConfigIssue("", f"{where}: {problem}") for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return made


def _numbered(configs: list[RunConfig]) -> list[RunConfig]:
    """Give each run of a sweep a folder of its own: its own name's, else numbered ones.

    Raises:
        ConfigError: Some runs, not all, share a name or a folder.
    """
    named = {(config.name, config.run_dir) for config in configs}
    if len(named) == len(configs) > 1:
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
