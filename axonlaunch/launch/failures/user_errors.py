"""Reports errors of files that a configuration names as errors of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from axonlaunch.checkpoint import CorruptCheckpointError
from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.system.processes.isolated import IsolatedCallError


def user_problems(error: BaseException) -> list[ConfigIssue] | None:
    """Return the problems that a user can correct; None for any other exception."""
    if isinstance(error, ConfigError):
        return error.problems
    if isinstance(error, IsolatedCallError):
        return [ConfigIssue("tokenizer.path", str(error))]
    if isinstance(error, CorruptCheckpointError):
        return [ConfigIssue("", str(error))]
    return None


@contextmanager
def config_errors() -> Iterator[None]:
    """Raise ``ConfigError`` for each exception with problems that a user can correct.

    Raises:
        ConfigError: A configuration, or a file that it names, is wrong.
    """
    try:
        yield
    except Exception as error:
        problems = user_problems(error)
        if problems is None or isinstance(error, ConfigError):
            raise
        raise ConfigError(problems) from error
