"""An error about the path of a run's model names the frozen configuration that has it."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path

from axonlaunch.config.problems.errors import ConfigIssue, change_problems


def name_frozen_file(file: Path) -> AbstractContextManager[None]:
    """Add the file to errors of the block about ``model.path``, as the commands take no override.

    Args:
        file: Frozen configuration of the run.
    """

    def with_file(problem: ConfigIssue) -> ConfigIssue:
        if problem.key != "model.path":
            return problem
        return dataclasses.replace(problem, message=f"{problem.message}; correct it in {file}")

    return change_problems(with_file)
