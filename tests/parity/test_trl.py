"""Fine-tuning counts the same tokens and has the same losses as trl's SFTTrainer and peft.

Each step uses all rows, so the order of rows has no effect. The rows that trl gets are written by
hand in its own forms, so that no code of this project decides what it counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support import chat_templates, corpus, hf_families, hf_loops
from support.configured import run_config

from axonlaunch import data
from axonlaunch.data.datasets.dataset import IGNORE_INDEX
from axonlaunch.models.build import build_model

pytest.importorskip("trl")
pytestmark = [
    # peft 0.21 calls it, but it is deprecated in transformers 5.23.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning"),
]

TWO = "launch.nproc=2"
LAYOUTS = {
    "single": ["strategy=single"],
    "fsdp": ["strategy=fsdp", TWO],
    "tensor": ["strategy=tensor", "strategy.tensor.degree=2", TWO],
    "pipeline": ["strategy=pipeline", "strategy.pipeline.degree=2", TWO],
}
ENDED = chat_templates.MARKED.replace(
    "'<|im_end|>\n' }}{% endgeneration %}", "'<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
)
"""ChatML with marks up to the end of a turn."""
TOKENS = ["<|im_start|>", "<|im_end|>"]
ROWS = 8
LENGTH = 160


def chat(number: int) -> list[dict[str, Any]]:
    """Return two questions about functions of Python's library, with answers."""
    rows = corpus.functions()[2 * number : 2 * number + 2]
    return [
        message
        for row in rows
        for message in (
            {"role": "user", "content": f"What does {row['name']} do?"},
            {"role": "assistant", "content": row["doc"][: 12 + 2 * number].strip()},
        )
    ]


CHATS = [chat(number) for number in range(ROWS)]


def flagged(messages: list[dict[str, Any]], **flag: Any) -> list[dict[str, Any]]:
    return [messages[0], {**messages[1], **flag}, *messages[2:]]


def alpaca(messages: list[dict[str, Any]]) -> str:
    below = "Below is an instruction that describes a task. Write a response that appropriately"
    prompt = f"### Instruction:\n{messages[0]['content']}"
    return f"{below} completes the request.\n\n{prompt}\n\n### Response:\n"


@dataclass(frozen=True)
class Case:
    """The same rows in a form of this project and in one of trl's.

    Attributes:
        rows: Rows of a file.
        overrides: Overrides of the data.
        theirs: Rows of a data set of trl.
        settings: Settings of ``SFTConfig``.
        template: Chat template of the tokenizer; None: it has none.
        their_template: Chat template that trl uses instead.
        adds: Whether two tokens are added, of which one ends a text.
        adapts: Whether an adapter of peft is trained.
        ties: Whether the head is the embedding.
        kind: Family of the model.
        changes: Changes of its configuration.
    """

    rows: list[dict[str, Any]]
    theirs: list[dict[str, Any]]
    overrides: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=lambda: {"assistant_only_loss": True})
    template: str | None = ENDED
    their_template: str | None = None
    adds: bool = False
    adapts: bool = False
    ties: bool = False
    kind: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict)


