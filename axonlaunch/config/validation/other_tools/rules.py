"""Builds rules, and settings of training that several keys of another tool determine together."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from axonlaunch.config.precision import PRECISIONS
from axonlaunch.config.validation.other_tools.translation import Rule, Translation

OFF: tuple[Any, ...] = (None, False, 0, "", "false", "no", "none", "None", "off", [], {})
"""Values with which most tools switch a feature off."""
_FIRST_LAYER = (
    "accelerate leaves the first linear layer out; for most models that is "
    "train.matmul_exclude=['*.layers.0.self_attn.q_proj']"
)
_BASES = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}


def to(target: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Return the rule of a key of another tool that has a counterpart here.

    Args:
        target: Counterpart, a dotted key of the experiment.
        convert: Converts the tool's value to the value of the counterpart. If it fails, the key
            is reported as not translated.
    """

    def apply(translation: Translation, key: str, value: Any) -> None:
        try:
            translation.set(target, convert(value), key)
        except (ValueError, TypeError, KeyError, OverflowError):
            translation.leave_out(key, f"has no counterpart with this value; set {target}")

    return Rule("expressed", apply)


def products_in_8_bits(recipe: str) -> Rule:
    """Return the rule of a key of accelerate that enables one of torchao's fp8 recipes."""

    def apply(translation: Translation, key: str, value: Any) -> None:
        translation.set("train.matmul_dtype", recipe if value is True else None, key)
        if value is True:
            translation.note(key, _FIRST_LAYER)

    return Rule("expressed", apply)


def with_others() -> Rule:
    """Return the rule of a key that is translated with others when all keys are known."""
    return Rule("expressed", lambda translation, key, value: None)


def not_needed(why: str) -> Rule:
    """Return the rule of a key that has no counterpart and doesn't change training."""
    return Rule(
        "not needed", lambda translation, key, value: translation.not_needed.append(key), reason=why
    )


def missing(text: str, *, off: tuple[Any, ...] = OFF) -> Rule:
    """Return the rule of a key that can't be expressed.

    Args:
        text: Reason, and what to do.
        off: Values that switch the feature off, so that nothing is missing.
    """

    def apply(translation: Translation, key: str, value: Any) -> None:
        if any(value == each and type(value) is type(each) for each in off):
            translation.not_needed.append(key)
        else:
            translation.leave_out(key, text)

    return Rule("left out", apply)


def with_note(text: str, *, off: tuple[Any, ...] = OFF) -> Rule:
    """Return the rule of a key whose effect is expressed differently here.

    Args:
        text: Note that describes how.
        off: Values that switch the feature off, so that no note is needed.
    """

    def apply(translation: Translation, key: str, value: Any) -> None:
        if value in off:
            translation.not_needed.append(key)
        else:
            translation.note(key, text)

    return Rule("not needed", apply)


def base_bits() -> Rule:
    """Return the rule of a key that quantizes frozen weights, for ``set_base``."""

    def apply(translation: Translation, key: str, value: Any) -> None:
        if value in OFF:
            translation.not_needed.append(key)

    return Rule("expressed", apply)


def set_base(translation: Translation, bases: Mapping[str, str] = _BASES) -> None:
    """Set the format of an adapter's frozen weights, after the adapter is set.

    Args:
        bases: Maps each key of the other tool to the format that it chooses.
    """
    for key, base in bases.items():
        if translation.get(key) in OFF:
            continue
        if "adapter" not in translation.options:
            translation.leave_out(key, "quantized weights are frozen; use adapter=lora")
        elif "adapter.base" not in translation.settings:
            translation.set("adapter.base", base, key)


