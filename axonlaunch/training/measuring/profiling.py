"""Records traces of selected steps and ranks with ``torch.profiler`` and aligns their clocks.

``diagnostics.step_breakdown`` analyzes the traces.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from axonlaunch.comm import World
from axonlaunch.comm.checks.json_exchange import all_gather_json
from axonlaunch.config.options.recording import ProfileConfig
from axonlaunch.diagnostics import flight_recorder, step_breakdown
from axonlaunch.diagnostics.out_of_memory import is_out_of_memory
from axonlaunch.diagnostics.pipeline_actions import CLOCK_AHEAD
from axonlaunch.diagnostics.stragglers import files_of
from axonlaunch.diagnostics.wait_detection import waits
from axonlaunch.system.processes.process_state import state

_SAMPLE_S = 0.001
_MEMORY_EVENTS = 100_000


class StepProfiler:
    """Profiles a range of steps. Every rank has one."""

    def __init__(self, config: ProfileConfig, *, world: World, run_dir: Path) -> None:
        """Prepare profiling, and start to record memory history if it is configured.

        Args:
            config: Steps and ranks to profile.
            world: The ranks that train.
            run_dir: Run folder; traces are written to its folder ``profile``.
        """
        self._config = config
        self._world = world
        self._run_dir = run_dir
        self._folder = run_dir / step_breakdown.PROFILE_FOLDER
        self._takes_part = bool(config.steps) and world.rank in config.ranks
        self._clocks: list[tuple[str, int]] = []
        self._profile: Any = None
        self._waits: _WaitSampler | None = None
        self._is_over = False
        is_cuda = world.device.type == "cuda"
        self._remembers = config.memory and is_cuda and world.rank in config.ranks
        if self._remembers:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Return a context for a training step. Every rank calls this for each step.

        A run that resumes within the range of steps profiles the remaining ones, unless there are
        earlier traces, which are kept.
        """
        steps = self._config.steps
        if steps and step > steps[0] and not self._clocks and not self._is_over:
            self._is_over = step > steps[1] or self._has_traces()
        if not steps or self._is_over or step < steps[0]:
            with self._snapshot_on_oom():
                yield
            return
        if not self._clocks:
            self._start()
        with self._snapshot_on_oom(), record_function(f"{step_breakdown.STEP} {step}"):
            yield
        if step >= steps[1]:
            self.finish()

    def finish(self) -> None:
        """Write the traces, if any. Every rank calls this after the same step."""
        if not self._clocks or self._is_over:
            return
        self._is_over = True
        if self._takes_part:
            self._write()
        if self._world.world_size > 1:
            all_gather_json(None)  # wait until all ranks have written
        if self._world.is_main:
            offsets = {rank: self._ahead(rank) for rank in self._config.ranks}
            step_breakdown.merge(self._run_dir, offsets_ns=offsets)

    def _has_traces(self) -> bool:
        """Return whether any rank finds traces. Ranks may not share a file system."""
        is_there = any(self._folder.glob("rank_*.json.gz"))
        return any(all_gather_json(is_there)) if self._world.world_size > 1 else is_there

    def _ahead(self, rank: int) -> int:
        """Return how many nanoseconds a rank's clock is ahead of the first profiled rank's."""
        host, clock = self._clocks[self._config.ranks[0]]
        return 0 if self._clocks[rank][0] == host else self._clocks[rank][1] - clock

    def _start(self) -> None:
        device = self._world.device
        if self._takes_part:
            activities = [ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.synchronize(device)
            self._profile = profile(activities=activities)
            self._profile.start()
        clock: list[Any] = [socket.gethostname(), 0]
        if self._world.world_size > 1:
            dist.all_reduce(torch.zeros((), device=device))
            clock[1] = time.time_ns()  # all ranks leave the all-reduce at about the same time
        gathered = all_gather_json(clock) if self._world.world_size > 1 else [clock]
        self._clocks = [(str(host), int(nanoseconds)) for host, nanoseconds in gathered]
        if self._takes_part and device.type == "cpu":
            self._waits = _WaitSampler()

    def _write(self) -> None:
        if self._waits is not None:
            self._waits.close()
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{self._world.rank}.json.gz"
        partial = self._folder / f".rank_{self._world.rank}.json"
        self._profile.export_chrome_trace(str(partial))
        self._profile = None
        content = json.loads(partial.read_text())
        partial.unlink()
        zero = int(content.get("baseTimeNanoseconds", 0))
        if self._waits is not None:
            content["traceEvents"] += self._waits.events(content["traceEvents"], zero_ns=zero)
        content[CLOCK_AHEAD] = self._ahead(self._world.rank)
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as stream:
            json.dump(content, stream)
        self._dump_memory()

    @contextmanager
    def _snapshot_on_oom(self) -> Iterator[None]:
        """Write the allocator's snapshot if a step runs out of memory."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                self._dump_memory()
            raise

    def _dump_memory(self) -> None:
        if self._remembers:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"rank_{self._world.rank}.memory.pickle"
            torch.cuda.memory._dump_snapshot(str(path))


class _WaitSampler:
    """Records when the thread that creates it waits for other ranks, and along which mesh axis.

    gloo's collectives end in separate threads, and torch does not record their end. Therefore the
    thread's stack is sampled a thousand times a second. The axis is that of the last collective
    that was begun, which can be wrong if several are in flight.
    """

    def __init__(self) -> None:
        self._thread, self._native = threading.get_ident(), threading.get_native_id()
        self._intervals: list[list[int]] = []
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="profile", daemon=True)
        self._sampler.start()

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._sampler.join()

    def events(self, recorded: list[dict[str, Any]], *, zero_ns: int) -> list[dict[str, Any]]:
        """Return the waits as events of a trace.

        Args:
            recorded: Events of the trace. The axis is added to those that begin a collective.
            zero_ns: Start of the trace's time axis, in nanoseconds since the epoch.
        """
        begun = flight_recorder.begun_collectives()
        starts = [at for at, _ in begun]

        def axis_at(moment_ns: float) -> str:
            count = bisect.bisect(starts, moment_ns)
            return begun[count - 1][1] if count else "world"

        for event in recorded:
            if str(event.get("name")).startswith("c10d::"):
                end = zero_ns + 1000 * (float(event["ts"]) + float(event["dur"]))
                event["args"] = {**event.get("args", {}), "axis": axis_at(end)}
        waits = []
        for start, end in self._intervals:
            axis = axis_at(end)
            waits.append(
                {
                    "ph": "X",
                    "cat": step_breakdown.WAIT,
                    "name": f"waiting for {step_breakdown.axis_of(axis)}",
                    "pid": os.getpid(),
                    "tid": self._native,
                    "ts": (start - zero_ns) / 1000,
                    "dur": (end - start) / 1000,
                    "args": {"axis": axis},
                }
            )
        return waits

    def _sample(self) -> None:
        was_waiting, last = False, time.time_ns()
        while not self._over.wait(_SAMPLE_S):
            now = time.time_ns()
            files = files_of(sys._current_frames().get(self._thread))
            is_waiting = waits(files, is_asleep=state(os.getpid(), self._native) == "S")
            if is_waiting and was_waiting:
                self._intervals[-1][1] = now
            elif is_waiting:
                self._intervals.append([last, now])
            was_waiting, last = is_waiting, now
