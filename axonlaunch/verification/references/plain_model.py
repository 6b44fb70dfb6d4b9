"""Parts of the reference, in plain torch: losses, micro-batches, casts, balancing, quantizing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.config import RunConfig
from axonlaunch.data.datasets.dataset import (
    IGNORE_INDEX,
    AnyBatch,
    Batch,
    MicroBatch,
    takes_present,
)
from axonlaunch.data.datasets.samples import CollatedSamples, map_tensors
from axonlaunch.models.build import on_meta
from axonlaunch.models.specs.custom_loss import CustomLoss
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.models.tensors.packed_blocks import logical_numel
from axonlaunch.models.torch_internals import BatchNorm

_BLOCK, _LARGEST_INT8 = 64, 127
"""Values of a quantized block, and the largest code of int8."""
_SMALL = 20_000_000
"""Models with fewer parameters compute on one thread."""


def reference_device(config: RunConfig) -> torch.device:
    """Return the first GPU if the layout's ranks use GPUs, otherwise the CPU."""
    return torch.device("cuda", 0) if config.launch.device == "cuda" else torch.device("cpu")


def has_drawn_numbers(device: torch.device, *, seed: int) -> bool:
    """Return whether host or device generators were used since they were seeded."""
    states = [(torch.Generator(), torch.get_rng_state())]
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        states.append((torch.Generator(device), generator.get_state()))
    return any(not torch.equal(g.manual_seed(seed).get_state(), now) for g, now in states)


@contextmanager
def preserving_global_state(config: RunConfig) -> Iterator[None]:
    """Restore the number of threads and the random states on exit.

    Args:
        config: Configuration of the layout.
    """
    device = reference_device(config)
    devices = [device.index] if device.type == "cuda" else []
    with threads_for(config), torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def threads_for(config: RunConfig) -> Iterator[None]:
    """Use one thread inside if the model is small: dividing its work costs more than the work.

    Args:
        config: Configuration of the run.
    """
    threads = torch.get_num_threads()
    parameters = sum(logical_numel(p) for p in on_meta(config, seed=config.seed).parameters())
    if parameters < _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def loss_sum(
    spec: ModelSpec,
    outputs: Any,
    targets: Tensor,
    *,
    label_smoothing: float,
    z_loss: float,
    dft: bool,
    eaft: float,
) -> Tensor:
    """Return the sum of the loss over counted targets.

    Cross entropy is computed by torch in fp32, on the counted targets only. Writing out its formula
    gives a difference of 1e-7, which after some layers in bf16 grows to the size of rounding: 2e-3
    on a CPU with AVX2. An auxiliary loss is multiplied by the number of counted targets. A loss
    defined by the model is called unchanged.

    Args:
        spec: Specification of the model.
        outputs: Outputs of the model.
        targets: Classes.
        label_smoothing: ``train.label_smoothing`` in training, 0 in evaluations.
        z_loss: ``train.z_loss`` in training, 0 in evaluations.
        dft: ``train.dft`` in training, False in evaluations.
        eaft: ``train.eaft`` in training, 0 in evaluations.
    """
    if spec.loss is not cross_entropy_sum:
        return spec.loss(outputs, targets)
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    counted = targets != IGNORE_INDEX
    logits = logits[counted]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    total = nn.functional.cross_entropy(
        logits, targets[counted], reduction="sum", label_smoothing=label_smoothing
    )
    if dft:
        likely = logits.log_softmax(-1).gather(-1, targets[counted].unsqueeze(-1))
        total = -(likely.detach().exp() * likely).sum()
    if eaft:
        likely = logits.log_softmax(-1).gather(-1, targets[counted].unsqueeze(-1)).squeeze(-1)
        top = logits.detach().sort(-1, descending=True).values[:, :20].log_softmax(-1)
        total = -(likely * (-(top.exp() * top).sum(-1) / 3) ** eaft).sum()
    if z_loss:
        total = total + z_loss * (logits.logsumexp(-1) ** 2).sum()
    if not isinstance(outputs, Tensor):
        total = total + outputs.auxiliary_loss.to(total.dtype) * counted.sum()
    return total


def loss_divisor(custom_loss: CustomLoss | None, batch: AnyBatch, *, micro_batch_size: int) -> int:
    """Return the divisor of a global batch's summed loss, as defined by ``register_loss``."""
    if isinstance(batch, Batch) and (custom_loss is None or custom_loss.count is None):
        targets = batch.targets[: len(batch) - batch.surplus]
        return (
            targets.numel() if targets.is_floating_point() else int((targets != IGNORE_INDEX).sum())
        )
    counted = [part for part in micro_batches_of(batch, micro_batch_size) if part.is_counted]
    if custom_loss is None or custom_loss.count is None:
        return sum(part.num_samples for part in counted)
    return sum(int(custom_loss.count(loss_argument(part))) for part in counted)


