"""The source of Python's own standard library: real text that every machine has.

It reads the running interpreter's files and refuses one that came without them.
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

from axonlaunch.config.data import PythonSourceConfig
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.data.dataset import FileSums
from axonlaunch.data.text import ByteWindows

Bytes = npt.NDArray[np.uint8]

# Not of the library, not on every machine, or tests and demos that repeat themselves.
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
        """Read the library, once a process.

        Raises:
            ConfigError: This Python has no source, or too little for one sample.
        """
        root = Path(sysconfig.get_path("stdlib"))
        train, held_out = _read(root, config.eval_fraction)
        super().__init__(train, held_out, sequence_length=config.sequence_length)

    def file_sums(self, shards: int | None = None) -> FileSums:
        """Return one checksum of all training files, under one name."""
        del shards  # there are none
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
            continue  # an unreadable file of the library is not this run's problem
        (held_out if _share(name) < eval_fraction else train).append(content)
    if not train and not held_out:
        message = (
            f"this Python has no source files under {root} (it may be frozen or zipped); "
            "use data=text with files of your own"
        )
        raise ConfigError([ConfigIssue("data.name", message, "python_source")])
    if not train or not held_out:
        message = (
            f"all {len(train) + len(held_out)} files fall on one side; use a share nearer 0.05"
        )
        raise ConfigError([ConfigIssue("data.eval_fraction", message, eval_fraction)])
    return _join_files(train), _join_files(held_out)


def _source_files(root: Path) -> list[str]:
    """List the library's source files, as paths in it, in an order of their names alone."""
    sources: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        inside = folder.removeprefix(str(root)).replace(os.sep, "/").lstrip("/")
        within = f"{inside}/" if inside else ""
        sources += [within + name for name in files if name.endswith(".py")]
    return sorted(sources)


def _share(name: str) -> float:
    """Place a file in [0, 1) by its name, so that it is on the same side on every machine."""
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest()) / 2**48


def _join_files(contents: list[bytes]) -> Bytes:
    return np.frombuffer(b"\n".join(contents), dtype=np.uint8)
