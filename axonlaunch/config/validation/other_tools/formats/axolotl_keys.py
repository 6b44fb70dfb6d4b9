"""Rules of axolotl's keys; those of data are in ``axolotl_data``."""

from __future__ import annotations

import re
from typing import Any

from axonlaunch.config.validation.other_tools import (
    data_rules,
    reasons,
    rules,
    trainer_keys,
)
from axonlaunch.config.validation.other_tools.formats.axolotl_data import DATA_KEYS
from axonlaunch.config.validation.other_tools.rules import (
    OFF,
    missing,
    not_needed,
    to,
    with_note,
    with_others,
)
from axonlaunch.config.validation.other_tools.translation import Rule, Table, Translation

_IMAGES = "models of images and sound are not supported; train on text"
_OTHER_METHOD = "this method is not supported; train without it"
_SIMULATED = "sparse and quantized weights are made after checkpoint export"
_ANY = "\0"
"""Stands for ``*`` of a pattern in a regular expression that is being translated."""
_PLAIN_PATTERN = re.compile(rf"\^?(?:[\w\-.{_ANY}]|\\\.|\[[\d-]+\])+\$?")


def _adapter(translation: Translation, key: str, value: Any) -> None:
    if value not in ("lora", "qlora"):
        translation.leave_out(key, "only LoRA adapters are supported; adapter=lora is used")


def _attention(translation: Translation, key: str, value: Any) -> None:
    names = {"sdpa": "sdpa", "eager": "eager", "flex_attention": "flex"}
    if str(value) in names:
        translation.set("model.attention", names[str(value)], key)
    else:
        translation.not_needed.append(key)


def _eager(translation: Translation, key: str, value: Any) -> None:
    if value is True:
        translation.set("model.attention", "eager", key)
    else:
        translation.not_needed.append(key)


def _tokens(translation: Translation, key: str, value: Any) -> None:
    if isinstance(value, list):
        translation.set("tokenizer.add_tokens", [str(token) for token in value], key)
    else:  # an earlier name of special_tokens
        data_rules.translate_special_tokens(translation, "tokens.")


def _plugins(translation: Translation, key: str, value: Any) -> None:
    kernels = ("liger", "cut_cross_entropy", "kernels", "expert_parallel", "swanlab")
    for name in value if isinstance(value, list) else [value]:
        if not any(f".{each}." in str(name).lower() for each in kernels):
            translation.leave_out(key, f"{name} is not supported; train without it")
    translation.not_needed.append(key)


def _unfrozen(translation: Translation, key: str, value: Any) -> None:
    """Translate regular expressions, which match the beginning of a name, to patterns."""
    if translation.flag("adapter"):
        text = "an adapter freezes the weights of the model; train.unfreeze trains some of them"
        translation.note(key, text)
        return
    patterns = []
    for written in value if isinstance(value, list) else [value]:
        text = re.sub(r"\[?\\d\]?\+|(?<!\\)\.[*+]", _ANY, str(written))
        text = re.sub(r"(?<=\d)(\[[\d-]+\])\+", r"\1", text)  # 4[4-9]+: 44 to 49
        if not _PLAIN_PATTERN.fullmatch(text):
            translation.leave_out(key, f"write {written} as a pattern in train.unfreeze")
            continue
        name = text.removeprefix("^").replace("\\.", ".").replace(_ANY, "*")
        name = re.sub(r"\blanguage_model\.?", "", name)  # of models of images
        patterns.append(name.removesuffix("$") if name.endswith("$") else f"{name}*")
    translation.set("train.freeze", ["*"], key)
    translation.set("train.unfreeze", patterns, key)


