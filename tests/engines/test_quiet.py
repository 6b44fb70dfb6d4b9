"""torch's warning about views is shown only if user code could modify one."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_state

import axonlaunch as ax


def warned(model: str) -> set[str]:
    """Return the classes that torch warns about in a sharded step."""
    chosen = run_config(
        [
            *(f"model={model}", "data=synthetic_tokens", "data.sequence_length=8"),
            *("strategy=fsdp", "launch.nproc=2", "launch.backend=mock"),
            "train.global_batch_size=4",
        ]
    )

    def run(world: ax.World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))

    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        ax.World.mock(2).run(run)
    texts = [str(w.message) for w in reported if "returned a view" in str(w.message)]
    return {text.partition("(")[2].partition(")")[0] for text in texts}


def test_no_view_warning_for_root_module() -> None:
    @ax.register_model("viewing", inputs="tokens")
    def full() -> nn.Module:
        return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

    assert warned("viewing") == set()


@pytest.mark.skipif(
    "returned a view tensor" not in inspect.getsource(_fsdp_state),
    reason=f"torch {torch.__version__} warns of none",
)
def test_view_warning_for_user_blocks_is_shown() -> None:
    ax.register_model("chain", inputs="tokens", layers="blocks", ends=(("embed",), ("head",)))(
        Chain
    )
    assert warned("chain") == {"FSDPLinear"}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits
