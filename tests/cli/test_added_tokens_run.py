"""Runs with added tokens: they resume on other layouts, and exports have the tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import yaml
from support import corpus, hf_families
from support.command import Served
from support.served import Server

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    # peft 0.21 calls it, but it is deprecated in transformers 5.23.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

DATA = ["data=chat", "data.files=[chats.jsonl]", "data.sequence_length=64", "train.eval_batches=0"]
DATA += ["data.chat_template=chatml", "tokenizer.add_tokens=['<|im_start|>']"]
DATA += ["tokenizer.special={eos:'<|im_end|>',pad:'<pad>'}", "train.global_batch_size=4"]
RUN = ["model=hf", "model.path=base", *DATA, "launch.backend=mock", "launch.nproc=2"]
RUN += ["checkpoint.every=2"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Served:
    """Return the command in a folder with a base model without a chat template, and chats."""
    command = Served(tmp_path_factory.mktemp("runs"), server)
    base = command.folder / "base"
    hf_families.save("llama", base, vocab_size=512, tie_word_embeddings=True)
    corpus.save_tokenizer(base)
    rows = [{"prompt": f"What is {n} + 1?", "completion": f"{n + 1}."} for n in range(40)]
    corpus.write_jsonl(command.folder / "chats.jsonl", rows)
    return command


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    messages = [{"role": "user", "content": "What is 3 + 1?"}]
    tokens = tokenizer.apply_chat_template(messages, return_dict=False, return_tensors="pt")
    outputs: torch.Tensor = model.eval()(input_ids=tokens).logits
    return outputs


def test_a_run_with_added_tokens_resumes_on_another_layout_and_its_export_answers(
    command: Served,
) -> None:
    command("train", *RUN, "strategy=fsdp", "train.steps=2", "name=full")
    more = command("train", *RUN, "strategy=tensor", "train.steps=4", "name=full").stdout
    assert "tokenizer: tokens added: 3, so that it has 515" in more
    assert "steps 2 to 4" in more
    command("checkpoint", "export", "runs/full", "exported")
    exported = command.folder / "exported"
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert len(tokenizer) == len(model.get_input_embeddings().weight) == 515
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<pad>")
    assert model.config.eos_token_id == end
    assert end in [*torch.tensor(model.generation_config.eos_token_id).flatten().tolist()]
    assert torch.isfinite(logits(model, tokenizer)).all()
    overrides = ["--chat", "--prompt", "What is 3 + 1?", "--tokens", "4", "--json"]
    [_, answer] = json.loads(command("sample", "exported", *overrides).stdout)["messages"]
    assert answer["role"] == "assistant"


def test_an_adapter_trains_the_rows_of_added_tokens_and_peft_loads_both(command: Served) -> None:
    import peft

    lora = ["adapter=lora", "adapter.rank=4", "name=lora", "optimizer.lr=0.01"]
    command("train", *RUN, *lora, "strategy=fsdp", "train.steps=2")
    command("train", *RUN, *lora, "strategy=single", "launch.nproc=1", "train.steps=4")
    frozen = yaml.safe_load((command.folder / "runs/lora/config.yaml").read_text())
    assert frozen["train"]["unfreeze"] == ["model.embed_tokens.weight"]
    to_load = command("checkpoint", "export", "runs/lora", "peft").stdout.partition("to load: ")[2]
    command("checkpoint", "export", "runs/lora", "merged", "--merge")
    settings = json.loads((command.folder / "peft" / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["model.embed_tokens"]
    assert settings["ensure_weight_tying"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(command.folder / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(command.folder / "merged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(command.folder)  # the path of the base model is in the adapter
        loaded = eval(to_load, {"peft": peft, "transformers": transformers})
    assert len(loaded.get_input_embeddings().weight) == 515
    assert torch.allclose(logits(loaded, tokenizer), logits(merged, tokenizer), atol=1e-5)
