"""Cost of a run's files for its report: microseconds of a logged step, bytes per step and rank.

Also measures the CPU time of watching the ranks, relative to a step of the small workload, and of
sampling the node, relative to the time between samples.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from axonlaunch.config.options.model import GPTConfig
from axonlaunch.diagnostics.stragglers import _Samples
from axonlaunch.events import Event, RankTimes, StepLogged
from axonlaunch.models.build import build_model
from axonlaunch.system.storage.run_files import append_event
from axonlaunch.training.loggers.event_log import EventLog
from axonlaunch.training.loggers.jsonl import JSONLLogger
from axonlaunch.training.measuring.system_use import INTERVAL_S, SystemUse

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ranks", type=int, nargs="+", default=[2, 64, 1000])
parser.add_argument("--events", type=int, default=200)
parser.add_argument("--log-every", type=int, default=10)
args = parser.parse_args()


def step_s() -> float:
    """Return CPU seconds of a rank's step of ``scripts/bench step --workloads small``."""
    torch.set_num_threads(1)
    model = build_model(GPTConfig(hidden_size=256, num_hidden_layers=6, num_attention_heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 256, (4, 128))
    for step in range(6):
        if step == 1:
            began = time.process_time()
        model(tokens).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - began) / 5


def writing(ranks: int) -> tuple[float, int]:
    """Return CPU seconds and bytes of a logged step."""
    shares = tuple(0.01 * (rank % 100) for rank in range(ranks))
    names = tuple(f"node-{rank // 8:03}.cluster.example" for rank in range(ranks))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        listeners: list[Callable[[Event], None]] = [
            JSONLLogger(folder / "metrics.jsonl", resumed_at=None),
            EventLog(folder, world_size=ranks),
        ]
        began = time.process_time()
        for step in range(1, args.events + 1):
            events: list[Event] = [
                StepLogged(
                    step, 2.345678, 1e-3, 0.98765, 4096, 123456.7, 0.0331, 2**30, 0.1, 10**6
                ),
                RankTimes(step, names, shares, shares, shares, shares),
            ]
            for event in events:
                for listener in listeners:
                    listener(event)
        seconds = (time.process_time() - began) / args.events
        return seconds, sum(path.stat().st_size for path in folder.iterdir()) // args.events


def watching() -> float:
    """Return the fraction of a core that sampling the training thread takes."""
    samples = _Samples()
    samples.note("stepping")
    began, cpu = time.perf_counter(), time.process_time()
    time.sleep(5)
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    samples.close()
    return share


def sampling() -> float:
    """Return CPU seconds of a sample of the node and its line."""
    use = SystemUse([])
    with tempfile.TemporaryDirectory() as name:
        began = time.process_time()
        for _ in range(args.events):
            use.sample()
            append_event(Path(name), "system", use.take())
        seconds: float = (time.process_time() - began) / args.events
        return seconds


def main() -> None:
    step, share, sample = step_s(), watching(), sampling()
    print(f"a step {step * 1e3:.1f} ms, watching the rank {share:.2%} of a core")
    of_core = sample / INTERVAL_S
    print(f"a sample of the node {sample * 1e6:.0f} us, {of_core:.4%} of a core")
    columns = f"{'ranks':>6}{'a logged step':>16}{'of a step':>12}{'with sampling':>15}"
    print(f"{columns}{'bytes per rank':>14}")
    for ranks in args.ranks:
        seconds, size = writing(ranks)
        of_step = seconds / args.log_every / step
        print(
            f"{ranks:>6}{seconds * 1e6:>13.0f} us{of_step:>12.3%}{of_step + share:>15.3%}"
            f"{size / args.log_every / ranks:>14.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
