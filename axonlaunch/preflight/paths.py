"""Makes the paths of a run's model, tokenizer and adapter absolute.

No file is read. Model ids of the Hugging Face Hub are not changed.
"""

from __future__ import annotations

from pathlib import Path

from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.options.data import DATASETS
from axonlaunch.config.values.environment_values import EnvironmentText
from axonlaunch.data.tokenizers.tokenizer import tokenizer_of


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return a configuration with absolute paths of model, tokenizer and adapter."""
    tokenizer = config.tokenizer.path
    if DATASETS.facts(config.data.name).takes_tokenizer:
        tokenizer = tokenizer_of(config).path
    adapter = config.adapter.path if config.adapter is not None else None
    paths = {"model.path": config.model_path, "tokenizer.path": tokenizer, "adapter.path": adapter}
    return with_values(
        config, {key: _absolute(path) for key, path in paths.items() if path is not None}
    )


def _absolute(path: str) -> str:
    """Return the absolute path if the path exists; other text, such as a model id, unchanged."""
    here = Path(path).expanduser()
    if not here.exists() or str(here.absolute()) == path:
        return path
    if isinstance(path, EnvironmentText) and here == Path(path):
        return path.below(str(Path.cwd()))
    return str(here.absolute())
