"""Inductor without kernels: compiled blocks allocate as they would, and compute nothing.

Everything of Inductor's that this takes is here, private as most of it is;
``tests/planning/test_fake_inductor.py`` holds it against code that is really compiled, and says
what to do when it moves. What is kept for backward and what is computed again is decided before
there are kernels; what these fuse, and so what is stored between them, by who writes them: C++ for
a CPU, Triton for a GPU. Triton itself need not be there. Reductions that Inductor fuses on CUDA
alone, and what it pads there, are not counted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch._higher_order_ops import wrap
from torch._inductor import async_compile, cpu_vec_isa
from torch._inductor.codegen import wrapper
from torch.utils import _triton


def install_fake_inductor(*, for_gpu: bool) -> None:
    """Let what is compiled in this process, in its fake world, be so on fake tensors.

    Args:
        for_gpu: Whether kernels are those of a GPU, though tensors are said to be on a CPU.
    """
    _generate_alone()
    if for_gpu:
        _generate_triton()
    _allocate_visibly()
    _say_nothing_of_it()
    # As ``build`` has it; what looks for buckets takes fake tensors for its own.
    torch._dynamo.config.optimize_ddp = False


def _generate_alone() -> None:
    """Let Inductor write kernels without building them, and keep them out of its cache."""
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.compile_threads = 1
    # dynamo asks the GPU of this node, if it has one, whether Triton knows it: for a context there.
    torch._inductor.config.triton_disable_device_detection = True
    # It builds a program of each.
    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]
    async_compile.AsyncCompile.cpp_pybinding = lambda *_, **__: _do_nothing  # type: ignore[method-assign]


def _generate_triton() -> None:
    """Let Triton's kernels be written; nothing imports it, and none is run."""
    torch._inductor.config.cpu_backend = "triton"
    vars(_triton)["triton_hash_with_backend"] = lambda: ""
    wrapper.PythonWrapperCodegen.write_triton_header_once = _do_nothing  # type: ignore
    kernel: Any = SimpleNamespace(run=_do_nothing)
    async_compile.AsyncCompile.triton = lambda *_, **__: kernel  # type: ignore[method-assign]
    # Numbers of the host are given by value, and a GPU's tensors are none.
    vars(wrapper)["should_unwrap_unspec_arg"] = lambda name: False


def _say_nothing_of_it() -> None:
    """Let whoever runs this for real see torch's own warnings about it."""
    wrap.warning_once = _do_nothing  # type: ignore[assignment]


def _allocate_visibly() -> None:
    """Turn what kernel wrappers do to storages into operations, which dispatch modes see."""
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cpu = _empty
    guards._reinterpret_tensor = _reinterpret
    guards.assert_size_stride = _do_nothing


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(tensor: torch.Tensor, *place: Any) -> torch.Tensor:
    return torch.as_strided(tensor, *place).detach()  # autograd is to see no view


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
