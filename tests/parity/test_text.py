"""Training on rows of text equals a plain loop of transformers and torch, one document at a
time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import chat_templates, corpus, hf_families, hf_loops
from support.configured import run_config

from axonlaunch.data.datasets.dataset import IGNORE_INDEX
from axonlaunch.models.build import build_model

pytest.importorskip("transformers")

TWO = "launch.nproc=2"
LAYOUTS = {
    "single": ["strategy=single"],
    "fsdp": ["strategy=fsdp", TWO],
    "tensor": ["strategy=tensor", "strategy.tensor.degree=2", TWO],
    "pipeline": ["strategy=pipeline", "strategy.pipeline.degree=2", TWO],
}
HYBRID = {"hybrid": ["strategy=hybrid", *LAYOUTS["tensor"][1:2], *LAYOUTS["pipeline"][1:2]]}
HYBRID["hybrid"].append("launch.nproc=4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model's folder with its tokenizer and a file of 200 real rows."""
    folder = tmp_path_factory.mktemp("model")
    hf_families.save("qwen3", folder, vocab_size=512)
    corpus.save_tokenizer(folder, chat_template=chat_templates.CHATML)
    rows = [dict(row) for row in corpus.functions()]
    corpus.write_jsonl(folder / "rows.jsonl", rows)
    corpus.write_jsonl(folder / "chats.jsonl", [{"messages": chat(row)} for row in rows])
    return folder


def chat(row: dict[str, str]) -> list[dict[str, str]]:
    """Return a question about a function, and its documentation as the answer."""
    return [
        {"role": "user", "content": f"What does {row['name']} do?"},
        {"role": "assistant", "content": row["doc"][:50].strip()},
    ]


def data(model: Path, packing: str) -> list[str]:
    overrides = [
        "data=documents",
        f"data.files=[{model}/rows.jsonl]",
        f"data.cache_dir={model}/cache",
    ]
    return [*overrides, f"data.packing={packing}", "data.sequence_length=64"]


@cache
def plain_losses(model: Path, packing: str) -> list[float]:
    """Return the losses of transformers' model and torch's AdamW, with each document separately."""

    def summed(net: Any, batch: Any) -> Iterator[tuple[torch.Tensor, int]]:
        for tokens, targets in documents(batch, texts(model)):
            logits = net(input_ids=tokens[None]).logits[0]
            loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
            yield loss, int((targets != IGNORE_INDEX).sum())

    return plainly_trained(model, data(model, packing), summed)


def plainly_trained(
    model: Path,
    overrides: list[str],
    summed: Callable[[Any, Any], Iterator[tuple[torch.Tensor, int]]],
    *,
    adapted: Callable[[Any, Any], Any] = lambda net, _: net,
) -> list[float]:
    """Return the losses of steps over batches, with each part computed separately.

    Args:
        model: Folder of a model of transformers.
        overrides: Overrides of the data.
        summed: Function from a model and a batch to the summed loss of each part and its number of
            counted targets.
        adapted: Function from a model and the configuration to the model to train.
    """
    import transformers

    chosen = run_config([*hf_loops.SETTINGS, f"model.path={model}", "strategy=single", *overrides])
    net: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net = adapted(net, chosen)
    optimizer = hf_loops.adamw(net.train())
    losses = []
    for batch in hf_loops.batches(chosen):
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for loss, counted in summed(net, batch):
            total, count = total + loss, count + counted
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    return losses


@cache
def texts(model: Path) -> list[list[int]]:
    """Return the tokens of each text and of its end, computed only with transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [row["text"] for row in corpus.functions()]
    return [[*tokens, tokenizer.eos_token_id] for tokens in tokenizer(rows)["input_ids"]]


def documents(batch: Any, examples: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the texts, or parts of them, in a batch, each with the token after every one.

    The batch's targets are ignored, except for the end of a part that is cut.
    """
    samples = []
    for row, inputs in enumerate(batch.inputs.tolist()):
        starts = [0]
        if batch.positions is not None:
            starts = torch.nonzero(batch.positions[row] == 0).flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(inputs)], strict=True):
            part = inputs[start:end]
            while part and part[-1] == 0:  # rows are padded with it
                part.pop()
            if part:
                target = int(batch.targets[row, start + len(part) - 1])
                assert any(target in following(text, part) for text in examples)
                samples.append((torch.tensor(part), torch.tensor([*part[1:], target])))
    return samples


