"""A model's loss, and where its initial weights go, in plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.config import RunConfig
from axonlaunch.data.dataset import IGNORE_INDEX, AnyBatch, Batch, MicroBatch
from axonlaunch.data.samples import CollatedSamples, map_tensors
from axonlaunch.models.build import on_meta
from axonlaunch.models.loss import cross_entropy_sum
from axonlaunch.models.own_loss import OwnLoss
from axonlaunch.models.spec import ModelSpec
from axonlaunch.models.torch_internals import BatchNorm

_SMALL = 20_000_000
"""Parameters of a model that computes on one thread."""


def reference_device(config: RunConfig) -> torch.device:
    """Return where one process computes what a layout's ranks do: on the first GPU, or the CPU."""
    return torch.device("cuda", 0) if config.launch.device == "cuda" else torch.device("cpu")


def has_drawn(device: torch.device, *, seed: int) -> bool:
    """Say whether random numbers were drawn, on the host or on a device, since all were seeded."""
    states = [(torch.Generator(), torch.get_rng_state())]
    if device.type == "cuda":
        own = torch.cuda.default_generators[device.index]
        states.append((torch.Generator(device), own.get_state()))
    return any(not torch.equal(g.manual_seed(seed).get_state(), now) for g, now in states)


@contextmanager
def leaving_no_trace(config: RunConfig) -> Iterator[None]:
    """Let a plain run compute inside, and leave threads and random states as they were.

    Args:
        config: The layout's.
    """
    device = reference_device(config)
    devices = [device.index] if device.type == "cuda" else []
    with threads_for(config), torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def threads_for(config: RunConfig) -> Iterator[None]:
    """Compute a small model on one thread inside: to share its work out costs more than the work.

    Args:
        config: The run's.
    """
    before = torch.get_num_threads()
    parameters = sum(p.numel() for p in on_meta(config, seed=config.seed).parameters())
    if parameters < _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def loss_sum(spec: ModelSpec, outputs: Any, targets: Tensor) -> Tensor:
    """Return the loss's sum over counted targets.

    Cross entropy is torch's, in fp32, of what counts alone. Its formula written out differs from it
    by 1e-7, which after some layers in bf16 is as much as any rounding: 2e-3 on a CPU with AVX2. An
    auxiliary loss counts as often as targets do. A model's own loss is called.
    """
    if spec.loss is not cross_entropy_sum:
        return spec.loss(outputs, targets)
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    counted = targets != IGNORE_INDEX
    logits = logits[counted]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    total = nn.functional.cross_entropy(logits, targets[counted], reduction="sum")
    if not isinstance(outputs, Tensor):
        total = total + outputs.auxiliary_loss.to(total.dtype) * counted.sum()
    return total


def count_of(own: OwnLoss | None, batch: AnyBatch, *, micro_batch_size: int) -> int:
    """Return what the sum of a global batch's losses is divided by, as ``register_loss`` says."""
    if isinstance(batch, Batch) and (own is None or own.count is None):
        targets = batch.targets[: len(batch) - batch.surplus]
        return (
            targets.numel() if targets.is_floating_point() else int((targets != IGNORE_INDEX).sum())
        )
    counted = [part for part in micro_batches_of(batch, micro_batch_size) if part.is_counted]
    if own is None or own.count is None:
        return sum(part.num_samples for part in counted)
    return sum(int(own.count(whole_of(part))) for part in counted)


def whole_of(batch: MicroBatch) -> Any:
    """Return what a loss of one's own sees."""
    if isinstance(batch, CollatedSamples):
        return batch.whole
    named = {"inputs": batch.inputs, "targets": batch.targets}
    return named if batch.positions is None else {**named, "positions": batch.positions}


