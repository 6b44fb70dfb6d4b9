"""The work of any layout by analytic formulas, from what one device does with a sample.

It is the planner's first cut; the layouts that it leaves are traced. Kernels of memory-bound
operations, waves of tiles and messages are divided as if all divided evenly.

An example: one device with 11 samples of 1024 tokens does the product m=11264 n=4096 k=1024, in
which 11264 = 11 * 1024 are the tokens (11 divides no width, so no width is taken for them). With 2
samples per micro-batch and 4 tensor ranks it is m=2048 n=1024 k=1024: the tokens are scaled by
2 / 11, and the larger of the widths, 4096, is what the tensor ranks divide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from axonlaunch.config import RunConfig
from axonlaunch.config.layout import Layout
from axonlaunch.planning.throughput.operations import (
    Amount,
    AttentionOp,
    CollectiveOp,
    ExchangeKind,
    Kernel,
    Operation,
    Phase,
    Product,
    Send,
    Work,
)
from axonlaunch.planning.throughput.step_work import SAMPLES, Share, StageWork, StepWork

FP32 = 4
HALF = 2
_RING = 160
"""Activations that a ring attention's fp32 merges read and write for each rank, as traced."""


def scaled(
    reference: StepWork, config: RunConfig, layout: Layout, *, layers: tuple[int, ...]
) -> StepWork:
    """Return the work of a layout.

    Args:
        reference: Of the same model on one device, ``SAMPLES`` a step, nothing recomputed.
        config: The layout's run.
        layout: Its layout.
        layers: Of each of its stages.
    """
    return _Scaled(reference, config, layout).work(layers)


