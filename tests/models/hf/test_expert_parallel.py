"""Experts of transformers' models divided among ranks, compared with transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import moe_layouts
from support.configured import run_config
from support.hf_families import FAMILIES, ROUTED, save
from support.hf_loops import by_axonlaunch, by_transformers
from support.rank_engine import rank_engine
from torch import Tensor, nn

from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.problems.errors import plain
from axonlaunch.engines.expert.dispatch import AllToAll
from axonlaunch.engines.expert.experts import dispatch_experts
from axonlaunch.preflight.inspection import inspect
from axonlaunch.training.ending.invalid_routes import naming_sample

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
    """Return the pairs of family and layout; two of them are fast."""
    fast = {("qwen3_moe", "tensor"), ("gpt_oss", "fsdp")}
    every = [(kind, layout) for kind in ("qwen3_moe", "mixtral") for layout in LAYOUTS]
    every += [(kind, layout) for kind in ROUTED for layout in ("fsdp", "tensor", "all")]
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in every]


@pytest.mark.slow(keep=1)
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


@pytest.mark.parametrize(
    ("experts", "weights", "reason"),
    [
        ([[1], [4]], [[1.0], [1.0]], "expert 4 does not exist; there are 4, from 0 on"),
        ([[1], [3]], [[1.0], [float("inf")]], "the weights of its experts are [inf]"),
    ],
)
def test_router_with_invalid_route_is_named(
    experts: list[list[int]], weights: list[list[float]], reason: str
) -> None:
    def run(world: World) -> str:
        with pytest.raises(RuntimeError) as failure:
            divided(world)(torch.ones(2, 2), torch.tensor(experts), torch.tensor(weights))
        return str(failure.value)

    message = f"the router of experts gives an invalid route to token 1: {reason}"
    assert World.mock(2).run(run) == [message, message]


ONE_BY_ONE = ["train.global_batch_size=8", "train.micro_batch_size=1"]


@pytest.mark.parametrize("weight", [0.0, 0.01])  # with a loss, choices are counted first
def test_sample_with_an_invalid_route_is_named(weight: float) -> None:
    model = family("qwen3_moe", router_aux_loss_coef=weight)
    chosen = run_config([*SETTINGS, model, *LAYOUTS["fsdp"], *ONE_BY_ONE])

    def run(world: World) -> tuple[str, str]:
        engine, loader = rank_engine(chosen, world)
        batch = loader.batch(0)
        wrong = int(batch.inputs[1, 9])  # a token of this rank's second sample
        row, position = (batch.inputs == wrong).nonzero()[0].tolist()
        [model] = engine.modules
        spoiled: list[Tensor] = []

        def find(_module: Any, inputs: Any, _output: Tensor) -> None:
            spoiled[:] = [(inputs[0] == wrong).unsqueeze(-1)]

        def spoil(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            return output.masked_fill(spoiled[0], float("nan"))

        model.get_submodule("model.embed_tokens").register_forward_hook(find)
        block = model.get_submodule("model.layers.1")
        block.get_submodule("post_attention_layernorm").register_forward_hook(spoil)
        with pytest.raises(RuntimeError) as failure, naming_sample(loader, step=0):
            engine.backward(batch)
        expected = (
            f"the router of model.layers.1.mlp.experts gives an invalid route to token {position}: "
            f"the weights of its experts are [nan, nan] (step 1, sample {loader.indices(0)[row]} "
            "of the data set)"
        )
        return str(failure.value), expected

    for actual, expected in World.mock(4).run(run):
        assert actual == expected


NO_EXPERT = "expert {} does not exist; there are 8, from 0 on"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (-1, NO_EXPERT.format(-1)),
        (8, NO_EXPERT.format(8)),
        (float("nan"), "the weights of its experts are [nan, nan]"),
    ],
)
@pytest.mark.parametrize("model", ["moe_debug", "qwen3_moe"])
def test_sample_with_an_invalid_route_is_named_with_undivided_experts(
    model: str, wrong: float, reason: str
) -> None:
    described = [*SETTINGS, family("qwen3_moe", num_experts=8)]
    if model == "moe_debug":
        described = [*moe_layouts.SETTINGS, "model.num_hidden_layers=2"]
    chosen = run_config([*described, "strategy=fsdp", "launch.nproc=2", *ONE_BY_ONE])

    def run(world: World) -> tuple[str, str]:
        engine, loader = rank_engine(chosen, world)
        experts = {n: m for module in engine.modules for n, m in module.named_modules()}
        layer = next(reversed([name for name in experts if name.endswith(".experts")]))

        def spoil(_: Any, inputs: Any) -> Any:
            hidden, choice, weights = inputs
            choice, weights = choice.clone(), weights.clone()
            if wrong == wrong:  # not NaN
                choice[9, 1] = wrong
            else:
                weights[9] = wrong
            return hidden, choice, weights

        experts[layer].register_forward_pre_hook(spoil)
        with pytest.raises(RuntimeError) as failure, naming_sample(loader, step=0):
            engine.train_step(loader.batch(0))
        expected = (
            f"the router of {layer} gives an invalid route to token 9: {reason} (step 1, sample "
            f"{loader.indices(0)[0]} of the data set)"
        )
        return str(failure.value), expected

    for actual, expected in World.mock(2).run(run):
        assert actual == expected


def test_sample_with_an_invalid_route_in_a_pipeline_is_named() -> None:
    chosen = run_config([*SETTINGS, family("qwen3_moe"), *LAYOUTS["pipeline"], *ONE_BY_ONE])
    expected: list[int] = []

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        parts = {name: part for module in engine.modules for name, part in module.named_modules()}
        if world.rank == 3:  # the last stage's rank with the second half of the samples
            calls: list[Tensor] = []

            def spoil(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
                if torch.is_grad_enabled():  # other forwards find out shapes
                    calls.append(output)
                second = torch.zeros_like(output[..., :1], dtype=torch.bool)
                second[0, 9] = len(calls) == 2
                return output.masked_fill(second, float("nan"))

            parts["model.layers.1.post_attention_layernorm"].register_forward_hook(spoil)
            expected.append(loader.indices(0)[1])
        with naming_sample(loader, step=0):
            engine.backward(loader.batch(0))

    with pytest.raises(RuntimeError, match="gives an invalid route to token 9") as failure:
        World.mock(4).run(run)
    assert str(failure.value).endswith(f"(step 1, sample {expected[0]} of the data set)")


@pytest.mark.slow
def test_inspect_shows_experts_routers_and_legal_degrees() -> None:
    model = plain({**ROUTED["deepseek_v3"], "n_routed_experts": 6})
    [experts] = inspect(run_config([*SETTINGS, f"model.config={model}"])).experts
    assert (experts.modules, experts.count) == ("model.layers.*.mlp.experts", 2)
    assert experts.router == "model.layers.*.mlp.gate"
    assert experts.shared == ["model.layers.*.mlp.shared_experts"]
    assert (experts.num_experts, experts.degrees) == (6, [1, 2, 3, 6])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [family("qwen3_moe"), "strategy=fsdp", "launch.nproc=8", "strategy.expert.degree=8"],
            "strategy.expert.degree=8: the experts of a layer can't be split evenly; use 1, 2 or",
        ),
        (
            [
                *(family("qwen3_moe"), "strategy=fsdp", "launch.nproc=6"),
                *("train.global_batch_size=12", "strategy.expert.degree=6"),
            ],
            "strategy.expert.degree=6: the experts of a layer can't be split evenly; use 1 or 2",
        ),
        (
            [family("llama"), *LAYOUTS["fsdp"]],
            "strategy.expert.degree=2: LlamaForCausalLM has no experts that can be split; use 1",
        ),
    ],
)
def test_degree_that_does_not_fit_the_experts_is_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config([*SETTINGS, "train.global_batch_size=8", *overrides])
    assert str(refused.value).startswith(message)


def test_legal_degrees_divide_the_experts_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 6}')
    layout = ["strategy=fsdp", "strategy.expert.degree=3", "launch.nproc=4"]
    with pytest.raises(ConfigError, match=r"6 experts are split among the 4 ranks .*; use 1 or 2$"):
        run_config([*SETTINGS, f"model.path={tmp_path}", *layout])
