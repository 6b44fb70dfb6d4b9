"""A tensor plan divides a model from outside and does not change its results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tensor_cases import (
    GPT,
    LLAMA,
    TIED_LLAMA,
    VIT,
    VOCABULARY,
    Seen,
    assert_same_gradients,
    axis,
    full,
    in_float64,
    loss_of,
    on_ranks,
    tokens_and_targets,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import axonlaunch as ax
from axonlaunch.config.options.model import MLPConfig
from axonlaunch.engines.tensor.parallelize import parallelize
from axonlaunch.engines.tensor.plan_checks import plan_issues
from axonlaunch.models.build import build_model, construct, spec_for
from axonlaunch.models.specs.loss import cross_entropy_sum


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("config", [LLAMA, TIED_LLAMA, GPT], ids=["llama", "tied_llama", "gpt"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_transformer_equals_undivided_model(
    config: Any, sequence_parallel: bool, size: int
) -> None:
    tokens, targets = tokens_and_targets()
    undivided = in_float64(config)
    expected = F.cross_entropy(undivided(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    expected.backward()

    def rank(world: ax.World) -> None:
        model, mesh = in_float64(config), axis(world)
        plan = spec_for(config).plan(model)
        parallelize(model, plan, mesh=mesh, sequence_parallel=sequence_parallel)
        for _ in range(2):  # gradients of a second backward are added
            loss = loss_of(model, mesh, tokens, targets)
            loss.backward()
        torch.testing.assert_close(loss, expected)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
        assert_same_gradients(model, undivided)

    on_ranks(size, rank)


def test_module_on_full_sequences_between_parts_equals_undivided_model() -> None:
    tokens, targets = tokens_and_targets()
    undivided = in_float64(LLAMA)
    logits = undivided(tokens).flatten(0, 1)
    F.cross_entropy(logits, targets.flatten(), reduction="sum").backward()

    def rank(world: ax.World) -> list[int]:
        model, mesh = in_float64(LLAMA), axis(world)
        plan = {**spec_for(LLAMA).plan(model), "layers.*.mlp": "full_sequence"}
        parallelize(model, plan, mesh=mesh, sequence_parallel=True)
        lengths: list[int] = []
        for module in (model.layers[0].mlp.gate_proj, model.layers[0].post_attention_layernorm):
            module.register_forward_hook(lambda _, __, output: lengths.append(output.shape[1]))
        loss_of(model, mesh, tokens, targets).backward()
        assert_same_gradients(model, undivided)
        return lengths

    length = tokens.shape[1]
    assert on_ranks(2, rank)[0] == [length // 2, length]


@pytest.mark.parametrize("layers", [2, 3])
def test_mlp_plan_alternates_column_and_row_parallel(layers: int) -> None:
    config = MLPConfig(input_size=12, hidden_size=8, num_hidden_layers=layers, num_classes=5)
    x, targets = torch.randn(3, 12, dtype=torch.float64), torch.tensor([0, 4, 2])
    undivided = in_float64(config)
    cross_entropy_sum(undivided(x), targets).backward()

    def rank(world: ax.World) -> dict[str, Any]:
        model, mesh = in_float64(config), axis(world)
        parallelize(model, spec_for(config).plan(model), mesh=mesh)
        loss_of(model, mesh, x, targets).backward()
        assert_same_gradients(model, undivided)
        return {n: p.placements[0] for n, p in model.named_parameters() if n.endswith("weight")}

    placed = on_ranks(2, rank)[0]
    last = Replicate() if layers == 2 else Shard(1)
    assert list(placed.values()) == [*[Shard(0), Shard(1), Shard(0)][:layers], last]


def test_tensor_plan_applies_to_partial_pipeline_stage() -> None:
    config = MLPConfig(input_size=12, hidden_size=8, num_hidden_layers=3, num_classes=5)

    def rank(world: ax.World) -> list[Any]:
        model = construct(config, seed=0)
        model.layers[0] = None
        parallelize(model, spec_for(config).plan(model), mesh=axis(world))
        return [model.layers[1].weight.placements, model.layers[2].weight.placements]

    assert on_ranks(2, rank)[0] == [(Shard(1),), (Shard(0),)]


def test_tensor_parallel_vit_equals_undivided_model() -> None:
    images, targets = torch.randn(3, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 4, 2])
    undivided = in_float64(VIT)
    cross_entropy_sum(undivided(images), targets).backward()

    def rank(world: ax.World) -> None:
        model, mesh = in_float64(VIT), axis(world)
        parallelize(model, spec_for(VIT).plan(model), mesh=mesh)
        loss_of(model, mesh, images, targets).backward()
        assert_same_gradients(model, undivided)
        assert model.embed_patches.weight.placements == (Replicate(),)

    on_ranks(2, rank)


@pytest.mark.parametrize(
    ("sequence_parallel", "forward", "backward"),
    [
        (False, ["all_reduce"] * 2, ["all_reduce"] * 2),
        # Two leave the region, two enter it; backward also sums the gradients of two norms.
        (
            True,
            ["all_gather_into_tensor", "reduce_scatter_tensor"] * 2,
            ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"] * 2,
        ),
    ],
)
def test_llama_block_has_minimal_communication(
    sequence_parallel: bool, forward: list[str], backward: list[str]
) -> None:
    def rank(world: ax.World) -> tuple[list[str], list[str]]:
        model = build_model(LLAMA)
        plan = spec_for(LLAMA).plan(model)
        parallelize(model, plan, mesh=axis(world), sequence_parallel=sequence_parallel)
        x = torch.randn(2, 4, 32, requires_grad=True)
        with Seen() as going:
            y = model.layers[0](x, model.rotary)
        with Seen() as coming:
            y.sum().backward()
        return going.names, coming.names

    assert on_ranks(2, rank) == [(forward, backward)] * 2


@pytest.mark.parametrize(
    ("sequence_parallel", "operation"), [(False, "all_reduce_"), (True, "reduce_scatter_tensor")]
)
def test_weights_gradients_are_computed_while_the_inputs_gradient_is_summed(
    sequence_parallel: bool, operation: str
) -> None:
    class Order(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> object:
            self.names.append(func.name().partition("::")[2])
            return func(*args, **(kwargs or {}))

    def rank(world: ax.World) -> int:
        model = build_model(LLAMA)
        plan = spec_for(LLAMA).plan(model)
        parallelize(model, plan, mesh=axis(world), sequence_parallel=sequence_parallel)
        y = model.layers[0].self_attn(torch.randn(2, 4, 32, requires_grad=True), model.rotary)
        with Order() as order:
            y.sum().backward()
        started = order.names.index(operation)
        waited = order.names.index("wait_tensor", started)
        return order.names[started:waited].count("mm")

    assert on_ranks(2, rank) == [3, 3]  # q, k and v


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_rank_has_full_vocabulary_logits(sequence_parallel: bool) -> None:
    tokens, targets = tokens_and_targets()

    def rank(world: ax.World) -> int:
        model, mesh = build_model(LLAMA), axis(world)
        plan = spec_for(LLAMA).plan(model)
        parallelize(model, plan, mesh=mesh, sequence_parallel=sequence_parallel)
        with Seen(VOCABULARY) as watched:
            loss_of(model, mesh, tokens, targets).backward()
        return watched.tensors

    assert on_ranks(2, rank) == [0, 0]


def test_tensor_parallel_state_dict_has_dtensors() -> None:
    def rank(world: ax.World) -> None:
        model, mesh = build_model(GPT), axis(world)
        names = [name for name, _ in model.named_parameters()]
        model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        parallelize(model, spec_for(GPT).plan(model), mesh=mesh)
        assert [name for name, _ in model.named_parameters()] == names
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        assert all(p.device_mesh is mesh for p in model.parameters())
        assert isinstance(model.norm.weight, DTensor)
        assert model.lm_head.weight is model.embed_tokens.weight
        assert isinstance(model.layers[0].input_layernorm, nn.LayerNorm)
        assert isinstance(model.layers[0].mlp.down_proj, nn.Linear)
        assert not model.layers[0].mlp.up_proj.weight.requires_grad
        placed = {name: p.placements[0] for name, p in model.named_parameters()}
        assert placed["embed_tokens.weight"] == placed["layers.0.self_attn.q_proj.bias"] == Shard(0)
        assert placed["layers.1.mlp.down_proj.weight"] == Shard(1)
        assert placed["layers.1.mlp.down_proj.bias"] == placed["norm.bias"] == Replicate()
        model(tokens_and_targets()[0])
        assert isinstance(model.norm.weight, DTensor)

    on_ranks(2, rank)


def test_state_loads_and_copies_compute() -> None:
    tokens, _ = tokens_and_targets()

    def rank(world: ax.World) -> None:
        models = []
        for seed in (1, 2):
            model = build_model(LLAMA, seed=seed)
            parallelize(model, spec_for(LLAMA).plan(model), mesh=axis(world))
            models.append(model)
        first, second = models
        second.load_state_dict(first.state_dict())
        assert torch.equal(first(tokens), second(tokens))
        twin = copy.deepcopy(first)
        with torch.no_grad():
            for parameter in first.parameters():
                parameter.zero_()
        assert torch.equal(twin(tokens), second(tokens))
        twin(tokens).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert all(p.grad is None for p in first.parameters())

    on_ranks(2, rank)


class NormedAttention(nn.Module):
    """A user's attention: fused differently, with a norm and a scale inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.query = nn.Linear(8, 16)
        self.value = nn.Linear(8, 16, bias=False)
        self.query_norm = nn.RMSNorm(4)
        self.out = nn.Linear(16, 8)

    def forward(self, *, hidden: Tensor) -> Tensor:
        query = self.query_norm(self.query(hidden).unflatten(-1, (-1, 4)))
        value = self.value(hidden.tanh()).unflatten(-1, (-1, 4))  # not the region's input itself
        return self.out((self.scale * query.tanh() * value).flatten(-2))


class Users(nn.Module):
    """A user's model: parameters, a weight that is read through its parent, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8))
        self.many = nn.ParameterList([torch.randn(8), torch.randn(8)])
        self.conv = nn.Conv1d(8, 8, kernel_size=1)
        self.attention = NormedAttention()
        self.wide = nn.Linear(8, 12)
        self.narrow = nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.read = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2) + self.shift + self.many[0] * self.many[1]
        x = x + self.attention(hidden=x)
        x = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return F.linear(x, self.read.weight)


USERS_PLAN = {
    "attention": "region",
    "attention.query": "column",
    "attention.val*.weight": "column",
    "*.out": "row",
    "wide": "column",
    "narrow": "row",
}


@pytest.mark.parametrize("size", [2, 4])
def test_custom_model_is_divided_by_tensor_plan(size: int) -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    def made() -> Users:
        torch.manual_seed(4)
        return Users().double()

    undivided = made()
    expected = undivided(x)
    expected.square().sum().backward()

    def rank(world: ax.World) -> None:
        model = made()
        parallelize(model, USERS_PLAN, mesh=axis(world))
        got = model(x)
        torch.testing.assert_close(got, expected)
        got.square().sum().backward()
        undivided.read.bias.grad = None
        for name, parameter in model.named_parameters():
            if name == "read.bias":  # unused
                continue
            torch.testing.assert_close(full(parameter.grad), undivided.get_parameter(name).grad)
        assert not isinstance(model.count, DTensor)
        assert model.attention.value.weight.placements == (Shard(0),)
        assert isinstance(model.shift, DTensor)

    # Not in threads, because a seeded model draws from the rank's generator.
    on_ranks(size, rank)


def test_padding_of_an_embedding_gets_no_gradient() -> None:
    def rank(world: ax.World) -> None:
        module = nn.Sequential(nn.Embedding(8, 4, padding_idx=5))
        parallelize(module, {"0": "vocabulary"}, mesh=axis(world))
        module(torch.tensor([5, 1, 6])).sum().backward()
        rows = full(module[0].weight.grad).sum(1)
        assert rows.tolist() == [0, 4, 0, 0, 0, 0, 4, 0]

    on_ranks(2, rank)


def test_invalid_tensor_plan_is_refused_without_changes() -> None:
    def rank(world: ax.World) -> None:
        model = build_model(GPT)
        plan = {**spec_for(GPT).plan(model), "norm": "column"}
        with pytest.raises(ValueError, match="norm: names norm, of type LayerNorm; column is for"):
            parallelize(model, plan, mesh=axis(world))
        with pytest.raises(
            ValueError, match="norm: there is no style 'colum'; did you mean column"
        ):
            parallelize(model, {"norm": "colum"}, mesh=axis(world))
        assert not [p for p in model.parameters() if isinstance(p, DTensor)]
        square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
        with pytest.raises(ValueError, match="pass only the tensor axis"):
            parallelize(model, {}, mesh=square)

    on_ranks(2, rank)


def test_shadowed_tensor_plan_pattern_is_reported() -> None:
    plan = {"layers.*": "region", "layers.*.mlp.up_proj": "column"}
    model = build_model(GPT)
    wrong = dict(plan_issues(model, plan, degree=2, sequence_parallel=False))
    assert wrong["layers.*.mlp.up_proj"] == (
        "layers.* comes before it and matches layers.0.mlp.up_proj too; put this one first"
    )


def test_indivisible_sequence_parallel_length_is_refused() -> None:
    def rank(world: ax.World) -> None:
        model = build_model(GPT)
        plan = spec_for(GPT).plan(model)
        parallelize(model, plan, mesh=axis(world), sequence_parallel=True)
        with pytest.raises(ValueError, match=r"dim 1 .* 5 a multiple of 2"):
            model(torch.zeros(2, 5, dtype=torch.long))

    on_ranks(2, rank)
