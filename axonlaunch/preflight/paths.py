"""Makes the paths of a run's model, tokenizer, adapter, template and prompt format absolute.

No file is read. Model ids of the Hugging Face Hub are not changed.
"""

from __future__ import annotations

from pathlib import Path

from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.options.data import DATASETS
from axonlaunch.config.values.environment_values import EnvironmentText
from axonlaunch.config.values.optional_keys import chat_template_of, prompt_format_of
from axonlaunch.data.texts.chats.named_templates import PROMPT_FORMATS, TEMPLATES
from axonlaunch.data.tokenizers.tokenizer_files import tokenizer_of
from axonlaunch.system.storage.home import expand_home

_LONGEST = 4096
"""Longest path of a file on Linux."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return a configuration with absolute paths of models, tokenizers, adapters and templates."""
    tokenizer = config.tokenizer.path
    if DATASETS.facts(config.data.name).takes_tokenizer:
        tokenizer = tokenizer_of(config).path
    adapter = config.adapter.path if config.adapter is not None else None
    paths = {"model.path": config.model_path, "tokenizer.path": tokenizer, "adapter.path": adapter}
    paths["data.chat_template"] = _file_of(chat_template_of(config.data))
    paths["data.prompt_format"] = _file_of(prompt_format_of(config.data))
    return with_values(
        config, {key: _absolute(path) for key, path in paths.items() if path is not None}
    )


def _file_of(value: str | None) -> str | None:
    """Return a value that is the path of a file; None for a name or a text."""
    is_text = value is None or "{" in value or "\n" in value or len(value) > _LONGEST
    if is_text or value in {*TEMPLATES, *PROMPT_FORMATS}:
        return None
    return value


def _absolute(path: str) -> str:
    """Return the absolute path if the path exists; other text, such as a model id, unchanged."""
    here = expand_home(path)
    if not here.exists() or str(here.absolute()) == path:
        return path
    if isinstance(path, EnvironmentText) and here == Path(path):
        return path.below(str(Path.cwd()))
    return str(here.absolute())
