from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.configured import estimate_config

from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.consistency.layout import Layout
from axonlaunch.planning.measured_constants import LAUNCH_S
from axonlaunch.planning.throughput.operations import Amount, CollectiveOp, HostWait, Phase
from axonlaunch.planning.throughput.step_time import StepTime
from axonlaunch.planning.throughput.step_work import Share, StageWork, StepWork, step_work
from axonlaunch.planning.throughput.throughput import (
    Throughput,
    speed_of,
    throughput,
)

pytestmark = pytest.mark.processes

LLAMA = [
    "model=llama3_8b",
    "model.num_hidden_layers=4",
    "data=synthetic_tokens",
    "data.sequence_length=2048",
    "train.precision=bf16",
    "train.micro_batch_size=1",
    "train.global_batch_size=16",
]


def run(*overrides: str, hardware: str = "h100_80gb") -> RunConfig:
    return estimate_config([*LLAMA, f"hardware={hardware}", *overrides])


def reported(config: RunConfig, work: StepWork | None = None) -> Throughput:
    assert config.hardware is not None
    return (
        throughput(config, config.hardware)
        if work is None
        else speed_of(config, config.hardware, work)
    )


@pytest.fixture(scope="module")
def fsdp() -> StepWork:
    return step_work(run("strategy=fsdp", "launch.nproc=8"), world_size=8)


@pytest.mark.slow
def test_step_time_parts_sum_to_step_time(fsdp: StepWork) -> None:
    estimate = reported(run("strategy=fsdp", "launch.nproc=8"), fsdp)
    assert sum(estimate.breakdown.values()) == pytest.approx(estimate.step_s)
    assert min(estimate.breakdown.values()) >= 0
    assert estimate.tokens_per_s_per_device == pytest.approx(16 * 2048 / estimate.step_s / 8)


def test_mfu_counts_model_flops(fsdp: StepWork) -> None:
    config = run("strategy=fsdp", "launch.nproc=8")
    estimate = reported(config, fsdp)
    needed = 6 * (fsdp.parameters - 128_256 * 4096) + 12 * 4 * 4096 * 2048
    assert fsdp.flops_per_token == needed
    assert estimate.mfu == pytest.approx(estimate.tokens_per_s_per_device * needed / 989e12)


def test_a_slower_network_never_makes_a_step_quicker(fsdp: StepWork) -> None:
    fast = reported(run("strategy=fsdp", "launch.nproc=8"), fsdp)
    slow = reported(run("strategy=fsdp", "launch.nproc=8", "hardware.link_gb_s=1"), fsdp)
    assert slow.step_s > fast.step_s
    assert slow.breakdown["communication dp"] > fast.breakdown["communication dp"]
    assert slow.breakdown["matrix products"] == fast.breakdown["matrix products"]


@pytest.mark.slow
def test_ranks_that_share_sequences_do_not_exchange_tokens_of_experts() -> None:
    slow_link = ["launch.nproc=8", "hardware.link_gb_s=1"]
    parts = reported(run("strategy=fsdp", "strategy.context.degree=2", *slow_link)).breakdown
    assert "communication cp" in parts
    assert "communication ep" not in parts


@pytest.mark.parametrize(
    ("layout", "phase", "axis", "name"),
    [
        ("strategy.expert.degree=2", "forward", "ep", "ep"),
        ("strategy.expert.degree=8", "forward", "dp_shard", "ep"),  # the same ranks
        ("strategy.expert.degree=2 strategy.tensor.degree=2", "backward", "tp", "ep"),
        ("strategy.expert.degree=8", "update", "dp_shard", "dp"),  # Muon's
        ("strategy.expert.degree=2 strategy.tensor.degree=2", "update", "tp", "tp"),
        ("strategy.expert.degree=4 strategy.context.degree=2", "backward", "cp", "cp"),
    ],
)
def test_only_tokens_for_experts_count_as_communication_of_experts(
    layout: str, phase: Phase, axis: str, name: str
) -> None:
    mixture = ["model=moe_debug", "data.sequence_length=64", "strategy=fsdp", "launch.nproc=8"]
    config = run(*mixture, *layout.split())
    sent = Share({CollectiveOp(phase, "all_to_all", (axis,)): Amount(1, 1e9)})
    nothing = Share({})
    step, micro = (sent, nothing) if phase == "update" else (nothing, sent)
    stage = StageWork(step_ends=step, step_layer=nothing, micro_ends=micro, micro_layer=nothing)
    parts = reported(config, StepWork(stage, stage, (1,), 1, 2048, 64, 1)).breakdown
    counted = [key for key, seconds in parts.items() if seconds and "communication" in key]
    assert counted == [f"communication {name}"]


