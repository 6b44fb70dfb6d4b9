"""A vocabulary that ranks can't divide evenly is trained, saved and loaded without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configured import run_config
from support.hf_families import without_folder
from support.parity import assert_trains_as_one_process
from support.rank_engine import rank_engine

from axonlaunch import checkpoint
from axonlaunch.checkpoint import Retention
from axonlaunch.checkpoint.exchange import weights
from axonlaunch.checkpoint.saving.saver import Saver
from axonlaunch.comm import World
from axonlaunch.models.tensors.dtensor_regions import full_tensor

VOCABULARY = 73
"""Two tensor ranks have 37 and 36 rows, which three data ranks can't divide evenly either."""
_DATA = [f"data.vocab_size={VOCABULARY}", "data.sequence_length=12"]
MODELS: dict[str, list[str]] = {
    "gpt, tied": [
        *("model=gpt", "model.hidden_size=32", "model.num_attention_heads=4"),
        *(f"model.vocab_size={VOCABULARY}", "data=synthetic_tokens", *_DATA),
    ],
    "llama, untied": [
        *("model=llama_debug", "model.hidden_size=32", "model.num_attention_heads=4"),
        *("model.num_key_value_heads=4", "model.intermediate_size=48"),
        *(f"model.vocab_size={VOCABULARY}", "data=synthetic_tokens", *_DATA),
    ],
    "gpt2 of transformers, tied": [*without_folder("gpt2", vocab_size=VOCABULARY), *_DATA],
    "qwen3 of transformers, untied": [*without_folder("qwen3", vocab_size=VOCABULARY), *_DATA],
}
DEGREE = "strategy.tensor.degree=2"
SINGLE = (1, ["strategy=single"])
LAYOUTS = {
    "tensor 2": (2, ["strategy=tensor"]),
    "fsdp 3 x tensor 2": (6, ["strategy=fsdp", DEGREE, "train.global_batch_size=6"]),
    "zero1 3 x tensor 2": (6, ["strategy=zero1", DEGREE, "train.global_batch_size=6"]),
    "pipeline 2 x tensor 2": (
        4,
        ["strategy=pipeline", "strategy.pipeline.degree=2", DEGREE, "train.micro_batch_size=2"],
    ),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_uneven_vocabulary_trains_as_one_process_does(model: str, layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    assert_trains_as_one_process([*MODELS[model], *overrides], ranks)


def engines(model: str, layout: str, work: Any) -> Any:
    ranks, overrides = SINGLE if layout == "single" else LAYOUTS[layout]
    chosen = run_config([*MODELS[model], f"launch.nproc={ranks}", *overrides])
    return chosen, World.mock(ranks).run(lambda world: work(*rank_engine(chosen, world), world))[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_checkpoint_has_no_vocabulary_padding_and_loads_in_other_layouts(tmp_path: Path) -> None:
    import transformers

    model = "gpt2 of transformers, tied"

    def save(engine: Any, loader: Any, world: World) -> dict[str, torch.Tensor]:
        engine.train_step(loader.batch(0))
        state = engine.state_dict()
        Saver(tmp_path / "run", world=world, retention=Retention(newest=1)).save(
            state, step=1, samples=10
        )
        return {name: full_tensor(tensor).clone() for name, tensor in state["model"].items()}

    chosen, saved = engines(model, "fsdp 3 x tensor 2", save)
    assert saved["transformer.wte.weight"].shape[0] == VOCABULARY
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None

    def load(engine: Any, loader: Any, world: World) -> dict[str, torch.Tensor]:
        engine.load_state_dict(checkpoint.load_checkpoint(newest, engine.state_dict(), world=world))
        return {name: full_tensor(t).clone() for name, t in engine.state_dict()["model"].items()}

    for layout in ("tensor 2", "fsdp 3 x tensor 2"):
        loaded = engines(model, layout, load)[1]
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    weights.export_weights(newest, chosen, tmp_path / "out")
    reloaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in reloaded.named_parameters():
        assert torch.equal(parameter, saved[name]), name


def test_predictions_cover_full_vocabulary() -> None:
    def predict(engine: Any, loader: Any, world: World) -> torch.Tensor:
        outputs: torch.Tensor = engine.predict(loader.batch(0).inputs)
        return outputs

    expected = engines("llama, untied", "single", predict)[1]
    assert expected.shape[-1] == VOCABULARY
    torch.testing.assert_close(engines("llama, untied", "tensor 2", predict)[1], expected)
