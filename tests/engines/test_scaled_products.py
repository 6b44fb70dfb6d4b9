"""Products of factors in 8 bits equal torchao's to the bit, and agree in every layout."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.precision import MATMUL_FORMATS, Float8Format
from axonlaunch.engines.precision.scaled_products import (
    ScaledProducts,
)
from axonlaunch.engines.tensor.rounded_layers import RoundedLinear, round_products
from axonlaunch.models.facts.scaled_layers import scaled_layers
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec

NAMES = sorted(n for n, each in MATMUL_FORMATS.items() if isinstance(each, Float8Format))
MODEL = [
    *("model=gpt", "model.num_hidden_layers=2", "model.hidden_size=64", "data=synthetic_tokens"),
    *("model.num_attention_heads=4", "data.sequence_length=32", "train.global_batch_size=8"),
]
SETTINGS = [*MODEL, "scheduler=constant", "train.steps=8", "checkpoint.every=0"]
LAYOUTS = {
    "micro-batches": ["strategy=single", "train.micro_batch_size=2"],
    "ddp": ["strategy=ddp", "launch.nproc=2"],
    "zero1": ["strategy=zero1", "launch.nproc=2"],
    "fsdp": ["strategy=fsdp", "launch.nproc=2"],
    "hsdp": ["strategy=hsdp", "launch.nproc=4", "strategy.fsdp.replicate=2"],
    "tensor": ["strategy=tensor", "launch.nproc=2"],
    "sequence parallel": [
        *("strategy=tensor", "launch.nproc=2", "strategy.tensor.sequence_parallel=true"),
    ],
    "context": ["strategy=fsdp", "launch.nproc=2", "strategy.context.degree=2"],
    "pipeline": ["strategy=pipeline", "launch.nproc=2"],
    "zero bubble": [
        *("strategy=pipeline", "launch.nproc=2", "model.num_hidden_layers=4"),
        "strategy.pipeline.schedule=zbv_zero_bubble",
    ],
    "hybrid": ["strategy=hybrid", "launch.nproc=8"],
}


def linear_layers(*, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 32, bias=False)).to(dtype)


def in_8_bits(model: nn.Sequential, name: str) -> nn.Sequential:
    round_products([each for each in model if isinstance(each, nn.Linear)], MATMUL_FORMATS[name])
    return model


def trained(model: nn.Module, *, dtype: torch.dtype) -> list[Tensor]:
    """Train some steps; return the losses and gradients of each."""
    torch.manual_seed(1)
    x, target = torch.randn(4, 8, 64, dtype=dtype), torch.randn(4, 8, 32, dtype=dtype)
    optimizer, values = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        values += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # torchao's libraries for GPUs can't be loaded
def test_training_in_8_bits_equals_torchao_to_the_bit(name: str, dtype: torch.dtype) -> None:
    torchao: Any = pytest.importorskip("torchao.float8")
    recipe = torchao.Float8LinearConfig.from_recipe_name(name.removeprefix("fp8_"))
    recipe = replace(recipe, emulate=True, round_scales_to_power_of_2=True)
    model = linear_layers(dtype=dtype)
    expected = torchao.convert_to_float8_training(copy.deepcopy(model), config=recipe)
    pairs = zip(
        trained(in_8_bits(model, name), dtype=dtype), trained(expected, dtype=dtype), strict=True
    )
    assert all(torch.equal(actual, value) for actual, value in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_a_factor_is_rounded_like_the_full_factor(name: str) -> None:
    """Scales of a rank's rows or columns differ from those of all by powers of two."""
    torch.manual_seed(0)
    layer: Any = in_8_bits(linear_layers(dtype=torch.float32), name)[0]
    sizes = torch.logspace(-3, 1, 64)  # each column has another largest number
    matrix = torch.randn(48, 64).sign() * (1 + torch.rand(48, 64)) * sizes
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):

        def rounded(part: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            codes, inverse_scale = layer.product.round_factor(part, dtype)
            return codes.float() * inverse_scale

        full = rounded(matrix)
        assert not torch.equal(full, matrix)
        for dim in (0, 1):
            parts = torch.cat([rounded(part) for part in matrix.chunk(4, dim)], dim)
            assert torch.equal(parts, full)


@pytest.mark.parametrize("tokens", [1, 24])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_tokens_need_not_be_multiples_of_16(name: str, tokens: int) -> None:
    layer = in_8_bits(linear_layers(dtype=torch.float32), name)[0]
    x = torch.randn(tokens, 64)
    layer(torch.cat([x, x.new_zeros(8, 64)])).sum().backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_factor_of_zeros_gives_zeros_and_an_infinite_one_nan(name: str) -> None:
    layer = in_8_bits(linear_layers(dtype=torch.float32), name)[2]
    assert torch.equal(layer(torch.zeros(4, 128)), torch.zeros(4, 32))
    assert layer(torch.full((4, 128), torch.inf)).isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # torch's compiler imports deprecated parts of torch
def test_compiled_products_equal_eager_ones(name: str) -> None:
    model = in_8_bits(linear_layers(dtype=torch.float32), name)
    expected = trained(copy.deepcopy(model), dtype=torch.float32)
    actual = trained(torch.compile(model), dtype=torch.float32)  # type: ignore[arg-type]
    for value, other in zip(actual, expected, strict=True):
        assert (value - other).norm() <= 1e-5 * other.norm()


def losses(overrides: list[str]) -> list[float]:
    chosen = run_config([*SETTINGS, *overrides])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> list[float]:
        engine, loader = rank_engine(chosen, world)
        return [float(engine.train_step(loader.batch(step)).loss) for step in range(8)]

    return World.mock(chosen.launch.nproc).run(run)[0]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(layout: str, name: str) -> None:
    overrides = [f"train.matmul_dtype={name}", *LAYOUTS[layout]]
    depth = [each for each in overrides if "num_hidden_layers" in each]
    expected = losses([overrides[0], "strategy=single", *depth])
    actual = losses(overrides)
    assert actual[:1] == pytest.approx(expected[:1], rel=5e-5)
    # Sums in another order differ by 1e-7. Once this rounds a factor to its other neighbor, losses
    # differ as much as after a change of the weights by 1e-7: by up to 9e-4.
    assert actual == pytest.approx(expected, rel=3e-3)
    without = losses(["strategy=single", *depth])
    assert abs(without[0] - expected[0]) > 1e-4 * expected[0]


def test_linear_layers_of_blocks_compute_in_8_bits_and_excluded_ones_do_not() -> None:
    chosen = run_config(
        [*SETTINGS, "train.matmul_dtype=fp8_rowwise", "train.matmul_exclude=[layers.1.*,o_proj]"]
    )

    def run(world: World) -> set[str]:
        engine, _ = rank_engine(chosen, world)
        [model] = engine.modules
        return {n for n, layer in model.named_modules() if isinstance(layer, RoundedLinear)}

    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"]
    expected = {f"layers.0.{name}" for name in [*layers, "mlp.down_proj"]}
    assert World.mock(1).run(run)[0] == expected


def test_layers_of_a_class_share_a_class_so_blocks_are_compiled_once() -> None:
    model = linear_layers(dtype=torch.float32)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    round_products(layers, MATMUL_FORMATS[NAMES[0]])
    assert len({type(layer) for layer in layers}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_without_tokens_has_zero_gradients(name: str) -> None:
    layer = in_8_bits(nn.Sequential(nn.Linear(32, 16)), name)
    x = torch.empty(0, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert not layer[0].weight.grad.any()  # type: ignore[union-attr, operator]


class Router(nn.Module):
    """A router that is a module beside its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 20)


class Mixture(nn.Module):
    """A layer with 20 experts, whose router is a child of a module beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(32, 32)
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(20))


def test_router_in_a_sibling_module_of_experts_is_not_scaled() -> None:
    config = run_config([*MODEL, "train.matmul_dtype=fp8_rowwise"])
    spec = ModelSpec(build=lambda _: Mixture(), loss=cross_entropy_sum)
    layers = scaled_layers(config, spec, Mixture())
    assert [name for name in layers if not name.startswith("experts.")] == ["attention"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([*MODEL, "model.hidden_size=40"], "layers.0.self_attn.q_proj has 40 inputs, not a multi"),
        (
            [
                *MODEL,
                "strategy=tensor",
                "launch.nproc=8",
                "strategy.tensor.degree=8",
                "model.num_attention_heads=8",
            ],
            "has 8 outputs on each of 8 tensor ranks, not a multiple of 16; add it to "
            "train.matmul_exclude",
        ),
        ([*MODEL, "train.matmul_exclude=[q_prj]"], "q_prj matches no layer"),
        ([*MODEL, "train.matmul_exclude=['*']"], "leaves no layer; use train.matmul_dtype=null"),
        ([*MODEL, "adapter=lora", "adapter.base=int8"], "would be rounded a second time"),
        ([*MODEL, "hardware=a100_80gb"], "hardware=a100_80gb has no fp8_tflops"),
        (
            [
                *(*MODEL, "strategy=tensor", "launch.nproc=2", "train.compile=true"),
                "strategy.tensor.sequence_parallel=true",
                "strategy.tensor.async_collectives=true",
            ],
            "torch overlaps no products of rounded numbers",
        ),
    ],
)
def test_products_in_8_bits_that_a_run_cannot_have_are_refused(
    overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config([*overrides, "train.matmul_dtype=fp8_rowwise"])
    assert problem in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_halves_of_backward_compute_each_product_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As zero-bubble schedules do: first the gradients of inputs, later those of weights."""
    computed: list[str] = []

    def counted(product: str) -> Any:
        compute = getattr(ScaledProducts, product)

        def call(self: ScaledProducts, *factors: Tensor) -> Tensor:
            computed.append(product)
            return compute(self, *factors)

        return call

    for product in ("input_gradient", "weight_gradient"):
        monkeypatch.setattr(ScaledProducts, product, counted(product))
    model = in_8_bits(linear_layers(dtype=torch.bfloat16), name)
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert sorted(computed) == 2 * ["input_gradient"] + 2 * ["weight_gradient"]
    computed.clear()
    loss = model(x).sum()
    [of_input], groups = stage_backward_input([loss], None, [x], model.parameters())
    assert computed == 2 * ["input_gradient"]
    stage_backward_weight(model.parameters(), groups)
    assert computed == 2 * ["input_gradient"] + 2 * ["weight_gradient"]
    assert of_input is not None
    for gradient, whole in zip(
        [of_input, *(p.grad for p in model.parameters())], expected, strict=True
    ):
        assert torch.equal(gradient, whole)
