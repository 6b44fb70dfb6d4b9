"""``axonlaunch train`` proves the layout of a model of transformers before it starts a rank."""

from __future__ import annotations

import pytest
from support.command import Command
from support.hf_families import without_folder

UNSUMMED = """
from axonlaunch.engines.tensor.parallel_layers import layers

layers.leave = lambda x, group, *, sequence_parallel: x
"""


OVERRIDES = [
    *without_folder("llama"),
    *("strategy=tensor", "train.steps=2", "train.eval_batches=0", "launch.backend=mock"),
]


@pytest.mark.slow
def test_train_proves_layout_and_caches_result(served: Command) -> None:
    done = served("train", *OVERRIDES, "train.prove=always", "name=right")
    assert "proved: tensor 2 gives one process's losses and gradients (" in done.stdout
    summary = served.summary("right")["proof"]
    assert (summary["outcome"], summary["layout"]) == ("proved", "tensor 2")
    assert summary["seconds"] > 0


def test_failed_layout_proof_refuses_start(served: Command) -> None:
    (served.folder / "unsummed.py").write_text(UNSUMMED)
    refused = served("train", *OVERRIDES, "plugins=[unsummed]", "name=wrong", status=2)
    assert refused.stderr.startswith("error: strategy: tensor 2 and one process compute different")
    assert "the first module that differs is model.embed_tokens;" in refused.stderr
    assert not (served.folder / "runs/wrong").exists()


@pytest.mark.slow
def test_dry_run_names_layout_proof(served: Command) -> None:
    dry = served("train", *OVERRIDES, "train.prove=always", "--dry-run").stdout
    assert "before the first step to be proved: tensor 2 gives one process's losses" in dry
