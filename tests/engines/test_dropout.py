"""Dropout masks: equal on ranks with the same values, different on others, reproducible."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import Batch
from axonlaunch.models.build import build_model
from axonlaunch.models.tensors.dtensor_regions import full_tensor

BLOCKS, STEPS = 2, 2


class Block(nn.Module):
    """Records the mask of its dropout, or uses ``given`` as the mask if it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)
        self.kept: list[Tensor] = []
        self.given: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(self.up(x).relu())
        if self.given is not None:
            return x + 2 * hidden * self.given
        dropped = self.drop(hidden)
        self.kept.append(dropped.detach() != 0)
        return x + dropped


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


@dataclass
class Drawn:
    """Records of each step: masks of each block (the forward's first), gradients and samples."""

    kept: list[list[list[Tensor]]]
    gradients: list[dict[str, Tensor]]
    batches: list[Batch]


@pytest.fixture(autouse=True)
def _registered() -> None:
    plan = {"layers.*.up": "column", "layers.*.down": "row"}
    ax.register_model("dropping", layers="layers", tensor_plan=plan)(Dropping)


def configured(*overrides: str, ranks: int) -> RunConfig:
    return run_config(
        [
            *("model=dropping", "data=synthetic_tokens", "data.sequence_length=8"),
            *(
                "train.global_batch_size=4",
                "optimizer.lr=0",
                f"launch.nproc={ranks}",
                "launch.backend=mock",
            ),
            *overrides,
        ]
    )


def draw(chosen: RunConfig, *, ranks: int) -> list[Drawn]:
    """Train for some steps on the mock world; return each rank's masks."""

    def run(world: ax.World) -> Drawn:
        engine, loader = rank_engine(chosen, world)
        blocks = [module for module in engine.modules[0].modules() if isinstance(module, Block)]
        drawn = Drawn([], [], [])
        for step in range(STEPS):
            batch = loader.batch(step)
            engine.backward(batch)
            named = engine.named_parameters()
            drawn.gradients.append(
                {n: full_tensor(p.grad).clone() for n, p in named if p.grad is not None}
            )
            drawn.kept.append([block.kept for block in blocks])
            drawn.batches.append(batch)
            for block in blocks:
                block.kept = []
            engine.update()  # with a rate of 0, so that every step has the same weights
        return drawn

    return ax.World.mock(ranks).run(run)


RECOMPUTE = "train.activation_checkpointing="
SHARED = ["strategy.tensor.degree=2"]
LAYOUTS = [["strategy=ddp", *SHARED], ["strategy=fsdp", *SHARED], ["strategy=zero1", *SHARED]]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("overrides", LAYOUTS, ids=" ".join)
def test_dropout_masks_are_equal_only_on_tensor_ranks(
    overrides: list[str],
) -> None:
    chosen = configured(*overrides, ranks=4)
    drawn, layout = draw(chosen, ranks=4), Layout.of(chosen, world_size=4)
    masks: dict[tuple[int, int, int], Tensor] = {}
    for rank, of_rank in enumerate(drawn):
        for step, block in itertools.product(range(STEPS), range(BLOCKS)):
            [mask] = of_rank.kept[step][block]
            coordinates = layout.data_shard(rank), step, block
            assert torch.equal(masks.setdefault(coordinates, mask), mask), (
                f"rank {rank} at {coordinates}"
            )
            assert 0.3 < mask.float().mean() < 0.7
    assert len(masks) == 2 * STEPS * BLOCKS
    for site, other in itertools.combinations(masks, 2):
        assert not torch.equal(masks[site], masks[other]), f"{site} and {other} drew the same"


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("overrides", [["strategy=single"], *LAYOUTS[:2]], ids=" ".join)
def test_dropout_gradients_equal_torch_with_same_masks(overrides: list[str], mode: str) -> None:
    """Recomputation in backward must use the masks of the forward."""
    ranks = 1 if overrides == ["strategy=single"] else 4
    chosen = configured(*overrides, RECOMPUTE + mode, ranks=ranks)
    drawn, layout = draw(chosen, ranks=ranks), Layout.of(chosen, world_size=ranks)
    for step in range(STEPS):
        plain = build_model(chosen.model, seed=chosen.seed)
        blocks = [module for module in plain.modules() if isinstance(module, Block)]
        for rank in range(0, ranks, layout.tensor):  # one of the tensor ranks
            for block, masks in zip(blocks, drawn[rank].kept[step], strict=True):
                block.given = masks[0]
            batch = drawn[rank].batches[step]
            logits, targets = plain(batch.inputs).flatten(0, 1), batch.targets.flatten()
            (F.cross_entropy(logits, targets) / layout.data_ranks).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(drawn[0].gradients[step][name], parameter.grad)
