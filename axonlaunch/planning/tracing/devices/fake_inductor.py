"""Runs Inductor without kernels: compiled blocks allocate their storages and compute nothing.

All uses of Inductor's internals are in this module. ``tests/planning/test_fake_inductor.py``
compares the result with really compiled code and says what to do if an internal function moves.
Inductor decides before code generation which tensors to keep for backward and which to recompute.
The code generator (C++ for a CPU, Triton for a GPU) decides which operations to fuse, and so which
intermediate results are stored. Triton need not be installed. Not counted: reductions that
Inductor fuses only on CUDA, and padding on CUDA.
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
    """Patch Inductor for this process, so that compiled code runs on fake tensors.

    Args:
        for_gpu: Whether to generate kernels for a GPU, although the tensors are on a CPU.
    """
    _skip_building()
    if for_gpu:
        _skip_triton()
    _allocate_visibly()
    _silence_warning()
    # As in a real run. DDPOptimizer would also mistake these fake tensors for its own.
    torch._dynamo.config.optimize_ddp = False


def _skip_building() -> None:
    """Let Inductor generate kernels without building or caching them."""
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.compile_threads = 1
    # Dynamo would create a CUDA context to find out whether Triton supports this node's GPU.
    torch._inductor.config.triton_disable_device_detection = True
    # Inductor builds a test program for each instruction set.
    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]
    async_compile.AsyncCompile.cpp_pybinding = lambda *_, **__: _do_nothing  # type: ignore[method-assign]


def _skip_triton() -> None:
    """Let Inductor generate Triton kernels without importing Triton or running them."""
    torch._inductor.config.cpu_backend = "triton"
    vars(_triton)["triton_hash_with_backend"] = lambda: ""
    wrapper.PythonWrapperCodegen.write_triton_header_once = _do_nothing  # type: ignore
    kernel: Any = SimpleNamespace(run=_do_nothing)
    async_compile.AsyncCompile.triton = lambda *_, **__: kernel  # type: ignore[method-assign]
    # Inductor passes scalars in host memory by value, but these tensors represent a GPU's.
    vars(wrapper)["should_unwrap_unspec_arg"] = lambda name: False


def _silence_warning() -> None:
    """Silence a warning of torch that the user sees in the real run."""
    wrap.warning_once = _do_nothing  # type: ignore[assignment]


def _allocate_visibly() -> None:
    """Replace the C++ allocation functions of compiled code by operations that modes can see."""
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cpu = _empty
    guards._reinterpret_tensor = _reinterpret
    guards.assert_size_stride = _do_nothing


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(tensor: torch.Tensor, *geometry: Any) -> torch.Tensor:
    return torch.as_strided(tensor, *geometry).detach()  # hide the view from autograd


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
