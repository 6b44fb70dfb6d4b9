"""Settings other than the layout change arithmetic or memory, but not the training result."""

from __future__ import annotations

import pytest
import torch
from support.configured import run_config
from support.parity import assert_trains_as_one_process
from support.parity_table import MODELS
from support.rank_engine import rank_engine
from torch import Tensor

from axonlaunch import data
from axonlaunch.comm import World
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.engines.build import build_engine

LAYOUTS = {
    "ddp": (2, ["strategy=ddp"]),
    "zero1": (2, ["strategy=zero1"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "tensor": (2, ["strategy=tensor"]),
    "sequence": (2, ["strategy=tensor", "strategy.tensor.sequence_parallel=true"]),
    "pipeline": (2, ["strategy=pipeline"]),
    "hybrid": (8, ["strategy=hybrid"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp16_trains_as_one_process_in_fp16(layout: str) -> None:
    """Outputs are in fp16 on both sides, too, which shows that the computation was in fp16."""
    ranks, overrides = LAYOUTS[layout]
    chosen = [*MODELS["gpt"], *overrides, "train.precision=fp16"]
    verdict = assert_trains_as_one_process(chosen, ranks, beyond=True)
    assert verdict.features["skipped steps"] == "0 of 2"


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_gradients_of_fp32_are_summed_in_reduce_dtype(strategy: str) -> None:
    def norm(reduce_dtype: str) -> float:
        chosen = run_config(
            [
                *MODELS["gpt"],
                *(f"strategy={strategy}", f"strategy.reduce_dtype={reduce_dtype}"),
                *("launch.nproc=2", "train.global_batch_size=4"),
            ]
        )

        def run(world: World) -> float:
            engine, loader = rank_engine(chosen, world)
            engine.backward(loader.batch(0))
            return float(engine.gradient_norm())

        return World.mock(2).run(run)[0]

    exact, rounded = norm("fp32"), norm("bf16")
    assert rounded != exact, "strategy.reduce_dtype=bf16 was ignored"
    assert rounded == pytest.approx(exact, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [["strategy=zero1"], ["strategy=fsdp"], ["strategy=ddp", "x tensor"], ["strategy=ddp"]],
    ids=" ".join,
)
def test_gradients_summed_in_bf16_are_rounded_and_no_more(overrides: list[str]) -> None:
    if overrides[-1] == "x tensor":
        overrides = [overrides[0], "strategy.tensor.degree=2"]
    chosen = [*MODELS["gpt"], *overrides, "strategy.reduce_dtype=bf16"]
    verdict = assert_trains_as_one_process(chosen, 4)
    assert 1e-4 < verdict.max_gradient_difference < 0.01


@pytest.mark.parametrize(
    "layout",
    [
        *("fsdp", "tensor", "pipeline"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "sequence", "hybrid")),
    ],
)
def test_quantization_aware_training_rounds_as_one_process(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    quantized = ["train.matmul_dtype=qat_int8_int4", "train.matmul_group_size=16"]
    assert_trains_as_one_process([*MODELS["gpt"], *overrides, *quantized], ranks)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "pipeline"])
def test_quantization_that_begins_at_a_later_step_trains_as_one_process(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    quantized = ["train.matmul_dtype=qat_int8_int4", "train.matmul_group_size=16"]
    # Adam would turn a number that is rounded to its other neighbor into an update of full size.
    later = [*overrides, *quantized, "train.matmul_start_step=1", "optimizer=sgd"]
    assert_trains_as_one_process([*MODELS["gpt"], *later], ranks)


def test_quantization_begins_at_its_step_also_after_a_resume() -> None:
    quantized = ["train.matmul_dtype=qat_int8_int4", "train.matmul_group_size=16"]

    def losses(overrides: list[str], *, first_step: int = 0) -> list[float]:
        chosen = run_config([*MODELS["gpt"], *overrides, "train.global_batch_size=4"])

        def run(world: World) -> list[float]:
            engine, loader = rank_engine(chosen, world)
            engine.step = first_step
            return [float(engine.train_step(loader.batch(n)).loss) for n in range(2)]

        return World.mock(1).run(run)[0]

    single = ["strategy=single", "launch.nproc=1"]
    without, with_all = losses(single), losses([*single, *quantized])
    after_one = [*single, *quantized, "train.matmul_start_step=1"]
    assert losses(after_one)[0] == without[0] != with_all[0]
    assert losses(after_one)[1] != without[1]
    assert losses(after_one, first_step=1)[0] == with_all[0]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_momentum_sgd_trains_as_one_process(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    model = "llama" if layout == "sequence" else "mlp"
    sgd = ["optimizer=sgd", "optimizer.lr=0.05", "optimizer.weight_decay=0.01"]
    blocks = "model.num_hidden_layers=4"
    assert_trains_as_one_process([*MODELS[model], *overrides, *sgd, blocks], ranks)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("ends", ["true", "false"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_tied_and_untied_embeddings_train_alike_on_two_stages(schedule: str, ends: str) -> None:
    """The ends of tied weights are on two ranks under 1f1b, on one under the V-shaped schedule."""
    tie = f"model.tie_word_embeddings={ends}"
    chosen = ["strategy=pipeline", f"strategy.pipeline.schedule={schedule}", tie]
    assert_trains_as_one_process([*MODELS["gpt"], *chosen], 2)


def test_a_split_by_hand_trains_as_a_balanced_one() -> None:
    split = ["strategy=pipeline", "strategy.pipeline.split=[1,3]"]
    assert_trains_as_one_process([*MODELS["llama"], *split], 2)


def test_engine_equals_float64_by_hand() -> None:
    """Checks the reference itself against AdamW and clipping in float64."""
    overrides = [
        *MODELS["mlp"],
        "model.num_hidden_layers=1",
        "launch.nproc=1",
        "train.global_batch_size=8",
        "train.steps=3",
    ]
    chosen = run_config([*overrides, "scheduler=constant", "scheduler.warmup_steps=0"])
    loader = Loader(data.build_dataset(chosen.data), seed=chosen.seed, global_batch_size=8)
    lr, (b1, b2) = chosen.optimizer.lr, chosen.optimizer.betas  # type: ignore[union-attr]

    def run(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = build_engine(chosen, world)
        start = {name: p.double() for name, p in engine.state_dict()["model"].items()}
        for step in range(3):
            engine.train_step(loader.batch(step))
        return start, engine.state_dict()["model"]

    start, got = World.mock(1).run(run)[0]
    p = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    names = list(p)
    moments = {name: (torch.zeros_like(v), torch.zeros_like(v)) for name, v in p.items()}
    for step in range(3):
        batch = loader.batch(step)
        x = batch.inputs.double().flatten(1)
        hidden = torch.relu(x @ p[names[0]].T + p[names[1]])
        logits = hidden @ p[names[2]].T + p[names[3]]
        gradients = torch.autograd.grad(
            torch.nn.functional.cross_entropy(logits, batch.targets), list(p.values())
        )
        norm = torch.sqrt(sum((g**2).sum() for g in gradients))  # type: ignore[arg-type]
        scale = min(1.0, 1.0 / (float(norm) + 1e-6))
        with torch.no_grad():
            for name, gradient in zip(names, gradients, strict=True):
                m, v = moments[name]
                m.mul_(b1).add_(gradient * scale, alpha=1 - b1)
                v.mul_(b2).add_((gradient * scale) ** 2, alpha=1 - b2)
                if p[name].ndim >= 2:
                    p[name] *= 1 - lr * 0.1
                update = (m / (1 - b1 ** (step + 1))) / ((v / (1 - b2 ** (step + 1))).sqrt() + 1e-8)
                p[name] -= lr * update
    for name in names:
        torch.testing.assert_close(got[name].double(), p[name].detach(), rtol=1e-5, atol=1e-6)
