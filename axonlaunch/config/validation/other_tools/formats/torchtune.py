"""Configurations of torchtune's recipes, whose parts are named by ``_component_``."""

from __future__ import annotations

import re
from typing import Any

from axonlaunch.config.validation.other_tools import data_rules, quantization, reasons, rules
from axonlaunch.config.validation.other_tools.rules import (
    missing,
    not_needed,
    to,
    with_note,
    with_others,
)
from axonlaunch.config.validation.other_tools.translation import Format, Rule, Table, Translation

_OTHER_RECIPE = "this recipe is not supported; recipes for fine-tuning are"
_IMAGES = "models of images are not supported; train on text"
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MLP = ["gate_proj", "up_proj", "down_proj"]
_PHI3 = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_MERGED = "transformers has one layer for q, k and v, and one for gate and up; both are adapted"
_DATASETS: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"files": ["tatsu-lab/alpaca"], "prompt_format": "alpaca"},
    "alpaca_cleaned_dataset": {"files": ["yahma/alpaca-cleaned"], "prompt_format": "alpaca"},
    "slimorca_dataset": {"files": ["Open-Orca/SlimOrca-Dedup"]},
    "chat_dataset": {},
    "instruct_dataset": {},
    "text_completion_dataset": {"data": "documents"},
    "wikitext_dataset": {
        "data": "documents",
        "files": ["EleutherAI/wikitext_document_level"],
        "text_field": "page",
    },
    "cnn_dailymail_articles_dataset": {
        "data": "documents",
        "files": ["ccdv/cnn_dailymail"],
        "text_field": "article",
    },
}
_ALL_TOKENS = ("alpaca_dataset", "alpaca_cleaned_dataset")
"""Datasets whose prompts count in the loss by default."""
_INSTRUCTIONS = ("llama2_tokenizer", "mistral_tokenizer")
"""Tokenizers that put a question between [INST] and [/INST]."""
_TEMPLATES = {"llama3": "llama3", "qwen": "chatml", "phi3": "phi3"}
"""Chat templates by the beginning of a tokenizer's name; gemma's writes texts as they are."""
_FILE_KINDS = ("json", "csv", "parquet", "text", "arrow")


def _component(translation: Translation, key: str, value: Any) -> None:
    """Report losses that are not cross entropy."""
    if not any(name in str(value) for name in ("CrossEntropy", "CEWithChunked")):
        translation.leave_out(key, reasons.NO_PREFERENCES)


def _logger(translation: Translation, key: str, value: Any) -> None:
    for part, name in {"WandB": "wandb", "TensorBoard": "tensorboard"}.items():
        if part in str(value):
            project = translation.get("metric_logger.project")
            chosen = {"name": name, "project": project} if project and name == "wandb" else name
            translation.set("loggers", [chosen], key)


def _dtype(translation: Translation, key: str, value: Any) -> None:
    if value == "bf16":
        translation.set("train.precision", "bf16", key)
        translation.set("train.param_dtype", "bf16", key)
    else:
        translation.set("train.precision", "fp32", key)


def _offload(translation: Translation, key: str, value: Any) -> None:
    if value is True:
        translation.option("strategy", "fsdp", key)
        translation.set("strategy.fsdp.cpu_offload", "full", key)


def _update_in_backward(translation: Translation, key: str, value: Any) -> None:
    translation.set("train.optimizer_in_backward", value is True, key)
    if value is True and translation.devices > 1:  # torchtune shards parameters on several devices
        translation.option("strategy", "fsdp", key)


