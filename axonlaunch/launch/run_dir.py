"""Creates, locks and checks the run folder, which contains everything that a run writes.

The folder holds the frozen configuration, the summary and the logs.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from axonlaunch import checkpoint
from axonlaunch.checkpoint.format import storage
from axonlaunch.checkpoint.loading.resume_source import (
    is_launched_by,
    resume_of,
    resume_of_restart,
)
from axonlaunch.checkpoint.loading.run_lock import lock_checkpoints
from axonlaunch.config import (
    CONFIG,
    Composed,
    ConfigError,
    ConfigIssue,
    RunConfig,
    to_yaml,
    with_values,
)
from axonlaunch.config.axes import PRINTED
from axonlaunch.config.composition.origins import origins_of
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.resumed_settings import (
    frozen_settings,
    other_threads,
    settings_unlike_resumed,
)
from axonlaunch.config.values.optional_keys import weights_of
from axonlaunch.config.values.plain_values import LARGEST_YAML
from axonlaunch.config.values.url import is_url, shortened
from axonlaunch.diagnostics.report.record.run_record import NotARunError, find_launched, read_run
from axonlaunch.launch.environment.environment_variables import LaunchIdentity, submission_of
from axonlaunch.preflight.paths import with_absolute_paths
from axonlaunch.system.node import host
from axonlaunch.system.storage.disk import free_bytes, shortage
from axonlaunch.system.storage.files import (
    NotRegularError,
    folder_lock,
    is_there,
    open_regular,
    read_text,
    replace_text,
)
from axonlaunch.system.storage.home import expand_home
from axonlaunch.system.storage.run_files import (
    CRASH,
    EVENTS,
    METRICS,
    ORIGINS,
    SUMMARY,
    TOKENIZER,
    append_event,
)
from axonlaunch.system.storage.trusted_files import mark_trusted
from axonlaunch.system.storage.version_control import commit_of

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a write to a full disk, or over the user's quota."""
SCRATCH_FOLDER = "/tmp/axonlaunch"
"""Folder of runs on other nodes whose checkpoints are in a bucket."""


@contextmanager
def open_run_dir(
    config: RunConfig,
    *,
    announce: Callable[[str], object],
    composed: Composed | None = None,
    sharing: int | None = None,
    is_submitted: bool = False,
    launched_by: str = "",
) -> Iterator[RunConfig]:
    """Create the folder, freeze the configuration in it, and lock it until the context ends.

    A generated name gets a number if its folder exists. A name that the user chose is used
    unchanged, because reusing a name resumes its run.

    Args:
        config: Checked configuration.
        announce: Receives a line for the user.
        composed: Composed files, overrides and environment of the run; None if unknown.
        sharing: Number of ranks that share the cores available to this process; None: all ranks of
            the node.
        is_submitted: Whether the run waits in a queue and is launched from this folder later; the
            configuration is not frozen yet.
        launched_by: Name that is the same in all starts of the run by its launcher or scheduler.

    Raises:
        ConfigError: The folder can't be created, it contains a run that must not be continued, or
            another run uses the same checkpoint folder.
    """
    try:
        config = _make_folder(config, announce)
        folder = Path(config.run_dir)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        path = "runs" if config.run_dir == "auto" else config.run_dir
        raise _cannot_create(error, Path(path)) from None
    with _hold(folder), _lock_checkpoints(config, creates=not is_submitted):
        if not is_submitted:  # the nodes of a job have other cores
            config = _with_threads(config, sharing, announce)
        requested, config = config.checkpoint.resume, _with_resume(config)
        if requested != config.checkpoint.resume:
            announce(
                f"{config.name} already has checkpoints: resuming from them, not from {requested}"
            )
        for note in _differences(config):
            announce(note)
        if is_submitted:  # the job freezes it; until then the folder has that of the last launch
            yield config
            return
        try:
            # The event comes first: if it can't be written, no frozen configuration is left that
            # would make the next start refuse the folder.
            about = {"host": socket.gethostname(), "commit": commit_of(Path.cwd())}
            append_event(folder, "launched", {**about, "by": launched_by or None})
            frozen = to_yaml(config)
            replace_text(folder / CONFIG, frozen)
            mark_trusted(folder / CONFIG, frozen)
            (folder / CRASH).unlink(missing_ok=True)  # from an earlier launch
            if composed is not None:
                write_json(folder / ORIGINS, origins_of(composed, config))
        except OSError as error:
            raise _cannot_create(error, folder) from None
        yield config


