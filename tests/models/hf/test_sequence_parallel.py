"""Sequence-parallel models of transformers: equal to one process, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.configured import run_config
from support.hf_families import FAMILIES, SPECIAL, save, without_folder
from support.hf_loops import by_axonlaunch, by_transformers
from support.parity import assert_trains_as_one_process
from torch import Tensor

from axonlaunch.config import ConfigError
from axonlaunch.config.options.model import HuggingFaceConfig
from axonlaunch.models.build import spec_for
from axonlaunch.models.hf.analysis.hidden_parts import why_unsplittable
from axonlaunch.models.hf.analysis.structure import structure
from axonlaunch.models.hf.analysis.tensor_plans import tensor_plan
from axonlaunch.preflight.inspection import inspect

PARTS = ["strategy.tensor.degree=2", "strategy.tensor.sequence_parallel=true"]
LAYOUTS = {
    "tensor": (2, ["strategy=tensor"]),
    "fsdp": (4, ["strategy=fsdp"]),
    "pipeline": (4, ["strategy=pipeline", "strategy.pipeline.degree=2"]),
    "context": (4, ["strategy=ddp", "strategy.context.degree=2"]),
    "expert": (4, ["strategy=fsdp", "strategy.expert.degree=2"]),
    "recomputed": (4, ["strategy=hsdp", "train.activation_checkpointing=selective"]),
    "lora": (2, ["strategy=tensor", "adapter=lora"]),
    "chunked": (4, ["strategy=tensor", "strategy.tensor.degree=4", "train.loss_chunk=16"]),
}
REFUSED = {
    "gpt2": "running it on parts of them fails (RuntimeError: shape '[-1, 26, 64]' is invalid",
    "opt": "model.decoder.layers.0.fc1 gets [13, 64], not [1, 13, features]",
    "bloom": "it counts positions from 0 instead of using the positions it is given",
}
SPLIT = [kind for kind in FAMILIES if kind not in REFUSED]


def overrides_of(layout: str) -> tuple[int, list[str]]:
    ranks, settings = LAYOUTS[layout]
    return ranks, [*PARTS, *settings]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", SPLIT)
def test_family_with_parts_of_hidden_states_learns_as_plain_loop(kind: str, tmp_path: Path) -> None:
    # Mistral and Gemma have a window of 16 in a sequence of 32, of which a rank has 16.
    save(kind, tmp_path)
    losses = by_axonlaunch(tmp_path, [*overrides_of("tensor")[1], "launch.nproc=2"])
    assert losses == pytest.approx(by_transformers(tmp_path), rel=2e-5)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("llama", layout) for layout in ("fsdp", "pipeline", "context", "lora", "chunked")),
        *(("gemma3_text", layout) for layout in ("fsdp", "pipeline")),
        *(("olmo2", layout) for layout in ("fsdp", "pipeline", "context", "recomputed")),
        *(("mixtral", layout) for layout in ("fsdp", "pipeline", "expert")),
        *((kind, "fsdp") for kind in SPECIAL),
    ],
)
def test_losses_gradients_and_norm_equal_one_process(kind: str, layout: str) -> None:
    ranks, settings = overrides_of(layout)
    model = without_folder(kind, **SPECIAL.get(kind, {}))
    assert_trains_as_one_process([*model, *settings], ranks)


@pytest.mark.slow
def test_router_loss_of_global_batch_holds_with_parts_of_hidden_states() -> None:
    routed = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    ranks, settings = overrides_of("pipeline")
    assert_trains_as_one_process([*without_folder("mixtral", **routed), *settings], ranks)


def test_plan_says_which_modules_see_parts_and_which_full_sequences() -> None:
    analyzed = structure(HuggingFaceConfig(config=FAMILIES["olmo2"], init="random"))
    plan = tensor_plan(analyzed.copy(), analyzed.layers)
    # Norms of all queries and keys follow its projections, so it is no region.
    assert plan["model.layers.*.self_attn"] == "full_sequence"
    assert plan["model.layers.*.mlp"] == "region"
    parts = {pattern for pattern, style in plan.items() if style == "sequence"}
    norms = {f"model.layers.*.post_{name}_layernorm" for name in ("attention", "feedforward")}
    assert parts == {*norms, "model.norm"}


@pytest.mark.parametrize("kind", REFUSED)
def test_family_that_needs_full_hidden_states_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config([*without_folder(kind), *overrides_of("tensor")[1], "launch.nproc=2"])
    [problem] = refused.value.problems
    assert str(problem).startswith(
        "strategy.tensor.sequence_parallel=true: hidden states of model=hf of "
        f"model_type={kind} can't be split: {REFUSED[kind]}"
    )
    assert str(problem).endswith("; use false")


def test_indivisible_length_is_refused_with_the_next_valid_one() -> None:
    odd = ["launch.nproc=2", "data.sequence_length=31"]
    with pytest.raises(
        ConfigError, match=r"strategy.tensor.degree=2 needs a multiple of 2; use 32"
    ):
        run_config([*without_folder("llama"), *overrides_of("tensor")[1], *odd])


def test_block_that_mixes_tokens_outside_of_regions_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    analyzed = structure(HuggingFaceConfig(config=FAMILIES["llama"], init="random"))
    assert analyzed.layers is not None
    assert why_unsplittable(analyzed.copy(), layers=analyzed.layers) == ""
    original: Any = LlamaRMSNorm.forward

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return original(self, hidden - hidden.mean(1, keepdim=True))

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    reason = why_unsplittable(analyzed.copy(), layers=analyzed.layers)
    assert reason.startswith("model.layers.0 mixes tokens by mean")


def test_positions_that_are_counted_in_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    analyzed = structure(HuggingFaceConfig(config=FAMILIES["llama"], init="random"))
    assert analyzed.layers is not None
    original: Any = LlamaModel.forward

    def forward(self: Any, input_ids: Tensor, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is None:
            position_ids = (input_ids != 1).long().cumsum(1)
        return original(self, input_ids, position_ids=position_ids, **more)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    reason = why_unsplittable(analyzed.copy(), layers=analyzed.layers)
    assert reason.startswith("it computes positions from the tokens")


def test_inspection_says_whether_hidden_states_can_be_split() -> None:
    answers = {}
    for kind in ("llama", "gpt2"):
        inspected = inspect(run_config(without_folder(kind)))
        [answers[kind]] = [a for a in inspected.layouts if "sequence_parallel" in a.layout]
    assert answers["llama"].legal
    assert not answers["gpt2"].legal
    assert answers["gpt2"].reason == spec_for(run_config(without_folder("gpt2"))).unsplittable()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral", "olmo2"])
def test_packed_documents_stay_separate_with_parts_of_hidden_states(
    kind: str, tmp_path: Path
) -> None:
    save(kind, tmp_path)
    data = "data.document_length=10"
    losses = by_axonlaunch(tmp_path, [*overrides_of("tensor")[1], "launch.nproc=2"], data)
    assert losses == pytest.approx(by_transformers(tmp_path, data), rel=2e-5)
    assert losses != pytest.approx(by_transformers(tmp_path), rel=2e-5)
