"""``axonlaunch doctor``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from axonlaunch.cli.shared.options import Json, print_json
from axonlaunch.cli.shared.output_files import option_file_problem, writing
from axonlaunch.system.text.terminal import console_on

HELP = "Show this node's hardware and test its communication."
EXAMPLES = """Examples:

\b
  axonlaunch doctor
  axonlaunch doctor --json
  axonlaunch doctor --measure --ranks 4
  axonlaunch doctor --measure --write hardware/own.yaml
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
            help=(
                "Benchmark this node's GPUs (--write keeps the figures), or its CPU for "
                "hardware=cpu."
            ),
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            help="Number of ranks in the benchmark; default: all GPUs, or 2 on a CPU.",
            show_default=False,
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Write the figures of the GPUs to a configuration file, hardware/NAME.yaml.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show this node's hardware and test each communication backend."""
    from axonlaunch.diagnostics.doctor.diagnose import diagnose

    _check_options(measure=measure, ranks=ranks, write=write)
    report = diagnose(run_dir, measures=measure, ranks=ranks, write=write)
    if "timed" in report:
        name = "measured" if write is None else write.stem
        report["measured"], source = _gpu_figures(report, name)
        if write is not None:
            _write(write, report, source)
    if as_json:
        print_json(report)
        return

    console = console_on()
    for name, value in _rows(report):
        console.print(f"[dim]{name:<14}[/dim]{value}", soft_wrap=True)
    if write is not None:
        folder = write.parent.parent
        console.print(f"\nwritten to {write}", markup=False, soft_wrap=True)
        console.print(
            f"axonlaunch plan --config-dir {folder} hardware={write.stem}",
            markup=False,
            soft_wrap=True,
        )


def _check_options(*, measure: bool, ranks: int | None, write: Path | None) -> None:
    """Check the options before anything is measured.

    Raises:
        ConfigError: An option can't be used.
    """
    from axonlaunch.config import ConfigError, ConfigIssue

    problems = []
    if ranks is not None and ranks < 1:
        problems.append(ConfigIssue("--ranks", "must be at least 1", ranks))
    if ranks is not None and ranks > (most := _RANKS_PER_CORE * (os.cpu_count() or 1)):
        message = f"is too many for this node's cores; use at most {most}"
        problems.append(ConfigIssue("--ranks", message, ranks))
    if write is not None:
        reason = "" if measure else "needs measured figures; add --measure"
        if reason := reason or option_file_problem(write, "hardware"):
            problems.append(ConfigIssue("--write", reason, str(write)))
    if problems:
        raise ConfigError(problems)


def _gpu_figures(report: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the figures of measured GPUs, and the option with those that are published."""
    from axonlaunch.config import Composer, to_tree
    from axonlaunch.config.options.hardware import HardwareConfig
    from axonlaunch.planning.search.found_hardware import option_of_device
    from axonlaunch.planning.throughput.measured_gpus import hardware_from_times

    timed, options = report["timed"], Composer().contents("hardware")
    option = option_of_device(timed["device"], options)
    published = None if option is None else HardwareConfig(**options[option])
    hardware = hardware_from_times(
        timed,
        name=name,
        ranks=report["measured_ranks"],
        gpus=len(report["devices"]),
        published=published,
    )
    return to_tree(hardware), option or ""


def _write(path: Path, report: dict[str, Any], option: str) -> None:
    """Write the figures of measured GPUs as an option of the group ``hardware``."""
    import yaml

    from axonlaunch.config.options.hardware import HardwareConfig
    from axonlaunch.system.storage.files import replace_text

    timed = report["timed"]
    lines = [
        f"# {report['measured_ranks']} x {timed['device']}, measured by axonlaunch doctor",
        f"# torch {report['torch']}, driver {report['driver'] or 'unknown'}",
    ]
    if option:
        lines.append(f"# peaks, bandwidths and figures of the network are those of {option}")
    usual = HardwareConfig(name="")
    figures = {
        name: value for name, value in report["measured"].items() if value != getattr(usual, name)
    }
    with writing("--write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, "\n".join([*lines, yaml.safe_dump(figures, sort_keys=False)]))


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
    if "timed" in report:
        rows.append(("GPUs", f"measured with {report['measured_ranks']} ranks"))
        rows += [(f"  {name}", text) for name, text in _gpu_rates(report["measured"])]
    elif "measured" in report:
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


def _gpu_rates(measured: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows with the measured speed and memory of a GPU."""
    from axonlaunch.config.precision import PRECISIONS

    peaks = dict.fromkeys(
        peak for each in PRECISIONS.values() for peak in (each.peak, each.relaxed_peak)
    )
    share = measured["matrix_efficiency"]
    products = [
        f"{peak.removesuffix('_tflops')} {share * rate:,.3g} TFLOP/s"
        for peak in peaks
        if (rate := measured[peak]) is not None
    ]
    rows = [
        ("matmul", f"{', '.join(products)}: {share:.0%} of the peak"),
        ("attention", f"{measured['attention_efficiency']:.0%} of the peak"),
        ("memory", _share(measured, "memory_bandwidth_gb_s", "memory_efficiency")),
        ("kernels", f"{measured['kernel_us']:.3g} us for the smallest"),
        ("host", _share(measured, "host_gb_s", "host_efficiency")),
    ]
    if measured["link_latency_us"] is not None:
        link = _share(measured, "link_gb_s", "link_efficiency")
        rows.append(("nccl", f"{measured['link_latency_us']:.3g} us per hop, {link}"))
    held = f"{measured['context_mib']:,.0f} MiB for the CUDA context"
    if measured["communicator_mib"] is not None:
        held += f", {measured['communicator_mib']:,.0f} MiB for a communicator of NCCL"
    rows.append(("outside torch", held))
    if measured["disk_gb_s"] is not None:
        rows.append(("checkpoints", f"{measured['disk_gb_s']:.3g} GB/s to the disk of runs"))
    return rows


def _share(measured: dict[str, Any], name: str, efficiency: str) -> str:
    rate, share = measured[name], measured[efficiency]
    return f"{rate * share:,.4g} GB/s, {share:.0%} of {rate:,.4g} GB/s"


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
