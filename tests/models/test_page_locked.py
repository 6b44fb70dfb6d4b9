"""Page-locked host memory, with a simulated driver: pages are locked once, and always unlocked."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from axonlaunch.config.optimization.optimizer_states import OptimizerState
from axonlaunch.engines.optimizer import optimizers, streaming
from axonlaunch.models import build
from axonlaunch.models.tensors import host_memory, page_locked as module
from axonlaunch.models.tensors.initialization import Constant, Staging
from axonlaunch.models.tensors.page_locked import page_locked

PAGE, HOST = mmap.PAGESIZE, torch.device("cpu")


@dataclass
class Driver:
    """Locks whole pages, and refuses one that is locked (cudaErrorHostMemoryAlreadyRegistered).

    Attributes:
        locked: Maps each locked page to the start of its locked range.
        requests: Number of requests to lock memory.
        copies: Addresses that work launched on device 3 still copies to or from.
        refusal: Error code of all requests; 0 means success.
    """

    locked: dict[int, int] = field(default_factory=dict)
    requests: int = 0
    copies: set[int] = field(default_factory=set)
    refusal: int = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        self.requests += 1
        pages = range(address // PAGE, -(-(address + size) // PAGE))
        if self.refusal or self.locked.keys() & set(pages):
            return self.refusal or 712
        self.locked.update(dict.fromkeys(pages, address))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert address not in self.copies
        if self.refusal:
            return self.refusal
        self.locked = {page: first for page, first in self.locked.items() if first != address}
        return 0

    def synchronize(self, device: int) -> None:
        assert device == 3
        self.copies.clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake_driver = Driver()

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"words of CUDA ({status})")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake_driver)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", fake_driver.synchronize)
    return fake_driver


def test_page_locked_tensors_share_no_pages(driver: Driver) -> None:
    small = [page_locked(torch.empty(3, 5, device="meta")) for _ in range(40)]
    assert len(driver.locked) == 40
    kept = small[0].detach()  # as a DTensor holds it
    small.clear()
    assert len(driver.locked) == 1
    kept.fill_(1.0)
    del kept
    assert not driver.locked


def test_page_locked_memory_stays_until_copies_complete(driver: Driver) -> None:
    locked = page_locked(torch.empty(7, device="meta"))
    driver.copies.add(locked.data_ptr())
    del locked
    assert not driver.locked


def test_page_lock_refusal_is_reported_and_memory_not_reused(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_freed: list[mmap.mmap] = []
    monkeypatch.setattr(module, "_never_freed", never_freed)
    like = torch.empty(2**18, device="meta")
    locked = page_locked(like)
    driver.refusal = 2
    with pytest.raises(RuntimeError, match=r"can't lock 1\.0 MiB of host memory: words of CUDA"):
        page_locked(like)
    with pytest.warns(UserWarning, match=r"1\.0 MiB .* can't unlock them: words of CUDA \(2\)"):
        del locked
    assert [len(pages) for pages in never_freed] == [2**20]


def test_page_locked_tensor_has_requested_strides_and_dtype(driver: Driver) -> None:
    like = torch.empty(50, 100, dtype=torch.bfloat16, device="meta").t()
    locked = page_locked(like)
    assert (locked.shape, locked.stride(), locked.dtype) == ((100, 50), (1, 100), torch.bfloat16)
    assert len(driver.locked) == 3
    assert page_locked(torch.empty(0, 7, device="meta")).shape == (0, 7)
    assert page_locked(torch.empty((), device="meta")).shape == ()


class OfGpu(torch.Tensor):
    """A tensor whose device claims to be a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_streamed_states_are_page_locked_at_exact_size(driver: Driver) -> None:
    parameter = torch.ones(33, 1024).as_subclass(OfGpu)
    momentum = optimizers.new_state(OptimizerState(name="momentum_buffer"), parameter, device=HOST)
    moved = streaming.moved(parameter, HOST)
    assert driver.requests == 2
    assert len(driver.locked) == 2 * 33 * 4096 // PAGE
    assert (float(momentum.sum()), float(moved.sum())) == (0.0, 33 * 1024)


def test_parameters_are_drawn_in_one_buffer(driver: Driver) -> None:
    staging = Staging()
    parts: list[Any] = [torch.empty(n, 1024, device="meta") for n in (8, 3, 8)]
    buffers = [staging.like(part) for part in parts]
    assert len({tensor.data_ptr() for tensor in buffers}) == driver.requests == 1
    staging.like(torch.empty(9, 1024, device="meta"))
    del buffers
    assert len(driver.locked) == 9 * 4096 // PAGE


def test_adapters_are_drawn_in_one_buffer(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = {"0": Constant(1.0), "1": Constant(2.0)}
    monkeypatch.setattr(build, "adapter_initializers", lambda module: starts)
    parts = [torch.zeros(rows, 1024).as_subclass(OfGpu) for rows in (8, 3)]
    adapters = torch.nn.ParameterList(parts)
    build._fill_adapters(adapters, seed=0)
    assert [float(part.mean()) for part in parts] == [1.0, 2.0]
    assert driver.requests == 1
    assert not driver.locked


def test_host_memory_of_many_sizes_is_that_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def allocate(like: torch.Tensor) -> torch.Tensor:
        sizes.append(like.nbytes)
        return torch.empty(like.shape, dtype=like.dtype)

    monkeypatch.setattr(host_memory, "page_locked", allocate)
    buffers = host_memory.HostBuffers(torch.device("cuda"))
    for length in (7, 3, 5, 9, 2, 8):
        inputs = torch.empty(4, length, dtype=torch.bfloat16).t()
        taken = [buffers.take(inputs) for _ in range(2)]
        assert {(each.shape, each.stride(), each.dtype) for each in taken} == {
            (inputs.shape, inputs.stride(), inputs.dtype)
        }
        assert taken[0].data_ptr() != taken[1].data_ptr()
        for each in taken:
            buffers.give_back(each)
    assert sizes == [56, 56, 72, 72]
