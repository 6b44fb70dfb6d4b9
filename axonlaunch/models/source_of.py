"""Chooses the source of a model: Hugging Face files, or included or user code.

Other packages call ``source_of`` and don't test the type of a model's configuration. This module
does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.facts.source import ModelSource
from axonlaunch.models.hf.source import HuggingFaceSource
from axonlaunch.models.specs.model_spec import model_of


def source_of(config: Any) -> ModelSource:
    """Return the source of the model of a run's or a model's configuration."""
    model = model_of(config)
    return HuggingFaceSource(model) if isinstance(model, HuggingFaceConfig) else ModelSource(model)


def model_in_folder(folder: Path) -> Any:
    """Return the configuration of the model that a ``config.json`` describes, without its weights.

    Args:
        folder: Folder with files as ``save_pretrained`` writes them.
    """
    return HuggingFaceConfig(path=str(folder.absolute()), init="random")
