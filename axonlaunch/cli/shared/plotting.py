"""Saves matplotlib figures as PNG or SVG files."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from axonlaunch.cli.shared.output_files import check_file, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: Path) -> None:
    """Check that a plot can be written.

    Raises:
        ConfigError: The ending is neither .png nor .svg, the file can't be written, or matplotlib
            is not installed.
    """
    check_file("--plot", path, endings=(".png", ".svg"))
    if find_spec("matplotlib") is None:
        from axonlaunch.config import ConfigError, ConfigIssue

        reason = "matplotlib is not installed; run pip install 'axonlaunch[plot]'"
        raise ConfigError([ConfigIssue("--plot", reason, str(path))])


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's ending.

    Raises:
        ConfigError: The file can't be written.
    """
    image = io.BytesIO()  # a failure while drawing leaves no incomplete file
    figure.savefig(image, format=path.suffix.lower()[1:], dpi=150, facecolor="white")
    with writing("--plot", path):
        path.write_bytes(image.getvalue())