MESSAGES = [{"messages": messages} for messages in CHATS]
LORA = ["adapter=lora", "adapter.rank=4", "adapter.alpha=6"]
ADDED = [f"tokenizer.add_tokens=['{TOKENS[0]}']", f"tokenizer.special={{eos:'{TOKENS[1]}'}}"]
CASES = {
    "marks": Case(MESSAGES, MESSAGES),
    "no marks": Case(MESSAGES, MESSAGES, template=chat_templates.CHATML, their_template=ENDED),
    "named template": Case(
        MESSAGES, MESSAGES, ["data.chat_template=chatml"], template=None, their_template=ENDED
    ),
    "truncated": Case(MESSAGES, MESSAGES, ["data.sequence_length=64"]),
    "packed": Case(MESSAGES, MESSAGES, ["data.packing=best_fit", "data.sequence_length=256"]),
    "fields": Case(
        [{"q": messages[0]["content"], "a": messages[1]["content"]} for messages in CHATS],
        [{"prompt": messages[:1], "completion": messages[1:2]} for messages in CHATS],
        ["data.fields={prompt:q,completion:a}"],
    ),
    "prompt as messages": Case(
        [{"prompt": messages[:3], "completion": messages[3:]} for messages in CHATS],
        [{"prompt": messages[:3], "completion": messages[3:]} for messages in CHATS],
    ),
    "flags": Case(
        [{"messages": flagged(messages, weight=0)} for messages in CHATS],
        [{"prompt": messages[:3], "completion": messages[3:]} for messages in CHATS],
        template=chat_templates.CHATML,
        their_template=ENDED,
    ),
    "prompt format": Case(
        [{"q": messages[0]["content"], "a": messages[1]["content"]} for messages in CHATS],
        [{"prompt": alpaca(each), "completion": each[1]["content"]} for each in CHATS],
        ["data.prompt_format=alpaca", "data.fields={instruction:q,completion:a}"],
        settings={},
        template=None,
    ),
    "added tokens": Case(MESSAGES, MESSAGES, ADDED, adds=True),
    "added tokens, tied": Case(MESSAGES, MESSAGES, ADDED, adds=True, ties=True),
    "label smoothing": Case(
        MESSAGES,
        MESSAGES,
        ["train.label_smoothing=0.1"],
        {"assistant_only_loss": True, "label_smoothing_factor": 0.1},
    ),
    "dft": Case(
        MESSAGES,
        MESSAGES,
        ["train.dft=true"],
        {"assistant_only_loss": True, "loss_type": "dft"},
    ),
    "routers": Case(MESSAGES, MESSAGES, kind="mixtral", changes={"router_aux_loss_coef": 5.0}),
    "adapter": Case(MESSAGES, MESSAGES, LORA, adapts=True),
    "adapter, added tokens": Case(MESSAGES, MESSAGES, [*LORA, *ADDED], adds=True, adapts=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a case: a small Llama, its tokenizer and a file of rows."""

    @functools.cache
    def make(name: str) -> Path:
        case, path = CASES[name], tmp_path_factory.mktemp("case")
        sizes: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 256}
        sizes |= {"tie_word_embeddings": case.ties, **case.changes}
        hf_families.save(case.kind, path, **sizes)
        corpus.save_tokenizer(path, chat_template=case.template)
        corpus.write_jsonl(path / "rows.jsonl", case.rows)
        return path

    return make


def overrides_of(name: str, path: Path) -> list[str]:
    return [
        *("data=chat", f"data.files=[{path}/rows.jsonl]", f"data.cache_dir={path}/cache"),
        *("data.held_out=0", "train.eval_batches=0", "data.packing=none"),
        *(f"data.sequence_length={LENGTH}", *CASES[name].overrides),
    ]


def full_batch(name: str, path: Path) -> list[str]:
    """Return overrides that put all rows into each step."""
    single = ["strategy=single", "train.global_batch_size=1"]
    model = [*hf_loops.SETTINGS, f"model.path={path}"]
    chosen = run_config([*model, *overrides_of(name, path), *single])
    dataset = data.build_dataset(chosen.data, chosen.tokenizer)
    return [*overrides_of(name, path), f"train.global_batch_size={dataset.num_samples}"]


@functools.cache
def by_trl(name: str, path: Path, *, masks_lasts: bool = True) -> tuple[list[float], int, Any]:
    """Return the loss of each step of SFTTrainer, how many tokens count in a step, and a batch.

    Args:
        name: Name of the case.
        path: Folder of the case.
        masks_lasts: Whether routers do not read the last token of each row, as here.
    """
    import datasets
    import transformers
    import trl

    case = CASES[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = case.their_template or case.template
    tokenizer.pad_token = tokenizer.eos_token
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if case.adds:
        tokenizer.add_tokens(TOKENS[:1])
        tokenizer.add_special_tokens({"eos_token": TOKENS[1]})
        with torch.no_grad():
            means = [end.weight.mean(0) for end in (model.get_input_embeddings(), model.lm_head)]
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
            for end, mean in zip((model.get_input_embeddings(), model.lm_head), means, strict=True):
                end.weight[512:] = mean
    if case.adapts:
        model = by_peft(model, name, path)
    losses: list[float] = []
    batches: list[dict[str, Any]] = []

    class Recording(trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            kept = {"input_ids", "attention_mask"} & {*inputs}  # packed rows have no mask
            batches.append({name: inputs[name].clone() for name in kept})
            result = super().compute_loss(model, inputs, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            losses.append(loss.detach().item())
            return result

    lengths = [each for each in overrides_of(name, path) if each.startswith("data.sequence_length")]
    settings: dict[str, Any] = {
        "max_length": int(lengths[-1].partition("=")[2]),
        "per_device_train_batch_size": 2 * ROWS,
        "max_steps": hf_loops.STEPS,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "bf16": False,
        "use_cpu": True,
        "activation_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "packing": "data.packing=best_fit" in case.overrides,
        **case.settings,
    }
    trainer: Any = Recording(
        model=model,
        args=trl.SFTConfig(output_dir=str(path / "trl"), **settings),
        train_dataset=datasets.Dataset.from_list(case.theirs),
        processing_class=tokenizer,
    )
    counted = sum(sum(n != -100 for n in row["labels"][1:]) for row in trainer.train_dataset)
    if case.kind == "mixtral" and masks_lasts:
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: without_last_tokens(collate(rows))
    trainer.train()
    return losses, counted, batches[0]


def without_last_tokens(batch: dict[str, Any]) -> dict[str, Any]:
    """Mask the last token of each row, which routers of a model read in trl but not here."""
    mask = batch["attention_mask"].clone()
    mask[torch.arange(len(mask)), mask.sum(1) - 1] = 0
    return {**batch, "attention_mask": mask}


def by_peft(model: Any, name: str, path: Path) -> Any:
    """Return a model with peft's adapters, which have a run's initial matrices."""
    import peft

    case = CASES[name]
    chosen = run_config(
        [*hf_loops.SETTINGS, f"model.path={path}", *overrides_of(name, path), "strategy=single"]
    )
    start = dict(build_model(chosen, seed=chosen.seed).named_parameters())
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        modules_to_save=["embed_tokens", "lm_head"] if case.adds else None,
    )
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if ".lora_" in key:
                ours = key.removeprefix("base_model.model.").replace(".default.", ".")
                parameter.copy_(start[ours])
    return adapted


@functools.cache
def counted_here(name: str, path: Path) -> int:
    """Return how many tokens count in a step."""
    chosen = run_config(
        [*hf_loops.SETTINGS, f"model.path={path}", *full_batch(name, path), "strategy=single"]
    )
    dataset = data.build_dataset(chosen.data, chosen.tokenizer)
    batch = dataset.samples(range(dataset.num_samples), split="train")
    return int((batch.targets != IGNORE_INDEX).sum())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_counted_tokens_and_losses_are_those_of_trl(
    name: str, layout: str, folder: Callable[[str], Path]
) -> None:
    path = folder(name)
    losses, counted, _ = by_trl(name, path)
    assert counted_here(name, path) == counted
    ours = hf_loops.by_axonlaunch(path, LAYOUTS[layout], *full_batch(name, path))
    assert ours == pytest.approx(losses, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_router_loss_differs_from_trl_by_the_last_token_of_each_row(
    layout: str, folder: Callable[[str], Path]
) -> None:
    """The last token is only a target here; in trl, routers read it too."""
    import transformers
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    path = folder("routers")
    theirs, _, batch = by_trl("routers", path, masks_lasts=False)
    ours = hf_loops.by_axonlaunch(path, LAYOUTS[layout], *full_batch("routers", path))
    lengths = batch["attention_mask"].sum(1)
    assert lengths.unique().numel() > 2  # rows of several lengths, with padding
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        routers = model(**batch, output_router_logits=True).router_logits
    every, fewer = (
        load_balancing_loss_func(routers, 4, model.config.num_experts_per_tok, mask).item()
        for mask in (batch["attention_mask"], without_last_tokens(batch)["attention_mask"])
    )
    difference = model.config.router_aux_loss_coef * (every - fewer)
    assert abs(difference) > 5e-4
    # Losses of about 16 have rounding errors of some 1e-6.
    assert theirs[0] - ours[0] == pytest.approx(difference, abs=1e-5)
