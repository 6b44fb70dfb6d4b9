"""Describes folders that are given as a model but are something else, and what to write for them.

Adapters in PEFT's format, runs and checkpoints of runs are recognized.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from axonlaunch.config import CONFIG
from axonlaunch.config.values.plain_values import LARGEST_YAML, read_yaml
from axonlaunch.system.storage.files import inside_folder, read_text

ADAPTER_FILE = "adapter_config.json"
_LARGEST_JSON = 1 << 20


def describe_other_folder(folder: Path) -> str:
    """Return what a folder without a model's ``config.json`` is; empty if it is unknown."""
    if (folder / ADAPTER_FILE).is_file():
        return _adapter_message(_base_model(folder / ADAPTER_FILE), shlex.quote(str(folder)))
    for run in (folder, folder.parent.parent):  # a run, or one of its checkpoints
        if (run / CONFIG).is_file():
            return _describe_run(run, folder)
    return ""


def _adapter_message(base: str, path: str) -> str:
    return f"is an adapter, not a model; write model.path={base} adapter=lora adapter.path={path}"


def _base_model(file: Path) -> str:
    """Return the adapted model in a shell's syntax; BASE if the file does not say it."""
    try:
        base = json.loads(read_text(inside_folder(file), at_most=_LARGEST_JSON)).get(
            "base_model_name_or_path"
        )
    except (OSError, ValueError, AttributeError, RecursionError):
        base = None
    return shlex.quote(base) if isinstance(base, str) and base.isprintable() and base else "BASE"


def _describe_run(run: Path, folder: Path) -> str:
    try:
        adapter = read_yaml(read_text(run / CONFIG, at_most=LARGEST_YAML)).get("adapter")
    except (OSError, ValueError):
        adapter = None
    export = f"axonlaunch checkpoint export {shlex.quote(str(folder))} FOLDER"
    if adapter:
        return f"{_adapter_message('BASE', 'FOLDER')}, after {export}"
    path = shlex.quote(str(folder))
    return (
        f"is a run, not a model; write the model.path of the run and model.weights={path}, or "
        f"model.path=FOLDER after {export}"
    )
