"""Writes the files next to exported weights that ``from_pretrained`` needs.

The weights are written elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from axonlaunch.config.options.model import TransformersModel
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.models.hf.analysis.structure import structure
from axonlaunch.models.hf.reading import files, library
from axonlaunch.system.storage.files import (
    LARGEST_MODEL_FILE,
    create_file,
    inside_folder,
    read_copy,
    why_not_read,
)

_OURS = (files.CONFIG_FILE_NAME, "*.safetensors.index.json", "*.bin.index.json")
"""Files that are not copied, because they are written anew or describe the weights that were read.
"""


def config_json(config: TransformersModel) -> dict[str, Any]:
    """Return the content of ``config.json``, including overrides.

    Raises:
        ConfigError: The architecture can't be determined.
    """
    model_structure = structure(config)
    content: dict[str, Any] = json.loads(model_structure.typed.to_json_string(use_diff=True))
    content.pop("use_cache", None)  # off only during training
    original = files.read_config(config)
    content |= {key: original[key] for key in ("use_cache", "auto_map") if key in original}
    content["architectures"] = [type(model_structure.model).__name__]
    return content


def copy_other_files(config: TransformersModel, folder: Path) -> list[str]:
    """Copy tokenizer files and the generation configuration; return the names of the written files.

    If the model has no generation configuration, it is created from the model's configuration.

    Raises:
        ConfigError: The model's folder has disappeared, or one of the files is not a regular file.
    """
    source_folder, written = files.folder(config), []
    patterns = (*files.BESIDES, *(["*.py"] if config.trust_remote_code else []))
    for file in sorted(source_folder.iterdir()) if source_folder is not None else []:
        is_wanted = any(fnmatch(file.name, pattern) for pattern in patterns)
        if (
            is_wanted
            and not file.is_dir()
            and not any(fnmatch(file.name, excluded) for excluded in _OURS)
        ):
            _copy(file, folder / file.name, path=config.path)
            written.append(file.name)
    if "generation_config.json" not in written:
        typed = structure(config).typed
        generation = library.transformers().GenerationConfig.from_model_config(typed)
        generation.use_cache = True
        generation.save_pretrained(folder)
        written.append("generation_config.json")
    return written


def set_special_tokens(content: dict[str, Any], folder: Path, ids: Mapping[str, int]) -> None:
    """Name special tokens in ``config.json`` and in the generation configuration.

    A model that stopped at other tokens stops at these, too.

    Args:
        content: Content of ``config.json``, which is changed in place.
        folder: Folder with the exported ``generation_config.json``.
        ids: Token numbers by name: eos, bos or pad.
    """
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text())
    for name, token in ids.items():
        key = f"{name}_token_id"
        previous = generation.get(key)
        content[key] = generation[key] = token
        if name == "eos" and previous not in (None, token, [token]):
            others = previous if isinstance(previous, list) else [previous]
            generation[key] = [token, *(other for other in others if other != token)]
    file.write_text(json.dumps(generation, indent=2) + "\n")


def _copy(file: Path, to: Path, *, path: str | None) -> None:
    """Copy a file of a model's folder with its permissions, without following links out of it.

    Raises:
        ConfigError: The file can't be read, is not a regular file, or is too large.
    """
    try:
        source = read_copy(inside_folder(file), at_most=LARGEST_MODEL_FILE)
        with create_file(to, mode=source.mode) as target:
            target.write(source.content)
    except OSError as error:
        message = f"{file} can't be copied: {why_not_read(file, error)}"
        raise ConfigError([ConfigIssue("model.path", message, path)]) from None
