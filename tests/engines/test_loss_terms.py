"""Terms and factors of cross entropy equal torch, transformers and formulas in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.configured import run_config
from support.hf_families import without_folder
from support.rank_engine import rank_engine
from torch import Tensor
from transformers.trainer_pt_utils import LabelSmoother

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.options.data import IGNORE_INDEX
from axonlaunch.config.schema import TrainConfig
from axonlaunch.engines.tensor.outputs.loss import vocab_parallel_cross_entropy_sum
from axonlaunch.engines.tensor.outputs.losses import losses_of
from axonlaunch.models.architectures.gpt import SPEC
from axonlaunch.models.build import build_model
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

SMOOTHING, Z_LOSS = 0.1, 0.02
TERMS = [f"train.label_smoothing={SMOOTHING}", f"train.z_loss={Z_LOSS}"]
GPT = [
    *("model=gpt", "model.num_hidden_layers=2", "model.hidden_size=32"),
    *("data=synthetic_tokens", "data.sequence_length=16", "train.global_batch_size=8"),
]
BOTH = {"label_smoothing": SMOOTHING, "z_loss": Z_LOSS}
CHOSEN: list[dict[str, Any]] = [
    {"label_smoothing": 0.2},
    {"z_loss": 0.3},
    BOTH,
    {"dft": True},
    {"eaft": 1.5},
]


def drawn(classes: int, *, scale: float = 5.0) -> tuple[Tensor, Tensor]:
    """Return logits [2, 5, classes] and targets, one of which is not counted."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, classes, generator=generator) * scale
    targets = torch.randint(classes, (2, 5), generator=generator)
    targets[1, 2] = IGNORE_INDEX
    return logits, targets


def by_formula(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
    eaft: float = 0.0,
) -> Tensor:
    """Return the sum in fp64, with the distribution of the targets written out."""
    logits, classes = logits.double(), logits.shape[-1]
    counted = targets != IGNORE_INDEX
    wanted = F.one_hot(targets.clamp(min=0), classes).double()
    wanted = (1 - label_smoothing) * wanted + label_smoothing / classes
    losses = -(wanted * logits.log_softmax(-1)).sum(-1)
    losses = losses + z_loss * logits.exp().sum(-1).log() ** 2
    if dft:
        losses = losses * (wanted * logits.softmax(-1)).sum(-1).detach()
    if eaft:
        largest = logits.detach().sort(-1, descending=True).values[..., :20].softmax(-1)
        losses = losses * (-(largest * largest.log()).sum(-1) / 3) ** eaft
    return losses[counted].sum()


@pytest.mark.parametrize("terms", CHOSEN, ids=str)
def test_cross_entropy_with_terms_equals_formula(terms: dict[str, Any]) -> None:
    logits, targets = drawn(11)
    exact = logits.double().requires_grad_()
    logits.requires_grad_()
    expected = by_formula(exact, targets, **terms)
    expected.backward()
    train = TrainConfig(**terms)
    [losses] = World.mock(1).run(
        lambda world: losses_of(SPEC, train, classes=None, group=world.default_group)
    )
    loss = losses.loss(logits, targets)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert losses.evaluation_loss(logits, targets).item() == pytest.approx(plain.item(), rel=1e-6)


@pytest.mark.parametrize("term", [{"label_smoothing": SMOOTHING}, {"z_loss": Z_LOSS}], ids=str)
def test_dft_with_another_term_is_refused(term: dict[str, float]) -> None:
    logits, targets = drawn(11)
    with pytest.raises(ValueError, match="dft=True weights plain cross entropy"):
        cross_entropy_sum(logits, targets, dft=True, **term)
    world = World.mock(1)
    with pytest.raises(Exception, match="dft=True weights plain cross entropy"):
        world.run(
            lambda world: vocab_parallel_cross_entropy_sum(
                logits, targets, group=world.default_group, dft=True, **term
            )
        )


def test_label_smoothing_equals_that_of_transformers() -> None:
    logits, targets = drawn(11)
    expected = LabelSmoother(epsilon=SMOOTHING)({"logits": logits}, targets)
    computed = cross_entropy_sum(logits, targets, label_smoothing=SMOOTHING)
    assert (computed / 9).item() == pytest.approx(float(expected), rel=1e-6)


def test_weights_by_entropy_are_those_of_the_20_most_likely_of_many_classes() -> None:
    """Written as LLaMA-Factory computes them; the most likely classes are on several ranks."""
    logits, targets = drawn(101, scale=2.0)
    counted = targets != IGNORE_INDEX
    highest, _ = torch.topk(logits[counted].double(), k=20, dim=-1)
    logs = highest - torch.logsumexp(highest, dim=-1, keepdim=True)
    weights = (-(logs.exp() * logs).sum(-1) / 3.0) ** 0.7
    losses = F.cross_entropy(logits[counted].double(), targets[counted], reduction="none")
    expected = (losses * weights).sum().item()
    assert cross_entropy_sum(logits, targets, eaft=0.7).item() == pytest.approx(expected, rel=1e-6)

    def rank(world: World) -> None:
        mine = logits.chunk(3, -1)[world.rank]
        loss = vocab_parallel_cross_entropy_sum(
            mine, targets, group=world.default_group, classes=101, eaft=0.7
        )
        assert loss.item() == pytest.approx(expected, rel=1e-6)

    World.mock(3).run(rank)


