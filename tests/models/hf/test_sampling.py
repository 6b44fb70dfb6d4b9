"""Sampling from a folder of transformers equals transformers' ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_families import save

from axonlaunch.config import ConfigError
from axonlaunch.training.text.sampling import continue_prompt
from axonlaunch.training.text.sampling_options import SamplingOptions

TEXT = ["to be or not to be, that is the question", "whether it is nobler in the mind"] * 4
WITH_LOSS = {"router_aux_loss_coef": 0.1}
"""Changes of a mixture that has a loss of its routers, which its forward returns too."""


def saved_with_tokenizer(kind: str, folder: Path) -> Any:
    """Save a model of a family, and a tokenizer that is trained here."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    save(kind, folder, **(WITH_LOSS if kind == "mixtral" else {}))
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)
    return fast


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mixtral"])
def test_greedy_sampling_equals_transformers(kind: str, tmp_path: Path) -> None:
    import transformers

    tokenizer = saved_with_tokenizer(kind, tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = tokenizer("to be ", return_tensors="pt")["input_ids"]
    expected = prompt
    with torch.no_grad():
        for _ in range(12):
            following = model(expected).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat((expected, following), 1)
    written = continue_prompt(tmp_path, "to be ", SamplingOptions(tokens=12, temperature=0))
    assert written == tokenizer.decode(expected[0, prompt.shape[1] :], skip_special_tokens=True)


def test_a_tokenizer_that_can_not_be_read_is_refused(tmp_path: Path) -> None:
    saved_with_tokenizer("qwen3", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.path=.*: can't be read: "):
        continue_prompt(tmp_path, "to be ", SamplingOptions(tokens=2, temperature=0))
