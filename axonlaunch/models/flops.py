"""Counts the floating-point operations that a model needs for a token; MFU is a share of them.

It looks at the built model, so that one count serves models of this package, of transformers and
custom ones. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

_ATTENTION = ("Attention", "Attn")
_WITHOUT_SCORES = ("Linear", "Lightning", "Rwkv")
"""In class names of attention whose cost per token does not depend on the sequence's length."""
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "n_q_heads")
_CHOSEN = (
    *("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
    *("top_k_experts", "topk"),
)
"""Names of the number of experts that a router chooses for each token."""


@dataclass(frozen=True)
class AttentionFlops:
    """Sizes of one attention layer, from which the cost of its scores follows.

    Attributes:
        width: Numbers per token in all query heads plus those in all value heads.
        window: Positions that a token attends to at most; None: all of them.
    """

    width: int
    window: int | None = None

    def per_token(self, positions: int) -> int:
        """Return the FLOPs of forward and backward for one token.

        A product of queries and keys takes 2 FLOPs per number and position, as does one of scores
        and values; backward doubles both. That is 12 H Q T where values are as wide as
        queries.
        """
        return 6 * self.width * min(positions, self.window or positions)


@dataclass(frozen=True)
class ModelFlops:
    """Sizes of a model, from which the cost of a token follows.

    Attributes:
        multiplied: Parameters that each token is multiplied with: without embedding tables that no
            head shares, and with the chosen experts only.
        frozen: Those of ``multiplied`` that are not trained, and need no gradient.
        attention: Layers whose cost grows with the sequence.
    """

    multiplied: int
    frozen: int = 0
    attention: tuple[AttentionFlops, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        """Count a model.

        Args:
            model: Undivided, on any device.
        """
        tables, shares = _looked_up(model), _expert_shares(model)
        counted = [
            (parameter, parameter.numel() * shares.get(id(parameter), Fraction(1)))
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

        N parameters are multiplied, F of them frozen. L layers have H heads of Q numbers and attend
        to T positions, masked ones included. Recomputation is not counted.

        Args:
            positions: Tokens of a sample, T.

        Source: Chowdhery et al., "PaLM", 2022, appendix B; pytorch/torchtitan leaves the embedding
        out too, ``torchtitan/models/utils.py``.
        """
        attention = sum(layer.per_token(positions) for layer in self.attention)
        return 6 * self.multiplied - 2 * self.frozen + attention


def looked_up_parameters(model: nn.Module) -> int:
    """Return the number of parameters in embedding tables that no other module multiplies with.

    Args:
        model: Undivided, on any device.
    """
    return sum(table.numel() for table in _looked_up(model).values())


def _looked_up(model: nn.Module) -> dict[int, Tensor]:
    """Return the embedding tables that no other module holds, by their identity."""
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return {key: table for key, table in tables.items() if key not in multiplied}


def _expert_shares(model: nn.Module) -> dict[int, Fraction]:
    """Return the fraction of each routed expert's parameters that a token is multiplied with."""
    modules = dict(model.named_modules())
    shares: dict[int, Fraction] = {}
    for path, module in modules.items():
        count = _num_experts(path, module)
        chosen = _num_chosen(path, modules) if count else None
        if chosen is not None:
            share = Fraction(min(chosen, count), count)
            shares.update((id(parameter), share) for parameter in module.parameters())
    return shares


def _num_experts(path: str, module: nn.Module) -> int:
    """Return how many routed experts a module holds; 0: it holds none.

    They are a list, or packed in parameters [experts, outputs, inputs].
    """
    name = path.rpartition(".")[2]
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return len(module) if name == "experts" else 0
    if name != "experts" and "Expert" not in type(module).__name__:
        return 0
    packed = [p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3]
    return packed[0] if packed else 0


def _num_chosen(path: str, modules: Mapping[str, nn.Module]) -> int | None:
    """Return how many experts the nearest router chooses, or else the configuration says."""
    place = path
    while place:
        place = place.rpartition(".")[0]
        for module in (modules[place], *modules[place].children()):
            if (chosen := _integer(module, _CHOSEN)) is not None:
                return chosen
    return _integer(_text_config(modules[""]), _CHOSEN)


def _attention_layers(model: nn.Module) -> Iterator[AttentionFlops]:
    """Yield the attention layers whose cost grows with the sequence."""
    for module in model.modules():
        if not _computes_scores(module) or any(
            _computes_scores(inner) for inner in module.modules() if inner is not module
        ):
            continue
        config = _text_config(module) or _text_config(model)
        heads = _integer(module, _HEADS) or _integer(config, _HEADS)
        if not heads:
            continue
        hidden = _integer(config, ("hidden_size",)) or _integer(module, ("embed_dim",)) or 0
        size = _integer(module, ("head_dim",)) or _integer(config, ("head_dim",)) or hidden // heads
        queries = _integer(module, ("qk_head_dim",)) or size
        values = _integer(module, ("v_head_dim",)) or size
        yield AttentionFlops(heads * (queries + values), window=_window(module, config))


def _computes_scores(module: nn.Module) -> bool:
    """Say whether a module is attention with projections of its own, and not linear attention."""
    name = type(module).__name__
    if not any(part in name for part in _ATTENTION) or any(
        part in name for part in _WITHOUT_SCORES
    ):
        return False
    weights = [getattr(child, "weight", None) for child in module.children()]
    weights += [getattr(module, "in_proj_weight", None)]
    return sum(isinstance(weight, Tensor) and weight.ndim == 2 for weight in weights) > 1


def _window(module: nn.Module, config: Any) -> int | None:
    """Return how many positions a token of an attention layer sees at most; None: all."""
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
    """Return the configuration that a module of transformers keeps; None: it keeps none."""
    config = getattr(module, "config", None)
    text = getattr(config, "get_text_config", None)
    return config if text is None else text()


def _integer(holder: Any, names: tuple[str, ...]) -> int | None:
    """Return the first attribute that is a positive integer."""
    values = (getattr(holder, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), None)
