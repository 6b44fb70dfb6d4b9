"""``verify`` compares datasets with random augmentation, if the loader can seed their numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.configured import run_config

from axonlaunch.verification.comparison.compare import on_mock
from axonlaunch.verification.references.comparison_plan import ComparisonPlan

MODULE = """
import random

import numpy as np
import torch

ENTROPY = np.random.default_rng()


class Images(torch.utils.data.Dataset):
    num_classes = 4

    def __init__(self, own=False):
        self.own = own

    def __len__(self):
        return 64

    def __getitem__(self, index):
        scale = ENTROPY.random() if self.own else np.random.rand() + random.random()
        return (torch.randn(1, 4, 4) + index % 4) * float(scale), index % 4


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 4)

    def forward(self, images):
        return self.linear(images.flatten(1))
"""
CHOSEN = ["data=custom", "data.target=random_images:Images", "model=custom", "launch.nproc=2"]
CHOSEN += ["model.target=random_images:Classifier", "strategy=fsdp", "train.global_batch_size=8"]
CHOSEN += ["train.micro_batch_size=2", "data.workers=2"]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random_images.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "random_images", raising=False)


def test_augmentation_by_global_generators_passes() -> None:
    verdict = on_mock(run_config(CHOSEN), ComparisonPlan(steps=3, beyond=True))
    assert verdict.passed, verdict.failure


def test_a_generator_of_the_datasets_own_is_reported() -> None:
    config = run_config([*CHOSEN, "data.arguments={own: true}"])
    verdict = on_mock(config, ComparisonPlan(steps=2))
    assert not verdict.passed
    assert "of a generator of its own" in str(verdict.failure)
