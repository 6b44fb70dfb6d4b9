"""An error about the path of a run's model names the frozen configuration that has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from axonlaunch.config.problems.errors import ConfigError


@contextmanager
def name_frozen_file(file: Path) -> Iterator[None]:
    """Add the file to errors of the block about ``model.path``, as the commands take no override.

    Args:
        file: Frozen configuration of the run.
    """
    try:
        yield
    except ConfigError as error:
        problems = [
            dataclasses.replace(problem, message=f"{problem.message}; correct it in {file}")
            if problem.key == "model.path"
            else problem
            for problem in error.problems
        ]
        raise ConfigError(problems) from error
