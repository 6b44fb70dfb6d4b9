"""Public imports, and that asking for help does not import torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys

import axonlaunch as ax
from axonlaunch.comm import __all__ as comm_names


def test_every_public_name_is_listed_once_sorted_and_there() -> None:
    assert ax.__all__ == sorted(set(ax.__all__))
    for name in ax.__all__:
        assert getattr(ax, name) is not None
    assert dir(ax) == ax.__all__


def test_every_name_of_the_comm_package_is_public() -> None:
    assert set(comm_names) <= set(ax.__all__)


def test_every_name_that_a_package_lists_is_there() -> None:
    packages = (
        each.name for each in pkgutil.walk_packages(ax.__path__, "axonlaunch.") if each.ispkg
    )
    for module in map(importlib.import_module, packages):
        names = getattr(module, "__all__", [])
        assert [name for name in names if not hasattr(module, name)] == [], module
        assert names == sorted(set(names)), module


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(ax, "no_such_name")


def test_the_version_is_the_packages() -> None:
    ran = _run("-m", "axonlaunch", "--version")
    assert ran.stdout.strip() == f"axonlaunch {importlib.metadata.version('axonlaunch')}"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=60
    )


def test_importing_the_package_imports_no_torch() -> None:
    modules = "axonlaunch, axonlaunch.models, axonlaunch.models.hf.source"
    _run("-c", f"import sys, {modules}; assert 'torch' not in sys.modules")


def test_the_parent_of_a_run_imports_neither_torch_nor_numpy() -> None:
    modules = (
        "axonlaunch.launch.runs, axonlaunch.launch.local.launcher, "
        "axonlaunch.launch.external.slurm.launcher"
    )
    _run("-c", f"import sys, {modules}; assert not sys.modules.keys() & {{'torch', 'numpy'}}")


def test_help_imports_no_torch_and_no_hydra() -> None:
    ran = _run("-X", "importtime", "-m", "axonlaunch", "--help")
    imported = {line.rsplit("|", 1)[1].strip() for line in ran.stderr.splitlines() if "|" in line}
    assert not imported & {"torch", "hydra", "omegaconf", "rich", "numpy"}
    assert "train" in ran.stdout


def test_help_imports_few_modules() -> None:
    """The time to help is the time of its imports, most of them Python's own; a command is one."""
    # Python imports some itself, and more if an environment has .pth files.
    alone, helping = (
        sum("|" in line for line in _run("-X", "importtime", *arguments).stderr.splitlines())
        for arguments in (("-c", ""), ("-m", "axonlaunch", "--help"))
    )
    assert helping - alone <= 227