def micro_batches_of(batch: AnyBatch, size: int) -> Iterator[MicroBatch]:
    """Yield micro-batches, without the code that the engines cut a batch by."""
    for part in (slice(start, start + size) for start in range(0, len(batch), size)):
        if isinstance(batch, Batch):
            end = len(batch) - batch.surplus
            surplus = 0 if part.start < end else len(batch.inputs[part])
            part = part if surplus else slice(part.start, min(part.stop, end))
            positions = None if batch.positions is None else batch.positions[part]
            yield Batch(batch.inputs[part], batch.targets[part], positions, surplus)
            continue
        items = batch.items[part]
        counted = [True] * len(items) if batch.counted is None else batch.counted[part]
        # Where none counts, the model sees them all the same.
        kept = [item for item, counts in zip(items, counted, strict=True) if counts] or [*items]
        yield CollatedSamples(batch.collate(kept), len(kept), is_counted=any(counted))


def mapped(batch: MicroBatch, function: Callable[[Tensor], Tensor]) -> MicroBatch:
    """Return a micro-batch of what a function makes of each tensor."""
    if isinstance(batch, CollatedSamples):
        return replace(batch, whole=map_tensors(function, batch.whole))
    positions = None if batch.positions is None else function(batch.positions)
    return Batch(function(batch.inputs), function(batch.targets), positions, batch.surplus)


def forward_arguments(model: nn.Module, batch: MicroBatch) -> tuple[list[Any], dict[str, Any]]:
    """Return what a model is called with: inputs, and of a dict what its forward has names for."""
    if isinstance(batch, Batch):
        return [batch.inputs], {} if batch.positions is None else {"positions": batch.positions}
    whole = batch.whole
    if isinstance(whole, Mapping):
        names = signature(model.forward).parameters
        return [], {name: value for name, value in whole.items() if name in names}
    return [whole[0] if isinstance(whole, tuple | list) else whole], {}


@dataclass
class LoadableWeights:
    """A model as what initial weights are loaded into."""

    model: nn.Module

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers, a tied parameter once."""
        known = self.model.state_dict()
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach() for name, tensor in named if name in known}

    def load_model_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take values over."""
        for name, tensor in self.model_state_dict().items():
            tensor.copy_(state[name])


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a model's state, by name."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def clone_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of them."""
    return {name: buffer.clone() for name, buffer in saved_buffers(model).items()}


def put_back(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give a model's buffers the values of copies."""
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(buffers[name])


def moves_buffers(model: nn.Module) -> bool:
    """Say whether it may matter to a model how many samples a forward has, and how many are done.

    Batch normalisation without statistics mixes samples all the same.
    """
    return has_batch_norm(model) or bool(saved_buffers(model))


def has_batch_norm(model: nn.Module) -> bool:
    """Say whether a model normalises over samples."""
    return any(isinstance(part, BatchNorm) for part in model.modules())


@contextmanager
def counting_calls(model: nn.Module) -> Iterator[Counter[nn.Module]]:
    """Count inside how often each module of a model, and the model, are called."""
    calls: Counter[nn.Module] = Counter()

    def count(module: nn.Module, _inputs: Any) -> None:
        calls[module] += 1

    handles = [module.register_forward_pre_hook(count) for module in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def reads_again(model: nn.Module, calls: Mapping[nn.Module, int]) -> bool:
    """Say whether a forward may read a trained parameter, read others, and read it once more.

    Replicas that compute in a lower type then read two copies, whose gradients add up in fp32.
    """
    return any(
        calls.get(module, 0) > calls[model] or next(_of_children(module), None) is not None
        for module in model.modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    )


def _of_children(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for child in module.children() for parameter in child.parameters())


def cast_parameters(
    model: nn.Module, dtype: torch.dtype, *, is_gathered: bool
) -> dict[str, Tensor]:
    """Return a model's parameters, by name, as its forward reads them in a lower type.

    Args:
        model: Whole.
        dtype: The type.
        is_gathered: Whether all are, as those that fully_shard gathers; of replicas those of a
            module with running statistics, which torch takes in their type alone, stay.
    """
    kept = {
        parameter
        for module in model.modules()
        if not is_gathered and getattr(module, "running_mean", None) is not None
        for parameter in module.parameters(recurse=False)
    }
    return {
        name: parameter
        if parameter in kept or not parameter.is_floating_point()
        else parameter.to(dtype)
        for name, parameter in model.named_parameters()
    }