def _lock_checkpoints(config: RunConfig, *, creates: bool = False) -> AbstractContextManager[None]:
    """Lock the folder of a run's checkpoints, for all starts of the run by its scheduler."""
    scheduled = submission_of(os.environ) or socket.gethostname()
    owner = f"{scheduled} {Path(config.run_dir).absolute()}"
    return lock_checkpoints(config, owner=owner, creates=creates)


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Lock a run's folder. The kernel releases the lock however the process ends.

    Raises:
        ConfigError: Another process has locked it, or it contains a link or a special file in place
            of a file that ranks write.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder / "logs"))
        except BlockingIOError:
            message = f"another process is training in {folder}; wait for it, or choose another"
            problem = ConfigIssue("run_dir", f"{message} name", is_transient=True)
            raise ConfigError([problem]) from None
        except OSError as error:
            raise _cannot_create(error, folder) from None
        _refuse_special_files(folder)
        yield


def _with_resume(config: RunConfig) -> RunConfig:
    """Resolve ``checkpoint.resume`` for all ranks."""
    return with_values(config, {"checkpoint.resume": resume_of(config)})


def resumes_if_restarted(config: RunConfig, identity: LaunchIdentity) -> RunConfig:
    """Make a run resume from its latest checkpoint if its launcher or scheduler restarts it."""
    if not (identity.name and identity.is_restart):
        return config
    if config.name == config.run_dir == "auto":
        folder = find_launched(Path("runs"), by=identity.name) if identity.has_one_run else None
        if folder is None:
            return config
        config = with_values(config, {"run_dir": str(folder)})
    resolved = with_run_dir(config)
    try:
        events = read_run(Path(resolved.run_dir)).events
    except NotARunError:
        return config
    resume = resume_of_restart(resolved, events, launched_by=identity.name)
    overwrites = config.checkpoint.overwrite and not is_launched_by(events, identity.name)
    return with_values(config, {"checkpoint.resume": resume, "checkpoint.overwrite": overwrites})


def check_run_dir(config: RunConfig) -> None:
    """Check that ``open_run_dir`` would accept the folder, without creating it.

    Raises:
        ConfigError: The folder can't be created or contains a run that must not be continued.
    """
    folder = Path("runs")
    if not config.name == config.run_dir == "auto":
        config = with_run_dir(config)
        folder = Path(config.run_dir)
        _refuse_overwriting(config)
        if (folder / "logs").exists():
            with _hold(folder):
                pass
    with _lock_checkpoints(config):
        pass
    existing, _ = free_bytes(folder)
    reason = 0 if os.access(existing, os.W_OK | os.X_OK) else errno.EACCES
    if reason := reason if existing.is_dir() else errno.ENOTDIR:
        raise _cannot_create(OSError(reason, os.strerror(reason), str(existing)), folder)


def _with_threads(
    config: RunConfig, sharing: int | None, announce: Callable[[str], object]
) -> RunConfig:
    """Resolve ``launch.threads`` for every node, so that the frozen configuration records it."""
    if config.launch.threads != "auto":
        return config
    assert config.launch.nproc != "auto"
    ranks = 1 if config.launch.backend == "mock" else sharing or config.launch.nproc
    threads, name = host.threads(ranks=ranks), host.OMP_NUM_THREADS
    reason = f"{host.cores()} cores for {ranks} process{'es' * (ranks > 1)}; {name} is not set"
    if host.requested_threads() is not None:
        reason = f"set by {name}"
    announce(f"launch.threads={threads} ({reason})")
    return with_values(config, {"launch.threads": threads})


def _refuse_special_files(folder: Path) -> None:
    """Refuse a folder in which a file that ranks write is a link or a special file, like a FIFO.

    Raises:
        ConfigError: A file is a link or a special file, or can't be opened.
    """
    if (folder / TOKENIZER).is_symlink():
        message = f"{folder / TOKENIZER} is a link; remove it, or use another run folder"
        raise ConfigError([ConfigIssue("run_dir", message)])
    for file in (folder / METRICS, folder / EVENTS, *sorted((folder / "logs").glob("rank_*"))):
        try:
            open_regular(file).close()
        except FileNotFoundError:
            continue
        except NotRegularError:
            message = f"{file} is not a regular file; remove it, or use another run folder"
            raise ConfigError([ConfigIssue("run_dir", message)]) from None
        except OSError as error:
            raise _cannot_create(error, folder) from None


