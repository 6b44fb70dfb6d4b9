"""Estimates the work of a layout by formulas, from the traced work of one device.

The planner uses this to discard layouts; the remaining ones are traced. Memory-bound kernels, tiles
and messages are assumed to divide evenly.

An example: one device with 11 samples of 1024 tokens computes the product m=11264 n=4096 k=1024.
The number of tokens is 11264 = 11 * 1024; 11 divides no width, so a width is never mistaken for the
number of tokens. With 2 samples per micro-batch and 4 tensor ranks the product is m=2048 n=1024
k=1024: the tokens are scaled by 2 / 11, and the tensor ranks divide the larger width, 4096.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from axonlaunch.config import RunConfig
from axonlaunch.config.axes import EXPERT
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.config.consistency.run_precision import precision_of
from axonlaunch.planning.throughput.operations import (
    Amount,
    AttentionOp,
    CollectiveOp,
    ExchangeKind,
    HostWait,
    Kernel,
    Operation,
    Phase,
    Product,
    Rounding,
    Send,
    Work,
    add,
)
from axonlaunch.planning.throughput.step_work import SAMPLES, Share, StageWork, StepWork

_RING_TRAFFIC = 160
"""Memory traffic of the fp32 merges of ring attention per rank, in multiples of the activations.

Taken from traces.
"""


@dataclass(frozen=True)
class ExpertShare:
    """Experts that are divided among ranks.

    Attributes:
        load: Tokens of a rank's experts, relative to a balanced router.
        parameters: Share of experts in the parameters of a layer.
        has_router_loss: Whether routers have a loss of the global batch, see ``RouterLoss``.
    """

    load: float = 1.0
    parameters: float = 0.0
    has_router_loss: bool = False


def scaled(
    reference: StepWork,
    config: RunConfig,
    layout: Layout,
    *,
    layers: tuple[int, ...],
    experts: ExpertShare | None = None,
) -> StepWork:
    """Return the work of a layout.

    Args:
        reference: Work of the same model on one device, with ``SAMPLES`` samples per step and
            without recomputation.
        config: Configuration of the run.
        layout: Parallel layout of the run.
        layers: Number of layers of each pipeline stage.
        experts: Tokens and parameters of the experts; None for a model without divided experts.
    """
    return _Scaled(reference, config, layout, experts or ExpertShare()).work(layers)


class _Scaled:
    def __init__(
        self, reference: StepWork, config: RunConfig, layout: Layout, experts: ExpertShare
    ) -> None:
        self._reference = reference
        self._experts = experts
        self._config = config
        self._layout = layout
        self._length = reference.sample_length
        self._samples = layout.micro_batch_size / layout.divisor("sequences")
        self._precision = precision_of(config)
        self._compute_bytes = self._precision.compute.nbytes
        self._activation_bytes = (
            self._samples * self._length * reference.hidden_size * self._compute_bytes
        )

    def work(self, layers: tuple[int, ...]) -> StepWork:
        """Return the work of the full step."""
        stage = self._reference.first
        has_one_stage = self._layout.num_stages == 1
        frees = self._config.strategy.fsdp.sharding != "shard_grad_op"
        of_ends = self._per_micro_batch(stage.step_ends, regathers=False)
        layer = self._micro_batch(
            stage.micro_layer,
            self._layer_communication()
            | self._expert_communication()
            | self._per_micro_batch(stage.step_layer, regathers=frees),
        )
        step_layer = self._step(stage.step_layer)
        leading = self._reference.leading
        if leading.count:
            communication = self._layer_communication() | self._per_micro_batch(
                leading.step, regathers=frees
            )
            micro = self._micro_batch(leading.micro, communication)
            leading = dataclasses.replace(leading, step=self._step(leading.step), micro=micro)
        first, last = (
            StageWork(
                step_ends=self._step(stage.step_ends, fraction=fraction),
                step_layer=step_layer,
                micro_ends=self._micro_batch(
                    self._ends(), messages, fraction=fraction, is_in_layers=not sum(layers)
                ),
                micro_layer=layer,
            )
            # The output projection and the loss belong to the last stage. The first stage has
            # the embedding, which needs no matrix product.
            for fraction, messages in (
                (1.0 if has_one_stage else 0.0, self._stage_messages() | of_ends),
                (1.0, of_ends),
            )
        )
        return dataclasses.replace(
            self._reference, first=first, last=last, layers=layers, leading=leading
        )

    def _ends(self) -> Share:
        """Return the work outside of the layers; a loss in chunks computes its logits twice."""
        ends = self._reference.first.micro_ends
        is_counted = any(key.phase == "recomputation" for key in ends.work)
        if self._config.train.loss_chunk is None or is_counted:
            return ends
        again: Work = {
            dataclasses.replace(key, phase="recomputation"): amount
            for key, amount in ends.work.items()
            if key.phase == "forward" and isinstance(key, Product | Kernel)
        }
        return Share(add(ends.work, again))

    def _micro_batch(
        self, share: Share, communication: Work, *, fraction: float = 1.0, is_in_layers: bool = True
    ) -> Share:
        """Return the work of a micro-batch.

        Args:
            share: Work of the part of the model on one device.
            communication: Communication of the part.
            fraction: Fraction of the part that the stage has.
            is_in_layers: Whether the part has layers, whose forward may be recomputed.
        """
        work: Work = {}
        for key, amount in share.work.items():
            for phase in self._phases(key) if is_in_layers else (key.phase,):
                operation, scaled_amount = self._operation(key, amount, phase)
                _add(work, operation, scaled_amount * fraction)
        for key, amount in communication.items():
            _add(work, key, amount)
        if self._counts_choices:
            # A first pass without gradients, with all that a forward needs.
            forward = [(key, amount) for key, amount in work.items() if key.phase == "forward"]
            for key, amount in forward:
                _add(work, key, amount)
        return Share(work)

    @property
    def _counts_choices(self) -> bool:
        """Whether routers choose experts for all micro-batches before the first one is learned."""
        is_one_pass = self._layout.micro_batches == self._layout.pipeline == 1
        return self._experts.has_router_loss and not is_one_pass

    def _phases(self, key: Operation) -> Iterable[Phase]:
        """Yield the phases of an operation; recomputed operations also run in backward."""
        yield key.phase
        mode = self._config.train.recomputation
        if key.phase == "forward" and mode != "none":
            is_saved = mode == "selective" and isinstance(key, AttentionOp)
            if not is_saved:
                yield "recomputation"

    def _operation(self, key: Operation, amount: Amount, phase: Phase) -> tuple[Operation, Amount]:
        """Return the layout's equivalent of an operation on one device."""
        tensor = self._layout.tensor
        mode = self._config.train.recomputation
        recomputed = 0.5 if phase == "recomputation" and mode == "selective" else 1.0
        samples = self._samples / SAMPLES
        if isinstance(key, Product) and key.tokens is not None:
            return self._expert_product(key, phase), amount * recomputed
        if isinstance(key, Product):
            sizes = {"m": key.m, "n": key.n, "k": key.k}
            tokens = next((d for d, size in sizes.items() if size == SAMPLES * self._length), None)
            width = max((d for d in sizes if d != tokens), key=sizes.__getitem__)
            count = amount.count * recomputed
            if tokens is not None:
                sizes[tokens] = max(1, round(sizes[tokens] * samples))
            else:  # one product per sample
                count *= samples
            sizes[width] = max(1, sizes[width] // tensor)
            m, n, k = sizes.values()
            product = dataclasses.replace(key, phase=phase, m=m, n=n, k=k)
            return product, Amount(count, amount.num_bytes, amount.flops)
        if isinstance(key, Rounding):
            return self._rounding(key, amount * recomputed, phase)
        share = recomputed * samples
        if isinstance(key, AttentionOp):
            share /= tensor
        else:
            assert isinstance(key, Kernel)
            is_divided = self._config.strategy.tensor.sequence_parallel
            share *= 1 / tensor if is_divided else (1 + 1 / tensor) / 2
        return dataclasses.replace(key, phase=phase), Amount(amount.count, *_scale(amount, share))

    def _rounding(self, key: Rounding, amount: Amount, phase: Phase) -> tuple[Rounding, Amount]:
        """Return the rounding of a layout's factor, which is a weight or has a row for each token.

        Tensor ranks divide each weight, and one of the two other factors of its products.
        """
        sizes = {"rows": key.rows, "columns": key.columns}
        tokens = next((d for d, size in sizes.items() if size == SAMPLES * self._length), None)
        width = max((d for d in sizes if d != tokens), key=sizes.__getitem__)
        divided = 1 / self._layout.tensor
        if tokens is not None:
            sizes[tokens] = max(1, round(sizes[tokens] * self._samples / SAMPLES))
            divided = (1 + divided) / 2
        sizes[width] = max(1, round(sizes[width] * divided))
        rows, columns = sizes.values()
        rounding = dataclasses.replace(key, phase=phase, rows=rows, columns=columns)
        share = rounding.rows * rounding.columns / (key.rows * key.columns)
        return rounding, Amount(amount.count, *_scale(amount, share))

    def _expert_product(self, key: Product, phase: Phase) -> Product:
        """Return the products of a rank's experts.

        Ranks of the expert axis have fewer experts with the tokens of all of them. Without it,
        tensor ranks divide the matrices of each expert, and have all tokens.
        """
        layout, sizes = self._layout, {"m": key.m, "n": key.n, "k": key.k}
        assert key.tokens is not None
        tokens = sizes[key.tokens] * self._samples / SAMPLES
        if layout.expert > 1:
            tokens *= self._experts.load * layout.expert / layout.tensor
        else:
            width = max((d for d in sizes if d != key.tokens), key=sizes.__getitem__)
            sizes[width] = max(1, sizes[width] // layout.tensor)
        sizes[key.tokens] = max(1, round(tokens))
        experts = max(1, key.batch // layout.expert)
        m, n, k = sizes.values()
        return dataclasses.replace(key, phase=phase, batch=experts, m=m, n=n, k=k)

    def _expert_communication(self) -> Work:
        """Return the exchanges of hidden states between the ranks that share experts, for a layer.

        Each micro-batch sends them to their experts and back, in forward and in backward. The host
        waits for the sizes.
        """
        layout, work = self._layout, Work()
        width = self._reference.hidden_size
        products = [
            (key, amount.count * key.batch * key.m)
            for key, amount in self._reference.first.micro_layer.work.items()
            if isinstance(key, Product) and (key.phase, key.tokens) == ("forward", "m")
        ]
        # One product of an expert ends with the width of the hidden states. The others may too, but
        # not if they also begin with it.
        rows = min(
            sum(count for key, count in products if key.k == width),
            sum(count for key, count in products if key.n == width),
        )
        if layout.expert == 1 or not rows:
            return work
        rows *= self._samples / SAMPLES * self._experts.load / layout.tensor
        axes = (EXPERT,)
        dispatches: list[Phase] = ["forward"]
        if self._recomputes_all:
            dispatches.append("recomputation")
        for phase in (*dispatches, "backward"):
            amount = Amount(2, 2 * rows * width * self._compute_bytes)
            _add(work, CollectiveOp(phase, "all_to_all", axes), amount)
        for phase in dispatches:
            _add(work, HostWait(phase), Amount(1))
        return work

    @property
    def _recomputes_all(self) -> bool:
        return self._config.train.recomputation == "full"

    def _step(self, share: Share, *, fraction: float = 1.0) -> Share:
        """Return the work done once per step: the update and the communication of replicas."""
        layout = self._layout
        facts = layout.facts
        shards = layout.tensor * layout.optimizer_shards
        work: Work = {
            key: Amount(amount.count, *_scale(amount, fraction / shards))
            for key, amount in share.work.items()
            if key.phase == "update"
        }
        num_bytes = fraction * share.gradient_bytes / layout.tensor
        share_bytes = fraction * share.parameter_bytes / layout.tensor
        if facts.divides_update:
            _add(
                work,
                CollectiveOp("update", "all_gather", ("dp_replicate",)),
                Amount(1, num_bytes),
            )
        if layout.pipeline > 1:
            for key, amount in self._shard_communication(share, regathers=False).items():
                _add(work, key, amount * fraction)
        if facts.averages == "parameters" and layout.gradient_ranks > 1:
            period = facts.period(self._config.strategy.options) if facts.period else 1
            _add(
                work,
                CollectiveOp("update", "all_reduce", self._data_axes),
                Amount(1, num_bytes) * (1 / period),
            )
        elif facts.keeps_gradients and layout.gradient_ranks > 1:
            kind: ExchangeKind = "reduce_scatter" if facts.divides_update else "all_reduce"
            _add(work, CollectiveOp("backward", kind, self._data_axes), Amount(1, num_bytes))
        return Share(work, num_bytes, share_bytes)

    @property
    def _data_axes(self) -> tuple[str, ...]:
        return self._nontrivial(self._layout.division().sum_axes)

    def _nontrivial(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the axes with more than one rank."""
        return tuple(name for name in names if self._layout.ranks_along([name]) > 1)

    def _layer_communication(self) -> Work:
        """Return the communication of a layer's activations for each micro-batch."""
        layout, work, recomputed = self._layout, Work(), self._recomputes_all
        if layout.tensor > 1:
            is_divided = self._config.strategy.tensor.sequence_parallel
            kinds = ("all_gather", "reduce_scatter") if is_divided else ("all_reduce",)
            phases: list[Phase] = ["forward", "backward"]
            for phase in (*phases, *(["recomputation"] if recomputed else [])):
                for kind in kinds:
                    key = CollectiveOp(phase, kind, ("tp",))  # type: ignore[arg-type]
                    _add(work, key, Amount(2, 2 * self._activation_bytes))
        if layout.context > 1:
            _add(
                work,
                CollectiveOp("forward", "all_gather", ("cp",)),
                Amount(1, 2 * self._activation_bytes),
            )
            _add(
                work,
                CollectiveOp("backward", "all_gather", ("cp",)),
                Amount(2, 4 * self._activation_bytes),
            )
            merged = _RING_TRAFFIC * layout.context * self._activation_bytes / layout.tensor
            _add(work, Kernel("forward", "ring"), Amount(1, merged))
        return work

    def _per_micro_batch(self, share: Share, *, regathers: bool) -> Work:
        """Return the communication of parameters for each micro-batch.

        A pipeline gathers parameters once per step, for all micro-batches.
        """
        if self._layout.pipeline > 1:
            return {}
        return self._shard_communication(share, regathers=regathers)

    def _shard_communication(self, share: Share, *, regathers: bool) -> Work:
        """Return the communication of sharded parameters, for each time they are gathered.

        Args:
            share: Part of the model.
            regathers: Whether backward gathers the parameters again.
        """
        layout, work = self._layout, Work()
        if not layout.facts.shards_parameters:
            return work
        parts = [(False, 1 / layout.tensor)]
        is_layer = share is self._reference.first.step_layer
        if layout.expert > 1 and is_layer and (experts := self._experts.parameters):
            parts = [(False, (1 - experts) / layout.tensor), (True, experts / layout.expert)]
        for is_expert, fraction in parts:
            division = layout.division(is_expert=is_expert)
            gather = Amount(1, share.gathered_bytes * fraction)
            reduced = share.num_trained * fraction * self._precision.reduce.nbytes
            shard_axes = self._nontrivial(division.shard_axes)
            if shard_axes:
                _add(work, CollectiveOp("forward", "all_gather", shard_axes), gather)
                if regathers:
                    _add(work, CollectiveOp("backward", "all_gather", shard_axes), gather)
                scatter = CollectiveOp("backward", "reduce_scatter", shard_axes)
                _add(work, scatter, Amount(1, reduced))
            if replicate_axes := self._nontrivial(division.replicate_axes):
                # Replicas sum their shards.
                shard = Amount(1, reduced / layout.ranks_along(division.shard_axes))
                _add(work, CollectiveOp("backward", "all_reduce", replicate_axes), shard)
        return work

    def _stage_messages(self) -> Work:
        if self._layout.pipeline == 1:
            return {}
        is_divided = self._config.strategy.tensor.sequence_parallel
        size = self._activation_bytes / (self._layout.tensor if is_divided else 1)
        return {Send("forward", "pp"): Amount(1, size)}


def _scale(amount: Amount, factor: float) -> tuple[float, float]:
    return amount.num_bytes * factor, amount.flops * factor


def _add(work: Work, key: Operation, amount: Amount) -> None:
    work[key] = work.get(key, Amount()) + amount
