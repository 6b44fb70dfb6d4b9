"""Builds an engine with initial weights for a training loop that is not ours."""

from __future__ import annotations

from axonlaunch import data
from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.comm import World
from axonlaunch.config import RunConfig
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.engines.build import build_engine
from axonlaunch.engines.engine import Engine
from axonlaunch.training.process.arithmetic import configure_arithmetic

__all__ = ["Engine", "engine_with_weights"]


def engine_with_weights(config: RunConfig, world: World) -> Engine:
    """Configure torch's arithmetic, build this rank's engine, and load initial weights.

    Args:
        config: A resolved configuration.
        world: The ranks that train. All of them must call this.
    """
    configure_arithmetic(config.train)
    sample = sample_inputs(data.build_dataset(config.data, config.tokenizer))
    engine = build_engine(config, world, sample=sample)
    load_initial_weights(engine, config, world=world)
    return engine
