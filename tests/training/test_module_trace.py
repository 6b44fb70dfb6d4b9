"""A run's trace of its modules: the same in every layout, and in a user's loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.hf_families import without_folder
from support.parity_table import MODELS
from torch import nn

import axonlaunch as ax
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.consistency.layout import num_ranks
from axonlaunch.diagnostics.module_trace.difference import (
    TraceComparison,
    TraceTolerance,
    compare_traces,
)
from axonlaunch.diagnostics.module_trace.element_comparison import elements_of_steps
from axonlaunch.diagnostics.module_trace.files import StepTrace, read_step, traced_steps
from axonlaunch.engines.tensor.parallel_layers import layers
from axonlaunch.preflight import module_trace
from axonlaunch.training import worker
from axonlaunch.verification.result import GRADIENT_FLOOR, PARAMETER_FLOOR

SMALL = [
    *("train.global_batch_size=16", "train.steps=2", "scheduler.warmup_steps=0"),
    *("train.eval_batches=0", "optimizer.eps=1e-4"),
    "checkpoint.every=0",
    "train.trace={steps: [0, 1], tensors: full}",
]
SINGLE = ("strategy=single", "launch.nproc=1")
TOLERANCE = TraceTolerance(gradient_floor=GRADIENT_FLOOR, parameter_floor=PARAMETER_FLOOR)


def configured(model: str, *overrides: str) -> RunConfig:
    return run_config(
        [*MODELS[model], f"model.num_hidden_layers={BLOCKS[model]}", *SMALL, *overrides]
    )


class Traced(dict[int, StepTrace]):
    """The traced steps of a run, by their number, and its folder."""

    def __init__(self, folder: Path) -> None:
        self.paths = traced_steps(folder)
        super().__init__({step: read_step(path) for step, path in self.paths.items()})


FOLDERS: list[Path] = []
"""Runs' files are kept until the last test."""


@pytest.fixture(scope="module", autouse=True)
def _folders() -> Iterator[None]:
    with TemporaryDirectory() as folder:
        FOLDERS.append(Path(folder))
        yield
    FOLDERS.clear()
    alone.cache_clear()


def traced(model: str, *overrides: str) -> Traced:
    return trained(configured(model, *overrides))


def trained(chosen: RunConfig) -> Traced:
    """Train on the mock world and return the traced steps."""
    folder = Path(mkdtemp(dir=FOLDERS[0]))
    chosen = dataclasses.replace(chosen, run_dir=str(folder))
    World.mock(num_ranks(chosen)).run(lambda world: worker.run(chosen, world))
    return Traced(folder)


@functools.cache
def alone(model: str) -> Traced:
    return traced(model, *SINGLE)


def compared(first: Traced, other: Traced) -> TraceComparison:
    elements = elements_of_steps(first.paths, other.paths)
    return compare_traces(first, other, tolerance=TOLERANCE, elements=elements)


