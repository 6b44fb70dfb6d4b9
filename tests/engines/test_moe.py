"""The included mixture of experts in every layout, compared with a loop in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from support.configured import run_config
from support.hf_families import FAMILIES
from support.moe_layouts import LAYOUTS, RATE, SETTINGS, WEIGHT
from support.parity import assert_trains_as_one_process
from support.rank_engine import rank_engine
from torch import Tensor
from torch.nn.functional import cross_entropy

from axonlaunch import data
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.problems.errors import plain as as_text
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.models.build import build_model, construct, spec_for
from axonlaunch.models.facts.parameter_facts import parameter_facts

STEPS = 5
FAST = {"tensor-2", "1f1b-2", "full", "context"}
CASES = [pytest.param(key, marks=() if key in FAST else pytest.mark.slow) for key in LAYOUTS]

Trained = tuple[list[float], list[float], dict[str, Tensor]]
"""Losses and norms of the steps, and the biases of routers after the last one."""
UNBALANCED = ["model.balance=none", "model.balance_rate=1e-3", "model.router_aux_loss=false"]
"""Settings of models whose experts are not balanced."""


def balancing_loss(routed: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return the loss of Switch Transformers over all layers, from the outputs of routers.

    With E experts it is ``E * sum(f_e * P_e)``: the choices of each expert per token, and its mean
    share of a token's scores.
    """
    scores = torch.cat([logits.sigmoid() for logits, _, _ in routed])
    chosen = torch.cat([experts for _, _, experts in routed])
    frequencies = chosen.flatten().bincount(minlength=8) / len(chosen)
    return 8 * (frequencies * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()


@functools.cache
def plain() -> Trained:
    """Train with torch: the losses of the whole batch, AdamW, and a bias moved by signs."""
    chosen = run_config([*SETTINGS, *LAYOUTS["single"]])
    model: Any = build_model(chosen.model, seed=chosen.seed)
    loader = rank_loader(
        chosen, data.build_dataset(chosen.data), layout=Layout.of(chosen, world_size=1), rank=0
    )
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-6, betas=(0.9, 0.99))
    routers = {n: m for n, m in model.named_modules() if hasattr(m, "e_score_correction_bias")}
    routed: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, router in routers.items():
        router.register_forward_hook(lambda _, __, output, name=name: routed.update({name: output}))
    losses, norms = [], []
    for step in range(STEPS):
        batch = loader.batch(step)
        logits = model(batch.inputs).logits.flatten(0, 1)
        loss = cross_entropy(logits, batch.targets.flatten())
        loss = loss + WEIGHT * balancing_loss([*routed.values()])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for name, router in routers.items():
            counts = routed[name][2].flatten().bincount(minlength=8).double()
            router.e_score_correction_bias += RATE * (counts.mean() - counts).sign().float()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: r.e_score_correction_bias.clone() for name, r in routers.items()}


