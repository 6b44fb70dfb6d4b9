"""Counts the floating-point operations that a model needs for each token, for MFU.

The count uses the built model, so it works for models of this package, of transformers, and of
users. The model is not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from axonlaunch.models.tensors.packed_blocks import logical_numel, logical_shape

_ATTENTION = ("Attention", "Attn")
_WITHOUT_SCORES = ("Linear", "Lightning", "Rwkv")
"""Parts of class names of attention with a cost per token that is independent of the length."""
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "n_q_heads")
_EXPERTS_PER_TOKEN = (
    *("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
    *("top_k_experts", "topk"),
)
"""Attributes with the number of experts that a router selects for each token."""


@dataclass(frozen=True)
class AttentionFlops:
    """Sizes of one attention layer that determine the cost of its scores.

    Attributes:
        width: Total size of all query heads plus total size of all value heads, per token.
        window: Maximum number of positions that a token attends to; None for all positions.
    """

    width: int
    window: int | None = None

    def per_token(self, positions: int) -> int:
        """Return the FLOPs of forward and backward for one token.

        The product of queries and keys takes 2 FLOPs for each number and position, and so does the
        product of scores and values. Backward takes twice as much as forward. This is 12 H Q T if
        values have the same size as queries.
        """
        return 6 * self.width * min(positions, self.window or positions)


@dataclass(frozen=True)
class ModelFlops:
    """Sizes of a model that determine the cost of a token.

    Attributes:
        multiplied: Number of parameters that each token is multiplied with. Embedding tables count
            only if a head shares them, and experts only in the fraction that a token uses.
        frozen: Number of ``multiplied`` parameters that are not trained and need no weight
            gradient.
        attention: Layers with a cost that grows with the sequence length.
    """

    multiplied: int
    frozen: int = 0
    attention: tuple[AttentionFlops, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        """Count the parameters and attention layers of a model.

        Args:
            model: Unsharded model on any device.
        """
        tables, shares = _looked_up(model), _expert_shares(model)
        counted = [
            (parameter, logical_numel(parameter) * shares.get(id(parameter), Fraction(1)))
            for parameter in model.parameters()
            if id(parameter) not in tables
        ]
        return cls(
            multiplied=round(sum(size for _, size in counted)),
            frozen=round(sum(size for p, size in counted if not p.requires_grad)),
            attention=tuple(_attention_layers(model)),
        )

    def per_token(self, positions: int) -> int:
        """Return the FLOPs of forward and backward for one token: 6 N - 2 F + 12 L H Q T.

        N is the number of multiplied parameters, and F of them are frozen. L layers have H heads of
        size Q and attend to T positions, including masked ones. Recomputation is not counted.

        Args:
            positions: Number of tokens of a sample, T.

        Source: Chowdhery et al., "PaLM", 2022, appendix B; pytorch/torchtitan leaves out the
        embedding too, ``torchtitan/models/utils.py``.
        """
        attention = sum(layer.per_token(positions) for layer in self.attention)
        return 6 * self.multiplied - 2 * self.frozen + attention


def looked_up_parameters(model: nn.Module) -> int:
    """Return the number of parameters in embedding tables that no other module uses.

    Args:
        model: Unsharded model on any device.
    """
    return sum(table.numel() for table in _looked_up(model).values())


def tied_parameters(model: nn.Module) -> int:
    """Return the number of parameters in embedding tables that other modules use, too.

    Args:
        model: Unsharded model on any device.
    """
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(table.numel() for table in tables.values()) - looked_up_parameters(model)


def active_experts(model: nn.Module) -> float:
    """Return the largest fraction of a layer's experts that one token uses; 1 without experts."""
    return float(max(_expert_shares(model).values(), default=1))


def _looked_up(model: nn.Module) -> dict[int, Tensor]:
    """Return the embedding tables that no other module uses, by ``id``."""
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return {key: table for key, table in tables.items() if key not in multiplied}


