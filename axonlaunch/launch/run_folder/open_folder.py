"""Creates, locks and checks the run folder, which contains everything that a run writes.

The folder holds the frozen configuration, the summary and the logs.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from axonlaunch import checkpoint
from axonlaunch.checkpoint.format import storage
from axonlaunch.checkpoint.loading.resume_source import resume_of
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
from axonlaunch.config.composition.origins import origins_of
from axonlaunch.config.consistency.resumed_settings import (
    frozen_settings,
    other_threads,
    settings_unlike_resumed,
)
from axonlaunch.config.values.optional_keys import weights_of
from axonlaunch.config.values.url import is_url
from axonlaunch.launch.environment.environment_variables import submission_of
from axonlaunch.launch.run_folder.names import create_unique, default_name, with_run_dir
from axonlaunch.system.node import host
from axonlaunch.system.storage.disk import free_bytes, shortage
from axonlaunch.system.storage.files import (
    NotRegularError,
    folder_lock,
    is_there,
    open_regular,
    replace_json,
    replace_text,
)
from axonlaunch.system.storage.home import expand_home
from axonlaunch.system.storage.run_files import (
    CRASH,
    EVENTS,
    METRICS,
    ORIGINS,
    TOKENIZER,
    append_event,
)
from axonlaunch.system.storage.trusted_files import mark_trusted
from axonlaunch.system.storage.version_control import commit_of

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a write to a full disk, or over the user's quota."""
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_A_FOLDER = (errno.ENOTDIR, errno.EEXIST)


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
        # A job freezes its configuration; until then the folder has that of the last launch.
        if is_submitted:
            yield config
            return
        with _interrupt_recorded(folder):
            _freeze(config, composed, launched_by)
            yield config


@contextmanager
def _interrupt_recorded(folder: Path) -> Iterator[None]:
    """Record the end of a run that is interrupted before its ranks handle interrupts."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):
            append_event(folder, "ended", {"status": "interrupted"})
        raise


def _freeze(config: RunConfig, composed: Composed | None, launched_by: str) -> None:
    """Record a launch in the run folder, with the configuration and the origins of its values.

    Raises:
        ConfigError: A file can't be written.
    """
    folder = Path(config.run_dir)
    try:
        # The event comes first: if it can't be written, no frozen configuration is left that would
        # make the next start refuse the folder.
        about = {"host": socket.gethostname(), "commit": commit_of(Path.cwd())}
        append_event(folder, "launched", {**about, "by": launched_by or None})
        frozen = to_yaml(config)
        replace_text(folder / CONFIG, frozen)
        mark_trusted(folder / CONFIG, frozen)
        (folder / CRASH).unlink(missing_ok=True)  # from an earlier launch
        if composed is not None:
            replace_json(folder / ORIGINS, origins_of(composed, config))
    except OSError as error:
        raise _cannot_create(error, folder) from None


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
    message = f"can't make the run folder: {error.strerror}{path}{_remedy(error, folder)}"
    return ConfigError([ConfigIssue("run_dir", message)])


def _remedy(error: OSError, folder: Path) -> str:
    if error.errno in _FULL:
        return f"; {shortage(folder)[1]}, or use another"
    if error.errno in _NOT_WRITABLE:
        return "; make it writable, or use another folder"
    return "; a file is in the way; use another folder" if error.errno in _NOT_A_FOLDER else ""


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


def _refuse_overwriting(config: RunConfig) -> None:
    resume, overwrite = config.checkpoint.resume, config.checkpoint.overwrite
    if not (Path(config.run_dir) / CONFIG).exists():
        return
    if resume == "never" and not overwrite:
        message = (
            f"{config.run_dir} already contains a run; choose another name, continue it with "
            "checkpoint.resume=auto, or move it aside with checkpoint.overwrite=true"
        )
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
