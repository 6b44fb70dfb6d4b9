"""Describes folders that are given as a model but are something else, and what to write for them.

Adapters in PEFT's format, runs, checkpoints of runs and exports of other models are recognized.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def describe_export(content: Mapping[str, Any], path: str) -> str:
    """Return what to write for the export of a model that is not of transformers.

    Args:
        content: Content of the folder's ``config.json``.
        path: Folder of the export.

    Returns:
        The message; empty if ``config.json`` is not of such an export.
    """
    name = content.get("name")
    if "model_type" in content or "axonlaunch" not in content or not _is_plain(name):
        return ""
    return _registered_message("an export", str(name), shlex.quote(path))


def _registered_message(folder: str, name: str, path: str) -> str:
    model = shlex.quote(f"model={name}")
    return (
        f"is {folder} of {model}, which is not a model of transformers; write {model} "
        f"model.weights={path}, with the sizes and the plugins of its run"
    )


def _is_plain(text: Any) -> bool:
    return isinstance(text, str) and bool(text) and text.isprintable()


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
    return _quoted_base(base)


def _quoted_base(base: Any) -> str:
    return shlex.quote(str(base)) if _is_plain(base) else "BASE"


def _describe_run(run: Path, folder: Path) -> str:
    try:
        config = read_yaml(read_text(run / CONFIG, at_most=LARGEST_YAML))
    except (OSError, ValueError):
        config = {}
    export = f"axonlaunch checkpoint export {shlex.quote(str(folder))} FOLDER"
    model = config.get("model")
    model = model if isinstance(model, Mapping) else {}
    path, name = shlex.quote(str(folder)), model.get("name")
    if config.get("adapter"):
        return f"{_adapter_message(_quoted_base(model.get('path')), 'FOLDER')}, after {export}"
    if _is_plain(name) and name != "hf":
        return _registered_message("a run", str(name), path)
    base = _quoted_base(model.get("path"))
    return (
        f"is a run, not a model; write model.path={base} model.weights={path}, or "
        f"model.path=FOLDER after {export}"
    )
