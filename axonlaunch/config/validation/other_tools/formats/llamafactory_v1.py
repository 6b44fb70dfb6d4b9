"""Configurations of LLaMA-Factory's second format, in which plugins have keys of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from axonlaunch.config.validation.other_tools import (
    data_rules,
    freezing,
    reasons,
    rules,
    trainer_keys,
)
from axonlaunch.config.validation.other_tools.formats import llamafactory
from axonlaunch.config.validation.other_tools.rules import (
    missing,
    not_needed,
    to,
    with_note,
    with_others,
)
from axonlaunch.config.validation.other_tools.translation import Format, Rule, Table, Translation
from axonlaunch.system.storage.files import read_text

_LARGEST = 1 << 20
_CONVERTERS = (None, "alpaca", "sharegpt")
"""Forms of rows that are recognized here too; None: messages with parts."""
_OWN_OPTIMIZER = "there is no such optimizer; adamw is used: optimizer=custom takes any class"


def _peft(translation: Translation, key: str, value: Any) -> None:
    if value not in ("lora", "freeze"):
        translation.leave_out(key, "only LoRA adapters are supported; adapter=lora")


def _layout(translation: Translation, key: str, value: Any) -> None:
    if value not in ("fsdp2", "fsdpturbo", "deepspeed"):
        translation.not_needed.append(key)
    elif "strategy" not in translation.options:  # else the stage of DeepSpeed's file is known
        translation.option("strategy", "fsdp", key)


def _offload(translation: Translation, key: str, value: Any) -> None:
    if value is True:
        translation.set("strategy.fsdp.cpu_offload", "full", key)


_KEYS: Table = {
    "batching_strategy": with_others(),
    "batching_workers": not_needed(reasons.READING),
    "bf16": with_others(),
    "cp_mode": not_needed(reasons.LAYOUT_ONLY),
    "cp_size": with_others(),
    "custom_chat_template": to("data.chat_template", str),
    "cutoff_len": with_others(),
    "dist_config.config_file": trainer_keys.DEEPSPEED_RULE,
    "dist_config.dcp_path": missing("model.path is a folder of transformers"),
    "dist_config.ep_size": Rule("expressed", rules.set_expert_degree),
    "dist_config.name": Rule("expressed", _layout),
    "dist_config.offload_params": Rule("expressed", _offload),
    "dist_config.*": not_needed(reasons.LAYOUT_ONLY),
    "dist_timeout": to("launch.timeout_s", float),
    "dp_size": not_needed(reasons.LAYOUT_ONLY),
    "dpo_label_smoothing": missing(reasons.NO_PREFERENCES),
    "enable_activation_checkpointing": with_others(),
    "eval_dataset": with_others(),
    "flash_attn": llamafactory.ATTENTION,
    "full_determinism": to("train.deterministic", bool),
    "global_batch_size": to("train.global_batch_size", int),
    "init_config.*": not_needed("a model is created without values, and read by each rank"),
    "kernel_config.*": not_needed(reasons.EXACT_KERNEL),
    "ld_alpha": missing(reasons.NO_PREFERENCES),
    "learning_rate": with_others(),
    "logging_steps": to("train.log_every", lambda steps: max(1, int(steps))),
    "lr_scheduler_config.*": missing("set the schedule and its options (scheduler=wsd)"),
    "max_grad_norm": with_others(),
    "max_new_tokens": not_needed("no generation in training"),
    "max_steps": with_others(),
    "micro_batch_size": with_others(),
    "model": to("model.path", str),
    "model_class": missing("only causal language models are supported", off=("llm",)),
    "mp_replicate_size": not_needed(reasons.LAYOUT_ONLY),
    "mp_shard_size": not_needed(reasons.LAYOUT_ONLY),
    "num_train_epochs": with_others(),
    "optim_config.adamw_betas": to("optimizer.adamw_betas", list),
    "optim_config.adamw_eps": to("optimizer.adamw_eps", float),
    "optim_config.momentum": to("optimizer.momentum", float),
    "optim_config.name": missing(_OWN_OPTIMIZER, off=("muon",)),
    "optim_config.nesterov": to("optimizer.nesterov", bool),
    "optim_config.ns_steps": to("optimizer.ns_steps", int),
    "optim_config.wd": to("optimizer.weight_decay", float),
    "optim_config.*": missing("set the options of the optimizer (optimizer.*)"),
    "output_dir": to("run_dir", str),
    "peft_config.adapter_name_or_path": to("adapter.path", str),
    "peft_config.export_*": with_note("axonlaunch checkpoint export RUN writes the model"),
    "peft_config.freeze_extra_modules": with_others(),
    "peft_config.freeze_trainable_layers": with_others(),
    "peft_config.freeze_trainable_modules": with_others(),
    "peft_config.cast_trainable_params_to_fp32": not_needed("peft_config.name says it"),
    "peft_config.infer_dtype": not_needed("no generation in training"),
    "peft_config.lora_alpha": with_others(),
    "peft_config.lora_dropout": with_others(),
    "peft_config.modules_to_save": with_others(),
    "peft_config.name": Rule("expressed", _peft),
    "peft_config.r": with_others(),
    "peft_config.target_modules": with_others(),
    "peft_config.use_dora": with_others(),
    "peft_config.use_rslora": with_others(),
    "pref_*": missing(reasons.NO_PREFERENCES, off=()),
    "quant_config.name": with_others(),
    "quant_config.quantization_bit": with_others(),
    "quant_config.*": not_needed("quant_config.quantization_bit says it"),
    "resume_from_checkpoint": trainer_keys.RESUME,
    "sample_backend": not_needed("no generation in training"),
    "save_ckpt_as_hf": not_needed("checkpoint export writes the files of transformers"),
    "save_epochs": with_others(),
    "save_steps": with_others(),
    "save_total_limit": with_others(),
    "seed": to("seed", int),
    "simpo_gamma": missing(reasons.NO_PREFERENCES),
    "train_dataset": with_others(),
    "trust_remote_code": to("model.trust_remote_code", bool),
}


def _finish(translation: Translation) -> None:
    """Translate keys that depend on each other."""
    translation.use_hub_model("model")
    _set_data(translation)
    key = "enable_activation_checkpointing"
    translation.set(
        "train.activation_checkpointing", "full" if translation.flag(key) else "none", key
    )
    shared = rules.set_degrees(translation, context="cp_size")
    if not translation.has("global_batch_size"):
        rules.set_batch(translation, "micro_batch_size", "", divided_by=shared)
    else:
        micro = int(translation.number("micro_batch_size"))
        translation.set("train.micro_batch_size", micro, "micro_batch_size")
    rules.set_length(translation, "num_train_epochs", "max_steps")
    _set_optimizer(translation)
    rules.set_precision(translation, weights=("bf16",))
    trainer_keys.set_clipping(translation)
    rules.set_router_loss(translation)
    _set_saves(translation)
    _set_adapter(translation)


def _set_optimizer(translation: Translation) -> None:
    """Set torch's AdamW or Muon, and the constant rate that the tool always has."""
    if translation.get("optim_config.name") == "muon":
        translation.option("optimizer", "muon", "optim_config.name")
    else:
        translation.option("optimizer", "adamw")
        translation.set("optimizer.weight_decay", 0.01)
        rules.set_decay_of_all(translation, 0.01)
        translation.set("optimizer.betas", [0.9, 0.999])
    translation.set("optimizer.lr", float(translation.number("learning_rate")), "learning_rate")
    translation.option("scheduler", "constant")
    translation.set("scheduler.warmup_steps", 0)


