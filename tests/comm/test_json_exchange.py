"""Plain values are sent between ranks without a pickle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import axonlaunch
from axonlaunch.comm import World
from axonlaunch.comm.checks.json_exchange import all_gather_json


def test_json_all_gather_returns_every_value() -> None:
    values = [None, [1, 2.5, "é"], {"a": ["b"] * 100}]
    gathered = World.mock(3).run(lambda world: all_gather_json(values[world.rank]))
    assert gathered == [values] * 3


def test_package_uses_no_pickled_object_collectives() -> None:
    """torch's checkpoints use pickle, over authenticated connections; see ``docs/security.md``."""
    names = [name for name in dir(dist) if "object" in name and callable(getattr(dist, name))]
    assert "all_gather_object" in names
    sources = Path(axonlaunch.__file__).parent.rglob("*.py")
    uses = [
        f"{path.name}: {name}" for path in sources for name in names if name in path.read_text()
    ]
    assert uses == []


def test_non_json_value_is_refused_by_sender() -> None:
    with World.init(), pytest.raises(TypeError, match="not JSON serializable"):
        all_gather_json(object())
