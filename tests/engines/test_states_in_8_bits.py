"""States in 8 bits are those of bitsandbytes, in blocks that no layout cuts."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from support.configured import run_config
from support.hf_families import without_folder
from support.rank_engine import rank_engine
from torch import Tensor, nn

from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.config.optimization.optimizer import AdamWConfig, LionConfig
from axonlaunch.config.optimization.parameter_groups import state_bytes, states_of
from axonlaunch.engines.optimizer.optimizers import facts_of
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.models.tensors import packed_blocks
from axonlaunch.models.tensors.dtensor_regions import full_tensor
from axonlaunch.training.worker import load_run_state

SHAPE = (96, 128)
ADAMW = AdamWConfig(lr=1e-2, state_dtype="8bit")
SETTINGS = [
    *("model=gpt", "model.num_hidden_layers=2", "model.hidden_size=128", "data=synthetic_tokens"),
    *("data.sequence_length=16", "train.global_batch_size=8", "scheduler=constant"),
    *("optimizer=adamw_8bit", "train.steps=8", "checkpoint.every=0"),
]
LAYOUTS = {
    "single": ["strategy=single"],
    "zero1": ["strategy=zero1", "launch.nproc=2"],
    "fsdp": ["strategy=fsdp", "launch.nproc=4"],
    "tensor": ["strategy=tensor", "launch.nproc=2"],
    "zero1 tensor": ["strategy=zero1", "strategy.tensor.degree=2", "launch.nproc=4"],
    "pipeline": ["strategy=pipeline", "launch.nproc=2"],
}

MIXTURE = [
    *("model=moe_debug", "model.balance=none", "model.intermediate_size=192"),
    "model.moe_intermediate_size=192",
    *("adapter=lora", "adapter.rank=16", "adapter.targets=[experts.*,down_proj]"),
]


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randn(SHAPE, generator=generator).exp()
    return [sizes * torch.randn(SHAPE, generator=generator) for _ in range(steps)]


def start() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def quantized(values: Tensor, *, signed: bool) -> Tensor:
    """Return the values that bitsandbytes' codes of blocks of 64 have."""
    code = functional.create_dynamic_map(signed=signed)
    codes, state = functional.quantize_blockwise(values, code=code, blocksize=64)
    kept: Tensor = functional.dequantize_blockwise(codes, state)
    return kept


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter, *, rounds: bool) -> Tensor:
    """Train with an optimizer of torch or bitsandbytes, optionally with rounded states."""
    for gradient in gradients(20):
        weight.grad = gradient.clone()
        optimizer.step()
        if rounds:
            for name in ("exp_avg", "exp_avg_sq"):
                state = optimizer.state[weight][name]
                state.copy_(quantized(state, signed=name == "exp_avg"))
    return weight.detach()


def ours(config: Any) -> Tensor:
    weight = nn.Parameter(start())
    update = Update(config, {"weight": weight})
    for step, gradient in enumerate(gradients(20), start=1):
        weight.grad = gradient.clone()
        update.apply(rate=lambda peak: peak, step=step)
    assert update.state_dict()["weight.exp_avg"].dtype is torch.uint8
    return weight.detach()


def test_8bit_adamw_is_torch_adamw_with_states_quantized_by_bitsandbytes() -> None:
    weight = nn.Parameter(start())
    options: Any = {"lr": 1e-2, "betas": ADAMW.betas, "weight_decay": ADAMW.weight_decay}
    plain = torch.optim.AdamW([weight], **options, eps=ADAMW.eps, fused=True)
    assert torch.equal(ours(ADAMW), trained(plain, weight, rounds=True))


def test_8bit_adamw_is_as_close_to_fp32_states_as_that_of_bitsandbytes() -> None:
    options: Any = {"lr": 1e-2, "betas": ADAMW.betas, "weight_decay": ADAMW.weight_decay}
    exact, other = nn.Parameter(start()), nn.Parameter(start())
    expected = trained(torch.optim.AdamW([exact], **options, eps=ADAMW.eps), exact, rounds=False)
    of_bitsandbytes = trained(
        bitsandbytes.optim.AdamW8bit([other], **options, eps=ADAMW.eps), other, rounds=False
    )
    assert (ours(ADAMW) - expected).norm() < (of_bitsandbytes - expected).norm()
    assert (ours(ADAMW) - expected).norm() < 0.05 * (expected - start()).norm()


def test_only_large_matrices_with_whole_blocks_have_states_in_8_bits() -> None:
    def dtypes(*shape: int) -> set[str]:
        return {s.dtype for name, s in states_of(ADAMW, shape).items() if name != "step"}

    assert dtypes(64, 64) == dtypes(2, 32, 64) == {"uint8"}
    assert dtypes(63, 64) == dtypes(4096) == dtypes(128, 96) == {"parameter"}


def test_states_in_8_bits_take_a_byte_and_a_sixteenth_for_each_element() -> None:
    facts = facts_of({"weight": torch.empty(1024, 512, device="meta")}).values()
    elements = 1024 * 512
    assert state_bytes(ADAMW, facts) == 2 * elements * 17 // 16 + 4
    assert state_bytes(LionConfig(state_dtype="8bit"), facts) == elements * 17 // 16