_KEYS: Table = {
    "ac_mode": with_others(),
    "ac_option": not_needed("selective stores every second matrix product"),
    "batch_size": with_others(),
    "batch_size_val": not_needed("evaluation has the batches of training"),
    "base_model_path": not_needed("other keys refer to it"),
    "checkpointer._component_": not_needed("the folder has the weights"),
    "checkpointer.checkpoint_dir": to("model.path", str),
    "checkpointer.adapter_checkpoint": to("adapter.path", str),
    "checkpointer.keep_last_n_checkpoints": with_others(),
    "checkpointer.*": not_needed("the folder has the weights"),
    "clip_grad_norm": with_others(),
    "collate_fn": not_needed(reasons.READING),
    "compile": to("train.compile", lambda on: on is True),
    "custom_sharded_layers": not_needed(reasons.LAYOUT_ONLY),
    "dataloader.*": not_needed(reasons.READING),
    "data_parallel_replicate_dim": with_others(),
    "data_parallel_shard_dim": with_others(),
    "dataset._component_": with_others(),
    "dataset.add_eos": not_needed("a document ends with the end token"),
    "dataset.column": with_others(),
    "dataset.column_map.*": with_others(),
    "dataset.conversation_column": with_others(),
    "dataset.conversation_style": not_needed("the keys of messages are recognized"),
    "dataset.data_files": with_others(),
    "dataset.max_seq_len": with_others(),
    "dataset.name": with_others(),
    "dataset.new_system_prompt": missing("add a system message to the rows"),
    "dataset.packed": with_others(),
    "dataset.partition": missing(
        "is a part of the rows; write it as data.split=train[:90%]", off=()
    ),
    "dataset.source": with_others(),
    "dataset.split": with_others(),
    "dataset.split_across_pack": with_others(),
    "dataset.subset": with_others(),
    "dataset.train_on_input": with_others(),
    "dataset_val._component_": with_others(),
    "dataset_val.split": with_others(),
    "dataset_val.*": with_note("held-out rows are read like training rows (data.held_out)"),
    "device": to("launch.device", lambda name: "cpu" if name == "cpu" else "auto"),
    "dtype": Rule("expressed", _dtype),
    "enable_activation_checkpointing": with_others(),
    "enable_activation_offloading": with_others(),
    "epochs": with_others(),
    "fake_quant_after_n_steps": with_others(),
    "fsdp.cpu_offload": Rule("expressed", _offload),
    "fsdp_*": Rule("expressed", _offload),
    "fsdp_reshard_after_forward": not_needed(reasons.LAYOUT_ONLY),
    "gradient_accumulation_steps": with_others(),
    "kd_loss.*": missing(_OTHER_RECIPE, off=()),
    "kd_ratio": missing(_OTHER_RECIPE, off=()),
    "log_every_n_steps": to("train.log_every", int),
    "log_level": not_needed(reasons.REPORTING),
    "log_peak_memory_stats": not_needed(reasons.REPORTING),
    "loss._component_": Rule("expressed", _component),
    "loss.label_smoothing": to("train.label_smoothing", float),
    "loss.*": not_needed(reasons.EXACT_KERNEL),
    "low_cpu_ram": not_needed(reasons.LAYOUT_ONLY),
    "lr_scheduler._component_": with_others(),
    "lr_scheduler.num_warmup_steps": with_others(),
    "lr_scheduler.*": missing("set the options of the schedule (scheduler.*)"),
    "max_steps_per_epoch": with_others(),
    "memory_efficient_fsdp_wrap": not_needed(reasons.LAYOUT_ONLY),
    "metric_logger._component_": Rule("expressed", _logger),
    "metric_logger.*": not_needed(reasons.REPORTING),
    "model._component_": with_others(),
    "model.apply_lora_to_mlp": with_others(),
    "model.apply_lora_to_output": with_others(),
    "model.decoder_trainable": missing(_IMAGES, off=()),
    "model.encoder_trainable": missing(_IMAGES, off=()),
    "model.fusion_trainable": missing(_IMAGES, off=()),
    "model.image_size": missing(_IMAGES, off=()),
    "model.lora_alpha": with_others(),
    "model.lora_attn_modules": with_others(),
    "model.lora_dropout": with_others(),
    "model.lora_rank": with_others(),
    "model.quantize_base": rules.base_bits(),
    "model.use_dora": with_others(),
    "model.*": not_needed("the folder of the model has its sizes"),
    "model_type": not_needed("transformers knows the class of a model"),
    "name": to("name", str),
    "optimizer._component_": with_others(),
    "optimizer.betas": to("optimizer.betas", list),
    "optimizer.eps": to("optimizer.eps", float),
    "optimizer.foreach": not_needed(reasons.EXACT_KERNEL),
    "optimizer.fused": not_needed(reasons.EXACT_KERNEL),
    "optimizer.lr": to("optimizer.lr", float),
    "optimizer.momentum": to("optimizer.momentum", float),
    "optimizer.weight_decay": with_others(),
    "optimizer.*": missing("set the options of the optimizer (optimizer.*)"),
    "optimizer_in_bwd": Rule("expressed", _update_in_backward),
    "output_dir": to("run_dir", str),
    "profiler.*": not_needed("train.profile.steps records steps"),
    "quantizer._component_": with_others(),
    "quantizer.groupsize": with_others(),
    "quantizer.*": missing("weights are quantized in torchao's default types", off=()),
    "resume_from_checkpoint": not_needed("a run resumes from its folder"),
    "run_val_every_n_steps": with_others(),
    "save_adapter_weights_only": not_needed("checkpoint export writes the adapter"),
    "save_every_n_epochs": with_others(),
    "seed": to("seed", int),
    "shuffle": with_others(),
    "tensor_parallel_dim": with_others(),
    "tensor_parallel_plan.*": not_needed("the model defines its plan"),
    "tokenizer._component_": not_needed("the folder of the model has the tokenizer"),
    "tokenizer.image_size": not_needed("only for models of images"),
    "tokenizer.max_seq_len": with_others(),
    "tokenizer.prompt_template": missing("write it in data.chat_template"),
    "tokenizer.*": not_needed("the folder of the model has the tokenizer"),
    "use_flex": not_needed(reasons.EXACT_KERNEL),
    **{
        key: missing(_OTHER_RECIPE, off=())
        for key in (
            *("datasets", "enable_kv_cache", "forward_batch_size", "gamma", "grpo_samples"),
            *("inference.*", "kl_coeff", "lmbda", "max_generated_tokens", "num_steps"),
            *("orchestration.*", "policy_model.*", "postprocessing.*", "ppo_batch_size"),
            *("ppo_epochs", "ref_checkpointer.*", "ref_policy_checkpointer.*", "tasks"),
            *("reward_and_value_model.*", "reward_checkpointer.*", "reward_functions"),
            *("teacher_checkpointer.*", "teacher_model.*", "training.*", "value_checkpointer.*"),
            *("min_response_length", "penalise_no_eos", "reward_penalty", "stop_token_ids"),
            *("whiten_rewards", "prompt.*", "max_new_tokens", "top_k", "temperature"),
        )
    },
}


