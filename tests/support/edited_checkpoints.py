"""Changes files of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axonlaunch.checkpoint.format import manifest, step_folders

FILES = "files"


def edit(file: Path, change: Callable[[Any], object]) -> None:
    """Change a file of JSON in place."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def resum(folder: Path) -> None:
    """Update a manifest's checksums, as the creator of the folder could."""

    def change(about: dict[str, Any]) -> None:
        for name in about[FILES]:
            if (folder / name).is_file():
                size = (folder / name).stat().st_size
                about[FILES][name] = {"bytes": size, "crc32": step_folders._crc32(folder / name)}
        about["sha256"] = manifest._own_sum(about)

    edit(folder / "manifest.json", change)
