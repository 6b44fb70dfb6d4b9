"""Counts that are extrapolated linearly in layers and micro-batches equal those of a full trace."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.configured import estimate_config
from support.hf_families import SPECIAL, without_folder
from torch.utils.flop_counter import FlopCounterMode

from axonlaunch.config import ConfigError
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.options.model import FreeModelConfig
from axonlaunch.models.build import build_model, on_meta, spec_for
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.throughput import step_work
from axonlaunch.planning.throughput.operations import Amount, Kernel, Product, Work, add
from axonlaunch.planning.throughput.step_work import StageWork, StepWork
from axonlaunch.planning.tracing.extrapolation import extrapolate_chunks
from axonlaunch.system.processes import forked_map

pytestmark = pytest.mark.processes

SMALL = [
    "model=llama_debug",
    "model.num_hidden_layers=4",
    "data=synthetic_tokens",
    "data.sequence_length=64",
    "train.precision=bf16",
]


def summed(stage: StageWork, *, layers: int, micro_batches: int) -> Work:
    micro = add(stage.micro_ends.work, stage.micro_layer.work, factor=layers)
    step = add(stage.step_ends.work, stage.step_layer.work, factor=layers)
    return add(step, micro, factor=micro_batches)


def full(overrides: list[str], *, stage: int = 0) -> Work:
    config = estimate_config(overrides)
    runs = [([config], 0)]
    (((traced,),),) = forked_map.map_forked([lambda: step_work._trace(runs, stage=stage)])
    return traced.share.work


@pytest.fixture(scope="module")
def alone() -> StepWork:
    return step_work.step_work(estimate_config([*SMALL, "launch.nproc=1"]), world_size=1)


def same(first: Work, second: Work) -> bool:
    left = add(first, second, factor=-1)
    return all(
        abs(amount.count) < 1e-6 and abs(amount.num_bytes) < 64 and abs(amount.flops) < 1
        for amount in left.values()
    )


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            ["strategy=fsdp", "launch.nproc=4", "train.activation_checkpointing=full"],
            marks=pytest.mark.slow,
        ),
        ["strategy=ddp", "launch.nproc=4"],
        pytest.param(
            ["strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fsdp", "ddp", "tensor"],
)
def test_step_work_is_linear_in_layers_and_micro_batches(strategy: list[str]) -> None:
    samples = 4 if "strategy=tensor" in strategy else 16  # 4 micro-batches of each data rank
    overrides = [*SMALL, *strategy, f"train.global_batch_size={samples}"]
    overrides += ["train.micro_batch_size=1"]
    config = estimate_config(overrides)
    ranks = config.launch.nproc
    assert ranks != "auto"
    reported = step_work.step_work(config, world_size=ranks)
    assert reported.layers == (4,)
    assert same(summed(reported.first, layers=4, micro_batches=4), full(overrides))


@pytest.mark.parametrize(
    "strategy",
    [
        ["launch.nproc=1", "train.activation_checkpointing=full"],
        pytest.param(
            ["strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=2"], marks=pytest.mark.slow
        ),
        pytest.param(["strategy=zero1", "launch.nproc=2"], marks=pytest.mark.slow),
    ],
    ids=["one device", "expert", "zero1"],
)
def test_first_pass_of_a_router_loss_is_counted_for_each_micro_batch(strategy: list[str]) -> None:
    """A run of one micro-batch needs no first pass, so it may not stand for one of several."""
    family = without_folder("qwen3_moe", router_aux_loss_coef=0.01)
    overrides = [*family, *strategy, "train.micro_batch_size=1", "train.global_batch_size=6"]
    config = estimate_config(overrides)
    ranks = num_ranks(config)
    reported = step_work.step_work(config, world_size=ranks)
    micro_batches = Layout.of(config, world_size=ranks).micro_batches
    assert same(summed(reported.first, layers=2, micro_batches=micro_batches), full(overrides))


@pytest.mark.parametrize(
    "layout",
    [
        "strategy=fsdp launch.nproc=2 train.micro_batch_size=1",
        "strategy=ddp launch.nproc=2 train.freeze=[layers.*,embed_tokens.*,norm.*]",
        pytest.param(
            "strategy=tensor strategy.tensor.sequence_parallel=true launch.nproc=2",
            marks=pytest.mark.slow,
        ),
        pytest.param("strategy=pipeline launch.nproc=2 adapter=lora", marks=pytest.mark.slow),
    ],
)
def test_chunks_of_a_loss_count_as_if_all_of_them_ran(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has 16 or more chunks, of which the last one is smaller."""
    overrides = [*SMALL, *layout.split(), "train.loss_chunk=3", "train.global_batch_size=4"]
    config = estimate_config([*overrides, "hardware=h100_80gb"])

    def counted() -> Any:
        return step_work.step_work(config, world_size=2), estimate(config)

    few = counted()
    monkeypatch.setattr(extrapolate_chunks, "_LEAST", 1000)
    assert few == counted()