def _finish(translation: Translation) -> None:
    """Translate keys that depend on each other."""
    translation.use_hub_model("model._component_")
    validates = _set_data(translation)
    if not translation.get("shuffle", True):
        data_rules.set_in_order(translation, "shuffle")
    degree = rules.set_degrees(translation, tensor="tensor_parallel_dim")
    rules.set_batch(translation, "batch_size", "gradient_accumulation_steps", divided_by=degree)
    _set_length(translation)
    _set_optimizer(translation)
    limit = translation.get("clip_grad_norm")
    clips = isinstance(limit, int | float) and limit > 0
    translation.set("train.grad_clip", float(limit) if clips else None, "clip_grad_norm")
    _set_recomputation(translation)
    every = int(translation.number("run_val_every_n_steps"))
    if not validates:
        translation.set("data.held_out", 0, "dataset_val")
    elif every:
        translation.set("train.eval_every", every, "run_val_every_n_steps")
    epochs = int(translation.number("save_every_n_epochs", 1))
    translation.set("checkpoint.every", f"{epochs} epoch", "save_every_n_epochs")
    rules.set_kept(translation, "checkpointer.keep_last_n_checkpoints")
    _set_adapter(translation)
    quantization.set_torchtune_quantizer(translation)


def _set_recomputation(translation: Translation) -> None:
    mode, keys = translation.get("ac_mode"), ["ac_mode"]
    offloading = "enable_activation_offloading"
    if mode not in ("full", "selective"):
        keys = ["enable_activation_checkpointing"]
        mode = "full" if translation.flag(keys[0]) else "none"
    if translation.flag(offloading):
        mode = "selective_offload" if mode == "selective" else "offload"
        keys.append(offloading)
    translation.set("train.activation_checkpointing", mode, *keys)


def _set_length(translation: Translation) -> None:
    rules.set_length(translation, "epochs", "num_steps")
    most = int(translation.number("max_steps_per_epoch"))
    if most:
        steps = most * int(translation.number("epochs", 1))
        translation.settings.pop("train.epochs", None)
        translation.set("train.steps", steps, "max_steps_per_epoch", "epochs")