class _Scaled:
    def __init__(self, reference: StepWork, config: RunConfig, layout: Layout) -> None:
        self._reference = reference
        self._config = config
        self._layout = layout
        self._length = reference.sample_length
        self._samples = layout.micro_batch_size / layout.context
        self._type = FP32 if config.train.precision == "fp32" else HALF
        self._stream = self._samples * self._length * reference.hidden_size * self._type

    def work(self, layers: tuple[int, ...]) -> StepWork:
        """Return the whole step's work."""
        stage = self._reference.first
        has_one_stage = self._layout.num_stages == 1
        layer = self._micro(stage.micro_layer, self._in_layer(stage.step_layer))
        step_layer = self._step(stage.step_layer)
        first, last = (
            StageWork(
                step_ends=self._step(stage.step_ends, part=part),
                step_layer=step_layer,
                micro_ends=self._micro(stage.micro_ends, sent, part=part),
                micro_layer=layer,
            )
            # The vocabulary's product and loss are the last stage's, its embedding the first's.
            for part, sent in (
                (1.0 if has_one_stage else 0.0, self._sent_work()),
                (1.0, {}),
            )
        )
        return dataclasses.replace(self._reference, first=first, last=last, layers=layers)

    def _micro(self, share: Share, more: Work, *, part: float = 1.0) -> Share:
        work: Work = {}
        for key, amount in share.work.items():
            for phase in self._phases(key):
                operation, scaled_amount = self._operation(key, amount, phase)
                _put(work, operation, scaled_amount * part)
        for key, amount in more.items():
            _put(work, key, amount)
        return Share(work)

    def _phases(self, key: Operation) -> Iterable[Phase]:
        """Yield when an operation runs: what is recomputed runs again in backward."""
        yield key.phase
        mode = self._config.train.activation_checkpointing
        if key.phase == "forward" and mode != "none":
            is_saved = mode == "selective" and isinstance(key, AttentionOp)
            if not is_saved:
                yield "recomputation"

    def _operation(self, key: Operation, amount: Amount, phase: Phase) -> tuple[Operation, Amount]:
        """Return an operation of the layout in the place of one on one device."""
        tensor = self._layout.tensor
        mode = self._config.train.activation_checkpointing
        again = 0.5 if phase == "recomputation" and mode == "selective" else 1.0
        samples = self._samples / SAMPLES
        if isinstance(key, Product):
            sizes = {"m": key.m, "n": key.n, "k": key.k}
            tokens = next((d for d, size in sizes.items() if size == SAMPLES * self._length), None)
            width = max((d for d in sizes if d != tokens), key=sizes.__getitem__)
            count = amount.count * again
            if tokens is not None:
                sizes[tokens] = max(1, round(sizes[tokens] * samples))
            else:  # a product for each sample
                count *= samples
            sizes[width] = max(1, sizes[width] // tensor)
            m, n, k = sizes.values()
            product = dataclasses.replace(key, phase=phase, m=m, n=n, k=k)
            return product, Amount(count, amount.num_bytes, amount.flops)
        share = again * samples
        if isinstance(key, AttentionOp):
            share /= tensor
        else:
            assert isinstance(key, Kernel)
            divided = self._config.strategy.tensor.sequence_parallel
            share *= 1 / tensor if divided else (1 + 1 / tensor) / 2
        return dataclasses.replace(key, phase=phase), Amount(amount.count, *_times(amount, share))

    def _step(self, share: Share, *, part: float = 1.0) -> Share:
        """Return what is done once a step: the update, and what replicas agree on."""
        layout = self._layout
        facts = layout.facts
        over = layout.tensor * layout.optimizer_shards
        work: Work = {
            key: Amount(amount.count, *_times(amount, part / over))
            for key, amount in share.work.items()
            if key.phase == "update"
        }
        num_bytes = part * share.gradient_bytes / layout.tensor
        share_bytes = part * share.parameter_bytes / layout.tensor
        if facts.divides_update:
            _put(
                work,
                CollectiveOp("update", "all_gather", ("dp_replicate",)),
                Amount(1, num_bytes),
            )
        if facts.averages == "parameters" and layout.gradient_ranks > 1:
            period = facts.period(self._config.strategy.options) if facts.period else 1
            _put(
                work,
                CollectiveOp("update", "all_reduce", self._axes),
                Amount(1, num_bytes) * (1 / period),
            )
        elif facts.shards_parameters and layout.dp_replicate > 1:
            summed = CollectiveOp("backward", "all_reduce", ("dp_replicate",))
            _put(work, summed, Amount(1, num_bytes / layout.dp_shard))
        elif facts.keeps_gradients and layout.gradient_ranks > 1:
            kind: ExchangeKind = "reduce_scatter" if facts.divides_update else "all_reduce"
            _put(work, CollectiveOp("backward", kind, self._axes), Amount(1, num_bytes))
        return Share(work, num_bytes, share_bytes)

    @property
    def _axes(self) -> tuple[str, ...]:
        names = ("dp_replicate", "dp_shard", "cp")
        return tuple(name for name in names if self._layout.axes[name] > 1)

    def _in_layer(self, layer: Share) -> Work:
        """Return what a layer sends for each micro-batch."""
        layout, work = self._layout, Work()
        recomputed = self._config.train.activation_checkpointing == "full"
        if layout.tensor > 1:
            divided = self._config.strategy.tensor.sequence_parallel
            kinds = ("all_gather", "reduce_scatter") if divided else ("all_reduce",)
            phases: list[Phase] = ["forward", "backward"]
            for phase in (*phases, *(["recomputation"] if recomputed else [])):
                for kind in kinds:
                    key = CollectiveOp(phase, kind, ("tp",))  # type: ignore[arg-type]
                    _put(work, key, Amount(2, 2 * self._stream))
        if layout.facts.shards_parameters:
            axes = tuple(name for name in ("dp_shard", "cp") if layout.axes[name] > 1)
            whole = layer.parameter_bytes / layout.tensor
            gradients = layer.gradient_bytes / layout.tensor
            gathered = whole * self._type / self._config.train.parameter_bytes
            if axes:
                _put(work, CollectiveOp("forward", "all_gather", axes), Amount(1, gathered))
                if self._config.strategy.fsdp.sharding != "shard_grad_op":
                    _put(work, CollectiveOp("backward", "all_gather", axes), Amount(1, gathered))
                summed = FP32 if self._config.strategy.reduce_dtype == "fp32" else HALF
                reduced = gradients * summed / self._config.train.parameter_bytes
                _put(work, CollectiveOp("backward", "reduce_scatter", axes), Amount(1, reduced))
        if layout.context > 1:
            _put(work, CollectiveOp("forward", "all_gather", ("cp",)), Amount(1, 2 * self._stream))
            _put(work, CollectiveOp("backward", "all_gather", ("cp",)), Amount(2, 4 * self._stream))
            merged = _RING * layout.context * self._stream / layout.tensor
            _put(work, Kernel("forward", "ring"), Amount(1, merged))
        return work

    def _sent_work(self) -> Work:
        if self._layout.pipeline == 1:
            return {}
        divided = self._config.strategy.tensor.sequence_parallel
        size = self._stream / (self._layout.tensor if divided else 1)
        return {Send("forward", "pp"): Amount(1, size)}


def _times(amount: Amount, factor: float) -> tuple[float, float]:
    return amount.num_bytes * factor, amount.flops * factor


def _put(work: Work, key: Operation, amount: Amount) -> None:
    work[key] = work.get(key, Amount()) + amount
