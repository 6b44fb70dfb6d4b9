"""A run whose custom optimizer keeps 8-bit states is saved and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import quantized_optimizer
from support.command import Command

RUN = [
    *("model.hidden_size=64", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=4"),
    *("optimizer=custom", "optimizer.lr=1e-3", "scheduler=constant"),
    *("strategy=ddp", "launch.nproc=2", "launch.backend=mock", "estimate.background=false"),
    *("train.steps=4", "train.log_every=1", "checkpoint.every=2", "checkpoint.keep_last=3"),
]


@pytest.mark.parametrize("target", ["quantized_optimizer:Adam8bit", "bitsandbytes.optim:AdamW8bit"])
def test_run_with_8_bit_optimizer_resumes_to_same_losses(target: str, served: Command) -> None:
    if "." in target:
        pytest.importorskip(target.partition(".")[0])
    shutil.copy(quantized_optimizer.__file__, served.folder)
    run = [*RUN, f"optimizer.target={target}"]
    served("train", *run, "name=whole")
    served("train", *run, "name=resumed", "checkpoint.resume=runs/whole/checkpoints/step_2")

    def losses(name: str) -> dict[int, float]:
        lines = Path(served.folder, "runs", name, "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    full, resumed = losses("whole"), losses("resumed")
    assert [*resumed] == [3, 4]
    assert resumed == {step: full[step] for step in (3, 4)}
