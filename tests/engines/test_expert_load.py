"""Loads of experts in metrics, and dispatches of plug-ins."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.logged_runs import lines, train
from support.moe_layouts import LAYOUTS, RATE, SETTINGS
from support.rank_engine import rank_engine
from torch import Tensor
from torch.nn import functional

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.comm.errors import RankFailedError
from axonlaunch.config import ConfigError, RunConfig
from axonlaunch.config.options.data_parallel import DISPATCHES
from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.engines.expert.balance import ExpertCounts, ExpertLoad
from axonlaunch.engines.expert.dispatch import AllToAll
from axonlaunch.engines.expert.registry import register_dispatch
from axonlaunch.launch.output.console import RunConsole
from axonlaunch.models.build import build_model
from axonlaunch.training.measuring.expert_load import RouterWatch
from axonlaunch.verification.comparison.compare import on_mock
from axonlaunch.verification.references.comparison_plan import ComparisonPlan


def plain_loads(overrides: list[str]) -> dict[str, float]:
    """Return the largest count over the mean of each layer, from the model on the whole batch."""
    chosen = run_config([*SETTINGS, *overrides])
    model: Any = build_model(chosen.model, seed=chosen.seed)
    counts: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_hook(
                lambda _, args, __, name=name: counts.update({name: args[1].flatten().bincount()})
            )
    _, loader = World.mock(1).run(lambda world: rank_engine(chosen, world))[0]
    model(loader.batch(0).inputs)
    return {name: float(count.max() / (count.sum() / 8)) for name, count in counts.items()}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["1f1b-2", "full", "single", "tensor-2", "all-4", "context-2"])
def test_load_of_experts_is_that_of_the_global_batch(layout: str) -> None:
    chosen = run_config([*SETTINGS, *LAYOUTS[layout]])
    assert chosen.launch.nproc != "auto"

    def run(world: World) -> dict[str, float]:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))
        return {name: load.relative for name, load in engine.expert_loads().items()}

    expected = plain_loads(LAYOUTS["single"])
    for loads in World.mock(chosen.launch.nproc).run(run):
        assert loads == pytest.approx(expected)


@pytest.mark.slow
def test_share_of_fullest_expert_counts_stages_without_experts() -> None:
    dense = [*SETTINGS, "model.first_k_dense_replace=2", "model.num_hidden_layers=4"]
    shares = []
    for layout in ("single", "1f1b-2"):
        chosen = run_config([*dense, *LAYOUTS[layout]])
        assert chosen.launch.nproc != "auto"

        def run(world: World, chosen: Any = chosen) -> dict[str, Any]:
            engine, loader = rank_engine(chosen, world)
            engine.train_step(loader.batch(0))
            return engine.expert_loads()

        shares.append(World.mock(chosen.launch.nproc).run(run)[0])
    assert shares[0] == shares[1]


def test_steps_without_balance_or_log_sum_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = run_config(
        [*SETTINGS, *LAYOUTS["ddp"], "model.balance=none", "model.balance_rate=1e-3"]
    )
    sums: Counter[str] = Counter()
    original = ExpertCounts._sum

    def count(self: ExpertCounts) -> None:
        sums["calls"] += 1
        original(self)

    monkeypatch.setattr(ExpertCounts, "_sum", count)

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))
        engine.train_step(loader.batch(1))

    World.mock(2).run(run)
    assert not sums


@pytest.mark.slow
def test_biases_of_a_checkpoint_resume_on_other_layout(tmp_path: Path) -> None:
    def settings(layout: str) -> Any:
        return run_config([*SETTINGS, *LAYOUTS[layout]])

    def write(world: World) -> tuple[float, dict[str, Tensor]]:
        engine, loader = rank_engine(settings("fsdp-2"), world)
        for step in range(2):
            engine.train_step(loader.batch(step))
        state = engine.state_dict()
        Saver(tmp_path, world=world, retention=Retention(newest=1)).save(state, step=2, samples=16)
        biases = {n: t.clone() for n, t in state["model"].items() if "correction_bias" in n}
        return float(engine.train_step(loader.batch(2)).loss), biases

    def resume(world: World) -> tuple[float, dict[str, Tensor]]:
        engine, loader = rank_engine(settings("1f1b"), world)
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        engine.load_state_dict(checkpoint.load_checkpoint(newest, engine.state_dict(), world=world))
        state = engine.state_dict()["model"]
        biases = {n: t.clone() for n, t in state.items() if "correction_bias" in n}
        return float(engine.train_step(loader.batch(2)).loss), biases

    (loss, saved), *_ = World.mock(2).run(write)
    (resumed, first), (_, last) = World.mock(2).run(resume)
    assert resumed == pytest.approx(loss, rel=2e-5)
    assert {*first, *last} == {*saved}
    assert any(bias.abs().max() > 0 for bias in saved.values())
    assert all(torch.equal(saved[name], bias) for name, bias in (first | last).items())


def test_padding_does_not_move_biases(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number} " * (1 + number % 9)}) for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    settings = [word for word in SETTINGS if not word.startswith(("data", "model.vocab_size"))]
    padded = [
        *("data=documents", f"data.files=[{tmp_path}/rows.jsonl]", "data.packing=none"),
        *("tokenizer.name=bytes", f"data.cache_dir={tmp_path}/cache", "data.too_long=truncate"),
        *("data.sequence_length=16", "model.vocab_size=264"),
    ]
    expected: dict[str, Tensor] = {}

    def plain(world: World) -> None:
        """Count the choices of the first step's tokens that are not padding."""
        chosen = run_config([*settings, *padded, *LAYOUTS["single"]])
        batch = rank_engine(chosen, world)[1].batch(0)
        assert batch.present is not None
        assert not batch.present.all()
        counted, model = batch.present.flatten(), build_model(chosen.model, seed=chosen.seed)
        for name, router in model.named_modules():
            if hasattr(router, "e_score_correction_bias"):

                def count(_: Any, __: Any, output: Any, name: str = name) -> None:
                    counts = output[2][counted].flatten().bincount(minlength=8).double()
                    moved = RATE * (counts.mean() - counts).sign().float()
                    expected[f"{name}.e_score_correction_bias"] = moved

                router.register_forward_hook(count)
        model(batch.inputs)

    World.mock(1).run(plain)
    for layout in ("single", "1f1b", "fsdp-2"):
        chosen = run_config([*settings, *padded, *LAYOUTS[layout]])

        def run(world: World, chosen: RunConfig = chosen) -> dict[str, Tensor]:
            engine, loader = rank_engine(chosen, world)
            engine.train_step(loader.batch(0))
            buffers = (each for module in engine.modules for each in module.named_buffers())
            return {name: value.clone() for name, value in buffers if name in expected}

        assert chosen.launch.nproc != "auto"
        for biases in World.mock(chosen.launch.nproc).run(run):
            for name, bias in biases.items():
                assert torch.equal(bias, expected[name]), (layout, name)


