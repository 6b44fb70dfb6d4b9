"""The arithmetic of layouts, and values that the node decides."""

import pytest

from axonlaunch import config
from axonlaunch.config.consistency import rules
from axonlaunch.config.consistency.layout import Layout, model_ranks, resolved

TENSOR, PIPELINE = "strategy.tensor.degree=2", "strategy.pipeline.degree=2"
CONTEXT = "strategy.context.degree=2"


@pytest.mark.parametrize(
    ("overrides", "accelerators", "nproc", "kind"),
    [
        ([], 0, 2, "ddp"),
        ([], 1, 1, "none"),
        ([], 4, 4, "ddp"),
        (["strategy=single"], 4, 1, "none"),
        (["strategy=fsdp"], 0, 2, "fsdp"),
        (["strategy=fsdp"], 8, 8, "fsdp"),
        (["launch.nproc=1"], 8, 1, "none"),
        (["launch.nproc=4", "strategy=zero1"], 0, 4, "zero1"),
        (["strategy=tensor"], 0, 2, "none"),
        (["strategy=pipeline"], 8, 8, "ddp"),
        (["strategy=tensor", "strategy.pipeline.degree=4"], 0, 8, "none"),
        (["strategy=hybrid"], 0, 8, "fsdp"),
        (["strategy=single", "strategy.tensor.degree=2"], 8, 2, "none"),
        (["strategy.context.degree=2"], 0, 2, "ddp"),
        (["strategy=tensor", "strategy.context.degree=2"], 0, 4, "ddp"),
        (["strategy=pipeline", "strategy.context.degree=2", "launch.nproc=4"], 0, 4, "ddp"),
    ],
)
def test_auto_settings_are_resolved_on_node(
    overrides: list[str], accelerators: int, nproc: int, kind: str
) -> None:
    chosen = resolved(config.load(overrides), accelerators=accelerators)
    assert (chosen.launch.nproc, chosen.strategy.data_parallel) == (nproc, kind)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "degrees", [[], [TENSOR], [PIPELINE], [CONTEXT], [TENSOR, CONTEXT], [PIPELINE, CONTEXT]]
)
def test_a_layout_has_the_kind_that_is_written_to_the_run(degrees: list[str], ranks: int) -> None:
    chosen = config.load(degrees)
    if ranks % model_ranks(chosen.strategy) == 0:
        written = resolved(config.with_values(chosen, {"launch.nproc": ranks}), accelerators=0)
        kind = written.strategy.data_parallel
        assert kind == Layout.of(chosen, world_size=ranks).data_parallel
        assert kind == Layout.of(written, world_size=ranks).data_parallel


@pytest.mark.parametrize(
    ("overrides", "world", "replicate", "shard", "micro", "micro_batches"),
    [
        (["strategy=ddp"], 4, 4, 1, 8, 1),
        (["strategy=fsdp"], 4, 1, 4, 8, 1),
        (["strategy=hsdp", "strategy.fsdp.replicate=2"], 4, 2, 2, 8, 1),
        (["strategy=hsdp"], 4, 1, 4, 8, 1),
        # Parameters are sharded over all nodes unless hybrid sharding is configured.
        (["strategy=fsdp", "launch.nnodes=2"], 4, 1, 4, 8, 1),
        (["strategy=zero2", "launch.nnodes=2"], 4, 1, 4, 8, 1),
        (["strategy=hsdp", "launch.nnodes=2"], 4, 2, 2, 8, 1),
        (["strategy=hsdp", "launch.nnodes=2", "strategy.pipeline.degree=2"], 8, 1, 4, 2, 4),
        (["strategy=fsdp", "strategy.fsdp.sharding=no_shard"], 4, 4, 1, 8, 1),
        (["strategy=fsdp", "train.micro_batch_size=2"], 4, 1, 4, 2, 4),
        (["strategy=single"], 1, 1, 1, 32, 1),
    ],
)
def test_shares_of_the_batch_follow_from_the_layout(
    overrides: list[str], world: int, replicate: int, shard: int, micro: int, micro_batches: int
) -> None:
    layout = Layout.of(config.load(["train.global_batch_size=32", *overrides]), world_size=world)
    assert (layout.dp_replicate, layout.dp_shard) == (replicate, shard)
    assert (layout.micro_batch_size, layout.micro_batches) == (micro, micro_batches)
    assert layout.data_ranks * micro * micro_batches == 32


