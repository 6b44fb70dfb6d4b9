"""Derives the structure of a model that parallelism needs: blocks, ends, ties, plans.

If blocks, ends or ties can't be found, the reason is stored, and features that need them refuse to
run.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from axonlaunch.config.options.model import TransformersModel
from axonlaunch.models.fake.block_flow import block_flow
from axonlaunch.models.hf.analysis.hidden_parts import why_unsplittable
from axonlaunch.models.hf.analysis.sequence_mixing import why_unpackable, why_unshardable
from axonlaunch.models.hf.build import build_recorded, untraceable
from axonlaunch.models.hf.reading import files
from axonlaunch.models.hf.reading.quantized_files import unquantized_modules
from axonlaunch.models.modules.repeated_blocks import representative
from axonlaunch.models.specs.model_spec import BlockFlow
from axonlaunch.models.tensors.initialization import Initializer


@dataclass(frozen=True)
class Structure:
    """Structure of a transformers model.

    Attributes:
        model: Unsharded model with parameters without storage. It must not be changed; use
            ``copy``.
        initializers: Initializer of each parameter.
        layers: Path of the ``nn.ModuleList`` of blocks, or None.
        no_layers: Why ``layers`` is None; otherwise empty.
        kinds: Class of each block, with its layer type if configured.
        ties: ``{other name: first name}`` of tied parameters.
        tensor_plan: transformers' tensor plan: patterns of module names to its styles.
        pipeline_plan: transformers' pipeline plan: tensors that pass between the parts of the base
            model.
        untraceable: Why the model can't run on tensors without values; empty if it can.
        head: Path of the output embeddings, which compute logits; None if unknown.
        unquantized: Names of modules whose weights are not quantized in files of which others are.
    """

    model: nn.Module
    initializers: Mapping[str, Initializer]
    layers: str | None
    no_layers: str
    kinds: tuple[str, ...]
    ties: Mapping[str, str]
    tensor_plan: Mapping[str, str]
    pipeline_plan: Mapping[str, Any]
    untraceable: str = ""
    head: str | None = None
    unquantized: frozenset[str] = frozenset()

    def copy(self) -> nn.Module:
        """Return a copy of the model that may be changed."""
        return copy.deepcopy(self.model)

    @property
    def typed(self) -> Any:
        """Transformers' configuration of the model."""
        return self.model.config

    @property
    def index_names(self) -> tuple[str, ...]:
        """Attributes that hold the number of a block, if all blocks are of the same kind."""
        return ("layer_idx",) if len(set(self.kinds)) == 1 else ()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Number of rows of the parameters of the embedding and the head, by their first name."""
        ends: Any = self.model
        modules = (ends.get_input_embeddings(), ends.get_output_embeddings())
        held = {
            id(part) for module in modules if module is not None for part in module.parameters()
        }
        named = self.model.named_parameters()
        return {name: len(part) for name, part in named if id(part) in held and part.ndim}

    @functools.cached_property
    def representative(self) -> nn.Module:
        """The model, with only a few of its blocks if all are equal."""
        return representative(self.model, self.layers or "", index_names=self.index_names)

    @functools.cached_property
    def flow(self) -> BlockFlow:
        """Modules and tensors around the blocks, for pipelines."""
        if self.layers is None:
            return BlockFlow(problem=self.no_layers)
        if self.untraceable:
            return BlockFlow(problem=self.untraceable)
        flow = block_flow(self.representative, layers=self.layers)
        left_out = len(self.kinds) - len(flow.returns)
        if flow.problem or not left_out:
            return flow
        first, inner, last = flow.returns
        return replace(flow, returns=(first, *[inner] * (left_out + 1), last))

    @functools.cached_property
    def unshardable(self) -> str:
        """Why sequences can't be split over ranks; empty if they can."""
        if self.layers is None or self.untraceable:
            return self.no_layers or self.untraceable
        return why_unshardable(self.representative, layers=self.layers)

    @functools.cached_property
    def unsplittable(self) -> str:
        """Why tensor ranks can't each have a part of the hidden states; empty if they can."""
        if self.layers is None or self.untraceable:
            return self.no_layers or self.untraceable
        return why_unsplittable(self.representative, layers=self.layers)

    @functools.cached_property
    def unpackable(self) -> str:
        """Why a row can't hold several documents; empty if it can."""
        return self.no_layers or why_unpackable(self.representative, layers=self.layers or "")


def structure(config: TransformersModel) -> Structure:
    """Build a model without storage and return its structure; cached for each configuration.

    Raises:
        ConfigError: The model can't be built.
    """
    keys = {field.name: getattr(config, field.name) for field in fields(TransformersModel)}
    return _derive(json.dumps(keys, sort_keys=True, default=str), str(files.read_config(config)))


@functools.lru_cache(maxsize=8)
def _derive(keys: str, content: str) -> Structure:
    del content  # part of the cache key, because config.json may change
    config = TransformersModel(**json.loads(keys))
    model, initializers = build_recorded(config)
    layers, no_layers = _layers(model)
    return Structure(
        model=model,
        initializers=initializers,
        layers=layers,
        no_layers=no_layers,
        kinds=tuple(_kinds(model, layers)),
        ties=_ties(model),
        tensor_plan=dict(getattr(model, "tp_plan", None) or {}),
        pipeline_plan=dict(getattr(model, "pp_plan", None) or {}),
        untraceable=untraceable(config),
        head=_head(model),
        unquantized=unquantized_modules(model, files.read_config(config), config),
    )


def _head(model: Any) -> str | None:
    """Return the path of a model's output embeddings."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _layers(model: Any) -> tuple[str | None, str]:
    """Return the path of the list of blocks, or None and the reason.

    These rules are tried in order; the first one that matches a single list is used:
    1. the list of elements that transformers would not split over devices
    2. the list in the base model's pipeline plan
    3. the list with ``num_hidden_layers`` elements in the decoder
    4. the only list in the decoder
    """
    depth = getattr(model.config, "num_hidden_layers", None)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    if not lists:
        return None, "it has no nn.ModuleList"
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    decoder_modules = {id(module) for module in decoder.modules()}
    stages = dict(getattr(model, "pp_plan", None) or {})
    no_split_classes = set(getattr(model, "_no_split_modules", None) or ())
    for candidates in (
        [
            name
            for name, layers in lists.items()
            if {type(b).__name__ for b in layers} <= no_split_classes
        ],
        [name for name in lists if name.rpartition(".")[2] in stages],
        [
            name
            for name, layers in lists.items()
            if len(layers) == depth and id(layers) in decoder_modules
        ],
        [name for name, layers in lists.items() if id(layers) in decoder_modules],
    ):
        outermost = [n for n in candidates if not any(n.startswith(f"{o}.") for o in candidates)]
        matching = [name for name in outermost if len(lists[name]) == depth] or outermost
        if len(matching) == 1:
            return matching[0], ""
    blocks = "its blocks" if depth is None else f"its {depth} blocks"
    return None, f"none of its lists ({', '.join(lists)}) holds only {blocks}"


def _kinds(model: Any, layers: str | None) -> Iterator[str]:
    if layers is None:
        return
    types = getattr(model.config, "layer_types", None) or []
    blocks: Any = model.get_submodule(layers)
    for number, block in enumerate(blocks):
        kind = type(block).__name__
        yield f"{kind}({types[number]})" if len(types) == len(blocks) else kind


def _ties(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties
