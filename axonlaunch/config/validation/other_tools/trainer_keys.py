"""Keys of transformers' ``TrainingArguments``, which several tools pass on."""

from __future__ import annotations

from typing import Any

from axonlaunch.config.precision import PRECISIONS
from axonlaunch.config.validation.other_tools import reasons
from axonlaunch.config.validation.other_tools.rules import (
    OFF,
    missing,
    not_needed,
    to,
    with_note,
    with_others,
)
from axonlaunch.config.validation.other_tools.translation import Rule, Table, Translation

TRAINER_DEFAULTS = {
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 8,
    "optim": "adamw_torch",
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "logging_steps": 500,
    "seed": 42,
}
"""Values of transformers that differ from those of axonlaunch."""


def _resume(translation: Translation, key: str, value: Any) -> None:
    if value in (True, "auto", *OFF):
        translation.not_needed.append(key)  # a run resumes from its folder anyway
    else:
        text = "is a checkpoint of another tool; model.weights=FOLDER starts from its weights"
        translation.leave_out(key, text)


def set_loggers(translation: Translation, names: list[str], key: str, **wandb: Any) -> None:
    """Set the loggers by names of transformers' integrations."""
    loggers: list[Any] = []
    for name in names:
        if name == "wandb":
            loggers.append({"name": "wandb", **wandb} if wandb else "wandb")
        elif name in ("tensorboard", "mlflow"):
            loggers.append(name)
        elif name == "all":
            translation.note(key, "name the loggers, loggers=[tensorboard,wandb]")
        elif name not in ("none", "None"):
            translation.note(key, f"there is no logger {name}; loggers takes a class of yours")
    if loggers:
        translation.set("loggers", loggers, key)


def _report_to(translation: Translation, key: str, value: Any) -> None:
    set_loggers(translation, value if isinstance(value, list) else [str(value)], key)


def _checkpointing(translation: Translation, key: str, value: Any) -> None:
    mode = "full" if value in (True, "true", "unsloth") else "none"
    keys = [key]
    if translation.flag(_OFFLOADING):
        mode = "offload"
        keys.append(_OFFLOADING)
    elif isinstance(value, str) and value.startswith("offload"):
        mode = "offload"
    if str(value).endswith("disk"):
        translation.note(key, "inputs of blocks are in host memory, not on a disk")
    translation.set("train.activation_checkpointing", mode, *keys)


def _offloading(translation: Translation, key: str, value: Any) -> None:
    if value in OFF:
        translation.not_needed.append(key)
        return
    translation.set("train.activation_checkpointing", "offload", key)
    if not translation.flag("gradient_checkpointing"):
        translation.note(key, "blocks are recomputed from inputs that are in host memory")


def drop_smoothing_of_weighted_loss(translation: Translation) -> None:
    """Drop label smoothing with the losses of DFT and EAFT, whose functions there ignore it."""
    smoothing = translation.settings.get("train.label_smoothing")
    chosen = [translation.settings.get(key) for key in ("train.dft", "train.eaft")]
    if smoothing and any(setting and setting.value for setting in chosen):
        del translation.settings["train.label_smoothing"]
        if smoothing.value:
            name = "DFT" if chosen[0] and chosen[0].value else "EAFT"
            text = f"{translation.tool.name} ignores it with the loss of {name}"
            translation.note("label_smoothing_factor", text)


def _load_best(translation: Translation, key: str, value: Any) -> None:
    if value in OFF:
        translation.not_needed.append(key)
        return
    translation.set("checkpoint.keep_best", 1, key)
    translation.note(key, _LAST)


_LAST = (
    "the best checkpoint is kept, and the last one is uploaded; `axonlaunch checkpoint export "
    "FOLDER_OF_THE_STEP --push ORG/NAME` uploads the best"
)
_OFFLOADING = "activation_offloading"
CHECKPOINTING = Rule("expressed", _checkpointing)
OFFLOADING = Rule("expressed", _offloading)
RESUME = Rule("expressed", _resume)


def _zero_stage(translation: Translation, key: str, value: Any) -> None:
    text = str(value).lower()
    stages = {"3": "fsdp", "2": "zero2", "1": "zero1", "0": "ddp"}
    digits = [c for c in text.replace("zero", "z").split("z", 1)[-1] if c.isdigit()]
    if isinstance(value, dict):
        zero = value.get("zero_optimization")
        digits = [str(zero.get("stage"))] if isinstance(zero, dict) else []
    if (stage := stages.get(digits[0] if digits else "")) is not None:
        translation.option("strategy", stage, key)
    elif value not in OFF:
        translation.leave_out(
            key, "it does not say which stage of ZeRO; write strategy=zero1, zero2 or fsdp"
        )
    if "offload" in text and "none" not in text:
        translation.note(key, "strategy.fsdp.cpu_offload=full moves states to host memory")


