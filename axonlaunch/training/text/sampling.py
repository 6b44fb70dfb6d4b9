"""Generates text from a saved run or from exported weights, in a single process.

The model may have been trained with any layout. Its tokenizer is the one kept in the run folder,
the text methods of the run's custom dataset, or that of a transformers model folder; models trained
on text as bytes need none. Models that were not trained on text are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch import checkpoint, config
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.options.data import DATASETS, CustomDataConfig
from axonlaunch.config.problems.errors import one_of
from axonlaunch.config.problems.frozen_file import name_frozen_file
from axonlaunch.config.values.optional_keys import vocabulary_size
from axonlaunch.data.datasets.dataset import Dataset
from axonlaunch.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer, load_kept, read_foreign
from axonlaunch.data.tokenizers.tokenizer_files import model_of_folder, tokenizer_files
from axonlaunch.models.source_of import model_in_folder, source_of
from axonlaunch.training.text.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from axonlaunch.models.specs.model_spec import ModelOutputs

_EXPORTED, _ADAPTER = "config.json", "adapter_config.json"
_CONTEXT = 2048
"""Context length of a model if its configuration has no maximum sequence length."""


class _DatasetText(ByteTokenizer):
    """The text methods of a dataset, with the interface of a tokenizer.

    Attributes:
        length: Number of tokens in a sample.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.vocab_size, self.length = dataset.num_classes, dataset.sample_shape[0]

    def encode(self, text: str) -> list[int]:
        """Convert a prompt to tokens."""
        return self._dataset.encode(text)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Convert tokens to text."""
        del special
        return self._dataset.decode(tokens)


@dataclass(frozen=True)
class TrainedText:
    """A trained language model and its tokenizer.

    Attributes:
        model: Maps tokens [1, T] to logits [1, T, vocab], or to them and an auxiliary loss. The
            tokenizer may have fewer than vocab tokens.
        context_length: Sequence length of training.
        tokenizer: Tokenizer of the model.
    """

    model: Callable[[Tensor], Tensor | ModelOutputs]
    context_length: int
    tokenizer: Tokenizer

    def generate(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        *,
        is_over: Callable[[list[int]], bool] | None = None,
    ) -> list[int]:
        """Return the tokens that continue a prompt.

        Args:
            prompt: Tokens of the prompt.
            options: Number of new tokens, and how each is drawn.
            is_over: Returns whether new tokens end the text; None ends it after the tokenizer's
                end-of-text token.
        """
        from axonlaunch.models.specs.model_spec import ModelOutputs
        from axonlaunch.training.text.generation import generate

        def logits_of_tokens(inputs: Tensor) -> Tensor:
            outputs = self.model(inputs)
            logits = outputs.logits if isinstance(outputs, ModelOutputs) else outputs
            return logits[..., : self.tokenizer.vocab_size]

        return generate(
            logits_of_tokens,
            prompt,
            options,
            context_length=self.context_length,
            is_over=is_over or (lambda tokens: tokens[-1] == self.tokenizer.end),
        )


def load_text_model(folder: Path, *, trusted: bool = False) -> TrainedText:
    """Load a run's newest checkpoint or a folder of safetensors files.

    Args:
        folder: Run folder, or folder with weights and their ``config.json``.
        trusted: Whether to run code that the run's configuration names.

    Raises:
        ConfigError: The folder has no weights or only an adapter, the model was not trained on
            text, or the configuration names code and is not trusted.
    """
    if (folder / _ADAPTER).is_file():
        message = "is an adapter; give its run, or what checkpoint export --merge wrote"
        raise ConfigError([ConfigIssue("", f"{folder}: {message}")])
    is_exported = (folder / _EXPORTED).is_file() and not (folder / CONFIG).is_file()
    if is_exported:
        return TrainedText(*_load_exported(folder))
    with name_frozen_file(folder / CONFIG):
        return TrainedText(*_load_run(folder, trusted=trusted))


def continue_prompt(
    folder: Path,
    prompt: str,
    options: SamplingOptions,
    *,
    trusted: bool = False,
) -> str:
    """Load a run's newest checkpoint or a folder of safetensors files, and continue a prompt.

    Args:
        folder: Run folder, or folder with weights and their ``config.json``.
        prompt: Text to continue.
        options: Number of new tokens, and how each is drawn.
        trusted: Whether to run code that the run's configuration names.

    Raises:
        ConfigError: The folder has no weights, the model was not trained on text, or the
            configuration names code and is not trusted.
    """
    if not prompt:
        raise ConfigError([ConfigIssue("", "--prompt: it is empty; give at least one character")])
    trained = load_text_model(folder, trusted=trusted)
    generated = trained.generate(trained.tokenizer.encode(prompt), options)
    return trained.tokenizer.decode(generated)


def _load_run(folder: Path, *, trusted: bool) -> tuple[nn.Module, int, Tokenizer]:
    """Return a run's model, its context length and its tokenizer."""
    saved = config.read_frozen(folder, trusted=trusted)
    newest = checkpoint.latest(folder)
    if newest is None:
        message = f"{folder}: the run has no checkpoint; train with checkpoint.every=N"
        raise ConfigError([ConfigIssue("", message)])
    dataset_text = _text_of_custom_dataset(saved.data)
    tokenizer = dataset_text or load_kept(folder) or _tokenizer_of_model(saved)
    length = dataset_text.length if dataset_text else saved.sequence_length
    if tokenizer is None or length is None:
        length = _length(saved.data, origin=f"{folder}: the run")
    import torch

    from axonlaunch.checkpoint.exchange.base_weights import base_tensors
    from axonlaunch.models.adapters.lora import not_saved
    from axonlaunch.models.build import build_model
    from axonlaunch.models.modules.module_state import model_state

    model = build_model(saved, seed=saved.seed).eval()
    state, left_out = model_state(model), not_saved(saved, model)
    with torch.no_grad():
        for name, tensor in base_tensors(saved, sorted(left_out), newest.path.parent.parent):
            state[name].copy_(tensor)
    checkpoint.load_model(newest, {n: t for n, t in state.items() if n not in left_out})
    return model, length, tokenizer or ByteTokenizer()


