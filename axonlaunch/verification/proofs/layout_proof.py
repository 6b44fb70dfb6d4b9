"""Proves a layout before its first step, by comparing a small similar model with one process.

Successful proofs are cached under a hash of everything that they depend on. A model that cannot be
reduced is reported as not proved. A difference is an error.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from axonlaunch.config import (
    ConfigError,
    ConfigIssue,
    RunConfig,
    to_interpolations,
    to_tree,
    with_values,
)
from axonlaunch.config.axes import AXES, OUTER
from axonlaunch.config.code.plugins import import_plugins
from axonlaunch.config.consistency.degree_rules import EXPERT_DEGREE
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.optimization.optimizer import AdamWConfig
from axonlaunch.config.optimization.schedules import ConstantConfig
from axonlaunch.config.options.data import DATASETS, SyntheticTokensConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.config.precision import FP32
from axonlaunch.config.schema import TrainConfig
from axonlaunch.engines.context.context import length_multiple
from axonlaunch.models.facts.source import ModelDivision, NotReducibleError
from axonlaunch.models.source_of import source_of
from axonlaunch.models.tensors.packed_blocks import BLOCK
from axonlaunch.preflight.checks import find_issues
from axonlaunch.preflight.dataset import with_packing
from axonlaunch.system.storage import cache
from axonlaunch.verification.comparison.compare import on_mock
from axonlaunch.verification.locating import locate
from axonlaunch.verification.locating.recorded_steps import RecordedSteps
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.result import ParityResult, Proof, layout_of

MAX_RANKS = 8
"""Layouts with more ranks are proved with two ranks on each of their axes."""
STEPS = 2
_LENGTH = 32


def prove(config: RunConfig) -> Proof:
    """Prove a checked run's layout unless it was proved before. Call in a separate process.

    Raises:
        ConfigError: The results of the layout and of one process differ.
    """
    began = time.monotonic()
    import_plugins(config.plugins)
    proof = Proof(layout=layout_of(config))
    try:
        small = reduced(config)
        file = _proof_file(small)
        if config.train.prove == "auto" and file is not None and file.exists():
            return replace(proof, outcome="proved before", seconds=time.monotonic() - began)
        parameters = _check_similar(config, small)
    except NotReducibleError as why:
        return replace(proof, reason=str(why), seconds=time.monotonic() - began)
    result = on_mock(small, ComparisonPlan(steps=STEPS))
    if result.verdict == "nothing proved":
        return replace(proof, reason=result.reason, seconds=time.monotonic() - began)
    if not result.passed:
        raise ConfigError([_difference(config, small, result)])
    if file is not None:
        cache.keep(file, json.dumps(to_interpolations(to_tree(small))))
    seconds = time.monotonic() - began
    return replace(proof, outcome="proved", seconds=seconds, parameters=parameters)


def preview(config: RunConfig) -> Proof:
    """Predict the outcome of ``prove`` without comparing anything."""
    import_plugins(config.plugins)
    proof = Proof(layout=layout_of(config))
    try:
        small = reduced(with_packing(config))
        file = _proof_file(small)
        if config.train.prove == "auto" and file is not None and file.exists():
            return replace(proof, outcome="proved before")
        return replace(proof, outcome="to be proved", parameters=_check_similar(config, small))
    except NotReducibleError as why:
        return replace(proof, reason=str(why))


def reduced(config: RunConfig) -> RunConfig:
    """Return a configuration with a small model and a similar layout of few ranks and samples.

    Raises:
        ConfigError: The model's configuration cannot be read.
        NotReducibleError: The model cannot be reduced.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    degrees = _degrees(layout)
    per_rank = 2
    if layout.pipeline > 1:
        per_rank = 2 * degrees["pp"] * layout.stages_per_rank
    has_micro_batches_of_one = layout.pipeline > 1 or layout.micro_batches > 1
    if config.adapter is not None:  # saved matrices have other sizes than those of the small model
        config = with_values(config, {"adapter.path": None})
    small = with_values(
        config,
        {
            **_layout_settings(config, degrees),
            "train.global_batch_size": per_rank * degrees["dp_replicate"] * degrees["dp_shard"],
            "train.micro_batch_size": 1 if has_micro_batches_of_one else "auto",
            "train.precision": FP32.name,
            "train.matmul_dtype": None,
            "train.matmul_group_size": TrainConfig.matmul_group_size,
            "train.matmul_start_step": 0,
            "train.matmul_exclude": [],
            "train.compile": False,
            "train.attention_kernel": "auto",
            "train.loss": None,
            "train.loss_options": None,
            "train.steps": STEPS,
            "optimizer": AdamWConfig(lr=3e-4),
            "scheduler": ConstantConfig(),
            "seed": 0,
            "hardware": None,
        },
    )
    return _with_small_model(small, layout, degrees)


