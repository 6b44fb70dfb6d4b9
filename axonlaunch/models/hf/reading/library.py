"""Imports transformers and contains all code that depends on its internals.

Versions that are too old are an error. ``tests/models/hf/test_library.py`` tests the private names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.models.modules import attention
from axonlaunch.models.specs.router_loss import choices_of_logits, current_router_loss
from axonlaunch.models.torch_internals import is_fake, unset_fake_temporarily

OLDEST = (5, 9)
"""Oldest supported version of transformers.

Up to 5.3 configurations are no dataclasses, and 5.4 can't build Olmo2 with its default
configuration.
"""
INSTALL = "pip install 'axonlaunch[hf]'"


_IS_PART: ContextVar[bool] = ContextVar("positions_are_of_a_part", default=False)
_DOCUMENTS: ContextVar[Tensor | None] = ContextVar("documents", default=None)
"""Positions of tokens in their documents, [samples, tokens]; None without packing."""
_ROW_LENGTH: ContextVar[int | None] = ContextVar("row_length", default=None)
"""Number of tokens of rows whose hidden states are parts of the sequence; None for full ones."""
_PRESENT: ContextVar[Tensor | None] = ContextVar("present_tokens", default=None)
"""Whether each token is not padding, [samples, tokens]; None: no token is padding."""


@contextmanager
def positions_of_a_part() -> Iterator[None]:
    """Tell transformers that a gap in the positions does not start a new document."""
    token = _IS_PART.set(True)
    try:
        yield
    finally:
        _IS_PART.reset(token)


@contextmanager
def parts_of_rows(length: int) -> Iterator[None]:
    """Make all masks that transformers builds cover full rows, while hidden states are parts.

    Args:
        length: Number of tokens of a full row, whose positions count up from 0 or restart in each
            document.
    """
    token = _ROW_LENGTH.set(length)
    try:
        yield
    finally:
        _ROW_LENGTH.reset(token)


def row_length(hidden: int) -> int:
    """Return the number of tokens of a full row.

    Args:
        hidden: Number of positions in the hidden states.
    """
    length = _ROW_LENGTH.get()
    return hidden if length is None else length


@contextmanager
def documents_apart(positions: Tensor) -> Iterator[None]:
    """Let transformers build only masks that separate documents.

    transformers does this itself only for models that pass their positions to the mask builder,
    which not all do. It would also read the values of the positions, for which a GPU must be
    synchronized.

    Args:
        positions: Position of each token of full rows in its document, [samples, tokens].
    """
    token = _DOCUMENTS.set(positions)
    try:
        yield
    finally:
        _DOCUMENTS.reset(token)


@contextmanager
def router_loss_without_padding(present: Tensor | None) -> Iterator[None]:
    """Make the auxiliary loss of routers count only tokens that are present.

    Attention gets no such mask, because no token attends to padding after it.

    Args:
        present: Whether each token is not padding, [samples, tokens]; None: no token is padding.
    """
    token = _PRESENT.set(present)
    try:
        yield
    finally:
        _PRESENT.reset(token)


@functools.cache
def mask_router_loss(module_name: str) -> bool:
    """Make the auxiliary loss in a module with a model's code obey the context above.

    Returns:
        Whether the module has the function that all models of transformers with such a loss have.
    """
    module: Any = sys.modules[module_name]
    original = getattr(module, "load_balancing_loss_func", None)
    if original is None or "attention_mask" not in inspect.signature(original).parameters:
        return False
    signature = inspect.signature(original)
    has_shares = shares_router_loss(module_name)

    @functools.wraps(original)
    def load_balancing_loss_func(*args: Any, **named: Any) -> Any:
        call = signature.bind(*args, **named)
        if call.arguments.get("attention_mask") is None and _PRESENT.get() is not None:
            call.arguments["attention_mask"] = _PRESENT.get()
        loss, gate_logits = current_router_loss(), call.arguments.get("gate_logits")
        if loss is None or not has_shares or not isinstance(gate_logits, tuple):
            return original(*call.args, **call.kwargs)
        call.apply_defaults()
        return loss.share(
            choices_of_logits(gate_logits, top_k=call.arguments["top_k"]),
            num_experts=call.arguments["num_experts"],
            mask=call.arguments["attention_mask"],
            device=gate_logits[0].device,
        )

    module.load_balancing_loss_func = load_balancing_loss_func
    return True


def shares_router_loss(module_name: str) -> bool:
    """Return whether ``RouterLoss`` computes the auxiliary loss of a module with a model's code.

    It is the same function in all models except those with other arguments, like Doge.
    """
    function = getattr(sys.modules[module_name], "load_balancing_loss_func", None)
    parameters = [] if function is None else [*inspect.signature(function).parameters]
    return parameters == ["gate_logits", "num_experts", "top_k", "attention_mask"]


def recorded_router_logits() -> tuple[Tensor, ...]:
    """Return the router logits that a running forward has recorded so far."""
    capturing: Any = importlib.import_module("transformers.utils.output_capturing")
    recorded = capturing._active_collector.get() or {}
    return tuple(logits for logits in recorded.get("router_logits", ()) if logits is not None)


def present_tokens() -> Tensor | None:
    """Return whether each token is not padding, as the surrounding context has set it.

    None if no context has set it, or no token is padding.
    """
    return _PRESENT.get()


def document_positions() -> Tensor | None:
    """Return the positions of tokens in their documents, [samples, tokens]; None if not packed."""
    return _DOCUMENTS.get()


def register_attention(name: str, *, attend: Any, mask: Any) -> None:
    """Add an attention function and its mask builder to transformers' registry."""
    importlib.import_module("transformers.modeling_utils").AttentionInterface.register(name, attend)
    masking = importlib.import_module("transformers.masking_utils")
    masking.AttentionMaskInterface.register(name, mask)


