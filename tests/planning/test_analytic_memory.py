"""The planner's formulas of memory compared with traces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from support.analytic_model import MODEL
from support.configured import estimate_config

from axonlaunch.config import RunConfig
from axonlaunch.config.consistency.layout import Layout, num_ranks
from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.engines.pipeline.schedule import Action, PipelineSchedule
from axonlaunch.models.facts.parameter_facts import TrainingShares
from axonlaunch.planning.memory import analytic
from axonlaunch.planning.memory.analytic import on_one_device
from axonlaunch.planning.memory.cuda_process import cublas_workspaces
from axonlaunch.planning.memory.estimate import estimate
from axonlaunch.planning.memory.pipeline_ranks import PipelineRank
from axonlaunch.planning.throughput.step_work import step_work
from axonlaunch.system.processes import forked_map

pytestmark = pytest.mark.processes


@pytest.mark.slow
@pytest.mark.parametrize(("reduce_dtype", "tolerance"), [("fp32", 0.1), ("bf16", 0.05)])
def test_analytic_memory_of_bf16_parameters_is_close_to_trace(
    reduce_dtype: str, tolerance: float
) -> None:
    """torch's DDP, whose buckets hold all gradients, sums only in the parameters' own format.

    The single bucket that is otherwise in flight is not counted.
    """
    overrides = ["train.precision=bf16", "train.param_dtype=bf16", "launch.nproc=2"]
    overrides += ["strategy=ddp", f"strategy.reduce_dtype={reduce_dtype}"]
    chosen = estimate_config([*MODEL, *overrides])
    alone = on_one_device(chosen)
    [work] = forked_map.map_forked([lambda: step_work(alone, world_size=1)])
    [sizes] = forked_map.map_forked([lambda: analytic.activations(alone)])
    layout, shares = Layout.of(chosen, world_size=2), TrainingShares.of(chosen)
    reported = analytic.peak_bytes(
        chosen, layout, PipelineRank(layers=4), work=work, activations=sizes, shares=shares
    )
    assert reported == pytest.approx(estimate(chosen).peak_bytes, rel=tolerance)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "overrides",
    [
        "strategy=pipeline strategy.data_parallel=fsdp strategy.expert.degree=2",
        "strategy=pipeline strategy.data_parallel=fsdp",
        "strategy=tensor model.hidden_size=512 model.moe_intermediate_size=512 "
        "train.activation_checkpointing=selective data.sequence_length=1024 "
        "model.max_position_embeddings=1024 train.micro_batch_size=4",
    ],
)
def test_analytic_memory_of_mixtures_is_close_to_trace(overrides: str) -> None:
    run = ["model=moe_debug", "model.num_hidden_layers=8", *MODEL[4:], "train.precision=bf16"]
    chosen = estimate_config([*run, "launch.nproc=4", *overrides.split()])
    formulas = analytic.Formulas.of(chosen)
    reported = highest_peak(formulas, chosen)
    assert reported == pytest.approx(estimate(chosen).peak_bytes, rel=0.05)


def test_formulas_of_a_streamed_update_follow_the_optimizer_groups() -> None:
    """A group of options makes neighbours of the two largest matrices, at the ends of the model."""
    alike = "optimizer.groups={embed_tokens.weight:{lr:1e-4},lm_head.weight:{lr:1e-4}}"
    vocabulary = ["model.vocab_size=8192", "data.vocab_size=8192"]
    apart, together = (
        analytic._streamed_share(estimate_config([*MODEL, *vocabulary, *groups]))
        for groups in ([], [alike])
    )
    assert together > 1.5 * apart


@pytest.mark.slow
def test_analytic_memory_counts_tied_embedding_on_both_ends_of_a_pipeline() -> None:
    overrides = [*MODEL, "model.vocab_size=32000", "data.vocab_size=32000", "launch.nproc=4"]
    overrides += ["strategy=pipeline", "strategy.pipeline.degree=4", "train.micro_batch_size=1"]

    def first_peak(tied: bool) -> float:
        chosen = estimate_config([*overrides, f"model.tie_word_embeddings={str(tied).lower()}"])
        formulas, layout = analytic.Formulas.of(chosen), Layout.of(chosen, world_size=4)
        return analytic.peak_bytes(
            chosen,
            layout,
            formulas.ranks(layout)[0],
            work=formulas.single_device,
            activations=formulas.activations,
            shares=formulas.shares,
        )

    table, states = 4 * 32000 * 128, 4  # its parameters, gradients and two states
    assert first_peak(tied=True) == pytest.approx(first_peak(tied=False), rel=0.05)
    assert first_peak(tied=True) > states * table


def highest_peak(formulas: analytic.Formulas, chosen: RunConfig) -> float:
    return formulas.tensor_bytes(chosen, Layout.of(chosen, world_size=num_ranks(chosen)))


PIPELINE = [
    *("model=llama3_8b", "model.hidden_size=1024", "model.num_hidden_layers=16"),
    *("model.intermediate_size=3584", "model.num_attention_heads=8", "model.num_key_value_heads=8"),
    *("model.vocab_size=32000", "data.sequence_length=2048", "hardware=h100_80gb"),
    *("train.precision=bf16", "train.micro_batch_size=1", "train.activation_checkpointing=none"),
    *("strategy=pipeline", "strategy.pipeline.degree=4"),
]


@pytest.fixture(scope="module")
def pipeline_formulas() -> analytic.Formulas:
    return analytic.Formulas.of(estimate_config([*PIPELINE, "launch.nproc=4"]))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("kind", "schedule", "per_round"),
    [
        ("fsdp", "1f1b", 4),
        ("fsdp", "1f1b", 8),
        ("fsdp", "1f1b", 16),
        ("fsdp", "interleaved_1f1b", 4),
        ("fsdp", "interleaved_1f1b", 16),
        ("ddp", "1f1b", 4),
        ("ddp", "1f1b", 16),
    ],
)
def test_analytic_memory_of_pipelines_in_rounds_is_close_to_trace(
    kind: str, schedule: str, per_round: int, pipeline_formulas: analytic.Formulas
) -> None:
    chosen = estimate_config(
        [
            *(*PIPELINE, f"strategy.data_parallel={kind}", "launch.nproc=8"),
            *("train.global_batch_size=32", f"strategy.pipeline.schedule={schedule}"),
            f"strategy.pipeline.microbatches={per_round}",
        ]
    )
    traced = estimate(chosen, ends=True).peak_bytes - sum(cublas_workspaces(chosen))
    assert highest_peak(pipeline_formulas, chosen) == pytest.approx(traced, rel=0.07)


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [
        *itertools.product(["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"], [4, 8]),
        *itertools.product(["zbv_zero_bubble", "interleaved_zero_bubble", "dualpipev"], [8, 16]),
    ],
)
def test_pipeline_ranks_hold_as_many_micro_batches_as_their_schedule(
    schedule: str, micro_batches: int
) -> None:
    overrides = ["launch.nproc=4", f"train.global_batch_size={micro_batches}"]
    chosen = estimate_config([*PIPELINE, f"strategy.pipeline.schedule={schedule}", *overrides])
    layout = Layout.of(chosen, world_size=4)
    chunks, layers = layout.stages_per_rank, [1] * layout.num_stages
    if SCHEDULES[schedule].v_shaped:
        layers = [*range(1, layout.num_stages + 1)]
    order = PipelineSchedule.of(layout)
    for rank, actions in enumerate(order.actions):
        held, most, most_beside_gradients, done = 0, 0, 0, set[int]()
        for action in actions:
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) * layers[action.stage]
            done |= {action.stage} if action.kind in ("B", "W") else set()
            most = max(most, held)
            if len(done) == chunks:
                most_beside_gradients = max(most_beside_gradients, held)
        counted = PipelineRank.of(layout, rank, layers=layers, leading=0)
        assert counted.in_flight * counted.layers == pytest.approx(most)
        in_flight, gradients = counted.during_backward[-1]
        assert gradients == 1.0
        assert_holds_gradients_of_inputs(counted, actions, layers)
        # Stages of an interleaved rank get gradients one after another, so this is an upper bound.
        at_most = in_flight * counted.layers
        if chunks == 1:
            assert at_most == most_beside_gradients
        else:
            assert at_most >= most_beside_gradients - 1e-9


def assert_holds_gradients_of_inputs(
    counted: PipelineRank, actions: Sequence[Action | None], layers: Sequence[int]
) -> None:
    """Compare the most memory of a rank whose gradients need a share of that of its activations."""
    split = any(action is not None and action.kind == "I" for action in actions)
    assert bool(counted.awaiting_weights) == split
    for size in (0.3, 0.6, 0.9) if split else ():
        held, awaiting, most = 0, 0, 0.0
        for action in filter(None, actions):
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) * layers[action.stage]
            awaiting += {"I": 1, "W": -1}.get(action.kind, 0) * layers[action.stage]
            most = max(most, held + size * awaiting)
        moments = [(counted.in_flight, 0.0), *counted.awaiting_weights]
        reported = max(held + size * waiting for held, waiting in moments) * counted.layers
        assert reported == pytest.approx(most, rel=0.05)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        *itertools.product(
            [
                f"strategy=tensor strategy.tensor.sequence_parallel={parts}"
                for parts in (True, False)
            ],
            ["none", "selective", "full"],
        ),
        ("strategy=pipeline strategy.pipeline.schedule=zbv_zero_bubble", "none"),
    ],
)
def test_analytic_memory_of_tensor_ranks_and_split_backwards_is_close_to_trace(
    layout: str, mode: str, pipeline_formulas: analytic.Formulas
) -> None:
    sizes = ["strategy.pipeline.degree=1", "strategy.tensor.degree=4"]
    if "zbv" in layout:
        sizes = ["strategy.pipeline.degree=4"]
    overrides = [*PIPELINE, *layout.split(), *sizes, f"train.activation_checkpointing={mode}"]
    chosen = estimate_config([*overrides, "launch.nproc=4", "train.global_batch_size=8"])
    traced = estimate(chosen).peak_bytes - sum(cublas_workspaces(chosen))
    assert highest_peak(pipeline_formulas, chosen) == pytest.approx(traced, rel=0.07)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "strategy.fsdp.cpu_offload=optimizer_states",
        "strategy.fsdp.cpu_offload=params",
        "strategy.data_parallel=fsdp",
        "strategy.data_parallel=zero1",
    ],
)
def test_analytic_memory_of_process_is_close_to_replay(
    layout: str, pipeline_formulas: analytic.Formulas
) -> None:
    """An allocator has gaps beside logits, and the memory of other streams can't fill them."""
    overrides = [*PIPELINE, "strategy.pipeline.degree=1", "strategy.data_parallel=fsdp"]
    overrides += ["train.micro_batch_size=2", "train.activation_checkpointing=full"]
    chosen = estimate_config([*overrides, "launch.nproc=2", *layout.split()])
    reported = pipeline_formulas.process_bytes(chosen)
    assert reported == pytest.approx(estimate(chosen).process_bytes, rel=0.05)


