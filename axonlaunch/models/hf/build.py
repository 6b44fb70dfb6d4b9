"""Builds transformers models with recorded initialization: no storage for parameters.

Buffers have values. The forward maps tokens to logits, with a router's auxiliary loss if there is
one. The model's code is used unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from axonlaunch.config.options.model import TransformersModel
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.models.hf.architecture import ROUTER_LOSS_WEIGHTS, architecture
from axonlaunch.models.hf.reading import library
from axonlaunch.models.hf.recorded_weights import WeightRecorder
from axonlaunch.models.specs.model_spec import ModelOutputs
from axonlaunch.models.specs.router_loss import (
    RouterLossModel,
    choices_of_logits,
    current_router_loss,
)
from axonlaunch.models.tensors.initialization import Initializer

_ATTENTION = {"auto": None, "sdpa": "sdpa", "flex": "flex_attention", "eager": "eager"}


class CausalLM(RouterLossModel):
    """Base class that gives a transformers class a forward from tokens to logits.

    Attributes:
        _part_positions: Maps the number of tokens in a part of a sequence to their positions; None
            for full sequences.
        _whole_positions: Gathers the positions in documents from a part of the rows to full rows.
        _has_parts: Whether hidden states are parts of the sequence, but tokens and positions are
            not: the embedding returns a part, and attention and the head gather it.
    """

    _part_positions: Callable[[int], Tensor] | None = None
    _whole_positions: Callable[[Tensor], Tensor] | None = None
    _has_parts: bool = False

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor | ModelOutputs:
        """Return logits [samples, tokens, vocabulary] of tokens [samples, tokens].

        Args:
            positions: Position of each token in its document, [samples, tokens], if rows hold
                several documents.
        """
        length = input_ids.shape[1]
        with library.parts_of_rows(length) if self._has_parts else nullcontext():
            outputs = self._outputs(input_ids, positions)
        logits: Tensor = outputs.logits
        auxiliary = getattr(outputs, "aux_loss", None)
        if auxiliary is None:
            return logits
        loss = auxiliary * _coefficient(self)
        if (shared := current_router_loss()) is None or not self.shares_router_loss:
            return ModelOutputs(logits, loss)
        shared.add(loss)
        return logits

    def _outputs(self, input_ids: Tensor, positions: Tensor | None) -> Any:
        """Return transformers' outputs."""
        if positions is not None:
            gather_positions = self._whole_positions
            with library.documents_apart(
                positions if gather_positions is None else gather_positions(positions)
            ):
                return super().forward(input_ids=input_ids, position_ids=positions)
        length, device = input_ids.shape[1], input_ids.device
        if self._part_positions is not None:
            positions = self._part_positions(length).to(device)
            with library.positions_of_a_part():
                return super().forward(input_ids=input_ids, position_ids=positions[None])
        if self._has_parts:  # transformers would count the positions of the hidden states
            positions = torch.arange(length, device=device)
            return super().forward(input_ids=input_ids, position_ids=positions[None])
        return super().forward(input_ids=input_ids)


class RoutedCausalLM(CausalLM):
    """A model with an auxiliary loss of its routers, in which padding does not count.

    Attributes:
        takes_present: Whether the forward takes ``present``.
    """

    takes_present = True

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        present: Tensor | None = None,
    ) -> Tensor | ModelOutputs:
        """Return logits and the auxiliary loss.

        Args:
            input_ids: Tokens [samples, tokens].
            positions: Position of each token in its document, if rows hold several documents.
            present: Whether each token is not padding, [samples, tokens] bool; None: none is.
        """
        with library.router_loss_without_padding(present):
            return super().forward(input_ids, positions)

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of a pipeline stage, with the loss of its blocks attached."""
        loss = current_router_loss()
        if loss is None or not self.shares_router_loss:
            return hidden
        model: Any = self
        if not (logits := library.recorded_router_logits()):
            loss.share_nothing(num_experts=model.num_experts, device=hidden.device)
            return hidden
        share = loss.share(
            choices_of_logits(logits, top_k=model.num_experts_per_tok),
            num_experts=model.num_experts,
            mask=library.present_tokens(),
            device=hidden.device,
        )
        return loss.attach(hidden, share * _coefficient(model))


def split_hidden_states(model: Any) -> None:
    """Let a model with sharded layers compute on full rows with parts of hidden states.

    Args:
        model: A ``CausalLM``, or a pipeline stage of one; it is changed in place.
    """
    model._has_parts = True


def build_recorded(config: TransformersModel) -> tuple[nn.Module, dict[str, Initializer]]:
    """Build a model and return it with the initializers of its parameters.

    Raises:
        ConfigError: The architecture can't be determined, or the model's code can't build it.
    """
    typed = architecture(config)
    attention = _ATTENTION[config.attention]
    if attention is not None:
        library.choose_attention_kernel(typed, attention)
    recorder = WeightRecorder()
    try:
        # Build on the CPU, so that buffers get their values, which are not in checkpoints.
        with library.quiet(), torch.random.fork_rng(devices=[]), torch.device("cpu"), recorder:
            model: Any = library.transformers().AutoModelForCausalLM.from_config(
                typed, dtype=torch.float32, trust_remote_code=config.trust_remote_code
            )
            model.initialize_weights()
        initializers = recorder.initializers(model)
        if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
            raise ValueError(f"its code gives {empty[0]} no values")
    except ConfigError:
        raise
    except Exception as error:  # a constructor may raise any error
        raise ConfigError([_failure(config, error)]) from error
    if config.router_aux_loss:
        for name in ROUTER_LOSS_WEIGHTS:
            if hasattr(model, name):
                setattr(model, name, float(config.router_aux_loss))
    cls, base = type(model), CausalLM
    if getattr(typed, "output_router_logits", False) and library.mask_router_loss(cls.__module__):
        base = RoutedCausalLM
    namespace = {"__module__": cls.__module__}
    shares = base is RoutedCausalLM and library.shares_router_loss(cls.__module__)
    model.__class__ = type(cls.__name__, (base, cls), {**namespace, "shares_router_loss": shares})
    return model, initializers


def untraceable(config: TransformersModel) -> str:
    """Return why a model can't be run on tensors without values; empty if it can."""
    if config.attention == "flex":  # it calls torch's compiler, which would crash the process
        return "model.attention=flex can't be run without values; use sdpa to estimate"
    return ""


def _coefficient(model: Any) -> float:
    """Return the weight of a model's auxiliary loss.

    Raises:
        ConfigError: The model has no known attribute for it.
    """
    for owner in (model, model.config):
        for name in ROUTER_LOSS_WEIGHTS:
            if (value := getattr(owner, name, None)) is not None:
                return float(value)
    message = "its auxiliary loss has no known weight; use false"
    raise ConfigError([ConfigIssue("model.router_aux_loss", message, None)])


def _failure(config: TransformersModel, error: Exception) -> ConfigIssue:
    reason = " ".join(str(error).split()).split(". ")[0][:400] or type(error).__name__
    if config.attention != "auto" and "ttention" in reason:
        message = f"the model refuses it ({reason}); use auto"
        return ConfigIssue("model.attention", message, config.attention)
    key = "model.path" if config.path else "model.config"
    message = f"transformers can't build it: {type(error).__name__}: {reason}"
    return ConfigIssue(key, message, config.path or config.config)
