"""A torch process group between the rank threads of a mock world.

It implements torch's ``ProcessGroup`` with its old and new method names, so that all code on top of
it runs unchanged. Data exchange and scheduling are implemented elsewhere.
"""

# The methods and their arguments are those of torch's ProcessGroup and are documented there.
# ruff: noqa: A002, ARG002, D102
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonlaunch.comm.mock.exchange import (
    CollectiveCall,
    Exchange,
    PendingMessage,
    PendingOperation,
    describe_call,
    here,
)
from axonlaunch.comm.mock.output import Output, outputs_of, write_all
from axonlaunch.comm.mock.work import MockWork

_COMBINE: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.AVG: Tensor.add_,
    dist.ReduceOp.PRODUCT: Tensor.mul_,
    dist.ReduceOp.MIN: lambda total, value: torch.minimum(total, value, out=total),
    dist.ReduceOp.MAX: lambda total, value: torch.maximum(total, value, out=total),
    dist.ReduceOp.BAND: Tensor.bitwise_and_,
    dist.ReduceOp.BOR: Tensor.bitwise_or_,
    dist.ReduceOp.BXOR: Tensor.bitwise_xor_,
}


def reduce_in_rank_order(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Combine the tensors of all ranks in rank order, in their dtype."""
    if op not in _COMBINE:
        raise ValueError(
            f"mock, like gloo, has no {op.name}: use SUM and divide "
            "(FSDP: set_force_sum_reduction_for_comms(True))"
        )
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        _COMBINE[op](total, tensor)
    return total.div_(len(tensors)) if op == dist.ReduceOp.AVG else total


class MockProcessGroup(dist.ProcessGroup):
    """One rank's end of a group in a mock world."""

    def __init__(self, rank: int, size: int, *, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._world_exchange: Exchange = here.exchange
        self._global_rank: int = here.rank
        self._ranks = tuple(ranks)
        self._name = name
        self._key = self._world_exchange.join_group(name, self._ranks, self._global_rank)
        self._num_calls = 0
        self._num_exchanges: Counter[int] = Counter()
        self._coalesced: list[MockWork] | None = None

    def exchange(self, line: str) -> list[str]:
        """Return the line of every rank, by rank in the group."""
        key = (self._key, self._num_calls)
        self._num_calls += 1
        return self._exchange(key, self._ranks, line)

    def exchange_with(self, peer: int, line: str) -> str:
        """Exchange lines with a global rank and return its line."""
        pair = (min(self._global_rank, peer), max(self._global_rank, peer))
        key = ((self._key, pair), self._num_exchanges[peer])
        self._num_exchanges[peer] += 1
        return self._exchange(key, pair, line)[pair.index(peer)]

    def _exchange(self, key: Any, ranks: tuple[int, ...], line: str) -> list[str]:
        lines: list[str] = []

        def work(payloads: list[tuple[str, list[str]]]) -> None:
            for _, target in payloads:
                target.extend(payload_line for payload_line, _ in payloads)

        label = line.partition("|")[0]
        collective = self._world_exchange.join(
            key,
            ranks,
            self._global_rank,
            CollectiveCall("exchange", "", ()),
            (line, lines),
            work,
            label=label,
        )
        self._work([collective], lines).wait()
        return lines

    # Collectives, by torch's names.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MockWork:
        op = _op(opts)

        def work(payloads: list[list[Output]]) -> None:
            for outputs in zip(*payloads, strict=True):
                total = reduce_in_rank_order([output.tensor for output in outputs], op)
                for output in outputs:
                    output.write(total, is_unshared=True)

        call = describe_call("all_reduce", tensors, detail=op.name)
        outputs = outputs_of(tensors, at_once=_waits(opts))
        return self._collective(call, outputs, work, tensors, outputs)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> MockWork:
        op, root = _op(opts), opts.rootRank

        def work(payloads: list[list[Output]]) -> None:
            for outputs in zip(*payloads, strict=True):
                total = reduce_in_rank_order([output.tensor for output in outputs], op)
                outputs[root].write(total, is_unshared=True)

        call = describe_call("reduce", tensors, detail=f"{op.name} to rank {self._ranks[root]}")
        outputs = outputs_of(tensors, at_once=_waits(opts))
        return self._collective(call, outputs, work, tensors, outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MockWork:
        root = opts.rootRank

        def work(payloads: list[list[Output]]) -> None:
            sources = [output.tensor for output in payloads[root]]
            for rank, outputs in enumerate(payloads):
                if rank != root:
                    write_all(outputs, sources)

        call = describe_call("broadcast", tensors, detail=f"from rank {self._ranks[root]}")
        outputs = outputs_of(tensors, at_once=_waits(opts))
        return self._collective(call, outputs, work, tensors, outputs)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> MockWork:
        return self._gather("all_gather", outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> MockWork:
        by_input = [list(parts) for parts in zip(*outputs, strict=True)]
        return self._gather("all_gather", by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MockWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> MockWork:
        parts = [self._split(output) for output in outputs]
        work = self._gather("all_gather", parts, inputs, opts)
        work._result = outputs
        return work

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MockWork:
        return self._gather("gather", outputs, inputs, opts, root=opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MockWork:
        root = opts.rootRank

        def work(payloads: list[tuple[list[Output], list[list[Tensor]]]]) -> None:
            for targets, parts in zip(
                zip(*(targets for targets, _ in payloads), strict=True),
                payloads[root][1],
                strict=True,
            ):
                write_all(targets, parts)

        call = describe_call("scatter", outputs, detail=f"from rank {self._ranks[root]}")
        targets = outputs_of(outputs, at_once=_waits(opts))
        payload = (targets, [_raw(parts) for parts in inputs])
        return self._collective(call, payload, work, outputs, targets)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> MockWork:
        call = describe_call(
            "reduce_scatter", [t for parts in inputs for t in parts], detail=_op(opts).name
        )
        return self._reduce_scatter(call, outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MockWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> MockWork:
        call = describe_call("reduce_scatter", inputs, detail=_op(opts).name)
        parts = [self._split(tensor.contiguous()) for tensor in inputs]
        return self._reduce_scatter(call, outputs, parts, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MockWork:
        def work(payloads: list[tuple[list[Output], list[Tensor]]]) -> None:
            for rank, (targets, _) in enumerate(payloads):
                write_all(targets, [sources[rank] for _, sources in payloads])

        call = CollectiveCall("all_to_all", f"of {inputs[0].dtype}" if inputs else "", ())
        targets = outputs_of(outputs, at_once=_waits(opts))
        return self._collective(call, (targets, _raw(inputs)), work, outputs, targets)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> MockWork:
        work = self.alltoall(
            list(output.split(output_sizes) if output_sizes else self._chunk(output)),
            list(input.split(input_sizes) if input_sizes else self._chunk(input)),
            opts,
        )
        work._result = [output]
        return work

    def barrier(self, opts: Any = None) -> MockWork:
        return self._collective(CollectiveCall("barrier", "", ()), None, lambda _: None, [], [])

    # Messages.

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> MockWork:
        return self._post("send", tensors, self._ranks[dst], tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> MockWork:
        return self._post("recv", tensors, self._ranks[src], tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MockWork:
        return self._post("recv", tensors, None, tag)

    # Other methods that torch calls, and older names (until torch 2.12) of the methods above.

    def getBackendName(self) -> str:  # noqa: N802
        return "mock"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        shared = self._world_exchange.turns.device
        return [torch.device("cpu")] + ([] if shared.is_cpu else [shared.device])

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> MockWork:
        works, self._coalesced = self._coalesced or [], None
        operations = [operation for work in works for operation in work._operations]
        return self._work(operations, [], [output for work in works for output in work._outputs])

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _collective(
        self,
        call: CollectiveCall,
        payload: Any,
        work: Callable[[list[Any]], None],
        result: Any,
        outputs: Sequence[Output],
    ) -> MockWork:
        key = (self._key, self._num_calls)
        self._num_calls += 1
        collective = self._world_exchange.join(
            key, self._ranks, self._global_rank, call, payload, work
        )
        return self._work([collective], result, outputs)

    def _gather(
        self,
        name: str,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: Any,
        *,
        root: int | None = None,
    ) -> MockWork:
        def work(payloads: list[tuple[list[list[Output]], list[Tensor]]]) -> None:
            for rank, (targets, _) in enumerate(payloads):
                if root in (None, rank):
                    for index, parts in enumerate(targets):
                        write_all(parts, [sources[index] for _, sources in payloads])

        detail = "" if root is None else f"to rank {self._ranks[root]}"
        call = describe_call(name, inputs, detail=detail)
        targets = [outputs_of(parts, at_once=_waits(opts)) for parts in outputs]
        flat = [target for parts in targets for target in parts]
        return self._collective(call, (targets, _raw(inputs)), work, outputs, flat)

    def _reduce_scatter(
        self, call: CollectiveCall, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> MockWork:
        op = _op(opts)

        def work(payloads: list[tuple[list[Output], list[list[Tensor]]]]) -> None:
            for index in range(len(outputs)):
                for rank, (targets, _) in enumerate(payloads):
                    values = [parts[index][rank] for _, parts in payloads]
                    targets[index].write(reduce_in_rank_order(values, op), is_unshared=True)

        targets = outputs_of(outputs, at_once=_waits(opts))
        payload = (targets, [_raw(parts) for parts in inputs])
        return self._collective(call, payload, work, outputs, targets)

    def _post(self, verb: str, tensors: list[Tensor], peer: int | None, tag: int) -> MockWork:
        # torch's call does not say whether the rank waits within it.
        outputs = outputs_of(tensors, at_once=False)
        messages = [PendingMessage(verb, self._global_rank, peer, o, tag) for o in outputs]
        for message in messages:
            self._world_exchange.post(self._key, message)
        return self._work(messages, tensors, outputs)

    def _work(
        self, operations: Sequence[PendingOperation], result: Any, outputs: Sequence[Output] = ()
    ) -> MockWork:
        work = MockWork(
            self._world_exchange.turns,
            self._global_rank,
            operations,
            result=result,
            outputs=outputs,
            ranks=self._ranks,
        )
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _split(self, tensor: Tensor) -> list[Tensor]:
        """View a tensor as one flat part for each rank."""
        flat, size = tensor.view(-1), self.size()
        part = flat.numel() // size
        if part * size != flat.numel():
            raise ValueError(f"{list(tensor.shape)} is not divisible by {size} ranks")
        return [flat[rank * part : (rank + 1) * part] for rank in range(size)]

    def _chunk(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """View a tensor as one part of dimension 0 for each rank."""
        if tensor.shape[0] % self.size():
            raise ValueError(f"dim 0 of {list(tensor.shape)} is not divisible by {self.size()}")
        return (
            tensor.unflatten(0, (self.size(), -1)).unbind()
            if tensor.numel()
            else (tensor,) * self.size()
        )


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp.op


def _waits(opts: Any) -> bool:
    """Return whether the caller waits before it returns; torch sets this, calls from C++ don't."""
    return opts is not None and not opts.asyncOp


def _raw(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return aliases of tensors that autograd does not track."""
    return [tensor.data for tensor in tensors]
