"""Locates and reads the files of a model, in a folder or in the Hugging Face Hub's cache.

Missing files are an error; only ``fetch`` accesses the network.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from axonlaunch.config.options.model import TransformersModel
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.models.hf.reading import library
from axonlaunch.models.hf.reading.other_folders import describe_other_folder
from axonlaunch.system.hub import is_passing_status
from axonlaunch.system.storage.files import inside_folder, read_text

CONFIG_FILE_NAME = "config.json"
BESIDES = ("*.json", "*.txt", "*.model", "*.jinja", "tokenizer*")
"""Files to fetch in addition to weights: configuration, tokenizer, generation settings."""
_WEIGHTS = "*.safetensors"
_FLOAT = "__float__"
"""Key that marks numbers that JSON can't represent."""
_ID = re.compile(r"\w([\w.-]*\w)?(/\w([\w.-]*\w)?)?")
_LARGEST_JSON = 64 << 20


def folder(config: TransformersModel) -> Path | None:
    """Return the folder of a model's files; None for a model that has only ``model.config``.

    Raises:
        ConfigError: The folder does not exist, and the model is not in the Hub's cache.
    """
    if config.path is None:
        return None
    local_folder = Path(config.path)
    if local_folder.is_dir():
        return local_folder
    _refuse_invalid_id(config.path)
    if (cached := _cached_folder(config)) is None:
        raise ConfigError(
            [_missing_files(config, "there is no such folder, nor is it in the cache")]
        )
    return cached


def read_config(config: TransformersModel) -> dict[str, Any]:
    """Return the content of ``config.json``; {} for a model that has only ``model.config``.

    Raises:
        ConfigError: The file does not exist or can't be read.
    """
    model_folder = folder(config)
    if model_folder is None:
        return {}
    content: dict[str, Any] = _with_floats(
        read_folder_json(model_folder / CONFIG_FILE_NAME, path=config.path)
    )
    return content


def _with_floats(value: Any) -> Any:
    """Replace ``{"__float__": "Infinity"}``, which transformers writes, with numbers."""
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("Infinity", "-Infinity", "NaN"):
            return float(value[_FLOAT])
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def read_folder_json(file: Path, *, path: str | None) -> dict[str, Any]:
    """Read a JSON object from a file in a model's folder.

    Args:
        file: Path of the file; only links of the Hub's cache are followed.
        path: The user's setting for the folder, for error messages.

    Raises:
        ConfigError: The file does not exist, or does not contain a JSON object.
    """
    try:
        content = json.loads(read_text(inside_folder(file), at_most=_LARGEST_JSON))
        if not isinstance(content, dict):
            raise TypeError(f"contains {type(content).__name__} instead of a JSON object")
    except FileNotFoundError:
        message = describe_other_folder(file.parent) or (
            f"has no {file.name}; give the folder of a model that save_pretrained wrote"
        )
        raise ConfigError([ConfigIssue("model.path", message, path)]) from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{file} can't be read: {reason}"
        raise ConfigError([ConfigIssue("model.path", message, path)]) from None
    return content


def fetch(config: TransformersModel, *, weights: bool) -> Path | None:
    """Download a model from the Hub into its cache, with a progress bar, if it is not there.

    Args:
        config: Configuration of the model; a model in a local folder is not downloaded.
        weights: Whether to download the weights too.

    Returns:
        Folder of the model; None for a model that has only ``model.config``.

    Raises:
        ConfigError: The download fails.
    """
    if config.path is None or Path(config.path).is_dir():
        return folder(config)
    _refuse_invalid_id(config.path)
    library.transformers()
    if (cached := _cached_folder(config)) is not None and (not weights or is_complete(cached)):
        return cached
    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    huggingface_hub.utils.enable_progress_bars()  # library.transformers disabled them
    patterns = [*BESIDES, *([_WEIGHTS] if weights else []), *_code(config)]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                config.path, revision=config.revision, allow_patterns=patterns
            )
        )
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        reason = "there is no such folder, it is not in the cache, and the Hub can't be reached"
        is_offline = any(isinstance(e, OfflineModeIsEnabled) for e in (error, error.__cause__))
        raise ConfigError([_missing_files(config, reason, is_transient=not is_offline)]) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        is_transient = is_passing_status(status)
        if status == 404:
            message = "there is no such folder, and no such model on the Hub"
        elif is_transient:
            message = f"the Hub answered with status {status}"
        else:
            message = f"the Hub refuses it ({status or 'no answer'}); log in with hf auth login"
        raise ConfigError([_missing_files(config, message, is_transient=is_transient)]) from None
    except (OSError, ValueError) as error:  # no network, no free space, an invalid name
        reason = str(error).splitlines()[0][:200]
        raise ConfigError([_missing_files(config, f"can't be fetched: {reason}")]) from None


def is_complete(model_folder: Path) -> bool:
    """Return whether all weight files in a folder's index exist, or any weight file if no index."""
    index = model_folder / "model.safetensors.index.json"
    if not index.exists():
        return any(model_folder.glob(_WEIGHTS))
    files = read_folder_json(index, path=str(model_folder)).get("weight_map")
    names = {str(name) for name in files.values()} if isinstance(files, dict) else set()
    return bool(names) and all((model_folder / name).exists() for name in names)


def _code(config: TransformersModel) -> list[str]:
    return ["*.py"] if config.trust_remote_code else []


def _cached_folder(config: TransformersModel) -> Path | None:
    """Return a model's folder in the Hub's cache if it contains the configuration, or None."""
    library.transformers()
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(
        str(config.path), CONFIG_FILE_NAME, revision=config.revision
    )
    return Path(cached).parent if isinstance(cached, str | os.PathLike) else None


def _refuse_invalid_id(path: str) -> None:
    """Refuse a path that is neither an existing folder nor a valid model id.

    Raises:
        ConfigError: The path is not a valid model id.
    """
    if _ID.fullmatch(path) and not any(part in path for part in ("..", "--")):
        return
    message = "there is no such folder; give one that save_pretrained wrote, or a model id"
    raise ConfigError([ConfigIssue("model.path", message, path)])


def _missing_files(
    config: TransformersModel, reason: str, *, is_transient: bool = False
) -> ConfigIssue:
    option = f" --revision {config.revision}" if config.revision else ""
    message = (
        f"{reason}; give a folder, or run hf download {config.path}{option} "
        "where there is a network"
    )
    return ConfigIssue("model.path", message, config.path, is_transient=is_transient)
