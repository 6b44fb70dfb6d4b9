"""LoRA on a quantized base: layouts train what one process trains, on equal weights."""

from __future__ import annotations

import weakref
from importlib import metadata

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from support.configured import run_config
from support.gathered import gathered, held
from support.parity import assert_trains_as_one_process
from support.rank_engine import rank_engine
from torch import Tensor

from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.models.adapters.quantized_base import quantized_names, recomputing_weights
from axonlaunch.models.build import build_model, construct
from axonlaunch.models.facts.parameter_facts import TrainingShares
from axonlaunch.models.tensors.packed_blocks import BLOCK_FORMATS, BlockFormat

MODEL = [
    *("model=llama_debug", "model.hidden_size=128", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=2"),
    *("model.intermediate_size=256", "model.vocab_size=64"),
    *("data=synthetic_tokens", "data.vocab_size=64", "data.sequence_length=8"),
    *("train.grad_clip=null", "scheduler=constant", "checkpoint.every=0"),
    *("train.global_batch_size=8", "adapter=lora", "adapter.rank=4"),
]
NF4 = [*MODEL, "adapter.base=nf4"]
EXPERTS = (
    "model=moe_debug model.num_experts=4 model.moe_intermediate_size=128 model.balance=none "
    "strategy=fsdp adapter.targets=[experts.*,v_proj]"
)
LAYOUTS = {
    "ddp": (2, "strategy=ddp adapter.base=int8"),
    "fsdp": (2, "strategy=fsdp"),
    "recomputed": (2, "strategy=fsdp train.activation_checkpointing=full adapter.rslora=true"),
    "hsdp": (4, "strategy=hsdp strategy.fsdp.replicate=2 adapter.base=int8"),
    "tensor": (2, "strategy=tensor adapter.dora=true optimizer=adamw_8bit"),
    "pipeline": (2, "strategy=pipeline adapter.dora=true adapter.base=int8"),
    "hybrid": (8, "strategy=hybrid strategy.tensor.degree=2 strategy.pipeline.degree=2"),
    "offload": (2, "strategy=fsdp strategy.fsdp.cpu_offload=full"),
    "zero1": (2, "strategy=zero1"),
    "context": (2, "strategy=fsdp strategy.context.degree=2"),
    "experts": (2, EXPERTS),
    "expert": (2, f"{EXPERTS} strategy.expert.degree=2 adapter.base=int8"),
    "expert-tensor": (4, f"{EXPERTS} strategy.expert.degree=2 strategy.tensor.degree=2"),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_with_quantized_base_trains_as_one_process(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    assert_trains_as_one_process([*NF4, *overrides.split()], ranks)


@pytest.mark.parametrize("strategy", ["tensor", "fsdp"])
def test_quantized_weights_of_two_ranks_equal_those_of_bitsandbytes(strategy: str) -> None:
    chosen = run_config([*NF4, f"strategy={strategy}", "launch.nproc=2"])
    ranks = World.mock(2).run(lambda world: held(rank_engine(chosen, world)[0].named_parameters()))
    stored, plain = gathered(ranks), build_model(run_config(MODEL), seed=0)
    names = quantized_names(build_model(chosen, seed=0))
    assert len(names) == 2 * 7
    for name in names:
        codes, state = quantize_4bit(plain.get_parameter(name).detach(), quant_type="nf4")
        values = BLOCK_FORMATS["nf4"].dequantize(stored[name], torch.float32)
        assert torch.equal(values, dequantize_4bit(codes, state))


@pytest.mark.parametrize("base", BLOCK_FORMATS)
def test_share_of_quantized_experts_is_that_of_their_stored_bytes(base: str) -> None:
    chosen = ["model=moe_debug", "model.balance=none", "data=synthetic_tokens", "adapter=lora"]
    config = run_config([*chosen, f"adapter.base={base}", "strategy=single", "launch.nproc=1"])
    sizes = {name: p.nbytes for name, p in construct(config, seed=0).named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert TrainingShares.of(config).experts == experts / sum(sizes.values())


@pytest.mark.parametrize("base", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantized_values_are_rounded_once(base: str, dtype: torch.dtype) -> None:
    block_format = BLOCK_FORMATS[base]
    values = torch.randn(3, 4, 192).index_fill(0, torch.tensor([1]), 0.0)
    packed = block_format.quantize(values)
    assert packed.nbytes * 64 == values.numel() * {"nf4": 36, "int8": 68}[base]
    kept = block_format.dequantize(packed, torch.float32)
    assert float((kept - values).norm() / values.norm()) < {"nf4": 0.1, "int8": 0.01}[base]
    assert torch.equal(block_format.dequantize(packed, dtype), kept.to(dtype))
    assert torch.equal(block_format.quantize(values[..., 64:]), packed[..., 1:, :])


def test_backward_keeps_quantized_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    dequantize = BlockFormat.dequantize

    def watched(self: BlockFormat, packed: Tensor, dtype: torch.dtype) -> Tensor:
        values = dequantize(self, packed, dtype)
        alive.append(weakref.ref(values))
        return values

    monkeypatch.setattr(BlockFormat, "dequantize", watched)
    model = build_model(run_config([*NF4, "strategy=single"]), seed=0)
    block: torch.nn.Module = model.layers[0]  # type: ignore[index]
    forward = recomputing_weights(block.mlp)  # type: ignore[union-attr]
    x = torch.randn(2, 4, 128, requires_grad=True)
    output = forward(x)
    assert len(alive) == 3
    assert not any(reference() is not None for reference in alive)
    output.sum().backward()
    assert len(alive) == 6
    expected = torch.autograd.grad(block.mlp(x).sum(), x)[0]  # type: ignore[union-attr]
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activation_checkpointing_of_a_quantized_block_keeps_no_activations(mode: str) -> None:
    checkpointing = f"train.activation_checkpointing={mode}"
    chosen = run_config([*NF4, "strategy=single", checkpointing])
    kept: list[weakref.ref[Tensor]] = []

    def run(world: World) -> list[bool]:
        engine, loader = rank_engine(chosen, world)
        [model] = engine.modules  # type: ignore[attr-defined]
        model.layers[0].mlp.down_proj.register_forward_pre_hook(
            lambda _, inputs: kept.append(weakref.ref(inputs[0]))
        )
        found: list[bool] = []
        model.layers[1].register_forward_pre_hook(
            lambda *_: found.append(kept[-1]() is not None), prepend=True
        )
        engine.backward(loader.batch(0))
        return found

    [found] = World.mock(1).run(run)
    assert found[0] is (mode == "none")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.intermediate_size=96"], "down_proj.weight has rows of 96 values"),
        (
            ["strategy=tensor", "strategy.tensor.degree=4", "launch.nproc=4"],
            "o_proj.weight has rows of 2 quantized blocks of 64 values, which 4 does not divide; "
            "use a degree of 1 or 2",
        ),
    ],
)
def test_weights_that_cannot_be_quantized_or_divided_are_refused(
    overrides: list[str], message: str
) -> None:
    more = [] if "strategy=tensor" in overrides else ["strategy=single"]
    heads = ["model.num_key_value_heads=4"]
    with pytest.raises(ConfigError) as refused:
        run_config([*NF4, *heads, *more, *overrides])
    assert message in str(refused.value)


def test_missing_or_old_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.44.1")
    with pytest.raises(
        ConfigError, match=r"bitsandbytes 0\.44\.1 is installed, and 0\.48 or newer"
    ):
        run_config([*NF4, "strategy=single"])
