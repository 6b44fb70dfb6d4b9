"""A run that resumes after its data changed is refused, or continues from the data's first row."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import corpus

from axonlaunch import checkpoint, config
from axonlaunch.comm import World
from axonlaunch.comm.errors import RankFailedError
from axonlaunch.config import ConfigError
from axonlaunch.data.datasets import loader
from axonlaunch.data.datasets.origin import Origin
from axonlaunch.data.shards import shard_maker
from axonlaunch.data.shards.file_sum import sum_of_file
from axonlaunch.preflight import checkpoint as checkpoint_checks, checks, dataset as dataset_checks
from axonlaunch.training import worker

SMALL = [
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("train.global_batch_size=4", "train.eval_batches=0", "launch.nproc=2", "strategy=ddp"),
    *("launch.backend=mock", "checkpoint.every=2", "checkpoint.keep_last=9"),
    *("model.max_position_embeddings=64", "model.vocab_size=512"),
]


ROWS = """
import torch


class Rows:
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((16,), index), torch.full((16,), index + 1)
"""


def write_rows(file: Path, word: str, count: int = 60) -> None:
    rows = [json.dumps({"text": f"{word} number {number} of all"}) for number in range(count)]
    file.write_text("\n".join(rows))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[int]]:
    """Return a function that trains to a step in the run's folder, with a command's checks.

    The function returns the row positions in the data that rank 0 read at first.
    """

    def train(*overrides: str, steps: int = 2) -> list[int]:
        keys = [*SMALL, *overrides, f"run_dir={tmp_path / 'run'}", f"train.steps={steps}"]
        chosen = checks.resolve(config.load(keys), devices=0)
        positions: list[int] = []
        with pytest.MonkeyPatch.context() as patched:
            of_rows = loader.order_of

            def note(dataset: Any, places: Any, *, seed: int) -> Any:
                positions.extend(places.tolist())
                return of_rows(dataset, places, seed=seed)

            patched.setattr(loader, "order_of", note)
            (tmp_path / "run").mkdir(exist_ok=True)
            World.mock(2).run(lambda world: worker.run(chosen, world))
        return sorted(positions)

    return train


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    write_rows(tmp_path / "a.jsonl", "apple")
    write_rows(tmp_path / "b.jsonl", "berry")
    files = f"data.files=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]"
    return ["data=documents", files, "data.sequence_length=16", f"data.cache_dir={tmp_path}/cache"]


def newest(tmp_path: Path) -> checkpoint.Checkpoint:
    found = checkpoint.latest(tmp_path / "run")
    assert found is not None
    return found


def test_a_changed_file_is_an_error_that_names_it(
    run: Callable[..., list[int]], documents: list[str], tmp_path: Path
) -> None:
    run(*documents)
    write_rows(tmp_path / "b.jsonl", "bread")
    with pytest.raises(ConfigError) as refused:
        run(*documents, steps=4)
    assert "data.files" in str(refused.value)
    assert f"changed: {tmp_path}/b.jsonl (in {tmp_path}/run/checkpoints/step_2" in str(
        refused.value
    )
    assert "a.jsonl (" not in str(refused.value)
    assert "checkpoint.changed_data=restart" in str(refused.value)


def test_new_and_missing_files_are_named(
    run: Callable[..., list[int]], documents: list[str], tmp_path: Path
) -> None:
    run(*documents)
    write_rows(tmp_path / "c.jsonl", "cherry")
    files = f"data.files=[{tmp_path}/a.jsonl,{tmp_path}/c.jsonl]"
    with pytest.raises(ConfigError, match=rf"missing: {tmp_path}/b.jsonl; new: {tmp_path}/c.jsonl"):
        run(*documents, files, steps=4)
    files = f"data.files=[{tmp_path}/b.jsonl,{tmp_path}/a.jsonl]"
    with pytest.raises(ConfigError, match="the same files in another order"):
        run(*documents, files, steps=4)


def test_restart_reads_new_data_from_the_first_row_and_later_resumes_continue(
    run: Callable[..., list[int]], documents: list[str], tmp_path: Path
) -> None:
    run(*documents)
    write_rows(tmp_path / "b.jsonl", "bread")
    positions = run(*documents, "checkpoint.changed_data=restart", steps=4)
    assert positions[:8] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert newest(tmp_path).step == 4
    assert newest(tmp_path).first_row_at == 8
    positions = run(*documents, "checkpoint.changed_data=restart", steps=6)
    assert positions[:8] == [8, 9, 10, 11, 12, 13, 14, 15]
    assert newest(tmp_path).first_row_at == 8


def test_epochs_count_the_new_data_after_a_restart(
    run: Callable[..., list[int]], documents: list[str], tmp_path: Path
) -> None:
    run(*documents)
    write_rows(tmp_path / "b.jsonl", "bread")
    keys = [*SMALL, *documents, f"run_dir={tmp_path / 'run'}", "train.epochs=1"]
    fresh = checks.resolve(config.load([*keys, "checkpoint.resume=never"]), devices=0)
    again = checks.resolve(config.load([*keys, "checkpoint.changed_data=restart"]), devices=0)
    assert again.train.num_steps == 2 + fresh.train.num_steps


def test_moved_and_touched_files_with_the_same_rows_resume(
    run: Callable[..., list[int]], documents: list[str], tmp_path: Path
) -> None:
    run(*documents)
    (tmp_path / "moved").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
        os.utime(tmp_path / "moved" / name, (1, 1))
    positions = run(*documents, f"data.files=[{tmp_path}/moved/*.jsonl]", steps=4)
    assert positions[:4] == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sequence_length=8", r"data.sequence_length=8: was 16 "),
        ("data.packing=best_fit", r'data.packing=best_fit: was "concat"'),
        ("data.held_out=7", r"data.held_out=7: was 0.01"),
    ],
)
def test_changed_options_of_data_are_an_error(
    override: str, message: str, run: Callable[..., list[int]], documents: list[str]
) -> None:
    run(*documents)
    with pytest.raises(ConfigError, match=message):
        run(*documents, override, steps=4)


def test_a_changed_chat_template_is_an_error_or_begins_at_the_first_row(
    run: Callable[..., list[int]], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    folder = corpus.save_tokenizer(tmp_path / "tokenizer")
    template = folder / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}")
    chats = [
        {"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(40)
    ]
    keys = [
        *("data=chat", f"data.files=[{corpus.write_jsonl(tmp_path / 'a.jsonl', chats)}]"),
        *("data.train_on=all", f"tokenizer.path={folder}", f"data.cache_dir={tmp_path}/cache"),
        "data.sequence_length=32",
    ]
    run(*keys)
    template.write_text("{% for m in messages %}{{ m['role'] + '> ' + m['content'] }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"tokenizer.path: has another chat template"):
        run(*keys, steps=4)
    run(*keys, "checkpoint.changed_data=restart", steps=4)
    assert newest(tmp_path).first_row_at == 8


def test_resumed_run_keeps_the_day_that_its_chat_template_writes(
    run: Callable[..., list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    template = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    folder = corpus.save_tokenizer(tmp_path / "tokenizer", chat_template=template)
    chats = [{"prompt": f"What is {number}?", "completion": "It is."} for number in range(40)]
    keys = [
        *("data=chat", f"data.files=[{corpus.write_jsonl(tmp_path / 'a.jsonl', chats)}]"),
        *("data.train_on=all", f"tokenizer.path={folder}", "data.sequence_length=32"),
    ]
    now = classmethod(lambda cls, zone: cls(2026, 1, day, tzinfo=zone))
    monkeypatch.setattr(
        dataset_checks, "datetime", type("Clock", (datetime.datetime,), {"now": now})
    )
    day = 30
    run(*keys, f"data.cache_dir={tmp_path}/cache")
    frozen = checks.resolve(config.load([*SMALL, *keys]), devices=0)
    assert frozen.data.template_date == "2026-01-30"  # type: ignore[attr-defined]
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml(frozen))
    day = 31
    keys += [f"data.cache_dir={tmp_path}/empty"]
    assert run(*keys, steps=4)[:4] == [8, 9, 10, 11]
    with pytest.raises(ConfigError, match=r'data.template_date=2026-01-31: was "2026-01-30"'):
        run(*keys, "data.template_date=2026-01-31", steps=6)
    killed = config.to_yaml(frozen).replace("2026-01-30", "2026-01-31")  # before its first save
    (tmp_path / "run" / "config.yaml").write_text(killed)
    assert run(*keys, steps=5)[:4] == [16, 17, 18, 19]
    assert run(*keys, "checkpoint.changed_data=restart", steps=6)[:4] == [0, 1, 2, 3]


def test_a_changed_file_of_bytes_or_of_tokens_is_an_error(
    run: Callable[..., list[int]], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("some text " * 500)
    tokens = np.arange(5000, dtype=np.uint16) % 256
    tokens.tofile(tmp_path / "a.bin")
    text = ["data=text", f"data.files=[{tmp_path}/a.txt]", "data.sequence_length=16"]
    flat = ["data=tokens", f"data.path={tmp_path}/a.bin", "data.sequence_length=16"]
    run(*text)
    (tmp_path / "a.txt").write_text("some test " * 500)
    with pytest.raises(ConfigError, match=r"changed: .*a.txt"):
        run(*text, steps=4)
    with pytest.raises(ConfigError, match=r'data.name=tokens: was "text"'):
        run(*flat, steps=4)
    run(*flat, "checkpoint.changed_data=restart", steps=4)
    (tokens + 1).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"changed: .*a.bin"):
        run(*flat, steps=6)


def test_shuffled_shards_compare_only_the_shards_that_were_read(
    run: Callable[..., list[int]],
    documents: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_maker, "SHARD_SIZE", 1000)
    monkeypatch.setattr(shard_maker, "_CHUNK_ROWS", 5)
    write_rows(tmp_path / "a.jsonl", "apple", 200)
    write_rows(tmp_path / "b.jsonl", "berry", 200)
    run(*documents, "data.shuffle=shards")
    saved = newest(tmp_path).origin
    assert saved is not None
    assert 0 < saved["shards"] < 6
    write_rows(tmp_path / "b.jsonl", "bread", 200)
    assert run(*documents, "data.shuffle=shards", steps=4)[:4] == [8, 9, 10, 11]
    write_rows(tmp_path / "a.jsonl", "acorn", 200)
    with pytest.raises(ConfigError, match=r"changed: .*a.jsonl"):
        run(*documents, "data.shuffle=shards", steps=6)


def test_data_that_changed_after_the_check_ends_the_run(
    documents: list[str], run: Callable[..., list[int]], tmp_path: Path
) -> None:
    run(*documents)
    keys = [*SMALL, *documents, f"run_dir={tmp_path / 'run'}", "train.steps=4"]
    chosen = checks.resolve(config.load(keys), devices=0)
    write_rows(tmp_path / "b.jsonl", "bread")
    with pytest.raises(RankFailedError, match=r"data is not that of|changed: .*b.jsonl"):
        World.mock(2).run(lambda world: worker.run(chosen, world))


def test_a_manifest_s_description_of_data_can_not_write_to_the_terminal() -> None:
    content = Origin((("a\x1b[2J", "1-0"),), {}).to_dict()
    with pytest.raises(TypeError):
        Origin.from_dict(content)


def test_large_files_are_compared_by_size_and_evenly_spaced_parts(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    with file.open("wb") as stream:
        stream.truncate((1 << 30) + 5)
    first_sum = sum_of_file(file)
    with file.open("r+b") as stream:
        stream.seek((1 << 30) + 4)
        stream.write(b"x")
    assert sum_of_file(file) != first_sum


def test_a_checkpoint_without_a_description_of_its_data_resumes(
    run: Callable[..., list[int]], documents: list[str], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Origin, "to_dict", lambda origin: None)
        run(*documents)
    assert newest(tmp_path).origin is None
    assert run(*documents, "data.sequence_length=8", steps=4)[:4] == [8, 9, 10, 11]


def test_overwrite_does_not_replace_the_checkpoints_of_another_folder(
    run: Callable[..., list[int]], documents: list[str], tmp_path: Path
) -> None:
    run(*documents)
    other = [f"run_dir={tmp_path / 'other'}", f"checkpoint.path={tmp_path / 'run'}"]
    message = r"checkpoint.overwrite=true: .*/step_2 exists, and checkpoint.path is not moved aside"
    with pytest.raises(ConfigError, match=message):
        checks.resolve(
            config.load([*SMALL, *documents, *other, "checkpoint.overwrite=true"]), devices=0
        )


def test_other_added_tokens_are_named_when_a_run_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder, file = corpus.save_tokenizer(tmp_path / "tokenizer"), tmp_path / "a.jsonl"
    write_rows(file, "apple")
    keys = [*SMALL, "data=documents", f"data.files=[{file}]", f"tokenizer.path={folder}"]
    (tmp_path / "config.yaml").write_text(config.to_yaml(config.load(keys)))
    more = config.load([*keys, "tokenizer.add_tokens=[more]", "tokenizer.special={eos: end}"])
    assert [str(issue) for issue in checkpoint_checks._other_tokenizer(more, tmp_path)] == [
        f"tokenizer.add_tokens=[more]: {tmp_path} was trained without it; remove it",
        f"tokenizer.special.eos=end: {tmp_path} was trained without it; remove it",
    ]


def test_other_kind_of_data_is_an_error_or_begins_at_the_first_row(
    run: Callable[..., list[int]],
    documents: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows_of_a_user.py").write_text(ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    custom = ["data=custom", "data.target=rows_of_a_user:Rows", "data.num_classes=512"]
    assert run(*custom)[:4] == [0, 1, 2, 3]
    assert run(*custom, "checkpoint.changed_data=restart", steps=4)[:4] == [8, 9, 10, 11]
    message = r'data.name=documents: was "custom" .*, or checkpoint.changed_data=restart'
    with pytest.raises(ConfigError, match=message):
        run(*documents, steps=6)
    assert run(*documents, "checkpoint.changed_data=restart", steps=6)[:4] == [0, 1, 2, 3]
    assert newest(tmp_path).first_row_at == 16
    with pytest.raises(ConfigError, match=r'data.name=custom: was "documents"'):
        run(*custom, steps=8)