def test_two_factors_of_cross_entropy_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dft=True weights .* and eaft=1.0, must be 0"):
        cross_entropy_sum(*drawn(11), dft=True, eaft=1.0)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("classes", [12, 11])
@pytest.mark.parametrize("terms", CHOSEN, ids=str)
def test_vocabulary_parallel_terms_equal_formula(
    size: int, classes: int, terms: dict[str, Any]
) -> None:
    def rank(world: World) -> None:
        logits, targets = drawn(classes)
        exact = logits.double().requires_grad_()
        expected = by_formula(exact, targets, **terms)
        (2 * expected).backward()
        mine = logits.chunk(size, -1)[world.rank].clone().requires_grad_()
        loss = ax.vocab_parallel_cross_entropy_sum(
            mine, targets, group=world.default_group, classes=classes, **terms
        )
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        (2 * loss).backward()
        assert mine.grad is not None
        assert exact.grad is not None
        wanted = exact.grad.chunk(size, -1)[world.rank]
        torch.testing.assert_close(mine.grad.double(), wanted, rtol=1e-5, atol=1e-6)

    World.mock(size).run(rank)


CHUNK = "train.loss_chunk=5"
TENSOR = ["strategy=tensor", "launch.nproc=2"]
PIPELINE = ["strategy=pipeline", "launch.nproc=2"]


@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=fsdp", "launch.nproc=2", "train.micro_batch_size=2"],
        TENSOR,
        PIPELINE,
        pytest.param([*TENSOR, CHUNK], marks=pytest.mark.slow),
        pytest.param([*PIPELINE, CHUNK], marks=pytest.mark.slow),
        pytest.param(["strategy=ddp", "launch.nproc=2", CHUNK], marks=pytest.mark.slow),
        pytest.param(
            ["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=2"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_loss_terms_in_every_layout_equal_plain_torch(layout: list[str]) -> None:
    verdict = compare.on_mock(run_config([*GPT, *TERMS, *layout]), ComparisonPlan(steps=2))
    assert verdict.failure is None
    assert verdict.passed, verdict.differences


@pytest.mark.parametrize("factor", ["train.dft=true", "train.eaft=1.5"])
@pytest.mark.parametrize(
    "layout",
    [
        TENSOR,
        pytest.param([*TENSOR, CHUNK], marks=pytest.mark.slow),
        pytest.param([*PIPELINE, CHUNK], marks=pytest.mark.slow),
        pytest.param(
            ["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=2"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_weighted_loss_in_every_layout_equals_plain_torch(layout: list[str], factor: str) -> None:
    verdict = compare.on_mock(run_config([*GPT, factor, *layout]), ComparisonPlan(steps=2))
    assert verdict.failure is None
    assert verdict.passed, verdict.differences


PACKED = ["data.document_length=6", "data.sequence_length=16"]


@pytest.mark.parametrize(
    "overrides",
    [
        GPT,
        [*GPT, CHUNK],
        pytest.param(without_folder("qwen3", *PACKED), marks=pytest.mark.slow),
    ],
    ids=["gpt", "chunks", "packed"],
)
def test_step_loss_and_gradients_with_terms_equal_torch(overrides: list[str]) -> None:
    chosen = run_config([*overrides, *TERMS, "strategy=single"])
    model = build_model(chosen.model, seed=0)

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        batch: Any = loader.batch(0)
        loss, tokens = engine.backward(batch)
        named = {} if batch.positions is None else {"positions": batch.positions}
        logits = model(batch.inputs, **named).flatten(0, 1)
        targets = batch.targets.flatten()
        expected = F.cross_entropy(logits, targets, label_smoothing=SMOOTHING)
        expected = expected + Z_LOSS * logits[targets != IGNORE_INDEX].logsumexp(-1).square().mean()
        expected.backward()
        assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
        wanted = dict(model.named_parameters())
        for name, parameter in engine.named_parameters():
            assert parameter.grad is not None
            gradient = wanted[name].grad
            assert gradient is not None
            floor = 1.0 if name.endswith("k_proj.bias") else 0.0  # ignored by softmax
            distance = (parameter.grad - gradient).norm() / (gradient.norm() + floor)
            assert distance < 2e-6, name
        total, count = engine.evaluate(batch).tolist()
        assert count == int(tokens)
        assert total / count == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)

    World.mock(1).run(run)


@pytest.mark.parametrize("term", [*TERMS, "train.dft=true", "train.eaft=1"])
def test_terms_of_cross_entropy_are_refused_with_another_loss(term: str) -> None:
    key = term.partition("=")[0]
    ax.register_loss("squares_for_terms")(lambda outputs, batch: outputs.square().sum())
    with pytest.raises(ConfigError, match=rf"{key}=.*: it changes cross entropy, .* use (0|false)"):
        run_config([*GPT, term, "strategy=single", "train.loss=squares_for_terms"])
