"""The origin of a frame's code, by its file."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import axonlaunch
from axonlaunch.system.frame_origin import Owner, frame_owner, place_in_user_code

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


def test_error_location_is_in_user_file_rather_than_package(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "library.py"
    scope: dict[str, Any] = {}
    exec(compile("def load():\n    raise OSError", str(package), "exec"), scope)
    exec(compile("def build():\n    load()", f"{tmp_path}/models.py", "exec"), scope)
    for call, location in (("build", f"{tmp_path}/models.py:2"), ("load", f"{package}:2")):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - it has no message
            scope[call]()
        traceback = caught.value.__traceback__
        assert traceback is not None
        # below this file, which counts as a user's file
        error = caught.value.with_traceback(traceback.tb_next)
        assert place_in_user_code(error) == f" ({location})"


def test_an_error_outside_of_a_users_code_has_no_place() -> None:
    assert place_in_user_code(OSError()) == ""
