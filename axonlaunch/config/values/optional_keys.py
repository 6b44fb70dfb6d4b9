"""Reads keys that only some choices of a group have; others count as unset.

Choices come from packages too, so no union of classes has all of them. Keys of number formats are
read in ``config.precision``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axonlaunch.system.storage.files import read_text

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations of transformers."""
_LARGEST = 1 << 20
"""Bytes of a configuration of transformers that is read here."""


def num_data_workers(data: Any) -> int:
    """Return ``data.workers``, the number of processes per rank that read samples."""
    return int(getattr(data, "workers", 0))


def eval_fraction(data: Any) -> float | None:
    """Return ``data.eval_fraction``, the share of samples that is held out."""
    share: float | None = getattr(data, "eval_fraction", None)
    return share


def num_classes(data: Any) -> int | None:
    """Return ``data.num_classes``; None if it is unset or read from the dataset."""
    number: int | None = getattr(data, "num_classes", None)
    return number


def vocabulary_size(data: Any) -> int | None:
    """Return ``data.vocab_size``, the number of tokens; None if it is unset."""
    size: int | None = getattr(data, "vocab_size", None)
    return size


def num_experts(model: Any) -> int | None:
    """Return ``model.num_experts``, or that of ``model=hf``; None if it is unknown without torch.

    For ``model=hf`` it is in ``model.config`` or in the ``config.json`` of a local folder. It is
    unknown if these have several numbers above 1, because only transformers knows which is used.
    """
    numbers = {getattr(model, "num_experts", None)}
    if isinstance(overrides := getattr(model, "config", None), Mapping):
        of_file = _config_file(getattr(model, "path", None))
        texts = (of_file.get("text_config"), overrides.get("text_config"))
        parts = [part for part in ({**of_file, **overrides}, *texts) if isinstance(part, Mapping)]
        numbers = {part.get(name) for part in parts for name in _NUM_EXPERTS}
    several = [number for number in numbers if isinstance(number, int) and number > 1]
    return several[0] if len(several) == 1 else None


def _config_file(path: str | None) -> dict[str, Any]:
    """Return the content of a model's ``config.json``; {} if there is none that can be read."""
    try:
        content = json.loads(read_text(Path(path, "config.json"), at_most=_LARGEST)) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def chat_template_of(data: Any) -> str | None:
    """Return ``data.chat_template``; None for the template of the tokenizer."""
    template: str | None = getattr(data, "chat_template", None)
    return template


def prompt_format_of(data: Any) -> str | None:
    """Return ``data.prompt_format``; None for rows that are not written by a format."""
    prompt_format: str | None = getattr(data, "prompt_format", None)
    return prompt_format


def packing_of(data: Any) -> str:
    """Return ``data.packing``."""
    return str(getattr(data, "packing", "none"))


def balances_by_bias(model: Any) -> bool:
    """Return whether ``model.balance=bias`` balances experts by biases of the router."""
    return bool(getattr(model, "balance", "none") == "bias")


def optimizer_groups(optimizer: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return ``optimizer.groups``, options by pattern of parameter names."""
    groups: Mapping[str, Mapping[str, Any]] = getattr(optimizer, "groups", {})
    return groups


def weight_decay(optimizer: Any) -> float | None:
    """Return ``optimizer.weight_decay``; None for an optimizer without it."""
    decay: float | None = getattr(optimizer, "weight_decay", None)
    return decay


def weights_of(model: Any) -> str | None:
    """Return ``model.weights``, the path of saved initial weights."""
    path: str | None = getattr(model, "weights", None)
    return path


def custom_target(choice: Any) -> str | None:
    """Return the key ``target`` of a choice ``custom``, ``module:name``; None for other choices."""
    target: str | None = getattr(choice, "target", None)
    return target


def custom_arguments(choice: Any) -> dict[str, Any]:
    """Return the key ``arguments`` of a choice ``custom``."""
    arguments: dict[str, Any] = getattr(choice, "arguments", {})
    return arguments
