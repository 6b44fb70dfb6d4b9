"""Mixture of experts: Llama's blocks with a router and experts in place of the feed-forward.

Plain single-device code. Modules and parameters are named and shaped as in Hugging Face's
``DeepseekV3ForCausalLM``, without the leading ``model.``; attention is Llama's.
"""

from __future__ import annotations

import dataclasses
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonlaunch.config.options.model import MoEConfig
from axonlaunch.models.architectures.llama import (
    SPEC as LLAMA_SPEC,
    GatedFeedForward,
    Llama,
    LlamaBlock,
)
from axonlaunch.models.specs.model_spec import ModelOutputs, ModelSpec
from axonlaunch.models.specs.router_loss import (
    RouterChoices,
    current_router_loss,
    router_loss_of_batch,
)

_CHOICES: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("choices", default=None)
"""Scores and experts of the routers that a running forward has called; None without their loss."""


class Router(nn.Module):
    """Chooses each token's experts by their scores; computes in fp32.

    Attributes:
        e_score_correction_bias: Added to scores to choose experts, but not to weight them, [E]
            fp32. ``model.balance`` moves it (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2).
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.is_sigmoid = config.scoring_func == "sigmoid"
        self.normalizes = config.norm_topk_prob
        self.scale = config.routed_scaling_factor
        self.has_loss = bool(config.router_aux_loss)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.empty(config.num_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Set the bias to zero, for example after ``to_empty``."""
        self.e_score_correction_bias.zero_()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the experts of tokens [T, hidden].

        Returns:
            Logits [T, E], weights [T, K] and numbers [T, K] of the chosen experts.
        """
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logits = F.linear(hidden.to(precise), self.weight.to(precise))
        scores = logits.sigmoid() if self.is_sigmoid else logits.softmax(-1)
        experts = (scores.detach() + self.e_score_correction_bias).topk(self.top_k).indices
        if self.has_loss and (choices := _CHOICES.get()) is not None:
            choices.append((scores, experts))
        weights = scores.gather(-1, experts)
        if self.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.scale, experts


class Experts(nn.Module):
    """Routed experts, each a SwiGLU.

    Attributes:
        num_experts: Number of experts whose weights this module has.
        gate_up_proj: Gate and up projections, [E, 2 x width, hidden].
        down_proj: Down projections, [E, hidden, width].
        is_plain: Whether experts are computed one after another, without a grouped product.
    """

    is_plain = False

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        size, width = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, size, width))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return each token's weighted sum of the results of its experts, [T, hidden].

        Args:
            hidden_states: Tokens [T, hidden].
            top_k_index: Experts of each token, [T, K].
            top_k_weights: Weight of each of these experts, [T, K].
        """
        if self.is_plain:
            return self._one_after_another(hidden_states, top_k_index, top_k_weights)
        experts = top_k_index.flatten()
        ones = torch.ones_like(experts)
        counts = experts.new_zeros(self.num_experts).scatter_add_(0, experts, ones)
        order = experts.argsort(stable=True)
        rows = hidden_states[order // top_k_index.shape[-1]]
        gate, up = _products(rows, self.gate_up_proj, counts).chunk(2, dim=-1)
        results = _products(F.silu(gate) * up, self.down_proj, counts)
        # Unlike index_copy, this does not keep the results in their first order for backward.
        by_token = results.new_empty(results.shape).index_put((order,), results)
        weighted = by_token.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    def _one_after_another(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(hidden[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            results = F.linear(F.silu(gate) * up, self.down_proj[expert])
            weighted = results * weights[tokens, places].unsqueeze(-1)
            total = total.index_add(0, tokens, weighted.to(total.dtype))
        return total


def _products(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows [N, inputs], sorted by expert, with their matrices [E, outputs, inputs]."""
    if rows.is_meta:  # without values, torch's grouped product takes only bf16
        return F.linear(rows, matrices[0])
    if rows.dtype != torch.float64 and not (rows.shape[-1] % 8 or matrices.shape[-2] % 8):
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)
    # torch's grouped product takes no float64 and no rows that are not aligned to 16 bytes.
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, matrices, strict=True)])


class MoELayer(nn.Module):
    """Feed-forward of routed experts and optionally shared ones, which compute every token."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = None
        if shared := config.n_shared_experts:
            width = shared * config.moe_intermediate_size
            self.shared_experts = GatedFeedForward(config.hidden_size, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        rows = x.flatten(0, -2)
        _, weights, experts = self.gate(rows)
        output: Tensor = self.experts(rows, experts, weights).view_as(x)
        return output if self.shared_experts is None else output + self.shared_experts(x)


class MixtureOfExperts(Llama):
    """Language model with experts in all blocks except the first ``first_k_dense_replace``.

    Attributes:
        takes_present: Whether the forward takes ``present``, see ``data.datasets.dataset``.
    """

    config: MoEConfig

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self.takes_present = bool(config.router_aux_loss)

    def forward(  # type: ignore[override]
        self, x: Tensor, positions: Tensor | None = None, present: Tensor | None = None
    ) -> Tensor | ModelOutputs:
        """Map tokens to logits, see ``Llama.forward``; outside of an engine also to a loss.

        Args:
            present: Whether each token is not padding, [B, T] bool; None: none is.
        """
        if not self.config.router_aux_loss:
            return super().forward(x, positions)
        choices: list[tuple[Tensor, Tensor]] = []
        token = _CHOICES.set(choices)
        try:
            outputs = super().forward(x, positions)
        finally:
            _CHOICES.reset(token)
        return self._with_router_loss(outputs, choices, present)

    def _with_router_loss(
        self, outputs: Tensor, choices: list[tuple[Tensor, Tensor]], present: Tensor | None
    ) -> Tensor | ModelOutputs:
        weight, num_experts = float(self.config.router_aux_loss), self.config.num_experts
        # The probabilities of DeepSeek-V3 (2024, equation 19), and of softmax.
        layers = (
            RouterChoices(scores / scores.sum(-1, keepdim=True), experts)
            for scores, experts in choices
        )
        if (loss := current_router_loss()) is None:
            total = router_loss_of_batch([*layers], num_experts=num_experts, mask=present)
            return ModelOutputs(outputs, total * weight)
        if not choices:  # a pipeline stage of dense blocks
            loss.share_nothing(num_experts=num_experts, device=outputs.device)
            return outputs
        share = weight * loss.share(
            layers, num_experts=num_experts, mask=present, device=outputs.device
        )
        if self.lm_head is None:
            return loss.attach(outputs, share)
        loss.add(share)
        return outputs

    def build_block(self, number: int) -> LlamaBlock:
        """Return the block with a number from 0."""
        config = self.config
        is_dense = number < config.first_k_dense_replace
        return LlamaBlock(
            config,
            feed_forward=None if is_dense else MoELayer(config),
            head_dim=config.head_dim,
            qk_norm=config.qk_norm,
        )


def _use_plain_experts(model: nn.Module) -> None:
    """Let a model compute its experts one after another."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.is_plain = True


def expert_names(model: nn.Module) -> tuple[str, ...]:
    """Return the full names of the modules of experts of a model or stage, in order."""
    return tuple(name for name, module in model.named_modules() if isinstance(module, Experts))


def _tensor_plan(model: nn.Module) -> dict[str, str]:
    """Return Llama's plan, with the matrices of experts divided like those of a feed-forward."""
    plan = {name: style for name, style in LLAMA_SPEC.plan(model).items() if ".mlp" not in name}
    for name, module in model.named_modules():
        if isinstance(module, GatedFeedForward):  # dense or shared
            plan |= {
                name: "region",
                f"{name}.gate_proj": "column",
                f"{name}.up_proj": "column",
                f"{name}.down_proj": "row",
            }
        elif isinstance(module, Experts):
            plan |= {
                name: "experts",
                f"{name}.gate_up_proj": "packed_column",
                f"{name}.down_proj": "row",
            }
    return plan


def _adapt(spec: ModelSpec, config: MoEConfig) -> ModelSpec:
    """Return the spec of a model with or without a loss of its routers."""
    return dataclasses.replace(spec, mixes_samples="batch" if config.router_aux_loss else "none")


SPEC = dataclasses.replace(
    LLAMA_SPEC,
    build=MixtureOfExperts,
    adapt=_adapt,
    tensor_plan=_tensor_plan,
    sequence_parallel=False,
    experts=expert_names,
    use_plain_experts=_use_plain_experts,
)
