"""Text from a saved run, or from exported weights, in this process alone.

It is for models of text, as bytes, by a tokenizer that was kept, by the run's own dataset, or by
that of a folder of transformers, whatever layout trained them; others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch import checkpoint, config
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.data import DATASETS, CustomDataConfig
from axonlaunch.config.errors import one_of
from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.data.dataset import Dataset
from axonlaunch.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    load_kept,
    model_of_folder,
    read_foreign,
    tokenizer_files,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

_EXPORTED = "config.json"
_CONTEXT = 2048
"""Tokens that a model is shown whose configuration has no longest sequence."""


class _DatasetText(ByteTokenizer):
    """The text side of a dataset, in the form of a tokenizer.

    Attributes:
        length: Tokens of a sample.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.vocab_size, self.length = dataset.num_classes, dataset.sample_shape[0]

    def encode(self, text: str) -> list[int]:
        """Turn a text that is to be continued into tokens."""
        return self._dataset.encode(text)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Turn tokens into text."""
        del special
        return self._dataset.decode(tokens)


@dataclass(frozen=True)
class TrainedText:
    """A trained model of text.

    Attributes:
        model: Tokens [1, T] to logits [1, T, vocab], where the tokenizer may have fewer tokens.
        context_length: Tokens that it was trained to look at.
        tokenizer: What makes them.
    """

    model: Callable[[Tensor], Tensor]
    context_length: int
    tokenizer: Tokenizer

    def generate(self, prompt: Sequence[int], **options: Any) -> list[int]:
        """Return the tokens that continue a prompt; ``models.generation`` says by which options.

        The tokenizer's end of a text ends them.
        """
        from axonlaunch.models.generation import generate

        def logits_of_tokens(inputs: Tensor) -> Tensor:
            return self.model(inputs)[..., : self.tokenizer.vocab_size]

        options.setdefault("is_over", lambda tokens: tokens[-1] == self.tokenizer.end)
        return generate(logits_of_tokens, prompt, context_length=self.context_length, **options)


def load_text_model(folder: Path, *, trusted: bool = False) -> TrainedText:
    """Load a run's newest checkpoint, or a folder of safetensors.

    Args:
        folder: Of the run, or of the weights and their ``config.json``.
        trusted: Whether code that the run's configuration names may run.

    Raises:
        ConfigError: The folder holds no weights, or not those of a model of text, or a run's
            configuration names code and is not trusted.
    """
    is_exported = (folder / _EXPORTED).is_file() and not (folder / CONFIG).is_file()
    return TrainedText(
        *(_load_exported(folder) if is_exported else _of_run(folder, trusted=trusted))
    )


def continue_prompt(
    folder: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    trusted: bool = False,
) -> str:
    """Load a run's newest checkpoint, or a folder of safetensors, and continue a prompt.

    Args:
        folder: Of the run, or of the weights and their ``config.json``.
        prompt: Text.
        tokens: Tokens to add.
        temperature: Divides the logits; Sampling temperature; 0 = greedy.
        top_k: Draw among so many likeliest tokens; None: among all.
        seed: Random seed.
        trusted: Whether code that the run's configuration names may run.

    Raises:
        ConfigError: The folder holds no weights, or not those of a model of text, or a run's
            configuration names code and is not trusted.
    """
    if not prompt:
        raise ConfigError([ConfigIssue("", "--prompt: it is empty; give at least one character")])
    trained = load_text_model(folder, trusted=trusted)
    written = trained.generate(
        trained.tokenizer.encode(prompt),
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return trained.tokenizer.decode(written)


def _of_run(folder: Path, *, trusted: bool) -> tuple[nn.Module, int, Tokenizer]:
    """Return a run's model, how many tokens it was trained to look at, and what makes them."""
    saved = config.read_frozen(folder, trusted=trusted)
    newest = checkpoint.latest(folder)
    if newest is None:
        message = f"{folder}: the run has no checkpoint; train with checkpoint.every=N"
        raise ConfigError([ConfigIssue("", message)])
    own = _of_its_dataset(saved.data)
    tokenizer = own or load_kept(folder) or _of_its_model(saved)
    length = own.length if own else getattr(saved.data, "sequence_length", None)
    if tokenizer is None or length is None:
        length = _length(saved.data, where=f"{folder}: the run")
    import torch

    from axonlaunch.checkpoint.base_weights import base_tensors
    from axonlaunch.models.build import build_model
    from axonlaunch.models.lora import not_saved
    from axonlaunch.models.module_state import model_state

    model = build_model(saved, seed=saved.seed).eval()
    state, left_out = model_state(model), not_saved(saved, model)
    with torch.no_grad():
        for name, tensor in base_tensors(saved, sorted(left_out)):
            state[name].copy_(tensor)
    checkpoint.load_model(newest, {n: t for n, t in state.items() if n not in left_out})
    return model, length, tokenizer or ByteTokenizer()


def _of_its_dataset(data: Any) -> _DatasetText | None:
    """Return what makes tokens of a run on a dataset of one's own; None: it is none, or no text.

    Raises:
        ConfigError: The dataset can't be made here.
    """
    if DATASETS.is_included(data.name) and not isinstance(data, CustomDataConfig):
        return None
    from axonlaunch.data import build_dataset

    dataset = build_dataset(data)
    return _DatasetText(dataset) if dataset.is_text else None


def _of_its_model(saved: RunConfig) -> Tokenizer | None:
    """Return the tokenizer in the folder of a run's model; None: it has none, or saw bytes."""
    if not isinstance(saved.model, HuggingFaceConfig) or _is_text(saved.data):
        return None
    from axonlaunch.models.hf import files

    folder = files.folder(saved.model)
    return None if folder is None else read_foreign(folder, model=model_of_folder(folder))


def _load_exported(folder: Path) -> tuple[nn.Module, int, Tokenizer]:
    """Return the same of a folder of safetensors."""
    from axonlaunch.checkpoint import weights
    from axonlaunch.models.build import build_model

    tokenizer = weights.exported_tokenizer(folder)
    described: Any
    if tokenizer is None and not weights.was_trained_on_text(folder) and tokenizer_files(folder):
        tokenizer = read_foreign(folder, model=model_of_folder(folder))
        described = HuggingFaceConfig(path=str(folder.absolute()), init="random")
        length = None
    else:
        described, data = weights.describe_folder(folder)
        known = tokenizer is not None
        length = data.sequence_length if known else _length(data, where=f"{folder}: its model")
    model = build_model(described).eval()
    if length is None:
        own: Any = model
        length = getattr(own.config, "max_position_embeddings", None) or _CONTEXT
    if wrong := weights.differences(folder, described, model):
        message = f"{folder}: its weights are not those of its {_EXPORTED}: {weights.first(wrong)}"
        raise ConfigError([ConfigIssue("", message)])
    model.load_state_dict(weights.read_folder(folder, described), strict=False)
    return model, length, tokenizer or ByteTokenizer()


def _length(data: Any, *, where: str) -> int:
    """Return the sequence length of data that is text.

    Raises:
        ConfigError: It is not.
    """
    if _is_text(data):
        return int(data.sequence_length)
    vocabulary = getattr(data, "vocab_size", None)
    tokens = f" with {vocabulary} tokens" if vocabulary else ""
    texts = [name for name, facts in DATASETS.known_facts().items() if facts.is_text]
    message = (
        f"{where} is of data={data.name}{tokens}; only a model of text can be sampled, of "
        f"data={one_of(texts)}"
    )
    raise ConfigError([ConfigIssue("", message)])


def _is_text(data: Any) -> bool:
    return DATASETS.facts(data.name).is_text
