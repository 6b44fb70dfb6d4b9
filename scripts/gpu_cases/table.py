"""Shared by the parts: arguments, the time limit of ten minutes, rows, the table and its status.

Run as a script, it says whether the device that the parts need exists.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

try:
    from axonlaunch.system.node import allocator_settings

    allocator_settings.grow_segments()  # as in a rank, before torch is imported
    import torch
except ModuleNotFoundError as error:
    sys.stderr.write(
        f"error: {sys.executable} has no {error.name}: install axonlaunch there, or give its "
        "wheels; scripts/gpu --help says how\n"
    )
    sys.exit(2)

DRIVER = Path("/dev/nvidia-uvm")
"""File that a process has open after it initialized CUDA; processes that only use NVML have
others.
"""
OUTPUTS = Path("gpu-logs")
"""Folder for the output of failed commands, by case."""
ENDS_AFTER_CTRL_C_S = 15.0
_ENDS = time.monotonic() + 580.0


@dataclass(frozen=True)
class Row:
    """A case and its result.

    Attributes:
        name: Name of the case.
        cells: Texts by column.
        problem: Error of the case; empty without errors.
    """

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def seconds_left() -> float:
    """Return the remaining seconds of a part, in which its commands must end."""
    return max(0.0, _ENDS - time.monotonic())


def ended(
    command: Sequence[str | Path], folder: Path | None = None, /, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        folder: Working directory; None uses the current one.
        environment: Additional environment variables.

    Raises:
        subprocess.TimeoutExpired: The part's time ended before.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while True:
            try:
                output, errors = process.communicate(timeout=min(1.0, seconds_left()))
            except subprocess.TimeoutExpired:
                if not seconds_left():
                    process.kill()
                    raise
            else:
                return subprocess.CompletedProcess(command, process.returncode, output, errors)


def computing(belongs: Callable[[int], bool]) -> list[int]:
    """Return the processes that initialized CUDA and satisfy ``belongs``.

    Detected by their open files, because nvidia-smi prints PIDs of the host in a container.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [descriptor.readlink() for descriptor in (process / "fd").iterdir()]
            if DRIVER in opened and belongs(int(process.name)):
                found.append(int(process.name))
        except OSError:  # another user's, or just ended
            continue
    return found


def why(case: str, printed: str) -> str:
    """Return the last line that a failed command printed; ``gpu-logs`` gets all of it."""
    OUTPUTS.mkdir(exist_ok=True)
    (OUTPUTS / f"{case}.txt").write_text(printed)
    return (printed.strip().splitlines() or ["it ended without a word"])[-1]


def arguments(description: str) -> argparse.Namespace:
    """Parse the arguments of every part; exit with status 2 if the requested device is missing."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", default="", metavar="PREFIX", help="only cases whose names have this prefix"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() == 0:
        sys.stderr.write("error: torch sees no GPU here; --device cpu runs a small scale\n")
        sys.exit(2)
    return args


def run(names: Sequence[str], only: str, case: Callable[[str], Row], *, at_once: int = 1) -> int:
    """Run the cases, print each as it ends and finally the table; return the exit status.

    Ctrl-C, which running commands receive as well, ends it with the table of completed cases, and
    status 130.

    Args:
        names: Names of all cases, in the table's order.
        only: Prefix of the names of cases to run.
        case: Function that runs a case.
        at_once: Number of concurrent cases; 1 if cases are timed.
    """

    seconds: dict[str, float] = {}

    def row_of(name: str) -> Row:
        began = time.monotonic()
        try:
            return case(name) if seconds_left() else Row(name, problem="not run: no time was left")
        except subprocess.TimeoutExpired:
            return Row(name, problem="stopped: no time was left")
        finally:
            seconds[name] = time.monotonic() - began

    asked = [name for name in names if name.startswith(only)]
    if not asked:
        sys.stderr.write(f"error: no case's name begins with {only!r}: {', '.join(names)}\n")
        return 2
    rows: list[Row] = []
    interrupted = False
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        try:
            for row in pool.map(row_of, asked):
                rows.append(row)
                said = [f"{row.name}: {row.problem or 'as it has to be'}"]
                said += [f"{column} {cell}" for column, cell in row.cells.items()]
                sys.stdout.write(f"{', '.join(said)} ({seconds[row.name]:.0f} s)\n")
                sys.stdout.flush()
        except KeyboardInterrupt:
            interrupted = True
            global _ENDS  # ends commands that the interruption did not end
            _ENDS = min(_ENDS, time.monotonic() + ENDS_AFTER_CTRL_C_S)
            pool.shutdown(wait=False, cancel_futures=True)
    rows += [Row(name, problem="interrupted") for name in asked[len(rows) :]]
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    lines = [["case", *columns, "verdict"]]
    lines += [
        [row.name, *(row.cells.get(c, "") for c in columns), row.problem or "ok"] for row in rows
    ]
    sys.stdout.write(f"\n{where()}\n\n")
    for number, line in enumerate(lines):
        sys.stdout.write(f"| {' | '.join(line)} |\n")
        if not number:
            sys.stdout.write(f"|{' --- |' * len(line)}\n")
    return 130 if interrupted else int(any(row.problem for row in rows))


def where() -> str:
    """Return the device, driver and versions, which belong to every number."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        query = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"CPU, {versions}"
    return f"{query.stdout.splitlines()[0]}, {versions}"


if __name__ == "__main__":
    arguments(__doc__ or "")
