"""Mixes of several sources of text: the source and row of each sample."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import corpus
from support.configured import run_config

from axonlaunch import config
from axonlaunch.comm import World
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data import build_dataset
from axonlaunch.data.datasets.loader import Loader
from axonlaunch.data.texts.mix import TextMix
from axonlaunch.data.texts.text_rows import TextRows
from axonlaunch.events import Evaluated, Monitor, StepLogged
from axonlaunch.training import worker

ROWS = {"a": 40, "b": 10}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create two files of rows of 8 bytes."""
    for name, count in ROWS.items():
        rows = [{"text": f"{name} {number:06}"} for number in range(count)]
        corpus.write_jsonl(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


def overrides_of(folder: Path, *, a: str = "", b: str = "") -> list[str]:
    """Return the overrides of a mix of both files, one text per row."""
    sources = f"{{a: {{files: [{folder}/a.jsonl]{a}}}, b: {{files: [{folder}/b.jsonl]{b}}}}}"
    data = ["data=documents", f"data.mix={sources}", f"data.cache_dir={folder}/cache"]
    return [*data, "data.packing=none", "data.sequence_length=8", "data.held_out=0"]


def mixed(folder: Path, *more: str, a: str = "", b: str = "") -> TextMix:
    dataset: Any = build_dataset(config.load([*overrides_of(folder, a=a, b=b), *more]).data)
    return dataset


def texts(dataset: TextMix, indices: Any, split: Any = "train") -> list[str]:
    batch = dataset.samples(indices, split=split)
    pairs = zip(batch.inputs, batch.targets, strict=True)
    return [bytes([*inputs[:-1].tolist(), int(targets[-2])]).decode() for inputs, targets in pairs]


def test_without_weights_or_epochs_each_row_is_seen_once(folder: Path) -> None:
    dataset = mixed(folder)
    rows = texts(dataset, range(dataset.num_samples))
    assert sorted(rows) == sorted(f"{n} {i:06}" for n, count in ROWS.items() for i in range(count))
    assert dataset.info.notes[0] == "data.mix: 50 rows: 80.0% a (1 epoch), 20.0% b (1 epoch)"


def test_a_source_is_seen_as_often_as_its_epochs_say(folder: Path) -> None:
    dataset = mixed(folder, a=", epochs: 0.5", b=", epochs: 2.5")
    counts = Counter(texts(dataset, range(dataset.num_samples)))
    of = {name: [n for text, n in counts.items() if text.startswith(name)] for name in ROWS}
    assert of["a"] == [1] * 20
    assert sorted(of["b"]) == [2] * 5 + [3] * 5
    assert dataset.info.notes[0] == "data.mix: 45 rows: 44.4% a (0.5 epochs), 55.6% b (2.5 epochs)"


def test_notes_on_sources_have_their_names_and_a_note_on_the_tokenizer_is_printed_once(
    folder: Path,
) -> None:
    tokenizer = TokenizerConfig(path=str(corpus.save_tokenizer(folder / "t")), add_tokens=["<new>"])
    dataset = build_dataset(config.load(overrides_of(folder)).data, tokenizer)
    first_words = [note.partition(": ")[0] for note in dataset.info.notes]
    assert first_words == ["data.mix", "data.mix.a", "data.mix.b", "tokenizer"]


def test_a_part_of_a_source_is_another_one_in_the_next_pass(folder: Path) -> None:
    dataset = mixed(folder, a=", epochs: 0.5", b=", epochs: 2.5")
    loader = Loader(dataset, seed=0, global_batch_size=45)
    counts = Counter(text for step in (0, 1) for text in texts(dataset, loader.indices(step)))
    assert {n for text, n in counts.items() if text.startswith("a")} == {1}
    assert {n for text, n in counts.items() if text.startswith("b")} == {5}
    assert len(counts) == 50


def test_weights_are_shares_of_a_pass_in_which_each_row_is_seen(folder: Path) -> None:
    dataset = mixed(folder, a=", weight: 2", b=", weight: 3")
    counts = Counter(texts(dataset, range(dataset.num_samples)))
    assert sum(n for text, n in counts.items() if text.startswith("a")) == 40
    assert sum(n for text, n in counts.items() if text.startswith("b")) == 60
    assert {n for text, n in counts.items() if text.startswith("b")} == {6}


def test_mixed_order_depends_only_on_seed_and_sample_index(folder: Path) -> None:
    """The order does not depend on the number of ranks or on where the run resumed."""
    dataset = mixed(folder, b=", epochs: 3")

    def read(steps: range, *, seed: int = 0, shards: int = 1) -> list[str]:
        loaders = [
            Loader(dataset, seed=seed, global_batch_size=4, num_shards=shards, shard=shard)
            for shard in range(shards)
        ]
        return [
            text
            for step in steps
            for loader in loaders
            for text in texts(dataset, loader.indices(step))
        ]

    full = read(range(20))
    assert read(range(13, 20)) == full[13 * 4 :]
    assert read(range(20), shards=4) == full
    assert read(range(20), seed=1) != full


def test_rows_of_a_batch_have_the_order_of_their_indices(folder: Path) -> None:
    dataset = mixed(folder)
    indices = [45, 3, 41, 0, 49, 39]
    assert texts(dataset, indices) == [texts(dataset, [index])[0] for index in indices]
    assert texts(dataset, np.array(indices)) == texts(dataset, indices)


def test_each_source_is_evaluated_by_itself(folder: Path) -> None:
    chosen = run_config(
        [
            *overrides_of(folder, a=", held_out: 3", b=", held_out: 2"),
            *("model=gpt", "model.hidden_size=16", "model.num_hidden_layers=1", "launch.nproc=2"),
            *("model.num_attention_heads=2", "strategy=ddp", "train.steps=1", "checkpoint.every=0"),
            *("train.global_batch_size=4", f"run_dir={folder}/run"),
        ]
    )
    (folder / "run").mkdir()
    [event] = evaluations(chosen)
    assert event.eval_tokens == 5 * 7
    assert event.sources.keys() == {"a", "b"}
    weighted = (3 * event.sources["a"] + 2 * event.sources["b"]) / 5
    assert event.eval_loss == pytest.approx(weighted)
    for name, held_out in (("a", 3), ("b", 2)):
        dataset: Any = build_dataset(chosen.data)
        part = dataset.info.eval_parts[name]
        assert {text[0] for text in texts(dataset, part, "eval")} == {name}
        assert len(part) == held_out
    line = (folder / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"sources": {"a": {"eval_loss": ' in line


TINY = ["model=gpt", "model.hidden_size=16", "model.num_hidden_layers=1", "launch.nproc=2"]
TINY += ["model.num_attention_heads=2", "train.global_batch_size=4"]
TINY += ["train.log_every=1", "train.eval_batches=0", "scheduler=constant"]


def losses(folder: Path, *more: str, stop_at: int | None = None) -> list[float]:
    """Return the logged losses of a run on the mix that ends, or stops after a step."""
    chosen = run_config([*overrides_of(folder, b=", epochs: 3"), *TINY, "train.epochs=1", *more])
    run = Path(chosen.run_dir)
    run.mkdir(exist_ok=True)
    steps: list[int] = []

    def report(event: Any) -> None:
        if isinstance(event, StepLogged):
            steps.append(event.step)

    monitor = Monitor(report=report, stop=lambda: stop_at is not None and steps[-1:] == [stop_at])
    World.mock(2).run(lambda world: worker.run(chosen, world, monitor=monitor))
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_that_stops_in_the_middle_of_a_mix_resumes_at_the_next_sample(folder: Path) -> None:
    """To the bit in the same layout, and to rounding in another one."""
    full = losses(folder, "strategy=ddp", f"run_dir={folder}/whole", "checkpoint.every=100")
    assert len(full) == (40 + 3 * 10) // 4 + 1
    for layout, exact in (("ddp", True), ("fsdp", False)):
        run = [f"run_dir={folder}/{layout}", "checkpoint.every=100"]
        first_losses = losses(folder, "strategy=ddp", *run, stop_at=7)
        assert len(first_losses) < len(full)
        resumed = losses(folder, f"strategy={layout}", *run)
        assert resumed == (full if exact else pytest.approx(full, rel=1e-5))


def evaluations(chosen: RunConfig) -> list[Evaluated]:
    """Return the evaluations that the main rank reported."""
    events: list[Any] = []
    World.mock(2).run(
        lambda world: worker.run(chosen, world, monitor=Monitor(report=events.append))
    )
    return [event for event in events if isinstance(event, Evaluated)]


@pytest.mark.parametrize(
    ("a", "b", "more", "message"),
    [
        (", weight: 1", "", [], "data.mix.b: has no weight, and a has; give it one"),
        (", weight: 1", ", weight: 1, epochs: 2", [], "has weights and epochs, which follow from"),
        ("", ", weight: 0", [], "data.mix.b.weight=0: must be above 0"),
        ("", ", wieght: 1", [], "there is no option of a group 'wieght'; did you mean weight?"),
        ("", ", packing: none", [], "data.mix.b.packing=none: has one value for all of"),
        ("", "", ["data.files=[c.jsonl]"], "data.mix names the files of each source; use one of"),
        ("", ", held_out: ['{folder}/a.jsonl']", [], "a.jsonl is also in data.mix.a.files and "),
        ("", ", text_field: body", [], "data.mix.b.files: {folder}/b.jsonl, line 1: has no field"),
    ],
)
def test_mix_errors_are_reported_by_source(
    a: str, b: str, more: list[str], message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        mixed(folder, *more, a=a, b=b.format(folder=folder))
    assert message.format(folder=folder) in str(raised.value)


def test_a_source_without_files_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.mix\.a\.files: names no file; write "):
        config.load(["data=documents", "data.mix={a: {weight: 1}}"])


# Chats and documents


def kinds(folder: Path, chat: str = "", documents: str = "") -> Any:
    """Return a mix of chats and documents, with a tokenizer that is trained on both."""
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(20)]
    corpus.write_jsonl(folder / "chats.jsonl", rows)
    talk = f"talk: {{files: [{folder}/chats.jsonl]{chat}}}"
    text = f"text: {{data: documents, files: [{folder}/a.jsonl]{documents}}}"
    overrides_of = ["data=chat", f"data.mix={{{talk}, {text}}}", f"data.cache_dir={folder}/cache"]
    overrides_of += ["data.sequence_length=64", "data.held_out=2", "data.packing=none"]
    overrides_of += ["tokenizer=train", "tokenizer.vocab_size=300"]
    chosen = config.load(overrides_of)
    return build_dataset(chosen.data, chosen.tokenizer), chosen


def test_mixed_chats_and_documents_are_masked_by_kind(folder: Path) -> None:
    pytest.importorskip("transformers")
    dataset, chosen = kinds(folder)
    sources = chosen.data.sources()
    assert [type(c).__name__ for c in sources.values()] == ["ChatConfig", "DocumentsConfig"]
    alone = {name: TextRows(c, dataset.tokenizer, report=print) for name, c in sources.items()}
    for name, source in alone.items():
        counted = dataset.summaries()[name].counted_tokens
        assert counted == source.summaries()[""].counted_tokens
        part = dataset.info.eval_parts[name]
        ours, expected = (
            text_rows.samples(rows, split="eval").targets
            for text_rows, rows in ((dataset, part), (source, range(2)))
        )
        assert torch.equal(ours, expected)
    summaries = dataset.summaries()
    assert summaries["text"].counted_tokens == summaries["text"].tokens - 40
    assert summaries["talk"].counted_tokens < summaries["talk"].tokens / 2


def test_mix_source_accepts_only_keys_of_its_kind(folder: Path) -> None:
    pytest.importorskip("transformers")
    _, chosen = kinds(folder, chat=", train_on: all", documents=", text_field: text")
    assert chosen.data.sources()["talk"].train_on == "all"
    assert chosen.data.sources()["text"].text_field == "text"
    with pytest.raises(ConfigError, match=r"data\.mix\.text\.train_on.*no option of a group"):
        kinds(folder, documents=", train_on: all")
    with pytest.raises(ConfigError, match=r"data\.mix\.talk\.data=tokens: use documents or chat"):
        kinds(folder, chat=", data: tokens")


def test_chats_in_a_mix_of_documents_need_a_template_too(folder: Path) -> None:
    mix = f"data.mix={{a: {{data: chat, files: [{folder}/a.jsonl]}}}}"
    with pytest.raises(ConfigError, match="have no chat template"):
        run_config(["data=documents", mix, "model=gpt"])
