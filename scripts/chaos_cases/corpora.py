"""A run on text is interrupted, also while it tokenizes, and resumed.

Half of the runs are on a mix of chats and documents, the others on a large file, which is tokenized
shard after shard while they train on earlier ones. Half of each resume in the same layout, and must
have the losses of an undisturbed run to the bit; the others resume in another layout each time, and
must have them to rounding.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

from kills import act, is_alive, judge, wait
from lab import (
    STEPS,
    STRATEGIES,
    Lab,
    Log,
    check_complete,
    check_nothing_is_left,
    end,
    steps_logged,
)
from support import corpus
from support.command import Command

from axonlaunch.data.shards.shard_maker import SHARD_SIZE

FAULTS = 2
"""Number of interruptions of a run before it may complete."""
PAIRS = [("launcher", "SIGKILL"), ("launcher", "SIGTERM"), ("rank", "SIGKILL"), ("all", "SIGKILL")]
ROUNDING = 1e-4
"""Relative tolerance of a loss after this number of steps in other layouts."""
HELD_OUT_COPIES = 6
"""Copies of the library's functions: enough to interrupt their tokenization."""

SHARDS, SHARD_ROWS = 4, 64
"""Rows of the large file; a run reads each at least once."""

_undisturbed: dict[tuple[str, bool], list[float]] = {}


def run(lab: Lab, seed: int, log: Log) -> None:
    """Interrupt a run at random points and check that it loses and repeats no sample."""
    chance = random.Random(seed)
    same = seed % 2 == 0
    names = [("ddp", "fsdp")[seed // 2 % 2]] if same else list(STRATEGIES)
    in_shards = seed // 4 % 2 == 1
    log("shards" if in_shards else "a mix")
    log("the same layout" if same else "another layout each time")
    command = lab.quick(lab.new(f"corpus-{seed}"))
    cache = lab.folder / f"tokens-{seed}"
    overrides = _words(lab, cache, in_shards=in_shards)
    try:
        for fault in range(FAULTS):
            strategy = chance.choice(names)
            process = command.start("train", *overrides, *STRATEGIES[strategy])
            tokenizing = fault == 0 and chance.random() < 0.4
            pairs = PAIRS[:2] if tokenizing else PAIRS
            victim, action = chance.choice(pairs)
            log(strategy)
            _some_moment(chance, command, process, log, cache=cache if tokenizing else None)
            act(chance, command, process, victim, action, log)
            judge(command, end(process), victim, action)
            if steps_logged(command) >= STEPS:
                break
        strategy = chance.choice(names)
        done = end(command.start("train", *overrides, *STRATEGIES[strategy]))
        assert done.status == 0, f"it does not resume: {done.text[-1500:]}"
        check_nothing_is_left(command)
        if same:
            check_complete(command, _losses(lab, strategy, in_shards))
        else:
            log(strategy)
            _check_rounding(command, _losses(lab, "ddp", in_shards))
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _some_moment(
    chance: random.Random, command: Command, process: Any, log: Log, *, cache: Path | None
) -> None:
    """Wait for a moment of tokenizing, if the cache is passed, or of training."""
    if cache is not None:
        log("while tokenizing")
        wait(process, lambda: any(cache.glob("*.partial/progress.json")), turn_s=0.001)
        time.sleep(chance.uniform(0, 0.3))
        return
    lines = steps_logged(command) + chance.randint(1, STEPS // 3)
    log(f"at line {lines}")
    wait(process, lambda: steps_logged(command) >= lines or not is_alive(process.pid))
    time.sleep(chance.uniform(0, 0.05))


def _mixed(lab: Lab) -> list[str]:
    """Return overrides of the data: two kinds of rows; a run reads some of them twice."""
    folder = lab.folder / "corpus"
    if not folder.exists():
        folder.mkdir()
        functions = corpus.functions(1000)
        chats = [{"prompt": f"What is {f['name']}?", "completion": f["doc"]} for f in functions]
        corpus.write_jsonl(folder / "documents.jsonl", functions[:12])
        corpus.write_jsonl(folder / "chats.jsonl", chats[:20])
        corpus.write_jsonl(folder / "held_out.jsonl", functions[20:] * HELD_OUT_COPIES)
    code = f"{{files: [{folder}/documents.jsonl], held_out: [{folder}/held_out.jsonl]}}"
    talk = f"{{data: chat, files: [{folder}/chats.jsonl], held_out: 2}}"
    return [
        *("data=documents", f"data.mix={{code: {code}, talk: {talk}}}"),
        *("tokenizer=train", "tokenizer.vocab_size=400"),
    ]


def _sharded(lab: Lab) -> list[str]:
    """Return overrides of the data: a file of several shards, with a row for each long document."""
    file = lab.folder / "large.jsonl"
    if not file.exists():
        texts = [row["text"] for row in corpus.functions()]
        length = SHARD_SIZE // SHARD_ROWS
        rows = []
        for number in range(SHARDS * SHARD_ROWS):
            text = texts[number % len(texts)]
            rows.append({"text": (text * (1 + length // len(text)))[:length]})
        corpus.write_jsonl(file, rows)
    return [
        *("data=documents", f"data.files=[{file}]", "data.shuffle=shards"),
        *("data.packing=none", "data.held_out=4"),
    ]


def _words(lab: Lab, cache: Path, *, in_shards: bool) -> list[str]:
    """Return a run's overrides."""
    return [
        *(_sharded(lab) if in_shards else _mixed(lab)),
        *("model=gpt", "model.hidden_size=32", "model.num_hidden_layers=2"),
        *("model.num_attention_heads=2", "model.vocab_size=400"),
        *("data.sequence_length=32", f"data.cache_dir={cache}", "train.global_batch_size=12"),
        *("train.micro_batch_size=2", f"train.steps={STEPS}", "train.log_every=1"),
        *("train.eval_batches=2", "optimizer.eps=1e-5", "launch.threads=1"),
        *("checkpoint.every=3", "name=run"),
    ]


def _losses(lab: Lab, strategy: str, in_shards: bool) -> list[float]:
    """Return the losses of an undisturbed run."""
    if (strategy, in_shards) not in _undisturbed:
        command = lab.quick(lab.new(f"undisturbed-corpus-{strategy}-{in_shards:d}"))
        overrides = _words(lab, lab.folder / "tokens", in_shards=in_shards)
        done = end(command.start("train", *overrides, *STRATEGIES[strategy]))
        assert done.status == 0, f"the undisturbed run failed: {done.text}"
        _undisturbed[strategy, in_shards] = command.losses("run")
    return _undisturbed[strategy, in_shards]


def _check_rounding(command: Command, expected: list[float]) -> None:
    lines = [line for line in command.lines("run") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "other steps"
    for line, loss in zip(lines, expected, strict=True):
        near = math.isclose(line["loss"], loss, rel_tol=ROUNDING)
        assert near, f"step {line['step']}: a loss of {line['loss']}, undisturbed {loss}"
