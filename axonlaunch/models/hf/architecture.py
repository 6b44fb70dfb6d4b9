"""Reads and checks the architecture of a model: ``config.json`` with overrides, as a typed object.

Models that are not causal language models or can't be trained here, and unknown keys, are errors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from axonlaunch.config.options.model import MOST_LAYERS, TransformersModel
from axonlaunch.config.problems.did_you_mean import nearest
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue, plain
from axonlaunch.models.hf.reading import files, library
from axonlaunch.models.hf.reading.other_folders import describe_export
from axonlaunch.models.hf.reading.quantized_files import QUANTIZATION, refuse_quantized

_CAUSAL_WITHOUT_A_FLAG = {"gpt_neox", "gpt_neox_japanese"}
"""Models that have ``is_decoder`` but are always causal."""
_NEVER_CAUSAL = {"xlnet": "predicts tokens in a random order"}
_MODALITIES = ("vision_config", "audio_config")
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Keys with which a file selects functions, possibly from a repository on the Hub."""
_COUNTS = ("layers", "n_layer", "experts", "blocks")
"""Endings of keys for numbers of blocks and experts."""
_ROPE = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Keys of older files, which transformers converts to ``rope_parameters``."""
_ROUTER_LOGITS = "output_router_logits"
"""Key that makes a model compute the auxiliary loss of its routers."""
ROUTER_LOSS_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Keys, and attributes of models, with the weight of this loss."""
_EACH_BLOCK = "per_layer_config"
"""Key for per-block settings by block number, which newer versions accept in every class."""


def architecture(config: TransformersModel) -> Any:
    """Return transformers' typed configuration of a model.

    Raises:
        ConfigError: The configuration can't be read, or the model can't be trained here.
    """
    library.transformers()
    content = files.read_config(config)
    model_type = config.config.get("model_type", content.get("model_type"))
    if content and model_type != content.get("model_type"):
        message = f"model.path is {content.get('model_type')}; remove this setting"
        raise ConfigError([ConfigIssue("model.config.model_type", message, model_type)])
    refuse_quantized(content, config)
    content.pop(QUANTIZATION, None)  # describes the files of the weights, not the model
    _refuse_kernels(content, config)
    typed = _read_remote(config, content) if _is_remote(config, content) else None
    if typed is None:
        _refuse_kind(model_type, content, config)
        typed = _type_content(config, content, str(model_type))
    _refuse_untrainable(typed, config)
    _choose_router_loss(typed, config)
    typed.use_cache = False
    return typed


def _choose_router_loss(typed: Any, config: TransformersModel) -> None:
    """Turn the auxiliary loss of routers on or off, and set its weight.

    As in trl, it is on if the configuration has a weight for it, even if the file says
    ``output_router_logits: false``, the default of transformers.

    Raises:
        ConfigError: The model has no such loss, but a weight is given.
    """
    weight, key = config.router_aux_loss, f"model.config.{_ROUTER_LOGITS}"
    if not hasattr(typed, _ROUTER_LOGITS):
        if weight:
            message = f"model_type={typed.model_type} has no routers with an auxiliary loss"
            raise ConfigError(
                [ConfigIssue("model.router_aux_loss", f"{message}; use null", weight)]
            )
        return
    configured = config.config.get(_ROUTER_LOGITS)
    if weight is not None:
        if configured is not None and bool(configured) != bool(weight):
            message = f"contradicts model.router_aux_loss={plain(weight)}; remove this setting"
            raise ConfigError([ConfigIssue(key, message, configured)])
        setattr(typed, _ROUTER_LOGITS, bool(weight))
        for name in ROUTER_LOSS_WEIGHTS:
            if weight and hasattr(typed, name):
                setattr(typed, name, float(weight))
    elif configured is None and any(getattr(typed, name, None) for name in ROUTER_LOSS_WEIGHTS):
        setattr(typed, _ROUTER_LOGITS, True)


def _type_content(config: TransformersModel, content: dict[str, Any], kind: str) -> Any:
    """Merge overrides into a file's content and create the typed configuration.

    Raises:
        ConfigError: An override is unknown or a value is invalid.
    """
    cls = library.config_types()[kind]
    _refuse_unknown(config.config, cls, content, prefix="model.config")
    merged = _merge(canonical(content, cls), canonical(config.config, cls))
    merged.pop("model_type", None)
    _shorten_lists(merged, content, cls)
    _refuse_oversized(merged, config)
    try:
        with library.quiet():
            typed = cls.from_dict(merged)
    except ConfigError:
        raise
    except Exception as error:  # each class validates values with errors of any type
        raise ConfigError([_config_issue(config, error)]) from None
    typed.name_or_path = str(files.folder(config) or "")
    return typed


