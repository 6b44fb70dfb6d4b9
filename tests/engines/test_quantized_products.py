"""Factors rounded for quantization-aware training equal torchao's, and agree in every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.configured import run_config
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor

from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.precision import QuantizedFormat
from axonlaunch.engines.precision.quantized_products import QuantizedProducts
from axonlaunch.engines.tensor.parallel_layers.layers import RowParallelLinear
from axonlaunch.engines.tensor.rounded_layers import round_products
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.facts.scaled_layers import note_on_experts

GROUP = 32
FORMAT = QuantizedFormat(name="qat_int8_int4", input_bits=8, weight_bits=4, input_multiple=GROUP)
MODEL = [
    *("model=gpt", "model.num_hidden_layers=2", "model.hidden_size=64", "data=synthetic_tokens"),
    *("model.num_attention_heads=4", "data.sequence_length=32", "train.global_batch_size=8"),
]


def linear_layers(*, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 32, bias=False)).to(dtype)


def quantized(model: nn.Sequential) -> nn.Sequential:
    round_products([each for each in model if isinstance(each, nn.Linear)], FORMAT)
    return model


def torchao_model(model: nn.Sequential) -> nn.Module:
    """Return torchao's model of torchtune's quantizer."""
    qat: Any = pytest.importorskip("torchao.quantization.qat")
    quantizer = qat.Int8DynActInt4WeightQATQuantizer(
        GROUP, precision=next(model.parameters()).dtype
    )
    prepared: nn.Module = quantizer.prepare(copy.deepcopy(model))
    return prepared


def samples(*, dtype: torch.dtype) -> Tensor:
    """Return inputs, one of which has only zeros and one only numbers above zero."""
    torch.manual_seed(1)
    x = torch.randn(4, 8, 64, dtype=dtype) * torch.logspace(-3, 3, 32).view(4, 8, 1).to(dtype)
    x[0, 0], x[1, 1] = 0, x[1, 1].abs() + 1
    return x.requires_grad_()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(2)
    output = model(x)
    (output * torch.randn_like(output)).sum().backward()
    assert x.grad is not None
    return {
        "input": x.grad,
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")  # torchao's libraries for GPUs can't be loaded
def test_quantized_outputs_equal_torchao_to_the_bit(dtype: torch.dtype) -> None:
    model = linear_layers(dtype=dtype)
    x = samples(dtype=dtype)
    expected = torchao_model(model)(x)
    assert not torch.equal(model(x), expected)
    assert torch.equal(quantized(model)(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")
def test_gradients_of_quantized_layers_are_those_of_torchao(dtype: torch.dtype) -> None:
    """torchao multiplies a gradient by a scale and its inverse, which rounds it twice."""
    model = linear_layers(dtype=dtype)
    expected = gradients(torchao_model(model), samples(dtype=dtype))
    actual = gradients(quantized(model), samples(dtype=dtype))
    assert actual.keys() == expected.keys()
    roundoff = torch.finfo(dtype).eps
    for name, gradient in actual.items():
        exact = expected[name]
        assert torch.equal(gradient == 0, exact == 0)
        assert (gradient - exact).norm() <= roundoff * exact.norm()
    weight = actual["0.weight"]
    assert 0 < (weight == 0).float().mean() < 1 / GROUP  # the largest weights of some groups


def converted_by_torchao(model: nn.Sequential) -> Any:
    """Return a copy with torchao's integers in place of weights."""
    ao: Any = pytest.importorskip("torchao.quantization")
    config = ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=ao.PerGroup(GROUP)
    )
    converted = copy.deepcopy(model)
    ao.quantize_(converted, config)
    return converted


@pytest.mark.filterwarnings("ignore")
def test_trained_weights_that_torchao_quantizes_give_the_outputs_of_training() -> None:
    model, x = linear_layers(dtype=torch.float32), samples(dtype=torch.float32)
    converted = converted_by_torchao(model)
    with torch.no_grad():
        expected, actual = converted(x), quantized(model)(x)
    assert (actual - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("dtype", "moved"), [(torch.float32, 0.0), (torch.bfloat16, 0.02)], ids=str
)
@pytest.mark.filterwarnings("ignore")
def test_torchao_makes_the_integers_of_training_or_in_bf16_neighbors_of_a_few(
    dtype: torch.dtype, moved: float
) -> None:
    """torchao computes integers in the dtype of the weights, and training computes them in fp32."""
    model = linear_layers(dtype=dtype)
    converted = converted_by_torchao(model)
    for index in (0, 2):
        weight = model[index].weight.detach()
        assert isinstance(weight, Tensor)
        products = QuantizedProducts(FORMAT)
        _, scale = products._in_groups(weight)
        integers = [
            (values.float().unflatten(-1, (-1, GROUP)) / scale).round()
            for values in (products.rounded_weight(weight), converted[index].weight.dequantize())
        ]
        difference = (integers[1] - integers[0]).abs()
        assert (difference > 0).float().mean() <= moved
        assert difference.max() <= 1


