"""Correct runs pass, even with large rounding or unusual settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from support.configured import run_config
from support.parity_table import BATCH, MODELS, Combination, combinations_in_tests
from torch import Tensor, nn
from torch.optim import Optimizer

from axonlaunch.verification.comparison import compare
from axonlaunch.verification.comparison.comparison_config import harder_config
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.differences import compare_tensors
from axonlaunch.verification.references.plain_rounding import StateRounding, round_states
from axonlaunch.verification.references.reference_runs import run_references
from axonlaunch.verification.references.reference_values import Reference
from axonlaunch.verification.references.tolerances import Tolerances, floors
from axonlaunch.verification.result import ParityResult

DDP = ["strategy=ddp", "launch.nproc=2"]
FSDP = ["strategy=fsdp", "launch.nproc=2"]
TENSOR = ["strategy=tensor", "launch.nproc=2"]
ZERO1 = ["strategy=zero1", "launch.nproc=2"]
LOWER = ["train.precision=bf16", "train.param_dtype=bf16"]
FP16 = ["train.precision=fp16", "train.param_dtype=fp16"]
OWN = ["model=custom", "data=digits"]
WIDE = ["model.hidden_size=128", "model.num_hidden_layers=2"]
GPT = [
    *("model.hidden_size=32", "model.num_hidden_layers=4", "model.num_attention_heads=4"),
    *("data=synthetic_tokens", "data.sequence_length=16"),
]


def verify(overrides: list[str], *, steps: int = 6) -> ParityResult:
    """Verify as the command does."""
    plan = ComparisonPlan(steps=steps, beyond=True)
    return compare.on_mock(
        harder_config(run_config([*overrides, "launch.backend=mock"]), plan), plan
    )


class Overflowing(nn.Module):
    """A model whose scaled gradients do not fit into fp16 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(784, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(x.flatten(1)) * 100)
        return outputs


def overflowing() -> nn.Module:
    return Overflowing()


class HalfOfRange(nn.Module):
    """A model whose scaled gradients fill more than half of fp16's range in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(784, 10)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(x.flatten(1) * 7)
        return outputs


def half_of_range() -> nn.Module:
    return HalfOfRange()


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
    )


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Dropout(0.1), nn.Linear(64, 10))


class Unused(nn.Module):
    """A model with a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(784, 10), nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.used(x.flatten(1))
        return outputs


def unused() -> nn.Module:
    return Unused()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "overrides",
    [
        [*MODELS["mlp"], *DDP, "optimizer=sgd", "optimizer.lr=0.05"],
        [*MODELS["gpt"], *TENSOR, "optimizer=muon", "model.num_hidden_layers=2"],
        # Its updates round to bf16, even in a run in fp32.
        [*GPT, *FSDP, "optimizer=muon"],
        [*MODELS["mlp"], *FSDP, "optimizer=lion"],
        [*MODELS["mlp"], *FSDP, "optimizer=adafactor"],
        [*MODELS["mlp"], *DDP, "optimizer=nadam", "scheduler=wsd"],
        [*MODELS["mlp"], *DDP, "scheduler=inverse_sqrt"],
        [*OWN, *DDP, f"model.target={__name__}:normed"],
        [*OWN, *DDP, "strategy.ddp.sync=synchronous", f"model.target={__name__}:unused"],
        [*MODELS["mlp"], *FSDP, *LOWER],
        [*MODELS["mlp"], *ZERO1, *LOWER, "optimizer.master_weights=fp32", "train.grad_dtype=fp32"],
        [*MODELS["mlp"], *FSDP, *LOWER, "optimizer.master_weights=fp32", "optimizer=lion"],
        [*MODELS["gpt"], *TENSOR, *FP16, "optimizer.master_weights=fp32"],
        [*GPT, *FSDP, "optimizer.state_dtype=bf16"],
        [*GPT, *TENSOR, "optimizer=adamw_8bit"],
        [*MODELS["gpt"], *TENSOR, *WIDE, *LOWER, "optimizer=lion_8bit"],
        [*MODELS["mlp"], *DDP, "strategy.reduce_dtype=bf16"],
        [*MODELS["gpt"], *TENSOR, *WIDE, "train.matmul_dtype=fp8_tensorwise"],
        [*MODELS["gpt"], *FSDP, *WIDE, *LOWER, "train.matmul_dtype=fp8_rowwise"],
        [*MODELS["gpt"], *TENSOR, *WIDE, "train.matmul_dtype=qat_int8_int4"],
        [*MODELS["gpt"], *TENSOR, *WIDE, *LOWER, "train.matmul_dtype=qat_int8_int4"],
        [
            *(*MODELS["gpt"], *FSDP, *WIDE, "train.precision=bf16", "optimizer=adamw_8bit"),
            *("adapter=lora", "adapter.rank=64", "adapter.base=nf4"),
        ],
        # With 24 units of ReLU and 8 samples, one unit that rounding turns on is a large
        # fraction.
        [
            *(*MODELS["mlp"], *TENSOR, "strategy.fsdp.sharding=no_shard", "launch.nproc=4"),
            *(
                "model.num_hidden_layers=4",
                "strategy.data_parallel=fsdp",
                "train.precision=bf16",
            ),
        ],
        [*OWN, *DDP, f"model.target={__name__}:normed", "train.precision=bf16"],
    ],
    ids=lambda overrides: " ".join(overrides[-3:]),
)
def test_verify_of_right_code_passes(overrides: list[str]) -> None:
    verdict = verify(overrides)
    assert verdict.failure is None
    assert verdict.passed, (verdict.reason, verdict.differences)


