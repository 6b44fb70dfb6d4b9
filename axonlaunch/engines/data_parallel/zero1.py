"""ZeRO-1: parameters whole on every rank, optimizer states and the update divided among them.

Gradients are whole while they add up. Their mean is a rank's own rows, which come from ``DDP``.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, stage 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from axonlaunch.comm.gradient_bucket import BUCKET_BYTES, buckets
from axonlaunch.comm.row_bucket import padded_lengths, padded_rows, rows_of
from axonlaunch.comm.torch_internals import all_gather_single
from axonlaunch.config.optimizer import OptimizerConfig
from axonlaunch.config.optimizer_states import ParameterFacts
from axonlaunch.engines.optimizer.clipping import local_part
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.models import parameter_facts
from axonlaunch.models.torch_internals import StridedShard

_LARGE = parameter_facts.LARGE
_FULL = BUCKET_BYTES
"""Bytes of parameters that are gathered together, as many as DDP reduces together."""


class ShardedUpdate(Update):
    """Updates each rank's rows of every parameter, then gathers the rows of the others.

    The rows are DTensors over the parameters' own storage, placed as fully_shard places them, so
    optimizer states are saved and loaded as those of any other layout. Of a parameter that is
    divided over a tensor axis already, it is this rank's part whose rows are divided.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, Tensor],
        *,
        mesh: DeviceMesh,
        axis: str = "dp_replicate",
        gradients: MutableMapping[Tensor, Tensor] | None = None,
        facts: Mapping[str, ParameterFacts] | None = None,
        modules: Sequence[nn.Module] = (),
        units: Sequence[nn.Module] = (),
    ) -> None:
        """Divide parameters by rows.

        Args:
            config: The optimizer's figures.
            parameters: By fully-qualified name, the same on every rank of the axis; plain, or
                DTensors on ``mesh["tp"]``.
            mesh: The run's.
            axis: The ranks that divide the states.
            gradients: Where those of this rank's rows arrive, by parameter, and are freed from;
                None: every rank has whole ones, in the parameters.
            facts: What else is known of the parameters, by the same names; None: nothing.
            modules: What computes with the parameters, in the order of their forwards. A forward
                waits for the rows that it needs, which travel meanwhile; without modules each
                update waits.
            units: Parts of ``modules`` that wait for their own, in the order of their forwards.
                Nobody else may read what they alone hold before ``finish``.
        """
        self._parameters = dict(parameters)
        self._root = mesh
        self._mesh = mesh[axis]
        self._gradients = gradients
        for parameter in parameters.values():
            _lay_out_by_rows(parameter)
        parts = {parameter: local_part(parameter.detach()) for parameter in parameters.values()}
        self._strides = {p: part.stride() for p, part in parts.items() if not part.is_contiguous()}
        rows = {name: nn.Parameter(self._rows(p)) for name, p in parameters.items()}
        super().__init__(config, rows, parameters=facts)
        self._under_way: dict[Tensor, _Message] = {}
        self._readers = _first_readers(modules, units)
        for reader in self._readers:
            reader.register_forward_pre_hook(self._finish_before)
        # As forwards ask for them; what no module holds is asked for by nobody.
        asked = dict.fromkeys(p for held in self._readers.values() for p in held)
        own = dict.fromkeys(parameters.values())
        self._in_order = [p for p in asked if p in own] + [p for p in own if p not in asked]

    def _rows(self, parameter: Tensor) -> DTensor:
        """Return a DTensor whose local part is a view of this rank's rows of a parameter."""
        local = local_part(parameter.detach())
        if local.ndim:
            local = local[self._own(local)]
        return self._dtensor(local, parameter)

    def _dtensor(self, rows: Tensor, parameter: Tensor) -> DTensor:
        """Return a DTensor of this rank's rows of what has a parameter's shape."""
        mesh, placements = self._mesh, [self._placement(parameter)]
        if isinstance(parameter, DTensor):
            names = (
                *(self._mesh.mesh_dim_names or ()),
                *(parameter.device_mesh.mesh_dim_names or ()),
            )
            mesh, placements = self._root[names], [*placements, *parameter.placements]
        return DTensor.from_local(
            rows,
            mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _placement(self, parameter: Tensor) -> Placement:
        """Return how the data axis divides a parameter: after the tensor axis, if both cut rows."""
        if parameter.ndim == 0:
            return Replicate()
        if isinstance(parameter, DTensor) and getattr(parameter.placements[0], "dim", None) == 0:
            return StridedShard(0, split_factor=parameter.device_mesh.size())
        return Shard(0)

    def _own(self, local: Tensor) -> slice:
        """Return this rank's rows of a parameter's local part."""
        return rows_of(local.shape[0], rank=self._mesh.get_local_rank(), ranks=self._mesh.size())

    def collect_gradients(self) -> None:
        """Give each shard the gradient of its rows."""
        for name, parameter in self._parameters.items():
            shard = self.tensors[name]
            if self._gradients is None:
                whole = parameter.grad
                shard.grad = None if whole is None else self._rows(whole)
            else:
                rows = self._gradients.get(parameter)
                shard.grad = None if rows is None else self._gradient(rows, parameter)

    def _gradient(self, rows: Tensor, parameter: Tensor) -> DTensor:
        """Return a gradient of rows, in memory as they are: fused kernels read both as they lie."""
        if (strides := self._strides.get(parameter)) is not None:
            rows = rows.new_empty_strided(rows.shape, strides).copy_(rows)
        return self._dtensor(rows, parameter)

    def apply(self, *, rate: Callable[[float], float], unless: Tensor | None = None) -> None:
        """Update this rank's rows and begin to gather everyone's."""
        self.finish()  # what no forward has asked for
        super().apply(rate=rate, unless=unless)
        self._gather()
        if not self._readers:
            self.finish()

    def finish(self) -> None:
        """Wait until every parameter has the rows of all ranks."""
        self._receive(list(self._under_way))

    def _finish_before(self, reader: nn.Module, inputs: Any) -> None:
        del inputs
        if self._under_way:
            self._receive(self._readers[reader])

    @torch.no_grad()
    def _receive(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            message = self._under_way.get(parameter)
            if message is not None:
                message.finish()
                for received in message.parameters:
                    del self._under_way[received]

    def forget_gradients(self) -> None:
        """Free every gradient, of shards and of whole parameters."""
        super().forget_gradients()
        if self._gradients is not None:
            self._gradients.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _gather(self) -> None:
        group, size = self._mesh.get_group(), self._mesh.size()
        alone: dict[Tensor, Tensor] = {}
        small: dict[Tensor, Tensor] = {}
        for parameter in self._in_order:
            whole = local_part(parameter.detach())
            if whole.ndim == 0 or whole.numel() == 0:
                continue
            divides = whole.shape[0] % size == 0 and whole.is_contiguous()
            (alone if whole.nbytes >= _LARGE and divides else small)[whole] = parameter
        # The first forward may need any of the small ones, and they are soon there.
        for wholes in buckets(small, limit=_FULL):
            bucket = _Bucket(wholes, ranks=size)
            mine = bucket.pack([whole[self._own(whole)] for whole in bucket.wholes])
            work = all_gather_single(bucket.gathered, mine, group=group, async_op=True)
            self._note(_Message(work, [small[whole] for whole in wholes], bucket))
        for whole, parameter in alone.items():
            # To where they are to be already: nothing is copied, as fully_shard gathers.
            mine = whole[self._own(whole)]
            work = all_gather_single(whole, mine, group=group, async_op=True)
            self._note(_Message(work, [parameter]))

    def _note(self, message: _Message) -> None:
        self._under_way.update(dict.fromkeys(message.parameters, message))


@dataclass(frozen=True)
class _Message:
    """Rows on their way: of one parameter to its own place, or of several to a bucket."""

    work: dist.Work
    parameters: list[Tensor]
    bucket: _Bucket | None = None

    def finish(self) -> None:
        """Wait for them, and put them into the parameters."""
        self.work.wait()
        if self.bucket is not None:
            self.bucket.unpack()


def _lay_out_by_rows(parameter: Tensor) -> None:
    """Put a plain parameter's rows one after another in memory, as those of a transposed are not.

    Parts of such rows would have gaps, over which torch's fused kernels read and write.
    """
    strides = parameter.stride()
    if not isinstance(parameter, DTensor) and strides and strides[0] < max(strides):
        parameter.data = parameter.data.contiguous()


def _first_readers(
    modules: Sequence[nn.Module], units: Sequence[nn.Module]
) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the modules before whose forwards parameters must be whole, and which.

    A unit waits for those that it alone holds, the module around it for all others.
    """
    unit_of = {part: unit for unit in units for part in unit.modules()}
    reader_of: dict[nn.Parameter, nn.Module] = {}
    for module in modules:
        for part in module.modules():
            reader = unit_of.get(part, module)
            for parameter in part.parameters(recurse=False):
                if reader_of.setdefault(parameter, reader) is not reader:
                    reader_of[parameter] = module
    readers: dict[nn.Module, list[nn.Parameter]] = {part: [] for part in (*modules, *units)}
    for parameter, reader in reader_of.items():
        readers[reader].append(parameter)
    return readers


class _Bucket:
    """Parameters whose rows travel in one message, for one costs more than what is in it."""

    def __init__(self, wholes: list[Tensor], *, ranks: int) -> None:
        self.wholes = wholes
        self._ranks = ranks
        self._lengths = padded_lengths([whole.shape for whole in wholes], ranks=ranks)
        self.gathered = wholes[0].new_empty(ranks * sum(self._lengths))
        # Here as long as NCCL holds it, which is until it is waited for.
        self._sent: Tensor | None = None

    def pack(self, pieces: list[Tensor]) -> Tensor:
        """Return a rank's rows of every parameter, one after another."""
        flat = self._sent = self.gathered.new_zeros(sum(self._lengths))
        places = zip(flat.split(self._lengths), pieces, strict=True)
        torch._foreach_copy_([to[: part.numel()].view(part.shape) for to, part in places], pieces)
        return flat

    def unpack(self) -> None:
        """Copy the rows of all ranks to the parameters."""
        self._sent = None
        by_rank = self.gathered.view(self._ranks, -1).split(self._lengths, dim=1)
        for whole, pieces in zip(self.wholes, by_rank, strict=True):
            # The padding is at the end of the last ranks' rows, so at the very end.
            # Their number is written out, which -1 leaves open for parameters of shape [n, 0].
            count = self._ranks * padded_rows(whole.shape[0], ranks=self._ranks)
            rows = pieces.reshape(count, *whole.shape[1:])
            whole.copy_(rows[: whole.shape[0]])
