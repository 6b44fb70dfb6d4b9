"""Keeps the inputs of recomputed blocks in host memory from forward to backward.

Torch's ``save_on_cpu`` copies in the stream of the computation, which waits for each copy. Here the
copies run beside it: an input leaves while its block computes, and arrives while the block after it
runs backward. With three blocks on a GPU:

    computation     block 0    block 1    block 2    |  backward 2   backward 1   backward 0
    to the host     input 0    input 1    input 2    |
    to the device                                  input 2  input 1      input 0

The computation waits for a copy to the host at the end of the block, and only then frees the input,
so the allocator gives no memory away that is still read. The host itself never waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from axonlaunch.engines.precision.lower_parameters import Forward
from axonlaunch.models.tensors.host_memory import HostBuffers
from axonlaunch.models.torch_internals import storage_key


class InputCopies:
    """Copies in order with the computation, as on a CPU."""

    def leaving(self) -> AbstractContextManager[None]:
        """Return a context for a copy to the host, after all work enqueued before."""
        return nullcontext()

    def arriving(self) -> AbstractContextManager[None]:
        """Return a context for a copy to the device, after all work enqueued before."""
        return nullcontext()

    def wait_for_left(self) -> None:
        """Let later computation wait for the copies to the host."""

    def wait_for_arrived(self) -> None:
        """Let later computation wait for the copies to the device."""


class StreamCopies(InputCopies):
    """Copies on two streams, one in each direction, concurrently with the current stream."""

    def __init__(self, device: torch.device) -> None:
        """Create the streams on a device."""
        self._device = device
        self._to_host, self._to_device = (torch.cuda.Stream(device) for _ in range(2))

    def leaving(self) -> AbstractContextManager[None]:
        """Return a context for a copy to the host, after all work enqueued before."""
        return self._after_computation(self._to_host)

    def arriving(self) -> AbstractContextManager[None]:
        """Return a context for a copy to the device, after all work enqueued before."""
        return self._after_computation(self._to_device)

    def wait_for_left(self) -> None:
        """Let later computation wait for the copies to the host."""
        torch.cuda.current_stream(self._device).wait_stream(self._to_host)

    def wait_for_arrived(self) -> None:
        """Let later computation wait for the copies to the device."""
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)

    @contextmanager
    def _after_computation(self, stream: torch.cuda.Stream) -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield


class _Input:
    """The input of one run of a block, in host memory.

    Attributes:
        host: Copy of the input in host memory.
        previous: Reference to the input of the block before it; None for the first block.
        arrived: Copy on the device that was made ahead; None if there is none.
    """

    def __init__(
        self, host: Tensor, memory: HostBuffers, previous: weakref.ref[_Input] | None
    ) -> None:
        self.host = host
        self.previous = previous
        self.arrived: Tensor | None = None
        self._memory = memory

    def __del__(self) -> None:
        self._memory.give_back(self.host)


class OffloadedInputs:
    """Offloads the first input of each block of a model or a pipeline stage.

    Other inputs, such as tables of positions and masks, are often the same for all blocks, and stay
    on the device.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without inputs.

        Args:
            device: Device of the blocks.
        """
        self._device = device
        self._copies = StreamCopies(device) if device.type == "cuda" else InputCopies()
        self._memory = HostBuffers(device)
        self._latest: weakref.ref[_Input] | None = None
        # Tensors of copies for which the computation has not waited.
        self._leaving: list[Tensor] = []
        self._arriving: list[Tensor] = []

    def wrap(self, forward: Forward, *, is_first: bool) -> Forward:
        """Return a block's forward that offloads the input that activation checkpointing saves.

        Args:
            forward: Forward of a block with activation checkpointing, compiled or not.
            is_first: Whether the block is the first of the model or stage.
        """

        def compute(*inputs: Any, **options: Any) -> Any:
            if is_first:
                self._latest = None
            first = next((each for each in inputs if isinstance(each, Tensor)), None)
            if first is None or not torch.is_grad_enabled():
                return forward(*inputs, **options)
            key = storage_key(first)

            def pack(tensor: Tensor) -> Tensor | _Input:
                return self._send(tensor) if storage_key(tensor) == key else tensor

            with saved_tensors_hooks(pack, self._unpack):
                outputs = forward(*inputs, **options)
            self._free_sent()
            return outputs

        return compute

    def _send(self, tensor: Tensor) -> _Input:
        if self._arriving:  # made ahead for a backward that ended early
            self._copies.wait_for_arrived()
            self._arriving.clear()
        host = self._memory.take(tensor)
        with self._copies.leaving():
            host.copy_(tensor, non_blocking=True)
        self._leaving.append(tensor)
        sent = _Input(host, self._memory, self._latest)
        self._latest = weakref.ref(sent)
        return sent

    def _free_sent(self) -> None:
        if self._leaving:
            self._copies.wait_for_left()
            self._leaving.clear()

    def _unpack(self, packed: Tensor | _Input) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.arrived is None:
            self._fetch(packed)
        self._copies.wait_for_arrived()
        self._arriving.clear()
        arrived, packed.arrived = packed.arrived, None
        previous = None if packed.previous is None else packed.previous()
        if previous is not None and previous.arrived is None:
            self._fetch(previous)
        assert arrived is not None
        return arrived

    def _fetch(self, packed: _Input) -> None:
        # In the memory of the computation's stream, which waits for the copy before it is freed.
        arrived = torch.empty_like(packed.host, device=self._device)
        with self._copies.arriving():
            arrived.copy_(packed.host, non_blocking=True)
        self._arriving.append(arrived)
        packed.arrived = arrived