def attention_function(name: str) -> Any:
    """Return a function from transformers' registry; None for ``eager``, which models define."""
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    return functions.get(name)


@functools.cache
def transformers() -> Any:
    """Import transformers and disable its log messages and progress bars.

    Raises:
        ConfigError: transformers is not installed, or too old.
    """
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        message = f"transformers is not installed; {INSTALL}"
        raise ConfigError([ConfigIssue("model.name", message, "hf")]) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        message = (
            f"transformers {version} is installed, but {oldest} or newer is required; {INSTALL}"
        )
        raise ConfigError([ConfigIssue("model.name", message, "hf")])
    # Otherwise it checks for new versions online whenever it reads a file in its cache.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # transformers imports an installed torchao, which reports kernels for other devices.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # It caches comparisons of versions, which can't change while torch compiles its code.
    cached = "Dynamo detected a call to a `functools.lru_cache`"
    warnings.filterwarnings("ignore", message=cached)
    module = importlib.import_module("transformers")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    _build_same_masks_when_fake()
    _separate_documents_in_masks()
    _build_same_rotary_tables_when_fake()
    _repeat_unsupported_groups()
    return module


_MASKED = ("sdpa", "eager", "flex_attention")
"""Attention implementations that a run may select and that get masks."""


def _build_same_masks_when_fake() -> None:
    """Make a model build the same masks on tensors without values as on tensors with values.

    transformers checks whether positions restart. On tensors without values it would instead assume
    that they may, as for its compiler: it would build a mask [samples, 1, tokens, tokens] and use
    another attention kernel than a run.
    """
    masking: Any = importlib.import_module("transformers.masking_utils")
    original: Any = masking.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        is_known = _IS_PART.get() or any(c.get() is not None for c in (_DOCUMENTS, _ROW_LENGTH))
        return None if is_known or is_fake(position_ids) else original(position_ids)

    masking.find_packed_sequence_indices = find_packed_sequence_indices


def _separate_documents_in_masks() -> None:
    """Wrap the mask builder of each attention implementation."""
    masking: Any = importlib.import_module("transformers.masking_utils")
    for name in _MASKED:
        build: Any = masking.ALL_MASK_ATTENTION_FUNCTIONS[name]
        masking.AttentionMaskInterface.register(name, _with_documents(build))


def _with_documents(build: Any) -> Any:
    @functools.wraps(build)
    def build_mask(*, mask_function: Any, allow_is_causal_skip: bool = True, **options: Any) -> Any:
        positions, padding = _DOCUMENTS.get(), options.get("attention_mask")
        if padding is not None and is_fake(padding) and hides_nothing(padding):
            options["attention_mask"] = None
        if (length := _ROW_LENGTH.get()) is not None:
            options |= {"q_length": length, "kv_length": length}
            if padding is not None and padding.shape[-1] != length:
                # BioGPT makes a mask of ones for the hidden states, which are a part of the row.
                options["attention_mask"] = None
        if positions is not None:
            mask_function = _within_documents(mask_function, positions)
            allow_is_causal_skip = False
        return build(
            mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **options
        )

    return build_mask


def _within_documents(mask_function: Any, positions: Tensor) -> Any:
    """Restrict attention to a token's document, with distances within the document.

    With ``positions`` [samples, tokens] 0 1 2 0 1, the fourth token attends only to itself, like a
    first token.
    """
    documents = (positions == 0).cumsum(-1)

    def mask(sample: Any, head: Any, query: Any, key: Any) -> Any:
        query_position, key_position = positions[sample, query], positions[sample, key]
        is_same_document = documents[sample, query] == documents[sample, key]
        return is_same_document & mask_function(sample, head, query_position, key_position)

    return mask


def hides_nothing(padding: Tensor) -> bool:
    """Return whether a padding mask shows all tokens.

    Models here get tokens without a padding mask. A mask without values is therefore all ones; OPT
    creates such a mask up to 5.17.
    """
    return is_fake(padding) or bool(padding.all())