def _differences(config: RunConfig) -> list[str]:
    """Return notes on the settings in which a run differs from the run that it resumes."""
    if config.checkpoint.resume != "auto":
        return []
    folder = storage.root(config)  # its configuration is that of the last run that saved there
    file = folder / CONFIG
    with storage.reaching(folder):
        if not is_there(file) or checkpoint.find_checkpoint(folder) is None:
            return []
    try:
        previous = frozen_settings(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return [
            f"{file}: can't be read ({reason}), so changed settings can't be reported; it is "
            "written again"
        ]
    changed = settings_unlike_resumed(config, previous)
    notes = [f"resuming with changed settings: {', '.join(changed)}"] if changed else []
    return [*notes, *other_threads(config, previous)]


def finished_summary(config: RunConfig) -> dict[str, Any] | None:
    """Return the summary of a run that has already trained all steps of this configuration.

    Return None if there is no such run. A run that early stopping ended has no steps left either.

    Raises:
        ConfigError: The run has trained the same number of steps with other settings.
    """
    if config.name == config.run_dir == "auto" or resume_of(config) != "auto":
        return None
    folder = Path(with_run_dir(config).run_dir)
    try:
        summary: dict[str, Any] = json.loads(read_text(folder / SUMMARY, at_most=LARGEST_YAML))
        steps = summary["steps"] if summary["status"] == "done" else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if steps != config.train.steps:
        is_stopped = steps is not None and _is_stopped_early(config, step=steps)
        return summary if is_stopped else None
    try:
        previous = frozen_settings(folder / CONFIG)
        changed = settings_unlike_resumed(with_absolute_paths(config), previous)
    except (OSError, ValueError):
        changed = []  # the settings don't matter, because no step is left to train
    if changed:
        message = (
            f"{folder} has already trained this number of steps with other settings than "
            f"{', '.join(changed)}; use more steps to continue with these settings, or another name"
        )
        raise ConfigError([ConfigIssue("train.steps", message, config.train.steps)])
    return summary


def finished_text(config: RunConfig, summary: dict[str, Any]) -> str:
    """Return the message for a run that has no steps left, from ``finished_summary``'s result."""
    steps, patience = summary["steps"], config.train.early_stop
    reason = f"it has trained all of its {steps} steps; to continue, use more train.steps"
    if steps != config.train.steps:
        reason = (
            f"train.early_stop={patience} ended it after {steps} steps; to continue, use more "
            "evaluations, or null"
        )
    text = (
        f"{with_run_dir(config).name} is finished: {reason}; to start over, use another name or "
        "checkpoint.overwrite=true"
    )
    if config.checkpoint.push is None or summary.get("pushed") is not None:
        return text
    return f"{text}; to upload its weights, use {pushing_command(with_run_dir(config))}"


def pushing_command(config: RunConfig) -> str:
    """Return the command that uploads the weights of a run to ``checkpoint.push``."""
    private = " --private" if config.checkpoint.push_private else ""
    folder = shortened(config.run_dir)
    return f"axonlaunch checkpoint export {folder} --push {config.checkpoint.push}{private}"


def _is_stopped_early(config: RunConfig, *, step: int) -> bool:
    """Return whether the newest checkpoint of a run ended it by ``train.early_stop``."""
    patience = config.train.early_stop
    if patience is None:
        return False
    try:
        saved = last_saved(with_run_dir(config))
    except OSError:  # reported where the run is resumed
        return False
    return saved is not None and saved.step == step and saved.evaluations_since >= patience


def last_saved(config: RunConfig) -> checkpoint.Checkpoint | None:
    """Return the latest checkpoint that a run has saved itself.

    None if there is none, and for remote folders of checkpoints, which are not read.
    """
    if is_url(config.checkpoint.path or ""):
        return None
    return checkpoint.find_checkpoint(storage.root(config))


def create_joined(config: RunConfig) -> None:
    """Create the folder of a run that another process began, with its frozen configuration.

    Raises:
        ConfigError: The folder can't be created.
    """
    folder = Path(config.run_dir)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if not (folder / CONFIG).exists():  # that process has another disk
            replace_text(folder / CONFIG, to_yaml(config))
    except OSError as error:
        raise _cannot_create(error, folder) from None


def _cannot_create(error: OSError, folder: Path) -> ConfigError:
    path = f": {error.filename}" if error.filename else ""
    remedy = f"; {shortage(folder)[1]}, or use another" if error.errno in FULL else ""
    message = f"can't make the run folder: {error.strerror}{path}{remedy}"
    return ConfigError([ConfigIssue("run_dir", message)])


def _make_folder(config: RunConfig, announce: Callable[[str], object]) -> RunConfig:
    """Resolve ``name`` and ``run_dir``, and create the folder.

    With ``checkpoint.overwrite`` a run in it is moved aside first. The returned configuration does
    not have this setting, so that a restart resumes.
    """
    if config.name == config.run_dir == "auto":
        folder = create_unique(default_name(config))
        config = dataclasses.replace(config, name=folder.name, run_dir=str(folder))
        return with_values(config, {"checkpoint.overwrite": False})
    config = with_run_dir(config)
    _refuse_overwriting(config)
    folder = Path(config.run_dir)
    if config.checkpoint.overwrite and (folder / CONFIG).exists():
        with _hold(folder), _lock_checkpoints(config):
            kept = _free_path(folder)
            folder.rename(kept)
        announce(f"{config.name}: starting over; the earlier run was moved to {kept}")
    folder.mkdir(parents=True, exist_ok=True)
    return with_values(config, {"checkpoint.overwrite": False})


def _free_path(folder: Path) -> Path:
    """Return the first path beside a folder, with a number, that does not exist."""
    paths = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    return next(path for path in paths if not is_there(path))


def with_run_dir(config: RunConfig) -> RunConfig:
    """Resolve ``name`` and ``run_dir`` without creating the folder."""
    name, folder = str(config.name), Path(config.run_dir)
    if name == config.run_dir == "auto":
        name = free_name(default_name(config))
    if config.run_dir == "auto":
        folder = Path("runs", name)
    name = folder.name if name == "auto" else name
    return dataclasses.replace(config, name=name, run_dir=str(folder.absolute()))


def create_unique(name: str) -> Path:
    """Create a new folder below ``runs`` with this name, plus a number if the name is taken."""
    for number in itertools.count(1):
        folder = Path("runs", name if number == 1 else f"{name}-{number}").absolute()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("count ended")


def with_folder_of_nodes(config: RunConfig, *, root: str = SCRATCH_FOLDER) -> RunConfig:
    """Resolve ``name`` and ``run_dir`` of a run on other nodes.

    Args:
        config: Configuration with resolved ``launch.nproc``.
        root: Folder of the nodes in which the run folder is, unless the configuration has one.
    """
    name = default_name(config) if config.name == "auto" else config.name
    folder = f"{root.rstrip('/')}/{name}" if config.run_dir == "auto" else config.run_dir
    return dataclasses.replace(config, name=name, run_dir=folder)


def free_name(name: str) -> str:
    """Return a name without a folder below ``runs``: this one, or this one with a number."""
    numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(free for free in numbered if not Path("runs", free).exists())


def default_name(config: RunConfig) -> str:
    """Name a run after its model and strategy; ``launch.nproc`` is resolved."""
    layout = Layout.of(config, world_size=num_ranks(config))
    kinds: list[str] = [] if layout.facts.averages == "nothing" else [layout.data_parallel]
    kinds += [axis.word for axis in PRINTED if layout.degrees[axis.name] > 1]
    return "-".join([config.model.name, *(kinds or ["single"])])


def _refuse_overwriting(config: RunConfig) -> None:
    resume, overwrite = config.checkpoint.resume, config.checkpoint.overwrite
    if not (Path(config.run_dir) / CONFIG).exists():
        return
    message = ""
    if resume == "never" and not overwrite:
        message = (
            f"{config.run_dir} already contains a run; choose another name, continue it with "
            "checkpoint.resume=auto, or move it aside with checkpoint.overwrite=true"
        )
    if message:
        raise ConfigError([ConfigIssue("checkpoint.resume", message, resume)])
    folder = Path(config.run_dir).resolve()
    moved = {
        key: path
        for key, path in (_paths_to_read(config) if overwrite else {}).items()
        if not is_url(path) and expand_home(path).resolve().is_relative_to(folder)
    }
    if moved:
        message = (
            "is in the run that checkpoint.overwrite=true moves aside; remove that setting, or "
            "choose another name"
        )
        raise ConfigError([ConfigIssue(key, message, path) for key, path in moved.items()])


def _paths_to_read(config: RunConfig) -> dict[str, str]:
    """Return the paths of the checkpoint, the weights and the tokenizer that a run starts from."""
    resume = config.checkpoint.resume
    paths = {
        "checkpoint.resume": None if resume in ("auto", "never") else resume,
        "model.weights": weights_of(config.model),
        "model.path": config.model_path,
        "adapter.path": None if config.adapter is None else config.adapter.path,
        "tokenizer.path": config.tokenizer.path,
    }
    return {key: path for key, path in paths.items() if path is not None}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON object."""
    replace_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