def trained(
    overrides: Sequence[str], settings: Sequence[str] = SETTINGS, *, timeout_s: float = 60
) -> Trained:
    """Train in a layout; every rank must have the same losses and norms."""
    chosen = run_config([*settings, *overrides])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> Trained:
        engine, loader = rank_engine(chosen, world)
        results = [engine.train_step(loader.batch(step)) for step in range(STEPS)]
        losses, norms = [float(r.loss) for r in results], [float(r.grad_norm) for r in results]  # type: ignore[arg-type]
        state = engine.model_state_dict()
        biases = {name: tensor for name, tensor in state.items() if "correction_bias" in name}
        return losses, norms, {name.rpartition(".")[0]: b.clone() for name, b in biases.items()}

    ranks = World.mock(chosen.launch.nproc, timeout_s=timeout_s)
    (losses, norms, biases), *others = ranks.run(run)
    assert all(other[:2] == (losses, norms) for other in others)
    for other in others:  # the other stages of a pipeline have the biases of other blocks
        for name, bias in other[2].items():
            assert torch.equal(biases.setdefault(name, bias), bias)
    return losses, norms, biases


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", CASES)
def test_losses_norms_and_biases_of_experts_equal_plain_torch(layout: str) -> None:
    losses, norms, biases = trained(LAYOUTS[layout])
    expected_losses, expected_norms, expected_biases = plain()
    assert losses == pytest.approx(expected_losses, rel=2e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert biases.keys() == expected_biases.keys()
    for name, bias in biases.items():
        torch.testing.assert_close(bias, expected_biases[name], rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor-2", "zero1"])
def test_muon_of_experts_trains_as_in_one_process(layout: str) -> None:
    [degree] = [word for word in LAYOUTS[layout] if word.startswith("launch.nproc=")]
    chosen = [*SETTINGS, *LAYOUTS[layout], "optimizer=muon", "optimizer.adamw_eps=1e-4"]
    chosen = [word for word in chosen if not word.startswith(("optimizer.betas", "optimizer.eps"))]
    assert_trains_as_one_process(chosen, int(degree.partition("=")[2]))


def test_muon_leaves_adapters_of_experts_to_adamw() -> None:
    """Their matrices are not those of one expert."""
    chosen = [*SETTINGS, *LAYOUTS["single"], *UNBALANCED]
    config = run_config([*chosen, "adapter=lora", "adapter.targets=[q_proj,experts.*]"])
    facts = parameter_facts(spec_for(config), construct(config, seed=0))
    adapted = {name for name, entry in facts.items() if not entry.is_hidden_matrix}
    assert adapted == {name for name in facts if ".experts." in name}
    assert 0 < len(adapted) < len(facts)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [],
            "train.compile=true: torch compiles products of experts only in bf16; use "
            "train.precision=bf16",
        ),
        (
            ["train.precision=bf16", "model.router_aux_loss=0.1"],
            "train.compile=true: compiled blocks can't pass on the choices of their routers; use "
            "false, or model.router_aux_loss=false",
        ),
        (
            ["train.precision=bf16", "model.router_aux_loss=0.1", "model.balance=bias"],
            "train.compile=true: compiled blocks can't pass on the choices of their routers; use "
            "false, or model.router_aux_loss=false and model.balance=none",
        ),
    ],
    ids=["fp32", "loss of routers", "loss and biases of routers"],
)
def test_experts_that_cannot_be_compiled_are_refused(overrides: list[str], problem: str) -> None:
    chosen = [*SETTINGS, *LAYOUTS["fsdp"], *UNBALANCED, "train.compile=true", *overrides]
    with pytest.raises(ConfigError) as refused:
        run_config(chosen)
    assert str(refused.value) == problem


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler imports deprecated parts of torch
@pytest.mark.parametrize(("kind", "tolerance"), [("moe_debug", 2e-3), ("qwen3_moe", 2e-5)])
def test_compiled_experts_have_the_losses_of_the_eager_run(kind: str, tolerance: float) -> None:
    chosen = [*SETTINGS, "model.num_hidden_layers=1", "model.first_k_dense_replace=0"]
    chosen += [*UNBALANCED, "train.precision=bf16"]
    if kind == "qwen3_moe":
        described = {**FAMILIES[kind], "num_hidden_layers": 1}
        chosen = ["model=hf", "model.init=random", f"model.config={as_text(described)}"]
        chosen += ["data=synthetic_tokens", "data.sequence_length=16", "optimizer.eps=1e-6"]
        chosen += ["train.global_batch_size=8"]
    eager, _, _ = trained([*chosen, *LAYOUTS["single"]], [])
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    chosen += [*LAYOUTS["single"], "train.compile=true"]
    compiled, _, _ = trained(chosen, [], timeout_s=600)  # the compiler does not communicate
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    assert compiled == pytest.approx(eager, rel=tolerance)


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_compiled_experts_are_refused_if_recomputation_could_choose_others(mode: str) -> None:
    chosen = [*SETTINGS, *UNBALANCED, "train.precision=bf16"]
    with pytest.raises(ConfigError) as refused:
        run_config([*chosen, "train.compile=true", f"train.activation_checkpointing={mode}"])
    message = (
        "a compiled block would choose experts again in backward, and rounding can change the "
        "choice; use none, or train.compile=false"
    )
    assert str(refused.value) == f"train.activation_checkpointing={mode}: {message}"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["tensor-2", "1f1b-2", "context-4", "hsdp-2", "zbv-2", "all-4"])
def test_losses_of_experts_in_bf16_are_close_to_plain_fp32(layout: str) -> None:
    losses, norms, _ = trained([*LAYOUTS[layout], "train.precision=bf16"])
    expected_losses, expected_norms, _ = plain()
    assert losses == pytest.approx(expected_losses, rel=5e-3)
    assert norms == pytest.approx(expected_norms, rel=5e-2)
