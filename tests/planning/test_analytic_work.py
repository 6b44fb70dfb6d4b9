"""The planner's analytic formulas compared with the counts of a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.analytic_model import MODEL
from support.configured import estimate_config
from support.hf_families import FAMILIES

from axonlaunch.config import with_values
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.problems.errors import plain
from axonlaunch.models.build import spec_for
from axonlaunch.models.facts.parameter_facts import TrainingShares
from axonlaunch.planning.memory import analytic
from axonlaunch.planning.memory.analytic import on_one_device
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.memory.pipeline_ranks import PipelineRank
from axonlaunch.planning.throughput.analytic_work import scaled
from axonlaunch.planning.throughput.operations import (
    AttentionOp,
    CollectiveOp,
    HostWait,
    Product,
    Rounding,
    Work,
    add,
)
from axonlaunch.planning.throughput.step_work import StepWork, step_work
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.stage_trace import trace_rank
from axonlaunch.planning.tracing.storage_trace import CATEGORIES
from axonlaunch.system.processes import forked_map

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def work() -> StepWork:
    chosen = on_one_device(estimate_config([*MODEL, "launch.nproc=1"]))
    [work] = forked_map.map_forked([lambda: step_work(chosen, world_size=1)])
    return work


@pytest.fixture(scope="module")
def sizes() -> dict[str, analytic.ActivationBytes]:
    chosen = on_one_device(estimate_config([*MODEL, "launch.nproc=1"]))
    [activations] = forked_map.map_forked([lambda: analytic.activations(chosen)])
    return activations


def flops(work: Work, kind: type) -> float:
    total = 0.0
    for key, amount in work.items():
        if isinstance(key, kind):
            product = isinstance(key, Product)
            total += (
                2 * key.batch * key.m * key.n * key.k * amount.count if product else amount.flops
            )
    return total


def sent(work: Work) -> float:
    return sum(amount.num_bytes for key, amount in work.items() if isinstance(key, CollectiveOp))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "strategy=ddp launch.nproc=2",
        "strategy=fsdp launch.nproc=2 train.activation_checkpointing=full",
        "strategy=tensor launch.nproc=2 strategy.tensor.sequence_parallel=true",
    ],
)
def test_analytic_layer_work_equals_trace(overrides: str, work: StepWork) -> None:
    chosen = estimate_config([*MODEL, *overrides.split()])
    layout = Layout.of(chosen, world_size=2)
    reported = scaled(work, chosen, layout, layers=(4,)).first.micro_layer.work
    [counted] = forked_map.map_forked([lambda: step_work(chosen, world_size=2)])
    analytic_work = counted.first.micro_layer.work
    # torch recomputes only as far as backward needs, so not a block's last product.
    assert flops(reported, Product) == pytest.approx(flops(analytic_work, Product), rel=0.07)
    assert flops(reported, AttentionOp) == pytest.approx(
        flops(analytic_work, AttentionOp), rel=0.01
    )
    assert sent(reported) == pytest.approx(sent(analytic_work), rel=0.15)


@pytest.mark.slow
def test_analytic_loss_in_chunks_computes_logits_twice(work: StepWork) -> None:
    chosen = estimate_config([*MODEL, "strategy=fsdp", "launch.nproc=2", "train.loss_chunk=16"])
    layout = Layout.of(chosen, world_size=2)
    reported = scaled(work, chosen, layout, layers=(4,)).first.micro_ends.work
    [counted] = forked_map.map_forked([lambda: step_work(chosen, world_size=2)])
    expected = counted.first.micro_ends.work
    assert flops(reported, Product) == pytest.approx(flops(expected, Product), rel=0.01)
    whole = scaled(work, with_values(chosen, {"train.loss_chunk": None}), layout, layers=(4,))
    once = flops(whole.first.micro_ends.work, Product)
    assert flops(reported, Product) == pytest.approx(4 / 3 * once, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["strategy=fsdp", "strategy=tensor"])
def test_analytic_rounding_equals_trace(layout: str) -> None:
    """Weights are rounded for each micro-batch, whatever its size."""
    chosen = estimate_config(
        [*MODEL, layout, "launch.nproc=2", "train.precision=bf16", "train.matmul_dtype=fp8_rowwise"]
    )
    works = []
    for config, ranks in ((on_one_device(chosen), 1), (chosen, 2)):
        works += forked_map.map_forked([lambda c=config, n=ranks: step_work(c, world_size=n)])
    reported = scaled(works[0], chosen, Layout.of(chosen, world_size=2), layers=(4,))
    numbers, expected = (
        sum(
            amount.count * key.rows * key.columns
            for key, amount in work.first.micro_layer.work.items()
            if isinstance(key, Rounding)
        )
        for work in (reported, works[1])
    )
    assert numbers == pytest.approx(expected, rel=0.01 if layout == "strategy=fsdp" else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [
        "train.param_dtype=bf16",
        "adapter.base=nf4",
        "adapter.base=int8 train.param_dtype=bf16",
    ],
)
def test_analytic_gathers_of_frozen_base_equal_trace(base: str) -> None:
    """Quantized weights are gathered as their bytes, others in the compute type."""
    sizes = ["model.hidden_size=256", "model.intermediate_size=512"]
    layout = ["strategy=hsdp", "strategy.fsdp.replicate=2", "launch.nproc=4"]
    adapted = ["train.precision=bf16", "adapter=lora", *base.split()]
    chosen = estimate_config([*MODEL, *sizes, *layout, *adapted])
    alone, works = on_one_device(chosen), []
    for config, ranks in ((alone, 1), (chosen, 4)):
        works += forked_map.map_forked([lambda c=config, n=ranks: step_work(c, world_size=n)])
    reported = scaled(works[0], chosen, Layout.of(chosen, world_size=4), layers=(4,))
    assert of_data_ranks(reported.first.micro_layer.work) == of_data_ranks(
        works[1].first.micro_layer.work
    )


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ("strategy=hsdp strategy.fsdp.replicate=2 strategy.context.degree=2", 8),
        ("strategy=hsdp strategy.fsdp.replicate=2", 4),
        ("strategy=hsdp strategy.fsdp.replicate=2 strategy.reduce_dtype=bf16", 4),
        ("strategy=fsdp strategy.fsdp.sharding=no_shard strategy.context.degree=2", 4),
        ("strategy=hsdp strategy.fsdp.replicate=2 strategy.pipeline.degree=2", 8),
    ],
)
def test_analytic_communication_of_shards_and_replicas_equals_trace(
    overrides: str, ranks: int, work: StepWork
) -> None:
    chosen = estimate_config([*MODEL, *overrides.split(), f"launch.nproc={ranks}"])
    layout = Layout.of(chosen, world_size=ranks)
    layers = (2, 2) if layout.pipeline > 1 else (4,)
    reported = scaled(work, chosen, layout, layers=layers)
    [counted] = forked_map.map_forked([lambda: step_work(chosen, world_size=ranks)])
    for part in ("micro_layer", "micro_ends", "step_layer"):
        assert of_data_ranks(getattr(reported.first, part).work) == of_data_ranks(
            getattr(counted.first, part).work
        )


def of_data_ranks(work: Work) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the bytes of collectives of data-parallel ranks, by kind and axes."""
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    for key, amount in work.items():
        if isinstance(key, CollectiveOp) and {"dp_replicate", "dp_shard"} & {*key.axes}:
            kind = (key.kind, key.axes)
            sums[kind] = sums.get(kind, 0.0) + amount.num_bytes
    return sums


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "strategy=ddp launch.nproc=2",
        "strategy=ddp launch.nproc=2 train.micro_batch_size=4",
        "strategy=zero1 launch.nproc=2",
        "strategy=zero2 launch.nproc=2",
        "strategy=fsdp launch.nproc=2",
        "strategy=fsdp launch.nproc=2 train.activation_checkpointing=full",
        "strategy=ddp launch.nproc=2 train.activation_checkpointing=full optimizer=sgd",
    ],
)
def test_analytic_memory_is_close_to_trace(
    overrides: str, work: StepWork, sizes: dict[str, analytic.ActivationBytes]
) -> None:
    chosen = estimate_config([*MODEL, *overrides.split()])
    layout = Layout.of(chosen, world_size=2)
    shares = TrainingShares.of(chosen)
    reported = analytic.peak_bytes(
        chosen, layout, PipelineRank(layers=4), work=work, activations=sizes, shares=shares
    )
    assert reported == pytest.approx(estimate(chosen).peak_bytes, rel=0.03)


