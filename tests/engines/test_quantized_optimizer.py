"""A custom optimizer with 8-bit states saves them and resumes exactly."""

from __future__ import annotations

import pytest
import torch
from support.configured import run_config
from support.quantized_optimizer import Adam8bit
from torch import nn

from axonlaunch.config import ConfigError
from axonlaunch.config.optimization.optimizer import CustomOptimizerConfig
from axonlaunch.config.optimization.parameter_groups import states_of
from axonlaunch.engines.optimizer.step import Update

CONFIG = CustomOptimizerConfig(target="support.quantized_optimizer:Adam8bit", lr=0.01)
TINY = [
    *("model.hidden_size=64", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("data=synthetic_tokens", "data.sequence_length=8", "train.global_batch_size=4"),
]
CUSTOM = [*TINY, "optimizer=custom", "optimizer.target=support.quantized_optimizer:Adam8bit"]


@pytest.mark.parametrize(
    "shape", [(6, 4), (64, 64), (63, 65), (4097, 100), (3, 700, 100), (50257, 8), (70001,), (4096,)]
)
def test_quantized_optimizer_states_are_detected_for_each_shape(
    shape: tuple[int, ...],
) -> None:
    parameter = nn.Parameter(torch.randn(shape))
    parameter.grad = torch.randn(shape)
    optimizer = Adam8bit([parameter], lr=0.01)
    optimizer.step()
    kept = {
        name: (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else ()
        for name, value in optimizer.state[parameter].items()
    }
    found = {
        name: () if state.dtype == "int" else (state.shape(shape), f"torch.{state.dtype}")
        for name, state in states_of(CONFIG, shape).items()
    }
    assert found == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_states_are_saved_and_loaded_exactly(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = {"large": torch.randn(70, 65), "flat": torch.randn(5000), "small": torch.randn(6, 4)}

    def parameters(values: dict[str, torch.Tensor]) -> dict[str, nn.Parameter]:
        return {
            name: nn.Parameter(value.detach().to(dtype).clone()) for name, value in values.items()
        }

    def stepped(update: Update, updated: dict[str, nn.Parameter], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in updated.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        update.apply(rate=lambda peak: peak)

    straight = parameters(start)
    first = Update(CONFIG, straight)
    stepped(first, straight, 1)
    saved = {key: value.clone() for key, value in first.state_dict().items()}
    assert saved["large.m"].dtype is torch.uint8
    assert saved["small.m"].dtype is torch.float32
    resumed = parameters(dict(straight))
    second = Update(CONFIG, resumed)
    second.load_state_dict(saved)
    for update, updated in ((first, straight), (second, resumed)):
        stepped(update, updated, 2)
        stepped(update, updated, 3)
    assert all(torch.equal(straight[name], resumed[name]) for name in start)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=fsdp"], "Adam8bit: it needs all elements of a parameter to update one"),
        (
            ["strategy=ddp", "optimizer.target=support.quantized_optimizer:AdamOfSubclass"],
            "AdamOfSubclass: keeps a state m that is a Subclass; keep a plain tensor",
        ),
    ],
)
def test_quantized_states_that_cannot_be_saved_are_refused_before_a_run(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config([*CUSTOM, *overrides, "launch.nproc=2"])


def test_undetected_optimizer_state_is_error() -> None:
    parameter = nn.Parameter(torch.randn(6, 4))
    update = Update(CONFIG, {"p": parameter})
    parameter.grad = torch.randn(6, 4)
    update.apply(rate=lambda peak: peak)
    update.optimizers[0].state[parameter]["late"] = torch.zeros(3)
    with pytest.raises(ConfigError, match="keeps late of p, and no such state when it was tried"):
        update.state_dict()
