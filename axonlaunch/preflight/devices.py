"""Checks the devices of this node: their number, precision, memory and the ranks that share them.

The driver is queried in a process that is not a rank. CUDA is never initialized in a process that
forks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.consistency.run_precision import precision_of, with_precision
from axonlaunch.config.precision import Float8Format
from axonlaunch.engines.tensor.outputs.liger_loss import liger_problem
from axonlaunch.system import gpus
from axonlaunch.system.node import host, limits


def accelerators(config: RunConfig | None = None) -> int:
    """Return the number of accelerators that NCCL can serve.

    Args:
        config: Configuration of a run; the number is 0 if it uses the CPU. None counts all.

    Raises:
        ConfigError: There is a driver but CUDA fails. Otherwise the run would silently use the CPU.
    """
    if config is not None and config.launch.device == "cpu":
        return 0
    try:
        return len(gpus.devices())
    except RuntimeError as error:
        message = (
            f"CUDA fails here: {str(error).splitlines()[0]}; repair it (nvidia-smi), or use "
            "launch.device=cpu"
        )
        raise ConfigError([ConfigIssue("launch.backend", message)]) from None


def with_device_precision(config: RunConfig) -> RunConfig:
    """Return a configuration with ``train.precision=auto`` replaced, given this node's devices.

    Args:
        config: Configuration of a run with resolved backend and device.
    """
    if config.train.precision != "auto":
        return config
    has_bf16 = config.launch.device == "cuda" and all(gpu.has_bf16 for gpu in gpus.devices())
    return with_precision(config, has_bf16=has_bf16)


def device_problems(config: RunConfig, devices: int) -> Iterator[ConfigIssue]:
    """Yield settings that the devices or the backend of this node's ranks do not allow.

    Args:
        config: Configuration of a run with resolved backend and device.
        devices: Number of ranks on this node that can have a separate device.
    """
    launch = config.launch
    backend, nproc = launch.backend, launch.nproc
    assert nproc != "auto"
    if backend == "nccl" and devices < nproc:
        have = f"this node has {devices}" if devices else "this node has none"
        instead = "gloo" if not devices else "gloo, or mock with launch.device=cuda"
        message = f"{nproc} ranks need an accelerator each; {have}; use {instead}"
        yield ConfigIssue("launch.backend", message, backend)
    elif launch.device == "cuda" and not devices:
        message = "this node has no accelerator that torch sees; use cpu"
        yield ConfigIssue("launch.device", message, launch.device)
    tensor = config.strategy.tensor
    if tensor.async_collectives and (backend != "nccl" or nproc % tensor.degree):
        message = (
            f"requires that all {tensor.degree} tensor ranks are on GPUs of one node, because they "
            "exchange data through GPU memory; use false"
        )
        yield ConfigIssue("strategy.tensor.async_collectives", message, True)
    kernel = config.train.attention_kernel
    if kernel != "auto" and launch.device != "cuda":
        message = "the ranks compute on the CPU, which has one kernel; use auto"
        yield ConfigIssue("train.attention_kernel", message, kernel)
    loss_kernel = config.train.loss_kernel
    if loss_kernel is not None and (problem := liger_problem(launch.device)):
        yield ConfigIssue("train.loss_kernel", problem, loss_kernel)
    products = precision_of(config).products
    if isinstance(products, Float8Format) and launch.device == "cuda" and devices:
        lacking = [gpu.name for gpu in gpus.devices() if not gpu.has_fp8]
        if lacking:
            message = (
                f"{lacking[0]} has no products of 8-bit numbers, which NVIDIA's GPUs have from "
                "compute capability 8.9 on (Ada, Hopper), and AMD's from MI350 on; use null"
            )
            yield ConfigIssue("train.matmul_dtype", message, products.name)
    if config.train.compile and (lacking_compiler := _lacking_compiler(launch.device)):
        name, variable = lacking_compiler
        message = f"needs {name}, which is not in PATH; install it, set {variable}, or use false"
        yield ConfigIssue("train.compile", message, True)
    if backend == "mock" and config.train.compile:
        message = "ranks are threads of one process, which torch.compile does not support; use gloo"
        yield ConfigIssue("launch.backend", message, backend)


def _lacking_compiler(device: str) -> tuple[str, str] | None:
    """Return the compiler that torch.compile calls and its variable, if this node does not have it.

    Inductor compiles kernels for CPUs with a C++ compiler, and Triton the code that launches
    kernels on GPUs with a C compiler.
    """
    variable = "CC" if device == "cuda" else "CXX"
    names = ["gcc", "clang"] if device == "cuda" else ["g++"]
    if chosen := os.environ.get(variable):
        names = [chosen]
    return None if any(map(shutil.which, names)) else (names[0], variable)


def memory_of_a_rank(config: RunConfig) -> tuple[int, str]:
    """Return the bytes of memory available to a rank on this node, and a description of them."""
    nproc = config.launch.nproc
    assert nproc != "auto"
    if config.launch.device == "cuda" and (devices := gpus.devices()):
        sharing = 1
        if config.launch.backend != "nccl":  # threads share the first device, processes all devices
            used = 1 if config.launch.backend == "mock" else len(devices)
            sharing = -(-nproc // used)
        description = "a device here" if sharing == 1 else "a rank's share of a device here"
        return devices[0].memory_bytes // sharing, description
    share, limit = host.memory_bytes() // nproc, limits.address_space()
    if limit is not None and limit < share:
        return limit, "the address space of a process (ulimit -v)"
    return share, "a rank's share of this node's memory"
