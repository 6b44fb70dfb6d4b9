"""The included mixture of experts, compared with plain torch and with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from axonlaunch.config.options.model import MoEConfig
from axonlaunch.models.architectures.moe import MoELayer, Router
from axonlaunch.models.build import build_model, spec_for
from axonlaunch.models.facts.flops import ModelFlops

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def layer(**changes: Any) -> tuple[MoELayer, dict[str, Tensor]]:
    """Return a layer with a bias that changes choices, and its weights in fp64."""
    module: Any = build_model(MoEConfig(**{**SIZES, **changes}), seed=1).layers[1].mlp  # type: ignore[index, union-attr]
    with torch.no_grad():
        module.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 6))
    weights = {name: value.detach().double() for name, value in module.state_dict().items()}
    return module, {name: value.requires_grad_() for name, value in weights.items()}


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def plain_layer(x: Tensor, w: dict[str, Tensor], config: MoEConfig) -> Tensor:
    """Compute the layer token by token."""
    results = []
    for token in x.flatten(0, 1):
        logits = w["gate.weight"] @ token
        scores = logits.sigmoid() if config.scoring_func == "sigmoid" else logits.softmax(0)
        biased = scores + w["gate.e_score_correction_bias"]
        chosen = biased.argsort(descending=True)[: config.num_experts_per_tok].tolist()
        total = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1.0
        result = torch.zeros_like(token)
        for expert in chosen:
            gate, up = (w["experts.gate_up_proj"][expert] @ token).chunk(2)
            value = w["experts.down_proj"][expert] @ (silu(gate) * up)
            result = result + scores[expert] / total * config.routed_scaling_factor * value
        if config.n_shared_experts:
            gate, up = (w[f"shared_experts.{name}_proj.weight"] @ token for name in ("gate", "up"))
            result = result + w["shared_experts.down_proj.weight"] @ (silu(gate) * up)
        results.append(result)
    return torch.stack(results).view_as(x)


def test_experts_keep_their_inputs_and_results_once() -> None:
    """For backward, in rows of the hidden size: one for each token and chosen expert."""
    module, _ = layer(n_shared_experts=0)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(torch.randn(2, 9, 32, requires_grad=True)).sum()
    assert [*kept.values()].count(2 * 9 * 2 * 32) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scoring_func": "softmax", "n_shared_experts": 0, "routed_scaling_factor": 2.5},
        {"norm_topk_prob": False, "n_shared_experts": 2},
        {"moe_intermediate_size": 24, "num_experts_per_tok": 6},
    ],
)
def test_experts_give_the_results_and_gradients_of_a_plain_fp64_loop(
    changes: dict[str, Any],
) -> None:
    module, weights = layer(**changes)
    config = MoEConfig(**{**SIZES, **changes})
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    direction = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    result, expected = module(x), plain_layer(x.double(), weights, config)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    (result * direction).sum().backward()
    (expected * direction).sum().backward()
    for name, parameter in module.named_parameters():
        gradient, wanted = parameter.grad.double(), weights[name].grad  # type: ignore[union-attr]
        assert wanted is not None
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_experts_in_fp64_equal_the_plain_loop_to_rounding() -> None:
    module, weights = layer()
    x = torch.randn(1, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = plain_layer(x, weights, MoEConfig(**SIZES))
    torch.testing.assert_close(module.double()(x), expected, rtol=1e-12, atol=1e-12)


def test_layer_equals_deepseek_v3_of_transformers() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    module, _ = layer(n_shared_experts=2, routed_scaling_factor=2.5)
    described = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.5,
    )
    other = DeepseekV3MoE(described)
    other.load_state_dict(module.state_dict())
    x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(x), other(x), rtol=1e-5, atol=1e-6)


def qwen3_moe() -> tuple[torch.nn.Module, Any]:
    """Return the included model and transformers' Qwen3-MoE with the same weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = MoEConfig(
        **SIZES, n_shared_experts=0, scoring_func="softmax", head_dim=16, qk_norm=True
    )
    model = build_model(config, seed=3)
    with torch.no_grad():  # norms start at one, which would hide a forgotten weight
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    keys = ("initializer_range", "num_experts")
    sizes = {key: value for key, value in SIZES.items() if key not in keys}
    other = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes,
            num_experts=6,
            head_dim=16,
            norm_topk_prob=True,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    )
    state = {
        (name if name.startswith("lm_head") else f"model.{name}"): value
        for name, value in model.state_dict().items()
        if "correction_bias" not in name
    }
    other.load_state_dict(state)
    return model, other


def test_model_equals_qwen3_moe_of_transformers_in_logits_and_gradients() -> None:
    model, other = qwen3_moe()
    tokens = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1).flatten()
    logits, expected = model(tokens), other(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for output in (logits, expected):
        cross_entropy(output.flatten(0, 1), targets).backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
        assert difference < 1e-5, (name, difference)


def test_flops_count_only_the_experts_that_compute_a_token() -> None:
    config = MoEConfig(**{**SIZES, "num_hidden_layers": 1})
    model: Any = build_model(config)
    experts = sum(p.numel() for p in model.layers[0].mlp.experts.parameters())
    embedding = model.embed_tokens.weight.numel()
    multiplied = sum(p.numel() for p in model.parameters()) - embedding - experts + experts // 3
    assert ModelFlops.of(model).multiplied == multiplied


def test_blocks_before_the_first_with_experts_are_dense() -> None:
    model = build_model(MoEConfig(**{**SIZES, "first_k_dense_replace": 1}))
    assert spec_for(MoEConfig()).experts(model) == ("layers.1.mlp.experts",)


def test_correction_bias_is_saved_and_starts_at_zero() -> None:
    router = Router(MoEConfig(**SIZES))
    assert torch.equal(router.state_dict()["e_score_correction_bias"], torch.zeros(6))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"moe_intermediate_size": 20},
            ("moe_intermediate_size", "products of experts need a multiple of 8; use 24"),
        ),
        (
            {"num_experts_per_tok": 9},
            ("num_experts_per_tok", "there are only num_experts=6; use at most as many"),
        ),
        ({"head_dim": 5}, ("head_dim", "rotary positions need an even number")),
    ],
)
def test_sizes_that_experts_cannot_have_are_refused(
    changes: dict[str, Any], problem: tuple[str, str]
) -> None:
    assert MoEConfig(**{**SIZES, **changes}).problems() == [problem]