MASTERS = "train.param_dtype=bf16 optimizer.master_weights=fp32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numerics", "layout"),
    [
        (MASTERS, "strategy=zero1 launch.nproc=2"),
        (f"{MASTERS} optimizer.state_dtype=8bit", "strategy=single launch.nproc=1"),
        ("optimizer.state_dtype=8bit", "strategy=fsdp launch.nproc=2"),
        ("train.matmul_dtype=fp8_tensorwise", "strategy=tensor launch.nproc=2"),
        ("adapter=lora adapter.base=nf4", "strategy=single launch.nproc=1"),
        ("adapter=lora adapter.base=nf4", "strategy=tensor launch.nproc=2"),
        ("adapter=lora adapter.base=int8", "strategy=zero1 launch.nproc=2"),
        ("adapter=lora train.param_dtype=bf16", "strategy=zero1 launch.nproc=2"),
    ],
)
def test_analytic_memory_of_low_precision_is_close_to_trace(numerics: str, layout: str) -> None:
    """Parameters need much more memory than activations, as in large models."""
    sizes = ["model.hidden_size=2048", "model.intermediate_size=5632", "model.num_hidden_layers=8"]
    overrides = [*MODEL, *sizes, "train.precision=bf16", *numerics.split(), *layout.split()]
    chosen = estimate_config(overrides)
    formulas = analytic.Formulas.of(chosen)
    reported = analytic.peak_bytes(
        chosen,
        Layout.of(chosen, world_size=num_ranks(chosen)),
        PipelineRank(layers=8),
        work=formulas.single_device,
        activations=formulas.activations,
        shares=formulas.shares,
    )
    assert reported == pytest.approx(estimate(chosen).peak_bytes, rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["train.loss_chunk=256", "train.loss_kernel=liger"])
def test_analytic_memory_without_all_logits_is_close_to_trace(loss: str) -> None:
    """With all logits, the run would need twice the memory."""
    large = ["model.vocab_size=16384", "data.vocab_size=16384", "train.micro_batch_size=16"]
    chosen = estimate_config([*MODEL, *large, "strategy=single", "launch.nproc=1", loss])
    reported = highest_peak(analytic.Formulas.of(chosen), chosen)
    assert reported == pytest.approx(estimate(chosen).peak_bytes, rel=0.08)
