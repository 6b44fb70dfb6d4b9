"""Plans for tensor parallelism of transformers models: transformers' plans, or ours.

transformers' plans name a style for each layer. They are translated to our styles, and modules with
a single input for all of their layers become regions. A style without an equivalent keeps its name
and is refused by name later.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from axonlaunch.models.adapters.lora import ADAPTER_PARTS
from axonlaunch.models.modules.attention import Attention

_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "rowwise_split_input": "row_split",
    "rowwise_rep": "row_split",
    "packed_colwise": "packed_column",
    "packed_rowwise": "packed_row",
    "moe_tp_experts": "experts",
    "moe_identity_expert": "averaged",
    "all_reduce": "experts",
    "local_params": "local",
    "replicated_with_grad_allreduce": "replicated_summed",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "column_gathered",
    "replicate": "replicated",
}
"""transformers' styles and our equivalents. ``mla_kv_a_proj`` makes its attention a region."""
_LATENT = "mla_kv_a_proj"

_ATTENTION = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
}
_GATED = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
_HEADS_TOGETHER = {"query_key_value": "colwise", "dense": "rowwise"}
"""Query, key and value of each head are adjacent, so heads can be split."""
_WHOLE_HEADS = {"query_key_value": "colwise_gather_output", "dense": "rowwise_split_input"}
"""Weights are split, but every rank computes attention for all heads."""
_FOUR = {"mlp.dense_h_to_4h": "colwise", "mlp.dense_4h_to_h": "rowwise"}


def _falcon(config: Any) -> dict[str, str]:
    """Split heads if keys and values are next to their queries and there is no ALiBi bias."""
    together = config.new_decoder_architecture or not config.multi_query
    attention = _HEADS_TOGETHER if together and not config.alibi else _WHOLE_HEADS
    return {**_below("self_attention", attention), **_FOUR}


def _stablelm(config: Any) -> dict[str, str]:
    """Norms of query and key heads need all heads."""
    if config.qk_layernorm:
        full = dict.fromkeys(_ATTENTION, "colwise_gather_output")
        return {**full, "self_attn.o_proj": "rowwise_split_input", **_GATED}
    return {**_ATTENTION, "self_attn.o_proj": "rowwise", **_GATED}


def _persimmon(config: Any) -> dict[str, str]:
    del config
    norms = {f"self_attn.{name}_layernorm": "replicated_with_grad_allreduce" for name in "qk"}
    return {**_below("self_attn", _HEADS_TOGETHER), **norms, **_FOUR}


def _below(name: str, plan: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}.{key}": style for key, style in plan.items()}


_OPT = {**_ATTENTION, "self_attn.out_proj": "rowwise", "fc1": "colwise", "fc2": "rowwise"}
_GPT2 = {
    "attn.c_attn": "packed_colwise/3",
    "attn.c_proj": "rowwise",
    "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
}
_GPT_NEO = {
    **{f"attn.attention.{name}_proj": "colwise" for name in "qkv"},
    "attn.attention.out_proj": "rowwise",
    "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
}
_GPTJ = {
    **{f"attn.{name}_proj": "colwise" for name in "qkv"},
    "attn.out_proj": "rowwise",
    "mlp.fc_in": "colwise",
    "mlp.fc_out": "rowwise",
}
_BLOOM = {**_below("self_attention", _WHOLE_HEADS), **_FOUR}
_MPT = {
    "attn.Wqkv": "colwise_gather_output",
    "attn.out_proj": "rowwise_split_input",
    "ffn.up_proj": "colwise",
    "ffn.down_proj": "rowwise",
}
_CODEGEN = {
    "attn.qkv_proj": "colwise_gather_output",
    "attn.out_proj": "rowwise_split_input",
    "mlp.fc_in": "colwise",
    "mlp.fc_out": "rowwise",
}
_XGLM = {**_ATTENTION, "self_attn.out_proj": "rowwise", "fc1": "colwise", "fc2": "rowwise"}