def _expert_shares(model: nn.Module) -> dict[int, Fraction]:
    """Return the fraction of each routed expert's parameters that one token uses, by ``id``."""
    modules = dict(model.named_modules())
    shares: dict[int, Fraction] = {}
    for path, module in modules.items():
        count = count_experts(path, module)
        num_active = _experts_per_token(path, modules) if count else None
        if num_active is not None:
            share = Fraction(min(num_active, count), count)
            shares.update((id(parameter), share) for parameter in module.parameters())
    return shares


def count_experts(path: str, module: nn.Module) -> int:
    """Return the number of routed experts in a module, or 0.

    Experts are a list, or packed in parameters [experts, outputs, inputs].
    """
    name = path.rpartition(".")[2]
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return len(module) if name == "experts" else 0
    if name != "experts" and "Expert" not in type(module).__name__:
        return 0
    packed = [p.shape[0] for p in module.parameters(recurse=False) if len(logical_shape(p)) == 3]
    return packed[0] if packed else 0


def _experts_per_token(path: str, modules: Mapping[str, nn.Module]) -> int | None:
    """Return the number of experts per token from the nearest router or the configuration."""
    ancestor = path
    while ancestor:
        ancestor = ancestor.rpartition(".")[0]
        for module in (modules[ancestor], *modules[ancestor].children()):
            if (count := _integer(module, _EXPERTS_PER_TOKEN)) is not None:
                return count
    return _integer(_text_config(modules[""]), _EXPERTS_PER_TOKEN)


def _attention_layers(model: nn.Module) -> Iterator[AttentionFlops]:
    """Yield the attention layers with a cost that grows with the sequence length."""
    for module in model.modules():
        if not _computes_scores(module) or any(
            _computes_scores(inner) for inner in module.modules() if inner is not module
        ):
            continue
        config = _layer_config(module, _text_config(module) or _text_config(model))
        heads = _integer(module, _HEADS) or _integer(config, _HEADS)
        if not heads:
            continue
        hidden = _integer(config, ("hidden_size",)) or _integer(module, ("embed_dim",)) or 0
        size = _integer(module, ("head_dim",)) or _integer(config, ("head_dim",)) or hidden // heads
        queries = _integer(module, ("qk_head_dim",)) or size
        values = _integer(module, ("v_head_dim",)) or size
        yield AttentionFlops(heads * (queries + values), window=_window(module, config))


def _computes_scores(module: nn.Module) -> bool:
    """Return whether a module is non-linear attention that contains its projections."""
    name = type(module).__name__
    if not any(part in name for part in _ATTENTION) or any(
        part in name for part in _WITHOUT_SCORES
    ):
        return False
    weights = [getattr(child, "weight", None) for child in module.children()]
    weights += [getattr(module, "in_proj_weight", None)]
    return sum(isinstance(weight, Tensor) and weight.ndim == 2 for weight in weights) > 1


def _window(module: nn.Module, config: Any) -> int | None:
    """Return the maximum number of positions that a token attends to; None for all positions."""
    index, kinds = getattr(module, "layer_idx", None), getattr(config, "layer_types", None)
    kind = kinds[index] if kinds and isinstance(index, int) and index < len(kinds) else None
    if kind == "chunked_attention":
        return _integer(config, ("attention_chunk_size",))
    if hasattr(module, "sliding_window"):
        return _integer(module, ("sliding_window",))
    if kind not in (None, "sliding_attention"):
        return None
    return _integer(config, ("sliding_window",))


def _text_config(module: nn.Module) -> Any:
    """Return the text configuration of a transformers module, or None."""
    config = getattr(module, "config", None)
    text = getattr(config, "get_text_config", None)
    return config if text is None else text()


def _layer_config(module: nn.Module, config: Any) -> Any:
    """Return the configuration of a module's layer, if sizes of the model differ by layer."""
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int) and getattr(config, "is_heterogeneous", False):
        return config.per_layer_config[index]
    return config


def _integer(holder: Any, names: tuple[str, ...]) -> int | None:
    """Return the first attribute that is a positive integer, or None."""
    values = (getattr(holder, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), None)
