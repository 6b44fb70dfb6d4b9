"""Text from a saved run, in this process alone, whatever layout trained it."""

from __future__ import annotations

from pathlib import Path

from axonlaunch import checkpoint, config
from axonlaunch.config import ConfigError, Problem
from axonlaunch.config.data import PythonSourceConfig, TextConfig


def continue_prompt(
    run_dir: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    trusted: bool = False,
) -> str:
    """Load a run's newest checkpoint and continue a prompt.

    Raises:
        ConfigError: The folder holds no checkpoint, the run was not on text, or its configuration
            names code and is not trusted.
    """
    saved = config.read(run_dir, trusted=trusted)
    found = checkpoint.latest(run_dir)
    if found is None:
        message = f"{run_dir}: the run has no checkpoint; train with checkpoint.every=N"
        raise ConfigError([Problem("", message)])
    if not prompt:
        raise ConfigError([Problem("", "--prompt: it is empty; give at least one character")])
    if not isinstance(saved.data, PythonSourceConfig | TextConfig):
        message = f"{run_dir}: the run was on data={saved.data.name}, which is not text"
        raise ConfigError([Problem("", message)])
    from axonlaunch.data.text import decode, encode
    from axonlaunch.engines.mesh_engine import model_state
    from axonlaunch.models.build import build
    from axonlaunch.models.generation import generate

    model = build(saved.model, seed=saved.seed).eval()
    checkpoint.load_model(found, model_state(model))
    written = generate(
        model,
        encode(prompt),
        max_new_tokens=tokens,
        context_length=saved.data.sequence_length,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return decode(written)
