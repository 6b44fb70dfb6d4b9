"""Provides the ``ModelSpec`` of a transformers model for each configuration.

Nothing is refused here. The structure of the model says what prevents it from being split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.hf.analysis.context_attention import shard_attention
from axonlaunch.models.hf.analysis.expert_modules import expert_modules, use_plain_experts
from axonlaunch.models.hf.analysis.structure import structure
from axonlaunch.models.hf.analysis.tensor_plans import tensor_plan
from axonlaunch.models.hf.build import split_hidden_states, untraceable
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import MixedSamples, ModelSpec
from axonlaunch.models.tensors.initialization import Constant, Initializer


def build_causal_lm(config: HuggingFaceConfig) -> nn.Module:
    """Build a model with parameters without storage.

    Raises:
        ConfigError: The architecture can't be determined, or the model's code can't build it.
    """
    return structure(config).copy()


def adapt(spec: ModelSpec, config: HuggingFaceConfig) -> ModelSpec:
    """Return the spec of the model that a configuration describes.

    Raises:
        ConfigError: The model can't be built.
    """
    model_structure = structure(config)
    initializers: dict[str, Initializer] = dict(model_structure.initializers)
    is_from_files = config.init == "pretrained" and config.weights is None
    if config.init == "pretrained" and config.path is not None:
        initializers = dict.fromkeys(initializers, Constant(0.0))  # a checkpoint fills all of them
    for other, first in model_structure.ties.items():
        initializers[other] = replace(initializers[first], key=first)  # type: ignore[type-var]
    typed: Any = model_structure.typed
    return replace(
        spec,
        layers=model_structure.layers,
        flow=lambda: model_structure.flow,
        unshardable=lambda: model_structure.unshardable,
        unpackable=lambda: model_structure.unpackable,
        tensor_plan=lambda module: tensor_plan(module, model_structure.layers),
        unsplittable=lambda: model_structure.unsplittable,
        experts=expert_modules,
        use_plain_experts=use_plain_experts,
        initializers=lambda module: initializers,
        max_positions=getattr(typed, "max_position_embeddings", None),
        index_names=model_structure.index_names,
        untraceable=untraceable(config),
        head=model_structure.head,
        mixes_samples=_mixed_samples(model_structure.model),
        unquantized=model_structure.unquantized if is_from_files else frozenset(),
    )


def _mixed_samples(model: Any) -> MixedSamples:
    if not getattr(model.config, "output_router_logits", False):
        return "none"
    return "batch" if model.shares_router_loss else "micro_batch"


SPEC = ModelSpec(
    build=build_causal_lm,
    loss=cross_entropy_sum,
    adapt=adapt,
    shard_sequences=shard_attention,
    sequence_parallel=True,
    split_hidden_states=split_hidden_states,
    shards_documents=True,
    runs_without_values=True,
)
