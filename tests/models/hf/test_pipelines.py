"""Stages that run transformers' forward learn the same as a plain loop of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.configured import run_config
from support.hf_families import FAMILIES, SPECIAL, save, without_folder
from support.hf_loops import SETTINGS, by_axonlaunch, by_transformers
from torch import nn

from axonlaunch.config.consistency.schedule_rules import SCHEDULES
from axonlaunch.engines.pipeline.placeholders import keep_blocks
from axonlaunch.engines.pipeline.split import stage_counts
from axonlaunch.models.build import on_meta, spec_for
from axonlaunch.models.hf.analysis import structure
from axonlaunch.preflight.inspection import inspect

BLOCKS = 4
PIPELINE = ["strategy=pipeline", "strategy.pipeline.degree=2", "launch.nproc=2"]
EIGHT = ["train.global_batch_size=8", "train.micro_batch_size=2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_learns_in_two_stages_as_in_a_plain_loop(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path, num_hidden_layers=BLOCKS)
    expected = by_transformers(tmp_path)
    assert by_axonlaunch(tmp_path, PIPELINE) == pytest.approx(expected, rel=2e-5)
    assert max(expected) - min(expected) > 1e-2  # the weights have moved


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_learns_as_a_plain_loop(schedule: str, tmp_path: Path) -> None:
    save("gemma2", tmp_path, num_hidden_layers=BLOCKS)  # windows, softcaps, a tied and scaled table
    overrides = ["train.global_batch_size=8", "train.micro_batch_size=1"]
    losses = by_axonlaunch(
        tmp_path, [*PIPELINE, f"strategy.pipeline.schedule={schedule}"], *overrides
    )
    assert losses == pytest.approx(by_transformers(tmp_path, *overrides), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opt", "qwen3_moe"])
def test_split_backward_accepts_all_block_outputs(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path, num_hidden_layers=BLOCKS)  # OPT's block returns a view
    layout = [*PIPELINE, "strategy.pipeline.schedule=zbv_zero_bubble"]
    losses = by_axonlaunch(tmp_path, layout, *EIGHT)
    assert losses == pytest.approx(by_transformers(tmp_path, *EIGHT), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
def test_sharded_stages_learn_as_a_plain_loop(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path, num_hidden_layers=BLOCKS)
    layout = ["strategy=hybrid", "launch.nproc=4"]
    layout += ["strategy.pipeline.degree=2", "strategy.tensor.degree=1"]
    losses = by_axonlaunch(tmp_path, layout)
    assert losses == pytest.approx(by_transformers(tmp_path), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECIAL)
def test_pipeline_splits_blocks_of_several_kinds(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    assert by_axonlaunch(tmp_path, PIPELINE) == pytest.approx(by_transformers(tmp_path), rel=2e-5)


def test_inspect_shows_ends_and_that_a_pipeline_is_legal() -> None:
    inspected = inspect(run_config(without_folder("gpt2")))
    assert inspected.first == ["transformer.wte", "transformer.wpe"]
    assert inspected.last == ["transformer.ln_f", "lm_head"]
    answers = {answer.layout: answer.legal for answer in inspected.layouts}
    assert answers["strategy.pipeline.degree=2"]


def test_stages_hold_each_parameter_once_and_a_tied_one_at_both_ends() -> None:
    config = run_config(without_folder("gemma2", num_hidden_layers=BLOCKS)).model
    spec, full = spec_for(config), on_meta(config, seed=0)
    assert spec.flow is not None
    names = [
        [n for n, _ in _cut(config, first, last).named_parameters()]
        for first, last in ((0, 1), (1, 3), (3, BLOCKS))
    ]
    assert sorted({n for of_stage in names for n in of_stage} - {"lm_head.weight"}) == sorted(
        n for n, _ in full.named_parameters()
    )
    assert "model.embed_tokens.weight" in names[0]
    assert "lm_head.weight" in names[2]
    assert sum(map(len, names)) == len(list(full.named_parameters())) + 1


@pytest.mark.slow
def test_a_model_that_scales_its_embedding_in_place_learns_in_stages(tmp_path: Path) -> None:
    import transformers

    sizes = {"n_embd": 32, "n_head": 4, "dff": 32, "n_positions": 64, "n_layer": 2}
    config = transformers.CTRLConfig(vocab_size=256, resid_pdrop=0.0, embd_pdrop=0.0, **sizes)
    transformers.CTRLLMHeadModel(config).save_pretrained(tmp_path)
    expected = by_transformers(tmp_path)
    assert by_axonlaunch(tmp_path, PIPELINE) == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
def test_pipeline_split_works_in_fresh_process() -> None:
    # As in a rank: the launcher inspected the model in another process.
    config = run_config(without_folder("qwen3", num_hidden_layers=6)).model
    structure._derive.cache_clear()
    spec = spec_for(config)
    sample = torch.zeros((1, 8), dtype=torch.int64, device="meta")
    model = on_meta(config, seed=0)
    assert sum(stage_counts(spec, model, num_stages=2, sample=sample)) == 6


def test_placeholder_block_has_attributes_of_block() -> None:
    config = run_config(without_folder("gemma2", num_hidden_layers=BLOCKS)).model
    stage = _cut(config, 2, BLOCKS)
    first = stage.get_submodule("model.layers.0")
    assert [first.self_attn.layer_idx, first.self_attn.sliding_window] == [0, 16]
    assert not list(first.parameters())
    assert [*spec_for(config).blocks(stage)] == ["model.layers.2", "model.layers.3"]


def _cut(config: object, first: int, last: int) -> nn.Module:
    spec, full = spec_for(config), on_meta(config, seed=0)
    assert spec.flow is not None
    blocks = [*spec.blocks(full)]
    return keep_blocks(full, spec.flow(), blocks=blocks, first=first, last=last)


def test_a_stage_reads_only_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.rank_engine import rank_engine

    from axonlaunch.comm import World

    save("llama", tmp_path, num_hidden_layers=BLOCKS)
    chosen = run_config([*SETTINGS, f"model.path={tmp_path}", *PIPELINE])

    def run(world: World) -> list[str]:
        engine, _ = rank_engine(chosen, world)
        return list(engine.state_dict()["model"])

    first, last = World.mock(2).run(run)
    assert not {*first} & {*last}
    assert "model.embed_tokens.weight" in first
    assert "lm_head.weight" in last


@pytest.mark.slow
def test_evaluation_runs_through_pipeline_stages(tmp_path: Path) -> None:

    from support.rank_engine import rank_engine

    from axonlaunch.comm import World

    save("phi3", tmp_path, num_hidden_layers=BLOCKS)
    overrides = [*SETTINGS, f"model.path={tmp_path}"]

    def predict(layout: list[str]) -> list[torch.Tensor]:
        chosen = run_config([*overrides, *layout])
        tokens = torch.arange(2 * 32).view(2, 32)

        def run(world: World) -> torch.Tensor:
            from axonlaunch.checkpoint.exchange.weights import load_initial_weights

            engine, _ = rank_engine(chosen, world)
            load_initial_weights(engine, chosen.model, world=world)
            return engine.predict(tokens)

        assert isinstance(chosen.launch.nproc, int)
        return World.mock(chosen.launch.nproc).run(run)

    (expected,) = predict(["strategy=single"])
    for logits in predict(PIPELINE):
        torch.testing.assert_close(logits, expected)
