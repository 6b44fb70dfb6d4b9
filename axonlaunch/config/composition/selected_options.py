"""Errors about the option of a group name the file that was selected.

``model=llama3_8b`` selects a file with ``name: llama``. Checks know only the typed configuration,
so their errors would be about ``model=llama`` or ``model.name=llama``.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from axonlaunch.config.composition.compose import Composed
from axonlaunch.config.problems.errors import ConfigIssue, change_problems


def name_selected_options(composed: Composed | None) -> AbstractContextManager[None]:
    """Replace the options of groups in errors of the block by the files that were selected.

    Args:
        composed: Composed files of the run; None leaves errors as they are.
    """
    return nullcontext() if composed is None else change_problems(partial(_with_selected, composed))


def _with_selected(composed: Composed, problem: ConfigIssue) -> ConfigIssue:
    key = problem.key.removesuffix(".name")
    group = composed.tree.get(key)
    if not isinstance(group, dict) or group.get("name") != problem.value:
        return problem
    file = Path(composed.origins().get(f"{key}.name", ""))
    is_selected = file.parent.name == key and file.suffix == ".yaml"
    if not is_selected or file.stem in (problem.value, "auto"):  # auto chooses a name itself
        return problem
    return dataclasses.replace(problem, key=key, value=file.stem)