def test_gathering_hides_under_computation(fsdp: StepWork) -> None:
    config = run("strategy=fsdp", "launch.nproc=8")
    assert config.hardware is not None
    exchanged = 3 * 2 * fsdp.parameters / 450e9
    assert reported(config, fsdp).breakdown["communication dp"] < exchanged * 2


def test_cpu_communication_is_not_overlapped(fsdp: StepWork) -> None:
    overrides = ["strategy=fsdp", "launch.nproc=8"]
    apart, together = run(*overrides), run(*overrides, "hardware.link=loopback")
    hidden = reported(apart, fsdp).breakdown["communication dp"]
    assert reported(together, fsdp).breakdown["communication dp"] > 2 * hidden


def test_compiling_saves_kernel_time_but_not_products(fsdp: StepWork) -> None:
    plain = reported(run("strategy=fsdp", "launch.nproc=8"), fsdp)
    fused = reported(run("strategy=fsdp", "launch.nproc=8", "train.compile=true"), fsdp)
    assert fused.breakdown["matrix products"] == plain.breakdown["matrix products"]
    assert fused.breakdown["memory-bound"] < plain.breakdown["memory-bound"]


@pytest.mark.slow
def test_products_in_8_bits_take_more_than_half_the_time(fsdp: StepWork) -> None:
    overrides = ["strategy=fsdp", "launch.nproc=8", "train.compile=true"]
    plain = reported(run(*overrides), fsdp)
    rounded = reported(run(*overrides, "train.matmul_dtype=fp8_tensorwise"))
    shares = [each.breakdown["matrix products"] for each in (rounded, plain)]
    assert 0.5 < shares[0] / shares[1] < 0.7  # the head is in bf16
    tokens, hidden, wide = 2048, 4096, 14336
    layers = [*[(hidden, hidden)] * 2, *[(hidden, 1024)] * 2, *[(hidden, wide)] * 3]
    # Each of the three products of a linear layer rounds two of input, weight and gradient;
    # selective recomputation rounds input and weight again. Two kernels move five bytes for each
    # number, at 0.9 of 3,350 GB/s, and start in 2 us. A step has 2 micro-batches of 4 layers.
    numbers = sum(2 * (tokens * (n + k) + n * k) + tokens * n + n * k for n, k in layers)
    seconds = 5 * numbers / (0.9 * 3350e9) + (6 + 2) * len(layers) * 2 * 2e-6
    added = rounded.breakdown["memory-bound"] - plain.breakdown["memory-bound"]
    assert added == pytest.approx(2 * 4 * seconds, rel=0.02)


@pytest.mark.slow
def test_device_with_little_work_waits_for_launches() -> None:
    narrow = ["strategy=tensor", "launch.nproc=8", "data.sequence_length=128"]
    config = run(*narrow)
    micro_batches = Layout.of(config, world_size=8).micro_batches
    work = step_work(config, world_size=8)
    operations = sum(
        amount.count * runs
        for share, runs in ((work.first.micro_ends, 1), (work.first.micro_layer, 4))
        for operation, amount in share.work.items()
        if not isinstance(operation, HostWait)
    )
    estimate = reported(config, work)
    launches = micro_batches * operations * LAUNCH_S
    assert estimate.step_s == pytest.approx(launches + estimate.breakdown["optimizer"], rel=0.05)
    compiled = reported(run(*narrow, "train.compile=true"), work)
    assert compiled.step_s < estimate.step_s - 0.5 * launches
    long = reported(run("strategy=tensor", "launch.nproc=8", "data.sequence_length=8192"))
    assert "launches" not in long.breakdown