def train(
    overrides: list[str], *, steps: int = 2, folder: Path | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train some steps, after those of a checkpoint; return the losses and the states."""
    chosen = run_config([*SETTINGS, *overrides])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> tuple[list[float], dict[str, Tensor]]:
        engine, loader = rank_engine(chosen, world)
        load_run_state(chosen, engine, world)
        first = engine.step
        losses = [float(engine.train_step(loader.batch(first + n)).loss) for n in range(steps)]
        state = engine.state_dict()
        if folder is not None:
            saver = Saver(folder, world=world, retention=Retention(newest=1))
            saver.save(state, step=engine.step, samples=8 * engine.step)
        return losses, {name: full_tensor(value) for name, value in state["optimizer"].items()}

    ranks = World.mock(chosen.launch.nproc).run(run)
    return ranks[0][0], {name: value for _, states in ranks for name, value in states.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_states_in_8_bits_are_resumed_to_the_bit_in_every_layout(
    layout: str, tmp_path: Path
) -> None:
    _, expected = train(LAYOUTS["fsdp"], folder=tmp_path)
    resumed = [*LAYOUTS[layout], f"checkpoint.resume={tmp_path}"]
    _, loaded = train(resumed, steps=0)
    assert any(value.dtype is torch.uint8 for value in loaded.values())
    for name, value in loaded.items():
        assert torch.equal(value, expected[name]), name
    losses, _ = train(resumed)
    assert losses == pytest.approx(train(["strategy=single"], steps=4)[0][2:], rel=1e-5)


def _custom(target: str) -> list[str]:
    return ["strategy=single", "optimizer=custom", f"optimizer.target={target}"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [*LAYOUTS["tensor"], "model.hidden_size=64", "model.num_attention_heads=2"],
            "rows of 64 values, and strategy.tensor.degree=2 shards them within blocks of 64",
        ),
        (
            [*MIXTURE, "strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=2"],
            r"lora_B.weight has rows of 128 values, and strategy.expert.degree=2 shards them",
        ),
        (
            [
                *(*LAYOUTS["tensor"], "model=llama_debug", "model.intermediate_size=192"),
                *("adapter=lora", "adapter.rank=32"),
            ],
            r"down_proj.lora_A.weight has rows of 192 values, and strategy.tensor.degree=2 shards",
        ),
        (
            [*MIXTURE, *LAYOUTS["tensor"], "adapter.targets=[experts.*]"],
            r"down_proj_lora.lora_A.weight has rows of 192 values, and strategy.tensor.degree=2",
        ),
        (["optimizer=muon", "optimizer.state_dtype=8bit"], "muon updates full matrices"),
        (
            [*_custom("torch.optim:Adagrad"), "optimizer.state_dtype=8bit"],
            "creates states before its first step, in the dtype of the weights; use parameter",
        ),
        (
            [*_custom("support.quantized_optimizer:Fp32Adam"), "optimizer.state_dtype=8bit"],
            "optimizer=custom keeps no states in the dtype of the weights",
        ),
        (
            ["optimizer=sgd", "optimizer.momentum=0", "optimizer.state_dtype=8bit"],
            "optimizer=sgd keeps no states in the dtype of the weights",
        ),
    ],
    ids=[
        "a cut block",
        "adapter of divided experts",
        "adapter of a row layer",
        "adapter of experts",
        "muon",
        "early states",
        "fp32 states",
        "no states",
    ],
)
def test_states_in_8_bits_that_a_run_cannot_have_are_refused(
    overrides: list[str], problem: str
) -> None:
    settings = [setting for setting in SETTINGS if not setting.startswith("optimizer=")]
    optimizer = [] if "optimizer=" in " ".join(overrides) else ["optimizer=adamw_8bit"]
    with pytest.raises(ConfigError, match=problem):
        run_config([*settings, *optimizer, *overrides])


def test_states_in_8_bits_of_biases_of_experts_that_shards_cut_are_refused() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 1056, "num_local_experts": 2}
    chosen = without_folder("gpt_oss", num_hidden_layers=1, num_experts_per_tok=1, **sizes)
    layout = ["strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=4"]
    problem = "gate_up_proj_bias has rows of 2112 values, and strategy.expert.degree=2 shards them"
    with pytest.raises(ConfigError, match=problem):
        run_config([*chosen, *layout, "optimizer=adamw_8bit"])


@pytest.mark.parametrize("installed", ["none", "0.40.1"])
def test_states_in_8_bits_need_bitsandbytes(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = f"bitsandbytes {installed} is installed, and 0.48 or newer is needed"
    if installed == "none":
        problem = "bitsandbytes is not installed; pip install"
        monkeypatch.setattr(packed_blocks.Needs, "is_missing", True)
    else:
        monkeypatch.setattr(metadata, "version", lambda package: installed)
    with pytest.raises(ConfigError, match=problem):
        run_config([*SETTINGS, "strategy=single"])


@pytest.mark.slow
@pytest.mark.parametrize(("first", "after"), [("8bit", "parameter"), ("parameter", "8bit")])
def test_states_of_another_dtype_in_a_checkpoint_are_refused(
    first: str, after: str, tmp_path: Path
) -> None:
    train(["strategy=single", f"optimizer.state_dtype={first}"], folder=tmp_path)
    with pytest.raises(ConfigError, match=f"optimizer.state_dtype={after}: .*; use {first}"):
        run_config([*SETTINGS, f"checkpoint.resume={tmp_path}", f"optimizer.state_dtype={after}"])
