"""Configurations of trl's SFT script and of the alignment handbook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axonlaunch.config.precision import PRECISIONS
from axonlaunch.config.validation.other_tools import data_rules, reasons, rules, trainer_keys
from axonlaunch.config.validation.other_tools.rules import (
    missing,
    not_needed,
    to,
    with_others,
)
from axonlaunch.config.validation.other_tools.translation import Format, Rule, Table, Translation

_ROWS = (
    "if its rows have text, write data=documents; if they have prompt and completion, "
    "data.train_on=assistant, as trl chooses"
)


def _loss(translation: Translation, key: str, value: Any) -> None:
    if value in ("nll", "chunked_nll"):
        translation.not_needed.append(key)
    elif value == "dft":
        translation.set("train.dft", True, key)
    else:
        translation.leave_out(key, reasons.NO_PREFERENCES)


_KEYS: Table = {
    **trainer_keys.TRAINER_KEYS,
    "activation_offloading": trainer_keys.OFFLOADING,
    "assistant_only_loss": with_others(),
    "attn_implementation": not_needed(reasons.EXACT_KERNEL),
    "beta": missing(reasons.NO_PREFERENCES, off=()),
    "bnb_4bit_quant_type": not_needed("load_in_4bit says it"),
    "chat_template": with_others(),
    "chat_template_path": with_others(),
    "completion_only_loss": with_others(),
    "dataset_config": with_others(),
    "dataset_kwargs.*": not_needed(reasons.READING),
    "dataset_mixer": with_others(),
    "dataset_mixer.*": with_others(),
    "dataset_mixture.datasets": with_others(),
    "dataset_mixture.seed": not_needed("seed orders the samples"),
    "dataset_mixture.test_split_size": with_others(),
    "dataset_name": with_others(),
    "dataset_num_proc": not_needed(reasons.READING),
    "dataset_splits": with_others(),
    "dataset_streaming": not_needed("data.shuffle=shards starts before all rows are read"),
    "dataset_test_split": with_others(),
    "dataset_text_field": with_others(),
    "dataset_train_split": with_others(),
    "dtype": with_others(),
    "eos_token": with_others(),
    "eval_packing": not_needed("held-out rows are packed like training rows"),
    "load_in_4bit": rules.base_bits(),
    "load_in_8bit": rules.base_bits(),
    "lora_alpha": with_others(),
    "lora_dropout": with_others(),
    "lora_modules_to_save": with_others(),
    "lora_r": with_others(),
    "lora_target_modules": with_others(),
    "lora_task_type": not_needed("the model is a causal language model"),
    "loss_type": Rule("expressed", _loss),
    "max_completion_length": missing(reasons.NO_PREFERENCES, off=()),
    "max_length": with_others(),
    "max_prompt_length": missing(reasons.NO_PREFERENCES, off=()),
    "max_seq_length": with_others(),
    "model_name_or_path": to("model.path", str),
    "model_revision": to("model.revision", str),
    "packing": with_others(),
    "packing_strategy": with_others(),
    "pad_token": with_others(),
    "pad_to_multiple_of": not_needed("padding is masked"),
    "padding_free": not_needed("packing decides it"),
    "router_aux_loss_coef": with_others(),
    "shuffle_dataset": not_needed("rows are in random order"),
    "tokenizer_name_or_path": to("tokenizer.path", str),
    "torch_dtype": with_others(),
    "trust_remote_code": to("model.trust_remote_code", bool),
    "use_bnb_nested_quant": not_needed("load_in_4bit says it"),
    "use_cache": not_needed("no generation in training"),
    "use_dora": with_others(),
    "use_flash_attention_2": not_needed(reasons.EXACT_KERNEL),
    "use_liger": not_needed(reasons.EXACT_KERNEL),
    "use_peft": with_others(),
    "use_rslora": with_others(),
}


def _finish(translation: Translation) -> None:
    """Translate keys that depend on each other."""
    translation.use_hub_model("model_name_or_path")
    held_out = _set_data(translation)
    rules.set_batch(
        translation, "per_device_train_batch_size", "gradient_accumulation_steps", divided_by=1
    )
    rules.set_length(translation, "num_train_epochs", "max_steps")
    rules.set_optimizer(translation, "optim")
    ratio, origin = trainer_keys.final_ratio(translation)
    rules.set_schedule(translation, "lr_scheduler_type", final_lr_ratio=ratio, final_from=origin)
    dtype = "dtype" if translation.has("dtype") else "torch_dtype"
    in_bf16 = rules.precision_named(translation.get(dtype)) == "bf16"
    rules.set_precision(translation, weights=(dtype,) if in_bf16 else ())
    if not any(translation.has(name) for name in PRECISIONS):
        translation.set("train.precision", "bf16", "bf16")
    if not translation.has("gradient_checkpointing"):
        translation.set("train.activation_checkpointing", "full", "gradient_checkpointing")
    if translation.has(router := "router_aux_loss_coef"):
        translation.set("model.router_aux_loss", translation.number(router) or False, router)
    trainer_keys.set_clipping(translation)
    trainer_keys.drop_smoothing_of_weighted_loss(translation)
    rules.set_intervals(translation, held_out=held_out)
    rules.set_kept(translation)
    rules.set_early_stop(translation)
    trainer_keys.set_best_metric(translation)
    trainer_keys.set_push(translation)
    data_rules.translate_special_tokens(translation)
    if translation.flag("use_peft"):
        translation.option("adapter", "lora", "use_peft")
        rules.set_adapter(
            translation,
            rank="lora_r",
            alpha=32,
            targets=translation.get("lora_target_modules", ["q_proj", "v_proj"]),
            targets_key="lora_target_modules",
            unfrozen="lora_modules_to_save",
        )
    rules.set_base(translation)


def _set_data(translation: Translation) -> bool:
    """Set the dataset; return whether it has rows for evaluation."""
    key, sources, held_out = _sources(translation)
    if not sources:
        translation.leave_out("dataset_name", "the file names no dataset; set data.files")
    evaluates = str(translation.get("eval_strategy", "no")).lower() not in ("no", "false")
    data_rules.set_sources(translation, sources or [{"data": "chat"}], key)
    is_text = translation.has("dataset_text_field") and (
        translation.get("dataset_text_field") != "messages"
    )
    if is_text:
        translation.option("data", "documents", "dataset_text_field")
        name = translation.get("dataset_text_field")
        translation.set("data.text_field", name, "dataset_text_field")
    elif translation.flag("assistant_only_loss") or translation.flag("completion_only_loss"):
        named = "assistant_only_loss" if translation.flag("assistant_only_loss") else ""
        translation.set("data.train_on", "assistant", named or "completion_only_loss")
    else:
        translation.set("data.train_on", "all", "assistant_only_loss")
        if key == "dataset_name" and not translation.has("completion_only_loss"):
            translation.note(key, _ROWS)
    for name, value in held_out.items():
        if evaluates:
            translation.set(f"data.{name}", *value)
    length = "max_seq_length" if translation.has("max_seq_length") else "max_length"
    translation.set("data.sequence_length", int(translation.number(length)), length)
    packs = translation.flag("packing")
    how = "concat" if translation.get("packing_strategy") == "wrapped" else "best_fit"
    translation.set("data.packing", how if packs else "none", "packing")
    if not is_text:
        for name in ("chat_template", "chat_template_path"):
            if translation.has(name):
                translation.set("data.chat_template", translation.get(name), name)
    return bool(held_out) and evaluates


def _sources(
    translation: Translation,
) -> tuple[str, list[dict[str, Any]], dict[str, tuple[Any, str]]]:
    """Return the key that names the data, its sources, and the settings of held-out rows."""
    held_out: dict[str, tuple[Any, str]] = {}
    if translation.has("dataset_mixture"):
        key = "dataset_mixture.datasets"
        mixture = [each for each in translation.items(key) if isinstance(each, Mapping)]
        size = "dataset_mixture.test_split_size"
        if translation.has(size):
            held_out["held_out"] = (translation.number(size), size)
        return key, [_mixture_source(each) for each in mixture], held_out
    train, test = "dataset_train_split", "dataset_test_split"
    if translation.has("dataset_mixer"):
        mixer = translation.mapping("dataset_mixer")
        splits = [str(name) for name in translation.items("dataset_splits")]
        tests = [name for name in splits if "test" in name]
        trains = [name for name in splits if "test" not in name] or ["train"]
        sources = [
            _source(name, split="+".join(trains), weight=share) for name, share in mixer.items()
        ]
        if tests and len(sources) == 1:
            held_out["validation_split"] = ("+".join(tests), "dataset_splits")
        return "dataset_mixer", sources, held_out
    if not translation.has("dataset_name"):
        return "dataset_name", [], {}
    source = _source(
        translation.get("dataset_name"),
        subset=translation.get("dataset_config"),
        split=translation.get(train),
    )
    if translation.has(test):
        held_out["validation_split"] = (translation.get(test), test)
    return "dataset_name", [source], held_out


def _mixture_source(each: Mapping[str, Any]) -> dict[str, Any]:
    weight = each.get("weight")
    return _source(
        each.get("id"),
        subset=each.get("config"),
        split=each.get("split"),
        weight=weight,
    )


def _source(
    name: Any, *, subset: Any = None, split: Any = None, weight: Any = None
) -> dict[str, Any]:
    source: dict[str, Any] = {"data": "chat", "files": [str(name)]}
    if subset not in (None, "default"):
        source["subset"] = subset
    if split is not None:
        source["split"] = split
    if isinstance(weight, int | float) and weight != 1:
        source["epochs"] = float(weight)
    return source


TRL = Format(
    name="trl",
    marks=tuple(
        frozenset({"model_name_or_path", key})
        for key in ("dataset_mixture", "dataset_mixer", "dataset_name", "use_peft", "max_length")
    ),
    keys=_KEYS,
    defaults={
        **trainer_keys.TRAINER_DEFAULTS,
        "learning_rate": 2e-5,
        "logging_steps": 10,
        "assistant_only_loss": False,
        "bf16": True,
        "gradient_checkpointing": True,
        "max_length": 1024,
        "packing": False,
        "dataset_splits": ["train", "test"],
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": ["q_proj", "v_proj"],
    },
    finish=_finish,
    companions={
        "bf16": True,
        "use_peft": True,
        "dataset_test_split": "test",
        "eval_strategy": "steps",
        "early_stopping_patience": 3,
    },
)
"""trl and the alignment handbook."""
