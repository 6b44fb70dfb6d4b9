"""``axonlaunch train`` proves the layout of a model of transformers before it starts a rank."""

from __future__ import annotations

from command import Command
from hf_families import without_folder

UNSUMMED = """
from axonlaunch.engines.tensor import layers

layers.leave = lambda x, group, *, sequence_parallel: x
"""


def test_train_proves_first_and_starts_nothing_that_differs(served: Command) -> None:
    words = [*without_folder("llama"), "strategy=tensor", "train.steps=2", "launch.backend=mock"]
    done = served("train", *words, "name=right", "train.eval_batches=0")
    assert "proved: tensor 2 gives one process's losses and gradients (" in done.stdout
    summary = served.summary("right")["proof"]
    assert (summary["outcome"], summary["layout"]) == ("proved", "tensor 2")
    assert summary["seconds"] > 0
    (served.folder / "unsummed.py").write_text(UNSUMMED)
    refused = served("train", *words, "plugins=[unsummed]", "name=wrong", status=2)
    assert refused.stderr.startswith("error: strategy: tensor 2 does not compute what one process")
    assert "the first module that differs is model.embed_tokens;" in refused.stderr
    assert not (served.folder / "runs/wrong").exists()
    dry = served("train", *words, "--dry-run").stdout
    assert "before the first step proved before: tensor 2 gives" in dry
