"""Modules in the working folder never replace a library's, in any process of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.command import TINY, Command
from support.configured import run_config
from support.launchers import BIN, By, needs
from support.rank_engine import rank_engine
from torch._inductor import cpu_vec_isa

import axonlaunch as ax
from axonlaunch.system.processes import temporary_folders
from axonlaunch.system.storage import cache

LIBRARIES = ("typer", "torch", "yaml", "rich", "numpy", "hydra", "omegaconf", "signal", "threading")
HOSTILE = 'open({marker!r} + str(__import__("os").getpid()), "w").close(); raise SystemExit(3)'
TRAIN = ["train", *TINY, "train.steps=2", "name=run"]


@pytest.fixture
def hostile(axonlaunch: Command) -> Command:
    """Return a working folder with modules named like libraries, which leave a mark when they
    run.
    """
    for name in LIBRARIES:
        marker = str(axonlaunch.folder / f"ran_{name}_")
        (axonlaunch.folder / f"{name}.py").write_text(HOSTILE.format(marker=marker))
    return axonlaunch


def _marks(command: Command) -> list[str]:
    return sorted(path.name for path in command.folder.glob("ran_*"))


@pytest.mark.slow
def test_the_installed_command_imports_nothing_from_the_working_folder(hostile: Command) -> None:
    (hostile.folder / "mine.py").write_text("open('imported', 'w').close()")
    ran = subprocess.run(
        [BIN / "axonlaunch", *TRAIN, "strategy=ddp", "launch.nproc=2", "plugins=[mine]"],
        cwd=hostile.folder,
        env=hostile.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert _marks(hostile) == []
    assert ran.returncode == 0, ran.stderr
    assert (hostile.folder / "imported").exists()  # requested by the configuration


@pytest.mark.slow
def test_python_m_imports_nothing_from_the_working_folder(hostile: Command) -> None:
    hostile(*TRAIN, "strategy=single")
    assert _marks(hostile) == []


@pytest.mark.slow
def test_ranks_of_mpirun_import_nothing_from_the_working_folder(hostile: Command) -> None:
    needs("mpirun", root=False)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    By(hostile.folder, ["mpirun", "--oversubscribe", "-np", "2"], as_root)(*TRAIN, "strategy=ddp")
    assert _marks(hostile) == []
    hostile.wait_until_gone(seconds=5)


def test_compiled_kernel_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "axonlaunch/inductor").mkdir(parents=True, mode=0o777)
    temporary_folders.keep_kernels(tmp_path / "otherwise")
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder == cache.cache_folder() / "inductor"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_compiled_kernels_without_cache_folder_are_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    temporary_folders.keep_kernels(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


@pytest.mark.slow
def test_compiled_kernel_cache_follows_torch_setting(tmp_path: Path) -> None:
    program = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "here")}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(tmp_path / "here")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_compiler_subprocesses_import_nothing_from_working_folder(
    hostile: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile.folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    chosen = run_config(["strategy=single", "launch.nproc=1", "train.compile=true"])
    ax.World.mock(1).run(partial(rank_engine, chosen))
    # Environment of the programs by which torch tests the CPU; the second is up to torch 2.11.
    environment = getattr(cpu_vec_isa.VecISA, "_build_probe_env", cpu_vec_isa.python_subprocess_env)
    probe = [sys.executable, "-c", "import typer"]
    subprocess.run(probe, env=environment(), check=True, timeout=60)
    assert _marks(hostile) == []
    assert "PYTHONSAFEPATH" not in os.environ  # processes of the user's code inherit nothing