OURS: dict[str, Any] = {
    "gpt2": _GPT2,
    "opt": _OPT,
    "xglm": _XGLM,
    "biogpt": _OPT,
    "gpt_neo": _GPT_NEO,
    "gptj": _GPTJ,
    "codegen": _CODEGEN,
    "bloom": _BLOOM,
    "mpt": _MPT,
    "falcon": _falcon,
    "stablelm": _stablelm,
    "persimmon": _persimmon,
}
"""Our plans by ``model_type``: styles of a block's layers, or a function of the configuration."""
_PACKED_EXPERTS = {"mlp.experts.gate_up_proj": "packed_colwise"}
_LEARNED_SLOPES = {"mlp.act_fn": "replicated_with_grad_allreduce"}
_CORRECTIONS: dict[str, dict[str, str]] = {
    # The slopes of the activation are trained, and each rank applies them only to its features.
    "apertus": _LEARNED_SLOPES,
    "apertus1p5_text": _LEARNED_SLOPES,
    # Gate and up projections are packed in one weight; transformers' plan splits them as one.
    "inkling_text": _PACKED_EXPERTS,
    "inkling2_text": _PACKED_EXPERTS,
    "inkling2_loop_text": _PACKED_EXPERTS,
    # It keeps the largest of all features.
    "gemma3n_text": {
        "mlp.gate_proj": "colwise_gather_output",
        "mlp.up_proj": "colwise_gather_output",
        "mlp.down_proj": "rowwise_split_input",
    },
    # All values together determine a mask for all heads.
    "doge": {
        **dict.fromkeys(_ATTENTION, "colwise_gather_output"),
        "self_attn.dt_proj": "rowwise_split_input",
        "self_attn.o_proj": "rowwise_split_input",
    },
}
"""Corrections by ``model_type`` if transformers' plan is incomplete or wrong."""


def tensor_plan(model: Any, layers: str | None) -> dict[str, str]:
    """Return a plan in our styles for a model, or an empty dict.

    Args:
        model: Unsharded model, or a part of one with the same names.
        layers: Path of the blocks.
    """
    names = [*_modules(model), *(name for name, _ in model.named_parameters())]
    return _patterns(module_styles(model, layers), names)


def module_styles(model: Any, layers: str | None) -> dict[str, str]:
    """Return our style of each module and parameter that has one, by full name."""
    plan = _plan_of_transformers(model, layers)
    if not plan:
        return {}
    modules = _modules(model)
    styles = {name: style for name in modules if (style := plan.get(_with_stars(name)))}
    for name, owner in modules.items():
        for key in owner._parameters:
            full_name = f"{name}.{key}"
            if style := plan.get(_with_stars(full_name)):
                styles[full_name] = style
    latent_attentions = {_parent(name) for name, style in styles.items() if style == _LATENT}
    translated = {
        name: _translate_style(style, name, modules)
        for name, style in styles.items()
        if style != _LATENT
    }
    translated |= _ends(model, modules, translated)
    for name in _regions(modules, translated, latent_attentions):
        translated[name] = "region"
    return translated | _around_layers(modules, translated, layers)


def _around_layers(
    modules: Mapping[str, nn.Module], styles: Mapping[str, str], layers: str | None
) -> dict[str, str]:
    """Return the styles of modules around sharded layers, which matter for sequence parallelism.

    Modules with vectors, such as norms, compute on parts of the sequence. A module in a block that
    has matrices and is not a region computes on full sequences, because it may mix tokens.
    """
    with_matrices = {
        parent
        for name, module in modules.items()
        if any(p is not None and p.ndim > 1 for p in module._parameters.values())
        for parent in itertools.accumulate(name.split("."), "{}.{}".format)
    }
    blocks = {name for name in modules if _parent(name) == layers}
    around: dict[str, str] = {}
    closed: list[str] = []
    for name, module in modules.items():  # parents come before their children
        if name.startswith(tuple(closed)):
            continue
        is_part = any(name.startswith(f"{block}.") for block in blocks)
        is_called = type(module).forward is not nn.Module.forward
        if name in styles:
            closed.append(f"{name}.")
        elif is_part and is_called and name in with_matrices:
            around[name] = "full_sequence"
            closed.append(f"{name}.")
        elif any(parameter is not None for parameter in module._parameters.values()):
            around[name] = "sequence"
    return around


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by full name, except adapters, which are split like their layers."""
    modules = model.named_modules()
    return {name: module for name, module in modules if not isinstance(module, ADAPTER_PARTS)}


def _plan_of_transformers(model: Any, layers: str | None) -> dict[str, str]:
    """Return transformers' styles by names with ``*`` for numbers."""
    plan = OURS.get(model.config.model_type)
    if plan is None or layers is None:
        corrected = _below(f"{layers}.*", _CORRECTIONS.get(model.config.model_type, {}))
        return dict(getattr(model, "tp_plan", None) or {}) | corrected
    return _below(f"{layers}.*", plan(model.config) if callable(plan) else plan)