def test_registered_dispatch_moves_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DISPATCHES, "_entries", dict(DISPATCHES._entries))
    calls: Counter[str] = Counter()

    @register_dispatch("counted")
    class Counted(AllToAll):
        """All-to-all, counted."""

        def send(self, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, object]:
            calls["send"] += 1
            return super().send(hidden, experts)

    chosen = run_config([*SETTINGS, *LAYOUTS["fsdp-2"], "strategy.expert.dispatch=counted"])

    def run(world: World) -> float:
        engine, loader = rank_engine(chosen, world)
        loss = float(engine.train_step(loader.batch(0)).loss)
        engine.expert_loads()  # which would refuse lost rows
        return loss

    losses = World.mock(2).run(run)
    assert DISPATCHES.summaries()["counted"] == "All-to-all, counted."
    assert calls["send"] == 2 * 3  # ranks and layers
    assert len({*losses}) == 1


class DropsResults(AllToAll):
    def combine(self, results: Tensor, weights: Tensor, ticket: object) -> Tensor:
        return super().combine(results, weights, ticket)[:1]


class DropsRows(AllToAll):
    def send(self, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, object]:
        rows, local_experts, ticket = super().send(hidden, experts)
        return rows[1:], local_experts, ticket


class DropsTokens(AllToAll):
    """Experts with a limited capacity: what does not fit has the result 0."""

    def send(self, hidden: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, object]:
        rows, local_experts, ticket = super().send(hidden, experts)
        return rows[:-1], local_experts[:-1], ticket

    def combine(self, results: Tensor, weights: Tensor, ticket: object) -> Tensor:
        return super().combine(functional.pad(results, (0, 0, 0, 1)), weights, ticket)


