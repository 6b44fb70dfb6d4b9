"""Rows with several documents, in every layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.configured import estimate_config, run_config
from support.parity import assert_trains_as_one_process, verified

from axonlaunch.config import ConfigError
from axonlaunch.config.options.documents import ChatConfig
from axonlaunch.data import register_dataset
from axonlaunch.data.datasets.dataset import Batch, DatasetInfo
from axonlaunch.verification.proofs.layout_proof import preview

DATA = ["data=synthetic_tokens", "data.sequence_length=16", "data.document_length=5"]
MODELS = {
    "gpt": ["model=gpt", "model.hidden_size=16", "model.num_attention_heads=2"],
    "llama": ["model=llama_debug", "model.hidden_size=32", "model.num_attention_heads=4"],
}
TENSOR = ["strategy=tensor", "strategy.tensor.degree=2"]
CONTEXT = ["strategy.context.degree=2", "strategy.data_parallel=ddp"]
PIPELINE = ["strategy=pipeline", "strategy.pipeline.degree=2"]
LAYOUTS = {
    "ddp": (["strategy=ddp"], 2),
    "zero1": (["strategy=zero1"], 2),
    "fsdp": (["strategy=fsdp"], 2),
    "tensor": (TENSOR, 2),
    "sequence": ([*TENSOR, "strategy.tensor.sequence_parallel=true"], 2),
    "1f1b": (PIPELINE, 2),
    "zero_bubble": ([*PIPELINE, "strategy.pipeline.schedule=zbv_zero_bubble"], 2),
    "hybrid": (["strategy=hybrid", *TENSOR[1:], *PIPELINE[1:]], 8),
    "context": (CONTEXT, 2),
    "context_4": (["strategy.context.degree=4", *CONTEXT[1:]], 4),
    "context_tensor": ([*TENSOR, "strategy.tensor.sequence_parallel=true", *CONTEXT], 4),
    "context_pipeline": ([*PIPELINE, *CONTEXT, "train.activation_checkpointing=full"], 4),
    "recomputed": (["strategy=fsdp", "train.activation_checkpointing=full"], 2),
}


def overrides_of(model: str) -> list[str]:
    return [*MODELS[model], "model.num_hidden_layers=4", *DATA]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_stay_separate_in_every_layout(layout: str, model: str) -> None:
    overrides, ranks = LAYOUTS[layout]
    assert_trains_as_one_process([*overrides_of(model), *overrides], ranks)


def test_packing_boundaries_affect_training() -> None:
    overrides = [*overrides_of("gpt"), "strategy=single"]
    apart, together = (
        verified([*overrides, *more], 1) for more in ([], ["data.document_length=null"])
    )
    assert together.losses != apart.losses


class PackedRows:
    """A user's dataset of packed rows."""

    kind, num_classes, num_samples, num_eval_samples = "tokens", 256, 64, 16
    sample_shape, info = (8,), DatasetInfo(is_packed=True)

    def samples(self, indices: Any, *, split: str) -> Batch:
        rows = np.asarray(indices)[:, None] + np.arange(9)
        positions = np.broadcast_to(np.arange(8) % 4, (len(rows), 8)).copy()
        return Batch.from_numpy(rows[:, :-1], rows[:, 1:], positions)


@pytest.mark.parametrize(
    ("data", "key", "instead"),
    [
        (DATA, "data.document_length=5", "null"),
        (["data=packed_rows"], "data.name=packed_rows", "a dataset with one document per row"),
    ],
    ids=["synthetic", "registered"],
)
def test_packing_with_unsupported_model_is_refused_before_start(
    data: list[str], key: str, instead: str
) -> None:
    register_dataset("packed_rows")(PackedRows)
    overrides = ["model=custom", "model.target=torch.nn:Embedding", "strategy=single"]
    arguments = "model.arguments={num_embeddings: 256, embedding_dim: 256}"
    with pytest.raises(ConfigError) as raised:
        run_config([*overrides, arguments, *data])
    assert str(raised.value) == (
        f"{key}: a row holds several documents, and model=custom can't keep them "
        f"apart: its forward takes no positions; use {instead}"
    )


def test_an_estimate_of_packed_rows_needs_no_file() -> None:
    chosen = estimate_config(["data=documents", "data.files=[none.jsonl]", "model=gpt"])
    assert chosen.data.document_length == chosen.data.sequence_length == 1024
    chosen = estimate_config(["data=documents", "data.files=[none.jsonl]", "data.packing=none"])
    assert chosen.data.document_length is None


OWN = ["model=custom", "model.target=torch.nn:Embedding", "strategy=single"]
OWN += ["model.arguments={num_embeddings: 256, embedding_dim: 256}"]
HYBRID = {
    "model_type": "qwen3_5_text",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CHAT = ["data=chat", "data.files=[none.jsonl]", "data.sequence_length=16"]


@pytest.mark.parametrize(
    "model",
    [
        OWN,
        ["model=hf", "model.init=random", f"model.config={json.dumps(HYBRID)}"],
    ],
    ids=["custom", "qwen3_5"],
)
def test_packing_auto_is_off_for_unsupported_model(
    model: list[str],
) -> None:
    chosen = estimate_config([*model, *CHAT])
    assert (chosen.data.packing, chosen.data.document_length) == ("none", None)
    with pytest.raises(ConfigError, match=r"^data.packing=best_fit: .*; use none$"):
        estimate_config([*model, *CHAT, "data.packing=best_fit"])


def test_packing_auto_stays_for_supported_model() -> None:
    chosen = estimate_config(["model=gpt", *CHAT])
    assert (chosen.data.packing, chosen.data.document_length) == ("auto", 16)


def test_a_run_resolves_packing_auto(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} and one", "completion": str(number + 1)} for number in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [
        *("data=documents", f"data.files=[{tmp_path}/rows.jsonl]", "data.text_field=prompt"),
        *("data.sequence_length=16", "data.packing=auto", f"data.cache_dir={tmp_path}/tokens"),
        *("train.global_batch_size=2", "train.eval_batches=0"),
    ]
    assert run_config([*OWN, *files]).data.packing == "none"
    assert run_config(["model=gpt", *files]).data.packing == "auto"


def test_the_proof_of_a_dry_run_resolves_packing_auto() -> None:
    model = ["model=hf", "model.init=random", f"model.config={json.dumps(HYBRID)}"]
    chosen = estimate_config([*model, *CHAT, "strategy=ddp", "launch.nproc=2"])
    read = ChatConfig(files=["none.jsonl"], sequence_length=16)
    assert not preview(dataclasses.replace(chosen, data=read)).reason