def _with_stars(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _translate_style(style: str, name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return our style; ranks may share key-value heads if there are fewer of them."""
    base, slash, pieces = style.partition("/")
    holder: Any = modules.get(_parent(name))
    has_groups = getattr(holder, "num_key_value_groups", None) is not None and hasattr(
        holder, "head_dim"
    )
    if base == "colwise" and has_groups and name.endswith((".k_proj", ".v_proj")):
        return "key_value"
    return _STYLES.get(base, base) + slash + pieces


def _ends(
    model: Any, modules: Mapping[str, nn.Module], styles: Mapping[str, str]
) -> dict[str, str]:
    """Return the styles of the embedding and the head, which are split by vocabulary.

    If they are tied and the embedding is not split, the head is not split either.
    """
    names = {id(module): name for name, module in modules.items()}
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {}
    if inputs is not None and (name := names.get(id(inputs))):
        # Embeddings that do more than look up rows, for example with a norm, are replicated.
        is_replicated = styles.get(name) == "replicated" or any(True for _ in inputs.children())
        ends[name] = "replicated" if is_replicated else "vocabulary"
    if outputs is not None and (name := names.get(id(outputs))):
        tied = inputs is not None and outputs.weight is inputs.weight
        is_replicated = tied and "replicated" in ends.values()
        ends[name] = "replicated" if is_replicated else "vocabulary"
    return ends


def _regions(
    modules: Mapping[str, nn.Module], styles: Mapping[str, str], latent: set[str]
) -> list[str]:
    """Return modules with a single input for all column layers and with a row layer at the end.

    In a region, layers that are not split get a partial gradient, which is summed over ranks. So
    all modules with parameters must be before the row layer. This holds for the latent keys and
    values of an MLA attention.
    """
    regions = []
    for name, module in modules.items():
        inner_styles = {
            key: styles.get(f"{name}.{key}")
            for key, inner in module.named_modules()
            if key and inner._parameters
        }
        kinds = [style.partition("/")[0] if style else None for style in inner_styles.values()]
        divided = {"column", "packed_column", "key_value"} & set(kinds)
        has_row_layer = any(s == "row" and "." not in key for key, s in inner_styles.items())
        allowed = {"column", "packed_column", "key_value", "row", "replicated_summed"}
        is_region = set(kinds) <= allowed or (
            name in latent and not {"column_gathered", "row_split"} & set(kinds)
        )
        if (
            divided
            and has_row_layer
            and is_region
            and not isinstance(module, Attention)
            and _one_input(module)
        ):
            regions.append(name)
    return regions


def _one_input(module: nn.Module) -> bool:
    first = next(iter(inspect.signature(module.forward).parameters.values()), None)
    return first is not None and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _patterns(styles: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """Use one pattern for all blocks if the pattern matches nothing else."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in styles:
        groups[_with_stars(name)].append(name)
    patterns: dict[str, str] = {}
    for pattern, members in groups.items():
        kinds = {styles[name] for name in members}
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if len(kinds) == 1 and matched == set(members):
            patterns[pattern] = kinds.pop()
        else:
            patterns |= {name: styles[name] for name in members}
    return patterns
