"""A stage with sharded parameters gathers them once per step, for any number of micro-batches."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.configured import run_config
from support.parity_table import MODELS
from support.rank_engine import rank_engine

from axonlaunch import data
from axonlaunch.comm import World
from axonlaunch.comm.mock.process_group import MockProcessGroup
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import build_engine


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline_stage_gathers_parameters_once_per_step(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    gather, calls = MockProcessGroup.all_gather_single_coalesced, []

    def counted(group: MockProcessGroup, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return gather(group, *args, **kwargs)

    monkeypatch.setattr(MockProcessGroup, "all_gather_single_coalesced", counted)
    gathered = {}
    for count in (2, 4):
        calls.clear()
        _train(schedule, count)
        gathered[count] = len(calls)
    assert gathered[2] == gathered[4] > 0


def _train(schedule: str, micro_batches: int) -> None:
    chosen = run_config(
        [
            *(
                "strategy=fsdp",
                "strategy.pipeline.degree=2",
                f"strategy.pipeline.schedule={schedule}",
            ),
            *("launch.nproc=4", "launch.backend=mock", "data=synthetic_tokens"),
            *("data.sequence_length=8", "train.global_batch_size=8"),
            *("model.hidden_size=16", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
            f"train.micro_batch_size={4 // micro_batches}",
        ]
    )

    def run(world: World) -> None:
        layout = Layout.of(chosen, world_size=4)
        loader = rank_loader(
            chosen, data.build_dataset(chosen.data), layout=layout, rank=world.rank
        )
        engine = build_engine(chosen, world, sample=sample_inputs(loader.dataset))
        engine.train_step(loader.batch(0))

    World.mock(4).run(run)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["strategy=ddp"], torch.bfloat16),
        (["strategy=ddp", "train.param_dtype=bf16"], torch.bfloat16),
        (["strategy=fsdp"], torch.bfloat16),
        # The sum over blocks, which autocast leaves in fp32.
        (["strategy=ddp", "train.precision=fp16"], torch.float32),
    ],
    ids=["replicated", "parameters in bf16", "sharded", "fp16"],
)
def test_evaluation_sends_activations_in_training_dtype(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: torch.dtype
) -> None:
    sent: dict[tuple[int, str], list[torch.dtype]] = defaultdict(list)
    phase: dict[int, str] = {}
    send = MockProcessGroup.send

    def spied(group: MockProcessGroup, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        rank = dist.get_rank()
        types = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
        sent[rank, phase[rank]].extend(types)
        return send(group, tensors, dst, tag)

    monkeypatch.setattr(MockProcessGroup, "send", spied)
    chosen = run_config(
        [
            *(*MODELS["llama"], "train.precision=bf16", "strategy.pipeline.degree=2"),
            *("launch.backend=mock", "launch.nproc=2", "train.global_batch_size=4"),
            *overrides,
        ]
    )

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        phase[world.rank] = "training"
        engine.train_step(loader.batch(0))
        phase[world.rank] = "evaluation"
        engine.evaluate(loader.batch(1))

    World.mock(2).run(run)
    assert set(sent[0, "training"]) == set(sent[0, "evaluation"]) == {expected}
