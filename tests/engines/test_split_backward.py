"""Schedules with separate backwards for inputs and weights compute the weights' part once."""

from __future__ import annotations

import pytest
import torch
from support.configured import run_config
from support.parity_table import MODELS
from torch.utils._python_dispatch import TorchDispatchMode

from axonlaunch import data
from axonlaunch.comm import World
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import build_engine

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Products(TorchDispatchMode):
    times = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.times += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def products(schedule: str) -> int:
    chosen = run_config(
        [
            *(*MODELS["llama"], "strategy=tensor", "strategy.pipeline.degree=2"),
            *(f"strategy.pipeline.schedule={schedule}", "launch.nproc=4"),
            *("train.global_batch_size=8", "train.micro_batch_size=1"),
        ]
    )

    def run(world: World) -> int:
        dataset, layout = data.build_dataset(chosen.data), Layout.of(chosen, world_size=4)
        engine = build_engine(chosen, world, sample=sample_inputs(dataset))
        batch = rank_loader(chosen, dataset, layout=layout, rank=world.rank).batch(0)
        engine.backward(batch)  # finds shapes, once
        with Products() as counted:
            engine.backward(batch)
        return counted.times

    return sum(World.mock(4).run(run))


@pytest.mark.slow
def test_split_backward_with_tensor_parallelism_repeats_few_products() -> None:
    """At most a sixth more: torch recomputes a part where it splits a stage's graph.

    A joint backward of all layers of a region, the default, would need a third more.
    """
    full, split = products("interleaved_1f1b"), products("zbv_zero_bubble")
    assert full <= split <= 1.17 * full