def _set_saves(translation: Translation) -> None:
    if translation.has("save_epochs"):
        epochs = translation.number("save_epochs")
        translation.set("checkpoint.every", f"{epochs:g} epoch", "save_epochs")
    else:
        steps = max(0, int(translation.number("save_steps")))
        translation.set("checkpoint.every", steps, "save_steps")
    rules.set_kept(translation)


def _set_adapter(translation: Translation) -> None:
    if translation.get("peft_config.name") == "freeze":
        freezing.set_trained_layers(translation, prefix="peft_config.")
    elif translation.get("peft_config.name") is not None:
        translation.option("adapter", "lora", "peft_config.name")
        rules.set_adapter(
            translation,
            rank="peft_config.r",
            alpha=16,
            targets=translation.get("peft_config.target_modules"),
            targets_key="peft_config.target_modules",
            unfrozen="peft_config.modules_to_save",
            prefix="peft_config.",
        )
    key = "quant_config.quantization_bit"
    bits = translation.get(key, 4 if translation.get("quant_config.name") == "bnb" else None)
    if base := llamafactory.BASES.get(str(bits)):
        named = key if translation.has(key) else "quant_config.name"
        rules.set_base(translation, {named: base})
    elif bits is not None:
        translation.leave_out(key, llamafactory.BITS)