@pytest.mark.slow
def test_step_work_of_pipeline_ends_is_linear() -> None:
    overrides = [
        *SMALL,
        "strategy=pipeline",
        "strategy.pipeline.degree=2",
        "strategy.pipeline.schedule=1f1b",
        "strategy.pipeline.split=[3,3]",
        "model.num_hidden_layers=6",
        "launch.nproc=2",
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
    ]
    reported = step_work.step_work(estimate_config(overrides), world_size=2)
    assert reported.layers == (3, 3)
    for stage, mine in enumerate((reported.first, reported.last)):
        assert same(summed(mine, layers=3, micro_batches=4), full(overrides, stage=stage))


MIXTURE = [
    *("model=moe_debug", "model.first_k_dense_replace=2", "model.num_hidden_layers=6"),
    *("data=synthetic_tokens", "data.sequence_length=32", "train.micro_batch_size=1"),
]
DEEPSEEK = without_folder(
    "deepseek_v3",
    **{**SPECIAL["deepseek_v3"], "first_k_dense_replace": 2, "num_hidden_layers": 6},
)


@pytest.mark.parametrize(
    ("strategy", "stages"),
    [
        (["launch.nproc=1", "train.global_batch_size=1"], 1),
        pytest.param(
            ["strategy=fsdp", "strategy.expert.degree=2", "launch.nproc=4"],
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["strategy=pipeline", "strategy.pipeline.split=[3,3]", "launch.nproc=2"],
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [*DEEPSEEK, "strategy=pipeline", "strategy.pipeline.split=[3,3]", "launch.nproc=2"],
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one device", "expert", "pipeline", "pipeline of transformers"],
)
def test_dense_and_expert_blocks_are_counted_apart(strategy: list[str], stages: int) -> None:
    overrides = [*(() if "model=hf" in strategy else MIXTURE), *strategy]
    config = estimate_config(overrides)
    layout = Layout.of(config, world_size=num_ranks(config))
    reported = step_work.step_work(config, world_size=num_ranks(config))
    assert reported.leading.count == 2
    model = on_meta(config.model, seed=0)
    assert reported.parameters == sum(p.numel() for p in model.parameters())
    for index, layers in enumerate(reported.layers):
        stage = reported.stage(index)
        work = summed(stage, layers=layers, micro_batches=layout.micro_batches)
        assert same(work, full(overrides, stage=index))
    assert len(reported.layers) == stages


def test_flops_of_dense_and_expert_blocks_equal_those_of_torch_flop_counter() -> None:
    config = estimate_config([*MIXTURE, "launch.nproc=1", "train.global_batch_size=1"])
    stage = step_work.step_work(config, world_size=1).stage(0)
    products = [
        amount.flops
        for key, amount in summed(stage, layers=6, micro_batches=1).items()
        if isinstance(key, Product)
    ]
    spec, model = spec_for(config), build_model(config, seed=0)
    spec.use_plain_experts(model)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(256, (1, 32))).sum().backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert sum(products) == pytest.approx(counted, rel=1e-12)


def test_blocks_with_other_products_in_8_bits_are_traced_whole() -> None:
    scaled = ["train.matmul_dtype=fp8_tensorwise", "train.matmul_exclude=[layers.3.mlp.up_proj]"]
    overrides = [*SMALL, *scaled, "launch.nproc=1", "train.global_batch_size=1"]
    config = estimate_config(overrides)
    reported = step_work.step_work(config, world_size=1)
    work = summed(reported.first, layers=4, micro_batches=1)
    assert same(work, full(overrides))


def test_a_model_with_one_block_is_traced_itself_because_deeper_ones_differ() -> None:
    overrides = ["model=mlp", "data=synthetic_images", "optimizer.state_dtype=8bit"]
    overrides += ["strategy=tensor", "strategy.tensor.degree=8", "launch.nproc=8"]
    config = estimate_config(overrides)  # a second block would have rows of 32 values on a rank
    work = step_work.step_work(config, world_size=8)
    traced = summed(
        work.first, layers=0, micro_batches=Layout.of(config, world_size=8).micro_batches
    )
    assert same(traced, full(overrides))


def test_step_work_counts_parameters_of_full_depth(alone: StepWork) -> None:
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    assert alone.parameters == 4 * layer + 2 * 256 * 128 + 128


def test_a_norm_is_one_kernel(alone: StepWork) -> None:
    names = {key.name for key in alone.first.micro_layer.work if isinstance(key, Kernel)}
    assert "aten::native_layer_norm" in names
    assert "aten::rsqrt" not in names


def test_every_product_of_a_layer_comes_once_forward_and_twice_backward(alone: StepWork) -> None:
    flops = {
        phase: sum(
            amount.flops
            for key, amount in alone.first.micro_layer.work.items()
            if isinstance(key, Product) and key.phase == phase
        )
        for phase in ("forward", "backward")
    }
    # llama_debug's layer: q and o 128 x 128, k and v 128 x 64, three of 128 x 384.
    weights = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384
    tokens = 16 * 64
    assert flops == {"forward": 2 * tokens * weights, "backward": 4 * tokens * weights}


def test_a_pipeline_of_a_model_without_depth_is_refused() -> None:
    config = estimate_config(
        [*SMALL, "strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"]
    )
    custom = dataclasses.replace(config, model=FreeModelConfig(name="llama"))
    with pytest.raises(ConfigError, match="do not repeat, so it can't be extrapolated"):
        step_work.step_work(custom, world_size=2)


def test_step_work_scales() -> None:
    assert Amount(1, 2, 3) * 2 == Amount(2, 4, 6)


def trace_functions(schedule: str, *overrides: str) -> list[Any]:
    run = [*SMALL, "strategy=pipeline", "launch.nproc=4", "strategy.pipeline.degree=2", *overrides]
    config = estimate_config([*run, f"strategy.pipeline.schedule={schedule}"])
    traces: list[Any] = step_work._TracePlan.of(config, 4).functions()[:2]
    return traces


def test_schedules_that_do_the_same_work_have_equal_traces() -> None:
    """The traced pipelines are shorter and have no schedule's order of work."""
    assert trace_functions("1f1b") == trace_functions("gpipe")
    assert trace_functions("1f1b") != trace_functions("1f1b", "train.micro_batch_size=1")
    assert trace_functions("1f1b") != trace_functions("zbv_zero_bubble")


def test_equal_traces_of_several_runs_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def count(functions: list[Any], **options: Any) -> list[Any]:
        numbers.append(len(functions))
        return map_forked(functions, **options)

    map_forked = forked_map.map_forked
    monkeypatch.setattr(forked_map, "map_forked", count)
    config = estimate_config([*SMALL, "launch.nproc=1", "model.num_hidden_layers=2"])
    first, second = step_work.step_works([config, config], world_size=1)
    assert (first, numbers) == (second, [1])
