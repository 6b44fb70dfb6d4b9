"""``train.loss_kernel=liger`` equals the plain head and loss, and is refused where it can't be.

Cases with Liger-Kernel need the extra ``kernels``, and ``TRITON_INTERPRET=1`` in the environment of
pytest, because Triton reads it when it is imported; otherwise they are skipped. The other cases put
the formulas, with which estimates trace a step, in its place.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import OrderedDict
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.configured import estimate_config, run_config
from support.hf_families import without_folder
from support.rank_engine import rank_engine
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config import ConfigError, registry, with_values
from axonlaunch.config.options.data import IGNORE_INDEX
from axonlaunch.data import build_dataset
from axonlaunch.engines.tensor.outputs import liger_loss
from axonlaunch.engines.tensor.outputs.liger_loss import LinearCrossEntropy
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.throughput.throughput import throughput
from axonlaunch.planning.tracing.devices import liger_kernel
from axonlaunch.planning.tracing.extrapolation import extrapolate_depth
from axonlaunch.planning.tracing.storage_trace import StorageTrace, on_device
from axonlaunch.preflight.model_outputs import head_problems
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

LIGER = "train.loss_kernel=liger"
DATA = ["data=synthetic_tokens", "data.sequence_length=16", "train.global_batch_size=8"]
GPT = ["model=gpt", "model.num_hidden_layers=2", "model.hidden_size=32", *DATA]


class StandIn:
    """Has the interface of Liger's loss that axonlaunch uses."""

    def __init__(
        self,
        *,
        ignore_index: int,
        lse_square_scale: float,
        label_smoothing: float,
        reduction: str,
        accum_dtype: torch.dtype,
        use_token_scaling: bool,
    ) -> None:
        assert (ignore_index, reduction, accum_dtype) == (IGNORE_INDEX, "sum", torch.float32)
        self._terms: dict[str, Any] = {
            "label_smoothing": label_smoothing,
            "z_loss": lse_square_scale,
            "dft": use_token_scaling,
        }

    def __call__(
        self, weight: Tensor, hidden: Tensor, targets: Tensor, bias: Tensor | None
    ) -> Tensor:
        return liger_kernel.fused_cross_entropy_sum(hidden, weight, bias, targets, **self._terms)


