"""ZeRO-1 gathers updated rows while the next step computes, and completes before they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support.configured import run_config
from support.parity_table import MODELS
from support.rank_engine import rank_engine
from torch import Tensor, nn

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.engines.data_parallel import zero1
from axonlaunch.engines.mesh_engine import MeshEngine
from axonlaunch.models.build import build_model, spec_for
from axonlaunch.models.specs.model_spec import ModelOutputs

RUN = ["strategy=zero1", "launch.backend=mock", "launch.nproc=2", "train.global_batch_size=4"]


def engine_of(world: World, model: str, *overrides: str) -> tuple[MeshEngine, Any]:
    chosen = run_config([*MODELS[model], *RUN, "model.num_hidden_layers=2", *overrides])
    engine, loader = rank_engine(chosen, world)
    assert isinstance(engine, MeshEngine)
    return engine, loader


@pytest.fixture(autouse=True)
def _matrices_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero1, "_LARGE", 1024)


def test_zero1_block_waits_only_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[Tensor, str] = {}
    happened: list[str] = []  # on rank 0
    finish = zero1._Message.finish

    def received(message: zero1._Message) -> None:
        happened.extend(names[parameter] for parameter in message.parameters if parameter in names)
        finish(message)

    monkeypatch.setattr(zero1._Message, "finish", received)

    def run(world: World) -> None:
        engine, loader = engine_of(world, "llama")
        [model] = engine.modules
        engine.train_step(loader.batch(0))
        if world.is_main:
            names.update({parameter: name for name, parameter in model.named_parameters()})
            for name, module in model.named_modules():
                if name in ("embed_tokens", "layers.0", "layers.1", "lm_head"):
                    done = f"{name} done"
                    module.register_forward_hook(lambda *_, done=done: happened.append(done))
        engine.backward(loader.batch(1))

    World.mock(2).run(run)
    places = {event: position for position, event in enumerate(happened)}
    assert places["embed_tokens.weight"] < places["embed_tokens done"]
    for earlier, module in [
        ("embed_tokens", "layers.0"),
        ("layers.0", "layers.1"),
        ("layers.1", "lm_head"),
    ]:
        overrides = [
            event for event in happened if event.startswith(f"{module}.") and "norm" not in event
        ]
        assert overrides
        assert all(
            places[f"{earlier} done"] < places[o] < places[f"{module} done"] for o in overrides
        )


@pytest.mark.parametrize("reads", ["named_parameters", "state_dict", "model_state_dict", "update"])
def test_zero1_reading_parameters_waits_for_all_rows(reads: str) -> None:
    def run(world: World) -> None:
        engine, loader = engine_of(world, "llama")
        engine.train_step(loader.batch(0))
        update = engine._parts.update
        assert isinstance(update, zero1.ShardedUpdate)
        assert update._in_flight
        messages = {id(message): message for message in update._in_flight.values()}
        if reads == "update":
            engine.update()
        else:
            dict(getattr(engine, reads)())
        assert not any(id(message) in messages for message in update._in_flight.values())

    World.mock(2).run(run)


def test_zero1_shared_parameters_arrive_before_first_forward() -> None:
    chosen = run_config([*MODELS["gpt"], *RUN, "model.tie_word_embeddings=true"])
    model = build_model(chosen, seed=0)
    blocks = [*spec_for(chosen).blocks(model).values()]
    head: nn.Module = model.get_submodule("lm_head")
    readers = zero1._first_readers([model], [*blocks, head])
    table: Tensor = model.get_parameter("embed_tokens.weight")
    assert any(table is parameter for parameter in readers[model])
    assert readers[head] == []
    held = [parameter for of in readers.values() for parameter in of]
    assert len(held) == len({*held}) == len([*model.parameters()])


def test_zero1_gathers_rows_in_forward_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gather, sizes = zero1.all_gather_single, []

    def counted(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            sizes.append(tuple(output.shape))
        return gather(output, *args, **kwargs)

    def run(world: World) -> list[tuple[int, ...]]:
        engine, loader = engine_of(world, "llama")
        monkeypatch.setattr(zero1, "all_gather_single", counted)
        engine.train_step(loader.batch(0))
        full = dict(engine.named_parameters())
        names = sorted(full, key=lambda name: "layers" in name)  # the head waits for blocks
        last = names.pop(names.index("lm_head.weight"))
        return [tuple(full[name].shape) for name in [*names, last] if "norm" not in name]

    # One message with all norms, then one for each matrix to its rank; no byte is sent twice.
    expected = World.mock(2).run(run)[0]
    assert sizes == [(5 * 32,), *expected]


class ReadsFirst(nn.Module):
    """Computes with the weights of blocks before it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: Tensor) -> ModelOutputs:
        penalty = sum(layer.weight.square().sum() for layer in self.layers)
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return ModelOutputs(self.head(hidden), penalty)


def test_zero1_weights_read_outside_block_are_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zero1, "_LARGE", 2**30)
    monkeypatch.setattr(zero1, "_FULL", 1)  # a bucket for each, which a wait unpacks
    ax.register_model("reads_first", inputs="tokens", layers="layers")(ReadsFirst)

    def losses(strategy: str) -> list[float]:
        overrides = [
            "model=reads_first",
            "data=synthetic_tokens",
            "data.sequence_length=8",
        ]
        chosen = run_config(
            [*overrides, *RUN, f"strategy={strategy}", "scheduler=constant", "optimizer.lr=0.1"]
        )

        def run(world: World) -> list[float]:
            engine, loader = rank_engine(chosen, world)
            return [float(engine.train_step(loader.batch(step)).loss) for step in range(3)]

        return World.mock(2).run(run)[0]

    assert losses("zero1") == pytest.approx(losses("ddp"), rel=1e-5)
