"""Converted recipes of other tools train, with tiny models and rows in the format of their data.

The experiments in ``published`` were written by ``axonlaunch convert`` from files of axolotl,
LLaMA-Factory, torchtune and the alignment handbook, the others by hand. A local server stands for
the Hub.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import corpus
from support.chat_templates import CHATML
from support.hf_families import save
from support.hub_server import ServedAtHub, hub_server
from support.served import Server

pytest.importorskip("transformers")
pytest.importorskip("huggingface_hub")
pyarrow = pytest.importorskip("pyarrow")

FOLDER = Path(__file__).parent / "published"
SPECIAL = ["<|end_of_text|>", "<s>", "</s>"]
ALPACA = [
    {"instruction": f"Add one to {n}.", "input": "", "output": f"It is {n + 1}."}
    for n in range(300)
]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} + 1?"},
            {"role": "assistant", "content": f"{n + 1}."},
        ]
    }
    for n in range(1500)
]
TEXTS = [{"text": "to be or not to be " * 30, "chapter": "the rest is silence " * 30}] * 60
SQUAD = [
    {
        "context": f"{n} is followed by {n + 1}.",
        "question": f"What follows {n}?",
        "answers": {"text": [str(n + 1)], "answer_start": [3]},
    }
    for n in range(300)
]
ROWS = {
    "tatsu-lab/alpaca": ALPACA,
    "mhenrichsen/alpaca_2k_test": ALPACA,
    "yahma/alpaca-cleaned": ALPACA,
    "teknium/GPT4-LLM-Cleaned": ALPACA,
    "fozziethebeat/alpaca_messages_2k_test": CHATS[:400],
    "stas/openwebtext-10k": TEXTS * 5,
    "HuggingFaceH4/ultrachat_200k": CHATS,
    "HuggingFaceTB/smoltalk": CHATS,
    "HuggingFaceH4/deita-10k-v0-sft": CHATS,
    "princeton-nlp/TextbookChapters": TEXTS,
    "togethercomputer/Long-Data-Collections": TEXTS,
    "rajpurkar/squad": SQUAD,
    "allenai/c4": TEXTS * 5,
    "allenai/olmo-mix-1124": TEXTS * 5,
    "EleutherAI/the_pile_deduplicated": TEXTS * 5,
}
"""Rows that stand for those of data sets on the Hub."""
SPLITS = {
    "HuggingFaceH4/deita-10k-v0-sft": ["train_sft", "test_sft"],
    "HuggingFaceH4/ultrachat_200k": ["train_sft", "test_sft"],
    "HuggingFaceTB/smoltalk": ["train", "test"],
    "rajpurkar/squad": ["train", "validation"],
}
RECIPES = {
    "automodel_falcon3_7b_squad_lora": ("llama", 2),
    "automodel_phi_4_squad_tp2": ("phi3", 2),
    "axolotl_cogito_3b_lora": ("llama", 1),
    "axolotl_llama3_1b_lora": ("llama", 1),
    "axolotl_llama3_8b_instruct_lora": ("llama", 1),
    "axolotl_llama3_8b_long_context": ("llama", 8),
    "axolotl_mixtral_8x22b_qlora": ("mixtral", 1),
    "axolotl_olmo3_7b_qlora": ("olmo2", 1),
    "axolotl_phi_3_5_lora": ("phi3", 1),
    "axolotl_qwen3_30b_expert_parallel": ("qwen3_moe", 4),
    "axolotl_starcoder2_qlora": ("mistral", 1),
    "axolotl_tinyllama_pretraining": ("llama", 1),
    "gptneox_pythia_160m": ("gpt_neox", 2),
    "handbook_smollm2_sft": ("llama", 1),
    "handbook_zephyr_7b_gemma": ("gemma2", 1),
    "handbook_zephyr_7b_qlora": ("mistral", 1),
    "llamafactory_llama3_8b_loraplus": ("llama", 1),
    "llamafactory_qwen2_dft": ("qwen3", 1),
    "llamafactory_qwen3_4b_full": ("qwen3", 1),
    "llamafactory_qwen3_4b_lora": ("qwen3", 1),
    "llamafactory_qwen3_4b_pretraining_lora": ("qwen3", 1),
    "llamafactory_v1_qwen3_4b_lora": ("qwen3", 2),
    "nanogpt_gpt2_xl_shakespeare": ("gpt2", 1),
    "nanotron_tiny_llama": ("llama", 8),
    "olmocore_olmo2_1b": ("olmo2", 2),
    "torchtitan_qwen3_moe_param_groups": ("qwen3_moe", 2),
    "torchtune_gemma_2b_full": ("gemma2", 1),
    "torchtune_llama3_2_3b_qat_lora": ("llama", 1),
    "torchtune_llama3_8b_lora": ("llama", 1),
    "torchtune_phi3_mini_lora": ("phi3", 1),
    "torchtune_qwen3_4b_qat": ("qwen3", 1),
}
"""Family of each recipe's model, and the number of ranks."""
FIVE_STEPS = [
    *["train.epochs=null", "train.steps=5", "train.micro_batch_size=auto", "train.prove=never"],
    *["data.sequence_length=128", "data.min_tokens=1", "train.matmul_group_size=32"],
    *["train.eval_every=0", "scheduler.warmup_steps=auto", "checkpoint.every=0"],
    *["train.log_every=1", "loggers=[]", "launch.backend=mock", "train.compile=false"],
    *["checkpoint.keep_best=0", "checkpoint.async_save=false", "tokenizer.path=null"],
]


