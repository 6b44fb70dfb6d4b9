"""Inputs of blocks in host memory: results of recomputation, and copies during computation."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.rank_engine import rank_engine
from support.simulated_streams import Done, Stream, is_before, simulate_streams
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonlaunch.comm import World
from axonlaunch.engines.recomputation import offloaded_inputs
from axonlaunch.engines.recomputation.offloaded_inputs import OffloadedInputs

MODEL = "data=synthetic_tokens data.sequence_length=16 train.global_batch_size=8 checkpoint.every=0"
GPT = f"{MODEL} model=gpt model.num_hidden_layers=4 model.hidden_size=32"
LLAMA = f"{MODEL} model=llama_debug model.num_hidden_layers=4"
PIPELINE = f"{GPT} strategy=pipeline launch.nproc=2 strategy.pipeline.schedule"
LAYOUTS = {
    "single": f"{GPT} strategy=single train.micro_batch_size=4",
    "ddp": f"{GPT} strategy=ddp launch.nproc=2",
    "fsdp": f"{GPT} strategy=fsdp launch.nproc=2 train.precision=bf16",
    "sequence": f"{LLAMA} strategy=tensor launch.nproc=2 strategy.tensor.sequence_parallel=true",
    "pipeline": f"{PIPELINE}=1f1b train.micro_batch_size=1",
    "interleaved": f"{PIPELINE}=interleaved_1f1b",
    "dualpipev": f"{PIPELINE}=dualpipev",
    "hybrid": f"{GPT} strategy=hybrid launch.nproc=4",
    "context": f"{GPT} strategy=ddp strategy.context.degree=2 launch.nproc=2",
    "experts": f"{MODEL} model=moe_debug strategy=fsdp strategy.expert.degree=2 launch.nproc=2",
    "transformers": f"{MODEL} strategy=fsdp launch.nproc=2 model=hf model.init=random "
    "data.vocab_size=64 'model.config={model_type: llama, vocab_size: 64, hidden_size: 32, "
    "intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}'",
}
Trained = tuple[list[float], list[Tensor]]


def train(layout: str, mode: str, *more: str) -> list[Trained]:
    """Return the losses of two steps and the updated parameters of every rank."""
    settings = [*shlex.split(LAYOUTS[layout]), f"train.activation_checkpointing={mode}", *more]
    chosen = run_config(settings)
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> Trained:
        engine, loader = rank_engine(chosen, world)
        losses = [float(engine.train_step(loader.batch(step)).loss) for step in range(2)]
        parameters = [p.detach() for _, p in engine.named_parameters()]
        return losses, [p.to_local() if hasattr(p, "to_local") else p for p in parameters]

    return World.mock(chosen.launch.nproc).run(run)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the list of the shapes of inputs that are sent to host memory."""
    shapes: list[tuple[int, ...]] = []
    send = OffloadedInputs._send

    def noted(self: OffloadedInputs, tensor: Tensor) -> Any:
        shapes.append(tuple(tensor.shape))
        return send(self, tensor)

    monkeypatch.setattr(OffloadedInputs, "_send", noted)
    return shapes


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("mode", "recomputation"), [("offload", "full"), ("selective_offload", "selective")]
)
def test_offloaded_inputs_give_the_results_of_recomputation_to_the_bit(
    layout: str, mode: str, recomputation: str, sent: list[tuple[int, ...]]
) -> None:
    if mode == "selective_offload" and layout == "dualpipev":
        pytest.skip("selective recomputation is refused with it")
    actual = train(layout, mode)
    assert sent
    for (losses, weights), (expected, others) in zip(
        actual, train(layout, recomputation), strict=True
    ):
        assert losses == expected
        assert all(map(torch.equal, weights, others))


def test_only_the_first_input_of_each_block_is_offloaded(sent: list[tuple[int, ...]]) -> None:
    """Tables of positions of transformers' models are inputs of all blocks."""
    train("transformers", "offload")
    # Two ranks, two steps, two blocks: 4 samples of 16 positions with 32 features.
    assert sent == 8 * [(4, 16, 32)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler imports deprecated parts of torch
def test_offloaded_inputs_of_compiled_blocks(sent: list[tuple[int, ...]]) -> None:
    [(losses, _)] = train("single", "offload", "train.compile=true")
    assert len(sent) == 2 * 2 * 4
    [(expected, _)] = train("single", "full")
    assert losses == pytest.approx(expected, rel=2e-5)


# The order of copies and computation, on simulated streams.


def _are_concurrent(first: Done, second: Done) -> bool:
    return not is_before(first, second) and not is_before(second, first)


class _Block(nn.Module):
    """A block that notes its forwards and backwards on the simulated stream."""

    def __init__(self, number: int, done: dict[str, Done]) -> None:
        super().__init__()
        self.linear, self._number, self._done = nn.Linear(3, 3), number, done

    def forward(self, x: Tensor) -> Tensor:
        name = f"forward {self._number}"
        self._done[f"again {name}" if name in self._done else name] = Stream.current.do()
        return self.linear(x).relu()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> dict[str, Done]:
    """Three blocks that ran forward and backward on a GPU: the operations on each of them."""
    done: dict[str, Done] = {}
    simulate_streams(monkeypatch)
    offloaded = OffloadedInputs(torch.device("cpu"))
    offloaded._copies = offloaded_inputs.StreamCopies(torch.device("cuda", 0))
    numbers: dict[int, int] = {}
    copy: Any = Tensor.copy_

    def noted(self: Tensor, other: Tensor, non_blocking: bool = False) -> Any:
        assert non_blocking
        if other.data_ptr() in numbers:
            done[f"arrives {numbers[other.data_ptr()]}"] = Stream.current.do()
        else:
            numbers[self.data_ptr()] = len(numbers)
            done[f"leaves {numbers[self.data_ptr()]}"] = Stream.current.do()
        return copy(self, other)

    monkeypatch.setattr(Tensor, "copy_", noted)
    free = offloaded._free_sent

    def freed() -> None:
        free()
        assert not offloaded._leaving
        number = sum(name.startswith("freed") for name in done)
        done[f"freed {number}"] = Stream.current.do()

    monkeypatch.setattr(offloaded, "_free_sent", freed)
    hidden = torch.ones(2, 3, requires_grad=True)
    for number in range(3):
        block = _Block(number, done)
        forward = block.forward
        hidden = offloaded.wrap(
            lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False),
            is_first=not number,
        )(hidden)
        hidden.register_hook(
            lambda _, number=number: done.update({f"backward {number}": Stream.current.do()})
        )
    hidden.sum().backward()
    assert not offloaded._arriving
    return done


def test_inputs_are_copied_in_order(copied: dict[str, Done]) -> None:
    for number in range(3):
        leaves, arrives = copied[f"leaves {number}"], copied[f"arrives {number}"]
        assert is_before(leaves, copied[f"freed {number}"])
        assert is_before(leaves, arrives)
        assert is_before(arrives, copied[f"again forward {number}"])
        if number:
            assert is_before(copied[f"forward {number - 1}"], leaves)


def test_inputs_leave_during_their_block_and_arrive_one_block_ahead(
    copied: dict[str, Done],
) -> None:
    for number in range(3):
        assert _are_concurrent(copied[f"leaves {number}"], copied[f"forward {number}"])
    for number in (0, 1):
        arrives = copied[f"arrives {number}"]
        assert _are_concurrent(arrives, copied[f"again forward {number + 1}"])
        assert not is_before(copied[f"again forward {number + 1}"], arrives)
    # Not two blocks ahead.
    assert is_before(copied["again forward 2"], copied["arrives 0"])