def test_scales_of_tokens_in_fp16_are_those_of_fp32() -> None:
    """A range may exceed the largest number of fp16."""
    x = torch.stack((torch.linspace(-40000, 40000, 64), torch.linspace(-1, 3, 64))).half()
    products = QuantizedProducts(FORMAT)
    for scale, exact in zip(
        products._input_scale(x), products._input_scale(x.float()), strict=True
    ):
        assert torch.equal(scale, exact)
    [layer] = quantized(linear_layers(dtype=torch.float16)[:1])
    assert layer(x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_with_parts_of_inputs_round_like_one_process(dtype: torch.dtype) -> None:
    """Each rank has one half of the features, of which the second has far larger numbers."""

    def layer(kind: Callable[..., nn.Linear]) -> nn.Sequential:
        torch.manual_seed(0)
        return quantized(nn.Sequential(kind(64, 32, dtype=dtype)))

    def inputs() -> Tensor:
        return (samples(dtype=dtype).detach() * torch.arange(1, 65).to(dtype)).requires_grad_()

    expected = gradients(layer(nn.Linear), inputs())
    output = layer(nn.Linear)(inputs())
    scales = QuantizedProducts(FORMAT)._input_scale(inputs().detach())

    def run(world: World) -> None:
        parts = layer(RowParallelLinear)
        features: Any = inputs().detach().chunk(2, -1)[world.rank]
        products: Any = parts[0].product
        for part, full in zip(products._input_scale(features), scales, strict=True):
            assert torch.equal(part, full)
        allowed = 4 * torch.finfo(dtype).eps
        assert (parts(inputs()) - output).norm() <= allowed * output.norm()
        for name, gradient in gradients(parts, inputs()).items():
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            assert (full - expected[name]).norm() <= allowed * expected[name].norm()

    World.mock(2).run(run)


def test_tokens_without_numbers_have_zero_gradients() -> None:
    layer = quantized(nn.Sequential(nn.Linear(32, 16)))
    layer(torch.empty(0, 32)).sum().backward()
    assert not layer[0].weight.grad.any()  # type: ignore[union-attr, operator]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler imports deprecated parts of torch
def test_compiled_quantized_layers_equal_eager_ones() -> None:
    model = quantized(linear_layers(dtype=torch.float32))
    expected = gradients(copy.deepcopy(model), samples(dtype=torch.float32))
    compiled: Any = torch.compile(model)
    for name, gradient in gradients(compiled, samples(dtype=torch.float32)).items():
        exact = expected[name.removeprefix("_orig_mod.")]
        assert (gradient - exact).norm() <= 1e-5 * exact.norm()


def test_groups_that_a_layer_or_a_rank_would_cut_are_refused_with_sizes_that_fit() -> None:
    one = [*MODEL, "train.matmul_dtype=qat_int8_int4"]
    with pytest.raises(ConfigError) as refused:
        run_config([*one, "train.matmul_group_size=48"])
    message = (
        "train.matmul_group_size=48: layers.0.self_attn.q_proj has 64 inputs, not a multiple of "
        "it; use 8, 16, 32 or 64, or add the layer to train.matmul_exclude"
    )
    assert message in str(refused.value)
    two = [*one, "strategy=tensor", "launch.nproc=2"]
    run_config([*two, "train.matmul_group_size=32"])
    with pytest.raises(ConfigError) as refused:
        run_config([*two, "train.matmul_group_size=64"])
    message = (
        "o_proj has 32 inputs on each of 2 tensor ranks, not a multiple of it; use 4, 8, 16 or 32"
    )
    assert message in str(refused.value)


def test_a_note_says_which_share_of_a_mixture_is_rounded() -> None:
    """Of 128 features, attention has a half of the keys and values; experts have a width of 128."""
    small = ["data=synthetic_tokens", "data.sequence_length=32", "train.global_batch_size=8"]

    def note(*model: str) -> str | None:
        config = run_config([*model, *small, "train.matmul_dtype=qat_int8_int4"])
        return note_on_experts(config, spec_for(config), on_meta(config, seed=0))

    square = 128 * 128
    rounded, experts, router = (2 + 2 / 2 + 3) * square, 8 * 3 * square, 8 * 128
    share = round(100 * rounded / (rounded + experts + router))
    assert note("model=moe_debug") == (
        f"train.matmul_dtype=qat_int8_int4: rounds {share}% of the blocks' weights, because packed "
        "experts are left out"
    )
    assert note("model=gpt", "model.hidden_size=64", "model.num_attention_heads=4") is None


def test_halves_of_backward_compute_each_gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As zero-bubble schedules do: first the gradients of inputs, later those of weights."""
    computed: list[str] = []

    def counted(part: str) -> Any:
        compute = getattr(QuantizedProducts, part)

        def call(self: QuantizedProducts, *factors: Tensor) -> Tensor:
            computed.append(part)
            gradient: Tensor = compute(self, *factors)
            return gradient

        return call

    for part in ("through_input", "through_weight"):
        monkeypatch.setattr(QuantizedProducts, part, counted(part))
    model = quantized(linear_layers(dtype=torch.float32))
    x = samples(dtype=torch.float32)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    computed.clear()
    loss = model(x).sum()
    [of_input], groups = stage_backward_input([loss], None, [x], model.parameters())
    assert computed == 2 * ["through_input"]
    stage_backward_weight(model.parameters(), groups)
    assert computed == 2 * ["through_input"] + 2 * ["through_weight"]
    found = [of_input, *(p.grad for p in model.parameters())]
    for gradient, whole in zip(found, expected, strict=True):
        assert gradient is not None
        assert torch.equal(gradient, whole)
