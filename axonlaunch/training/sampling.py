"""Text from a saved run, or from exported weights, in this process alone.

It is for models of text as bytes, or with a tokenizer of transformers in their folder, whatever
layout trained them; others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch import checkpoint, config
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue
from axonlaunch.config.data import NUM_BYTES, PythonSourceConfig, TextConfig
from axonlaunch.config.model import HuggingFaceConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

_EXPORTED = "config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_CONTEXT = 2048
"""Tokens that a model is shown whose configuration has no longest sequence."""


@dataclass(frozen=True)
class _Writer:
    """A model, and how it reads and writes text.

    Attributes:
        model: Tokens to logits.
        context_length: Tokens that it was trained to look at.
        encode: Text to tokens.
        decode: Tokens to text.
        classes: Of its logits that are tokens; None: all.
    """

    model: nn.Module
    context_length: int
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    classes: int | None = None


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
        tokens: To add: bytes, or those of the folder's tokenizer.
        temperature: Divides the logits; Sampling temperature; 0 = greedy.
        top_k: Draw among so many likeliest tokens; None: among all.
        seed: Random seed.
        trusted: Whether code that the run's configuration names may run.

    Raises:
        ConfigError: The folder holds no weights, or those of a model whose text can't be read, or a
            run's configuration names code and is not trusted.
    """
    if not prompt:
        raise ConfigError([ConfigIssue("", "--prompt: it is empty; give at least one character")])
    is_exported = (folder / _EXPORTED).is_file() and not (folder / CONFIG).is_file()
    writer = _exported(folder) if is_exported else _of_run(folder, trusted=trusted)
    from axonlaunch.models.generation import generate

    def logits_of_tokens(inputs: Tensor) -> Tensor:
        """A vocabulary may be padded to more than there are tokens."""
        logits: Tensor = writer.model(inputs)[..., : writer.classes]
        return logits

    written = generate(
        logits_of_tokens,
        writer.encode(prompt),
        max_new_tokens=tokens,
        context_length=writer.context_length,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return writer.decode(written)


def _of_bytes(model: nn.Module, length: int) -> _Writer:
    from axonlaunch.data.text import decode, encode

    return _Writer(model, length, encode, decode, NUM_BYTES)


def _by_tokenizer(model: nn.Module, length: int, folder: Path) -> _Writer:
    """Read and write text by the tokenizer of a folder of transformers.

    Raises:
        ConfigError: transformers can't load it.
    """
    from axonlaunch.models.hf import library

    try:
        tokenizer: Any = library.transformers().AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        message = f"{folder}: its tokenizer can't be loaded: {' '.join(str(error).split())[:300]}"
        raise ConfigError([ConfigIssue("", message)]) from None
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return _Writer(model, length, tokenizer.encode, decode)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _of_run(folder: Path, *, trusted: bool) -> _Writer:
    """Return a run's model, and how it reads text: as bytes, or by its folder's tokenizer."""
    saved = config.read_frozen(folder, trusted=trusted)
    newest = checkpoint.latest(folder)
    if newest is None:
        message = f"{folder}: the run has no checkpoint; train with checkpoint.every=N"
        raise ConfigError([ConfigIssue("", message)])
    tokenizer = None
    if isinstance(saved.model, HuggingFaceConfig) and not _is_text(saved.data):
        from axonlaunch.models.hf import files

        tokenizer = files.folder(saved.model)
    by_tokenizer = tokenizer is not None and _has_tokenizer(tokenizer)
    length = getattr(saved.data, "sequence_length", None)
    if not by_tokenizer or length is None:
        length = _length(saved.data, where=f"{folder}: the run")
    from axonlaunch.engines.mesh_engine import model_state
    from axonlaunch.models.build import build_model

    model = build_model(saved.model, seed=saved.seed).eval()
    checkpoint.load_model(newest, model_state(model))
    if by_tokenizer and tokenizer is not None:
        return _by_tokenizer(model, length, tokenizer)
    return _of_bytes(model, length)


def _exported(folder: Path) -> _Writer:
    """Return the model of a folder of safetensors, and how it reads text.

    What was exported of a run on bytes of text reads bytes; another has a tokenizer.
    """
    from axonlaunch.checkpoint import weights

    of_bytes = weights.was_trained_on_text(folder)
    if not of_bytes and _has_tokenizer(folder):
        described = HuggingFaceConfig(path=str(folder.absolute()), init="random")
        model = _filled(folder, described)
        own: Any = model
        length = getattr(own.config, "max_position_embeddings", None) or _CONTEXT
        return _by_tokenizer(model, length, folder)
    typed, data = weights.described(folder)
    length = _length(data, where=f"{folder}: its model")
    return _of_bytes(_filled(folder, typed), length)


def _filled(folder: Path, described: Any) -> nn.Module:
    """Return the model of a folder with its weights.

    Raises:
        ConfigError: They are not those of its ``config.json``.
    """
    from axonlaunch.checkpoint import weights
    from axonlaunch.models.build import build_model

    model = build_model(described).eval()
    if wrong := weights.differences(folder, described, model):
        message = f"{folder}: its weights are not those of its {_EXPORTED}: {weights.first(wrong)}"
        raise ConfigError([ConfigIssue("", message)])
    model.load_state_dict(weights.read_folder(folder, described), strict=False)
    return model


def _is_text(data: Any) -> bool:
    return isinstance(data, PythonSourceConfig | TextConfig)


def _length(data: Any, *, where: str) -> int:
    """Return the sequence length of data that is text.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(data, PythonSourceConfig | TextConfig):
        return data.sequence_length
    vocabulary = getattr(data, "vocab_size", None)
    tokens = f" with {vocabulary} tokens" if vocabulary else ""
    message = (
        f"{where} is of data={data.name}{tokens}; only a model of text as bytes can be sampled, of "
        "data=text or data=python_source, or one whose folder has a tokenizer"
    )
    raise ConfigError([ConfigIssue("", message)])