_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary tables that depend on the value of the longest position."""


def _repeat_unsupported_groups() -> None:
    """Repeat key-value heads if no fused CUDA kernel supports fewer of them, including in fp32."""
    sdpa: Any = importlib.import_module("transformers.integrations.sdpa_attention")
    original: Any = sdpa.use_gqa_in_sdpa

    def use_gqa_in_sdpa(attention_mask: Any, key: Tensor, *rest: Any) -> bool:
        is_fused = not attention.refuses_groups(key, attention_mask)
        return is_fused and bool(original(attention_mask, key, *rest))

    sdpa.use_gqa_in_sdpa = use_gqa_in_sdpa


def _build_same_rotary_tables_when_fake() -> None:
    """Make rotary tables that depend on the longest position work on tensors without values.

    Modules apply the decorator at import, which is later. If a module was imported before this
    call, tables of these kinds can't be traced.
    """
    rotary: Any = importlib.import_module("transformers.modeling_rope_utils")
    decorate: Any = rotary.dynamic_rope_update

    def dynamic_rope_update(forward: Any) -> Any:
        updated = decorate(forward)

        @functools.wraps(updated)
        def with_known_positions(
            self: Any, x: Any, position_ids: Any, *args: Any, **kw: Any
        ) -> Any:
            needs_values = any(
                kind in str(getattr(self, "rope_type", "")) for kind in _LENGTH_DEPENDENT
            )
            if needs_values and is_fake(position_ids) and not _IS_PART.get():
                with unset_fake_temporarily():  # positions count up from 0
                    positions = torch.arange(position_ids.shape[-1])
                    position_ids = positions.expand(tuple(position_ids.shape))
            return updated(self, x, position_ids, *args, **kw)

        return with_known_positions

    rotary.dynamic_rope_update = dynamic_rope_update


@functools.cache
def causal_types() -> dict[str, str]:
    """Return ``{model_type: class name}`` of every causal language model."""
    transformers()
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@functools.cache
def config_types() -> Any:
    """Return the mapping from ``model_type`` to configuration class, for models of all kinds."""
    transformers()
    return importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING


@functools.cache
def keys_read_by_code(cls: Any) -> frozenset[str]:
    """Return configuration keys that a model's code reads although its class does not declare them.

    For example, Qwen3-MoE reads ``getattr(config, "head_dim", ...)`` and DBRX reads
    ``attn_config.rope_theta``; their configuration classes have no such fields.
    """
    folder = Path(inspect.getfile(cls)).parent
    code = "".join(file.read_text() for file in sorted(folder.glob("modeling_*.py")))
    read_keys = set(re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", code))
    return frozenset(read_keys | set(re.findall(r"config\.(\w+)", code)) - {*dir(cls)})


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' warnings; they are irrelevant here or checked elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def targets(model: Any, names: list[str]) -> Iterator[tuple[str, str, str | None, Any]]:
    """Yield the target parameter of each tensor in a checkpoint, as transformers' loading finds it.

    Args:
        model: Model without storage.
        names: Names of the tensors.

    Yields:
        Tensor name, parameter name, pattern of the converter, and converter. The last two are None
        if the tensor is used unchanged.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping")
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [
        transform for transform in transforms if isinstance(transform, loading.WeightRenaming)
    ]
    converters = [
        transform for transform in transforms if isinstance(transform, loading.WeightConverter)
    ]
    converter_by_pattern = {
        pattern: transform for transform in converters for pattern in transform.source_patterns
    }
    state = model.state_dict()
    prefix = model.base_model_prefix
    for name in sorted(names, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = loading.rename_source_key(name, [], [], prefix, state)
        yield name, renamed, pattern, converter_by_pattern[pattern] if pattern else None


def revert_conversion(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a model's parameters with the names and shapes in which transformers saves them."""
    loading = importlib.import_module("transformers.core_model_loading")
    saved: dict[str, Any] = loading.revert_weight_conversion(model, tensors)
    return saved


def quantizes(model: Any, skipped: list[str] | None) -> Callable[[str], bool]:
    """Return whether transformers quantizes a linear layer, as a function of the layer's name.

    Args:
        model: Model without storage.
        skipped: ``llm_int8_skip_modules`` of the quantization.
    """
    base = importlib.import_module("transformers.quantizers.base")
    names = importlib.import_module("transformers.quantizers.quantizers_utils")
    patterns = base.HfQuantizer.get_modules_to_not_convert(
        model, skipped, model._keep_in_fp32_modules
    )
    return lambda name: bool(names.should_convert_module(name, patterns))


def ignored_patterns(model: Any) -> list[str]:
    """Return name patterns of tensors in a checkpoint that a model may ignore."""
    return list(model._keys_to_ignore_on_load_unexpected or ())


def has_attention_kernel(config: Any) -> bool:
    """Return whether an object is a configuration that names an attention implementation."""
    return hasattr(config, "_attn_implementation_internal")


def attention_kernel(config: Any) -> Any:
    """Return the name of a model's attention implementation, or None."""
    return getattr(config, "_attn_implementation_internal", None)


def choose_attention_kernel(config: Any, name: str) -> None:
    """Set the attention implementation of a model and of the models that it contains."""
    config._attn_implementation = name


def replace_attention_kernel(config: Any, name: str) -> None:
    """Set the attention implementation of exactly this configuration, without checks."""
    object.__setattr__(config, "_attn_implementation_internal", name)
