"""The work of any layout by closed formulas, from what one device does with a sample.

It is the planner's first cut; the layouts that it leaves are traced. Kernels of memory-bound
operations, waves of tiles and messages are divided as if all divided evenly.
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
    one: StepWork, config: RunConfig, shares: Layout, *, layers: tuple[int, ...]
) -> StepWork:
    """Return the work of a layout.

    Args:
        one: Of the same model on one device, ``SAMPLES`` a step, nothing recomputed.
        config: The layout's run.
        shares: Its layout.
        layers: Of each of its stages.
    """
    return _Scaled(one, config, shares).work(layers)


class _Scaled:
    def __init__(self, one: StepWork, config: RunConfig, shares: Layout) -> None:
        self._one = one
        self._config = config
        self._shares = shares
        self._length = one.sample_length
        self._samples = shares.micro_batch_size / shares.context
        self._type = FP32 if config.train.precision == "fp32" else HALF
        hidden = getattr(config.model, "hidden_size", 0)
        self._stream = self._samples * self._length * hidden * self._type

    def work(self, layers: tuple[int, ...]) -> StepWork:
        """Return the whole step's work."""
        stage = self._one.first
        alone = self._shares.num_stages == 1
        layer = self._micro(stage.micro_layer, self._in_layer(stage.step_layer.gradient_bytes))
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
                (1.0 if alone else 0.0, self._sent()),
                (1.0, {}),
            )
        )
        return StepWork(first, last, layers, self._one.parameters, self._length)

    def _micro(self, share: Share, more: Work, *, part: float = 1.0) -> Share:
        found: Work = {}
        for key, amount in share.work.items():
            for phase in self._phases(key):
                operation, amount_then = self._operation(key, amount, phase)
                _put(found, operation, amount_then * part)
        for key, amount in more.items():
            _put(found, key, amount)
        return Share(found)

    def _phases(self, key: Operation) -> Iterable[Phase]:
        """Yield when an operation runs: what is recomputed runs again in backward."""
        yield key.phase
        mode = self._config.train.activation_checkpointing
        if key.phase == "forward" and mode != "none":
            kept = mode == "selective" and isinstance(key, AttentionOp)
            if not kept:
                yield "recomputation"

    def _operation(self, key: Operation, amount: Amount, phase: Phase) -> tuple[Operation, Amount]:
        """Return an operation of the layout in the place of one on one device."""
        tensor = self._shares.tensor
        mode = self._config.train.activation_checkpointing
        again = 0.5 if phase == "recomputation" and mode == "selective" else 1.0
        samples = self._samples / SAMPLES
        if isinstance(key, Product):
            sizes = {"m": key.m, "n": key.n, "k": key.k}
            along = [name for name, size in sizes.items() if size == SAMPLES * self._length]
            across = max((name for name in sizes if name not in along[:1]), key=sizes.__getitem__)
            count = amount.count * again
            if along:
                sizes[along[0]] = max(1, round(sizes[along[0]] * samples))
            else:
                count *= samples
            sizes[across] = max(1, sizes[across] // tensor)
            m, n, k = sizes.values()
            made = dataclasses.replace(key, phase=phase, m=m, n=n, k=k)
            return made, Amount(count, amount.num_bytes, amount.flops)
        share = again * samples
        if isinstance(key, AttentionOp):
            made_attention = dataclasses.replace(key, phase=phase)
            times = share / tensor
            return made_attention, Amount(amount.count, *_times(amount, times))
        assert isinstance(key, Kernel)
        divided = self._config.strategy.tensor.sequence_parallel
        kept = 1 / tensor if divided else (1 + 1 / tensor) / 2
        return dataclasses.replace(key, phase=phase), Amount(
            amount.count, *_times(amount, share * kept)
        )

    def _step(self, share: Share, *, part: float = 1.0) -> Share:
        """Return what is done once a step: the update, and what replicas agree on."""
        shares = self._shares
        facts = shares.facts
        over = shares.tensor * shares.optimizer_shards
        found: Work = {
            key: Amount(amount.count, *_times(amount, part / over))
            for key, amount in share.work.items()
            if key.phase == "update"
        }
        held = part * share.gradient_bytes / shares.tensor
        if facts.gathers_updates:
            _put(found, CollectiveOp("update", "all_gather", ("dp_replicate",)), Amount(1, held))
        if facts.averages == "parameters" and shares.gradient_ranks > 1:
            period = facts.period(self._config.strategy.options) if facts.period else 1
            _put(
                found,
                CollectiveOp("update", "all_reduce", self._axes),
                Amount(1, held) * (1 / period),
            )
        elif facts.shards_parameters and shares.dp_replicate > 1:
            summed = CollectiveOp("backward", "all_reduce", ("dp_replicate",))
            _put(found, summed, Amount(1, held / shares.dp_shard))
        elif facts.sums_gradients and shares.gradient_ranks > 1:
            _put(found, CollectiveOp("backward", "all_reduce", self._axes), Amount(1, held))
        return Share(found, held)

    @property
    def _axes(self) -> tuple[str, ...]:
        names = ("dp_replicate", "dp_shard", "cp")
        return tuple(name for name in names if self._shares.axes[name] > 1)

    def _in_layer(self, gradient_bytes: float) -> Work:
        """Return what a layer sends for each micro-batch."""
        shares, found = self._shares, Work()
        recomputed = self._config.train.activation_checkpointing == "full"
        if shares.tensor > 1:
            divided = self._config.strategy.tensor.sequence_parallel
            kinds = ("all_gather", "reduce_scatter") if divided else ("all_reduce",)
            phases: list[Phase] = ["forward", "backward"]
            for phase in (*phases, *(["recomputation"] if recomputed else [])):
                for kind in kinds:
                    key = CollectiveOp(phase, kind, ("tp",))  # type: ignore[arg-type]
                    _put(found, key, Amount(2, 2 * self._stream))
        if shares.facts.shards_parameters:
            axes = tuple(name for name in ("dp_shard", "cp") if shares.axes[name] > 1)
            whole = gradient_bytes / shares.tensor
            gathered = whole * self._type / self._config.train.parameter_bytes
            if axes:
                _put(found, CollectiveOp("forward", "all_gather", axes), Amount(1, gathered))
                if self._config.strategy.fsdp.sharding != "shard_grad_op":
                    _put(found, CollectiveOp("backward", "all_gather", axes), Amount(1, gathered))
                summed = FP32 if self._config.strategy.reduce_dtype == "fp32" else HALF
                reduced = whole * summed / self._config.train.parameter_bytes
                _put(found, CollectiveOp("backward", "reduce_scatter", axes), Amount(1, reduced))
        if shares.context > 1:
            _put(found, CollectiveOp("forward", "all_gather", ("cp",)), Amount(1, 2 * self._stream))
            _put(
                found, CollectiveOp("backward", "all_gather", ("cp",)), Amount(2, 4 * self._stream)
            )
            merged = _RING * shares.context * self._stream / shares.tensor
            _put(found, Kernel("forward", "ring"), Amount(1, merged))
        return found

    def _sent(self) -> Work:
        if self._shares.pipeline == 1:
            return {}
        divided = self._config.strategy.tensor.sequence_parallel
        size = self._stream / (self._shares.tensor if divided else 1)
        return {Send("forward", "pp"): Amount(1, size)}


def _times(amount: Amount, factor: float) -> tuple[float, float]:
    return amount.num_bytes * factor, amount.flops * factor


def _put(work: Work, key: Operation, amount: Amount) -> None:
    work[key] = work.get(key, Amount()) + amount
