"""A rank's memory by analytic formulas, from what one device holds of a sample.

It is the planner's first cut: ``analytic_states``, and activations as Korthikanti et al., 2022,
section 4, divides them; the layouts that it leaves are traced. Rounding and messages between stages
are left out. Of 44 runs of models of 0.1 to 8 B parameters on 1 and 8 GPUs, without tensor ranks
and pipelines, tensors are 0 to 8 MiB below a trace's, cuBLAS's workspaces aside, and a process
is at most 13% off its estimate; two tensor ranks are 13% above theirs, a pipeline of four 15%.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from axonlaunch.config import RunConfig, with_values
from axonlaunch.config.layout import Layout, estimated_on, num_ranks, of_ranks
from axonlaunch.config.schedule_rules import SCHEDULES
from axonlaunch.config.schema import StrategyConfig
from axonlaunch.models import fake_tensor_cache
from axonlaunch.models.figures import model_figures
from axonlaunch.models.parameter_facts import TrainingShares
from axonlaunch.planning.memory import analytic_states, cuda_process
from axonlaunch.planning.throughput.step_work import SAMPLES, StepWork, reduced_config, step_work
from axonlaunch.planning.tracing.reduced_run import ReducedRun
from axonlaunch.planning.tracing.stage_trace import trace_rank
from axonlaunch.planning.tracing.storage_trace import CATEGORIES, Category
from axonlaunch.system import forked_map

_FP32 = 4
_PASSING: tuple[Category, ...] = ("activations", "temporary")
_MODES = ("none", "selective", "full")
_DIVIDED = 24 / 34
"""Share of a layer's activations that tensor parallelism alone divides (Korthikanti, eq. 2)."""
_CACHED = 1.05
"""What the allocator keeps, beside what the formulas say of tensors: a little, to lose none."""


@dataclass(frozen=True)
class ActivationBytes:
    """Activations of one sample on one device, in bytes, at the peak of a step.

    Attributes:
        layer: Of each layer.
        ends: Of everything else.
    """

    layer: float
    ends: float


