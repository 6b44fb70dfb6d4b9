"""Reading errors that affect both sides equally are found by properties of the data."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.configured import run_config
from support.corpus import functions, write_jsonl
from torch.utils.data import default_collate

from axonlaunch import data
from axonlaunch.config import RunConfig
from axonlaunch.config.optimization.schedules import ConstantConfig
from axonlaunch.config.options.data import IGNORE_INDEX, CustomDataConfig, FreeDataConfig
from axonlaunch.config.options.documents import DocumentsConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data.datasets import packing
from axonlaunch.data.datasets.dataset import AnyBatch, Batch
from axonlaunch.data.datasets.loader import Loader, full_loader, order_of
from axonlaunch.data.datasets.samples import Collate
from axonlaunch.data.datasets.shuffle import Indices
from axonlaunch.data.datasets.user_datasets.adapters import UserDataset, adapt_dataset
from axonlaunch.data.shards import shard_maker
from axonlaunch.data.texts.sharded_rows import ShardedRows
from axonlaunch.models.tensors import initialization
from axonlaunch.verification.comparison.schedule_check import schedule_problems
from axonlaunch.verification.references import comparison_inputs, data_checks
from axonlaunch.verification.references.comparison_plan import ComparisonPlan
from axonlaunch.verification.references.reference import NoReferenceError, PlainRun

Patch = pytest.MonkeyPatch


def loader(size: int = 8, *, shards: int = 1, shard: int = 0) -> Loader:
    config = run_config(["data=synthetic_tokens", f"train.global_batch_size={size}"])
    dataset = data.build_dataset(config.data, config.tokenizer)
    return Loader(dataset, seed=0, global_batch_size=size, num_shards=shards, shard=shard)


def test_an_order_that_repeats_samples_or_epochs_is_no_order(monkeypatch: Patch) -> None:
    assert data_checks.order_problem(loader(), seed=0) == ""
    right = order_of
    size = loader().dataset.num_samples

    def same_in_each_epoch(dataset: Any, places: Any, *, seed: int) -> Any:
        return right(dataset, places % size, seed=seed)

    monkeypatch.setattr(data_checks, "order_of", same_in_each_epoch)
    problem = data_checks.order_problem(loader(), seed=0)
    assert problem == "the data: every epoch reads samples in the same order"
    monkeypatch.setattr(
        data_checks, "order_of", lambda _dataset, places, *, seed: places // 2 + seed
    )
    problem = data_checks.order_problem(loader(), seed=0)
    assert problem == "the data: an epoch reads a sample twice"


def test_user_dataset_pairs_skip_token_checks() -> None:
    """Also a registered one without a dataclass, because the order of its tokens is unknown."""
    reading, token_data = loader(), run_config(["data=synthetic_tokens"]).data
    batch = reading.batch(0)
    shuffled = Batch(batch.inputs, batch.targets.flip(1))
    problem = "the data: targets are not the tokens that follow their inputs"
    assert data_checks.data_problem(token_data, reading, shuffled, step=0) == problem
    classes = Batch(batch.inputs, batch.targets[:, 0])
    for registered in (FreeDataConfig(name="theirs"), CustomDataConfig(target="theirs:Pairs")):
        assert data_checks.data_problem(registered, reading, shuffled, step=0) == ""
        assert data_checks.data_problem(registered, reading, classes, step=0) == ""


def test_evaluation_that_drops_or_repeats_held_out_samples_is_found() -> None:
    reading, config = loader(), run_config(["data=synthetic_tokens"]).data
    batches = [*reading.eval_batches(part=comparison_inputs.evaluated_samples(reading))]
    assert len(batches) == 2, "the second one is not full"
    assert data_checks.held_out_problem(config, reading, batches) == ""
    problem = "the data: an evaluation does not read each held-out sample once"
    assert data_checks.held_out_problem(config, reading, batches[:1]) == problem
    assert data_checks.held_out_problem(config, reading, [*batches, batches[1]]) == problem


@pytest.mark.parametrize(
    ("size", "problem"),
    [(24, "an epoch reads a sample twice"), (8, "every epoch reads samples in the same order")],
    ids=["incomplete", "whole"],
)
def test_order_that_ends_with_the_last_full_batch_is_found(
    monkeypatch: Patch, size: int, problem: str
) -> None:
    right = Loader.indices

    def dropping(self: Loader, step: int) -> Any:
        return right(self, step % (self.dataset.num_samples // self.global_batch_size))

    monkeypatch.setattr(Loader, "indices", dropping)
    assert data_checks.order_problem(loader(size=size), seed=0) == f"the data: {problem}"


def test_a_shard_that_reads_anothers_samples_in_the_second_epoch_is_seen() -> None:
    full, sharded = loader(), loader(shards=2, shard=1)
    assert data_checks.other_ranks_samples(sharded, full, shard=1) == 0
    right, steps = sharded.indices, sharded.dataset.num_samples // 8
    sharded.indices = lambda step: right(step) - 1 * (step >= steps)  # type: ignore[method-assign]
    assert data_checks.other_ranks_samples(sharded, full, shard=1) == 5 * 4


def text(folder: Path, *overrides: str) -> tuple[RunConfig, Loader]:
    """Return a run on two sources of text, and its loader."""
    rows = [{"text": function["text"][:60]} for function in functions(40)]
    first = write_jsonl(folder / "a.jsonl", rows[:30])
    other = write_jsonl(folder / "b.jsonl", rows[30:])
    files = f"data.mix={{a: {{files: [{first}]}}, b: {{files: [{other}]}}}}"
    chosen = ["data=documents", f"data.cache_dir={folder}/cache", "data.sequence_length=64"]
    config = run_config([*chosen, files, "train.global_batch_size=4", *overrides])
    return config, full_loader(config, data.build_dataset(config.data, config.tokenizer))


def padding_counts(batch: Batch) -> Batch:
    return dataclasses.replace(batch, targets=batch.targets.clamp(min=0))


def targets_count_a_token_late(batch: Batch) -> Batch:
    late = torch.where(batch.targets.roll(1, 1) < 0, IGNORE_INDEX, batch.targets)
    return dataclasses.replace(batch, targets=late)


def positions_run_on(batch: Batch) -> Batch:
    positions = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
    return dataclasses.replace(batch, positions=positions)


def rows_change_places(batch: Batch) -> Batch:
    return batch.map(lambda tensor: tensor.flip(0))


def nothing(batch: Batch) -> Batch:
    return batch


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (nothing, ""),
        (padding_counts, "the data: targets after the last document of a row are counted"),
        (
            targets_count_a_token_late,
            "the data: targets are not the counted next tokens of their document",
        ),
        (
            positions_run_on,
            "the data: positions do not start at 0 in each document and count up by 1",
        ),
        (rows_change_places, "the data: tokens of a row differ from those of its documents"),
    ],
)
def test_rows_of_text_are_those_of_their_documents(
    fault: Callable[[Batch], Batch], problem: str, tmp_path: Path
) -> None:
    config, reading = text(tmp_path, "data.packing=best_fit")
    batch = reading.batch(0)
    assert isinstance(batch, Batch)
    found = data_checks.data_problem(config.data, reading, fault(batch), step=0)
    assert found == problem


def test_rows_that_cross_documents_are_noticed(tmp_path: Path, monkeypatch: Patch) -> None:
    def crossing(starts: Indices, places: Indices, *, length: int) -> packing.RowTable:
        total = int(places.sum())
        rows = np.arange(0, total, length)
        sizes = np.diff(rows, append=total)
        return packing.RowTable(rows, sizes, np.arange(len(rows) + 1), length)

    config, reading = text(tmp_path, "data.packing=concat")
    assert data_checks.data_problem(config.data, reading, reading.batch(0), step=0) == ""
    monkeypatch.setitem(packing.PACKERS, "concat", crossing)
    config, reading = text(tmp_path, "data.packing=concat")
    problem = data_checks.data_problem(config.data, reading, reading.batch(0), step=0)
    assert problem == (
        "the data: a row continues past the end of a document as if it were one document"
    )


def of_shards(folder: Path, packing: str) -> Loader:
    """Return a loader of two shards of 40 short documents each."""
    files = [folder / f"{name}.jsonl" for name in "ab"]
    for file in files:
        if not file.exists():  # the token cache depends on the file's time
            write_jsonl(file, [{"text": f"{file.stem}{n} " * 5} for n in range(40)])
    config = DocumentsConfig(
        files=[str(file) for file in files],
        sequence_length=24,
        held_out=2,
        packing=packing,  # type: ignore[arg-type]
        shuffle="shards",
        cache_dir=str(folder / "cache"),
    )
    dataset = data.build_dataset(config, TokenizerConfig(name="bytes"))
    return Loader(dataset, seed=0, global_batch_size=4)


@pytest.fixture
def shard_of_each_file(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shard_maker, "SHARD_SIZE", 900)


@pytest.mark.usefixtures("shard_of_each_file")
def test_rows_of_a_shard_in_the_same_order_in_later_passes_are_noticed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    reading = of_shards(tmp_path, "none")
    assert data_checks.order_problem(reading, seed=0) == ""
    right = ShardedRows._shuffled_row

    def same_in_later_passes(
        rows: ShardedRows, shard: int, position: int, epoch: int, seed: int
    ) -> int:
        return right(rows, shard, position, min(epoch, 1), seed)

    monkeypatch.setattr(ShardedRows, "_shuffled_row", same_in_later_passes)
    problem = data_checks.order_problem(reading, seed=0)
    assert problem == "the data: every epoch reads the samples of a shard in the same order"


@pytest.mark.usefixtures("shard_of_each_file")
def test_a_row_count_cached_for_another_packing_is_noticed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    assert data_checks.order_problem(of_shards(tmp_path, "none"), seed=0) == ""
    assert data_checks.order_problem(of_shards(tmp_path, "concat"), seed=0) == ""
    [*notes] = (tmp_path / "cache").glob("*/rows-*.json")
    assert len(notes) == 2, "of the second shard, one for each packing"
    for note in notes:
        digest = note.stem.removeprefix("rows-")
        crc32 = zlib.crc32(f"{digest} 3".encode())
        note.write_text(json.dumps({"rows": 3, "crc32": crc32}))
    problem = data_checks.order_problem(of_shards(tmp_path, "concat"), seed=0)
    assert problem.startswith("the data: shard 1 has ")
    assert problem.endswith("rows, but 3 were counted")


def test_evaluation_of_mix_source_reads_only_its_samples(tmp_path: Path) -> None:
    _, reading = text(tmp_path, "data.packing=none")
    parts = reading.dataset.info.eval_parts
    first, second = ([*reading.eval_batches(part=part)] for part in parts.values())
    assert data_checks.part_problem(reading, parts["b"], second) == ""
    problem = (
        "the data: an evaluation of one source reads samples of another source, or repeats one"
    )
    assert data_checks.part_problem(reading, parts["b"], first) == problem
    assert data_checks.part_problem(reading, parts["b"], second * 2) == problem


class Pairs:
    """Images and their classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full((1, 2, 2), index, dtype=np.float32), index % 4


