"""The source code of Python's standard library: real text that every machine has.

It reads the files of the running interpreter; an interpreter without source files is an error.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.data import PythonSourceConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.datasets.dataset import FileSums
from axonlaunch.data.included.text import ByteWindows

Bytes = npt.NDArray[np.uint8]

# Not part of the library, not on every machine, or repetitive tests and demos.
_SKIPPED = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "idle_test",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


class PythonSource(ByteWindows):
    """Windows of the standard library's source; whole files are held out."""

    def __init__(self, config: PythonSourceConfig) -> None:
        """Read the library, once per process.

        Raises:
            ConfigError: This Python has no source files, or too little text for one sample.
        """
        root = Path(sysconfig.get_path("stdlib"))
        train, held_out = _read(root, config.eval_fraction)
        super().__init__(train, held_out, sequence_length=config.sequence_length)

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return one checksum of all training files, under one name."""
        del shards  # no shards
        source = self._rows["train"]
        version = sysconfig.get_python_version()
        name = f"the standard library of Python {version}"
        return FileSums([(name, f"{len(source)}-{zlib.crc32(source.data):08x}")])


@lru_cache(maxsize=2)
def _read(root: Path, eval_fraction: float) -> tuple[Bytes, Bytes]:
    train: list[bytes] = []
    held_out: list[bytes] = []
    for name in _source_files(root):
        try:
            content = (root / name).read_bytes()
        except OSError:
            continue  # unreadable files of the library are left out
        (held_out if _share(name) < eval_fraction else train).append(content)
    if not train and not held_out:
        message = (
            f"this Python has no source files under {root} (it may be frozen or zipped); "
            "use data=text with your files"
        )
        raise ConfigError([ConfigIssue("data.name", message, "python_source")])
    if not train or not held_out:
        message = (
            f"all {len(train) + len(held_out)} files are in one split; use a value closer to 0.05"
        )
        raise ConfigError([ConfigIssue("data.eval_fraction", message, eval_fraction)])
    return _join_files(train), _join_files(held_out)


def _source_files(root: Path) -> list[str]:
    """List the library's source files as relative paths, ordered by name."""
    sources: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        inside = folder.removeprefix(str(root)).replace(os.sep, "/").lstrip("/")
        within = f"{inside}/" if inside else ""
        sources += [within + name for name in files if name.endswith(".py")]
    return sorted(sources)


def _share(name: str) -> float:
    """Map a file name to [0, 1), so that a file is in the same split on every machine."""
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest()) / 2**48


def _join_files(contents: list[bytes]) -> Bytes:
    return np.frombuffer(b"\n".join(contents), dtype=np.uint8)