BLOCKS = {"gpt": 2, "llama": 4, "mlp": 2}
"""Number of blocks; four pipeline stages need four."""
TWO = "launch.nproc=2"
LAYOUTS = {
    "ddp, accumulating": (["strategy=ddp", TWO, "train.micro_batch_size=4"], "gpt"),
    "tensor x pipeline x fsdp": (["strategy=hybrid", "launch.nproc=8"], "gpt"),
    "sequence parallel": (["strategy=tensor", "strategy.tensor.sequence_parallel=true"], "gpt"),
    "two stages a rank, split backward": (
        ["strategy=pipeline", "strategy.pipeline.schedule=zbv_zero_bubble"],
        "llama",
    ),
    "context, recomputing": (
        ["strategy.context.degree=2", TWO, "train.activation_checkpointing=full"],
        "llama",
    ),
    "loss in chunks": (["strategy=zero1", TWO, "train.loss_chunk=32"], "llama"),
    "fp16": ([*SINGLE, "train.precision=fp16"], "llama"),
    "bf16": (["strategy=ddp", TWO, "train.precision=bf16"], "gpt"),
    "bf16, where units of ReLU flip": ([*SINGLE, "train.precision=bf16"], "mlp"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_module_trace_of_every_layout_equals_one_process(layout: str) -> None:
    overrides, model = LAYOUTS[layout]
    result = compared(alone(model), traced(model, *overrides))
    assert [str(d) for d in result.differences] == []
    assert [*result.steps] == [0, 1]
    # Except the logits, which do not exist if the loss is chunked.
    assert result.only == ((["lm_head"] if "chunks" in layout else []), [])
    assert result.compared > (2 * 20 if model == "mlp" else 2 * 100)
    # Except the batch, the loss, and values that no rank of the layout has for every sample.
    assert result.by_element >= result.compared - 2 * 4


@pytest.mark.slow
def test_adapter_gradient_trace_is_equal_in_every_layout() -> None:
    full = traced("gpt", *SINGLE, "adapter=lora")
    gradients = [tensor.name for tensor in full[0].tensors if tensor.kind == "gradient"]
    assert gradients
    assert all(".lora_" in name for name in gradients)
    for layout in ("fsdp", "tensor"):
        result = compared(full, traced("gpt", f"strategy={layout}", TWO, "adapter=lora"))
        assert ([str(d) for d in result.differences], result.only) == ([], ([], []))


@pytest.mark.slow
def test_modules_empty_on_later_stages_are_not_traced_in_pipelines() -> None:
    """GPT-2 of transformers applies dropout in front of its blocks, which later stages lack."""
    pytest.importorskip("transformers")
    model = [*without_folder("gpt2"), "data.sequence_length=16", *SMALL]

    def steps(*overrides: str) -> Traced:
        return trained(run_config([*model, *overrides]))

    result = compared(steps(*SINGLE), steps("strategy=pipeline", TWO))
    assert ([str(d) for d in result.differences], result.only[1]) == ([], [])
    assert "transformer.drop" in result.only[0]


def test_module_trace_statistics_are_of_full_tensors() -> None:
    chosen = configured("gpt", *SINGLE)

    def run(world: World) -> tuple[dict[str, torch.Tensor], torch.Tensor, Any]:
        from support.rank_engine import rank_engine

        engine, loader = rank_engine(chosen, world)
        outputs: list[torch.Tensor] = []
        engine.modules[0].get_submodule("layers.1.mlp").register_forward_hook(
            lambda _, __, output: outputs.append(output.detach().double())
        )
        batch = loader.batch(0)
        engine.backward(batch)
        gradients = {n: p.grad.double() for n, p in engine.named_parameters() if p.grad is not None}
        return gradients, torch.cat(outputs), batch.inputs.double()

    gradients, output, inputs = World.mock(1).run(run)[0]
    step = {(t.kind, t.name): t for t in traced("gpt", "strategy=ddp", TWO)[0].tensors}
    expected = {
        ("batch", "inputs"): inputs,
        ("output", "layers.1.mlp"): output,
        ("gradient", "layers.1.mlp.up_proj.weight"): gradients["layers.1.mlp.up_proj.weight"],
    }
    for key, tensor in expected.items():
        stats = step[key]  # type: ignore[index]
        assert stats.rms == pytest.approx(float(tensor.square().mean().sqrt()), rel=1e-5)
        assert stats.mean == pytest.approx(float(tensor.mean()), rel=1e-5, abs=1e-7)
        assert stats.absmax == pytest.approx(float(tensor.abs().max()), rel=1e-5)


def test_module_trace_finds_extra_tensor_parallel_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = layers.RowParallelLinear.forward
    monkeypatch.setattr(layers.RowParallelLinear, "forward", lambda *args: 2 * right(*args))
    first = compared(traced("gpt", "strategy=tensor", TWO), alone("gpt")).differences[0]
    assert (first.step, first.module, first.first_tensor.kind) == (
        0,
        "layers.0.self_attn.o_proj",
        "output",
    )
    assert first.ratio == pytest.approx(2.0)


def test_full_module_trace_finds_reordered_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = layers.RowParallelLinear.forward
    monkeypatch.setattr(layers.RowParallelLinear, "forward", lambda *args: right(*args).flip(0))
    first = compared(traced("gpt", "strategy=tensor", TWO), alone("gpt")).differences[0]
    assert (first.module, first.first_tensor.kind) == ("layers.0.self_attn.o_proj", "output")
    assert first.elements is not None
    assert first.elements.index == (0, 0, 0)
    assert first.first_tensor.rms == pytest.approx(first.second_tensor.rms)


def test_module_trace_finds_other_samples_and_weights_first() -> None:
    other = compared(alone("mlp"), traced("mlp", *SINGLE, "seed=1")).differences[0]
    assert (other.first_tensor.kind, other.first_tensor.name) == ("batch", "inputs")


def test_module_trace_without_steps_adds_no_hooks(tmp_path: Path) -> None:
    overrides = ["train.trace={steps: [], tensors: norms}", "train.steps=1"]
    chosen = dataclasses.replace(configured("mlp", *SINGLE, *overrides), run_dir=str(tmp_path))
    hooks: list[int] = []

    def counted(engine: Any, batch: Any) -> Any:
        modules = [part for full in engine.modules for part in full.modules()]
        hooks.append(sum(len(part._forward_hooks) for part in modules))
        return right(engine, batch)

    from axonlaunch.engines.mesh_engine import MeshEngine

    right = MeshEngine.backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshEngine, "backward", counted)
        World.mock(1).run(lambda world: worker.run(chosen, world))
    assert hooks == [0]
    assert not (tmp_path / "module_trace").exists()


@pytest.mark.parametrize("steps", ["[2]", "[-1]", "[0,0]"])
def test_invalid_trace_steps_are_refused(steps: str) -> None:
    with pytest.raises(ConfigError, match=r"expected steps from 0, the first, to 1, each once"):
        configured("mlp", *SINGLE, f"train.trace.steps={steps}")


def test_all_elements_of_many_steps_or_of_more_than_the_disk_holds_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        ConfigError, match="all elements of 17 steps would be written; list at most 16"
    ):
        configured("mlp", *SINGLE, "train.steps=20", f"train.trace.steps={[*range(17)]}")
    monkeypatch.setattr(module_trace, "free_bytes", lambda folder: (folder, 1000))
    with pytest.raises(ConfigError, match=r"all elements of 2 steps take .* MiB free; use"):
        configured("mlp", *SINGLE)


