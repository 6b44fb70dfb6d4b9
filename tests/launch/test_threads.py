"""The number of a rank's threads is part of the run, because its bits depend on it."""

from __future__ import annotations

import pytest
import yaml
from support.command import Command

from axonlaunch.system.node import host

SAYS = """
import torch
from axonlaunch.training import worker
real = worker.fit
def fit(*args, **kwargs):
    print("threads:", torch.get_num_threads())
    return real(*args, **kwargs)
worker.fit = fit
"""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("threads", ["auto", 3])
def test_the_number_of_threads_is_frozen_and_used(served: Command, threads: str | int) -> None:
    (served.folder / "says.py").write_text(SAYS)
    overrides = ["strategy=ddp", "launch.nproc=2", "plugins=[says]", f"launch.threads={threads}"]
    ran = served.train(*overrides, "name=run", "train.steps=1")
    used = host.threads(ranks=2) if threads == "auto" else threads
    frozen = yaml.safe_load((served.folder / "runs/run/config.yaml").read_text())
    assert frozen["launch"]["threads"] == used
    assert f"threads: {used}\n" in ran.stdout


@pytest.mark.slow
def test_resume_with_other_thread_count_warns_of_differences(served: Command) -> None:
    overrides = ["strategy=ddp", "launch.nproc=2", "name=run", "checkpoint.every=2"]
    served.train(*overrides, "train.steps=2", "launch.threads=1")
    same = served.train(*overrides, "train.steps=4", "launch.threads=1").stdout
    assert "launch.threads" not in same
    other = " ".join(served.train(*overrides, "train.steps=6", "launch.threads=2").stdout.split())
    assert "resuming with launch.threads=2 (was 1): sums round otherwise" in other
    assert "launch.threads=1 keeps them" in other
