"""Trains a saved model for five steps: in a layout, and with only transformers and torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from axonlaunch.comm import World
from support.configured import run_config
from support.rank_engine import rank_engine

STEPS = 5
SETTINGS = [
    "model=hf",
    *("data=synthetic_tokens", "data.sequence_length=32"),
    *("train.global_batch_size=4", "train.steps=10", "train.grad_clip=null"),
    *(
        "scheduler=constant",
        "optimizer.lr=3e-3",
        "optimizer.eps=1e-6",
        "optimizer.betas=[0.9,0.99]",
    ),
    *("optimizer.weight_decay=0.1", "checkpoint.every=0"),
]


def by_axonlaunch(path: Path, layout: list[str], *more: str) -> list[float]:
    """Return the loss of each step of training a saved model in a layout."""
    chosen = run_config([*SETTINGS, f"model.path={path}", *layout, *more])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> list[float]:
        from axonlaunch.checkpoint.exchange.weights import load_initial_weights

        engine, loader = rank_engine(chosen, world)
        load_initial_weights(engine, chosen, world=world)
        return [float(engine.train_step(loader.batch(step)).loss) for step in range(STEPS)]

    first, *others = World.mock(chosen.launch.nproc).run(run)
    assert all(other == first for other in others)
    return first


def by_transformers(path: Path, *more: str) -> list[float]:
    """Train with transformers' model, torch's loss and AdamW, and only the data of axonlaunch.

    The result is cached by the model's content, because tests of several layouts train the same
    model.
    """
    files = sorted(path.iterdir())
    key = (*(hashlib.sha256(file.read_bytes()).digest() for file in files), *more)
    if key not in _LOSSES:
        _LOSSES[key] = _trained_by_transformers(path, *more)
    return _LOSSES[key]


_LOSSES: dict[tuple[bytes | str, ...], list[float]] = {}


def _trained_by_transformers(path: Path, *more: str) -> list[float]:
    import transformers

    chosen = run_config([*SETTINGS, f"model.path={path}", "strategy=single", *more])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = adamw(model.train())
    losses = []
    for batch in batches(chosen):
        optimizer.zero_grad()
        # transformers recognizes the documents in a row by positions that start again.
        packed: dict[str, Any] = {}
        if batch.positions is not None:
            packed = {"position_ids": batch.positions, "use_cache": False}
        outputs = model(input_ids=batch.inputs.long(), **packed)
        # The loss that models compute from labels does not take shifted labels in all versions.
        loss = cross_entropy(outputs.logits.flatten(0, 1), batch.targets.flatten())
        if getattr(outputs, "aux_loss", None) is not None:
            loss = loss + model.router_aux_loss_coef * outputs.aux_loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer with the settings above, without weight decay for vectors."""
    parameters = list(model.parameters())
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-6, betas=(0.9, 0.99), weight_decay=0.1)


def batches(chosen: Any) -> list[Any]:
    """Return the first batches of a run on one rank."""
    from axonlaunch import data
    from axonlaunch.config.consistency.layout import Layout
    from axonlaunch.data.datasets.loader import rank_loader

    layout = Layout.of(chosen, world_size=1)
    loader = rank_loader(
        chosen, data.build_dataset(chosen.data, chosen.tokenizer), layout=layout, rank=0
    )
    return [loader.batch(step) for step in range(STEPS)]
