"""Biases of routers that balance the experts of transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.hf_families import SPECIAL, save, without_folder
from support.hf_loops import SETTINGS, STEPS, adamw, batches
from support.rank_engine import rank_engine
from torch import Tensor
from torch.nn.functional import cross_entropy

from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.problems.errors import plain

RATE = 0.02
BALANCE = ["model.balance=bias", f"model.balance_rate={RATE}"]
SINGLE = ["strategy=single", "launch.nproc=1"]
LAYOUTS = {
    "micro-batches": [*SINGLE, "train.micro_batch_size=2"],
    "experts": [
        *("strategy=fsdp", "strategy.expert.degree=2", "strategy.tensor.degree=2"),
        "launch.nproc=2",
    ],
    "recomputed pipeline": [
        *("strategy=fsdp", "strategy.pipeline.degree=2", "launch.nproc=4"),
        *("strategy.expert.degree=2", "train.activation_checkpointing=full"),
    ],
}


def by_transformers(path: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Train five steps with transformers and torch; return losses and biases."""
    import transformers

    chosen = run_config([*SETTINGS, f"model.path={path}", *SINGLE])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer, chosen_experts, losses = adamw(model.train()), {}, []
    routers = {n: m for n, m in model.named_modules() if hasattr(m, "e_score_correction_bias")}
    for name, router in routers.items():
        router.register_forward_hook(
            lambda _, __, output, name=name: chosen_experts.update({name: output[2]})
        )
    for batch in batches(chosen):
        optimizer.zero_grad()
        logits = model(input_ids=batch.inputs.long()).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        for name, router in routers.items():
            counts = chosen_experts[name].flatten().bincount(minlength=4).double()
            router.e_score_correction_bias += RATE * (counts.mean() - counts).sign().float()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: r.e_score_correction_bias.clone() for name, r in routers.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["micro-batches", "experts", "recomputed pipeline"])
def test_biases_and_losses_equal_a_loop_of_transformers(layout: str, tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    chosen = run_config([*SETTINGS, f"model.path={tmp_path}", *BALANCE, *LAYOUTS[layout]])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> tuple[list[float], dict[str, Tensor]]:
        engine, loader = rank_engine(chosen, world)
        load_initial_weights(engine, chosen, world=world)
        losses = [float(engine.train_step(loader.batch(step)).loss) for step in range(STEPS)]
        state = engine.model_state_dict().items()
        return losses, {name: t.clone() for name, t in state if "correction_bias" in name}

    results = World.mock(chosen.launch.nproc).run(run)
    expected, biases = by_transformers(tmp_path)
    assert results[0][0] == pytest.approx(expected, rel=2e-5)
    found = {
        name.rpartition(".")[0]: bias for _, all_of in results for name, bias in all_of.items()
    }
    assert found.keys() == biases.keys()
    for name, bias in found.items():
        torch.testing.assert_close(bias, biases[name], rtol=0, atol=1e-7)


DEEPSEEK = ["model=hf", "model.init=random", f"model.config={plain(SPECIAL['deepseek_v3'])}"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*without_folder("qwen3_moe"), "model.balance=bias"],
            "model.balance=bias: Qwen3MoeForCausalLM has no routers with an e_score_corre",
        ),
        (
            [*without_folder("llama"), "model.balance=bias"],
            "model.balance=bias: LlamaForCausalLM has no routers with an e_score_corre",
        ),
        (
            [*DEEPSEEK, "model.balance=bias", "adapter=lora", "data=synthetic_tokens"],
            "model.balance=bias: an exported adapter does not contain the biases of routers",
        ),
        (
            [*DEEPSEEK, "model.balance=bias", "train.compile=true", "data=synthetic_tokens"],
            "train.compile=true: compiled blocks can't pass on the choices of their routers; use "
            "false, or model.balance=none",
        ),
    ],
)
def test_biases_that_cannot_balance_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config([*overrides, *SINGLE])
    assert str(refused.value).startswith(message)
