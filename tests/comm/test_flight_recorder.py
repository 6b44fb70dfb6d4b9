"""Reports of torch's flight recorder about a rank.

Its names are private to torch. If this fails after an update, change only
``axonlaunch/diagnostics/flight_recorder.py``: look for ``_dump_fr_trace_json`` in torch's
``csrc/distributed/c10d``.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from axonlaunch.diagnostics.flight_recorder import OpenCollective, Record

RANK = """
import os, pickle, sys, time

import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh

from axonlaunch.diagnostics import flight_recorder

rank = int(os.environ["RANK"])
store = dist.FileStore("store", 3)
dist.init_process_group("gloo", rank=rank, world_size=3, store=store)
mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp_shard",))
pair = dist.new_group([0, 2], group_desc="mesh_tp")
dist.all_reduce(torch.ones(3))
if rank != 1:
    dist.all_reduce(torch.ones(5), group=pair)
if rank == 0:
    waiting = dist.all_reduce(torch.ones(7, dtype=torch.bfloat16), group=pair, async_op=True)
time.sleep(0.2)
print("RECORD", flight_recorder.take().to_json())
assert [entry["collective_seq_id"] for entry in pickle.loads(flight_recorder.dump())["entries"]]
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_flight_recorder_reports_unfinished_collectives(
    run_ranks: Callable[..., list[tuple[int | None, str]]],
) -> None:
    reported = []
    for status, text in run_ranks(RANK, world_size=3):
        assert status == 0, text
        line = next(line for line in text.splitlines() if line.startswith("RECORD "))
        reported.append(Record.of(json.loads(line.removeprefix("RECORD "))))
    [world, pair] = reported[0].begun
    assert reported[0].begun == {world: 1, pair: 2}
    assert reported[0].open == (
        OpenCollective(
            group=pair, axis="tp", ranks=(0, 2), number=2, op="all_reduce", num_bytes=14
        ),
    )
    assert reported[1:] == [
        Record(begun={world: 1}, open=()),
        Record(begun={world: 1, pair: 1}, open=()),
    ]
