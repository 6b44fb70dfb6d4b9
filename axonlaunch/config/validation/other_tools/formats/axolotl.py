"""Configurations of axolotl's ``train`` command; the rules of keys are in ``axolotl_keys``."""

from __future__ import annotations

from collections.abc import Mapping

from axonlaunch.config.validation.other_tools import (
    data_rules,
    quantization,
    rules,
    trainer_keys,
)
from axonlaunch.config.validation.other_tools.formats.axolotl_data import set_data
from axonlaunch.config.validation.other_tools.formats.axolotl_keys import AXOLOTL_KEYS
from axonlaunch.config.validation.other_tools.translation import Format, Translation


def _finish(translation: Translation) -> None:
    """Translate keys that depend on each other."""
    translation.use_hub_model("base_model")
    held_out = set_data(translation)
    if translation.flag("curriculum_sampling"):
        data_rules.set_in_order(translation, "curriculum_sampling")
    shared = _set_layout(translation)
    rules.set_batch(
        translation,
        "micro_batch_size",
        "gradient_accumulation_steps",
        divided_by=shared,
        of_device="batch_size",
    )
    rules.set_length(translation, "num_epochs", "max_steps")
    _set_optimizer(translation)
    _set_precision(translation)
    trainer_keys.set_clipping(translation)
    _set_weighted_loss(translation)
    _set_intervals(translation, held_out=held_out)
    rules.set_kept(translation)
    rules.set_early_stop(translation)
    trainer_keys.set_best_metric(translation)
    trainer_keys.set_push(translation)
    if "checkpoint.push" in translation.settings:
        translation.set("checkpoint.push_private", True, "hub_model_id")
    rules.set_router_loss(translation, "model_config.output_router_logits")
    _set_adapter(translation)
    rules.set_base(translation)
    quantization.set_axolotl_types(translation)
    _set_loggers(translation)
    data_rules.translate_special_tokens(translation, "special_tokens.")


def _set_layout(translation: Translation) -> int:
    """Set the degrees of the layout; return the number of devices with equal samples."""
    earlier = translation.has("sequence_parallel_degree")
    shared = rules.set_degrees(
        translation,
        tensor="tensor_parallel_size",
        context="sequence_parallel_degree" if earlier else "context_parallel_size",
    )
    shards = int(translation.number("dp_shard_size", 1))
    replicas = int(translation.number("dp_replicate_size", 1))
    if replicas > 1 and shards > 1:
        translation.option("strategy", "hsdp", "dp_shard_size", "dp_replicate_size")
        translation.set("strategy.fsdp.replicate", replicas, "dp_replicate_size")
    elif shards > 1:
        translation.option("strategy", "fsdp", "dp_shard_size")
    return shared


def _set_optimizer(translation: Translation) -> None:
    eps = "adam_eps" if translation.has("adam_eps") else "adam_epsilon"
    rules.set_optimizer(translation, "optimizer", eps=eps)
    ratio, origin = 0.0, ""
    if translation.has("cosine_min_lr_ratio"):
        origin = "cosine_min_lr_ratio"
        ratio = float(translation.number(origin))
    rules.set_schedule(
        translation,
        "lr_scheduler",
        final_lr_ratio=ratio,
        final_from=origin,
        default_share=0.03,
        default_steps=100,
    )
    _set_groups(translation)


def _set_groups(translation: Translation) -> None:
    """Set the learning rates of embeddings and of named modules; later patterns have priority."""
    groups: dict[str, dict[str, float]] = {}
    rate = "embedding_lr" if translation.has("embedding_lr") else "embedding_lr_scale"
    keys = [rate]
    if translation.has(rate):
        option = "lr" if rate == "embedding_lr" else "lr_scale"
        groups["*embed_tokens*"] = {option: translation.number(rate), "weight_decay": 0.0}
    for group in translation.items("lr_groups"):
        if isinstance(group, Mapping) and isinstance(group.get("lr"), int | float):
            groups |= {f"*{name}*": {"lr": group["lr"]} for name in group.get("modules", ())}
            keys.append("lr_groups")
    if groups:
        translation.set("optimizer.groups", groups, *dict.fromkeys(keys))


