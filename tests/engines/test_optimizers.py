"""Every optimizer follows torch or its paper, in one process and in every layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import optimizer_layouts
from support.configured import run_config
from support.gathered import Held, gathered, held
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from axonlaunch.comm import World
from axonlaunch.config.optimization.optimizer import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    NAdamConfig,
    OptimizerConfig,
    SGDConfig,
)
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.config.optimization.parameter_groups import states_of, with_options
from axonlaunch.engines.optimizer.algorithms import muon
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.models.tensors.dtensor_regions import full_tensor

OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(weight_decay=0.3),
    "adam": AdamConfig(weight_decay=0.3),
    "sgd": SGDConfig(weight_decay=0.3),
    "nadam": NAdamConfig(weight_decay=0.3),
    "lion": LionConfig(weight_decay=0.3),
    "adafactor": AdafactorConfig(weight_decay=0.3),
    "muon": MuonConfig(weight_decay=0.3),
    "muon original": MuonConfig(weight_decay=0.3, adjust_lr_fn="original"),
}
STEPS = 4
RATES = [0.1 / (step + 1) for step in range(STEPS)]


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (7, 3), "head": (4, 6), "bias": (5,), "scalar": (), "stack": (2, 3, 4)}
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def facts() -> dict[str, ParameterFacts]:
    return {
        name: ParameterFacts(name=name, shape=tuple(p.shape), is_hidden_matrix=name == "hidden")
        for name, p in parameters().items()
    }


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in parameters().items()}


def trained(config: OptimizerConfig) -> dict[str, Tensor]:
    weights = parameters()
    update = Update(config, weights, parameters=facts())
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            weights[name].grad = gradient
        update.apply(rate=lambda _, step=step: RATES[step])  # type: ignore[misc]
    return {name: p.detach() for name, p in weights.items()}


def in_torch(kind: str, weights: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers with parameter groups as in their documentation."""
    optim = torch.optim
    groups: list[dict[str, Any]] = [
        {"params": [p for p in weights.values() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in weights.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind in ("muon", "muon original"):
        adjust = "original" if kind == "muon original" else "match_rms_adamw"
        groups[0]["params"] = [p for p in groups[0]["params"] if p is not weights["hidden"]]
        return [
            optim.Muon([weights["hidden"]], weight_decay=0.3, adjust_lr_fn=adjust),
            optim.AdamW(groups, betas=(0.9, 0.95), fused=True),
        ]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: optim.AdamW(groups, betas=(0.9, 0.95), fused=True),
        "adam": lambda: optim.Adam(groups, betas=(0.9, 0.999), fused=True),
        "sgd": lambda: optim.SGD(groups, momentum=0.9, fused=True),
        "nadam": lambda: optim.NAdam(
            groups, betas=(0.9, 0.95), decoupled_weight_decay=True, foreach=True
        ),
        "adafactor": lambda: optim.Adafactor(groups, foreach=False),
    }
    return [makers[kind]()]


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "lion"])
def test_unsharded_update_is_bitwise_equal_to_torch(kind: str) -> None:
    weights = parameters()
    optimizers = in_torch(kind, weights)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            weights[name].grad = gradient
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATES[step]
            optimizer.step()
    for name, tensor in trained(OPTIMIZERS[kind]).items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_lion_equals_paper_in_float64(eps: float) -> None:
    """Algorithm 2 of Chen et al., 2023, with lambda = 0.3 for matrices."""
    weights = {name: p.detach().double() for name, p in parameters().items()}
    momenta = {name: torch.zeros_like(p) for name, p in weights.items()}
    for step, rate in enumerate(RATES):
        for name, g in gradients(step).items():
            p, m, g = weights[name], momenta[name], g.double()
            c = 0.9 * m + (1 - 0.9) * g
            update = c / (c.abs() + eps) if eps else torch.sign(c)
            weights[name] = p - rate * (update + (0.3 if p.ndim > 1 else 0.0) * p)
            momenta[name] = 0.99 * m + (1 - 0.99) * g
    for name, tensor in trained(LionConfig(weight_decay=0.3, eps=eps)).items():
        torch.testing.assert_close(tensor.double(), weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_entry_lists_state_tensors(kind: str) -> None:
    weights, config = parameters(), OPTIMIZERS[kind]
    update = Update(config, weights, parameters=facts())
    for p in weights.values():
        p.grad = torch.ones_like(p)
    for optimizer in update.optimizers:
        optimizer.step()
    by_parameter = {
        p: states for optimizer in update.optimizers for p, states in optimizer.state.items()
    }
    for name, p in weights.items():
        shape = tuple(p.shape)
        expected = states_of(with_options(config, facts()[name]), shape)
        assert by_parameter.get(p, {}).keys() == expected.keys()
        for key, state in expected.items():
            assert tuple(by_parameter[p][key].shape) == state.shape(shape)
            assert by_parameter[p][key].nbytes == state.nbytes(shape)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_preallocated_states_do_not_change_first_step(kind: str) -> None:
    weights = parameters()
    update = Update(OPTIMIZERS[kind], weights, parameters=facts())
    update.load_state_dict({k: v.clone() for k, v in update.state_dict().items()})
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            weights[name].grad = gradient
        update.apply(rate=lambda _, step=step: RATES[step])  # type: ignore[misc]
    for name, tensor in trained(OPTIMIZERS[kind]).items():
        assert torch.equal(tensor, weights[name]), name


SMALL = [
    *("model.hidden_size=16", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=8"),
    *("train.grad_clip=1.0", "scheduler=constant", "scheduler.warmup_steps=0"),
]
# eps keeps gradients that are only rounding, like the key bias's, from causing full steps.
OVERRIDES = {
    "adam": ["optimizer=adam", "optimizer.eps=1e-4"],
    "nadam": ["optimizer=nadam", "optimizer.eps=1e-4"],
    "lion": ["optimizer=lion", "optimizer.eps=1e-4"],
    "adafactor": ["optimizer=adafactor", "optimizer.eps=[1e-4,1e-3]"],
    "muon": ["optimizer=muon", "optimizer.adamw_eps=1e-4"],
}
LAYOUTS = {
    **{layout: how for layout, how in optimizer_layouts.LAYOUTS.items() if layout != "single"},
    "zero1": (3, "strategy=zero1 train.global_batch_size=9"),
    "fsdp": (4, "strategy=fsdp"),
}


def run(overrides: list[str], ranks: int, steps: int = 3) -> dict[str, Tensor]:
    chosen = run_config([*SMALL, *overrides, f"launch.nproc={ranks}"])

    def on_rank(world: World) -> dict[str, Held]:
        engine, loader = rank_engine(chosen, world)
        for step in range(steps):
            engine.train_step(loader.batch(step))
        return held(engine.named_parameters())

    return gathered(World.mock(ranks).run(on_rank))


# Elementwise optimizers share everything that a layout could get wrong: each layout tests one of
# them. Optimizers that exchange shards are tested in each layout.
_ELEMENTWISE = [*zip(LAYOUTS, ["adam", "nadam", "lion"] * len(LAYOUTS), strict=False)]
_EXCHANGING = [
    (layout, kind)
    for kind in ("adafactor", "muon")
    for layout in LAYOUTS
    if "offloaded" not in layout  # refused
]


@functools.cache
def alone(kind: str, *overrides: str, steps: int = 3) -> dict[str, Tensor]:
    return run([*OVERRIDES[kind], "strategy=single", *overrides], 1, steps=steps)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("layout", "kind"), [*_ELEMENTWISE, *_EXCHANGING])
def test_optimizer_in_layout_equals_one_process(layout: str, kind: str) -> None:
    ranks, strategy = LAYOUTS[layout]
    overrides = strategy.split()
    size = [word for word in overrides if "global_batch" in word]
    start, expected = alone(kind, *size, steps=0), alone(kind, *size)
    got = run([*OVERRIDES[kind], *overrides], ranks)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        moved = float((tensor - start[name]).norm())
        off = float((got[name] - tensor).norm())
        # Muon rounds to bf16 and then amplifies small values up to 480 times. Another test below
        # shows that it is exact for equal gradients.
        share = 0.05 if kind == "muon" else 1e-3
        assert off <= share * moved + 1e-6 * math.sqrt(tensor.numel()), name


def after_a_tensor_axis(dim: int) -> list[Placement]:
    """Return how fully_shard divides a tensor that a tensor axis has divided along ``dim``."""
    data: Placement = Shard(0) if dim else _StridedShard(0, split_factor=2)
    return [data, Shard(dim)]


DIVISIONS: dict[str, tuple[dict[str, int], list[Placement]]] = {
    "rows": ({"dp_shard": 4}, [Shard(0)]),
    "columns": ({"tp": 2}, [Shard(1)]),
    "rows of replicas": ({"dp_replicate": 2, "dp_shard": 2}, [Replicate(), Shard(0)]),
    "rows of rows": ({"dp_shard": 2, "tp": 2}, after_a_tensor_axis(0)),
    "rows of columns": ({"dp_shard": 2, "tp": 2}, after_a_tensor_axis(1)),
    "nothing": ({"tp": 2}, [Replicate()]),
}
SHAPES = {"one row": (1, 4), "tall": (6, 4), "wide": (4, 10), "few": (3, 8), "large": (16, 8)}


def matrix(name: str, step: int) -> Tensor:
    """Return a parameter for step 0, or its gradient for a later step."""
    generator = torch.Generator().manual_seed(7 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator)


def divided(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Return a tensor divided by the tensor axis first, then by the data axis."""
    local = tensor
    strided = [isinstance(each, _StridedShard) for each in placements]
    for axis in sorted(range(len(placements)), key=lambda axis: strided[axis]):
        placement = placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            chunks = local.chunk(mesh.size(axis), placement.dim)
            rank = mesh.get_local_rank(axis)
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[rank] if rank < len(chunks) else empty
    return DTensor.from_local(
        local.clone(),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@pytest.mark.slow(keep=15)
@pytest.mark.parametrize("kind", ["muon", "muon original", "adafactor", "lion", "nadam"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_sharded_matrix_update_equals_unsharded_update(division: str, kind: str) -> None:
    sizes, placements = DIVISIONS[division]
    config = OPTIMIZERS[kind]
    # A tensor axis must divide evenly; fully_shard gives the last ranks less.
    names = [name for name in SHAPES if "tp" not in sizes or SHAPES[name][0] % 2 == 0]
    hidden = {
        name: ParameterFacts(name=name, shape=SHAPES[name], is_hidden_matrix=True) for name in names
    }

    def updated(wrap: Callable[[Tensor], Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        weights = {name: nn.Parameter(wrap(matrix(name, 0))) for name in names}
        update = Update(config, weights, parameters=hidden)
        for step in range(STEPS):
            for name, p in weights.items():
                p.grad = wrap(matrix(name, step + 1))
            update.apply(rate=lambda _, step=step: RATES[step])  # type: ignore[misc]
        states = {key: full_tensor(state) for key, state in update.state_dict().items()}
        return {name: full_tensor(p.detach()) for name, p in weights.items()}, states

    expected = updated(lambda tensor: tensor.clone())

    def on_rank(world: World) -> None:
        mesh = world.mesh(**sizes).device_mesh
        got = updated(lambda tensor: divided(tensor, mesh, placements))
        for mine, wanted in zip(got, expected, strict=True):
            assert mine.keys() == wanted.keys()
            for name, tensor in wanted.items():
                if "muon" in kind:
                    assert torch.equal(mine[name], tensor), name
                else:
                    torch.testing.assert_close(mine[name], tensor, rtol=1e-5, atol=1e-6, msg=name)

    World.mock(math.prod(sizes.values())).run(on_rank)


def test_replaced_shards_are_updated() -> None:
    """fully_shard replaces shards before its first forward if it pins or pads them."""

    def run(world: World) -> None:
        mesh = world.mesh(dp_shard=2).device_mesh
        p = nn.Parameter(divided(torch.ones(4, 3), mesh, [Shard(0)]))
        update = Update(SGDConfig(lr=1.0), {"p": p})
        p._local_tensor = p._local_tensor.clone()
        p.grad = divided(torch.ones(4, 3), mesh, [Shard(0)])
        update.apply(rate=lambda peak: peak)
        assert not p.to_local().any()

    World.mock(2).run(run)


def test_muon_updates_experts_as_torch_updates_the_matrix_of_each() -> None:
    name, experts = "experts", 3
    start = torch.randn(experts, 6, 4, generator=torch.Generator().manual_seed(0))
    facts = {name: ParameterFacts(name=name, shape=tuple(start.shape), is_hidden_matrix=True)}
    plain = [nn.Parameter(matrix.clone()) for matrix in start]
    optimizer = torch.optim.Muon(plain, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    steps = [torch.randn_like(start) for _ in range(STEPS)]
    for step, gradient in enumerate(steps):
        optimizer.param_groups[0]["lr"] = RATES[step]
        for matrix, part in zip(plain, gradient, strict=True):
            matrix.grad = part.clone()
        optimizer.step()
    expected = torch.stack([matrix.detach() for matrix in plain])

    def updated(wrap: Callable[[Tensor], Tensor]) -> Tensor:
        p = nn.Parameter(wrap(start.clone()))
        update = Update(OPTIMIZERS["muon"], {name: p}, parameters=facts)
        for step, gradient in enumerate(steps):
            p.grad = wrap(gradient.clone())
            update.apply(rate=lambda _, step=step: RATES[step])  # type: ignore[misc]
        return full_tensor(p.detach())

    assert torch.equal(updated(lambda tensor: tensor), expected)
    layouts = {
        "experts": ({"dp_shard": 2}, [Shard(0)]),
        "columns": ({"dp_shard": 2}, [Shard(2)]),
        "experts and rows": ({"dp_shard": 2, "tp": 2}, [Shard(0), Shard(1)]),
        "rows and columns": ({"dp_shard": 2, "tp": 2}, [Shard(1), Shard(2)]),
    }
    for layout, (sizes, placements) in layouts.items():

        def on_rank(world: World, sizes: Any = sizes, placements: Any = placements) -> Tensor:
            mesh = world.mesh(**sizes).device_mesh
            return updated(lambda tensor: divided(tensor, mesh, placements))

        for of_rank in World.mock(math.prod(sizes.values())).run(on_rank):
            assert torch.equal(of_rank, expected), layout


@pytest.mark.parametrize(
    "precision",
    [
        ["train.precision=fp32"],
        ["train.precision=bf16", "train.param_dtype=bf16", "optimizer.master_weights=fp32"],
    ],
    ids=["fp32", "masters"],
)
def test_muon_distributes_matrices_over_ranks(
    precision: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: dict[int, int] = dict.fromkeys(range(4), 0)
    iterate = muon.orthogonalized

    def counted(matrix: Tensor, **iteration: Any) -> Tensor:
        done[dist.get_rank()] += matrix.numel()
        return iterate(matrix, **iteration)

    monkeypatch.setattr(muon, "orthogonalized", counted)
    layout = ["strategy=fsdp", "launch.nproc=4"]
    chosen = run_config([*SMALL, *OVERRIDES["muon"], *layout, *precision])

    def on_rank(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.backward(loader.batch(0))
        engine.update()

    World.mock(4).run(on_rank)
    # Each matrix of two blocks once.
    assert sum(done.values()) == 2 * (4 * 16 * 16 + 2 * 16 * 64)
    assert max(done.values()) == 16 * 64 + 2 * 16 * 16