@pytest.fixture(params=["liger", "stand-in"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``train.loss_kernel=liger`` compute on the CPU."""
    if request.param == "liger":
        if problem := liger_loss.liger_problem("cpu"):
            pytest.skip(problem)
        return
    module: Any = ModuleType("liger_kernel.transformers")
    module.LigerFusedLinearCrossEntropyLoss = StandIn
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    monkeypatch.setattr("axonlaunch.preflight.devices.liger_problem", lambda device: "")


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "terms",
    [{}, {"label_smoothing": 0.1, "z_loss": 0.01}, {"dft": True}],
    ids=["plain", "terms", "dft"],
)
def test_kernel_equals_linear_and_cross_entropy(terms: dict[str, Any], has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(size, generator=generator) for size in [(21, 16), (40, 16), (40,)]]
    hidden, weight, bias = [tensor.requires_grad_() for tensor in tensors]
    used = bias if has_bias else None
    targets = torch.randint(40, (21,), generator=generator)
    targets[3] = IGNORE_INDEX
    expected = cross_entropy_sum(F.linear(hidden, weight, used), targets, **terms)
    total = liger_loss.linear_cross_entropy_sum(hidden, weight, used, targets, **terms)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    inputs = [hidden, weight, *([bias] if has_bias else [])]
    wanted = torch.autograd.grad(expected * 0.37, inputs)
    for gradient, reference in zip(torch.autograd.grad(total * 0.37, inputs), wanted, strict=True):
        assert (gradient - reference).norm() < 1e-5 * reference.norm()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "trained",
    [
        [],
        ["model.tie_word_embeddings=false", "train.freeze=['*']", "train.unfreeze=[lm_head.*]"],
        ["adapter=lora", "adapter.targets=[q_proj]"],
    ],
    ids=["all", "only head", "adapters"],
)
def test_gradients_equal_those_of_full_logits(trained: list[str]) -> None:
    def gradients(*overrides: str) -> dict[str, Tensor]:
        def run(world: World) -> dict[str, Tensor]:
            engine, loader = rank_engine(run_config([*GPT, *trained, *overrides]), world)
            loss, _ = engine.backward(loader.batch(0))
            evaluated = engine.evaluate(loader.batch(1)).sum()
            of_parameters = {n: p.grad for n, p in engine.named_parameters() if p.grad is not None}
            return {"": loss, "evaluation": evaluated, **of_parameters}

        [result] = World.mock(1).run(run)
        return result

    plain, by_kernel = gradients("strategy=single"), gradients("strategy=single", LIGER)
    assert len(plain) > 2
    assert plain.keys() == by_kernel.keys()
    for name, gradient in plain.items():
        floor = 1.0 if name.endswith("k_proj.bias") else 0.0  # only rounding
        distance = (by_kernel[name] - gradient).norm()
        assert distance <= 2e-5 * (gradient.norm() + floor), name


@pytest.mark.usefixtures("kernel")
@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=pipeline", "launch.nproc=2", "train.z_loss=0.01"],
        ["strategy=ddp", "launch.nproc=2", "train.micro_batch_size=2", "train.precision=bf16"],
        ["strategy=fsdp", "launch.nproc=2", "train.micro_batch_size=2"],
        ["strategy=fsdp", "launch.nproc=2", "train.precision=bf16"],
        ["strategy=zero1", "launch.nproc=2", "train.label_smoothing=0.1"],
        ["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=2"],
    ],
    ids=" ".join,
)
def test_layouts_equal_one_process_without_kernel(layout: list[str]) -> None:
    verdict = compare.on_mock(run_config([*GPT, LIGER, *layout]), ComparisonPlan(steps=2))
    assert verdict.failure is None
    assert verdict.passed, verdict.differences


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["strategy=tensor", "launch.nproc=2"], "strategy.tensor.degree=2 divides it; use 1"),
        (["train.loss_chunk=4"], "use train.loss_chunk=null"),
        (["train.precision=fp16"], "use train.precision=bf16"),
        (["train.eaft=1"], "use train.eaft=0"),
        (
            [
                *("strategy=pipeline", "launch.nproc=2"),
                "strategy.pipeline.schedule=zbv_zero_bubble",
            ],
            "use strategy.pipeline.schedule=1f1b",
        ),
    ],
    ids=["tensor", "chunk", "fp16", "eaft", "schedule"],
)
def test_unsupported_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], reason: str
) -> None:
    monkeypatch.setattr("axonlaunch.preflight.devices.liger_problem", lambda device: "")
    with pytest.raises(ConfigError, match=rf"train\.loss_kernel=liger: .*{reason}"):
        run_config([*GPT, "strategy=single", LIGER, *overrides])


def test_model_that_changes_its_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axonlaunch.preflight.devices.liger_problem", lambda device: "")
    gemma = without_folder("gemma2", "strategy=single", final_logit_softcapping=0.1)
    with pytest.raises(ConfigError, match=r"changes its logits after lm_head \(.*tanh.*use null"):
        run_config([*gemma, "data.sequence_length=16", LIGER])


class _Scaled(nn.Linear):
    """A layer whose forward a kernel does not know."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def test_head_with_a_forward_of_its_own_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(embed=nn.Embedding(256, 8), head=_Scaled(8, 256)))
    spec = ModelSpec(build=lambda config: model, loss=cross_entropy_sum, head="head")
    plain = run_config([*GPT, "strategy=single"])
    chosen = with_values(plain, {"train.loss_kernel": "liger"})
    [problem] = head_problems(model, spec, build_dataset(plain.data), train=chosen.train)
    reason = "head is a _Scaled, and the kernel needs a plain nn.Linear; use null"
    assert str(problem) == f"train.loss_kernel=liger: {reason}"


@pytest.mark.parametrize(
    ("is_missing", "problem"),
    [
        (True, "liger-kernel is not installed; pip install 'axonlaunch[kernels]'"),
        (False, "liger-kernel 0.5.2 is installed, and 0.8 or newer is needed; update it"),
    ],
)
def test_missing_or_old_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_missing: bool, problem: str
) -> None:
    monkeypatch.setattr(registry.Needs, "is_missing", is_missing)
    monkeypatch.setattr(metadata, "version", lambda package: "0.5.2")
    with pytest.raises(ConfigError, match=rf"train\.loss_kernel=liger: {re.escape(problem)}"):
        run_config([*GPT, "strategy=single", LIGER])


def test_cpu_without_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.Needs, "problem", lambda needs: "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "use null, or set TRITON_INTERPRET=1" in liger_loss.liger_problem("cpu")
    assert liger_loss.liger_problem("cuda") == ""


def test_step_time_is_not_predicted() -> None:
    bf16 = "train.precision=bf16"  # with the products of GPUs
    chosen = estimate_config([*GPT, "strategy=single", LIGER, bf16, "hardware=a100_80gb"])
    with pytest.raises(ConfigError, match=r"loss_kernel=liger: its speed has not been measured"):
        throughput(chosen, chosen.hardware)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_traced_memory_equals_that_of_the_kernel(dtype: torch.dtype) -> None:
    if problem := liger_loss.liger_problem("cpu"):
        pytest.skip(problem)
    rows, width, classes = 128, 64, 512

    def peak(kernel: LinearCrossEntropy) -> int:
        hidden, weight = (
            torch.zeros(size, dtype=dtype, requires_grad=True)
            for size in [(rows, width), (classes, width)]
        )
        with StorageTrace() as trace:
            targets = torch.zeros(rows, dtype=torch.int64)
            kernel(hidden, weight, None, targets).backward()  # type: ignore[no-untyped-call]
            trace.finish()
        gc.collect()  # Triton's interpreter leaves cycles that hold tensors
        return on_device(extrapolate_depth.peak(trace.events)[0])

    peak(liger_loss.linear_cross_entropy_sum)  # its first call allocates more
    of_kernel = peak(liger_loss.linear_cross_entropy_sum)
    assert peak(liger_kernel.fused_cross_entropy_sum) == of_kernel


@pytest.mark.slow
def test_estimate_counts_logits_of_a_chunk() -> None:
    """The vocabulary is large enough that the peak is at the loss."""
    large = ["model.vocab_size=4096", "data.vocab_size=4096", "data.sequence_length=128"]
    overrides = [*GPT, *large, "model.num_hidden_layers=1", "strategy=ddp", "launch.nproc=2"]

    def peak(*chosen: str) -> int:
        return estimate(estimate_config([*overrides, *chosen, "hardware=cpu"])).peak_bytes

    tokens, of_logit = 4 * 128, 4
    # Three fp32 numbers per logit, in place of two gradients of the head.
    saved = 3 * tokens * 4096 * of_logit - 2 * 4096 * 32 * 4
    assert peak() - peak(LIGER) == pytest.approx(saved, rel=0.1)
