"""What to do about a failure, where that is known."""

from __future__ import annotations

import sys

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import nodes
from axonlaunch.disk import free_bytes
from axonlaunch.launch.reports import Report

GIB = 1024**3


def hint(report: Report, config: RunConfig) -> str:
    """Return what to do about a failure; empty where it is not known."""
    cause, _, rest = report.cause.partition(" ")
    if cause == "disk":
        from pathlib import Path

        folder, free = free_bytes(Path(config.run_dir))
        return (
            f"the disk of {folder} has {free / GIB:.2f} GiB free; make room, or use another "
            "run_dir, checkpoint.keep=1 or a larger checkpoint.every"
        )
    if cause == "module":
        return (
            f"{rest} is not installed for {sys.executable}; pip install it there, on every "
            "machine of the run"
        )
    if cause == "refused":
        launch = config.launch
        if nodes(config)[1] == 1:
            return "nothing listens there; is a service that the model or the data needs running?"
        return (
            f"nothing listens at {launch.master_addr}:{launch.master_port}; is that machine 0's "
            "address, and does a firewall let its port through?"
        )
    return ""
