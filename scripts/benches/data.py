"""Measures tokenizing against datasets.map, feeding batches, the first batch, and memory.

The corpus is the source of Python's library, as rows of JSON lines, repeated up to a size; the
tokenizer is trained on it. Contestants run one after another in separate processes, on the same
number of cores, several times in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
MB, MIB = 10**6, 1 << 20
ROW = 4000
"""Characters per row."""
VOCABULARY = 8192
STEP_TIMEOUT_S = 600.0
LEARNED_MB, FED_MB = 20, 20
"""Megabytes of text for training the tokenizer and for feeding batches."""


def write_corpus(file: Path, size: int) -> Path:
    """Write rows of at least ``size`` bytes."""
    written = 0
    with file.open("w") as stream:
        for number, text in enumerate(_texts()):
            written += stream.write(json.dumps({"text": f"# {number}\n{text}"}) + "\n")
            if written >= size:
                return file
    raise AssertionError("texts ended")


def _texts() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    sources = [file.read_text(errors="ignore") for file in sorted(library.glob("*.py"))]
    while True:
        for source in sources:
            yield from (source[at : at + ROW] for at in range(0, len(source), ROW))


def learn_tokenizer(corpus: Path, folder: Path) -> Path:
    """Train a tokenizer on a corpus, as tokenizer=train does."""
    from axonlaunch.config.options.documents import DocumentsConfig
    from axonlaunch.config.options.tokenizer import TokenizerConfig
    from axonlaunch.data.texts.learned_tokenizer import load_or_learn

    data = DocumentsConfig(files=[str(corpus)], cache_dir=str(folder))
    chosen = TokenizerConfig(name="train", vocab_size=VOCABULARY)
    load_or_learn(chosen, data, report=lambda state: None)
    return next(folder.glob("tokenizer-*"))


def by_axonlaunch(corpus: Path, tokenizer: Path, cores: int) -> tuple[float, int]:
    """Return the seconds for tokenizing the rows, and the peak memory of the process in bytes."""
    with tempfile.TemporaryDirectory() as cache:
        command = [
            *(str(BIN / "axonlaunch"), "data", "prepare", "--json", "data=documents"),
            *(f"data.files=[{corpus}]", f"tokenizer.path={tokenizer}", f"data.cache_dir={cache}"),
        ]
        printed, peak = _run(command, cores)
        assert printed["tokenized"]
        return float(printed["seconds"]), peak


def by_datasets(corpus: Path, tokenizer: Path, cores: int) -> tuple[float, float]:
    """Return the seconds of ``datasets.map``, without and with reading the rows into Arrow."""
    command = [sys.executable, __file__, "--rival", str(corpus), str(tokenizer), str(cores)]
    with tempfile.TemporaryDirectory() as cache:
        printed, _ = _run(command, cores, HF_DATASETS_CACHE=cache, HF_HUB_OFFLINE="1")
    return printed["map_s"], printed["all_s"]


def rival(corpus: str, tokenizer: str, cores: int) -> None:
    """Tokenize as in the documentation of datasets, and print the seconds."""
    import datasets
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tokenizer)
    datasets.disable_progress_bars()
    began = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=corpus, split="train")
    loaded = time.perf_counter()
    rows.map(
        lambda batch: made(batch["text"]),
        batched=True,
        num_proc=cores,
        remove_columns=rows.column_names,
    )
    ended = time.perf_counter()
    print(json.dumps({"map_s": ended - loaded, "all_s": ended - began}))


def _run(command: list[str], cores: int, **variables: str) -> tuple[dict[str, Any], int]:
    """Run a command; return its parsed output, and its peak resident memory in bytes."""
    threads = {"RAYON_NUM_THREADS": str(cores), "OMP_NUM_THREADS": str(cores)}
    environment = {**os.environ, **threads, **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        printed: dict[str, Any] = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return printed, usage.ru_maxrss * 1024


def feeding(corpus: Path, tokenizer: Path, steps: int) -> tuple[float, float, float]:
    """Measure how long a small GPT's steps wait for the thread that prepares batches.

    Returns:
        Seconds that steps wait for batches, total seconds of the steps, and seconds of preparing
            the batches in parallel.
    """
    import torch

    from axonlaunch import config
    from axonlaunch.comm import World
    from axonlaunch.config.consistency.layout import Layout
    from axonlaunch.data import build_dataset
    from axonlaunch.data.datasets.dataset import sample_inputs
    from axonlaunch.data.datasets.loader import rank_loader
    from axonlaunch.engines.build import build_engine
    from axonlaunch.preflight import checks

    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as cache:
        command = ["data=documents", f"data.files=[{corpus}]", f"tokenizer.path={tokenizer}"]
        command += [f"data.cache_dir={cache}", "data.sequence_length=512", "strategy=single"]
        command += ["model=gpt", f"model.vocab_size={VOCABULARY}", "train.global_batch_size=8"]
        command += ["model.max_position_embeddings=512", "launch.nproc=1", "checkpoint.every=0"]
        chosen = checks.resolve(config.load(command))

        def work(world: World) -> tuple[float, float, float]:
            dataset = build_dataset(chosen.data, chosen.tokenizer)
            engine = build_engine(chosen, world, sample=sample_inputs(dataset))
            layout = Layout.of(chosen, world_size=1)
            loader = rank_loader(chosen, dataset, layout=layout, rank=0)
            batches = loader.iterate()
            waits, takes = [], []
            for _ in range(steps + 1):
                began = time.perf_counter()
                batch = next(batches)
                got = time.perf_counter()
                engine.train_step(batch)
                waits.append(got - began)
                takes.append(time.perf_counter() - began)
            batches.close()
            began = time.perf_counter()
            for step in range(steps):
                loader.batch(2 * steps + step)
            return sum(waits[1:]), sum(takes[1:]), time.perf_counter() - began

        [rates] = World.mock(1, timeout_s=STEP_TIMEOUT_S).run(work)
        return rates


def first_batch(corpora: Path, tokenizer: Path) -> tuple[float, float]:
    """Return the seconds to the first batch of files, and those to tokenize them all."""
    import numpy as np

    from axonlaunch.config.options.documents import DocumentsConfig
    from axonlaunch.config.options.tokenizer import TokenizerConfig
    from axonlaunch.data import build_dataset
    from axonlaunch.data.datasets.loader import Loader, order_of

    with tempfile.TemporaryDirectory() as cache:
        chosen = DocumentsConfig(
            files=[f"{corpora}/*.jsonl"], shuffle="shards", held_out=8, cache_dir=cache
        )
        began = time.perf_counter()
        dataset = build_dataset(chosen, TokenizerConfig(path=str(tokenizer)))
        Loader(dataset, seed=0, global_batch_size=8).batch(0)
        first = time.perf_counter() - began
        order_of(dataset, np.array([2**40]), seed=0)  # beyond all rows: each file is tokenized
        return first, time.perf_counter() - began


def compare_speed(folder: Path, tokenizer: Path, arguments: argparse.Namespace) -> None:
    """Print the speed of tokenizing compared with ``datasets.map``, in turn."""
    corpus = write_corpus(folder / "corpus.jsonl", arguments.mb * MB)
    ours, theirs = [], []
    for _ in range(arguments.repeats):
        ours.append(by_axonlaunch(corpus, tokenizer, arguments.cores)[0])
        theirs.append(by_datasets(corpus, tokenizer, arguments.cores))
    seconds = statistics.median(ours)
    mapped, everything = (statistics.median(column) for column in zip(*theirs, strict=True))
    size = corpus.stat().st_size / MB
    print(f"tokenize {size:.0f} MB on {arguments.cores} cores")
    print(f"  axonlaunch data prepare     {size / seconds:7.2f} MB/s")
    for rival_name, took in (("datasets.map", mapped), ("with load_dataset", everything)):
        print(f"  {rival_name:<26}  {size / took:7.2f} MB/s, ours is {took / seconds:.2f} of it")


def measure_feeding(folder: Path, tokenizer: Path, arguments: argparse.Namespace) -> None:
    """Print the fraction of a step that is spent waiting for its batch."""
    corpus = write_corpus(folder / "fed.jsonl", FED_MB * MB)
    waits, takes, makes = feeding(corpus, tokenizer, arguments.steps)
    step = f"a step of {takes / arguments.steps * 1e3:.0f} ms waits {waits / takes:.2%}"
    print(f"feeding: {step}; its batch is made in {makes / takes:.2%} of that time, beside it")


def measure_start(folder: Path, tokenizer: Path, arguments: argparse.Namespace) -> None:
    """Print the time until the first batch of one large file is available."""
    corpora = folder / "corpora"
    corpora.mkdir()
    write_corpus(corpora / "large.jsonl", arguments.mb * MB)
    first, everything = first_batch(corpora, tokenizer)
    print(
        f"data.shuffle=shards: the first batch of a file of {arguments.mb} MB after {first:.1f} s, "
        f"all of it tokenized after {everything:.1f} s"
    )


def measure_memory(folder: Path, tokenizer: Path, arguments: argparse.Namespace) -> None:
    """Print the peak memory of tokenizing corpora of several sizes."""
    for size in arguments.memory_mb:
        large = write_corpus(folder / "large.jsonl", size * MB)
        seconds, peak = by_axonlaunch(large, tokenizer, arguments.cores)
        took = f"{peak / MIB:.0f} MiB at its peak, {seconds:.0f} s"
        print(f"memory: a corpus of {size} MB takes {took}", flush=True)
        large.unlink()


PARTS = {
    "tokenize": compare_speed,
    "feeding": measure_feeding,
    "start": measure_start,
    "memory": measure_memory,
}


def main() -> None:
    """Run all parts, or the chosen ones, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run; all by default")
    parser.add_argument("--mb", type=int, default=200, help="megabytes of text to tokenize")
    parser.add_argument(
        "--memory-mb",
        type=int,
        nargs="+",
        default=[4000],
        help="megabytes of the corpora in the part memory",
    )
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", help="folder of the corpora (default: the temporary folder)")
    parser.add_argument("--rival", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rival:
        corpus, tokenizer, cores = arguments.rival
        rival(corpus, tokenizer, int(cores))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        os.environ["TMPDIR"] = name  # caches are next to the corpora
        tempfile.tempdir = name
        text = write_corpus(folder / "learned.jsonl", LEARNED_MB * MB)
        tokenizer = learn_tokenizer(text, folder / "learned")
        for part in arguments.only or PARTS:
            PARTS[part](folder, tokenizer, arguments)


if __name__ == "__main__":
    main()
