"""Which architecture a configuration describes: ``config.json`` with overrides, typed and checked.

It refuses what is no causal language model, what it can't train, and keys that nobody reads.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from axonlaunch.config.did_you_mean import nearest
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.model import MOST_LAYERS, HuggingFaceConfig
from axonlaunch.models.hf import files, library

_CAUSAL_WITHOUT_A_FLAG = {"gpt_neox", "gpt_neox_japanese"}
"""Have ``is_decoder`` and are causal whatever it is."""
_NEVER_CAUSAL = {"xlnet": "predicts tokens in a random order"}
_MODALITIES = ("vision_config", "audio_config")
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Keys by which a file chooses functions, of a repository on the Hub too."""
_COUNTS = ("layers", "n_layer", "experts", "blocks")
"""What keys end with that say how many of its parts a model has."""
_ROPE = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Keys of older files, which transformers takes into ``rope_parameters``."""
_EACH_BLOCK = "per_layer_config"
"""What blocks have of their own, by their number, which newer versions take of every class."""


def architecture(config: HuggingFaceConfig) -> Any:
    """Return transformers' typed configuration of a model.

    Raises:
        ConfigError: It can't be read, or describes what can't be trained here.
    """
    library.transformers()
    content = files.read_config(config)
    kind = config.config.get("model_type", content.get("model_type"))
    if content and kind != content.get("model_type"):
        message = f"model.path is {content.get('model_type')}; remove this setting"
        raise ConfigError([ConfigIssue("model.config.model_type", message, kind)])
    _refuse_quantised(content, config)
    _refuse_kernels(content, config)
    typed = _remote(config, content) if _is_remote(config, content) else None
    if typed is None:
        _refuse_kind(kind, config)
        typed = _type_content(config, content, str(kind))
    _refuse_untrainable(typed, config)
    typed.use_cache = False
    return typed


def _type_content(config: HuggingFaceConfig, content: dict[str, Any], kind: str) -> Any:
    """Put overrides over a file's content, and type all of it.

    Raises:
        ConfigError: An override is unknown, or a value does not fit.
    """
    cls = library.config_types()[kind]
    _refuse_unknown(config.config, cls, content, prefix="model.config")
    merged = _merged(canonical(content, cls), canonical(config.config, cls))
    merged.pop("model_type", None)
    _shorten_lists(merged, content, cls)
    _refuse_oversized(merged, config)
    try:
        with library.quiet():
            typed = cls.from_dict(merged)
    except ConfigError:
        raise
    except Exception as error:  # each class checks its own values, and raises what it likes
        raise ConfigError([_wrong(config, error)]) from None
    typed.name_or_path = str(files.folder(config) or "")
    return typed


def known_keys(cls: Any) -> set[str]:
    """Return the keys that a configuration class reads."""
    own = {field.name for field in dataclasses.fields(cls)}
    rope = _ROPE if "rope_parameters" in own else set()
    each = {_EACH_BLOCK} if hasattr(cls, _EACH_BLOCK) else set()
    return {key for key in own if not key.startswith("_")} | set(cls.attribute_map) | rope | each


def _refuse_unknown(
    overrides: Mapping[str, Any], cls: Any, content: Mapping[str, Any], *, prefix: str
) -> None:
    """Refuse overrides that the class does not read, in nested configurations too.

    Raises:
        ConfigError: It names each, and the nearest key.
    """
    known, problems = known_keys(cls) | content.keys() | {"model_type"}, []
    nested = dict(cls.sub_configs)
    for key, value in overrides.items():
        if key not in known and key not in library.keys_read_by_code(cls):
            close = nearest(key, known)
            meant = f"; did you mean {prefix}.{close}?" if close else ""
            message = f"{cls.model_type} has no such key{meant}"
            shown = ... if isinstance(value, dict) else value
            problems.append(ConfigIssue(f"{prefix}.{key}", message, shown))
        elif isinstance(value, Mapping) and hasattr(nested.get(key), "model_type"):
            inner = content.get(key) or {}
            _refuse_unknown(value, nested[key], inner, prefix=f"{prefix}.{key}")
    if problems:
        raise ConfigError(problems)


def canonical(content: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    """Call each key as the class does: GPT-2's ``num_hidden_layers`` is ``n_layer``."""
    return {cls.attribute_map.get(key, key): value for key, value in content.items()}


