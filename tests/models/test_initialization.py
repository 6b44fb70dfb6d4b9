import math
import threading

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from axonlaunch.comm import World
from axonlaunch.config.options.model import GPTConfig, LlamaConfig
from axonlaunch.models.build import build_model, construct, initialize_weights
from axonlaunch.models.tensors.initialization import (
    Constant,
    Normal,
    Staging,
    Uniform,
    fill,
    initialize,
    materialize,
)

GPT = GPTConfig(
    hidden_size=36,
    num_hidden_layers=2,
    num_attention_heads=6,
    vocab_size=101,
    max_position_embeddings=50,
)
DRAWN = [Normal(0.3), Uniform(0.7)]


def full(shape, initializer=DRAWN[0], *, seed=3, name="w"):
    tensor = torch.empty(shape)
    fill(tensor, initializer, seed=seed, name=name, staging=Staging())
    return tensor


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3000, 70), (13, 5), (3, 2), (1, 40000)], ids=str)
def test_shard_initialization_is_bitwise_equal_to_full(mesh_shape, placements, shape):
    expected = full(shape)

    def rank(world: World) -> list[bool]:
        mesh = init_device_mesh("cpu", mesh_shape)
        tensor = distribute_tensor(torch.zeros(shape), mesh, placements)
        fill(tensor, DRAWN[0], seed=3, name="w", staging=Staging())
        right = distribute_tensor(expected, mesh, placements)
        return torch.equal(tensor.to_local(), right.to_local())

    assert World.mock(math.prod(mesh_shape)).run(rank) == [True] * math.prod(mesh_shape)


