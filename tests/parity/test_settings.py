"""A layout changes where work happens, never what is computed: one process is the reference."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from axonlaunch import config, data
from axonlaunch.comm import World
from axonlaunch.config.layout import layout
from axonlaunch.data.dataset import IGNORE_INDEX, Batch
from axonlaunch.data.loader import Loader
from axonlaunch.engines.build import build

STEPS = 10
# The key projection's bias has a gradient of zero, for softmax ignores it, so what rounding leaves
# is all there is. With AdamW's usual eps of 1e-8 that noise alone would move it by the whole
# learning rate in a random direction.
EPS = ["optimizer.eps=1e-4"]
TOKENS = ["data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=12"]
MODELS = {
    "mlp": [
        "model=mlp",
        "model.hidden_size=24",
        "model.input_size=64",
        "data=synthetic_images",
        "data.image_size=8",
        "data.num_channels=1",
    ],
    "gpt": [
        "model=gpt",
        "model.hidden_size=32",
        "model.num_hidden_layers=2",
        *TOKENS,
        "model.num_attention_heads=4",
        "model.vocab_size=64",
        "model.max_position_embeddings=16",
    ],
    "llama": [
        "model=llama_debug",
        "model.hidden_size=32",
        "model.num_hidden_layers=2",
        *TOKENS,
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.intermediate_size=48",
        "model.vocab_size=64",
    ],
}
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "ddp small buckets": ["strategy=ddp", "strategy.ddp.bucket_size_mb=0.01"],
    "ddp synchronous": ["strategy=ddp", "strategy.ddp.sync=synchronous"],
    "ddp no_sync": ["strategy=ddp", "strategy.ddp.sync=no_sync"],
    "zero1": ["strategy=zero1"],
    "full_shard": ["strategy=fsdp"],
    "shard_grad_op": ["strategy=zero2"],
    "no_shard": ["strategy=fsdp", "strategy.fsdp.sharding=no_shard"],
    "hybrid_shard": ["strategy=hsdp", "strategy.fsdp.replicate=2"],
    "offload params": ["strategy=fsdp", "strategy.fsdp.cpu_offload=params"],
    "offload states": ["strategy=fsdp", "strategy.fsdp.cpu_offload=optimizer_states"],
    "offload full": ["strategy=fsdp", "strategy.fsdp.cpu_offload=full"],
}
ACCUMULATIONS = {"whole": [], "accumulated": ["train.micro_batch_size=1"]}


@dataclass(frozen=True)
class Trained:
    """What a run gave: losses and gradient norms by step, whole parameters by name."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def train(overrides: list[str], ranks: int) -> Trained:
    """Train for some steps on the mock world; every rank must tell the same."""
    chosen = config.load(
        [f"launch.nproc={ranks}", "train.global_batch_size=8", f"train.steps={STEPS}", *overrides]
        + ([] if "optimizer=sgd" in overrides else EPS)
    )

    def run(world: World) -> Trained:
        shares = layout(chosen, world_size=ranks)
        loader = Loader(
            data.build(chosen.data),
            seed=chosen.seed,
            global_batch_size=8,
            num_shards=shares.data_ranks,
            shard=world.rank,
        )
        engine = build(chosen, world)
        results = [engine.train_step(_unequal(loader.batch(step))) for step in range(STEPS)]
        parameters = {name: _whole(p) for name, p in engine.state_dict()["model"].items()}
        norms = [float(r.grad_norm) for r in results if r.grad_norm is not None]
        return Trained([float(r.loss) for r in results], norms, parameters)

    trained = World.mock(ranks).run(run)
    assert all(other.losses == trained[0].losses for other in trained)
    return trained[0]


def _unequal(batch: Batch) -> Batch:
    """Leave targets of some rows out, so that ranks and micro-batches count differently."""
    targets = batch.targets.clone()
    if targets.ndim == 2:
        for row, target in enumerate(targets):
            target[: int(batch.inputs[row, 0]) % 7] = IGNORE_INDEX
    return Batch(batch.inputs, targets)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


