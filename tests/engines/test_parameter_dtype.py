"""Training weights in bf16 equals torch's training of such a model, in every layout; states may be
fp32, with or without masters of the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor
from torch.nn.functional import cross_entropy

from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.comm.mesh import local_part
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.engines.precision.policy import keep_parameters_in
from axonlaunch.models.build import build_model

STEPS = 3
SETTINGS = [
    *("model=gpt", "model.num_hidden_layers=4", "model.hidden_size=32", "data=synthetic_tokens"),
    *("data.sequence_length=16", "train.global_batch_size=8", "train.grad_clip=null"),
    *("scheduler=constant", "optimizer.lr=2e-3", "optimizer.weight_decay=0"),
    *("train.steps=8", "train.precision=bf16", "train.param_dtype=bf16", "checkpoint.every=0"),
]
FP32_STATES = "optimizer.state_dtype=fp32"
MASTERS = "optimizer.master_weights=fp32"
LAYOUTS = {
    "single": ["strategy=single"],
    "ddp": ["strategy=ddp", "launch.nproc=2"],
    "zero1": ["strategy=zero1", "launch.nproc=2"],
    "fsdp": ["strategy=fsdp", "launch.nproc=2"],
    "offload": ["strategy=fsdp", "launch.nproc=2", "strategy.fsdp.cpu_offload=full"],
    "tensor": ["strategy=tensor", "launch.nproc=2"],
    "pipeline": ["strategy=pipeline", "launch.nproc=2"],
    "zero bubble": [
        *("strategy=pipeline", "launch.nproc=2"),
        "strategy.pipeline.schedule=zbv_zero_bubble",
    ],
    "context": ["strategy=fsdp", "strategy.context.degree=2", "launch.nproc=2"],
}


def in_layout(overrides: list[str]) -> list[float]:
    chosen = run_config([*SETTINGS, *overrides])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> list[float]:
        engine, loader = rank_engine(chosen, world)
        losses = [float(engine.train_step(loader.batch(step)).loss) for step in range(STEPS)]
        for _, parameter in engine.named_parameters():
            assert parameter.dtype is torch.bfloat16
        states = {local_part(s).dtype for s in engine.optimizer_states() if s.ndim}
        is_fp32 = FP32_STATES in overrides or MASTERS in overrides
        assert states == {torch.float32 if is_fp32 else torch.bfloat16}
        return losses

    return World.mock(chosen.launch.nproc).run(run)[0]


def batches(chosen: RunConfig) -> list[Any]:
    def run(world: World) -> list[Any]:
        _, loader = rank_engine(chosen, world)
        return [loader.batch(step) for step in range(STEPS)]

    return World.mock(1).run(run)[0]


def by_torch(*, in_fp32: bool, keeps_masters: bool) -> list[float]:
    """Train with only torch: a model in bf16, torch's AdamW, and optionally fp32 copies of the
    weights, made for each update or kept.
    """
    chosen = run_config([*SETTINGS, "strategy=single"])
    model = build_model(chosen.model, seed=0).to(torch.bfloat16)
    parameters = [*model.parameters()]
    updated: list[Tensor] = parameters
    if in_fp32:
        updated = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = torch.optim.AdamW(
        updated, lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    losses = []
    for batch in batches(chosen):
        logits = model(batch.inputs)
        loss = cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for mine, parameter in zip(updated, parameters, strict=True):
                if in_fp32:
                    assert parameter.grad is not None
                    if not keeps_masters:
                        mine.copy_(parameter)
                    mine.grad = parameter.grad.float()
            optimizer.step()
            for mine, parameter in zip(updated, parameters, strict=True):
                parameter.copy_(mine)
                parameter.grad = None
    return losses


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("states", [(), (FP32_STATES,), (MASTERS,)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_parameters_train_like_torch(layout: str, states: tuple[str, ...]) -> None:
    expected = by_torch(in_fp32=bool(states), keeps_masters=states == (MASTERS,))
    # Layouts may only add roundings to bf16 (1/256); one process adds none.
    tolerance = 1e-6 if layout == "single" else 5e-3
    assert in_layout([*LAYOUTS[layout], *states]) == pytest.approx(expected, rel=tolerance)


def test_tied_weights_stay_tied_and_buffers_keep_their_dtype() -> None:
    overrides = ["model=llama_debug", "model.tie_word_embeddings=true"]
    model: Any = build_model(run_config([*overrides, "strategy=single"]).model)
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
    keep_parameters_in(model, torch.bfloat16)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == dtypes


def saved(folder: Path, overrides: list[str]) -> None:
    chosen = run_config([*SETTINGS, *overrides])

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))
        saver = Saver(folder, world=world, retention=Retention(newest=1))
        saver.save(engine.state_dict(), step=1, samples=8)

    assert chosen.launch.nproc != "auto"
    World.mock(chosen.launch.nproc).run(run)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["train.param_dtype=fp32"], "train.param_dtype=fp32: "),
        ([FP32_STATES], "optimizer.state_dtype=fp32: "),
        ([MASTERS], "optimizer.master_weights=fp32: "),
    ],
)
def test_resume_with_other_parameter_dtype_is_refused(
    overrides: list[str], problem: str, tmp_path: Path
) -> None:
    saved(tmp_path, LAYOUTS["fsdp"])
    resume = [*SETTINGS, f"checkpoint.resume={tmp_path}"]
    run_config([*resume, *LAYOUTS["zero1"]])  # another layout resumes it
    with pytest.raises(ConfigError) as refused:
        run_config([*resume, *LAYOUTS["fsdp"], *overrides])
    assert problem in str(refused.value)
    assert " in bf16" in str(refused.value)
    assert "; use " in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["train.precision=fp32"], "weights in bf16 compute in bf16, not in fp32; use bf16"),
        (
            ["optimizer=muon", MASTERS, "optimizer.state_dtype=bf16"],
            "optimizer.state_dtype=bf16: optimizer=muon updates full matrices, and only the states "
            "of updates of single elements are rounded; use parameter, or adamw",
        ),
        (
            ["optimizer=custom", "optimizer.target=torch.optim:Adagrad", MASTERS],
            "optimizer=custom creates states before its first step, in the dtype of the weights; "
            "use null, or adamw",
        ),
    ],
)
def test_invalid_parameter_dtype_is_refused(overrides: list[str], problem: str) -> None:
    settings = [s for s in SETTINGS if not s.startswith("optimizer.")]
    with pytest.raises(ConfigError, match=problem):
        run_config([*settings, *LAYOUTS["fsdp"], *overrides])
