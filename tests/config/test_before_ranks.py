"""Everything that a rank would refuse is refused by the command, before a rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.configured import run_config
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch import config
from axonlaunch.config import ConfigError
from axonlaunch.models.tensors.initialization import Normal
from axonlaunch.preflight import checks

TOKENS = ["data=synthetic_tokens", "data.sequence_length=8", "launch.nproc=2"]


class Scaled(nn.Module):
    """A user's model with a parameter of any type and shape."""

    def __init__(self, *, scale: tuple[int, ...] = (1,), dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(256, 8, dtype=dtype)
        self.head = nn.Linear(8, 256)
        self.scale = nn.Parameter(torch.ones(scale))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens).float()) * self.scale
        return logits


def refusals(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        run_config(overrides)
    return [str(problem) for problem in refused.value.problems]


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["strategy=tensor"], "none"),
        (["strategy=pipeline"], "none"),
        (["strategy.context.degree=2"], "ddp"),
        (["strategy=tensor", "strategy.context.degree=2"], "ddp"),
        (["strategy=hsdp"], "fsdp"),
    ],
    ids=" ".join,
)
def test_each_rank_reads_the_run_that_was_checked(
    overrides: list[str], kind: str, tmp_path: Path
) -> None:
    written = run_config([*TOKENS[:2], *overrides])
    (tmp_path / "config.yaml").write_text(config.to_yaml(written))
    assert config.read_frozen(tmp_path) == written
    assert written.strategy.data_parallel == kind


def test_replica_setting_without_replicas_is_refused() -> None:
    assert refusals(*TOKENS, "strategy=tensor", "strategy.ddp.sync=no_sync") == [
        "strategy.ddp.sync=no_sync: data_parallel is none; use strategy.data_parallel=ddp or "
        "remove this setting"
    ]


def test_a_scalar_parameter_can_not_be_sharded() -> None:
    ax.register_model("scaled")(lambda: Scaled(scale=()))
    run_config(["model=scaled", *TOKENS, "strategy=zero1"])
    assert refusals("model=scaled", *TOKENS, "strategy=fsdp") == [
        "strategy.data_parallel=fsdp: scale has no dim that can be sharded; give it the shape [1], "
        "or use ddp or zero1"
    ]


def test_parameters_of_two_types_can_not_be_gathered_together() -> None:
    ax.register_model("scaled")(lambda: Scaled(dtype=torch.bfloat16))
    run_config(["model=scaled", *TOKENS, "strategy=ddp"])
    assert refusals("model=scaled", *TOKENS, "strategy=fsdp") == [
        "strategy.data_parallel=fsdp: scale is float32 and embed.weight is bfloat16, but they are "
        "gathered together; give them one type, or use ddp"
    ]


def test_weights_of_running_statistics_are_not_gathered_in_a_lower_type() -> None:
    normed = [
        "model=custom",
        "model.target=support.normed:build",
        "data=digits",
        "data.image_size=8",
    ]
    half = [*normed, "train.precision=bf16"]
    run_config([*half, "strategy=zero1"])
    run_config([*normed, "strategy=fsdp"])
    reason = "2 has running statistics in fp32, and torch refuses weights in bf16 with them"
    assert refusals(*half, "strategy=fsdp") == [
        f"strategy.data_parallel=fsdp: {reason}, the type in which fsdp gathers weights; use "
        "ddp or zero1, which keep them in fp32, or train.precision=fp32"
    ]
    assert refusals(*half, "train.param_dtype=bf16", "strategy=ddp") == [
        f"train.param_dtype=bf16: {reason}; use fp32"
    ]


def test_a_parameter_that_starts_as_nothing() -> None:
    ax.register_model("scaled", initializers=lambda _: {"embed.weight": Normal(0.02)})(Scaled)
    assert refusals("model=scaled", *TOKENS) == [
        "model=scaled: initializers= returns no entry for scale, head.weight, head.bias; add it"
    ]


@pytest.mark.parametrize(
    ("overrides", "num_checkpoints"),
    [
        (["checkpoint.keep_last=3", "checkpoint.keep_best=1"], 5),
        (["checkpoint.every=[10,20,30]"], 4),
        (["checkpoint.every=[10,100]"], 2),
        (["checkpoint.every=10", "checkpoint.keep_every_n_steps=15"], 6),
    ],
)
def test_disk_is_compared_with_all_checkpoints_that_are_kept(
    overrides: list[str], num_checkpoints: int
) -> None:
    loaded = config.load(["train.steps=100", *overrides])
    assert checks._num_checkpoints(loaded) == num_checkpoints