AXOLOTL_KEYS: Table = {
    **{
        key: rule
        for key, rule in trainer_keys.TRAINER_KEYS.items()
        if not key.startswith(("per_device", "num_train", "push_to_hub", "lr_scheduler"))
    },
    **DATA_KEYS,
    "activation_offloading": trainer_keys.OFFLOADING,
    "added_tokens_overrides.*": missing("the name of an unused token can't be changed", off=()),
    "auto_find_batch_size": missing("set train.micro_batch_size=auto"),
    "batch_flattening": not_needed("padding is masked"),
    "chunked_cross_entropy*": not_needed(reasons.EXACT_KERNEL),
    "deepcompile": not_needed(reasons.EXACT_KERNEL),
    "dion_*": missing("there is no optimizer dion; optimizer=custom takes any class"),
    "eager_attention": Rule("expressed", _eager),
    "embedding_lr": with_others(),
    "embedding_lr_scale": with_others(),
    "eval_sequence_len": missing("held-out rows are as long as training rows"),
    "fix_untrained_tokens": missing("embeddings of unused tokens stay as they are"),
    "float32": with_note("train.precision=fp32 is used"),
    "gc_*": not_needed("does not change training"),
    "gpu_memory_limit": not_needed(reasons.LAYOUT_ONLY),
    "heads_k_stride": not_needed(reasons.LAYOUT_ONLY),
    "hub_revision": with_note("checkpoint.push uploads to the main branch", off=("main", *OFF)),
    "include_tkps": not_needed(reasons.REPORTING),
    "layer_offloading": with_note("strategy.fsdp.cpu_offload=full moves weights to the host"),
    "lora_embedding_kernel": not_needed(reasons.EXACT_KERNEL),
    "lora_on_cpu": not_needed(reasons.LAYOUT_ONLY),
    "lr_groups": with_others(),
    "lr_scheduler_kwargs.*": missing("set the options of the schedule (scheduler.*)", off=()),
    "max_memory": not_needed(reasons.LAYOUT_ONLY),
    "mean_resizing_embeddings": not_needed("new rows are the mean of the others"),
    "overrides_of_model_config.*": missing("set it in model.config", off=()),
    "overrides_of_model_kwargs.*": missing("has no counterpart", off=()),
    "pad_to_multiple_of": not_needed("padding is masked"),
    "peft_autocast_adapter_dtype": not_needed("adapters are stored in fp32"),
    "peft_init_lora_weights": missing(
        "adapters begin with random A and zero B; train with adapter=lora", off=(True, "true")
    ),
    "peft_layers_*": missing("name the layers in adapter.targets", off=()),
    "profiler_steps*": not_needed("train.profile.steps records steps"),
    "pretraining_sample_concatenation": not_needed("packing decides it"),
    "qgalore_*": missing("there is no optimizer galore; optimizer=custom takes any class"),
    "ring_attn_func": not_needed(reasons.EXACT_KERNEL),
    "sage_attention": not_needed(reasons.EXACT_KERNEL),
    "save_first_step": not_needed("does not change training"),
    "sdpa_varlen": not_needed(reasons.EXACT_KERNEL),
    "selective_checkpointing.*": with_note("set train.activation_checkpointing=selective"),
    "sequence_parallel_degree": with_others(),
    "torch_compile_options.*": not_needed(reasons.EXACT_KERNEL),
    "type_of_model": not_needed("transformers knows the class of a model"),
    "use_comet": with_note("loggers takes a class of yours"),
    "use_pose": missing("positions are not skipped; set data.sequence_length"),
    "use_trackio": with_note("loggers takes a class of yours"),
    "adam_eps": with_others(),
    "adapter": Rule("expressed", _adapter),
    "attn_implementation": Rule("expressed", _attention),
    "auto_resume_from_checkpoints": not_needed("checkpoint.resume=auto is the default"),
    "base_model": to("model.path", str),
    "base_model_config": not_needed("base_model has the configuration"),
    "base_model_ignore_patterns": not_needed("weights are read from safetensors"),
    "batch_size": with_others(),
    "bfloat16": with_others(),
    "bnb_config_kwargs.*": not_needed("load_in_4bit says it"),
    "center_rewards_coefficient": missing(reasons.NO_PREFERENCES),
    "cls_model_config": not_needed("the configuration of the model says it"),
    "comet_*": not_needed(reasons.REPORTING),
    "context_parallel_size": with_others(),
    "cosine_constant_lr_ratio": missing("scheduler=wsd has a constant part"),
    "cosine_min_lr_ratio": with_others(),
    "curriculum_sampling": with_others(),
    "cut_cross_entropy": with_note(
        "train.loss_chunk=1024 saves the memory of logits, or train.loss_kernel=liger"
    ),
    "ddp": not_needed(reasons.LAYOUT_ONLY),
    "ddp_*": not_needed(reasons.LAYOUT_ONLY),
    "debug": not_needed(reasons.REPORTING),
    "device_map": not_needed(reasons.LAYOUT_ONLY),
    "device_map.*": not_needed(reasons.LAYOUT_ONLY),
    "diffusion.*": missing("is a loss of its own; train.loss takes one of yours", off=()),
    "do_causal_lm_eval": not_needed(reasons.REPORTING),
    "dp_replicate_size": with_others(),
    "dp_shard_size": with_others(),
    "dsv4_*": not_needed(reasons.EXACT_KERNEL),
    "eaft_alpha": with_others(),
    "eaft_k": missing("the 20 most likely classes count", off=(20,)),
    "ebft.*": missing(reasons.NO_PREFERENCES, off=()),
    "eta_min": with_note("axolotl ignores it; cosine_min_lr_ratio is its key"),
    "eval_batch_size": not_needed("evaluation has the batches of training"),
    "eval_causal_lm_metrics": not_needed(reasons.REPORTING),
    "eval_max_new_tokens": not_needed(reasons.REPORTING),
    "eval_table_size": not_needed(reasons.REPORTING),
    "evals_per_epoch": with_others(),
    "experimental_skip_move_to_device": not_needed(reasons.LAYOUT_ONLY),
    "expert_parallel_size": Rule("expressed", rules.set_expert_degree),
    "expert_parallel_*": not_needed(reasons.LAYOUT_ONLY),
    "experts_implementation": not_needed(reasons.EXACT_KERNEL),
    "flash_attention": not_needed(reasons.EXACT_KERNEL),
    "flash_attn_*": not_needed(reasons.EXACT_KERNEL),
    "flash_optimum": not_needed(reasons.EXACT_KERNEL),
    "flex_attention": not_needed(reasons.EXACT_KERNEL),
    "flex_attn_compile_kwargs.*": not_needed(reasons.EXACT_KERNEL),
    "float16": with_others(),
    "fp8": rules.products_in_8_bits("fp8_tensorwise"),
    "fp8_*": not_needed("weights are gathered in bf16, by every backend"),
    "freeze_mm_modules": not_needed("only for models of images"),
    "full_finetune": not_needed("adapter says it"),
    "fused_attn_kernel": not_needed(reasons.EXACT_KERNEL),
    "gemma4_hybrid_attn_impl": not_needed(reasons.EXACT_KERNEL),
    "gptq": missing("GPTQ weights can't be read; adapter.base quantizes the original weights"),
    "gptq_*": not_needed("gptq says it"),
    "gradient_checkpointing": trainer_keys.CHECKPOINTING,
    "hf_use_auth_token": not_needed("the token of `hf auth login`, or HF_TOKEN, is used"),
    "is_*_derived_model": not_needed("transformers knows the architecture"),
    "jagged_restart_*": missing("restarts of the schedule need scheduler=custom"),
    "kto_*": missing(reasons.NO_PREFERENCES, off=()),
    "liger_*": not_needed(reasons.EXACT_KERNEL),
    "liger_fused_linear_cross_entropy": with_note("train.loss_kernel=liger uses this kernel"),
    "lisa_*": missing(_OTHER_METHOD),
    "llama4_linearized_experts": not_needed("adapter.targets=[experts.*] adapts packed experts"),
    "llmcompressor.*": missing(_SIMULATED, off=()),
    "load_in_4bit": rules.base_bits(),
    "load_in_8bit": rules.base_bits(),
    "logging_steps": to("train.log_every", lambda steps: max(1, int(steps))),
    "lora_alpha": with_others(),
    "lora_dropout": with_others(),
    "lora_fan_in_fan_out": not_needed("layers are recognized by their class"),
    "lora_mlp_kernel": not_needed(reasons.EXACT_KERNEL),
    "lora_model_dir": to("adapter.path", str),
    "lora_modules_to_save": with_others(),
    "lora_o_kernel": not_needed(reasons.EXACT_KERNEL),
    "lora_qkv_kernel": not_needed(reasons.EXACT_KERNEL),
    "lora_r": with_others(),
    "lora_target_linear": with_others(),
    "lora_target_modules": with_others(),
    "lora_target_parameters": with_others(),
    "loraplus_lr_ratio": with_others(),
    "loraplus_lr_embedding": not_needed("loraplus_lr_ratio says it"),
    "loss_watchdog_*": not_needed("a loss that is not finite ends the run with its step"),
    "low_cpu_mem_usage": not_needed(reasons.LAYOUT_ONLY),
    "lr_quadratic_warmup": missing("the warm-up is linear; scheduler=custom takes another one"),
    "lr_scheduler": with_others(),
    "max_grad_norm": with_others(),
    "max_steps": with_others(),
    "micro_batch_size": with_others(),
    "mlflow_*": not_needed(reasons.REPORTING),
    "model_config.output_router_logits": not_needed("model.router_aux_loss says it"),
    "model_config.*": missing("set it in model.config", off=()),
    "model_quantization_config": with_note("weights are read in bf16"),
    "model_quantization_config_kwargs.*": not_needed("model_quantization_config says it"),
    "model_type": not_needed("transformers knows the class of a model"),
    "neftune_noise_alpha": missing("noise on embeddings is not supported; train without it"),
    "num_epochs": with_others(),
    "num_labels": missing(reasons.NO_PREFERENCES),
    "nvfp4_*": not_needed(reasons.EXACT_KERNEL),
    "optimizer": with_others(),
    "orpo_alpha": missing(reasons.NO_PREFERENCES),
    "otel_*": not_needed(reasons.REPORTING),
    "peft.*": missing("adapters begin with random A and zero B; train with adapter=lora"),
    "peft_use_dora": with_others(),
    "peft_use_rslora": with_others(),
    "plugins": Rule("expressed", _plugins),
    "process_reward_model": missing(reasons.NO_PREFERENCES),
    "processor_type": missing(_IMAGES, off=()),
    "project_name": not_needed(reasons.REPORTING),
    "push_dataset_to_hub": not_needed(reasons.READING),
    "qat.activation_dtype": with_others(),
    "qat.fake_quant_after_n_steps": with_others(),
    "qat.group_size": with_others(),
    "qat.quantize_embedding": missing("embeddings are not rounded; leave it out"),
    "qat.weight_dtype": with_others(),
    "quantize_moe_experts": not_needed("adapter.base quantizes packed experts too"),
    "ray_num_workers": not_needed("axonlaunch starts its own ranks"),
    "reinit_weights": to("model.init", lambda on: "random" if on is True else "pretrained"),
    "relora": missing(_OTHER_METHOD),
    "relora_*": not_needed("relora says it"),
    "resize_token_embeddings_to_32x": not_needed("the vocabulary stays as it is"),
    "revision_of_model": to("model.revision", str),
    "reward_model": missing(reasons.NO_PREFERENCES),
    "rl": missing(reasons.NO_PREFERENCES),
    "rl_beta": missing(reasons.NO_PREFERENCES),
    "saves_per_epoch": with_others(),
    "special_tokens.*": with_others(),
    "spectrum_*": missing("name the trained parameters in train.unfreeze"),
    "strict": not_needed(reasons.READING),
    "swanlab_*": not_needed(reasons.REPORTING),
    "tensor_parallel_size": with_others(),
    "tiled_mlp": not_needed(reasons.EXACT_KERNEL),
    "tokenizer_config": to("tokenizer.path", str),
    "tokenizer_legacy": not_needed("the tokenizer's files say it"),
    "tokenizer_type": not_needed("transformers knows the class of a tokenizer"),
    "tokenizer_use_fast": not_needed("the fast tokenizer is used"),
    "tokenizer_use_mistral_common": with_note("the tokenizer of transformers is used"),
    "tokens": Rule("expressed", _tokens),
    "torch_dtype": with_others(),
    "torchdistx_path": not_needed(reasons.LAYOUT_ONLY),
    "trackio_*": not_needed(reasons.REPORTING),
    "trl.*": missing(reasons.NO_PREFERENCES, off=()),
    "trust_remote_code": to("model.trust_remote_code", bool),
    "unfrozen_parameters": Rule("expressed", _unfrozen),
    "use_dsv4_kernels": not_needed(reasons.EXACT_KERNEL),
    "use_eaft": with_others(),
    "use_glm_dsa_kernels": not_needed(reasons.EXACT_KERNEL),
    "use_kernels": not_needed(reasons.EXACT_KERNEL),
    "use_mlflow": not_needed(reasons.REPORTING),
    "use_onebitllms": missing(_OTHER_METHOD),
    "use_otel_metrics": not_needed(reasons.REPORTING),
    "use_ray": not_needed("axonlaunch starts its own ranks"),
    "use_scattermoe": not_needed(reasons.EXACT_KERNEL),
    "use_sonicmoe": not_needed(reasons.EXACT_KERNEL),
    "use_swanlab": with_note("loggers takes a class of yours"),
    "use_tensorboard": with_others(),
    "use_wandb": with_others(),
    "vllm.*": missing(reasons.NO_PREFERENCES, off=()),
    "wandb_entity": with_others(),
    "wandb_project": with_others(),
    "wandb_mode": with_others(),
    "wandb_name": to("name", str),
    "wandb_*": not_needed(reasons.REPORTING),
    "xformers_attention": not_needed(reasons.EXACT_KERNEL),
    "sdp_attention": not_needed(reasons.EXACT_KERNEL),
}
