"""A node without a GPU driver has no accelerator; no process with torch has to say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonlaunch.cli.configuration import config
from axonlaunch.launch.environment.accelerators import count_accelerators
from axonlaunch.system.node import gpu_driver
from axonlaunch.system.processes import forked_call, forkserver


@pytest.fixture
def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_driver, "_LIBRARY", "libabsent.so.1")
    monkeypatch.setattr(gpu_driver, "_DEVICES", ())


def test_node_without_gpu_driver_has_no_accelerator_and_starts_no_server(
    without_driver: None,
) -> None:
    assert count_accelerators(pytest.fail) == 0


@pytest.mark.parametrize(
    ("library", "device"), [("libc.so.6", "absent"), ("libabsent.so.1", "kfd")]
)
def test_accelerators_are_counted_by_torch_if_there_is_a_gpu_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, device: str
) -> None:
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(gpu_driver, "_LIBRARY", library)
    monkeypatch.setattr(gpu_driver, "_DEVICES", (str(tmp_path / device),))
    monkeypatch.setattr(forked_call, "call", lambda context, target, *, task: 8)
    assert count_accelerators(lambda: None) == 8  # type: ignore[arg-type,return-value]


def test_config_starts_no_server_on_a_node_without_gpu_driver(
    without_driver: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forkserver, "warm", pytest.fail)
    config.command(["strategy=fsdp", "train.steps=7"])
    assert "backend: gloo" in capsys.readouterr().out
