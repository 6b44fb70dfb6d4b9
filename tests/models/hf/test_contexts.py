"""Context-parallel models of transformers: equal to a plain loop, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.configured import run_config
from support.hf_families import FAMILIES, SPECIAL, save, without_folder
from support.hf_loops import by_axonlaunch, by_transformers
from torch import Tensor, nn

from axonlaunch.config import ConfigError
from axonlaunch.models.hf.analysis.sequence_mixing import why_unshardable
from axonlaunch.preflight.inspection import inspect

_sdpa = torch.nn.functional.scaled_dot_product_attention
CONTEXT = ["strategy=ddp", "strategy.context.degree=2", "launch.nproc=2"]
_TENSOR = ["strategy=tensor", "strategy.tensor.degree=2", "launch.nproc=2"]
OFFERED = [kind for kind in FAMILIES if kind != "bloom"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OFFERED)
def test_hf_family_with_context_parallelism_equals_plain_loop(kind: str, tmp_path: Path) -> None:
    # Mistral and Gemma have a window of 16 in a sequence of 32.
    save(kind, tmp_path)
    expected = by_transformers(tmp_path)
    assert by_axonlaunch(tmp_path, CONTEXT) == pytest.approx(expected, rel=2e-5)
    assert max(expected) - min(expected) > 1e-2  # the weights have moved


@pytest.mark.slow
def test_a_window_shorter_than_a_part_holds_on_four_ranks(tmp_path: Path) -> None:
    save("mistral", tmp_path, sliding_window=5)
    layout = ["strategy=ddp", "strategy.context.degree=4", "launch.nproc=4"]
    losses = by_axonlaunch(tmp_path, layout)
    assert losses == pytest.approx(by_transformers(tmp_path), rel=2e-5)
    save("mistral", tmp_path, sliding_window=None)
    assert losses != pytest.approx(by_transformers(tmp_path), rel=2e-5)


@pytest.mark.slow
def test_granite_attention_scale_holds_with_context_parallelism(tmp_path: Path) -> None:
    save("llama", tmp_path)
    changes = {"model_type": "granite", "attention_multiplier": 0.5, "rope_parameters": None}
    save("llama", tmp_path, **changes)
    losses = by_axonlaunch(tmp_path, CONTEXT)
    assert losses == pytest.approx(by_transformers(tmp_path), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["strategy=pipeline", "strategy.pipeline.degree=2"],
        ["strategy=fsdp", "train.activation_checkpointing=full"],
    ],
    ids=["pipeline", "fsdp"],
)
def test_context_parallelism_combines_with_other_axes(layout: list[str], tmp_path: Path) -> None:
    save("gemma3_text", tmp_path)
    losses = by_axonlaunch(tmp_path, [*layout, "strategy.context.degree=2", "launch.nproc=4"])
    assert losses == pytest.approx(by_transformers(tmp_path), rel=2e-5)


PACKED = {
    "llama": CONTEXT,
    "mistral": ["strategy=ddp", "strategy.context.degree=4", "launch.nproc=4"],
    "deepseek_v3": CONTEXT,
    "qwen3_moe": ["strategy=tensor", "strategy.tensor.degree=2", *CONTEXT[1:2], "launch.nproc=4"],
    "gemma3_text": [
        *("strategy=pipeline", "strategy.pipeline.degree=2", *CONTEXT[1:2], "launch.nproc=4"),
        "train.activation_checkpointing=full",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKED)
def test_context_parallel_packing_equals_plain_loop(kind: str, tmp_path: Path) -> None:
    # Documents of 20 tokens begin in one shard and end in another, and are longer than a window.
    save(kind, tmp_path)
    packed = "data.document_length=20"
    expected = by_transformers(tmp_path, packed)
    assert by_axonlaunch(tmp_path, PACKED[kind], packed) == pytest.approx(expected, rel=2e-5)
    assert expected != pytest.approx(by_transformers(tmp_path), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECIAL)
def test_context_parallelism_supports_head_sizes_and_sinks(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    assert by_axonlaunch(tmp_path, CONTEXT) == pytest.approx(by_transformers(tmp_path), rel=2e-5)


REFUSED = {
    "bloom": r"counts positions from 0|on a part of a sequence fails",  # depends on the version
    "mamba2": r"backbone\.layers\.0 mixes tokens by convolution",
    "falcon": "attention functions",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_context_parallel_model_is_refused_before_start(kind: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_config(without_folder(kind, *CONTEXT))
    (issue,) = raised.value.problems
    assert issue.key == "strategy.context.degree"
    assert "its sequences can't be split" in issue.message
    assert re.search(REFUSED[kind], issue.message)


@pytest.mark.parametrize(
    "layout",
    [CONTEXT, [*_TENSOR, "strategy.tensor.sequence_parallel=true"]],
    ids=["context", "sequence"],
)
def test_mask_that_needs_tokens_of_other_ranks_is_refused_before_start(layout: list[str]) -> None:
    # Its tokens of an image attend to each other, and a table says which belong together.
    text = {"model_type": "gemma4_unified_text", "hidden_size": 64, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="mask looks up values of tokens that are on other ranks"):
        run_config(without_folder("gemma4_unified", *layout, text_config=text))
    run_config(without_folder("gemma4_unified_text", *layout, **text))


def test_one_unsupported_block_refuses_context_parallelism() -> None:
    types = ["full_attention", "conv"]
    with pytest.raises(ConfigError, match=r"layers\.1 mixes tokens by convolution"):
        run_config(without_folder("lfm2", *CONTEXT, layer_types=types))


def test_rotary_angles_that_follow_the_longest_position_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="its sequences can't be split"):
        run_config(without_folder("llama", *CONTEXT, rope_parameters=rope))


def test_inspect_says_why_sequences_can_t_be_divided() -> None:
    inspected = inspect(run_config(without_folder("bloom")))
    (answer,) = (layout for layout in inspected.layouts if "context" in layout.layout)
    assert not answer.legal
    assert re.search(REFUSED["bloom"], answer.reason)


class _Attends(nn.Module):
    """A block that uses transformers' registry of attention, and an additional operation."""

    def __init__(self, config: object, beside: object) -> None:
        super().__init__()
        self.config, self.beside = config, beside
        self.linear = nn.Linear(8, 8, device="meta")

    def forward(self, hidden: Tensor) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        heads = self.linear(hidden).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed, _ = attend(self, heads, heads, heads, None)
        return self.beside(hidden + mixed.flatten(2))