def adapted(dataset: Pairs, *, collate: Collate | None = None) -> UserDataset:
    return adapt_dataset(
        dataset,
        collate=collate,
        eval_fraction=0.25,
        num_classes=4,
        refusal=ValueError,
        description="pairs",
    )


def test_pairs_that_are_held_out_are_not_those_of_training(monkeypatch: Patch) -> None:
    pairs = adapted(Pairs())
    reading, held_out = Loader(pairs, seed=0, global_batch_size=8), object()
    batches = [*reading.eval_batches(part=comparison_inputs.evaluated_samples(reading))]
    assert data_checks.held_out_problem(held_out, reading, batches) == ""
    right = pairs.read

    def trained(indices: Any, **options: Any) -> Any:
        return right(indices, **{**options, "split": "train", "seed": 0})

    monkeypatch.setattr(pairs, "read", trained)
    batches = [*reading.eval_batches(part=comparison_inputs.evaluated_samples(reading))]
    problem = "the data: every held-out sample is also one of the first training samples"
    assert data_checks.held_out_problem(held_out, reading, batches) == problem


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize(
    ("draw", "is_seeded"),
    [
        (random.random, True),
        (lambda: np.random.rand(), True),
        (lambda: float(torch.rand(())), True),
        (np.random.default_rng(0).random, False),
        (random.SystemRandom().random, False),
        (lambda: 0.5, True),
    ],
)
def test_only_datasets_with_a_custom_generator_are_reported_as_random(
    draw: Callable[[], float], is_seeded: bool, structured: bool
) -> None:
    class Augmented(Pairs):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            image, target = super().__getitem__(index)
            return image * np.float32(draw()), target

    pairs = adapted(Augmented(), collate=default_collate if structured else None)
    problem = data_checks.random_problem(Loader(pairs, seed=0, global_batch_size=8))
    if is_seeded:
        assert problem == ""
    else:
        assert problem.startswith("Reading the same sample twice gave different values")


