"""The installed transformers, and everything that depends on how it works inside.

A version that can't serve is refused; ``tests/models/hf/test_library.py`` holds what is private.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.models import attention
from axonlaunch.models.torch_internals import is_fake, unset_fake_temporarily

OLDEST = (5, 9)
"""Version of transformers from which it builds and converts as this package expects.

Until 5.3 configurations are no dataclasses; 5.4 can't build Olmo2's own defaults.
"""
INSTALL = "pip install 'axonlaunch[hf]'"


_POSITIONS_ARE_OF_A_PART: ContextVar[bool] = ContextVar("positions_are_of_a_part", default=False)
_DOCUMENTS: ContextVar[Tensor | None] = ContextVar("documents", default=None)
"""Positions of tokens in their documents, [samples, tokens]; None: a sample is one sequence."""


@contextmanager
def positions_of_a_part() -> Iterator[None]:
    """Keep transformers from taking the gap in a part's positions for the start of a document."""
    token = _POSITIONS_ARE_OF_A_PART.set(True)
    try:
        yield
    finally:
        _POSITIONS_ARE_OF_A_PART.reset(token)


@contextmanager
def documents_apart(positions: Tensor) -> Iterator[None]:
    """Let every mask that transformers builds keep documents from each other.

    It would do so by itself for the models that hand their positions to what builds masks, which
    not all do, and with a look at the values, for which a GPU is waited for.

    Args:
        positions: Of each token of whole rows in its document, [samples, tokens].
    """
    token = _DOCUMENTS.set(positions)
    try:
        yield
    finally:
        _DOCUMENTS.reset(token)


def document_positions() -> Tensor | None:
    """Return the positions of tokens in their documents, [samples, tokens]; None: no packing."""
    return _DOCUMENTS.get()


def register_attention(name: str, *, attend: Any, mask: Any) -> None:
    """Add a function to transformers' registry of attention, and what builds its masks."""
    importlib.import_module("transformers.modeling_utils").AttentionInterface.register(name, attend)
    masking = importlib.import_module("transformers.masking_utils")
    masking.AttentionMaskInterface.register(name, mask)


def attention_function(name: str) -> Any:
    """Return a function of transformers' registry; None for ``eager``, which each model has."""
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    return functions.get(name)


@functools.cache
def transformers() -> Any:
    """Import transformers, which then keeps its advice to itself.

    Raises:
        ConfigError: It is not installed, or too old.
    """
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        message = f"transformers is not installed; {INSTALL}"
        raise ConfigError([ConfigIssue("model.name", message, "hf")]) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        message = f"transformers {version} is installed, and it takes {oldest} or newer; {INSTALL}"
        raise ConfigError([ConfigIssue("model.name", message, "hf")])
    # It would look for new versions of what is in the cache whenever it reads a file of it.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    module = importlib.import_module("transformers")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    _let_masks_be_those_of_a_run()
    _let_masks_keep_documents_apart()
    _let_rotary_tables_be_those_of_a_run()
    _let_kernels_refuse_groups()
    return module


_MASKED = ("sdpa", "eager", "flex_attention")
"""The implementations of attention that a run may choose, and that are given masks."""


def _let_masks_be_those_of_a_run() -> None:
    """Let a model on tensors without values build the masks that it builds on tensors with values.

    It looks whether positions restart, and takes its own compiler's part where it can't look: a
    mask [samples, 1, tokens, tokens] that no run has, and another kernel of attention.
    """
    masking: Any = importlib.import_module("transformers.masking_utils")
    look: Any = masking.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        known = _POSITIONS_ARE_OF_A_PART.get() or _DOCUMENTS.get() is not None
        return None if known or is_fake(position_ids) else look(position_ids)

    masking.find_packed_sequence_indices = find_packed_sequence_indices


def _let_masks_keep_documents_apart() -> None:
    """Wrap what builds masks for each implementation of attention."""
    masking: Any = importlib.import_module("transformers.masking_utils")
    for name in _MASKED:
        build: Any = masking.ALL_MASK_ATTENTION_FUNCTIONS[name]
        masking.AttentionMaskInterface.register(name, _keeping_documents_apart(build))


def _keeping_documents_apart(build: Any) -> Any:
    @functools.wraps(build)
    def build_mask(*, mask_function: Any, allow_is_causal_skip: bool = True, **options: Any) -> Any:
        positions, padding = _DOCUMENTS.get(), options.get("attention_mask")
        if padding is not None and is_fake(padding) and hides_nothing(padding):
            options["attention_mask"] = None
        if positions is not None:
            mask_function = _within_documents(mask_function, positions)
            allow_is_causal_skip = False
        return build(
            mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **options
        )

    return build_mask


def _within_documents(mask_function: Any, positions: Tensor) -> Any:
    """Let tokens see those of their own document alone, at the distances that they have in it.

    Of ``positions`` [samples, tokens] 0 1 2 0 1, the fourth token sees itself, as a first one does.
    """
    documents = (positions == 0).cumsum(-1)

    def mask(sample: Any, head: Any, query: Any, key: Any) -> Any:
        at, seen = positions[sample, query], positions[sample, key]
        same = documents[sample, query] == documents[sample, key]
        return same & mask_function(sample, head, at, seen)

    return mask