class _Model(nn.Module):
    def __init__(self, beside: object) -> None:
        import transformers

        super().__init__()
        self.config = transformers.LlamaConfig(attn_implementation="sdpa")
        self.table = nn.Embedding(64, 8, device="meta")
        self.layers = nn.ModuleList([_Attends(self.config, beside)])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) + self.table(self._part_positions(tokens.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize(
    ("beside", "operation"),
    [
        (lambda x: x.cumsum(1), "cumsum"),
        (lambda x: x + x.mean(1, keepdim=True), "mean"),
        (lambda x: x + torch.nn.functional.pad(x, (0, 0, 1, -1)), "constant_pad_nd"),
        (lambda x: x @ x.mT @ x, "bmm"),
        (lambda x: x.softmax(1), "_softmax"),
        (lambda x: x + x.roll(1, 1), "roll"),
        (lambda x: torch.stack([x[:, n] for n in range(x.shape[1])], 1), "select"),
        (lambda x: _sdpa(*[x[:, None]] * 3)[:, 0], "scaled_dot_product"),
        (lambda x: x * torch.arange(x.shape[1])[:, None], "counts positions"),
    ],
    ids=["sum", "mean", "shift", "product", "softmax", "roll", "loop", "attention", "count"],
)
def test_token_mixing_modules_are_named(beside: object, operation: str) -> None:
    assert operation in why_unshardable(_Model(beside), layers="layers")


def test_per_token_modules_are_not_token_mixing() -> None:
    assert (
        why_unshardable(_Model(lambda x: x.softmax(-1) + x.mean(-1, True)), layers="layers") == ""
    )