def known_keys(cls: Any) -> set[str]:
    """Return the keys that a configuration class reads."""
    field_names = {field.name for field in dataclasses.fields(cls)}
    rope = _ROPE if "rope_parameters" in field_names else set()
    per_block = {_EACH_BLOCK} if hasattr(cls, _EACH_BLOCK) else set()
    return (
        {key for key in field_names if not key.startswith("_")}
        | set(cls.attribute_map)
        | rope
        | per_block
    )


def _refuse_unknown(
    overrides: Mapping[str, Any], cls: Any, content: Mapping[str, Any], *, prefix: str
) -> None:
    """Refuse overrides that the class does not read, also in nested configurations.

    Raises:
        ConfigError: Names each unknown key and the most similar known key.
    """
    valid_keys, problems = known_keys(cls) | content.keys() | {"model_type"}, []
    nested = dict(cls.sub_configs)
    for key, value in overrides.items():
        if key not in valid_keys and key not in library.keys_read_by_code(cls):
            similar = nearest(key, valid_keys)
            hint = f"; did you mean {prefix}.{similar}?" if similar else ""
            message = f"{cls.model_type} has no such key{hint}"
            shown_value = ... if isinstance(value, dict) else value
            problems.append(ConfigIssue(f"{prefix}.{key}", message, shown_value))
        elif isinstance(value, Mapping) and hasattr(nested.get(key), "model_type"):
            inner = content.get(key) or {}
            _refuse_unknown(value, nested[key], inner, prefix=f"{prefix}.{key}")
    if problems:
        raise ConfigError(problems)


