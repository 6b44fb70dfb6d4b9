"""Configurations of LLaMA-Factory's ``train`` command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from axonlaunch.config.validation.other_tools import (
    data_rules,
    freezing,
    reasons,
    rules,
    trainer_keys,
)
from axonlaunch.config.validation.other_tools.rules import (
    missing,
    not_needed,
    to,
    with_note,
    with_others,
)
from axonlaunch.config.validation.other_tools.translation import Format, Rule, Table, Translation
from axonlaunch.system.storage.files import read_text

_LARGEST = 1 << 24
_IMAGES = "models of images, video and sound are not supported; train on text"
_OTHER_OPTIMIZER = "there is no such optimizer; optimizer=custom takes a class of yours"
_OTHER_LOSS = "there is no such loss; train.loss takes a loss of yours (register_loss)"
_OTHER_WEIGHTS = "adapters begin with random A and zero B; train with adapter=lora"


BASES = {"4": "nf4", "8": "int8"}
"""Formats of frozen weights by bits."""
BITS = "adapter.base has 4 bits (nf4) and 8 bits (int8)"


def _quantization(translation: Translation, key: str, value: Any) -> None:
    if value in rules.OFF:
        translation.not_needed.append(key)
    elif str(value) not in BASES:
        translation.leave_out(key, BITS)


def _stage(translation: Translation, key: str, value: Any) -> None:
    if value not in ("sft", "pt"):
        translation.leave_out(key, reasons.NO_PREFERENCES)


def _tokens(translation: Translation, key: str, value: Any) -> None:
    tokens = value if isinstance(value, list) else str(value).split(",")
    earlier = translation.settings.get("tokenizer.add_tokens")
    every = [*(earlier.value if earlier else []), *(str(token).strip() for token in tokens)]
    translation.set("tokenizer.add_tokens", [*dict.fromkeys(every)], key)


def _attention(translation: Translation, key: str, value: Any) -> None:
    names = {"sdpa": "sdpa", "disabled": "eager"}
    if str(value) in names:
        translation.set("model.attention", names[str(value)], key)
    else:
        translation.not_needed.append(key)


ATTENTION = Rule("expressed", _attention)


def _fp8_backend(translation: Translation, key: str, value: Any) -> None:
    if value == "te":
        text = "scales of earlier steps are not supported; train.matmul_dtype has current ones"
        translation.leave_out(key, text)
    else:
        translation.not_needed.append(key)


_KEYS: Table = {
    **trainer_keys.TRAINER_KEYS,
    "adapter_name_or_path": to("adapter.path", str),
    "additional_target": with_others(),
    "apollo_*": missing(_OTHER_OPTIMIZER),
    "badam_*": missing(_OTHER_OPTIMIZER),
    "cache_dir": not_needed("HF_HOME sets the folder of the Hub's cache"),
    "cutoff_len": with_others(),
    "dataset": with_others(),
    "dataset_dir": with_others(),
    "default_system": missing("is added to chats without a system message; add it to the rows"),
    "disable_gradient_checkpointing": with_others(),
    "disable_shuffling": with_others(),
    "double_quantization": not_needed("quantization_bit says it"),
    "enable_liger_kernel": not_needed(reasons.EXACT_KERNEL),
    "eval_dataset": with_others(),
    "finetuning_type": with_others(),
    "flash_attn": ATTENTION,
    "fp8": rules.products_in_8_bits("fp8_rowwise"),
    "fp8_backend": Rule("expressed", _fp8_backend),
    "fp8_*": not_needed("weights are gathered in bf16, by every backend"),
    "freeze_extra_modules": with_others(),
    "freeze_multi_modal_projector": not_needed("only for models of images"),
    "freeze_language_model": not_needed("only for models of images"),
    "freeze_trainable_layers": with_others(),
    "freeze_trainable_modules": with_others(),
    "freeze_vision_tower": not_needed("only for models of images"),
    "galore_*": missing(_OTHER_OPTIMIZER),
    "hub_model_id": with_others(),
    "image_max_pixels": missing(_IMAGES, off=()),
    "interleave_probs": missing("weights of sources are data.mix.NAME.weight"),
    "infer_backend": not_needed(reasons.REPORTING),
    "kt_*": not_needed("use_kt says it"),
    "loraplus_lr_ratio": with_others(),
    "lora_alpha": with_others(),
    "lora_dropout": with_others(),
    "lora_rank": with_others(),
    "lora_target": with_others(),
    "mask_history": missing("flags of messages say which answers count, training: false"),
    "max_new_tokens": not_needed("no generation in training"),
    "max_samples": with_others(),
    "media_dir": not_needed("only for images"),
    "mix_strategy": missing("data.mix sees each row once; weights change that", off=("concat",)),
    "mixture_of_depths": missing("changes the model; it is trained as it is"),
    "model_name_or_path": to("model.path", str),
    "model_revision": to("model.revision", str),
    "moe_aux_loss_coef": to("model.router_aux_loss", float),
    "add_tokens": Rule("expressed", _tokens),
    "add_special_tokens": Rule("expressed", _tokens),
    "new_special_tokens": Rule("expressed", _tokens),
    "neat_packing": with_others(),
    "oft_*": missing("only LoRA adapters are supported; use adapter=lora"),
    "overwrite_cache": not_needed(reasons.READING),
    "packing": with_others(),
    "pissa_*": missing(_OTHER_WEIGHTS),
    "plot_loss": not_needed(reasons.REPORTING),
    "pref_beta": missing(reasons.NO_PREFERENCES, off=()),
    "pref_*": missing(reasons.NO_PREFERENCES, off=()),
    "preprocessing_batch_size": not_needed(reasons.READING),
    "preprocessing_num_workers": not_needed(reasons.READING),
    "pure_bf16": with_others(),
    "quantization_bit": Rule("expressed", _quantization),
    "quantization_method": not_needed("quantization_bit says it"),
    "quantization_type": not_needed("quantization_bit says it"),
    "ray_*": not_needed("axonlaunch starts its own ranks"),
    "resize_vocab": not_needed("the embedding grows with tokenizer.add_tokens"),
    "rope_scaling": missing("set it in model.config, {rope_scaling: {...}}"),
    "save_tokens": not_needed(reasons.REPORTING),
    "shift_attn": missing("this attention is not supported"),
    "stage": Rule("expressed", _stage),
    "streaming": not_needed("data.shuffle=shards starts before all rows are read"),
    "template": with_others(),
    "tokenized_path": not_needed(reasons.READING),
    "train_on_prompt": with_others(),
    "trust_remote_code": to("model.trust_remote_code", bool),
    "upcast_layernorm": not_needed("precision decides it"),
    "use_adam_mini": missing(_OTHER_OPTIMIZER),
    "use_apollo": missing(_OTHER_OPTIMIZER),
    "use_asft_loss": missing(_OTHER_LOSS),
    "asft_alpha": not_needed("use_asft_loss says it"),
    "use_badam": missing(_OTHER_OPTIMIZER),
    "apply_rope_fusion": not_needed(reasons.EXACT_KERNEL),
    "buffer_size": not_needed(reasons.READING),
    "compute_accuracy": not_needed(reasons.REPORTING),
    "create_new_adapter": missing("train.unfreeze and adapter.path train one adapter"),
    "data_shared_file_system": not_needed(reasons.READING),
    "eaft_alpha": with_others(),
    "early_stopping_steps": with_others(),
    "enable_thinking": missing("the template of the tokenizer decides", off=(True,)),
    "enable_torch_profiler": not_needed("train.profile.steps records steps"),
    "eval_on_each_dataset": not_needed(reasons.REPORTING),
    "hf_hub_token": not_needed("the token of `hf auth login`, or HF_TOKEN, is used"),
    "ignore_pad_token_for_loss": not_needed("padding is masked"),
    "include_effective_tokens_per_second": not_needed(reasons.REPORTING),
    "infer_dtype": not_needed("no generation in training"),
    "init_special_tokens": not_needed("new rows are the mean of the others"),
    "loraplus_lr_embedding": not_needed("loraplus_lr_ratio says it"),
    "low_cpu_mem_usage": not_needed(reasons.LAYOUT_ONLY),
    "print_param_status": not_needed(reasons.REPORTING),
    "profiler_*": not_needed("train.profile.steps records steps"),
    "recompute_*": not_needed(reasons.LAYOUT_ONLY),
    "split_special_tokens": missing("special tokens in texts are single tokens"),
    "tool_format": missing("the template of the tokenizer writes tools"),
    "train_from_scratch": to("model.init", lambda on: "random" if on is True else "pretrained"),
    "upcast_lmhead_output": not_needed("losses are computed in fp32"),
    "use_mca": not_needed(reasons.LAYOUT_ONLY),
    "use_megatron_bridge": not_needed(reasons.LAYOUT_ONLY),
    "megatron_bridge_args.*": not_needed(reasons.LAYOUT_ONLY),
    "use_unsloth_gc": not_needed(reasons.EXACT_KERNEL),
    "virtual_pipeline_model_parallel_size": not_needed(reasons.LAYOUT_ONLY),
    **dict.fromkeys(
        (
            *("do_sample", "length_penalty", "max_length", "num_beams", "repetition_penalty"),
            *("skip_special_tokens", "temperature", "top_k", "top_p"),
        ),
        not_needed("no generation in training"),
    ),
    "bias_activation_fusion": not_needed(reasons.EXACT_KERNEL),
    "context_parallel_size": with_others(),
    "do_predict": with_note("axonlaunch sample RUN generates text"),
    "expert_model_parallel_size": Rule("expressed", rules.set_expert_degree),
    "export_*": with_note("axonlaunch checkpoint export RUN writes the model"),
    "mixed_precision": not_needed("bf16 says it"),
    "moe_*": not_needed(reasons.EXACT_KERNEL),
    "overlap_*": not_needed(reasons.LAYOUT_ONLY),
    "pipeline_model_parallel_size": with_others(),
    "predict_with_generate": not_needed("no generation in training"),
    "recompute_granularity": to("train.activation_checkpointing", {"full": "full"}.__getitem__),
    "sequence_parallel": to("strategy.tensor.sequence_parallel", bool),
    "tensor_model_parallel_size": with_others(),
    "use_distributed_optimizer": not_needed(reasons.LAYOUT_ONLY),
    "use_packed_sequences": not_needed("packing decides it"),
    "use_dft_loss": to("train.dft", lambda on: on is True),
    "use_dora": with_others(),
    "use_eaft_loss": with_others(),
    "use_fast_tokenizer": not_needed("the fast tokenizer is used"),
    "use_galore": missing(_OTHER_OPTIMIZER),
    "use_kt": with_note("experts stay on the device; strategy.fsdp.cpu_offload=params moves them"),
    "use_llama_pro": missing(
        "trains the layers that were added; name them: train.freeze=['*'] "
        "train.unfreeze=['*.layers.4.*']"
    ),
    "use_muon": with_others(),
    "use_reentrant_gc": not_needed("recomputation has no variants"),
    "use_rslora": with_others(),
    "use_swanlab": with_note("loggers takes a class of yours"),
    "swanlab_*": not_needed(reasons.REPORTING),
    "use_unsloth": not_needed(reasons.EXACT_KERNEL),
    "use_v1_kernels": not_needed(reasons.EXACT_KERNEL),
    "val_size": with_others(),
    "video_fps": missing(_IMAGES, off=()),
    "video_max_pixels": missing(_IMAGES, off=()),
    "video_maxlen": missing(_IMAGES, off=()),
}


def _finish(translation: Translation) -> None:
    """Translate keys that depend on each other."""
    translation.use_hub_model("model_name_or_path")
    held_out = _set_data(translation)
    if translation.flag("disable_shuffling"):
        data_rules.set_in_order(translation, "disable_shuffling")
    shared = rules.set_degrees(
        translation,
        tensor="tensor_model_parallel_size",
        pipeline="pipeline_model_parallel_size",
        context="context_parallel_size",
    )
    rules.set_batch(
        translation,
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        divided_by=shared,
    )
    rules.set_length(translation, "num_train_epochs", "max_steps")
    rules.set_optimizer(translation, "optim")
    if translation.flag("use_muon"):
        translation.option("optimizer", "muon", "use_muon")
        translation.settings.pop("optimizer.betas", None)
        text = "updates are as large as AdamW's (optimizer.adjust_lr_fn); compare learning rates"
        translation.note("use_muon", text)
    ratio, origin = trainer_keys.final_ratio(translation)
    rules.set_schedule(translation, "lr_scheduler_type", final_lr_ratio=ratio, final_from=origin)
    rules.set_precision(translation, weights=_weights(translation))
    trainer_keys.set_clipping(translation)
    if translation.flag("use_eaft_loss"):
        exponent = translation.number("eaft_alpha", 1.0)
        translation.set("train.eaft", exponent, "use_eaft_loss", "eaft_alpha")
    trainer_keys.drop_smoothing_of_weighted_loss(translation)
    recomputes = not translation.flag("disable_gradient_checkpointing")
    if not translation.has("gradient_checkpointing"):
        chosen = "full" if recomputes else "none"
        key = "disable_gradient_checkpointing"
        translation.set("train.activation_checkpointing", chosen, key)
    rules.set_intervals(translation, held_out=held_out)
    rules.set_kept(translation)
    rules.set_early_stop(translation, "early_stopping_steps")
    trainer_keys.set_best_metric(translation)
    trainer_keys.set_push(translation)
    rules.set_router_loss(translation, "moe_aux_loss_coef")
    _refuse_quantized_weights(translation)
    _set_finetuning(translation)
    if base := BASES.get(str(translation.get("quantization_bit"))):
        rules.set_base(translation, {"quantization_bit": base})


def _weights(translation: Translation) -> tuple[str, ...]:
    """Return the keys because of which frozen or all weights are stored in bf16."""
    if translation.flag("pure_bf16"):
        return ("pure_bf16",)
    return ()


def _refuse_quantized_weights(translation: Translation) -> None:
    """Report weights that are quantized on the Hub, which the name of the repository says."""
    key = "model_name_or_path"
    words = re.split(r"[^a-z]+", str(translation.get(key)).lower())
    if {"awq", "gptq", "aqlm", "hqq", "eetq"} & {*words}:
        translation.leave_out(key, "has quantized weights; name the original, and set adapter.base")


def _set_finetuning(translation: Translation) -> None:
    kind = translation.get("finetuning_type")
    if kind == "lora":
        translation.option("adapter", "lora", "finetuning_type")
        rules.set_adapter(
            translation,
            rank="lora_rank",
            alpha=2 * translation.number("lora_rank", 8),
            targets=translation.get("lora_target"),
            targets_key="lora_target",
            unfrozen="additional_target",
        )
        if translation.has("loraplus_lr_ratio") and "adapter" in translation.options:
            scale = {
                "*.lora_B.weight": {"lr_scale": float(translation.number("loraplus_lr_ratio"))}
            }
            translation.set("optimizer.groups", scale, "loraplus_lr_ratio")
    elif kind == "freeze":
        freezing.set_trained_layers(translation)
    elif kind != "full":
        translation.leave_out("finetuning_type", "only LoRA adapters are supported; adapter=lora")
        translation.option("adapter", "lora", "finetuning_type")


def _set_data(translation: Translation) -> bool:
    """Set the dataset; return whether rows are held out for evaluation."""
    names = _names(translation.get("dataset"))
    info = _dataset_info(translation)
    is_pretraining = translation.get("stage") == "pt"
    sources = [
        _source(translation, info[name], is_pretraining=is_pretraining)
        for name in names
        if name in info
    ]
    if missing := [name for name in names if name not in info]:
        text = (
            f"dataset_info.json in {translation.get('dataset_dir')} describes no "
            f"{', '.join(missing)}; write dataset_dir, or set data.files"
        )
        translation.leave_out("dataset", text)
    if not names:
        translation.leave_out("dataset", "the file names no dataset; set data.files")
    kind = "documents" if is_pretraining else "chat"
    data_rules.set_sources(translation, sources or [{"data": kind}], "dataset")
    if translation.has("stage"):
        translation.option("data", kind, "stage")
    if translation.has("max_samples"):
        limit = int(translation.number("max_samples"))
        translation.set("data.limit", limit, "max_samples")
    length = int(translation.number("cutoff_len"))
    translation.set("data.sequence_length", length, "cutoff_len")
    if is_pretraining:
        packs = translation.flag("packing") or not translation.has("packing")
        translation.set("data.packing", "concat" if packs else "none", "stage", "packing")
    else:
        packs = translation.flag("packing") or translation.flag("neat_packing")
        key = "neat_packing" if translation.has("neat_packing") else "packing"
        translation.set("data.packing", "best_fit" if packs else "none", key)
        if translation.flag("train_on_prompt"):
            translation.set("data.train_on", "all", "train_on_prompt")
        if translation.has("template"):
            model = str(translation.get("model_name_or_path"))
            data_rules.set_template(translation, "template", model)
    if translation.has("eval_dataset"):
        files: list[str] = []
        for name in _names(translation.get("eval_dataset")):
            if name in info:
                files += _source(translation, info[name], is_pretraining=is_pretraining)["files"]
            else:
                translation.note("eval_dataset", "set data.held_out={files: [...]}")
        if files:
            data_rules.set_held_out_files(translation, {"files": files}, "eval_dataset")
            return True
    size = translation.number("val_size")
    if size:
        translation.set("data.held_out", int(size) if size >= 1 else size, "val_size")
    return bool(size)


def _names(value: Any) -> list[str]:
    names = value if isinstance(value, list) else str(value or "").split(",")
    return [str(name).strip() for name in names if str(name).strip()]


def _dataset_info(translation: Translation) -> dict[str, Any]:
    """Return the datasets that ``dataset_info.json`` describes, by name."""
    named = str(translation.get("dataset_dir"))
    for folder in (Path(named), translation.folder / named, *_parents(translation.folder, named)):
        file = folder / "dataset_info.json"
        if file.is_file():
            try:
                content = json.loads(read_text(file, at_most=_LARGEST))
            except (OSError, ValueError) as error:
                translation.leave_out("dataset_dir", f"{file} can't be read: {error}")
                return {}
            described: dict[str, Any] = {
                name: {**each, "folder": folder}
                for name, each in content.items()
                if isinstance(each, dict)
            }
            return described
    return {}


def _parents(folder: Path, named: str) -> list[Path]:
    """Return ``named`` in the folders above, because recipes are below the tool's folder."""
    return [parent / named for parent in list(folder.resolve().parents)[:3]]


