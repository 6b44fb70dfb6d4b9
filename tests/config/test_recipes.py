"""Every recipe of ``configs/experiment`` trains at a tiny size, and the page shows each of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support import corpus
from support.chat_templates import CHATML
from support.command import Served
from support.served import Server

from axonlaunch.config import load

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
    *["train.micro_batch_size=auto", "train.eval_every=0"],
    *["checkpoint.every=0", "checkpoint.keep_best=0"],
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


def sized(kind: str, **sizes: object) -> list[str]:
    """Return overrides for random weights in the published size of a model."""
    written = ", ".join(f"{key}: {value}" for key, value in {"model_type": kind, **sizes}.items())
    return [*FROM_SCRATCH, f"model.config={{{written}}}", "tokenizer=bytes"]


def qwen3(hidden: int, layers: int, heads: int, inner: int, *, tied: bool = False) -> list[str]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": inner, "num_key_value_heads": 8, "head_dim": 128}
    shared = {"vocab_size": 151936, "max_position_embeddings": 40960}
    return sized("qwen3", **sizes, **shared, tie_word_embeddings=str(tied).lower())


def llama(hidden: int, layers: int, heads: int, inner: int, *, tied: bool = False) -> list[str]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": inner, "num_key_value_heads": 8, "rope_theta": 500000.0}
    shared = {"vocab_size": 128256, "max_position_embeddings": 131072}
    return sized("llama", **sizes, **shared, tie_word_embeddings=str(tied).lower())


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN3_MOE = sized(
    "qwen3_moe",
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    head_dim=128,
    **{"num_key_value_heads": 4, "vocab_size": 151936, "intermediate_size": 6144, **EXPERTS},
    max_position_embeddings=40960,
    norm_topk_prob="true",
    router_aux_loss_coef=0.001,
)
ROWS, TEXTS, BINARY = "data.files=chats.jsonl", "data.files=documents.jsonl", "data.path=tokens.bin"
FULL: dict[str, list[str]] = {
    "qwen3_small": [*qwen3(1024, 28, 16, 3072, tied=True), ROWS],
    "llama_small": [*llama(2048, 16, 32, 8192, tied=True), ROWS],
    "qwen3_lora": [*qwen3(4096, 36, 32, 12288), ROWS],
    "llama_lora": [*llama(4096, 32, 32, 14336), ROWS],
    "qwen3_full": [*qwen3(4096, 36, 32, 12288), ROWS],
    "llama_full": [*llama(4096, 32, 32, 14336), ROWS],
    "llama_70b_lora": [*llama(8192, 80, 64, 28672), ROWS],
    "qwen3_moe": [*QWEN3_MOE, ROWS],
    "continued_pretraining": [*qwen3(2048, 28, 16, 6144, tied=True), TEXTS],
    "long_context": [*llama(4096, 32, 32, 14336), TEXTS],
    "gpt2_124m": [BINARY],
    "llama3_8b": [BINARY],
    "llama3_70b": [BINARY],
    "tiny_llama": [],
    "mamba": [
        *sized("mamba", hidden_size=768, intermediate_size=1536, num_hidden_layers=24),
        *("model.config.vocab_size=50280", "model.config.state_size=16", TEXTS),
        "data.sequence_length=32",  # it is traced token by token
    ],
}
"""Overrides by which recipes need no Hub: models of the same sizes."""


def estimates_of_page() -> dict[str, tuple[int, float, int]]:
    """Return the GPUs, the GiB of each and the tokens of a second in the page's table."""
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \| ([\d.]+) GiB \| ([\d,]+) \|", PAGE.read_text(), re.M
    )
    return {
        name: (int(gpus), float(memory), int(tokens.replace(",", "")))
        for name, gpus, memory, tokens in rows
    }


IMAGES = {
    name: (float(memory), float(step), float(steps))
    for name, memory, step, steps in re.findall(
        r"^\| `(\w+)` \| 1 \| ([\d.]+) GiB \| ([\d.]+) ms \| ([\d.]+) s \|", PAGE.read_text(), re.M
    )
}
"""GiB, milliseconds of a step, and seconds of all steps, in the page's table of images."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FULL)
def test_estimate_at_full_size_is_that_of_the_page(recipe: str, command: Served) -> None:
    gpus, memory, tokens = estimates_of_page()[recipe]
    ranks = [f"launch.nproc={min(8, gpus)}", f"launch.nnodes={max(1, gpus // 8)}"]
    overrides = [*FULL[recipe], *ranks, "hardware=h100_80gb", "--tokens", "10M", "--json"]
    process = command.start("estimate", f"experiment={recipe}", *overrides)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    printed = json.loads(output)
    assert printed["fits"] is True
    assert printed["process_bytes"] / 2**30 == pytest.approx(memory, rel=0.01, abs=0.06)
    step = printed["workload"]["global_batch_size"] * printed["workload"]["sequence_length"]
    assert step / printed["training"]["step_s"] == pytest.approx(tokens, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", IMAGES)
def test_planned_time_of_images_is_that_of_the_page(recipe: str, command: Served) -> None:
    memory, step, steps = IMAGES[recipe]
    overrides = ["--devices", "1", "hardware=h100_80gb", "--json"]
    process = command.start("plan", f"experiment={recipe}", *overrides)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    best, *_ = json.loads(output)["candidates"]
    assert best["process_bytes"] / 2**30 == pytest.approx(memory, abs=0.06)
    assert best["step_s"] * 1000 == pytest.approx(step, abs=0.06)
    assert 0.001 * step * load([f"experiment={recipe}"]).train.steps == pytest.approx(
        steps, abs=0.06
    )


def test_the_page_shows_every_recipe() -> None:
    assert set(re.findall(r"experiment=(\w+)", PAGE.read_text())) == set(RECIPES)
    assert set(TINY) == set(RECIPES)
    assert set(estimates_of_page()) == set(FULL)
    assert set(IMAGES) == {"digits_vit", "digits_mlp"}
