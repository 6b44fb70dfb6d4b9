"""Verifies configurations as ``axonlaunch verify`` does, in fewer steps, for tests of parity.

The reference runs once for all layouts of a model that have the same reference values.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence

from axonlaunch.config import RunConfig, to_tree, with_values
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_inputs import shards_sequences
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.reference_runs import run_references
from axonlaunch.verification.references.reference_values import Reference
from axonlaunch.verification.result import ParityResult
from support.configured import run_config

STEPS = 2
"""The second step uses the first update and the optimizer states that it created."""
DEMANDS = [
    *("train.global_batch_size=8", "train.steps=10", "scheduler.warmup_steps=0"),
    "train.grad_clip=0.5",
]
"""Settings that ``axonlaunch verify`` adds to a run; tests choose the accumulation themselves."""
_BUCKET_MB = 0.02
"""Bucket size of replicas' gradients, small enough for several buckets."""
_WHOLE_BATCH = ("gpt", "llama", "mlp", "vit")
"""Models for which the reference computes all samples of a step at once in fp32."""
_KEPT = 24

_references: OrderedDict[str, tuple[Reference, ...]] = OrderedDict()


def verified(
    overrides: Sequence[str], ranks: int, *, steps: int = STEPS, beyond: bool = False
) -> ParityResult:
    """Compare a layout on the mock world with plain torch in one process.

    Args:
        overrides: Overrides of the configuration; they follow ``DEMANDS``.
        ranks: Number of ranks.
        steps: Number of optimizer steps.
        beyond: Whether to compare an evaluation, a prediction and a checkpoint, too.
    """
    layout = [f"launch.nproc={ranks}", "launch.backend=mock"]
    config = run_config([*DEMANDS, *layout, *overrides])
    if Layout.of(config, world_size=ranks).facts.section == "ddp":
        config = with_values(config, {"strategy.ddp.bucket_size_mb": _BUCKET_MB})
    plan = ComparisonPlan(steps=steps, beyond=beyond)
    return compare.on_mock(config, plan, one_process=_run_once)


def assert_trains_as_one_process(
    overrides: Sequence[str], ranks: int, *, steps: int = STEPS, beyond: bool = False
) -> ParityResult:
    """Fail if a layout differs. On one rank, where layouts prove little, compare all values."""
    verdict = verified(overrides, ranks, steps=steps, beyond=beyond)
    assert verdict.failure is None, verdict.failure
    assert not verdict.differences, verdict.differences[:8]
    assert verdict.passed or ranks == 1, verdict.reason
    return verdict


def _run_once(config: RunConfig, plan: ComparisonPlan) -> tuple[Reference, ...]:
    """Run the reference unless another layout has already run it."""
    key = f"{plan} {_matters(config)} {plan.beyond and shards_sequences(config)}"
    if key not in _references:
        _references[key] = run_references(config, plan)
        while len(_references) > _KEPT:
            _references.popitem(last=False)
    _references.move_to_end(key)
    return _references[key]


def _matters(config: RunConfig) -> str:
    """Return the settings that the reference values depend on.

    Of the layout these are the micro-batches and the dtypes of the computation, if they have an
    effect.
    """
    layout = Layout.of(config, world_size=num_ranks(config))
    tree = to_tree(config)
    train, strategy = tree["train"], tree.pop("strategy")
    of_layout = {
        "micro-batch": train.pop("micro_batch_size"),
        "samples": layout.micro_batch_size,
        "scaled for": layout.gradient_ranks if train["precision"] == "fp16" else 1,
        "buffers of": 1 if config.model.name in _WHOLE_BATCH else layout.data_ranks,
        "gathered": layout.facts.shards_parameters,
        "summed": strategy["reduce_dtype"],
    }
    del tree["launch"], train["activation_checkpointing"]
    is_whole = config.model.name in _WHOLE_BATCH and train["precision"] == "fp32"
    if is_whole and not config.train.loss:
        of_layout = {"summed": strategy["reduce_dtype"]}
    return json.dumps([tree, of_layout], sort_keys=True, default=str)
