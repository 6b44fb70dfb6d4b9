"""``axonlaunch estimate``: its output, plots, and errors."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.command import TINY, Command

from axonlaunch.cli.planning.estimate import estimate_to_json, print_estimate
from axonlaunch.cli.shared.plotting import save
from axonlaunch.planning.records import (
    Estimate,
    Forecast,
    HostMemory,
    RankEstimate,
    Remedy,
    RoutingForecast,
    Workload,
    verdict,
)
from axonlaunch.planning.reports.memory_plot import draw_memory
from axonlaunch.planning.reports.memory_table import bars
from axonlaunch.system.text.formatting import figures, size

GIB = 1024**3
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "communication", "temporary")

CHOOSING = """
from torch import nn
from axonlaunch import register_model

class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        used = self.embedding(tokens[tokens > 3])
        return self.head(self.embedding(tokens) + used.mean())

@register_model("choosing", inputs="tokens")
def build():
    return Choosing()

class Block(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x

class Staged(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.layers = nn.ModuleList(Block(8, 8) for _ in range(3))

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = x if layer is None else layer(x)
        return x if self.head is None else self.head(x)

ENDS = ("embedding",), ("head",)

@register_model("staged", inputs="tokens", layers="layers", ends=ENDS)
def build_staged():
    return Staged()
"""
STATES = ("parameters", "gradients", "optimizer")


def forecast(*, memory: int | None = None, stages: int = 2, host: int = 0) -> Forecast:
    ranks = []
    for stage in range(stages):
        sizes = (7 * GIB, 0, 14 * GIB, (30 - 5 * stage) * GIB, GIB // 7, 3 * GIB)
        breakdown: Any = dict(zip(CATEGORIES, sizes, strict=True))
        ranks.append(RankEstimate(stage * 4, {"pp": stage}, sum(sizes), host, breakdown))
    peak = ranks[0].peak_bytes
    estimate = Estimate(8, {"pp": stages, "tp": 4}, 10**9, *(3 * [peak]), ranks)
    return Forecast(
        layout="pipeline 2 (1f1b)",
        workload=Workload(512, 1, 8192, "bf16", "selective"),
        estimate=estimate,
        hardware=None if memory is None else "some_device",
        memory_bytes=memory,
        margin=0.1,
        host_memory=HostMemory(host, 8 * host, None, None) if host else None,
        states_only=False,
        notes=[],
    )


REMEDY = Remedy(["train.micro_batch_size=1"], ["smaller matrix products"], 10 * GIB)


def shown(estimated: Forecast, *, width: int, **options: Any) -> str:
    stream = io.StringIO()
    print_estimate(estimated, Console(file=stream, width=width, highlight=False, **options))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("measured", "reported"),
    [
        ((), "2x; set hardware.context_mib and hardware.communicator_mib to your measurements)"),
        (
            ("context_mib",),
            "512 MiB for the CUDA context (from hardware); 1 GiB for NCCL (typical figures, can be "
            "off by 2x; set hardware.communicator_mib to your measurements)",
        ),
        (
            ("context_mib", "communicator_mib"),
            "the CUDA context (from hardware); 1 GiB for NCCL (from hardware)",
        ),
    ],
)
def test_process_overhead_names_source_of_its_figures(
    measured: tuple[str, ...], reported: str
) -> None:
    result = forecast()
    held = {"context_bytes": GIB // 2, "communicator_bytes": GIB}
    process = result.estimate.process_bytes + 3 * GIB // 2
    estimate = replace(result.estimate, process_bytes=process, **held)
    text = shown(replace(result, estimate=estimate, measured=measured), width=200)
    assert reported in text
    assert "includes" not in shown(result, width=200)  # an estimate for a CPU


@pytest.mark.slow
def test_512_ranks_are_reported_on_one_node_and_kept(axonlaunch: Command) -> None:
    overrides = [
        *("estimate", *TINY, "strategy=hybrid", "model.num_attention_heads=4", "--json"),
        *("launch.nproc=512", "train.global_batch_size=1024", "hardware=h100_80gb"),
    ]
    first = axonlaunch(*overrides)
    reported = json.loads(first.stdout)
    assert (reported["world_size"], reported["fits"], reported["changes"]) == (512, True, [])
    assert reported["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 128, "cp": 1, "tp": 2}
    assert [rank["rank"] for rank in reported["ranks"]] == [0, 256]
    for rank in reported["ranks"]:
        assert set(rank["breakdown"]) == set(CATEGORIES)
        assert sum(rank["breakdown"].values()) == rank["peak_bytes"] <= reported["peak_bytes"]
    assert len(list((axonlaunch.folder / "cache" / "axonlaunch" / "estimates").iterdir())) == 1
    assert axonlaunch(*overrides).stdout == first.stdout
    assert [path.name for path in axonlaunch.folder.iterdir()] == ["cache"]


def test_data_that_is_not_there_is_no_obstacle(axonlaunch: Command) -> None:
    overrides = ["data=tokens", "data.sequence_length=16"]
    ran = axonlaunch("estimate", *TINY[:3], "train.global_batch_size=8", *overrides)
    assert "highest peak" in ran.stdout


def test_a_model_that_can_not_be_traced_is_reported_by_operation_and_module(
    axonlaunch: Command,
) -> None:
    (axonlaunch.folder / "choosing.py").write_text(CHOOSING)
    overrides = ["plugins=[choosing]", "model=choosing", *TINY[3:]]
    ran = axonlaunch("estimate", *overrides, status=2)
    [error] = ran.stderr.splitlines()
    assert error.startswith("error: model.name=choosing: ")
    assert "in Choosing depends on values" in error
    assert "axonlaunch estimate --analytic" in error
    reported = axonlaunch("estimate", *overrides, "--analytic", "hardware=h100_80gb").stdout
    assert "note analytic: only parameters, gradients, optimizer states" in reported
    assert "may fit " in reported


def test_untraceable_pipeline_model_is_refused_with_remedy(
    axonlaunch: Command,
) -> None:
    (axonlaunch.folder / "choosing.py").write_text(CHOOSING)
    overrides = ["plugins=[choosing]", "model=staged", "strategy=pipeline", *TINY[3:]]
    [error] = axonlaunch("estimate", *overrides, status=2).stderr.splitlines()
    assert error.startswith("error: strategy.pipeline.split=auto: where to split Staged can't")
    overrides += ["strategy.pipeline.split=[2,1]", "--analytic", "--json"]
    reported = json.loads(axonlaunch("estimate", *overrides).stdout)
    states = [sum(rank["breakdown"][name] for name in STATES) for rank in reported["ranks"]]
    first, last = 8 * 256 + 2 * 8 * 9, 8 * 9 + 9 * 256
    # AdamW has four fp32 numbers per parameter, and a step count for each tensor.
    assert states == [4 * 4 * first + 4 * 5, 4 * 4 * last + 4 * 4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--plot", "memory.pdf"], "--plot=memory.pdf: must end in .png or .svg"),
        (["--plot", "nowhere/a.png"], "--plot=nowhere/a.png: there is no folder nowhere"),
        (["launch.nproc=7", "strategy=tensor"], "strategy.tensor.degree=2: 7 ranks are not"),
        (["launch.nproc=7"], "train.global_batch_size=8: must be divisible by 7 ranks"),
        (
            ["+hardware.name=mine"],
            "hardware.memory_gib=null: is not set for mine, so whether a run fits",
        ),
        (["strategy=tensor", "strategy.tensor.degree=3"], "strategy.tensor.degree=3: "),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    overrides: list[str], message: str, axonlaunch: Command
) -> None:
    ran = axonlaunch("estimate", *TINY, *overrides, status=2)
    assert ran.stdout == ""
    [error] = ran.stderr.splitlines()
    assert error.startswith(f"error: {message}")


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("memory", [None, 40 * GIB, 80 * GIB])
def test_it_fits_the_terminal(width: int, memory: int | None) -> None:
    text = shown(forecast(memory=memory, stages=12, host=12 * GIB), width=width)
    assert max(map(len, text.splitlines())) <= width
    # The bars have one, and so has each table.
    assert text.count("pp 11") == 1 + text.count("ranks  ") == (4 if width == 40 else 2)
    assert {"peak", "params", "temporary", "host"} <= {*text.split()}
    assert "…" not in text
    assert ("does not fit" in text) == (memory == 40 * GIB)


def test_color_is_for_terminals_and_nothing_hangs_on_it() -> None:
    plain = shown(forecast(memory=40 * GIB), width=80)
    colored = shown(
        forecast(memory=40 * GIB), width=80, force_terminal=True, color_system="truecolor"
    )
    assert "\x1b" not in plain
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain
    first = next(line for line in plain.splitlines() if line.startswith("pp 0  P"))
    assert re.fullmatch(r"pp 0  P-+O-+A-+\|-+C-*T-*|pp 0  P-+O-+A-+\|.*", first)


def test_bar_length_matches_value() -> None:
    estimate = forecast(memory=100 * GIB).estimate
    lines = bars(estimate, memory_bytes=100 * GIB, width=107).plain.splitlines()
    for line, rank in zip(lines, estimate.ranks, strict=False):
        assert line.index("|") == 106
        assert len(line[:106].rstrip()) - 6 == round(rank.peak_bytes / GIB)


def test_sizes_have_three_figures() -> None:
    assert [size(n * 1024**2) for n in (0, 0.5, 12.345, 999, 1000)] == [
        *("0 MiB", "0.5 MiB", "12.3 MiB", "999 MiB", "0.977 GiB")
    ]
    assert [figures(n) for n in (1234.5, 0.00012)] == ["1,234", "0.00012"]


def test_json_lists_remedies() -> None:
    reported = estimate_to_json(
        replace(forecast(memory=40 * GIB), changes=(REMEDY,), untried=["seed=1"])
    )
    assert (reported["fits"], reported["verdict"], reported["margin"]) == (False, "too_large", 0.1)
    assert reported["workload"]["sequence_length"] == 8192
    assert reported["untried"] == ["seed=1"]
    assert reported["changes"] == [
        {
            "overrides": ["train.micro_batch_size=1"],
            "costs": ["smaller matrix products"],
            "process_bytes": 10 * GIB,
            "host_memory": None,
        }
    ]


def test_loads_of_experts_are_listed_with_their_verdicts() -> None:
    estimated = forecast(memory=60 * GIB)
    larger = replace(estimated.estimate, process_bytes=70 * GIB)
    routed = replace(
        estimated,
        routings=(
            RoutingForecast("balanced", 1.0, estimated.estimate, "fits"),
            RoutingForecast("worst", None, larger, "too_large", REMEDY),
        ),
    )
    text = shown(routed, width=120)
    assert re.search(r"balanced +1 x balanced .* fits", text)
    assert re.search(r"worst +all that can .* 70 GiB +too large: 15.5 GiB more than fits", text)
    narrow = shown(routed, width=80)
    assert re.search(r"worst +all that can .* 70 GiB +too large: 15.5 GiB more", narrow)
    balanced, worst = estimate_to_json(routed)["routings"]
    assert (balanced["load"], balanced["verdict"], balanced["change"]) == (1.0, "fits", None)
    assert (worst["load"], worst["process_bytes"]) == (None, 70 * GIB)
    assert worst["change"]["overrides"] == ["train.micro_batch_size=1"]


@pytest.mark.parametrize(
    ("memory", "word"), [(100, "fits"), (55, "tight"), (50, "does not fit"), (None, "")]
)
def test_between_fitting_and_not_a_run_is_tight(memory: int | None, word: str) -> None:
    """54.3 GiB estimated: with the margin of a tenth this may be 59.8."""
    estimated = forecast(memory=None if memory is None else memory * GIB)
    lines = shown(estimated, width=200).splitlines()
    ends = [line for line in lines if line.startswith(("fits", "tight", "does not fit"))]
    assert [line.partition("  ")[0] for line in ends] == ([word] if word else [])
    assert estimated.fits is (None if memory is None else word == "fits")
    assert ("10% by which an estimate may be too low (estimate.margin)" in str(ends)) == (
        word == "tight"
    )


def test_the_margin_is_of_the_estimate() -> None:
    assert verdict(100.0, memory=111.0, margin=0.1) == "fits"
    assert verdict(100.0, memory=109.0, margin=0.1) == "tight"
    assert verdict(100.0, memory=100.0, margin=0.0) == "fits"
    assert verdict(100.0, memory=99.0, margin=0.0) == "too_large"


def test_first_line_describes_samples_of_a_step() -> None:
    first = shown(forecast(), width=200).splitlines()[0]
    assert first.endswith(
        "1B parameters, batch 512 (micro-batch 1), 8,192 positions, bf16, selective recomputation"
    )
    images = Workload(64, None, None, "fp32", "none")
    assert str(images) == "batch 64, fp32, no recomputation"


@pytest.mark.parametrize(
    ("node_gib", "said"),
    [
        (None, "12 GiB per rank, 96 GiB per node; hardware.host_memory_gib is not set"),
        (2048, "a node has 2,048 GiB"),
        (64, "a node has 64 GiB: too little"),
    ],
)
def test_estimate_compares_offloaded_bytes_with_host_memory(
    node_gib: int | None, said: str
) -> None:
    memory = None if node_gib is None else node_gib * GIB
    fits = None if memory is None else memory > 96 * GIB
    host = HostMemory(12 * GIB, 96 * GIB, memory, fits)
    estimated = dataclasses.replace(forecast(memory=100 * GIB), host_memory=host)
    assert said in shown(estimated, width=200)
    assert estimated.fits is (fits is not False)


def test_plots_have_titles_and_axis_labels(tmp_path: Path) -> None:
    save(draw_memory(forecast(memory=40 * GIB)), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    save(draw_memory(forecast(memory=40 * GIB)), tmp_path / "b.svg")
    written = re.findall(r"<!-- (.*?) -->", (tmp_path / "b.svg").read_text())
    assert {"pp 0", "pp 1", "parameters", "activations", "40 GiB"} <= set(written)
