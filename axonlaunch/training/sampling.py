"""Text from a saved run, or from exported weights, in this process alone.

It is for models of text as bytes, whatever layout trained them; others are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch import checkpoint, config
from axonlaunch.config import CONFIG, ConfigError, ConfigIssue
from axonlaunch.config.data import NUM_BYTES, PythonSourceConfig, TextConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

_EXPORTED = "config.json"


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
        tokens: Bytes to add.
        temperature: Divides the logits; Sampling temperature; 0 = greedy.
        top_k: Draw among so many likeliest bytes; None: among all.
        seed: Random seed.
        trusted: Whether code that the run's configuration names may run.

    Raises:
        ConfigError: The folder holds no weights, or not those of a model of text, or a run's
            configuration names code and is not trusted.
    """
    if not prompt:
        raise ConfigError([ConfigIssue("", "--prompt: it is empty; give at least one character")])
    is_exported = (folder / _EXPORTED).is_file() and not (folder / CONFIG).is_file()
    model, context_length = _exported(folder) if is_exported else _of_run(folder, trusted=trusted)
    from axonlaunch.data.text import decode, encode
    from axonlaunch.models.generation import generate

    def logits_of_bytes(inputs: Tensor) -> Tensor:
        """A vocabulary may be padded to more than there are bytes."""
        logits: Tensor = model(inputs)[..., :NUM_BYTES]
        return logits

    written = generate(
        logits_of_bytes,
        encode(prompt),
        max_new_tokens=tokens,
        context_length=context_length,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return decode(written)


def _of_run(folder: Path, *, trusted: bool) -> tuple[nn.Module, int]:
    """Return a run's model, and how many bytes it was trained to look at."""
    saved = config.read_frozen(folder, trusted=trusted)
    newest = checkpoint.latest(folder)
    if newest is None:
        message = f"{folder}: the run has no checkpoint; train with checkpoint.every=N"
        raise ConfigError([ConfigIssue("", message)])
    length = _length(saved.data, where=f"{folder}: the run")
    from axonlaunch.engines.mesh_engine import model_state
    from axonlaunch.models.build import build_model

    model = build_model(saved.model, seed=saved.seed).eval()
    checkpoint.load_model(newest, model_state(model))
    return model, length


def _exported(folder: Path) -> tuple[nn.Module, int]:
    """Return the model of a folder of safetensors, and how many bytes it was trained to look at."""
    from axonlaunch.checkpoint import weights
    from axonlaunch.models.build import build_model

    described, data = weights.described(folder)
    length = _length(data, where=f"{folder}: its model")
    model = build_model(described).eval()
    if wrong := weights.differences(folder, described, model):
        message = f"{folder}: its weights are not those of its {_EXPORTED}: {weights.first(wrong)}"
        raise ConfigError([ConfigIssue("", message)])
    model.load_state_dict(weights.read_folder(folder, described), strict=False)
    return model, length


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
        "data=text or data=python_source"
    )
    raise ConfigError([ConfigIssue("", message)])