def _set_optimizer(translation: Translation) -> None:
    key = "optimizer._component_"
    name = str(translation.get(key)).rsplit(".", 1)[-1]
    module = str(translation.get(key)).rsplit(".", 1)[0]
    decay = 0.01 if name == "AdamW" else 0.0
    if name in ("AdamW", "PagedAdamW", "PagedAdamW8bit", "AdamW8bit", "AdamW32bit"):
        translation.option("optimizer", "adamw_8bit" if "8bit" in name else "adamw", key)
        decay = 0.01
        if name.startswith("Paged"):
            translation.note(key, rules.PAGED)
        if not translation.has("optimizer.betas"):
            translation.set("optimizer.betas", [0.9, 0.999], "optimizer.betas")
    elif name in ("SGD", "Adam"):
        translation.option("optimizer", name.lower(), key)
        if name == "SGD" and not translation.has("optimizer.momentum"):
            translation.set("optimizer.momentum", 0.0, "optimizer.momentum")
    else:
        translation.option("optimizer", "custom", key)
        translation.set("optimizer.target", f"{module}:{name}", key)
        return
    weight_decay = float(translation.number("optimizer.weight_decay", decay))
    translation.set("optimizer.weight_decay", weight_decay, "optimizer.weight_decay")
    if not _is_adapted(translation):
        rules.set_decay_of_all(translation, weight_decay)
    _set_schedule(translation)


def _set_schedule(translation: Translation) -> None:
    key = "lr_scheduler._component_"
    steps = int(translation.number("lr_scheduler.num_warmup_steps"))
    name = str(translation.get(key, ""))
    if not name:
        translation.option("scheduler", "constant", key)
    else:
        translation.option("scheduler", "cosine", key)
        translation.set("scheduler.final_lr_ratio", 0.0, key)
        if "cosine" not in name:
            text = "cosine is used: choose scheduler=linear, wsd or constant, or write one"
            translation.leave_out(key, text)
    translation.set("scheduler.warmup_steps", steps, "lr_scheduler.num_warmup_steps")


def _is_adapted(translation: Translation) -> bool:
    return _model(translation).startswith(("lora_", "qlora_", "dora_"))


def _model(translation: Translation) -> str:
    """Return the name of the model's component, without its module."""
    return str(translation.get("model._component_")).rsplit(".", 1)[-1]


def _set_adapter(translation: Translation) -> None:
    component = _model(translation)
    if not _is_adapted(translation):
        return
    key = "model._component_"
    translation.option("adapter", "lora", key)
    is_quantized = component.startswith("qlora_")
    rules.set_base(translation, {key if is_quantized else "model.quantize_base": "nf4"})
    modules = translation.items("model.lora_attn_modules") or ["q_proj", "v_proj"]
    targets = ["o_proj" if name == "output_proj" else name for name in modules]
    if translation.flag("model.apply_lora_to_mlp"):
        targets += _MLP
    if translation.flag("model.apply_lora_to_output"):
        rules.leave_out_head(translation, "model.apply_lora_to_output", "lm_head")
    if "phi3" in component:
        targets = [*dict.fromkeys(_PHI3.get(name, name) for name in targets)]
        translation.note("model.lora_attn_modules", _MERGED)
    keys = ("model.lora_attn_modules", "model.apply_lora_to_mlp")
    translation.set("adapter.targets", targets, *(key for key in keys if translation.has(key)))
    for name in ("rank", "alpha", "dropout"):
        value = translation.number(f"model.lora_{name}", {"rank": 8, "alpha": 16}.get(name, 0.0))
        chosen = int(value) if name == "rank" else float(value)
        translation.set(f"adapter.{name}", chosen, f"model.lora_{name}")
    if translation.flag("model.use_dora") or component.startswith("dora_"):
        translation.set("adapter.dora", True, "model.use_dora")


