"""Mock world ranks that share a GPU: calls to a simulated GPU are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.configured import run_config
from torch.futures import Future

from axonlaunch import data
from axonlaunch.comm import Backend, World, all_reduce_sum
from axonlaunch.comm.checks.argument_checks import device_of
from axonlaunch.comm.mock import shared_device
from axonlaunch.comm.process_group import compute_on
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.data.datasets.dataset import sample_inputs
from axonlaunch.data.datasets.loader import rank_loader
from axonlaunch.engines.build import Source, build_engine

GPU = torch.device("cuda", 0)


class MadeUpGpu:
    """Simulates torch's functions for one GPU with counts; its generator is a second one of the
    CPU.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[torch.device] = []
        self.entered: list[int] = []
        self.generator = torch.Generator()
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "synchronize", self.waits.append)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.entered.append)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield MadeUpGpu(monkeypatch)
    compute_on(torch.device("cpu"))


def test_mock_world_on_missing_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device=cuda: torch sees no GPU here; use cpu"):
        World.mock(2, device="cuda")
    with pytest.raises(ValueError, match="device=meta: ranks compute on cpu or cuda"):
        World.mock(2, device="meta")


def test_mock_ranks_share_gpu_and_communicate_its_tensors(gpu: MadeUpGpu) -> None:
    def look(world: World) -> tuple[torch.device, torch.device]:
        return world.device, device_of(world.default_group)

    assert World.mock(2, device="cuda").run(look) == [(GPU, GPU)] * 2
    assert gpu.entered == [0, 0]
    assert World.mock(2).run(look) == [(torch.device("cpu"),) * 2] * 2


def test_mock_world_synchronizes_device_around_communication(gpu: MadeUpGpu) -> None:
    def exchange(world: World) -> None:
        dist.all_reduce(torch.ones(1))
        if world.rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.empty(1), 0)

    World.mock(2, device="cuda").run(exchange)
    assert gpu.waits == [GPU] * 5


def test_mock_world_on_gpu_communicates_host_tensors(gpu: MadeUpGpu) -> None:
    del gpu
    sums = World.mock(2, device="cuda").run(
        lambda world: float(all_reduce_sum(torch.tensor(float(world.rank + 1))))
    )
    assert sums == [3.0, 3.0]


def test_mock_ranks_have_separate_gpu_random_states(gpu: MadeUpGpu) -> None:
    def draw(world: World) -> list[float]:
        del world
        values = []
        for _ in range(2):
            values.append(float(torch.rand(1, generator=gpu.generator)))
            dist.barrier()
        return values

    gpu.generator.manual_seed(5)
    initial_state = gpu.generator.get_state()
    first, second = World.mock(2, device="cuda").run(draw)
    assert first == second
    assert torch.equal(gpu.generator.get_state(), initial_state)


def test_mock_futures_may_hold_gpu_tensors(gpu: MadeUpGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    del gpu
    futures: list[Any] = []

    def future(devices: list[torch.device] | None = None) -> Future[Any]:
        futures.append(devices)
        return Future()

    monkeypatch.setattr(shared_device, "Future", future)

    def ask(world: World) -> None:
        del world
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()

    World.mock(2, device="cuda").run(ask)
    assert futures == [[GPU], [GPU]]


@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=single", "launch.nproc=1"],
        ["strategy=ddp", "strategy.ddp.sync=synchronous", "launch.nproc=2"],
        ["strategy=zero1", "strategy.ddp.sync=synchronous", "launch.nproc=2"],
    ],
)
def test_mock_steps_on_device_read_no_values_and_mix_no_devices(
    layout: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is ``meta``: reading it, or computing with a host tensor, raises."""
    chosen = run_config(
        [
            *("model=llama_debug", "data=synthetic_tokens", "data.sequence_length=16"),
            *("model.num_hidden_layers=1", "train.global_batch_size=4", "launch.backend=mock"),
            *("optimizer=lion", *layout),
        ]
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)

    def train(mock: World) -> list[str]:
        world = World(
            rank=mock.rank,
            local_rank=mock.rank,
            world_size=mock.world_size,
            device=torch.device("meta"),
            backend=Backend.MOCK,
        )
        layout = Layout.of(chosen, world_size=world.world_size)
        dataset = data.build_dataset(chosen.data, chosen.tokenizer)
        loader = rank_loader(chosen, dataset, layout=layout, rank=world.rank)
        source = Source(initialize_weights=lambda *args, **kwargs: None)
        engine = build_engine(chosen, world, sample=sample_inputs(dataset), source=source)
        return [str(engine.train_step(loader.batch(step)).loss.device) for step in range(2)]

    try:
        ranks = World.mock(chosen.launch.nproc).run(train)  # type: ignore[arg-type]
    finally:
        compute_on(torch.device("cpu"))
    assert all(devices == ["meta", "meta"] for devices in ranks)
