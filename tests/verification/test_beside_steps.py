"""verify finds bugs outside of a step: in reading, evaluating, saving and fp16's loss scale."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.parity_table import MODELS
from torch import Tensor, nn

from axonlaunch.checkpoint.loading import dcp_reader, reader
from axonlaunch.checkpoint.loading.fallback import Resumed
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.data.datasets.dataset import Batch
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.engines import mesh_engine
from axonlaunch.engines.optimizer import step
from axonlaunch.engines.precision import policy as precision
from axonlaunch.models.modules import module_state
from axonlaunch.models.modules.attention import Attention, Packing
from axonlaunch.training import trainer, worker
from axonlaunch.verification.comparison import compare
from axonlaunch.verification.references import comparison_inputs
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.lookahead import lookahead_problem

Patch = pytest.MonkeyPatch
FSDP = [*MODELS["mlp"], "strategy=fsdp", "launch.nproc=2", "train.global_batch_size=8"]
FP16 = [*FSDP, "train.precision=fp16"]
LOWER = [*FSDP, *("train.precision=bf16", "train.param_dtype=bf16", "optimizer.state_dtype=fp32")]
LLAMA = [*MODELS["llama"], "model.num_hidden_layers=1", "train.global_batch_size=4"]
PACKED = [*LLAMA, "strategy=ddp", "launch.nproc=2", "data.document_length=5"]
CONTEXT = ["strategy.context.degree=2", "launch.nproc=2"]
NORMED = [
    *("model=custom", f"model.target={__name__}:normed", "data=digits", "strategy=fsdp"),
    *("launch.nproc=2", "train.global_batch_size=8"),
]


def differences(overrides: list[str]) -> list[str]:
    verdict = compare.on_mock(run_config(overrides), ComparisonPlan(steps=3, beyond=True))
    assert verdict.failure is None
    return verdict.differences


def a_resumed_run_reads_from_the_beginning(patch: Patch) -> None:
    right = Loader.iterate
    patch.setattr(Loader, "iterate", lambda self, start_step=0: right(self, 0 * start_step))


def targets_are_those_of_a_rank(patch: Patch) -> None:
    right = mesh_engine.MeshEngine.backward

    def halved(self: Any, batch: Any) -> tuple[Tensor, Tensor]:
        loss, tokens = right(self, batch)
        return loss, tokens // 2

    patch.setattr(mesh_engine.MeshEngine, "backward", halved)


def the_loss_scale_never_grows(patch: Patch) -> None:
    def update(self: Any, has_overflowed: Tensor) -> Tensor:
        overflowed = has_overflowed.float()
        self.value.div_(1 + overflowed)
        return overflowed

    patch.setattr(precision.LossScale, "update", update)


def rows_are_read_from_the_first_on(patch: Patch) -> None:
    right = dcp_reader._Guarded._fill

    def first(self: Any, item: Any, *others: Any) -> None:
        offsets = torch.Size([0, *item.storage_offsets[1:]])
        right(self, dataclasses.replace(item, storage_offsets=offsets), *others)

    patch.setattr(dcp_reader._Guarded, "_fill", first)


def a_save_is_written_when_training_continues(patch: Patch) -> None:
    save, close = Saver.save, Saver.close
    waiting: dict[Saver, tuple[Any, Any]] = {}

    def later(saver: Saver, state: Any, **about: Any) -> list[Any]:
        waiting[saver] = state, about
        return []

    def at_last(saver: Saver) -> list[Any]:
        if saver in waiting:
            state, about = waiting.pop(saver)
            save(saver, state, **about)
        return close(saver)

    patch.setattr(Saver, "save", later)
    patch.setattr(Saver, "close", at_last)


def an_evaluation_is_never_over(patch: Patch) -> None:
    def evaluating(modules: Any) -> Any:
        for module in modules:
            module.eval()
        return nullcontext()

    patch.setattr(mesh_engine, "evaluating", evaluating)


def buffers_are_not_read(patch: Patch) -> None:
    right = reader.load_checkpoint

    def parameters_alone(saved: Any, state: Any, *, world: Any) -> Any:
        left = {n: t.clone() for n, t in state["model"].items() if "running" in n}
        right(saved, state, world=world)
        for name, initial in left.items():
            state["model"][name].copy_(initial)
        return state

    patch.setattr(reader, "load_checkpoint", parameters_alone)


def a_resumed_run_finds_no_checkpoint(patch: Patch) -> None:
    patch.setattr(worker, "_restore", lambda config, engine, world: Resumed(None, {}))


def a_resumed_run_forgets_its_targets(patch: Patch) -> None:
    patch.setattr(trainer, "_progress", lambda resumed: trainer._Progress())


def a_forward_does_not_get_the_documents(patch: Patch) -> None:
    patch.setattr(Batch, "forward_arguments", lambda self, forward: ([self.inputs], {}))


def updates_in_fp32_are_made_in_bf16(patch: Patch) -> None:
    def build(self: Any) -> Any:
        self._state_dtype = None
        return self._optimizers()

    patch.setattr(step.Update, "_build", build)


def a_prediction_is_padded_in_front(patch: Patch) -> None:
    right = torch.nn.functional.pad
    patch.setattr(torch.nn.functional, "pad", lambda x, sizes: right(x, sizes[::-1]))


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("fault", "overrides", "reported"),
    [
        (a_resumed_run_reads_from_the_beginning, FSDP, "step 2: loss is "),
        (targets_are_those_of_a_rank, FSDP, "step 1: number of counted targets is "),
        (the_loss_scale_never_grows, FP16, "step 1: loss scale is 32768, not 65536"),
        (rows_are_read_from_the_first_on, FSDP, "step 1: value that one process reads from"),
        (
            a_save_is_written_when_training_continues,
            FSDP,
            "step 1: value that one process reads fro",
        ),
        (
            an_evaluation_is_never_over,
            FSDP,
            "step 1: rank 0 draws no random numbers, unlike in other steps",
        ),
        (buffers_are_not_read, NORMED, "step 1: buffer of 2.running_mean is off by "),
        (a_resumed_run_finds_no_checkpoint, FSDP, "step 2: number of steps that training does"),
        (
            a_resumed_run_forgets_its_targets,
            FSDP,
            "step 2: number of counted targets of all",
        ),
        (a_forward_does_not_get_the_documents, PACKED, "step 0: evaluation loss is "),
        (
            updates_in_fp32_are_made_in_bf16,
            LOWER,
            "step 1: values of layers.0.weight.exp_avg are t",
        ),
        (a_prediction_is_padded_in_front, [*CONTEXT, *LLAMA], "step 0: prediction is off by "),
    ],
)
def test_verify_reports_errors_outside_the_step(
    fault: Any, overrides: list[str], reported: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    assert differences(overrides)[0].startswith(reported)


class Attending(nn.Module):
    """One layer of attention on a table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(16, 8), Attention(8, num_heads=2)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map tokens [B, T] to [B, T, 8]."""
        outputs: Tensor = self.attention(self.table(tokens), packing=Packing.of(positions))
        return outputs


def known(batch: Batch) -> str:
    torch.manual_seed(0)
    model = Attending()

    def outputs_of(sample: Batch) -> Tensor:
        outputs: Tensor = model(sample.inputs, sample.positions)
        return outputs

    return lookahead_problem(model, batch, outputs_of)


def test_non_causal_model_is_found(monkeypatch: Patch) -> None:
    tokens = torch.arange(12).view(1, 12)
    packed = Batch(tokens, tokens, torch.arange(12).view(1, 12) % 5)
    assert known(Batch(tokens, tokens)) == known(packed) == ""
    attend = torch.nn.functional.scaled_dot_product_attention

    def seeing(*args: Any, **options: Any) -> Tensor:
        return attend(*args, **{**options, "is_causal": False})

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seeing)
    assert known(Batch(tokens, tokens)) == "the model: outputs depend on tokens that come later"


def test_a_model_that_sees_other_documents_is_found(monkeypatch: Patch) -> None:
    tokens = torch.arange(12).view(1, 12)
    packed = Batch(tokens, tokens, torch.arange(12).view(1, 12) % 5)

    def of_one(positions: Tensor | None) -> Packing | None:
        assert positions is not None
        mask = torch.ones(12, 12, dtype=torch.bool).tril().view(1, 1, 12, 12)
        return Packing(positions, mask)

    monkeypatch.setattr(Packing, "of", of_one)
    assert known(packed) == "the model: outputs depend on tokens of another document"


def test_dropout_is_on_where_an_evaluation_must_not_draw() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    dropout, x = comparison_inputs.Dropout([model]), torch.ones(64, 4)
    off = model(x)
    assert dropout.largest == 0.5
    with dropout.on():
        assert not torch.equal(model(x), off)
        with module_state.evaluating([model]):
            assert torch.equal(model(x), off)
    assert torch.equal(model(x), off)
