"""The result of a user's builder is checked before it is used."""

from __future__ import annotations

from typing import Any

import pytest

import axonlaunch as ax
from axonlaunch import config
from axonlaunch.config import ConfigError
from axonlaunch.models.build import on_meta


def test_a_builder_that_returns_nothing_is_reported_in_one_line() -> None:
    @ax.register_model("forgetful", inputs="tokens")
    def full() -> Any:
        """Forget to return."""

    chosen = config.load(["model=forgetful", "data=synthetic_tokens"])
    with pytest.raises(ConfigError) as reported:
        on_meta(chosen.model, seed=0)
    assert str(reported.value) == (
        "model.name=forgetful: its builder returned NoneType, not an nn.Module"
    )