@pytest.mark.slow
def test_more_micro_batches_fill_a_pipeline() -> None:
    # A small vocabulary, so that all stages have about the same work.
    pipeline = ["strategy=pipeline", "strategy.pipeline.degree=4", "launch.nproc=4"]
    pipeline.append("model.vocab_size=1024")
    work = step_work(run(*pipeline, "train.global_batch_size=4"), world_size=4)  # any number
    few = reported(run(*pipeline, "train.global_batch_size=4"), work)
    many = reported(run(*pipeline, "train.global_batch_size=32"), work)
    assert many.tokens_per_s_per_device > few.tokens_per_s_per_device
    assert few.breakdown["pipeline bubble"] / few.step_s > 0.3
    assert many.breakdown["pipeline bubble"] / many.step_s < 0.3


@pytest.mark.slow
def test_tensor_parallelism_over_nodes_is_slow() -> None:
    tensor = ["strategy=tensor", "strategy.tensor.degree=8", "launch.nproc=8"]
    config = run(*tensor)
    work = step_work(config, world_size=8)
    inside, over = (
        reported(config, work),
        reported(run(*tensor, "hardware.devices_per_node=2"), work),
    )
    assert over.breakdown["communication tp"] > 2 * inside.breakdown["communication tp"]
    four_nodes = run(*tensor[:-1], "launch.nnodes=4", "launch.nproc=2")
    assert reported(four_nodes, work).breakdown == over.breakdown


def test_hardware_without_figures_is_refused(fsdp: StepWork) -> None:
    config = run("strategy=fsdp", "launch.nproc=8", hardware="cpu")
    with pytest.raises(ConfigError, match=r"hardware\.\w+=null: .*write hardware\."):
        reported(config, fsdp)


def test_custom_hardware_is_predicted(tmp_path: Path, fsdp: StepWork) -> None:
    ours = Path(__file__).parents[2] / "configs" / "hardware" / "h100_80gb.yaml"
    folder = tmp_path / "hardware"
    folder.mkdir()
    text = ours.read_text().replace("name: h100_80gb", "name: twice")
    (folder / "twice.yaml").write_text(text.replace("bf16_tflops: 989", "bf16_tflops: 1978"))
    overrides = [*LLAMA, "strategy=fsdp", "launch.nproc=8", "hardware=twice"]
    config = estimate_config(overrides, config_dirs=[tmp_path])
    plain = reported(run("strategy=fsdp", "launch.nproc=8"), fsdp)
    assert reported(config, fsdp).breakdown["matrix products"] < plain.breakdown["matrix products"]


def test_offload_time_uses_host_link(fsdp: StepWork) -> None:
    overrides = ["strategy=fsdp", "launch.nproc=8", "hardware.host_gb_s=1"]
    shard_s = 4 * fsdp.parameters / 8 / (1e9 * 0.79)

    def host_s(*more: str) -> float:
        return reported(run(*overrides, *more), fsdp).breakdown.get("host memory", 0.0)

    key = "strategy.fsdp.cpu_offload"
    assert host_s() == 0
    assert host_s(f"{key}=optimizer_states") == pytest.approx(1.4 * 2 * shard_s)
    # Two reads for each of two micro-batches, then parameters and gradients for the update.
    assert host_s(f"{key}=params") == pytest.approx(1.4 * (2 * 2 + 2) * shard_s)
    kept = [f"{key}=params", "strategy.fsdp.sharding=shard_grad_op"]
    assert host_s(*kept) == pytest.approx(1.4 * (2 + 2) * shard_s)
    with pytest.raises(
        ConfigError, match="the speed of updates on the host's cores can't be estimated"
    ):
        host_s(f"{key}=full")


def test_offload_reads_a_stage_of_a_pipeline_once_for_all_micro_batches(fsdp: StepWork) -> None:
    piped = [
        "strategy=fsdp",
        "strategy.pipeline.degree=2",
        "launch.nproc=8",
        "hardware.host_gb_s=1",
    ]

    def step_s(*more: str) -> float:
        config = run(*piped, *more)
        assert config.hardware is not None
        layout = Layout.of(config, world_size=8)
        assert layout.micro_batches > 1
        two_stages = dataclasses.replace(fsdp, layers=(2, 2))
        return StepTime(config, layout, config.hardware).approximate(two_stages)

    shard_s = 4 * fsdp.parameters / 8 / (1e9 * 0.79)
    # One read for the gathers, then parameters and gradients for the update.
    copied_s = step_s("strategy.fsdp.cpu_offload=params") - step_s()
    assert copied_s == pytest.approx(1.4 * (1 + 2) * shard_s)