def set_batch(
    translation: Translation,
    micro: str,
    accumulation: str,
    *,
    divided_by: int,
    of_device: str = "",
) -> None:
    """Set the batch sizes.

    Args:
        micro: Key with the samples of a device per forward.
        accumulation: Key with the number of forwards per step.
        divided_by: Number of devices that process the same samples.
        of_device: Key with the samples of a device per step, for files without ``accumulation``.
    """
    samples = max(1, int(translation.number(micro, 1)))
    if of_device and translation.has(of_device) and not translation.has(accumulation):
        accumulation = of_device
        forwards = max(1, int(translation.number(of_device)) // samples)
    else:
        forwards = max(1, int(translation.number(accumulation, 1)))
    ranks = max(1, translation.devices // max(1, divided_by))
    devices = f"{translation.devices} device{'s' if translation.devices > 1 else ''}"
    note = f"on {devices}" if divided_by <= 1 else f"on {devices}, {divided_by} with equal samples"
    total = samples * forwards * ranks
    translation.set("train.global_batch_size", total, micro, accumulation, note=note)
    translation.set("train.micro_batch_size", samples, micro)


def set_degrees(translation: Translation, **keys: str) -> int:
    """Set the degrees of the axes of the layout; return the number of devices with equal samples.

    Args:
        keys: Keys with degrees, by axis.
    """
    shared = 1
    for axis, key in keys.items():
        degree = int(translation.number(key, 1))
        if degree > 1:
            translation.set(f"strategy.{axis}.degree", degree, key)
            shared *= degree
    return shared


def set_expert_degree(translation: Translation, key: str, value: Any) -> None:
    """Divide experts; ``strategy=fsdp`` divides them among the ranks of data parallelism."""
    if isinstance(value, int) and value > 1:
        translation.option("strategy", "fsdp", key)
        translation.set("strategy.expert.degree", value, key)
    else:
        translation.not_needed.append(key)


def set_length(translation: Translation, epochs: str, steps: str) -> None:
    """Set the number of steps, or of epochs if there is no positive number of steps."""
    if translation.number(steps, -1) > 0:
        translation.set("train.steps", int(translation.number(steps)), steps)
        return
    translation.set("train.steps", "auto", epochs)
    translation.set("train.epochs", float(translation.number(epochs, 1)), epochs)


_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
}


def set_schedule(
    translation: Translation,
    name: str,
    *,
    warmup_steps: str = "warmup_steps",
    warmup_ratio: str = "warmup_ratio",
    final_lr_ratio: float = 0.0,
    final_from: str = "",
    default_share: float = 0.0,
    default_steps: int = 0,
) -> None:
    """Set the schedule of the learning rate and its warm-up.

    Args:
        name: Key with the name that transformers has for the schedule.
        warmup_steps: Key with the steps of the warm-up, or a fraction below 1 of all steps.
        warmup_ratio: Key with that fraction.
        final_lr_ratio: Last learning rate as a fraction of the peak.
        final_from: Key that sets the last learning rate; empty if none does.
        default_share: Warm-up of files without one, as a fraction of all steps.
        default_steps: Largest number of steps of that warm-up.
    """
    written = str(translation.get(name))
    option = _SCHEDULES.get(written)
    if option is None:
        text = "there is no such schedule; cosine is used: choose scheduler=linear, wsd or constant"
        translation.leave_out(name, f"{text}, or write one of yours (scheduler=custom)")
        option = "cosine"
    translation.option("scheduler", option, name)
    steps, ratio = translation.number(warmup_steps), translation.number(warmup_ratio)
    if written == "constant":  # transformers ignores the warm-up of this schedule
        translation.set("scheduler.warmup_steps", 0, name)
    elif default_share and not translation.has(warmup_steps) and not translation.has(warmup_ratio):
        _set_default_warmup(translation, default_share, default_steps)
    elif steps >= 1:
        translation.set("scheduler.warmup_steps", int(steps), warmup_steps)
    else:
        source = warmup_steps if steps > 0 else warmup_ratio
        translation.set("scheduler.warmup_ratio", float(steps or ratio), source)
    if option not in ("constant", "inverse_sqrt"):
        keys = (final_from,) if final_from else (name,)
        translation.set("scheduler.final_lr_ratio", final_lr_ratio, *keys)


def _set_default_warmup(translation: Translation, share: float, most: int) -> None:
    length = translation.settings.get("train.steps")
    if length is not None and isinstance(length.value, int):
        translation.set("scheduler.warmup_steps", min(int(share * length.value), most))
    else:
        note = f"at most {most} steps there"
        translation.set("scheduler.warmup_ratio", share, note=note)


_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused")
_ADAMW_8BIT = ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
_LION = ("lion", "lion_32bit")
_PAGED = {
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_lion_32bit": "lion",
    "paged_lion_8bit": "lion_8bit",
}
PAGED = "states stay on the GPU; strategy.fsdp.cpu_offload=optimizer_states keeps them on the host"
"""Remark on optimizers with states in paged memory."""
_OF_TORCH = {"rmsprop": "torch.optim:RMSprop", "adagrad": "torch.optim:Adagrad"}


def set_optimizer(
    translation: Translation,
    name: str,
    *,
    betas: tuple[str, str] = ("adam_beta1", "adam_beta2"),
    eps: str = "adam_epsilon",
) -> None:
    """Set the optimizer by the name that transformers has for it, its betas and its epsilon."""
    written = str(translation.get(name))
    rate = "learning_rate"
    if not translation.has(rate) and rate in translation.tool.defaults:
        translation.set("optimizer.lr", float(translation.number(rate)), rate)
    decay = float(translation.number("weight_decay", 0.0))
    has_decay, has_betas = True, True
    if written in _ADAMW:
        translation.option("optimizer", "adamw", name)
    elif written in _ADAMW_8BIT:
        if written == "adamw_torch_4bit":
            translation.note(name, "states in 8 bits")
        translation.option("optimizer", "adamw_8bit", name)
    elif written in _PAGED:
        translation.note(name, PAGED)
        translation.option("optimizer", _PAGED[written], name)
        has_betas = "adamw" in written
    elif written in (*_LION, "lion_8bit"):
        translation.option("optimizer", "lion" if written in _LION else written, name)
        has_betas = False
    elif written == "muon":
        translation.option("optimizer", "muon", name)
        text = "updates are as large as AdamW's (optimizer.adjust_lr_fn); compare learning rates"
        translation.note(name, text)
        has_betas = False
    elif written == "sgd":
        translation.option("optimizer", "sgd", name)
        translation.set("optimizer.momentum", 0.0, name)
        has_betas = False
    elif written in _OF_TORCH:
        translation.option("optimizer", "custom", name)
        translation.set("optimizer.target", _OF_TORCH[written], name)
        has_decay = has_betas = False
    else:
        text = "there is no such optimizer; adamw is used: optimizer=custom takes any class"
        translation.leave_out(name, text)
        translation.option("optimizer", "adamw", name)
    if has_decay:
        translation.set("optimizer.weight_decay", decay, "weight_decay")
    if has_betas:
        both = [translation.number(betas[0], 0.9), translation.number(betas[1], 0.999)]
        translation.set("optimizer.betas", both, *betas)
        if translation.has(eps):
            translation.set("optimizer.eps", translation.number(eps), eps)


def set_decay_of_all(translation: Translation, decay: float) -> None:
    """Decay vectors too, as torch does by default; here, only matrices are decayed."""
    if decay:
        groups = {"*": {"weight_decay": decay}}
        translation.set("optimizer.groups", groups, note="norms and biases too")


def set_router_loss(translation: Translation, *keys: str) -> None:
    """Switch the loss of routers off, which is on here, if none of these keys is on.

    Models without routers accept the setting.
    """
    if not any(translation.flag(key) for key in keys):
        translation.set("model.router_aux_loss", False, note="only for mixtures of experts")


def set_precision(translation: Translation, *, weights: tuple[str, ...] = ()) -> None:
    """Set the precision by keys with the names of precisions.

    Args:
        weights: Keys because of which the tool stores weights in bf16 too; empty if it doesn't.
    """
    for name in PRECISIONS:
        if translation.flag(name):
            chosen = "auto" if translation.get(name) == "auto" and not weights else name
            translation.set("train.precision", chosen, name)
            break
    else:
        translation.set("train.precision", "fp32", "bf16")
    if weights and translation.flag("bf16"):
        translation.set("train.param_dtype", "bf16", *weights)


def precision_named(name: object) -> str:
    """Return axonlaunch's name of one of torch's dtypes: ``bf16`` for ``torch.bfloat16``."""
    text = str(name).removeprefix("torch.")
    return text.replace("bfloat", "bf").replace("float", "fp")


def set_intervals(
    translation: Translation, *, held_out: bool, steps_are_enough: bool = False
) -> None:
    """Set the intervals of evaluations and saves from keys of transformers' Trainer.

    Args:
        held_out: Whether the file holds rows out for evaluation.
        steps_are_enough: Whether ``eval_steps`` and ``save_steps`` have an effect in the tool
            without ``eval_strategy=steps`` and ``save_strategy=steps``.
    """
    named = "evaluation_strategy" if translation.has("evaluation_strategy") else "eval_strategy"
    when = str(translation.get(named, "no")).lower().replace("false", "no")
    if steps_are_enough and held_out and translation.has("eval_steps"):
        when = "steps"
    if when == "epoch":
        translation.set("train.eval_every", "1 epoch", named)
    elif when == "steps":
        key = "eval_steps" if translation.has("eval_steps") else "logging_steps"
        _set_steps(translation, "train.eval_every", key)
    elif not held_out:
        translation.set("data.held_out", 0, named)
    else:
        translation.set("train.eval_every", 0, named)
    saves = str(translation.get("save_strategy", "steps")).lower().replace("false", "no")
    if steps_are_enough and translation.has("save_steps"):
        saves = "steps"
    if saves == "no":
        translation.set("checkpoint.every", 0, "save_strategy")
    elif saves == "epoch":
        translation.set("checkpoint.every", "1 epoch", "save_strategy")
    elif saves == "best" and "train.eval_every" in translation.settings:
        every = translation.settings["train.eval_every"].value
        translation.set("checkpoint.every", every, "save_strategy")
        translation.set("checkpoint.keep_best", 1, "save_strategy")
    else:
        _set_steps(translation, "checkpoint.every", "save_steps")


def set_kept(translation: Translation, key: str = "save_total_limit") -> None:
    """Set the number of checkpoints that are kept, after their interval; tools keep all by default.

    Args:
        key: Key with the number; 0 or none stands for all.
    """
    if translation.settings["checkpoint.every"].value == 0:
        return
    if (number := int(translation.number(key))) > 0:
        translation.set("checkpoint.keep_last", number, key)
    else:
        translation.set("checkpoint.keep_every_n_steps", 1, key, note="all are kept")


_LETTERS = f"{string.ascii_letters}{string.digits}_-., "
"""Characters of names of layers; other texts are regular expressions."""


def set_early_stop(translation: Translation, key: str = "early_stopping_patience") -> None:
    """Set the number of evaluations without improvement after which a run ends."""
    if not translation.has(key):
        return
    every = translation.settings.get("train.eval_every")
    if every is None or every.value == 0:
        translation.note(key, "nothing is evaluated before the end; set train.eval_every")
    else:
        translation.set("train.early_stop", max(1, int(translation.number(key))), key)


def _set_steps(translation: Translation, target: str, key: str) -> None:
    """Set an interval in steps; below 1 it is a fraction of the run."""
    steps = translation.number(key, 500)
    if steps >= 1 or steps <= 0:
        translation.set(target, max(0, int(steps)), key)
    elif "train.epochs" in translation.settings:
        epochs = translation.settings["train.epochs"].value
        translation.set(target, f"{steps * epochs:.6g} epoch", key)
    else:
        total = translation.settings["train.steps"].value
        translation.set(target, max(1, round(steps * total)), key)


def named_layers(written: str) -> list[str]:
    """Return the entries of ``adapter.targets`` for names with commas, or a regular expression.

    The names of a text model have no ``language_model.``, which those of a model of images have.
    """
    if set(written) <= set(_LETTERS):
        return [name.strip() for name in written.split(",")]
    return [re.sub(r"\b((?:language|text)_model\\?\.)(?![*+?{])", r"(\1)?", f"({written})")]


_HEADS_AND_EMBEDDINGS = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe")


def leave_out_head(translation: Translation, key: str, name: str) -> None:
    """Report a head or embedding that the other tool adapts, beside layers of the blocks."""
    text = f"layers of the blocks are adapted, not {name}; train.unfreeze=['*{name}*'] trains it"
    translation.leave_out(key, f"{text} in full")


def _heads_and_embeddings(targets: list[Any]) -> list[str]:
    """Return the last parts of the names of heads and embeddings among names of layers."""
    names = [str(name).rpartition(".")[2] for name in targets]
    return [name for name in names if name in _HEADS_AND_EMBEDDINGS]


def _train_in_full(translation: Translation, key: str, names: list[str], also: list[str]) -> None:
    """Train heads and embeddings in full, because an adapter would have no other layer."""
    both = " and ".join(names)
    text = f"only layers of the blocks can be adapted; {both} is trained in full, without adapter"
    translation.leave_out(key, text)
    del translation.options["adapter"]
    translation.set("train.freeze", ["*"], key)
    translation.set("train.unfreeze", [*(f"*{name}*" for name in names), *also], key)


def set_adapter(
    translation: Translation,
    *,
    rank: str,
    alpha: float,
    targets: Any,
    targets_key: str,
    unfrozen: str,
    prefix: str = "",
) -> None:
    """Set the options of a LoRA adapter.

    A file that adapts only heads and embeddings gets no adapter.

    Args:
        rank: Key with the rank.
        alpha: Numerator of the scale if the file has none.
        targets: Names of layers, or a text with names and commas, or ``"all-linear"``.
        targets_key: Key that the names come from.
        unfrozen: Key with modules that are trained in full.
        prefix: Beginning of the keys.
    """
    if isinstance(targets, str) and targets not in ("all-linear", "all"):
        targets = named_layers(targets)
    chosen = "all-linear" if targets in ("all", ["all"], ["all-linear"]) else targets
    written = translation.get(unfrozen) or []
    modules = written.split(",") if isinstance(written, str) else translation.items(unfrozen)
    trained = [f"*{str(name).strip()}*" for name in modules]
    if isinstance(chosen, list) and (heads := _heads_and_embeddings(chosen)):
        if len(heads) == len(chosen):
            _train_in_full(translation, targets_key, heads, trained)
            return
        for name in heads:
            leave_out_head(translation, targets_key, name)
        chosen = [name for name in chosen if not _heads_and_embeddings([name])]
    translation.set("adapter.rank", int(translation.number(rank, 8)), rank)
    for key, target, default in (
        (f"{prefix}lora_alpha", "adapter.alpha", alpha),
        (f"{prefix}lora_dropout", "adapter.dropout", 0.0),
    ):
        translation.set(target, float(translation.number(key, default)), key)
    for key, target in {
        **dict.fromkeys((f"{prefix}use_rslora", "peft_use_rslora"), "adapter.rslora"),
        **dict.fromkeys((f"{prefix}use_dora", "peft_use_dora"), "adapter.dora"),
    }.items():
        if translation.flag(key):
            translation.set(target, True, key)
    if chosen:
        translation.set("adapter.targets", chosen, targets_key)
    if trained:
        translation.set("train.unfreeze", trained, unfrozen)
