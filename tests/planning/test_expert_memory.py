"""Estimates of divided experts equal the memory of real processes, for every load of a router."""

from __future__ import annotations

from typing import Any

import pytest
from support import live_storages
from support.configured import estimate_config
from support.forced_router import forced_experts
from support.hf_families import FAMILIES, SPECIAL
from support.live_storages import small

from axonlaunch.config.problems.errors import plain
from axonlaunch.planning.memory.estimate import estimate

LAYOUTS = {
    "pair": ("strategy.expert.degree=2", "estimate.imbalance=1.5"),
    "one shard": ("strategy.expert.degree=4",),
    "two shards": ("strategy.expert.degree=2",),
    "tensor": ("strategy.expert.degree=4", "strategy.tensor.degree=2"),
    "pipeline": ("strategy.expert.degree=2", "strategy.pipeline.degree=2"),
}
LOADS = ("balanced", "skewed", "worst")
EXPERTS = {
    "qwen3_moe": "num_experts",
    "mixtral": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
    "gpt_oss": "num_local_experts",
}
WITHOUT_LOSS = ("gpt_oss",)
"""Families whose auxiliary loss is turned off."""


def cases() -> list[Any]:
    """Return families, layouts, loads and numbers of ranks; one case is fast."""
    return [
        pytest.param("mixtral", "pair", ["skewed"], 2, id="mixtral, pair"),
        *(
            pytest.param(kind, layout, LOADS, 4, id=f"{kind}, {layout}", marks=pytest.mark.slow)
            for kind in (*EXPERTS, "moe_debug")
            for layout in LAYOUTS
            if layout != "pair"
        ),
    ]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("kind", "layout", "loads", "ranks"), cases())
def test_expert_estimate_equals_memory_of_rank_with_most_tokens(
    kind: str, layout: str, loads: list[str], ranks: int
) -> None:
    model: tuple[str, ...] = ("model=moe_debug", "model.router_aux_loss=0.01")
    if kind in EXPERTS:
        content = {**{**FAMILIES, **SPECIAL}[kind], EXPERTS[kind]: 8}
        model = ("model=hf", f"model.config={plain(content)}", "model.init=random")
    if kind in WITHOUT_LOSS:
        model += ("model.router_aux_loss=false",)
    runs = [
        (*model, "strategy=fsdp", *LAYOUTS[layout], f"estimate.routing={load}") for load in loads
    ]
    for run, measured in zip(runs, live_storages.held(runs, ranks=ranks), strict=True):
        overrides = [*small(run), f"launch.nproc={ranks}", "hardware=cpu", *run]
        config = estimate_config(overrides)
        stages = estimate(config).ranks
        for rank, peak in enumerate(measured):
            expected = stages[rank * len(stages) // ranks].peak_bytes
            if rank % config.strategy.expert.degree == 0 or config.estimate.routing == "balanced":
                assert peak["total"] == expected, (run, rank)
            else:
                assert peak["total"] <= expected, (run, rank)


@pytest.mark.parametrize(("load", "rows"), [(1, 16), (1.5, 24), (2, 32), (float("inf"), 64)])
def test_forced_router_sends_load_to_first_rank(load: float, rows: int) -> None:
    # 8 tokens with 2 of 8 experts, on one of 4 ranks
    chosen = forced_experts(32, 2, 8, 4, load=load)
    assert int((chosen < 2).sum()) == rows
    assert all(len({*token}) == 2 for token in chosen.tolist())
