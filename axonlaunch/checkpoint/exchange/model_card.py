"""Writes the README.md of uploaded weights: base model, data, command and losses.

Paths of this node are shortened to names, and overrides of ``loggers`` and ``launch``, which may
hold addresses and keys, are left out of the command.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from axonlaunch.checkpoint.format.manifest import Checkpoint
from axonlaunch.config import RunConfig
from axonlaunch.config.options.documents import TextRowsConfig
from axonlaunch.config.values.hub_reference import parse_hub_reference
from axonlaunch.config.values.plain_values import LARGEST_YAML
from axonlaunch.models.source_of import source_of
from axonlaunch.system.storage.files import read_text
from axonlaunch.system.storage.run_files import ORIGINS

_OVERRIDE = "override "
_OPTION = re.compile(r"(\w+)/([\w/-]+)\.yaml")
_DEFAULTS = {"model=gpt", "data=auto", "tokenizer=auto", "optimizer=adamw", "scheduler=cosine"}
"""Options that a command has without being told."""
_LEFT_OUT = ("launch", "loggers", "run_dir", "checkpoint.push")


def model_card(checkpoint: Checkpoint, config: RunConfig, *, is_adapter: bool) -> str:
    """Return the content of README.md.

    Args:
        checkpoint: Checkpoint whose weights are uploaded.
        config: Configuration of its run.
        is_adapter: Whether only the adapter is uploaded.
    """
    import yaml

    head: dict[str, Any] = {"tags": ["axonlaunch"]}
    if (library := source_of(config).library) is not None:
        head["library_name"] = "peft" if is_adapter else library
    if (base := _base_model(config)) is not None:
        head["base_model"] = base
    if datasets := [name for name, is_of_hub in _data(config) if is_of_hub]:
        head["datasets"] = [*dict.fromkeys(name.partition("@")[0] for name in datasets)]
    return "\n".join(
        [
            "---",
            yaml.safe_dump(head, sort_keys=True).rstrip(),
            "---",
            "",
            f"# {config.name}",
            "",
            f"Trained with axonlaunch {importlib.metadata.version('axonlaunch')}.",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {_cell(text)} |" for name, text in _rows(checkpoint, config)),
            "",
            "## Command",
            "",
            "```bash",
            _command(checkpoint.path.parent.parent),
            "```",
            "",
        ]
    )


def _rows(checkpoint: Checkpoint, config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.is_pretrained and config.model_path is not None:
        yield "base model", _base_model(config) or Path(config.model_path).name
    elif source_of(config).library is None:
        yield "base model", f"none; {config.model.name} trained from scratch"
    else:
        yield "base model", "none; trained from scratch"
    if config.adapter is not None:
        yield "adapter", config.adapter.name
    yield "data", ", ".join(name for name, _ in _data(config)) or config.data.name
    yield "steps", f"{checkpoint.step} of {config.train.global_batch_size} samples"
    if checkpoint.loss is not None:
        yield "training loss", f"{checkpoint.loss:.4f}"
    if checkpoint.eval_loss is not None:
        yield "evaluation loss", f"{checkpoint.eval_loss:.4f}"


def _base_model(config: RunConfig) -> str | None:
    """Return the id of the pretrained model; None for a folder, or a model from scratch."""
    path = config.model_path
    if path is None or not config.is_pretrained or Path(path).exists():
        return None
    return path if parse_hub_reference(path) is not None else None


def _data(config: RunConfig) -> Iterator[tuple[str, bool]]:
    """Yield the name of each training file, and whether it is a data set of the Hub."""
    if not isinstance(config.data, TextRowsConfig):
        return
    for source in config.data.sources().values() or [config.data]:
        for file in source.files:
            reference = None if Path(file).exists() else parse_hub_reference(file)
            if reference is None:
                yield PurePosixPath(file).name, False
            else:
                parts = [part for part in (source.subset, source.split) if part]
                commit = f"@{reference.revision}" if reference.revision else ""
                yield " ".join([f"{reference.repo}{commit}", *parts]), True


def _command(run_dir: Path) -> str:
    """Return the command of a run, from the origins of its settings."""
    try:
        origins = json.loads(read_text(run_dir / ORIGINS, at_most=LARGEST_YAML))
        texts = [*dict.fromkeys(_override(key, str(text)) for key, text in origins.items())]
    except (OSError, ValueError, AttributeError):
        return "axonlaunch train  # its settings were not recorded"
    return shlex.join(["axonlaunch", "train", *filter(None, texts)])


def _override(key: str, origin: str) -> str:
    """Return the override that a setting comes from; empty if there is none to show."""
    if origin.startswith("automatic: "):
        origin = origin.removeprefix("automatic: ").rpartition(" has ")[0]
    if key.startswith(_LEFT_OUT):
        return ""
    if origin.startswith(_OVERRIDE):
        return origin.removeprefix(_OVERRIDE)
    found = _OPTION.fullmatch(origin)
    option = f"{found[1]}={found[2]}" if found else ""
    return "" if option in _DEFAULTS else option


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
