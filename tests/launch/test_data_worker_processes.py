"""Runs with ``data.workers``: equal losses, failures with the sample, no orphans."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.command import Served, wait_for
from support.launchers import torchrun
from support.served import Server

MODULE = """
import os
import random
import signal
import time

import numpy as np
import torch


class Images(torch.utils.data.Dataset):
    '''Images that are flipped, scaled and noised at random.'''

    num_classes = 4

    def __init__(self, pause=0.0, fault=None, at=40):
        self.pause, self.fault, self.at = pause, fault, at

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.pause)
        if index == self.at:
            self.fail()
        image = torch.full((1, 4, 4), index % 4.0) + torch.randn(1, 4, 4)
        if random.random() < 0.5:
            image = image.flip(-1)
        return image * float(np.random.uniform(0.5, 1.5)), index % 4

    def fail(self):
        if self.fault == "exception":
            raise ValueError("a broken file")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(1000)


class Rows(torch.utils.data.Dataset):
    vocab_size = 32

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = (torch.arange(17) + index + random.randint(0, 9)) % 32
        return row[:-1], row[1:]


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.linear = torch.nn.Linear(16, 4)

    def forward(self, images):
        return self.linear(self.dropout(images.flatten(1)))
"""
RUN = ["data=custom", "data.target=images_of_a_test:Images", "data.eval_fraction=0.125"]
RUN += ["model=custom", "model.target=images_of_a_test:Classifier"]
RUN += ["train.global_batch_size=8", "train.micro_batch_size=1", "train.log_every=1"]
RUN += ["train.steps=12", "train.eval_batches=1", "checkpoint.every=0", "optimizer.lr=0.01"]


@pytest.fixture
def images(served: Served) -> Served:
    (served.folder / "images_of_a_test.py").write_text(MODULE)
    return served


def workers(run: Served) -> list[int]:
    """Return the processes of a run that are named like data workers of torch."""
    found = []
    for pid in run.processes():
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("pt_data_worker"):
            found.append(pid)
    return found


def logged(run: Served, name: str) -> list[dict[str, float]]:
    """Return the lines of a run that may not have written any."""
    try:
        return run.lines(name)
    except (OSError, ValueError):
        return []


def test_an_image_dataset_with_augmentation_feeds_four_ranks_by_workers(images: Served) -> None:
    four = ["strategy=fsdp", "launch.nproc=4"]
    images("train", *RUN, *four, "data.workers=2", "name=workers")
    images("train", *RUN, *four, "name=alone")
    assert images.losses("workers") == images.losses("alone")
    images("train", *RUN, *four, "data.workers=1", "launch.backend=mock", "name=mock")
    assert images.losses("mock") == pytest.approx(images.losses("alone"), rel=1e-5)
    assert all("data_wait_s" in line for line in images.lines("workers") if "loss" in line)
    images.wait_until_gone(seconds=5)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_ranks_that_read_the_same_samples_get_the_same_random_numbers(
    images: Served, axis: str
) -> None:
    rows = [*RUN[:1], "data.target=images_of_a_test:Rows", "train.log_every=1", "train.steps=6"]
    rows += ["model=gpt", "model.hidden_size=16", "model.num_hidden_layers=2"]
    rows += ["train.global_batch_size=8", "train.micro_batch_size=2"]
    rows += ["model.num_attention_heads=2", "train.eval_batches=1", "checkpoint.every=0"]
    images("train", *rows, "strategy=single", "launch.nproc=1", "name=single")
    images("train", *rows, f"strategy={axis}", "launch.nproc=2", "data.workers=1", "name=divided")
    assert images.losses("divided") == pytest.approx(images.losses("single"), rel=1e-5)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", "the process that read sample 40 was ended by SIGKILL"),
        pytest.param("exception", "failed with ValueError: a broken file", marks=pytest.mark.slow),
        pytest.param("hang", "so the process hangs", marks=pytest.mark.slow),
    ],
)
def test_a_failing_worker_ends_the_run_with_its_sample(
    images: Served, fault: str, message: str
) -> None:
    chosen = ["launch.nproc=2", "data.workers=2", "name=run", f"data.arguments={{fault: {fault}}}"]
    seconds = ["launch.timeout_s=30"] if fault == "hang" else []
    ran = images("train", *RUN, *chosen, *seconds, status=1)
    assert ran.stderr.count("failed first") == 1
    kind = "WorkerDiedError" if fault == "kill" else "SampleError"
    assert f"{kind}: data=custom (images_of_a_test:Images): " in ran.stderr
    assert "sample 40" in ran.stderr
    assert message in " ".join(ran.stderr.replace("│", " ").split())
    if fault == "kill":
        assert "Traceback" not in ran.stderr
    else:
        assert "images_of_a_test.py" in ran.stderr
        assert "in fail" in ran.stderr
    images.wait_until_gone(seconds=5)


def test_a_killed_worker_process_ends_the_run(images: Served) -> None:
    chosen = ["launch.nproc=2", "data.workers=1", "name=run", "data.arguments={pause: 0.05}"]
    process = images.start("train", *RUN, *chosen, "train.steps=500")
    wait_for(lambda: len(workers(images)) == 2 and bool(logged(images, "run")))
    os.kill(workers(images)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was ended by SIGKILL" in " ".join(errors.replace("│", " ").split())
    images.wait_until_gone(seconds=5)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_an_ended_run_leaves_no_worker(images: Served, number: signal.Signals) -> None:
    chosen = ["launch.nproc=2", "data.workers=2", "name=run", "data.arguments={pause: 0.05}"]
    process = images.start("train", *RUN, *chosen, "train.steps=500", "checkpoint.every=1000")
    wait_for(lambda: len(workers(images)) == 4 and bool(logged(images, "run")))
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    images.wait_until_gone(seconds=8)


@pytest.mark.slow
def test_a_killed_rank_leaves_no_worker_under_torchrun(images: Served, server: Server) -> None:
    by = torchrun(images.folder, 2).served(server)
    chosen = ["data.workers=2", "name=run", "data.arguments={pause: 0.05}"]
    process = by.start("train", *RUN, *chosen, "train.steps=500")
    wait_for(lambda: len(workers(images)) == 4 and bool(logged(images, "run")))
    rank = int(Path(f"/proc/{workers(images)[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(rank, signal.SIGKILL)
    process.communicate(timeout=90)
    assert process.returncode
    images.wait_until_gone(seconds=8)


def interrupt(run: Served, *overrides: str, number: int) -> None:
    """Continue a run and end it by Ctrl-C, or for every third one by killing it."""
    process = run.start("train", *RUN, *overrides, "name=parts", "data.arguments={pause: 0.01}")
    steps = logged(run, "parts")
    wait_for(lambda: len(logged(run, "parts")) > len(steps) + 3 or process.returncode is not None)
    process.send_signal(signal.SIGKILL if number % 3 == 2 else signal.SIGINT)
    process.communicate(timeout=90)
    run.wait_until_gone(seconds=10)


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_interrupted_runs_with_workers_resume_to_the_bit(images: Served, times: int) -> None:
    chosen = ["launch.nproc=2", "checkpoint.every=3", f"train.steps={8 * times}"]
    images("train", *RUN, *chosen, "name=whole")
    for number in range(times):
        interrupt(images, *chosen, f"data.workers={number % 3}", number=number)
    images("train", *RUN, *chosen, "data.workers=1", "name=parts")
    by_step = {line["step"]: line["loss"] for line in images.lines("parts") if "loss" in line}
    full = {line["step"]: line["loss"] for line in images.lines("whole") if "loss" in line}
    assert by_step == full
