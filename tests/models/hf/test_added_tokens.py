"""Tokens that are added to a tokenizer get rows in the embedding and the head, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import corpus, hf_families
from support.configured import estimate_config, run_config
from support.gathered import gathered, held
from support.hf_loops import SETTINGS
from support.rank_engine import rank_engine
from torch import Tensor

from axonlaunch.checkpoint.exchange.weights import load_initial_weights
from axonlaunch.comm import World
from axonlaunch.config import ConfigError
from axonlaunch.models.build import on_meta

TOKENS = ["tokenizer.add_tokens=['<|a|>','<|b|>']", "tokenizer.special={pad:'<pad>'}"]
TEXT = ["data=documents", "data.sequence_length=32", "data.packing=concat", "train.eval_batches=0"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return the folder of a model with 512 tokens, its tokenizer and a file of rows."""
    hf_families.save("llama", tmp_path, vocab_size=512)
    corpus.save_tokenizer(tmp_path)
    corpus.write_jsonl(tmp_path / "rows.jsonl", [dict(row) for row in corpus.functions(40)])
    return tmp_path


def overrides_of(base: Path, *more: str) -> list[str]:
    files = [f"data.files=[{base}/rows.jsonl]", f"data.cache_dir={base}/cache"]
    tokens = [] if any("tokenizer." in override for override in more) else TOKENS
    return [*SETTINGS, f"model.path={base}", *TEXT, *files, *tokens, *more]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind", "changes"),
    [
        ("tensor", "llama", {}),
        pytest.param("fsdp", "llama", {"tie_word_embeddings": True}, marks=pytest.mark.slow),
        pytest.param("pipeline", "gpt2", {}, marks=pytest.mark.slow),
        pytest.param("ddp", "opt", {}, marks=pytest.mark.slow),
        pytest.param("tensor", "gemma2", {}, marks=pytest.mark.slow),
    ],
)
def test_new_rows_are_the_mean_of_the_others_and_the_others_are_unchanged(
    strategy: str, kind: str, changes: dict[str, Any], base: Path
) -> None:
    for file in base.glob("*.safetensors"):
        file.unlink()
    saved = hf_families.save(kind, base, vocab_size=512, **changes)
    chosen = run_config(overrides_of(base, f"strategy={strategy}", "launch.nproc=2"))
    assert chosen.model.config == {"vocab_size": 515}

    def run(world: World) -> Any:
        engine, _ = rank_engine(chosen, world)
        load_initial_weights(engine, chosen, world=world)
        return held(engine.named_parameters())

    grown: dict[str, Tensor] = gathered(World.mock(2).run(run))
    for name, expected in saved.named_parameters():
        new = grown[name]
        if new.shape != expected.shape:
            assert (len(new), len(expected)) == (515, 512)
            mean = expected.double().mean(0).float()
            assert torch.equal(new[512:], mean.expand_as(new[512:]))
        assert torch.equal(new[: len(expected)], expected)
    assert len(grown[next(iter(grown))]) == 515


def test_a_vocabulary_with_room_for_new_tokens_is_not_grown(base: Path) -> None:
    hf_families.save("llama", base, vocab_size=520)
    assert run_config(overrides_of(base, "strategy=single")).model.config == {}
    tokens = "tokenizer.add_tokens=['<|user|>']"
    hf_families.save("llama", base, vocab_size=512)
    chosen = run_config(overrides_of(base, "strategy=single", tokens, "adapter=lora"))
    assert (chosen.model.config, chosen.train.unfreeze) == ({}, [])


def test_an_adapter_trains_the_rows_of_a_vocabulary_that_the_configuration_grows(
    base: Path,
) -> None:
    hf_families.save("llama", base, vocab_size=500)
    overrides = overrides_of(base, "strategy=single", "tokenizer.add_tokens=[]", "adapter=lora")
    chosen = run_config([*overrides, "model.config={vocab_size: 512}"])
    assert chosen.train.unfreeze == ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.slow
def test_a_larger_tokenizer_of_the_user_names_the_setting_that_grows_the_model(base: Path) -> None:
    hf_families.save("llama", base, vocab_size=500)
    overrides = overrides_of(base, "strategy=single", "tokenizer.add_tokens=[]")
    with pytest.raises(ConfigError) as raised:
        run_config(overrides)
    message = str(raised.value)
    assert "have 500, but the data has 512 tokens; use model.config={vocab_size: 512}" in message
    chosen = run_config([*overrides, "model.config={vocab_size: 512}"])
    assert len(next(on_meta(chosen, seed=0).parameters())) == 512


def test_an_estimate_has_the_rows_of_added_tokens_without_data(base: Path) -> None:
    (base / "rows.jsonl").unlink()
    chosen = estimate_config(overrides_of(base, "strategy=single", "adapter=lora"))
    parameters = dict(on_meta(chosen, seed=0).named_parameters())
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    assert [parameters[name].shape[0] for name in names] == [515, 515]
    assert all(parameters[name].requires_grad for name in names)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["tokenizer.add_tokens=[a]", "model=gpt"],
            "tokenizer.add_tokens=[a]: bytes have a fixed vocabulary; use tokenizer.path=FOLDER",
        ),
        (
            ["tokenizer.path={base}", "model=gpt", "tokenizer.add_tokens=['<|a|>']"],
            "model.vocab_size=256: the tokenizer has 513 tokens; use 513 or more",
        ),
        (["tokenizer.path=nowhere"], "tokenizer.path=nowhere: there is no such folder"),
    ],
)
def test_tokens_that_can_not_be_added_are_an_error_before_the_start(
    overrides: list[str], message: str, base: Path
) -> None:
    model = ["model=hf", f"model.path={base}"] if "model=gpt" not in overrides else []
    files = [f"data.files=[{base}/rows.jsonl]", f"data.cache_dir={base}/cache"]
    more = [each.format(base=base) for each in overrides]
    with pytest.raises(ConfigError) as raised:
        run_config([*model, *TEXT, *files, *more, "launch.nproc=1", "train.steps=1"])
    assert str(raised.value.problems[0]).startswith(message)
