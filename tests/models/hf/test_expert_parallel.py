"""Experts of transformers' models divided among ranks, compared with transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from configured import run_config
from hf_families import FAMILIES, ROUTED, save
from hf_loops import by_axonlaunch, by_transformers
from rank_engine import rank_engine
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.problems.errors import plain
from axonlaunch.engines.expert.dispatch import AllToAll
from axonlaunch.engines.expert.experts import dispatch_experts

EXPERT = ["strategy=fsdp", "strategy.expert.degree=2"]
LAYOUTS = {
    "fsdp": [*EXPERT, "launch.nproc=4"],
    "one shard": [*EXPERT, "launch.nproc=2"],
    "hsdp": ["strategy=hsdp", "strategy.expert.degree=2", "launch.nproc=4"],
    "tensor": [*EXPERT, "strategy.tensor.degree=2", "launch.nproc=4"],
    "context": [*EXPERT, "strategy.context.degree=2", "launch.nproc=4"],
    "pipeline": [*EXPERT, "strategy.pipeline.degree=2", "launch.nproc=4"],
    "zbv": [
        *(*EXPERT, "strategy.pipeline.degree=2", "launch.nproc=4"),
        "strategy.pipeline.schedule=zbv_zero_bubble",
    ],
    "all": [
        *("strategy=fsdp", "strategy.expert.degree=4", "launch.nproc=8"),
        *("strategy.tensor.degree=2", "strategy.pipeline.degree=2"),
    ],
}
LAYERS = {"gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2}}
SETTINGS = [
    *("model=hf", "model.init=random", "data=synthetic_tokens", "data.sequence_length=16"),
    *("train.global_batch_size=4", "train.steps=10", "scheduler=constant", "optimizer.eps=1e-6"),
]


def family(kind: str, **changes: Any) -> str:
    return f"model.config={plain({**FAMILIES[kind], **changes})}"


def cases() -> list[Any]:
    """Return the pairs of family and layout; three of them are fast."""
    fast = {("qwen3_moe", "tensor"), ("mixtral", "fsdp"), ("gpt_oss", "tensor")}
    every = [(kind, layout) for kind in ("qwen3_moe", "mixtral") for layout in LAYOUTS]
    every += [(kind, layout) for kind in ROUTED for layout in ("fsdp", "tensor", "all")]
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in every]


@pytest.mark.parametrize(("kind", "layout"), cases())
def test_losses_with_divided_experts_equal_transformers(
    kind: str, layout: str, tmp_path: Path
) -> None:
    model = save(kind, tmp_path, num_hidden_layers=4, **LAYERS.get(kind, {}))
    prefer_last_experts(model)
    model.save_pretrained(tmp_path)
    losses = by_axonlaunch(tmp_path, LAYOUTS[layout])
    assert losses == pytest.approx(by_transformers(tmp_path), rel=2e-5)


def prefer_last_experts(model: nn.Module) -> None:
    """Let the biases of a model's routers, zero at first, change the choice of experts."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_of_divided_experts_keeps_losses(mode: str) -> None:
    plain_losses, recomputed = (
        trained([*SETTINGS, family("qwen3_moe", norm_topk_prob=True), *LAYOUTS["fsdp"], *more])
        for more in ([], [f"train.activation_checkpointing={mode}"])
    )
    assert recomputed == pytest.approx(plain_losses, rel=1e-6)


@pytest.mark.slow
def test_adapters_of_divided_experts_learn_as_in_one_process() -> None:
    adapter = [*SETTINGS, family("qwen3_moe"), "adapter=lora"]
    single = trained([*adapter, "strategy=single", "launch.nproc=1"])
    assert trained([*adapter, *LAYOUTS["tensor"]]) == pytest.approx(single, rel=2e-5)


def trained(overrides: list[str]) -> list[float]:
    """Return the losses of three steps."""
    chosen = run_config(overrides)
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> list[float]:
        engine, loader = rank_engine(chosen, world)
        return [float(engine.train_step(loader.batch(step)).loss) for step in range(3)]

    return World.mock(chosen.launch.nproc).run(run)[0]


class Experts(nn.Module):
    """Four experts that scale by their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.scale = nn.Parameter(torch.arange(1.0, 5.0).view(4, 1, 1))

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return (hidden.unsqueeze(1) * self.scale[experts].squeeze(-1) * weights.unsqueeze(-1)).sum(
            1
        )


def divided(world: World) -> Any:
    model = nn.ModuleDict({"experts": Experts()})
    mesh = world.lay_out({"ep": world.world_size}).device_mesh["ep"]
    dispatch_experts(model, ["experts"], mesh=mesh, make_dispatch=AllToAll)
    return model["experts"]


def test_rank_without_tokens_gets_gradients_of_zero() -> None:
    def run(world: World) -> tuple[list[float], list[float]]:
        experts = divided(world)
        hidden = torch.full((3, 2), 1.0 + world.rank)
        chosen = torch.tensor([[0], [1], [0]])  # both are on rank 0
        result = experts(hidden, chosen, torch.full((3, 1), 0.5))
        result.sum().backward()
        return result[:, 0].tolist(), experts.scale.grad.to_local().flatten().tolist()

    (first, gradient), (second, empty) = World.mock(2).run(run)
    assert (first, second) == ([0.5, 1.0, 0.5], [1.0, 2.0, 1.0])
    assert (gradient, empty) == ([6.0, 3.0], [0.0, 0.0])


def test_router_with_invalid_expert_is_named() -> None:
    def run(world: World) -> str:
        with pytest.raises(RuntimeError) as failure:
            divided(world)(torch.ones(2, 2), torch.tensor([[1], [4]]), torch.ones(2, 1))
        return str(failure.value)

    message = "experts: expert 4 of row 1 does not exist; there are 4, counted from 0"
    assert World.mock(2).run(run) == [message, message]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [family("qwen3_moe"), "strategy=fsdp", "launch.nproc=8", "strategy.expert.degree=8"],
            "strategy.expert.degree=8: the experts of a layer can't be divided evenly; use 1, 2 or",
        ),
        (
            [family("llama"), *LAYOUTS["fsdp"]],
            "strategy.expert.degree=2: LlamaForCausalLM has no experts that can be divided; use 1",
        ),
    ],
)
def test_degree_that_does_not_fit_the_experts_is_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config([*SETTINGS, "train.global_batch_size=8", *overrides])
    assert str(refused.value).startswith(message)