def _fsdp(translation: Translation, key: str, value: Any) -> None:
    if value in OFF:
        translation.not_needed.append(key)
        return
    names = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    option = "hsdp" if "hybrid_shard" in names else "fsdp"
    translation.option("strategy", "zero2" if "shard_grad_op" in names else option, key)
    if "offload" in names:
        translation.set("strategy.fsdp.cpu_offload", "full", key)


def _offload(translation: Translation, key: str, value: Any) -> None:
    if value in (True, "true"):
        translation.option("strategy", "fsdp", key)
        translation.set("strategy.fsdp.cpu_offload", "full", key)


def _fsdp_checkpointing(translation: Translation, key: str, value: Any) -> None:
    if value is True:
        translation.set("train.activation_checkpointing", "full", key)


DEEPSPEED_RULE, FSDP_RULE = Rule("expressed", _zero_stage), Rule("expressed", _fsdp)
FSDP_KEYS: Table = {
    "fsdp": FSDP_RULE,
    "fsdp_config.offload_params": Rule("expressed", _offload),
    "fsdp_config.fsdp_offload_params": Rule("expressed", _offload),
    "fsdp_config.activation_checkpointing": Rule("expressed", _fsdp_checkpointing),
    "fsdp_config.fsdp_activation_checkpointing": Rule("expressed", _fsdp_checkpointing),
    "fsdp_config.*": not_needed(reasons.LAYOUT_ONLY),
    "fsdp_version": not_needed(reasons.LAYOUT_ONLY),
    "fsdp_transformer_layer_cls_to_wrap": not_needed("blocks of the model are found"),
    "deepspeed": DEEPSPEED_RULE,
}

_NO_NOISE = "noise on embeddings is not supported; train without it"

TRAINER_KEYS: Table = {
    "adam_beta1": with_others(),
    "adam_beta2": with_others(),
    "adam_epsilon": with_others(),
    "average_tokens_across_devices": not_needed("the loss is the mean over all counted tokens"),
    "bf16_full_eval": not_needed("evaluation has the precision of training"),
    "data_seed": not_needed("seed orders the samples"),
    "dataloader_drop_last": not_needed(reasons.READING),
    "dataloader_num_workers": not_needed(reasons.READING),
    "dataloader_persistent_workers": not_needed(reasons.READING),
    "dataloader_pin_memory": not_needed(reasons.READING),
    "dataloader_prefetch_factor": not_needed(reasons.READING),
    "ddp_bucket_cap_mb": to("strategy.ddp.bucket_size_mb", float),
    "ddp_find_unused_parameters": not_needed(reasons.LAYOUT_ONLY),
    "ddp_timeout": not_needed("hanging ranks are found by their heartbeat"),
    "disable_tqdm": not_needed(reasons.REPORTING),
    "do_eval": not_needed("eval_strategy says it"),
    "do_train": not_needed("the command says it"),
    "early_stopping_patience": with_others(),
    "eval_accumulation_steps": not_needed("losses are summed on the device"),
    "eval_on_start": to("train.eval_at_start", bool),
    "eval_steps": with_others(),
    "eval_strategy": with_others(),
    "evaluation_strategy": with_others(),
    "full_determinism": to("train.deterministic", bool),
    "gradient_accumulation_steps": with_others(),
    "gradient_checkpointing": CHECKPOINTING,
    "gradient_checkpointing_kwargs.*": not_needed("recomputation has no variants"),
    "greater_is_better": with_others(),
    "group_by_length": with_note("rows are in random order; data.packing=best_fit avoids padding"),
    "hub_always_push": not_needed("the last checkpoint is uploaded"),
    "hub_model_id": with_others(),
    "hub_model_revision": with_note(
        "checkpoint.push uploads to the main branch", off=("main", *OFF)
    ),
    "hub_private_repo": with_others(),
    "hub_strategy": not_needed("the last checkpoint is uploaded"),
    "hub_token": not_needed("the token of `hf auth login`, or HF_TOKEN, is used"),
    "include_num_input_tokens_seen": not_needed(reasons.REPORTING),
    "include_tokens_per_second": not_needed(reasons.REPORTING),
    "label_smoothing_factor": to("train.label_smoothing", float),
    "learning_rate": to("optimizer.lr", float),
    "load_best_model_at_end": Rule("expressed", _load_best),
    "local_rank": not_needed("set by the launcher"),
    "log_level": not_needed(reasons.REPORTING),
    "log_level_replica": not_needed(reasons.REPORTING),
    "logging_dir": not_needed(reasons.REPORTING),
    "logging_first_step": not_needed(reasons.REPORTING),
    "logging_steps": to("train.log_every", lambda steps: max(1, int(steps))),
    "logging_strategy": not_needed(reasons.REPORTING),
    "lr_scheduler_kwargs.min_lr": with_others(),
    "lr_scheduler_kwargs.min_lr_rate": with_others(),
    "lr_scheduler_kwargs.*": missing("set the options of the schedule (scheduler.*)"),
    "lr_scheduler_type": with_others(),
    "max_grad_norm": with_others(),
    "max_steps": with_others(),
    "metric_for_best_model": with_others(),
    "neftune_noise_alpha": missing(_NO_NOISE),
    "no_cuda": not_needed("launch.device says it"),
    "num_train_epochs": with_others(),
    "optim": with_others(),
    "optim_args": missing("set the options of the optimizer (optimizer.*)"),
    "output_dir": to("run_dir", str),
    "overwrite_output_dir": to("checkpoint.overwrite", bool),
    "per_device_eval_batch_size": not_needed("evaluation has the batches of training"),
    "per_device_train_batch_size": with_others(),
    "prediction_loss_only": not_needed(reasons.REPORTING),
    "push_to_hub": with_others(),
    "remove_unused_columns": not_needed("only used columns are read"),
    "report_to": Rule("expressed", _report_to),
    "resume_from_checkpoint": RESUME,
    "run_name": to("name", str),
    "save_on_each_node": not_needed("each node saves its part of a checkpoint"),
    "save_only_model": not_needed("checkpoints have optimizer states, so that runs resume"),
    "save_safetensors": not_needed("checkpoint export writes safetensors"),
    "save_steps": with_others(),
    "save_strategy": with_others(),
    "save_total_limit": with_others(),
    "seed": to("seed", int),
    "tf32": to("train.matmul_precision", lambda on: "high" if on is True else "highest"),
    "torch_compile": to("train.compile", lambda on: on is True),
    "torch_compile_backend": not_needed("inductor"),
    "torch_compile_mode": with_note("set train.compile_mode=max-autotune-no-cudagraphs"),
    "torch_empty_cache_steps": not_needed("does not change training"),
    "use_liger_kernel": not_needed(reasons.EXACT_KERNEL),
    "warmup_ratio": with_others(),
    "warmup_steps": with_others(),
    "weight_decay": with_others(),
    **FSDP_KEYS,
    **dict.fromkeys(PRECISIONS, with_others()),
    "accelerator_config.*": not_needed("rows are dispatched by their index"),
}
"""Rules of the arguments that published recipes use."""