def _source(
    translation: Translation, described: dict[str, Any], *, is_pretraining: bool
) -> dict[str, Any]:
    """Return the keys of ``data`` for a dataset of ``dataset_info.json``."""
    source: dict[str, Any] = {"data": "documents" if is_pretraining else "chat"}
    if "hf_hub_url" in described:
        source["files"] = [str(described["hf_hub_url"])]
        for name in ("subset", "split"):
            if described.get(name):
                source[name] = described[name]
    elif "file_name" in described:
        source["files"] = [str(described["folder"] / described["file_name"])]
    else:
        source["files"] = []
        translation.leave_out("dataset", "is made by a script; write its rows to a file")
    if described.get("ranking"):
        translation.leave_out("dataset", reasons.NO_PREFERENCES)
    if described.get("num_samples"):
        source["limit"] = int(described["num_samples"])
    columns, tags = described.get("columns", {}), described.get("tags", {})
    if is_pretraining:
        source["text_field"] = columns.get("prompt", "text")
        return source
    named = {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        **{name: name for name in ("system", "messages", "tools")},
    }
    fields = {named[name]: column for name, column in columns.items() if name in named}
    fields |= {
        ours: tags[tag]
        for tag, ours in (("role_tag", "role"), ("content_tag", "content"))
        if tag in tags
    }
    fields |= {
        role: tags[f"{role}_tag"]
        for role, sharegpt_role in (("user", "human"), ("assistant", "gpt"))
        if tags.get(f"{role}_tag", role) not in (role, sharegpt_role)
    }
    if fields:
        source["fields"] = fields
    return source


LLAMA_FACTORY = Format(
    name="llamafactory",
    marks=tuple(
        frozenset({"model_name_or_path", key})
        for key in ("finetuning_type", "stage", "cutoff_len", "template")
    ),
    keys=_KEYS,
    defaults={
        **trainer_keys.TRAINER_DEFAULTS,
        "learning_rate": 5e-5,
        "cutoff_len": 2048,
        "dataset_dir": "data",
        "disable_gradient_checkpointing": False,
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "packing": False,
        "stage": "sft",
        "val_size": 0.0,
    },
    finish=_finish,
    companions={"val_size": 0.1, "eval_strategy": "steps"},
)
"""LLaMA-Factory."""
