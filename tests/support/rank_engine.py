"""Builds one rank's engine and the loader of its samples from a configuration."""

from __future__ import annotations

from axonlaunch import data
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.data.datasets.loader import Loader, rank_loader
from axonlaunch.engines.build import build_engine
from axonlaunch.engines.engine import Engine


def rank_engine(chosen: RunConfig, world: World) -> tuple[Engine, Loader]:
    """Build both for the rank of a world."""
    layout = Layout.of(chosen, world_size=world.world_size)
    loader = rank_loader(
        chosen, data.build_dataset(chosen.data, chosen.tokenizer), layout=layout, rank=world.rank
    )
    return build_engine(chosen, world, sample=sample_inputs(loader.dataset)), loader
