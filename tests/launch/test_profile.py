"""Profiled steps: parts of a trace, alignment of traces, and files of a run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.command import TINY, Served
from support.configured import run_config

from axonlaunch.comm import World
from axonlaunch.config import ConfigError, read_frozen, to_yaml
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.options.recording import ProfileConfig
from axonlaunch.diagnostics import step_breakdown
from axonlaunch.diagnostics.pipeline_actions import CLOCK_AHEAD, pipeline_actions
from axonlaunch.diagnostics.step_breakdown import breakdown, read_trace
from axonlaunch.engines.pipeline.schedule import PipelineSchedule
from axonlaunch.training.measuring.profiling import StepProfiler


def event(name: str, start: float, end: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    tid = 7 if cat == "kernel" else 1
    span = {"ts": start, "dur": end - start}
    return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "args": args, **span}


def trace(*events: dict[str, Any], base: int = 0) -> dict[str, Any]:
    return {"traceEvents": list(events), "baseTimeNanoseconds": base}


def steps(*ends: float) -> list[dict[str, Any]]:
    starts = (0.0, *ends)
    return [
        event(f"axonlaunch step {4 + n}", starts[n], end, "user_annotation")
        for n, end in enumerate(ends)
    ]


def shares(content: dict[str, Any]) -> dict[str, float]:
    """Return the parts of a step, in microseconds."""
    step = breakdown(content, rank=0)
    assert sum(step.parts.values()) == pytest.approx(step.step_s)
    return {kind: round(seconds * 1e6, 6) for kind, seconds in step.parts.items() if seconds}


# Parts of a step.


def test_on_a_gpu_communication_under_kernels_is_not_exposed() -> None:
    content = trace(
        *steps(100.0),
        event("nvjet_hsh_128x256_TNT", 0, 30),
        event("ncclDevKernel_AllGather", 20, 50, **{"Process Group Description": "mesh_dp_shard"}),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 50, 60),
        event("void at::native::vectorized_elementwise_kernel", 55, 70),
        event("ncclDevKernel_AllReduce", 70, 80, **{"Process Group Description": "mesh_tp"}),
        event("aten::mm", 0, 100, "cpu_op"),  # on the host, which only launches
    )
    assert shares(content) == {
        "matrix products": 30.0,
        "attention": 10.0,
        "other kernels": 10.0,
        "exposed communication dp": 20.0,
        "exposed communication tp": 10.0,
        "idle": 20.0,
    }


def test_work_that_the_device_ends_after_the_host_belongs_to_the_steps() -> None:
    content = trace(*steps(40.0, 80.0), event("ampere_sgemm_128x64_nn", 10, 120))
    step = breakdown(content, rank=3)
    assert (step.first, step.steps, step.rank) == (4, 2, 3)
    assert step.step_s == pytest.approx(60e-6)
    assert step.parts["matrix products"] == pytest.approx(55e-6)


def test_on_a_cpu_an_operation_counts_without_those_inside_it() -> None:
    content = trace(
        *steps(100.0),
        event("aten::linear", 0, 40, "cpu_op"),
        event("aten::addmm", 10, 30, "cpu_op"),
        event("aten::_scaled_dot_product_flash_attention_for_cpu", 40, 55, "cpu_op"),
        event("c10d::allreduce_", 60, 70, "cpu_op"),
        event("waiting for mesh_dp_shard", 70, 90, step_breakdown.WAIT, axis="mesh_dp_shard"),
    )
    assert shares(content) == {
        "matrix products": 20.0,
        "attention": 15.0,
        "other kernels": 20.0,
        "exposed communication world": 10.0,
        "exposed communication dp": 20.0,
        "idle": 15.0,
    }


# Alignment of traces.


def test_traces_of_nodes_are_aligned_to_one_clock(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    for rank, base in ((0, 1_000_000), (1, 5_000_000)):
        with gzip.open(folder / f"rank_{rank}.json.gz", "wt") as stream:
            named = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}
            json.dump(trace(event("axonlaunch step 1", 10, 20), named, base=base), stream)
    merged = read_trace(step_breakdown.merge(tmp_path, offsets_ns={0: 0, 1: 3_000_000}))
    first, second = (e for e in merged["traceEvents"] if e["ph"] == "X")
    assert (first["ts"], second["ts"]) == (10, 1010)  # 5 ms - 1 ms - 3 ms later
    assert first["pid"] != second["pid"]
    names = [e["args"]["name"] for e in merged["traceEvents"] if e["ph"] == "M"]
    assert names == ["rank 0: python", "rank 1: python"]


# Files of a run.


@pytest.mark.slow
def test_profiled_run_writes_trace_per_rank_and_combined(served: Served) -> None:
    profile = ["train.profile={steps: [2, 3], ranks: [0, 1]}", "hardware=h100_80gb"]
    served("train", *TINY, *profile, "launch.nproc=2", "strategy=fsdp", "name=run")
    folder = served.folder / "runs" / "run"
    names = sorted(path.name for path in (folder / "profile").iterdir())
    assert names == ["merged.json.gz", "rank_0.json.gz", "rank_1.json.gz"]
    printed = json.loads(served("profile", "runs/run", "--json").stdout)
    for rank, of_rank in enumerate(printed["ranks"]):
        assert (of_rank["rank"], of_rank["first"], of_rank["steps"]) == (rank, 2, 2)
        assert sum(of_rank["parts"].values()) == pytest.approx(of_rank["step_s"])
        assert {"matrix products", "other kernels", "idle"} <= of_rank["parts"].keys()
    axes = {kind for of_rank in printed["ranks"] for kind in of_rank["parts"] if "exposed" in kind}
    assert "exposed communication dp" in axes
    assert printed["predicted"]["matrix products"] > 0
    merged = read_trace(folder / "profile" / "merged.json.gz")["traceEvents"]
    begun = [e["ts"] for e in merged if e["name"] == "axonlaunch step 2"]
    assert len({e["pid"] for e in merged if e["name"] == "axonlaunch step 2"}) == len(begun) == 2
    table = served("profile", "runs/run").stdout
    assert "2 steps from 2" in table
    assert "predicted" in table


def test_mock_ranks_are_profiled_separately(tmp_path: Path) -> None:
    def run(world: World) -> None:
        config = ProfileConfig(steps=[1, 1])
        profiler = StepProfiler(config, world=world, run_dir=tmp_path)
        with profiler.step(1):
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        profiler.finish()

    World.mock(2).run(run)
    [step] = [breakdown(read_trace(path), rank=0) for path in (tmp_path / "profile").glob("r*")]
    assert step.parts["matrix products"] > 0


def test_profile_is_written_if_run_stops_early(tmp_path: Path) -> None:
    def run(world: World) -> None:
        profiler = StepProfiler(ProfileConfig(steps=[2, 9]), world=world, run_dir=tmp_path)
        for step in (1, 2, 3):
            with profiler.step(step):
                pass
        profiler.finish()

    World.mock(1).run(run)
    assert breakdown(read_trace(tmp_path / "profile" / "rank_0.json.gz"), rank=0).steps == 2


@pytest.mark.parametrize(
    ("resumed_at", "was_written", "steps"),
    [(5, False, None), (5, True, 1), (2, False, 2), (2, True, 1)],
    ids=["after them", "after them, written", "among them", "among them, written"],
)
def test_resumed_run_keeps_profile(
    tmp_path: Path, resumed_at: int, was_written: bool, steps: int | None
) -> None:
    def run(world: World, first: int, last: int) -> None:
        profiler = StepProfiler(ProfileConfig(steps=[2, 4]), world=world, run_dir=tmp_path)
        for step in range(first, last + 1):
            with profiler.step(step):
                pass
        profiler.finish()

    if was_written:
        World.mock(2).run(lambda world: run(world, 1, 2))
    World.mock(2).run(lambda world: run(world, resumed_at + 1, 6))
    path = tmp_path / "profile" / "rank_0.json.gz"
    assert path.exists() == (steps is not None)
    if steps is not None:
        assert breakdown(read_trace(path), rank=0).steps == steps


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (torch.OutOfMemoryError(), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (dist.DistBackendError("NCCL error: unhandled cuda error, out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_out_of_memory_writes_allocator_snapshot(
    error: Exception, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped: list[str] = []
    history: list[object] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: history.append(options)
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dumped.append)

    def run(world: World) -> None:
        world.device = torch.device("cuda", 0)
        config = ProfileConfig(steps=[5, 5], memory=True)
        profiler = StepProfiler(config, world=world, run_dir=tmp_path)
        with pytest.raises(type(error)), profiler.step(1):
            raise error

    World.mock(1).run(run)
    assert history
    snapshot = str(tmp_path / "profile" / "rank_0.memory.pickle")
    assert dumped == ([snapshot] if is_kept else [])


# Errors.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.profile.steps=[10]"], r"steps 1 to 450, as \[2,5\]"),
        (["train.profile.steps=[13,10]"], "expected the first and the last"),
        (["train.profile.steps=[0,3]"], "expected the first and the last"),
        (["train.profile.steps=[10,13]", "train.steps=12"], "of steps 1 to 12"),
        (["train.profile.memory=true"], "no step is profiled"),
        (["train.profile={steps: [1, 2], ranks: []}"], "expected ranks"),
        (["train.profile={steps: [1, 2], ranks: [2]}"], "the world has ranks 0 to 1"),
        (
            ["train.profile={steps: [1, 2], ranks: [0, 1]}", "launch.backend=mock"],
            "only one of them can be profiled",
        ),
    ],
)
def test_invalid_profile_settings_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config([*overrides, "launch.nproc=2"])


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no step was profiled"), (b"corrupt", "can't be read"), (b"{}", "can't be read")],
)
def test_a_run_without_a_trace_is_refused(
    served: Served, content: bytes | None, message: str
) -> None:
    folder = served.folder / "run" / "profile"
    folder.mkdir(parents=True)
    (folder.parent / "config.yaml").write_text(to_yaml(run_config(["launch.nproc=1"])))
    if content is not None:
        (folder / "rank_0.json.gz").write_bytes(content)
    assert message in served("profile", "run", status=2).stderr


# Timeline of a pipeline's ranks.


def test_pipeline_actions_of_first_profiled_step_share_clock() -> None:
    def named(name: str, start: float, end: float) -> dict[str, Any]:
        return event(f"axonlaunch pipeline {name}", start, end, "user_annotation")

    first = trace(*steps(100.0, 200.0), named("0F0", 10, 30), named("0F0", 110, 130))
    second = trace(*steps(100.0), named("1F0", 40, 50), named("1B0", 50, 60), base=5_000)
    second[CLOCK_AHEAD] = 5_000
    drawn = pipeline_actions({0: first, 1: second})
    assert [(rank, action) for rank, _, _, action in drawn] == [(0, "0F0"), (1, "1F0"), (1, "1B0")]
    assert [start for _, start, _, _ in drawn] == pytest.approx([0.0, 30e-6, 40e-6])


def test_pipeline_actions_on_gpu_use_kernel_times() -> None:
    queued = event("axonlaunch pipeline 0F0", 0, 1, "user_annotation")
    ran = event("axonlaunch pipeline 0F0", 20, 50, "gpu_user_annotation")
    step = event("axonlaunch step 4", 10, 90, "gpu_user_annotation")
    [(rank, start, stop, action)] = pipeline_actions({3: trace(*steps(100.0), queued, step, ran)})
    assert (rank, start, action) == (3, 0.0, "0F0")
    assert stop == pytest.approx(30e-6)


@pytest.mark.slow
def test_a_profiled_pipeline_shows_every_action_of_its_schedule(served: Served) -> None:
    schedule = "interleaved_zero_bubble"
    overrides = ["strategy=pipeline", f"strategy.pipeline.schedule={schedule}", "launch.nproc=2"]
    overrides += ["train.profile.steps=[1,1]", "train.profile.ranks=[0,1]", "launch.backend=gloo"]
    served.train(*overrides, "name=run", "train.steps=1", "model.num_hidden_layers=4")
    folder = served.folder / "runs/run"
    read = {rank: read_trace(path) for rank, path in step_breakdown.traces(folder).items()}
    config = read_frozen(folder)
    layout = Layout.of(config, world_size=2)
    expected = PipelineSchedule(
        schedule,
        degree=2,
        microbatches=layout.microbatches_per_round,
        stages_per_rank=layout.stages_per_rank,
    )
    shown = pipeline_actions(read)
    for rank, actions in enumerate(expected.actions):
        assert sorted(a for r, _, _, a in shown if r == rank) == sorted(map(str, actions))