def _merged(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with overrides put in, key by key where both hold keys."""
    merged = copy.deepcopy(dict(content))
    for key, value in overrides.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(before, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    rope = merged.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in overrides:
        rope["rope_theta"] = overrides["rope_theta"]
    return merged


def _shorten_lists(merged: dict[str, Any], content: Mapping[str, Any], cls: Any) -> None:
    """Cut lists that have an entry for each block to fewer blocks, as ``layer_types`` is."""
    key = cls.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    before, now = canonical(content, cls).get(key), merged.get(key)
    if not isinstance(before, int) or not isinstance(now, int) or now >= before:
        return
    for name, value in merged.items():
        if isinstance(value, list) and len(value) == before and value == content.get(name):
            merged[name] = value[:now]


def _is_remote(config: HuggingFaceConfig, content: Mapping[str, Any]) -> bool:
    """Say whether a model needs the code that comes with it, or shall use it.

    Raises:
        ConfigError: It needs it, and that is not allowed.
    """
    brings = content.get("auto_map")
    if not isinstance(brings, Mapping) or "AutoModelForCausalLM" not in brings:
        return False
    if config.trust_remote_code:
        return True
    if content.get("model_type") in library.causal_types():
        return False
    code = str(brings["AutoModelForCausalLM"])
    message = (
        f"{config.path} brings its own code ({code}), which would be run; read it, and use true if "
        "you trust it"
    )
    raise ConfigError([ConfigIssue("model.trust_remote_code", message, False)])


def _remote(config: HuggingFaceConfig, content: Mapping[str, Any]) -> Any:
    """Read a configuration by the code that comes with it.

    Raises:
        ConfigError: That fails, or an override is unknown.
    """
    where = files.folder(config)
    try:
        with library.quiet():
            typed = library.transformers().AutoConfig.from_pretrained(
                str(where), trust_remote_code=True, local_files_only=True
            )
            for key, value in config.config.items():
                if key not in content and not hasattr(typed, key):
                    close = nearest(key, [*content, *vars(typed)])
                    meant = f"; did you mean model.config.{close}?" if close else ""
                    message = f"its configuration has no such key{meant}"
                    raise ConfigError([ConfigIssue(f"model.config.{key}", message, value)])
                setattr(typed, key, value)
    except ConfigError:
        raise
    except Exception as error:  # code of others may fail in any way
        raise ConfigError([_wrong(config, error)]) from None
    return typed


def _refuse_quantised(content: Mapping[str, Any], config: HuggingFaceConfig) -> None:
    quantization = content.get("quantization_config") or {}
    if (
        method := quantization.get("quant_method")
        if isinstance(quantization, Mapping)
        else quantization
    ):
        message = (
            f"its weights are quantised ({method}), which can't be trained; fp32, bf16 and fp16 "
            "are supported: give the model that it was made from"
        )
        raise ConfigError([ConfigIssue("model.path", message, config.path)])


def _refuse_kernels(content: Mapping[str, Any], config: HuggingFaceConfig) -> None:
    """Refuse a file that names a repository of kernels, whose code transformers fetches and runs.

    Raises:
        ConfigError: It does, at whatever depth.
    """
    for key, value in content.items():
        named = [*value.values()] if isinstance(value, Mapping) else [value]
        names_code = key.strip("_").removesuffix("_internal") in _IMPLEMENTATIONS
        if names_code and any("/" in str(name) for name in named):
            message = (
                f"its {files.CONFIG_FILE_NAME} has {key}={value}, whose code would be fetched "
            )
            message += "and run; remove the key, and choose by model.attention"
            raise ConfigError([ConfigIssue("model.path", message, config.path)])
        if isinstance(value, Mapping):
            _refuse_kernels(value, config)


def _refuse_oversized(content: Mapping[str, Any], config: HuggingFaceConfig) -> None:
    """Refuse more blocks or experts than any model has: each is an object, and takes time.

    Raises:
        ConfigError: It names the first key with more.
    """
    for key, value in content.items():
        if isinstance(value, Mapping):
            _refuse_oversized(value, config)
        elif isinstance(value, int) and value > MOST_LAYERS and key.endswith(_COUNTS):
            message = f"{key}={value}: must be at most {MOST_LAYERS}"
            where = "model.path" if config.path else "model.config"
            raise ConfigError([ConfigIssue(where, message, config.path or ...)])


def _refuse_kind(kind: Any, config: HuggingFaceConfig) -> None:
    """Refuse a ``model_type`` that is no causal language model's.

    Raises:
        ConfigError: It says which was meant.
    """
    if kind in library.causal_types():
        return
    key = "model.path" if config.path else "model.config.model_type"
    value = config.path if config.path else kind
    shown = f"model_type={kind} " if config.path else ""
    if kind in library.config_types():
        message = f"{shown}is not a causal language model; give one that continues text"
    else:
        close = nearest(str(kind), library.causal_types())
        meant = f"; did you mean {close}?" if close else ""
        version = library.transformers().__version__
        message = f"{shown}is not known to transformers {version}{meant}"
    raise ConfigError([ConfigIssue(key, message, value)])


def _refuse_untrainable(typed: Any, config: HuggingFaceConfig) -> None:
    """Refuse what a causal language model's loss would train in silence, and wrongly.

    Raises:
        ConfigError: It says what the model is.
    """
    kind = typed.model_type
    why = _NEVER_CAUSAL.get(kind, "")
    if getattr(typed, "is_encoder_decoder", False):
        why = (
            "is an encoder-decoder, which is not supported; set "
            "model.config.is_encoder_decoder=false to train its decoder alone"
        )
    elif any(getattr(typed, part, None) is not None for part in _MODALITIES):
        why = "takes images or sound too, which is not supported; give its text model"
    elif getattr(typed, "is_decoder", True) is False and kind not in _CAUSAL_WITHOUT_A_FLAG:
        why = "is an encoder, whose tokens see later ones; set model.config.is_decoder=true"
    elif getattr(typed, "causal", True) is False:
        why = "sees later tokens; set model.config.causal=true"
    if why:
        key = "model.path" if config.path else "model.config.model_type"
        shown = f"model_type={kind} " if config.path else ""
        raise ConfigError([ConfigIssue(key, f"{shown}{why}", config.path or kind)])


def _wrong(config: HuggingFaceConfig, error: Exception) -> ConfigIssue:
    """Say in a line what transformers says of a configuration in many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    reason = str(cause).strip() if cause is not None and str(cause).strip() else " ".join(lines)
    shown = config.config if config.config else ...
    where = f"{config.path}/{files.CONFIG_FILE_NAME}: " if config.path else ""
    message = f"{where}{reason or type(error).__name__}"
    return ConfigIssue("model.config" if config.config else "model.path", message[:400], shown)
