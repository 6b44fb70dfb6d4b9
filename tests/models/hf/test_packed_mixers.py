"""Models that mix tokens by other means than attention can't keep documents in a row apart.

transformers passes document boundaries (``seq_idx``, ``cu_seq_lens``) of some models to CUDA
kernels of other packages, and raises an error without them; other models ignore boundaries. If it
learns to separate documents without kernels, these tests fail and packing can follow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support.configured import run_config
from support.hf_families import without_folder

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.models.build import build_model

_STATES = {"n_groups": 1, "state_size": 8, "expand": 2, "head_dim": 16, "num_heads": 8}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
IGNORING: dict[str, dict[str, Any]] = {"mamba": {"state_size": 8}, "mamba2": _STATES}
"""Models that ignore boundaries."""
KINDS: dict[str, dict[str, Any]] = {
    **IGNORING,
    "bamba": {**_HEADS, **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_HEADS, **_MAMBA, "mamba_d_ssm": 128},
}
SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}


def configured(kind: str, *overrides: str) -> RunConfig:
    packed = ["data.document_length=8", "strategy=single", "launch.nproc=1"]
    return run_config([*without_folder(kind, *packed, **SIZES, **KINDS[kind]), *overrides])


@pytest.mark.parametrize("kind", KINDS)
def test_packing_is_refused_for_models_that_mix_tokens_otherwise(kind: str) -> None:
    with pytest.raises(ConfigError, match="a row holds several documents, and model=hf can't keep"):
        configured(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_does_not_separate_documents_without_kernels(kind: str) -> None:
    config = configured(kind, "data.document_length=null")
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
        if kind in IGNORING:
            packed = forward(model, input_ids=tokens, **documents).logits
            assert (packed - expected).abs().max() > 1e-2 * expected.abs().max()
        else:
            with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
                forward(model, input_ids=tokens, **documents)
