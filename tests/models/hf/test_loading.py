"""A rank reads its shard of a checkpoint, and holds little more than that meanwhile."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from support.configured import estimate_config

from axonlaunch.planning.memory.estimate import estimate

BENCHES = Path(__file__).parents[3] / "scripts" / "benches"
SIZES = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1024}
SLACK = 12 << 20
"""Memory of Python, gloo and allocators while a rank is built."""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "layout", ["strategy=fsdp", "strategy=tensor", "strategy=fsdp adapter=lora adapter.base=nf4"]
)
def test_loading_rank_holds_shard_and_at_most_one_tensor(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHES))
    bench: Any = importlib.import_module("hf_load")
    total = bench.save(tmp_path, layers=2, file_mb=40, **SIZES)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ranks = bench.load(tmp_path, layout.split(), ranks=2)
    overrides = ["model=hf", f"model.path={tmp_path}", *bench.DATA, *layout.split()]
    overrides += ["launch.nproc=2"]
    [estimated] = estimate(estimate_config([*overrides, "hardware=cpu"])).ranks
    assert 0 < estimated.read_bytes <= ranks[0].largest
    for rank in ranks:
        assert rank.part < 0.51 * total
        assert rank.peak - rank.part <= estimated.read_bytes + SLACK < rank.part