@pytest.fixture
def command(tmp_path: Path, server: Server) -> Iterator[ServedAtHub]:
    with hub_server() as hub:
        for name, rows in ROWS.items():
            hub.dataset(name, data_files(name, rows))
        corpus.write_jsonl(tmp_path / "identity.json", ALPACA)
        corpus.write_jsonl(tmp_path / "alpaca_en_demo.json", ALPACA)
        corpus.write_jsonl(tmp_path / "c4_demo.jsonl", TEXTS)
        for name in ("train", "validation"):
            (tmp_path / f"{name}.txt").write_text(f"{name}: to be, or not to be.\n" * 3000)
        yield ServedAtHub(tmp_path, server, hub)


def data_files(name: str, rows: list[dict[str, Any]]) -> dict[str, str | bytes]:
    """Return the files of a data set, as the one on the Hub names them."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if name == "togethercomputer/Long-Data-Collections":
        return {"pretrain/rp_sub.jsonl.zst": pyarrow.compress(text.encode(), "zstd", asbytes=True)}
    splits = SPLITS.get(name, ["train"])
    if name == "allenai/c4":
        subset = "---\nconfigs: [{config_name: en, data_files: en/train-*}]\n---\n"
        files = {f"en/{split}-00000.jsonl": text for split in ("train", "validation")}
        return {**files, "README.md": subset}
    files: dict[str, str | bytes] = {
        f"data/all/{split}-00000-of-00001.jsonl": text for split in splits
    }
    parts = [{"split": split, "path": f"data/all/{split}-*"} for split in splits]
    subsets = yaml.safe_dump({"configs": [{"config_name": "all", "data_files": parts}]})
    return files if name not in SPLITS else {**files, "README.md": f"---\n{subsets}---\n"}


def save_model(kind: str, folder: Path) -> None:
    """Save a tiny model of a family with a tokenizer of 512 tokens and special ones."""
    from transformers import AutoTokenizer

    corpus.save_tokenizer(folder, chat_template=CHATML)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.save_pretrained(folder)
    save(kind, folder, vocab_size=len(tokenizer))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_converted_recipe_trains_five_steps(recipe: str, command: ServedAtHub) -> None:
    kind, ranks = RECIPES[recipe]
    save_model(kind, command.folder / "model")
    experiments = command.folder / "mine" / "experiment"
    experiments.mkdir(parents=True)
    shutil.copy(FOLDER / f"{recipe}.yaml", experiments)
    command(
        *("train", "--config-dir", "mine", f"experiment={recipe}", "run_dir=runs/run"),
        *("model.path=model", "model.revision=null", *FIVE_STEPS),
        *(f"train.global_batch_size={max(4, ranks)}", f"launch.nproc={ranks}"),
    )
    assert command.summary("run")["steps"] == 5


def test_every_published_recipe_is_trained() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*RECIPES}