@functools.cache
def reference(model: str, *extra: str) -> Trained:
    return train([*MODELS[model], *extra], 1)


def assert_same(got: Trained, expected: Trained, *, tolerance: float) -> None:
    for step, (a, b) in enumerate(zip(got.losses, expected.losses, strict=True)):
        assert a == pytest.approx(b, rel=tolerance), f"loss of step {step}"
    for step, (a, b) in enumerate(zip(got.norms, expected.norms, strict=True)):
        assert a == pytest.approx(b, rel=tolerance), f"gradient norm of step {step}"
    assert got.parameters.keys() == expected.parameters.keys()
    for name, parameter in expected.parameters.items():
        # Biases start at 0: what is small beside the weights' initial deviation is no difference.
        scale = parameter.norm().clamp(min=0.02 * parameter.numel() ** 0.5)
        difference = (got.parameters[name] - parameter).norm() / scale
        assert difference <= tolerance, f"parameter {name}"


def _combinations() -> list[object]:
    """Every combination; those that repeat what others show run under ``scripts/test --all``."""
    found: list[object] = []
    for ranks, strategy, model, accumulation in itertools.product(
        (1, 2, 4), STRATEGIES, MODELS, ACCUMULATIONS
    ):
        if ranks == 1 and strategy == "hybrid_shard":
            continue  # two replicas need two ranks
        usual = (ranks, accumulation) == (2, "whole")
        deep = (ranks, model, accumulation) == (4, "gpt", "accumulated")
        small = (ranks, model, accumulation) == (1, "mlp", "whole")
        marks = () if usual or deep or small else (pytest.mark.slow,)
        found.append(pytest.param(strategy, model, ranks, accumulation, marks=marks))
    return found


@pytest.mark.parametrize(("strategy", "model", "ranks", "accumulation"), _combinations())
def test_every_layout_trains_as_one_process(
    strategy: str, model: str, ranks: int, accumulation: str
) -> None:
    overrides = [*MODELS[model], *STRATEGIES[strategy], *ACCUMULATIONS[accumulation]]
    assert_same(train(overrides, ranks), reference(model), tolerance=1e-5)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_recomputed_activations_change_nothing(strategy: str, checkpointing: str) -> None:
    recompute = [f"train.activation_checkpointing={checkpointing}"]
    got = train([*MODELS["llama"], *STRATEGIES[strategy], *recompute], 2)
    assert_same(got, reference("llama"), tolerance=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "full_shard"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_stays_close_to_fp32(strategy: str, precision: str) -> None:
    got = train([*MODELS["gpt"], *STRATEGIES[strategy], f"train.precision={precision}"], 2)
    expected = reference("gpt")
    assert got.losses == pytest.approx(expected.losses, rel=0.02 if precision == "bf16" else 0.005)
    assert got.losses != expected.losses, "nothing was computed in the lower precision"


@pytest.mark.parametrize("strategy", ["ddp", "full_shard", "zero1"])
def test_momentum_sgd_trains_as_one_process(strategy: str) -> None:
    sgd = ["optimizer=sgd", "optimizer.lr=0.05", "optimizer.weight_decay=0.01"]
    got = train([*MODELS["mlp"], *STRATEGIES[strategy], *sgd], 4)
    assert_same(got, reference("mlp", *sgd), tolerance=1e-5)


def test_the_engine_computes_what_float64_by_hand_computes() -> None:
    """The reference itself, held against AdamW and clipping written out in float64."""
    overrides = [*MODELS["mlp"], "launch.nproc=1", "train.global_batch_size=8", "train.steps=3"]
    chosen = config.load([*overrides, "scheduler=constant", "scheduler.warmup_steps=0"])
    loader = Loader(data.build(chosen.data), seed=chosen.seed, global_batch_size=8)
    lr, (b1, b2) = chosen.optimizer.lr, chosen.optimizer.betas  # type: ignore[union-attr]

    def run(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = build(chosen, world)
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
