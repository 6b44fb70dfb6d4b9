"""Figures as files, PNG or SVG, written whole or not at all.

It draws nothing itself and refuses other kinds of files; without matplotlib it says how to install
it.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from axonlaunch.cli.output_files import check_file, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: Path) -> None:
    """Say before any work whether a plot can be written there.

    Raises:
        ConfigError: The ending is neither .png nor .svg, there is no such folder, the path is a
            folder itself, or matplotlib is not installed.
    """
    check_file("--plot", path, endings=(".png", ".svg"))
    if find_spec("matplotlib") is None:
        from axonlaunch.config import ConfigError, ConfigIssue

        reason = "matplotlib is not installed; pip install 'axonlaunch[plot]'"
        raise ConfigError([ConfigIssue("--plot", reason, str(path))])


def save(figure: Figure, path: Path) -> None:
    """Write a figure, as its file's ending says.

    Raises:
        ConfigError: The file can't be written.
    """
    drawn = io.BytesIO()  # the file appears whole or not at all
    figure.savefig(drawn, format=path.suffix.lower()[1:], dpi=150, facecolor="white")
    with writing("--plot", path):
        path.write_bytes(drawn.getvalue())
