"""Estimates of transformers' models equal the memory of real processes, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import live_storages
from support.configured import estimate_config
from support.hf_families import FAMILIES
from support.live_storages import small

from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun

pytestmark = pytest.mark.usefixtures("server")

LONG = {
    **FAMILIES["phi3"],
    "original_max_position_embeddings": 16,  # the runs have 32, so they use the long table
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}
DESCRIBED = {**FAMILIES, "phi3, longrope": LONG}
ROUTED = 0.05
"""Fraction of its estimate by which a rank of a mixture of experts may differ."""
PARTS = "strategy.tensor.sequence_parallel=true"
CASES = {
    "gemma2": "strategy=fsdp train.activation_checkpointing=full train.precision=bf16",
    "mixtral": "strategy=fsdp train.micro_batch_size=2",
}
SLOW_CASES = {
    "bloom": "strategy=zero1 train.micro_batch_size=2",
    "llama": "strategy=fsdp",
    "gpt2": "strategy=ddp train.activation_checkpointing=selective",
    "phi3": "strategy=fsdp strategy.fsdp.cpu_offload=full",
    "qwen3_moe": "strategy=ddp",
    "opt": "strategy=zero2",
    "phi3, longrope": "strategy=fsdp",
    "qwen3": f"strategy=tensor {PARTS}",
    "gpt_neox": "strategy=tensor",
    "olmo2": f"strategy=tensor {PARTS}",
    "mistral": f"strategy=tensor {PARTS} train.activation_checkpointing=full",
}
STAGES = "strategy=pipeline strategy.pipeline.degree=2 train.micro_batch_size=2"
RING = "strategy=ddp strategy.context.degree=2 train.micro_batch_size=2"


# OPT's block reshapes its result; the next one adds to it out of place.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPOPTDecoderLayer. returned a view")
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([*CASES.items()], id="some"),
        pytest.param([*SLOW_CASES.items()], id="more", marks=pytest.mark.slow),
    ],
)
def test_hf_estimate_equals_rank_memory_for_every_family(
    layouts: list[tuple[str, str]], tmp_path: Path
) -> None:
    cases = []
    for kind, layout in layouts:
        (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / kind / "config.json").write_text(json.dumps(DESCRIBED[kind]))
        path = f"model.path='{tmp_path / kind}'"
        cases.append(("model=hf", path, "model.init=random", *layout.split()))
    measured = live_storages.held(cases, ranks=2)
    for case, (kind, layout), of_ranks in zip(cases, layouts, _totals(measured), strict=True):
        overrides = [*small(case), "launch.nproc=2", "hardware=cpu", *case]
        estimated = estimate(estimate_config(overrides)).peak_bytes
        # The memory of a router's experts depends on the tokens that are routed to each.
        allowed = ROUTED * estimated if kind in ("mixtral", "qwen3_moe") else 0
        assert max(abs(size - estimated) for size in of_ranks) <= allowed, (kind, layout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mixtral"])
def test_hf_estimate_traces_few_equal_blocks(kind: str, tmp_path: Path) -> None:
    content = {**FAMILIES[kind], "num_hidden_layers": 9}
    (tmp_path / "config.json").write_text(json.dumps(content))
    case = ["model=hf", f"model.path={tmp_path}", "model.init=random", "strategy=fsdp"]
    chosen = estimate_config([*small(case), *case, "launch.nproc=4", "hardware=cpu"])
    assert ReducedRun.of(chosen).repeats
    assert estimate(chosen).peak_bytes == estimate(chosen, exact=True).peak_bytes


def test_hf_estimate_traces_all_kinds_of_blocks(tmp_path: Path) -> None:
    content = {**FAMILIES["gemma2"], "num_hidden_layers": 9}
    (tmp_path / "config.json").write_text(json.dumps(content))
    case = ["model=hf", f"model.path={tmp_path}", "model.init=random", "strategy=fsdp"]
    chosen = estimate_config([*small(case), *case, "launch.nproc=4", "hardware=cpu"])
    assert not ReducedRun.of(chosen).repeats


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(
            {"gpt2": f"{STAGES} strategy.pipeline.schedule=zbv_zero_bubble"},
            id="some",
        ),
        pytest.param({"llama": STAGES, "mistral": RING}, id="more"),
    ],
)
def test_hf_estimate_equals_stage_and_context_memory(
    layouts: dict[str, str], tmp_path: Path
) -> None:
    cases = []
    for kind, layout in layouts.items():
        (tmp_path / kind).mkdir()
        content = {**FAMILIES[kind], "num_hidden_layers": 4}
        (tmp_path / kind / "config.json").write_text(json.dumps(content))
        path = f"model.path={tmp_path / kind}"
        cases.append(("model=hf", path, "model.init=random", *layout.split()))
    measured = live_storages.held(cases, ranks=2)
    for case, of_ranks in zip(cases, _totals(measured), strict=True):
        overrides = [*small(case), "launch.nproc=2", "hardware=cpu", *case]
        estimated = [rank.peak_bytes for rank in estimate(estimate_config(overrides)).ranks]
        assert of_ranks == (estimated * 2)[:2]  # ranks of one stage are estimated once


@pytest.mark.slow
def test_hf_estimate_covers_uneven_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FAMILIES["gpt2"], "vocab_size": 257}))
    case = ("model=hf", f"model.path={tmp_path}", "model.init=random", "strategy=tensor")
    [[first, last]] = _totals(live_storages.held([case], ranks=2))
    overrides = [*small(case), "launch.nproc=2", "hardware=cpu", *case]
    assert first == estimate(estimate_config(overrides)).peak_bytes
    assert last < first  # less by a row of the weight and of its states, and a token's logits


def _totals(measured: list[list[live_storages.Held]]) -> list[list[int]]:
    return [[of_rank["total"] for of_rank in of_case] for of_case in measured]
