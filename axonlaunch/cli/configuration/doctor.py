"""``axonlaunch doctor``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from axonlaunch.cli.shared.options import Json, print_json
from axonlaunch.system.text.terminal import console_on

HELP = "Show this node's hardware and test its communication."
EXAMPLES = """Examples:

\b
  axonlaunch doctor
  axonlaunch doctor --json
  axonlaunch doctor --measure --ranks 4
"""

_RANKS_PER_CORE = 8


def command(
    run_dir: Annotated[
        Path,
        typer.Option(
            "--run-dir",
            metavar="FOLDER",
            file_okay=False,
            help="Folder of runs, whose free disk space is shown.",
        ),
    ] = Path("runs"),
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Benchmark this node's CPU again; hardware=cpu uses the results.",
        ),
    ] = False,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", help="Number of ranks in the benchmark.")
    ] = 2,
    as_json: Json = False,
) -> None:
    """Show this node's hardware and test each communication backend."""
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.diagnostics.doctor.diagnose import diagnose

    if ranks < 1:
        raise ConfigError([ConfigIssue("--ranks", "must be at least 1", ranks)])
    if ranks > (most := _RANKS_PER_CORE * (os.cpu_count() or 1)):
        message = f"is too many for this node's cores; use at most {most}"
        raise ConfigError([ConfigIssue("--ranks", message, ranks)])
    report = diagnose(run_dir, ranks=ranks if measure else None)
    if as_json:
        print_json(report)
        return

    console = console_on()
    for name, value in _rows(report):
        console.print(f"[dim]{name:<14}[/dim]{value}", soft_wrap=True)


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("python", report["python"]),
        ("torch", report["torch"]),
        ("platform", report["platform"]),
        ("cores", str(report["cores"])),
        ("memory", f"{report['memory_gib']} GiB"),
    ]
    devices = report["devices"]
    rows += [
        ("accelerator", f"{device['index']}: {device['name']}, {device['memory_gib']} GiB")
        for device in devices
    ]
    if not devices:
        rows.append(("accelerator", report["accelerator"] or "none; ranks compute on the CPU"))
    if report["driver"]:
        rows.append(("driver", report["driver"]))
    rows += _gpu_rows(report.get("gpus"))
    if report["nccl"]["available"]:
        rows.append(("nccl", report["nccl"]["version"]))
    for name, verdict in report["backends"].items():
        if verdict["works"]:
            result = f"all-reduce over {verdict['ranks']} ranks in {verdict['seconds']} s"
            text = f"[green]works[/green]: {result}"
        else:
            text = f"[yellow]does not work[/yellow]: {verdict['reason']}"
        rows.append((f"  {name}", text))
    if "measured" in report:
        rows.append(("hardware=cpu", f"measured with {report['measured_ranks']} ranks"))
        rows += [(f"  {name}", text) for name, text in _figures(report["measured"])]
    rows.append(("disk", f"{report['disk_free_gib']} GiB free at {report['run_folder']}"))
    return rows


def _gpu_rows(report: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return rows with the connections, link speeds and problems of GPUs."""
    if report is None:
        return []
    rows = []
    for pair in report["topology"]:
        i, j = pair["between"]
        parts = [pair["path"] or "an unknown path"]
        for key, name in (("nvlink", "NVLink"), ("peer_access", "peer access")):
            if pair[key] is not None:
                parts.append(name if pair[key] else f"no {name}")
        rows.append(("  topology", f"GPUs {i} and {j}: {', '.join(parts)}"))
    rows += [
        ("  link", f"{link['source']} to {link['target']}: {link['gb_s']:g} GB/s")
        for link in report["links"]
    ]
    rows += [("  problem", f"[red]{line}[/red]") for line in report["problems"]]
    if report["unknown"]:
        rows.append(("  unknown", report["unknown"]))
    return rows


def _figures(measured: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows with the measured speed of one rank."""
    from axonlaunch.config.precision import PRECISIONS

    gflops = {name: measured[each.peak] * 1000 for name, each in PRECISIONS.items()}
    rows = [("matmul", ", ".join(f"{name} {rate:,.3g} GFLOP/s" for name, rate in gflops.items()))]
    kernel, mib = measured["kernel_us"], 2**20
    moved = zip(measured["kernel_bytes"], measured["kernel_latency_us"], strict=True)
    rates = [
        f"{size / (us + kernel) / 1e3:,.3g} GB/s for {size / mib:g} MiB"
        for size, us in moved
        if size >= mib
    ]
    rows.append(("kernels", f"{kernel:.3g} us, {', '.join(rates)}"))
    if "link_gb_s" in measured:
        latency = f"{measured['link_latency_us']:,.0f} us per hop"
        speeds = f"{measured['link_gb_s']:.3g} GB/s, gathers {measured['allgather_bw_gb_s']:.3g}"
        rows.append(("gloo", f"{latency}, {speeds}"))
    if "disk_gb_s" in measured:
        rows.append(("checkpoints", f"{measured['disk_gb_s']:.3g} GB/s to the disk of runs"))
    return rows
