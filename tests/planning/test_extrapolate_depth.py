"""Extrapolating two shallow models gives a deep model's memory to the byte."""

from __future__ import annotations

import pytest
from support.configured import estimate_config
from torch import nn

from axonlaunch.models.modules.repeated_blocks import num_leading
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import ModelSpec
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.tracing.extrapolation import extrapolate_depth
from axonlaunch.planning.tracing.extrapolation.reduced_run import ReducedRun
from axonlaunch.planning.tracing.storage_trace import TraceEvent

pytestmark = pytest.mark.processes

DEEP = [
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "data=synthetic_tokens",
    "data.sequence_length=32",
    "train.global_batch_size=16",
    "hardware=cpu",  # skips the estimate of the allocator's cache, which needs another trace
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "strategy=fsdp launch.nproc=4 model.num_hidden_layers=8 "
        "train.activation_checkpointing=full train.precision=bf16",
        "strategy=tensor model=llama_debug strategy.tensor.sequence_parallel=true "
        "model.num_hidden_layers=8 train.activation_checkpointing=selective",
        "strategy=ddp launch.nproc=4 model.num_hidden_layers=12 train.micro_batch_size=2",
        "strategy=zero1 launch.nproc=4 model.num_hidden_layers=13",
        "strategy=fsdp launch.nproc=8 model.num_hidden_layers=14 train.precision=bf16",
        "strategy=fsdp launch.nproc=8 model.num_hidden_layers=14 strategy.fsdp.cpu_offload=full",
        "strategy=pipeline model.num_hidden_layers=21",
        "strategy=pipeline strategy.pipeline.schedule=interleaved_1f1b model.num_hidden_layers=37",
        "strategy=hybrid launch.nproc=8 model.num_hidden_layers=18",
        "strategy=fsdp strategy.expert.degree=2 launch.nproc=4 model=moe_debug "
        "model.num_hidden_layers=9 model.first_k_dense_replace=2",
        "strategy=zero1 launch.nproc=4 model=moe_debug model.num_hidden_layers=8 "
        "model.first_k_dense_replace=1 model.intermediate_size=512",
    ],
)
def test_depth_extrapolation_equals_full_trace(overrides: str) -> None:
    chosen = estimate_config([*DEEP, "launch.nproc=2", *overrides.split()])
    assert min(ReducedRun.of(chosen).counts) > extrapolate_depth.SHALLOW + 1
    assert estimate(chosen) == estimate(chosen, exact=True)


def test_blocks_that_differ_in_shape_or_in_a_setting_do_not_repeat() -> None:
    def repeats(*more: nn.Module) -> bool:
        alike = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(3)]
        spec = ModelSpec(build=lambda _: module, loss=cross_entropy_sum, layers="held")
        module = nn.ModuleDict({"held": nn.ModuleList([*alike, *more])})
        return spec.repeats(module)

    assert repeats()
    assert not repeats(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)))
    assert not repeats(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1)))


@pytest.mark.parametrize(
    ("widths", "leading"),
    [([4, 4, 4], 0), ([4], 0), ([5, 4, 4], 1), ([4, 5, 4, 4], 2), ([4, 4, 5], None), ([], None)],
)
def test_blocks_before_equal_ones_are_counted(widths: list[int], leading: int | None) -> None:
    blocks = nn.ModuleList([nn.Linear(4, width) for width in widths])
    assert num_leading(nn.ModuleDict({"held": blocks}), "held") == leading


@pytest.mark.parametrize(
    ("excluded", "leading"), [("[o_proj]", 0), ("[layers.0.*,layers.1.*]", None), ("[]", 0)]
)
def test_blocks_with_other_products_in_8_bits_are_not_equal(
    excluded: str, leading: int | None
) -> None:
    chosen = ["train.matmul_dtype=fp8_rowwise", f"train.matmul_exclude={excluded}"]
    config = estimate_config(["model=gpt", *DEEP, *chosen, "model.num_hidden_layers=6"])
    assert ReducedRun.of(config).leading == leading


def events(*, blocks: int) -> list[TraceEvent]:
    """Return events of a model whose blocks each save 10 bytes in forward and free them in
    backward.
    """
    recorded = [TraceEvent(("start",), [(5, 0)])]
    for index in range(blocks):
        position = (0, index, blocks - 1 - index)
        recorded.append(TraceEvent(("forward", *position), [(5 + 10 * (index + 1), 0)]))
    for index in reversed(range(blocks)):
        position = (0, index, blocks - 1 - index)
        recorded.append(TraceEvent(("backward", *position), [(5 + 10 * (index + 1) + 3, 0)]))
    return recorded


def test_depth_extrapolation_finds_growth_at_maximum() -> None:
    deep = extrapolate_depth.extrapolate(events(blocks=6), events(blocks=7), blocks=94)
    assert extrapolate_depth.peak(deep) == ((5 + 10 * 100 + 3, 0), 0)
    assert len(deep) == 1 + 2 * 2 * extrapolate_depth.NEAR


def test_an_event_with_more_moments_in_a_deeper_model_continues_as_its_highest_does() -> None:
    shallow = [TraceEvent(("update",), [(1, 0), (7, 0)])]
    deeper = [TraceEvent(("update",), [(1, 0), (2, 0), (9, 0)])]
    assert extrapolate_depth.peak(extrapolate_depth.extrapolate(shallow, deeper, blocks=10)) == (
        (27, 0),
        0,
    )
