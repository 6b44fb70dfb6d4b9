"""Where the files of a model are: in a folder, or in the cache of the Hugging Face Hub.

What is not there is refused; ``fetch`` alone reaches for the network.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.models.hf import library
from axonlaunch.system.files import inside_folder, read_text

CONFIG_FILE_NAME = "config.json"
BESIDES = ("*.json", "*.txt", "*.model", "*.jinja", "tokenizer*")
"""What is fetched beside weights: a tokenizer's files, and how text is generated."""
_WEIGHTS = "*.safetensors"
_FLOAT = "__float__"
"""Key of what JSON has no number for."""
_ID = re.compile(r"\w([\w.-]*\w)?(/\w([\w.-]*\w)?)?")
_LARGEST_JSON = 64 << 20


def folder(config: HuggingFaceConfig) -> Path | None:
    """Return the folder of a model's files; None for a model of ``model.config`` alone.

    Raises:
        ConfigError: There is no such folder, and no such model in the Hub's cache.
    """
    if config.path is None:
        return None
    here = Path(config.path)
    if here.is_dir():
        return here
    _refuse_no_id(config.path)
    if (cached := _cached_folder(config)) is None:
        raise ConfigError([_not_there(config, "there is no such folder, nor is it in the cache")])
    return cached


def read_config(config: HuggingFaceConfig) -> dict[str, Any]:
    """Return what a model's ``config.json`` holds; {} for a model of ``model.config`` alone.

    Raises:
        ConfigError: There is none, or it can't be read.
    """
    where = folder(config)
    if where is None:
        return {}
    content: dict[str, Any] = _with_floats(
        read_folder_json(where / CONFIG_FILE_NAME, path=config.path)
    )
    return content


def _with_floats(value: Any) -> Any:
    """Put numbers in place of ``{"__float__": "Infinity"}``, as transformers writes them."""
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("Infinity", "-Infinity", "NaN"):
            return float(value[_FLOAT])
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def read_folder_json(file: Path, *, path: str | None) -> dict[str, Any]:
    """Read an object of JSON out of a model's folder.

    Args:
        file: Its path; a link of the Hub's cache is followed, no other.
        path: What the user wrote for the folder.

    Raises:
        ConfigError: It is not there, or holds something else.
    """
    try:
        content = json.loads(read_text(inside_folder(file), at_most=_LARGEST_JSON))
        if not isinstance(content, dict):
            raise TypeError(f"holds {type(content).__name__} where keys belong")
    except FileNotFoundError:
        message = f"has no {file.name}; give the folder of a model that save_pretrained wrote"
        raise ConfigError([ConfigIssue("model.path", message, path)]) from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{file} can't be read: {reason}"
        raise ConfigError([ConfigIssue("model.path", message, path)]) from None
    return content


def fetch(config: HuggingFaceConfig, *, weights: bool) -> Path | None:
    """Bring a model of the Hub into its cache, with a progress bar, if it is not there.

    Args:
        config: Of the model; one in a folder is left as it is.
        weights: Whether its weights are wanted too, beside what describes it.

    Returns:
        Its folder; None for a model of ``model.config`` alone.

    Raises:
        ConfigError: It can't be fetched.
    """
    if config.path is None or Path(config.path).is_dir():
        return folder(config)
    _refuse_no_id(config.path)
    library.transformers()
    if (cached := _cached_folder(config)) is not None and (not weights or is_complete(cached)):
        return cached
    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    huggingface_hub.utils.enable_progress_bars()  # which were disabled with those of transformers
    patterns = [*BESIDES, *([_WEIGHTS] if weights else []), *_code(config)]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                config.path, revision=config.revision, allow_patterns=patterns
            )
        )
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        why = "it is not in the cache, and the Hub can't be reached"
        raise ConfigError([_not_there(config, why)]) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no answer")
        why = "there is no such folder, and no such model on the Hub" if status == 404 else ""
        message = why or f"the Hub refuses it ({status}); log in with hf auth login"
        raise ConfigError([_not_there(config, message)]) from None
    except (OSError, ValueError) as error:  # no network, no free space, a name that is none
        reason = str(error).splitlines()[0][:200]
        raise ConfigError([_not_there(config, f"can't be fetched: {reason}")]) from None


def is_complete(where: Path) -> bool:
    """Say whether a folder has all files of weights that its index names, or some without one."""
    index = where / "model.safetensors.index.json"
    if not index.exists():
        return any(where.glob(_WEIGHTS))
    files = read_folder_json(index, path=str(where)).get("weight_map")
    names = {str(name) for name in files.values()} if isinstance(files, dict) else set()
    return bool(names) and all((where / name).exists() for name in names)


def _code(config: HuggingFaceConfig) -> list[str]:
    return ["*.py"] if config.trust_remote_code else []


def _cached_folder(config: HuggingFaceConfig) -> Path | None:
    """Return a model's folder in the Hub's cache, if its description is in it."""
    library.transformers()
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(
        str(config.path), CONFIG_FILE_NAME, revision=config.revision
    )
    return Path(cached).parent if isinstance(cached, str | os.PathLike) else None


def _refuse_no_id(path: str) -> None:
    """Refuse what can be neither a folder that is there nor a model's id.

    Raises:
        ConfigError: It is such.
    """
    if _ID.fullmatch(path) and not any(part in path for part in ("..", "--")):
        return
    message = "there is no such folder; give one that save_pretrained wrote, or a model id"
    raise ConfigError([ConfigIssue("model.path", message, path)])


def _not_there(config: HuggingFaceConfig, why: str) -> ConfigIssue:
    at = f" at {config.revision}" if config.revision else ""
    message = f"{why}; give a folder, or run hf download {config.path}{at} where there is a network"
    return ConfigIssue("model.path", message, config.path)