def test_held_out_samples_are_compared_in_small_batches() -> None:
    class Counted(Pairs):
        def __len__(self) -> int:
            return 2048

    pairs = adapted(Counted())
    reading, most, right = Loader(pairs, seed=0, global_batch_size=8), [], pairs.read

    def counting(indices: Any, **options: Any) -> AnyBatch:
        most.append(len(indices))
        return right(indices, **options)

    pairs.read = counting  # type: ignore[method-assign]
    batches = [*reading.eval_batches(part=comparison_inputs.evaluated_samples(reading))]
    assert data_checks.held_out_problem(object(), reading, batches) == ""
    assert max(most) <= 16
    assert sum(most) > 1024


def test_tied_weights_that_come_apart_are_seen(monkeypatch: Patch) -> None:
    small = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
    config = run_config(["data=synthetic_tokens", *small, "launch.nproc=2"])

    def untied(module: torch.nn.Module, *, device: Any) -> None:
        module.to_empty(device=device)
        initialization.reset_buffers(module)

    monkeypatch.setattr("axonlaunch.models.build.materialize", untied)
    with pytest.raises(NoReferenceError, match=r"lm_head\.weight is no longer the weight it was"):
        PlainRun(config, ComparisonPlan(steps=1)).refuse_problems()


def test_learning_rates_follow_schedule_over_run(monkeypatch: Patch) -> None:
    config = run_config(["train.steps=1000", "scheduler.warmup_ratio=0.1", "launch.nproc=2"])
    assert not [*schedule_problems(config)]
    monkeypatch.setattr(ConstantConfig, "warmup", lambda self, steps: steps // 5)
    [problem] = schedule_problems(config)
    assert problem == "step 1 of the run's 1000: learning rate is 1.5e-05, not 3e-05"
