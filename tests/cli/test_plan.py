"""``axonlaunch plan``: its results, output, cached files and errors."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.command import Served
from support.served import Server

from axonlaunch import config
from axonlaunch.cli.planning.plan import plan_to_json, print_plan
from axonlaunch.config import ConfigError
from axonlaunch.config.consistency.run_nodes import RunNodes
from axonlaunch.planning.plan import experiment
from axonlaunch.planning.records import (
    CompiledLayout,
    FitVerdict,
    HostMemory,
    Plan,
    Planned,
    Workload,
)
from axonlaunch.planning.reports.plan_table import compile_note, notes, why_slower

GIB = 1024**3
MODEL = [
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "data=synthetic_tokens",
    "data.sequence_length=16",
    "train.global_batch_size=2",
    "hardware=h100_80gb",
]


def planned(*, step_s: float, verdict: FitVerdict = "fits", **breakdown: float) -> Planned:
    return Planned(
        overrides=["strategy.data_parallel=fsdp", "launch.nproc=64"],
        layout="fsdp 64, micro-batch 1, selective recomputation",
        mesh={"pp": 1, "dp_replicate": 1, "dp_shard": 64, "cp": 1, "tp": 1},
        peak_bytes=60 * GIB,
        host_bytes=0,
        process_bytes=70 * GIB,
        verdict=verdict,
        tokens_per_s_per_device=800.0,
        step_s=step_s,
        mfu=0.4,
        breakdown=breakdown,
    )


@pytest.mark.slow
def test_it_finds_layouts_that_train_and_estimate_take(tmp_path: Path, server: Server) -> None:
    axonlaunch = Served(tmp_path, server)
    overrides = [*MODEL, "strategy.tensor.degree=2", "train.global_batch_size=1"]
    overrides += ["train.micro_batch_size=auto"]  # same as unset
    ran = axonlaunch(
        "plan", *overrides, "--devices", "2", "--json", "--write", "experiment/best.yaml"
    )
    reported = json.loads(ran.stdout)
    assert reported["searched"] > 1
    assert reported["seconds"] > 0
    best = reported["candidates"][0]
    assert set(best) >= {
        *("overrides", "mesh", "peak_bytes", "fits", "tokens_per_s_per_device", "step_s", "mfu")
    }
    assert best["fits"]
    assert all(candidate["mesh"]["tp"] == 2 for candidate in reported["candidates"])
    ranked = [c["step_s"] * c["rank_factor"] for c in reported["candidates"] if c["fits"]]
    assert ranked == sorted(ranked)
    estimated = json.loads(axonlaunch("estimate", *overrides, *best["overrides"], "--json").stdout)
    assert estimated["peak_bytes"] == best["peak_bytes"]
    assert estimated["mesh"] == best["mesh"]
    again = axonlaunch(
        "plan", *overrides, "--devices", "2", "--write", "experiment/best.yaml", status=2
    )
    assert "experiment/best.yaml: already exists" in again.stderr
    chosen = config.load(["experiment=best"], config_dirs=[tmp_path])
    assert chosen == config.load([*overrides, *best["overrides"]])


@pytest.mark.slow
def test_offload_is_planned_only_if_required(tmp_path: Path, server: Server) -> None:
    overrides = ["model=llama3_8b", "data=synthetic_tokens", "data.sequence_length=2048"]
    overrides += ["train.global_batch_size=2", "train.precision=bf16"]
    overrides += ["hardware=h100_80gb", "hardware.memory_gib=60"]
    ran = Served(tmp_path, server)("plan", *overrides, "--devices", "1", "--json", status=2)
    assert "no layout of 1 device fits" in ran.stderr
    ran = Served(tmp_path, server)("plan", *overrides, "--devices", "2", "--json")
    best = json.loads(ran.stdout)["candidates"][0]
    assert best["fits"]
    assert "strategy.fsdp.cpu_offload=optimizer_states" in best["overrides"]
    assert best["host_bytes"] > 30e9
    assert best["breakdown"]["host memory"] > 0.5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--devices", "2"], "hardware: is needed: speed and memory depend on the devices; use "),
        (["hardware=h100_80gb"], "--devices: must be the number of devices to plan for, 1 or more"),
        (
            ["--devices", "2", "--allow", "low-precision"],
            "--allow=low-precision: is no option of --allow; use low_precision",
        ),
        (["--devices", "13", *MODEL], "--devices=13: nodes with up to 8 devices (hardware."),
        (["--devices", "2", "--write", "a.json"], "--write=a.json: must end in .yaml"),
        (["--devices", "2", "--write", "a.yaml"], "--write=a.yaml: must be in a folder named exp"),
        (
            ["--devices", "2", "--write", "/proc/experiment/a.yaml"],
            "--write=/proc/experiment/a.yaml: can't be written: ",
        ),
        (
            ["--devices", "2", "--write", "experiment/x.yaml", "experiment=x"],
            "--write=experiment/x.yaml: would include itself, because of experiment=x",
        ),
        (
            ["--devices", "8", "model=mlp", "hardware=h100_80gb"],
            "model.name=mlp: needs images, but data=synthetic_tokens has tokens; use data=digits",
        ),
        (
            ["--devices", "3", *MODEL, "model.num_hidden_layers=2"],
            "train.global_batch_size=2: no layout of 3 devices splits the model and a batch",
        ),
        pytest.param(
            ["--devices", "2", *MODEL, "hardware.memory_gib=0.5"],
            "hardware=h100_80gb: no layout of 2 devices fits: ",
            marks=pytest.mark.slow,
        ),
        (["--devices", "2", *MODEL, "hardware.memory_gib=null"], "hardware.memory_gib=null: "),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    overrides: list[str], message: str, tmp_path: Path, server: Server
) -> None:
    ran = Served(tmp_path, server)("plan", *overrides, status=2)
    [error] = ran.stderr.splitlines()
    assert error.startswith(f"error: {message}")
    assert ran.stdout == ""


def test_all_figures_that_hardware_lacks_are_reported_at_once(
    tmp_path: Path, server: Server
) -> None:
    overrides = [*MODEL[:-1], "--devices", "16", "hardware=rtx4090"]
    overrides += ["hardware.multiprocessors=null", "hardware.bf16_tflops=null"]
    overrides += ["train.precision=bf16"]
    reported = Served(tmp_path, server)("plan", *overrides, status=2).stderr.splitlines()
    lacking = ["devices_per_node", "bf16_tflops", "multiprocessors"]
    assert [line.partition("=")[0] for line in reported] == [
        f"error: hardware.{n}" for n in lacking
    ]


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_keeps_to_the_terminal_and_says_why_others_lost(width: int) -> None:
    first = planned(step_s=10.0, **{"matrix products": 7.0, "communication dp": 3.0})
    second = planned(step_s=11.0, **{"matrix products": 7.0, "communication dp": 4.0})
    third = planned(step_s=12.0, **{"matrix products": 9.0, "communication dp": 3.0})
    stream = io.StringIO()
    workload = Workload(128, None, 8192, "bf16", None)
    print_plan(
        Plan(workload, 1234, [first, second, third]),
        Console(file=stream, width=width),
        seconds=12.3,
    )
    text = stream.getvalue()
    assert text.startswith(
        "model: batch 128, 8,192 positions, bf16, recomputation per layout\n"
        "1,234 layouts searched in 12 s"
    )
    assert "matrix products 70%, communication dp 30%" in text
    assert "10.0% slower: communication dp +1 s" in text
    assert "20.0% slower: matrix products +2 s" in text
    assert "note" not in text
    pasted = [line for line in text.splitlines() if "launch.nproc" in line]
    assert all(len(line) <= width for line in text.splitlines() if line not in pasted)


def test_plan_says_on_which_nodes_its_layouts_are() -> None:
    plan = Plan(Workload(96, None, 8192, "bf16", None), 1, [], nodes=RunNodes(count=2, ranks=6))
    [note] = notes(plan)
    assert note.startswith("assumes 2 nodes with 6 ranks each; for others set launch.nnodes")
    assert not [*notes(dataclasses.replace(plan, nodes=RunNodes(count=1, ranks=8)))]


def test_plan_says_what_compiled_blocks_would_save() -> None:
    plan = Plan(Workload(96, None, 8192, "bf16", None), 1, [planned(step_s=10.0)])
    assert compile_note(plan) is None
    assert plan_to_json(plan, 1.0)["compiled"] is None
    compiled = CompiledLayout(["train.compile=true"], 9.0)
    plan = dataclasses.replace(plan, compiled=compiled)
    assert str(compile_note(plan)).startswith(
        "with train.compile=true, layout 1 is expected to take 9 s (10% less); "
    )
    in_json = plan_to_json(plan, 1.0)["compiled"]
    assert in_json == {"overrides": ["train.compile=true"], "step_s": 9.0}
    stream = io.StringIO()
    print_plan(plan, Console(file=stream, width=80), seconds=1.0)
    table, note = stream.getvalue().split("\nnote with train.compile=true")
    assert "fsdp 64, micro-batch 1" in table  # the note follows the table that it refers to
    assert "\n1  strategy.data_parallel=fsdp" in note


def test_plan_reports_layouts_that_do_not_fit() -> None:
    assert (
        why_slower(planned(step_s=1.0), planned(step_s=0.5, verdict="tight"))
        == "does not fit: tight, with less to spare than estimate.margin"
    )


def test_a_plan_is_kept_as_groups_and_values() -> None:
    text = experiment(["model=gpt", "+strategy=fsdp", "train.steps=3"], ["launch.nproc=4"])
    assert text == (
        "# @package _global_\ndefaults:\n- _self_\n- override /model: gpt\n"
        "- override /strategy: fsdp\ntrain:\n  steps: 3\nlaunch:\n  nproc: 4\n"
    )


def test_saved_plan_names_changes_of_numerics(tmp_path: Path) -> None:
    best = tmp_path / "experiment/best.yaml"
    best.parent.mkdir()
    data = ["data=synthetic_tokens"]
    best.write_text(experiment(data, ["optimizer.state_dtype=8bit"], numerics=["8-bit states"]))
    assert best.read_text().startswith(
        "# @package _global_\n# Changes the numerics of the run: 8-bit states\ndefaults:"
    )
    kept = config.load(["experiment=best"], config_dirs=[tmp_path])
    assert kept == config.load([*data, "optimizer.state_dtype=8bit"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=tiny_llama", "strategy=ddp", "optimizer=sgd", "optimizer.lr=3e-4"],
        ["strategy=null", "hardware=null", "strategy.data_parallel=null"],
        ["launch=slurm", "launch.slurm.time=10:00:00", "name=0123"],
        ["name='1e3'", "run_dir=runs/${name}"],
        ["model=custom", "model.target=m:x", "model.arguments={a: {b: 1, c: null}}"],
        ["optimizer.groups={'*.bias': {weight_decay: 0}}", "++train.log_every=5"],
    ],
)
def test_saved_plan_records_its_arguments(overrides: list[str], tmp_path: Path) -> None:
    overrides = ["data=synthetic_tokens", *overrides]
    (tmp_path / "experiment").mkdir()
    text = experiment(overrides, ["launch.nproc=4"])
    (tmp_path / "experiment/best.yaml").write_text(text)
    kept = config.load(["experiment=best"], config_dirs=[tmp_path])
    assert kept == config.load([*overrides, "launch.nproc=4"])


def test_a_key_that_is_taken_away_cant_be_kept() -> None:
    with pytest.raises(ConfigError, match=r"^~train\.eval_every: a file can't delete a key"):
        experiment(["~train.eval_every"])


def test_a_layout_that_offloads_more_than_a_node_has_does_not_fit() -> None:
    host = HostMemory(400 * GIB, 3200 * GIB, 2048 * GIB, False)
    large = dataclasses.replace(planned(step_s=0.5), host_memory=host)
    assert not large.fits
    assert why_slower(planned(step_s=1.0), large) == "does not fit: too little host memory"


def test_plan_lists_its_assumptions_and_omissions() -> None:
    workload, stream = Workload(128, None, 8192, "bf16", None), io.StringIO()
    assumed = {"hardware.link_efficiency": 0.8}
    plan = Plan(workload, 10, [planned(step_s=1.0)], assumed, untraced=2, imbalance=2.0)
    print_plan(plan, Console(file=stream, width=80), seconds=1.0)
    assert "so assumed: hardware.link_efficiency=0.8\n" in stream.getvalue()
    assert "2 more layouts may be faster than the first one" in stream.getvalue()
    for ranks, expected in ((8, False), (12, True), (256, False)):
        notices = " ".join(notes(dataclasses.replace(plan, nodes=RunNodes(1, ranks))))
        assert ("12 data-parallel ranks can't share 128 samples" in notices) == expected
    assert "one is assumed to get 2 times the mean number of tokens" in stream.getvalue()
    reported = plan_to_json(plan, 1.0)
    assert (reported["assumed"], reported["untraced"]) == (assumed, 2)
