"""ZeRO-1: full parameters on every rank; optimizer states and the update are divided among ranks.

Full gradients are accumulated during backward. ``DDP`` then gives each rank the mean gradient of
its rows.

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

from axonlaunch.comm.averaging.gradient_bucket import BUCKET_BYTES, buckets
from axonlaunch.comm.averaging.row_bucket import padded_lengths, padded_rows, rows_of
from axonlaunch.comm.mesh import local_part
from axonlaunch.comm.torch_internals import all_gather_single
from axonlaunch.config.optimization.optimizer import OptimizerConfig
from axonlaunch.config.optimization.optimizer_states import ParameterFacts
from axonlaunch.engines.optimizer.step import Update
from axonlaunch.models.facts import parameter_facts
from axonlaunch.models.torch_internals import StridedShard

_LARGE = parameter_facts.LARGE
_FULL = BUCKET_BYTES
"""Bytes of parameters gathered in one message; equal to DDP's bucket size."""


class ShardedUpdate(Update):
    """Updates this rank's rows of every parameter, then gathers the rows of other ranks.

    The rows are DTensors that share the parameters' storage, with the placements of fully_shard, so
    optimizer states are saved and loaded as in any other layout. If a parameter is already sharded
    over a tensor axis, the rows of this rank's shard are divided.
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
        seed: int = 0,
        modules: Sequence[nn.Module] = (),
        units: Sequence[nn.Module] = (),
    ) -> None:
        """Divide parameters by rows.

        Args:
            config: Configuration of the optimizer.
            parameters: Parameters by fully-qualified name, the same on every rank of the axis;
                plain tensors, or DTensors on ``mesh["tp"]``.
            mesh: Mesh of the run.
            axis: Mesh axis over which the states are divided.
            gradients: Mapping that receives the gradients of this rank's rows, by parameter;
                cleared after use. None if every rank has full gradients in the parameters.
            facts: Facts about the parameters that select optimizer options, by the same names; None
                derives names and shapes from the parameters.
            seed: Seed of random numbers, see ``Update``.
            modules: Modules that use the parameters, in the order of their forwards. A forward
                waits for the rows it needs, so communication overlaps with earlier forwards.
                Without modules each update waits.
            units: Submodules of ``modules`` that wait for their parameters separately, in the order
                of their forwards. Parameters that only a unit holds must not be read elsewhere
                before ``finish``.
        """
        self._parameters = dict(parameters)
        self._root = mesh
        self._mesh = mesh[axis]
        self._gradients = gradients
        for parameter in parameters.values():
            _lay_out_by_rows(parameter)
        local_parts = {
            parameter: local_part(parameter.detach()) for parameter in parameters.values()
        }
        self._strides = {
            p: part.stride() for p, part in local_parts.items() if not part.is_contiguous()
        }
        rows = {name: self._trained_rows(p) for name, p in parameters.items()}
        super().__init__(config, rows, parameters=facts, seed=seed)
        self._in_flight: dict[Tensor, _Message] = {}
        self._readers = _first_readers(modules, units)
        for reader in self._readers:
            reader.register_forward_pre_hook(self._finish_before)
        # Gather in the order of the forwards, then parameters that no module holds.
        used = dict.fromkeys(p for held in self._readers.values() for p in held)
        updated = dict.fromkeys(parameters.values())
        self._gather_order = [p for p in used if p in updated] + [
            p for p in updated if p not in used
        ]

    def _trained_rows(self, parameter: Tensor) -> nn.Parameter:
        rows = nn.Parameter(self._rows(parameter))
        rows.grad_dtype = parameter.grad_dtype
        return rows

    def _rows(self, parameter: Tensor) -> DTensor:
        """Return a DTensor with a view of this rank's rows of a parameter as its local tensor."""
        local = local_part(parameter.detach())
        if local.ndim:
            local = local[self._row_slice(local)]
        return self._dtensor(local, parameter)

    def _dtensor(self, rows: Tensor, parameter: Tensor) -> DTensor:
        """Return a DTensor with a parameter's shape from this rank's rows."""
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
        """Return the data axis's placement; if the tensor axis cuts rows too, it cuts first."""
        if parameter.ndim == 0:
            return Replicate()
        if isinstance(parameter, DTensor) and getattr(parameter.placements[0], "dim", None) == 0:
            return StridedShard(0, split_factor=parameter.device_mesh.size())
        return Shard(0)

    def _row_slice(self, local: Tensor) -> slice:
        """Return this rank's rows of a parameter's local part."""
        return rows_of(local.shape[0], rank=self._mesh.get_local_rank(), ranks=self._mesh.size())

    def collect_gradients(self) -> None:
        """Set the gradient of each shard to the gradient of its rows."""
        for name, parameter in self._parameters.items():
            shard = self.tensors[name]
            if self._gradients is None:
                full_gradient = parameter.grad
                shard.grad = None if full_gradient is None else self._rows(full_gradient)
            else:
                rows = self._gradients.get(parameter)
                shard.grad = None if rows is None else self._gradient(rows, parameter)

    def _gradient(self, rows: Tensor, parameter: Tensor) -> DTensor:
        """Return a gradient with the strides of its rows; fused kernels require equal strides."""
        if (strides := self._strides.get(parameter)) is not None:
            rows = rows.new_empty_strided(rows.shape, strides).copy_(rows)
        return self._dtensor(rows, parameter)

    def round_masters(self) -> None:
        """Set this rank's rows to the rounded masters, and gather the rows of all ranks."""
        super().round_masters()
        if self._masters:
            self._gather()
            self.finish()

    def apply(
        self, *, rate: Callable[[float], float], step: int = 1, skip: Tensor | None = None
    ) -> None:
        """Update this rank's rows and start gathering the rows of all ranks."""
        self.finish()  # rows that no forward needed
        super().apply(rate=rate, step=step, skip=skip)
        self._gather()
        if not self._readers:
            self.finish()

    def finish(self) -> None:
        """Wait until every parameter contains the rows of all ranks."""
        self._receive(list(self._in_flight))

    def _finish_before(self, reader: nn.Module, inputs: Any) -> None:
        del inputs
        if self._in_flight:
            self._receive(self._readers[reader])

    @torch.no_grad()
    def _receive(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            message = self._in_flight.get(parameter)
            if message is not None:
                message.finish()
                for received in message.parameters:
                    del self._in_flight[received]

    def forget_gradients(self) -> None:
        """Free all gradients of shards and of full parameters."""
        super().forget_gradients()
        if self._gradients is not None:
            self._gradients.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _gather(self) -> None:
        group, size = self._mesh.get_group(), self._mesh.size()
        large: dict[Tensor, Tensor] = {}
        small: dict[Tensor, Tensor] = {}
        for parameter in self._gather_order:
            local = local_part(parameter.detach())
            if local.ndim == 0 or local.numel() == 0:
                continue
            divides = local.shape[0] % size == 0 and local.is_contiguous()
            (large if local.nbytes >= _LARGE and divides else small)[local] = parameter
        # Small parameters first: the first forward may need any of them, and they arrive quickly.
        for members in buckets(small, limit=_FULL):
            bucket = _Bucket(members, ranks=size)
            own_rows = bucket.pack([local[self._row_slice(local)] for local in bucket.parameters])
            work = all_gather_single(bucket.gathered, own_rows, group=group, async_op=True)
            self._note(_Message(work, [small[local] for local in members], bucket))
        for local, parameter in large.items():
            # Gather directly into the parameter without a copy, as fully_shard does.
            own_rows = local[self._row_slice(local)]
            work = all_gather_single(local, own_rows, group=group, async_op=True)
            self._note(_Message(work, [parameter]))

    def _note(self, message: _Message) -> None:
        self._in_flight.update(dict.fromkeys(message.parameters, message))


@dataclass(frozen=True)
class _Message:
    """A gather in flight: directly into one parameter, or of several parameters into a bucket."""

    work: dist.Work
    parameters: list[Tensor]
    bucket: _Bucket | None = None

    def finish(self) -> None:
        """Wait for the rows and write them to the parameters."""
        self.work.wait()
        if self.bucket is not None:
            self.bucket.unpack()


def _lay_out_by_rows(parameter: Tensor) -> None:
    """Make a plain parameter contiguous if its rows are not, as in a transposed tensor.

    Parts of such rows would have gaps, which torch's fused kernels would read and overwrite.
    """
    strides = parameter.stride()
    if not isinstance(parameter, DTensor) and strides and strides[0] < max(strides):
        parameter.data = parameter.data.contiguous()


def _first_readers(
    modules: Sequence[nn.Module], units: Sequence[nn.Module]
) -> dict[nn.Module, list[nn.Parameter]]:
    """Map each module to the parameters that must be complete before its forward.

    A unit waits for the parameters that only it holds; its surrounding module waits for all others.
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
    """Small parameters gathered in one message, to save the fixed cost of a message for each."""

    def __init__(self, parameters: list[Tensor], *, ranks: int) -> None:
        self.parameters = parameters
        self._ranks = ranks
        self._lengths = padded_lengths([parameter.shape for parameter in parameters], ranks=ranks)
        self.gathered = parameters[0].new_empty(ranks * sum(self._lengths))
        # Kept alive until the message has been waited for, because NCCL reads it until then.
        self._sent: Tensor | None = None

    def pack(self, pieces: list[Tensor]) -> Tensor:
        """Concatenate a rank's rows of every parameter."""
        flat = self._sent = self.gathered.new_zeros(sum(self._lengths))
        targets = zip(flat.split(self._lengths), pieces, strict=True)
        torch._foreach_copy_(
            [target[: piece.numel()].view(piece.shape) for target, piece in targets], pieces
        )
        return flat

    def unpack(self) -> None:
        """Copy the rows of all ranks to the parameters."""
        self._sent = None
        by_rank = self.gathered.view(self._ranks, -1).split(self._lengths, dim=1)
        for parameter, pieces in zip(self.parameters, by_rank, strict=True):
            # The last ranks' rows end with padding, so all of it is at the very end. The row count
            # is explicit, because -1 is ambiguous for parameters of shape [n, 0].
            count = self._ranks * padded_rows(parameter.shape[0], ranks=self._ranks)
            rows = pieces.reshape(count, *parameter.shape[1:])
            parameter.copy_(rows[: parameter.shape[0]])
