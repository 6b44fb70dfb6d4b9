"""Benches express published runs as they were, and reuse only results of equal runs and sources."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHES = Path(__file__).parents[2] / "scripts" / "benches"
ROW = {
    "id": "mlm-1",
    "quality": "A",
    "model": "tiny",
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "ffn": 128,
    "vocab": 256,
    "seq_len": 64,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "pos_emb": "rope",
    "linear_bias": False,
    "num_gpus": 8,
    "gpu": "H100 80GB",
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "zero_stage": 1,
    "param_dtype": "bf16",
    "ac_mode": "none",
    "grad_dtype": "fp32",
    "memory_metric": "max allocated",
    "peak_memory_bytes": 1000,
    "tokens_per_s_per_gpu": 100.0,
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"dp_replicate": 8, "zero_stage": 0}, []),
        ({"dp_replicate": 2}, ["optimizer states divided among some of the data ranks"]),
        ({"zero1_group_size": 4}, ["optimizer states divided among some of the data ranks"]),
        ({"zero1_group_size": 4, "tp": 2}, []),
        ({"zero_stage": None, "master_weights": "fp32"}, ["not given: stage of ZeRO"]),
        (
            {"param_dtype": "fp16", "master_weights": "fp32"},
            ["fp16 parameters with fp32 masters"],
        ),
    ],
)
def test_a_row_that_no_setting_expresses_has_a_reason(
    changes: dict[str, Any], reasons: list[str], bench: Callable[[str], Any]
) -> None:
    row = {**ROW, "master_weights": "fp32", **changes}
    assert bench("published").reasons(row) == reasons


@pytest.mark.parametrize(
    ("changes", "override"),
    [
        ({"tp": 2, "async_tp": True}, "strategy.tensor.async_collectives=true"),
        ({"tp": 2, "sequence_parallel": True}, "strategy.tensor.sequence_parallel=true"),
        ({"cp": 2}, "strategy.context.degree=2"),
        ({"zero_stage": 3, "dp_replicate": 2}, "strategy.fsdp.replicate=2"),
        ({"pp": 2, "pp_schedule": "1F1B"}, "strategy.pipeline.schedule=1f1b"),
    ],
)
def test_the_layout_of_a_row_is_that_of_its_run(
    changes: dict[str, Any], override: str, bench: Callable[[str], Any]
) -> None:
    published = bench("published")
    assert override in published.run({**ROW, "master_weights": "fp32", **changes}).overrides
    assert override not in published.run({**ROW, "master_weights": "fp32"}).overrides


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, "fp32"),  # the shards of ZeRO-1
        ({"zero_stage": 0}, None),
        ({"zero_stage": 0, "mixed_precision": "16-bit + fp32 master"}, "fp32"),
        ({"zero_stage": 3, "master_weights": "fp32 sharded params"}, "sharded"),
        ({"zero_stage": 3, "master_weights": "none"}, "none"),
    ],
)
def test_both_benches_keep_the_same_masters(
    changes: dict[str, Any], kept: str | None, bench: Callable[[str], Any]
) -> None:
    row = {**ROW, **changes}
    assert bench("published").masters(row) == kept
    masters = bench("published_speed").express(row).config.optimizer.master_weights
    assert (masters == "fp32") == (kept == "fp32")


def test_a_stage_of_the_zero_bubble_paper_has_whole_layers(bench: Callable[[str], Any]) -> None:
    speed = bench("published_speed")
    row = {**ROW, "id": "zb-1", "pp": 4, "zero_stage": 0, "layers": 6}
    assert speed.express(row).config.strategy.pipeline.split == [1, 2, 2, 1]
    with pytest.raises(speed.NotExpressedError, match="ends count as a layer each"):
        speed.express({**row, "layers": 8})


def test_only_results_of_the_same_runs_and_source_are_reported(
    bench: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    throughput, speed = bench("throughput"), bench("published_speed")
    rows, results = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    rows.write_text(json.dumps(ROW))
    row = speed.express(ROW)
    asked: list[str] = []

    def predicted(rows: Sequence[Any], left_out: Any) -> list[dict[str, Any]]:
        asked.extend(row.id for row in rows)
        return []

    def report_after(digest: str) -> bool:
        """Return whether a result with a digest is in the report, and not predicted again."""
        result = {"id": row.id, "source": "mlm", "group": row.group, "layout": row.layout}
        line = {**result, "digest": digest, "predicted": 1.0, "measured": 1.0}
        results.write_text(json.dumps(line) + "\n")
        asked.clear()
        throughput.main()
        is_reported = "\nmlm " in capsys.readouterr().out
        assert is_reported == (not asked)
        return is_reported

    monkeypatch.setattr(throughput, "_predicted", predicted)
    command = ["throughput", "--rows", str(rows), "--results", str(results)]
    monkeypatch.setattr("sys.argv", command)
    digest = bench("published").digest
    slower = replace(row, hardware=replace(row.hardware, attention_efficiency=0.1))
    current = digest(row)
    assert report_after(current)
    assert not report_after(digest(slower))
    monkeypatch.setattr(bench("published"), "source_hash", lambda: "of another source")
    assert not report_after(current)
