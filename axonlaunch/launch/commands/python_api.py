"""Commands as functions for scripts and notebooks, from ``load`` and ``train`` to ``export``.

Importing this module imports no torch. Work with torch is done in processes forked from a server,
which each call starts and ends. They do not import the caller's script, so the script needs no
``if __name__ == "__main__"``. Only ``sample`` and ``export`` work in the caller's process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from axonlaunch import config as configuration
from axonlaunch.config import Composed, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.precision import NUMBER_FORMATS
from axonlaunch.config.problems.errors import one_of
from axonlaunch.launch.environment.accelerators import count_accelerators
from axonlaunch.launch.environment.cluster_environment import ClusterEnvironment
from axonlaunch.launch.environment.launcher_process import LauncherProcess
from axonlaunch.launch.failures.user_errors import config_errors
from axonlaunch.launch.launcher import LaunchOptions
from axonlaunch.launch.local.preload_rules import preloads, preloads_of_config
from axonlaunch.launch.run_folder.restarts import resumes_if_restarted
from axonlaunch.launch.runs import INTERRUPTED, Run, prepare_runs
from axonlaunch.planning import auto_strategy
from axonlaunch.planning.estimate import forecast, resolve_for_node, with_changes
from axonlaunch.planning.plan import allowed_keys, plan_config
from axonlaunch.planning.records import Forecast, Plan
from axonlaunch.planning.search.keys import SEARCHED
from axonlaunch.system.node import limits
from axonlaunch.system.processes import forkserver
from axonlaunch.verification.proofs import runner
from axonlaunch.verification.result import ParityResult


@dataclass(eq=False)
class RunFailedError(RuntimeError):
    """A run that ``train`` has started failed.

    Attributes:
        summary: Content of ``summary.json``, with ``reason``, ``failed_rank`` and ``run_dir``;
            empty on all nodes except the first.
    """

    summary: dict[str, Any]

    def __str__(self) -> str:
        if "reason" not in self.summary:
            return "the run failed; the lines printed before tell why"
        rank, reason, folder = (self.summary[key] for key in ("failed_rank", "reason", "run_dir"))
        return f"rank {rank} failed: {reason}; see {folder}/crash.json and {folder}/logs"


@config_errors()
def load(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "config",
    config_dirs: Sequence[str | Path] = (),
) -> RunConfig:
    """Compose, type and check a configuration. With ``strategy=auto``, search its layout.

    Args:
        overrides: Settings as on the command line, ``["strategy=fsdp", "train.steps=10"]``.
        config_name: Name of the primary configuration file, without .yaml.
        config_dirs: Folders with the user's YAML files, searched before the included ones.

    Raises:
        ConfigError: The configuration is invalid; the error lists all problems that can be detected
            without torch.
    """
    if isinstance(overrides, str):
        raise TypeError(f"overrides is a text; pass a list of settings, [{overrides!r}]")
    if others := [override for override in overrides if not isinstance(override, str)]:
        raise TypeError(f"overrides has {others[0]!r}; write settings as text, 'train.steps=5'")
    if isinstance(config_dirs, str | Path):
        raise TypeError(f"config_dirs is one path; pass a list of folders, ['{config_dirs}']")
    folders = [Path(folder) for folder in config_dirs]
    with forkserver.on_demand(preload=preloads(overrides)) as server:
        _, config = auto_strategy.load_auto_strategy(
            overrides,
            compose=partial(configuration.compose, config_name=config_name, config_dirs=folders),
            server=server,
            config_dirs=folders,
        )
    return config


@config_errors()
def train(config: RunConfig) -> dict[str, Any]:
    """Start the ranks of a run, wait for their end, and return the summary.

    The run prints what ``axonlaunch train`` prints, and writes the same files. In the main thread,
    the first Ctrl-C (or the interrupt of a notebook's kernel) ends the run after the current step.

    Args:
        config: Result of ``load``.

    Returns:
        The content of ``summary.json``; empty on all nodes except the first.

    Raises:
        ConfigError: The run can't be launched; nothing was started.
        RunFailedError: The run failed.
        KeyboardInterrupt: The run was interrupted.
    """
    started = time.time()
    limits.allow_open_files()  # the server and the ranks inherit the limit
    environment = ClusterEnvironment.detect(os.environ)
    config = _check_again(config)
    with forkserver.on_demand(preload=preloads_of_config(config, traces=False)) as server:
        count = partial(count_accelerators, server)
        composed = Composed(configuration.to_tree(config), {}, dict, [])
        if environment.is_rank(lambda: composed, accelerators=count):
            message = (
                f"{environment.launcher} started this process as one rank, and ax.train starts all "
                "ranks: start the script without it, or use ax.build_engine with ax.World.init()"
            )
            raise ConfigError([ConfigIssue("", message)])
        composed = environment.for_node().applied_to(composed, accelerators=count)
        config = configuration.type_config(composed.tree, composed.problems)
        identity = LauncherProcess(environment.launcher).identity
        options = LaunchOptions(fork_server=server(), started=started, identity=identity)
        config = resumes_if_restarted(config, identity)
        [run] = prepare_runs([Run(overrides=[], composed=None, config=config, options=options)])
        result = run.launch()
    summary = result.summary or {}
    if result.status == INTERRUPTED:
        raise KeyboardInterrupt
    if result.status:
        raise RunFailedError(summary)
    return summary


@config_errors()
def estimate(
    config: RunConfig,
    *,
    exact: bool = False,
    analytic: bool = False,
    changes: bool = True,
    tokens: float | None = None,
) -> Forecast:
    """Estimate the peak memory of each rank, as ``axonlaunch estimate`` does.

    Args:
        config: Result of ``load``.
        exact: Whether to trace every layer and micro-batch, without extrapolation.
        analytic: Whether to count only parameters, gradients and optimizer states.
        changes: Whether to search for changes that make the run fit if it does not, which takes up
            to 30 seconds.
        tokens: Number of tokens to train on; the result then has ``training``.

    Raises:
        ConfigError: The configuration can't be run on any node or can't be traced.
    """
    if exact and analytic:
        message = "analytic=True contradicts exact=True, which traces every layer; use one of them"
        raise ConfigError([ConfigIssue("", message)])
    config = _check_again(config)
    with _tracing(config) as context:
        config = resolve_for_node(context, config)
        result = forecast(context, config, exact=exact, analytic=analytic, tokens=tokens)
        return with_changes(context, config, result) if changes else result


@config_errors()
def verify(
    config: RunConfig, *, steps: int = 6, fp64: bool = False, dump: str | Path | None = None
) -> ParityResult:
    """Compare a layout with a single process, as ``axonlaunch verify`` does.

    Args:
        config: Result of ``load``.
        steps: Number of optimizer steps to compare.
        fp64: Whether the single process computes in float64.
        dump: Folder in which the tensors of the first two steps are saved; None saves none.

    Raises:
        ConfigError: The configuration can't be run.
    """
    if steps < 1:
        raise ConfigError([ConfigIssue("steps", "must be 1 or more", steps)])
    config, folder = _check_again(config), None if dump is None else Path(dump)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with _tracing(config) as context:
        return runner.verify(context, config, steps=steps, fp64=fp64, dump=folder)


@config_errors()
def plan(
    config: RunConfig,
    *,
    devices: int,
    fixed: Sequence[str] = (),
    tokens: float | None = None,
    allow: Sequence[str] = (),
) -> Plan:
    """Search for the fastest layouts that fit, as ``axonlaunch plan`` does.

    The search replaces the layout of the configuration, except the settings in ``fixed``. The
    command keeps the settings among its overrides instead.

    Args:
        config: Result of ``load``, with ``hardware``.
        devices: Number of devices, with one rank each.
        fixed: Keys of settings to keep, such as ``strategy.tensor.degree``.
        tokens: Number of tokens to train on; the layouts then have ``training``.
        allow: ``low_precision`` also searches 16-bit weights with fp32 masters, optimizer states in
            8 bits and products in fp8. Layouts with them have ``numerics``.

    Raises:
        ConfigError: No layout fits, or the configuration can't be run.
    """
    if devices < 1:
        raise ConfigError([ConfigIssue("devices", "must be 1 or more", devices)])
    searched = [*SEARCHED, *allowed_keys(allow, name="allow")]
    if unknown := [key for key in fixed if key not in searched]:
        message = f"is not a setting that the search changes; use {one_of(searched)}"
        raise ConfigError([ConfigIssue("fixed", message, unknown)])
    config = _check_again(config)
    with _tracing(config) as context:
        return plan_config(
            context, config, devices=devices, fixed=fixed, tokens=tokens, allow=allow
        )


@config_errors()
def sample(
    folder: str | Path,
    prompt: str = "def ",
    *,
    tokens: int = 300,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    trust: bool = False,
) -> str:
    """Continue a prompt with a trained model in this process, as ``axonlaunch sample`` does.

    Args:
        folder: Run with a checkpoint, or folder of exported weights.
        prompt: Text to continue.
        tokens: Maximum number of new tokens.
        temperature: Sampling temperature; 0 takes the most likely token.
        top_k: Number of most likely tokens to sample from; None samples from all tokens.
        top_p: Probability of the most likely tokens to sample from; None samples from all.
        seed: Random seed.
        trust: Whether to import the Python code that the run's configuration names.

    Returns:
        The continuation, without the prompt.

    Raises:
        ConfigError: The folder has no weights, the model was not trained on text, or the
            configuration names code and ``trust`` is false.
    """
    from axonlaunch.training.text.sampling import continue_prompt
    from axonlaunch.training.text.sampling_options import SamplingOptions

    if not prompt:
        raise ConfigError([ConfigIssue("prompt", "is empty; give at least one character")])
    options = SamplingOptions(
        tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    return continue_prompt(Path(folder), prompt, options, trusted=trust)


@config_errors()
def export(
    folder: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    merge: bool = False,
    trust: bool = False,
) -> list[Path]:
    """Write trained weights as safetensors files, as ``axonlaunch checkpoint export`` does.

    transformers loads the new folder of a run with ``model=hf``, and PEFT that of an adapter.

    Args:
        folder: Folder or fsspec URL of a run or of one of its checkpoints.
        out: Folder to create; it may exist if it is empty.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None keeps the dtype of each tensor.
        merge: Whether to write the full model with the adapter merged into it, instead of the
            adapter alone.
        trust: Whether to import the Python code that the run's configuration names.

    Returns:
        The written files.

    Raises:
        ConfigError: The folder has no checkpoint, ``out`` is not empty, or the configuration names
            code and ``trust`` is false.
    """
    from axonlaunch.checkpoint.exchange.weights import export_weights
    from axonlaunch.checkpoint.format.storage import storage_path
    from axonlaunch.checkpoint.loading.given_path import require_checkpoint

    if dtype is not None and dtype not in NUMBER_FORMATS:
        message = f"is not supported; use {one_of([*NUMBER_FORMATS])}"
        raise ConfigError([ConfigIssue("dtype", message, dtype)])
    checkpoint = require_checkpoint(storage_path(str(folder)))
    config = configuration.read_frozen(checkpoint.path.parent.parent, trusted=trust)
    if merge and config.adapter is None:
        raise ConfigError([ConfigIssue("merge", f"{checkpoint.path} has no adapter", merge)])
    written = export_weights(checkpoint, config, Path(out), dtype=dtype, merge=merge)
    return [Path(out, name) for name in written]


def _check_again(config: object) -> RunConfig:
    """Type and check a configuration again, because the caller may have replaced values."""
    if not isinstance(config, RunConfig):
        kind = type(config).__name__
        raise TypeError(f"config is of type {kind}; pass the result of ax.load")
    return configuration.type_config(configuration.to_tree(config))


@contextmanager
def _tracing(config: RunConfig) -> Iterator[ForkServerContext]:
    """Start a fork server that traces steps, and end it with the context."""
    limits.allow_open_files()
    with forkserver.warm(preload=preloads_of_config(config)) as context:
        yield context
