"""Models that mix tokens by other means than attention can't keep documents in a row apart.

transformers passes document boundaries (``seq_idx``, ``cu_seq_lens``) of some models to CUDA
kernels of other packages, and raises an error without them; other models ignore boundaries. If it
learns to separate documents without kernels, these tests fail and packing can follow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.configured import run_config

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.problems.errors import plain
from axonlaunch.models.build import build_model

BENCHES = Path(__file__).parents[3] / "scripts" / "benches"
IGNORING = (
    *("mamba", "jamba", "mamba2", "falcon_mamba", "recurrent_gemma", "rwkv", "xlstm"),
    *("minimax", "inkling_text", "zaya"),
)
"""Models that ignore boundaries."""
REFUSING = (
    *("bamba", "falcon_h1", "granitemoehybrid", "zamba", "zamba2", "nemotron_h", "qwen3_next"),
    *("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe", "lfm3"),
    *("kimi_linear", "bailing_hybrid", "qwen4_exp_text", "lara_mini", "inkling2_text"),
)
"""Models that pass boundaries to kernels and need these."""


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Return a function that returns the configuration of a run of a tiny model."""
    monkeypatch.syspath_prepend(str(BENCHES))
    tiny: Any = importlib.import_module("hf_tiny")

    def load(kind: str, *overrides: str) -> RunConfig:
        model = ["model=hf", "model.init=random", f"model.config={plain(tiny.tiny(kind))}"]
        data = ["data=synthetic_tokens", "data.vocab_size=256", "data.sequence_length=16"]
        return run_config([*model, *data, "strategy=single", "launch.nproc=1", *overrides])

    return load


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kind", [*IGNORING, *REFUSING])
def test_packing_is_refused_for_models_that_mix_tokens_otherwise(
    kind: str, configured: Callable[..., RunConfig]
) -> None:
    with pytest.raises(ConfigError, match="a row holds several documents, and model=hf can't keep"):
        configured(kind, "data.document_length=8")


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kind", [*IGNORING, *REFUSING])
def test_transformers_does_not_separate_documents_without_kernels(
    kind: str, configured: Callable[..., RunConfig]
) -> None:
    config = configured(kind)
    model: Any = build_model(config.model, seed=0).eval()
    forward = getattr(transformers, type(model).__name__).forward
    tokens = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    boundaries = torch.tensor([0, 10, 24], dtype=torch.int32)
    documents = {
        "position_ids": positions,
        "seq_idx": ((positions == 0).cumsum(-1) - 1).int(),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
    }
    with torch.no_grad():
        parts = [forward(model, input_ids=part).logits for part in tokens.split([10, 14], dim=1)]
        expected = torch.cat(parts, dim=1)
        if kind in IGNORING:  # by far more than rounding, 1e-6
            packed = forward(model, input_ids=tokens, **documents).logits
            assert (packed - expected).abs().max() > 1e-3 * expected.abs().max()
        else:
            with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
                forward(model, input_ids=tokens, **documents)