def _set_weighted_loss(translation: Translation) -> None:
    """Set the loss of EAFT; gradients are clipped in proportion to axolotl's larger weights."""
    if not translation.flag("use_eaft"):
        return
    exponent = translation.number("eaft_alpha", 1.0)
    translation.set("train.eaft", exponent, "use_eaft", "eaft_alpha")
    if (limit := translation.settings["train.grad_clip"]).value is not None:
        note = "for weights that are smaller than those of axolotl"
        clipped = limit.value / 3.0**exponent
        translation.set("train.grad_clip", clipped, *limit.keys, note=note)
    text = (
        "axolotl does not divide the entropy by 3; Adam's updates are the same, and its loss larger"
    )
    translation.note("use_eaft", text)


def _set_precision(translation: Translation) -> None:
    for alias in ("bfloat16", "float16"):
        name = rules.precision_named(alias)
        if translation.flag(alias) and not translation.flag(name):
            translation.set("train.precision", name, alias)
            return
    rules.set_precision(translation)
    if not translation.flag("adapter") and translation.flag("bf16"):
        text = "weights are stored in fp32, not in bf16; train.param_dtype=bf16 halves them"
        translation.note("bf16", text)


def _set_intervals(translation: Translation, *, held_out: bool) -> None:
    rules.set_intervals(translation, held_out=held_out, steps_are_enough=True)
    for key, target in {
        "evals_per_epoch": "train.eval_every",
        "saves_per_epoch": "checkpoint.every",
    }.items():
        number = translation.number(key)
        if number > 0 and (target != "train.eval_every" or held_out):
            length = "1" if number == 1 else f"{1 / number:.6g}"
            translation.set(target, f"{length} epoch", key)
        elif translation.has(key) and target == "checkpoint.every":
            translation.set(target, 0, key)
    if held_out and not any(
        translation.has(key) for key in ("eval_strategy", "evals_per_epoch", "eval_steps")
    ):
        translation.set("train.eval_every", "1 epoch", "val_set_size")


def _set_adapter(translation: Translation) -> None:
    if not translation.flag("adapter"):
        return
    translation.option("adapter", "lora", "adapter")
    targets, key = translation.get("lora_target_modules"), "lora_target_modules"
    if translation.flag("lora_target_linear"):
        targets, key = "all-linear", "lora_target_linear"
    if translation.has("lora_target_parameters"):
        extra = [f"*{name}" for name in translation.items("lora_target_parameters")]
        if isinstance(targets, str):
            targets = ["(.*)"] if targets == "all-linear" else rules.named_layers(targets)
        targets = [*(targets or []), *extra]
    rules.set_adapter(
        translation,
        rank="lora_r",
        alpha=16,
        targets=targets or "all-linear",
        targets_key=key,
        unfrozen="lora_modules_to_save",
    )
    if translation.has("loraplus_lr_ratio") and "adapter" in translation.options:
        scale = {"*.lora_B.weight": {"lr_scale": float(translation.number("loraplus_lr_ratio"))}}
        translation.set("optimizer.groups", scale, "loraplus_lr_ratio")


def _set_loggers(translation: Translation) -> None:
    names = []
    if translation.has("wandb_project") or translation.flag("use_wandb"):
        names.append("wandb")
    if translation.flag("use_tensorboard"):
        names.append("tensorboard")
    wandb = {
        ours: translation.get(wandb_key)
        for wandb_key, ours in (("wandb_project", "project"), ("wandb_entity", "entity"))
        if translation.has(wandb_key)
    }
    key = "wandb_project" if translation.has("wandb_project") else "use_tensorboard"
    if names:
        trainer_keys.set_loggers(translation, names, key, **wandb)


AXOLOTL = Format(
    name="axolotl",
    marks=(frozenset({"base_model"}),),
    keys=AXOLOTL_KEYS,
    defaults={
        **{
            key: value
            for key, value in trainer_keys.TRAINER_DEFAULTS.items()
            if key not in ("optim", "lr_scheduler_type", "num_train_epochs", "logging_steps")
        },
        "save_strategy": "epoch",
        "save_total_limit": 4,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "num_epochs": 1,
        "micro_batch_size": 1,
        "sequence_len": 512,
        "sample_packing": False,
        "val_set_size": 0.0,
        "lora_dropout": 0.0,
        "logging_steps": 10,
    },
    finish=_finish,
    companions={"adapter": "lora", "val_set_size": 0.1},
)
"""axolotl."""