@pytest.mark.slow
def test_analytic_work_of_model_with_minimum_batch() -> None:
    overrides = [
        "model=custom",
        "model.target=support.normed:build",
        "data=digits",
        "data.image_size=8",
    ]
    overrides += ["hardware=h100_80gb", "train.global_batch_size=4"]
    chosen = estimate_config([*overrides, "launch.nproc=2", "train.micro_batch_size=2"])
    assert analytic.Formulas.of(chosen).process_bytes(chosen) > 0


@pytest.mark.slow
def test_analytic_activations_per_layer_equal_depth_difference(
    sizes: dict[str, analytic.ActivationBytes],
) -> None:
    def most(layers: int) -> int:
        overrides = ["strategy=fsdp", "launch.nproc=2", f"model.num_hidden_layers={layers}"]
        events = trace_rank(ReducedRun.of(estimate_config([*MODEL, *overrides])), 0).events
        saved = CATEGORIES.index("activations")
        return max(point[saved] for event in events for point in event.points)

    few, more = forked_map.map_forked([lambda: most(2), lambda: most(3)])
    samples = 2  # samples of a micro-batch
    assert sizes["none"].layer == pytest.approx((more - few) / samples, rel=0.02)


def test_a_model_of_unknown_depth_is_cut_evenly_by_a_pipeline(
    work: StepWork, sizes: dict[str, analytic.ActivationBytes]
) -> None:
    def of_ranks(ranks: int) -> float:
        overrides = [
            "strategy=pipeline",
            f"strategy.pipeline.degree={ranks}",
            f"launch.nproc={ranks}",
        ]
        chosen = estimate_config([*MODEL, *overrides])
        formulas = analytic.Formulas(replace(work, layers=(0,), hidden_size=0), sizes)
        return formulas.process_bytes(chosen)

    full, halves, quarters = of_ranks(1), of_ranks(2), of_ranks(4)
    assert quarters < halves < full
    states = 4 * work.first.step_ends.gradient_bytes
    assert full - halves == pytest.approx(states / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy.expert.degree=4"],
        ["strategy.expert.degree=4", "strategy.tensor.degree=2", "estimate.imbalance=1.5"],
        ["strategy.expert.degree=2", "train.activation_checkpointing=full"],
        ["strategy.expert.degree=4", "model.router_aux_loss=0.01"],
        ["strategy.expert.degree=2", "strategy.pipeline.degree=2", "model.router_aux_loss=0.01"],
    ],
)
def test_analytic_work_of_divided_experts_equals_trace(overrides: list[str]) -> None:
    content = {**FAMILIES["qwen3_moe"], "num_experts": 16, "num_hidden_layers": 4}
    model = ["model=hf", "model.init=random", f"model.config={plain(content)}", *MODEL[4:]]
    chosen = estimate_config([*model, "strategy=fsdp", "launch.nproc=4", *overrides])
    single, layout = on_one_device(chosen), Layout.of(chosen, world_size=4)
    formulas = analytic.Formulas(
        forked_map.map_forked([lambda: step_work(single, world_size=1)])[0],
        {},
        TrainingShares.of(chosen),
        has_router_loss=spec_for(chosen).mixes_samples == "batch",
    )
    [counted] = forked_map.map_forked([lambda: step_work(chosen, world_size=4)])
    reported = scaled(
        formulas.single_device,
        chosen,
        layout,
        layers=counted.layers,
        experts=formulas.experts(chosen, layout),
    )
    expected, analytic_work = reported.first.micro_layer.work, counted.first.micro_layer.work
    for kind in (Product, AttentionOp):
        assert flops(expected, kind) == pytest.approx(flops(analytic_work, kind), rel=0.07)
    assert experts_flops(expected) == pytest.approx(experts_flops(analytic_work), rel=0.07)
    assert exchanged(expected) == pytest.approx(exchanged(analytic_work), rel=0.05)
    waits = [
        sum(amount.count for key, amount in work.items() if isinstance(key, HostWait))
        for work in (expected, analytic_work)
    ]
    assert waits[0] == pytest.approx(waits[1])