def _degrees(layout: Layout) -> dict[str, int]:
    """Return the number of ranks on each axis, at most two if the layout has many ranks."""
    ranks = math.prod(layout.axes.values())
    return {
        axis: size if ranks <= MAX_RANKS else min(size, 2) for axis, size in layout.axes.items()
    }


def _layout_settings(config: RunConfig, degrees: dict[str, int]) -> dict[str, Any]:
    outer = degrees["dp_replicate"] * math.prod(degrees[axis.name] for axis in OUTER)
    of_a_replica = math.prod(degrees.values()) // outer
    settings: dict[str, Any] = {
        "launch.nproc": math.prod(degrees.values()),
        "launch.nnodes": 1,
        "launch.backend": "mock",
        "launch.device": "cpu",
        **{axis.key: degrees[axis.name] for axis in AXES},
        EXPERT_DEGREE: math.gcd(config.strategy.expert.degree, of_a_replica),
        "strategy.tensor.async_collectives": False,
        "strategy.pipeline.split": "auto",
        "strategy.pipeline.microbatches": "auto",
        "strategy.reduce_dtype": FP32.name,
    }
    if config.strategy.fsdp.sharding == "hybrid_shard":
        settings["strategy.fsdp.replicate"] = degrees["dp_replicate"]
    return settings


def _with_small_model(config: RunConfig, layout: Layout, degrees: dict[str, int]) -> RunConfig:
    is_quantized = config.adapter is not None and config.adapter.base is not None
    division = ModelDivision(
        stages=degrees["pp"] * layout.stages_per_rank,
        tensor=degrees["tp"],
        original_tensor=layout.tensor,
        block=BLOCK if is_quantized else 1,
    )
    multiple = length_multiple(config.strategy)
    length = -(-_LENGTH // multiple) * multiple
    small = source_of(config).reduce(division)
    if small is not None:
        data = SyntheticTokensConfig(
            vocab_size=small.vocab_size,
            sequence_length=length,
            document_length=length // 3 if _is_packed(config) else None,
        )
        return with_values(
            config, {"model": small.config, "data": data, "tokenizer": TokenizerConfig()}
        )
    if config.sequence_length is not None:
        return with_values(config, {"data.sequence_length": length})
    return config


def _is_packed(config: RunConfig) -> bool:
    """Return whether rows contain several documents, separated by a mask."""
    facts = DATASETS.facts(config.data.name)
    return facts is not None and facts.sample is not None and facts.sample(config.data).is_packed


def _check_similar(config: RunConfig, small: RunConfig) -> int:
    """Return the number of parameters of a small model, if it can represent the original.

    Raises:
        ConfigError: A model cannot be built.
        NotReducibleError: The small model differs in kind or cannot run in the smaller layout.
    """
    count = source_of(config).check_small(small)
    if problems := find_issues(small, devices=None):
        raise NotReducibleError(f"with few blocks and heads, {problems[0]}")
    return count


def _proof_file(small: RunConfig) -> Path | None:
    """Return the cache file of a proof; None for models with code that may change."""
    model = None if small.plugins else source_of(small).identity()
    if model is None:
        return None
    dependencies = {
        "model": model,
        "adapter": None if small.adapter is None else to_tree(small.adapter),
        "data": to_tree(small.data),
        "strategy": to_tree(small.strategy),
        "train": to_tree(replace(small.train, prove="auto")),
        "ranks": num_ranks(small),
        "torch": version("torch"),
        "axonlaunch": version("axonlaunch"),
        "source": cache.source_hash(),
    }
    digest = sha256(json.dumps(dependencies, sort_keys=True, default=str).encode()).hexdigest()
    return cache.cache_folder() / "proofs" / f"{digest[:32]}.json"


def _difference(config: RunConfig, small: RunConfig, result: ParityResult) -> ConfigIssue:
    """Describe a difference between layout and one process, and the first module with it."""
    difference = result.failure or result.differences[0]
    first = None if result.failure else locate.first_difference(RecordedSteps(small), small)
    module = f"; the first module that differs is {first.module}" if first is not None else ""
    message = (
        f"{layout_of(config)} and one process compute different results for a small model of the "
        f"same architecture: {difference}{module}; use another layout, or train.prove=never"
    )
    return ConfigIssue("strategy", message)
