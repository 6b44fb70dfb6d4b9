"""Compares axonlaunch with other tools on a small transformer: time, memory, lines of code, and
how each handles ten mistakes. Writes axonlaunch/docs/comparison.md.

Everything runs on this CPU, with gloo and DDP. The tools take turns. The first call creates their
environments from PyPI (a minute); DeepSpeed compiles an extension when it first runs (another
minute).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contest import Contestant, step_seconds
from peer_environments import (
    AXONLAUNCH,
    PEERS,
    Job,
    Peer,
    command_of,
    lines_of,
    python_of,
    started,
    version_of,
    why_not,
)
from peer_mistakes import MISTAKES, TIMEOUT_S, judge, judge_resuming

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "axonlaunch/docs/comparison.md"
GOOD = ("works", "reported")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="+", choices=[peer.name for peer in PEERS])
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        help="seconds without output after which a run counts as hanging",
    )
    parser.add_argument("--no-mistakes", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="only 2 ranks, one repeat and three mistakes"
    )
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv/peers")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.repeats, args.steps = [2], 1, 20
    chosen = [peer for peer in PEERS if args.only is None or peer.name in args.only]
    pythons = {peer: python_of(peer, args.environments.absolute()) for peer in chosen}
    absent = {p: reason for p in chosen if (reason := why_not(p, pythons[p]))}
    peers = [peer for peer in chosen if peer not in absent]
    for peer in peers:  # compiles the extension and fills the file cache
        print(f"warming {peer.name}", flush=True)
        warm(peer, pythons[peer])
    speeds = {ranks: measured(peers, pythons, ranks, args) for ranks in args.ranks}
    mistakes: dict[str, dict[Peer, str]] = {}
    if not args.no_mistakes:
        mistakes = judged(peers, pythons, args.patience, is_quick=args.quick)
    versions = {peer: version_of(peer, pythons[peer]) for peer in chosen}
    args.output.write_text(page(peers, absent, versions, speeds, mistakes, args))
    print(f"written: {args.output}")


def warm(peer: Peer, python: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = command_of(peer, python, Job(steps=1), folder=folder)
        with started(overrides, python, folder=folder) as (process, _):
            if process.wait(timeout=600):
                raise SystemExit(f"{peer.name} fails:\n{(folder / 'output').read_text()}")


def measured(
    peers: Sequence[Peer], pythons: dict[Peer, Path], ranks: int, args: Any
) -> dict[Peer, dict[str, list[float]]]:
    """Return seconds to the first step and per step, and MiB per rank, of each turn."""
    samples: dict[Peer, dict[str, list[float]]] = {
        peer: {"first": [], "step": [], "memory": []} for peer in peers
    }
    for turn in range(args.repeats):
        for peer in reversed(peers) if turn % 2 else peers:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                job = Job(ranks=ranks, steps=args.steps)
                overrides = command_of(peer, pythons[peer], job, folder=folder)
                with started(overrides, pythons[peer], folder=folder) as (process, began):
                    contestant = contestant_of(peer, process, folder, began)
                    samples[peer]["first"].append(contestant.first_step_s())
                    samples[peer]["memory"].append(contestant.rank_pss_mib())
                    samples[peer]["step"].append(step_seconds(contestant))
            print(
                ranks, peer.name, {k: round(v[-1], 4) for k, v in samples[peer].items()}, flush=True
            )
    return samples


def contestant_of(
    peer: Peer, process: subprocess.Popen[bytes], folder: Path, began: float
) -> Contestant:
    def is_rank(proc_folder: Path) -> bool:
        if peer is AXONLAUNCH:
            return str((proc_folder / "fd" / "1").readlink()).startswith(str(folder / "run/logs"))
        line = (proc_folder / "cmdline").read_bytes()
        return f"--out={folder}".encode() in line and b"--standalone" not in line

    progress = folder / ("run/metrics.jsonl" if peer is AXONLAUNCH else "seconds")
    return Contestant(process, folder, progress, began, is_rank)


def judged(
    peers: Sequence[Peer], pythons: dict[Peer, Path], patience_s: float, *, is_quick: bool
) -> dict[str, dict[Peer, str]]:
    """Return the verdict by mistake and peer."""
    verdicts: dict[str, dict[Peer, str]] = {}

    def note(name: str, peer: Peer, verdict: str, output: str) -> None:
        verdicts.setdefault(name, {})[peer] = verdict
        last = " | ".join(output.strip().splitlines()[-2:])[-160:]
        print(f"{name:46} {peer.name:11} {verdict:15} {last}", flush=True)

    for mistake in MISTAKES[:3] if is_quick else MISTAKES:
        for peer in peers:
            verdict, output = judge(peer, pythons[peer], mistake, patience_s=patience_s)
            note(mistake.name, peer, verdict, output)
    for peer in () if is_quick else peers:
        for name, (verdict, output) in judge_resuming(
            peer, pythons[peer], patience_s=patience_s
        ).items():
            note(name, peer, verdict, output)
    return verdicts


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def page(
    peers: Sequence[Peer],
    absent: dict[Peer, str],
    versions: dict[Peer, str],
    speeds: dict[int, dict[Peer, dict[str, list[float]]]],
    mistakes: dict[str, dict[Peer, str]],
    args: Any,
) -> str:
    """Return the page of the documentation."""
    own = ("--environments", str(args.environments))  # their location does not matter
    asked = [argument for argument in sys.argv[1:] if argument not in own]
    command = " ".join(["scripts/bench peers", *asked])
    python = ".".join(map(str, sys.version_info[:3]))
    stated = ", ".join(f"{peer.name} {version}" for peer, version in versions.items())
    lines = [
        "# Comparison with other tools",
        "",
        "Speed and error handling of axonlaunch and five other tools on the same small model.",
        "",
        "| setting | value |",
        "| --- | --- |",
        "| model | a transformer with 0.9 million parameters |",
        f"| layout | DDP with gloo on {os.cpu_count()} CPU cores |",
        "| scripts | `scripts/benches/peer_scripts`; the one for torchrun is plain torch |",
        f"| command | `{command}` (creates the environments) |",
        f"| versions | Python {python}, {stated} |",
        f"| load average of the machine | {os.getloadavg()[2]:.1f} (15 minutes) |",
        "",
        "The machine had other work, so compare only numbers within one table.",
    ]
    for peer, reason in absent.items():
        lines += ["", f"{peer.name} does not run on a CPU: `{reason}`."]
    for ranks, by_peer in speeds.items():
        lines += [
            "",
            f"## {ranks} ranks",
            "",
            f"Medians of {args.repeats} runs. The tools take turns.",
            "",
        ]
        lines += table(
            ["tool", "first step", "step", "memory per rank (PSS)", "lines of user code"],
            [
                [
                    peer.name,
                    f"{statistics.median(turns['first']):.1f} s",
                    f"{1e3 * statistics.median(turns['step']):.1f} ms",
                    f"{statistics.median(turns['memory']):.0f} MiB",
                    str(lines_of(peer)),
                ]
                for peer, turns in by_peer.items()
            ],
        )
    if mistakes:
        lines += [
            "",
            "## Mistakes",
            "",
            "Each run has two ranks and contains one mistake.",
            "",
            "| outcome | meaning |",
            "| --- | --- |",
            "| works | the run behaved as intended |",
            "| reported | the run ended with an error that names the cause (the key, the number, "
            "the rank), or it continued correctly and reported the mistake |",
            "| misreported | the run ended with an error that does not name the cause |",
            f"| hung | the run had not ended after {args.patience:g} s, although a silent rank is "
            f"to be given up after {TIMEOUT_S:g} s |",
            "| silently wrong | the run ended as if nothing were wrong |",
            "",
            *table(
                ["mistake", *(peer.name for peer in peers)],
                [[name, *(cells[peer] for peer in peers)] for name, cells in mistakes.items()],
            ),
        ]
    lines += ["", "## Where another tool is better", "", *better(speeds, mistakes)]
    return "\n".join(lines) + "\n"


def better(
    speeds: dict[int, dict[Peer, dict[str, list[float]]]], mistakes: dict[str, dict[Peer, str]]
) -> list[str]:
    """Return a line for each aspect in which another tool is better."""
    kinds = {"first": "time to first step", "step": "step time", "memory": "memory per rank"}
    lines = []
    for ranks, by_peer in speeds.items():
        for key, name in kinds.items():
            values = {peer: statistics.median(turns[key]) for peer, turns in by_peer.items()}
            ours = values.get(AXONLAUNCH)
            for peer, value in values.items():
                if ours is not None and value < ours:
                    share = f"{value / ours:.2f} of axonlaunch's value"
                    lines.append(f"- {name}, {ranks} ranks: {peer.name}, {share}")
    for name, verdicts in mistakes.items():
        if verdicts.get(AXONLAUNCH) not in GOOD:
            others = [peer.name for peer, verdict in verdicts.items() if verdict in GOOD]
            if others:
                lines.append(f"- {name}: {', '.join(others)}")
    return lines or ["In none of these measurements."]


if __name__ == "__main__":
    main()
