"""Typed configurations of recordings of single steps: profiles, and traces of module outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Profiling of steps with torch.profiler."""

    steps: list[int] = field(default_factory=list)
    """first and last step to record, [10,13]; empty: none"""
    ranks: list[int] = field(default_factory=lambda: [0])
    """ranks to record; each writes profile/rank_N.json.gz to the run folder"""
    memory: bool = False
    """also record every GPU allocation, and write a snapshot with the profile and when a step runs
    out of memory: profile/rank_N.memory.pickle
    """


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Traces of the tensors that modules compute, for axonlaunch diff."""

    steps: list[int] = field(default_factory=list)
    """steps to trace, counted from 0: [0, 100] are the first and the 101st; empty: none"""
    tensors: Literal["norms", "full"] = "norms"
    """recorded values of module outputs, parameters and their gradients. norms: root mean square,
    mean and largest absolute value; full: also all elements, for at most 16 steps
    """