@pytest.mark.parametrize(
    ("dispatch", "message"),
    [
        (DropsTokens, r"DropsTokens\.send .* lost rows for layers\.1\.mlp\.experts: 2 since the "),
        (
            DropsResults,
            r"DropsResults\.combine .* returned 1 rows for layers\.1\.mlp\.experts, not 32",
        ),
        (DropsRows, r"DropsRows\.send .* returned \d+ rows for layers\.1\.mlp\.experts, not \d+"),
    ],
)
def test_dispatch_that_drops_tokens_is_an_error(
    dispatch: type[AllToAll], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DISPATCHES, "_entries", dict(DISPATCHES._entries))
    register_dispatch("drops")(dispatch)
    chosen = run_config([*SETTINGS, *LAYOUTS["fsdp-2"], "strategy.expert.dispatch=drops"])

    def run(world: World) -> None:
        engine, loader = rank_engine(chosen, world)
        engine.train_step(loader.batch(0))
        engine.expert_loads()

    with pytest.raises(RankFailedError, match=message):
        World.mock(4).run(run)


def test_dispatch_without_an_expert_degree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DISPATCHES, "_entries", dict(DISPATCHES._entries))
    register_dispatch("counted")(AllToAll)
    problem = "needs ranks that share experts, but strategy.expert.degree is 1; use 2 or more there"
    with pytest.raises(ConfigError, match=rf"^strategy\.expert\.dispatch=counted: {problem}$"):
        run_config([*SETTINGS, *LAYOUTS["fsdp"], "strategy.expert.dispatch=counted"])


def test_unknown_dispatch_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        run_config([*SETTINGS, *LAYOUTS["fsdp-2"], "strategy.expert.dispatch=deepep"])
    assert str(refused.value) == "strategy.expert.dispatch=deepep: use all_to_all"


FULL = ExpertLoad(relative=3.9, share=0.98, most=4)


def test_router_that_stays_collapsed_is_noted_once() -> None:
    watch, name = RouterWatch(), "layers.3.mlp.experts"
    noted = [[*watch.notes({name: FULL}, step=step)] for step in range(90, 150, 10)]
    assert [len(notes) for notes in noted] == [0, 0, 0, 0, 1, 0]  # early ones do not count
    assert noted[4][0].startswith(
        "the router of layers.3.mlp has collapsed: one expert computes 98% of the tokens; a higher "
    )


@pytest.mark.parametrize(
    "load", [ExpertLoad(relative=2.0, share=0.5, most=4), ExpertLoad(1.1, 0.95, 1)]
)
def test_router_that_must_or_does_spread_tokens_is_not_noted(load: ExpertLoad) -> None:
    watch = RouterWatch()
    loads = {"layers.3.mlp.experts": load}
    assert not [note for step in range(200, 205) for note in watch.notes(loads, step=step)]


def test_metrics_of_experts_are_named_by_block() -> None:
    loads = {
        f"model.layers.{n}.mlp.experts": ExpertLoad(load, 0.5, 4)
        for n, load in ((1, 1.5), (12, 2.25))
    }
    assert RouterWatch().metrics(loads) == {
        "expert_load": 2.25,
        "expert_loads": {"1": 1.5, "12": 2.25},
    }
    assert RouterWatch().metrics({}) == {}


def test_run_logs_and_shows_the_load_of_each_block(tmp_path: Path) -> None:
    sizes = ["model=moe_debug", "model.num_hidden_layers=2", "model.num_key_value_heads=2"]
    layout = ["strategy=fsdp", "strategy.expert.degree=2", "train.steps=3"]
    events = train(tmp_path / "run", *sizes, *layout, ranks=2)
    logged = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert [[*line["expert_loads"]] for line in logged] == [["0", "1"]] * 3
    for line in logged:
        assert line["expert_load"] == max(line["expert_loads"].values())
        assert 1 <= line["expert_load"] <= 4  # 8 experts, 2 of them for a token
    run = page_data([read_run(tmp_path / "run")])["runs"][0]
    assert run["experts"]["blocks"] == ["0", "1"]
    assert run["experts"]["loads"] == [[*line["expert_loads"].values()] for line in logged]
    assert run["series"]["expert_load"][1] == [line["expert_load"] for line in logged]

    stream = io.StringIO()
    show = RunConsole(stream=stream)
    for event in events:
        show(event)
    assert f"expert load {logged[0]['expert_load']:.2f}" in stream.getvalue()


@pytest.mark.slow
def test_verify_notices_a_bias_that_moves_the_wrong_way(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = run_config([*SETTINGS, *LAYOUTS["fsdp-2"], "model.balance_rate=0.1"])
    assert on_mock(chosen, ComparisonPlan(steps=3)).passed
    move = ExpertCounts.move_biases

    def reverse(self: ExpertCounts, **named: Any) -> None:
        monkeypatch.setattr(self, "_bias_rate", -0.1)
        move(self, **named)

    monkeypatch.setattr(ExpertCounts, "move_biases", reverse)
    assert not on_mock(chosen, ComparisonPlan(steps=3)).passed
