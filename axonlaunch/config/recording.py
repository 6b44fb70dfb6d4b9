"""Typed configuration of what is recorded of some steps: profiles, and what modules compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps are profiled, on which ranks."""

    steps: list[int] = field(default_factory=list)
    """first and last step that torch.profiler records, [10,13]; empty: none"""
    ranks: list[int] = field(default_factory=lambda: [0])
    """ranks that record; each writes profile/rank_N.json.gz to the run folder"""
    memory: bool = False
    """also record every allocation on a GPU, and write a snapshot with the trace, or when a step
    runs out of memory: profile/rank_N.memory.pickle
    """


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Of which steps what the modules compute is written, for axonlaunch diff."""

    steps: list[int] = field(default_factory=list)
    """steps that are traced, by the updates before them: [0, 100] are the first and the 101st;
    empty: none
    """
    tensors: Literal["norms", "full"] = "norms"
    """norms: root mean square, mean and largest absolute value of each module's output, of its
    gradient, of parameters and their gradients; full: all their elements too, of a few steps
    """
