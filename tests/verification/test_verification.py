"""verify passes correct engines, and names the errors of broken ones."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.configured import run_config
from support.parity_table import MODELS
from torch import Tensor, nn
from torch.nn import functional

from axonlaunch.comm import ProcessGroup
from axonlaunch.comm.averaging import gradient_bucket
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import Batch
from axonlaunch.engines import build, forward_backward, mesh_engine
from axonlaunch.engines.data_parallel import gradient_synchronizer
from axonlaunch.engines.data_parallel.zero1 import ShardedUpdate
from axonlaunch.engines.optimizer import clipping
from axonlaunch.engines.pipeline import pipeline, tied_weights
from axonlaunch.engines.tensor.parallel_layers import layers
from axonlaunch.models import build as models_build
from axonlaunch.models.modules import attention
from axonlaunch.verification.comparison import compare, comparison_config
from axonlaunch.verification.references import reference_runs
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.differences import compare_numbers
from axonlaunch.verification.result import ParityResult

TENSOR = ["strategy=tensor", "launch.nproc=2"]
PIPELINE = ["strategy=pipeline", "launch.nproc=2"]
SEQUENCE = [*TENSOR, "strategy.tensor.sequence_parallel=true"]
ONE_BY_ONE = ["strategy=ddp", "strategy.ddp.sync=no_sync", "launch.nproc=2"]


def verify(overrides: list[str], *, model: str = "gpt", steps: int = 2) -> ParityResult:
    chosen = run_config(
        [*MODELS[model], "train.global_batch_size=8", "scheduler.warmup_steps=0", *overrides]
    )
    return compare.on_mock(chosen, ComparisonPlan(steps=steps))


def test_verify_passes_correct_layouts() -> None:
    verdict = verify(TENSOR)
    assert verdict.passed
    assert verdict.differences == []
    assert 0 <= verdict.max_gradient_difference < verdict.tolerance == 1e-5


def test_custom_optimizer_updates_are_smooth() -> None:
    overrides = ["optimizer=custom", "optimizer.target=torch.optim:RMSprop", "optimizer.lr=0.01"]
    smooth = comparison_config.with_smooth_updates(run_config(overrides))
    assert smooth.optimizer.arguments == {"eps": 1e-4}
    chosen = run_config([*overrides, "optimizer.arguments={eps: 0.01}"])
    assert comparison_config.with_smooth_updates(chosen).optimizer.arguments == {"eps": 0.01}


def in_layout(broken: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    """Break a function only on worlds of several ranks: the reference stays correct."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return (broken if several else right)(*args, **kwargs)

    return chosen


def nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a function by one that does nothing."""


Patch = pytest.MonkeyPatch


def gradients_are_not_averaged(patch: Patch) -> None:
    patch.setattr(gradient_synchronizer.GradientSynchronizer, "sync_all", nothing)


def gradients_are_summed_not_averaged(patch: Patch) -> None:
    finish = gradient_bucket.GradientBucket.finish

    def summed(bucket: Any) -> None:
        finish(bucket)
        bucket.data.mul_(dist.get_world_size())

    patch.setattr(gradient_bucket.GradientBucket, "finish", summed)


def a_bias_is_added_on_every_rank(patch: Patch) -> None:
    def forward(layer: Any, x: Tensor) -> Tensor:
        weight, bias = map(layers.to_local, (layer.weight, layer.bias))
        y = torch.nn.functional.linear(x, weight, bias)
        return layers.leave(y, layer.axis.group, sequence_parallel=False)

    patch.setattr(layers.RowParallelLinear, "forward", forward)


def a_row_parallel_result_is_not_summed(patch: Patch) -> None:
    patch.setattr(layers, "leave", lambda x, group, *, sequence_parallel: x)


def a_micro_batch_is_dropped(patch: Patch) -> None:
    every = Batch.micro_batches

    def but_one(batch: Batch, size: int) -> Any:
        yield from [*every(batch, size)][1:]

    patch.setattr(Batch, "micro_batches", in_layout(but_one, every))


def a_pipeline_round_sees_another_s_targets(patch: Patch) -> None:
    run = pipeline.Pipeline.run

    def rolled(self: Any, inputs: Tensor, targets: Tensor, *, loss: Any) -> Any:
        return run(self, inputs, targets.roll(1, 0), loss=loss)

    patch.setattr(pipeline.Pipeline, "run", rolled)


def a_tied_weight_is_not_synced(patch: Patch) -> None:
    patch.setattr(tied_weights.TiedGradients, "sync", nothing)


def positions_are_one_off(patch: Patch) -> None:
    right = attention.Rotary.turn

    def shifted(rotary: Any, x: Tensor) -> Tensor:
        return right(attention.Rotary(rotary.cos.roll(1, 0), rotary.sin.roll(1, 0)), x)

    patch.setattr(attention.Rotary, "turn", in_layout(shifted, right))


def a_norm_counts_one_stage_alone(patch: Patch) -> None:
    right = mesh_engine.gradient_norm
    patch.setattr(mesh_engine, "gradient_norm", lambda p, **_: right(p))


def a_norm_counts_one_shard_alone(patch: Patch) -> None:
    patch.setattr(clipping, "_division", lambda gradient: (None, ()))


def losses_are_normalized_by_the_rank_s_own_targets(patch: Patch) -> None:
    right = mesh_engine.MeshEngine._sum_async

    def own(self: Any, counted: Tensor) -> Any:
        if counted.dtype == torch.int64:
            return None
        return right(self, counted)

    patch.setattr(mesh_engine.MeshEngine, "_sum_async", own)


def updated_rows_are_not_gathered(patch: Patch) -> None:
    patch.setattr(ShardedUpdate, "_gather", nothing)


def ranks_read_the_same_samples(patch: Patch) -> None:
    patch.setattr(Layout, "data_shard", lambda self, rank: 0)


def weights_depend_on_the_rank(patch: Patch) -> None:
    right = models_build.initialize

    def by_rank(module: Any, *, seed: int, initializers: Any) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        right(module, seed=seed + rank, initializers=initializers)

    patch.setattr(models_build, "initialize", by_rank)


def the_learning_rate_grows_with_the_world(patch: Patch) -> None:
    right = build.learning_rate

    def grown(schedule: Any, step: int, **figures: Any) -> float:
        return right(schedule, step, **figures) * dist.get_world_size()

    patch.setattr(build, "learning_rate", grown)


def a_region_s_gradient_is_not_summed(patch: Patch) -> None:
    from axonlaunch.engines.tensor.parallel_layers import fused_region

    patch.setattr(fused_region, "start_sum", lambda x, group: x)


def norms_of_a_part_keep_their_own_gradients(patch: Patch) -> None:
    from axonlaunch.engines.tensor.parallel_layers import local_parameters

    patch.setattr(local_parameters, "sum_over", lambda x, group: x)


def logits_of_one_rank_alone_are_normalized(patch: Patch) -> None:
    from axonlaunch.engines.tensor.outputs import loss

    def own(x: Tensor, group: ProcessGroup) -> Tensor:
        return x

    patch.setattr(loss, "sum_over", own)


def an_embedding_gets_no_gradient(patch: Patch) -> None:
    right = mesh_engine.MeshEngine.backward

    def without(self: Any, batch: Batch) -> Any:
        result = right(self, batch)
        for name, parameter in self.named_parameters():
            if name == "embed_positions.weight":
                parameter.grad = None
        return result

    patch.setattr(mesh_engine.MeshEngine, "backward", in_layout(without, right))


FAULTS: list[tuple[Callable[[Patch], None], list[str], str, str]] = [
    (gradients_are_not_averaged, ONE_BY_ONE, "gpt", "step 1: gradient of embed_tokens.weight"),
    (gradients_are_summed_not_averaged, ONE_BY_ONE, "gpt", "step 1: gradient of embed_tokens"),
    (a_bias_is_added_on_every_rank, TENSOR, "gpt", "step 1: loss is"),
    (a_row_parallel_result_is_not_summed, TENSOR, "llama", "step 1: loss is"),
    (
        a_micro_batch_is_dropped,
        ["strategy=ddp", "launch.nproc=2", "train.micro_batch_size=1"],
        "gpt",
        "step 1: loss is",
    ),
    (a_pipeline_round_sees_another_s_targets, PIPELINE, "gpt", "step 1: loss is"),
    (a_tied_weight_is_not_synced, PIPELINE, "gpt", "step 1: gradient of embed_tokens.weight"),
    (positions_are_one_off, TENSOR, "llama", "step 1: loss is"),
    (a_norm_counts_one_stage_alone, PIPELINE, "gpt", "step 1: gradient norm is"),
    (
        a_norm_counts_one_shard_alone,
        ["strategy=fsdp", "launch.nproc=2"],
        "gpt",
        "step 1: gradient norm is",
    ),
    (
        losses_are_normalized_by_the_rank_s_own_targets,
        ["strategy=ddp", "launch.nproc=2"],
        "gpt",
        "step 1: loss is",
    ),
    (
        updated_rows_are_not_gathered,
        ["strategy=zero1", "launch.nproc=2"],
        "gpt",
        "step 2: loss is",
    ),
    (ranks_read_the_same_samples, ONE_BY_ONE, "gpt", "step 1: loss is"),
    (weights_depend_on_the_rank, PIPELINE, "llama", "step 1: loss is"),
    (the_learning_rate_grows_with_the_world, ONE_BY_ONE, "gpt", "step 2: loss is"),
    (a_region_s_gradient_is_not_summed, TENSOR, "llama", "step 1: gradient of embed_tokens"),
    (
        norms_of_a_part_keep_their_own_gradients,
        SEQUENCE,
        "llama",
        "step 1: gradient of layers.0.input_layernorm.weight",
    ),
    (logits_of_one_rank_alone_are_normalized, TENSOR, "llama", "step 1: loss is"),
    (an_embedding_gets_no_gradient, TENSOR, "gpt", "no rank has the gradient of embed_positions"),
]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("fault", "overrides", "model", "reported"),
    FAULTS,
    ids=[fault.__name__ for fault, *_ in FAULTS],
)
def test_verify_names_error_of_broken_engine(
    fault: Callable[[Patch], None],
    overrides: list[str],
    model: str,
    reported: str,
    monkeypatch: Patch,
) -> None:
    fault(monkeypatch)
    verdict = verify(overrides, model=model)
    assert not verdict.passed
    assert any(reported in line for line in verdict.differences[:3]), verdict.differences[:5]


@pytest.mark.slow
def test_a_layout_that_fails_to_run_is_no_pass(monkeypatch: Patch) -> None:
    def broken(self: Any, batch: Batch, *, loss: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(forward_backward.PipelineForwardBackward, "train", broken)
    verdict = verify(PIPELINE)
    assert not verdict.passed
    assert "out of luck" in str(verdict.failure)


class Noisy(nn.Linear):
    """Applies dropout in its forward that no switch turns off."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.dropout(super().forward(inputs), 0.5, self.training)


