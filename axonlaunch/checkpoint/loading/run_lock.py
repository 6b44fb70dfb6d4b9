"""Locks the folder of a run's checkpoints, which may be outside the run folder.

Two runs that save into the same folder would delete each other's checkpoints and resume from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from axonlaunch.checkpoint.format.storage import is_remote, reaching
from axonlaunch.checkpoint.loading.bucket_lease import (
    ENDS_S,
    LEASE,
    LeaseHeldError,
    hold_lease,
    refuse_leased,
)
from axonlaunch.checkpoint.loading.resume_source import checkpoint_root
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.values.plain_values import LARGEST_YAML, read_yaml
from axonlaunch.system.storage.files import folder_lock, is_locked, read_text


@contextmanager
def lock_checkpoints(config: RunConfig, *, owner: str, creates: bool = False) -> Iterator[None]:
    """Lock the folder in which a run keeps its checkpoints; in a bucket, take its lease.

    Args:
        config: Configuration of the run; ``run_dir`` is resolved, or the folder will be new.
        owner: Identifies the run in all of its starts, as for ``hold_lease``.
        creates: Whether to create a missing folder, or the lease; otherwise a missing folder is not
            locked, and it is only checked that no other run has the lease.

    Raises:
        ConfigError: Another run holds the lock, or the folder can't be created.
    """
    try:
        folder = checkpoint_root(config)
    except ConfigError:  # no installed package reaches the bucket; preflight reports it
        folder = None
    key = "run_dir" if config.checkpoint.path is None else "checkpoint.path"
    value = config.checkpoint.path or config.run_dir
    with ExitStack() as stack:
        if folder is not None and is_remote(folder):
            with reaching(folder):
                try:
                    if creates:
                        stack.enter_context(hold_lease(folder, owner=owner, run_dir=config.run_dir))
                    else:
                        refuse_leased(folder, owner=owner)
                except LeaseHeldError as holder:
                    message = (
                        f"{holder} keeps its checkpoints there; wait for it, or use another. If it "
                        f"was killed, wait {ENDS_S / 60:g} minutes, or delete {folder / LEASE}"
                    )
                    problem = ConfigIssue(key, message, value, is_transient=True)
                    raise ConfigError([problem]) from None
                except Exception:
                    if creates:  # otherwise preflight reports it
                        raise
        elif folder is not None:
            try:
                if creates:
                    folder.mkdir(parents=True, exist_ok=True)
                if folder.is_dir():
                    stack.enter_context(folder_lock(folder.resolve()))
            except BlockingIOError:
                message = (
                    f"{_holder(folder)} keeps its checkpoints there; wait for it, or use another"
                )
                raise ConfigError([ConfigIssue(key, message, value, is_transient=True)]) from None
            except OSError as error:
                message = f"can't be used: {error.strerror}: {error.filename}; use another"
                raise ConfigError([ConfigIssue(key, message, value)]) from None
        yield


def _holder(folder: Path) -> str:
    """Return words for the run that keeps its checkpoints in a folder."""
    try:
        run_dir = Path(str(read_yaml(read_text(folder / CONFIG, at_most=LARGEST_YAML))["run_dir"]))
    except (OSError, ValueError, KeyError):
        return "another run"
    return f"the run of {run_dir}" if is_locked(run_dir / "logs") else "another run"