@pytest.mark.parametrize("initializer", DRAWN, ids=lambda initializer: type(initializer).__name__)
@pytest.mark.parametrize("shape", [(), (7,), (100_000,), (3, 4, 5, 6)], ids=str)
def test_shard_initialization_is_bitwise_equal_for_all_placements(initializer, shape):
    expected = full(shape, initializer)

    def rank(world: World) -> bool:
        mesh = init_device_mesh("cpu", (3,))
        placement = [Shard(len(shape) - 1)] if shape else [Replicate()]
        tensor = distribute_tensor(torch.zeros(shape), mesh, placement)
        fill(tensor, initializer, seed=3, name="w", staging=Staging())
        return torch.equal(
            tensor.to_local(), distribute_tensor(expected, mesh, placement).to_local()
        )

    assert World.mock(3).run(rank) == [True] * 3


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
def test_a_fully_sharded_gpt_starts_from_the_weights_of_one_process(mesh_shape):
    expected = build_model(GPT, seed=3).state_dict()

    def rank(world: World) -> list[str]:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        model = construct(GPT, seed=3)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        initialize_weights(model, GPT, seed=3, device="cpu")
        assert model.lm_head.weight is model.embed_tokens.weight
        parameters = dict(model.named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
        return [n for n, p in parameters.items() if not torch.equal(p.full_tensor(), expected[n])]

    assert World.mock(math.prod(mesh_shape)).run(rank) == [[]] * math.prod(mesh_shape)


def test_tensor_parallelism_under_fsdp_starts_from_the_weights_of_one_process():
    # 36 rows over 2 tensor ranks, each half over 4 data ranks: shards of 5, 5, 5 and 3 rows.
    expected = build_model(GPT, seed=3).state_dict()
    columns, rows = ("q_proj", "k_proj", "v_proj", "up_proj"), ("o_proj", "down_proj")
    plan = {f"{'mlp' if 'up' in n else 'self_attn'}.{n}": ColwiseParallel() for n in columns}
    plan |= {f"{'mlp' if 'down' in n else 'self_attn'}.{n}": RowwiseParallel() for n in rows}

    def rank(world: World) -> list[str]:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = construct(GPT, seed=3)
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        initialize_weights(model, GPT, seed=3, device="cpu")
        wrong = []
        for name, parameter in model.named_parameters():
            if parameter.device_mesh.ndim == 1:
                local = distribute_tensor(
                    expected[name], parameter.device_mesh, parameter.placements, src_data_rank=None
                ).to_local()
            else:
                dp, tp = parameter.device_mesh.get_coordinate()
                local = expected[name]
                kind = parameter.placements[1]
                if isinstance(kind, Shard):
                    local = local.chunk(2, kind.dim)[tp]
                pieces = local.chunk(4, 0)
                local = pieces[dp] if dp < len(pieces) else local[:0]
            if not torch.equal(parameter.to_local(), local):
                wrong.append(name)
        return wrong

    assert World.mock(8).run(rank) == [[]] * 8


def test_weights_depend_on_seed_and_name():
    a = full((50, 50))
    assert torch.equal(a, full((50, 50)))
    assert not torch.equal(a, full((50, 50), seed=4))
    assert not torch.equal(a, full((50, 50), name="v"))


def test_initialization_is_independent_of_global_generator():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    a = full((40, 40))
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    assert torch.equal(a, full((40, 40)))


@pytest.mark.parametrize("initializer", DRAWN, ids=lambda initializer: type(initializer).__name__)
def test_weights_do_not_depend_on_the_number_of_threads(initializer):
    num_threads = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(full((3, 150_001), initializer))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(*results)


def test_lower_precision_weights_are_the_rounded_fp32_ones():
    low = torch.empty(300, 200, dtype=torch.bfloat16)
    fill(low, DRAWN[0], seed=3, name="w", staging=Staging())
    assert torch.equal(low, full((300, 200)).bfloat16())


def test_draws_follow_their_distributions():
    normal = full((1000, 300), Normal(0.5, mean=2.0))
    assert abs(normal.mean() - 2) < 0.01
    assert abs(normal.std() - 0.5) < 0.01
    even = full((1000, 300), Uniform(0.5))
    assert abs(even.std() - 0.5 / 3**0.5) < 0.01
    assert (full((3, 3), Constant(1.5)) == 1.5).all()
    # No block repeats another, which would mean that a seed ignores the block's number.
    assert len(set(normal[:, 0].tolist())) > 900


def test_pipeline_stage_initialization_equals_full_model_with_tied_head():
    expected = build_model(GPT, seed=3)
    stage = construct(GPT, seed=3)
    stage.embed_tokens = stage.embed_positions = stage.layers[0] = None
    initialize_weights(stage, GPT, seed=3, device="cpu")
    assert torch.equal(stage.lm_head.weight, expected.embed_tokens.weight)
    weights = expected.state_dict()
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_residual_output_projection_initializes_smaller():
    model = build_model(LlamaConfig(hidden_size=256, num_attention_heads=8))
    block = model.layers[2]
    std = (0.4 / 256) ** 0.5
    assert abs(block.self_attn.q_proj.weight.std() / std - 1) < 0.03
    for ending in (block.self_attn.o_proj, block.mlp.down_proj):
        assert abs(ending.weight.std() * 8**0.5 / std - 1) < 0.03
    assert (block.input_layernorm.weight == 1).all()
    initialized = build_model(LlamaConfig(initializer_range=0.02))
    assert abs(initialized.embed_tokens.weight.std() / 0.02 - 1) < 0.03


def test_materialize_keeps_tied_parameters_tied_and_fills_buffers():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.empty(3), persistent=False)
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.second.weight = self.first.weight

        def reset_buffers(self):
            self.table.copy_(torch.tensor([1.0, 2.0, 3.0]))

    with torch.device("meta"):
        module = nn.Sequential(Table())
    materialize(module, device="cpu")
    assert module[0].table.tolist() == [1, 2, 3]
    assert module[0].first.weight is module[0].second.weight
    assert len(list(module.parameters())) == 3


def test_a_parameter_without_initializer_or_storage_is_named():
    with pytest.raises(ValueError, match="parameter bias has no initializer"):
        initialize(nn.Linear(2, 2), seed=0, initializers={"weight": Constant(0)})
    with pytest.raises(ValueError, match="parameter weight is on the meta device"):
        initialize(
            nn.Linear(2, 2, device="meta"),
            seed=0,
            initializers={"weight": Constant(0), "bias": Constant(0)},
        )


@pytest.mark.parametrize("initializer", DRAWN, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(initializer):
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = full((3000, 70), initializer)
        torch.set_num_threads(3)
        names = set()

        class Noted(Normal):
            def draw(self, shape, generator):
                names.add(threading.current_thread().name)
                return initializer.draw(shape, generator)

        assert torch.equal(full((3000, 70), Noted(0.3)), alone)
        assert threading.current_thread().name not in names
    finally:
        torch.set_num_threads(num_threads)