class NoisyBackward(nn.Linear):
    """Draws random numbers that change gradients only."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        none = self.weight.sum() - self.weight.detach().sum()
        return outputs + none * torch.rand_like(outputs)


class Undefined(nn.Linear):
    """Draws random numbers without effect, and has no finite outputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * torch.rand(1) * math.nan


class Broken(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        raise ValueError("the model itself is wrong")


@pytest.mark.parametrize(
    ("layer", "failure"),
    [
        (Noisy, "the model draws random numbers in training"),
        (NoisyBackward, "the model draws random numbers in training"),
        (Undefined, "the first loss of one process is nan"),
        (Broken, "one process fails, without the layout: ValueError: the model itself is wrong"),
    ],
)
def test_a_model_with_no_reference_is_no_pass(
    layer: type[nn.Linear], failure: str, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(MODELS, "user", [f"model.target={__name__}:user", "data=digits"])
    monkeypatch.setattr(sys.modules[__name__], "LAYER", layer)
    verdict = verify(["model=custom", *ONE_BY_ONE], model="user")
    assert not verdict.passed
    assert failure in str(verdict.failure)


class Wavering(nn.Linear):
    """Rounds its sums at random, as some GPU kernels do."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1 + 2.0**-22 * random.choice([-1, 1]))


@pytest.mark.parametrize(
    ("layer", "failure"),
    [(Wavering, "None"), (NoisyBackward, "the model draws random numbers in training")],
)
def test_a_gpu_that_sums_in_a_random_order_makes_no_model_random(
    layer: type[nn.Linear], failure: str, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(MODELS, "user", [f"model.target={__name__}:user", "data=digits"])
    monkeypatch.setattr(sys.modules[__name__], "LAYER", layer)
    monkeypatch.setattr(reference_runs, "reference_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(reference_runs, "has_drawn_numbers", lambda *_, **__: True)
    assert failure in str(verify(["model=custom", *ONE_BY_ONE], model="user").failure)


LAYER: type[nn.Linear] = nn.Linear


def user() -> nn.Module:
    return nn.Sequential(nn.Flatten(), LAYER(784, 16), nn.Dropout(0.5), nn.Linear(16, 10))


class Idle(nn.Linear):
    """Draws random numbers without effect."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + 0 * torch.rand(1, device=inputs.device)


@pytest.mark.parametrize("layer", [nn.Linear, Idle])
def test_dropout_is_off_for_every_layout_would_drop_others(
    layer: type[nn.Linear], monkeypatch: Patch
) -> None:
    monkeypatch.setitem(MODELS, "user", [f"model.target={__name__}:user", "data=digits"])
    monkeypatch.setattr(sys.modules[__name__], "LAYER", layer)
    assert verify(["model=custom", *ONE_BY_ONE], model="user").passed


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
    )


@pytest.mark.parametrize("overrides", [PIPELINE, ONE_BY_ONE], ids=" ".join)
def test_batch_norm_sees_the_same_micro_batches(overrides: list[str], monkeypatch: Patch) -> None:
    monkeypatch.setitem(MODELS, "user", [f"model.target={__name__}:normed", "data=digits"])
    assert verify(["model=custom", *overrides], model="user").passed


def test_nan_counts_as_difference() -> None:
    difference = compare_numbers(0, "loss", float("nan"), 1.0)
    assert difference.relative == float("inf")
    assert str(dataclasses.replace(difference, actual=None)) == "step 1: no rank has the loss"
