"""Cached estimates are used only as long as nothing that they depend on has changed."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
from support.configured import estimate_config
from support.parity_table import IMAGES

from axonlaunch.config import RunConfig
from axonlaunch.planning import estimate_cache
from axonlaunch.planning.records import Estimate, RankEstimate
from axonlaunch.system.storage import cache

MADE = Estimate(
    world_size=2,
    mesh={"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1},
    parameters=10,
    peak_bytes=300,
    reserved_bytes=320,
    process_bytes=340,
    ranks=[RankEstimate(0, {"pp": 0}, 300, 5, {"parameters": 100, "activations": 200})],
)


@pytest.fixture(autouse=True)
def kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "axonlaunch" / "estimates"


@lru_cache
def run(*overrides: str) -> RunConfig:
    return estimate_config(["strategy=fsdp", *overrides])


def test_cached_estimate_is_returned_complete(kept_here: Path) -> None:
    assert estimate_cache.read_estimate(run()) is None
    estimate_cache.write_estimate(run(), MADE)
    assert estimate_cache.read_estimate(run()) == MADE
    assert len(list(kept_here.iterdir())) == 1


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "seed=3",
        "train.steps=7",
        "train.log_every=3",
        "scheduler=constant",
        "checkpoint.every=0",
        "launch.backend=nccl",
    ],
)
def test_irrelevant_settings_share_cached_estimate(override: str) -> None:
    estimate_cache.write_estimate(run(), MADE)
    assert estimate_cache.read_estimate(run(override)) == MADE


@pytest.mark.parametrize(
    "override",
    [
        "model.hidden_size=64",
        "data.sequence_length=64",
        "optimizer=sgd",
        "train.precision=bf16",
        "train.micro_batch_size=4",
        "train.grad_clip=null",
        "strategy.fsdp.sharding=shard_grad_op",
        "launch.nproc=4",
        "launch.backend=mock",
        "launch.device=cpu",
        "hardware=h100_80gb",
        "adapter=lora",
    ],
)
def test_another_run_is_another_estimate(override: str) -> None:
    estimate_cache.write_estimate(run(), MADE)
    assert estimate_cache.read_estimate(run(override)) is None


def test_another_adapter_is_another_estimate() -> None:
    estimate_cache.write_estimate(run("adapter=lora"), MADE)
    for changed in ("adapter.rank=4", "adapter.dropout=0.1", "adapter.targets=[q_proj]"):
        assert estimate_cache.read_estimate(run("adapter=lora", changed)) is None


def test_full_trace_estimate_is_cached_separately() -> None:
    estimate_cache.write_estimate(run(), MADE)
    assert estimate_cache.read_estimate(run(), exact=True) is None


@pytest.mark.parametrize(
    ("module", "function"), [(cache, "source_hash"), (estimate_cache, "version")]
)
def test_another_source_or_torch_is_another_estimate(
    module: ModuleType, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate_cache.write_estimate(run(), MADE)
    monkeypatch.setattr(module, function, lambda *name: "other")
    assert estimate_cache.read_estimate(run()) is None


@pytest.mark.parametrize("damage", ["", "{", "half", "other", "binary"])
def test_corrupt_cached_estimate_is_replaced(damage: str, kept_here: Path) -> None:
    estimate_cache.write_estimate(run(), MADE)
    [file] = kept_here.iterdir()
    full = file.read_bytes()
    content = {
        "half": full[: len(full) // 2],
        "other": full.replace(b"300", b"301"),
        "binary": b"\xff\xfe\x00",
    }.get(damage, damage.encode())
    file.write_bytes(content)
    assert estimate_cache.read_estimate(run()) is None
    estimate_cache.write_estimate(run(), MADE)
    assert estimate_cache.read_estimate(run()) == MADE


def test_custom_model_estimate_is_not_cached(kept_here: Path) -> None:
    mine = run("model=custom", "model.target=support.normed:build", *IMAGES)
    estimate_cache.write_estimate(mine, MADE)
    assert estimate_cache.read_estimate(mine) is None
    with_plugin = run("plugins=[json]")
    estimate_cache.write_estimate(with_plugin, MADE)
    assert estimate_cache.read_estimate(with_plugin) is None
    assert not kept_here.exists()


def test_oldest_cached_estimates_are_evicted(
    kept_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_cache, "_MAX_ESTIMATES", 3)
    kept_here.mkdir(parents=True)
    for age in range(4):
        (kept_here / f"{age}.json").write_text("")
        os.utime(kept_here / f"{age}.json", (1000 - age, 1000 - age))
    estimate_cache.write_estimate(run(), MADE)
    assert estimate_cache.read_estimate(run()) == MADE
    assert {"0.json", "1.json"} < {path.name for path in kept_here.iterdir()}
    assert len([*kept_here.iterdir()]) == 3


def test_unwritable_cache_folder_caches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    estimate_cache.write_estimate(run(), MADE)
    assert estimate_cache.read_estimate(run()) is None


def test_cache_folder_defaults_to_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", "/home/someone")
    assert estimate_cache.estimates_folder() == Path("/home/someone/.cache/axonlaunch/estimates")