def set_clipping(translation: Translation, key: str = "max_grad_norm") -> None:
    """Set the largest norm of gradients; 0 switches clipping off."""
    limit = float(translation.number(key, 1.0))
    translation.set("train.grad_clip", limit if limit > 0 else None, key)


_ACCURACIES = ("accuracy", "mean_token_accuracy")


def set_best_metric(translation: Translation) -> None:
    """Set the metric that early stopping and the best checkpoint follow, after both are set."""
    if not {"train.early_stop", "checkpoint.keep_best"} & translation.settings.keys():
        return
    key, order = "metric_for_best_model", "greater_is_better"
    name = str(translation.get(key, "loss")).removeprefix("eval_")
    is_accuracy = name in _ACCURACIES
    if not is_accuracy and name != "loss":
        translation.leave_out(key, "the evaluation loss decides; train.best_metric names a metric")
    elif translation.has(order) and translation.flag(order) is not is_accuracy:
        best = "highest" if is_accuracy else "lowest"
        translation.leave_out(order, f"the best {name} is the {best}")
    elif is_accuracy:
        translation.set("metrics", ["accuracy"], key)
        translation.set("train.best_metric", "accuracy", key, note="over all counted tokens")


def final_ratio(translation: Translation) -> tuple[float, str]:
    """Return the last learning rate as a fraction of the peak, and the key that sets it."""
    rate, ratio = "lr_scheduler_kwargs.min_lr", "lr_scheduler_kwargs.min_lr_rate"
    if translation.has(ratio):
        return float(translation.number(ratio)), ratio
    if translation.has(rate) and (peak := translation.number("learning_rate")):
        return translation.number(rate) / peak, rate
    return 0.0, ""


def set_push(translation: Translation) -> None:
    """Set the repository that the model is uploaded to."""
    name = translation.get("hub_model_id")
    if not translation.flag("push_to_hub") and not (
        name and "push_to_hub" not in translation.tool.keys
    ):
        return
    if not isinstance(name, str) or "/" not in name:
        text = "names no account; write checkpoint.push=ORG/NAME to upload the model"
        translation.note("hub_model_id" if name else "push_to_hub", text)
    elif translation.settings.get("checkpoint.every") and (
        translation.settings["checkpoint.every"].value != 0
    ):
        translation.set("checkpoint.push", name, "hub_model_id")
        if translation.flag("hub_private_repo"):
            translation.set("checkpoint.push_private", True, "hub_private_repo")
    else:
        translation.note("hub_model_id", "nothing is saved; set checkpoint.every to upload it")
