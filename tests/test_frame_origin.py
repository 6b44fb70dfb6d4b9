"""Whose code a frame runs, known by its file."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

import axonlaunch
from axonlaunch.system.frame_origin import Owner, frame_owner

STDLIB = sysconfig.get_path("stdlib")


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        (axonlaunch.__file__, "axonlaunch"),
        (torch.nn.__file__, "torch"),
        ("/usr/lib/python3/dist-packages/torch/nn/modules/module.py", "torch"),
        (f"{STDLIB}/threading.py", "python"),
        ("<frozen importlib._bootstrap>", "python"),
        ("<string>", "python"),
        (f"{STDLIB}/site-packages/timm/models/vit.py", "user"),
        ("/home/me/torch/model.py", "user"),
        ("/home/me/axonlaunch/train.py", "user"),
    ],
)
def test_a_frame_is_reported_by_its_file(file: str, whose: Owner) -> None:
    assert frame_owner(str(Path(file))) == whose
