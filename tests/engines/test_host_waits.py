"""In an unlogged step no rank waits for its device, in any layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.configured import run_config
from support.host_waits import HostWaits
from support.parity_table import MODELS
from support.rank_engine import rank_engine

from axonlaunch.comm import World
from axonlaunch.engines.mesh_engine import push_to

TENSOR, PIPELINE = "strategy.tensor.degree=2", "strategy.pipeline.degree=2"
LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp": (2, ["strategy=ddp"]),
    "ddp, synchronous": (2, ["strategy=ddp", "strategy.ddp.sync=synchronous"]),
    "ddp, bf16 sums": (2, ["strategy=ddp", "strategy.reduce_dtype=bf16"]),
    "zero1": (2, ["strategy=zero1"]),
    "zero2": (2, ["strategy=zero2"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "hsdp": (4, ["strategy=hsdp", "strategy.fsdp.replicate=2"]),
    "recomputed": (2, ["strategy=fsdp", "train.activation_checkpointing=selective"]),
    "chunked loss": (2, ["strategy=fsdp", "train.loss_chunk=8"]),
    "tensor": (2, [TENSOR]),
    "sequence": (2, [TENSOR, "strategy.tensor.sequence_parallel=true"]),
    "pipeline": (2, ["strategy=pipeline", PIPELINE]),
    "zero bubble": (2, [PIPELINE, "strategy.pipeline.schedule=zbv_zero_bubble"]),
    "fsdp x pipeline": (4, ["strategy=fsdp", PIPELINE]),
    "fsdp x tensor": (4, ["strategy=fsdp", TENSOR]),
    "zero1 x tensor": (4, ["strategy=zero1", TENSOR]),
    "hybrid": (4, ["strategy=hybrid"]),
    "context": (2, ["strategy.context.degree=2"]),
}


def waits(model: str, ranks: int, *overrides: str) -> list[str]:
    """Return where ranks wait in the second step; the first one fills caches."""
    blocks = 4 if any("pipeline" in override for override in overrides) else 2
    chosen = run_config(
        [
            *(*MODELS[model], f"model.num_hidden_layers={blocks}", "launch.backend=mock"),
            *("train.global_batch_size=8", "train.precision=bf16", f"launch.nproc={ranks}"),
            *overrides,
        ]
    )

    def run(world: World) -> list[str]:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))
        batch = loader.batch(1)
        with HostWaits([batch.inputs, batch.targets]) as waits:
            engine.train_step(batch)
        return waits.places

    return [line for places in World.mock(ranks).run(run) for line in places]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_step_has_no_device_sync(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    assert waits("llama", ranks, *overrides) == []


@pytest.mark.slow
def test_no_device_sync_with_embedded_positions_and_tied_weights() -> None:
    assert waits("gpt", 4, "strategy=ddp", PIPELINE, "strategy.context.degree=2") == []


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["fsdp", "fsdp x tensor", "zero1"])
def test_no_device_sync_with_fp16_loss_scaling(layout: str) -> None:
    """torch's fused optimizers read the flag on the device, through a private attribute."""
    ranks, overrides = LAYOUTS[layout]
    assert waits("llama", ranks, *overrides, "train.precision=fp16") == []


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["single", "zero1", "fsdp"])
def test_no_device_sync_with_masters_of_fp16_weights(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    fp16 = ["train.precision=fp16", "train.param_dtype=fp16", "optimizer.master_weights=fp32"]
    assert waits("llama", ranks, *overrides, *fp16) == []


def test_token_counts_are_copied_from_page_locked_memory() -> None:
    with HostWaits([]) as waits:
        push_to(torch.ones(()), torch.device("meta"))
        assert waits.places == []
        torch.ones(()).to("meta")
    assert len(waits.places) == 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda batch, value: float(value[0]),
        lambda batch, value: bool((value > 0).all()),
        lambda batch, value: value[value > 0],
        lambda batch, value: value.nonzero(),
        lambda batch, value: value[[0, 1]],
        lambda batch, value: batch.to("cpu"),
        lambda batch, value: batch[torch.arange(2)].to("cpu", non_blocking=True),
        lambda batch, value: torch.zeros(3) + value,
        lambda batch, value: torch.tensor(1.0, device="cpu"),
    ],
)
def test_device_syncs_are_detected(wait: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    batch, value = torch.arange(4), torch.ones(3)
    with HostWaits([batch]) as waits:
        wait(batch, value)
    assert waits.places
