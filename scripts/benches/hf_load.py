"""Measures ranks' host memory and time while they read a checkpoint of transformers.

Real processes start from a folder that ``save_pretrained`` wrote. A rank's memory is its anonymous
pages minus those before it built its engine; mapped files belong to the page cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 4
LAYOUTS = {
    "fsdp 4": ["strategy=fsdp"],
    "tensor 4": ["strategy=tensor", "strategy.tensor.degree=4"],
    "nf4, fsdp 4": ["strategy=fsdp", "adapter=lora", "adapter.base=nf4"],
}
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 256,
}
DATA = ["data=synthetic_tokens", "data.sequence_length=32", "train.global_batch_size=4"]


@dataclass(frozen=True)
class Loaded:
    """Measurements of a rank.

    Attributes:
        part: Bytes of its parameters.
        largest: Bytes of the model's largest parameter, unsharded.
        peak: Peak bytes of anonymous memory above the amount before its engine was built.
        seconds: Seconds of reading the weights.
    """

    part: int
    largest: int
    peak: int
    seconds: float


class Peak:
    """Peak anonymous memory of this process, sampled every millisecond."""

    def __init__(self) -> None:
        self.start = self.most = _anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, _anonymous())


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def save(folder: Path, *, layers: int, file_mb: int, **sizes: int) -> int:
    """Save a Llama with random weights in several files; return their bytes."""
    import torch
    import transformers

    config = transformers.LlamaConfig(**{**SIZES, **sizes}, num_hidden_layers=layers)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder, max_shard_size=f"{file_mb}MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def load(folder: Path, layout: list[str], *, ranks: int = RANKS) -> list[Loaded]:
    """Start an engine from a folder on real ranks."""
    from axonlaunch.system.processes import forked_call

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["axonlaunch.launch.local.preload"])
    with tempfile.TemporaryDirectory() as meet:
        calls = [(str(folder), layout, rank, ranks, meet) for rank in range(ranks)]
        return forked_call.call_together(context, "hf_load:on_rank", calls)


def on_rank(folder: str, layout: list[str], rank: int, ranks: int, meet: str) -> Loaded:
    """Build a rank's engine, and load its weights."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from axonlaunch import data
    from axonlaunch.checkpoint.exchange.weights import load_initial_weights
    from axonlaunch.comm import World
    from axonlaunch.comm.connection.rendezvous import local_place
    from axonlaunch.data.datasets.dataset import sample_inputs
    from axonlaunch.engines.build import build_engine

    torch.set_num_threads(1)
    config = configured(folder, layout, ranks)
    if config.adapter is not None and config.adapter.base == "nf4":
        importlib.import_module("bitsandbytes.functional")  # its code is not the model's memory
    sample = sample_inputs(data.build_dataset(config.data))
    store = dist.FileStore(f"{meet}/store", ranks)
    with World.join(local_place(rank, ranks), backend="gloo", store=store) as world, Peak() as peak:
        engine = build_engine(config, world, sample=sample)
        began = time.perf_counter()
        load_initial_weights(engine, config, world=world)
        seconds = time.perf_counter() - began
        tensors = [tensor for _, tensor in engine.named_parameters()]
        shards = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return Loaded(
        part=sum(shard.nbytes for shard in shards),
        largest=max(t.numel() * t.element_size() for t in tensors),
        peak=peak.most - peak.start,
        seconds=seconds,
    )


def configured(folder: str, layout: list[str], ranks: int) -> Any:
    """Return the checked configuration of a run that starts from a folder."""
    from support.configured import run_config

    overrides = ["model=hf", f"model.path={folder}", *DATA, *layout, f"launch.nproc={ranks}"]
    return run_config(overrides)


def reading(folder: Path) -> float:
    """Return the seconds in which one process reads the files."""
    room, began = bytearray(16 << 20), time.perf_counter()
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(room):
                pass
    return time.perf_counter() - began


def main() -> None:
    """Print for each layout the highest rank's memory, and its time compared with reading the
    files.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=25, help="number of layers; 25 are 2 GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = save(folder, layers=chosen.layers, file_mb=400)
        print(f"{total / 1e9:.2f} GB in {len(list(folder.glob('*.safetensors')))} files")
        for _ in range(chosen.repeats):
            for layout in chosen.only:
                read = reading(folder)
                ranks = load(folder, LAYOUTS[layout])
                slowest = max(r.seconds for r in ranks)
                above = max(r.peak - r.part for r in ranks)
                if chosen.json:
                    rows = [vars(r) for r in ranks]
                    print(json.dumps({"layout": layout, "read_s": read, "ranks": rows}))
                    continue
                print(
                    f"{layout:11} part {max(r.part for r in ranks) / 1e6:.0f} MB, beside it at "
                    f"most {above / 1e6:.0f} MB; largest tensor {ranks[0].largest / 1e6:.0f} MB; "
                    f"loaded in {slowest:.2f} s, files read in {read:.2f} s "
                    f"({slowest / read:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
