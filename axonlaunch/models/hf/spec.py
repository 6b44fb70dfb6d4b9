"""What an engine must know of a model of transformers, for each configuration of one.

It refuses nothing itself: what keeps a model from being divided is found by looking at it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.models.hf.build import untraceable
from axonlaunch.models.hf.divided_attention import divide_attention
from axonlaunch.models.hf.structure import structure
from axonlaunch.models.hf.tensor_plans import tensor_plan
from axonlaunch.models.initialization import Constant, Initializer
from axonlaunch.models.loss import cross_entropy_sum
from axonlaunch.models.spec import ModelSpec


def build_causal_lm(config: HuggingFaceConfig) -> nn.Module:
    """Build a model whose parameters have no storage.

    Raises:
        ConfigError: It can't be described, or its own code can't build it so.
    """
    return structure(config).copy()


def adapt(spec: ModelSpec, config: HuggingFaceConfig) -> ModelSpec:
    """Return the spec of the model that a configuration describes.

    Raises:
        ConfigError: It can't be built.
    """
    derived = structure(config)
    starts: dict[str, Initializer] = dict(derived.initializers)
    if config.init == "pretrained" and config.path is not None:
        starts = dict.fromkeys(starts, Constant(0.0))  # a checkpoint fills all of them
    for other, first in derived.ties.items():
        starts[other] = replace(starts[first], key=first)  # type: ignore[type-var]
    typed: Any = derived.typed
    return replace(
        spec,
        layers=derived.layers,
        flow=lambda: derived.flow,
        undivided=lambda: derived.undivided,
        unpackable=lambda: derived.unpackable,
        tensor_plan=lambda module: tensor_plan(module, derived.layers),
        initializers=lambda module: starts,
        max_positions=getattr(typed, "max_position_embeddings", None),
        index_names=derived.index_names,
        untraceable=untraceable(config),
        head=derived.head,
        mixes_samples=bool(getattr(typed, "output_router_logits", False)),
    )


SPEC = ModelSpec(
    build=build_causal_lm,
    loss=cross_entropy_sum,
    adapt=adapt,
    divide=divide_attention,
    divides_documents=True,
    runs_without_values=True,
)
