"""Every recipe of ``configs/experiment`` trains at a tiny size, and the page shows each of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import corpus
import pytest
from chat_templates import CHATML
from command import Served
from served import Server

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "axonlaunch" / "docs" / "recipes.md"
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
SMALL = "vocab_size: 512, hidden_size: 32, num_hidden_layers: 2"
HEADS = "num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 48"
LLAMA = f"model.config={{model_type: llama, {SMALL}, {HEADS}}}"
QWEN = f"model.config={{model_type: qwen3, {SMALL}, {HEADS}, head_dim: 8}}"
MIXTURE = (
    f"model.config={{model_type: qwen3_moe, {SMALL}, {HEADS}, head_dim: 8, "
    "num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16}"
)
MAMBA = f"model.config={{model_type: mamba, {SMALL}, state_size: 4}}"
FROM_SCRATCH = ["model.path=null", "model.init=random"]
"""Replaces weights of the Hub by random ones."""
CHATS = ["data.files=chats.jsonl", "tokenizer.path=tokenizer", "data.sequence_length=64"]
DOCUMENTS = ["data.files=documents.jsonl", "tokenizer.path=tokenizer", "data.sequence_length=64"]
TOKENS = ["data.path=tokens.bin", "data.sequence_length=32"]
INCLUDED = [
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
]
GROWN = ["model.intermediate_size=48", "model.vocab_size=512"]
TINY: dict[str, list[str]] = {
    "continued_pretraining": [*FROM_SCRATCH, QWEN, *DOCUMENTS, "launch.nproc=2"],
    "custom_model": ["model.target=my_models:build", "data.files=README.md"],
    "diffusion": [],
    "digits_mlp": [],
    "digits_vit": [],
    "gpt2_124m": [
        *["model.config.vocab_size=512", "model.config.n_layer=2", "model.config.n_embd=32"],
        *["model.config.n_head=4", "train.compile=false", *TOKENS, "launch.nproc=2"],
    ],
    "llama3_70b": [*INCLUDED, *GROWN, *TOKENS, "launch.nproc=2"],
    "llama3_8b": [*INCLUDED, *GROWN, *TOKENS, "launch.nproc=2"],
    "llama_70b_lora": [*FROM_SCRATCH, LLAMA, *CHATS, "launch.nproc=2"],
    "llama_full": [*FROM_SCRATCH, LLAMA, *CHATS, "launch.nproc=2"],
    "llama_lora": [*FROM_SCRATCH, LLAMA, *CHATS, "launch.nproc=2"],
    "llama_small": [*FROM_SCRATCH, LLAMA, *CHATS, "launch.nproc=2"],
    "long_context": [
        *[*FROM_SCRATCH, LLAMA, *DOCUMENTS, "train.loss_chunk=8"],
        *["strategy.context.degree=2", "launch.nproc=2"],
    ],
    "mamba": [*FROM_SCRATCH, MAMBA, *DOCUMENTS],
    "qwen3_full": [*FROM_SCRATCH, QWEN, *CHATS, "launch.nproc=2"],
    "qwen3_lora": [*FROM_SCRATCH, QWEN, *CHATS],
    "qwen3_moe": [
        *[*FROM_SCRATCH, MIXTURE, *CHATS],
        *["strategy.expert.degree=2", "launch.nproc=2"],
    ],
    "qwen3_small": [*FROM_SCRATCH, QWEN, *CHATS],
    "tiny_llama": INCLUDED,
}
"""Overrides that make each recipe tiny and give it files; other settings stay as they are."""
AT_ONCE = ("custom_model", "llama3_8b")
"""Recipes that train without the slow import of transformers, and so in every test run."""
CASES = [
    pytest.param(recipe, marks=[] if recipe in AT_ONCE else [pytest.mark.slow])
    for recipe in RECIPES
]
TWO_STEPS = [
    *["launch.backend=mock", "train.epochs=null", "train.steps=2", "train.global_batch_size=4"],
    *["train.micro_batch_size=auto", "train.eval_every=0", "checkpoint.every=0"],
    *["scheduler.warmup_steps=auto", "train.prove=never"],
]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Served:
    """Return the command in a folder with the user files of all recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copy(ROOT / "README.md", folder)
    chats = [{"prompt": f"What is {n} + 1?", "completion": f"{n + 1}."} for n in range(200)]
    corpus.write_jsonl(folder / "chats.jsonl", chats)
    corpus.write_jsonl(folder / "documents.jsonl", [{"text": "to be or not to be " * 20}] * 200)
    corpus.save_tokenizer(folder / "tokenizer", chat_template=CHATML)
    (folder / "tokens.bin").write_bytes(bytes(2**17))
    for name, code in page_code().items():
        (folder / name).write_text(code)
    return Served(folder, server)


def page_code() -> dict[str, str]:
    """Return the Python files of the page by name."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return dict(blocks)


@pytest.mark.parametrize("recipe", CASES)
def test_recipe_trains_two_steps_at_a_tiny_size(recipe: str, command: Served) -> None:
    command("train", f"experiment={recipe}", *TINY[recipe], *TWO_STEPS, f"name={recipe}")
    assert command.summary(recipe)["steps"] == 2


def test_the_page_shows_every_recipe() -> None:
    assert set(re.findall(r"experiment=(\w+)", PAGE.read_text())) == set(RECIPES)
    assert set(TINY) == set(RECIPES)