def hides_nothing(padding: Tensor) -> bool:
    """Say whether a mask of padding shows all tokens.

    Models are given tokens and no mask: one without values is what OPT made of ones until 5.17.
    """
    return is_fake(padding) or bool(padding.all())


_LOOKING = ("dynamic", "longrope")
"""Kinds of rotary tables that depend on the value of the longest position."""


def _let_kernels_refuse_groups() -> None:
    """Let transformers repeat heads where no fused kernel of CUDA's shares them: also in fp32."""
    sdpa: Any = importlib.import_module("transformers.integrations.sdpa_attention")
    takes: Any = sdpa.use_gqa_in_sdpa

    def use_gqa_in_sdpa(attention_mask: Any, key: Tensor, *rest: Any) -> bool:
        fused = not attention.refuses_groups(key, attention_mask)
        return fused and bool(takes(attention_mask, key, *rest))

    sdpa.use_gqa_in_sdpa = use_gqa_in_sdpa


def _let_rotary_tables_be_those_of_a_run() -> None:
    """Give tables that depend on the longest position its value, on tensors without values too.

    Modules take the decorator when they are imported, which is later; of one that somebody imported
    before, a table of that kind can't be traced.
    """
    rotary: Any = importlib.import_module("transformers.modeling_rope_utils")
    decorate: Any = rotary.dynamic_rope_update

    def dynamic_rope_update(forward: Any) -> Any:
        updated = decorate(forward)

        @functools.wraps(updated)
        def of_known_positions(self: Any, x: Any, position_ids: Any, *args: Any, **kw: Any) -> Any:
            looks = any(kind in str(getattr(self, "rope_type", "")) for kind in _LOOKING)
            if looks and is_fake(position_ids) and not _POSITIONS_ARE_OF_A_PART.get():
                with unset_fake_temporarily():  # they count up from 0
                    counted = torch.arange(position_ids.shape[-1])
                    position_ids = counted.expand(tuple(position_ids.shape))
            return updated(self, x, position_ids, *args, **kw)

        return of_known_positions

    rotary.dynamic_rope_update = dynamic_rope_update


@functools.cache
def causal_types() -> dict[str, str]:
    """Return ``{model_type: class name}`` of every causal language model."""
    transformers()
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@functools.cache
def config_types() -> Any:
    """Return the mapping of ``model_type`` to configuration classes, of models of all kinds."""
    transformers()
    return importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING


@functools.cache
def keys_read_by_code(cls: Any) -> frozenset[str]:
    """Return the keys that a model's code looks for without its configuration declaring them.

    Qwen3-MoE reads ``getattr(config, "head_dim", ...)`` and DBRX ``attn_config.rope_theta``, and
    their classes have no such fields.
    """
    folder = Path(inspect.getfile(cls)).parent
    code = "".join(file.read_text() for file in sorted(folder.glob("modeling_*.py")))
    looked_up = set(re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", code))
    return frozenset(looked_up | set(re.findall(r"config\.(\w+)", code)) - {*dir(cls)})


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what transformers warns of while it reads or builds: it is checked here, or moot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def targets(model: Any, names: list[str]) -> Iterator[tuple[str, str, str | None, Any]]:
    """Yield where each tensor of a checkpoint goes, as transformers' loading finds it.

    Args:
        model: Without storage.
        names: Of the tensors.

    Yields:
        The tensor's name, the parameter's, and the converter's pattern and the converter that takes
        it; None and None: it is taken as it is.
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
    of_pattern = {
        pattern: transform for transform in converters for pattern in transform.source_patterns
    }
    state = model.state_dict()
    prefix = model.base_model_prefix
    for name in sorted(names, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = loading.rename_source_key(name, [], [], prefix, state)
        yield name, renamed, pattern, of_pattern[pattern] if pattern else None


def revert_conversion(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a model's parameters as transformers' saving names and shapes them."""
    loading = importlib.import_module("transformers.core_model_loading")
    original: dict[str, Any] = loading.revert_weight_conversion(model, tensors)
    return original


def ignored_patterns(model: Any) -> list[str]:
    """Return patterns of tensors that a model may find in a checkpoint and has no use for."""
    return list(model._keys_to_ignore_on_load_unexpected or ())


def has_attention_kernel(config: Any) -> bool:
    """Say whether something is a configuration that names what computes attention."""
    return hasattr(config, "_attn_implementation_internal")


def attention_kernel(config: Any) -> Any:
    """Return the name of what computes a model's attention; None where it does not say."""
    return getattr(config, "_attn_implementation_internal", None)


def choose_attention_kernel(config: Any, name: str) -> None:
    """Let a model, and the models that are parts of it, compute attention so."""
    config._attn_implementation = name


def replace_attention_kernel(config: Any, name: str) -> None:
    """Let what has this very configuration compute attention so, unchecked."""
    object.__setattr__(config, "_attn_implementation_internal", name)