def _text_of_custom_dataset(data: Any) -> _DatasetText | None:
    """Return the text methods of a custom dataset; None for included datasets and without text.

    Raises:
        ConfigError: The dataset can't be built here.
    """
    if DATASETS.is_included(data.name) and not isinstance(data, CustomDataConfig):
        return None
    from axonlaunch.data import build_dataset

    dataset = build_dataset(data)
    return _DatasetText(dataset) if dataset.is_text else None


def _tokenizer_of_model(saved: RunConfig) -> Tokenizer | None:
    """Return the tokenizer in the model folder of a run; None without one or with byte data."""
    folder = None if _is_text(saved.data) else source_of(saved).folder()
    return None if folder is None else read_foreign(folder, model=model_of_folder(folder))


def _load_exported(folder: Path) -> tuple[nn.Module, int, Tokenizer]:
    """Return the model, context length and tokenizer of a folder of safetensors files."""
    from axonlaunch.checkpoint.exchange import weights
    from axonlaunch.models.build import build_model, spec_for

    tokenizer = weights.exported_tokenizer(folder)
    described: Any
    if tokenizer is None and not weights.was_trained_on_text(folder) and tokenizer_files(folder):
        tokenizer = read_foreign(folder, model=model_of_folder(folder))
        described = model_in_folder(folder)
        length = None
    else:
        described, data = weights.describe_folder(folder)
        has_tokenizer = tokenizer is not None
        length = (
            data.sequence_length if has_tokenizer else _length(data, origin=f"{folder}: its model")
        )
    model = build_model(described).eval()
    if length is None:
        length = spec_for(described).max_positions or _CONTEXT
    if wrong := weights.differences(folder, described, model):
        message = f"{folder}: its weights are not those of its {_EXPORTED}: {weights.first(wrong)}"
        raise ConfigError([ConfigIssue("", message)])
    model.load_state_dict(weights.read_folder(folder, described), strict=False)
    return model, length, tokenizer or ByteTokenizer()


def _length(data: Any, *, origin: str) -> int:
    """Return the sequence length of text data.

    Raises:
        ConfigError: The data is not text.
    """
    if _is_text(data):
        return int(data.sequence_length)
    vocabulary = vocabulary_size(data)
    tokens = f" with {vocabulary} tokens" if vocabulary else ""
    texts = [name for name, facts in DATASETS.known_facts().items() if facts.is_text]
    message = (
        f"{origin} was trained on data={data.name}{tokens}; only models trained on text can be "
        f"sampled: data={one_of(texts)}"
    )
    raise ConfigError([ConfigIssue("", message)])


def _is_text(data: Any) -> bool:
    return DATASETS.facts(data.name).is_text