def _set_data(translation: Translation) -> None:
    sources = _sources(translation, "train_dataset")
    data_rules.set_sources(translation, sources or [{"data": "chat"}], "train_dataset")
    translation.set("data.sequence_length", int(translation.number("cutoff_len")), "cutoff_len")
    key = "batching_strategy"
    packs = str(translation.get(key)).startswith("dynamic")
    translation.set("data.packing", "best_fit" if packs else "none", key)
    if packs:
        translation.note(key, "a step has rows of cutoff_len tokens, each with several chats")
    files = [file for source in _sources(translation, "eval_dataset") for file in source["files"]]
    if files:
        translation.set("data.held_out", {"files": files}, "eval_dataset")
    else:
        translation.set("data.held_out", 0)


def _sources(translation: Translation, key: str) -> list[dict[str, Any]]:
    """Return the keys of ``data`` for each dataset of a description, a file or the Hub."""
    if not translation.has(key):
        if key == "train_dataset":
            translation.leave_out(key, "the file names no dataset; set data.files")
        return []
    named = str(translation.get(key))
    if not named.endswith(".yaml"):
        return [{"data": "chat", "files": [named]}]
    for root in (Path(), translation.folder, *list(translation.folder.resolve().parents)[:4]):
        if (root / named).is_file():
            break
    else:
        translation.leave_out(key, "is not found; set data.files, or convert a file beside it")
        return []
    try:
        described = yaml.safe_load(read_text(root / named, at_most=_LARGEST))
        entries = [dict(each) for each in described.values()]
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        translation.leave_out(key, f"{root / named} can't be read: {type(error).__name__}")
        return []
    return [_source(translation, key, entry, root) for entry in entries]


def _source(
    translation: Translation, key: str, entry: dict[str, Any], root: Path
) -> dict[str, Any]:
    source: dict[str, Any] = {"data": "chat", "files": [str(entry.get("path"))]}
    if entry.get("source", "hf_hub") == "local":
        source["files"] = [str(root / str(entry.get("path")))]
    elif "split" in entry:
        source["split"] = str(entry["split"])
    converter = entry.get("converter")
    if converter == "pair":
        translation.leave_out(key, reasons.NO_PREFERENCES)
    elif converter not in _CONVERTERS:
        translation.leave_out(key, f"the converter {converter} is code; name data.fields")
    if entry.get("size"):
        source["limit"] = int(entry["size"])
        translation.note(key, "size takes the first rows; LLaMA-Factory draws them at random")
    if entry.get("weight"):
        source["epochs"] = float(entry["weight"])
    return source


LLAMA_FACTORY_V1 = Format(
    name="llamafactory-v1",
    marks=(frozenset({"model", "train_dataset"}), frozenset({"model", "peft_config"})),
    keys=_KEYS,
    defaults={
        "learning_rate": 1e-4,
        "cutoff_len": 2048,
        "enable_activation_checkpointing": True,
        "batching_strategy": "normal",
        "bf16": True,
        "max_grad_norm": 1.0,
        "micro_batch_size": 1,
        "num_train_epochs": 3,
        "peft_config.lora_dropout": 0.05,
        "peft_config.target_modules": "all",
        "save_steps": 0,
    },
    finish=_finish,
    companions={"peft_config": {"name": "lora"}},
)
"""LLaMA-Factory, files with ``model`` and ``train_dataset``."""