@pytest.mark.parametrize(
    ("overrides", "world", "axes", "micro", "micro_batches"),
    [
        (["strategy=hybrid"], 8, {"pp": 2, "dp_shard": 2, "tp": 2}, 4, 4),
        (["strategy=tensor"], 8, {"dp_replicate": 4, "tp": 2}, 8, 1),
        (["strategy=pipeline"], 2, {"pp": 2}, 8, 4),
        (["strategy=pipeline", "strategy.pipeline.degree=4"], 4, {"pp": 4}, 4, 8),
        (
            ["strategy=pipeline", "strategy.pipeline.schedule=dualpipev"],
            2,
            {"pp": 2},
            4,
            8,
        ),
        (["strategy=pipeline", "train.micro_batch_size=1"], 2, {"pp": 2}, 1, 32),
        (["strategy=hsdp", "strategy.fsdp.replicate=2", "strategy.tensor.degree=2"], 8,
         {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 8, 1),
        (["strategy=zero1", "strategy.pipeline.degree=2"], 8, {"pp": 2, "dp_replicate": 4}, 2, 4),
    ],
)  # fmt: skip
def test_remaining_ranks_are_data_parallel(
    overrides: list[str], world: int, axes: dict[str, int], micro: int, micro_batches: int
) -> None:
    layout = Layout.of(config.load(["train.global_batch_size=32", *overrides]), world_size=world)
    assert {axis: size for axis, size in layout.axes.items() if size > 1} == axes
    assert (layout.micro_batch_size, layout.micro_batches) == (micro, micro_batches)
    assert layout.rounds * layout.microbatches_per_round == micro_batches


def test_a_layout_is_reported_in_a_few_words() -> None:
    layout = Layout.of(config.load(["strategy=hybrid"]), world_size=16)
    assert str(layout) == "fsdp 4 x tensor 2 x pipeline 2 (1f1b)"
    assert str(Layout.of(config.load(["strategy=tensor"]), world_size=2)) == "tensor 2"
    assert str(Layout.of(config.load([CONTEXT]), world_size=2)) == "context 2"
    assert str(Layout.of(config.load([CONTEXT]), world_size=4)) == "ddp 2 x context 2"
    sharded = config.load([CONTEXT, "strategy=fsdp"])
    assert str(Layout.of(sharded, world_size=2)) == "fsdp x context 2"
    assert str(Layout.of(config.load(["strategy=fsdp"]), world_size=1)) == "fsdp"
    assert str(Layout.of(config.load(["strategy=ddp"]), world_size=1)) == "single"


def test_a_pipeline_runs_in_rounds() -> None:
    chosen = ["strategy=pipeline", "train.micro_batch_size=1", "strategy.pipeline.microbatches=4"]
    layout = Layout.of(config.load(["train.global_batch_size=32", *chosen]), world_size=2)
    assert (layout.micro_batches, layout.microbatches_per_round, layout.rounds) == (32, 4, 8)


@pytest.mark.parametrize("nnodes", ["1:10000000", "9000000:99999999"])
def test_a_range_of_nodes_without_end_is_refused_by_its_first_sizes(
    nnodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    check = rules.broken_world_rules

    def counted(run: config.RunConfig, *, world_size: int) -> list[config.ConfigIssue]:
        assert len(sizes) < 100
        sizes.append(world_size)
        return check(run, world_size=world_size)

    monkeypatch.setattr(rules, "broken_world_rules", counted)
    with pytest.raises(config.ConfigError) as raised:
        config.load([f"launch.nnodes={nnodes}", "launch.nproc=2"])
    assert 1 <= len(raised.value.problems) < 20


def test_a_number_of_nodes_that_no_integer_holds_is_refused() -> None:
    with pytest.raises(config.ConfigError, match="expected a number of nodes"):
        config.load([f"launch.nnodes=1:{'9' * 5000}"])