class Plain(nn.Module):
    """Two layers; one of them is called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.twice(self.twice(self.first(x)))
        return y


def loop(folder: Path, *, parts: int = 1, wrapped: bool = False, bug: bool = False) -> Traced:
    """Trace three steps of a user's loop, in micro-batches."""
    torch.manual_seed(0)
    bare = Plain()
    model = nn.DataParallel(bare) if wrapped else bare
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    batches = torch.randn(3, 8, 4)
    if bug:
        bare.twice.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 3,))
    with ax.trace(model, folder, steps=[0, 2], tensors="full") as trace:
        for batch in batches:
            optimizer.zero_grad()
            for part in batch.chunk(parts):
                (model(part).square().mean() / parts).backward()
            nn.utils.clip_grad_norm_(bare.parameters(), 1e-3)
            optimizer.step()
            trace.step()
    assert not any(part._forward_hooks for part in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return Traced(folder)


def test_module_trace_of_loop_is_equal_in_micro_batches_and_wrapper(tmp_path: Path) -> None:
    right = loop(tmp_path / "a")
    result = compared(right, loop(tmp_path / "b", parts=4, wrapped=True))
    assert ([*result.steps], result.differences, result.only) == ([0, 2], [], ([], []))
    # Four parameters, their gradients, and the first layer's output and gradient. The calls of the
    # layer that is called twice in a forward are in another order.
    assert result.by_element == 2 * (1 + 4 + 4 + 2)
    first = compared(right, loop(tmp_path / "c", bug=True)).differences[0]
    assert (first.step, first.module, first.first_tensor.kind) == (0, "twice", "output gradient")


def test_a_loop_on_several_processes_is_refused() -> None:
    def refused(world: World) -> None:
        with pytest.raises(ValueError, match="there are 2 processes, and each sees only a part"):
            ax.trace(Plain(), "nowhere")

    World.mock(2).run(refused)
