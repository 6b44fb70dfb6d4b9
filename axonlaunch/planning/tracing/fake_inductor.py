"""Inductor without kernels: compiled blocks allocate as they would, and compute nothing.

Everything of Inductor's that this takes is here, private as most of it is;
``tests/planning/test_fake_inductor.py`` holds it against code that is really compiled, and says
what to do when it moves. It is counted for a CPU's kernels, whatever the device: what is kept for
backward and what is computed again is decided before there are any.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch._higher_order_ops import wrap
from torch._inductor import async_compile, cpu_vec_isa


def install_fake_inductor() -> None:
    """Let what is compiled in this process, in its fake world, be so on tensors without bytes."""
    _generate_alone()
    _allocate_visibly()
    _say_nothing_of_it()
    # As ``build`` has it; what looks for buckets takes fake tensors for its own.
    torch._dynamo.config.optimize_ddp = False


def _generate_alone() -> None:
    """Let Inductor write kernels without building them, and keep them out of its cache."""
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.compile_threads = 1
    # It builds a program of each.
    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]
    async_compile.AsyncCompile.cpp_pybinding = lambda *_, **__: _do_nothing  # type: ignore[method-assign]


def _say_nothing_of_it() -> None:
    """Let whoever runs this for real see torch's own warnings about it."""
    wrap.warning_once = _do_nothing  # type: ignore[assignment]


def _allocate_visibly() -> None:
    """Turn what kernel wrappers do to storages into operations, which dispatch modes see."""
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cpu = _empty
    guards._reinterpret_tensor = _reinterpreted
    guards.assert_size_stride = _do_nothing


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpreted(tensor: torch.Tensor, *place: Any) -> torch.Tensor:
    return torch.as_strided(tensor, *place).detach()  # autograd is to see no view


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