@pytest.mark.slow
@pytest.mark.parametrize(
    "combination",
    [c for c in combinations_in_tests() if "expert" in c.layout.label],
    ids=str,
)
def test_rows_with_divided_experts_pass(combination: Combination) -> None:
    ranks = [f"train.global_batch_size={BATCH}", f"launch.nproc={combination.layout.ranks}"]
    verdict = verify([*combination.model_overrides, *combination.overrides, *ranks])
    assert verdict.passed, (verdict.failure, verdict.reason, verdict.differences)


def test_a_gradient_that_is_nothing_but_rounding_may_have_any_of_its_size() -> None:
    plan, name = ComparisonPlan(steps=2), "1.bias"  # batch normalization cancels this bias
    config = run_config([*OWN, *DDP, f"model.target={__name__}:normed", "launch.backend=mock"])
    reference, other = run_references(config, plan)
    floor = floors(reference, 1)
    rounding = torch.full((16,), 1e-4 * floor)
    for run in (reference, other):  # equal here, but unequal in the first step
        run.steps[1].gradients[name] = rounding
    difference = compare_tensors((1, "gradient", name), -rounding, rounding, floor=floor)
    assert Tolerances(config, reference, [other]).allows(difference), difference


@pytest.mark.slow
def test_steps_that_fp16_skips_are_equal_skips() -> None:
    verdict = verify(
        [*OWN, *DDP, f"model.target={__name__}:overflowing", "train.precision=fp16"], steps=8
    )
    skipped, _, of_all = verdict.features["skipped steps"].partition(" of ")
    assert (int(skipped), of_all) > (1, "8")  # its first, and the one that is made to overflow
    assert verdict.passed, (verdict.reason, verdict.differences)


def test_the_step_that_is_made_to_overflow_does_so_where_a_rank_has_gradients_of_rows() -> None:
    verdict = verify([*MODELS["mlp"], "strategy=zero1", "launch.nproc=2", "train.precision=fp16"])
    assert verdict.features["skipped steps"] == "1 of 6"
    assert verdict.passed, (verdict.reason, verdict.differences)


def test_sum_of_ranks_that_would_overflow_fp16_is_no_overflow() -> None:
    """Ranks average in fp32, so that only a rank's gradient or the mean can overflow."""
    model, masters = f"model.target={__name__}:half_of_range", "optimizer.master_weights=fp32"
    config = run_config([*OWN, *ZERO1, *FP16, model, masters, "launch.backend=mock"])
    verdict = compare.on_mock(config, ComparisonPlan(steps=1))
    assert verdict.features["skipped steps"] == "0 of 1"
    assert verdict.passed, (verdict.reason, verdict.differences)


def test_a_mask_too_small_to_compare_was_drawn_all_the_same() -> None:
    model = [*OWN, f"model.target={__name__}:dropping"]
    rows = ["train.global_batch_size=4", "train.micro_batch_size=2"]  # 12.8 are dropped on average
    plan = ComparisonPlan(steps=2)
    verdict = compare.on_mock(run_config([*model, *DDP, *rows, "launch.backend=mock"]), plan)
    assert verdict.passed, (verdict.reason, verdict.differences)
    assert int(verdict.notes[0].split(" masks")[0].split()[-1]) < 4  # from 2 steps of 2 ranks


@pytest.mark.slow  # six steps of each kind above
def test_forty_steps_at_a_large_rate_pass() -> None:
    overrides = ["optimizer.lr=0.03", "model.num_hidden_layers=2", "data.sequence_length=8"]
    verdict = verify([*MODELS["gpt"], *TENSOR, *overrides], steps=40)
    assert verdict.passed, (verdict.reason, verdict.differences)


@pytest.mark.parametrize("share", [1e-5, 1e-4])
@pytest.mark.parametrize("exponent", [1, 2], ids=["normal", "squared"])
def test_rounded_states_differ_by_the_derived_size(exponent: int, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(2**14, generator=generator) ** exponent
    noise = torch.randn(state.shape, generator=generator) * state.square().mean().sqrt()
    one, other = (_round_at_random(values) for values in (state, state + share * noise))
    reference = Reference([], {}, {}, {}, {"weight.exp_avg": one}, {})
    rounding = StateRounding(
        reference, {"weight.exp_avg": 0.0}, spacing=2.0**-7, of_largest=2.0**-7
    )
    derived = rounding.allowed_in_state("weight.exp_avg", share, count=state.numel())
    assert derived / 10 < _difference(other, one) < derived
    assert derived < _difference(state.bfloat16().float(), one)  # rounding to nearest is found


def test_a_parameter_without_rounded_states_differs_only_as_much_as_its_gradients() -> None:
    eight_bits = ["optimizer=adamw_8bit", "launch.backend=mock"]
    config = run_config([*MODELS["mlp"], *DDP, *eight_bits])
    start = {"0.weight": torch.ones(64, 64), "0.bias": torch.ones(64)}
    end = {name: values * 1.1 for name, values in start.items()}
    states = {f"{name}.exp_avg": values for name, values in start.items()}
    reference = Reference([], start, end, {}, states, end, saved_step=1)
    tolerances = Tolerances(config, reference, [])
    is_allowed = {
        name: tolerances.allows(
            compare_tensors((0, "parameter", name), values * (1 + 3e-5), values, floor=0.0)
        )
        for name, values in end.items()
    }
    assert is_allowed == {"0.weight": True, "0.bias": False}


def _round_at_random(values: Tensor) -> Tensor:
    weight, state = nn.Parameter(torch.zeros_like(values)), values.clone()
    optimizer = SimpleNamespace(state={weight: {"exp_avg": state}})
    round_states(cast("Optimizer", optimizer), {id(weight): "weight"}, seed=0, step=1)
    return state


def _difference(actual: Tensor, expected: Tensor) -> float:
    return compare_tensors((0, "state", ""), actual, expected, floor=0.0).relative
