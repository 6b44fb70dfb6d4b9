"""Holds the folder of a run's checkpoints, which may be elsewhere than its run folder.

Two runs that save into one folder would delete each other's checkpoints and resume from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from axonlaunch.checkpoint.start import own_folder
from axonlaunch.checkpoint.storage import is_remote
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.plain import LARGEST_YAML, read_yaml
from axonlaunch.system.files import folder_lock, is_locked, read_text


@contextmanager
def lock_checkpoints(config: RunConfig, *, makes: bool = False) -> Iterator[None]:
    """Hold the folder in which a run keeps its checkpoints; a bucket has no locks.

    Args:
        config: Its ``run_dir`` is resolved, or will be new.
        makes: Whether the folder is made where it is missing; else there is nothing to hold.

    Raises:
        ConfigError: Another run holds it, or it can't be made.
    """
    try:
        where = own_folder(config)
    except ConfigError:  # of a bucket that nothing installed reaches, which preflight reports
        where = None
    if where is None or is_remote(where):
        yield
        return
    key = "run_dir" if config.checkpoint.path is None else "checkpoint.path"
    value = config.checkpoint.path or config.run_dir
    with ExitStack() as stack:
        try:
            if makes:
                where.mkdir(parents=True, exist_ok=True)
            if where.is_dir():
                stack.enter_context(folder_lock(where.resolve()))
        except BlockingIOError:
            message = f"{_holder(where)} keeps its checkpoints there; wait for it, or use another"
            raise ConfigError([ConfigIssue(key, message, value)]) from None
        except OSError as error:
            message = f"can't be used: {error.strerror}: {error.filename}; use another"
            raise ConfigError([ConfigIssue(key, message, value)]) from None
        yield


def _holder(folder: Path) -> str:
    """Name the run that keeps its checkpoints in a folder, as far as its files say."""
    try:
        run_dir = Path(str(read_yaml(read_text(folder / CONFIG, at_most=LARGEST_YAML))["run_dir"]))
    except (OSError, ValueError, KeyError):
        return "another run"
    return f"the run of {run_dir}" if is_locked(run_dir / "logs") else "another run"