MIXTURE = [
    *("model=moe_debug", "model.first_k_dense_replace=2", "model.num_hidden_layers=8"),
    *("model.intermediate_size=512", "data=synthetic_tokens", "data.sequence_length=48"),
    *("train.global_batch_size=16", "train.micro_batch_size=2", "train.precision=bf16"),
    "hardware=cpu",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "memory"),
    [
        ("strategy=fsdp strategy.expert.degree=4 launch.nproc=4", 0.05),
        (
            "strategy=fsdp strategy.expert.degree=2 launch.nproc=4 "
            "train.activation_checkpointing=full",
            0.05,
        ),
        ("strategy=pipeline strategy.pipeline.schedule=1f1b launch.nproc=2", 0.1),
    ],
)
def test_analytic_work_and_memory_of_dense_and_expert_blocks_are_close_to_trace(
    overrides: str, memory: float
) -> None:
    chosen = estimate_config([*MIXTURE, *overrides.split()])
    ranks = num_ranks(chosen)
    layout = Layout.of(chosen, world_size=ranks)
    formulas = analytic.Formulas.of(on_one_device(chosen))
    [counted] = forked_map.map_forked([lambda: step_work(chosen, world_size=ranks)])
    reported = scaled(
        formulas.single_device,
        chosen,
        layout,
        layers=counted.layers,
        experts=formulas.experts(chosen, layout),
    )
    for index in range(len(counted.layers)):
        expected, analytic_work = (
            add(stage.micro_ends.work, stage.micro_layer.work, factor=counted.layers[index])
            for stage in (reported.stage(index), counted.stage(index))
        )
        assert flops(expected, Product) == pytest.approx(flops(analytic_work, Product), rel=0.03)
        assert exchanged(expected) == pytest.approx(exchanged(analytic_work), rel=0.01)
    peak = estimate(chosen).peak_bytes
    assert formulas.process_bytes(chosen, layout) == pytest.approx(peak, rel=memory)


def experts_flops(work: Work) -> float:
    return sum(
        2 * key.batch * key.m * key.n * key.k * amount.count
        for key, amount in work.items()
        if isinstance(key, Product) and key.tokens is not None
    )


def exchanged(work: Work) -> float:
    return sum(
        amount.num_bytes
        for key, amount in work.items()
        if isinstance(key, CollectiveOp) and key.kind == "all_to_all"
    )