def following(text: list[int], part: list[int]) -> set[int]:
    """Return the tokens that follow a part of a text in it; an empty set if it is not a part."""
    ends = range(len(part), len(text))
    return {text[end] for end in ends if text[end - len(part) : end] == part}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("layout", "packing"),
    [
        *itertools.product([*LAYOUTS], ["concat", "best_fit", "none"]),
        ("hybrid", "concat"),
    ],
)
def test_losses_of_documents_are_those_of_transformers(
    layout: str, packing: str, model: Path
) -> None:
    losses = hf_loops.by_axonlaunch(model, {**LAYOUTS, **HYBRID}[layout], *data(model, packing))
    assert losses == pytest.approx(plain_losses(model, packing), rel=2e-5)


def chats(model: Path, packing: str) -> list[str]:
    overrides = ["data=chat", f"data.files=[{model}/chats.jsonl]", f"data.cache_dir={model}/cache"]
    return [
        *overrides,
        f"data.packing={packing}",
        "data.sequence_length=128",
        "data.too_long=error",
    ]


@cache
def answers(model: Path) -> dict[tuple[int, ...], list[int]]:
    """Return the position of the answer in each chat's tokens, computed only with transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    labels = {}
    for row in corpus.functions():
        messages = chat(dict(row))
        full = tokenizer.apply_chat_template(messages, return_dict=False)
        question = tokenizer.apply_chat_template(
            messages[:1], return_dict=False, add_generation_prompt=True
        )
        assert full[: len(question)] == question
        answer = full[len(question) :]
        # The line break after the end of a turn does not count.
        last = len(answer)
        while not tokenizer.decode(answer[last - 1]).strip():
            last -= 1
        counted = [*answer[:last], *[IGNORE_INDEX] * (len(answer) - last)]
        labels[tuple(full)] = [IGNORE_INDEX] * len(question) + counted
    return labels


@cache
def plain_chat_losses(model: Path, packing: str, *adapter: str) -> list[float]:
    """Return the losses of transformers' model with its labels, with each chat separately."""

    def summed(net: Any, batch: Any) -> Iterator[tuple[torch.Tensor, int]]:
        for tokens, labels in known_chats(batch, answers(model)):
            counted = int((labels[1:] != IGNORE_INDEX).sum())
            yield net(input_ids=tokens[None], labels=labels[None]).loss * counted, counted

    if not adapter:
        return plainly_trained(model, chats(model, packing), summed)
    return plainly_trained(model, [*chats(model, packing), *adapter], summed, adapted=by_peft)


def by_peft(net: Any, chosen: Any) -> Any:
    """Return a model with peft's adapters, which have a run's initial matrices."""
    import peft

    start = {
        f"base_model.model.{name}": parameter
        for name, parameter in build_model(chosen, seed=chosen.seed).named_parameters()
        if ".lora_" in name
    }
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
    adapted = peft.get_peft_model(net, settings)
    assert not peft.set_peft_model_state_dict(adapted, start).unexpected_keys
    return adapted.train()


def known_chats(
    batch: Any, examples: dict[tuple[int, ...], list[int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the chats, with their labels, whose tokens are in a batch, by where they begin."""
    samples = []
    for row, inputs in enumerate(batch.inputs.tolist()):
        starts = [0]
        if batch.positions is not None:
            starts = torch.nonzero(batch.positions[row] == 0).flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(inputs)], strict=True):
            tokens = tuple(inputs[start:end])
            if any(tokens):  # rows are padded with 0
                [full] = [
                    w
                    for w in examples
                    if tokens[: len(w) - 1] == w[:-1] and not any(tokens[len(w) - 1 :])
                ]
                samples.append((torch.tensor(full), torch.tensor(examples[full])))
    return samples


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("layout", "packing"),
    [
        *itertools.product([*LAYOUTS], ["best_fit", "none"]),
        ("hybrid", "best_fit"),
    ],
)
def test_losses_of_chats_are_those_of_transformers_with_labels_of_its_own(
    layout: str, packing: str, model: Path
) -> None:
    losses = hf_loops.by_axonlaunch(model, {**LAYOUTS, **HYBRID}[layout], *chats(model, packing))
    assert losses == pytest.approx(plain_chat_losses(model, packing), rel=2e-5)


# peft 0.21 calls it, but it is deprecated in transformers 5.23.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "layout",
    [
        "tensor",
        *(layout for layout in ("single", "fsdp", "pipeline", "hybrid")),
    ],
)
def test_losses_of_an_adapter_on_packed_chats_are_those_of_peft(layout: str, model: Path) -> None:
    adapter = ["adapter=lora", "adapter.rank=4", "adapter.alpha=6"]
    overrides = [*chats(model, "best_fit"), *adapter]
    losses = hf_loops.by_axonlaunch(model, {**LAYOUTS, **HYBRID}[layout], *overrides)
    assert losses == pytest.approx(plain_chat_losses(model, "best_fit", *adapter), rel=2e-5)
