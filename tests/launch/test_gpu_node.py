"""On a node with GPUs, commands never initialize CUDA in a process that forks or traces."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support import gpu_node, served
from support.command import Command
from support.configured import run_config
from support.served import Server

from axonlaunch.planning.background_estimate import BackgroundEstimate
from axonlaunch.system import gpus

ON_H100 = "hardware=h100_80gb"
ONE_BLOCK = ["model.num_hidden_layers=1", "data.sequence_length=16", "train.global_batch_size=8"]
FSDP = ["strategy=fsdp", "launch.nproc=8"]
ALONE = ["strategy.tensor.degree=1", "strategy.pipeline.degree=1"]
FIXED = [*ALONE, "train.activation_checkpointing=none", "train.micro_batch_size=4"]
LOOKED = {f"torch.cuda.get_device_properties in {gpu_node.ASKED}"}


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    file = tmp_path / "notes"
    file.touch()
    return file


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("arguments", "printed", "noted"),
    [
        (["estimate", *FSDP, ON_H100], "fsdp 8: 8 ranks", set()),
        (["train", "strategy=fsdp", "--dry-run"], "fsdp 8: 8 ranks", LOOKED),
        (
            ["plan", *FIXED, "strategy.data_parallel=fsdp", "--devices", "2", ON_H100],
            "fsdp 2",
            set(),
        ),
        (["train", "strategy=auto", *FIXED, "launch.nproc=2", "--dry-run"], "on a GPU", LOOKED),
    ],
    ids=["estimate", "dry run", "plan", "strategy=auto"],
)
def test_commands_without_ranks_do_not_initialize_cuda(
    tmp_path: Path,
    server: Server,
    notes: Path,
    arguments: list[str],
    printed: str,
    noted: set[str],
) -> None:
    environment = Command(tmp_path).environment()
    command_line = [str(notes), *arguments, *ONE_BLOCK]
    ran = served.Forked(
        gpu_node.command, server, *command_line, folder=tmp_path, environment=environment
    )
    output, errors = ran.communicate(timeout=90)
    assert ran.returncode == 0, errors
    assert printed in output
    assert set(notes.read_text().splitlines()) == noted


@pytest.mark.slow
def test_background_estimate_does_not_initialize_cuda(
    server: Server, notes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an empty cache
    device = gpus.Device(gpu_node.H100.name, gpu_node.H100.total_memory, gpu_node.H100.uuid)
    monkeypatch.setattr(gpus, "devices", lambda: [device] * 8)
    config = run_config([*FSDP, ON_H100, *ONE_BLOCK])
    assert config.launch.backend == "nccl"
    there = partial(gpu_node.here, str(notes))
    with served.reached(server, around=there) as context:
        estimate = BackgroundEstimate(context, config)
        estimate.begin()
        # it only gets the CPU time that other processes leave, which may be little
        estimate.wait(300)
        estimate.close()
    assert estimate.memory.result is not None, estimate.memory.reason
    assert estimate.step.result is not None, estimate.step.reason
    assert notes.read_text() == ""