def loss_argument(batch: MicroBatch) -> Any:
    """Return the batch argument of a custom loss."""
    if isinstance(batch, CollatedSamples):
        return batch.full
    named = {"inputs": batch.inputs, "targets": batch.targets}
    return named if batch.positions is None else {**named, "positions": batch.positions}


def micro_batches_of(batch: AnyBatch, size: int) -> Iterator[MicroBatch]:
    """Split a batch into micro-batches of ``size`` samples without using engine code."""
    for part in (slice(start, start + size) for start in range(0, len(batch), size)):
        if isinstance(batch, Batch):
            end = len(batch) - batch.surplus
            surplus = 0 if part.start < end else len(batch.inputs[part])
            part = part if surplus else slice(part.start, min(part.stop, end))
            positions = None if batch.positions is None else batch.positions[part]
            present = None if batch.present is None else batch.present[part]
            yield Batch(batch.inputs[part], batch.targets[part], positions, surplus, present)
            continue
        items = batch.items[part]
        counted = [True] * len(items) if batch.counted is None else batch.counted[part]
        # If no item is counted, the model still computes all of them.
        kept = [item for item, counts in zip(items, counted, strict=True) if counts] or [*items]
        collated = batch.combine(kept, start=part.start, stop=part.stop)
        yield CollatedSamples(collated, len(kept), is_counted=any(counted))


class RankMeans:
    """Averages gradients over data ranks in fp32, as layouts do: their sum may overflow in fp16."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, ranks: int) -> None:
        """Start without gradients.

        Args:
            parameters: The trained parameters.
            ranks: Number of data ranks; 1 leaves the gradients as they are.
        """
        self._parameters = [*parameters] if ranks > 1 else []
        self._ranks = ranks
        self._means: dict[nn.Parameter, Tensor] = {}

    def add_gradients(self) -> None:
        """Add the gradients of a micro-batch, and remove them from the parameters."""
        for parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                mean = gradient.to(dtype) / self._ranks
                previous = self._means.get(parameter)
                self._means[parameter] = mean if previous is None else previous + mean
                parameter.grad = None

    def replace_gradients(self) -> None:
        """Give the parameters the means, in the type of their gradients."""
        for parameter, mean in self._means.items():
            parameter.grad = mean.to(parameter.grad_dtype or parameter.dtype)


def map_batch(batch: MicroBatch, function: Callable[[Tensor], Tensor]) -> MicroBatch:
    """Apply a function to each tensor of a micro-batch."""
    if isinstance(batch, CollatedSamples):
        return replace(batch, full=map_tensors(function, batch.full))
    positions = None if batch.positions is None else function(batch.positions)
    present = None if batch.present is None else function(batch.present)
    inputs, targets = function(batch.inputs), function(batch.targets)
    return Batch(inputs, targets, positions, batch.surplus, present)


def forward_arguments(model: nn.Module, batch: MicroBatch) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments of a model's forward.

    Of a batch that is a mapping, the entries that the forward has parameters for are passed.
    """
    if isinstance(batch, Batch):
        named = {} if batch.positions is None else {"positions": batch.positions}
        if batch.present is not None and takes_present(model):
            named["present"] = batch.present
        return [batch.inputs], named
    full = batch.full
    if isinstance(full, Mapping):
        names = signature(model.forward).parameters
        return [], {name: value for name, value in full.items() if name in names}
    return [full[0] if isinstance(full, tuple | list) else full], {}


@dataclass
class LoadableWeights:
    """Adapter that lets ``load_initial_weights`` write to a plain module."""

    model: nn.Module

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers; a tied parameter is included once."""
        persistent = self.model.state_dict()
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach() for name, tensor in named if name in persistent}

    def load_model_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy values to parameters and buffers."""
        for name, tensor in self.model_state_dict().items():
            tensor.copy_(state[name])


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return persistent buffers by name."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def clone_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of persistent buffers by name."""
    return {name: buffer.clone() for name, buffer in saved_buffers(model).items()}


def restore_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Copy values back to persistent buffers."""
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(buffers[name])


def moves_buffers(model: nn.Module) -> bool:
    """Return whether results can depend on the micro-batch size or on earlier forwards.

    Persistent buffers may be changed by a forward. Batch normalization mixes samples even without
    running statistics.
    """
    return has_batch_norm(model) or bool(saved_buffers(model))


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a model normalizes over samples."""
    return any(isinstance(part, BatchNorm) for part in model.modules())


@contextmanager
def counting_calls(model: nn.Module) -> Iterator[Counter[nn.Module]]:
    """Count calls of the model and of each of its modules inside the context."""
    calls: Counter[nn.Module] = Counter()

    def count(module: nn.Module, _inputs: Any) -> None:
        calls[module] += 1

    handles = [module.register_forward_pre_hook(count) for module in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def rereads_parameters(model: nn.Module, calls: Mapping[nn.Module, int]) -> bool:
    """Return whether a forward may read a trained parameter again after reading others.

    Replicas that compute in low precision then read two copies, and the gradients of both copies
    are added in fp32.
    """
    return any(
        calls.get(module, 0) > calls[model] or next(_child_parameters(module), None) is not None
        for module in model.modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    )


def _child_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for child in module.children() for parameter in child.parameters())


def cast_parameters(
    model: nn.Module, dtype: torch.dtype, *, is_gathered: bool
) -> dict[str, Tensor]:
    """Return a model's parameters by name, cast to a lower precision for the forward.

    Args:
        model: Full model.
        dtype: Type to cast to.
        is_gathered: Whether all parameters are cast, as by fully_shard. Otherwise modules with
            running statistics keep their type, because torch requires equal types there.
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


@torch.no_grad()
def plain_quantized(values: Tensor, base: str) -> tuple[Tensor, Tensor]:
    """Quantize a full weight.

    Args:
        values: The weight, fp32 of shape [..., n].
        base: Value of ``adapter.base``.

    Returns:
        The values that are left, fp32; and what every layout together must store: for each block of
        64 values the codes and the scale in fp32, uint8 of shape [..., n / 64, bytes].
    """
    if base == "nf4":
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        codes, state = quantize_4bit(values, blocksize=_BLOCK, quant_type="nf4")
        scales, kept = state.absmax, dequantize_4bit(codes, state)
    else:
        blocks = values.unflatten(-1, (-1, _BLOCK))
        scales = blocks.abs().amax(-1, keepdim=True) / _LARGEST_INT8
        rounded = torch.where(scales > 0, blocks / scales, 0).round()
        codes, kept = rounded.to(torch.int8), (rounded * scales).flatten(-2)
    size = values.shape[-1] // _BLOCK
    parts = (codes, scales.contiguous().view(torch.int32))
    stored = [part.view(torch.uint8).reshape(*values.shape[:-1], size, -1) for part in parts]
    return kept, torch.cat(stored, -1)


class PlainBalance:
    """Counts the choices of a model's routers and moves their biases.

    Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024,
    algorithm 1.

    Attributes:
        present: Whether each token of the next forward is not padding; None if none is.
    """

    present: Tensor | None = None

    def __init__(self, model: nn.Module, experts: Sequence[str], *, rate: float) -> None:
        """Observe the experts.

        Args:
            model: Complete model.
            experts: Full names of the modules of experts.
            rate: Amount by which an update raises or lowers a bias.
        """
        self._rate = rate
        self._chosen: dict[str, list[Tensor]] = {name: [] for name in experts}
        self._biases: dict[str, Tensor] = {}
        for name in experts:
            layer = name.rpartition(".")[0]
            [self._biases[name]] = (
                buffer
                for key, buffer in model.named_buffers()
                if key.startswith(f"{layer}.") and key.endswith("e_score_correction_bias")
            )
            model.get_submodule(name).register_forward_hook(self._record(name), with_kwargs=True)

    def begin_step(self) -> None:
        """Forget the choices of earlier forwards."""
        for chosen in self._chosen.values():
            chosen.clear()

    @torch.no_grad()
    def move(self) -> None:
        """Move the biases by the choices since ``begin_step``."""
        for name, bias in self._biases.items():
            counts = torch.cat(self._chosen[name]).bincount(minlength=len(bias)).double()
            bias.add_((torch.sign(counts.mean() - counts) * self._rate).to(bias.dtype))

    def _record(self, name: str) -> Any:
        def record(_: nn.Module, args: Any, kwargs: Any, __: Any) -> None:
            chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            chosen = chosen.detach().flatten(0, -2)
            kept = chosen if self.present is None else chosen[self.present.flatten()]
            self._chosen[name].append(kept.flatten())

        return record