def canonical(content: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    """Rename keys to the class's names: GPT-2's ``num_hidden_layers`` becomes ``n_layer``."""
    return {cls.attribute_map.get(key, key): value for key, value in content.items()}


def _merge(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides into the content, recursively for nested mappings."""
    merged = copy.deepcopy(dict(content))
    for key, value in overrides.items():
        old = merged.get(key)
        is_nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if is_nested else copy.deepcopy(value)  # type: ignore[arg-type]
    rope = merged.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in overrides:
        rope["rope_theta"] = overrides["rope_theta"]
    return merged


def _shorten_lists(merged: dict[str, Any], content: Mapping[str, Any], cls: Any) -> None:
    """Shorten lists with an entry for each block, like ``layer_types``, to fewer blocks."""
    key = cls.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    old_count, new_count = canonical(content, cls).get(key), merged.get(key)
    if not isinstance(old_count, int) or not isinstance(new_count, int) or new_count >= old_count:
        return
    for name, value in merged.items():
        if isinstance(value, list) and len(value) == old_count and value == content.get(name):
            merged[name] = value[:new_count]


def _is_remote(config: TransformersModel, content: Mapping[str, Any]) -> bool:
    """Return whether a model uses the code in its repository.

    Raises:
        ConfigError: The model needs this code, but ``trust_remote_code`` is off.
    """
    auto_map = content.get("auto_map")
    if not isinstance(auto_map, Mapping) or "AutoModelForCausalLM" not in auto_map:
        return False
    if config.trust_remote_code:
        return True
    if content.get("model_type") in library.causal_types():
        return False
    code = str(auto_map["AutoModelForCausalLM"])
    message = (
        f"{config.path} contains custom code ({code}) that would be run; read it, and use true if "
        "you trust it"
    )
    raise ConfigError([ConfigIssue("model.trust_remote_code", message, False)])


def _read_remote(config: TransformersModel, content: Mapping[str, Any]) -> Any:
    """Read a configuration with the code in its repository.

    Raises:
        ConfigError: Reading fails, or an override is unknown.
    """
    folder = files.folder(config)
    try:
        with library.quiet():
            typed = library.transformers().AutoConfig.from_pretrained(
                str(folder), trust_remote_code=True, local_files_only=True
            )
            vars(typed).pop(QUANTIZATION, None)
            for key, value in config.config.items():
                if key not in content and not hasattr(typed, key):
                    similar = nearest(key, [*content, *vars(typed)])
                    hint = f"; did you mean model.config.{similar}?" if similar else ""
                    message = f"its configuration has no such key{hint}"
                    raise ConfigError([ConfigIssue(f"model.config.{key}", message, value)])
                setattr(typed, key, value)
    except ConfigError:
        raise
    except Exception as error:  # third-party code may fail in any way
        raise ConfigError([_config_issue(config, error)]) from None
    return typed


def _refuse_kernels(content: Mapping[str, Any], config: TransformersModel) -> None:
    """Refuse a file that selects a repository of kernels, which transformers would run.

    Raises:
        ConfigError: A key at any depth names a repository.
    """
    for key, value in content.items():
        names = [*value.values()] if isinstance(value, Mapping) else [value]
        names_code = key.strip("_").removesuffix("_internal") in _IMPLEMENTATIONS
        if names_code and any("/" in str(name) for name in names):
            message = (
                f"its {files.CONFIG_FILE_NAME} has {key}={value}, whose code would be fetched "
            )
            message += "and run; remove the key, and choose by model.attention"
            raise ConfigError([ConfigIssue("model.path", message, config.path)])
        if isinstance(value, Mapping):
            _refuse_kernels(value, config)


def _refuse_oversized(content: Mapping[str, Any], config: TransformersModel) -> None:
    """Refuse more blocks or experts than any model has, because each takes time to build.

    Raises:
        ConfigError: Names the first key with a larger number.
    """
    for key, value in content.items():
        if isinstance(value, Mapping):
            _refuse_oversized(value, config)
        elif isinstance(value, int) and value > MOST_LAYERS and key.endswith(_COUNTS):
            message = f"{key}={value}: must be at most {MOST_LAYERS}"
            source_key = "model.path" if config.path else "model.config"
            raise ConfigError([ConfigIssue(source_key, message, config.path or ...)])


def _refuse_kind(kind: Any, content: Mapping[str, Any], config: TransformersModel) -> None:
    """Refuse a ``model_type`` that is not a causal language model.

    Raises:
        ConfigError: Suggests the most similar type, or the keys for an export of another model.
    """
    if kind in library.causal_types():
        return
    if message := describe_export(content, str(config.path)):
        raise ConfigError([ConfigIssue("model.path", message, config.path)])
    key = "model.path" if config.path else "model.config.model_type"
    value = config.path if config.path else kind
    prefix = f"model_type={kind} " if config.path else ""
    if kind in library.config_types():
        message = f"{prefix}is not a causal language model; give one that continues text"
    else:
        similar = nearest(str(kind), library.causal_types())
        hint = f"; did you mean {similar}?" if similar else ""
        version = library.transformers().__version__
        message = f"{prefix}is not known to transformers {version}{hint}"
    raise ConfigError([ConfigIssue(key, message, value)])


def _refuse_untrainable(typed: Any, config: TransformersModel) -> None:
    """Refuse models that a causal language model's loss would train wrongly without an error.

    Raises:
        ConfigError: Says what kind of model it is.
    """
    kind = typed.model_type
    reason = _NEVER_CAUSAL.get(kind, "")
    if getattr(typed, "is_encoder_decoder", False):
        reason = (
            "is an encoder-decoder, which is not supported; set "
            "model.config.is_encoder_decoder=false to train only its decoder"
        )
    elif any(getattr(typed, part, None) is not None for part in _MODALITIES):
        reason = "also takes images or sound, which is not supported; use its text model"
    elif getattr(typed, "is_decoder", True) is False and kind not in _CAUSAL_WITHOUT_A_FLAG:
        reason = (
            "is an encoder, in which tokens attend to later ones; set model.config.is_decoder=true"
        )
    elif getattr(typed, "causal", True) is False:
        reason = "attends to later tokens; set model.config.causal=true"
    if reason:
        key = "model.path" if config.path else "model.config.model_type"
        prefix = f"model_type={kind} " if config.path else ""
        raise ConfigError([ConfigIssue(key, f"{prefix}{reason}", config.path or kind)])


def _config_issue(config: TransformersModel, error: Exception) -> ConfigIssue:
    """Shorten transformers' error about a configuration to one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    reason = str(cause).strip() if cause is not None and str(cause).strip() else " ".join(lines)
    shown_value = config.config if config.config else ...
    file_name = f"{config.path}/{files.CONFIG_FILE_NAME}: " if config.path else ""
    message = f"{file_name}{reason or type(error).__name__}"
    return ConfigIssue(
        "model.config" if config.config else "model.path", message[:400], shown_value
    )