def test_time_of_offloaded_inputs_is_what_exceeds_the_blocks(fsdp: StepWork) -> None:
    overrides = ["strategy=fsdp", "launch.nproc=8", "train.activation_checkpointing=offload"]

    def host_s(gb_s: float) -> float:
        chosen = run(*overrides, f"hardware.host_gb_s={gb_s}")
        return reported(chosen, fsdp).breakdown["host memory"]

    layout = Layout.of(run(*overrides), world_size=8)
    input_bytes = layout.micro_batch_size * fsdp.sample_length * fsdp.hidden_size * 2  # bf16
    copies_s = input_bytes / (1e9 * 0.79)
    # A fast link adds only the copy before the first backward of each of the micro-batches.
    assert host_s(1e6) == pytest.approx(layout.micro_batches * copies_s / 1e6)
    [layers] = fsdp.layers
    slow = 1e-6  # beside which a block takes no time
    both_ways = layout.micro_batches * (2 * layers + 1) * copies_s / slow
    assert host_s(slow) == pytest.approx(both_ways, rel=1e-3)


@pytest.mark.slow
def test_replicas_sum_every_gradient_once() -> None:
    slow = ["strategy=ddp", "launch.nproc=4", "hardware.link_gb_s=0.01", "model.vocab_size=1024"]
    in_fp32, in_bf16 = (run(*slow, f"strategy.reduce_dtype={dtype}") for dtype in ("fp32", "bf16"))
    work = step_work(in_fp32, world_size=4)
    seconds = {"fp32": reported(in_fp32, work), "bf16": reported(in_bf16)}
    parameters = work.parameters
    # torch's DDP, which is counted, and axonlaunch's buckets, which are traced.
    on_the_link = 2 * 3 / 4 * parameters / (0.01e9 * 0.824)
    assert seconds["fp32"].breakdown["communication dp"] == pytest.approx(4 * on_the_link, rel=0.01)
    assert seconds["bf16"].breakdown["communication dp"] == pytest.approx(2 * on_the_link, rel=0.01)


@pytest.mark.slow
def test_zero1_all_gather_overlaps_next_step() -> None:
    """Compared with replicas, only the rows of the ends and of the first block are waited for.

    Both reduce their gradients during the backward, which is long enough with this number of
    samples.
    """
    samples = ("train.micro_batch_size=4", "train.global_batch_size=32", "launch.nproc=8")
    kinds = [run(f"strategy={kind}", *samples) for kind in ("ddp", "zero1")]
    works = [step_work(config, world_size=8) for config in kinds]
    ddp, zero1 = map(reported, kinds, works)
    waited = zero1.breakdown["communication dp"] - ddp.breakdown["communication dp"]
    ends = 2 * 128_256 * 4096
    of_first_block = (works[1].parameters - ends) / 4
    gathered = 7 / 8 * 4 * (ends + of_first_block) / (450e9 * 0.824)
    assert waited == pytest.approx(gathered, rel=0.1)


@pytest.mark.slow
def test_gradients_of_zero1_take_half_the_time_of_replicas_gradients() -> None:
    """If buckets are sent at the end of the backward, the full time is waited for in any step."""
    of_kinds: list[list[float]] = []
    for kind in ("ddp", "zero1"):
        seconds = []
        for sync in ("synchronous", "overlapped"):
            # Enough samples for the backward to hide all communication that it can.
            samples = ("train.micro_batch_size=4", "train.global_batch_size=32", "launch.nproc=8")
            config = run(f"strategy={kind}", *samples, f"strategy.ddp.sync={sync}")
            seconds.append(reported(config).breakdown["communication dp"])
        of_kinds.append(seconds)
    full, rows = (after - during for after, during in of_kinds)
    assert rows == pytest.approx(full / 2, rel=0.1)


@pytest.mark.slow
def test_tensor_parallel_replicas_are_not_summed_twice() -> None:
    both = ["strategy=hybrid", "strategy.data_parallel=ddp", "strategy.pipeline.degree=1"]
    slow = [*both, "strategy.tensor.degree=2", "launch.nproc=4", "hardware.devices_per_node=2"]
    config = run(*slow, "hardware.network_gb_s=0.01", "model.vocab_size=1024")
    work = step_work(config, world_size=4)
    halves = 4 * work.parameters / 2
    seconds = reported(config, work).breakdown["communication dp"]
    assert seconds == pytest.approx(halves / (0.01e9 * 0.9), rel=0.05)
