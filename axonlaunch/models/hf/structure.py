"""What of a model's structure parallelism needs, derived from the model and never asked for.

Where blocks, ends or ties can't be found, it says why, and what depends on them is refused.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.models.block_flow import block_flow
from axonlaunch.models.hf import files
from axonlaunch.models.hf.build import build_recorded, untraceable
from axonlaunch.models.hf.sequence_mixing import why_undivided, why_unpackable
from axonlaunch.models.initialization import Initializer
from axonlaunch.models.repeated_blocks import representative
from axonlaunch.models.spec import BlockFlow


@dataclass(frozen=True)
class Structure:
    """A model of transformers, as parallelism sees it.

    Attributes:
        model: Whole, parameters without storage. Nobody changes it: ``copy`` gives one's own.
        initializers: How each parameter starts.
        layers: Path of the ``nn.ModuleList`` of blocks; None: there is none.
        no_layers: Why not; empty if there is one.
        kinds: Of each block: its class and, where the configuration says so, its type.
        ties: ``{other name: first name}`` of parameters that are held twice.
        tensor_plan: Patterns of module names to styles of transformers.
        pipeline_plan: What transformers says is passed between the parts of the base model.
        untraceable: Why it can't be run without values; empty if it can.
        head: Path of what makes logits; None: the class does not say.
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

    def copy(self) -> nn.Module:
        """Return a model of one's own."""
        return copy.deepcopy(self.model)

    @property
    def typed(self) -> Any:
        """Transformers' configuration of the model."""
        return self.model.config

    @property
    def index_names(self) -> tuple[str, ...]:
        """Attributes of a block that hold its number, by which it finds its place and its kind."""
        return ("layer_idx",) if len(set(self.kinds)) == 1 else ()

    @functools.cached_property
    def representative(self) -> nn.Module:
        """The model, with a few of its blocks where those are all alike."""
        return representative(self.model, self.layers or "", index_names=self.index_names)

    @functools.cached_property
    def flow(self) -> BlockFlow:
        """What passes through the blocks, which pipelines cut between."""
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
    def undivided(self) -> str:
        """Why sequences can't be divided over ranks; empty if they can."""
        if self.layers is None or self.untraceable:
            return self.no_layers or self.untraceable
        return why_undivided(self.representative, layers=self.layers)

    @functools.cached_property
    def unpackable(self) -> str:
        """Why a row can't hold several documents; empty if it can."""
        return self.no_layers or why_unpackable(self.representative, layers=self.layers or "")


def structure(config: HuggingFaceConfig) -> Structure:
    """Build a model without storage and look at it; once in a process for each configuration.

    Raises:
        ConfigError: It can't be built.
    """
    keys = asdict(config)
    del keys["init"], keys["weights"]
    return _of(json.dumps(keys, sort_keys=True, default=str), str(files.read_config(config)))


@functools.lru_cache(maxsize=8)
def _of(keys: str, content: str) -> Structure:
    del content  # of config.json, which may be another one than before
    config = HuggingFaceConfig(**json.loads(keys), init="random")
    model, initializers = build_recorded(config)
    layers, why_not = _layers(model)
    return Structure(
        model=model,
        initializers=initializers,
        layers=layers,
        no_layers=why_not,
        kinds=tuple(_kinds(model, layers)),
        ties=_ties(model),
        tensor_plan=dict(getattr(model, "tp_plan", None) or {}),
        pipeline_plan=dict(getattr(model, "pp_plan", None) or {}),
        untraceable=untraceable(config),
        head=_head(model),
    )


def _head(model: Any) -> str | None:
    """Return the path of a model's output embeddings, as transformers calls them."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _layers(model: Any) -> tuple[str | None, str]:
    """Return the path of the blocks' list, or why there is none.

    It is the one list whose elements transformers would not split over devices; or the list of
    the base model's pipeline plan; or the one of ``num_hidden_layers`` elements in the decoder; or
    the only one there.
    """
    depth = getattr(model.config, "num_hidden_layers", None)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    if not lists:
        return None, "it has no nn.ModuleList"
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = {id(module) for module in inner.modules()}
    stages = dict(getattr(model, "pp_plan", None) or {})
    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    for candidates in (
        [name for name, layers in lists.items() if {type(b).__name__ for b in layers} <= unsplit],
        [name for name in lists if name.rpartition(".")[2] in stages],
        [name for name, layers in lists.items() if len(layers) == depth and id(layers) in inside],
        [name for name, layers in lists.items() if id(layers) in inside],
    ):
        outermost = [n for n in candidates if not any(n.startswith(f"{o}.") for o in candidates)]
        deep = [name for name in outermost if len(lists[name]) == depth] or outermost
        if len(deep) == 1:
            return deep[0], ""
    blocks = "its blocks" if depth is None else f"its {depth} blocks"
    return None, f"none of its lists ({', '.join(lists)}) is that of {blocks} alone"


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
