"""Unsharded parameters that are stored in fp32 and computed with in bf16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.parity_table import MODELS
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call

from axonlaunch.comm import World
from axonlaunch.engines.precision.lower_parameters import lower_blocks
from axonlaunch.engines.recomputation.activation_checkpointing import apply_activation_checkpointing
from axonlaunch.models.build import build_model, spec_for
from axonlaunch.models.tensors.dtensor_regions import full_tensor

TOKENS = torch.arange(12).view(2, 6)


def trained(model: list[str], *overrides: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and parameters of two steps on two ranks."""
    common = ["launch.backend=mock", "launch.nproc=2", "train.global_batch_size=8"]
    # The norm for clipping gradients is summed in another order over shards.
    arithmetic = ["train.precision=bf16", "train.grad_clip=null"]
    chosen = run_config([*model, *common, *arithmetic, *overrides])

    def run(world: World) -> tuple[list[float], dict[str, Tensor]]:
        engine, loader = rank_engine(chosen, world)
        losses = [float(engine.train_step(loader.batch(step)).loss) for step in range(2)]
        return losses, {name: full_tensor(p) for name, p in engine.named_parameters()}

    return World.mock(2).run(run)[0]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("model", ["llama", "gpt", "mlp"])
def test_replicas_in_bf16_equal_fsdp_bitwise(model: str) -> None:
    tied = ["model.tie_word_embeddings=true"] if model == "gpt" else []
    losses, parameters = trained([*MODELS[model], *tied], "strategy=fsdp")
    for strategy in ("ddp", "zero1"):
        sharded, replicas = trained([*MODELS[model], *tied], f"strategy={strategy}")
        assert sharded == losses
        assert all(torch.equal(replicas[name], shard) for name, shard in parameters.items())


class _Lifted(nn.Module):
    """A block that computes with a weight of its input's dtype; its predecessor outputs fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.bfloat16
        return nn.functional.linear(x, self.linear.weight).relu() + self.table


class _OfManyKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scales = nn.ParameterList([nn.Parameter(torch.linspace(0.5, 1.5, 8))])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.table(tokens))
        hidden = hidden * self.scales[0]
        return self.head(hidden + self.attention(hidden, hidden, hidden)[0])


def lowered(model: nn.Module, *, blocks: list[nn.Module], mode: Any = "none") -> nn.Module:
    around = lower_blocks(model, torch.bfloat16, blocks=blocks)
    apply_activation_checkpointing(blocks, mode=mode)
    model.forward = around(model.forward)  # type: ignore[method-assign]
    return model


def test_modules_compute_with_bf16_copies_and_get_fp32_gradients() -> None:
    model = lowered(_OfManyKinds(), blocks=[])
    plain = _OfManyKinds()
    plain.load_state_dict(model.state_dict())
    copies = {name: parameter.bfloat16() for name, parameter in plain.named_parameters()}
    outputs, expected = model(TOKENS), functional_call(plain, copies, (TOKENS,))
    assert outputs.dtype is torch.bfloat16
    assert torch.equal(outputs, expected)
    for result in (outputs, expected):
        result.float().square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    gradients = [(ours.grad, reference.grad) for ours, reference in pairs]
    assert all(ours is not None and ours.dtype is torch.float32 for ours, _ in gradients)
    assert all(torch.equal(ours, reference) for ours, reference in gradients)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.head.weight is model.table.weight  # the parameter itself, outside of a forward


@pytest.mark.parametrize("mode", ["none", "full"])
def test_fp32_block_output_is_cast_for_next_block(mode: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(_Lifted(), _Lifted())
    model = copy.deepcopy(plain)
    lowered(model, blocks=[*model], mode=mode)
    x = torch.ones(3, 8)
    model(x).sum().backward()
    hidden = x
    for block in plain:
        weight = block.linear.weight.bfloat16()
        hidden = nn.functional.linear(hidden.bfloat16(), weight).relu() + block.table
    hidden.sum().backward()
    for lowered_block, block in zip(model, plain, strict=True):
        assert torch.equal(lowered_block.linear.weight.grad, block.linear.weight.grad)


def test_batchnorm_computes_with_fp32_weights() -> None:
    norm = nn.BatchNorm1d(8)
    model = lowered(nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8)), blocks=[])
    outputs = model(torch.randn(4, 8))
    assert outputs.dtype is torch.bfloat16
    outputs.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    assert norm.running_mean is not None
    assert norm.running_mean.dtype is torch.float32
    assert norm.running_mean.any()


class _Experts(nn.Module):
    """Reads experts one by one, and uses weights again without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, 16))
        self.shared = nn.Linear(16, 16, bias=False)
        self.router = nn.Linear(16, 16, bias=False)
        self.router.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.router(x) + x @ self.weight[0]
        for expert in range(len(self.weight)):
            x = nn.functional.linear(x, self.weight[expert])
        return self.shared(x)


def test_experts_loop_keeps_one_bf16_copy() -> None:
    model = lowered(_Experts(), blocks=[])
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(torch.randn(2, 16))
    experts = 2 * model.get_parameter("weight").numel()
    assert [*storages.values()].count(experts) == 1
    outputs.float().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


# A warning about torch inspecting a block's inputs, which torch hides unless warnings are errors.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_block_casts_within_its_one_graph() -> None:
    chosen = run_config(["model=llama_debug", "model.num_hidden_layers=2"])

    def gradients(compiled: bool) -> dict[str, Tensor]:
        model = build_model(chosen, seed=0)
        blocks = [*spec_for(chosen).blocks(model).values()]
        around = lower_blocks(model, torch.bfloat16, blocks=blocks)
        apply_activation_checkpointing(blocks, mode="full")
        for block in blocks if compiled else ():
            block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
        around(model.forward)(TOKENS).float().square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    expected = gradients(compiled=False)
    of_compiled = gradients(compiled=True)
    assert counter.frame_count == 1
    assert all(torch.equal(of_compiled[name], gradient) for name, gradient in expected.items())