def _set_data(translation: Translation) -> bool:
    """Set the dataset; return whether rows are held out for evaluation."""
    key = "dataset._component_"
    name = str(translation.get(key, "")).rsplit(".", 1)[-1]
    described = _DATASETS.get(name)
    if described is None:
        text = "has no counterpart; set data.files, and data.fields or data.prompt_format"
        translation.leave_out(key, text)
    source: dict[str, Any] = {"data": "chat", **(described or {})}
    origin = translation.get("dataset.source")
    if origin in _FILE_KINDS:
        source["files"] = translation.items("dataset.data_files")
    elif origin:
        source["files"] = [str(origin)]
    for torchtune_key, ours in (("split", "split"), ("subset", "subset"), ("name", "subset")):
        if translation.has(f"dataset.{torchtune_key}") and origin not in _FILE_KINDS:
            source[ours] = str(translation.get(f"dataset.{torchtune_key}"))
    if source["data"] == "documents" and translation.has("dataset.column"):
        source["text_field"] = translation.get("dataset.column")
    if translation.has("dataset.conversation_column"):
        source["fields"] = {"messages": translation.get("dataset.conversation_column")}
    elif columns := translation.mapping("dataset.column_map"):
        named = {"input": "prompt", "output": "completion"}
        source["fields"] = {named[name]: columns[name] for name in columns if name in named}
    _set_prompt(translation, source)
    data_rules.set_sources(translation, [source], key)
    if source["data"] == "chat":
        counts = translation.get("dataset.train_on_input", name in _ALL_TOKENS)
        translation.set("data.train_on", "all" if counts else "assistant", "dataset.train_on_input")
        _set_template(translation)
    _set_rows(translation)
    split = translation.get("dataset_val.split")
    if split and origin not in _FILE_KINDS:
        translation.set("data.validation_split", str(split), "dataset_val.split")
    return bool(split)


def _tokenizer(translation: Translation) -> str:
    """Return the name of the tokenizer's component, without its module."""
    return str(translation.get("tokenizer._component_", "")).rsplit(".", 1)[-1]


def _set_prompt(translation: Translation, source: dict[str, Any]) -> None:
    """Write a prompt as a message, which torchtune's tokenizers put into their template."""
    named, tokenizer = source.get("prompt_format"), _tokenizer(translation)
    if named is None or tokenizer.startswith("gemma"):
        return
    prompt = data_rules.ALPACA
    if tokenizer in _INSTRUCTIONS:
        source["prompt_format"] = f"[INST] {prompt} [/INST] "
    else:
        del source["prompt_format"]
        source["fields"] = {"prompt": prompt, "completion": "output"}


def _set_template(translation: Translation) -> None:
    tokenizer, key = _tokenizer(translation), "tokenizer._component_"
    if "data.prompt_format" in translation.settings:
        return
    for start, template in _TEMPLATES.items():
        if tokenizer.startswith(start):
            translation.set("data.chat_template", template, key)


def _set_rows(translation: Translation) -> None:
    length = "tokenizer.max_seq_len"
    if translation.has(length):
        translation.set("data.sequence_length", int(translation.number(length)), length)
    elif translation.has("dataset.max_seq_len"):
        number = int(translation.number("dataset.max_seq_len"))
        translation.set("data.sequence_length", number, "dataset.max_seq_len")
    else:
        translation.set("data.sequence_length", 4096, length, note="torchtune has no limit")
    packs = translation.flag("dataset.packed")
    how = "concat" if translation.flag("dataset.split_across_pack") else "best_fit"
    translation.set("data.packing", how if packs else "none", "dataset.packed")


def resolve_references(document: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with references, ``${output_dir}``, replaced by their values."""

    def look_up(match: re.Match[str]) -> str:
        value: Any = document
        for part in match[1].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return match[0] if value is None or isinstance(value, dict | list) else str(value)

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(each) for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each) for each in value]
        if not isinstance(value, str):
            return value
        for _ in range(4):  # references in values that are referred to
            value = _REFERENCE.sub(look_up, value)
        return value

    replaced: dict[str, Any] = walk(document)
    return replaced


TORCHTUNE = Format(
    name="torchtune",
    marks=(
        frozenset({"checkpointer", "model", "dataset"}),
        frozenset({"checkpointer", "model", "optimizer"}),
    ),
    keys=_KEYS,
    defaults={"dataset.packed": False, "gradient_accumulation_steps": 1, "batch_size": 1},
    finish=_finish,
    companions={"model": {"_component_": "lora_llama3"}},
)
"""torchtune."""
