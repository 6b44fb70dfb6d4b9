"""A launcher that starts ranks on this node, and writes the names of the runs to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import axonlaunch as ax
from axonlaunch.config.options.launch import LaunchConfig
from axonlaunch.launch.local import launcher as local


@dataclass(frozen=True, kw_only=True)
class NotedConfig(LaunchConfig):
    """Ranks on this node, noted in a file."""

    name: str = "noted"
    """name of the launcher"""
    list_file: str = "launched.txt"
    """file that the names of runs are appended to"""


@ax.register_launcher("noted", config=NotedConfig, on_this_node=True)
class Noted:
    """Ranks on this node, noted in a file."""

    check = staticmethod(local.check)

    def launch(self, config, options):
        """Note the run and start its ranks."""
        with Path(config.launch.list_file).open("a") as file:
            file.write(f"{config.name}\n")
        return local.launch(config, options)