@dataclass(frozen=True)
class Formulas:
    """A model, traced on one device: what all of its layouts are estimated from.

    Attributes:
        one: The work of a step of ``SAMPLES``.
        held: What a sample leaves behind under each kind of recomputation.
        shares: Of what training keeps beside the parameters.
    """

    one: StepWork
    held: dict[str, ActivationBytes]
    shares: TrainingShares = field(default_factory=TrainingShares)

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Trace the model of a run.

        Raises:
            ConfigError: It can't be traced.
        """
        alone = on_one_device(config)
        runs: list[Callable[[], Any]] = [
            partial(step_work, alone, world_size=1),
            partial(activations, alone),
        ]
        work, by_mode = forked_map.map_forked(
            runs, task="tracing a step on one device", memory=fake_tensor_cache.recipes
        )
        return cls(work, by_mode, TrainingShares.of(config))

    def process_bytes(self, config: RunConfig, layout: Layout | None = None) -> float:
        """Return what the highest rank of a layout holds of its device, about.

        Args:
            config: The layout's run, with ``launch.nproc`` resolved.
            layout: Its layout; None: to be found.
        """
        layout = layout or Layout.of(config, world_size=num_ranks(config))
        layers = -(-sum(self.one.layers) // layout.pipeline)
        on_gpu = estimated_on(config) == "gpu"
        tensors = peak_bytes(
            config,
            layout,
            work=self.one,
            activations=self.held,
            layers=layers,
            shares=self.shares,
            by_stream=on_gpu and layout.facts.shards_parameters,
        )
        if not on_gpu:
            return tensors
        rest = cuda_process.besides(cuda_process.communicator_sizes(layout), config.hardware)
        return _CACHED * tensors + sum(cuda_process.cublas_workspaces(config)) + rest


def on_one_device(config: RunConfig) -> RunConfig:
    """Return a run of the same model on one device, with ``SAMPLES`` a step."""
    return with_values(
        config,
        {
            "strategy": StrategyConfig(data_parallel="none"),
            "train.global_batch_size": SAMPLES,
            "train.micro_batch_size": SAMPLES,
            "train.activation_checkpointing": "none",
            "train.compile": False,
            **of_ranks(1),
        },
    )


def activations(config: RunConfig) -> dict[str, ActivationBytes]:
    """Trace what a sample leaves behind under each kind of recomputation.

    It is traced on two ranks that shard their parameters, so that nothing of those is among it.

    Args:
        config: A run on one device, with ``SAMPLES`` a step.

    Raises:
        ConfigError: The run can't be traced.
    """
    two = {"train.global_batch_size": 2 * SAMPLES, **of_ranks(2)}
    config = with_values(config, {"strategy.data_parallel": "fsdp", **two})
    figures = model_figures(config.model)
    depths = (figures.period, 2 * figures.period) if figures.num_blocks else (0, 0)
    runs = []
    for mode in _MODES:
        changed = with_values(config, {"train.activation_checkpointing": mode})
        for layers in depths:
            short = reduced_config(changed, world_size=2, layers=layers, micro_batches=1)
            runs.append(partial(_activations, short))
    traced = iter(
        forked_map.map_forked(
            runs, task="tracing a step for its activations", memory=fake_tensor_cache.recipes
        )
    )
    activations_by_mode = {}
    for mode in _MODES:
        few, more = (next(traced) / SAMPLES for _ in depths)
        layer = (more - few) / figures.period
        activations_by_mode[mode] = ActivationBytes(layer, 2 * few - more)
    return activations_by_mode


def peak_bytes(
    config: RunConfig,
    layout: Layout,
    *,
    work: StepWork,
    activations: dict[str, ActivationBytes],
    layers: int,
    shares: TrainingShares,
    by_stream: bool = False,
) -> float:
    """Return what the first and the last stage together hold at most: no rank holds more.

    Args:
        config: The layout's run.
        layout: Its layout.
        work: Work of one device, for the sizes of parameters.
        activations: As ``activations`` gives it.
        layers: Of the stage that has most, all of a rank's stages together; 0 of a model whose
            layers are not known: it is cut evenly.
        shares: Of what training keeps beside the parameters.
        by_stream: Whether to return what an allocator keeps: memory that streams which gather and
            reduce had is not the others' at another moment.
    """
    half = 1.0 if config.train.precision == "fp32" else 0.5
    a_layer = work.first.step_layer.parameter_bytes
    cut = 1.0 if layers else 1 / layout.pipeline
    ends = cut * work.first.step_ends.parameter_bytes
    whole = layers * a_layer + ends
    mode = config.train.activation_checkpointing
    saved = activations[mode]
    divided = 1 / layout.tensor
    if not config.strategy.tensor.sequence_parallel:
        # What is recomputed in full keeps a layer's input alone, which every rank has whole.
        divided = 1.0 if mode == "full" else 1 - _DIVIDED + _DIVIDED / layout.tensor
    samples = layout.micro_batch_size / layout.context
    a_layer_keeps = divided * saved.layer
    if mode == "selective" and layout.tensor > 1:
        # It keeps what is gathered and reduced, twice each in a layer's forward.
        hidden = work.hidden_size * work.sample_length * _FP32 * half
        a_layer_keeps += 2 * hidden * (1 + divided)
    in_flight = _in_flight(layout)
    of_ends = (saved.ends if layers else cut * in_flight * saved.ends) / layout.tensor
    of_layers = layers * in_flight * a_layer_keeps
    recomputed = 0.0 if mode == "none" else divided * activations["none"].layer
    moments = analytic_states.moments(
        config, layout, whole=whole, layer=a_layer, ends=ends, shares=shares
    )
    passing = {
        "loss": of_layers + of_ends,
        "last block": of_layers + recomputed,
        "first block": recomputed,
        "update": 0.0,
    }
    held = {
        name: sum(moment.values()) + samples * passing[name] for name, moment in moments.items()
    }
    if not by_stream:
        return max(held.values())
    sent = {name: of["communication"] for name, of in moments.items()}
    return max(held[name] - sent[name] for name in held) + max(sent.values())


def _in_flight(layout: Layout) -> float:
    """Return micro-batches of which a rank holds all its layers' activations at once.

    Of the first rank of 1F1B and interleaved 1F1B: Narayanan et al., "Efficient Large-Scale
    Language Model Training on GPU Clusters", 2021, section 2.2; of ZB-V: Qi et al., "Pipeline
    Parallelism with Controllable Memory", 2024, section 3.
    """
    ranks, chunks = layout.pipeline, layout.stages_per_rank
    waiting = float(ranks)
    if SCHEDULES[layout.schedule].in_rounds:
        waiting = (2 * (ranks - 1) + (chunks - 1) * ranks + 1) / chunks
    return min(waiting, layout.microbatches_per_round)


def _activations(config: RunConfig) -> float:
    """Return the most that activations take, and what a backward makes of them; compiled, less."""
    config = with_values(config, {"train.compile": False})
    events = trace_rank(ReducedRun.of(config), 0).events
    before = next(n for n, event in enumerate(events) if event.name[0] == "update")
    which = [CATEGORIES.index(category) for category in _PASSING]
    points = (point for event in events[:before] for point in event.points)
    return float(max(sum(point[index] for index in which) for point in points))
