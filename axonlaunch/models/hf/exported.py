"""What a folder of exported weights holds beside them, so that ``from_pretrained`` loads it.

It writes no weights.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.models.hf import files, library
from axonlaunch.models.hf.structure import structure
from axonlaunch.system.files import (
    LARGEST_MODEL_FILE,
    create_file,
    inside_folder,
    read_copy,
    why_not_read,
)

_OURS = (files.CONFIG_FILE_NAME, "*.safetensors.index.json", "*.bin.index.json")
"""What is written again, or belongs to the weights that were read."""


def config_json(config: HuggingFaceConfig) -> dict[str, Any]:
    """Return the content of ``config.json``: the file's, with what was overridden.

    Raises:
        ConfigError: The model can't be described.
    """
    derived = structure(config)
    content: dict[str, Any] = json.loads(derived.typed.to_json_string(use_diff=True))
    content.pop("use_cache", None)  # off for training alone
    before = files.read_config(config)
    content |= {key: before[key] for key in ("use_cache", "auto_map") if key in before}
    content["architectures"] = [type(derived.model).__name__]
    return content


def copy_besides(config: HuggingFaceConfig, folder: Path) -> list[str]:
    """Copy a tokenizer's files and how text is generated; return the names of what was written.

    A model that came without a file says the latter by its configuration.

    Raises:
        ConfigError: The model's folder is not there any more, or holds what is no regular file.
    """
    where, written = files.folder(config), []
    patterns = (*files.BESIDES, *(["*.py"] if config.trust_remote_code else []))
    for file in sorted(where.iterdir()) if where is not None else []:
        wanted = any(fnmatch(file.name, pattern) for pattern in patterns)
        if wanted and not file.is_dir() and not any(fnmatch(file.name, ours) for ours in _OURS):
            _copy(file, folder / file.name, path=config.path)
            written.append(file.name)
    if "generation_config.json" not in written:
        typed = structure(config).typed
        made = library.transformers().GenerationConfig.from_model_config(typed)
        made.use_cache = True
        made.save_pretrained(folder)
        written.append("generation_config.json")
    return written


def _copy(file: Path, to: Path, *, path: str | None) -> None:
    """Copy a file of a model's folder with its permissions; no link out of the folder is followed.

    Raises:
        ConfigError: It can't be read, is no regular file, or too large.
    """
    try:
        copy = read_copy(inside_folder(file), at_most=LARGEST_MODEL_FILE)
        with create_file(to, mode=copy.mode) as copied:
            copied.write(copy.content)
    except OSError as error:
        message = f"{file} can't be copied: {why_not_read(file, error)}"
        raise ConfigError([ConfigIssue("model.path", message, path)]) from None
