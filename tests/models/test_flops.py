"""The FLOPs of MFU, compared with the counts of torch's FLOP counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.configured import estimate_config, run_config
from support.hf_families import theirs
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from axonlaunch.models.build import construct
from axonlaunch.models.facts.flops import AttentionFlops, ModelFlops, looked_up_parameters

POSITIONS = 64


def counted_by_torch(model: nn.Module, *, backward: bool) -> int:
    """Return the FLOPs of all products per token, from torch's counter."""
    tokens = torch.arange(POSITIONS)[None] % 60
    with FlopCounterMode(display=False) as counter:
        outputs = model(tokens) if not hasattr(model, "config") else model(input_ids=tokens).logits
        if backward:
            outputs.sum().backward()
    return counter.get_total_flops() // POSITIONS


def flops_without_windows(model: nn.Module) -> ModelFlops:
    """Return the count for an implementation that computes all scores and masks some."""
    flops = ModelFlops.of(model)
    return replace(flops, attention=tuple(replace(a, window=None) for a in flops.attention))


@pytest.mark.parametrize(
    "kind",
    ["qwen3", "gemma2", "gpt2", "phi3", "bloom", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"],
)
def test_hf_flops_equal_torch_counter(kind: str) -> None:
    """Within 3 %: 6 FLOPs are also counted for each element of a norm and a bias."""
    model = theirs(kind).eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    counted = flops_without_windows(model).per_token(POSITIONS)
    assert counted == pytest.approx(3 * counted_by_torch(model, backward=False), rel=0.03)


def test_only_the_chosen_experts_of_a_mixture_count() -> None:
    few = ModelFlops.of(theirs("qwen3_moe", num_experts=16, num_experts_per_tok=1))
    more = ModelFlops.of(theirs("qwen3_moe", num_experts=16, num_experts_per_tok=4))
    expert = 3 * 64 * 32
    assert more.multiplied - few.multiplied == 2 * 3 * expert  # layers, experts


def test_experts_in_a_list_count_as_those_in_one_parameter_do() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top_k = 2
            self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
            self.shared_experts = nn.Linear(8, 8, bias=False)

    assert ModelFlops.of(nn.Sequential(Mixture())).multiplied == 3 * 64


def test_attention_with_a_window_sees_no_more_than_that() -> None:
    windows = [layer.window for layer in ModelFlops.of(theirs("gemma2")).attention]
    assert windows == [16, None]
    assert [layer.window for layer in ModelFlops.of(theirs("mistral")).attention] == [16, 16]
    assert AttentionFlops(128, window=16).per_token(8) == 6 * 128 * 8
    assert AttentionFlops(128, window=16).per_token(64) == 6 * 128 * 16


def test_layers_of_linear_attention_have_no_scores() -> None:
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert config.layer_types.count("full_attention") == 1
    assert ModelFlops.of(model).attention == (AttentionFlops(2 * 4 * 16),)


def test_flops_exclude_gradients_of_frozen_parameters() -> None:
    full, frozen = (theirs("qwen3").eval() for _ in range(2))
    for model in (full, frozen):
        model.set_attn_implementation("eager")
    for parameter in frozen.parameters():  # the table is trained, so all layers propagate gradients
        parameter.requires_grad_(parameter is frozen.model.embed_tokens.weight)
    flops = ModelFlops.of(frozen)
    assert flops.frozen == flops.multiplied
    left_out = counted_by_torch(full, backward=True) - counted_by_torch(frozen, backward=True)
    saved = ModelFlops.of(full).per_token(POSITIONS) - flops.per_token(POSITIONS)
    assert saved == pytest.approx(left_out, rel=0.02)  # norms


def test_frozen_tied_head_counts_as_frozen() -> None:
    model = theirs("gemma2")
    model.model.embed_tokens.weight.requires_grad_(False)
    assert ModelFlops.of(model).frozen == 256 * 64


def test_embeddings_need_no_flops_unless_a_head_shares_them() -> None:
    gpt, llama = run_config([]).model, run_config(["model=llama_debug"]).model
    with torch.device("meta"):
        tied, untied = construct(gpt, seed=0), construct(llama, seed=0)
    assert looked_up_parameters(untied) == llama.vocab_size * llama.hidden_size
    positions = gpt.max_position_embeddings * gpt.hidden_size
    assert looked_up_parameters(tied) == positions
    assert looked_up_parameters(nn.Linear(3, 3)) == 0


def test_flops_of_llama3_8b_are_those_that_torchtitan_counts() -> None:
    """6 (N - N_embedding) + 12 L H Q T, torchtitan/models/utils.py."""
    with torch.device("meta"):
        model = construct(estimate_config(["model=llama3_8b"]).model, seed=0)
    flops = ModelFlops.of(model).per_token(8192)
    assert flops == 6 * (8_030_261_248 - 525_336_576) + 12 * 32 * 32 * 128 * 8192
