"""A parameter without a gradient is named in the error, if replicas wait for it."""

from __future__ import annotations

import pytest
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch.config import ConfigError


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.extra = nn.Linear(3, 3)
        self.head = nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


class SkipsOnce(Idle):
    """Leaves a layer out of one of its forwards."""

    def __init__(self, without: int) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.without, self.forwards = without, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.forwards += 1
        hidden = self.embed(tokens)
        if self.forwards != self.without:
            hidden = self.extra(hidden)
        logits: Tensor = self.head(hidden)
        return logits


@pytest.fixture(autouse=True)
def _registered() -> None:
    ax.register_model("idle", inputs="tokens")(Idle)
    ax.register_model("skips_once", inputs="tokens")(SkipsOnce)


def losses(*overrides: str, model: str = "idle") -> list[float]:
    chosen = run_config(
        [
            *(f"model={model}", "data=synthetic_tokens", "data.sequence_length=8", *overrides),
            *("launch.nproc=2", "launch.backend=mock", "train.global_batch_size=4"),
        ]
    )

    def run(world: ax.World) -> list[float]:
        engine, loader = rank_engine(chosen, world)
        return [float(engine.train_step(loader.batch(step)).loss) for step in range(3)]

    return ax.World.mock(2).run(run)[0]


def test_overlapped_ddp_names_unused_parameter() -> None:
    with pytest.raises(Exception, match=r"rank \d|strategy") as reported:
        losses("strategy=ddp")
    error = reported.value.__cause__ or reported.value
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "strategy.ddp.sync=overlapped: extra.weight, extra.bias got no gradient, but the other "
        "ranks wait for it; use synchronous"
    )


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("model.arguments.without=3",), "extra.weight, extra.bias"),
        # The previous micro-batch used the layer; the last one sends the gradients.
        (("model.arguments.without=6", "train.micro_batch_size=1"), "a parameter"),
    ],
    ids=["last step", "last micro-batch"],
)
def test_overlapped_ddp_names_parameter_unused_in_any_step(
    overrides: tuple[str, ...], name: str
) -> None:
    with pytest.raises(Exception, match=r"rank \d|strategy") as reported:
        losses("strategy=ddp", *overrides, model="skips_once")
    error = reported.value.__cause__ or reported.value
    assert isinstance(error, ConfigError)
    assert str(error) == (
        f"strategy.ddp.sync=overlapped: {name} got no gradient, but the other ranks wait for it; "
        "use synchronous"
    )


@pytest.mark.parametrize(
    "overrides",
    [("strategy=ddp", "strategy.ddp.sync=synchronous"), ("strategy=zero1",)],
    ids=["what it says to write", "zero1"],
)
def test_unused_parameter_without_overlap_equals_fsdp(overrides: tuple[str, ...]) -> None:
    assert losses(*overrides) == pytest.approx(losses("strategy=fsdp"), rel=1e-5)
